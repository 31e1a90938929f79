//! Bounds on what waits, and for how long.

use std::time::Duration;

use rialto_a2a::Kind;
use rialto_rpc::tasks::Follow;
use rialto_task_store::Options;

use crate::world::*;

fn hasty() -> Options {
    Options { due_period: Duration::from_millis(5), ..Options::default() }
}

fn soon(send: Send) -> Send {
    send.queue().policy(|policy| policy.queue_timeout_ms = 30)
}

#[tokio::test]
async fn work_that_nobody_wants_any_more_expires_without_a_runner_and_is_never_started() {
    let world = World::with(engine(2), 3, &hasty());
    world.background();
    // There is no free slot: nobody claims anything.
    let expiring = soon(Send::new("late")).follow(Follow::Result);
    let blocking = world.updates(expiring).await.expect("sends");
    let patient = world.send(Send::new("patient")).await.expect("sends");
    let result = all(blocking).await;
    assert_eq!(result.len(), 1);
    let expired = task(result[0].clone());
    assert_eq!((state(&expired), reason(&expired)), (S::Failed, "expired".into()));
    assert_eq!(state(&world.get(&patient.id).await), S::Submitted, "without a deadline it waits");
    let mut begun = Vec::new();
    while let Some(run) = world.claim("r").await {
        begun.extend(world.begin(&run).await.map(|begun| begun.run.run.task_id));
    }
    assert_eq!(begun, [patient.id]);
}

#[tokio::test]
async fn what_waits_behind_a_turn_of_its_context_expires_too() {
    let world = World::with(engine(2), 2, &hasty());
    world.background();
    let sent = world.send(Send::new("long")).await.expect("sends");
    let begun = world.next().await;
    let task_behind = world.send(soon(Send::new("new task")).context(&sent.context_id)).await.expect("waits");
    let message_behind = soon(Send::to(&sent, "same task")).follow(Follow::Result);
    let mut blocking = world.updates(message_behind).await.expect("waits");
    let refused = tokio::time::timeout(Duration::from_secs(20), futures::StreamExt::next(&mut blocking)).await;
    let refused = refused.expect("in time").expect("an update").expect_err("it was dropped");
    assert_eq!(error(&refused).kind, Kind::Deadline);
    eventually("expired", || async { state(&world.get(&task_behind.id).await) == S::Failed }).await;
    assert_eq!(state(&world.get(&sent.id).await), S::Working, "what runs goes on");
    world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
    assert_eq!((world.entries().await, history(&world.get(&sent.id).await)), (0, vec!["long".to_owned()]));
    world.send(Send::to(&sent, "another")).await.expect("the context is free");
}

#[tokio::test]
async fn a_caller_has_so_many_tasks_under_way_and_others_are_not_concerned() {
    let world = World::with(engine(4), 2, &Options::default());
    let send = |owner: &str| Send::new("x").owner(owner).policy(|policy| policy.max_caller_turns = 3);
    let mut contexts = Vec::new();
    for n in 0..5 {
        let sent = world.send(send("a")).await;
        assert_eq!(sent.is_ok(), n < 3, "{n}");
        match sent {
            Ok(sent) => contexts.push(sent.context_id),
            Err(refused) => {
                assert_eq!(refused.kind, Kind::QueueFull);
                assert!(refused.retry_after.is_some());
            }
        }
    }
    let waits = world.send(send("a").queue().context(&contexts[0])).await;
    assert_eq!(kind(waits), Kind::QueueFull, "also behind another turn");
    world.send(send("b")).await.expect("another caller");
    // Running ones count, ended and parked ones do not.
    let begun = world.next().await;
    assert_eq!(kind(world.send(send("a")).await), Kind::QueueFull);
    world.finish(&begun, 3, vec![status(S::InputRequired)]).await;
    let mut free = 0;
    for _ in 0..4 {
        world.run_to(S::Completed).await;
        if world.claim("nobody").await.is_none() {
            break;
        }
    }
    for _ in 0..5 {
        free += u32::from(world.send(send("a")).await.is_ok());
    }
    assert!(free >= 2, "room again: {free}");
}
