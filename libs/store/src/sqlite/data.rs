//! Where an engine keeps its data: what the logic of a transaction needs, whatever is underneath.

use bytes::Bytes;

use crate::{CommitId, Committed, Entry, EntryId, IndexQuery, Millis, ReadLimit, Record, Shard};

/// Only the database ever fails; maps in memory do not.
pub(super) type Result<T> = rusqlite::Result<T>;

/// Inside a transaction.
pub(super) trait Data {
    /// Version of a record; 0 = there is none.
    fn version(&mut self, shard: Shard, key: &str) -> Result<u64>;
    /// What the last commit that this record led has written, if it was that one.
    fn repeated(&mut self, shard: Shard, key: &str, id: &CommitId) -> Result<Option<Committed>>;
    /// Writes a record; says its version.
    fn put(&mut self, shard: Shard, key: &str, bytes: &Bytes) -> Result<u64>;
    fn delete(&mut self, shard: Shard, key: &str) -> Result<()>;
    fn set_ref(&mut self, shard: Shard, key: &str, name: &str, id: EntryId) -> Result<()>;
    fn set_commit(&mut self, shard: Shard, key: &str, id: &CommitId, committed: &Committed) -> Result<()>;
    /// A batch is over; what it noted is to be written.
    fn end_batch(&mut self) -> Result<()>;

    fn move_member(
        &mut self,
        shard: Shard,
        index: &str,
        member: &str,
        was: Option<i64>,
        now: Option<i64>,
    ) -> Result<()>;

    /// The highest id that a stream ever had.
    fn tail(&mut self, shard: Shard, stream: &str) -> Result<EntryId>;
    fn length(&mut self, shard: Shard, stream: &str) -> Result<u64>;
    /// Adds an entry. Streams that are worked off are `counted`.
    fn push(&mut self, shard: Shard, stream: &str, entry: &Entry, counted: bool) -> Result<()>;
    fn entry(&mut self, shard: Shard, stream: &str, id: EntryId) -> Result<Option<Entry>>;
    /// Removes an entry, if there; its id stays used.
    fn remove(&mut self, shard: Shard, stream: &str, id: EntryId) -> Result<()>;
    /// Removes a stream, its numbering included.
    fn drop_stream(&mut self, shard: Shard, stream: &str) -> Result<()>;

    fn delay(&mut self, shard: Shard, stream: &str, id: &str, due: Millis, tag: u8, payload: &Bytes) -> Result<()>;
    fn undelay(&mut self, shard: Shard, stream: &str, id: &str) -> Result<()>;
    /// Takes out the first `most` entries that are due.
    fn take_due(&mut self, shard: Shard, stream: &str, now: Millis, most: u32) -> Result<Vec<(u8, Bytes)>>;
    /// When the next one is due.
    fn next_due(&mut self, shard: Shard, stream: &str) -> Result<Option<Millis>>;

    /// When the limit has all its room again.
    fn full_at(&mut self, shard: Shard, key: &str) -> Result<Option<i64>>;
    fn set_full_at(&mut self, shard: Shard, key: &str, full_at: i64) -> Result<()>;
    /// Forgets limits that have all their room again.
    fn sweep_limits(&mut self, now: i64) -> Result<()>;
}

/// Outside of transactions: each call sees all that was committed, and nothing else.
pub(super) trait Look {
    fn records(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>>;
    fn entries(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>>;
    fn last_entries(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>>;
    fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>>;
    fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64>;
    /// The next entries of a stream, with how often they were handed out as far as is written.
    fn next_entries(&self, shard: Shard, stream: &str, after: EntryId, most: usize) -> Result<Vec<(Entry, u32)>>;
    fn entry_count(&self, shard: Shard, stream: &str) -> Result<u64>;
    fn delayed_count(&self, shard: Shard, stream: &str) -> Result<u64>;
    fn look_due(&self, shard: Shard, stream: &str) -> Result<Option<Millis>>;
}
