//! What an operator sees and does, with `rialto admin` and the API behind it.

use std::{
    fmt::Write as _,
    fs,
    io::BufRead as _,
    net::TcpListener,
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::{
    cluster::cluster,
    process::{Dev, lines, rialto, scripted, shown},
    wire::{get, http, send, until},
};

/// The id of a task that nobody has made.
const NOBODY: &str = "01932f5c-3b1e-7d2a-9c4f-5e8a7b6d0c00";

/// A `rialto dev` with the scripted agent, and its admin port.
struct Town {
    dev: Dev,
    admin: String,
}

impl Town {
    fn new(folder: &Path, agent: &str, arguments: &[&str]) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let config = scripted(folder, agent);
        let all =
            [&["dev", "--listen", "127.0.0.1:0", "--admin-listen", &address, "--config", &config], arguments].concat();
        let mut command = rialto(&all);
        command.env("PATH", crate::process::scripted_agent_path());
        Self { dev: Dev::spawn(command), admin: format!("http://{address}") }
    }

    fn admin(&self, arguments: &[&str]) -> Output {
        admin(&self.admin, arguments)
    }

    /// The one JSON value that a command prints.
    fn json(&self, arguments: &[&str]) -> Value {
        json(&self.admin, arguments)
    }

    /// Sends a message whose task ends, or stops, at once.
    fn call(&self, text: &str) -> Value {
        lines(&self.dev.client(&["call", text])).remove(0)["task"].clone()
    }

    /// Sends messages that are not waited for.
    fn begin(&self, texts: &[&str]) -> Vec<std::process::Child> {
        texts.iter().map(|text| self.dev.client_started(&["stream", text]).0).collect()
    }

    fn until(&self, what: &str, arguments: &[&str], check: impl Fn(&Value) -> bool) -> Value {
        for _ in 0..600 {
            let found = self.json(arguments);
            if check(&found) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("never: {what}: {}", self.json(arguments));
    }
}

fn admin(url: &str, arguments: &[&str]) -> Output {
    rialto(&[&["admin"], arguments].concat()).env("RIALTO_ADMIN_URL", url).output().unwrap()
}

fn json(url: &str, arguments: &[&str]) -> Value {
    let output = admin(url, arguments);
    let mut found = lines(&output);
    assert_eq!((output.status.code(), found.len()), (Some(0), 1), "{}", shown(&output, &[]));
    found.remove(0)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// What a person is shown, without what differs between runs: spaces, times, and these texts.
fn settled(output: &Output, replace: &[(&str, &str)]) -> String {
    let mut settled = String::new();
    // What is due when is not what these tests are about.
    for line in shown(output, replace).lines().filter(|line| !line.starts_with("next clean-up")) {
        let words = line.split_whitespace().map(|word| {
            let (open, word) = word.strip_prefix('(').map_or(("", word), |rest| ("(", rest));
            let of = |units: &str| word.bytes().all(|byte| byte.is_ascii_digit() || units.as_bytes().contains(&byte));
            match word.as_bytes() {
                [b'0'..=b'9', .., b's'] if of("hms") => format!("{open}AGE"),
                [b'2', b'0', .., b'Z'] => format!("{open}TIME"),
                _ => format!("{open}{word}"),
            }
        });
        writeln!(settled, "{}", words.collect::<Vec<_>>().join(" ")).unwrap();
    }
    settled
}

#[test]
fn a_poison_message_is_listed_shown_replayed_and_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let town = Town::new(folder.path(), "", &["--data", data.to_str().unwrap()]);
    for (command, empty) in [
        (&["dead", "list"][..], "no dead entries\n"),
        (&["tasks", "stuck", "--older", "0"], "no stuck tasks\n"),
        (&["dead", "drop", "--all"], "no dead entries\n"),
        (&["dead", "list", "--agent", "nosuch"], "no dead entries of agent nosuch\n"),
        (&["tasks", "stuck", "--agent", "nosuch"], "no stuck tasks of agent nosuch\n"),
        (&["dead", "drop", "--all", "--agent", "nosuch"], "no dead entries of agent nosuch\n"),
    ] {
        let output = town.admin(&[command, &["--text"]].concat());
        assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stdout)), (Some(0), empty.into()));
    }

    let poison = town.call("panic");
    assert_eq!(poison["status"]["state"], "TASK_STATE_FAILED");
    let task = text(&poison["id"]);
    let listed = town.json(&["dead", "list"]);
    let entry = &listed["entries"][0];
    let (id, turn) = (text(&entry["id"]), text(&entry["run"]["turnId"]));
    assert_eq!((entry["run"]["taskId"].as_str(), listed["entries"].as_array().unwrap().len()), (Some(task), 1));
    let (context, message) = (text(&poison["contextId"]), text(&poison["history"][0]["messageId"]));
    let facts = town.json(&["tasks", "show", task]);
    let runner = text(&facts["turn"]["consumer"]);
    // How large things are and how often they were touched is the store's business.
    let sizes = [
        format!("{} of {} bytes", facts["bytes"], facts["maxBytes"]),
        format!("{} ({} bytes)", facts["messages"], facts["messagesBytes"]),
        format!("{} to {}\n", facts["firstEvent"], facts["lastEvent"]),
        format!("{} (fence {})", facts["turn"]["attempts"], facts["turn"]["fence"]),
    ];
    let bytes = format!("bytes       {}", entry["bytes"]);
    assert_eq!((&facts["messages"], &facts["turn"]["attempts"]), (&1.into(), &4.into()), "{facts}");
    let replace = [
        (&sizes[0][..], "SIZE"),
        (&sizes[1], "SIZE"),
        (&sizes[2], "NUMBERS\n"),
        (&sizes[3], "COUNTS"),
        (id, "ENTRY"),
        (task, "TASK"),
        (turn, "TURN"),
        (context, "CONTEXT"),
        (message, "MESSAGE"),
        (runner, "RUNNER"),
        (text(&entry["entry"]), "RUN"),
        (&bytes, "bytes SIZE"),
    ];
    insta::assert_snapshot!(settled(&town.admin(&["dead", "list", "--text"]), &replace), @r#"
        exit 0
        ID AGE AGENT ATTEMPTS TASK REASON
        ENTRY AGE scripted 4 TASK the agent crashed 4 times; the last time, its process ended: exit status: 101
        ---
        "#);
    insta::assert_snapshot!(settled(&town.admin(&["dead", "show", id, "--text"]), &replace), @r#"
        exit 0
        dead entry ENTRY
        agent scripted
        reason the agent crashed 4 times; the last time, its process ended: exit status: 101
        given up TIME (AGE ago)
        deliveries 4
        was entry RUN of runs:scripted
        bytes SIZE
        attempts 4
        task TASK
        task state failed
        turn TURN
        message MESSAGE
        queued TIME
        replay sends the message again, as a new task of the same context
        ---
        "#);
    insta::assert_snapshot!(settled(&town.admin(&["tasks", "show", task, "--text"]), &replace), @r#"
        exit 0
        task TASK
        state failed, since TIME
        reason crashed
        waits for nothing
        agent scripted
        context CONTEXT
        created TIME
        turn number 1, done, id TURN
        attempts COUNTS
        queued TIME
        run entry RUN (not on the stream any more)
        runner RUNNER (alive)
        events NUMBERS
        messages SIZE
        size SIZE
        ---
        "#);
    insta::assert_snapshot!(settled(&town.admin(&["queues", "--text"]), &replace), @r#"
        exit 0
        AGENT LENGTH LAG PENDING DELAYED OLDEST DEAD RUNNERS
        scripted 0 0 0 0 - 1 1
        ---
        "#);
    let content = town.admin(&["tasks", "show", task, "--text", "--content"]);
    assert!(String::from_utf8_lossy(&content.stdout).contains(r#""text": "panic""#), "{}", shown(&content, &[]));

    // It is what it was, so it fails as it did; as another task.
    let replayed = town.json(&["dead", "replay", id]);
    let again = text(&replayed["taskId"]);
    assert_ne!(again, task);
    let second = town.until("a second dead entry", &["dead", "list"], |listed| {
        listed["entries"].as_array().unwrap().iter().any(|entry| entry["run"]["taskId"] == again)
    });
    assert_eq!(second["entries"].as_array().unwrap().len(), 1, "the first one is gone");
    let repeated = town.json(&["dead", "replay", id]);
    assert_eq!((&repeated["taskId"], &repeated["repeated"]), (&replayed["taskId"], &Value::Bool(true)));

    let missing = town.admin(&["dead", "drop", "0-1-1", text(&second["entries"][0]["id"]), "--text"]);
    let replace = [(text(&second["entries"][0]["id"]), "ENTRY")];
    insta::assert_snapshot!(settled(&missing, &replace), @r#"
        exit 1
        ENTRY: dropped
        ---
        error: there is no dead entry 0-1-1; it may have been replayed or dropped
        "#);
    assert_eq!(town.json(&["dead", "list"]), serde_json::json!({"entries": [], "next": ""}));
}

#[test]
fn queues_while_busy_are_the_same_figures_live_and_as_metrics_and_ctrl_c_ends_them() {
    let folder = tempfile::tempdir().unwrap();
    let town = Town::new(folder.path(), "    max-concurrent: 1\n", &["--ephemeral"]);
    town.call("panic");
    let clients = town.begin(&["hang", "hang", "hang"]);
    let busy = |queue: &Value| (queue["length"] == 3) && (queue["lag"] == 2) && (queue["pending"] == 1);
    let found = town.until("two turns wait for one", &["queues"], |found| busy(&found["queues"][0]));
    let queue = &found["queues"][0];
    assert_eq!((&queue["dead"], &queue["runners"], &queue["delayed"]), (&1.into(), &1.into(), &0.into()), "{queue}");
    assert!(queue["oldestMs"].is_u64(), "{queue}");

    let runners = town.json(&["runners"]);
    let runner = &runners["runners"][0];
    assert_eq!((&runner["turns"], &runner["alive"]), (&1.into(), &true.into()), "{runners}");
    assert_eq!(runner["agents"], serde_json::json!(["scripted"]));
    let stuck = town.json(&["tasks", "stuck", "--older", "0", "--all"]);
    let mut waits: Vec<_> = stuck["tasks"].as_array().unwrap().iter().map(|task| text(&task["waitsFor"])).collect();
    waits.sort_unstable();
    assert_eq!(waits, ["agent", "queue", "queue"]);

    // Each look makes the next one fresher.
    let rows = ["length 3", "lag 2", "pending 1", "delayed 0", "dead 1", "runners 1"];
    let metrics = || text(&wait(get(&http(), format!("{}/metrics", town.admin))).1).to_owned();
    let want = rows.map(|row| row.split_once(' ').unwrap());
    let want = want.map(|(name, figure)| format!("rialto_queue_{name}{{agent=\"scripted\"}} {figure}"));
    let mut found = String::new();
    for _ in 0..600 {
        found = metrics();
        if want.iter().all(|row| found.contains(row.as_str())) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(want.iter().all(|row| found.contains(row.as_str())), "{want:?} in {found}");
    assert!(found.contains("rialto_queue_oldest_age_seconds{agent=\"scripted\"} "), "{found}");

    let mut live = rialto(&["admin", "queues", "--watch", "--every", "20ms"]);
    let mut live = live.env("RIALTO_ADMIN_URL", &town.admin).stdout(Stdio::piped()).spawn().unwrap();
    let mut printed = std::io::BufReader::new(live.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let line: Value = serde_json::from_str(&printed.next().unwrap().unwrap()).unwrap();
        assert!(busy(&line["queues"][0]), "{line}");
    }
    kill(nix::unistd::Pid::from_raw(live.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    assert_eq!(live.wait().unwrap().code(), Some(0));
    for mut client in clients {
        client.kill().unwrap();
        client.wait().unwrap();
    }
}

/// Waits for what has to be asked over the network.
fn wait<T>(asked: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(asked)
}

#[test]
fn a_grant_lets_a_task_go_on_once() {
    let folder = tempfile::tempdir().unwrap();
    let town = Town::new(folder.path(), "", &["--ephemeral"]);
    let (mut client, mut stdout) = town.dev.client_started(&["stream", "auth"]);
    let mut line = String::new();
    while !line.contains("TASK_STATE_AUTH_REQUIRED") {
        line.clear();
        assert!(stdout.read_line(&mut line).unwrap() > 0, "the stream ended");
    }
    let stuck = town.json(&["tasks", "stuck", "--older", "0"]);
    let task = &stuck["tasks"][0];
    assert_eq!(task["waitsFor"], "authorization", "{stuck}");
    let id = text(&task["taskId"]);
    let granted = town.admin(&["grant", id, "--metadata", r#"{"code": "4711"}"#, "--text"]);
    assert_eq!(shown(&granted, &[(id, "TASK")]), "exit 0\ntask TASK goes on\n---\n");
    while !line.contains("TASK_STATE_COMPLETED") {
        line.clear();
        assert!(stdout.read_line(&mut line).unwrap() > 0, "the stream ended");
    }
    client.wait().unwrap();
    let again = town.admin(&["grant", id]);
    assert_eq!(shown(&again, &[]), "exit 1\n---\nerror: The task does not wait for authorization.\n");
    let nobody = town.admin(&["grant", NOBODY]);
    assert_eq!(nobody.status.code(), Some(1), "{}", shown(&nobody, &[]));

    // What comes with it is an object, or nothing.
    let grant = async |id: &str, body: &'static str| {
        let url = format!("{}/admin/v1/tasks/{id}/grant", town.admin);
        let answer = http().post(url).body(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap()["field"].clone())
    };
    for (body, expected) in [
        ("[]", (400, "body".into())),
        ("[{}]", (400, "body".into())),
        ("null", (400, "body".into())),
        ("{", (400, "body".into())),
        (r#"{"metadata": []}"#, (400, "metadata".into())),
        (r#"{"metadata": "x"}"#, (400, "metadata".into())),
        (r#"{"metadata": {}, "meta": {}}"#, (400, "meta".into())),
        (r#"{"metadata": {}}"#, (409, Value::Null)),
        ("{}", (409, Value::Null)),
        ("", (409, Value::Null)),
    ] {
        assert_eq!(wait(grant(id, body)), expected, "{body}");
    }
    assert_eq!(wait(grant("nobody", "")), (400, "id".into()));
}

#[test]
fn without_the_token_there_is_nothing_to_see_and_the_public_port_knows_none_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", "0123456789abcdef0\n"), file("wrong", "0123456789abcdef1\n"));
    let town = Town::new(folder.path(), &format!("admin-token-file: {right}\n"), &["--ephemeral"]);
    let replace = [(&town.admin[..], "URL"), (folder.path().to_str().unwrap(), "FOLDER")];
    let asked = |arguments: &[&str]| shown(&town.admin(&[&["dead", "list"], arguments].concat()), &replace);
    insta::assert_snapshot!(asked(&[]), @r#"
        exit 2
        ---
        error: URL asks for a token; name the file that has it with --token-file
        "#);
    insta::assert_snapshot!(asked(&["--token-file", &wrong]), @r#"
        exit 2
        ---
        error: URL does not take this token
        "#);
    insta::assert_snapshot!(asked(&["--token-file", "/does/not/exist"]), @r#"
        exit 2
        ---
        error: cannot read /does/not/exist: No such file or directory (os error 2)
        "#);
    assert_eq!(asked(&["--token-file", &right, "--text"]), "exit 0\nno dead entries\n---\n");
    // The configuration knows both, address and token.
    let config = folder.path().join("scripted.yaml");
    let mut by_config = rialto(&["admin", "--config", config.to_str().unwrap(), "dead", "list", "--text"]);
    by_config.env("RIALTO__ADMIN_LISTEN", town.admin.strip_prefix("http://").unwrap());
    assert_eq!(shown(&by_config.output().unwrap(), &replace), "exit 0\nno dead entries\n---\n");

    let (status, problem) = wait(get(&http(), format!("{}/admin/v1/queues", town.admin)));
    assert_eq!((status, &problem["status"], &problem["title"]), (401, &401.into(), &"Unauthorized".into()));
    for path in ["/admin/v1/queues", "/admin/v1/dead", "/metrics"] {
        let url = format!("{}{path}", town.dev.url);
        let asked = async { http().get(url).bearer_auth("0123456789abcdef0").send().await.unwrap().status() };
        let status = wait(asked);
        assert_eq!(status, 404, "{path}");
    }
}

#[test]
fn what_is_wrong_is_said_in_one_line_and_by_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let town = Town::new(folder.path(), "", &["--ephemeral"]);
    town.call("panic");
    for (arguments, expected) in [
        (&["tasks", "show", NOBODY][..], format!("exit 1\n---\nerror: there is no task {NOBODY}\n")),
        (
            &["dead", "show", "0-1-1"],
            "exit 1\n---\nerror: there is no dead entry 0-1-1; it may have been replayed or dropped\n".to_owned(),
        ),
        (
            &["dead", "list", "--after", "zzz"],
            "exit 2\n---\nerror: --after: must be the `next` of an earlier page\n".to_owned(),
        ),
        (
            &["tasks", "stuck", "--after", "zzz"],
            "exit 2\n---\nerror: --after: must be the `next` of an earlier page\n".to_owned(),
        ),
    ] {
        assert_eq!(shown(&town.admin(arguments), &[]), expected);
    }
    // Names of nothing never get as far as a path: `dead/..` would be all entries.
    for (arguments, named) in [
        (&["tasks", "show", ""][..], "<ID>': must be the id of a task"),
        (&["tasks", "show", "nobody"], "<ID>': must be the id of a task"),
        (&["grant", "..", "--metadata", "{}"], "<TASK>': must be the id of a task"),
        (&["dead", "show", "../queues"], "<ID>': must be the id of a dead entry"),
        (&["dead", "replay", "."], "<ID>...': must be the id of a dead entry"),
        (&["dead", "drop", ".."], "[ID]...': must be the id of a dead entry"),
        (&["dead", "drop", ""], "[ID]...': must be the id of a dead entry"),
        (&["dead", "drop", "--all", "--agent", ""], "--agent <ID>"),
        (&["dead", "list", "--limit", "0"], "--limit <N>': 0 is not in 1..=500"),
        (&["dead", "list", "--limit", "501"], "--limit <N>': 501 is not in 1..=500"),
        (&["tasks", "stuck", "--limit", "0"], "--limit <N>': 0 is not in 1..=500"),
    ] {
        let text = shown(&town.admin(arguments), &[]);
        assert!(text.starts_with("exit 2\n---\nerror: ") && text.contains(named), "{arguments:?}: {text}");
    }
    assert_eq!(town.json(&["dead", "list"])["entries"].as_array().unwrap().len(), 1, "it is still there");
    let nobody = admin("http://127.0.0.1:1", &["queues"]);
    assert_eq!(
        shown(&nobody, &[]),
        "exit 2\n---\nerror: cannot reach http://127.0.0.1:1: Connection refused (os error 111)\n"
    );
    // The public port is no admin port.
    let public = admin(&town.dev.url, &["queues"]);
    assert_eq!(public.status.code(), Some(2), "{}", shown(&public, &[]));
    for usage in [
        &["dead", "drop"][..],
        &["dead", "replay"],
        &["queues", "--every", "0", "--watch"],
        &["queues", "--every", "5s"],
        &["grant", "x", "--metadata", "1"],
        &["tasks"],
    ] {
        assert_eq!(town.admin(usage).status.code(), Some(2), "{usage:?}");
    }
    for (path, field) in [
        ("dead?limit=501", "limit"),
        ("dead?limit=0", "limit"),
        ("tasks/stuck?limit=0", "limit"),
        ("dead?after=zzz", "after"),
        ("tasks/stuck?after=zzz", "after"),
        ("tasks/nobody", "id"),
        ("dead/zzz", "id"),
        ("dead?limit=-1", "limit"),
        ("dead?nonsense=1", "nonsense"),
    ] {
        let (found, problem) = wait(get(&http(), format!("{}/admin/v1/{path}", town.admin)));
        assert_eq!((found, problem["field"].as_str()), (400, Some(field)), "{path}: {problem}");
        assert!(problem["status"] == 400 && text(&problem["detail"]).contains(field), "{problem}");
    }
    assert_eq!(wait(get(&http(), format!("{}/admin/v1/dead?limit=500", town.admin))).0, 200);
    let nobodys = wait(async { http().delete(format!("{}/admin/v1/dead?agent=", town.admin)).send().await }).unwrap();
    assert_eq!(nobodys.status(), 400, "an empty name is not every agent");
}

#[test]
fn whatever_the_admin_api_refuses_is_a_problem_that_names_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let town = Town::new(folder.path(), "", &["--ephemeral"]);
    let (client, grant) = (http(), format!("tasks/{NOBODY}/grant?x=1"));
    for (method, path, status, field, detail) in [
        // No UTF-8.
        ("GET", "dead/%ff", 400, "id", "id: must be the id of a dead entry"),
        ("DELETE", "dead/%ff", 400, "id", "id: must be the id of a dead entry"),
        ("POST", "dead/%ff/replay", 400, "id", "id: must be the id of a dead entry"),
        ("GET", "tasks/%ff", 400, "id", "id: must be the id of a task"),
        ("POST", "tasks/%ff/grant", 400, "id", "id: must be the id of a task"),
        // Wrong values.
        ("GET", "dead?limit=x", 400, "limit", "limit: must be from 1 to 500"),
        ("GET", "dead?limit=1&limit=1", 400, "limit", "limit: must be given once"),
        ("DELETE", "dead?until=x", 400, "until", "until: must be a number of milliseconds"),
        ("GET", "tasks/stuck?older=1", 400, "older", "older: \"1\" is not a time such as \"30s\""),
        ("GET", "tasks/stuck?all=maybe", 400, "all", "all: must be true or false"),
        ("GET", &format!("tasks/{NOBODY}?content=1"), 400, "content", "content: must be true or false"),
        // Unknown keys, also where none are known.
        ("GET", "dead?x=1", 400, "x", "x: unknown field `x`, expected one of `agent`, `limit`, `after`"),
        ("GET", "queues?x=1", 400, "x", "x: unknown field `x`"),
        ("GET", "runners?x=1", 400, "x", "x: unknown field `x`"),
        ("GET", "dead/0-1-1?x=1", 400, "x", "x: unknown field `x`"),
        ("DELETE", "dead/0-1-1?x=1", 400, "x", "x: unknown field `x`"),
        ("POST", "dead/0-1-1/replay?x=1", 400, "x", "x: unknown field `x`"),
        ("POST", &grant, 400, "x", "x: unknown field `x`"),
        // No such thing, and no such way.
        ("GET", "nosuch", 404, "", "there is no such page"),
        ("GET", "dead/0-1-1/nosuch", 404, "", "there is no such page"),
        ("GET", "%ff", 404, "", "there is no such page"),
        ("POST", "queues", 405, "GET,HEAD", "this cannot be done by this method"),
        ("PUT", "dead/0-1-1", 405, "GET,HEAD,DELETE", "this cannot be done by this method"),
        ("GET", "dead/%ff/replay", 405, "POST", "this cannot be done by this method"),
    ] {
        let request = client.request(method.parse().unwrap(), format!("{}/admin/v1/{path}", town.admin));
        let (found, headers, problem) = wait(async {
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.headers().clone(), response.text().await.unwrap())
        });
        let header = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap());
        let (kind, allow) = (header("content-type"), header("allow"));
        assert_eq!((found, kind), (status, "application/problem+json"), "{method} {path}: {problem}");
        let problem: Value = serde_json::from_str(&problem).unwrap();
        let named = if status == 405 { allow } else { problem["field"].as_str().unwrap_or_default() };
        assert_eq!(named, field, "{method} {path}: {problem}");
        assert!(problem["status"] == status && text(&problem["detail"]).starts_with(detail), "{path}: {problem}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_process_of_a_cluster_answers_the_operator() {
    let (cluster, client) = (cluster().start().await.unwrap(), http());
    let ask = async |url: String, arguments: &'static [&'static str]| {
        tokio::task::spawn_blocking(move || json(&url, arguments)).await.unwrap()
    };
    let sent = send(&client, &format!("{}/s", cluster.gateways[0].url()), "panic").send().await.unwrap();
    let sent: Value = sent.json().await.unwrap();
    let task = &sent["task"];
    assert_eq!(task["status"]["state"], "TASK_STATE_FAILED", "{sent}");
    let all = u64::try_from(cluster.runners.len()).unwrap();
    let seen = async || {
        let queues = ask(cluster.gateways[0].admin_url(), &["queues"]).await;
        queues["queues"].as_array().unwrap().iter().all(|queue| queue["runners"] == all)
    };
    until("each runner has looked for work", seen).await;
    let processes = cluster.gateways.iter().chain(&cluster.task_stores).chain(&cluster.runners);
    for process in processes {
        let queues = ask(process.admin_url(), &["queues"]).await;
        let figures: Vec<_> = queues["queues"]
            .as_array()
            .unwrap()
            .iter()
            .map(|queue| {
                (text(&queue["agent"]), queue["length"].as_u64(), queue["dead"].as_u64(), queue["runners"].as_u64())
            })
            .collect();
        assert_eq!(figures, [("echo", Some(0), Some(0), Some(all)), ("scripted", Some(0), Some(1), Some(all))]);
        let listed = ask(process.admin_url(), &["dead", "list"]).await;
        assert_eq!(listed["entries"][0]["run"]["taskId"], task["id"], "{listed}");
    }
    let found = ask(cluster.gateways[0].admin_url(), &["runners"]).await;
    let runners = found["runners"].as_array().unwrap();
    assert_eq!(runners.len(), cluster.runners.len(), "{found}");
    for runner in runners {
        assert_eq!((&runner["agents"], &runner["alive"]), (&serde_json::json!(["echo", "scripted"]), &true.into()));
        assert!(runner["pid"].as_u64().is_some_and(|pid| pid > 0), "{runner}");
    }
    // One dies; its silence is noticed after its lease or its longest pause.
    cluster.runners[0].kill();
    let gone = async || {
        let found = ask(cluster.gateways[0].admin_url(), &["runners"]).await;
        found["runners"].as_array().unwrap().iter().filter(|runner| runner["alive"] == false).count() == 1
    };
    until("the dead runner is known as such", gone).await;
}
