//! Is the process alive, and can it serve: the admin port, and the health service of gRPC.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{GetRequest, Scope, TaskStoreClient, task_store_server::SERVICE_NAME};
use rialto_store::Engine;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};
use tracing::{info, warn};

/// Whoever needs longer cannot serve.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at the store, for those who watch the health of task-store.
const PACE: Duration = Duration::from_secs(1);

/// What a process needs in order to serve.
#[derive(Clone, Debug)]
pub(super) struct Needs {
    /// The store, once it is open; the outer `None` when the process needs no store.
    pub(super) store: Option<Arc<OnceLock<Arc<dyn Engine>>>>,
    /// Of another process or of this one; `None` when nothing here calls it.
    pub(super) tasks: Option<TaskStoreClient>,
    pub(super) stop: CancellationToken,
}

/// What the admin port serves.
pub(super) fn admin(needs: Needs) -> Router {
    Router::new()
        // Depends on nothing: a backend that is down must not restart every process.
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(needs)
}

/// 200 or 503, and which of the needs is the reason.
async fn readyz(State(needs): State<Needs>) -> (StatusCode, Json<Value>) {
    let (store, tasks) = tokio::join!(needs.check_store(), needs.check_tasks());
    let mut checks = Map::new();
    let mut ready = true;
    for (name, check) in [("store", store), ("task-store", tasks)] {
        if let Some(check) = check {
            ready &= check.is_ok();
            checks.insert(name.to_owned(), check.err().unwrap_or("ok").into());
        }
    }
    if needs.stop.is_cancelled() {
        ready = false;
        checks.insert("process".to_owned(), "stopping".into());
    }
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"ready": ready, "checks": checks})))
}

impl Needs {
    async fn check_store(&self) -> Option<Result<(), &'static str>> {
        let store = self.store.as_ref()?;
        Some(match store.get() {
            Some(engine) => check_engine(&**engine).await,
            None => Err("not open yet"),
        })
    }

    async fn check_tasks(&self) -> Option<Result<(), &'static str>> {
        Some(check_task_store(self.tasks.clone()?).await)
    }
}

/// Whether the store answers.
async fn check_engine(engine: &dyn Engine) -> Result<(), &'static str> {
    match timeout(PATIENCE, engine.get(0, &["readyz"])).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err("not reachable"),
        Err(_) => Err("does not answer"),
    }
}

/// Whether task-store answers.
async fn check_task_store(mut tasks: TaskStoreClient) -> Result<(), &'static str> {
    // An id that names no task costs no read; whoever says so is there.
    let nobody = GetRequest { scope: Some(Scope::default()), id: "readyz".to_owned(), history_length: Some(0) };
    match timeout(PATIENCE, tasks.get(nobody)).await {
        Ok(Err(status)) if Error::from_status(&status).kind != Kind::TaskNotFound => Err("not reachable"),
        Ok(_) => Ok(()),
        Err(_) => Err("does not answer"),
    }
}

/// Waits until task-store answers; says whether it did before the stop.
pub(super) async fn task_store_answers(tasks: &TaskStoreClient, stop: &CancellationToken) -> bool {
    let mut told = false;
    let waiting = async {
        while let Err(problem) = check_task_store(tasks.clone()).await {
            if !told {
                warn!(problem, "task-store is needed before turns are taken; waiting for it");
                told = true;
            }
            sleep(PACE).await;
        }
        if told {
            info!("task-store answers");
        }
    };
    stop.run_until_cancelled(waiting).await.is_some()
}

/// Keeps the health service of gRPC true: SERVING while the store answers, until the stop.
pub(super) async fn report(engine: Arc<dyn Engine>, reporter: HealthReporter, stop: CancellationToken) {
    let set = async |status| {
        for service in ["", SERVICE_NAME] {
            reporter.set_service_status(service, status).await;
        }
    };
    let mut serving = None;
    let watching = async {
        loop {
            let answers = check_engine(&*engine).await;
            if serving != Some(answers.is_ok()) {
                serving = Some(answers.is_ok());
                match answers {
                    Ok(()) => set(ServingStatus::Serving).await,
                    Err(problem) => {
                        warn!(problem, "the store is away; not serving");
                        set(ServingStatus::NotServing).await;
                    }
                }
            }
            sleep(PACE).await;
        }
    };
    stop.run_until_cancelled(watching).await;
    set(ServingStatus::NotServing).await;
}
