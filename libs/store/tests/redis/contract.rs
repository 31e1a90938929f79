//! The contract suite.

use futures::{StreamExt, stream};
use rialto_store::{
    Shard,
    redis::{RedisConfig, RedisEngine},
    suite,
};
use rialto_testkit::redis::{RedisCluster, RedisServer};

use crate::documented_user;

/// Runs all cases side by side on one Redis, each with a prefix of its own, as a user with the documented rights.
async fn passes(url: &str, nodes: &[RedisServer], shards: Shard) {
    let url = &documented_user(url, nodes).await;
    let cases = stream::iter(suite::all()).map(|(name, case)| async move {
        let config = RedisConfig { prefix: format!("rialto:{name}:"), shards: Some(shards), ..RedisConfig::new(url) };
        let engine = RedisEngine::connect(config).await.unwrap();
        let done = tokio::spawn(suite::soon(case(engine))).await;
        done.is_err().then_some(name)
    });
    let failed: Vec<_> = cases.buffer_unordered(8).filter_map(std::future::ready).collect().await;
    assert!(failed.is_empty(), "on {url}: {failed:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_on_a_single_server() {
    let server = RedisServer::start().await.unwrap();
    passes(&server.url(), &[server], 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_on_a_single_server_with_four_shards() {
    let server = RedisServer::start().await.unwrap();
    passes(&server.url(), &[server], 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_on_a_cluster_of_one_node_with_four_shards() {
    let cluster = RedisCluster::start(1).await.unwrap();
    passes(&cluster.url(), &cluster.nodes, 4).await;
}
