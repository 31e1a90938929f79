//! Reads from the database. Each is one statement, or one read transaction, so it never sees half a commit.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params, types::Value};

use super::{
    codec,
    data::{Look, Result},
    sql::{sql, unsql},
};
use crate::{Entry, EntryId, IndexQuery, Millis, Order, ReadLimit, Record, Shard};

impl Look for Connection {
    fn records(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        // Others commit meanwhile.
        let mut select =
            self.prepare_cached("SELECT version, meta, bytes FROM records WHERE shard = ?1 AND key = ?2")?;
        let in_one = keys.len() > 1;
        if in_one {
            self.prepare_cached("BEGIN")?.execute([])?;
        }
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
        if in_one {
            self.prepare_cached("COMMIT")?.execute([])?;
        }
        records
    }

    fn entries(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        let mut select = self.prepare_cached(
            "SELECT ms, seq, tag, payload FROM entries WHERE shard = ?1 AND stream = ?2 AND (ms, seq) > (?3, ?4)
             ORDER BY ms, seq LIMIT ?5",
        )?;
        let most = signed(limit.entries.max(1));
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

    fn last_entries(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        let mut select = self.prepare_cached(
            "SELECT ms, seq, tag, payload FROM entries WHERE shard = ?1 AND stream = ?2
             ORDER BY ms DESC, seq DESC LIMIT ?3",
        )?;
        let mut entries = select.query_map(params![shard, stream, signed(n)], entry)?.collect::<Result<Vec<_>>>()?;
        entries.reverse();
        Ok(entries)
    }

    fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
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
        let mut select = self.prepare_cached(match query.order {
            Order::Ascending => {
                "SELECT score, member FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
                 AND (score, member) > (?3, ?4) AND (score, member) < (?5, ?6) ORDER BY score, member LIMIT ?7"
            }
            Order::Descending => {
                "SELECT score, member FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
                 AND (score, member) > (?3, ?4) AND (score, member) < (?5, ?6)
                 ORDER BY score DESC, member DESC LIMIT ?7"
            }
        })?;
        let bounds = params![shard, query.index, low.0, low.1, high.0, high.1, signed(query.limit)];
        select.query_map(bounds, |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
    }

    fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        let counted = match min {
            None => self
                .prepare_cached("SELECT members FROM indexes WHERE shard = ?1 AND name = ?2")?
                .query_row(params![shard, index], |row| row.get(0)),
            Some(min) => self
                .prepare_cached(
                    "SELECT count(*) FROM members WHERE id = (SELECT id FROM indexes WHERE shard = ?1 AND name = ?2)
                     AND score >= ?3",
                )?
                .query_row(params![shard, index, min], |row| row.get(0)),
        };
        Ok(counted.optional()?.map_or(0, unsql))
    }

    fn next_entries(&self, shard: Shard, stream: &str, after: EntryId, most: usize) -> Result<Vec<(Entry, u32)>> {
        self.prepare_cached(
            "SELECT ms, seq, tag, payload, deliveries FROM entries
             WHERE shard = ?1 AND stream = ?2 AND (ms, seq) > (?3, ?4) ORDER BY ms, seq LIMIT ?5",
        )?
        .query_map(params![shard, stream, sql(after.0), sql(after.1), signed(most)], |row| {
            Ok((entry(row)?, row.get(4)?))
        })?
        .collect()
    }

    fn entry_count(&self, shard: Shard, stream: &str) -> Result<u64> {
        let stored = self
            .prepare_cached("SELECT entries FROM streams WHERE shard = ?1 AND name = ?2")?
            .query_row(params![shard, stream], |row| row.get(0).map(unsql))
            .optional()?;
        match stored {
            Some(entries) => Ok(entries),
            None => self
                .prepare_cached("SELECT count(*) FROM entries WHERE shard = ?1 AND stream = ?2")?
                .query_row(params![shard, stream], |row| row.get(0).map(unsql)),
        }
    }

    fn delayed_count(&self, shard: Shard, stream: &str) -> Result<u64> {
        self.prepare_cached("SELECT count(*) FROM delayed WHERE shard = ?1 AND stream = ?2")?
            .query_row(params![shard, stream], |row| row.get(0).map(unsql))
    }

    fn look_due(&self, shard: Shard, stream: &str) -> Result<Option<Millis>> {
        self.prepare_cached("SELECT min(due) FROM delayed WHERE shard = ?1 AND stream = ?2")?
            .query_row(params![shard, stream], |row| row.get(0))
    }
}

/// Reads `ms, seq, tag, payload`.
pub(super) fn entry(row: &Row<'_>) -> Result<Entry> {
    Ok(Entry { id: entry_id(row)?, tag: row.get(2)?, payload: blob(row, 3)? })
}

/// Reads `ms, seq`.
pub(super) fn entry_id(row: &Row<'_>) -> Result<EntryId> {
    Ok(EntryId(unsql(row.get(0)?), unsql(row.get(1)?)))
}

/// Reads a value.
pub(super) fn blob(row: &Row<'_>, column: usize) -> Result<Bytes> {
    Ok(Bytes::copy_from_slice(row.get_ref(column)?.as_blob()?))
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
