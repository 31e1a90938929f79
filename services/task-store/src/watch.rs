//! Following tasks: one tail per watched task and replica, shared by its followers.
//!
//! A tail holds the newest events. A follower pulls: it has a place in the log and takes what is next from the
//! tail, or from the store when it has fallen out of there. So a stalled follower costs nothing and disturbs
//! nobody. The commits of this replica feed the tail; those of others announce themselves by notices, which may
//! get lost, so the log is also looked at when nothing was heard for a while.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, stream};
use rialto_a2a::{
    Error, Kind,
    v1::{StreamResponse, TaskState, stream_response::Payload},
};
use rialto_rpc::tasks::Update;
use rialto_store::{Entry, Notices, ReadLimit, Shard};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::{
    keys::TaskId,
    observe,
    read::{Shape, snapshot_event},
    store::{Store, corrupt},
    stored::{Head, Place, tag},
};

/// How long nothing may be heard before the log is looked at.
const RECHECK: Duration = Duration::from_secs(5);

/// How often somebody whose turn waits behind others looks whether it still does.
const LOOK_BEHIND: Duration = Duration::from_secs(1);

/// Events that a tail holds.
const RING: usize = 128;

/// Bytes that a tail holds, one event apart.
const RING_BYTES: usize = 64 << 10;

/// What a follower that has fallen behind reads at once.
const CATCH_UP: ReadLimit = ReadLimit { entries: 64, bytes: 64 << 10 };

/// How long a follower bears a store that is away.
const PATIENCE: Duration = Duration::from_secs(30);

/// The tails of the tasks that are watched on this replica.
#[derive(Debug)]
pub(crate) struct Tails {
    map: Arc<Mutex<HashMap<TaskId, Arc<Tail>>>>,
    /// By shard: whether notices come in.
    listening: Vec<AtomicBool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tails {
    pub(crate) fn new(shards: Shard) -> Self {
        Self { map: Arc::default(), listening: (0..shards).map(|_| AtomicBool::new(false)).collect() }
    }

    /// Begins to collect what is committed from now on. Look at the task after this, never before.
    pub(crate) fn open(&self, task: TaskId) -> Seat {
        let mut map = lock(&self.map);
        let tail = map.entry(task).or_insert_with(|| Arc::new(Tail::new(task)));
        let tail = Arc::clone(tail);
        tail.seats.fetch_add(1, Ordering::Relaxed);
        observe::watchers(1);
        drop(map);
        let listening = self.listening.get(usize::from(task.shard())).is_some_and(|it| it.load(Ordering::Acquire));
        if !listening {
            tail.doubt();
        }
        Seat { poked: tail.poke.subscribe(), tail, map: Arc::clone(&self.map) }
    }

    /// Takes events that were just committed here.
    pub(crate) fn feed(&self, task: TaskId, events: Vec<Entry>) {
        if events.is_empty() {
            return;
        }
        let tail = lock(&self.map).get(&task).cloned();
        if let Some(tail) = tail {
            tail.feed(events);
        }
    }

    /// Passes the notices of a shard on, for ever. Says when there was a cut between here and the store.
    pub(crate) async fn listen(&self, shard: Shard, mut notices: Notices, cut: impl Fn()) {
        let mut cuts = notices.cuts();
        let all = |tails: &Self| -> Vec<_> {
            lock(&tails.map)
                .iter()
                .filter(|(task, _)| task.shard() == shard)
                .map(|(_, tail)| Arc::clone(tail))
                .collect()
        };
        if let Some(listening) = self.listening.get(usize::from(shard)) {
            listening.store(true, Ordering::Release);
        }
        all(self).iter().for_each(|tail| tail.doubt());
        loop {
            let Some(notice) = notices.recv().await else {
                if std::mem::replace(&mut cuts, notices.cuts()) != notices.cuts() {
                    cut();
                }
                all(self).iter().for_each(|tail| tail.doubt());
                continue;
            };
            let Some((task, number)) = notice.payload.split_once(' ') else { continue };
            let (Some(task), Ok(number)) = (TaskId::parse(task, Shard::MAX), number.parse()) else { continue };
            let tail = lock(&self.map).get(&task).cloned();
            if let Some(tail) = tail {
                tail.hint(number);
            }
        }
    }

    /// How many tasks are watched.
    pub(crate) fn len(&self) -> usize {
        lock(&self.map).len()
    }
}

/// The newest events of one task.
#[derive(Debug)]
struct Tail {
    task: TaskId,
    ring: Mutex<Ring>,
    poke: watch::Sender<()>,
    /// Held by the follower that reads for all.
    filling: tokio::sync::Mutex<()>,
    /// How many hold it. Counted under the lock of the map.
    seats: AtomicUsize,
}

#[derive(Debug)]
struct Ring {
    /// Dense; the last one is number `last`.
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Number of the newest event that was here; `None` until somebody says where to begin.
    last: Option<u64>,
    /// There are events up to here.
    hint: u64,
    /// How often somebody thought that there may be more, and how many of these thoughts a look has settled.
    doubts: u64,
    settled: u64,
    looked: Instant,
}

/// What a follower finds.
#[derive(Debug)]
enum Next {
    Event(Entry),
    /// It is in the store only.
    Behind,
    /// The tail itself must be filled.
    Fill,
    /// Nothing yet.
    Wait,
}

impl Ring {
    fn push(&mut self, entry: Entry) {
        self.last = Some(entry.id.0);
        self.bytes += entry.payload.len();
        self.entries.push_back(entry);
        while self.entries.len() > 1 && (self.entries.len() > RING || self.bytes > RING_BYTES) {
            let gone = self.entries.pop_front();
            self.bytes -= gone.map_or(0, |entry| entry.payload.len());
        }
    }

    /// Takes the entries that are new, if nothing is missing before them.
    fn extend(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            match self.last {
                Some(last) if entry.id.0 <= last => {}
                Some(last) if entry.id.0 > last + 1 => self.hint = self.hint.max(entry.id.0),
                _ => self.push(entry),
            }
        }
    }

    fn needs_fill(&self) -> bool {
        self.doubts > self.settled || self.last.is_some_and(|last| self.hint > last)
    }
}

impl Tail {
    fn new(task: TaskId) -> Self {
        let ring = Ring {
            entries: VecDeque::new(),
            bytes: 0,
            last: None,
            hint: 0,
            doubts: 0,
            settled: 0,
            looked: Instant::now(),
        };
        Self {
            task,
            ring: Mutex::new(ring),
            poke: watch::Sender::new(()),
            filling: tokio::sync::Mutex::new(()),
            seats: AtomicUsize::new(0),
        }
    }

    fn feed(&self, entries: Vec<Entry>) {
        lock(&self.ring).extend(entries);
        self.poke.send_replace(());
    }

    fn hint(&self, number: u64) {
        let mut ring = lock(&self.ring);
        ring.hint = ring.hint.max(number);
        let news = ring.needs_fill();
        drop(ring);
        if news {
            self.poke.send_replace(());
        }
    }

    fn doubt(&self) {
        lock(&self.ring).doubts += 1;
        self.poke.send_replace(());
    }

    /// Nothing was heard for a while.
    fn recheck(&self) {
        let mut ring = lock(&self.ring);
        if ring.looked.elapsed() >= RECHECK {
            ring.doubts += 1;
        }
    }

    /// A follower has seen that the log goes up to this number.
    fn begin(&self, number: u64) {
        let mut ring = lock(&self.ring);
        ring.last.get_or_insert(number);
        ring.hint = ring.hint.max(number);
    }

    fn next(&self, cursor: u64) -> Next {
        let ring = lock(&self.ring);
        let last = ring.last.unwrap_or(cursor);
        if cursor >= last {
            return if ring.needs_fill() { Next::Fill } else { Next::Wait };
        }
        let first = last + 1 - ring.entries.len() as u64;
        match (cursor + 1).checked_sub(first).and_then(|n| ring.entries.get(usize::try_from(n).ok()?)) {
            Some(entry) => Next::Event(entry.clone()),
            None => Next::Behind,
        }
    }

    /// Reads what is new, once for all followers. Whatever was doubted or hinted at while it read, and everything
    /// if it is dropped on the way, is looked at again.
    async fn fill(&self, store: &Store) -> Result<(), Error> {
        let _one = self.filling.lock().await;
        let (last, doubts, hint) = {
            let mut ring = lock(&self.ring);
            if !ring.needs_fill() {
                return Ok(());
            }
            ring.looked = Instant::now();
            (ring.last.unwrap_or(0), ring.doubts, ring.hint)
        };
        let news = self.read(store, last).await?;
        let mut ring = lock(&self.ring);
        match news {
            // It may have been only the first part, so the doubt stays.
            News::Entries(entries) => ring.extend(entries),
            News::Jump(number) => {
                ring.settled = doubts;
                if ring.hint == hint {
                    // Of a store that has lost its newest events.
                    ring.hint = number;
                }
                if ring.last.is_none_or(|last| number > last) {
                    ring.entries.clear();
                    ring.bytes = 0;
                    ring.last = Some(number);
                }
            }
        }
        drop(ring);
        self.poke.send_replace(());
        Ok(())
    }

    async fn read(&self, store: &Store, last: u64) -> Result<News, Error> {
        let head = store.head(self.task).await?.ok_or(Kind::TaskNotFound)?.value;
        let entries = store.log(self.task, &head, last).await?;
        if entries.first().is_some_and(|entry| entry.id.0 == last + 1) {
            return Ok(News::Entries(entries));
        }
        // There is nothing new, or the log was folded away meanwhile.
        Ok(News::Jump(head.last_event))
    }
}

/// What a look at the log brought.
#[derive(Debug)]
enum News {
    /// The next events.
    Entries(Vec<Entry>),
    /// The newest event is this one. If it is a new one, followers look for themselves.
    Jump(u64),
}

/// A follower's place at a tail. The tail is there as long as somebody has one.
#[derive(Debug)]
pub(crate) struct Seat {
    tail: Arc<Tail>,
    poked: watch::Receiver<()>,
    map: Arc<Mutex<HashMap<TaskId, Arc<Tail>>>>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        observe::watchers(-1);
        let mut map = lock(&self.map);
        if self.tail.seats.fetch_sub(1, Ordering::Relaxed) == 1 {
            map.remove(&self.tail.task);
        }
    }
}

/// How far a follower goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// One update: what the task is once the turn is over.
    Result,
    /// Every event, to the end of the turn; while a credential is awaited, it is not over.
    Turn,
    /// Every event, to the end of the task.
    Task,
}

/// A follower.
#[derive(Debug)]
pub(crate) struct Follow {
    pub(crate) store: Arc<Store>,
    pub(crate) seat: Seat,
    pub(crate) task: TaskId,
    pub(crate) place: Place,
    pub(crate) until: Until,
    /// Set when the turn waits behind others, whose ends are not its own.
    pub(crate) behind: Option<Vec<u8>>,
    /// Number of the newest event that was delivered.
    pub(crate) cursor: u64,
    /// Number of the newest event there was when the task was looked at.
    pub(crate) newest: u64,
    /// Delivered before anything else.
    pub(crate) first: Option<Update>,
    /// Nothing comes after that.
    pub(crate) over: bool,
    pub(crate) shape: Shape,
    pub(crate) stop: CancellationToken,
    /// Read from the store, not delivered yet.
    pub(crate) queue: VecDeque<Entry>,
}

impl Follow {
    /// The updates. They end without an error only where the follower wanted to end.
    pub(crate) fn updates(self) -> impl Stream<Item = Result<Update, Status>> + Send + 'static {
        self.seat.tail.begin(self.newest);
        stream::unfold(self, |mut follow| async move { Some((follow.next().await?, follow)) })
    }

    async fn next(&mut self) -> Option<Result<Update, Status>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        if self.over {
            return None;
        }
        let stop = self.stop.clone();
        let mut delays = [50, 100, 200, 400].into_iter().map(Duration::from_millis);
        let mut until = None;
        loop {
            let step = tokio::select! {
                step = self.step() => step,
                () = stop.cancelled() => Err(Error::unavailable()),
            };
            let error = match step {
                Ok(update) => return Some(Ok(update)),
                Err(error) => error,
            };
            let until = *until.get_or_insert_with(|| Instant::now() + PATIENCE);
            if error.kind != Kind::Unavailable || stop.is_cancelled() || Instant::now() >= until {
                self.over = true;
                // To whoever has just sent it, a task that is gone is a store that failed: the send may be repeated.
                let lost = error.kind == Kind::TaskNotFound && self.until != Until::Task;
                let error = if lost { Error::unavailable() } else { error };
                return Some(Err(error.to_status()));
            }
            sleep(delays.next().unwrap_or(Duration::from_millis(800))).await;
        }
    }

    /// The next update. Nothing is lost when it is dropped on the way.
    async fn step(&mut self) -> Result<Update, Error> {
        loop {
            let Some(entry) = self.entry().await? else { return self.snapshot().await };
            let number = entry.id.0;
            let ends = self.ends(&entry).await?;
            if self.until == Until::Result {
                if !ends {
                    self.cursor = number;
                    continue;
                }
                let update = self.snapshot().await?;
                self.over = true;
                return Ok(update);
            }
            let event = self.place.event(entry.payload).map_err(corrupt)?;
            self.cursor = number;
            self.over = ends;
            return Ok(Update { number, event: Some(event), ..Update::default() });
        }
    }

    /// Whether the follower is done with this event.
    async fn ends(&self, entry: &Entry) -> Result<bool, Error> {
        match entry.tag {
            tag::TERMINAL => return Ok(true),
            tag::INTERRUPTED if self.until != Until::Task => {}
            _ => return Ok(false),
        }
        if self.until == Until::Turn {
            let event = self.place.event(entry.payload.clone()).map_err(corrupt)?;
            if state(&event) == TaskState::AuthRequired {
                return Ok(false);
            }
        }
        let Some(turn) = &self.behind else { return Ok(true) };
        let head = self.store.head_at_least(self.task, entry.id.0).await?.ok_or(Kind::TaskNotFound)?;
        Ok(head.value.ends(entry.id.0, turn))
    }

    /// The next event; `None` when it is not in the log any more.
    async fn entry(&mut self) -> Result<Option<Entry>, Error> {
        loop {
            // Taken away only once it was delivered: a store that fails in between loses nothing.
            while let Some(entry) = self.queue.front() {
                if entry.id.0 > self.cursor {
                    return Ok((entry.id.0 == self.cursor + 1).then(|| entry.clone()));
                }
                self.queue.pop_front();
            }
            // Before the look, so that nothing slips in between.
            self.seat.poked.mark_unchanged();
            match self.seat.tail.next(self.cursor) {
                Next::Event(entry) => return Ok(Some(entry)),
                Next::Fill => self.seat.tail.fill(&self.store).await?,
                Next::Behind => {
                    let next = self.cursor + 1;
                    let head = self.store.head_at_least(self.task, next).await?.ok_or(Kind::TaskNotFound)?.value;
                    self.queue = match head.logged() {
                        logged if next > logged => head.events_after(self.cursor).collect(),
                        _ => {
                            let log = self.task.log();
                            self.store.read(self.task.shard(), &log, self.cursor, CATCH_UP).await?.into()
                        }
                    };
                    if self.queue.is_empty() {
                        return Ok(None);
                    }
                }
                Next::Wait => {
                    let patience = if self.behind.is_some() { LOOK_BEHIND } else { RECHECK };
                    if timeout(patience, self.seat.poked.changed()).await.is_err() {
                        self.check_turn().await?;
                        self.seat.tail.recheck();
                    }
                }
            }
        }
    }

    /// Whether the turn, which waits behind others, is still there: one that is dropped leaves no event.
    async fn check_turn(&self) -> Result<(), Error> {
        let Some(turn) = &self.behind else { return Ok(()) };
        let head = self.store.head(self.task).await?.ok_or(Kind::TaskNotFound)?.value;
        match head.state().is_terminal() || has_turn(&self.store, self.task, &head, turn).await? {
            true => Ok(()),
            false => Err(Error::new(Kind::Deadline, "The message expired in the queue; it was not started.")),
        }
    }

    /// The task as it is now, in place of events.
    async fn snapshot(&mut self) -> Result<Update, Error> {
        let (head, task) = self.store.task(self.task, self.shape).await?.ok_or(Kind::TaskNotFound)?;
        let update = snapshot_event(&self.store, self.task, &head, task).await?;
        self.cursor = head.last_event;
        self.queue.clear();
        self.over = head.state().is_terminal();
        Ok(update)
    }
}

/// Whether the task, as it was read a moment ago, has this turn, or it waits for the task's context.
pub(crate) async fn has_turn(store: &Store, task: TaskId, head: &Head, turn: &[u8]) -> Result<bool, Error> {
    if head.knows(turn) {
        return Ok(true);
    }
    let context = store.context(task.shard(), &head.scope_key().context(&head.context_id)).await?;
    if context.is_some_and(|held| held.value.has_waiting(turn)) {
        return Ok(true);
    }
    // Between the two looks it may have gone from one to the other, so the task is read once more.
    Ok(store.head(task).await?.is_some_and(|held| held.value.knows(turn)))
}

/// The state that a status event gives the task.
fn state(event: &StreamResponse) -> TaskState {
    match &event.payload {
        Some(Payload::StatusUpdate(update)) => update.status.as_ref().map_or(TaskState::Unspecified, |it| it.state()),
        _ => TaskState::Unspecified,
    }
}
