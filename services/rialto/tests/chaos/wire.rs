//! Calls as a client makes them, and what may become of them.

use std::time::Duration;

use reqwest::{Client, ClientBuilder, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

/// Silence on a stream after which it is given up; gateways break it every half a second.
const SILENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binding {
    JsonRpc,
    Rest,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The connection broke, or nothing came: whatever was asked may have happened or not.
    Cut(String),
    /// 503 or 504: the same, said politely.
    Busy(String),
    /// Anything else is an answer.
    Refused(String),
}

impl Trouble {
    fn of(error: &reqwest::Error) -> Self {
        Self::Cut(format!("{error:?}"))
    }
}

/// One agent behind one gateway.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    http: Client,
    url: String,
    binding: Binding,
}

fn builder() -> ClientBuilder {
    // Already there if another test was quicker.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Client::builder().no_proxy().tls_certs_only([]).connect_timeout(SILENCE).read_timeout(SILENCE * 2)
}

pub(crate) fn http() -> Client {
    builder().build().unwrap()
}

/// Everything over one connection.
pub(crate) fn http2() -> Client {
    builder().http2_prior_knowledge().build().unwrap()
}

impl Wire {
    pub(crate) fn new(http: &Client, gateway: &str, mount: &str, binding: Binding) -> Self {
        Self { http: http.clone(), url: format!("{gateway}{mount}"), binding }
    }

    fn rpc(&self, method: &str, params: &Value) -> RequestBuilder {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.post("", &body)
    }

    fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        let post = self.http.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        post.header("a2a-version", "1.0").body(body.to_string())
    }

    fn get(&self, path: &str) -> RequestBuilder {
        self.http.get(format!("{}{path}", self.url)).header("a2a-version", "1.0")
    }

    /// Sends a message; with the same `key`, the same message. The answer holds its task.
    pub(crate) async fn send(&self, params: &Value, key: &str) -> Result<Value, Trouble> {
        let request = match self.binding {
            Binding::JsonRpc => self.rpc("SendMessage", params),
            Binding::Rest => self.post("/message:send", params),
        };
        self.answer(request.header("idempotency-key", key)).await
    }

    /// Sends a message and opens the stream of its events.
    pub(crate) async fn stream(&self, params: &Value, key: &str) -> Result<Events, Trouble> {
        let request = match self.binding {
            Binding::JsonRpc => self.rpc("SendStreamingMessage", params),
            Binding::Rest => self.post("/message:stream", params),
        };
        self.events(request.header("idempotency-key", key)).await
    }

    /// Follows a task, from event `after` on.
    pub(crate) async fn subscribe(&self, task: &str, after: Option<u64>) -> Result<Events, Trouble> {
        let request = match self.binding {
            Binding::JsonRpc => self.rpc("SubscribeToTask", &json!({"id": task})),
            Binding::Rest => self.get(&format!("/tasks/{task}:subscribe")),
        };
        let request = match after {
            Some(after) => request.header("last-event-id", after),
            None => request,
        };
        self.events(request).await
    }

    pub(crate) async fn task(&self, task: &str) -> Result<Value, Trouble> {
        self.answer(match self.binding {
            Binding::JsonRpc => self.rpc("GetTask", &json!({"id": task})),
            Binding::Rest => self.get(&format!("/tasks/{task}")),
        })
        .await
    }

    pub(crate) async fn cancel(&self, task: &str) -> Result<Value, Trouble> {
        self.answer(match self.binding {
            Binding::JsonRpc => self.rpc("CancelTask", &json!({"id": task})),
            Binding::Rest => self.post(&format!("/tasks/{task}:cancel"), &json!({})),
        })
        .await
    }

    /// All tasks of the agent, whole.
    pub(crate) async fn tasks(&self) -> Result<Vec<Value>, Trouble> {
        let (mut all, mut token) = (Vec::new(), String::new());
        loop {
            let params = json!({"pageSize": 100, "pageToken": token, "historyLength": 10, "includeArtifacts": true});
            let mut page = self.answer(self.rpc("ListTasks", &params)).await?;
            if let Value::Array(tasks) = page["tasks"].take() {
                all.extend(tasks);
            }
            token = page["nextPageToken"].as_str().unwrap_or_default().to_owned();
            if token.is_empty() {
                return Ok(all);
            }
        }
    }

    async fn answer(&self, request: RequestBuilder) -> Result<Value, Trouble> {
        let response = request.send().await.map_err(|error| Trouble::of(&error))?;
        let status = response.status();
        let text = response.text().await.map_err(|error| Trouble::of(&error))?;
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT) {
            return Err(Trouble::Busy(text));
        }
        let refused = || Trouble::Refused(format!("{status} {text}"));
        let mut body: Value = serde_json::from_str(&text).map_err(|_| refused())?;
        if !status.is_success() || body.get("error").is_some() {
            return Err(refused());
        }
        Ok(if self.binding == Binding::JsonRpc || body.get("result").is_some() { body["result"].take() } else { body })
    }

    async fn events(&self, request: RequestBuilder) -> Result<Events, Trouble> {
        let response = request.send().await.map_err(|error| Trouble::of(&error))?;
        let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if response.status().is_success() && kind.starts_with("text/event-stream") {
            return Ok(Events { response, text: Vec::new() });
        }
        let status = response.status();
        let text = response.text().await.map_err(|error| Trouble::of(&error))?;
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => Err(Trouble::Busy(text)),
            _ => Err(Trouble::Refused(format!("{status} {text}"))),
        }
    }
}

/// An open stream.
#[derive(Debug)]
pub(crate) struct Events {
    response: Response,
    text: Vec<u8>,
}

impl Events {
    /// The next event with its number; `None` at the end. Dropped on the way, it loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<(u64, Value)>, Trouble> {
        loop {
            while let Some(end) = self.text.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.text.drain(..end + 2).collect();
                if let Some(event) = event_of(&String::from_utf8_lossy(&event))? {
                    return Ok(Some(event));
                }
            }
            match tokio::time::timeout(SILENCE, self.response.chunk()).await {
                Ok(Ok(Some(chunk))) => self.text.extend_from_slice(&chunk),
                Ok(Ok(None)) if self.text.is_empty() => return Ok(None),
                Ok(Ok(None)) => return Err(Trouble::Cut("in the middle of an event".to_owned())),
                Ok(Err(error)) => return Err(Trouble::of(&error)),
                Err(_) => return Err(Trouble::Cut(format!("silent for {SILENCE:?}"))),
            }
        }
    }
}

/// `None` for comments.
fn event_of(text: &str) -> Result<Option<(u64, Value)>, Trouble> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let Some(data) = field("data:") else { return Ok(None) };
    let refused = || Trouble::Refused(text.to_owned());
    let mut data: Value = serde_json::from_str(data).map_err(|_| refused())?;
    if let Some(error) = data.get("error") {
        // Streams end with these when a store is away for long, or a server stops.
        let text = error.to_string();
        return Err(if text.contains("UNAVAILABLE") { Trouble::Busy(text) } else { refused() });
    }
    let event = if data.get("result").is_some() { data["result"].take() } else { data };
    let number = field("id:").and_then(|id| id.parse().ok()).ok_or_else(refused)?;
    Ok(Some((number, event)))
}
