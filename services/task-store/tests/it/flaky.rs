//! An engine that fails when it is told to, before or after it did what was asked.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rialto_store::{
    Batch, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, Error, IndexQuery, Millis, Notices,
    ReadLimit, Record, Result, Shard,
};

#[derive(Debug)]
pub(crate) struct Flaky {
    inner: Arc<dyn Engine>,
    down: AtomicBool,
    full: AtomicBool,
    /// Commits fail at random, some of them after they were done.
    chaos: Mutex<Option<u64>>,
    /// Milliseconds that everything takes longer.
    slow: AtomicU64,
    pub(crate) commits: AtomicUsize,
    /// Operations of the largest commit so far.
    pub(crate) largest: AtomicUsize,
    pub(crate) reads: AtomicUsize,
}

fn away() -> Error {
    Error::Unavailable("it is told to".into())
}

impl Flaky {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            down: AtomicBool::default(),
            full: AtomicBool::default(),
            chaos: Mutex::default(),
            slow: AtomicU64::default(),
            commits: AtomicUsize::default(),
            largest: AtomicUsize::default(),
            reads: AtomicUsize::default(),
        })
    }

    pub(crate) fn down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    pub(crate) fn full(&self, full: bool) {
        self.full.store(full, Ordering::SeqCst);
    }

    /// Lets commits fail at random, before or after they are done.
    pub(crate) fn chaos(&self, seed: Option<u64>) {
        *self.chaos.lock().expect("not poisoned") = seed;
    }

    pub(crate) fn slow(&self, millis: u64) {
        self.slow.store(millis, Ordering::SeqCst);
    }

    async fn dawdle(&self) {
        match self.slow.load(Ordering::SeqCst) {
            0 => {}
            millis => tokio::time::sleep(Duration::from_millis(millis)).await,
        }
    }

    fn fate(&self) -> u64 {
        let mut chaos = self.chaos.lock().expect("not poisoned");
        let Some(seed) = chaos.as_mut() else { return 0 };
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        (*seed >> 20) % 8
    }

    async fn read(&self) -> Result<()> {
        self.dawdle().await;
        self.reads.fetch_add(1, Ordering::SeqCst);
        if self.down.load(Ordering::SeqCst) { Err(away()) } else { Ok(()) }
    }
}

#[tonic::async_trait]
impl Engine for Flaky {
    fn shards(&self) -> Shard {
        self.inner.shards()
    }

    fn now(&self) -> Millis {
        self.inner.now()
    }

    async fn commit(&self, batch: Batch) -> Result<Committed> {
        self.commits.fetch_add(1, Ordering::SeqCst);
        self.largest.fetch_max(batch.ops.len(), Ordering::SeqCst);
        self.dawdle().await;
        if self.down.load(Ordering::SeqCst) {
            return Err(away());
        }
        if self.full.load(Ordering::SeqCst) && !batch.releasing {
            return Err(Error::Full);
        }
        match self.fate() {
            6 => Err(away()),
            7 => {
                self.inner.commit(batch).await?;
                Err(away())
            }
            _ => self.inner.commit(batch).await,
        }
    }

    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.read().await?;
        self.inner.get(shard, keys).await
    }

    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.read().await?;
        self.inner.read(shard, stream, after, limit).await
    }

    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.read().await?;
        self.inner.read_last(shard, stream, n).await
    }

    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.read().await?;
        self.inner.index(shard, query).await
    }

    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        self.read().await?;
        self.inner.index_count(shard, index, min).await
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        self.inner.claim(claim).await
    }

    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        self.inner.heartbeat(shard, stream, consumer, ids).await
    }

    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.inner.tick(shard, streams).await
    }

    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.inner.depth(shard, stream).await
    }

    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.inner.consumers(shard, stream).await
    }

    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        self.inner.listen(shard, topic).await
    }
}
