//! What is forgotten, and when.

use std::{sync::atomic::Ordering, time::Duration};

use futures::{StreamExt as _, stream};

use rialto_a2a::Kind;
use rialto_rpc::tasks::{CancelRequest, Follow, Outcome, task_store_server::TaskStore as _};
use rialto_store::{Batch, EntryId, Op};
use rialto_task_store::Options;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Request;

use crate::{engine::TIME_CAN_STAND_STILL, flaky::Flaky, world::*};

fn hasty() -> Options {
    Options {
        fold_after: Duration::from_millis(30),
        due_period: Duration::from_millis(5),
        min_context_idle: Duration::ZERO,
        ..Options::default()
    }
}

#[tokio::test]
async fn a_log_is_folded_away_and_the_task_stays() {
    let world = World::with(engine(2), 1, &hasty());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![artifact("a", &"1".repeat(300), false), artifact("a", "2", true)]).await;
    let canceled = world.cancel(&sent.id).await.expect("cancels, with an artifact that nobody folded");
    world.finish(&begun, 5, vec![]).await;
    let mut slow = world.watch(&sent.id, Some(1)).await.expect("watches");
    assert_eq!(short(&one(&mut slow).await), "2 WORKING");
    world.background();
    eventually("folded", || async { folded(&world, &sent.id).await }).await;
    assert_eq!(world.get(&sent.id).await, canceled);
    for after in [0, 3] {
        let resumed = world.watch(&sent.id, Some(after)).await.expect("a snapshot instead");
        assert_eq!(shorts(resumed).await, ["5 task CANCELED"]);
    }
    let rest = world.watch(&sent.id, Some(5)).await.expect("nothing is left");
    assert!(shorts(rest).await.is_empty());
    // Whoever stalled all the time is shown what became of it.
    let end = shorts(slow).await;
    assert_eq!(end.last().map(String::as_str), Some(if end.len() == 1 { "5 task CANCELED" } else { "5 CANCELED" }));
}

#[tokio::test]
async fn a_log_with_a_gap_is_an_error_and_never_a_shorter_artifact() {
    let world = World::with(engine(2), 1, &hasty());
    let long = "x".repeat(5000);
    let written = async || {
        let sent = world.send(Send::new("hi")).await.expect("sends");
        let begun = world.next().await;
        world.record(&begun, 3, vec![artifact("a", &long, false), artifact("a", "2", true)]).await;
        (sent.id, begun)
    };
    let lose = async |id: &str, op: Op| {
        let shard = u16::from_str_radix(&id[34..], 16).expect("two digits");
        world.engine.commit(Batch { shard, ops: vec![op], ..Batch::default() }).await.expect("commits");
    };
    let log = |id: &str| format!("log:{id}");
    for whole in [false, true] {
        let (id, begun) = written().await;
        let stream = log(&id);
        let lost = match whole {
            true => Op::Drop { stream },
            false => Op::Remove { stream, id: EntryId::number(3) },
        };
        lose(&id, lost).await;
        let finish = begun.finish(5, vec![status(S::Completed)]);
        let refused = world.calls().finish(Request::new(finish)).await.expect_err("nobody knows all of it");
        assert_eq!(error(&refused).kind, Kind::Internal);
        let refused = world.get_as("", &id, None).await.expect_err("nor shows a part of it");
        assert_eq!(refused.kind, Kind::Internal);
    }

    // One in the middle of what is read at once.
    let (id, begun) = written().await;
    world.record(&begun, 5, vec![artifact("a", &long, true)]).await;
    lose(&id, Op::Remove { stream: log(&id), id: EntryId::number(4) }).await;
    let refused = world.get_as("", &id, None).await.expect_err("nor without its middle");
    assert_eq!(refused.kind, Kind::Internal);

    // The clean-up lets it lie, and does not come back to it all the time.
    let (id, begun) = written().await;
    world.cancel(&id).await.expect("cancels");
    world.finish(&begun, 6, vec![]).await;
    lose(&id, Op::Remove { stream: log(&id), id: EntryId::number(4) }).await;
    world.background();
    eventually("set aside", async || world.due("t:").await == 0).await;
    let rest = world.watch(&id, Some(4)).await.expect("what is left");
    assert_eq!(shorts(rest).await, ["5 CANCELED"]);
}

#[tokio::test]
async fn a_log_that_was_folded_behind_a_runners_back_has_no_gap() {
    let world = World::with(engine(2), 2, &hasty());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    // The first replica knows the task as it is now, and misses what the second one does.
    world.record(&begun, 3, vec![artifact("a", &"x".repeat(5000), false), artifact("a", "2", true)]).await;
    let second = &world.replicas[1];
    let request = CancelRequest { scope: Some(scope("")), id: sent.id.clone(), ..CancelRequest::default() };
    second.cancel(Request::new(request)).await.expect("cancels");
    second.finish(Request::new(begun.finish(6, vec![]))).await.expect("stops");
    let canceled = world.get(&sent.id).await;
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    second.run_background(&stop, &TaskTracker::new());
    eventually("folded", async || {
        let mut updates = world.watch_at(1, &sent.id, Some(0), Follow::Task).await.expect("watches");
        short(&one(&mut updates).await) == "5 task CANCELED"
    })
    .await;
    assert_eq!(world.finish(&begun, 5, vec![status(S::Completed)]).await, Outcome::Canceled);
    assert_eq!(world.get(&sent.id).await, canceled);
}

#[tokio::test]
async fn a_parked_task_goes_on_after_its_log_was_folded() {
    let world = World::with(engine(2), 1, &hasty());
    world.background();
    let sent = world.send(Send::new("1")).await.expect("sends");
    let begun = world.next().await;
    let long = "x".repeat(300);
    world.finish(&begun, 3, vec![artifact("a", &long, false), status(S::InputRequired)]).await;
    eventually("folded", || async { folded(&world, &sent.id).await }).await;
    let mut watched = world.watch(&sent.id, None).await.expect("watches");
    assert_eq!(short(&one(&mut watched).await), "4 task INPUT_REQUIRED");
    world.send(Send::to(&sent, "2")).await.expect("accepts");
    let begun = world.next().await;
    world.record(&begun, 7, vec![artifact("a", "y", true)]).await;
    assert_eq!(parts(&world.get(&sent.id).await.artifacts[0].parts), format!("{long}y"));
    world.finish(&begun, 8, vec![status(S::Completed)]).await;
    assert_eq!(shorts(watched).await, ["5 SUBMITTED", "6 WORKING", "7 a+=y", "8 COMPLETED"]);
    assert_eq!(parts(&world.get(&sent.id).await.artifacts[0].parts), format!("{long}y"));
}

#[tokio::test]
async fn a_parked_task_without_artifacts_keeps_those_that_come_later() {
    let world = World::with(engine(2), 1, &hasty());
    world.background();
    let sent = world.send(Send::new("1")).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![status(S::Working); 50]).await;
    world.finish(&begun, 53, vec![status(S::InputRequired)]).await;
    eventually("folded", || async { folded(&world, &sent.id).await }).await;
    world.send(Send::to(&sent, "2")).await.expect("accepts");
    let begun = world.next().await;
    world.record(&begun, begun.turn.next_event, vec![artifact("a", "y", false)]).await;
    world.finish(&begun, begun.turn.next_event + 1, vec![status(S::Completed)]).await;
    assert_eq!(parts(&world.get(&sent.id).await.artifacts[0].parts), "y");
}

#[tokio::test]
async fn a_short_log_is_not_worth_a_second_look() {
    let world = World::with(engine(1), 1, &hasty());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    world.finish(&begun, 3, vec![artifact("a", "hi", false), status(S::Completed)]).await;
    assert_eq!(world.engine.index_count(0, "due", None).await.expect("counts"), 0);
    assert_eq!(numbers(&world, &sent.id).await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn expiry_empties_the_store() {
    let world = World::with(engine(2), 3, &hasty());
    for n in 0..200 {
        let policy = |policy: &mut rialto_rpc::tasks::Policy| {
            policy.task_ttl_ms = 50;
            policy.hidden = n % 10 == 0;
        };
        // Dropped: of a hidden task nothing comes before its end.
        drop(world.updates(Send::new("hi").policy(policy).owner("a")).await.expect("sends"));
    }
    let mut tasks = Vec::new();
    while let Some(run) = world.claim("r").await {
        tasks.push(run.run.task_id.clone());
        let begun = world.begin(&run).await.expect("a turn");
        let events = vec![artifact("a", "x", false), artifact("b", "y", false), status(S::Completed)];
        world.finish(&begun, 3, events).await;
    }
    world.background();
    eventually("empty", || async { world.members("due").await.is_empty() }).await;
    assert_eq!(world.members("active").await.len(), 0);
    assert_eq!(world.list("a", Default::default()).await.expect("lists").total_size, 0);
    assert_eq!(tasks.len(), 200);
    for id in tasks {
        assert_eq!(kind(world.get_as("a", &id, None).await), Kind::TaskNotFound);
        let shard = u16::from_str_radix(&id[34..], 16).expect("an id");
        let keys = [format!("t:{id}"), format!("a:{id}:0"), format!("a:{id}:1")];
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        assert!(world.engine.get(shard, &keys).await.expect("reads").iter().all(Option::is_none));
        for stream in [format!("log:{id}"), format!("h:{id}"), format!("j:{id}")] {
            assert!(world.engine.read_last(shard, &stream, 1).await.expect("reads").is_empty());
        }
    }
}

#[tokio::test]
async fn a_conversation_that_nobody_goes_on_with_is_forgotten_with_its_questions() {
    let world = World::with(engine(2), 2, &hasty());
    let idle = |send: Send| send.policy(|policy| policy.context_idle_ms = 60);
    let sent = world.send(idle(Send::new("secret"))).await.expect("sends");
    let stream = world.watch(&sent.id, None).await.expect("watches");
    world.run_to(S::InputRequired).await;
    let other = world.send(Send::new("mine")).await.expect("sends");
    world.run_to(S::InputRequired).await;
    world.background();
    assert!(shorts(stream).await.last().expect("an end").ends_with("FAILED"));
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), reason(&task)), (S::Failed, "context-expired".into()));
    assert_eq!(state(&world.get(&other.id).await), S::InputRequired, "this one waits for ever");
    eventually("forgotten", || async { world.due("c:").await == 0 }).await;
    world.send(idle(Send::new("again")).context(&sent.context_id)).await.expect("a new conversation");
    let run = world.claim("r").await.expect("an entry");
    let begun = world
        .begin_with(&run, |begin| {
            begin.window_messages = 10;
            begin.window_bytes = 1000;
        })
        .await;
    assert!(begun.expect("a turn").turn.conversation.is_empty(), "it remembers nothing");
}

/// C115.
#[tokio::test]
async fn ten_thousand_ended_tasks_leave_nothing_and_are_forgotten_in_bounded_steps() {
    let flaky = Flaky::new(engine(2));
    let world = World::with(flaky.clone(), 3, &hasty());
    let ended = |n: usize| {
        let world = &world;
        async move {
            let send = Send::new("hi").policy(|policy| policy.task_ttl_ms = 1);
            let mut updates = world.updates_at(n % 3, send).await.expect("sends");
            let sent = task(one(&mut updates).await);
            world.cancel(&sent.id).await.expect("cancels");
            sent.id
        }
    };
    // Enough to need many steps; on another engine fewer do.
    let many = if TIME_CAN_STAND_STILL { 10_000 } else { 2_000 };
    let ids: Vec<String> = stream::iter(0..many).map(ended).buffer_unordered(256).collect().await;
    flaky.largest.store(0, Ordering::SeqCst);
    world.background();
    let due = || async {
        let counts = [world.engine.index_count(0, "due", None).await, world.engine.index_count(1, "due", None).await];
        counts.into_iter().map(|count| count.expect("counts")).sum::<u64>()
    };
    eventually("nothing is due", || async { due().await == 0 }).await;
    assert_eq!(world.list("", Default::default()).await.expect("lists").total_size, 0);
    for id in ids.iter().step_by(97) {
        let shard = u16::from_str_radix(&id[34..], 16).expect("an id");
        let head = format!("t:{id}");
        assert!(world.engine.get(shard, &[&head]).await.expect("reads")[0].is_none());
    }
    let largest = flaky.largest.load(Ordering::SeqCst);
    assert!(largest <= 300, "a step of {largest} operations");
}
