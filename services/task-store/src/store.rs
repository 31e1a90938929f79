//! The one way to the engine: reads with a cache in front, and commits that are decided again until they fit.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::try_join_all;
use prost::Message as _;
use rialto_a2a::{
    Error, Kind,
    v1::{TaskArtifactUpdateEvent, stream_response::Payload},
};
use rialto_store::{Conflict, Engine, Entry, EntryId, Error as KernelError, Op, ReadLimit, Record, Shard};
use tracing::{debug, error, warn};

use crate::{
    artifacts::{self, Unfolded},
    cache::Cache,
    change::{Change, Decide, Decision, Need, State},
    keys::{ScopeKey, TaskId},
    observe, send,
    stored::{Context, Folded, Head, Held, Place, tag},
    watch::Tails,
};

/// Decisions for one operation before it gives up. Each conflict means that somebody else got on.
const TRIES: usize = 64;

/// A context that is deleted and made again counts its versions from 1 again. Nothing of it is deleted until a
/// minute after its last use, so what is younger than this cannot be mistaken for its successor.
const CONTEXT_AGE: Duration = Duration::from_secs(20);

/// A task that has ended is read from the cache; that it was deleted, or lost by the store, shows after this at
/// the latest.
const HEAD_AGE: Duration = Duration::from_secs(10);

/// Log entries that one read returns.
const BATCH: ReadLimit = ReadLimit { entries: 512, bytes: 1 << 20 };

/// Why an operation did nothing.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The run entry is not the caller's.
    NotPending,
    /// Anything else.
    Refused(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<Stop> for Error {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Refused(error) => error,
            Stop::NotPending => Self::internal(),
        }
    }
}

/// Records, logs and commits, in the terms of this service.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) engine: Arc<dyn Engine>,
    heads: Cache<Head>,
    contexts: Cache<Context>,
    pub(crate) tails: Tails,
}

/// An event that the head counts is not in the log.
#[derive(Debug)]
pub(crate) struct Gap {
    /// Its number.
    missing: u64,
    /// Number of the event that is there instead.
    found: Option<u64>,
}

/// What to believe before anything was read.
#[derive(Debug)]
pub(crate) enum Start {
    /// The task may be known from before.
    Known(TaskId),
    /// Most likely there is no such task yet, and if the context is not known, no such context.
    New(TaskId, String),
}

impl Store {
    pub(crate) fn new(engine: Arc<dyn Engine>, cached: usize) -> Self {
        let shards = engine.shards();
        Self {
            engine,
            heads: Cache::new(cached, Some(HEAD_AGE)),
            contexts: Cache::new(cached, Some(CONTEXT_AGE)),
            tails: Tails::new(shards),
        }
    }

    /// Believes nothing that was read before: behind a new connection may be a store that lost its newest writes,
    /// and will use their versions again.
    pub(crate) fn forget_all(&self) {
        self.heads.clear();
        self.contexts.clear();
    }

    /// Lets an operation decide until its change fits what is stored. An answer that writes nothing is only given
    /// on what was read now: what is cached may be old.
    pub(crate) async fn transact<D: Decide>(&self, start: Start, operation: &D) -> Result<D::Reply, Stop> {
        let mut fresh = false;
        let mut state = match start {
            Start::Known(task) => {
                let cached = self.heads.get(&task.head());
                let head = match cached {
                    Some(held) => Some(held),
                    None => {
                        fresh = true;
                        self.head(task).await?
                    }
                };
                State {
                    task,
                    heads: vec![(task, head)],
                    context: None,
                    unfolded: None,
                    kept: None,
                    marked: None,
                    message: None,
                }
            }
            Start::New(task, context) => {
                let held = self.contexts.get(&context);
                State {
                    task,
                    heads: vec![(task, None)],
                    context: Some((context, held)),
                    unfolded: None,
                    kept: None,
                    marked: None,
                    message: None,
                }
            }
        };
        for _ in 0..TRIES {
            let mut change = match operation.decide(&state, self.engine.now()) {
                Decision::Need(need) => {
                    match self.fetch(&mut state, need, fresh).await? {
                        Some(read_now) => fresh &= read_now,
                        None => {
                            self.refresh(&mut state, operation.mark()).await?;
                            fresh = true;
                        }
                    }
                    continue;
                }
                Decision::Commit(change, reply) => (change, reply),
                Decision::Reply(reply) if fresh => return Ok(reply),
                Decision::Refuse(error) if fresh => return Err(error.into()),
                Decision::Reply(_) | Decision::Refuse(_) => {
                    self.refresh(&mut state, operation.mark()).await?;
                    fresh = true;
                    continue;
                }
            };
            match self.commit(&state, &mut change.0).await {
                Ok(()) => return Ok(change.1),
                Err(KernelError::Conflict { reason: Conflict::NotPending, .. }) => return Err(Stop::NotPending),
                Err(KernelError::Conflict { reason: Conflict::TooLong(_), .. }) => {
                    return Err(send::queue_full().into());
                }
                Err(KernelError::Conflict { .. }) => {
                    self.refresh(&mut state, operation.mark()).await?;
                    fresh = true;
                }
                Err(error) => return Err(failed(&error).into()),
            }
        }
        warn!(task = %state.task, "too many conflicts");
        Err(Error::unavailable().into())
    }

    async fn commit(&self, state: &State, change: &mut Change) -> rialto_store::Result<()> {
        // New for each try: the same id must never stand for two different batches.
        let batch = change.batch(state, uuid::Uuid::new_v4().into_bytes());
        let mut runs: BTreeMap<String, usize> = BTreeMap::new();
        let appends = batch.ops.iter().filter_map(|op| match op {
            Op::Append { into, .. } => Some(into),
            _ => None,
        });
        for (n, into) in appends.enumerate() {
            if let Some((key, _)) = into {
                runs.insert(key.clone(), n);
            }
        }
        let committed = observe::commit(&*self.engine, batch).await?;
        let mut versions = committed.versions.into_iter();
        for draft in std::mem::take(&mut change.drafts) {
            let Some(version) = versions.next() else { break };
            let key = draft.task.head();
            let run = match runs.get(&key) {
                Some(n) => committed.entries.get(*n).copied(),
                None => draft.was.and_then(|held| held.run),
            };
            self.heads.put(&key, Held { version, value: Arc::new(draft.head), run });
            self.tails.feed(draft.task, draft.events);
        }
        if let Some((key, _)) = &state.context {
            match change.context.take() {
                Some(Some(context)) => {
                    if let Some(version) = versions.next() {
                        self.contexts.put(key, Held { version, value: Arc::new(context), run: None });
                    }
                }
                Some(None) => self.contexts.forget(key),
                None => {}
            }
        }
        for (task, _) in &change.deletes {
            self.heads.forget(&task.head());
        }
        Ok(())
    }

    /// Reads again everything that the last decision was made on.
    async fn refresh(&self, state: &mut State, mark: Option<String>) -> Result<(), Error> {
        state.unfolded = None;
        state.kept = None;
        state.message = None;
        for (task, _) in &state.heads {
            self.heads.forget(&task.head());
        }
        state.heads.truncate(1);
        let head = state.task.head();
        let mut keys = vec![head.as_str()];
        if let Some((key, _)) = &state.context {
            self.contexts.forget(key);
            keys.push(key);
        }
        keys.extend(mark.as_deref());
        let mut records = self.records(state.task.shard(), &keys).await?.into_iter();
        let held = self.keep(&self.heads, &head, records.next().flatten())?;
        if let Some((key, context)) = &mut state.context {
            *context = self.keep(&self.contexts, key, records.next().flatten())?;
        }
        state.heads[0].1 = held;
        state.marked = mark.map(|_| records.next().flatten().is_some());
        Ok(())
    }

    /// Gets what a decision needs; says whether it was read just now. `None` when it is there no more, because the
    /// task has changed.
    async fn fetch(&self, state: &mut State, need: Need, fresh: bool) -> Result<Option<bool>, Error> {
        let shard = state.task.shard();
        match need {
            Need::Context(key) => {
                let cached = self.contexts.get(&key).filter(|_| !fresh);
                let held = match cached.clone() {
                    Some(held) => Some(held),
                    None => {
                        let record = self.records(shard, &[&key]).await?.pop().flatten();
                        self.contexts.forget(&key);
                        self.keep(&self.contexts, &key, record)?
                    }
                };
                state.context = Some((key, held));
                Ok(Some(cached.is_none()))
            }
            Need::Head(task) => {
                let head = self.head(task).await?;
                state.heads.push((task, head));
                Ok(Some(true))
            }
            Need::Kept(at) => {
                let Some(held) = state.head().cloned() else { return Err(Error::internal()) };
                match self.artifacts_at(state.task, &held.value, at).await? {
                    Ok(artifacts) => state.kept = Some((at, Some(artifacts))),
                    Err(gap) if self.is_proven(state.task, &held, &gap).await? => state.kept = Some((at, None)),
                    Err(_) => return Ok(None),
                }
                Ok(Some(true))
            }
            Need::Message => {
                let Some(held) = state.head().cloned() else { return Err(Error::internal()) };
                let (place, number) = (Place::default(), held.value.turn.as_ref().map_or(0, |turn| turn.message));
                let messages = self.messages(state.task, &held.value, &place, number.saturating_sub(1), number).await?;
                state.message = Some(messages.into_iter().next());
                Ok(Some(true))
            }
            Need::Unfolded(places) => {
                let Some(held) = state.head().cloned() else { return Err(Error::internal()) };
                match self.unfolded(state.task, &held.value, places).await? {
                    Ok(unfolded) => state.unfolded = Some(unfolded),
                    Err(gap) if self.is_proven(state.task, &held, &gap).await? => return Err(Error::internal()),
                    Err(_) => return Ok(None),
                }
                Ok(Some(true))
            }
        }
    }

    /// Whether a gap is a fault: not when the task has changed since its head was read, for then its log may have
    /// been folded away.
    async fn is_proven(&self, task: TaskId, held: &Held<Head>, gap: &Gap) -> Result<bool, Error> {
        let now = self.head(task).await?;
        if now.is_none_or(|now| now.version != held.version) {
            return Ok(false);
        }
        let Gap { missing, found } = *gap;
        let (first_event, last_event, logged) = (held.value.first_event, held.value.last_event, held.value.logged());
        error!(%task, missing, found, first_event, logged, last_event, "the log of a task has a gap");
        Ok(true)
    }

    /// Reads the artifact events that no record holds, and the records that they build on.
    async fn unfolded(
        &self,
        task: TaskId,
        head: &Head,
        mut asked: BTreeSet<usize>,
    ) -> Result<Result<Unfolded, Gap>, Error> {
        let mut log = Vec::new();
        let (after, to) = head.unfolded_range();
        if let Err(gap) = self.each_update(task, head, after, to, |_, update| log.push(update)).await? {
            return Ok(Err(gap));
        }
        asked.append(&mut artifacts::touched(head, &log));
        let records = self.folded(task, asked.iter().copied()).await?;
        let mut records: BTreeMap<_, _> =
            records.into_iter().filter_map(|(place, record)| Some((place, record.artifact?))).collect();
        records.extend(head.inlined().map_err(corrupt)?);
        Ok(Ok(Unfolded { log, records, asked }))
    }

    /// Reads the artifact events after one event up to another, with their numbers. Each event between the two must be
    /// there.
    pub(crate) async fn each_update(
        &self,
        task: TaskId,
        head: &Head,
        mut after: u64,
        to: u64,
        mut each: impl FnMut(u64, TaskArtifactUpdateEvent) + Send,
    ) -> Result<Result<(), Gap>, Error> {
        let place = Place::default();
        while after < to {
            let entries = self.log(task, head, after).await?;
            if entries.is_empty() {
                return Ok(Err(Gap { missing: after + 1, found: None }));
            }
            for entry in entries {
                if entry.id.0 != after + 1 {
                    return Ok(Err(Gap { missing: after + 1, found: Some(entry.id.0) }));
                }
                after = entry.id.0;
                if entry.tag == tag::ARTIFACT
                    && let Some(Payload::ArtifactUpdate(update)) = place.event(entry.payload).map_err(corrupt)?.payload
                {
                    each(after, update);
                }
                if after == to {
                    break;
                }
            }
        }
        Ok(Ok(()))
    }

    /// Reads artifact records by their place in the head's list.
    pub(crate) async fn folded(
        &self,
        task: TaskId,
        places: impl Iterator<Item = usize>,
    ) -> Result<BTreeMap<usize, Folded>, Error> {
        let places: Vec<usize> = places.collect();
        let keys: Vec<String> = places.iter().map(|place| task.artifact(*place)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if keys.is_empty() {
            return Ok(BTreeMap::new());
        }
        let records = self.records(task.shard(), &keys).await?;
        let found = places.into_iter().zip(records).filter_map(|(place, record)| Some((place, record?)));
        found.map(|(place, record)| Ok((place, Folded::decode(record.bytes).map_err(corrupt)?))).collect()
    }

    /// Reads a task's head as it is now.
    pub(crate) async fn head(&self, task: TaskId) -> Result<Option<Held<Head>>, Error> {
        let key = task.head();
        let record = self.records(task.shard(), &[&key]).await?.pop().flatten();
        self.keep(&self.heads, &key, record)
    }

    /// How many tasks of a caller have a turn that waits, is queued or runs. Counted where that is bounded only; in
    /// all shards, so it may be off by what is under way.
    pub(crate) async fn turns_of(&self, scope: &ScopeKey) -> Result<u64, Error> {
        let index = scope.turns();
        let counts = (0..self.engine.shards()).map(|shard| self.engine.index_count(shard, &index, None));
        let counts = try_join_all(counts).await.map_err(|error| failed(&error))?;
        Ok(counts.into_iter().sum())
    }

    /// The head of a task that is known here to have ended.
    pub(crate) fn ended(&self, task: TaskId) -> Option<Held<Head>> {
        self.heads.get(&task.head()).filter(|held| held.value.state().is_terminal())
    }

    /// The head as it was last seen here, or as it is now.
    pub(crate) async fn head_at_least(&self, task: TaskId, last_event: u64) -> Result<Option<Held<Head>>, Error> {
        match self.heads.get(&task.head()).filter(|held| held.value.last_event >= last_event) {
            Some(held) => Ok(Some(held)),
            None => self.head(task).await,
        }
    }

    /// Reads heads of one shard as they are now.
    pub(crate) async fn heads(&self, shard: Shard, tasks: &[TaskId]) -> Result<Vec<Option<Held<Head>>>, Error> {
        let keys: Vec<String> = tasks.iter().map(|task| task.head()).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let records = self.records(shard, &keys).await?;
        records.into_iter().map(|record| record.map(Held::decode).transpose().map_err(corrupt)).collect()
    }

    /// Reads a context as it is now.
    pub(crate) async fn context(&self, shard: Shard, key: &str) -> Result<Option<Held<Context>>, Error> {
        let record = self.records(shard, &[key]).await?.pop().flatten();
        record.map(Held::decode).transpose().map_err(corrupt)
    }

    /// Reads some events after a number: from the log what this head does not have. No events are missing between
    /// the two, because they only ever move from the head to the log.
    pub(crate) async fn log(&self, task: TaskId, head: &Head, after: u64) -> Result<Vec<Entry>, Error> {
        if after >= head.logged() {
            return Ok(head.events_after(after).collect());
        }
        let mut entries = self.read(task.shard(), &task.log(), after, BATCH).await?;
        if let Some(last) = entries.last().map(|entry| entry.id.0).filter(|last| *last >= head.logged()) {
            entries.extend(head.events_after(last));
        }
        Ok(entries)
    }

    /// Reads a numbered stream.
    pub(crate) async fn read(
        &self,
        shard: Shard,
        stream: &str,
        after: u64,
        limit: ReadLimit,
    ) -> Result<Vec<Entry>, Error> {
        self.engine.read(shard, stream, EntryId::number(after), limit).await.map_err(|error| failed(&error))
    }

    pub(crate) async fn records(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>, Error> {
        self.engine.get(shard, keys).await.map_err(|error| failed(&error))
    }

    fn keep<T: prost::Message + Default>(
        &self,
        cache: &Cache<T>,
        key: &str,
        record: Option<Record>,
    ) -> Result<Option<Held<T>>, Error> {
        let held = record.map(Held::<T>::decode).transpose().map_err(corrupt)?;
        match &held {
            Some(held) => cache.put(key, held.clone()),
            None => cache.forget(key),
        }
        Ok(held)
    }
}

/// What a caller is told about a failed kernel call.
pub(crate) fn failed(error: &KernelError) -> Error {
    match error {
        KernelError::Unavailable(_) | KernelError::Full => {
            debug!(%error, "store call failed");
            Error::unavailable()
        }
        KernelError::Conflict { .. } | KernelError::Malformed(_) => {
            error!(%error, "store call was wrong");
            Kind::Internal.into()
        }
    }
}

/// Stored bytes that this version cannot read.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(crate) fn corrupt(error: prost::DecodeError) -> Error {
    error!(%error, "a record does not decode");
    Error::internal()
}

/// The id just before another one.
pub(crate) fn before(id: EntryId) -> EntryId {
    match id {
        EntryId(ms, 0) => EntryId(ms.saturating_sub(1), u64::MAX),
        EntryId(ms, seq) => EntryId(ms, seq - 1),
    }
}
