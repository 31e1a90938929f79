//! The REST binding.

use futures::StreamExt as _;
use reqwest::{RequestBuilder, Response};
use rialto_a2a::{
    json,
    v1::{
        CancelTaskRequest, GetTaskRequest, ListTasksRequest, ListTasksResponse, SendMessageRequest,
        SendMessageResponse, StreamResponse, SubscribeToTaskRequest, Task,
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use url::form_urlencoded;

use super::{
    Answered, Failure, Result, Update, Updates, Wire,
    http::{Http, refused},
};

/// Connected to one base URL.
#[derive(Debug)]
pub(super) struct Rest {
    http: Http,
}

#[derive(Deserialize)]
struct Refusal {
    error: ErrorStatus,
}

/// `google.rpc.Status` as JSON.
#[derive(Deserialize)]
struct ErrorStatus {
    code: i64,
    #[serde(default)]
    message: String,
    #[serde(default)]
    details: Value,
}

/// The reason in the first `google.rpc.ErrorInfo` of some details.
pub(super) fn reason(details: &Value) -> Option<&str> {
    details.as_array()?.iter().find_map(|detail| {
        let kind = detail.get("@type")?.as_str()?;
        kind.ends_with("google.rpc.ErrorInfo").then(|| detail.get("reason")?.as_str())?
    })
}

impl From<ErrorStatus> for Failure {
    fn from(error: ErrorStatus) -> Self {
        let passing = matches!(error.code, 429 | 503);
        let code = match reason(&error.details) {
            Some(reason) => format!("{reason}, HTTP {}", error.code),
            None => format!("HTTP {}", error.code),
        };
        Self::Answer(Answered { message: error.message, code, passing })
    }
}

/// A path segment, percent-encoded.
fn segment(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>().replace('+', "%20")
}

/// `/{tenant}` in front of a path, for agents that have tenants.
fn below(tenant: &str, path: &str) -> String {
    if tenant.is_empty() { path.to_owned() } else { format!("/{}{path}", segment(tenant)) }
}

impl Rest {
    pub(super) const fn new(http: Http) -> Self {
        Self { http }
    }

    async fn call<R: DeserializeOwned>(&self, request: RequestBuilder) -> Result<R> {
        let response = self.http.send(request).await?;
        if !response.status().is_success() {
            return Err(self.refusal(response).await);
        }
        let body = self.http.body(response).await?;
        json::from_slice(&body).map_err(Failure::garbage)
    }

    async fn refusal(&self, response: Response) -> Failure {
        let (status, url) = (response.status(), response.url().clone());
        match self.http.body(response).await {
            Ok(body) => match serde_json::from_slice::<Refusal>(&body) {
                Ok(refusal) => refusal.error.into(),
                Err(_) => refused(status, &url),
            },
            Err(failure) => failure,
        }
    }

    async fn follow(&self, request: RequestBuilder) -> Result<Updates> {
        match self.http.open(request).await? {
            Ok(events) => Ok(events
                .map(|event| {
                    let event = event?;
                    let number = event.id.and_then(|id| id.parse().ok());
                    Ok(Update { number, event: update(&event.data)? })
                })
                .boxed()),
            Err(response) if response.status().is_success() => {
                Err(Failure::garbage("a result where a stream was asked for"))
            }
            Err(response) => Err(self.refusal(response).await),
        }
    }
}

/// An event, or the error with which a stream ends.
fn update(data: &str) -> Result<StreamResponse> {
    match serde_json::from_str::<Refusal>(data) {
        Ok(refusal) => Err(refusal.error.into()),
        Err(_) => json::from_str(data).map_err(Failure::garbage),
    }
}

fn body<T: Serialize>(request: &T) -> Result<Vec<u8>> {
    json::to_vec(request).map_err(|error| Failure::Usage(error.to_string()))
}

#[tonic::async_trait]
impl Wire for Rest {
    async fn send(&self, request: SendMessageRequest, key: Option<&str>) -> Result<SendMessageResponse> {
        let path = below(&request.tenant, "/message:send");
        self.call(self.http.post_message(&path, body(&request)?, key)).await
    }

    async fn get(&self, request: GetTaskRequest) -> Result<Task> {
        let mut path = below(&request.tenant, &format!("/tasks/{}", segment(&request.id)));
        if let Some(length) = request.history_length {
            path.push_str(&format!("?historyLength={length}"));
        }
        self.call(self.http.get(&path)).await
    }

    async fn list(&self, request: ListTasksRequest) -> Result<ListTasksResponse> {
        let path = below(&request.tenant, "/tasks");
        // Query parameters have the names and values of ProtoJSON (spec §11.5).
        let parameters = match json::to_value(&ListTasksRequest { tenant: String::new(), ..request }) {
            Ok(Value::Object(parameters)) => parameters,
            _ => return Err(Failure::Usage("these filters cannot be written".to_owned())),
        };
        let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
        let parameters = parameters.into_iter().map(|(name, value)| (name, text(value)));
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(parameters).finish();
        self.call(self.http.get(&format!("{path}?{query}"))).await
    }

    async fn cancel(&self, request: CancelTaskRequest) -> Result<Task> {
        let path = below(&request.tenant, &format!("/tasks/{}:cancel", segment(&request.id)));
        self.call(self.http.post(&path, body(&request)?)).await
    }

    async fn stream(&self, request: SendMessageRequest, key: Option<&str>) -> Result<Updates> {
        let path = below(&request.tenant, "/message:stream");
        self.follow(self.http.post_message(&path, body(&request)?, key)).await
    }

    async fn subscribe(&self, request: SubscribeToTaskRequest, after: Option<u64>) -> Result<Updates> {
        let path = below(&request.tenant, &format!("/tasks/{}:subscribe", segment(&request.id)));
        let mut request = self.http.get(&path);
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        self.follow(request).await
    }
}
