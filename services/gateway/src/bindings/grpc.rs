//! gRPC (spec §10): `lf.a2a.v1.A2AService`, health and reflection, on the same port as everything else.
//!
//! The wire has no path for a mount, so the `tenant` of a message is read like one: `support/acme` is the tenant
//! `acme` of the agent at `/support`. Clients that can put something in front of the path may also call
//! `/support/lf.a2a.v1.A2AService/…`.

use std::{convert::Infallible, fmt, pin::Pin, sync::Arc};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Request, Response, Uri, header},
};
use futures::Stream;
use rialto_a2a::{
    Error, Kind,
    v1::{
        AgentCard, CancelTaskRequest, DeleteTaskPushNotificationConfigRequest, GetExtendedAgentCardRequest,
        GetTaskPushNotificationConfigRequest, GetTaskRequest, ListTaskPushNotificationConfigsRequest,
        ListTaskPushNotificationConfigsResponse, ListTasksRequest, ListTasksResponse, SendMessageRequest,
        SendMessageResponse, StreamResponse, SubscribeToTaskRequest, Task, TaskPushNotificationConfig,
    },
    wkt::Empty,
};
use rialto_net::Deadline;
use rialto_rpc::a2a::a2a_service_server::{A2aService, A2aServiceServer, SERVICE_NAME};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Response as Reply, Status, metadata::MetadataMap, service::Routes};
use tower::Service as _;
use tracing::error;

use super::{Limits, body_timed_out, too_large};
use crate::{
    agents::{Agent, Agents},
    call::{Call, Version},
    follow::{Events, Step},
    observe::Operation,
    operations::Operations,
};

const GRPC_ACCEPT_ENCODING: &str = "grpc-accept-encoding";

pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    // Not `application/grpc-web`, which is another protocol.
    let is_grpc = |value: &[u8]| {
        value.strip_prefix(b"application/grpc").is_some_and(|rest| matches!(rest, [] | [b'+' | b';', ..]))
    };
    headers.get(header::CONTENT_TYPE).is_some_and(|value| is_grpc(value.as_bytes()))
}

/// All gRPC services of the public port.
#[derive(Clone)]
pub(super) struct Grpc {
    a2a: A2aServiceServer<Binding>,
    others: axum::Router,
    limits: Limits,
}

impl fmt::Debug for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grpc").finish_non_exhaustive()
    }
}

/// The host that a request was sent to and the mount in front of its path, for the methods.
#[derive(Clone, Debug)]
struct Target {
    host: Option<String>,
    mount: String,
}

impl Grpc {
    pub(super) fn new(
        agents: Arc<Agents>,
        operations: Arc<Operations>,
        limits: Limits,
        tracker: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let (health, health_server) = tonic_health::server::health_reporter();
        tracker.spawn(async move {
            health.set_service_status(SERVICE_NAME, tonic_health::ServingStatus::Serving).await;
            stop.cancelled().await;
            for service in ["", SERVICE_NAME] {
                health.set_service_status(service, tonic_health::ServingStatus::NotServing).await;
            }
        });
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(rialto_a2a::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let mut others = Routes::new(health_server);
        if let Ok(v1) = reflection().build_v1() {
            others = others.add_service(v1);
        }
        if let Ok(v1alpha) = reflection().build_v1alpha() {
            others = others.add_service(v1alpha);
        }
        let a2a = A2aServiceServer::new(Binding { agents, operations })
            .max_decoding_message_size(limits.request_size)
            // A stored task is bounded by its own limit; what was accepted can be read.
            .max_encoding_message_size(usize::MAX);
        Self { a2a, others: others.into_axum_router(), limits }
    }

    pub(super) async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let host = super::host(&parts).map(str::to_owned);
        let path = parts.uri.path();
        let (service, method) = path.rsplit_once('/').unwrap_or_default();
        let operation = match service.trim_start_matches('/') {
            "grpc.health.v1.Health" => Operation::new("Health"),
            service if service.ends_with(SERVICE_NAME) => Operation::new(method),
            _ => Operation::new("unknown"),
        };
        let response = match service.strip_suffix(SERVICE_NAME).and_then(|before| before.strip_suffix('/')) {
            Some(mount) => {
                let target = Target { host, mount: mount.to_owned() };
                if !mount.is_empty() {
                    let bare = path[mount.len()..].parse::<Uri>();
                    parts.uri = bare.unwrap_or_default();
                }
                parts.extensions.insert(target);
                // Messages are small or refused by their length prefix; a body that stays away is not waited for.
                let body = Deadline::new(body, self.limits.body_timeout);
                let call = self.a2a.clone().call(Request::from_parts(parts, body));
                call.await.map(|response| response.map(Body::new))
            }
            None => self.others.clone().call(Request::from_parts(parts, body)).await,
        };
        let response = response.unwrap_or_else(|never: Infallible| match never {});
        let mut response = self.explain(response);
        operation.note(&mut response);
        response
    }

    /// Puts what tonic itself refuses into the terms of the protocol.
    fn explain(&self, response: Response<Body>) -> Response<Body> {
        let headers = response.headers();
        if headers.contains_key(Status::GRPC_STATUS_DETAILS) {
            return response;
        }
        let error = match headers.get(Status::GRPC_STATUS).map(tonic::codegen::http::HeaderValue::as_bytes) {
            Some(b"11" | b"8") => too_large(self.limits.request_size),
            // Our own errors have details; these are tonic's.
            Some(b"13") => Error::new(Kind::Parse, "Invalid protobuf payload"),
            Some(b"12") if headers.contains_key(GRPC_ACCEPT_ENCODING) => {
                let error = Error::new(Kind::MethodNotFound, "Compressed messages are not supported");
                let mut refused = error.to_status().into_http();
                // By this clients know to try again without.
                refused.headers_mut().insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
                return refused;
            }
            Some(b"12") => Kind::MethodNotFound.into(),
            // The body failed: it took too long, or the client is gone and does not care.
            Some(b"2") => body_timed_out(),
            _ => return response,
        };
        error.to_status().into_http()
    }
}

/// The operations as the generated trait wants them.
struct Binding {
    agents: Arc<Agents>,
    operations: Arc<Operations>,
}

type Answer<T> = Result<Reply<T>, Status>;
type StatusStream = Pin<Box<dyn Stream<Item = Result<StreamResponse, Status>> + Send>>;

impl Binding {
    /// The call that a request makes, and its message without what only chose the agent.
    fn call<T: Tenanted>(&self, request: tonic::Request<T>) -> Result<(Call, T), Status> {
        let (metadata, extensions, mut message) = request.into_parts();
        let (agent, tenant) = self.find(extensions.get(), message.tenant())?;
        message.tenant().clear();
        let call = Call::new(agent, Version::V1, tenant, metadata.as_ref(), None)?;
        Ok((call, message))
    }

    fn find(&self, target: Option<&Target>, tenant: &str) -> Result<(Arc<Agent>, String), Error> {
        let (host, mount) = target.map_or((None, ""), |target| (target.host.as_deref(), &target.mount[..]));
        let path = format!("{mount}/{tenant}");
        let not_found = || Error::new(Kind::TaskNotFound, Kind::TaskNotFound.wire().message);
        let (agent, rest) = self.agents.find(host, &path).ok_or_else(not_found)?;
        Ok((Arc::clone(agent), rest.strip_prefix('/').unwrap_or(rest).to_owned()))
    }
}

/// Tells which extensions are in effect, on results and errors alike.
fn finish<T>(call: &Call, answer: Result<T, Error>) -> Answer<T> {
    let echo = |metadata: &mut MetadataMap| metadata.as_mut().extend(call.activated());
    match answer {
        Ok(message) => {
            let mut reply = Reply::new(message);
            echo(reply.metadata_mut());
            Ok(reply)
        }
        Err(error) => {
            let mut status = error.to_status();
            echo(status.metadata_mut());
            Err(status)
        }
    }
}

fn stream(events: Events) -> StatusStream {
    Box::pin(futures::stream::unfold(events, |mut events| async move {
        let item = match events.next().await? {
            Step::Update(update) => update.event.ok_or_else(|| {
                error!(number = update.number, "an update without an event");
                Error::internal().to_status()
            }),
            Step::Failed(error) => Err(error.to_status()),
            // An end without a status would look like the end of the task.
            Step::Paused(why) => {
                let text = format!("The stream ends, the task does not: {why}; subscribe again with last-event-id");
                Err(Error { message: text.into(), ..Error::unavailable() }.to_status())
            }
        };
        Some((item, events))
    }))
}

#[tonic::async_trait]
impl A2aService for Binding {
    type SendStreamingMessageStream = StatusStream;
    type SubscribeToTaskStream = StatusStream;

    async fn send_message(&self, request: tonic::Request<SendMessageRequest>) -> Answer<SendMessageResponse> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.send_message(&call, message).await)
    }

    async fn send_streaming_message(&self, request: tonic::Request<SendMessageRequest>) -> Answer<StatusStream> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.send_streaming_message(&call, message).await.map(stream))
    }

    async fn get_task(&self, request: tonic::Request<GetTaskRequest>) -> Answer<Task> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.get_task(&call, message).await)
    }

    async fn list_tasks(&self, request: tonic::Request<ListTasksRequest>) -> Answer<ListTasksResponse> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.list_tasks(&call, message).await)
    }

    async fn cancel_task(&self, request: tonic::Request<CancelTaskRequest>) -> Answer<Task> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.cancel_task(&call, message).await)
    }

    async fn subscribe_to_task(&self, request: tonic::Request<SubscribeToTaskRequest>) -> Answer<StatusStream> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.subscribe_to_task(&call, message).await.map(stream))
    }

    async fn create_task_push_notification_config(
        &self,
        request: tonic::Request<TaskPushNotificationConfig>,
    ) -> Answer<TaskPushNotificationConfig> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.create_push_config(&call, &message))
    }

    async fn get_task_push_notification_config(
        &self,
        request: tonic::Request<GetTaskPushNotificationConfigRequest>,
    ) -> Answer<TaskPushNotificationConfig> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.get_push_config(&call, &message))
    }

    async fn list_task_push_notification_configs(
        &self,
        request: tonic::Request<ListTaskPushNotificationConfigsRequest>,
    ) -> Answer<ListTaskPushNotificationConfigsResponse> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.list_push_configs(&call, &message))
    }

    async fn delete_task_push_notification_config(
        &self,
        request: tonic::Request<DeleteTaskPushNotificationConfigRequest>,
    ) -> Answer<Empty> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.delete_push_config(&call, &message).map(|()| Empty {}))
    }

    async fn get_extended_agent_card(&self, request: tonic::Request<GetExtendedAgentCardRequest>) -> Answer<AgentCard> {
        let (call, message) = self.call(request)?;
        finish(&call, self.operations.get_extended_card(&call, &message))
    }
}

/// A request that names a tenant.
trait Tenanted {
    fn tenant(&mut self) -> &mut String;
}

macro_rules! tenanted {
    ($($request:ty),*) => {$(
        impl Tenanted for $request {
            fn tenant(&mut self) -> &mut String {
                &mut self.tenant
            }
        }
    )*};
}

tenanted!(
    SendMessageRequest,
    GetTaskRequest,
    ListTasksRequest,
    CancelTaskRequest,
    SubscribeToTaskRequest,
    TaskPushNotificationConfig,
    GetTaskPushNotificationConfigRequest,
    ListTaskPushNotificationConfigsRequest,
    DeleteTaskPushNotificationConfigRequest,
    GetExtendedAgentCardRequest
);
