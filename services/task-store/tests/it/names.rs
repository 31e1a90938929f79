//! Messages with a client's own name for them (`Idempotency-Key`).

use std::time::Duration;

use futures::{StreamExt as _, future::join_all};
use rialto_a2a::{
    Kind,
    v1::{Role, StreamResponse, stream_response::Payload},
};
use rialto_rpc::tasks::{Follow, Outcome};
use rialto_task_store::Options;

use crate::{flaky::Flaky, world::*};

#[tokio::test]
async fn a_retry_after_a_lost_answer_is_the_same_task() {
    let world = World::with(engine(4), 3, &Options::default());
    let named = Send::new("pay").named("k1");
    let sends = (0..10).map(|n| (n % 3, named.again().follow(Follow::None)));
    let sent = join_all(sends.map(|(replica, send)| world.updates_at(replica, send))).await;
    let mut tasks = Vec::new();
    for updates in sent {
        tasks.push(task(one(&mut updates.expect("sends")).await));
    }
    assert!(tasks.iter().all(|task| task.id == tasks[0].id && task.context_id == tasks[0].context_id));
    assert_eq!((world.entries().await, history(&world.get(&tasks[0].id).await)), (1, vec!["pay".to_owned()]));

    // Other replicas, as after a restart of everything.
    let restarted = World::with(world.engine.clone(), 1, &Options::default());
    let blocking = restarted.updates(named.again().follow(Follow::Result)).await.expect("sends");
    let stream = restarted.updates(named.again().follow(Follow::Turn)).await.expect("sends");
    assert_eq!(restarted.entries().await, 1);
    let begun = restarted.next().await;
    restarted.finish(&begun, 3, vec![artifact("a", "paid", false), status(S::Completed)]).await;
    assert_eq!(shorts(blocking).await, ["4 task COMPLETED"]);
    assert_eq!(shorts(stream).await, ["1 task SUBMITTED", "2 WORKING", "3 a=paid", "4 COMPLETED"]);
    let late = restarted.send(named.again().follow(Follow::Result)).await.expect("the same result");
    assert_eq!(
        (late.id.clone(), state(&late), parts(&late.artifacts[0].parts)),
        (begun.run.run.task_id, S::Completed, "paid".into())
    );
    assert_eq!(restarted.entries().await, 0, "it ran once");
}

#[tokio::test]
async fn another_body_under_the_same_name_is_refused_and_another_caller_has_names_of_its_own() {
    let world = World::with(engine(4), 2, &Options::default());
    let first = world.send(Send::new("one").named("k")).await.expect("sends");
    let mut other = Send::new("two").named("k");
    assert_eq!(kind(world.send(other.clone()).await), Kind::IdempotencyKeyReused);
    other = other.owner("b");
    assert_ne!(world.send(other).await.expect("a name of its own").id, first.id);
    let mut agent = Send::new("three").named("k");
    agent.0.scope.as_mut().expect("a scope").agent = "other".into();
    assert_ne!(world.send(agent).await.expect("per agent").id, first.id);
    // Without a name, the same message id is another message.
    let mut again = Send::new("one");
    again.message().message_id = unique();
    let same = again.clone().again();
    assert_ne!(world.send(again).await.expect("sends").id, world.send(same).await.expect("sends").id);
}

#[tokio::test]
async fn a_refused_message_does_not_use_up_its_name() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let busy = Send::to(&sent, "more").named("k");
    assert_eq!(kind(world.send(busy.clone()).await), Kind::UnsupportedOperation);
    world.run_to(S::InputRequired).await;
    world.send(busy.again()).await.expect("now it can");
    world.send(busy.again()).await.expect("and is not sent twice");
    assert_eq!(history(&world.get(&sent.id).await), ["hi", "more"]);
    let full = Send::new("x").policy(|policy| policy.max_turns = 1).named("full");
    let world = World::with(engine(1), 1, &Options::default());
    world.send(Send::new("first")).await.expect("sends");
    assert_eq!(kind(world.send(full.clone()).await), Kind::QueueFull);
    world.run_to(S::Completed).await;
    let accepted = world.send(full.again()).await.expect("now it can");
    assert_eq!(world.send(full.again()).await.expect("the same").id, accepted.id);
}

#[tokio::test]
async fn a_message_that_expired_behind_its_own_task_runs_when_it_is_sent_again_and_runs_once() {
    for swept in [true, false] {
        // Dropped by the background work, or by the end of the turn before it.
        let options = Options { due_period: Duration::from_millis(5), ..Options::default() };
        let world = World::with(engine(2), 2, &options);
        let sent = world.send(Send::new("long")).await.expect("sends");
        let begun = world.next().await;
        let late = Send::to(&sent, "late").queue().policy(|policy| policy.queue_timeout_ms = 200).named("k");
        let late = late.follow(Follow::Result);
        let mut first = world.updates(late.clone()).await.expect("waits");
        if swept {
            world.background();
            let refused = first.next().await.expect("an update").expect_err("it was dropped");
            assert_eq!(error(&refused).kind, Kind::Deadline);
        } else {
            tokio::time::sleep(Duration::from_millis(250)).await;
            world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
            assert_eq!((world.entries().await, history(&world.get(&sent.id).await)), (0, vec!["long".to_owned()]));
        }
        let patient = || late.again().policy(|policy| policy.queue_timeout_ms = 0).follow(Follow::None);
        for replica in 0..4 {
            drop(world.updates_at(replica % 2, patient()).await.expect("now it waits, or runs"));
        }
        if swept {
            world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
        }
        assert_eq!(world.entries().await, 1);
        let begun = world.next().await;
        assert_eq!(begun.run.run.task_id, sent.id);
        world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
        world.send(patient()).await.expect("it was sent before");
        assert_eq!(
            (world.entries().await, history(&world.get(&sent.id).await)),
            (0, vec!["long".into(), "late".into()])
        );
    }
}

#[tokio::test]
async fn an_old_name_does_not_run_again_however_much_the_task_went_through() {
    let world = World::new();
    let sent = world.send(Send::new("0")).await.expect("sends");
    world.run_to(S::InputRequired).await;
    let named = Send::to(&sent, "once").named("k");
    world.send(named.clone()).await.expect("sends");
    world.run_to(S::InputRequired).await;
    for n in 0..20 {
        world.send(Send::to(&sent, &n.to_string())).await.expect("sends");
        world.run_to(S::InputRequired).await;
    }
    let result = world.send(named.again().follow(Follow::Result)).await.expect("the task as it is");
    assert_eq!(state(&result), S::InputRequired);
    let stream = world.updates(named.again().follow(Follow::Turn)).await.expect("sends");
    assert_eq!(all(stream).await.len(), 1, "its turn is long over");
    assert_eq!(world.entries().await, 0);
    assert_eq!(history(&world.get(&sent.id).await).iter().filter(|text| *text == "once").count(), 1);
}

#[tokio::test]
async fn a_name_outlives_the_task_but_not_its_time() {
    let options = Options {
        fold_after: Duration::from_millis(10),
        due_period: Duration::from_millis(5),
        min_context_idle: Duration::ZERO,
        ..Options::default()
    };
    let world = World::with(engine(2), 2, &options);
    let named = Send::new("hi").policy(|policy| policy.task_ttl_ms = 20).named("k");
    let sent = world.send(named.clone()).await.expect("sends");
    world.run_to(S::Completed).await;
    world.background();
    let (shard, key) = (u16::from_str_radix(&sent.id[34..], 16).expect("an id"), format!("t:{}", sent.id));
    let gone = || async { world.engine.get(shard, &[&key]).await.expect("reads")[0].is_none() };
    eventually("the task is gone", gone).await;
    assert_eq!(kind(world.send(named.again()).await), Kind::TaskNotFound, "it ran, and is forgotten");
    assert_eq!(world.entries().await, 0);

    let hasty = Options { keep_names: Duration::from_millis(30), ..options };
    let world = World::with(engine(2), 3, &hasty);
    let many: Vec<_> = (0..300).map(|n| Send::new("hi").named(&n.to_string())).collect();
    for send in &many {
        world.send(send.clone()).await.expect("sends");
    }
    world.background();
    eventually("names are forgotten", || async { world.due("k:").await == 0 }).await;
    let other = Send::new("another body").named("7");
    world.send(other).await.expect("the name is free again");
}

#[tokio::test]
async fn a_message_that_is_answered_with_a_message_has_a_name_too() {
    let world = World::with(engine(4), 2, &Options::default());
    let named = Send::new("hi").policy(|policy| policy.hidden = true).named("k").follow(Follow::Result);
    let first = world.updates_at(0, named.clone()).await.expect("sends");
    let second = world.updates_at(1, named.again()).await.expect("sends");
    let begun = world.next().await;
    let answer = StreamResponse { payload: Some(Payload::Message(said(Role::Agent, "ho"))) };
    assert_eq!(world.finish(&begun, 3, vec![answer]).await, Outcome::Ok);
    let events = async |updates| all(updates).await.into_iter().map(|update| update.event).collect::<Vec<_>>();
    let (first, second) = (events(first).await, events(second).await);
    assert_eq!(first, second, "the same message");
    assert_eq!(events(world.updates(named.again()).await.expect("sends")).await, first);
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn whatever_gets_lost_on_the_way_a_named_message_runs_once() {
    let flaky = Flaky::new(engine(3));
    let world = World::with(flaky.clone(), 3, &Options::default());
    for seed in 1..30_u64 {
        flaky.chaos(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let named = Send::new("hi").named(&seed.to_string());
        let tries = (0..6).map(|n| {
            let world = &world;
            let send = named.again();
            async move {
                for _ in 0..50 {
                    match world.updates_at(n % 3, send.clone()).await {
                        Ok(mut updates) => return task(updates.next().await.expect("one").expect("no error")).id,
                        Err(error) => assert_eq!(error.kind, Kind::Unavailable),
                    }
                }
                panic!("never");
            }
        });
        let ids = join_all(tries).await;
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        flaky.chaos(None);
        assert_eq!(world.entries().await, 1);
        world.run_to(S::Completed).await;
    }
}
