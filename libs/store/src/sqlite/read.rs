//! Reads. Each is one statement, or one read transaction, so it never sees half a commit.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, params, types::Value};

use super::{
    cache::{count_entries, sql, unsql},
    codec,
};
use crate::{Entry, EntryId, IndexQuery, Millis, Order, ReadLimit, Record, Shard};

pub(super) fn records(conn: &Connection, shard: Shard, keys: &[&str]) -> rusqlite::Result<Vec<Option<Record>>> {
    // In memory, this connection is between two transactions; in a file, others commit meanwhile.
    let snapshot = if keys.len() > 1 { Some(conn.unchecked_transaction()?) } else { None };
    let mut select = conn.prepare_cached("SELECT version, meta, bytes FROM records WHERE shard = ?1 AND key = ?2")?;
    let records = keys
        .iter()
        .map(|key| {
            let found = select.query_row(params![shard, key], |row| {
                let refs = codec::refs(&mut row.get_ref(1)?.as_blob()?).ok_or(rusqlite::Error::InvalidQuery)?;
                Ok(Record { version: unsql(row.get(0)?), bytes: blob(row, 2)?, refs })
            });
            found.optional()
        })
        .collect();
    drop(select);
    if let Some(snapshot) = snapshot {
        snapshot.commit()?;
    }
    records
}

pub(super) fn entries(
    conn: &Connection,
    shard: Shard,
    stream: &str,
    after: EntryId,
    limit: ReadLimit,
) -> rusqlite::Result<Vec<Entry>> {
    let mut select = conn.prepare_cached(
        "SELECT ms, seq, tag, payload FROM entries WHERE shard = ?1 AND stream = ?2 AND (ms, seq) > (?3, ?4)
         ORDER BY ms, seq LIMIT ?5",
    )?;
    let most = i64::try_from(limit.entries.max(1)).unwrap_or(i64::MAX);
    let mut rows = select.query(params![shard, stream, sql(after.0), sql(after.1), most])?;
    let (mut entries, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next()? {
        bytes += row.get_ref(3)?.as_blob()?.len();
        if bytes > limit.bytes && !entries.is_empty() {
            break;
        }
        entries.push(entry(row)?);
    }
    Ok(entries)
}

pub(super) fn last_entries(conn: &Connection, shard: Shard, stream: &str, n: usize) -> rusqlite::Result<Vec<Entry>> {
    let mut select = conn.prepare_cached(
        "SELECT ms, seq, tag, payload FROM entries WHERE shard = ?1 AND stream = ?2
         ORDER BY ms DESC, seq DESC LIMIT ?3",
    )?;
    let most = i64::try_from(n).unwrap_or(i64::MAX);
    let mut entries = select.query_map(params![shard, stream, most], entry)?.collect::<rusqlite::Result<Vec<_>>>()?;
    entries.reverse();
    Ok(entries)
}

/// Reads `ms, seq, tag, payload`.
fn entry(row: &rusqlite::Row<'_>) -> rusqlite::Result<Entry> {
    Ok(Entry { id: entry_id(row)?, tag: row.get(2)?, payload: blob(row, 3)? })
}

/// Reads `ms, seq`.
pub(super) fn entry_id(row: &rusqlite::Row<'_>) -> rusqlite::Result<EntryId> {
    Ok(EntryId(unsql(row.get(0)?), unsql(row.get(1)?)))
}

/// Reads a value.
pub(super) fn blob(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<Bytes> {
    Ok(Bytes::copy_from_slice(row.get_ref(column)?.as_blob()?))
}

pub(super) fn index(conn: &Connection, shard: Shard, query: &IndexQuery) -> rusqlite::Result<Vec<(i64, String)>> {
    // A number sorts below every text and a blob above, so these are just outside a score's members.
    let (below, above) = (Value::Integer(0), Value::Blob(Vec::new()));
    let (mut low, mut high) = ((query.min.unwrap_or(i64::MIN), below), (query.max.unwrap_or(i64::MAX), above));
    if let Some((score, member)) = &query.after {
        let bound = (*score, Value::Text(member.clone()));
        match query.order {
            Order::Ascending if *score >= low.0 => low = bound,
            Order::Descending if *score <= high.0 => high = bound,
            // The page starts at its own bound, which is further on.
            Order::Ascending | Order::Descending => {}
        }
    }
    let text = match query.order {
        Order::Ascending => {
            "SELECT score, member FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
             AND (score, member) > (?3, ?4) AND (score, member) < (?5, ?6) ORDER BY score, member LIMIT ?7"
        }
        Order::Descending => {
            "SELECT score, member FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
             AND (score, member) > (?3, ?4) AND (score, member) < (?5, ?6) ORDER BY score DESC, member DESC LIMIT ?7"
        }
    };
    let most = i64::try_from(query.limit).unwrap_or(i64::MAX);
    conn.prepare_cached(text)?
        .query_map(params![shard, query.index, low.0, low.1, high.0, high.1, most], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?
        .collect()
}

pub(super) fn index_count(conn: &Connection, shard: Shard, index: &str, min: Option<i64>) -> rusqlite::Result<u64> {
    let counted = match min {
        None => conn
            .prepare_cached("SELECT members FROM indexes WHERE shard = ?1 AND name = ?2")?
            .query_row(params![shard, index], |row| row.get(0)),
        Some(min) => conn
            .prepare_cached(
                "SELECT count(*) FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
                 AND score >= ?3",
            )?
            .query_row(params![shard, index, min], |row| row.get(0)),
    };
    Ok(counted.optional()?.map_or(0, unsql))
}

/// Entries of a stream, claimed ones included.
pub(super) fn length(conn: &Connection, shard: Shard, stream: &str) -> rusqlite::Result<u64> {
    let stored = conn
        .prepare_cached("SELECT entries FROM streams WHERE shard = ?1 AND name = ?2")?
        .query_row(params![shard, stream], |row| row.get(0))
        .optional()?;
    stored.map_or_else(|| count_entries(conn, shard, stream), |entries| Ok(unsql(entries)))
}

/// When the next delayed entry of the stream is due.
pub(super) fn next_due(conn: &Connection, shard: Shard, stream: &str) -> rusqlite::Result<Option<Millis>> {
    conn.prepare_cached("SELECT min(due) FROM delayed WHERE shard = ?1 AND stream = ?2")?
        .query_row(params![shard, stream], |row| row.get(0))
}

/// Entries that are not due yet (or were not moved yet).
pub(super) fn delayed(conn: &Connection, shard: Shard, stream: &str) -> rusqlite::Result<u64> {
    conn.prepare_cached("SELECT count(*) FROM delayed WHERE shard = ?1 AND stream = ?2")?
        .query_row(params![shard, stream], |row| Ok(unsql(row.get(0)?)))
}
