//! Clients of a cluster, by hand: REST and its event streams.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// For waits that end much sooner on any machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn http() -> Client {
    // Already there if another test was quicker.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let client = Client::builder().no_proxy().tls_certs_only([]).timeout(PATIENCE);
    // A connection that waits in a pool may end just when it is used again; what then fails is not what we test.
    client.pool_max_idle_per_host(0).build().unwrap()
}

fn message(text: &str) -> Value {
    json!({"message": {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}})
}

fn post(client: &Client, url: String, text: &str) -> RequestBuilder {
    let request = client.post(url).header("a2a-version", "1.0").header("content-type", "application/json");
    request.body(message(text).to_string())
}

/// Sends a message to the agent at `base`, to wait for its end.
pub(crate) fn send(client: &Client, base: &str, text: &str) -> RequestBuilder {
    post(client, format!("{base}/message:send"), text)
}

/// Sends a message to the agent at `base` and begins to read what becomes of it.
pub(crate) async fn stream(client: &Client, base: &str, text: &str) -> Response {
    let response = post(client, format!("{base}/message:stream"), text).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response
}

/// Begins to read a task of the agent at `base`: from its state on, or after an event.
pub(crate) async fn subscribe(client: &Client, base: &str, task: &str, after: Option<u64>) -> Response {
    let mut request = client.post(format!("{base}/tasks/{task}:subscribe")).header("a2a-version", "1.0");
    if let Some(after) = after {
        request = request.header("last-event-id", after.to_string());
    }
    request.send().await.unwrap()
}

/// Status and body of a GET.
pub(crate) async fn get(client: &Client, url: String) -> (u16, Value) {
    let response = client.get(url).header("a2a-version", "1.0").send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Has an agent answer; returns the task.
pub(crate) async fn answered(client: &Client, base: &str, text: &str) -> Value {
    let response = send(client, base, text).send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    let task = &body["task"];
    assert_eq!(task["status"]["state"], "TASK_STATE_COMPLETED", "{text}: {body}");
    task.clone()
}

/// Has an agent repeat a text; returns the id of the task.
pub(crate) async fn echoed(client: &Client, base: &str, text: &str) -> String {
    let task = answered(client, base, text).await;
    assert_eq!(task["artifacts"][0]["parts"][0]["text"], text, "{task}");
    task["id"].as_str().unwrap().to_owned()
}

/// An event of a stream: its number and what it says.
pub(crate) type Event = (u64, Value);

/// Events of a stream, until one that `last` likes, the end, or a cut.
pub(crate) async fn events(response: &mut Response, last: impl Fn(&Value) -> bool) -> Vec<Event> {
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

pub(crate) fn is_artifact(event: &Value) -> bool {
    event.get("artifactUpdate").is_some()
}

pub(crate) fn is_completed(event: &Value) -> bool {
    event["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
}

/// Nothing is missing, nothing is there twice, and the last event, and no other, ends the task well.
pub(crate) fn assert_whole(events: &[Event]) {
    let numbers: Vec<_> = events.iter().map(|(number, _)| *number).collect();
    let dense: Vec<_> = (numbers[0]..).take(numbers.len()).collect();
    assert_eq!(numbers, dense, "an event was lost or repeated");
    let ends: Vec<_> = events.iter().filter(|(_, event)| is_completed(event)).map(|(number, _)| number).collect();
    assert_eq!(ends, [numbers.last().unwrap()], "{:?}", events.last());
}

/// The id of the task that a stream begins with.
pub(crate) fn task_of(events: &[Event]) -> String {
    events[0].1["task"]["id"].as_str().unwrap().to_owned()
}

/// The text of an artifact.
pub(crate) fn text_of(artifact: &Value) -> String {
    let parts = artifact["parts"].as_array().into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect()
}

/// Looks again until it is so.
pub(crate) async fn until(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !look().await {
        assert!(Instant::now() < end, "in vain: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}
