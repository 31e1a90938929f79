//! What agents may do to a task, and what happens when they do something else.

use rialto_a2a::{
    v1::{Role, StreamResponse, TaskArtifactUpdateEvent, stream_response::Payload},
    wkt::Struct,
};
use rialto_rpc::tasks::{JournalEntry, Outcome, RecordRequest};

use crate::{flaky::Flaky, world::*};

#[tokio::test]
async fn appended_chunks_pile_up_as_separate_artifacts() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let with = |mut event: StreamResponse, metadata: Struct| {
        if let Some(Payload::ArtifactUpdate(TaskArtifactUpdateEvent { artifact: Some(artifact), .. })) =
            &mut event.payload
        {
            artifact.metadata = Some(metadata);
        }
        event
    };
    let one: Struct = [("j", 1), ("k", 1)].into_iter().collect();
    let two: Struct = [("k", 2)].into_iter().collect();
    world.record(&begun, 3, vec![with(artifact("a1", "Hello", false), one)]).await;
    world.record(&begun, 4, vec![with(artifact("a1", " world", true), two)]).await;
    let task = world.get(&sent.id).await;
    assert_eq!((task.artifacts.len(), task.artifacts[0].parts.len()), (1, 2));
    assert_eq!(task.artifacts[0].metadata, Some([("j", 1), ("k", 2)].into_iter().collect()));
    world.record(&begun, 5, vec![artifact("a1", "new", false), artifact("b", "other", false)]).await;
    let running = world.get(&sent.id).await;
    let texts =
        |task: &rialto_a2a::v1::Task| -> Vec<String> { task.artifacts.iter().map(|it| parts(&it.parts)).collect() };
    assert_eq!(texts(&running), ["new", "other"]);
    world.finish(&begun, 7, vec![artifact("b", "!", true), status(S::Completed)]).await;
    assert_eq!(texts(&world.get(&sent.id).await), ["new", "other!"]);
}

#[tokio::test]
async fn a_long_artifact_is_folded_on_the_way_and_reads_the_same_at_each_step() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let chunk = "x".repeat(40_000);
    let mut expected = String::new();
    for n in 0..40_u64 {
        expected.push_str(&chunk);
        assert_eq!(world.record(&begun, 3 + n, vec![artifact("a", &chunk, n > 0)]).await, Outcome::Ok);
        let task = world.get(&sent.id).await;
        assert_eq!(parts(&task.artifacts[0].parts).len(), expected.len());
    }
    world.finish(&begun, 43, vec![artifact("b", "end", false), status(S::Completed)]).await;
    let task = world.get(&sent.id).await;
    assert_eq!(parts(&task.artifacts[0].parts), expected);
    assert_eq!(parts(&task.artifacts[1].parts), "end");
    let rest = world.watch(&sent.id, Some(0)).await.expect("the whole log");
    assert_eq!(all(rest).await.len(), 44);
}

#[tokio::test]
async fn an_echo_task_costs_three_commits_and_no_reads() {
    let flaky = Flaky::new(engine(4));
    let world = World::with(flaky.clone(), 1, &rialto_task_store::Options::default());
    world.background();
    tokio::task::yield_now().await;
    let count = || {
        let load = |counter: &std::sync::atomic::AtomicUsize| counter.load(std::sync::atomic::Ordering::SeqCst);
        (load(&flaky.commits), load(&flaky.reads))
    };
    let stream = world.updates(Send::new("hi").follow(rialto_rpc::tasks::Follow::Result)).await.expect("sends");
    assert_eq!(count(), (1, 0), "Send");
    let begun = world.next().await;
    assert_eq!(count(), (2, 0), "Begin");
    world.finish(&begun, 3, vec![artifact("a", "hi", false), status(S::Completed)]).await;
    assert_eq!(count(), (3, 0), "Finish");
    all(stream).await;
    assert_eq!(count(), (3, 0), "the answer is in the head");
}

#[tokio::test]
async fn a_task_reads_the_same_whatever_of_it_is_too_long_for_its_head() {
    for size in [1, 40, 100, 300, 600, 2000] {
        // The second replica has seen nothing of it.
        let world = World::with(engine(2), 2, &rialto_task_store::Options::default());
        let (mut expected, mut chunks, mut next) = (Vec::new(), Vec::new(), 1);
        let mut sent = None;
        for round in 0..4 {
            let question = format!("{round}{}", "q".repeat(size));
            let task = match &sent {
                None => world.send(Send::new(&question)).await.expect("sends"),
                Some(task) => world.send(Send::to(task, &question)).await.expect("sends"),
            };
            let begun = world.next().await;
            assert_eq!(begun.turn.message.as_ref().map(text), Some(question.clone()));
            expected.push(question);
            next += 2;
            for n in 0..3 {
                let chunk = format!("{round}{n}{}", "a".repeat(size));
                assert_eq!(
                    world.record(&begun, next, vec![artifact("a", &chunk, !chunks.is_empty())]).await,
                    Outcome::Ok
                );
                chunks.push(chunk);
                next += 1;
                assert_eq!(parts(&world.get(&task.id).await.artifacts[0].parts), chunks.concat(), "{size} {round}");
            }
            let answer = format!("{round}{}", "r".repeat(size));
            let state = if round == 3 { S::Completed } else { S::InputRequired };
            let said = vec![said(Role::Agent, &answer)];
            world.finish_with(&begun, next, vec![status(state)], |finish| finish.history = said).await;
            expected.push(answer);
            next += 1;
            for n in 0..=expected.len() {
                let task = world.get_as("", &task.id, Some(i32::try_from(n).expect("small"))).await.expect("the task");
                assert_eq!(history(&task), expected[expected.len() - n..], "{size} {round}");
            }
            assert_eq!(parts(&world.get(&task.id).await.artifacts[0].parts), chunks.concat());
            assert_eq!(numbers(&world, &task.id).await, (1..next).collect::<Vec<_>>(), "{size} {round}");
            sent = Some(task);
        }
        let id = sent.expect("a task").id;
        for after in 0..next {
            for replica in 0..2 {
                let updates = world.watch_at(replica, &id, Some(after), rialto_rpc::tasks::Follow::Task).await;
                let numbers: Vec<u64> = all(updates.expect("watches")).await.iter().map(|it| it.number).collect();
                assert_eq!(numbers, (after + 1..next).collect::<Vec<_>>(), "{size}");
            }
        }
    }
}

#[tokio::test]
async fn an_agent_that_answers_nonsense_fails_once_and_frees_its_context() {
    let message = StreamResponse { payload: Some(Payload::Message(said(Role::Agent, "x"))) };
    for (nonsense, finish) in [
        (vec![artifact("unknown", "x", true)], false),
        (vec![artifact("unknown", "x", true)], true),
        (vec![artifact("", "x", false)], false),
        (vec![status(S::Submitted)], false),
        (vec![status(S::Completed)], false),
        (vec![status(S::InputRequired)], false),
        (vec![StreamResponse::default()], false),
        (vec![message], true),
        (vec![status(S::Completed), artifact("a", "late", false)], true),
        (vec![status(S::Working)], true),
    ] {
        let world = World::new();
        let sent = world.send(Send::new("hi").queue()).await.expect("sends");
        let next = world.send(Send::new("next").queue().context(&sent.context_id)).await.expect("waits");
        let begun = world.next().await;
        world.record(&begun, 3, vec![artifact("kept", "x", false)]).await;
        let outcome = match finish {
            true => world.finish(&begun, 4, nonsense.clone()).await,
            false => world.record(&begun, 4, nonsense.clone()).await,
        };
        assert_eq!(outcome, if finish { Outcome::Ok } else { Outcome::Fenced }, "{nonsense:?}");
        let task = world.get(&sent.id).await;
        assert_eq!((state(&task), reason(&task)), (S::Failed, "invalid-agent-response".into()), "{nonsense:?}");
        assert_eq!(task.artifacts.len(), 1);
        assert_eq!(numbers(&world, &sent.id).await, [1, 2, 3, 4]);
        assert_ne!(world.record(&begun, 5, vec![artifact("a", "x", false)]).await, Outcome::Ok);
        assert_eq!(world.next().await.turn.task.expect("a task").id, next.id);
        assert_eq!(world.entries().await, 1);
    }
}

#[tokio::test]
async fn a_task_that_grows_too_large_fails_with_a_reason_and_stays_readable() {
    for finish in [false, true] {
        let world = World::new();
        let send = Send::new("hi").policy(|policy| policy.max_task_bytes = 10_000);
        let sent = world.send(send).await.expect("sends");
        let begun = world.next().await;
        let chunk = "x".repeat(4_000);
        world.record(&begun, 3, vec![artifact("a", &chunk, false)]).await;
        world.record(&begun, 4, vec![artifact("a", &chunk, true)]).await;
        let more = artifact("a", &chunk, true);
        let outcome = match finish {
            true => world.finish(&begun, 5, vec![more, status(S::Completed)]).await,
            false => world.record(&begun, 5, vec![more]).await,
        };
        assert_eq!(outcome, if finish { Outcome::Ok } else { Outcome::Fenced });
        let task = world.get(&sent.id).await;
        assert_eq!((state(&task), reason(&task)), (S::Failed, "too-large".into()));
        assert_eq!(parts(&task.artifacts[0].parts).len(), 8_000);
        assert_eq!(world.entries().await, 0);
    }
    let world = World::new();
    let large = Send::new(&"x".repeat(20_000)).policy(|policy| policy.max_task_bytes = 10_000);
    assert_eq!(kind(world.send(large).await), rialto_a2a::Kind::PayloadTooLarge);
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn replacing_an_artifact_makes_room() {
    let world = World::new();
    let sent = world.send(Send::new("hi").policy(|policy| policy.max_task_bytes = 10_000)).await.expect("sends");
    let begun = world.next().await;
    for n in 0..20 {
        let event = artifact("a", &"x".repeat(8_000), false);
        assert_eq!(world.record(&begun, 3 + n, vec![event]).await, Outcome::Ok);
    }
    world.finish(&begun, 23, vec![status(S::Completed)]).await;
    assert_eq!(state(&world.get(&sent.id).await), S::Completed);
}

#[tokio::test]
async fn an_agent_that_says_the_same_for_ever_is_stopped() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let mut outcome = Outcome::Ok;
    for n in 0..20 {
        assert_eq!(outcome, Outcome::Ok);
        outcome = world.record(&begun, 3 + n, vec![artifact("a", &"x".repeat(4 << 20), false)]).await;
        if outcome == Outcome::Fenced {
            break;
        }
    }
    assert_eq!(outcome, Outcome::Fenced);
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), reason(&task)), (S::Failed, "too-large".into()));
    assert_eq!(parts(&task.artifacts[0].parts).len(), 4 << 20);
}

#[tokio::test]
async fn every_status_has_a_time_that_never_goes_back() {
    let world = World::new();
    let mut last = None;
    let mut check = |task: &rialto_a2a::v1::Task| {
        let at = task.status.as_ref().and_then(|status| status.timestamp);
        assert!(at.is_some());
        assert!(at >= last, "{at:?} after {last:?}");
        assert_eq!(at.expect("checked").nanos % 1_000_000, 0);
        last = at;
    };
    let sent = world.send(Send::new("hi")).await.expect("sends");
    check(&sent);
    let begun = world.next().await;
    check(&world.get(&sent.id).await);
    let mut old = status(S::Working);
    if let Some(Payload::StatusUpdate(update)) = &mut old.payload {
        update.status.as_mut().expect("a status").timestamp = Some(rialto_a2a::wkt::Timestamp::from_millis(1));
    }
    world.record(&begun, 3, vec![old]).await;
    check(&world.get(&sent.id).await);
    world.finish(&begun, 4, vec![status(S::InputRequired)]).await;
    check(&world.get(&sent.id).await);
    check(&world.send(Send::to(&sent, "x")).await.expect("sends"));
    check(&world.cancel(&sent.id).await.expect("cancels"));
}

#[tokio::test]
async fn metadata_is_merged_and_watchers_see_it() {
    let world = World::new();
    let mut send = Send::new("hi");
    send.0.metadata = Some([("a", 1), ("b", 1)].into_iter().collect());
    let sent = world.send(send).await.expect("sends");
    let begun = world.next().await;
    world
        .finish_with(&begun, 3, vec![status(S::Completed)], |finish| {
            finish.metadata = Some([("b", 2), ("c", 2)].into_iter().collect());
        })
        .await;
    let task = world.get(&sent.id).await;
    assert_eq!(task.metadata, Some([("a", 1), ("b", 2), ("c", 2)].into_iter().collect()));
    let mut rebuilt = rialto_a2a::v1::Task::default();
    for update in all(world.watch(&sent.id, Some(0)).await.expect("watches")).await {
        rialto_a2a::state::fold(&mut rebuilt, update.event.expect("an event")).expect("fits");
    }
    assert_eq!(rebuilt.metadata, task.metadata);
}

#[tokio::test]
async fn a_journal_outlives_the_attempt_and_not_the_turn() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let step = |step, payload: &'static [u8]| JournalEntry { step, payload: payload.into(), ..JournalEntry::default() };
    let record = |journal| RecordRequest {
        task_id: sent.id.clone(),
        turn_id: begun.run.run.turn_id.clone(),
        fence: begun.turn.fence,
        first_event: 3,
        journal,
        ..RecordRequest::default()
    };
    assert_eq!(world.record_raw(record(vec![step(1, b"one")])).await, Outcome::Ok);
    assert_eq!(world.record_raw(record(vec![step(1, b"one"), step(2, b"two")])).await, Outcome::Ok);
    world.record(&begun, 3, vec![artifact("a", "half", false)]).await;
    let run = world.claim_after("r2", std::time::Duration::ZERO).await.expect("taken over");
    let again = world.begin(&run).await.expect("a turn");
    assert_eq!(again.turn.journal, [step(1, b"one"), step(2, b"two")]);
    assert_eq!(again.turn.attempt, 2);
    assert_eq!(again.turn.stale_artifacts, ["a"]);
    assert_eq!(again.turn.next_event, 6);
    world.finish(&again, 6, vec![status(S::InputRequired)]).await;
    world.send(Send::to(&sent, "more")).await.expect("sends");
    let next = world.next().await;
    assert!(next.turn.journal.is_empty());
    assert_eq!(next.turn.stale_artifacts, ["a"], "what was taken back, and not written again");
}
