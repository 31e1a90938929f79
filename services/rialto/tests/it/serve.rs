//! Clusters of real processes around a real Redis.

use std::{collections::BTreeSet, path::Path, time::Duration};

use futures::future::join_all;
use reqwest::{Client, RequestBuilder, Response};
use rialto_testkit::{
    cluster::{Builder, Cluster, Exit},
    redis::Options,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::process::{run, shown};

fn http() -> Client {
    // Already there if another test was quicker.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Client::builder().no_proxy().tls_certs_only([]).timeout(Duration::from_secs(30)).build().unwrap()
}

/// An agent that echoes at `/`, the scripted one at `/s`.
const AGENTS: &str = "stop-grace: 6s\nagents:\n\
  - {id: echo, backend: echo, lease: 1s}\n\
  - {id: scripted, mount: /s, lease: 1s, backend: {type: command, command: [scripted_agent]}}\n";

fn cluster() -> Builder {
    Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(AGENTS)
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
    let (cluster, client) = (cluster().prepare().await.unwrap(), http());
    // The last first: everybody waits for those behind.
    cluster.redis().kill().unwrap();
    for process in cluster.gateways.iter().chain(&cluster.runners) {
        process.spawn().unwrap();
    }
    let admin = cluster.gateways[0].admin_url();
    let probe = async |path: &str| {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match client.get(format!("{admin}{path}")).send().await {
                Ok(response) => return (response.status().as_u16(), response.text().await.unwrap()),
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(probe("/livez").await.0, 200);
    let (status, reason) = probe("/readyz").await;
    assert_eq!((status, reason.contains("task-store")), (503, true), "{reason}");
    for process in &cluster.task_stores {
        process.spawn().unwrap();
    }
    cluster.redis().restart().await.unwrap();
    cluster.start_all().await.unwrap();
    assert_eq!(probe("/readyz").await.0, 200);
    let urls = [&cluster.gateways[0].url(), &cluster.gateways[1].url()];

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
    cluster.gateways[0].kill();
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
        cluster.task_stores[0].kill();
    };
    let (ids, ()) = tokio::join!(join_all(texts.iter().map(|text| echoed(&client, urls[1], text))), killed);
    assert_eq!(ids.into_iter().collect::<BTreeSet<_>>().len(), 60);
    seen.extend(events(&mut sent, is_completed).await);
    assert!(seen.last().is_some_and(|(_, event)| is_completed(event)), "{seen:?}");
    let numbers: Vec<_> = seen.iter().map(|(id, _)| *id).collect();
    assert_eq!(numbers, (numbers[0]..=*numbers.last().unwrap()).collect::<Vec<_>>());

    // A planned stop, of each kind: in time, with success.
    for process in [&cluster.gateways[1], &cluster.task_stores[1]].into_iter().chain(&cluster.runners) {
        let Exit { code, stdout, stderr } = process.terminate().await.unwrap();
        assert_eq!((code, stdout.lines().count()), (0, 1), "{stdout}{stderr}");
        assert!(stderr.lines().count() < 40, "{stderr}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_in_one_process_on_redis() {
    let cluster = cluster().gateways(0).task_stores(0).runners(0).other(&["all"]).other(&["all"]);
    let (cluster, client) = (cluster.start().await.unwrap(), http());
    let [all, again] = [&cluster.others[0], &cluster.others[1]].map(|process| process.url());
    let id = echoed(&client, &all, "hello").await;
    let found = client.get(format!("{again}/tasks/{id}")).header("a2a-version", "1.0").send().await.unwrap();
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
