//! Data in plain maps, for `--ephemeral` and for tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use bytes::Bytes;
use hashbrown::HashMap;

use super::{
    codec::Meta,
    data::{Data, Look, Result},
};
use crate::{CommitId, Committed, Entry, EntryId, IndexQuery, Millis, Order, ReadLimit, Record, Shard};

/// What an item costs beside its texts and bytes, roughly.
const OVERHEAD: u64 = 100;

#[derive(Debug)]
pub(super) struct Heap {
    shards: Vec<Maps>,
    /// Room taken, roughly.
    pub(super) size: u64,
}

#[derive(Debug, Default)]
struct Maps {
    records: HashMap<String, Value>,
    indexes: HashMap<String, BTreeSet<(i64, String)>>,
    streams: HashMap<String, Stream>,
    delayed: HashMap<String, Delayed>,
    limits: HashMap<String, i64>,
}

#[derive(Debug, Default)]
struct Value {
    version: u64,
    bytes: Bytes,
    meta: Meta,
}

#[derive(Debug, Default)]
struct Stream {
    tail: EntryId,
    entries: BTreeMap<EntryId, Entry>,
}

#[derive(Debug, Default)]
struct Delayed {
    entries: HashMap<String, (Millis, u8, Bytes)>,
    by_due: BTreeSet<(Millis, String)>,
}

impl Heap {
    pub(super) fn new(shards: Shard) -> Self {
        Self { shards: (0..shards).map(|_| Maps::default()).collect(), size: 0 }
    }

    fn at(&self, shard: Shard) -> Option<&Maps> {
        self.shards.get(usize::from(shard))
    }

    /// Batches are checked for their shard before.
    fn of(&mut self, shard: Shard) -> &mut Maps {
        &mut self.shards[usize::from(shard)]
    }

    fn stream(&self, shard: Shard, stream: &str) -> Option<&Stream> {
        self.at(shard)?.streams.get(stream)
    }

    fn grow(&mut self, texts: usize) {
        self.size += texts as u64 + OVERHEAD;
    }

    fn shrink(&mut self, texts: usize) {
        self.size = self.size.saturating_sub(texts as u64 + OVERHEAD);
    }
}

impl Data for Heap {
    fn version(&mut self, shard: Shard, key: &str) -> Result<u64> {
        Ok(self.of(shard).records.get(key).map_or(0, |value| value.version))
    }

    fn repeated(&mut self, shard: Shard, key: &str, id: &CommitId) -> Result<Option<Committed>> {
        let commit = self.of(shard).records.get(key).and_then(|value| value.meta.commit.as_ref());
        Ok(commit.filter(|(last, _)| last == id).map(|(_, committed)| committed.clone()))
    }

    fn put(&mut self, shard: Shard, key: &str, bytes: &Bytes) -> Result<u64> {
        if let Some(value) = self.of(shard).records.get_mut(key) {
            value.version += 1;
            let before = std::mem::replace(&mut value.bytes, bytes.clone()).len();
            let version = value.version;
            self.size = (self.size + bytes.len() as u64).saturating_sub(before as u64);
            return Ok(version);
        }
        let value = Value { version: 1, bytes: bytes.clone(), meta: Meta::default() };
        self.of(shard).records.insert(key.to_owned(), value);
        self.grow(key.len() + bytes.len());
        Ok(1)
    }

    fn delete(&mut self, shard: Shard, key: &str) -> Result<()> {
        if let Some(value) = self.of(shard).records.remove(key) {
            self.shrink(key.len() + value.bytes.len());
        }
        Ok(())
    }

    fn set_ref(&mut self, shard: Shard, key: &str, name: &str, id: EntryId) -> Result<()> {
        if let Some(value) = self.of(shard).records.get_mut(key) {
            value.meta.refs.insert(name.to_owned(), id);
        }
        Ok(())
    }

    fn set_commit(&mut self, shard: Shard, key: &str, id: &CommitId, committed: &Committed) -> Result<()> {
        if let Some(value) = self.of(shard).records.get_mut(key) {
            value.meta.commit = Some((*id, committed.clone()));
        }
        Ok(())
    }

    fn end_batch(&mut self) -> Result<()> {
        Ok(())
    }

    fn move_member(
        &mut self,
        shard: Shard,
        index: &str,
        member: &str,
        was: Option<i64>,
        now: Option<i64>,
    ) -> Result<()> {
        let indexes = &mut self.of(shard).indexes;
        let (mut came, mut went) = (false, false);
        if let Some(members) = indexes.get_mut(index) {
            if let Some(was) = was {
                went = members.remove(&(was, member.to_owned()));
            }
            match now {
                Some(now) => came = members.insert((now, member.to_owned())),
                None if members.is_empty() => drop(indexes.remove(index)),
                None => {}
            }
        } else if let Some(now) = now {
            indexes.insert(index.to_owned(), BTreeSet::from([(now, member.to_owned())]));
            came = true;
        }
        if went {
            self.shrink(member.len());
        }
        if came {
            self.grow(member.len());
        }
        Ok(())
    }

    fn tail(&mut self, shard: Shard, stream: &str) -> Result<EntryId> {
        Ok(self.stream(shard, stream).map_or(EntryId::ZERO, |stream| stream.tail))
    }

    fn length(&mut self, shard: Shard, stream: &str) -> Result<u64> {
        self.entry_count(shard, stream)
    }

    fn push(&mut self, shard: Shard, name: &str, entry: &Entry, _counted: bool) -> Result<()> {
        let streams = &mut self.of(shard).streams;
        let stream = match streams.get_mut(name) {
            Some(stream) => stream,
            None => streams.entry(name.to_owned()).or_default(),
        };
        stream.tail = entry.id;
        stream.entries.insert(entry.id, entry.clone());
        self.grow(entry.payload.len());
        Ok(())
    }

    fn entry(&mut self, shard: Shard, stream: &str, id: EntryId) -> Result<Option<Entry>> {
        Ok(self.stream(shard, stream).and_then(|stream| stream.entries.get(&id)).cloned())
    }

    fn remove(&mut self, shard: Shard, stream: &str, id: EntryId) -> Result<()> {
        let removed = self.of(shard).streams.get_mut(stream).and_then(|stream| stream.entries.remove(&id));
        if let Some(entry) = removed {
            self.shrink(entry.payload.len());
        }
        Ok(())
    }

    fn drop_stream(&mut self, shard: Shard, stream: &str) -> Result<()> {
        for entry in self.of(shard).streams.remove(stream).into_iter().flat_map(|stream| stream.entries.into_values()) {
            self.shrink(entry.payload.len());
        }
        Ok(())
    }

    fn delay(&mut self, shard: Shard, stream: &str, id: &str, due: Millis, tag: u8, payload: &Bytes) -> Result<()> {
        self.undelay(shard, stream, id)?;
        let delayed = self.of(shard).delayed.entry(stream.to_owned()).or_default();
        delayed.by_due.insert((due, id.to_owned()));
        delayed.entries.insert(id.to_owned(), (due, tag, payload.clone()));
        self.grow(id.len() * 2 + payload.len());
        Ok(())
    }

    fn undelay(&mut self, shard: Shard, stream: &str, id: &str) -> Result<()> {
        let Some(delayed) = self.of(shard).delayed.get_mut(stream) else { return Ok(()) };
        if let Some((due, _, payload)) = delayed.entries.remove(id) {
            delayed.by_due.remove(&(due, id.to_owned()));
            self.shrink(id.len() * 2 + payload.len());
        }
        Ok(())
    }

    fn take_due(&mut self, shard: Shard, stream: &str, now: Millis, most: u32) -> Result<Vec<(u8, Bytes)>> {
        let mut taken = Vec::new();
        for _ in 0..most {
            let Some(delayed) = self.of(shard).delayed.get_mut(stream) else { break };
            let Some((_, id)) = delayed.by_due.first().filter(|(due, _)| *due <= now).cloned() else { break };
            taken.extend(delayed.entries.get(&id).map(|(_, tag, payload)| (*tag, payload.clone())));
            self.undelay(shard, stream, &id)?;
        }
        Ok(taken)
    }

    fn next_due(&mut self, shard: Shard, stream: &str) -> Result<Option<Millis>> {
        self.look_due(shard, stream)
    }

    fn full_at(&mut self, shard: Shard, key: &str) -> Result<Option<i64>> {
        Ok(self.of(shard).limits.get(key).copied())
    }

    fn set_full_at(&mut self, shard: Shard, key: &str, full_at: i64) -> Result<()> {
        self.of(shard).limits.insert(key.to_owned(), full_at);
        Ok(())
    }

    fn sweep_limits(&mut self, now: i64) -> Result<()> {
        self.shards.iter_mut().for_each(|maps| maps.limits.retain(|_, full_at| *full_at >= now));
        Ok(())
    }
}

impl Look for Heap {
    fn records(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        let found = keys.iter().map(|key| {
            let value = self.at(shard)?.records.get(*key)?;
            Some(Record { version: value.version, bytes: value.bytes.clone(), refs: value.meta.refs.clone() })
        });
        Ok(found.collect())
    }

    fn entries(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        let Some(stream) = self.stream(shard, stream) else { return Ok(Vec::new()) };
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let later = stream.entries.range((Bound::Excluded(after), Bound::Unbounded));
        for entry in later.map(|(_, entry)| entry).take(limit.entries.max(1)) {
            bytes += entry.payload.len();
            if bytes > limit.bytes && !entries.is_empty() {
                break;
            }
            entries.push(entry.clone());
        }
        Ok(entries)
    }

    fn last_entries(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        let Some(stream) = self.stream(shard, stream) else { return Ok(Vec::new()) };
        let mut entries: Vec<_> = stream.entries.values().rev().take(n).cloned().collect();
        entries.reverse();
        Ok(entries)
    }

    fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        let Some(members) = self.at(shard).and_then(|maps| maps.indexes.get(&query.index)) else {
            return Ok(Vec::new());
        };
        let (min, max) = (query.min.unwrap_or(i64::MIN), query.max.unwrap_or(i64::MAX));
        let mut low = Bound::Included((min, String::new()));
        // No text is the last one of its score, so the bound above is the score after it.
        let mut high = max.checked_add(1).map_or(Bound::Unbounded, |next| Bound::Excluded((next, String::new())));
        match (&query.after, query.order) {
            (Some(after), Order::Ascending) if after.0 >= min => low = Bound::Excluded(after.clone()),
            (Some(after), Order::Descending) if after.0 <= max => high = Bound::Excluded(after.clone()),
            _ => {}
        }
        if is_empty(&low, &high) {
            return Ok(Vec::new());
        }
        let range = members.range((low, high));
        Ok(match query.order {
            Order::Ascending => range.take(query.limit).cloned().collect(),
            Order::Descending => range.rev().take(query.limit).cloned().collect(),
        })
    }

    fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        let Some(members) = self.at(shard).and_then(|maps| maps.indexes.get(index)) else { return Ok(0) };
        Ok(min.map_or(members.len(), |min| members.range((min, String::new())..).count()) as u64)
    }

    fn next_entries(&self, shard: Shard, stream: &str, after: EntryId, most: usize) -> Result<Vec<(Entry, u32)>> {
        let limit = ReadLimit { entries: most, bytes: usize::MAX };
        Ok(self.entries(shard, stream, after, limit)?.into_iter().map(|entry| (entry, 0)).collect())
    }

    fn entry_count(&self, shard: Shard, stream: &str) -> Result<u64> {
        Ok(self.stream(shard, stream).map_or(0, |stream| stream.entries.len() as u64))
    }

    fn delayed_count(&self, shard: Shard, stream: &str) -> Result<u64> {
        let delayed = self.at(shard).and_then(|maps| maps.delayed.get(stream));
        Ok(delayed.map_or(0, |delayed| delayed.entries.len() as u64))
    }

    fn look_due(&self, shard: Shard, stream: &str) -> Result<Option<Millis>> {
        let delayed = self.at(shard).and_then(|maps| maps.delayed.get(stream));
        Ok(delayed.and_then(|delayed| delayed.by_due.first()).map(|(due, _)| *due))
    }
}

/// A range that ends before it starts, at which the map would panic.
fn is_empty(low: &Bound<(i64, String)>, high: &Bound<(i64, String)>) -> bool {
    match (low, high) {
        (Bound::Included(low) | Bound::Excluded(low), Bound::Excluded(high)) => low >= high,
        _ => false,
    }
}
