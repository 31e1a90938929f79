//! The engine of a cluster: Redis 7.0 or later, alone, behind Sentinels, or as a Redis Cluster.
//!
//! A record is a string, indexes are parts of sorted sets, a stream is a stream (`t` tag, `p` payload) with the
//! group `workers`. Everything that must happen together is one call of a function in `library.lua`. Only the 7.0
//! command set is used.
//!
//! `docs/deploy.md` has the rule for an ACL user; `rights.rs` checks it at start.

mod checks;
mod claim;
mod clock;
mod commit;
mod config;
mod index;
mod installed;
mod keys;
mod library;
mod link;
mod node;
mod notices;
mod record;
mod rights;
mod value;

use std::sync::Arc;

use redis::Value;
use tokio::time::Instant;

pub use self::{checks::OpenError, config::RedisConfig};
use self::{
    claim::{Arrived, Readers, Seats},
    clock::Clock,
    keys::kind,
    library::Function,
    link::{Link, Lost},
    notices::Subscription,
};
use crate::{
    Batch, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, Error, IndexQuery, Millis, Notices,
    ReadLimit, Record, Result, Shard,
};

/// Delayed entries of each stream that one step of a tick moves.
const TICK: usize = 256;

/// Entries that a read asks for before it knows how large they are.
const FIRST: usize = 32;

/// Entries that a read asks for at most at a time.
const MOST: usize = 512;

/// The storage kernel on Redis. Work goes on in the background for as long as it lives.
#[derive(Debug)]
pub struct RedisEngine {
    link: Arc<Link>,
    clock: Clock,
    notices: Subscription,
    readers: Readers,
    seats: Seats,
    arrived: Arrived,
}

impl RedisEngine {
    /// Connects, checks that Redis is fit for the purpose, and installs the functions and, the first time, the
    /// number of shards.
    ///
    /// # Errors
    /// One line that says what to do.
    pub async fn connect(config: RedisConfig) -> Result<Arc<Self>, OpenError> {
        let link = checks::open(&config).await?;
        link.spawn(installed::keep(Arc::clone(&link)));
        let notices = Subscription::new(&link);
        let engine = Self {
            notices,
            clock: Clock::new(),
            readers: Readers::default(),
            seats: Seats::default(),
            arrived: Arrived::default(),
            link,
        };
        // So the clock is right before the first commit.
        let asked = Instant::now();
        let time = engine.link.call(0, &redis::cmd("TIME"), Lost::Repeat).await;
        let time = time.ok().and_then(value::list).unwrap_or_default();
        if let [seconds, micros] = time.as_slice()
            && let (Some(seconds), Some(micros)) = (value::int(seconds), value::int(micros))
        {
            engine.clock.heard(seconds * 1000 + micros / 1000, asked);
        }
        Ok(Arc::new(engine))
    }

    fn check_shard(&self, shard: Shard) -> Result<()> {
        let shards = self.shards();
        if shard < shards { Ok(()) } else { Err(Error::Malformed(format!("shard {shard} of {shards}"))) }
    }

    fn key(&self, shard: Shard, kind: &str, name: &str) -> String {
        self.link.keys.key(shard, kind, name)
    }

    async fn ask(&self, shard: Shard, command: &redis::Cmd) -> Result<Value> {
        self.link.call(shard, command, Lost::Repeat).await
    }
}

impl Drop for RedisEngine {
    fn drop(&mut self) {
        self.link.stop.cancel();
    }
}

#[async_trait::async_trait]
impl Engine for RedisEngine {
    fn shards(&self) -> Shard {
        self.link.keys.shards()
    }

    fn now(&self) -> Millis {
        self.clock.now()
    }

    async fn commit(&self, batch: Batch) -> Result<Committed> {
        self.commit_batch(&batch).await
    }

    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.check_shard(shard)?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        // One command, so that no commit falls between two records.
        let mut command = redis::cmd("MGET");
        for key in keys {
            command.arg(self.key(shard, kind::PLAIN, key));
        }
        let records = value::list(self.ask(shard, &command).await?).ok_or_else(value::strange)?;
        let read = |stored| match stored {
            Value::Nil => Ok(None),
            Value::BulkString(stored) => record::parse(stored).map(Some).ok_or_else(value::strange),
            _ => Err(value::strange()),
        };
        records.into_iter().map(read).collect()
    }

    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.check_shard(shard)?;
        let key = self.key(shard, kind::PLAIN, stream);
        let (most, mut after, mut size) = (limit.entries.max(1), after, 0);
        let mut entries: Vec<Entry> = Vec::new();
        // With a small byte limit it is not worth asking for many.
        let mut count = FIRST.min(limit.bytes / 1024 + 1);
        loop {
            count = count.min(most - entries.len());
            let mut command = redis::cmd("XRANGE");
            command.arg(&key).arg(format!("({after}")).arg("+").arg("COUNT").arg(count);
            let read = value::list(self.ask(shard, &command).await?).ok_or_else(value::strange)?;
            let found = read.len();
            for entry in value::entries(Value::Array(read)).ok_or_else(value::strange)? {
                size += entry.payload.len();
                if size > limit.bytes && !entries.is_empty() {
                    return Ok(entries);
                }
                after = entry.id;
                entries.push(entry);
            }
            if found < count || entries.len() >= most || size >= limit.bytes {
                return Ok(entries);
            }
            // As many as fit if they are like those so far.
            let typical = size / entries.len().max(1) + 1;
            count = ((limit.bytes - size) / typical + 1).clamp(1, MOST);
        }
    }

    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.check_shard(shard)?;
        if n == 0 {
            return Ok(Vec::new());
        }
        let mut command = redis::cmd("XREVRANGE");
        command.arg(self.key(shard, kind::PLAIN, stream)).arg("+").arg("-").arg("COUNT").arg(n);
        let mut entries = value::entries(self.ask(shard, &command).await?).ok_or_else(value::strange)?;
        entries.reverse();
        Ok(entries)
    }

    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.check_shard(shard)?;
        let place = index::Place::of(&query.index);
        match index::page(&self.key(shard, kind::INDEX, place.set), &place, query) {
            Some(command) => index::rows(&place, self.ask(shard, &command).await?).ok_or_else(value::strange),
            None => Ok(Vec::new()),
        }
    }

    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        self.check_shard(shard)?;
        let place = index::Place::of(index);
        let command = index::count(&self.key(shard, kind::INDEX, place.set), &place, min);
        let count = value::int(&self.ask(shard, &command).await?);
        count.and_then(|count| u64::try_from(count).ok()).ok_or_else(value::strange)
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        self.claim_or_wait(claim).await
    }

    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        self.check_shard(shard)?;
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut command = self.link.library.call(Function::Heartbeat);
        command.arg(1).arg(self.key(shard, kind::PLAIN, stream)).arg(consumer);
        for id in ids {
            command.arg(id.to_string());
        }
        let owned = value::list(self.ask(shard, &command).await?).ok_or_else(value::strange)?;
        let owned: Vec<_> = owned.iter().map(|owned| value::int(owned) == Some(1)).collect();
        self.arrived.seen(shard, stream, ids, &owned);
        Ok(owned)
    }

    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.check_shard(shard)?;
        if streams.is_empty() {
            return Ok(0);
        }
        let mut command = self.link.library.call(Function::Tick);
        command.arg(streams.len() * 3);
        for stream in streams {
            for kind in [kind::PLAIN, kind::DUE, kind::DELAYED] {
                command.arg(self.key(shard, kind, stream));
            }
        }
        command.arg(TICK);
        let moved = value::int(&self.ask(shard, &command).await?);
        moved.and_then(|moved| u64::try_from(moved).ok()).ok_or_else(value::strange)
    }

    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.check_shard(shard)?;
        let mut command = self.link.library.call(Function::Depth);
        command.arg(2).arg(self.key(shard, kind::PLAIN, stream)).arg(self.key(shard, kind::DUE, stream));
        let parts = value::list(self.ask(shard, &command).await?).unwrap_or_default();
        let [waiting, pending, delayed, oldest] = parts.as_slice() else { return Err(value::strange()) };
        let count = |value: &Value| value::int(value).and_then(|count| u64::try_from(count).ok());
        let count = |value| count(value).ok_or_else(value::strange);
        Ok(Depth {
            waiting: count(waiting)?,
            pending: count(pending)?,
            delayed: count(delayed)?,
            oldest: value::id(oldest).and_then(|id| i64::try_from(id.0).ok()),
        })
    }

    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.check_shard(shard)?;
        self.consumers_of(shard, stream).await
    }

    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        self.check_shard(shard)?;
        self.notices.listen(shard, topic, self.link.deadline()).await
    }
}
