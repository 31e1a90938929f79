//! The Redis engine on real servers: what the contract suite cannot know of.

#![expect(clippy::unwrap_used, reason = "a panic is how tests fail, in their helpers as well")]
#![expect(clippy::disallowed_methods, reason = "tests wait for the tasks that they spawn")]

mod commit;
mod contract;
mod outage;
mod setup;
mod topology;
mod work;

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use rialto_store::{
    At, Batch, Claim, Claimed, Engine, EntryId, Error, Op, Result, Shard,
    redis::{RedisConfig, RedisEngine},
};
use rialto_testkit::redis::RedisServer;
use tokio::time::Instant;

/// A server of its own, and an engine on it.
async fn one() -> (RedisServer, Arc<RedisEngine>) {
    let server = RedisServer::start().await.unwrap();
    let engine = connect(&server.url()).await;
    (server, engine)
}

async fn connect(url: &str) -> Arc<RedisEngine> {
    RedisEngine::connect(RedisConfig::new(url)).await.unwrap()
}

/// The rights that the documentation tells operators to give, as they are written there.
fn documented_rights() -> Vec<&'static str> {
    let documentation = include_str!("../../../../docs/deploy.md");
    let (_, rule) = documentation.split_once("redis-cli ACL SETUSER rialto on '>PASSWORD' ").unwrap();
    let (rule, _) = rule.split_once("```").unwrap();
    rule.split_whitespace().filter(|word| *word != "\\").map(|word| word.trim_matches('\'')).collect()
}

/// Makes a user with the documented rights; its URL.
async fn documented_user(url: &str, nodes: &[RedisServer]) -> String {
    for node in nodes {
        let rule = ["ACL", "SETUSER", "rialto", "on", ">p@ss"];
        node.command(&[&rule, &documented_rights()[..]].concat()).await.unwrap();
    }
    url.replace("redis://", "redis://rialto:p%40ss@")
}

fn put(key: &str, bytes: &'static [u8]) -> Op {
    Op::Put { key: key.to_owned(), bytes: Bytes::from_static(bytes) }
}

fn append(stream: &str, payload: impl Into<Bytes>) -> Op {
    Op::Append { stream: stream.to_owned(), at: At::Next, tag: 7, payload: payload.into(), into: None }
}

fn number(stream: &str, number: u64) -> Op {
    let payload = Bytes::from(number.to_string());
    Op::Append { stream: stream.to_owned(), at: At::Number(number), tag: 0, payload, into: None }
}

fn ack(claimed: &Claimed) -> Op {
    Op::Ack { stream: claimed.stream.clone(), id: claimed.entry.id }
}

fn hand_back(claimed: &Claimed) -> Op {
    Op::HandBack { stream: claimed.stream.clone(), id: claimed.entry.id }
}

fn batch(ops: Vec<Op>) -> Batch {
    Batch { ops, ..Batch::default() }
}

/// A batch whose repeat is recognised by the record `lead`.
fn named(lead: &str, id: u8, ops: Vec<Op>) -> Batch {
    Batch { commit: Some((lead.to_owned(), [id; 16])), ops, ..Batch::default() }
}

fn request(consumer: &str, limit: usize) -> Claim {
    Claim {
        streams: vec![(0, "runs".to_owned())],
        consumer: consumer.to_owned(),
        limit,
        lease: Duration::from_secs(60),
        wait: Duration::ZERO,
    }
}

async fn claim(engine: &RedisEngine, consumer: &str, limit: usize) -> Vec<Claimed> {
    engine.claim(&request(consumer, limit)).await.unwrap()
}

fn payloads(claimed: &[Claimed]) -> Vec<&str> {
    claimed.iter().map(|one| std::str::from_utf8(&one.entry.payload).unwrap()).collect()
}

/// Tries until it works: for what must come back by itself.
async fn again<T, F: Future<Output = Result<T>>>(what: &str, mut attempt: impl FnMut() -> F) -> T {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return value,
            Err(error @ Error::Unavailable(_)) => {
                assert!(start.elapsed() < Duration::from_secs(15), "{what} in vain: {error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

/// Must be over within so many milliseconds.
async fn within<T>(millis: u64, doing: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_millis(millis), doing).await.expect("too slow")
}

fn shards(engine: &RedisEngine) -> impl Iterator<Item = Shard> + use<> {
    0..engine.shards()
}

const ZERO: EntryId = EntryId::ZERO;
