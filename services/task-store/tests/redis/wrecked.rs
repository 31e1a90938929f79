//! Work streams that somebody tampers with: their entries, their groups, the streams themselves (C119, C125, C127).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use rialto_a2a::v1::TaskState;
use rialto_rpc::tasks::Outcome;
use rialto_store::Engine;
use rialto_task_store::Options;
use rialto_testkit::redis::RedisServer;

use crate::{engine::OnRedis, world::*};

async fn texts(server: &RedisServer, words: &[&str]) -> Vec<String> {
    server.command(words).await.unwrap().list().iter().map(|reply| reply.text().to_owned()).collect()
}

/// The work streams of the agent.
async fn streams(server: &RedisServer) -> Vec<String> {
    let mut found = Vec::new();
    for key in texts(server, &["KEYS", "*runs:echo*"]).await {
        if server.command(&["TYPE", &key]).await.unwrap().text() == "stream" {
            found.push(key);
        }
    }
    assert!(!found.is_empty(), "there are streams");
    found
}

async fn group(server: &RedisServer, stream: &str) -> String {
    let groups = server.command(&["XINFO", "GROUPS", stream]).await.unwrap();
    groups.list()[0].list()[1].text().to_owned()
}

/// Ten turns wait and five run, with three replicas that look after them; then something happens to the streams, and
/// the runners of the five are never heard of again. Every task ends, once, and nothing is left.
async fn survives(what: &str, wreck: impl AsyncFn(&RedisServer, &str)) {
    let redis = Arc::new(OnRedis::start(2));
    let options =
        Options { due_period: Duration::from_millis(5), sweep_period: Duration::from_millis(20), ..Options::default() };
    let engine: Arc<dyn Engine> = Arc::<OnRedis>::clone(&redis);
    let world = World::with(engine, 3, &options);
    let mut tasks = Vec::new();
    for _ in 0..15 {
        tasks.push(world.send(Send::new("hi")).await.expect("sends").id);
    }
    let mut lost = Vec::new();
    for _ in 0..5 {
        lost.push(world.next().await);
    }
    for stream in streams(&redis.server).await {
        wreck(&redis.server, &stream).await;
    }
    world.background();
    let mut done = BTreeSet::new();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while done.len() < tasks.len() {
        assert!(tokio::time::Instant::now() < deadline, "{what}: {} of {} done", done.len(), tasks.len());
        // Also what the lost runners still seem to own.
        let Some(run) = world.claim_after("r2", Duration::from_millis(100)).await else {
            tokio::time::sleep(Duration::from_millis(2)).await;
            continue;
        };
        if let Some(begun) = world.begin(&run).await {
            let outcome = world.finish(&begun, begun.turn.next_event, vec![status(TaskState::Completed)]).await;
            assert_eq!(outcome, Outcome::Ok, "{what}");
            assert!(done.insert(run.run.task_id), "{what}: once");
        }
    }
    for begun in lost {
        assert_eq!(world.finish(&begun, 3, vec![status(TaskState::Failed)]).await, Outcome::Fenced, "{what}");
    }
    for id in tasks {
        assert_eq!(state(&world.get(&id).await), TaskState::Completed, "{what}");
    }
    // Entries that came twice settle as nothing to do.
    while let Some(run) = world.claim_after("r3", Duration::ZERO).await {
        assert!(world.begin(&run).await.is_none(), "{what}");
    }
    assert_eq!(world.entries().await, 0, "{what}");
}

#[tokio::test]
async fn the_streams_are_deleted() {
    survives("DEL", async |server, stream| {
        server.command(&["DEL", stream]).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn entries_are_trimmed_while_some_are_pending() {
    survives("XTRIM", async |server, stream| {
        server.command(&["XTRIM", stream, "MAXLEN", "0"]).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn the_bodies_of_pending_entries_are_gone() {
    survives("XDEL", async |server, stream| {
        let group = group(server, stream).await;
        let pending = server.command(&["XPENDING", stream, &group, "-", "+", "100"]).await.unwrap();
        for entry in pending.list() {
            server.command(&["XDEL", stream, entry.list()[0].text()]).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn the_consumer_group_is_destroyed() {
    survives("XGROUP DESTROY", async |server, stream| {
        let group = group(server, stream).await;
        server.command(&["XGROUP", "DESTROY", stream, &group]).await.unwrap();
    })
    .await;
}
