//! One task's events, over as many watches as it takes.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, future::BoxFuture};
use rialto_a2a::{
    Error, Kind, Result,
    v1::{TaskState, stream_response::Payload},
};
use rialto_rpc::tasks::{Follow, TaskStoreClient, Update, WatchRequest};
use rialto_runtime::telemetry::Seldom;
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tonic::Streaming;
use tracing::{debug, warn};

use super::{RECOVERY, STALLED};
use crate::operations::{STORE_TIMEOUT, stored};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

static ENDED: Seldom = Seldom::new(Duration::from_secs(10));

/// Where the events of one task come from, whatever happens on the way.
pub(super) struct Source {
    tasks: TaskStoreClient,
    /// How to go on. A message without a task has no id, and cannot be followed twice.
    watch: WatchRequest,
    /// Of the last event.
    number: u64,
    state: State,
    /// Whether the last event says that the stream may end here.
    settled: bool,
    /// Whether this stream, which may be a second one, has brought anything.
    moved: bool,
    failing: Option<Instant>,
    pause: Duration,
    /// When the reader last took an event.
    delivered: Instant,
    /// Whether the reader waits for more.
    asked: bool,
}

pub(super) enum State {
    Open(Box<Streaming<Update>>),
    Opening(BoxFuture<'static, Result<Streaming<Update>>>),
    Waiting(Pin<Box<Sleep>>),
    /// Given up for a reader that does not read.
    Parked,
    Over,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("id", &self.watch.id).field("number", &self.number).finish_non_exhaustive()
    }
}

impl Source {
    /// Begins with updates that are there already, and goes on as `watch` says, which has the last event that the
    /// reader knows.
    pub(super) fn new(tasks: TaskStoreClient, watch: WatchRequest, updates: Streaming<Update>) -> Self {
        Self {
            tasks,
            number: watch.after.unwrap_or(0),
            watch,
            state: State::Open(Box::new(updates)),
            settled: false,
            moved: false,
            failing: None,
            pause: FIRST_PAUSE,
            delivered: Instant::now(),
            asked: true,
        }
    }

    /// The next event, the last error, or the end.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Update>>> {
        let step = loop {
            match &mut self.state {
                State::Open(updates) => match Pin::new(updates).poll_next(context) {
                    Poll::Pending => break Poll::Pending,
                    Poll::Ready(Some(Ok(update))) => {
                        self.note(&update);
                        break Poll::Ready(Some(Ok(update)));
                    }
                    Poll::Ready(Some(Err(status))) => {
                        if let Some(error) = self.recover(stored(&status)) {
                            break Poll::Ready(Some(Err(error)));
                        }
                    }
                    // An end that the task did not reach is a lost connection.
                    Poll::Ready(None) if !self.settled && self.moved => {
                        if let Some(error) = self.recover(Error::unavailable()) {
                            break Poll::Ready(Some(Err(error)));
                        }
                    }
                    Poll::Ready(None) => {
                        self.state = State::Over;
                        break Poll::Ready(None);
                    }
                },
                State::Opening(opening) => match opening.as_mut().poll(context) {
                    Poll::Pending => break Poll::Pending,
                    Poll::Ready(Ok(updates)) => {
                        self.moved = false;
                        self.state = State::Open(Box::new(updates));
                    }
                    Poll::Ready(Err(error)) => {
                        if let Some(error) = self.recover(error) {
                            break Poll::Ready(Some(Err(error)));
                        }
                    }
                },
                State::Waiting(pause) => match pause.as_mut().poll(context) {
                    Poll::Pending => break Poll::Pending,
                    Poll::Ready(()) => self.open(),
                },
                State::Parked => self.open(),
                State::Over => break Poll::Ready(None),
            }
        };
        self.asked = step.is_pending();
        self.delivered = Instant::now();
        step
    }

    fn note(&mut self, update: &Update) {
        self.number = update.number;
        if !update.turn_id.is_empty() {
            self.watch.turn_id.clone_from(&update.turn_id);
        }
        self.moved = true;
        self.failing = None;
        self.pause = FIRST_PAUSE;
        let (id, state) = match update.event.as_ref().and_then(|event| event.payload.as_ref()) {
            Some(Payload::Task(task)) => (Some(&task.id), task.status.as_ref().map(|status| status.state())),
            Some(Payload::StatusUpdate(update)) => (Some(&update.task_id), update.status.as_ref().map(|s| s.state())),
            Some(Payload::ArtifactUpdate(update)) => (Some(&update.task_id), None),
            Some(Payload::Message(_)) => {
                self.settled = true;
                return;
            }
            None => (None, None),
        };
        if let Some(id) = id.filter(|_| self.watch.id.is_empty()) {
            self.watch.id.clone_from(id);
        }
        if let Some(state) = state {
            self.settled = match state {
                TaskState::Completed | TaskState::Failed | TaskState::Canceled | TaskState::Rejected => true,
                TaskState::InputRequired => self.watch.follow() == Follow::Turn,
                _ => false,
            };
        }
    }

    /// Tries again later, or gives the error back if that is of no use.
    fn recover(&mut self, error: Error) -> Option<Error> {
        let since = *self.failing.get_or_insert_with(Instant::now);
        if error.kind != Kind::Unavailable || self.watch.id.is_empty() || since.elapsed() >= RECOVERY {
            if error.kind == Kind::Unavailable
                && let Some(unsaid) = ENDED.may_say()
            {
                warn!(task.id = self.watch.id, unsaid, "a stream ends because task-store is away");
            }
            self.state = State::Over;
            return Some(error);
        }
        debug!(task.id = self.watch.id, "a stream lost task-store");
        self.state = State::Waiting(Box::pin(sleep_until(Instant::now() + self.pause)));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        None
    }

    /// Watches again, after the last event.
    fn open(&mut self) {
        let request = WatchRequest { after: Some(self.number), ..self.watch.clone() };
        let mut tasks = self.tasks.clone();
        let watch = async move {
            let answer = timeout(STORE_TIMEOUT, tasks.watch(request)).await.map_err(|_| Error::unavailable())?;
            answer.map(tonic::Response::into_inner).map_err(|status| stored(&status))
        };
        self.state = State::Opening(Box::pin(watch));
    }

    /// Gives back what to drop, outside of the lock.
    pub(super) fn park_if_stalled(&mut self) -> Option<State> {
        let stalled = !self.asked && !self.watch.id.is_empty() && self.delivered.elapsed() >= STALLED;
        (stalled && matches!(self.state, State::Open(_))).then(|| std::mem::replace(&mut self.state, State::Parked))
    }
}
