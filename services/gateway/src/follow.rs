//! Streams of a task's events, from task-store to any reader.
//!
//! A reader pulls: an event is fetched when the connection can take it, so a slow reader costs its own buffers and
//! nothing else. One that does not pull at all for a moment loses its stream inside the platform (where it would
//! hold up its neighbours), and gets a new one, after its last event, when it moves again. The same happens when
//! task-store goes away: readers notice a pause, never a gap and never an end that is none.

mod source;

use std::{
    collections::HashMap,
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};

use rialto_a2a::{
    Error, Result,
    v1::{StreamResponse, stream_response::Payload},
    wkt::Value,
};
use rialto_rpc::tasks::{Follow, TaskStoreClient, Update, WatchRequest};
use rialto_runtime::config::Limits;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, interval, sleep},
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::TaskTracker,
};
use tonic::Streaming;

use self::source::Source;
use crate::{EVENT_NUMBER, call::Call, observe::OpenStream};

/// A reader that has not asked for more in this time holds no stream inside the platform.
const STALLED: Duration = Duration::from_secs(1);
/// How long a stream may be without task-store before its reader is told.
pub(crate) const RECOVERY: Duration = Duration::from_secs(30);

/// Makes [`Events`], within the limits of this process.
#[derive(Debug)]
pub(crate) struct Follower {
    tasks: TaskStoreClient,
    slots: Arc<Semaphore>,
    readers: Arc<Readers>,
    subscription_idle: Duration,
    stop: CancellationToken,
}

/// Streams that readers may have stopped reading.
#[derive(Debug, Default)]
struct Readers(Mutex<HashMap<u64, Weak<Mutex<Source>>>>);

/// What a reader gets. After anything but an update the stream is over.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large one is the usual one")]
pub(crate) enum Step {
    /// The next event.
    Update(Update),
    /// The stream cannot go on, through no fault of the task.
    Failed(Error),
    /// The stream ends here; the task does not. The reader may subscribe again after its last event.
    Paused(&'static str),
}

impl Follower {
    pub(crate) fn new(limits: &Limits, tasks: TaskStoreClient, tracker: &TaskTracker, stop: CancellationToken) -> Self {
        let readers = Arc::new(Readers::default());
        let (sweep, stopped) = (Arc::clone(&readers), stop.clone());
        tracker.spawn(async move {
            stopped.run_until_cancelled(sweep.park_stalled()).await;
        });
        Self {
            tasks,
            slots: Arc::new(Semaphore::new(limits.streams)),
            readers,
            subscription_idle: limits.subscription_idle.0,
            stop,
        }
    }

    /// Takes a place for a stream.
    ///
    /// # Errors
    /// Unavailable when all are taken.
    pub(crate) fn admit(&self) -> Result<OwnedSemaphorePermit> {
        let full = || Error { message: "Too many open streams".into(), ..Error::unavailable() };
        Arc::clone(&self.slots).try_acquire_owned().map_err(|_| full())
    }

    /// Follows `updates`, waiting for the snapshot that they begin with. Should they break off, `watch` says how to go
    /// on; its id is empty as long as the task's is not known.
    ///
    /// # Errors
    /// What makes the stream end before it began, so that it can be answered without one.
    pub(crate) async fn follow(
        &self,
        permit: OwnedSemaphorePermit,
        call: &Call,
        watch: WatchRequest,
        updates: Streaming<Update>,
    ) -> Result<Events> {
        let (follow, resumed) = (watch.follow(), watch.after);
        let source = Source::new(self.tasks.clone(), watch, updates);
        let source = Arc::new(Mutex::new(source));
        let mut events = Events {
            first: None,
            number: self.readers.add(&source),
            readers: Arc::clone(&self.readers),
            source,
            numbered: call.numbers_events(),
            stop: Box::pin(self.stop.clone().cancelled_owned()),
            idle: (follow == Follow::Task).then(|| Idle::new(self.subscription_idle)),
            over: false,
            open: OpenStream::new(),
            _permit: permit,
        };
        // A snapshot comes at once; the next event after a given one may take for ever.
        let first = match resumed {
            None => events.next().await,
            Some(_) => futures::FutureExt::now_or_never(events.next()).flatten(),
        };
        match first {
            Some(Step::Failed(error)) => return Err(error),
            Some(step) => {
                events.over = false;
                events.first = Some(step);
            }
            None => {}
        }
        Ok(events)
    }
}

impl Readers {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<Mutex<Source>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, source: &Arc<Mutex<Source>>) -> u64 {
        // The address is unique for as long as the source lives, which is as long as its entry.
        let number = Arc::as_ptr(source).addr() as u64;
        self.lock().insert(number, Arc::downgrade(source));
        number
    }

    async fn park_stalled(&self) {
        let mut tick = interval(STALLED);
        loop {
            tick.tick().await;
            let all: Vec<_> = self.lock().values().cloned().collect();
            for source in all.iter().filter_map(Weak::upgrade) {
                // Whoever holds the lock is not stalled.
                let parked = source.try_lock().ok().and_then(|mut source| source.park_if_stalled());
                drop(parked);
            }
        }
    }
}

/// The events of one task for one reader.
pub(crate) struct Events {
    first: Option<Step>,
    source: Arc<Mutex<Source>>,
    number: u64,
    readers: Arc<Readers>,
    /// Whether events carry their number in metadata.
    numbered: bool,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    idle: Option<Idle>,
    over: bool,
    open: OpenStream,
    _permit: OwnedSemaphorePermit,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.readers.lock().remove(&self.number);
    }
}

impl Events {
    pub(crate) async fn next(&mut self) -> Option<Step> {
        std::future::poll_fn(|context| self.poll_step(context)).await
    }

    pub(crate) fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Option<Step>> {
        if let Some(step) = self.first.take() {
            self.over = !matches!(step, Step::Update(_));
            return Poll::Ready(Some(step));
        }
        if self.over {
            return Poll::Ready(None);
        }
        let step = self.poll_next_step(context);
        if let Poll::Ready(step) = &step {
            self.over = !matches!(step, Some(Step::Update(_)));
        }
        step
    }

    fn poll_next_step(&mut self, context: &mut Context<'_>) -> Poll<Option<Step>> {
        if self.stop.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Step::Paused("the server stops")));
        }
        let step = self.source.lock().unwrap_or_else(PoisonError::into_inner).poll(context);
        match step {
            Poll::Ready(Some(Ok(mut update))) => {
                if let Some(idle) = &mut self.idle {
                    idle.since = Instant::now();
                }
                if self.numbered
                    && let Some(event) = &mut update.event
                {
                    write_number(event, update.number);
                }
                self.open.count();
                Poll::Ready(Some(Step::Update(update)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Step::Failed(error))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => match &mut self.idle {
                Some(idle) => idle.poll(context).map(|()| Some(Step::Paused("nothing happened for a long time"))),
                None => Poll::Pending,
            },
        }
    }
}

/// Puts the number of an event into its metadata (extension [`EVENT_NUMBER`]).
fn write_number(event: &mut StreamResponse, number: u64) {
    let metadata = match &mut event.payload {
        Some(Payload::Task(task)) => &mut task.metadata,
        Some(Payload::Message(message)) => &mut message.metadata,
        Some(Payload::StatusUpdate(update)) => &mut update.metadata,
        Some(Payload::ArtifactUpdate(update)) => &mut update.metadata,
        None => return,
    };
    // Exact up to 2^53 events.
    let number = u32::try_from(number).map_or_else(|_| Value::from(number.to_string()), Value::from);
    metadata.get_or_insert_default().fields.insert(EVENT_NUMBER.to_owned(), number);
}

/// A time-out that is pushed back without touching the timer.
pub(crate) struct Idle {
    since: Instant,
    limit: Duration,
    sleep: Pin<Box<Sleep>>,
}

impl Idle {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { since: Instant::now(), limit, sleep: Box::pin(sleep(limit)) }
    }

    /// Begins again.
    pub(crate) fn reset(&mut self) {
        self.since = Instant::now();
    }

    /// Ready when nothing happened for the whole time.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.sleep.as_mut().poll(context));
            let due = self.since + self.limit;
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(due);
        }
    }
}
