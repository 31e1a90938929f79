//! One batch inside a transaction: its checks, then its operations.

use std::{collections::HashMap, sync::Arc};

use rusqlite::{Connection, OptionalExtension, params};

use super::{
    Shared,
    cache::{Cache, sql, unsql},
    codec,
    groups::Cell,
};
use crate::{
    At, Batch, Check, Committed, Conflict, EntryId, Error, Millis, Notice, Op, Rate, Result, Shard,
    worker::{DEAD, DeadEntry},
};

/// Delayed entries of one stream that one step moves.
const TICK: i64 = 256;

/// A transaction in progress: everything that becomes true when it is committed.
#[derive(Debug)]
pub(super) struct Transaction {
    shared: Arc<Shared>,
    pub(super) cache: Cache,
    /// To be told after `COMMIT`, in order.
    events: Vec<Event>,
    /// Entries that some batch of this transaction took from their owners, and whether they are gone.
    settled: HashMap<(Shard, String, EntryId), bool>,
    /// Ownerships that batches rely on, until the transaction ends.
    held: Vec<(Arc<Cell>, EntryId)>,
}

#[derive(Debug)]
enum Event {
    Appended { shard: Shard, stream: String },
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
    /// A check failed; the transaction is as before.
    Refused(Error),
    /// Something was written, or may have been: the transaction must be rolled back.
    Broken(Error),
}

impl From<rusqlite::Error> for Fail {
    fn from(error: rusqlite::Error) -> Self {
        Self::Broken(super::unavailable(&error))
    }
}

/// What happens to a record at the end of its batch.
enum Write<'a> {
    Bytes(&'a [u8]),
    Refs,
    Delete,
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

impl Transaction {
    pub(super) fn new(shared: Arc<Shared>, cache: Cache) -> Self {
        Self { shared, cache, events: Vec::new(), settled: HashMap::new(), held: Vec::new() }
    }

    /// Applies a batch, or refuses it without a trace.
    pub(super) fn apply(&mut self, conn: &Connection, batch: &Batch) -> Result<Committed, Fail> {
        let shard = batch.shard;
        if let Some((lead, id)) = &batch.commit
            && let Some((last, committed)) = &self.cache.record(conn, shard, lead)?.meta.commit
            && last == id
        {
            return Ok(committed.clone());
        }
        let mut limits = HashMap::new();
        for (n, check) in batch.checks.iter().enumerate() {
            if let Some(reason) = self.check(conn, shard, check, &mut limits)? {
                return Err(Fail::Refused(Error::Conflict { check: n, reason }));
            }
        }
        for (key, full_at) in limits {
            conn.prepare_cached("REPLACE INTO limits(shard, key, full_at) VALUES(?1, ?2, ?3)")?
                .execute(params![shard, key, full_at])?;
        }
        let mut committed = Committed { at: self.shared.clock.now(), ..Committed::default() };
        let mut writes = Vec::new();
        for op in &batch.ops {
            self.operate(conn, shard, op, &mut committed, &mut writes)?;
        }
        if let Some((lead, id)) = &batch.commit {
            self.cache.record(conn, shard, lead)?.meta.commit = Some((*id, committed.clone()));
        }
        for (key, write) in writes {
            self.write(conn, shard, key, &write)?;
        }
        Ok(committed)
    }

    fn check<'a>(
        &mut self,
        conn: &Connection,
        shard: Shard,
        check: &'a Check,
        limits: &mut HashMap<&'a str, i64>,
    ) -> rusqlite::Result<Option<Conflict>> {
        Ok(match check {
            Check::Version { key, version } => {
                let found = self.cache.record(conn, shard, key)?.version;
                (found == 0 || found != *version).then(|| Conflict::Version((found > 0).then_some(found)))
            }
            Check::Absent { key } => {
                let found = self.cache.record(conn, shard, key)?.version;
                (found > 0).then_some(Conflict::Version(Some(found)))
            }
            Check::Pending { stream, id, consumer } => {
                (!self.hold(shard, stream, *id, consumer)).then_some(Conflict::NotPending)
            }
            Check::Tail { stream, id } => {
                let tail = self.cache.tail(conn, shard, stream)?;
                (tail != *id).then_some(Conflict::Tail(tail))
            }
            Check::ShorterThan { stream, len } => {
                let found = self.cache.length(conn, shard, stream)?;
                (found >= *len).then_some(Conflict::TooLong(found))
            }
            Check::Limit { key, rate } => {
                let full_at = match limits.get(key.as_str()) {
                    Some(full_at) => Some(*full_at),
                    None => conn
                        .prepare_cached("SELECT full_at FROM limits WHERE shard = ?1 AND key = ?2")?
                        .query_row(params![shard, key], |row| row.get(0))
                        .optional()?,
                };
                match crate::limit::take(full_at, *rate, self.shared.clock.micros()) {
                    Ok(full_at) => {
                        limits.insert(key, full_at);
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

    fn operate<'a>(
        &mut self,
        conn: &Connection,
        shard: Shard,
        op: &'a Op,
        committed: &mut Committed,
        writes: &mut Vec<(&'a str, Write<'a>)>,
    ) -> Result<(), Fail> {
        match op {
            Op::Put { key, bytes } => {
                let record = self.cache.record(conn, shard, key)?;
                record.version += 1;
                committed.versions.push(record.version);
                note(writes, key, Write::Bytes(bytes));
            }
            Op::Delete { key } => {
                *self.cache.record(conn, shard, key)? = super::cache::Known::default();
                note(writes, key, Write::Delete);
            }
            Op::Index { index, member, was, now } => {
                self.cache.move_member(conn, shard, index, member, (*was, *now))?;
            }
            Op::Append { stream, at, tag, payload, into } => {
                let id = self.next_id(conn, shard, stream, *at, committed.at)?;
                self.append(conn, shard, stream, (id, *at == At::Next), *tag, payload)?;
                committed.entries.push(id);
                if let Some((key, name)) = into {
                    let record = self.cache.record(conn, shard, key)?;
                    if record.version == 0 {
                        return Err(Fail::Broken(Error::Malformed(format!("no record {key} to write a ref into"))));
                    }
                    record.meta.refs.insert(name.clone(), id);
                    note(writes, key, Write::Refs);
                }
            }
            Op::Delay { stream, id, due, tag, payload } => {
                conn.prepare_cached(
                    "REPLACE INTO delayed(shard, stream, id, due, tag, payload) VALUES(?1, ?2, ?3, ?4, ?5, ?6)",
                )?
                .execute(params![shard, stream, id, due, tag, &payload[..]])?;
                self.events.push(Event::Delayed { shard, stream: stream.clone(), due: *due });
            }
            Op::Undelay { stream, id } => {
                conn.prepare_cached("DELETE FROM delayed WHERE shard = ?1 AND stream = ?2 AND id = ?3")?
                    .execute(params![shard, stream, id])?;
            }
            Op::Ack { stream, id } => {
                if self.deliveries(shard, stream, *id).is_some() {
                    self.cache.remove_entry(conn, shard, stream, *id)?;
                    self.settle(shard, stream, *id);
                }
            }
            Op::Remove { stream, id } => {
                self.cache.remove_entry(conn, shard, stream, *id)?;
                self.settle(shard, stream, *id);
            }
            Op::HandBack { stream, id } => {
                self.settled.entry((shard, stream.clone(), *id)).or_insert(false);
                self.events.push(Event::HandedBack { shard, stream: stream.clone(), id: *id });
            }
            Op::Bury { stream, id, reason } => self.bury(conn, shard, (stream, *id), reason, committed.at)?,
            Op::Drop { stream } => {
                self.cache.drop_stream(conn, shard, stream)?;
                self.events.push(Event::Dropped { shard, stream: stream.clone() });
            }
            Op::Notify { topic, payload } => {
                let (topic, payload) = (topic.clone(), payload.clone());
                self.events.push(Event::Notice { shard, topic, payload });
            }
        }
        Ok(())
    }

    fn next_id(&mut self, conn: &Connection, shard: Shard, stream: &str, at: At, now: Millis) -> Result<EntryId, Fail> {
        let tail = self.cache.tail(conn, shard, stream)?;
        match at {
            At::Next => Ok(following(tail, now)),
            At::Number(n) if EntryId::number(n) > tail => Ok(EntryId::number(n)),
            At::Number(n) => {
                let reason = format!("entry {n}-0 of {stream} is not above the newest, {tail}");
                Err(Fail::Broken(Error::Malformed(reason)))
            }
        }
    }

    fn append(
        &mut self,
        conn: &Connection,
        shard: Shard,
        stream: &str,
        (id, counted): (EntryId, bool),
        tag: u8,
        payload: &[u8],
    ) -> rusqlite::Result<()> {
        self.cache.appended(conn, shard, stream, id, counted)?;
        conn.prepare_cached(
            "INSERT INTO entries(shard, stream, ms, seq, tag, deliveries, payload) VALUES(?1, ?2, ?3, ?4, ?5, 0, ?6)",
        )?
        .execute(params![shard, stream, sql(id.0), sql(id.1), tag, payload])?;
        self.events.push(Event::Appended { shard, stream: stream.to_owned() });
        Ok(())
    }

    /// How often an entry was handed out; `None` when it never was, or is gone.
    fn deliveries(&self, shard: Shard, stream: &str, id: EntryId) -> Option<u32> {
        if self.settled.get(&(shard, stream.to_owned(), id)) == Some(&true) {
            return None;
        }
        self.shared.groups.find(shard, stream)?.lock().deliveries(id)
    }

    fn settle(&mut self, shard: Shard, stream: &str, id: EntryId) {
        self.settled.insert((shard, stream.to_owned(), id), true);
        self.events.push(Event::Settled { shard, stream: stream.to_owned(), id });
    }

    fn bury(
        &mut self,
        conn: &Connection,
        shard: Shard,
        (stream, id): (&str, EntryId),
        reason: &str,
        now: Millis,
    ) -> Result<(), Fail> {
        let Some(deliveries) = self.deliveries(shard, stream, id) else { return Ok(()) };
        let found = conn
            .prepare_cached(
                "SELECT tag, payload FROM entries WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",
            )?
            .query_row(params![shard, stream, sql(id.0), sql(id.1)], |row| Ok((row.get(0)?, row.get::<_, Vec<u8>>(1)?)))
            .optional()?;
        self.settle(shard, stream, id);
        let Some((tag, payload)) = found else { return Ok(()) };
        let dead = DeadEntry {
            stream: stream.to_owned(),
            id,
            tag,
            payload: payload.into(),
            deliveries,
            reason: reason.to_owned(),
            at: now,
        };
        self.cache.remove_entry(conn, shard, stream, id)?;
        let at = self.next_id(conn, shard, DEAD, At::Next, now)?;
        self.append(conn, shard, DEAD, (at, true), tag, &dead.encode())?;
        Ok(())
    }

    fn write(&mut self, conn: &Connection, shard: Shard, key: &str, write: &Write<'_>) -> rusqlite::Result<()> {
        let known = self.cache.record(conn, shard, key)?;
        match write {
            Write::Bytes(bytes) => conn
                .prepare_cached("REPLACE INTO records(shard, key, version, meta, bytes) VALUES(?1, ?2, ?3, ?4, ?5)")?
                .execute(params![shard, key, sql(known.version), codec::encode(&known.meta), bytes])?,
            Write::Refs => conn
                .prepare_cached("UPDATE records SET meta = ?3 WHERE shard = ?1 AND key = ?2")?
                .execute(params![shard, key, codec::encode(&known.meta)])?,
            Write::Delete => conn
                .prepare_cached("DELETE FROM records WHERE shard = ?1 AND key = ?2")?
                .execute(params![shard, key])?,
        };
        Ok(())
    }

    /// Moves entries that are due into their stream; says how many.
    pub(super) fn tick(&mut self, conn: &Connection, shard: Shard, stream: &str) -> Result<u64, Fail> {
        let now = self.shared.clock.now();
        let due = conn
            .prepare_cached(
                "SELECT id, tag, payload FROM delayed WHERE shard = ?1 AND stream = ?2 AND due <= ?3
                 ORDER BY due, id LIMIT ?4",
            )?
            .query_map(params![shard, stream, now, TICK], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, u8>(1)?, row.get::<_, Vec<u8>>(2)?))
            })?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        for (delayed, tag, payload) in &due {
            let id = self.next_id(conn, shard, stream, At::Next, now)?;
            self.append(conn, shard, stream, (id, true), *tag, payload)?;
            conn.prepare_cached("DELETE FROM delayed WHERE shard = ?1 AND stream = ?2 AND id = ?3")?
                .execute(params![shard, stream, delayed])?;
        }
        let next = super::read::next_due(conn, shard, stream)?;
        self.events.push(Event::Ticked { shard, stream: stream.to_owned(), due: next });
        Ok(due.len() as u64)
    }

    /// Tells the world what became true.
    pub(super) fn committed(&mut self) {
        self.settled.clear();
        let mut appended: Vec<Arc<Cell>> = Vec::new();
        for event in self.events.drain(..) {
            publish(&self.shared, event, &mut appended);
        }
        self.release();
        for cell in appended {
            cell.wake.notify_one();
        }
        self.cache.trim();
    }

    /// Forgets what did not become true.
    pub(super) fn rolled_back(&mut self) {
        self.settled.clear();
        self.events.clear();
        self.cache.clear();
        self.release();
    }

    fn release(&mut self) {
        for (cell, id) in self.held.drain(..) {
            cell.lock().release(id);
        }
    }
}

fn publish(shared: &Shared, event: Event, appended: &mut Vec<Arc<Cell>>) {
    let group = |shard: Shard, stream: &str| shared.groups.find(shard, stream);
    match event {
        Event::Appended { shard, stream } => {
            let Some(cell) = group(shard, &stream) else { return };
            cell.lock().more = true;
            if !appended.iter().any(|known| Arc::ptr_eq(known, &cell)) {
                appended.push(cell);
            }
        }
        Event::Settled { shard, stream, id } => {
            if let Some(cell) = group(shard, &stream) {
                cell.lock().forget(id);
            }
        }
        Event::HandedBack { shard, stream, id } => {
            let Some(cell) = group(shard, &stream) else { return };
            cell.lock().hand_back(id);
            appended.push(cell);
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

/// Notes what happens to a record; what was noted before is overruled, except that refs need no more than a value.
fn note<'a>(writes: &mut Vec<(&'a str, Write<'a>)>, key: &'a str, write: Write<'a>) {
    match writes.iter_mut().find(|(known, _)| *known == key) {
        Some(known) => {
            if !matches!(write, Write::Refs) {
                known.1 = write;
            }
        }
        None => writes.push((key, write)),
    }
}

/// The store's next id.
fn following(tail: EntryId, now: Millis) -> EntryId {
    let ms = unsql(now);
    if ms > tail.0 { EntryId(ms, 0) } else { EntryId(tail.0, tail.1 + 1) }
}
