//! What becomes of the output of lost attempts, and of tasks that have only such.

use std::time::Duration;

use prost::Message as _;
use rialto_a2a::{
    state::fold,
    v1::{Artifact, StreamResponse, Task, stream_response::Payload},
};
use rialto_rpc::tasks::{
    Follow, HandBackRequest, JournalEntry, Outcome, RecordRequest, RunEntry, task_store_server::TaskStore as _,
};
use rialto_store::{
    Batch, EntryId, Op, ReadLimit,
    worker::{DEAD, DeadEntry},
};
use rialto_task_store::Options;
use tonic::Request;

use crate::world::*;

fn texts(task: &Task) -> Vec<String> {
    task.artifacts.iter().map(|artifact| format!("{}={}", artifact.artifact_id, parts(&artifact.parts))).collect()
}

/// The next attempt at a turn whose runner is gone.
async fn again(world: &World, consumer: &str) -> Begun {
    let run = world.take_over(consumer).await;
    world.begin(&run).await.expect("a turn")
}

#[tokio::test]
async fn two_attempts_are_never_mixed_in_one_artifact_and_watchers_see_why() {
    let world = World::with(engine(2), 2, &Options::default());
    let stream = world.updates(Send::new("hi").follow(Follow::Turn)).await.expect("sends");
    let lost = world.next().await;
    world.record(&lost, 3, vec![artifact("a", "one ", false), artifact("b", "only here", false)]).await;
    world.record(&lost, 5, vec![artifact("a", "two", true)]).await;
    let begun = again(&world, "r2").await;
    assert_eq!(begun.turn.stale_artifacts, ["a", "b"]);
    let task = world.get(&lost.run.run.task_id).await;
    assert_eq!(texts(&task), ["a=", "b="], "already before the next attempt says anything");
    let next = begun.turn.next_event;
    world.finish(&begun, next, vec![artifact("a", "new", false), status(S::Completed)]).await;
    let expected = [
        "1 task SUBMITTED",
        "2 WORKING",
        "3 a=one ",
        "4 b=only here",
        "5 a+=two",
        "6 WORKING",
        "7 a=",
        "8 b=",
        "9 a=new",
        "10 COMPLETED",
    ];
    let updates = all(stream).await;
    assert_eq!(updates.iter().map(short).collect::<Vec<_>>(), expected);
    assert_eq!(kept_event(updates[5].event.as_ref().expect("an event")), Some(2), "what came after that is void");
    let task = world.get(&lost.run.run.task_id).await;
    assert_eq!(texts(&task), ["a=new", "b="]);
    assert!(task.artifacts[1].metadata.as_ref().expect("marked").fields.contains_key("discarded"));
}

/// What an attempt writes that only wants to add to this artifact: the first time, a replacement of what was lost.
fn written(begun: &Begun, id: &str, text: &str) -> StreamResponse {
    let (kept, stale) = (&begun.turn.kept_artifacts, &begun.turn.stale_artifacts);
    assert!(kept.iter().all(|id| !stale.contains(id)), "one or the other");
    artifact(id, text, kept.iter().any(|kept| kept == id))
}

#[tokio::test]
async fn a_good_result_after_two_lost_attempts_is_not_marked_discarded() {
    for losses in 1..=2 {
        let world = World::new();
        let sent = world.send(Send::new("hi")).await.expect("sends");
        let mut begun = world.next().await;
        for n in 1..=losses {
            let lost = ["answer", "file"].map(|id| written(&begun, id, &format!("L{n}")));
            world.record(&begun, begun.turn.next_event, lost.into()).await;
            begun = again(&world, &format!("next-{n}")).await;
            assert_eq!(begun.turn.stale_artifacts, ["answer", "file"], "after {n} losses");
            assert!(begun.turn.kept_artifacts.is_empty(), "after {n} losses");
        }
        // The file is not written again in this turn, nor by the first attempt at the next one.
        let events = vec![written(&begun, "answer", "ok"), status(S::InputRequired)];
        world.finish(&begun, begun.turn.next_event, events).await;
        let Some(Payload::ArtifactUpdate(good)) = artifact("answer", "ok", false).payload else { unreachable!() };
        let good = good.artifact.expect("an artifact");
        let task = world.get(&sent.id).await;
        assert_eq!(task.artifacts[0], good, "after {losses} losses");
        assert_eq!(texts(&task), ["answer=ok", "file="]);

        // What was left by an earlier turn is as much of nothing.
        world.send(Send::to(&sent, "more")).await.expect("sends");
        let mut begun = world.next().await;
        for n in 1..=losses {
            world.record(&begun, begun.turn.next_event, vec![written(&begun, "file", &format!("L{n}"))]).await;
            begun = again(&world, &format!("later-{n}")).await;
            assert_eq!(begun.turn.stale_artifacts, ["file"], "after {n} losses");
        }
        let events = vec![written(&begun, "file", "ok"), status(S::Completed)];
        world.finish(&begun, begun.turn.next_event, events).await;
        let task = world.get(&sent.id).await;
        assert_eq!(task.artifacts, [good.clone(), Artifact { artifact_id: "file".into(), ..good }]);
        let mut folded = Task::default();
        for update in all(world.watch(&sent.id, Some(0)).await.expect("the log")).await {
            fold(&mut folded, update.event.expect("an event")).expect("fits");
        }
        assert_eq!((folded.artifacts, folded.metadata), (task.artifacts, task.metadata), "after {losses} losses");
    }
}

#[tokio::test]
async fn what_the_last_of_many_lost_attempts_wrote_is_not_marked_discarded() {
    let world = World::new();
    let sent = world.send(Send::new("poison")).await.expect("sends");
    let mut begun = world.next().await;
    for n in 1..=3 {
        world.record(&begun, begun.turn.next_event, vec![written(&begun, "answer", &format!("L{n}"))]).await;
        if n < 3 {
            begun = again(&world, &format!("next-{n}")).await;
        }
    }
    let run = world.take_over("r3").await;
    assert!(world.begin_with(&run, |begin| begin.max_attempts = 3).await.is_none());
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), texts(&task)), (S::Failed, vec!["answer=L3".to_owned()]));
    assert_eq!((task.artifacts[0].parts.len(), &task.artifacts[0].metadata), (1, &None));
}

#[tokio::test]
async fn what_was_said_before_a_finished_step_stays_and_what_came_after_it_goes() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let lost = world.next().await;
    let step = |step, after_event, text: &str| JournalEntry {
        step,
        after_event,
        text: text.into(),
        payload: "s".into(),
        ..JournalEntry::default()
    };
    let record = |first, events, journal| RecordRequest { journal, ..lost.record(first, events) };
    let events = vec![artifact("a", "1 ", false), artifact("a", "2 ", true), artifact("b", "x", false)];
    world.record_raw(record(3, events, vec![step(1, 3, "1 "), step(2, 4, "2 ")])).await;
    world.record(&lost, 6, vec![artifact("a", "half", true)]).await;
    let begun = again(&world, "r2").await;
    assert_eq!(texts(&world.get(&sent.id).await), ["a=1 2 ", "b="]);
    assert_eq!(
        (&begun.turn.kept_artifacts[..], &begun.turn.stale_artifacts[..]),
        (&["a".to_owned()][..], &["b".to_owned()][..])
    );
    let said: String = begun.turn.journal.iter().map(|entry| entry.text.clone()).collect();
    assert_eq!((said.as_str(), begun.turn.journal.len()), ("1 2 ", 2));
    // The second one is lost too, without having said anything: nothing happens to what is there.
    let next = begun.turn.next_event;
    let begun = again(&world, "r3").await;
    assert_eq!((begun.turn.next_event, begun.turn.attempt), (next, 3));
    world.finish(&begun, next, vec![artifact("a", "3", true), status(S::Completed)]).await;
    assert_eq!(texts(&world.get(&sent.id).await), ["a=1 2 3", "b="]);
}

#[tokio::test]
async fn an_artifact_of_an_earlier_turn_is_what_it_was() {
    let world = World::with(engine(2), 2, &Options::default());
    let sent = world.send(Send::new("1")).await.expect("sends");
    let begun = world.next().await;
    let large = "x".repeat(300_000);
    world
        .finish(&begun, 3, vec![artifact("a", &large, false), artifact("b", "b1", false), status(S::InputRequired)])
        .await;
    world.send(Send::to(&sent, "2")).await.expect("sends");
    let lost = world.next().await;
    let next = lost.turn.next_event;
    // Long enough to be worth folding, which must not happen now.
    let events =
        vec![artifact("a", &"y".repeat(700_000), true), artifact("b", "b2", false), artifact("c", "c2", false)];
    world.record(&lost, next, events).await;
    world.record(&lost, next + 3, vec![artifact("c", &"z".repeat(400_000), true)]).await;
    let begun = again(&world, "r2").await;
    assert_eq!(begun.turn.stale_artifacts, ["c"]);
    assert_eq!(texts(&world.get(&sent.id).await), [format!("a={large}"), "b=b1".into(), "c=".into()]);
    let next = begun.turn.next_event;
    world.finish(&begun, next, vec![artifact("a", "!", true), status(S::Completed)]).await;
    assert_eq!(texts(&world.get(&sent.id).await), [format!("a={large}!"), "b=b1".into(), "c=".into()]);
}

#[tokio::test]
async fn a_planned_stop_takes_back_what_no_step_vouches_for_and_costs_no_attempt() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![status(S::Working), artifact("a", "half", false)]).await;
    let request = HandBackRequest { turns: vec![begun.held()] };
    world.calls().hand_back(Request::new(request)).await.expect("gives back");
    let begun = world.next().await;
    assert_eq!((begun.turn.attempt, texts(&world.get(&sent.id).await)), (1, vec!["a=".to_owned()]));
}

#[tokio::test]
async fn a_crash_counts_even_when_the_runner_stops_right_after_it() {
    let world = World::new();
    world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let turns = vec![rialto_rpc::tasks::HeldTurn { crashed: true, ..begun.held() }];
    world.calls().hand_back(Request::new(HandBackRequest { turns })).await.expect("gives back");
    assert_eq!(world.next().await.turn.attempt, 2);
}

#[tokio::test]
async fn a_dead_entry_holds_everything_that_a_replay_needs() {
    let world = World::with(engine(1), 1, &Options::default());
    let mut send = Send::new("poison");
    send.message().message_id = "m-1".into();
    let sent = world.send(send).await.expect("sends");
    for n in 0..4 {
        let run = world.take_over(&format!("r{n}")).await;
        assert_eq!(world.begin_with(&run, |begin| begin.max_attempts = 4).await.expect("a turn").turn.attempt, n + 1);
    }
    let run = world.take_over("r5").await;
    let begun = world.begin_with(&run, |begin| {
        begin.max_attempts = 4;
        begin.crash = "signal: 9".into();
    });
    assert!(begun.await.is_none());
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), reason(&task)), (S::Failed, "crashed".into()));
    let shown = text(task.status.as_ref().and_then(|status| status.message.as_ref()).expect("a reason"));
    assert!(shown.contains("lost 4 times") && !shown.contains("signal"), "{shown}");
    assert_eq!(world.entries().await, 0);
    let limit = ReadLimit { entries: 10, bytes: 1 << 20 };
    let dead = world.engine.read(0, DEAD, EntryId::ZERO, limit).await.expect("reads");
    assert_eq!(dead.len(), 1);
    let dead = DeadEntry::decode(&dead[0].payload).expect("a dead entry");
    assert_eq!((dead.stream.as_str(), dead.deliveries), ("runs:echo", 4));
    assert_eq!(dead.reason, "the agent crashed 4 times; the last time, signal: 9");
    let entry = RunEntry::decode(dead.payload).expect("a run entry");
    assert_eq!((entry.task_id, entry.message_id.as_str(), entry.attempts), (sent.id, "m-1", 4));
    assert_eq!((entry.turn_id, entry.agent.as_str(), entry.schema), (run.run.turn_id.clone(), AGENT, 1));
    assert_eq!(world.begin(&run).await.map(|_| ()), None, "once");
    assert_eq!(world.engine.read(0, DEAD, EntryId::ZERO, limit).await.expect("reads").len(), 1);
    let outcome = world.send(Send::to(&world.get(&entry_id(&world).await).await, "more")).await;
    assert!(outcome.is_err(), "it has ended");
}

async fn entry_id(world: &World) -> String {
    world.list("", Default::default()).await.expect("lists").tasks[0].id.clone()
}

#[tokio::test]
async fn late_words_of_a_lost_attempt_are_refused_after_its_output_was_taken_back() {
    let world = World::with(engine(2), 2, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let paused = world.next().await;
    world.record(&paused, 3, vec![artifact("a", "old", false)]).await;
    let begun = again(&world, "r2").await;
    for _ in 0..2 {
        assert_eq!(world.record(&paused, 4, vec![artifact("a", "late", true)]).await, Outcome::Fenced);
        let late = vec![artifact("a", "late", true), status(S::Completed)];
        assert_eq!(world.finish(&paused, 4, late).await, Outcome::Fenced);
    }
    world.finish(&begun, begun.turn.next_event, vec![artifact("a", "new", false), status(S::Completed)]).await;
    assert_eq!(world.finish(&paused, 4, vec![status(S::Failed)]).await, Outcome::Fenced);
    assert_eq!(
        (state(&world.get(&sent.id).await), texts(&world.get(&sent.id).await)),
        (S::Completed, vec!["a=new".to_owned()])
    );
}

#[tokio::test]
async fn an_attempt_that_nobody_can_take_back_is_not_followed_by_others_for_ever() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let lost = world.next().await;
    let journal = vec![JournalEntry { step: 1, after_event: 4, ..JournalEntry::default() }];
    let chunks = vec![artifact("a", &"x".repeat(5000), false), artifact("a", "kept", true), artifact("a", "not", true)];
    world.record_raw(RecordRequest { journal, ..lost.record(3, chunks) }).await;
    let shard = u16::from_str_radix(&sent.id[34..], 16).expect("two digits");
    let gap = Op::Remove { stream: format!("log:{}", sent.id), id: EntryId::number(3) };
    world.engine.commit(Batch { shard, ops: vec![gap], ..Batch::default() }).await.expect("commits");

    let run = world.claim_after("r2", Duration::ZERO).await.expect("taken over");
    assert!(world.begin(&run).await.is_none(), "there is nothing to go on from");
    assert_eq!(world.entries().await, 0);
    assert_eq!(world.finish(&lost, 6, vec![status(S::Completed)]).await, Outcome::Fenced);
    let mut rest = world.watch(&sent.id, Some(5)).await.expect("watches");
    let end = one(&mut rest).await;
    assert_eq!(short(&end), "6 FAILED");
    assert!(format!("{end:?}").contains("damaged"), "{end:?}");
    let limit = ReadLimit { entries: 10, bytes: 1 << 20 };
    assert_eq!(world.engine.read(shard, DEAD, EntryId::ZERO, limit).await.expect("reads").len(), 1);
}
