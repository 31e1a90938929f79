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
async fn an_echo_task_costs_redis_38_commands_and_less_than_3_kb() {
    const TASKS: u32 = 1000;
    let redis = Arc::new(OnRedis::start(1));
    let engine: Arc<dyn Engine> = Arc::<OnRedis>::clone(&redis);
    let options = Options { fold_after: Duration::ZERO, due_period: Duration::from_millis(5), ..Options::default() };
    let world = World::with(engine, 1, &options);
    // So that what the first tasks cost is not counted.
    for _ in 0..200 {
        echo(&world).await;
    }
    redis.server.command(&["CONFIG", "RESETSTAT"]).await.unwrap();
    let before = memory(&redis).await;
    for _ in 0..TASKS {
        echo(&world).await;
    }
    let mut calls = redis.server.calls().await.unwrap();
    calls.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let per_task = |count: u64| f64::from(u32::try_from(count).unwrap()) / f64::from(TASKS);
    for (name, count) in &calls {
        eprintln!("{:6.2} {name}", per_task(*count));
    }
    let commands: f64 = calls.iter().map(|(_, count)| per_task(*count)).sum();
    // Whatever is to be folded away is folded away.
    world.background();
    let due = async || world.engine.index_count(0, "due", None).await.unwrap();
    let folded = async {
        while due().await > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), folded).await.unwrap();
    let bytes = (memory(&redis).await - before) / f64::from(TASKS);
    eprintln!("{commands:.1} commands, {bytes:.0} bytes");
    assert!(commands < 38.5, "{commands}");
    assert!(bytes < 3000.0, "{bytes}");
}
