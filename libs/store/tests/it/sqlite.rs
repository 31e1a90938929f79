//! The embedded engine keeps the contract, in memory and in a folder.

use std::sync::Arc;

use futures::{StreamExt, stream};
use proptest::prelude::*;
use rialto_store::{
    Engine, Shard,
    sqlite::{SqliteConfig, SqliteEngine},
    suite::{model, soon},
};

fn memory(shards: Shard) -> Arc<dyn Engine> {
    SqliteEngine::open(SqliteConfig::memory(shards)).unwrap()
}

/// Not synced, as these tests do not cut the power.
fn folder(shards: Shard) -> (Arc<dyn Engine>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = SqliteConfig { durable: false, ..SqliteConfig::folder(folder.path(), shards) };
    (SqliteEngine::open(config).unwrap(), folder)
}

mod in_memory {
    async fn engine() -> (std::sync::Arc<dyn rialto_store::Engine>, ()) {
        (super::memory(1), ())
    }
    rialto_store::contract_tests!(self::engine);
}

mod in_a_folder {
    async fn engine() -> (std::sync::Arc<dyn rialto_store::Engine>, tempfile::TempDir) {
        super::folder(1)
    }
    rialto_store::contract_tests!(self::engine);
}

/// All cases in one test, eight at a time: shards change little here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_four_shards() {
    let cases = rialto_store::suite::all().into_iter().map(|(_, case)| async move {
        let (on_disk, _folder) = folder(4);
        soon(case(memory(4))).await;
        soon(case(on_disk)).await;
    });
    stream::iter(cases).buffer_unordered(8).collect::<()>().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_follow_the_model(history in model::histories()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(model::follows(memory(1), history.clone()));
        let (engine, _folder) = folder(2);
        runtime.block_on(model::follows(engine, history));
    }
}
