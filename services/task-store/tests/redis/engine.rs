//! A Redis of its own for each engine that a test asks for.

use std::sync::Arc;

use rialto_store::{
    Batch, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, IndexQuery, Millis, Notices, ReadLimit,
    Record, Result, Shard,
    redis::{RedisConfig, RedisEngine},
};
use rialto_testkit::redis::RedisServer;
use tokio::runtime::{Builder, Runtime};

/// An engine with the server that it works on. Both live on a runtime of their own, so that tests can be written
/// for engines that need none.
#[derive(Debug)]
pub(crate) struct OnRedis {
    engine: Option<Arc<RedisEngine>>,
    pub(crate) server: RedisServer,
    runtime: Option<Runtime>,
}

impl OnRedis {
    /// Starts a server.
    pub(crate) fn start(shards: u16) -> Self {
        let starting = std::thread::spawn(move || {
            let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let (server, engine) = runtime.block_on(async {
                let server = RedisServer::start().await.unwrap();
                let config = RedisConfig { shards: Some(shards), ..RedisConfig::new(server.url()) };
                let engine = RedisEngine::connect(config).await.unwrap();
                (server, engine)
            });
            Self { engine: Some(engine), server, runtime: Some(runtime) }
        });
        starting.join().unwrap()
    }

    fn engine(&self) -> &RedisEngine {
        self.engine.as_ref().expect("until it is dropped")
    }
}

impl Drop for OnRedis {
    fn drop(&mut self) {
        drop(self.engine.take());
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Whether tests may stop the clock: not while another process is waited for.
pub(crate) const TIME_CAN_STAND_STILL: bool = false;

pub(crate) fn engine(shards: u16) -> Arc<dyn Engine> {
    Arc::new(OnRedis::start(shards))
}

#[tonic::async_trait]
impl Engine for OnRedis {
    fn shards(&self) -> Shard {
        self.engine().shards()
    }

    fn now(&self) -> Millis {
        self.engine().now()
    }

    async fn commit(&self, batch: Batch) -> Result<Committed> {
        self.engine().commit(batch).await
    }

    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.engine().get(shard, keys).await
    }

    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.engine().read(shard, stream, after, limit).await
    }

    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.engine().read_last(shard, stream, n).await
    }

    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.engine().index(shard, query).await
    }

    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        self.engine().index_count(shard, index, min).await
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        self.engine().claim(claim).await
    }

    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        self.engine().heartbeat(shard, stream, consumer, ids).await
    }

    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.engine().tick(shard, streams).await
    }

    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.engine().depth(shard, stream).await
    }

    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.engine().consumers(shard, stream).await
    }

    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        self.engine().listen(shard, topic).await
    }
}
