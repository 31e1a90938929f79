//! Claiming, waiting for work, signs of life.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use futures::future::select_all;
use rusqlite::{Connection, OptionalExtension, params};
use tokio::time::{Instant, sleep_until};

use super::{
    Delivered, SqliteEngine, Store,
    cache::sql,
    groups::{Cell, Due, Group, lock},
    read,
    writer::Job,
};
use crate::{Claim, Claimed, Depth, Entry, EntryId, Error, Result, Shard};

/// How long a number of deliveries may stay unwritten when nothing else is committed.
const WRITE_DOWN: Duration = Duration::from_millis(50);

/// Longest sleep; a clock that jumps is noticed after this.
const NAP: Duration = Duration::from_secs(60);

struct Source {
    shard: Shard,
    stream: Arc<str>,
    cell: Arc<Cell>,
}

impl SqliteEngine {
    /// Nothing is taken before an await that could be the last one, so a dropped claim loses nothing.
    pub(super) async fn claim_or_wait(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        let consumer: Arc<str> = claim.consumer.as_str().into();
        let sources = claim.streams.iter().map(|(shard, stream)| {
            let cell = self.shared.groups.get(*shard, stream);
            let cell = cell.ok_or_else(|| Error::Malformed(format!("shard {shard} of {}", self.shards)))?;
            Ok(Source { shard: *shard, stream: stream.as_str().into(), cell })
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        if sources.is_empty() || claim.limit == 0 {
            tokio::time::sleep(claim.wait).await;
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + claim.wait;
        loop {
            // Listening starts before looking, so nothing falls in between.
            let mut wakes: Vec<_> = sources.iter().map(|source| Box::pin(source.cell.wake.notified())).collect();
            for wake in &mut wakes {
                wake.as_mut().enable();
            }
            self.move_due(&sources).await?;
            let taken = self.reading(|conn| self.take(conn, &sources, claim, &consumer)).await?;
            let now = Instant::now();
            if !taken.is_empty() || now >= deadline {
                return Ok(taken);
            }
            let until = self.next_look(&sources, claim, now).min(deadline);
            if self.has_unwritten() {
                let soon = (now + WRITE_DOWN).min(until);
                wait(&mut wakes, soon).await;
                self.write_down();
            } else {
                wait(&mut wakes, until).await;
            }
        }
    }

    /// Takes up to the limit, from the streams in order.
    fn take(
        &self,
        conn: &Connection,
        sources: &[Source],
        claim: &Claim,
        consumer: &Arc<str>,
    ) -> rusqlite::Result<Vec<Claimed>> {
        let mut taken = Vec::new();
        for source in sources {
            let room = claim.limit - taken.len();
            if room == 0 {
                break;
            }
            let mut group = source.cell.lock();
            let now = Instant::now();
            let before = taken.len();
            // All reads of this stream come before the first change, so an error changes nothing.
            let found = find(conn, source, &mut group, claim, now, room);
            if let Ok(found) = found {
                for (entry, deliveries) in found {
                    let deliveries = group.hand_out(entry.id, consumer, deliveries, now);
                    let stream = source.stream.to_string();
                    taken.push(Claimed { shard: source.shard, stream, entry, deliveries });
                }
            } else if taken.is_empty() {
                found?;
            }
            if taken.len() > before {
                source.cell.pass_on(&group);
                self.note_deliveries(source, &taken[before..]);
            }
        }
        Ok(taken)
    }

    fn note_deliveries(&self, source: &Source, taken: &[Claimed]) {
        if matches!(self.store, Store::File(_)) {
            lock(&self.shared.delivered).extend(taken.iter().map(|claimed| Delivered {
                shard: source.shard,
                stream: Arc::clone(&source.stream),
                id: claimed.entry.id,
                deliveries: claimed.deliveries,
            }));
        }
    }

    fn has_unwritten(&self) -> bool {
        !lock(&self.shared.delivered).is_empty()
    }

    /// Asks the writer for a transaction, if nobody else did. A full queue means that one is coming anyway.
    fn write_down(&self) {
        if let Store::File(file) = &self.store
            && self.has_unwritten()
            && let Some(jobs) = &file.jobs
            && jobs.try_send(Job::WriteDown).is_err()
        {
            tracing::trace!("the writer is busy");
        }
    }

    /// Moves delayed entries that are due into the streams.
    async fn move_due(&self, sources: &[Source]) -> Result<()> {
        for source in sources {
            if source.cell.lock().due == Due::Unknown {
                self.reading(|conn| {
                    let mut group = source.cell.lock();
                    if group.due == Due::Unknown {
                        group.set_due(read::next_due(conn, source.shard, &source.stream)?);
                    }
                    Ok(())
                })
                .await?;
            }
            if !self.is_due(&source.cell.lock()) {
                continue;
            }
            let stream = source.stream.to_string();
            match &self.store {
                Store::Memory(writer) => {
                    lock(writer).tick_one(source.shard, &[stream])?;
                }
                Store::File(file) => {
                    let slot = file.slot().await?;
                    // From here on there is no await, so who takes this upon himself also does it.
                    let mut group = source.cell.lock();
                    if self.is_due(&group) {
                        group.set_due(None);
                        slot.send(Job::Tick { shard: source.shard, streams: vec![stream], reply: None });
                    }
                }
            }
        }
        Ok(())
    }

    fn is_due(&self, group: &Group) -> bool {
        matches!(group.due, Due::At(due) if due <= self.shared.clock.now())
    }

    /// When something may change without anybody saying so.
    fn next_look(&self, sources: &[Source], claim: &Claim, now: Instant) -> Instant {
        let mut until = now + NAP;
        for source in sources {
            let group = source.cell.lock();
            if let Some(expiry) = group.next_expiry(&claim.consumer, claim.lease, now) {
                until = until.min(expiry);
            }
            if let Due::At(due) = group.due {
                let left = u64::try_from(due - self.shared.clock.now()).unwrap_or(0);
                until = until.min(now + Duration::from_millis(left));
            }
        }
        until
    }

    /// Notes signs of life.
    pub(super) fn touch(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Vec<bool> {
        let Some(cell) = self.shared.groups.find(shard, stream) else { return vec![false; ids.len()] };
        let mut group = cell.lock();
        let now = Instant::now();
        ids.iter().map(|id| group.touch(*id, consumer, now)).collect()
    }

    pub(super) fn depth_of(&self, conn: &Connection, shard: Shard, stream: &str) -> rusqlite::Result<Depth> {
        let cell = self.shared.groups.find(shard, stream);
        let group = cell.as_ref().map(|cell| cell.lock());
        let pending = group.as_ref().map_or(0, |group| group.pending());
        let cursor = group.as_ref().map_or(EntryId::ZERO, |group| group.cursor);
        let entries = read::length(conn, shard, stream)?;
        let fresh = conn
            .prepare_cached(
                "SELECT ms, seq FROM entries WHERE shard = ?1 AND stream = ?2 AND (ms, seq) > (?3, ?4)
                 ORDER BY ms, seq LIMIT 1",
            )?
            .query_row(params![shard, stream, sql(cursor.0), sql(cursor.1)], read::entry_id)
            .optional()?;
        let oldest = group.as_ref().and_then(|group| group.first_returned()).into_iter().chain(fresh).min();
        Ok(Depth {
            waiting: entries.saturating_sub(pending),
            pending,
            delayed: read::delayed(conn, shard, stream)?,
            oldest: oldest.map(|id| sql(id.0)),
        })
    }
}

/// Entries that may be handed out, with their deliveries as far as the table knows, and moves the cursor.
fn find(
    conn: &Connection,
    source: &Source,
    group: &mut Group,
    claim: &Claim,
    now: Instant,
    room: usize,
) -> rusqlite::Result<Vec<(Entry, u32)>> {
    let mut found = Vec::new();
    for id in group.again(&claim.consumer, claim.lease, now, room) {
        let entry = conn
            .prepare_cached(
                "SELECT ms, seq, tag, payload, deliveries FROM entries
                 WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",
            )?
            .query_row(params![source.shard, source.stream, sql(id.0), sql(id.1)], handed)
            .optional()?;
        match entry {
            Some(entry) => found.push(entry),
            // Removed behind its owner's back.
            None => group.forget(id),
        }
    }
    if found.len() < room && group.more {
        let most = room - found.len();
        let cursor = group.cursor;
        let fresh = conn
            .prepare_cached(
                "SELECT ms, seq, tag, payload, deliveries FROM entries
                 WHERE shard = ?1 AND stream = ?2 AND (ms, seq) > (?3, ?4) ORDER BY ms, seq LIMIT ?5",
            )?
            .query_map(
                params![source.shard, source.stream, sql(cursor.0), sql(cursor.1), i64::try_from(most).unwrap_or(1)],
                handed,
            )?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        // Held since before the read: an append that was not seen sets this again.
        group.more = fresh.len() == most;
        if let Some((last, _)) = fresh.last() {
            group.cursor = last.id;
        }
        found.extend(fresh);
    }
    Ok(found)
}

/// Reads `ms, seq, tag, payload, deliveries`.
fn handed(row: &rusqlite::Row<'_>) -> rusqlite::Result<(Entry, u32)> {
    let entry = Entry { id: read::entry_id(row)?, tag: row.get(2)?, payload: read::blob(row, 3)? };
    Ok((entry, row.get(4)?))
}

async fn wait(wakes: &mut [Pin<Box<impl Future<Output = ()>>>], until: Instant) {
    tokio::select! {
        _ = select_all(wakes.iter_mut().map(|wake| wake.as_mut())) => {}
        () = sleep_until(until) => {}
    }
}
