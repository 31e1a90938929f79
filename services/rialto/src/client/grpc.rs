//! The gRPC binding.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use rialto_a2a::{
    v1::{
        CancelTaskRequest, GetTaskRequest, ListTasksRequest, ListTasksResponse, SendMessageRequest,
        SendMessageResponse, StreamResponse, SubscribeToTaskRequest, Task, stream_response::Payload,
    },
    wkt::{Struct, value::Kind},
};
use rialto_rpc::a2a::a2a_service_client::A2aServiceClient;
use tonic::{
    Code, Request, Status, Streaming,
    metadata::AsciiMetadataValue,
    transport::{Channel, ClientTlsConfig, Endpoint},
};
use tonic_types::StatusExt as _;

use super::{
    Answered, CONNECT, EVENT_NUMBER, Failure, MAX_ANSWER, Result, SILENCE, Update, Updates, VERSION, Wire, http::cause,
};

/// Connected to one address.
#[derive(Clone, Debug)]
pub(super) struct Grpc {
    client: A2aServiceClient<Channel>,
    address: String,
}

impl Grpc {
    pub(super) async fn connect(address: &str) -> Result<Self> {
        let fault =
            |error: tonic::transport::Error| Failure::Unreachable(format!("cannot reach {address}: {}", cause(&error)));
        // Cards of other servers give host and port alone.
        let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
        let mut endpoint = Endpoint::from_shared(url.clone())
            .map_err(|_| Failure::Usage(format!("{address:?} is not a URL such as \"http://127.0.0.1:8080\"")))?
            .user_agent(concat!("rialto/", env!("CARGO_PKG_VERSION")))
            .map_err(fault)?
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(SILENCE);
        if url.starts_with("https://") {
            endpoint = endpoint.tls_config(ClientTlsConfig::new().with_native_roots()).map_err(fault)?;
        }
        let channel = endpoint.connect().await.map_err(fault)?;
        let client =
            A2aServiceClient::new(channel).max_decoding_message_size(MAX_ANSWER).max_encoding_message_size(MAX_ANSWER);
        Ok(Self { client, address: address.to_owned() })
    }

    fn failure(&self, status: &Status) -> Failure {
        // A status that was made here, because the connection broke, has a source; one from the wire has none.
        let broken = std::error::Error::source(status);
        if let Some(source) = broken
            .filter(|_| matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled))
        {
            return Failure::Unreachable(format!("lost the connection to {}: {}", self.address, cause(source)));
        }
        let passing = matches!(status.code(), Code::Unavailable | Code::ResourceExhausted);
        let grpc = format!("gRPC {:?}", status.code());
        let code = match status.get_details_error_info() {
            Some(info) if !info.reason.is_empty() => format!("{}, {grpc}", info.reason),
            _ => grpc,
        };
        Failure::Answer(Answered { message: status.message().to_owned(), code, passing })
    }

    fn updates(&self, events: Streaming<StreamResponse>) -> Updates {
        let this = self.clone();
        stream::try_unfold((events, this), |(mut events, this)| async move {
            let event = events.message().await.map_err(|status| this.failure(&status))?;
            Ok(event.map(|event| (Update { number: number(&event), event }, (events, this))))
        })
        .boxed()
    }
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("a2a-version", AsciiMetadataValue::from_static(VERSION));
    request
}

fn stream_request<T>(message: T) -> Request<T> {
    let mut request = request(message);
    request.metadata_mut().insert("a2a-extensions", AsciiMetadataValue::from_static(EVENT_NUMBER));
    request
}

fn named<T>(mut request: Request<T>, key: Option<&str>) -> Result<Request<T>> {
    if let Some(key) = key {
        let key = key.parse().map_err(|_| Failure::Usage("the idempotency key is not ASCII text".to_owned()))?;
        request.metadata_mut().insert("idempotency-key", key);
    }
    Ok(request)
}

fn number(event: &StreamResponse) -> Option<u64> {
    let metadata: Option<&Struct> = match event.payload.as_ref()? {
        Payload::Task(task) => task.metadata.as_ref(),
        Payload::Message(message) => message.metadata.as_ref(),
        Payload::StatusUpdate(update) => update.metadata.as_ref(),
        Payload::ArtifactUpdate(update) => update.metadata.as_ref(),
    };
    match metadata?.fields.get(EVENT_NUMBER)?.kind.as_ref()? {
        // Written and read as text: a float prints a whole number without its fraction.
        Kind::NumberValue(number) => number.to_string().parse().ok(),
        Kind::StringValue(number) => number.parse().ok(),
        _ => None,
    }
}

#[tonic::async_trait]
impl Wire for Grpc {
    async fn send(&self, message: SendMessageRequest, key: Option<&str>) -> Result<SendMessageResponse> {
        let reply = self.client.clone().send_message(named(request(message), key)?).await;
        reply.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    async fn get(&self, message: GetTaskRequest) -> Result<Task> {
        let reply = self.client.clone().get_task(request(message)).await;
        reply.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    async fn list(&self, message: ListTasksRequest) -> Result<ListTasksResponse> {
        let reply = self.client.clone().list_tasks(request(message)).await;
        reply.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    async fn cancel(&self, message: CancelTaskRequest) -> Result<Task> {
        let reply = self.client.clone().cancel_task(request(message)).await;
        reply.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    async fn stream(&self, message: SendMessageRequest, key: Option<&str>) -> Result<Updates> {
        let events = self.client.clone().send_streaming_message(named(stream_request(message), key)?).await;
        events.map(|events| self.updates(events.into_inner())).map_err(|status| self.failure(&status))
    }

    async fn subscribe(&self, message: SubscribeToTaskRequest, after: Option<u64>) -> Result<Updates> {
        let mut request = stream_request(message);
        if let Some(after) = after {
            request.metadata_mut().insert("last-event-id", after.into());
        }
        let events = self.client.clone().subscribe_to_task(request).await;
        events.map(|events| self.updates(events.into_inner())).map_err(|status| self.failure(&status))
    }
}
