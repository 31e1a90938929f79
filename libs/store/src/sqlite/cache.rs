//! What the writer knows without asking: it is the only one that writes, so what it wrote or read once stays true.
//!
//! Numbers that change with every commit (lengths, counts) are written once per transaction. After a rollback
//! everything is forgotten.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, params};

use super::codec::{self, Meta};
use crate::{EntryId, Shard};

/// Things remembered per kind before they are all forgotten.
const REMEMBERED: usize = 20_000;

/// Index ids taken from the store at once.
const ID_BLOCK: i64 = 1024;

#[derive(Debug)]
pub(super) struct Cache {
    records: Map<Known>,
    streams: Map<Stream>,
    indexes: Map<Index>,
    dirty_streams: Vec<(Shard, String)>,
    dirty_indexes: Vec<(Shard, String)>,
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
pub(super) struct Known {
    /// 0 = there is none.
    pub(super) version: u64,
    pub(super) meta: Meta,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// The highest id so far, also when that entry is gone.
    pub(super) tail: EntryId,
    /// Entries; counted when somebody asks.
    entries: Option<u64>,
    /// It has a row of its own. A log, which only ever grows until it is dropped, needs none.
    stored: bool,
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

    fn of(&mut self, shard: Shard) -> &mut HashMap<String, T> {
        let shard = usize::from(shard);
        if shard >= self.shards.len() {
            self.shards.resize_with(shard + 1, HashMap::new);
        }
        &mut self.shards[shard]
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

impl Cache {
    pub(super) fn new(conn: &Connection, shards: Shard) -> rusqlite::Result<Self> {
        let next_index = next_index(conn)?;
        Ok(Self {
            records: Map::new(shards),
            streams: Map::new(shards),
            indexes: Map::new(shards),
            dirty_streams: Vec::new(),
            dirty_indexes: Vec::new(),
            next_index,
            reserved: next_index,
        })
    }

    /// Forgets what a rollback made untrue.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.streams.clear();
        self.indexes.clear();
        self.dirty_streams.clear();
        self.dirty_indexes.clear();
        // The block may not have been written; what was used of it stays unused.
        self.reserved = self.next_index;
    }

    /// Keeps memory bounded. Only between transactions, when nothing is dirty.
    pub(super) fn trim(&mut self) {
        self.records.trim();
        self.streams.trim();
        self.indexes.trim();
    }

    /// Writes down what the transaction changed.
    pub(super) fn flush(&mut self, conn: &Connection) -> rusqlite::Result<()> {
        for (shard, name) in self.dirty_streams.drain(..) {
            let Some(stream) = self.streams.of(shard).get_mut(&name) else { continue };
            stream.dirty = false;
            let entries = stream.entries.unwrap_or(0);
            conn.prepare_cached("REPLACE INTO streams(shard, name, ms, seq, entries) VALUES(?1, ?2, ?3, ?4, ?5)")?
                .execute(params![shard, name, sql(stream.tail.0), sql(stream.tail.1), sql(entries)])?;
        }
        for (shard, name) in self.dirty_indexes.drain(..) {
            let Some(index) = self.indexes.of(shard).get_mut(&name) else { continue };
            index.dirty = false;
            if index.members > 0 {
                index.stored = true;
                conn.prepare_cached("REPLACE INTO indexes(shard, name, id, members) VALUES(?1, ?2, ?3, ?4)")?
                    .execute(params![shard, name, index.id, sql(index.members)])?;
                continue;
            }
            if index.stored {
                conn.prepare_cached("DELETE FROM indexes WHERE shard = ?1 AND name = ?2")?
                    .execute(params![shard, name])?;
            }
            self.indexes.of(shard).remove(&name);
        }
        Ok(())
    }

    /// What is known about a record.
    pub(super) fn record(&mut self, conn: &Connection, shard: Shard, key: &str) -> rusqlite::Result<&mut Known> {
        let records = self.records.of(shard);
        if !records.contains_key(key) {
            let found = conn
                .prepare_cached("SELECT version, meta FROM records WHERE shard = ?1 AND key = ?2")?
                .query_row(params![shard, key], |row| {
                    let meta = codec::decode(row.get_ref(1)?.as_blob()?).ok_or(rusqlite::Error::InvalidQuery)?;
                    Ok(Known { version: unsql(row.get(0)?), meta })
                })
                .optional()?;
            records.insert(key.to_owned(), found.unwrap_or_default());
        }
        Ok(records.entry(key.to_owned()).or_default())
    }

    /// The highest id of a stream.
    pub(super) fn tail(&mut self, conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<EntryId> {
        Ok(self.stream(conn, shard, name)?.tail)
    }

    /// The number of entries of a stream.
    pub(super) fn length(&mut self, conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<u64> {
        let stream = self.stream(conn, shard, name)?;
        if let Some(entries) = stream.entries {
            return Ok(entries);
        }
        let entries = count_entries(conn, shard, name)?;
        stream.entries = Some(entries);
        Ok(entries)
    }

    /// Notes an entry that was appended. `plain` streams are read by work loops and counted, so they get a row.
    pub(super) fn appended(
        &mut self,
        conn: &Connection,
        shard: Shard,
        name: &str,
        id: EntryId,
        counted: bool,
    ) -> rusqlite::Result<()> {
        if counted {
            // Before the entry itself is in the table: a count made later would include it.
            self.length(conn, shard, name)?;
        }
        let stream = self.stream(conn, shard, name)?;
        stream.tail = id;
        stream.entries = stream.entries.map(|entries| entries + 1);
        if counted || stream.stored {
            self.dirty_stream(shard, name);
        }
        Ok(())
    }

    /// Deletes an entry; says whether it was there. Its number stays used.
    pub(super) fn remove_entry(
        &mut self,
        conn: &Connection,
        shard: Shard,
        name: &str,
        id: EntryId,
    ) -> rusqlite::Result<bool> {
        self.length(conn, shard, name)?;
        let removed = conn
            .prepare_cached("DELETE FROM entries WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4")?
            .execute(params![shard, name, sql(id.0), sql(id.1)])?;
        if removed > 0 {
            let stream = self.stream(conn, shard, name)?;
            stream.entries = stream.entries.map(|entries| entries.saturating_sub(1));
            self.dirty_stream(shard, name);
        }
        Ok(removed > 0)
    }

    /// Deletes a stream, its numbering included.
    pub(super) fn drop_stream(&mut self, conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<()> {
        conn.prepare_cached("DELETE FROM entries WHERE shard = ?1 AND stream = ?2")?.execute(params![shard, name])?;
        conn.prepare_cached("DELETE FROM streams WHERE shard = ?1 AND name = ?2")?.execute(params![shard, name])?;
        self.dirty_streams.retain(|(at, dirty)| *at != shard || dirty != name);
        let empty = Stream { tail: EntryId::ZERO, entries: Some(0), stored: false, dirty: false };
        self.streams.of(shard).insert(name.to_owned(), empty);
        Ok(())
    }

    fn dirty_stream(&mut self, shard: Shard, name: &str) {
        if let Some(stream) = self.streams.of(shard).get_mut(name) {
            stream.stored = true;
            if !std::mem::replace(&mut stream.dirty, true) {
                self.dirty_streams.push((shard, name.to_owned()));
            }
        }
    }

    fn stream(&mut self, conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<&mut Stream> {
        let streams = self.streams.of(shard);
        if !streams.contains_key(name) {
            streams.insert(name.to_owned(), load_stream(conn, shard, name)?);
        }
        streams.get_mut(name).ok_or(rusqlite::Error::QueryReturnedNoRows)
    }

    /// Moves a member of an index.
    pub(super) fn move_member(
        &mut self,
        conn: &Connection,
        shard: Shard,
        name: &str,
        member: &str,
        (was, now): (Option<i64>, Option<i64>),
    ) -> rusqlite::Result<()> {
        if was == now {
            return Ok(());
        }
        let Some((id, mut members)) = self.index(conn, shard, name, now.is_some())? else { return Ok(()) };
        if let Some(was) = was {
            let removed = conn
                .prepare_cached("DELETE FROM members WHERE id = ?1 AND score = ?2 AND member = ?3")?
                .execute(params![id, was, member])?;
            members = members.saturating_sub(removed as u64);
        }
        if let Some(now) = now {
            let added = conn
                .prepare_cached("INSERT OR IGNORE INTO members(id, score, member) VALUES(?1, ?2, ?3)")?
                .execute(params![id, now, member])?;
            members += added as u64;
        }
        if let Some(index) = self.indexes.of(shard).get_mut(name)
            && index.members != members
        {
            index.members = members;
            if !std::mem::replace(&mut index.dirty, true) {
                self.dirty_indexes.push((shard, name.to_owned()));
            }
        }
        Ok(())
    }

    /// Id and size of an index; `make` it when there is none.
    fn index(
        &mut self,
        conn: &Connection,
        shard: Shard,
        name: &str,
        make: bool,
    ) -> rusqlite::Result<Option<(i64, u64)>> {
        if let Some(index) = self.indexes.of(shard).get(name) {
            return Ok(Some((index.id, index.members)));
        }
        let found = conn
            .prepare_cached("SELECT id, members FROM indexes WHERE shard = ?1 AND name = ?2")?
            .query_row(params![shard, name], |row| Ok((row.get(0)?, unsql(row.get(1)?))))
            .optional()?;
        let stored = found.is_some();
        let (id, members) = match found {
            Some(found) => found,
            None if make => (self.new_index(conn)?, 0),
            None => return Ok(None),
        };
        self.indexes.of(shard).insert(name.to_owned(), Index { id, members, stored, dirty: false });
        Ok(Some((id, members)))
    }

    /// An id that no index ever had.
    fn new_index(&mut self, conn: &Connection) -> rusqlite::Result<i64> {
        if self.next_index >= self.reserved {
            self.reserved = self.next_index + ID_BLOCK;
            conn.prepare_cached("UPDATE meta SET value = ?1 WHERE name = 'next_index'")?.execute([self.reserved])?;
        }
        let id = self.next_index;
        self.next_index += 1;
        Ok(id)
    }
}

fn next_index(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("SELECT value FROM meta WHERE name = 'next_index'", [], |row| row.get(0))
}

fn load_stream(conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<Stream> {
    let stored = conn
        .prepare_cached("SELECT ms, seq, entries FROM streams WHERE shard = ?1 AND name = ?2")?
        .query_row(params![shard, name], |row| {
            let tail = EntryId(unsql(row.get(0)?), unsql(row.get(1)?));
            Ok(Stream { tail, entries: Some(unsql(row.get(2)?)), stored: true, dirty: false })
        })
        .optional()?;
    if let Some(stream) = stored {
        return Ok(stream);
    }
    let tail = conn
        .prepare_cached(
            "SELECT ms, seq FROM entries WHERE shard = ?1 AND stream = ?2 ORDER BY ms DESC, seq DESC LIMIT 1",
        )?
        .query_row(params![shard, name], |row| Ok(EntryId(unsql(row.get(0)?), unsql(row.get(1)?))))
        .optional()?;
    let entries = if tail.is_none() { Some(0) } else { None };
    Ok(Stream { tail: tail.unwrap_or(EntryId::ZERO), entries, stored: false, dirty: false })
}

/// Counts what is in the table.
pub(super) fn count_entries(conn: &Connection, shard: Shard, name: &str) -> rusqlite::Result<u64> {
    conn.prepare_cached("SELECT count(*) FROM entries WHERE shard = ?1 AND stream = ?2")?
        .query_row(params![shard, name], |row| Ok(unsql(row.get(0)?)))
}

/// SQLite's integers are signed. Numbers beyond that are refused at the door, or mean "past every entry".
pub(super) fn sql(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The other way round.
pub(super) fn unsql(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
