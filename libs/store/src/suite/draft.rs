//! Writing batches down briefly.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    At, Batch, Check, Claim, Claimed, CommitId, Committed, Engine, Entry, EntryId, IndexQuery, Millis, Op, Order, Rate,
    ReadLimit, Record, Result, Shard,
};

/// A batch being written.
#[derive(Clone, Debug)]
pub struct Draft {
    engine: Arc<dyn Engine>,
    /// So far.
    pub batch: Batch,
}

/// A shard of an engine.
#[derive(Clone, Debug)]
pub struct Home {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// The shard.
    pub shard: Shard,
}

impl Home {
    /// The last shard.
    #[must_use]
    pub fn new(engine: Arc<dyn Engine>) -> Self {
        let shard = super::home(&engine);
        Self { engine, shard }
    }

    /// An empty batch.
    #[must_use]
    pub fn batch(&self) -> Draft {
        Draft { engine: Arc::clone(&self.engine), batch: Batch { shard: self.shard, ..Batch::default() } }
    }

    /// One record.
    pub async fn record(&self, key: &str) -> Option<Record> {
        self.engine.get(self.shard, &[key]).await.unwrap().remove(0)
    }

    /// A whole stream.
    pub async fn entries(&self, stream: &str) -> Vec<Entry> {
        let limit = ReadLimit { entries: 100_000, bytes: 1 << 30 };
        self.engine.read(self.shard, stream, EntryId::ZERO, limit).await.unwrap()
    }

    /// Payloads of a whole stream, as text.
    pub async fn payloads(&self, stream: &str) -> Vec<String> {
        self.entries(stream).await.into_iter().map(|entry| text(&entry.payload)).collect()
    }

    /// A whole index, by pages of `limit`.
    pub async fn members(&self, index: &str, order: Order, limit: usize) -> Vec<(i64, String)> {
        let mut all = Vec::new();
        loop {
            let after = all.last().cloned();
            let query = IndexQuery { index: index.to_owned(), order, after, min: None, max: None, limit };
            let page = self.engine.index(self.shard, &query).await.unwrap();
            if page.is_empty() {
                return all;
            }
            assert!(page.len() <= limit);
            all.extend(page);
        }
    }

    /// The lowest few of an index, in one read.
    pub async fn lowest(&self, index: &str) -> Vec<(i64, String)> {
        let index = index.to_owned();
        let query = IndexQuery { index, order: Order::Ascending, after: None, min: None, max: None, limit: 9 };
        self.engine.index(self.shard, &query).await.unwrap()
    }

    /// A claim on one stream that does not wait, with a long lease.
    #[must_use]
    pub fn claim(&self, stream: &str, consumer: &str, limit: usize) -> Claim {
        Claim {
            streams: vec![(self.shard, stream.to_owned())],
            consumer: consumer.to_owned(),
            limit,
            lease: Duration::from_secs(60),
            wait: Duration::ZERO,
        }
    }

    /// Claims what is there.
    pub async fn take(&self, stream: &str, consumer: &str, limit: usize) -> Vec<Claimed> {
        self.engine.claim(&self.claim(stream, consumer, limit)).await.unwrap()
    }

    /// Claims one entry, waiting for it.
    pub async fn take_one(&self, stream: &str, consumer: &str) -> Claimed {
        let claim = Claim { wait: Duration::from_secs(20), ..self.claim(stream, consumer, 1) };
        let mut taken = self.engine.claim(&claim).await.unwrap();
        assert_eq!(taken.len(), 1, "an entry should have come");
        taken.remove(0)
    }

    /// Appends texts to a work stream.
    pub async fn give(&self, stream: &str, texts: &[&str]) -> Vec<EntryId> {
        let mut ids = Vec::new();
        for text in texts {
            ids.extend(self.batch().append(stream, text).commit().await.unwrap().entries);
        }
        ids
    }
}

impl Draft {
    /// Applies it.
    ///
    /// # Errors
    /// Those of [`Engine::commit`].
    pub async fn commit(&self) -> Result<Committed> {
        self.engine.commit(self.batch.clone()).await
    }

    fn op(mut self, op: Op) -> Self {
        self.batch.ops.push(op);
        self
    }

    fn check(mut self, check: Check) -> Self {
        self.batch.checks.push(check);
        self
    }

    /// Sets [`Batch::commit`].
    #[must_use]
    pub fn id(mut self, lead: &str, id: CommitId) -> Self {
        self.batch.commit = Some((lead.to_owned(), id));
        self
    }

    /// [`Op::Put`].
    #[must_use]
    pub fn put(self, key: &str, value: &str) -> Self {
        self.op(Op::Put { key: key.to_owned(), bytes: Bytes::copy_from_slice(value.as_bytes()) })
    }

    /// [`Op::Delete`].
    #[must_use]
    pub fn delete(self, key: &str) -> Self {
        self.op(Op::Delete { key: key.to_owned() })
    }

    /// [`Op::Index`].
    #[must_use]
    pub fn index(self, index: &str, member: &str, was: Option<i64>, now: Option<i64>) -> Self {
        self.op(Op::Index { index: index.to_owned(), member: member.to_owned(), was, now })
    }

    /// [`Op::Append`] with the store's id.
    #[must_use]
    pub fn append(self, stream: &str, value: &str) -> Self {
        self.append_at(stream, At::Next, value, None)
    }

    /// [`Op::Append`] with a number.
    #[must_use]
    pub fn number(self, stream: &str, n: u64, value: &str) -> Self {
        self.append_at(stream, At::Number(n), value, None)
    }

    /// [`Op::Append`] that writes a ref.
    #[must_use]
    pub fn append_into(self, stream: &str, value: &str, key: &str, name: &str) -> Self {
        self.append_at(stream, At::Next, value, Some((key.to_owned(), name.to_owned())))
    }

    fn append_at(self, stream: &str, at: At, value: &str, into: Option<(String, String)>) -> Self {
        let payload = Bytes::copy_from_slice(value.as_bytes());
        self.op(Op::Append { stream: stream.to_owned(), at, tag: tag(value), payload, into })
    }

    /// [`Op::Delay`].
    #[must_use]
    pub fn delay(self, stream: &str, id: &str, due: Millis, value: &str) -> Self {
        let payload = Bytes::copy_from_slice(value.as_bytes());
        self.op(Op::Delay { stream: stream.to_owned(), id: id.to_owned(), due, tag: tag(value), payload })
    }

    /// [`Op::Undelay`].
    #[must_use]
    pub fn undelay(self, stream: &str, id: &str) -> Self {
        self.op(Op::Undelay { stream: stream.to_owned(), id: id.to_owned() })
    }

    /// [`Op::Ack`].
    #[must_use]
    pub fn ack(self, stream: &str, id: EntryId) -> Self {
        self.op(Op::Ack { stream: stream.to_owned(), id })
    }

    /// [`Op::HandBack`].
    #[must_use]
    pub fn hand_back(self, stream: &str, id: EntryId) -> Self {
        self.op(Op::HandBack { stream: stream.to_owned(), id })
    }

    /// [`Op::Bury`].
    #[must_use]
    pub fn bury(self, stream: &str, id: EntryId, reason: &str) -> Self {
        self.op(Op::Bury { stream: stream.to_owned(), id, reason: reason.to_owned() })
    }

    /// [`Op::Remove`].
    #[must_use]
    pub fn remove(self, stream: &str, id: EntryId) -> Self {
        self.op(Op::Remove { stream: stream.to_owned(), id })
    }

    /// [`Op::Drop`].
    #[must_use]
    pub fn drop_stream(self, stream: &str) -> Self {
        self.op(Op::Drop { stream: stream.to_owned() })
    }

    /// [`Op::Notify`].
    #[must_use]
    pub fn notify(self, topic: &str, payload: &str) -> Self {
        self.op(Op::Notify { topic: topic.to_owned(), payload: payload.to_owned() })
    }

    /// [`Check::Version`].
    #[must_use]
    pub fn version(self, key: &str, version: u64) -> Self {
        self.check(Check::Version { key: key.to_owned(), version })
    }

    /// [`Check::Absent`].
    #[must_use]
    pub fn absent(self, key: &str) -> Self {
        self.check(Check::Absent { key: key.to_owned() })
    }

    /// [`Check::Pending`].
    #[must_use]
    pub fn pending(self, stream: &str, id: EntryId, consumer: &str) -> Self {
        self.check(Check::Pending { stream: stream.to_owned(), id, consumer: consumer.to_owned() })
    }

    /// [`Check::Tail`].
    #[must_use]
    pub fn tail(self, stream: &str, id: EntryId) -> Self {
        self.check(Check::Tail { stream: stream.to_owned(), id })
    }

    /// [`Check::ShorterThan`].
    #[must_use]
    pub fn shorter(self, stream: &str, len: u64) -> Self {
        self.check(Check::ShorterThan { stream: stream.to_owned(), len })
    }

    /// [`Check::Limit`].
    #[must_use]
    pub fn limit(self, key: &str, rate: Rate) -> Self {
        self.check(Check::Limit { key: key.to_owned(), rate })
    }
}

/// Bytes as text.
pub(super) fn text(bytes: &Bytes) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A tag that differs between values, so that mixing them up shows.
pub(super) fn tag(value: &str) -> u8 {
    value.bytes().fold(value.len().to_le_bytes()[0], |tag, byte| tag.wrapping_mul(31).wrapping_add(byte))
}
