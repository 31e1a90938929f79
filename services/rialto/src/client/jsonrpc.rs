//! The JSON-RPC binding.

use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt as _;
use reqwest::RequestBuilder;
use rialto_a2a::{
    json,
    v1::{
        CancelTaskRequest, GetTaskRequest, ListTasksRequest, ListTasksResponse, SendMessageRequest,
        SendMessageResponse, SubscribeToTaskRequest, Task,
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    Answered, Failure, Result, Update, Updates, Wire,
    http::{Http, refused},
};

/// Connected to one endpoint.
#[derive(Debug)]
pub(super) struct JsonRpc {
    http: Http,
    next_id: AtomicU64,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    error: Option<ErrorObject>,
}

#[derive(Deserialize)]
struct ErrorObject {
    code: i64,
    #[serde(default)]
    message: String,
    #[serde(default)]
    data: serde_json::Value,
}

impl JsonRpc {
    pub(super) const fn new(http: Http) -> Self {
        Self { http, next_id: AtomicU64::new(1) }
    }

    fn body<T: Serialize>(&self, method: &str, params: &T) -> Result<Vec<u8>> {
        let params = json::to_value(params).map_err(|error| Failure::Usage(error.to_string()))?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = serde_json::json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        Ok(request.to_string().into_bytes())
    }

    async fn call<T: Serialize + Sync, R: DeserializeOwned>(&self, method: &str, params: &T) -> Result<R> {
        self.ask(self.http.post("", self.body(method, params)?)).await
    }

    async fn ask<R: DeserializeOwned>(&self, request: RequestBuilder) -> Result<R> {
        self.answer(self.http.send(request).await?).await
    }

    /// Errors have a JSON-RPC body whatever the HTTP status says.
    async fn answer<R: DeserializeOwned>(&self, response: reqwest::Response) -> Result<R> {
        let (status, url) = (response.status(), response.url().clone());
        let body = self.http.body(response).await?;
        match result(&body) {
            Err(Failure::Answer(Answered { code, .. })) if code.is_empty() && !status.is_success() => {
                Err(refused(status, &url))
            }
            result => result,
        }
    }

    async fn follow(&self, request: RequestBuilder) -> Result<Updates> {
        match self.http.open(request).await? {
            Ok(events) => Ok(events
                .map(|event| {
                    let event = event?;
                    let number = event.id.and_then(|id| id.parse().ok());
                    Ok(Update { number, event: result(event.data.as_bytes())? })
                })
                .boxed()),
            Err(response) => match self.answer::<serde_json::Value>(response).await {
                Ok(_) => Err(Failure::garbage("a result where a stream was asked for")),
                Err(failure) => Err(failure),
            },
        }
    }
}

fn result<R: DeserializeOwned>(body: &[u8]) -> Result<R> {
    let envelope: Envelope<'_> = serde_json::from_slice(body).map_err(Failure::garbage)?;
    match (envelope.error, envelope.result) {
        (Some(error), _) => Err(error.into()),
        (None, Some(result)) => json::from_str(result.get()).map_err(Failure::garbage),
        (None, None) => Err(Failure::garbage("neither result nor error")),
    }
}

impl From<ErrorObject> for Failure {
    fn from(error: ErrorObject) -> Self {
        let reason = super::rest::reason(&error.data);
        let passing = matches!(reason, Some("UNAVAILABLE" | "RATE_LIMITED" | "QUEUE_FULL"));
        let code = reason.map_or_else(|| error.code.to_string(), |reason| format!("{reason}, {}", error.code));
        Self::Answer(Answered { message: error.message, code, passing })
    }
}

#[tonic::async_trait]
impl Wire for JsonRpc {
    async fn send(&self, request: SendMessageRequest, key: Option<&str>) -> Result<SendMessageResponse> {
        self.ask(self.http.post_message("", self.body("SendMessage", &request)?, key)).await
    }

    async fn get(&self, request: GetTaskRequest) -> Result<Task> {
        self.call("GetTask", &request).await
    }

    async fn list(&self, request: ListTasksRequest) -> Result<ListTasksResponse> {
        self.call("ListTasks", &request).await
    }

    async fn cancel(&self, request: CancelTaskRequest) -> Result<Task> {
        self.call("CancelTask", &request).await
    }

    async fn stream(&self, request: SendMessageRequest, key: Option<&str>) -> Result<Updates> {
        self.follow(self.http.post_message("", self.body("SendStreamingMessage", &request)?, key)).await
    }

    async fn subscribe(&self, request: SubscribeToTaskRequest, after: Option<u64>) -> Result<Updates> {
        let mut request = self.http.post("", self.body("SubscribeToTask", &request)?);
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        self.follow(request).await
    }
}
