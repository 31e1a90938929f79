//! What the gateway tells about requests: a span and some figures each (`docs/telemetry.md`).
//!
//! Names come from closed lists: whatever a client makes up, a path, a method or an id, is `unknown`.

use std::sync::LazyLock;

use axum::{
    body::Body,
    http::{Request, Response},
};
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
};
use rialto_a2a::{Error, Kind};
use rialto_runtime::telemetry::{self, trace};
use tokio::time::Instant;
use tonic::{Code, Status};
use tracing::{Instrument as _, Span, field::Empty, trace_span};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation(&'static str);

/// Span names; what comes after the space is the name in metrics.
const NAMES: [&str; 15] = [
    "a2a SendMessage",
    "a2a SendStreamingMessage",
    "a2a GetTask",
    "a2a ListTasks",
    "a2a CancelTask",
    "a2a SubscribeToTask",
    "a2a CreateTaskPushNotificationConfig",
    "a2a GetTaskPushNotificationConfig",
    "a2a ListTaskPushNotificationConfigs",
    "a2a DeleteTaskPushNotificationConfig",
    "a2a GetExtendedAgentCard",
    "a2a AgentCard",
    "a2a Health",
    "a2a Preflight",
    "a2a unknown",
];

impl Operation {
    /// By the name that JSON-RPC 1.0 and gRPC have for it.
    pub(crate) fn new(name: &str) -> Self {
        let known = NAMES.iter().find(|known| known[4..] == *name);
        Self(known.unwrap_or(&NAMES[14]))
    }

    fn name(self) -> &'static str {
        &self.0[4..]
    }

    /// Notes in a response what it answers.
    pub(crate) fn note(self, response: &mut Response<Body>) {
        response.extensions_mut().insert(self);
    }
}

/// How a request came in.
#[derive(Clone, Copy, Debug)]
struct Binding(&'static str);

/// Notes in a response how its request came in: `jsonrpc`, `rest` or `grpc`.
pub(crate) fn by(binding: &'static str, mut response: Response<Body>) -> Response<Body> {
    response.extensions_mut().insert(Binding(binding));
    response
}

/// Notes in a response what it refuses.
pub(crate) fn refused(kind: Kind, response: &mut Response<Body>) {
    response.extensions_mut().insert(kind);
}

struct Meters {
    requests: Counter<u64>,
    duration: Histogram<f64>,
    streams: UpDownCounter<i64>,
    events: Counter<u64>,
}

static METERS: LazyLock<Meters> = LazyLock::new(|| {
    let meter = telemetry::meter();
    Meters {
        requests: meter
            .u64_counter("rialto.gateway.requests")
            .with_unit("{request}")
            .with_description("Requests, by how they were answered")
            .build(),
        duration: meter
            .f64_histogram("rialto.gateway.request.duration")
            .with_unit("s")
            .with_description("From a request to the beginning of its answer")
            .with_boundaries(telemetry::SECONDS.to_vec())
            .build(),
        streams: meter
            .i64_up_down_counter("rialto.gateway.streams")
            .with_unit("{stream}")
            .with_description("Open event streams")
            .build(),
        events: meter
            .u64_counter("rialto.gateway.events")
            .with_unit("{event}")
            .with_description("Events sent on streams")
            .build(),
    }
});

/// Answers a request within a span that continues the client's trace, or begins one.
pub(crate) async fn observed<F>(request: Request<Body>, answer: impl FnOnce(Request<Body>) -> F) -> Response<Body>
where
    F: Future<Output = Response<Body>>,
{
    let started = Instant::now();
    let span = trace::under(
        || trace::extract(request.headers()),
        || {
            trace_span!(
                target: trace::TARGET,
                "a2a unknown",
                otel.kind = "server",
                otel.status_code = Empty,
                a2a.binding = Empty,
                http.request.method = request.method().as_str(),
                http.response.status_code = Empty,
                error.type = Empty,
            )
        },
    );
    let noted = span.clone();
    let answering = async move {
        let response = answer(request).await;
        note(&noted, started, &response);
        response
    };
    answering.instrument(span).await
}

fn note(span: &Span, started: Instant, response: &Response<Body>) {
    let extensions = response.extensions();
    let operation = extensions.get().copied().unwrap_or(Operation(NAMES[14]));
    let binding = extensions.get().map_or("http", |Binding(name)| name);
    let refused = extensions.get::<Kind>().copied().or_else(|| match binding {
        "grpc" => Status::from_header_map(response.headers())
            .filter(|status| status.code() != tonic::Code::Ok)
            .map(|status| kind(&status)),
        _ => None,
    });
    let outcome = refused.map_or("ok", |kind| kind.wire().reason);
    METERS.requests.add(
        1,
        &[
            KeyValue::new("operation", operation.name()),
            KeyValue::new("binding", binding),
            KeyValue::new("outcome", outcome),
        ],
    );
    METERS.duration.record(started.elapsed().as_secs_f64(), &[KeyValue::new("operation", operation.name())]);
    if span.is_disabled() {
        return;
    }
    trace::rename(operation.0);
    span.record("a2a.binding", binding);
    span.record("http.response.status_code", response.status().as_u16());
    if let Some(kind) = refused {
        span.record("error.type", outcome);
        if kind.wire().http >= 500 {
            span.record("otel.status_code", "error");
        }
    }
}

/// What a status refuses. Those of the health service carry no reason; what they say is not the gateway's fault.
fn kind(status: &Status) -> Kind {
    match (Error::from_status(status).kind, status.code()) {
        (Kind::Internal, Code::NotFound) => Kind::MethodNotFound,
        (Kind::Internal, Code::InvalidArgument | Code::FailedPrecondition) => Kind::InvalidRequest,
        (Kind::Internal, Code::Unauthenticated) => Kind::Unauthenticated,
        (Kind::Internal, Code::PermissionDenied) => Kind::Forbidden,
        (kind, _) => kind,
    }
}

/// An open stream. Its request's span lasts as long.
#[derive(Debug)]
pub(crate) struct OpenStream {
    _request: Span,
}

impl OpenStream {
    pub(crate) fn new() -> Self {
        METERS.streams.add(1, &[]);
        Self { _request: Span::current() }
    }

    /// An event is sent.
    #[expect(clippy::unused_self, reason = "only open streams send events")]
    pub(crate) fn count(&self) {
        METERS.events.add(1, &[]);
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        METERS.streams.add(-1, &[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_health_check_of_an_unknown_service_is_not_our_fault() {
        assert_eq!(kind(&Status::not_found("service not registered")), Kind::MethodNotFound);
        assert_eq!(kind(&Error::from(Kind::TaskNotFound).to_status()), Kind::TaskNotFound);
        assert_eq!(kind(&Status::internal("bug")), Kind::Internal);
    }
}
