//! `task-store`: the one place that knows what became of a message.
//!
//! Owns tasks, their conversations, the order of turns, and who may see which of it. Knows no wire, no agent and no
//! webhook, and of storage only the kernel's contract. Replicas share nothing but the store: any of them answers
//! for any task.

mod admin;
mod artifacts;
mod background;
mod cache;
mod cancel;
mod change;
mod grant;
mod keys;
mod list;
mod lost;
mod observe;
mod read;
mod reserve;
mod run;
mod runner;
mod send;
mod service;
mod store;
mod stored;
mod turn;
mod watch;

use std::{fmt, sync::Arc, time::Duration};

use rialto_store::{Engine, Millis};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::admin::{MAX_PAGE, is_dead_id, is_task_id};
use crate::{background::Pace, list::Seal, store::Store, turn::Rules};

/// What an operator may set.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long the events of an ended or waiting task can be read one by one; after that, readers get a snapshot.
    pub fold_after: Duration,
    /// How long a canceled turn keeps its context when its runner does not confirm.
    pub cancel_grace: Duration,
    /// How often overdue work is looked for. Costs one read per shard.
    pub due_period: Duration,
    /// How often turns whose run entry is gone are looked for, by one replica per shard.
    pub sweep_period: Duration,
    /// No context is forgotten earlier than this after its last use, whatever the agent's configuration says. Must
    /// stay well above the 20 s for which a replica may remember a context.
    pub min_context_idle: Duration,
    /// How long a client's name for a message (`Idempotency-Key`) counts after its first use.
    pub keep_names: Duration,
    /// Tasks, and contexts, that a replica remembers.
    pub cached_records: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            fold_after: Duration::from_secs(600),
            cancel_grace: Duration::from_secs(10),
            due_period: Duration::from_secs(2),
            sweep_period: Duration::from_secs(10),
            min_context_idle: Duration::from_secs(60),
            keep_names: Duration::from_secs(24 * 3600),
            cached_records: 16_384,
        }
    }
}

/// The service. Cheap to clone; all clones are one replica.
#[derive(Clone)]
pub struct TaskStore(Arc<Inner>);

struct Inner {
    store: Arc<Store>,
    rules: Rules,
    pace: Pace,
    seal: Seal,
    dead: admin::Counts,
    keep_names: Millis,
    /// Streams end when this is canceled; a child of whoever runs the background work.
    stop: CancellationToken,
    /// Those that wait for cancel orders here.
    runners: TaskTracker,
}

impl fmt::Debug for TaskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskStore").field("watched", &self.0.store.tails.len()).finish_non_exhaustive()
    }
}

impl TaskStore {
    /// A replica over a store. Serves at once; see [`Self::run_background`].
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>, options: &Options) -> Self {
        let rules = Rules {
            fold_after: turn::millis(options.fold_after),
            cancel_grace: turn::millis(options.cancel_grace),
            min_context_idle: turn::millis(options.min_context_idle),
        };
        Self(Arc::new(Inner {
            store: Arc::new(Store::new(engine, options.cached_records)),
            rules,
            pace: Pace { due: options.due_period, sweep: options.sweep_period },
            seal: Seal::default(),
            dead: admin::Counts::default(),
            keep_names: turn::millis(options.keep_names),
            stop: CancellationToken::new(),
            runners: TaskTracker::new(),
        }))
    }

    /// Starts what nobody asks for, as tasks of the tracker: listening for news of other replicas (without it
    /// followers look every 5 s), queueing lost turns again, and forgetting what is due. All of it, and every open
    /// stream but those of runners, ends when `stop` is canceled.
    pub fn run_background(&self, stop: &CancellationToken, tracker: &TaskTracker) {
        let inner = &self.0;
        background::start(&inner.store, &inner.rules, inner.pace, stop, tracker);
        let (stop, streams) = (stop.clone(), inner.stop.clone());
        tracker.spawn(async move {
            stop.cancelled().await;
            streams.cancel();
        });
    }

    /// Waits, after the stop, until no runner needs this replica any more. When everything is stopped at once, turns
    /// end and are handed back until then; a runner that goes on leaves for another replica.
    pub async fn runners_gone(&self) {
        self.0.runners.close();
        self.0.runners.wait().await;
    }
}
