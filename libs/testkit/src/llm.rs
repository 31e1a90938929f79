//! A chat-completions endpoint (`POST /v1/chat/completions`) that does what the last message says.
//!
//! | last message | answer |
//! |---|---|
//! | `text:NxM` | N pieces `1 `, `2 `, …, M ms apart |
//! | `status:S[:N[:R]]` | status S the first N times (1), with `Retry-After: R`; then `recovered` |
//! | `code:S:C` | status S, always, with the error code C |
//! | `redirect` | a redirection to `/elsewhere` |
//! | `deaf` | nothing at all |
//! | `silent` | a head, then empty pieces every 20 ms, for ever |
//! | `stall` | two pieces, then nothing, for ever |
//! | `cut:K[:N]` | K pieces, then the connection is cut, the first N times (1); then `recovered` |
//! | `short` | two pieces, then a clean end, too early |
//! | `garbage:K` | K pieces, then an event that is not JSON |
//! | `page` | a web page |
//! | `huge` | an event without an end |
//! | `error:K` | K pieces, then an event with an error, always |
//! | `finish:REASON` | two pieces, and that reason for the end |
//! | `lingers` | two pieces and the reason for the end, then nothing, for ever |
//! | `bare` | two pieces and the reason for the end; no usage, no `[DONE]` |
//! | `think` | thoughts for 400 ms, then two pieces |
//! | `document` | two pieces, in one JSON document |
//! | `roles` | the roles of all messages |
//! | anything else, T | `you said: T` |
//!
//! Answers have a usage: 10 tokens per message in, 1 per piece out. Without the right key, every request is
//! refused, and the refusal repeats the key that was sent, as real ones do.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, post},
};
use futures::stream;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// The key that is accepted.
pub const KEY: &str = "sk-test-0123456789abcdef";

/// The endpoint, on a free port of 127.0.0.1. Stops when dropped.
#[derive(Debug)]
pub struct Llm {
    address: SocketAddr,
    desk: Desk,
    _stop: DropGuard,
}

/// What all requests share.
#[derive(Clone, Debug)]
struct Desk {
    requests: Arc<Mutex<Vec<Value>>>,
    /// Requests under way.
    open: watch::Sender<usize>,
}

impl Llm {
    /// Starts to answer.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let desk = Desk { requests: Arc::default(), open: watch::channel(0).0 };
        let elsewhere = desk.clone();
        let router = Router::new()
            .route("/v1/chat/completions", post(answer))
            .route(
                "/elsewhere",
                any(async move || {
                    elsewhere.record(json!("elsewhere"));
                }),
            )
            .with_state(desk.clone());
        let stop = CancellationToken::new();
        let serving = async move { axum::serve(listener, router).await };
        TaskTracker::new().spawn(stop.clone().run_until_cancelled_owned(serving));
        Ok(Self { address, desk, _stop: stop.drop_guard() })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// What a client is told.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// The bodies of all requests with the right key so far; `"elsewhere"` for those that followed a redirection.
    #[must_use]
    pub fn requests(&self) -> Vec<Value> {
        self.desk.lock().clone()
    }

    /// Waits until so many requests are under way: those that are not fully answered, and whose clients are still
    /// there.
    pub async fn until_open(&self, wanted: usize) {
        let mut open = self.desk.open.subscribe();
        open.wait_for(|open| *open == wanted).await.expect("the desk outlives this wait");
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Vec<Value>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a request; says how many of the kind there were before.
    fn record(&self, request: Value) -> usize {
        let mut requests = self.lock();
        let before = requests.iter().filter(|other| prompt(other) == prompt(&request)).count();
        requests.push(request);
        before
    }

    fn open(&self) -> Open {
        self.open.send_modify(|open| *open += 1);
        Open(self.open.clone())
    }
}

/// A request under way.
struct Open(watch::Sender<usize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

/// What happens on a stream, one after the other; then it ends cleanly.
enum Step {
    Send(String),
    Wait(Duration),
    Cut,
    /// Again and again.
    Forever(Duration, String),
}

async fn answer(State(desk): State<Desk>, headers: HeaderMap, Json(request): Json<Value>) -> Response {
    let open = desk.open();
    let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if sent.strip_prefix("Bearer ") != Some(KEY) {
        let error =
            json!({"error": {"message": format!("Incorrect API key provided: {sent}"), "code": "invalid_api_key"}});
        return (StatusCode::UNAUTHORIZED, Json(error)).into_response();
    }
    let before = desk.record(request.clone());
    let prompt = prompt(&request);
    let mut words = prompt.split(':');
    let (word, arguments) = (words.next().unwrap_or_default(), words.collect::<Vec<_>>());
    let argument = |at: usize| arguments.get(at).copied().unwrap_or_default();
    let number = |at: usize, otherwise: u64| argument(at).parse().unwrap_or(otherwise);
    let still = |at: usize| (before as u64) < number(at, 1);
    let messages = request["messages"].as_array().map_or(0, Vec::len);

    let mut steps = VecDeque::new();
    let mut say =
        |pieces: &[&str]| steps.extend(pieces.iter().map(|piece| Step::Send(delta(&json!({"content": piece})))));
    let two = ["one ", "two"];
    let some = |at: usize| two.iter().copied().take(usize::try_from(number(at, 0)).unwrap_or(2)).collect::<Vec<_>>();
    match word {
        "text" => {
            let (pieces, pause) = argument(0).split_once('x').unwrap_or((argument(0), "0"));
            let pause = Duration::from_millis(pause.parse().unwrap_or(0));
            for piece in 1..=pieces.parse().unwrap_or(1) {
                steps.push_back(Step::Send(delta(&json!({"content": format!("{piece} ")}))));
                steps.push_back(Step::Wait(pause));
            }
        }
        "status" if still(1) => return refusal(number(0, 500), "", argument(2)),
        "code" => return refusal(number(0, 400), argument(1), ""),
        "redirect" => {
            return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, "/elsewhere")]).into_response();
        }
        "page" => {
            let page = "<html>data: {}\n\n</html>";
            return ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response();
        }
        "document" => {
            let message = json!({"role": "assistant", "content": "one two"});
            let choices = json!([{"index": 0, "message": message, "finish_reason": "stop"}]);
            return Json(json!({"id": "c-1", "model": "fake-1", "choices": choices, "usage": usage(messages, 2)}))
                .into_response();
        }
        "deaf" => {
            std::future::pending::<()>().await;
            drop(open);
            unreachable!("a wait without an end")
        }
        "silent" => {
            return stream_of(open, [Step::Forever(Duration::from_millis(20), delta(&json!({"content": ""})))].into());
        }
        "stall" => {
            say(&two);
            steps.push_back(Step::Forever(Duration::MAX, String::new()));
            return stream_of(open, steps);
        }
        "cut" if still(1) => {
            say(&some(0));
            // What was said is on its way by then.
            steps.extend([Step::Wait(Duration::from_millis(20)), Step::Cut]);
            return stream_of(open, steps);
        }
        "short" => {
            say(&two);
            return stream_of(open, steps);
        }
        "garbage" => {
            say(&some(0));
            steps.push_back(Step::Send("data: {\"choices\": [nonsense\n\n".to_owned()));
            return stream_of(open, steps);
        }
        "huge" => {
            steps.push_back(Step::Send("data: {\"x\": \"".to_owned()));
            steps.push_back(Step::Forever(Duration::ZERO, "x".repeat(64 << 10)));
            return stream_of(open, steps);
        }
        "error" => {
            say(&some(0));
            let error = json!({"error": {"message": format!("the database of {KEY} is on fire"), "code": 503}});
            steps.push_back(Step::Send(event(&error)));
            return stream_of(open, steps);
        }
        "think" => {
            for _ in 0..8 {
                steps.push_back(Step::Send(delta(&json!({"content": null, "reasoning_content": "hm"}))));
                steps.push_back(Step::Wait(Duration::from_millis(50)));
            }
            steps.extend(two.map(|piece| Step::Send(delta(&json!({"content": piece})))));
        }
        "finish" | "lingers" | "bare" => say(&two),
        "status" | "cut" => say(&["recovered"]),
        "roles" => {
            let roles = request["messages"].as_array().into_iter().flatten().filter_map(|line| line["role"].as_str());
            say(&[&roles.collect::<Vec<_>>().join(" ")]);
        }
        _ => say(&["you said: ", &prompt]),
    }
    let pieces = steps.iter().filter(|step| matches!(step, Step::Send(_))).count();
    let reason = if word == "finish" { argument(0) } else { "stop" };
    let end = json!({"index": 0, "delta": {}, "finish_reason": reason});
    steps.push_back(Step::Send(event(&json!({"id": "c-1", "model": "fake-1", "choices": [end]}))));
    match word {
        "lingers" => steps.push_back(Step::Forever(Duration::MAX, String::new())),
        "bare" => {}
        _ => {
            let usage = json!({"id": "c-1", "model": "fake-1", "choices": [], "usage": usage(messages, pieces)});
            steps.extend([event(&usage), "data: [DONE]\n\n".to_owned()].map(Step::Send));
        }
    }
    stream_of(open, steps)
}

/// The text of the last message.
fn prompt(request: &Value) -> String {
    let content = request["messages"].as_array().and_then(|messages| Some(&messages.last()?["content"]));
    match content {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(pieces)) => pieces.iter().filter_map(|piece| piece["text"].as_str()).collect(),
        _ => String::new(),
    }
}

fn usage(messages: usize, pieces: usize) -> Value {
    json!({"prompt_tokens": 10 * messages, "completion_tokens": pieces, "total_tokens": 10 * messages + pieces})
}

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

fn delta(delta: &Value) -> String {
    let choices = json!([{"index": 0, "delta": delta, "finish_reason": null}]);
    event(
        &json!({"id": "c-1", "object": "chat.completion.chunk", "model": "fake-1", "choices": choices, "usage": null}),
    )
}

fn refusal(status: u64, code: &str, retry_after: &str) -> Response {
    let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
    let error = json!({"error": {"message": format!("internal detail, {KEY}"), "type": "error", "code": code}});
    let mut response = (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), Json(error)).into_response();
    if let Ok(value) = retry_after.parse()
        && !retry_after.is_empty()
    {
        response.headers_mut().insert(header::RETRY_AFTER, value);
    }
    response
}

fn stream_of(open: Open, steps: VecDeque<Step>) -> Response {
    let body = stream::unfold((open, steps), |(open, mut steps)| async move {
        loop {
            let chunk = match steps.pop_front()? {
                Step::Send(text) => Ok(Bytes::from(text)),
                Step::Cut => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
                Step::Wait(pause) => {
                    sleep(pause).await;
                    continue;
                }
                Step::Forever(pause, text) => {
                    sleep(pause).await;
                    steps.push_front(Step::Forever(pause, text.clone()));
                    Ok(Bytes::from(text))
                }
            };
            return Some((chunk, (open, steps)));
        }
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
}
