//! Ending tasks from outside.

use std::{pin::pin, time::Duration};

use futures::FutureExt as _;
use rialto_a2a::Kind;
use rialto_rpc::tasks::{ControlRequest, Follow, HeartbeatRequest, Outcome, task_store_server::TaskStore as _};
use rialto_task_store::Options;
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Request;

use crate::world::*;

#[tokio::test]
async fn each_state_is_canceled_once_or_never() {
    for at in [S::Submitted, S::Working, S::InputRequired, S::AuthRequired] {
        let world = World::new();
        let sent = world.send(Send::new("hi")).await.expect("sends");
        match at {
            S::Submitted => {}
            S::Working => drop(world.next().await),
            asks => drop(world.run_to(asks).await),
        }
        let watched = world.watch(&sent.id, None).await.expect("watches");
        let commit = id_bytes().to_vec();
        let canceled = world.cancel_as("", &sent.id, commit.clone()).await.expect("cancels");
        assert_eq!(state(&canceled), S::Canceled, "{at:?}");
        assert_eq!(world.cancel_as("", &sent.id, commit).await.expect("the same call"), canceled);
        assert_eq!(kind(world.cancel(&sent.id).await), Kind::TaskNotCancelable);
        assert!(shorts(watched).await.last().expect("an end").ends_with("CANCELED"));
    }
    for ended in [S::Completed, S::Failed, S::Rejected] {
        let world = World::new();
        let sent = world.send(Send::new("hi")).await.expect("sends");
        world.run_to(ended).await;
        assert_eq!(kind(world.cancel(&sent.id).await), Kind::TaskNotCancelable);
        assert_eq!(state(&world.get(&sent.id).await), ended);
    }
}

#[tokio::test]
async fn a_queued_turn_is_dropped_and_its_context_is_free_at_once() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    world.cancel(&sent.id).await.expect("cancels");
    let next = world.send(Send::new("next").context(&sent.context_id)).await.expect("the context is free");
    let run = world.claim("r").await.expect("the canceled one");
    assert!(world.begin(&run).await.is_none());
    let begun = world.next().await;
    assert_eq!(begun.turn.task.expect("a task").id, next.id);
    assert_eq!(world.entries().await, 1);
}

#[tokio::test]
async fn a_waiting_turn_leaves_the_queue() {
    let world = World::new();
    let first = world.send(Send::new("1").queue()).await.expect("sends");
    let second = world.send(Send::new("2").queue().context(&first.context_id)).await.expect("waits");
    let third = world.send(Send::new("3").queue().context(&first.context_id)).await.expect("waits");
    world.cancel(&second.id).await.expect("cancels");
    world.run_to(S::Completed).await;
    assert_eq!(world.next().await.turn.task.expect("a task").id, third.id);
    assert!(world.claim("r").await.is_none());
}

#[tokio::test]
async fn the_runner_is_told_and_keeps_the_context_until_it_stopped() {
    let world = World::with(engine(4), 2, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let control = world.replicas[1].control(Request::new(ControlRequest { consumer: "r1".into() })).await;
    let mut control = control.expect("opens").into_inner();
    let beat = || async {
        let request = HeartbeatRequest { turns: vec![begun.held()] };
        let reply = world.replicas[1].heartbeat(Request::new(request)).await.expect("beats").into_inner();
        Outcome::try_from(reply.outcomes[0]).expect("an outcome")
    };
    assert_eq!(beat().await, Outcome::Ok);
    world.cancel(&sent.id).await.expect("cancels");
    let order = control.next().await.expect("an order").expect("no error");
    assert_eq!((order.task_id, order.turn_id), (sent.id.clone(), begun.run.run.turn_id.clone()));
    assert_eq!(beat().await, Outcome::Canceled);
    assert_eq!(world.record(&begun, 3, vec![artifact("a", "x", false)]).await, Outcome::Canceled);
    let busy = world.send(Send::new("next").context(&sent.context_id)).await;
    assert_eq!(kind(busy), Kind::UnsupportedOperation, "the runner may still be at work");
    let waits = world.send(Send::new("next").queue().context(&sent.context_id)).await.expect("waits");
    assert_eq!(world.finish(&begun, 3, vec![]).await, Outcome::Ok);
    assert_eq!(world.finish(&begun, 3, vec![]).await, Outcome::Ok, "repeated");
    assert_eq!(world.next().await.turn.task.expect("a task").id, waits.id);
    assert_eq!(numbers(&world, &sent.id).await, [1, 2, 3]);
    assert_eq!(state(&world.get(&sent.id).await), S::Canceled);
}

#[tokio::test]
async fn a_runner_that_finishes_a_canceled_turn_is_told() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    world.cancel(&sent.id).await.expect("cancels");
    for _ in 0..2 {
        let outcome = world.finish(&begun, 3, vec![status(S::Completed)]).await;
        assert_eq!(outcome, Outcome::Canceled);
    }
    assert_eq!(state(&world.get(&sent.id).await), S::Canceled);
    assert_eq!(world.entries().await, 0);
    world.send(Send::new("next").context(&sent.context_id)).await.expect("the context is free");
}

#[tokio::test]
async fn a_silent_runner_loses_the_context_after_the_grace() {
    let options = Options {
        cancel_grace: Duration::from_millis(100),
        due_period: Duration::from_millis(20),
        ..Options::default()
    };
    let world = World::with(engine(2), 2, &options);
    world.background();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let result = Send::new("next").queue().context(&sent.context_id).follow(Follow::Turn);
    world.cancel(&sent.id).await.expect("cancels");
    let mut waits = world.updates(result).await.expect("waits");
    one(&mut waits).await;
    let run = loop {
        match world.claim("r2").await {
            Some(run) => break run,
            None => tokio::task::yield_now().await,
        }
    };
    assert_ne!(run.run.task_id, sent.id);
    assert_eq!(world.finish(&begun, 3, vec![]).await, Outcome::Ok, "late, and harmless");
    let next = world.begin(&run).await.expect("a turn");
    world.finish(&next, 3, vec![status(S::Completed)]).await;
    assert_eq!(shorts(waits).await, ["2 WORKING", "3 COMPLETED"]);
}

#[tokio::test]
async fn a_reclaimed_canceled_turn_frees_its_context() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    world.next().await;
    world.cancel(&sent.id).await.expect("cancels");
    let run = world.claim_after("r2", Duration::ZERO).await.expect("taken over");
    assert!(world.begin(&run).await.is_none());
    assert_eq!(world.entries().await, 0);
    world.send(Send::new("next").context(&sent.context_id)).await.expect("the context is free");
}

#[tokio::test]
async fn a_canceled_task_keeps_what_it_had() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![artifact("a", "half", false)]).await;
    let canceled = world.cancel(&sent.id).await.expect("cancels");
    assert_eq!(parts(&canceled.artifacts[0].parts), "half");
    assert_eq!(canceled, world.get(&sent.id).await);
}

#[tokio::test]
async fn a_replica_that_stops_waits_for_the_runners_that_need_it_and_takes_no_other_ones() {
    let world = World::new();
    world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let (store, stop) = (&world.replicas[0], CancellationToken::new());
    let tracker = TaskTracker::new();
    store.run_background(&stop, &tracker);
    let open = async || store.control(Request::new(ControlRequest { consumer: "r1".into() })).await;
    let mut control = open().await.expect("opens").into_inner();
    stop.cancel();
    let order = control.next().await.expect("an order").expect("no error");
    assert!(order.stopping && order.task_id.is_empty() && order.turn_id.is_empty(), "{order:?}");
    let Err(refused) = open().await else { panic!("it goes away") };
    assert_eq!(error(&refused).kind, Kind::Unavailable);
    let mut gone = pin!(store.runners_gone());
    assert!((&mut gone).now_or_never().is_none(), "a runner is still there");
    assert_eq!(world.finish(&begun, 3, vec![status(S::Completed)]).await, Outcome::Ok);
    drop(control);
    gone.await;
}
