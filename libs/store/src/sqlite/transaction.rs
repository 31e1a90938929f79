//! One batch inside a transaction: its checks, then its operations.

use std::{collections::HashMap, sync::Arc};

use super::{
    Shared,
    data::{self, Data},
    groups::Cell,
};
use crate::{
    At, Batch, Check, Committed, Conflict, Entry, EntryId, Error, Millis, Notice, Op, Rate, Result, Shard,
    worker::{DEAD, DeadEntry},
};

/// Delayed entries of one stream that one step moves.
const TICK: u32 = 256;

/// A transaction in progress: everything that becomes true when it is committed.
#[derive(Debug)]
pub(super) struct Transaction<D> {
    shared: Arc<Shared>,
    pub(super) data: D,
    /// To be told after the commit, in order.
    events: Vec<Event>,
    /// Entries that some batch of this transaction took from their owners, and whether they are gone.
    settled: HashMap<(Shard, String, EntryId), bool>,
    /// Ownerships that batches rely on, until the transaction ends.
    held: Vec<(Arc<Cell>, EntryId)>,
}

#[derive(Debug)]
enum Event {
    Appended { shard: Shard, stream: String, entry: Entry },
    Settled { shard: Shard, stream: String, id: EntryId },
    HandedBack { shard: Shard, stream: String, id: EntryId },
    Dropped { shard: Shard, stream: String },
    Delayed { shard: Shard, stream: String, due: Millis },
    Ticked { shard: Shard, stream: String, due: Option<Millis> },
    Notice { shard: Shard, topic: String, payload: String },
}

/// Why a batch was not applied.
#[derive(Debug)]
pub(super) enum Fail {
    /// It was refused; the transaction is as before.
    Refused(Error),
    /// Something was written, or may have been: the transaction must be rolled back.
    Broken(Error),
}

impl From<rusqlite::Error> for Fail {
    fn from(error: rusqlite::Error) -> Self {
        Self::Broken(super::unavailable(&error))
    }
}

/// Finds the faults that need no look into the store.
pub(super) fn validate(batch: &Batch) -> Result<()> {
    if let Some((lead, _)) = &batch.commit
        && !batch.ops.iter().any(|op| matches!(op, Op::Put { key, .. } if key == lead))
    {
        return Err(Error::Malformed(format!("the lead record {lead} is not put")));
    }
    for check in &batch.checks {
        if let Check::Limit { key, rate: Rate { burst: 0, .. } } = check {
            return Err(Error::Malformed(format!("limit {key} lets nothing through")));
        }
    }
    for op in &batch.ops {
        if let Op::Append { at: At::Number(n), stream, .. } = op
            && i64::try_from(*n).is_err()
        {
            return Err(Error::Malformed(format!("entry number {n} of {stream} is too large")));
        }
    }
    Ok(())
}

impl<D: Data> Transaction<D> {
    pub(super) fn new(shared: Arc<Shared>, data: D) -> Self {
        Self { shared, data, events: Vec::new(), settled: HashMap::new(), held: Vec::new() }
    }

    /// Applies a batch, or refuses it without a trace.
    pub(super) fn apply(&mut self, batch: &Batch) -> Result<Committed, Fail> {
        let shard = batch.shard;
        if let Some((lead, id)) = &batch.commit
            && let Some(committed) = self.data.repeated(shard, lead, id)?
        {
            return Ok(committed);
        }
        let mut limits = Vec::new();
        for (n, check) in batch.checks.iter().enumerate() {
            if let Some(reason) = self.check(shard, check, &mut limits)? {
                return Err(Fail::Refused(Error::Conflict { check: n, reason }));
            }
        }
        let mut committed = Committed { at: self.shared.clock.now(), ..Committed::default() };
        if let Some(fault) = self.fault(batch, committed.at)? {
            return Err(Fail::Refused(Error::Malformed(fault)));
        }
        for (key, full_at) in limits {
            self.data.set_full_at(shard, key, full_at)?;
        }
        for op in &batch.ops {
            self.operate(shard, op, &mut committed)?;
        }
        if let Some((lead, id)) = &batch.commit {
            self.data.set_commit(shard, lead, id, &committed)?;
        }
        self.data.end_batch()?;
        Ok(committed)
    }

    fn check<'a>(
        &mut self,
        shard: Shard,
        check: &'a Check,
        limits: &mut Vec<(&'a str, i64)>,
    ) -> data::Result<Option<Conflict>> {
        Ok(match check {
            Check::Version { key, version } => {
                let found = self.data.version(shard, key)?;
                (found == 0 || found != *version).then(|| Conflict::Version((found > 0).then_some(found)))
            }
            Check::Absent { key } => {
                let found = self.data.version(shard, key)?;
                (found > 0).then_some(Conflict::Version(Some(found)))
            }
            Check::Pending { stream, id, consumer } => {
                (!self.hold(shard, stream, *id, consumer)).then_some(Conflict::NotPending)
            }
            Check::Tail { stream, id } => {
                let tail = self.data.tail(shard, stream)?;
                (tail != *id).then_some(Conflict::Tail(tail))
            }
            Check::ShorterThan { stream, len } => {
                let found = self.data.length(shard, stream)?;
                (found >= *len).then_some(Conflict::TooLong(found))
            }
            Check::Limit { key, rate } => {
                let full_at = match limits.iter_mut().find(|(known, _)| known == key) {
                    Some((_, full_at)) => Some(*full_at),
                    None => self.data.full_at(shard, key)?,
                };
                match crate::limit::take(full_at, *rate, self.shared.clock.micros()) {
                    Ok(full_at) => {
                        limits.retain(|(known, _)| known != key);
                        limits.push((key, full_at));
                        None
                    }
                    Err(wait) => Some(Conflict::Limited(wait)),
                }
            }
        })
    }

    /// Whether the consumer owns the entry. If so, nobody takes it over until the transaction ends.
    fn hold(&mut self, shard: Shard, stream: &str, id: EntryId, consumer: &str) -> bool {
        if !self.settled.is_empty() && self.settled.contains_key(&(shard, stream.to_owned(), id)) {
            return false;
        }
        let Some(cell) = self.shared.groups.find(shard, stream) else { return false };
        let owned = cell.lock().hold(id, consumer);
        if owned {
            self.held.push((cell, id));
        }
        owned
    }

    /// Finds operations that could not be applied when their turn comes, before the first one is.
    fn fault(&mut self, batch: &Batch, now: Millis) -> data::Result<Option<String>> {
        let shard = batch.shard;
        let mut tails: Vec<(&str, EntryId)> = Vec::new();
        let mut records: Vec<(&str, bool)> = Vec::new();
        for op in &batch.ops {
            match op {
                Op::Put { key, .. } => records.push((key, true)),
                Op::Delete { key } => records.push((key, false)),
                Op::Drop { stream } => tails.push((stream, EntryId::ZERO)),
                Op::Append { stream, at, into, .. } => {
                    let known = tails.iter().rev().find(|(known, _)| known == stream).map(|(_, tail)| *tail);
                    let tail = match known {
                        Some(tail) => tail,
                        None => self.data.tail(shard, stream)?,
                    };
                    let id = next_id(*at, tail, now);
                    if id <= tail {
                        return Ok(Some(format!("entry {id} of {stream} is not above the newest, {tail}")));
                    }
                    tails.push((stream, id));
                    if let Some((key, _)) = into {
                        let known = records.iter().rev().find(|(known, _)| known == key).map(|(_, exists)| *exists);
                        let exists = match known {
                            Some(exists) => exists,
                            None => self.data.version(shard, key)? > 0,
                        };
                        if !exists {
                            return Ok(Some(format!("no record {key} to write a ref into")));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }

    fn operate(&mut self, shard: Shard, op: &Op, committed: &mut Committed) -> Result<(), Fail> {
        match op {
            Op::Put { key, bytes } => committed.versions.push(self.data.put(shard, key, bytes)?),
            Op::Delete { key } => self.data.delete(shard, key)?,
            Op::Index { index, member, was, now } => self.data.move_member(shard, index, member, *was, *now)?,
            Op::Append { stream, at, tag, payload, into } => {
                let id = self.append(shard, stream, *at, *tag, payload.clone(), committed.at)?;
                committed.entries.push(id);
                if let Some((key, name)) = into {
                    self.data.set_ref(shard, key, name, id)?;
                }
            }
            Op::Delay { stream, id, due, tag, payload } => {
                self.data.delay(shard, stream, id, *due, *tag, payload)?;
                self.events.push(Event::Delayed { shard, stream: stream.clone(), due: *due });
            }
            Op::Undelay { stream, id } => self.data.undelay(shard, stream, id)?,
            Op::Ack { stream, id } => {
                if self.deliveries(shard, stream, *id).is_some() {
                    self.remove(shard, stream, *id)?;
                }
            }
            Op::Remove { stream, id } => self.remove(shard, stream, *id)?,
            Op::HandBack { stream, id } => {
                self.settled.entry((shard, stream.clone(), *id)).or_insert(false);
                self.events.push(Event::HandedBack { shard, stream: stream.clone(), id: *id });
            }
            Op::Bury { stream, id, reason } => self.bury(shard, stream, *id, reason, committed.at)?,
            Op::Drop { stream } => {
                self.data.drop_stream(shard, stream)?;
                self.events.push(Event::Dropped { shard, stream: stream.clone() });
            }
            Op::Notify { topic, payload } => {
                let (topic, payload) = (topic.clone(), payload.clone());
                self.events.push(Event::Notice { shard, topic, payload });
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        shard: Shard,
        stream: &str,
        at: At,
        tag: u8,
        payload: bytes::Bytes,
        now: Millis,
    ) -> data::Result<EntryId> {
        let id = next_id(at, self.data.tail(shard, stream)?, now);
        let entry = Entry { id, tag, payload };
        self.data.push(shard, stream, &entry, at == At::Next)?;
        self.events.push(Event::Appended { shard, stream: stream.to_owned(), entry });
        Ok(id)
    }

    /// How often an entry was handed out; `None` when it never was, or is gone.
    fn deliveries(&self, shard: Shard, stream: &str, id: EntryId) -> Option<u32> {
        if self.settled.get(&(shard, stream.to_owned(), id)) == Some(&true) {
            return None;
        }
        self.shared.groups.find(shard, stream)?.lock().deliveries(id)
    }

    fn remove(&mut self, shard: Shard, stream: &str, id: EntryId) -> data::Result<()> {
        self.data.remove(shard, stream, id)?;
        self.settled.insert((shard, stream.to_owned(), id), true);
        self.events.push(Event::Settled { shard, stream: stream.to_owned(), id });
        Ok(())
    }

    fn bury(&mut self, shard: Shard, stream: &str, id: EntryId, reason: &str, now: Millis) -> data::Result<()> {
        let Some(deliveries) = self.deliveries(shard, stream, id) else { return Ok(()) };
        let found = self.data.entry(shard, stream, id)?;
        self.remove(shard, stream, id)?;
        let Some(Entry { tag, payload, .. }) = found else { return Ok(()) };
        let (stream, reason) = (stream.to_owned(), reason.to_owned());
        let dead = DeadEntry { stream, id, tag, payload, deliveries, reason, at: now };
        self.append(shard, DEAD, At::Next, tag, dead.encode().into(), now)?;
        Ok(())
    }

    /// Moves entries that are due into their stream; says how many.
    pub(super) fn tick(&mut self, shard: Shard, stream: &str) -> data::Result<u64> {
        let now = self.shared.clock.now();
        let due = self.data.take_due(shard, stream, now, TICK)?;
        let moved = due.len() as u64;
        for (tag, payload) in due {
            self.append(shard, stream, At::Next, tag, payload, now)?;
        }
        let due = self.data.next_due(shard, stream)?;
        self.events.push(Event::Ticked { shard, stream: stream.to_owned(), due });
        Ok(moved)
    }

    /// Tells the world what became true.
    pub(super) fn committed(&mut self) {
        self.settled.clear();
        let mut changed: Vec<Arc<Cell>> = Vec::new();
        for event in self.events.drain(..) {
            publish(&self.shared, event, &mut changed);
        }
        self.release();
        for cell in changed {
            cell.wake.notify_one();
        }
    }

    /// Forgets what did not become true.
    pub(super) fn rolled_back(&mut self) {
        self.settled.clear();
        self.events.clear();
        self.release();
    }

    fn release(&mut self) {
        for (cell, id) in self.held.drain(..) {
            cell.lock().release(id);
        }
    }
}

/// Takes an event to where it matters; notes the groups that have something new to claim.
fn publish(shared: &Shared, event: Event, changed: &mut Vec<Arc<Cell>>) {
    let group = |shard: Shard, stream: &str| shared.groups.find(shard, stream);
    match event {
        Event::Appended { shard, stream, entry } => {
            let Some(cell) = group(shard, &stream) else { return };
            cell.lock().push(entry);
            note(changed, cell);
        }
        Event::Settled { shard, stream, id } => {
            if let Some(cell) = group(shard, &stream) {
                cell.lock().forget(id);
            }
        }
        Event::HandedBack { shard, stream, id } => {
            let Some(cell) = group(shard, &stream) else { return };
            cell.lock().hand_back(id);
            note(changed, cell);
        }
        Event::Dropped { shard, stream } => {
            if let Some(cell) = group(shard, &stream) {
                cell.lock().reset();
            }
        }
        Event::Delayed { shard, stream, due } => {
            if let Some(cell) = group(shard, &stream)
                && cell.lock().expect_due(due)
            {
                // All of them: whoever sleeps until a later moment must sleep less now.
                cell.wake.notify_waiters();
            }
        }
        Event::Ticked { shard, stream, due } => {
            if let Some(cell) = group(shard, &stream) {
                cell.lock().set_due(due);
                cell.wake.notify_waiters();
            }
        }
        Event::Notice { shard, topic, payload } => shared.hub.send(shard, topic, Notice { payload }),
    }
}

fn note(changed: &mut Vec<Arc<Cell>>, cell: Arc<Cell>) {
    if !changed.iter().any(|known| Arc::ptr_eq(known, &cell)) {
        changed.push(cell);
    }
}

/// The id of an entry at the end of a stream; not above the tail if the caller's number is not.
fn next_id(at: At, tail: EntryId, now: Millis) -> EntryId {
    let ms = u64::try_from(now).unwrap_or(0);
    match at {
        At::Number(n) => EntryId::number(n),
        At::Next if ms > tail.0 => EntryId(ms, 0),
        At::Next => EntryId(tail.0, tail.1 + 1),
    }
}
