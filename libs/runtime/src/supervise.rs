//! The life of a process: tasks that belong to it, the signal that ends it, the time that it has for that.

use std::{
    fmt,
    future::Future,
    io,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::FutureExt as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The tasks that a process consists of. Clones are the same supervisor.
///
/// A part that fails takes the process down in order: a process that limps along without one of its parts
/// answers health checks and does no work.
#[derive(Clone, Debug, Default)]
pub struct Supervisor {
    tracker: TaskTracker,
    stop: CancellationToken,
    failure: Arc<OnceLock<String>>,
}

/// Why a process ended other than by request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A part of it failed.
    #[error("{0}")]
    Part(String),
    /// Its parts did not end in the time that they had.
    #[error("stopped before all work had ended, after {} ms", .0.as_millis())]
    Grace(Duration),
}

impl Supervisor {
    /// Without tasks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancelled when the process is to end. Parts watch it.
    #[must_use]
    pub fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// For parts that spawn tasks of their own; the process ends after them.
    #[must_use]
    pub fn tracker(&self) -> TaskTracker {
        self.tracker.clone()
    }

    /// Runs a part of the process. An error or a panic of it, or its end before the stop, ends the process.
    pub fn part<F, E>(&self, name: &'static str, part: F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display,
    {
        let this = self.clone();
        self.tracker.spawn(async move {
            let failure = match std::panic::AssertUnwindSafe(part).catch_unwind().await {
                Ok(Ok(())) if this.stop.is_cancelled() => return,
                Ok(Ok(())) => format!("{name} ended by itself"),
                Ok(Err(error)) => format!("{name}: {error}"),
                Err(_) => format!("{name} panicked"),
            };
            tracing::error!(%failure, "a part of the process failed; stopping");
            // The first one is the reason; later ones follow from it.
            drop(this.failure.set(failure));
            this.stop.cancel();
        });
    }

    /// Waits for the stop, then for all tasks, at most for `grace`.
    ///
    /// # Errors
    /// The part that failed, or that time ran out.
    pub async fn run(self, grace: Duration) -> Result<(), Failure> {
        self.stop.cancelled().await;
        self.tracker.close();
        let ended = tokio::time::timeout(grace, self.tracker.wait()).await;
        match (self.failure.get(), ended) {
            (Some(failure), _) => Err(Failure::Part(failure.clone())),
            (None, Err(_)) => Err(Failure::Grace(grace)),
            (None, Ok(())) => Ok(()),
        }
    }
}

/// SIGTERM and SIGINT. The first asks the process to end, the second to do so at once.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes over both signals; from here on they no longer kill.
    ///
    /// # Errors
    /// The system refuses handlers.
    pub fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Cancels `stop` at the first signal, and returns at the second: with the exit code of a process that waits for
    /// nothing any more, 128 + the signal's number, as a shell would report it.
    ///
    /// It does not exit by itself: what tasks hold, such as processes that they started, ends when they are dropped,
    /// which is up to the owner of the runtime.
    pub async fn watch(mut self, stop: CancellationToken) -> u8 {
        let (name, _) = self.next().await;
        tracing::info!(signal = name, "stopping; once more to stop at once");
        stop.cancel();
        let (name, code) = self.next().await;
        tracing::warn!(signal = name, "stopped at once");
        code
    }

    async fn next(&mut self) -> (&'static str, u8) {
        tokio::select! {
            _ = self.terminate.recv() => ("SIGTERM", 143),
            _ = self.interrupt.recv() => ("SIGINT", 130),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn ends_when_asked_to_and_all_parts_have_ended() {
        let supervisor = Supervisor::new();
        let stop = supervisor.stop();
        supervisor.part("reader", {
            let stop = stop.clone();
            async move {
                stop.cancelled().await;
                Ok::<_, String>(())
            }
        });
        stop.cancel();
        assert_eq!(supervisor.run(GRACE).await, Ok(()));
    }

    #[tokio::test]
    async fn a_failed_part_stops_the_others_and_is_the_reason() {
        let supervisor = Supervisor::new();
        let stop = supervisor.stop();
        supervisor.part("waiter", async move {
            stop.cancelled().await;
            Err("because of the other")
        });
        supervisor.part("writer", async { Err("disk full") });
        assert_eq!(supervisor.run(GRACE).await, Err(Failure::Part("writer: disk full".to_owned())));
    }

    #[tokio::test]
    async fn a_panic_of_a_part_ends_the_process_in_order() {
        let supervisor = Supervisor::new();
        supervisor.part("poller", async { if true { panic!("bug") } else { Err("never") } });
        assert_eq!(supervisor.run(GRACE).await, Err(Failure::Part("poller panicked".to_owned())));
    }

    #[tokio::test]
    async fn a_part_that_just_ends_is_a_failure() {
        let supervisor = Supervisor::new();
        supervisor.part("listener", async { Ok::<_, String>(()) });
        assert_eq!(supervisor.run(GRACE).await, Err(Failure::Part("listener ended by itself".to_owned())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_ignores_the_stop_is_left_behind_after_the_grace() {
        let supervisor = Supervisor::new();
        supervisor.part("stubborn", std::future::pending::<Result<(), String>>());
        supervisor.stop().cancel();
        assert_eq!(supervisor.run(GRACE).await, Err(Failure::Grace(GRACE)));
    }
}
