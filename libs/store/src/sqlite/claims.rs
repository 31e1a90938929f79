//! Claiming, waiting for work, signs of life.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use futures::future::select_all;
use tokio::time::{Instant, sleep_until};

use super::{
    Delivered, SqliteEngine, Store,
    data::{self, Look},
    groups::{BUSY, Cell, Due, Group, lock},
    writer::Job,
};
use crate::{Claim, Claimed, Depth, EntryId, Error, Result, Shard};

/// How long a number of deliveries may stay unwritten when nothing else is committed.
const WRITE_DOWN: Duration = Duration::from_millis(50);

/// Longest sleep; a clock that jumps is noticed after this.
const NAP: Duration = Duration::from_secs(60);

/// Entries read at once, when one has to read at all.
const FETCH: usize = 32;

struct Source {
    shard: Shard,
    stream: Arc<str>,
    cell: Arc<Cell>,
}

/// The streams of a claim. Whoever leaves, in whatever way, wakes the next one when there is something left.
struct Sources(Vec<Source>);

impl Drop for Sources {
    fn drop(&mut self) {
        for source in &self.0 {
            if source.cell.lock().has_work() {
                source.cell.wake.notify_one();
            }
        }
    }
}

impl SqliteEngine {
    /// Nothing is taken before an await that could be the last one, so a dropped claim loses nothing.
    pub(super) async fn claim_or_wait(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        let consumer: Arc<str> = claim.consumer.as_str().into();
        let sources = Sources(self.sources(claim)?);
        if sources.0.is_empty() || claim.limit == 0 {
            tokio::time::sleep(claim.wait).await;
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + claim.wait;
        loop {
            // Listening starts before looking, so nothing falls in between.
            let mut wakes: Vec<_> = sources.0.iter().map(|source| Box::pin(source.cell.wake.notified())).collect();
            for wake in &mut wakes {
                wake.as_mut().enable();
            }
            for source in &sources.0 {
                self.move_due(source).await?;
                self.fetch(source, claim.limit).await?;
            }
            let taken = self.take(&sources.0, claim, &consumer);
            let now = Instant::now();
            if !taken.is_empty() || now >= deadline {
                return Ok(taken);
            }
            let until = self.next_look(&sources.0, claim, now).min(deadline);
            if self.has_unwritten() {
                wait(&mut wakes, (now + WRITE_DOWN).min(until)).await;
                self.write_down();
            } else {
                wait(&mut wakes, until).await;
            }
        }
    }

    fn sources(&self, claim: &Claim) -> Result<Vec<Source>> {
        let sources = claim.streams.iter().map(|(shard, stream)| {
            let cell = self.shared.groups.get(*shard, stream);
            let cell = cell.ok_or_else(|| Error::Malformed(format!("shard {shard} of {}", self.shards)))?;
            Ok(Source { shard: *shard, stream: stream.as_str().into(), cell })
        });
        sources.collect()
    }

    /// Reads new entries when there are too few at hand.
    async fn fetch(&self, source: &Source, room: usize) -> Result<()> {
        if source.cell.lock().missing(room) == 0 {
            return Ok(());
        }
        self.looking(|look| {
            // Held while reading: what is appended and not seen is told afterwards.
            let mut group = source.cell.lock();
            let missing = group.missing(room);
            if missing > 0 {
                let most = missing.max(FETCH);
                let found = look.next_entries(source.shard, &source.stream, group.cursor, most)?;
                let more = found.len() == most;
                group.fetched(found, more);
            }
            Ok(())
        })
        .await
    }

    /// Takes up to the limit of what is at hand, from the streams in order.
    fn take(&self, sources: &[Source], claim: &Claim, consumer: &Arc<str>) -> Vec<Claimed> {
        let mut taken = Vec::new();
        for source in sources {
            let room = claim.limit - taken.len();
            if room == 0 {
                break;
            }
            let found = source.cell.lock().take(consumer, claim.lease, room, Instant::now());
            if matches!(self.store, Store::File(_)) && !found.is_empty() {
                lock(&self.shared.delivered).extend(found.iter().map(|(entry, deliveries)| Delivered {
                    shard: source.shard,
                    stream: Arc::clone(&source.stream),
                    id: entry.id,
                    deliveries: *deliveries,
                }));
            }
            taken.extend(found.into_iter().map(|(entry, deliveries)| Claimed {
                shard: source.shard,
                stream: source.stream.to_string(),
                entry,
                deliveries,
            }));
        }
        taken
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

    /// Moves delayed entries that are due into the stream.
    async fn move_due(&self, source: &Source) -> Result<()> {
        let due = source.cell.lock().due;
        if due == Due::Unknown {
            self.looking(|look| {
                let mut group = source.cell.lock();
                if group.due == Due::Unknown {
                    group.set_due(look.look_due(source.shard, &source.stream)?);
                }
                Ok(())
            })
            .await?;
        }
        if !self.is_due(&source.cell.lock()) {
            return Ok(());
        }
        let streams = vec![source.stream.to_string()];
        match &self.store {
            Store::Memory(memory) => {
                lock(memory).tick(source.shard, &streams)?;
            }
            Store::File(file) => {
                let slot = file.slot().await?;
                // From here on there is no await, so who takes this upon himself also does it.
                let mut group = source.cell.lock();
                if self.is_due(&group) {
                    group.set_due(None);
                    slot.send(Job::Tick { shard: source.shard, streams, reply: None });
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
        // What others take while this one sleeps is theirs for a lease at least.
        let mut until = now + claim.lease.clamp(BUSY, NAP);
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

    pub(super) fn depth_of(&self, look: &dyn Look, shard: Shard, stream: &str) -> data::Result<Depth> {
        let cell = self.shared.groups.find(shard, stream);
        let group = cell.as_ref().map(|cell| cell.lock());
        let pending = group.as_ref().map_or(0, |group| group.pending());
        let cursor = group.as_ref().map_or(EntryId::ZERO, |group| group.cursor);
        let oldest = match group.as_ref().and_then(|group| group.oldest()) {
            Some(oldest) => Some(oldest),
            None => look.next_entries(shard, stream, cursor, 1)?.first().map(|(entry, _)| entry.id),
        };
        Ok(Depth {
            waiting: look.entry_count(shard, stream)?.saturating_sub(pending),
            pending,
            delayed: look.delayed_count(shard, stream)?,
            oldest: oldest.map(|id| i64::try_from(id.0).unwrap_or(i64::MAX)),
        })
    }
}

async fn wait(wakes: &mut [Pin<Box<impl Future<Output = ()>>>], until: Instant) {
    tokio::select! {
        _ = select_all(wakes.iter_mut().map(|wake| wake.as_mut())) => {}
        () = sleep_until(until) => {}
    }
}
