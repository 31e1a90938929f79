//! Is the process alive, and can it serve: probes of the admin port, and the health service of gRPC.

use std::{sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{GetRequest, Scope, TaskStoreClient, task_store_server::SERVICE_NAME};
use rialto_store::Engine;
use serde_json::{Map, Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};
use tracing::{info, warn};
use uuid::Uuid;

/// Whoever needs longer cannot serve.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at what is away: doubles from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// Between two looks at a store that answers.
const CALM_STORE: Duration = Duration::from_secs(4);
/// Between two looks at a task-store that serves. It asks its store each time, for every process that looks.
const CALM_TASKS: Duration = Duration::from_secs(10);
/// What was found longer ago is not known any more: the looks stand still, as after SIGSTOP.
const STALE: Duration = Duration::from_secs(30);

/// What a process needs in order to serve, as far as that is known.
#[derive(Clone, Debug)]
pub(super) struct Needs {
    /// `None` when the process needs no store.
    pub(super) store: Option<Known>,
    /// task-store, of another process or of this one; `None` when nothing here calls it.
    pub(super) tasks: Option<Known>,
    pub(super) stop: CancellationToken,
}

/// What the last look at something found. Whoever asks is answered at once, also when a look takes its time.
#[derive(Clone, Debug, Default)]
pub(super) struct Known(Arc<watch::Sender<Option<Found>>>);

#[derive(Clone, Copy, Debug)]
struct Found {
    at: Instant,
    result: Result<(), &'static str>,
    /// It was well once.
    once: bool,
}

impl Known {
    fn note(&self, result: Result<(), &'static str>) {
        self.0.send_modify(|found| {
            let once = result.is_ok() || found.is_some_and(|found| found.once);
            *found = Some(Found { at: Instant::now(), result, once });
        });
    }

    /// What is wrong, if anything; `unseen` before the first look is over.
    fn result(&self, unseen: &'static str) -> Result<(), &'static str> {
        match *self.0.borrow() {
            None => Err(unseen),
            Some(found) if found.at.elapsed() > STALE => Err("not known at the moment"),
            Some(found) => found.result,
        }
    }

    fn was_well(&self) -> bool {
        self.0.borrow().is_some_and(|found| found.once)
    }

    /// Looks again and again.
    async fn look<F>(&self, calm: Duration, mut look: impl FnMut() -> F)
    where
        F: Future<Output = Result<(), &'static str>>,
    {
        let mut pause = PAUSES.0;
        loop {
            let found = look().await;
            self.note(found);
            if found.is_ok() {
                pause = PAUSES.0;
                sleep(calm).await;
            } else {
                sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }

    /// Waits until task-store is well; says whether it was before the stop.
    pub(super) async fn tasks_are_served(&self, stop: &CancellationToken) -> bool {
        let mut found = self.0.subscribe();
        let waiting = async {
            let mut told = false;
            loop {
                match found.borrow_and_update().map(|found| found.result) {
                    Some(Ok(())) => break,
                    Some(Err(problem)) if !told => {
                        warn!(problem, "task-store is needed before turns are taken; waiting for it");
                        told = true;
                    }
                    _ => {}
                }
                // There is always a sender: this has it.
                drop(found.changed().await);
            }
            if told {
                info!("task-store answers");
            }
        };
        stop.run_until_cancelled(waiting).await.is_some()
    }
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
    let (store, tasks) = (needs.check_store(), needs.check_tasks());
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
    fn check_store(&self) -> Option<Result<(), Lack>> {
        Some(self.store.as_ref()?.result("not open yet").map_err(Lack::of))
    }

    /// A task-store without its store is no reason to leave the cards and the errors of a gateway to nobody, once
    /// it is known that things are wired right.
    fn check_tasks(&self) -> Option<Result<(), Lack>> {
        let tasks = self.tasks.as_ref()?;
        let unready = |what| what != STORE_AWAY || self.store.is_some() || !tasks.was_well();
        Some(tasks.result("not asked yet").map_err(|what| Lack { what, unready: unready(what) }))
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

/// Keeps up what is known of task-store, until the stop.
pub(super) async fn watch_tasks(tasks: TaskStoreClient, known: Known, stop: CancellationToken) {
    stop.run_until_cancelled(known.look(CALM_TASKS, || check_task_store(tasks.clone()))).await;
}

/// Keeps up what is known of the store, and the health service of gRPC: SERVING while the store answers, until the stop.
pub(super) async fn watch_store(
    engine: Arc<dyn Engine>,
    known: Known,
    reporter: HealthReporter,
    stop: CancellationToken,
) {
    let set = async |status| {
        for service in ["", SERVICE_NAME] {
            reporter.set_service_status(service, status).await;
        }
    };
    let mut found = known.0.subscribe();
    let reporting = async {
        let mut serving = None;
        // There is always a sender: `known` has it.
        while found.changed().await.is_ok() {
            let Some(Found { result, .. }) = *found.borrow_and_update() else { continue };
            if serving != Some(result.is_ok()) {
                serving = Some(result.is_ok());
                match result {
                    Ok(()) => set(ServingStatus::Serving).await,
                    Err(problem) => {
                        warn!(problem, "the store is away; not serving");
                        set(ServingStatus::NotServing).await;
                    }
                }
            }
        }
    };
    let looking = known.look(CALM_STORE, || check_engine(&*engine));
    stop.run_until_cancelled(async { tokio::join!(looking, reporting) }).await;
    set(ServingStatus::NotServing).await;
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[test]
    fn what_was_found_long_ago_is_not_known_any_more() {
        let known = Known::default();
        assert_eq!((known.result("unseen"), known.was_well()), (Err("unseen"), false));
        known.note(Err("away"));
        assert_eq!((known.result("unseen"), known.was_well()), (Err("away"), false));
        known.note(Ok(()));
        assert_eq!(known.result("unseen"), Ok(()));
        known.note(Err("away"));
        assert!(known.was_well());
        known.note(Ok(()));
        known.0.send_modify(|found| {
            if let Some(found) = found {
                found.at = found.at.checked_sub(STALE).unwrap();
            }
        });
        assert_eq!(known.result("unseen"), Err("not known at the moment"));
    }

    #[tokio::test]
    async fn looks_are_frequent_while_something_is_away_and_rare_while_it_is_not() {
        let (known, mut looks) = (Known::default(), 0);
        let looking = known.look(Duration::from_secs(3600), || {
            looks += 1;
            ready(if looks < 4 { Err("away") } else { Ok(()) })
        });
        let stop = CancellationToken::new();
        let served = timeout(Duration::from_secs(10), known.tasks_are_served(&stop));
        tokio::select! {
            () = looking => unreachable!("it never ends"),
            served = served => assert_eq!(served, Ok(true)),
        }
        assert_eq!((looks, known.result("unseen")), (4, Ok(())));
    }
}
