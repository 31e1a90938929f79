use std::{
    convert::Infallible,
    fmt,
    task::{Context, Poll},
};

use tonic::{
    body::Body,
    codegen::{BoxFuture, Service, StdError},
};
use tower::{ServiceExt as _, util::BoxCloneSyncService};
use tracing::Instrument as _;

use crate::trace;

/// The largest message of any internal call: a task at its size limit (16 MiB), with room for its envelope.
pub const MAX_MESSAGE_BYTES: usize = 24 << 20;

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// How a client reaches a service: in memory or over the network. Cheap to clone.
#[derive(Clone)]
pub struct Transport(BoxCloneSyncService<Request, Response, StdError>);

impl Transport {
    /// Calls a server in this process, without a socket.
    pub fn in_memory<S>(server: S) -> Self
    where
        S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        Self::new(server.map_err(|never| match never {}))
    }

    pub(crate) fn new<S>(service: S) -> Self
    where
        S: Service<Request, Response = Response, Error = StdError> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        Self(BoxCloneSyncService::new(service))
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transport")
    }
}

impl Service<Request> for Transport {
    type Response = Response;
    type Error = StdError;
    type Future = BoxFuture<Response, StdError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let span = trace::client(&mut request);
        let call = self.0.call(request);
        if span.is_disabled() {
            return call;
        }
        let noted = span.clone();
        let traced = async move {
            let answer = call.await;
            trace::answered(&noted, answer.as_ref().ok());
            answer
        };
        Box::pin(traced.instrument(span))
    }
}
