//! Is the process alive, and can it serve: probes of the admin port, and the health service of gRPC.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
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
use uuid::Uuid;

/// Whoever needs longer cannot serve.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at a store or a task-store that is away.
const PACE: Duration = Duration::from_secs(1);
/// Between two looks at a store that answers, for those who watch the health of task-store.
const CALM: Duration = Duration::from_secs(2);

/// What a process needs in order to serve.
#[derive(Clone, Debug)]
pub(super) struct Needs {
    /// The store, once it is open; the outer `None` when the process needs no store.
    pub(super) store: Option<Arc<OnceLock<Arc<dyn Engine>>>>,
    /// Of another process or of this one; `None` when nothing here calls it.
    pub(super) tasks: Option<TaskStoreClient>,
    /// task-store served once.
    pub(super) served: Arc<AtomicBool>,
    pub(super) stop: CancellationToken,
}

/// The probes of the admin port.
pub(super) fn probes(needs: Needs) -> Router {
    Router::new()
        // Depends on nothing: a backend that is down must not restart every process.
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(needs)
}

/// A need that is not met.
struct Lack {
    what: &'static str,
    /// Another replica may be better off.
    unready: bool,
}

impl Lack {
    const fn of(what: &'static str) -> Self {
        Self { what, unready: true }
    }
}

/// 200 or 503, and which of the needs is the reason.
async fn readyz(State(needs): State<Needs>) -> (StatusCode, Json<Value>) {
    let (store, tasks) = tokio::join!(needs.check_store(), needs.check_tasks());
    let stopping = needs.stop.is_cancelled().then_some(Err(Lack::of("stopping")));
    let mut checks = Map::new();
    let mut ready = true;
    for (name, check) in [("store", store), ("task-store", tasks), ("process", stopping)] {
        if let Some(check) = check {
            ready &= !check.as_ref().is_err_and(|lack| lack.unready);
            checks.insert(name.to_owned(), check.err().map_or("ok", |lack| lack.what).into());
        }
    }
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"ready": ready, "checks": checks})))
}

impl Needs {
    async fn check_store(&self) -> Option<Result<(), Lack>> {
        let store = self.store.as_ref()?;
        Some(match store.get() {
            Some(engine) => check_engine(&**engine).await.map_err(Lack::of),
            None => Err(Lack::of("not open yet")),
        })
    }

    /// A task-store without its store is no reason to leave the cards and the errors of a gateway to nobody, once
    /// it is known that things are wired right.
    async fn check_tasks(&self) -> Option<Result<(), Lack>> {
        let check = check_task_store(self.tasks.clone()?).await;
        if check.is_ok() {
            self.served.store(true, Ordering::Relaxed);
        }
        Some(check.map_err(|what| Lack {
            what,
            unready: what != STORE_AWAY || self.store.is_some() || !self.served.load(Ordering::Relaxed),
        }))
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

/// task-store is there and cannot serve.
const STORE_AWAY: &str = "its store is not reachable";

/// Whether task-store serves.
async fn check_task_store(tasks: TaskStoreClient) -> Result<(), &'static str> {
    let knows_no_task = async |id: String| {
        let mut tasks = tasks.clone();
        let request = GetRequest { scope: Some(Scope::default()), id, history_length: Some(0) };
        match timeout(PATIENCE, tasks.get(request)).await {
            Ok(Err(status)) => Error::from_status(&status).kind == Kind::TaskNotFound,
            Ok(Ok(_)) => true,
            Err(_) => false,
        }
    };
    // Of the first it takes a look at the store to say so, of the second none.
    match tokio::join!(knows_no_task(Uuid::nil().to_string()), knows_no_task("readyz".to_owned())) {
        (true, _) => Ok(()),
        (false, true) => Err(STORE_AWAY),
        (false, false) => Err("not reachable"),
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
            sleep(if serving == Some(true) { CALM } else { PACE }).await;
        }
    };
    stop.run_until_cancelled(watching).await;
    set(ServingStatus::NotServing).await;
}
