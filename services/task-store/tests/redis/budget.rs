//! What one echo task costs Redis: commands, time, memory.

use std::{sync::Arc, time::Duration};

use rialto_a2a::v1::Role;
use rialto_store::Engine;
use rialto_task_store::Options;

use crate::{engine::OnRedis, world::*};

/// Lives the life of an echo task, as gateway and runner see to it.
async fn echo(world: &World) {
    let text = "hello, is there anybody in there?";
    drop(world.updates(Send::new(text)).await.expect("sends"));
    let begun = world.next().await;
    let events = vec![artifact("answer", text, false), status(S::Completed)];
    let answer = vec![said(Role::Agent, text)];
    world.finish_with(&begun, begun.turn.next_event, events, |finish| finish.history = answer).await;
}

async fn memory(redis: &OnRedis) -> f64 {
    redis.server.info("used_memory").await.unwrap()
}

#[tokio::test]
async fn an_echo_task_costs_redis_few_commands_and_3_kb_when_it_is_folded() {
    const TASKS: u32 = 1000;
    let redis = Arc::new(OnRedis::start(1));
    let engine: Arc<dyn Engine> = Arc::<OnRedis>::clone(&redis);
    let options =
        Options { fold_after: Duration::from_millis(1), due_period: Duration::from_millis(5), ..Options::default() };
    let world = World::with(engine, 1, &options);
    // So that what the first task costs is not counted.
    for _ in 0..200 {
        echo(&world).await;
    }
    redis.server.command(&["CONFIG", "RESETSTAT"]).await.unwrap();
    let before = memory(&redis).await;
    let cpu =
        async || redis.server.info("used_cpu_user").await.unwrap() + redis.server.info("used_cpu_sys").await.unwrap();
    let worked = cpu().await;
    for _ in 0..TASKS {
        echo(&world).await;
    }
    let worked = (cpu().await - worked) * 1e6 / f64::from(TASKS);
    let mut calls = redis.server.calls().await.unwrap();
    calls.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let per_task = |count: u64| f64::from(u32::try_from(count).unwrap()) / f64::from(TASKS);
    let total: f64 = calls.iter().map(|(_, count)| per_task(*count)).sum();
    let live = (memory(&redis).await - before) / f64::from(TASKS);
    world.background();
    let due = async || world.engine.index_count(0, "due", None).await.unwrap();
    tokio::time::timeout(Duration::from_secs(60), async {
        while due().await > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    let folded = (memory(&redis).await - before) / f64::from(TASKS);
    for (name, count) in &calls {
        eprintln!("{:6.2} {name}", per_task(*count));
    }
    eprintln!("{total:.1} commands, {worked:.0} µs, {live:.0} bytes with its log, {folded:.0} bytes without");
    assert!(folded < 3000.0, "{folded} bytes");
}
