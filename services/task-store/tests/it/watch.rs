//! Streams: joining, resuming, falling behind, failing.

use std::time::Duration;

use futures::StreamExt as _;
use rialto_a2a::{Kind, state, v1::Task};
use rialto_rpc::tasks::{Follow, Outcome};
use rialto_task_store::Options;

use crate::{engine::TIME_CAN_STAND_STILL, flaky::Flaky, world::*};

#[tokio::test]
async fn a_task_of_a_plain_send_can_be_watched_on_another_replica() {
    let world = World::with(engine(4), 2, &Options::default());
    world.background();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let stream = world.watch_at(1, &sent.id, None, Follow::Task).await.expect("watches");
    let begun = world.next().await;
    world.record(&begun, 3, vec![artifact("a", "x", false)]).await;
    world.finish(&begun, 4, vec![status(S::Completed)]).await;
    assert_eq!(shorts(stream).await, ["1 task SUBMITTED", "2 WORKING", "3 a=x", "4 COMPLETED"]);
}

#[tokio::test(start_paused = true)]
async fn without_any_notice_events_come_within_seconds() {
    if !TIME_CAN_STAND_STILL {
        return;
    }
    let world = World::with(engine(1), 2, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let mut stream = world.watch_at(1, &sent.id, None, Follow::Task).await.expect("watches");
    one(&mut stream).await;
    // Reads once because nobody listens, then waits.
    assert!(silent(&mut stream).await);
    world.finish(&world.begin_at(0).await, 3, vec![status(S::Completed)]).await;
    let before = tokio::time::Instant::now();
    assert_eq!(shorts(stream).await, ["2 WORKING", "3 COMPLETED"]);
    assert!(before.elapsed() < Duration::from_secs(6), "{:?}", before.elapsed());
}

#[tokio::test]
async fn a_subscription_outlives_a_question_and_a_stream_does_not() {
    let world = World::new();
    let mut turn = world.updates(Send::new("hi").follow(Follow::Turn)).await.expect("sends");
    let sent = task(one(&mut turn).await);
    let mut subscription = world.watch(&sent.id, None).await.expect("watches");
    world.run_to(S::InputRequired).await;
    assert_eq!(shorts(turn).await, ["2 WORKING", "3 INPUT_REQUIRED"]);
    let mut late = world.watch(&sent.id, None).await.expect("any task that has not ended");
    assert_eq!(short(&one(&mut late).await), "3 task INPUT_REQUIRED");
    let stream = world.updates(Send::to(&sent, "more").follow(Follow::Turn)).await.expect("sends");
    world.run_to(S::Completed).await;
    assert_eq!(shorts(stream).await, ["4 task SUBMITTED", "5 WORKING", "6 COMPLETED"]);
    assert_eq!(shorts(late).await, ["4 SUBMITTED", "5 WORKING", "6 COMPLETED"]);
    for expected in ["1 task SUBMITTED", "2 WORKING", "3 INPUT_REQUIRED", "4 SUBMITTED", "5 WORKING", "6 COMPLETED"] {
        assert_eq!(short(&one(&mut subscription).await), expected);
    }
    assert!(ended(&mut subscription).await);
}

#[tokio::test]
async fn a_stream_that_was_lost_right_after_its_end_is_not_waited_for() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    world.run_to(S::InputRequired).await;
    let rest = world.watch_at(0, &sent.id, Some(2), Follow::Turn).await.expect("watches");
    assert_eq!(shorts(rest).await, ["3 INPUT_REQUIRED"]);
    let rest = world.watch_at(0, &sent.id, Some(3), Follow::Turn).await.expect("watches");
    assert!(shorts(rest).await.is_empty());
}

#[tokio::test]
async fn a_stream_stays_open_while_a_credential_is_awaited() {
    let world = World::new();
    let mut stream = world.updates(Send::new("hi").follow(Follow::Turn)).await.expect("sends");
    let sent = task(one(&mut stream).await);
    world.run_to(S::AuthRequired).await;
    assert_eq!(short(&one(&mut stream).await), "2 WORKING");
    assert_eq!(short(&one(&mut stream).await), "3 AUTH_REQUIRED");
    assert!(silent(&mut stream).await);
    world.send(Send::to(&sent, "done")).await.expect("accepts");
    world.run_to(S::Completed).await;
    assert_eq!(shorts(stream).await, ["4 SUBMITTED", "5 WORKING", "6 COMPLETED"]);
}

#[tokio::test(start_paused = true)]
async fn resuming_gives_exactly_what_was_missed_and_at_once() {
    if !TIME_CAN_STAND_STILL {
        return;
    }
    let world = World::new();
    world.background();
    tokio::task::yield_now().await;
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let mut live = world.watch(&sent.id, Some(1)).await.expect("watches");
    assert_eq!(short(&one(&mut live).await), "2 WORKING");
    assert!(silent(&mut live).await);
    assert_eq!(kind(world.watch(&sent.id, Some(3)).await.map(drop)), Kind::InvalidParams);
    world.finish(&begun, 3, vec![artifact("a", "x", false), status(S::Completed)]).await;
    assert_eq!(shorts(live).await, ["3 a=x", "4 COMPLETED"]);
    let started = tokio::time::Instant::now();
    let everything = ["1 SUBMITTED", "2 WORKING", "3 a=x", "4 COMPLETED"];
    for after in 0..=4 {
        let rest = world.watch(&sent.id, Some(after)).await.expect("the rest of an ended task");
        assert_eq!(shorts(rest).await, everything[usize::try_from(after).expect("small")..]);
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(kind(world.watch(&sent.id, None).await.map(drop)), Kind::UnsupportedOperation);
    assert_eq!(kind(world.watch(&sent.id, Some(5)).await.map(drop)), Kind::InvalidParams);
}

#[tokio::test]
async fn events_between_disconnect_and_resubscribe_are_lost() {
    let world = World::with(engine(2), 3, &Options::default());
    world.background();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let chunks = async {
        for n in 0..100_u64 {
            let append = n > 0;
            let event = artifact("a", &format!("{n} "), append);
            assert_eq!(world.record(&begun, 3 + n, vec![event]).await, Outcome::Ok);
            if n % 7 == 0 {
                tokio::task::yield_now().await;
            }
        }
        world.finish(&begun, 103, vec![status(S::Completed)]).await;
    };
    let client = |start: usize, resume: bool| {
        let (world, id) = (&world, sent.id.clone());
        async move {
            let mut rebuilt = Task::default();
            let (mut last, mut round) = (None, start);
            while rebuilt.status.as_ref().is_none_or(|it| !it.state().is_terminal()) {
                let after = last.filter(|_| resume);
                let Ok(mut stream) = world.watch_at(round % 3, &id, after, Follow::Task).await else {
                    // It ended between two looks.
                    return world.get(&id).await;
                };
                if !resume {
                    rebuilt = Task::default();
                }
                // Hangs up after a few.
                for _ in 0..=round % 13 {
                    let Some(update) = stream.next().await.transpose().expect("no error") else { break };
                    if let Some(last) = last.filter(|_| resume) {
                        assert_eq!(update.number, last + 1);
                    }
                    last = Some(update.number);
                    state::fold(&mut rebuilt, update.event.expect("an event")).expect("fits");
                }
                round += 1;
                tokio::task::yield_now().await;
            }
            rebuilt
        }
    };
    let clients = futures::future::join_all((0..10).map(|n| client(n, n % 2 == 0)));
    let ((), rebuilt) = tokio::join!(chunks, clients);
    let expected = world.get(&sent.id).await;
    assert_eq!(parts(&expected.artifacts[0].parts), (0..100).map(|n| format!("{n} ")).collect::<String>());
    for task in rebuilt {
        assert_eq!(task, expected);
    }
}

#[tokio::test]
async fn a_stalled_watcher_neither_loses_nor_disturbs() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let mut stalled = world.watch(&sent.id, None).await.expect("watches");
    let mut brisk = world.watch(&sent.id, None).await.expect("watches");
    one(&mut stalled).await;
    one(&mut brisk).await;
    let begun = world.next().await;
    one(&mut brisk).await;
    // Far more than a tail holds.
    for n in 0..1000_u64 {
        let text = "x".repeat(1000);
        world.record(&begun, 3 + n, vec![artifact("a", &text, n > 0)]).await;
        assert_eq!(one(&mut brisk).await.number, 3 + n);
    }
    world.finish(&begun, 1003, vec![status(S::Completed)]).await;
    let numbers: Vec<u64> = all(stalled).await.iter().map(|update| update.number).collect();
    assert_eq!(numbers, (2..=1003).collect::<Vec<_>>());
    assert_eq!(all(brisk).await.len(), 1);
}

#[tokio::test]
async fn watchers_on_all_replicas_see_one_order() {
    let world = World::with(engine(2), 3, &Options::default());
    world.background();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let mut streams = Vec::new();
    for n in 0..6 {
        streams.push(world.watch_at(n % 3, &sent.id, Some(0), Follow::Task).await.expect("watches"));
    }
    drop(streams.remove(0));
    let begun = world.next().await;
    for n in 0..50 {
        world.record(&begun, 3 + n, vec![status(S::Working)]).await;
    }
    world.finish(&begun, 53, vec![status(S::Completed)]).await;
    let seen = futures::future::join_all(streams.into_iter().map(all)).await;
    assert_eq!(seen[0].len(), 53);
    for other in &seen[1..] {
        assert_eq!(other, &seen[0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_failure_ends_the_stream_like_a_success() {
    if !TIME_CAN_STAND_STILL {
        return;
    }
    let flaky = Flaky::new(engine(1));
    let world = World::with(flaky.clone(), 1, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let mut stream = world.watch(&sent.id, None).await.expect("watches");
    one(&mut stream).await;
    // A short outage is borne.
    flaky.down(true);
    let up = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        flaky.down(false);
        world.finish(&world.next().await, 3, vec![status(S::InputRequired)]).await;
    };
    let (update, ()) = tokio::join!(stream.next(), up);
    assert_eq!(short(&update.expect("not the end").expect("no error")), "2 WORKING");
    assert_eq!(short(&one(&mut stream).await), "3 INPUT_REQUIRED");
    // A long one is said.
    flaky.down(true);
    let before = tokio::time::Instant::now();
    let end = stream.next().await.expect("not a clean end").expect_err("an error");
    assert_eq!(error(&end).kind, Kind::Unavailable);
    assert!(before.elapsed() > Duration::from_secs(30), "{:?}", before.elapsed());
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn streams_end_with_an_error_when_the_replica_stops() {
    let world = World::new();
    world.background();
    let mut stream = world.updates(Send::new("hi").follow(Follow::Result)).await.expect("sends");
    assert!(silent(&mut stream).await);
    world.stop();
    let end = stream.next().await.expect("not a clean end").expect_err("an error");
    assert_eq!(error(&end).kind, Kind::Unavailable);
}
