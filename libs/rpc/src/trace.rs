//! One trace over all hops: each call is a span at the one end and a span at the other.
//!
//! Both last until the answer begins, which for a stream is long before its end. A call that belongs to no trace,
//! such as a heartbeat, has no spans.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use http::{Request, Response};
use rialto_runtime::telemetry::trace::{self, TARGET};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{BoxFuture, Service},
    server::NamedService,
};
use tracing::{Instrument as _, Span, field::Empty, trace_span};

/// The span of a call that leaves, which it is told.
pub(crate) fn client(request: &mut Request<Body>) -> Span {
    let span = trace::child(|| call("client", request.uri().path()));
    if let Some(context) = span.in_scope(trace::current).filter(|_| !span.is_disabled()) {
        trace::inject(&context, request.headers_mut());
    }
    span
}

/// The span of a call that arrives.
fn server<B>(request: &Request<B>) -> Span {
    if !trace::is_on() {
        return Span::none();
    }
    let Some(caller) = trace::extract(request.headers()) else { return Span::none() };
    trace::under(|| Some(caller), || call("server", request.uri().path()))
}

/// One end of a call to `/package.Service/Method`.
fn call(kind: &'static str, path: &str) -> Span {
    let name = path.trim_start_matches('/');
    let (service, method) = name.split_once('/').unwrap_or_default();
    trace_span!(
        target: TARGET,
        "call",
        otel.name = name,
        otel.kind = kind,
        otel.status_code = Empty,
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        rpc.grpc.status_code = Empty,
    )
}

/// Notes in the span of a call how its answer began; `None` = there is none.
pub(crate) fn answered<B>(span: &Span, response: Option<&Response<B>>) {
    let code = match response {
        Some(response) => Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()),
        None => Code::Unavailable,
    };
    span.record("rpc.grpc.status_code", i32::from(code));
    if matches!(code, Code::Unknown | Code::Internal | Code::Unavailable | Code::DeadlineExceeded) {
        span.record("otel.status_code", "error");
    }
}

/// A server whose calls are part of their callers' traces.
#[derive(Clone, Debug)]
pub struct Traced<S>(S);

impl<S> Traced<S> {
    pub(crate) const fn new(server: S) -> Self {
        Self(server)
    }
}

impl<S: NamedService> NamedService for Traced<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<Request<B>> for Traced<S>
where
    S: Service<
            Request<B>,
            Response = Response<Body>,
            Error = Infallible,
            Future = BoxFuture<Response<Body>, Infallible>,
        >,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let span = server(&request);
        if span.is_disabled() {
            return self.0.call(request);
        }
        let call = span.in_scope(|| self.0.call(request));
        let noted = span.clone();
        let traced = async move {
            let answer = call.await;
            answered(&noted, answer.as_ref().ok());
            answer
        };
        Box::pin(traced.instrument(span))
    }
}
