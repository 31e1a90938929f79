//! Entries that were given up: counted, listed, shown and dropped.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use futures::future::try_join_all;
use prost::Message as _;
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{self, DeadRun, DropDeadReply, DropDeadRequest, ListDeadReply, ListDeadRequest, RunEntry};
use rialto_store::{
    Batch, Entry, EntryId, Millis, Op, ReadLimit, Shard,
    worker::{DEAD, DeadEntry},
};

use super::{MAX_LOOKS, by_shard, no_such_page, page, unsigned};
use crate::{
    Inner,
    cancel::hex,
    keys::TaskId,
    store::{Store, before, failed},
};

/// Entries that one read of a shard returns, and bytes.
const READ: ReadLimit = ReadLimit { entries: 64, bytes: 256 << 10 };

/// Bytes of entries after which a page ends early: ids of messages are strangers' text.
const PAGE_BYTES: usize = 4 << 20;

/// Entries that one call drops.
const DROPPED: usize = 1000;

/// Characters of a reason that are shown.
const MAX_REASON: usize = 2000;

/// Bytes of a payload that are shown when it is no run entry.
const MAX_PAYLOAD: usize = 256;

/// Where a dead entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeadId {
    pub(super) shard: Shard,
    pub(super) id: EntryId,
}

impl fmt::Display for DeadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.shard, self.id)
    }
}

impl FromStr for DeadId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (shard, id) = text.split_once('-').ok_or(())?;
        Ok(Self { shard: shard.parse().map_err(drop)?, id: id.parse().map_err(drop)? })
    }
}

/// Whether a text has the form of the id of a dead entry, such as `0-1764525600000-0`.
#[must_use]
pub fn is_dead_id(text: &str) -> bool {
    text.parse::<DeadId>().is_ok()
}

/// The agent whose work stream this is.
fn agent_of(stream: &str) -> &str {
    stream.strip_prefix("runs:").unwrap_or(stream)
}

/// An entry with what was in it.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) id: DeadId,
    bytes: usize,
    /// `None` when it is not what [`Op::Bury`] writes.
    dead: Option<DeadEntry>,
    /// `None` when there was something else in it.
    pub(super) run: Option<(TaskId, RunEntry)>,
}

impl Found {
    fn read(id: DeadId, entry: &Entry) -> Self {
        let bytes = entry.payload.len();
        let dead = DeadEntry::decode(&entry.payload);
        let run = dead.as_ref().and_then(|dead| RunEntry::decode(dead.payload.clone()).ok()).and_then(|run| {
            let task = TaskId::parse(&run.task_id, Shard::MAX).filter(|task| task.shard() == id.shard)?;
            Some((task, run)).filter(|(_, run)| run.turn_id.len() == 16)
        });
        Self { id, bytes, dead, run }
    }

    fn agent(&self) -> &str {
        self.dead.as_ref().map_or("", |dead| agent_of(&dead.stream))
    }

    fn describe(&self, now: Millis) -> tasks::DeadEntry {
        let mut entry =
            tasks::DeadEntry { id: self.id.to_string(), agent: self.agent().to_owned(), ..Default::default() };
        match &self.dead {
            Some(dead) => {
                entry.reason = cut(&dead.reason);
                entry.at_ms = unsigned(dead.at);
                entry.deliveries = dead.deliveries;
                entry.stream.clone_from(&dead.stream);
                entry.entry = dead.id.to_string();
                entry.tag = dead.tag.into();
                entry.bytes = dead.payload.len() as u64;
            }
            None => {
                entry.reason = "it is not in the form of dead entries".to_owned();
                entry.at_ms = self.id.id.0;
                entry.bytes = self.bytes as u64;
            }
        }
        entry.age_ms = unsigned(now).saturating_sub(entry.at_ms);
        if let Some((_, run)) = &self.run {
            entry.attempts = run.attempts;
            entry.run = Some(DeadRun {
                schema: run.schema,
                agent: run.agent.clone(),
                task_id: run.task_id.clone(),
                turn_id: hex(&run.turn_id),
                message_id: run.message_id.clone(),
                queued_at_ms: unsigned(run.queued_at_ms),
                traceparent: run.traceparent.clone(),
            });
        }
        entry
    }
}

/// The beginning of a text.
fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// How many dead entries there are of each agent. Counted once, then only when something has changed.
#[derive(Debug, Default)]
pub(crate) struct Counts(Mutex<BTreeMap<Shard, Counted>>);

#[derive(Clone, Debug, Default)]
struct Counted {
    newest: EntryId,
    entries: u64,
    agents: BTreeMap<String, u64>,
}

impl Counts {
    pub(super) async fn by_agent(&self, store: &Store) -> Result<BTreeMap<String, u64>, Error> {
        let counted = by_shard(store, |shard| self.shard(store, shard)).await?;
        let mut agents = BTreeMap::new();
        for (agent, entries) in counted.into_iter().flat_map(|counted| counted.agents) {
            *agents.entry(agent).or_default() += entries;
        }
        Ok(agents)
    }

    async fn shard(&self, store: &Store, shard: Shard) -> Result<Counted, Error> {
        let entries = store.engine.depth(shard, DEAD).await.map_err(|error| failed(&error))?.waiting;
        if entries == 0 {
            return Ok(Counted::default());
        }
        let newest = store.engine.read_last(shard, DEAD, 1).await.map_err(|error| failed(&error))?;
        let newest = newest.first().map_or(EntryId::ZERO, |entry| entry.id);
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&shard).cloned().unwrap_or_default();
        // Ids only rise: with the newest and the number the same, so are the others.
        if (known.newest, known.entries) == (newest, entries) {
            return Ok(known);
        }
        let mut counted = Counted::default();
        loop {
            let read = store.engine.read(shard, DEAD, counted.newest, READ).await.map_err(|error| failed(&error))?;
            let Some(last) = read.last() else { break };
            counted.newest = last.id;
            counted.entries += read.len() as u64;
            for entry in read {
                let dead = DeadEntry::decode(&entry.payload);
                let agent = dead.as_ref().map_or("", |dead| agent_of(&dead.stream));
                match counted.agents.get_mut(agent) {
                    Some(count) => *count += 1,
                    None => drop(counted.agents.insert(agent.to_owned(), 1)),
                }
            }
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, counted.clone());
        Ok(counted)
    }
}

/// The dead entries of one shard, as far as they were read.
#[derive(Debug)]
struct Lane {
    shard: Shard,
    after: EntryId,
    ready: VecDeque<Entry>,
    ended: bool,
}

impl Lane {
    async fn fill(&mut self, store: &Store) -> Result<(), Error> {
        if self.ended || !self.ready.is_empty() {
            return Ok(());
        }
        let read = store.engine.read(self.shard, DEAD, self.after, READ).await.map_err(|error| failed(&error))?;
        match read.last() {
            Some(last) => self.after = last.id,
            None => self.ended = true,
        }
        self.ready.extend(read);
        Ok(())
    }
}

/// A place among the dead entries of all shards: after this one, by (id, shard).
fn read_cursor(text: &str) -> Result<(EntryId, Shard), Error> {
    let read = || {
        let (id, shard) = text.rsplit_once('-')?;
        Some((id.parse().ok()?, shard.parse().ok()?))
    };
    read().ok_or_else(no_such_page)
}

impl Inner {
    pub(super) async fn list_dead(&self, request: &ListDeadRequest) -> Result<ListDeadReply, Error> {
        let limit = page(request.limit)?;
        let cursor = match request.after.as_str() {
            "" => None,
            after => Some(read_cursor(after)?),
        };
        let now = self.store.engine.now();
        let mut lanes: Vec<Lane> = (0..self.store.engine.shards())
            .map(|shard| {
                let after = match cursor {
                    None => EntryId::ZERO,
                    Some((id, last)) if shard <= last => id,
                    Some((id, _)) => before(id),
                };
                Lane { shard, after, ready: VecDeque::new(), ended: false }
            })
            .collect();
        let (mut reply, mut bytes) = (ListDeadReply::default(), 0);
        for look in 0.. {
            try_join_all(lanes.iter_mut().map(|lane| lane.fill(&self.store))).await?;
            let next = lanes.iter_mut().filter(|lane| !lane.ready.is_empty()).min_by_key(|lane| lane.ready[0].id);
            let Some(lane) = next else {
                reply.next.clear();
                break;
            };
            if look == MAX_LOOKS || reply.entries.len() == limit || bytes > PAGE_BYTES {
                break;
            }
            let Some(entry) = lane.ready.pop_front() else { break };
            bytes += entry.payload.len();
            reply.next = format!("{}-{}", entry.id, lane.shard);
            let found = Found::read(DeadId { shard: lane.shard, id: entry.id }, &entry);
            if request.agent.is_empty() || found.agent() == request.agent {
                reply.entries.push(found.describe(now));
            }
        }
        Ok(reply)
    }

    pub(super) async fn get_dead(&self, id: &str) -> Result<tasks::DeadEntry, Error> {
        let found = self.find(id).await?.ok_or_else(|| no_entry(id))?;
        let mut entry = found.describe(self.store.engine.now());
        let (replay, hindrance) = self.outlook(&found).await?.told();
        (entry.replay, entry.hindrance) = (replay.to_owned(), hindrance.to_owned());
        match &found.run {
            Some((task, _)) => {
                let head = self.store.head(*task).await?;
                entry.task_state = head.map(|held| held.value.state().as_str_name().to_owned()).unwrap_or_default();
            }
            None => {
                let payload = found.dead.as_ref().map(|dead| dead.payload.clone()).unwrap_or_default();
                entry.payload_hex = hex(&payload[..payload.len().min(MAX_PAYLOAD)]);
            }
        }
        Ok(entry)
    }

    /// Reads one entry.
    pub(super) async fn find(&self, text: &str) -> Result<Option<Found>, Error> {
        let Some(id) = text.parse::<DeadId>().ok().filter(|id| id.shard < self.store.engine.shards()) else {
            return Ok(None);
        };
        let limit = ReadLimit { entries: 1, ..READ };
        let read = self.store.engine.read(id.shard, DEAD, before(id.id), limit).await;
        let read = read.map_err(|error| failed(&error))?.into_iter().find(|entry| entry.id == id.id);
        Ok(read.map(|entry| Found::read(id, &entry)))
    }

    pub(super) async fn drop_dead(&self, request: &DropDeadRequest) -> Result<DropDeadReply, Error> {
        if !request.id.is_empty() {
            let found = self.find(&request.id).await?.ok_or_else(|| no_entry(&request.id))?;
            self.remove(found.id.shard, vec![found.id.id]).await?;
            return Ok(DropDeadReply { dropped: 1, ..DropDeadReply::default() });
        }
        let until = match request.until_at_ms {
            0 => unsigned(self.store.engine.now()),
            until => until,
        };
        let mut reply = DropDeadReply { until_at_ms: until, ..DropDeadReply::default() };
        for shard in 0..self.store.engine.shards() {
            let mut after = EntryId::ZERO;
            loop {
                let read = self.store.engine.read(shard, DEAD, after, READ).await.map_err(|error| failed(&error))?;
                let Some(last) = read.last().map(|last| last.id).filter(|_| read[0].id.0 <= until) else { break };
                after = last;
                let wanted = read.into_iter().filter(|entry| entry.id.0 <= until);
                let found = wanted.map(|entry| Found::read(DeadId { shard, id: entry.id }, &entry));
                let found = found.filter(|found| request.agent.is_empty() || found.agent() == request.agent);
                let ids: Vec<EntryId> = found.map(|found| found.id.id).collect();
                if ids.is_empty() {
                    continue;
                }
                if usize::try_from(reply.dropped).unwrap_or(usize::MAX) >= DROPPED {
                    return Ok(DropDeadReply { more: true, ..reply });
                }
                reply.dropped += ids.len() as u64;
                self.remove(shard, ids).await?;
            }
        }
        Ok(reply)
    }

    pub(super) async fn remove(&self, shard: Shard, ids: Vec<EntryId>) -> Result<(), Error> {
        let ops = ids.into_iter().map(remove).collect();
        let batch = Batch { shard, ops, releasing: true, ..Batch::default() };
        self.store.engine.commit(batch).await.map_err(|error| failed(&error)).map(drop)
    }
}

pub(super) fn remove(id: EntryId) -> Op {
    Op::Remove { stream: DEAD.to_owned(), id }
}

pub(super) fn no_entry(id: &str) -> Error {
    Error::new(Kind::TaskNotFound, format!("there is no dead entry {id}; it may have been replayed or dropped"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_dead_entry_is_one_word() {
        let id = DeadId { shard: 3, id: EntryId(1_764_525_600_000, 7) };
        assert_eq!(id.to_string(), "3-1764525600000-7");
        assert_eq!("3-1764525600000-7".parse(), Ok(id));
        for other in ["", "3", "3-7", "x-1-2", "3-1-2-3", "-1-2", "99999-1-2"] {
            assert_eq!(other.parse::<DeadId>(), Err(()), "{other}");
        }
    }
}
