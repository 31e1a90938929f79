//! Handing spans and log records on in batches, without ever waiting for the collector.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use opentelemetry::{
    Context, InstrumentationScope, KeyValue,
    metrics::{AsyncInstrument, Meter},
};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    logs::{LogProcessor, SdkLogRecord},
    trace::{Span, SpanData, SpanProcessor},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::warn;

use super::{otlp::Signal, seldom::Seldom};

/// Items that wait for the collector; some megabytes at most. What comes on top is dropped.
const QUEUE: usize = 4096;
/// Items of one export.
const BATCH: usize = 512;
/// A collector that needs longer has not taken the batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two warnings about a collector, whatever goes wrong.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// What did not reach a collector.
#[derive(Debug)]
pub(super) struct Losses {
    full: [AtomicU64; 3],
    refused: [AtomicU64; 3],
    failures: [AtomicU64; 3],
    warned: Seldom,
}

impl Default for Losses {
    fn default() -> Self {
        Self {
            full: Default::default(),
            refused: Default::default(),
            failures: Default::default(),
            warned: Seldom::new(WARN_EVERY),
        }
    }
}

impl Losses {
    /// Shows the counts as metrics.
    pub(super) fn measure(self: &Arc<Self>, meter: &Meter) {
        let losses = Arc::clone(self);
        meter
            .u64_observable_counter("rialto.telemetry.dropped")
            .with_unit("{item}")
            .with_description("Spans and log records that no collector got")
            .with_callback(move |counts| {
                losses.observe(counts, &losses.full, "queue_full");
                losses.observe(counts, &losses.refused, "export_failed");
            })
            .build();
        let losses = Arc::clone(self);
        meter
            .u64_observable_counter("rialto.telemetry.export.failures")
            .with_unit("{export}")
            .with_description("Exports that the collector did not take")
            .with_callback(move |counts| {
                for signal in Signal::ALL {
                    let count = losses.failures[signal as usize].load(Ordering::Relaxed);
                    counts.observe(count, &[KeyValue::new("signal", signal.name())]);
                }
            })
            .build();
    }

    fn observe(&self, counts: &dyn AsyncInstrument<u64>, of: &[AtomicU64; 3], reason: &'static str) {
        for signal in [Signal::Traces, Signal::Logs] {
            let labels = [KeyValue::new("signal", signal.name()), KeyValue::new("reason", reason)];
            counts.observe(of[signal as usize].load(Ordering::Relaxed), &labels);
        }
    }

    /// There was no room for an item.
    fn full(&self, signal: Signal) {
        self.full[signal as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes how an export ended. Says so at most once a minute.
    pub(super) fn exported(&self, signal: Signal, items: usize, result: &Result<(), String>) {
        let Err(problem) = result else { return };
        self.failures[signal as usize].fetch_add(1, Ordering::Relaxed);
        self.refused[signal as usize].fetch_add(items as u64, Ordering::Relaxed);
        if self.warned.may_say().is_none() {
            return;
        }
        let sum = |counts: &[AtomicU64; 3]| counts.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        let dropped = sum(&self.full) + sum(&self.refused);
        warn!(signal = signal.name(), problem, dropped, "the collector does not take telemetry; it is dropped");
    }
}

/// A queue in front of a collector.
pub(super) struct Queue<T> {
    signal: Signal,
    items: mpsc::Sender<T>,
    losses: Arc<Losses>,
}

impl<T> fmt::Debug for Queue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("signal", &self.signal).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Queue<T> {
    /// Exports what is put in, every `delay` or when a batch is full, until the stop; then at once what is left.
    pub(super) fn start<E, F>(
        signal: Signal,
        losses: &Arc<Losses>,
        delay: Duration,
        tracker: &TaskTracker,
        stop: CancellationToken,
        mut export: E,
    ) -> Self
    where
        E: FnMut(Vec<T>) -> F + Send + 'static,
        F: Future<Output = Result<(), String>> + Send,
    {
        let (items, mut waiting) = mpsc::channel(QUEUE);
        let own = Arc::clone(losses);
        tracker.spawn(async move {
            let mut batch = Vec::with_capacity(BATCH);
            while next(&mut waiting, &mut batch, delay, &stop).await {
                let count = batch.len();
                let result = match timeout(EXPORT_TIMEOUT, export(std::mem::take(&mut batch))).await {
                    Ok(result) => result,
                    Err(_) => Err("no answer in time".to_owned()),
                };
                own.exported(signal, count, &result);
            }
        });
        Self { signal, items, losses: Arc::clone(losses) }
    }

    fn put(&self, item: T) {
        if self.items.try_send(item).is_err() {
            self.losses.full(self.signal);
        }
    }
}

/// Fills a batch. False at the end: stopped, and nothing is left.
async fn next<T>(
    waiting: &mut mpsc::Receiver<T>,
    batch: &mut Vec<T>,
    delay: Duration,
    stop: &CancellationToken,
) -> bool {
    let mut due = None;
    while batch.len() < BATCH {
        let late = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled(), if !waiting.is_closed() => waiting.close(),
            got = waiting.recv_many(batch, BATCH - batch.len()) => match got {
                0 => break,
                _ => due = due.or_else(|| Some(Instant::now() + delay)),
            },
            () = late => break,
        }
    }
    !batch.is_empty()
}

impl SpanProcessor for Queue<SpanData> {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        self.put(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// A log record with the scope that it was written in.
pub(super) type Record = (SdkLogRecord, InstrumentationScope);

impl LogProcessor for Queue<Record> {
    fn emit(&self, record: &mut SdkLogRecord, scope: &InstrumentationScope) {
        self.put((record.clone(), scope.clone()));
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::time::advance;

    use super::*;

    const DELAY: Duration = Duration::from_secs(5);

    struct Started {
        queue: Queue<usize>,
        losses: Arc<Losses>,
        tracker: TaskTracker,
        stop: CancellationToken,
    }

    fn start<F>(export: impl FnMut(Vec<usize>) -> F + Send + 'static) -> Started
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let (losses, tracker, stop) = (Arc::default(), TaskTracker::new(), CancellationToken::new());
        let queue = Queue::start(Signal::Traces, &losses, DELAY, &tracker, stop.clone(), export);
        Started { queue, losses, tracker, stop }
    }

    fn count(of: &[AtomicU64; 3]) -> u64 {
        of[Signal::Traces as usize].load(Ordering::Relaxed)
    }

    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_never_answers_costs_a_bounded_queue() {
        let Started { queue, losses, .. } = start(|_| std::future::pending());
        (0..QUEUE + 10).for_each(|n| queue.put(n));
        assert_eq!(count(&losses.full), 10);
        // One batch is under way; there is room for as many.
        settle().await;
        (0..BATCH + 10).for_each(|n| queue.put(n));
        assert_eq!((count(&losses.full), count(&losses.failures)), (20, 0));
        advance(EXPORT_TIMEOUT + Duration::from_millis(1)).await;
        settle().await;
        assert_eq!((count(&losses.refused), count(&losses.failures)), (BATCH as u64, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_is_handed_over_at_the_stop_and_then_it_is_over() {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let own = Arc::clone(&taken);
        let Started { queue, losses, tracker, stop } = start(move |batch| {
            own.lock().unwrap().push(batch);
            async { Ok(()) }
        });
        (0..BATCH + 10).for_each(|n| queue.put(n));
        settle().await;
        assert_eq!(taken.lock().unwrap().len(), 1, "a full batch does not wait");
        let begun = Instant::now();
        stop.cancel();
        tracker.close();
        tracker.wait().await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert_eq!(taken.lock().unwrap().concat(), (0..BATCH + 10).collect::<Vec<_>>());
        queue.put(0);
        assert_eq!(count(&losses.full), 1, "what comes too late is counted");
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_items_wait_for_company() {
        let taken = Arc::new(Mutex::new(0));
        let own = Arc::clone(&taken);
        let Started { queue, .. } = start(move |batch| {
            *own.lock().unwrap() += batch.len();
            async { Ok(()) }
        });
        queue.put(1);
        settle().await;
        advance(DELAY / 2).await;
        queue.put(2);
        settle().await;
        assert_eq!(*taken.lock().unwrap(), 0);
        advance(DELAY / 2 + Duration::from_millis(1)).await;
        settle().await;
        assert_eq!(*taken.lock().unwrap(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn trouble_is_told_once_a_minute() {
        let losses = Losses::default();
        let may_warn = || losses.warned.may_say().is_some();
        assert!(may_warn());
        advance(Duration::from_secs(59)).await;
        assert!(!may_warn());
        advance(Duration::from_secs(1)).await;
        assert!(may_warn());
        assert!(!may_warn());
    }
}
