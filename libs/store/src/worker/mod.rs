//! The loop that everybody who works off streams runs: claim, handle, show signs of life, settle.
//!
//! It claims only with a free slot, so what waits stays claimable by others. It owns an entry until its handler's
//! [`Outcome`] is settled. Nothing that a handler does ends the loop.

mod dead;
mod trouble;

use std::{any::Any, collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

pub use self::dead::{DEAD, DeadEntry};
use self::trouble::{Backoff, Silence, Trouble};
use crate::{Batch, Check, Claim, Claimed, Engine, Error, Op, Result, Shard};

/// How long one claim waits. Longer means fewer calls when idle; a dropped claim costs nothing.
pub const CLAIM_WAIT: Duration = Duration::from_secs(5);

/// How long a stopping worker tries to give back what is left.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Pause after a panic before the entry is claimable again, times the deliveries so far.
const PANIC_PAUSE: Duration = Duration::from_millis(500);

/// A handler that panicked on an entry that was handed out this often does not get it again.
const MOST_DELIVERIES: u32 = 10;

/// Counts claims. An entry given back may be claimed again before its first handler is cleared away.
type Number = u64;

/// A worker of one process.
#[derive(Debug)]
pub struct Worker {
    /// Where the work is.
    pub engine: Arc<dyn Engine>,
    /// Work streams, in order of preference.
    pub streams: Vec<(Shard, String)>,
    /// See [`consumer_name`].
    pub consumer: String,
    /// Entries handled at the same time.
    pub slots: usize,
    /// After this long without a sign of life, entries of others are taken over; later when the store was away, where
    /// nobody could show one.
    pub lease: Duration,
    /// Time between signs of life; a third of the lease is good.
    pub heartbeat: Duration,
    /// How often due delayed entries are moved into the streams; `None` when somebody else does that.
    pub tick: Option<Duration>,
}

/// An entry in the hands of a [`Handler`].
#[derive(Clone, Debug)]
pub struct Work {
    /// The entry.
    pub claimed: Arc<Claimed>,
    /// Who owns it, for [`Check::Pending`].
    pub consumer: Arc<str>,
    /// Somebody else owns it now: stop, write nothing.
    pub lost: CancellationToken,
    /// Nobody wants the result any more: wind up.
    pub canceled: CancellationToken,
    /// The process is to end: finish soon, or return [`Outcome::HandBack`].
    pub stopping: CancellationToken,
}

/// An entry that this worker owns.
#[derive(Clone, Debug)]
pub struct Held {
    /// The entry.
    pub claimed: Arc<Claimed>,
    /// Who owns it.
    pub consumer: Arc<str>,
}

/// What a heartbeat says about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Still ours.
    Owned,
    /// Not any more.
    Lost,
    /// Ours, but not wanted any more.
    Canceled,
}

/// What becomes of an entry after its handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A commit of the handler acknowledged it.
    Settled,
    /// It is done.
    Ack,
    /// It was not handled: somebody else may have it at once.
    HandBack,
    /// It is to come again, as a new entry.
    Retry {
        /// When.
        after: Duration,
    },
    /// It is given up.
    Bury {
        /// For the operator.
        reason: String,
    },
}

/// Does the work.
#[async_trait::async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Handles an entry. A panic counts as "not handled": the entry comes again a little later.
    async fn handle(&self, work: Work) -> Outcome;

    /// Shows signs of life for all entries held, one verdict each. The default asks the engine, once per stream.
    ///
    /// # Errors
    /// Any; it is tried again.
    async fn heartbeat(&self, engine: &dyn Engine, held: &[Held]) -> Result<Vec<Verdict>> {
        heartbeat(engine, held).await
    }
}

/// Makes a consumer name that no other process has: `<prefix>-<host>-<pid>-<random>`.
#[must_use]
pub fn consumer_name(prefix: &str) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() { "host" } else { host };
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}-{host}-{}-{}", std::process::id(), &random[..8])
}

/// Shows signs of life for entries, once per stream.
///
/// # Errors
/// Those of [`Engine::heartbeat`].
pub async fn heartbeat(engine: &dyn Engine, held: &[Held]) -> Result<Vec<Verdict>> {
    let mut streams: BTreeMap<(Shard, &str), Vec<usize>> = BTreeMap::new();
    for (n, one) in held.iter().enumerate() {
        streams.entry((one.claimed.shard, &one.claimed.stream)).or_default().push(n);
    }
    let mut verdicts = vec![Verdict::Lost; held.len()];
    for ((shard, stream), numbers) in streams {
        let ids: Vec<_> = numbers.iter().map(|n| held[*n].claimed.entry.id).collect();
        let owned = engine.heartbeat(shard, stream, &held[numbers[0]].consumer, &ids).await?;
        for (n, owned) in numbers.into_iter().zip(owned) {
            if owned {
                verdicts[n] = Verdict::Owned;
            }
        }
    }
    Ok(verdicts)
}

/// An entry being handled.
struct Slot {
    held: Held,
    lost: CancellationToken,
    canceled: CancellationToken,
}

/// The worker at work.
struct Running<H> {
    worker: Worker,
    consumer: Arc<str>,
    handler: Arc<H>,
    stopping: CancellationToken,
    slots: BTreeMap<Number, Slot>,
    tasks: JoinSet<Number>,
    next: Number,
    /// Noticed by whatever is asked of the store: with all slots in use, that is no claim.
    silence: Silence,
}

impl Worker {
    /// Works until `stop`; then claims no more, tells the handlers, waits for them for at most `grace`, and hands
    /// back at once what is left.
    pub async fn run(self, handler: Arc<impl Handler>, stop: CancellationToken, grace: Duration) {
        let mut running = Running {
            consumer: self.consumer.as_str().into(),
            worker: self,
            handler,
            stopping: CancellationToken::new(),
            slots: BTreeMap::new(),
            tasks: JoinSet::new(),
            next: 0,
            silence: Silence::default(),
        };
        running.work(&stop).await;
        running.stopping.cancel();
        running.wind_up(grace).await;
    }
}

impl<H: Handler> Running<H> {
    async fn work(&mut self, stop: &CancellationToken) {
        let mut claiming: Option<BoxFuture<'static, Result<Vec<Claimed>>>> = None;
        let mut claims = Trouble::new("claim", &self.consumer);
        let mut beating = Beating::new(&self.worker, Arc::clone(&self.handler));
        let mut ticking = self.tick();
        loop {
            let free = self.worker.slots.saturating_sub(self.slots.len());
            if claiming.is_none() && free > 0 {
                claiming = Some(self.claim(free, claims.pause()));
            }
            // All branches are cancel-safe: the futures they poll outlive the round.
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(done) = self.tasks.join_next() => self.finished(done),
                verdicts = beating.next(&self.slots, &mut self.silence), if !self.slots.is_empty() => self.heard(verdicts),
                claimed = some(&mut claiming) => {
                    claiming = None;
                    match claimed {
                        Ok(entries) => {
                            claims.over();
                            self.silence.ends();
                            if self.slots.is_empty() {
                                beating.rested();
                            }
                            entries.into_iter().for_each(|claimed| self.start(claimed));
                        }
                        Err(error) => {
                            claims.met(&error);
                            self.silence.begins();
                        }
                    }
                }
                () = &mut ticking => {}
            }
        }
    }

    fn claim(&self, limit: usize, pause: Option<Duration>) -> BoxFuture<'static, Result<Vec<Claimed>>> {
        let (engine, lease) = (Arc::clone(&self.worker.engine), self.worker.lease);
        let claim = Claim {
            streams: self.worker.streams.clone(),
            consumer: self.worker.consumer.clone(),
            limit,
            lease: lease + self.silence.excuse(lease),
            wait: CLAIM_WAIT,
        };
        async move {
            if let Some(pause) = pause {
                sleep(pause).await;
            }
            engine.claim(&claim).await
        }
        .boxed()
    }

    /// Moves due entries, for ever.
    fn tick(&self) -> BoxFuture<'static, ()> {
        let Some(every) = self.worker.tick else { return std::future::pending().boxed() };
        let engine = Arc::clone(&self.worker.engine);
        let mut shards: BTreeMap<Shard, Vec<String>> = BTreeMap::new();
        let mut trouble = Trouble::new("tick", &self.consumer);
        for (shard, stream) in &self.worker.streams {
            shards.entry(*shard).or_default().push(stream.clone());
        }
        async move {
            loop {
                sleep(trouble.pause().unwrap_or(every).max(every)).await;
                for (shard, streams) in &shards {
                    match engine.tick(*shard, streams).await {
                        Ok(_) => trouble.over(),
                        Err(error) => trouble.met(&error),
                    }
                }
            }
        }
        .boxed()
    }

    fn start(&mut self, claimed: Claimed) {
        self.next += 1;
        let held = Held { claimed: Arc::new(claimed), consumer: Arc::clone(&self.consumer) };
        let (lost, canceled) = (CancellationToken::new(), CancellationToken::new());
        let work = Work {
            claimed: Arc::clone(&held.claimed),
            consumer: Arc::clone(&held.consumer),
            lost: lost.clone(),
            canceled: canceled.clone(),
            stopping: self.stopping.clone(),
        };
        let (engine, handler) = (Arc::clone(&self.worker.engine), Arc::clone(&self.handler));
        self.slots.insert(self.next, Slot { held, lost, canceled });
        self.tasks.spawn(one(engine, handler, work, self.next));
    }

    fn finished(&mut self, done: Result<Number, tokio::task::JoinError>) {
        match done {
            Ok(number) => drop(self.slots.remove(&number)),
            // Panics are caught in the task, and nobody aborts it before the end.
            Err(error) => tracing::error!(%error, "a task of the worker died"),
        }
    }

    fn heard(&self, verdicts: Vec<(Number, Verdict)>) {
        for (number, verdict) in verdicts {
            let Some(slot) = self.slots.get(&number) else { continue };
            match verdict {
                Verdict::Owned => {}
                Verdict::Lost => slot.lost.cancel(),
                Verdict::Canceled => slot.canceled.cancel(),
            }
        }
    }

    async fn wind_up(&mut self, grace: Duration) {
        let end = Instant::now() + grace;
        let mut beating = Beating::new(&self.worker, Arc::clone(&self.handler));
        while !self.slots.is_empty() {
            tokio::select! {
                biased;
                done = self.tasks.join_next() => match done {
                    Some(done) => self.finished(done),
                    None => break,
                },
                verdicts = beating.next(&self.slots, &mut self.silence) => self.heard(verdicts),
                () = sleep_until(end) => break,
            }
        }
        let left: Vec<_> = std::mem::take(&mut self.slots).into_values().collect();
        if left.is_empty() {
            return;
        }
        tracing::info!(entries = left.len(), "handing back unfinished work");
        self.tasks.abort_all();
        let back = left.into_iter().map(|slot| {
            slot.lost.cancel();
            let engine = Arc::clone(&self.worker.engine);
            async move { settle(&*engine, &slot.held, &Outcome::HandBack).await }
        });
        if timeout(LAST_WORDS, futures::future::join_all(back)).await.is_err() {
            tracing::warn!("not all unfinished work could be handed back; others get it when its lease ends");
        }
        self.tasks.shutdown().await;
    }
}

/// Handles one entry and settles what becomes of it.
async fn one(engine: Arc<dyn Engine>, handler: Arc<impl Handler>, work: Work, number: Number) -> Number {
    let held = Held { claimed: Arc::clone(&work.claimed), consumer: Arc::clone(&work.consumer) };
    let (lost, stopping) = (work.lost.clone(), work.stopping.clone());
    let outcome = match AssertUnwindSafe(handler.handle(work)).catch_unwind().await {
        Ok(outcome) => outcome,
        Err(panic) => after_panic(&held, text_of(&*panic), &stopping).await,
    };
    tokio::select! {
        biased;
        // Whatever we would write is refused anyway.
        () = lost.cancelled() => {}
        () = settle(&*engine, &held, &outcome) => {}
    }
    number
}

/// A crash may be the entry's fault. It comes again, ever later, and not for ever.
async fn after_panic(held: &Held, text: String, stopping: &CancellationToken) -> Outcome {
    let Claimed { stream, entry, deliveries, .. } = &*held.claimed;
    tracing::error!(%stream, entry = %entry.id, deliveries, panic = text, "a handler panicked");
    if *deliveries >= MOST_DELIVERIES {
        return Outcome::Bury { reason: format!("the handler panicked, delivery {deliveries}: {text}") };
    }
    tokio::select! {
        () = stopping.cancelled() => {}
        () = sleep(PANIC_PAUSE * *deliveries) => {}
    }
    Outcome::HandBack
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}

/// Carries out an outcome, until it is done or the entry is somebody else's.
async fn settle(engine: &dyn Engine, held: &Held, outcome: &Outcome) {
    let Claimed { shard, stream, entry, .. } = &*held.claimed;
    let (stream, id) = (stream.clone(), entry.id);
    let ops = match outcome {
        Outcome::Settled => return,
        Outcome::Ack => vec![Op::Ack { stream: stream.clone(), id }],
        Outcome::HandBack => vec![Op::HandBack { stream: stream.clone(), id }],
        Outcome::Bury { reason } => vec![Op::Bury { stream: stream.clone(), id, reason: reason.clone() }],
        Outcome::Retry { after } => {
            let due = engine.now().saturating_add(i64::try_from(after.as_millis()).unwrap_or(i64::MAX));
            let (tag, payload) = (entry.tag, entry.payload.clone());
            let delay = Op::Delay { stream: stream.clone(), id: id.to_string(), due, tag, payload };
            vec![Op::Ack { stream: stream.clone(), id }, delay]
        }
    };
    let pending = Check::Pending { stream, id, consumer: held.consumer.to_string() };
    let batch = Batch { shard: *shard, checks: vec![pending], ops, releasing: true, ..Batch::default() };
    let mut trouble = Trouble::new("settle", &held.consumer);
    loop {
        match engine.commit(batch.clone()).await {
            Ok(_) => return,
            // Done before, by a commit whose answer got lost; or taken over.
            Err(Error::Conflict { .. }) => return,
            Err(error) if error.retryable() => {
                trouble.met(&error);
                sleep(trouble.pause().unwrap_or_default()).await;
            }
            Err(error) => {
                tracing::error!(%error, ?outcome, "an outcome was refused");
                return;
            }
        }
    }
}

/// One heartbeat under way.
type Beat = BoxFuture<'static, Result<Vec<(Number, Verdict)>>>;

/// Signs of life, at regular times while something is held.
struct Beating<H> {
    engine: Arc<dyn Engine>,
    handler: Arc<H>,
    every: Duration,
    lease: Duration,
    at: Option<Instant>,
    current: Option<Beat>,
    backoff: Backoff,
    trouble: Trouble,
}

impl<H: Handler> Beating<H> {
    fn new(worker: &Worker, handler: Arc<H>) -> Self {
        Self {
            engine: Arc::clone(&worker.engine),
            handler,
            every: worker.heartbeat,
            lease: worker.lease,
            at: None,
            current: None,
            backoff: Backoff::new(&worker.consumer),
            trouble: Trouble::new("heartbeat", &worker.consumer),
        }
    }

    /// The next verdicts. Cancel-safe: what is under way goes on with the next call.
    async fn next(&mut self, slots: &BTreeMap<Number, Slot>, silence: &mut Silence) -> Vec<(Number, Verdict)> {
        loop {
            if let Some(current) = &mut self.current {
                let result = current.await;
                self.current = None;
                let now = Instant::now();
                match result {
                    Ok(verdicts) => {
                        self.trouble.over();
                        silence.ends();
                        self.backoff.reset();
                        self.at = Some(now + self.every);
                        return verdicts;
                    }
                    Err(error) => {
                        self.trouble.met(&error);
                        silence.begins();
                        self.at = Some(now + self.backoff.next().min(self.every));
                    }
                }
            }
            // Somebody starts to hold something: its first sign of life is the claim itself.
            let at = *self.at.get_or_insert_with(|| Instant::now() + self.every);
            sleep_until(at).await;
            self.at = None;
            let ours = slots.iter().filter(|(_, slot)| !slot.lost.is_cancelled());
            let (numbers, held): (Vec<_>, Vec<_>) = ours.map(|(number, slot)| (*number, slot.held.clone())).unzip();
            if !held.is_empty() {
                self.current = Some(self.beat(numbers, held));
            }
        }
    }

    /// Nothing was held for a while.
    const fn rested(&mut self) {
        self.at = None;
    }

    fn beat(&self, numbers: Vec<Number>, held: Vec<Held>) -> Beat {
        let (engine, handler) = (Arc::clone(&self.engine), Arc::clone(&self.handler));
        let until = Instant::now() + self.lease;
        async move {
            let verdicts = AssertUnwindSafe(handler.heartbeat(&*engine, &held)).catch_unwind();
            let failed = |reason: String| Error::Unavailable(reason);
            let verdicts = timeout_at(until, verdicts).await.map_err(|_| failed("no answer in time".to_owned()))?;
            let verdicts = verdicts.map_err(|panic| failed(text_of(&*panic)))??;
            Ok(numbers.into_iter().zip(verdicts).collect())
        }
        .boxed()
    }
}

/// Waits for a future that may not be there.
async fn some<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
