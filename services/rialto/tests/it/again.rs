//! Messages that are sent again (C53), to a real server that is killed in between.

use std::fs;

use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{process::Dev, wire::http};

fn message(text: &str) -> Value {
    json!({"message": {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}]}})
}

/// Status, and body.
async fn send(url: &str, key: &str, text: &str) -> (u16, Value) {
    let request = http()
        .post(format!("{url}/message:send"))
        .header("A2A-Version", "1.0")
        .header("Idempotency-Key", key)
        .json(&message(text));
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_after_a_lost_answer_runs_once_even_when_everything_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("agents.yaml");
    let yaml = json!({"agents": [{"id": "scripted", "lease": "1s", "backend": {
        "type": "command", "command": ["scripted_agent"],
        "env": {"SCRIPTED_COUNTERS": folder.path(), "SCRIPTED_TICK_MS": "20"},
    }}]});
    fs::write(&config, yaml.to_string()).unwrap();
    let data = folder.path().join("data");
    let start = || Dev::start(&["--config", config.to_str().unwrap(), "--data", data.to_str().unwrap()]);

    let dev = start();
    let answers = join_all((0..10).map(|_| send(&dev.url, "pay-1", "count:paid"))).await;
    let (status, first) = &answers[0];
    assert_eq!((*status, &first["task"]["status"]["state"]), (200, &json!("TASK_STATE_COMPLETED")), "{first}");
    for (_, answer) in &answers {
        assert_eq!(answer["task"]["id"], first["task"]["id"]);
        assert_eq!(answer["task"]["artifacts"], first["task"]["artifacts"], "the same result");
    }
    dev.signal(Signal::SIGKILL);
    dev.wait();

    let dev = start();
    let (_, again) = send(&dev.url, "pay-1", "count:paid").await;
    assert_eq!(&again, first);
    let (status, refused) = send(&dev.url, "pay-1", "count:other").await;
    assert_eq!(
        (status, &refused["error"]["details"][0]["reason"]),
        (400, &json!("IDEMPOTENCY_KEY_REUSED")),
        "{refused}"
    );
    let (_, other) = send(&dev.url, "pay-2", "count:paid").await;
    assert_ne!(other["task"]["id"], first["task"]["id"]);
    let paid = fs::read_to_string(folder.path().join("paid")).unwrap();
    assert_eq!(paid.lines().count(), 2, "once under each key: {paid}");
    assert!(!folder.path().join("other").exists());
}
