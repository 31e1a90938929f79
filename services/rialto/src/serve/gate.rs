//! task-store as this process reaches it and offers it, before and after its store is open.

use std::{
    convert::Infallible,
    fmt,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use rialto_a2a::Error;
use rialto_rpc::tasks::{self, Server, admin_server::AdminServer};
use rialto_task_store::TaskStore;
use tonic::{
    body::Body,
    codegen::{BoxFuture, Service, StdError},
};

/// How the paths of the calls of operators begin.
const ADMIN: &str = "/rialto.tasks.v1.Admin/";

/// A server that says UNAVAILABLE until there is one.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<OnceLock<Servers>>);

/// The two contracts of one service.
struct Servers {
    service: TaskStore,
    tasks: Server<TaskStore>,
    admin: AdminServer<TaskStore>,
}

impl Gate {
    /// From here on, calls are answered.
    pub(super) fn open(&self, service: TaskStore) {
        // A second one would be another view of the same store; the first one is as good.
        let (tasks, admin) = (tasks::server(service.clone()), tasks::admin_server(service.clone()));
        drop(self.0.set(Servers { service, tasks, admin }));
    }

    /// Waits, after the stop, until no runner needs what is behind it any more.
    pub(super) async fn runners_gone(&self) {
        if let Some(servers) = self.0.get() {
            servers.service.runners_gone().await;
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("open", &self.0.get().is_some()).finish()
    }
}

impl<B> Service<Request<B>> for Gate
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match self.0.get() {
            Some(servers) if request.uri().path().starts_with(ADMIN) => servers.admin.clone().call(request),
            Some(servers) => servers.tasks.clone().call(request),
            None => Box::pin(async { Ok(Error::unavailable().to_status().into_http()) }),
        }
    }
}
