//! The admin port: is the process alive, and can it serve.

use std::time::Duration;

use axum::{Router, extract::State, http::StatusCode, routing::get};
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{GetRequest, Scope, TaskStoreClient};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// A task-store that needs longer cannot serve.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Probes {
    tasks: TaskStoreClient,
    stop: CancellationToken,
}

pub(crate) fn router(tasks: TaskStoreClient, stop: CancellationToken) -> Router {
    Router::new()
        // Depends on nothing: a backend that is down must not restart every process.
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Probes { tasks, stop })
}

async fn ready(State(mut probes): State<Probes>) -> (StatusCode, &'static str) {
    if probes.stop.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "stopping\n");
    }
    // An id that names no task costs no read; whoever says so is there.
    let nobody = GetRequest { scope: Some(Scope::default()), id: "readyz".to_owned(), history_length: Some(0) };
    match timeout(PATIENCE, probes.tasks.get(nobody)).await {
        Ok(Err(status)) if Error::from_status(&status).kind != Kind::TaskNotFound => {
            warn!(%status, "task-store is not ready");
            (StatusCode::SERVICE_UNAVAILABLE, "task-store is not reachable\n")
        }
        Ok(_) => (StatusCode::OK, "ok\n"),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "task-store does not answer\n"),
    }
}
