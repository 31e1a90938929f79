//! Runs agents: claims their turns, hands each to a backend, and stores what the backend says.
//!
//! This service owns slots, attempts, fences, deadlines, cancellation and the mapping from a backend's events to
//! A2A events (design §6). It knows no client binding and keeps nothing: what a turn needs comes from task-store,
//! what becomes of it goes there.

pub mod backend;
mod calls;
mod grants;
mod held;
mod observe;
mod scribe;
mod turn;

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use rialto_rpc::tasks::{ControlRequest, HeartbeatRequest, HeldTurn, Outcome as Answer, TaskStoreClient};
use rialto_runtime::config;
use rialto_store::{
    Engine,
    worker::{self, Handler, Outcome, Verdict, Work, Worker, consumer_name},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use self::{backend::Backend, held::Held, observe::Figures, turn::Turns};

/// What a runner is to do.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// The agents whose turns it takes.
    pub agents: Vec<config::Agent>,
    /// How long a stopping runner lets turns end. What still runs then is handed back, for another runner.
    pub stop_grace: Duration,
}

/// After the grace: time to hand turns back.
const HAND_BACK: Duration = Duration::from_secs(3);
/// A replica of task-store that stops waits for runners that stop as well; whoever stops everything at once does not
/// do it at the same instant.
const STOPPING_TOO: Duration = Duration::from_millis(500);

/// Hosts agents until `stop`; returns when their turns have ended or are handed back.
///
/// # Errors
/// When the section of an agent cannot work; nothing was started then.
pub async fn run(
    options: RunnerOptions,
    engine: Arc<dyn Engine>,
    tasks: TaskStoreClient,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let opened = options.agents.iter().map(backend::open).collect::<anyhow::Result<Vec<_>>>()?;
    run_with(options.agents.into_iter().zip(opened).collect(), options.stop_grace, engine, tasks, stop).await;
    Ok(())
}

/// As [`run`], with backends of the caller's own.
pub async fn run_with(
    agents: Vec<(config::Agent, Arc<dyn Backend>)>,
    stop_grace: Duration,
    engine: Arc<dyn Engine>,
    tasks: TaskStoreClient,
    stop: CancellationToken,
) {
    let consumer = consumer_name("runner");
    let held = Held::default();
    let grace_over = CancellationToken::new();
    info!(consumer, agents = agents.len(), "the runner takes turns");

    let workers = join_all(agents.into_iter().map(|(agent, backend)| {
        let worker = Worker {
            engine: engine.clone(),
            streams: (0..engine.shards()).map(|shard| (shard, format!("runs:{}", agent.id))).collect(),
            consumer: consumer.clone(),
            slots: agent.max_concurrent,
            lease: agent.lease.0,
            heartbeat: agent.lease.0 / 3,
            // Nothing here delays entries; task-store moves what it delayed.
            tick: None,
        };
        let (client, held, grace_over) = (tasks.clone(), held.clone(), grace_over.clone());
        let grants = grants::pass_on(agent.id.clone(), Arc::clone(&backend), tasks.clone());
        let figures = Figures::new(&agent.id);
        let slots = figures.open(agent.max_concurrent);
        let turns = Turns { agent, backend: backend.clone(), client, held, figures, grace_over };
        let stop = stop.clone();
        async move {
            tokio::select! {
                () = worker.run(Arc::new(turns), stop, stop_grace + HAND_BACK) => {}
                () = grants => {}
            }
            backend.close().await;
            drop(slots);
        }
    }));
    let grace = async {
        stop.cancelled().await;
        sleep(stop_grace).await;
        grace_over.cancel();
        std::future::pending::<()>().await
    };
    tokio::select! {
        _ = workers => {}
        () = obey(&consumer, &held, tasks.clone(), &stop) => {}
        () = grace => {}
    }
}

/// Passes on cancel orders, for ever. Those that get lost come with a heartbeat.
async fn obey(consumer: &str, held: &Held, mut tasks: TaskStoreClient, stop: &CancellationToken) {
    let mut pauses = calls::pauses();
    loop {
        match tasks.control(ControlRequest { consumer: consumer.to_owned() }).await {
            Ok(orders) => {
                let mut orders = orders.into_inner();
                while let Ok(Some(order)) = orders.message().await {
                    pauses = calls::pauses();
                    if !order.stopping {
                        held.cancel(&order);
                    } else if timeout(STOPPING_TOO, stop.cancelled()).await.is_err() {
                        break;
                    }
                }
                debug!("the stream of cancel orders ended, opening it again");
            }
            Err(status) => debug!(%status, "no stream of cancel orders, trying again"),
        }
        sleep(pauses.next().unwrap_or(HAND_BACK)).await;
    }
}

#[async_trait::async_trait]
impl Handler for Turns {
    async fn handle(&self, work: Work) -> Outcome {
        self.work(&work).await
    }

    /// task-store shows the sign of life, and knows which attempt counts and what was canceled. While it is away,
    /// the store is asked directly: no turn is lost because of that.
    async fn heartbeat(&self, engine: &dyn Engine, held: &[worker::Held]) -> rialto_store::Result<Vec<Verdict>> {
        let turns: Vec<_> = held.iter().map(|held| self.held.turn(&held.claimed)).collect();
        let begun: Vec<HeldTurn> = turns.iter().flatten().cloned().collect();
        let mut client = self.client.clone();
        let told = match begun.is_empty() {
            true => Vec::new(),
            false => {
                // Short enough for the other way, should this one fail.
                match timeout(self.agent.lease.0 / 6, client.heartbeat(HeartbeatRequest { turns: begun })).await {
                    Ok(Ok(reply)) => reply.into_inner().outcomes().collect(),
                    Ok(Err(status)) => {
                        debug!(%status, "task-store does not answer a heartbeat");
                        Vec::new()
                    }
                    Err(_) => Vec::new(),
                }
            }
        };
        let mut told = told.into_iter();
        let told: Vec<Option<Answer>> = turns.iter().map(|turn| turn.as_ref().and_then(|_| told.next())).collect();
        let unknown: Vec<_> =
            held.iter().zip(&told).filter(|(_, told)| told.is_none()).map(|(held, _)| held.clone()).collect();
        let mut unknown = match unknown.is_empty() {
            true => Vec::new(),
            false => worker::heartbeat(engine, &unknown).await?,
        }
        .into_iter();
        let verdict = |told| match told {
            Some(Answer::Ok) => Verdict::Owned,
            Some(Answer::Canceled) => Verdict::Canceled,
            Some(Answer::Fenced) => Verdict::Lost,
            None => unknown.next().unwrap_or(Verdict::Owned),
        };
        Ok(told.into_iter().map(verdict).collect())
    }
}
