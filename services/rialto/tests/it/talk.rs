use std::{io::Write as _, process::Stdio};

use crate::process::{Dev, lines, rialto, run, scripted, shown};

const BINDINGS: [&str; 3] = ["jsonrpc", "rest", "grpc"];

#[test]
fn every_binding_says_the_same() {
    let dev = Dev::ephemeral();
    for binding in BINDINGS {
        let server = ["--binding", binding];
        let call = |arguments: &[&str]| {
            let output = dev.client(&[arguments, &server].concat());
            assert_eq!(output.status.code(), Some(0), "{binding}: {}", shown(&output, &[]));
            lines(&output)
        };
        let task = call(&["call", "hello é", "--context", binding])[0]["task"].clone();
        assert_eq!(task["artifacts"][0]["parts"][0]["text"], "hello é", "{binding}");
        let id = task["id"].as_str().unwrap();
        assert_eq!(call(&["task", "get", id])[0], task, "{binding}");
        assert!(call(&["task", "get", id, "--history", "0"])[0].get("history").is_none(), "{binding}");
        let listed = call(&["task", "list", "--context", binding, "--status", "completed"]);
        assert_eq!((listed.len(), &listed[0]["id"]), (1, &task["id"]), "{binding}");
        assert!(call(&["task", "list", "--context", binding, "--status", "working"]).is_empty(), "{binding}");

        let events = call(&["stream", "hello"]);
        let kinds: Vec<_> =
            events.iter().map(|event| event.as_object().unwrap().keys().next().unwrap().as_str()).collect();
        assert_eq!(kinds, ["task", "statusUpdate", "artifactUpdate", "statusUpdate"], "{binding}");
        let number = |event: &serde_json::Value| {
            let event = event.as_object().unwrap().values().next().unwrap();
            event["metadata"]["urn:rialto:event-number:v1"].as_u64()
        };
        let numbers: Vec<_> = events.iter().map(number).collect();
        assert_eq!(numbers, [Some(1), Some(2), Some(3), Some(4)], "{binding}");

        // What follows after an event, on a task that has ended.
        let id = events[1]["statusUpdate"]["taskId"].as_str().unwrap();
        assert_eq!(call(&["task", "watch", id, "--after", "2"]), events[2..], "{binding}");
        assert_eq!(call(&["task", "watch", id]).len(), 1, "{binding}");
    }
}

#[test]
fn a_command_that_is_repeated_with_its_key_shows_the_same_task() {
    let dev = Dev::ephemeral();
    let mut seen = std::collections::BTreeSet::new();
    for named in BINDINGS {
        let key = format!("key/{named}");
        let mut shown = Vec::new();
        for binding in BINDINGS {
            for command in ["call", "stream"] {
                let output = dev.client(&[command, "hello", "--idempotency-key", &key, "--binding", binding]);
                assert_eq!(output.status.code(), Some(0), "{binding} {command}: {}", self::shown(&output, &[]));
                shown.push(lines(&output)[0]["task"]["id"].as_str().unwrap().to_owned());
            }
        }
        assert!(shown.iter().all(|id| *id == shown[0]), "{named}: {shown:?}");
        assert!(seen.insert(shown.remove(0)), "another key, another task");
        let other = dev.client(&["call", "goodbye", "--idempotency-key", &key, "--binding", named]);
        let text = self::shown(&other, &[]);
        assert!(text.starts_with("exit 4") && text.contains("IDEMPOTENCY_KEY_REUSED"), "{named}: {text}");
    }
    assert_eq!(lines(&dev.client(&["task", "list"])).len(), seen.len());
}

#[test]
fn text_is_for_people() {
    let dev = Dev::ephemeral();
    for command in ["call", "stream"] {
        let output = dev.client(&[command, "hello", "--text"]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "hello\n");
        let status = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(status.starts_with("task ") && status.contains(" completed (context "), "{status}");
    }
}

#[test]
fn the_exit_code_tells_how_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let dev = Dev::start(&["--ephemeral", "--config", &scripted(folder.path(), "")]);
    for binding in BINDINGS {
        for (message, expected) in [("echo x", 0), ("fail", 1), ("reject", 1), ("ask", 5), ("auth", 5)] {
            let output = dev.client(&["call", message, "--binding", binding]);
            assert_eq!(output.status.code(), Some(expected), "{binding} {message}: {}", shown(&output, &[]));
        }
        let output = dev.client(&["stream", "ask", "--binding", binding]);
        assert_eq!(output.status.code(), Some(5), "{binding}: {}", shown(&output, &[]));
        // The answer to the question, to the same task.
        let asked = lines(&output)[0]["task"]["id"].as_str().unwrap().to_owned();
        let output = dev.client(&["call", "because", "--task", &asked, "--binding", binding, "--text"]);
        assert_eq!(output.status.code(), Some(0), "{binding}: {}", shown(&output, &[]));

        // Cancel and watch, while it runs.
        let (mut client, stdout) = dev.client_started(&["stream", "sleep:60", "--binding", binding]);
        let mut events = serde_json::Deserializer::from_reader(stdout).into_iter::<serde_json::Value>();
        let task = events.next().unwrap().unwrap();
        let id = task["task"]["id"].as_str().unwrap();
        assert_eq!(dev.client(&["task", "cancel", id, "--binding", binding]).status.code(), Some(0), "{binding}");
        assert!(events.last().unwrap().unwrap().to_string().contains("TASK_STATE_CANCELED"), "{binding}");
        assert_eq!(client.wait().unwrap().code(), Some(1), "{binding}");
        assert_eq!(dev.client(&["task", "watch", id, "--binding", binding]).status.code(), Some(1), "{binding}");
    }
}

#[test]
fn errors_of_the_server_are_one_line_and_exit_4() {
    let dev = Dev::ephemeral();
    for binding in BINDINGS {
        let shown = |arguments: &[&str]| shown(&dev.client(&[arguments, &["--binding", binding]].concat()), &[]);
        insta::assert_snapshot!(format!("{binding}_get"), shown(&["task", "get", "nope"]));
        insta::assert_snapshot!(format!("{binding}_watch"), shown(&["task", "watch", "nope"]));
        insta::assert_snapshot!(format!("{binding}_context"), shown(&["call", "x", "--context", "not an id"]));
    }
}

#[test]
fn what_cannot_be_reached_is_one_line_and_exit_3() {
    // Bound and never accepted: nobody else gets this port meanwhile.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{closed}");
    for arguments in
        [vec!["call", "x"], vec!["stream", "x"], vec!["card"], vec!["task", "list"], vec!["task", "watch", "x"]]
    {
        let output = run(&[arguments.as_slice(), &["--url", &url]].concat());
        assert_eq!(
            shown(&output, &[(&url, "URL")]),
            "exit 3\n---\nerror: cannot reach URL/: Connection refused (os error 111)\n"
        );
    }
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let output = run(&["call", "x", "--url", &url, "--timeout", "300ms"]);
    assert_eq!(shown(&output, &[]), "exit 3\n---\nerror: no answer within 300ms; see --timeout\n");
}

#[test]
fn mistakes_on_the_command_line_exit_2() {
    for arguments in [
        vec!["call"],
        vec!["call", "x", "--url", "ftp://x"],
        vec!["call", "x", "--binding", "soap"],
        vec!["call", "x", "--json", "--text"],
        vec!["call", "x", "--timeout", "soon"],
        vec!["call", "x", "--idempotency-key", ""],
        vec!["stream", "x", "--idempotency-key", "two words"],
        vec!["task", "list", "--limit", "0"],
        vec!["task", "list", "--status", "done"],
        vec!["dev", "--data", "x", "--ephemeral"],
        vec!["nonsense"],
    ] {
        let output = run(&arguments);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}");
    }
}

#[test]
fn a_dash_reads_the_message_from_stdin() {
    let dev = Dev::ephemeral();
    let mut command = rialto(&["call", "-", "--text"]);
    command.env("RIALTO_URL", &dev.url).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all("one\ntwo ü\n".as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "one\ntwo ü\n");
}

#[test]
fn the_card_comes_as_the_agent_wrote_it() {
    let dev = Dev::ephemeral();
    let card = lines(&dev.client(&["card"]));
    assert_eq!((card.len(), &card[0]["name"]), (1, &"echo".into()));
    assert_eq!(card[0]["supportedInterfaces"][0]["url"].as_str(), Some(dev.url.as_str()));
    let text: serde_json::Value = serde_json::from_slice(&dev.client(&["card", "--text"]).stdout).unwrap();
    assert_eq!(text, card[0]);
}
