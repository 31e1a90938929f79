//! Clusters of real processes around a real Redis.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Command,
    thread::{self, JoinHandle},
    time::Duration,
};

use futures::future::join_all;
use nix::sys::signal::Signal;
use reqwest::{Client, RequestBuilder, Response};
use rialto_testkit::redis::{Options, RedisServer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::process::{Dev, rialto, run, scripted_agent_path, shown};

/// A Redis, and the configuration of all processes around it.
struct Cluster {
    redis: RedisServer,
    folder: TempDir,
    task_stores: [SocketAddr; 2],
}

fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn http() -> Client {
    // Already there if another test was quicker.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Client::builder().no_proxy().tls_certs_only([]).timeout(Duration::from_secs(30)).build().unwrap()
}

impl Cluster {
    async fn new() -> Self {
        let redis = RedisServer::start().await.unwrap();
        let (folder, task_stores) = (tempfile::tempdir().unwrap(), [free(), free()]);
        let [one, two] = task_stores;
        let yaml = format!(
            "store: redis\nredis: {{url: '{}'}}\nstop-grace: 6s\n\
             services: {{task-store: ['http://{one}', 'http://{two}']}}\nagents:\n  \
             - {{id: echo, backend: echo, lease: 1s}}\n  \
             - {{id: scripted, mount: /s, lease: 1s, backend: {{type: command, command: [scripted_agent]}}}}\n",
            redis.url()
        );
        std::fs::write(folder.path().join("rialto.yaml"), yaml).unwrap();
        Self { redis, folder, task_stores }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let file = self.folder.path().join("rialto.yaml");
        let mut all = vec!["serve", "--config", file.to_str().unwrap(), "--listen", "127.0.0.1:0"];
        if !arguments.contains(&"--admin-listen") {
            all.extend(["--admin-listen", "127.0.0.1:0"]);
        }
        all.extend(arguments);
        let mut command = rialto(&all);
        command.env("PATH", scripted_agent_path());
        command
    }

    /// Starts a process; the handle waits until it is ready.
    fn start(&self, arguments: &[&str]) -> JoinHandle<Dev> {
        let command = self.command(arguments);
        thread::spawn(|| Dev::spawn(command))
    }

    fn start_task_store(&self, which: usize) -> JoinHandle<Dev> {
        self.start(&["task-store", "--task-store-listen", &self.task_stores[which].to_string()])
    }
}

async fn ready(process: JoinHandle<Dev>) -> Dev {
    tokio::task::spawn_blocking(|| process.join().unwrap()).await.unwrap()
}

fn message(text: &str) -> Value {
    json!({"message": {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}})
}

fn post(client: &Client, url: String, body: &Value) -> RequestBuilder {
    client.post(url).header("a2a-version", "1.0").header("content-type", "application/json").body(body.to_string())
}

/// Has the echo agent answer; returns the id of the task.
async fn echoed(client: &Client, gateway: &str, text: &str) -> String {
    let response = post(client, format!("{gateway}/message:send"), &message(text)).send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    let task = &body["task"];
    assert_eq!(task["status"]["state"], "TASK_STATE_COMPLETED", "{body}");
    assert_eq!(task["artifacts"][0]["parts"][0]["text"], text, "{body}");
    task["id"].as_str().unwrap().to_owned()
}

/// Events of a stream, until one that `last` likes, the end, or a cut: their ids and what they say.
async fn events(response: &mut Response, last: impl Fn(&Value) -> bool) -> Vec<(u64, Value)> {
    let (mut text, mut found) = (String::new(), Vec::new());
    while let Ok(Some(chunk)) = response.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
        while let Some((event, rest)) = text.split_once("\n\n") {
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            if let (Some(id), Some(data)) = (field("id:"), field("data:")) {
                found.push((id.parse().unwrap(), serde_json::from_str(data).unwrap()));
            }
            text = rest.to_owned();
            if found.last().is_some_and(|(_, event)| last(event)) {
                return found;
            }
        }
    }
    found
}

fn is_completed(event: &Value) -> bool {
    event["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_starts_in_any_order_answers_through_every_gateway_and_survives_kill_9() {
    let (cluster, client) = (Cluster::new().await, http());
    // The last first: everybody waits for those behind.
    cluster.redis.kill().unwrap();
    let admin = free();
    let gateways = [cluster.start(&["gateway", "--admin-listen", &admin.to_string()]), cluster.start(&["gateway"])];
    let runners = [cluster.start(&["agent-runner"]), cluster.start(&["agent-runner"])];
    let probe = async |path: &str| {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match client.get(format!("http://{admin}{path}")).send().await {
                Ok(response) => return (response.status().as_u16(), response.text().await.unwrap()),
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(probe("/livez").await.0, 200);
    let (status, reason) = probe("/readyz").await;
    assert_eq!((status, reason.contains("task-store")), (503, true), "{reason}");
    let stores = [cluster.start_task_store(0), cluster.start_task_store(1)];
    cluster.redis.restart().await.unwrap();
    let [store, other_store] = join_all(stores.map(ready)).await.try_into().unwrap();
    let [gateway, other] = join_all(gateways.map(ready)).await.try_into().unwrap();
    let runners = join_all(runners.map(ready)).await;
    assert_eq!(probe("/readyz").await.0, 200);
    let urls = [&gateway.url, &other.url];

    // Each answered once, and rightly.
    let texts: Vec<_> = (0..200).map(|n| format!("message {n}")).collect();
    let calls = texts.iter().enumerate().map(|(n, text)| echoed(&client, urls[n % 2], text));
    let ids: BTreeSet<_> = join_all(calls).await.into_iter().collect();
    assert_eq!(ids.len(), 200);

    // Sent through one, watched through the other.
    let stream = |url: &str, text: &str| post(&client, format!("{url}/s/message:stream"), &message(text)).send();
    let mut sent = stream(urls[0], "chunks:40x50").await.unwrap();
    let seen = events(&mut sent, |event| event.get("artifactUpdate").is_some()).await;
    let task = seen[0].1["task"]["id"].as_str().unwrap().to_owned();
    let subscribe = client.post(format!("{}/s/tasks/{task}:subscribe", urls[1])).header("a2a-version", "1.0");
    let mut watched = subscribe.send().await.unwrap();
    let snapshot = events(&mut watched, |event| event.get("artifactUpdate").is_some()).await;
    assert_eq!(snapshot[0].1["task"]["id"], task.as_str());

    // A gateway dies in the middle of a stream; the other goes on after the last event.
    gateway.signal(Signal::SIGKILL);
    let mut seen: Vec<_> = seen.into_iter().chain(events(&mut sent, is_completed).await).map(|(id, _)| id).collect();
    let resume = client.post(format!("{}/s/tasks/{task}:subscribe", urls[1])).header("a2a-version", "1.0");
    let mut resumed = resume.header("last-event-id", seen.last().unwrap().to_string()).send().await.unwrap();
    let rest = events(&mut resumed, is_completed).await;
    assert!(rest.last().is_some_and(|(_, event)| is_completed(event)), "{rest:?}");
    assert!(rest.len() > 2, "the gateway died too late: {seen:?}");
    seen.extend(rest.into_iter().map(|(id, _)| id));
    let dense: Vec<_> = (seen[0]..=*seen.last().unwrap()).collect();
    assert_eq!(seen, dense, "an event was lost or repeated");

    // A task-store dies under calls and under the stream that still watches; nobody notices.
    let mut sent = stream(urls[1], "chunks:40x50").await.unwrap();
    let mut seen = events(&mut sent, |event| event.get("artifactUpdate").is_some()).await;
    let texts: Vec<_> = (0..60).map(|n| format!("again {n}")).collect();
    let killed = async {
        sleep(Duration::from_millis(100)).await;
        store.signal(Signal::SIGKILL);
    };
    let (ids, ()) = tokio::join!(join_all(texts.iter().map(|text| echoed(&client, urls[1], text))), killed);
    assert_eq!(ids.into_iter().collect::<BTreeSet<_>>().len(), 60);
    seen.extend(events(&mut sent, is_completed).await);
    assert!(seen.last().is_some_and(|(_, event)| is_completed(event)), "{seen:?}");
    let numbers: Vec<_> = seen.iter().map(|(id, _)| *id).collect();
    assert_eq!(numbers, (numbers[0]..=*numbers.last().unwrap()).collect::<Vec<_>>());

    // A planned stop, of each kind: in time, with success.
    for process in [other, other_store].into_iter().chain(runners) {
        process.signal(Signal::SIGTERM);
        let (code, rest, stderr) = process.wait();
        assert_eq!((code, rest.as_str()), (0, ""), "{stderr}");
        assert!(stderr.lines().count() < 40, "{stderr}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_in_one_process_on_redis() {
    let (cluster, client) = (Cluster::new().await, http());
    let all = ready(cluster.start(&["all"])).await;
    let again = ready(cluster.start(&["all"])).await;
    let id = echoed(&client, &all.url, "hello").await;
    let found = client.get(format!("{}/tasks/{id}", again.url)).header("a2a-version", "1.0").send().await.unwrap();
    assert_eq!(found.json::<Value>().await.unwrap()["status"]["state"], "TASK_STATE_COMPLETED");
}

#[test]
fn what_is_not_there_yet_is_one_clear_line() {
    for service in ["card-signer", "push-dispatcher", "hub-scoring"] {
        let output = shown(&run(&["serve", service, "gateway"]), &[(service, "SERVICE")]);
        assert_eq!(
            output,
            "exit 2\n---\nerror: SERVICE is not in this version; there are gateway, task-store, agent-runner, \
             and all of them: all\n"
        );
    }
    insta::assert_snapshot!(shown(&run(&["serve", "gateway", "task-store"]), &[]), @r"
        exit 2
        ---
        error: store: sqlite is for one process, which is `rialto serve all`; services in processes of their own need store: redis
    ");
}

fn refused(folder: &Path, url: &str) -> String {
    let file = folder.join("r.yaml");
    std::fs::write(&file, format!("store: redis\nredis: {{url: '{url}'}}\n")).unwrap();
    let ports = ["--admin-listen", "127.0.0.1:0", "--task-store-listen", "127.0.0.1:0"];
    shown(&run(&[&["serve", "task-store", "--config", file.to_str().unwrap()], ports.as_slice()].concat()), &[])
}

#[tokio::test]
async fn a_redis_that_will_never_do_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let drops = Options::new().args(["--maxmemory-policy", "allkeys-lru"]).start().await.unwrap();
    let text = refused(folder.path(), &drops.url());
    assert!(text.starts_with("exit 2\n---\nerror: redis at 127.0.0.1:") && text.lines().count() == 3, "{text}");
    assert!(text.contains("allkeys-lru"), "{text}");

    let closed = Options::new().user("app", "right", "~* &* +@all").start().await.unwrap();
    let text = refused(folder.path(), &closed.url().replace("//", "//app:hunter2@"));
    assert!(text.starts_with("exit 2\n---\nerror: redis at 127.0.0.1:") && text.lines().count() == 3, "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}
