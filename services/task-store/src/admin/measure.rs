//! The queues as metrics (`docs/telemetry.md`): the figures of `Queues`, kept up to date for whoever reads them.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use opentelemetry::{KeyValue, metrics::AsyncInstrument};
use rialto_rpc::tasks::{AgentRef, Queue};
use rialto_runtime::telemetry;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::debug;

use crate::TaskStore;

/// How old figures get when nobody reads them.
const PACE: Duration = Duration::from_secs(15);

/// Shortest time between two looks, however often somebody reads.
const REST: Duration = Duration::from_secs(1);

/// The newest figures, and when they were taken. Empty when the store did not answer.
#[derive(Debug, Default)]
struct Figures {
    newest: Mutex<Option<(Instant, Vec<Queue>)>>,
    /// Somebody read them.
    read: Notify,
}

impl Figures {
    /// Tells something about each queue.
    fn each(&self, tell: impl Fn(&Queue, Duration) -> Option<u64>, to: &dyn AsyncInstrument<u64>) {
        self.read.notify_one();
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((taken, queues)) = &*newest else { return };
        for queue in queues {
            if let Some(figure) = tell(queue, taken.elapsed()) {
                to.observe(figure, &[KeyValue::new("agent", queue.agent.clone())]);
            }
        }
    }
}

impl TaskStore {
    /// Makes metrics of the queues of these agents, once per process. All replicas tell the same.
    pub fn measure_queues(&self, agents: Vec<AgentRef>, stop: &CancellationToken, tracker: &TaskTracker) {
        let figures = Arc::new(Figures::default());
        register(&figures);
        let (this, stop) = (self.clone(), stop.clone());
        tracker.spawn(async move {
            let looking = async {
                loop {
                    let queues = this.0.queues(&agents).await;
                    if let Err(error) = &queues {
                        debug!(%error, "the queues cannot be measured");
                    }
                    let newest = queues.ok().map(|queues| (Instant::now(), queues));
                    *figures.newest.lock().unwrap_or_else(PoisonError::into_inner) = newest;
                    sleep(REST).await;
                    // Whoever reads in regular intervals finds them fresh next time.
                    drop(timeout(PACE - REST, figures.read.notified()).await);
                }
            };
            stop.run_until_cancelled(looking).await;
        });
    }
}

/// A metric: name, unit, description, and what it is.
type Gauge = (&'static str, &'static str, &'static str, fn(&Queue, Duration) -> Option<u64>);

const GAUGES: [Gauge; 7] = [
    ("rialto.queue.length", "{turn}", "Turns that wait for a runner or run", |queue, _| Some(queue.length)),
    ("rialto.queue.lag", "{turn}", "Turns that no runner has claimed", |queue, _| Some(queue.lag)),
    ("rialto.queue.pending", "{turn}", "Turns that a runner has claimed", |queue, _| Some(queue.pending)),
    ("rialto.queue.delayed", "{entry}", "Entries that join the queue later", |queue, _| Some(queue.delayed)),
    ("rialto.queue.dead", "{entry}", "Entries that were given up", |queue, _| Some(queue.dead)),
    ("rialto.queue.runners", "{runner}", "Runners that are alive", |queue, _| Some(queue.runners.into())),
    ("rialto.queue.oldest.age", "s", "Age of the oldest turn that no runner has claimed", |queue, since| {
        Some(queue.oldest_ms.map_or(0, |ms| (Duration::from_millis(ms) + since).as_secs()))
    }),
];

fn register(figures: &Arc<Figures>) {
    let meter = telemetry::meter();
    for (name, unit, description, tell) in GAUGES {
        let figures = Arc::clone(figures);
        let gauge = meter.u64_observable_gauge(name).with_unit(unit).with_description(description);
        // The provider keeps it.
        let _gauge = gauge.with_callback(move |to| figures.each(tell, to)).build();
    }
}
