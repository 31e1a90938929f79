//! Data in the database, as the writer sees it.
//!
//! It is the only one that writes, so what it wrote or read once stays true and need not be asked for again.
//! Numbers that change with every commit (lengths, counts) are written once per transaction. After a rollback
//! everything is forgotten.

use std::collections::HashMap;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, params};

use super::{
    codec::{self, Meta},
    data::{Data, Result},
    read::{blob, entry, entry_id},
    statements::Statements,
};
use crate::{CommitId, Committed, Entry, EntryId, Millis, Shard};

/// Things remembered per kind before they are all forgotten.
const REMEMBERED: usize = 20_000;

/// Index ids taken from the store at once.
const ID_BLOCK: i64 = 1024;

#[derive(Debug)]
pub(super) struct Sql<'c> {
    pub(super) statements: Statements<'c>,
    records: Map<Known>,
    /// All streams that have a row are here from the start: a log, of which there are many, has none.
    streams: Map<Stream>,
    logs: Map<Stream>,
    indexes: Map<Index>,
    dirty_streams: Vec<(Shard, String)>,
    dirty_indexes: Vec<(Shard, String)>,
    /// What the running batch does to records; the last word counts.
    writes: Vec<(Shard, String, Write)>,
    next_index: i64,
    /// Ids below this are ours.
    reserved: i64,
}

#[derive(Debug)]
struct Map<T> {
    shards: Vec<HashMap<String, T>>,
}

/// A record without its value.
#[derive(Debug, Default)]
struct Known {
    /// 0 = there is none.
    version: u64,
    meta: Meta,
}

#[derive(Debug)]
enum Write {
    Bytes(Bytes),
    Meta,
    Delete,
}

/// A stream.
#[derive(Clone, Debug)]
struct Stream {
    /// The highest id so far, also when that entry is gone.
    tail: EntryId,
    /// Entries; counted when somebody asks.
    entries: Option<u64>,
    dirty: bool,
}

/// An index.
#[derive(Debug)]
struct Index {
    id: i64,
    members: u64,
    stored: bool,
    dirty: bool,
}

impl<T> Map<T> {
    fn new(shards: Shard) -> Self {
        Self { shards: (0..shards).map(|_| HashMap::new()).collect() }
    }

    /// Batches are checked for their shard before.
    fn of(&mut self, shard: Shard) -> &mut HashMap<String, T> {
        &mut self.shards[usize::from(shard)]
    }

    fn clear(&mut self) {
        self.shards.iter_mut().for_each(HashMap::clear);
    }

    fn trim(&mut self) {
        if self.shards.iter().map(HashMap::len).sum::<usize>() > REMEMBERED {
            self.clear();
        }
    }
}

impl<'c> Sql<'c> {
    pub(super) fn new(conn: &'c Connection, shards: Shard) -> Result<Self> {
        let next_index = conn.query_row("SELECT value FROM meta WHERE name = 'next_index'", [], |row| row.get(0))?;
        let mut sql = Self {
            statements: Statements::prepare(conn)?,
            records: Map::new(shards),
            streams: Map::new(shards),
            logs: Map::new(shards),
            indexes: Map::new(shards),
            dirty_streams: Vec::new(),
            dirty_indexes: Vec::new(),
            writes: Vec::new(),
            next_index,
            reserved: next_index,
        };
        sql.load_streams(conn)?;
        Ok(sql)
    }

    fn load_streams(&mut self, conn: &Connection) -> Result<()> {
        self.streams.clear();
        let mut select = conn.prepare_cached("SELECT ms, seq, entries, shard, name FROM streams")?;
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            let stream = Stream { tail: entry_id(row)?, entries: Some(unsql(row.get(2)?)), dirty: false };
            let shard: Shard = row.get(3)?;
            if usize::from(shard) < self.streams.shards.len() {
                self.streams.of(shard).insert(row.get(4)?, stream);
            }
        }
        Ok(())
    }

    /// Forgets what a rollback made untrue.
    pub(super) fn rolled_back(&mut self, conn: &Connection) -> Result<()> {
        self.records.clear();
        self.logs.clear();
        self.indexes.clear();
        self.dirty_streams.clear();
        self.dirty_indexes.clear();
        self.writes.clear();
        // The block may not have been written; what was used of it stays unused.
        self.reserved = self.next_index;
        self.load_streams(conn)
    }

    /// Keeps memory bounded. Only between transactions, when nothing is dirty.
    pub(super) fn trim(&mut self) {
        self.records.trim();
        self.logs.trim();
        self.indexes.trim();
    }

    /// Writes down what the transaction changed.
    pub(super) fn flush(&mut self) -> Result<()> {
        for (shard, name) in self.dirty_streams.drain(..) {
            let Some(stream) = self.streams.of(shard).get_mut(&name) else { continue };
            stream.dirty = false;
            let (EntryId(ms, seq), entries) = (stream.tail, stream.entries.unwrap_or(0));
            self.statements.put_stream.execute(params![shard, name, sql(ms), sql(seq), sql(entries)])?;
        }
        for (shard, name) in self.dirty_indexes.drain(..) {
            let Some(index) = self.indexes.of(shard).get_mut(&name) else { continue };
            index.dirty = false;
            if index.members > 0 {
                index.stored = true;
                self.statements.put_index.execute(params![shard, name, index.id, sql(index.members)])?;
                continue;
            }
            if index.stored {
                self.statements.delete_index.execute(params![shard, name])?;
            }
            self.indexes.of(shard).remove(&name);
        }
        Ok(())
    }

    /// What is known about a record.
    fn record(&mut self, shard: Shard, key: &str) -> Result<&mut Known> {
        let records = self.records.of(shard);
        if !records.contains_key(key) {
            let found = self.statements.record.query_row(params![shard, key], |row| {
                let meta = codec::decode(row.get_ref(1)?.as_blob()?).ok_or(rusqlite::Error::InvalidQuery)?;
                Ok(Known { version: unsql(row.get(0)?), meta })
            });
            records.insert(key.to_owned(), found.optional()?.unwrap_or_default());
        }
        records.get_mut(key).ok_or(rusqlite::Error::QueryReturnedNoRows)
    }

    /// Notes what happens to a record when the batch ends. A new value is written with what else there is.
    fn note(&mut self, shard: Shard, key: &str, write: Write) {
        match self.writes.iter_mut().find(|(_, known, _)| known == key) {
            Some((_, _, Write::Bytes(_))) if matches!(write, Write::Meta) => {}
            Some(known) => known.2 = write,
            None => self.writes.push((shard, key.to_owned(), write)),
        }
    }

    /// A stream, or a log.
    fn stream(&mut self, shard: Shard, name: &str) -> Result<&mut Stream> {
        if self.streams.of(shard).contains_key(name) {
            return self.streams.of(shard).get_mut(name).ok_or(rusqlite::Error::QueryReturnedNoRows);
        }
        let logs = self.logs.of(shard);
        if !logs.contains_key(name) {
            let tail = self.statements.tail.query_row(params![shard, name], entry_id).optional()?;
            let entries = if tail.is_none() { Some(0) } else { None };
            logs.insert(name.to_owned(), Stream { tail: tail.unwrap_or(EntryId::ZERO), entries, dirty: false });
        }
        logs.get_mut(name).ok_or(rusqlite::Error::QueryReturnedNoRows)
    }

    /// A stream whose row is to be written; one that was a log so far gets a row.
    fn dirty_stream(&mut self, shard: Shard, name: &str) -> Result<&mut Stream> {
        if !self.streams.of(shard).contains_key(name) {
            self.length(shard, name)?;
            if let Some(log) = self.logs.of(shard).remove(name) {
                self.streams.of(shard).insert(name.to_owned(), log);
            }
        }
        let stream = self.streams.of(shard).get_mut(name).ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        if !std::mem::replace(&mut stream.dirty, true) {
            self.dirty_streams.push((shard, name.to_owned()));
        }
        Ok(stream)
    }

    /// Id and size of an index; `make` it when there is none.
    fn index(&mut self, shard: Shard, name: &str, make: bool) -> Result<Option<(i64, u64)>> {
        if let Some(index) = self.indexes.of(shard).get(name) {
            return Ok(Some((index.id, index.members)));
        }
        let found = self.statements.index.query_row(params![shard, name], |row| Ok((row.get(0)?, unsql(row.get(1)?))));
        let found = found.optional()?;
        let stored = found.is_some();
        let (id, members) = match found {
            Some(found) => found,
            None if make => (self.new_index()?, 0),
            None => return Ok(None),
        };
        self.indexes.of(shard).insert(name.to_owned(), Index { id, members, stored, dirty: false });
        Ok(Some((id, members)))
    }

    /// An id that no index ever had.
    fn new_index(&mut self) -> Result<i64> {
        if self.next_index >= self.reserved {
            self.reserved = self.next_index + ID_BLOCK;
            self.statements.reserve_ids.execute([self.reserved])?;
        }
        let id = self.next_index;
        self.next_index += 1;
        Ok(id)
    }
}

impl Data for Sql<'_> {
    fn version(&mut self, shard: Shard, key: &str) -> Result<u64> {
        Ok(self.record(shard, key)?.version)
    }

    fn repeated(&mut self, shard: Shard, key: &str, id: &CommitId) -> Result<Option<Committed>> {
        let commit = self.record(shard, key)?.meta.commit.as_ref();
        Ok(commit.filter(|(last, _)| last == id).map(|(_, committed)| committed.clone()))
    }

    fn put(&mut self, shard: Shard, key: &str, bytes: &Bytes) -> Result<u64> {
        let record = self.record(shard, key)?;
        record.version += 1;
        let version = record.version;
        self.note(shard, key, Write::Bytes(bytes.clone()));
        Ok(version)
    }

    fn delete(&mut self, shard: Shard, key: &str) -> Result<()> {
        *self.record(shard, key)? = Known::default();
        self.note(shard, key, Write::Delete);
        Ok(())
    }

    fn set_ref(&mut self, shard: Shard, key: &str, name: &str, id: EntryId) -> Result<()> {
        self.record(shard, key)?.meta.refs.insert(name.to_owned(), id);
        self.note(shard, key, Write::Meta);
        Ok(())
    }

    fn set_commit(&mut self, shard: Shard, key: &str, id: &CommitId, committed: &Committed) -> Result<()> {
        let record = self.record(shard, key)?;
        if record.version > 0 {
            record.meta.commit = Some((*id, committed.clone()));
            self.note(shard, key, Write::Meta);
        }
        Ok(())
    }

    fn end_batch(&mut self) -> Result<()> {
        let mut writes = std::mem::take(&mut self.writes);
        for (shard, key, write) in writes.drain(..) {
            let Some(known) = self.records.of(shard).get(&key) else { continue };
            match write {
                Write::Bytes(bytes) => {
                    let (version, meta) = (sql(known.version), codec::encode(&known.meta));
                    self.statements.put_record.execute(params![shard, key, version, meta, &bytes[..]])?
                }
                Write::Meta => self.statements.put_meta.execute(params![shard, key, codec::encode(&known.meta)])?,
                Write::Delete => self.statements.delete_record.execute(params![shard, key])?,
            };
        }
        self.writes = writes;
        Ok(())
    }

    fn move_member(
        &mut self,
        shard: Shard,
        name: &str,
        member: &str,
        was: Option<i64>,
        now: Option<i64>,
    ) -> Result<()> {
        if was == now {
            return Ok(());
        }
        let Some((id, before)) = self.index(shard, name, now.is_some())? else { return Ok(()) };
        let mut members = before;
        if let Some(was) = was {
            let removed = self.statements.delete_member.execute(params![id, was, member])?;
            members = members.saturating_sub(removed as u64);
        }
        if let Some(now) = now {
            members += self.statements.put_member.execute(params![id, now, member])? as u64;
        }
        if members != before
            && let Some(index) = self.indexes.of(shard).get_mut(name)
        {
            index.members = members;
            if !std::mem::replace(&mut index.dirty, true) {
                self.dirty_indexes.push((shard, name.to_owned()));
            }
        }
        Ok(())
    }

    fn tail(&mut self, shard: Shard, stream: &str) -> Result<EntryId> {
        Ok(self.stream(shard, stream)?.tail)
    }

    fn length(&mut self, shard: Shard, name: &str) -> Result<u64> {
        if let Some(entries) = self.stream(shard, name)?.entries {
            return Ok(entries);
        }
        let entries = self.statements.count_entries.query_row(params![shard, name], |row| row.get(0).map(unsql))?;
        self.stream(shard, name)?.entries = Some(entries);
        Ok(entries)
    }

    fn push(&mut self, shard: Shard, name: &str, entry: &Entry, counted: bool) -> Result<()> {
        let known = self.streams.of(shard).contains_key(name);
        let stream = if known || counted { self.dirty_stream(shard, name)? } else { self.stream(shard, name)? };
        stream.tail = entry.id;
        stream.entries = stream.entries.map(|entries| entries + 1);
        let (ms, seq) = (sql(entry.id.0), sql(entry.id.1));
        self.statements.put_entry.execute(params![shard, name, ms, seq, entry.tag, &entry.payload[..]])?;
        Ok(())
    }

    fn entry(&mut self, shard: Shard, stream: &str, id: EntryId) -> Result<Option<Entry>> {
        let found = self.statements.entry.query_row(params![shard, stream, sql(id.0), sql(id.1)], entry);
        found.optional()
    }

    fn remove(&mut self, shard: Shard, name: &str, id: EntryId) -> Result<()> {
        // Counted before, or the count would be one too low afterwards.
        self.length(shard, name)?;
        let removed = self.statements.delete_entry.execute(params![shard, name, sql(id.0), sql(id.1)])?;
        if removed > 0 {
            let stream = self.dirty_stream(shard, name)?;
            stream.entries = stream.entries.map(|entries| entries.saturating_sub(1));
        }
        Ok(())
    }

    fn drop_stream(&mut self, shard: Shard, name: &str) -> Result<()> {
        self.statements.delete_entries.execute(params![shard, name])?;
        if self.streams.of(shard).remove(name).is_some() {
            self.dirty_streams.retain(|(at, dirty)| *at != shard || dirty != name);
            self.statements.delete_stream.execute(params![shard, name])?;
        }
        let empty = Stream { tail: EntryId::ZERO, entries: Some(0), dirty: false };
        self.logs.of(shard).insert(name.to_owned(), empty);
        Ok(())
    }

    fn delay(&mut self, shard: Shard, stream: &str, id: &str, due: Millis, tag: u8, payload: &Bytes) -> Result<()> {
        self.statements.put_delayed.execute(params![shard, stream, id, due, tag, &payload[..]])?;
        Ok(())
    }

    fn undelay(&mut self, shard: Shard, stream: &str, id: &str) -> Result<()> {
        self.statements.delete_delayed.execute(params![shard, stream, id])?;
        Ok(())
    }

    fn take_due(&mut self, shard: Shard, stream: &str, now: Millis, most: u32) -> Result<Vec<(u8, Bytes)>> {
        let due = self.statements.due.query_map(params![shard, stream, now, most], |row| {
            Ok((row.get::<_, String>(0)?, row.get(1)?, blob(row, 2)?))
        })?;
        let due = due.collect::<Result<Vec<_>>>()?;
        for (id, _, _) in &due {
            self.statements.delete_delayed.execute(params![shard, stream, id])?;
        }
        Ok(due.into_iter().map(|(_, tag, payload)| (tag, payload)).collect())
    }

    fn next_due(&mut self, shard: Shard, stream: &str) -> Result<Option<Millis>> {
        self.statements.next_due.query_row(params![shard, stream], |row| row.get(0))
    }

    fn full_at(&mut self, shard: Shard, key: &str) -> Result<Option<i64>> {
        self.statements.full_at.query_row(params![shard, key], |row| row.get(0)).optional()
    }

    fn set_full_at(&mut self, shard: Shard, key: &str, full_at: i64) -> Result<()> {
        self.statements.put_full_at.execute(params![shard, key, full_at])?;
        Ok(())
    }

    fn sweep_limits(&mut self, now: i64) -> Result<()> {
        self.statements.sweep_limits.execute([now])?;
        Ok(())
    }
}

/// SQLite's integers are signed. Numbers beyond that are refused at the door, or mean "past every entry".
pub(super) fn sql(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The other way round.
pub(super) fn unsql(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
