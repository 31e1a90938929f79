//! Runners and entries that go away.

use std::time::Duration;

use prost::Message as _;
use rialto_rpc::tasks::{
    HandBackRequest, HeartbeatRequest, JournalEntry, Outcome, RecordRequest, task_store_server::TaskStore as _,
};
use rialto_store::{Batch, EntryId, Op, ReadLimit, worker::DEAD};
use rialto_task_store::Options;
use tonic::Request;

use crate::{flaky::Flaky, world::*};

#[tokio::test]
async fn a_runner_that_was_paused_too_long_writes_nothing() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let paused = world.next().await;
    world.record(&paused, 3, vec![artifact("a", "1", false)]).await;
    let run = world.claim_after("r2", Duration::ZERO).await.expect("taken over");
    // Claimed by another one, but not begun: the first one still counts.
    assert_eq!(world.record(&paused, 4, vec![artifact("a", "2", true)]).await, Outcome::Ok);
    let begun = world.begin(&run).await.expect("a turn");
    assert_eq!((begun.turn.next_event, begun.turn.attempt), (7, 2), "what the lost attempt said is taken back");
    assert_eq!(world.record(&paused, 5, vec![artifact("a", "x", true)]).await, Outcome::Fenced);
    assert_eq!(world.finish(&paused, 5, vec![status(S::Failed)]).await, Outcome::Fenced);
    let request = HeartbeatRequest { turns: vec![paused.held(), begun.held()] };
    let reply = world.calls().heartbeat(Request::new(request)).await.expect("beats").into_inner();
    assert_eq!(reply.outcomes, [i32::from(Outcome::Fenced), Outcome::Ok.into()]);
    assert_eq!(world.finish(&begun, 7, vec![artifact("a", "new", false), status(S::Completed)]).await, Outcome::Ok);
    assert_eq!(world.finish(&paused, 5, vec![status(S::Failed)]).await, Outcome::Fenced);
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), parts(&task.artifacts[0].parts)), (S::Completed, "new".into()));
    assert_eq!(numbers(&world, &sent.id).await, [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[tokio::test]
async fn a_finish_before_the_successor_began_counts() {
    let world = World::new();
    world.send(Send::new("hi")).await.expect("sends");
    let slow = world.next().await;
    let run = world.claim_after("r2", Duration::ZERO).await.expect("taken over");
    assert_eq!(world.finish(&slow, 3, vec![status(S::Completed)]).await, Outcome::Ok);
    assert!(world.begin(&run).await.is_none(), "nothing left to do");
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn a_task_that_kills_its_runner_ends_and_its_neighbours_do_not() {
    let world = World::new();
    let sent = world.send(Send::new("poison")).await.expect("sends");
    let behind = world.send(Send::new("next").queue().context(&sent.context_id)).await.expect("waits");
    let shard = u16::from_str_radix(&sent.id[34..], 16).expect("an id");
    let mut last = None;
    for attempt in 1..=3 {
        let run = world.claim_after(&format!("r{attempt}"), Duration::ZERO).await.expect("an entry");
        let begun = world.begin(&run).await.expect("a turn");
        assert_eq!(begun.turn.attempt, attempt);
        last = Some(begun);
    }
    let run = world.claim_after("r4", Duration::ZERO).await.expect("an entry");
    assert!(world.begin(&run).await.is_none());
    let alive = last.expect("an attempt");
    let late = world.finish(&alive, alive.turn.next_event, vec![status(S::Completed)]).await;
    assert_eq!(late, Outcome::Fenced, "who was only slow is not told that its end counts");
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), reason(&task)), (S::Failed, "crashed".into()));
    let message = task.status.expect("a status").message.expect("a reason");
    assert!(text(&message).contains("lost 3 times"), "{message:?}");
    let limit = ReadLimit { entries: 10, bytes: 1 << 20 };
    assert_eq!(world.engine.read(shard, DEAD, EntryId::ZERO, limit).await.expect("reads").len(), 1);
    assert_eq!(world.next().await.turn.task.expect("a task").id, behind.id);
}

#[tokio::test]
async fn a_planned_stop_costs_no_attempt() {
    let world = World::new();
    world.send(Send::new("hi").policy(|policy| policy.queue_timeout_ms = 200)).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    let mut begun = world.begin_with(&run, |begin| begin.max_attempts = 1).await.expect("a turn");
    tokio::time::sleep(std::time::Duration::from_millis(210)).await;
    for _ in 0..5 {
        for _ in 0..2 {
            let request = HandBackRequest { turns: vec![begun.held()] };
            world.calls().hand_back(Request::new(request)).await.expect("gives back");
        }
        assert_eq!(world.record(&begun, 3, vec![artifact("a", "x", false)]).await, Outcome::Fenced);
        // At once, and though the deadline for the beginning is over.
        let run = world.claim("r2").await.expect("claimable at once");
        begun = world.begin_with(&run, |begin| begin.max_attempts = 1).await.expect("a turn");
        assert_eq!(begun.turn.attempt, 1);
    }
    assert_eq!(world.finish(&begun, 3, vec![status(S::Completed)]).await, Outcome::Ok);
}

#[tokio::test]
async fn a_store_that_forgot_what_an_attempt_wrote_neither_fails_the_task_nor_leaves_a_hole() {
    let world = World::with(engine(1), 2, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begin = async |consumer: &str| {
        let run = world.claim(consumer).await.expect("claimable at once");
        let begun = world.begin_with(&run, |begin| begin.max_attempts = 1).await.expect("a turn");
        assert_eq!(begun.turn.attempt, 1, "nobody crashed");
        begun
    };
    let step = |step| JournalEntry { step, payload: "step".into(), ..JournalEntry::default() };
    // What begins an artifact is forgotten, and more of it comes.
    let begun = begin("r1").await;
    assert_eq!(world.record(&begun, 4, vec![artifact("a", "2", true)]).await, Outcome::Fenced);
    // The same at the end.
    let begun = begin("r2").await;
    assert_eq!(world.finish(&begun, 4, vec![artifact("a", "2", true), status(S::Completed)]).await, Outcome::Fenced);
    // The middle of one.
    let begun = begin("r3").await;
    assert_eq!(world.record(&begun, 3, vec![artifact("a", "1", false)]).await, Outcome::Ok);
    assert_eq!(world.record(&begun, 5, vec![artifact("a", "3", true)]).await, Outcome::Fenced);
    assert_eq!(world.record(&begun, 4, vec![artifact("a", "x", true)]).await, Outcome::Fenced, "it is over");
    // A step.
    let begun = begin("r4").await;
    let next = begun.turn.next_event;
    let record = RecordRequest { journal: vec![step(1), step(2)], ..begun.record(next, Vec::new()) };
    assert_eq!(world.record_raw(record).await, Outcome::Ok);
    let record = RecordRequest { journal: vec![step(4)], ..begun.record(next, Vec::new()) };
    assert_eq!(world.record_raw(record).await, Outcome::Fenced);
    // A cancel, which the runner confirms.
    let begun = begin("r5").await;
    assert_eq!(begun.turn.journal.len(), 2);
    assert_eq!(world.finish(&begun, 0, Vec::new()).await, Outcome::Fenced);
    assert_eq!(state(&world.get(&sent.id).await), S::Working);

    let begun = begin("r6").await;
    let next = begun.turn.next_event;
    assert_eq!(world.finish(&begun, next, vec![artifact("a", "12", false), status(S::Completed)]).await, Outcome::Ok);
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), parts(&task.artifacts[0].parts)), (S::Completed, "12".into()));
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn two_attempts_that_know_nothing_of_each_other_are_not_mixed() {
    let world = World::with(engine(1), 1, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    let key = format!("t:{}", sent.id);
    let before = world.engine.get(0, &[&key]).await.expect("reads").remove(0).expect("a head");
    let forgotten = world.begin(&run).await.expect("a turn");
    // The store goes back to where it was.
    let ops = vec![Op::Put { key, bytes: before.bytes }];
    world.engine.commit(Batch { shard: 0, ops, ..Batch::default() }).await.expect("commits");
    tokio::time::sleep(Duration::from_millis(2)).await;
    let begun = world.begin(&run).await.expect("a turn");
    assert_eq!((forgotten.turn.attempt, begun.turn.attempt), (1, 1));
    assert_eq!(world.record(&forgotten, 3, vec![artifact("a", "x", false)]).await, Outcome::Fenced);
    assert_eq!(world.finish(&forgotten, 3, vec![status(S::Failed)]).await, Outcome::Fenced);
    assert_eq!(world.finish(&begun, 3, vec![artifact("a", "1", false), status(S::Completed)]).await, Outcome::Ok);
    assert_eq!(parts(&world.get(&sent.id).await.artifacts[0].parts), "1");
}

#[tokio::test]
async fn a_turn_that_expired_in_the_queue_is_not_started() {
    let world = World::new();
    let sent = world.send(Send::new("hi").policy(|policy| policy.queue_timeout_ms = 1)).await.expect("sends");
    let patient = world.send(Send::new("next").queue().context(&sent.context_id)).await.expect("waits");
    tokio::time::sleep(Duration::from_millis(5)).await;
    let run = world.claim("r").await.expect("an entry");
    assert!(world.begin(&run).await.is_none());
    let task = world.get(&sent.id).await;
    assert_eq!((state(&task), reason(&task)), (S::Failed, "expired".into()));
    assert_eq!(world.next().await.turn.task.expect("a task").id, patient.id);
}

#[tokio::test]
async fn a_begin_whose_answer_was_lost_is_the_same_attempt() {
    let world = World::with(engine(2), 2, &Options::default());
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    let commit = id_bytes().to_vec();
    let again = async || world.begin_with(&run, |begin| begin.commit_id = commit.clone().into()).await;
    let first = again().await.expect("a turn").turn;
    assert_eq!(again().await.expect("the same turn").turn, first);
    assert_eq!(numbers(&world, &sent.id).await, [1, 2]);
    let other = world.begin(&run).await.expect("another call").turn;
    assert_eq!((first.attempt, other.attempt), (1, 2));
    assert!(other.fence > first.fence);
}

#[tokio::test]
async fn a_finish_whose_answer_was_lost_is_ok_even_after_the_next_turn_began() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.run_to(S::InputRequired).await;
    let finish = async || world.finish(&begun, 3, vec![status(S::InputRequired)]).await;
    assert_eq!(finish().await, Outcome::Ok);
    world.send(Send::to(&sent, "more")).await.expect("sends");
    assert_eq!(finish().await, Outcome::Ok);
    world.next().await;
    assert_eq!(finish().await, Outcome::Ok);
    assert_eq!(world.record(&begun, 3, vec![status(S::Working)]).await, Outcome::Fenced);
    assert_eq!(numbers(&world, &sent.id).await, [1, 2, 3, 4, 5]);
}

#[tokio::test]
async fn begin_without_the_entry_is_nothing() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    let mut thief = run.clone();
    thief.claim.consumer = "thief".into();
    assert!(world.begin(&thief).await.is_none());
    let begun = world.begin(&run).await.expect("the owner's");
    assert_eq!(begun.turn.attempt, 1);
    assert_eq!(state(&world.get(&sent.id).await), S::Working);
}

#[tokio::test]
async fn an_entry_that_names_no_task_is_dead_once() {
    let world = World::with(engine(1), 1, &Options::default());
    let entry = |task_id: String| {
        let run = rialto_rpc::tasks::RunEntry { schema: 1, agent: AGENT.into(), task_id, ..Default::default() };
        Op::Append {
            stream: format!("runs:{AGENT}"),
            at: rialto_store::At::Next,
            tag: 0,
            payload: run.encode_to_vec().into(),
            into: None,
        }
    };
    let gone = format!("{}00", &unique()[..34]);
    let ops = vec![entry("junk".into()), entry(gone)];
    world.engine.commit(Batch { ops, ..Batch::default() }).await.expect("appends");
    for _ in 0..2 {
        let run = world.claim("r").await.expect("an entry");
        assert!(world.begin(&run).await.is_none());
    }
    assert_eq!(world.entries().await, 0);
    world.send(Send::new("hi")).await.expect("sends");
    world.next().await;
}

#[tokio::test]
async fn entries_of_a_newer_version_are_left_alone() {
    let world = World::new();
    world.send(Send::new("hi")).await.expect("sends");
    let run = world.claim("r").await.expect("an entry");
    let request = rialto_rpc::tasks::BeginRequest {
        run: Some(rialto_rpc::tasks::RunEntry { schema: 2, ..run.run.clone() }),
        claim: Some(run.claim.clone()),
        ..Default::default()
    };
    let refused = world.calls().begin(Request::new(request)).await.expect_err("refuses");
    assert_eq!(error(&refused).kind, rialto_a2a::Kind::Unavailable);
    assert_eq!(world.entries().await, 1);
    world.begin(&run).await.expect("whoever understands it may begin");
}

#[tokio::test]
async fn turns_whose_entry_is_gone_are_queued_again_once() {
    let options =
        Options { due_period: Duration::from_millis(5), sweep_period: Duration::from_millis(20), ..Options::default() };
    let world = World::with(engine(2), 3, &options);
    let mut tasks = Vec::new();
    for _ in 0..20 {
        tasks.push(world.send(Send::new("hi")).await.expect("sends"));
    }
    let mut lost = Vec::new();
    for _ in 0..5 {
        lost.push(world.next().await);
    }
    for shard in 0..2 {
        let ops = vec![Op::Drop { stream: format!("runs:{AGENT}") }];
        world.engine.commit(Batch { shard, ops, ..Batch::default() }).await.expect("drops");
    }
    assert_eq!(world.entries().await, 0);
    world.background();
    let mut done = std::collections::BTreeSet::new();
    while done.len() < tasks.len() {
        match world.claim("r2").await {
            Some(run) => {
                if let Some(begun) = world.begin(&run).await {
                    let outcome = world.finish(&begun, begun.turn.next_event, vec![status(S::Completed)]).await;
                    assert_eq!(outcome, Outcome::Ok);
                    assert!(done.insert(run.run.task_id), "once");
                }
            }
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
    for paused in lost {
        assert_eq!(world.finish(&paused, 3, vec![status(S::Failed)]).await, Outcome::Fenced);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.entries().await, 0, "nothing is queued that is done");
    for task in tasks {
        assert_eq!(state(&world.get(&task.id).await), S::Completed);
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_said_and_nothing_is_half_done() {
    let flaky = Flaky::new(engine(2));
    let world = World::with(flaky.clone(), 1, &Options::default());
    flaky.down(true);
    let refused = world.send(Send::new("hi")).await.expect_err("refuses");
    assert_eq!(refused.kind, rialto_a2a::Kind::Unavailable);
    assert!(refused.retry_after.is_some());
    assert!(!refused.message.contains("told"), "no internal text");
    flaky.down(false);
    assert_eq!(world.entries().await, 0);
    let sent = world.send(Send::new("hi")).await.expect("sends");
    let begun = world.next().await;
    let queued = world.send(Send::new("hi")).await.expect("sends");
    flaky.full(true);
    let refused = world.send(Send::new("hi")).await.expect_err("refuses");
    assert_eq!(refused.kind, rialto_a2a::Kind::Unavailable);
    assert_eq!(world.finish(&begun, 3, vec![status(S::Completed)]).await, Outcome::Ok, "finishing frees");
    assert_eq!(state(&world.get(&sent.id).await), S::Completed);
    world.run_to(S::Completed).await;
    assert_eq!(state(&world.get(&queued.id).await), S::Completed, "what was accepted gets done");
    assert!(world.list("", Default::default()).await.is_ok());
}

/// C117: the store refuses, then is slow, then loses answers, while a hundred messages come in.
#[tokio::test]
async fn a_short_store_error_drops_no_message_that_was_answered() {
    let flaky = Flaky::new(engine(2));
    let world = World::with(flaky.clone(), 2, &Options::default());
    let weather = async {
        let pause = || tokio::time::sleep(Duration::from_millis(40));
        flaky.slow(30);
        pause().await;
        flaky.down(true);
        pause().await;
        flaky.down(false);
        flaky.slow(0);
        flaky.chaos(Some(7));
        pause().await;
        flaky.chaos(None);
    };
    let sends = futures::future::join_all((0..100).map(|n: u64| {
        let world = &world;
        async move {
            tokio::time::sleep(Duration::from_millis(n * 3 / 2)).await;
            let replica = usize::from(n.is_multiple_of(2));
            match world.updates_at(replica, Send::new(&n.to_string())).await {
                Ok(mut updates) => match futures::StreamExt::next(&mut updates).await.expect("an update") {
                    Ok(update) => Ok(task(update).id),
                    Err(status) => Err(error(&status)),
                },
                Err(error) => Err(error),
            }
        }
    }));
    let (sent, ()) = tokio::join!(sends, weather);
    let mut answered = Vec::new();
    for outcome in sent {
        match outcome {
            Ok(id) => answered.push(id),
            Err(refused) => {
                assert_eq!(refused.kind, rialto_a2a::Kind::Unavailable);
                assert!(refused.retry_after.is_some(), "says when to come back");
            }
        }
    }
    assert!(answered.len() > 20, "{}", answered.len());
    while let Some(run) = world.claim("r").await {
        let begun = world.begin(&run).await.expect("a turn");
        assert_eq!(world.finish(&begun, 3, vec![status(S::Completed)]).await, Outcome::Ok);
    }
    for id in answered {
        assert_eq!(state(&world.get(&id).await), S::Completed);
    }
}
