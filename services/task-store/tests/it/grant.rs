//! Turns that stop for authorization.

use rialto_a2a::{
    Kind,
    wkt::{Struct, Value, value},
};
use rialto_rpc::tasks::{Follow, JournalEntry, Outcome, RecordRequest};
use rialto_task_store::Options;

use crate::world::*;

async fn stopped(world: &World) -> (rialto_a2a::v1::Task, Begun) {
    stopped_with(world, "before ").await
}

async fn stopped_with(world: &World, said: &str) -> (rialto_a2a::v1::Task, Begun) {
    let sent = world.send(Send::new("pay").queue()).await.expect("sends");
    let begun = world.next().await;
    let step = JournalEntry { step: 1, payload: "asked".into(), after_event: 3, ..JournalEntry::default() };
    let finish = world.finish_with(&begun, 3, vec![artifact("a", said, false), status(S::AuthRequired)], |finish| {
        finish.journal = vec![step]
    });
    assert_eq!(finish.await, Outcome::Ok);
    (sent, begun)
}

fn secret() -> Struct {
    [("code", "xyz")].into_iter().collect()
}

#[tokio::test]
async fn a_granted_turn_goes_on_where_it_stopped_with_its_journal_and_its_key() {
    let world = World::with(engine(4), 3, &Options::default());
    let stream = world.updates(Send::new("pay").queue().follow(Follow::Turn)).await.expect("sends");
    let begun = world.next().await;
    let step = JournalEntry { step: 1, payload: "asked".into(), after_event: 3, ..JournalEntry::default() };
    let events = vec![artifact("a", "before ", false), status(S::AuthRequired)];
    world.finish_with(&begun, 3, events, |finish| finish.journal = vec![step.clone()]).await;
    let id = begun.run.run.task_id.clone();
    assert_eq!((state(&world.get(&id).await), world.entries().await), (S::AuthRequired, 0), "the slot is free");

    let commit = id_bytes().to_vec();
    for _ in 0..2 {
        let granted = world
            .grant(&id, |grant| {
                grant.commit_id = commit.clone().into();
                grant.metadata = Some(secret());
            })
            .await;
        assert_eq!(state(&granted.expect("grants, twice")), S::Submitted);
    }
    assert_eq!(world.entries().await, 1, "queued once");
    assert_eq!(kind(world.grant(&id, |_| {}).await), Kind::UnsupportedOperation, "it waits for nothing any more");
    // A Finish whose answer was lost is still right.
    let events = vec![artifact("a", "before ", false), status(S::AuthRequired)];
    assert_eq!(world.finish(&begun, 3, events.clone()).await, Outcome::Ok);
    let again = world.next().await;
    assert_eq!(world.finish(&begun, 3, events).await, Outcome::Ok);
    assert_eq!(again.run.run.turn_id, begun.run.run.turn_id, "the same key for side effects");
    assert_eq!(again.turn.attempt, 1, "it stopped as it should: no attempt was lost");
    assert_eq!(again.turn.journal, [step]);
    let granted = again.turn.granted.clone().expect("it is told");
    assert_eq!((granted.times, granted.metadata), (1, Some(secret())));
    assert_eq!((again.turn.kept_artifacts.clone(), again.turn.stale_artifacts.len()), (vec!["a".to_owned()], 0));
    let next = again.turn.next_event;
    world.finish(&again, next, vec![artifact("a", "after", true), status(S::Completed)]).await;
    let seen = ["1 task SUBMITTED", "2 WORKING", "3 a=before ", "4 AUTH_REQUIRED", "5 SUBMITTED", "6 WORKING"];
    assert_eq!(shorts(stream).await, [&seen[..], &["7 a+=after", "8 COMPLETED"]].concat());
    let task = world.get(&id).await;
    assert_eq!(parts(&task.artifacts[0].parts), "before after");
    assert!(!format!("{task:?}").contains("xyz"), "clients are not shown what came with it");
    assert_eq!(kind(world.grant(&id, |_| {}).await), Kind::UnsupportedOperation);
}

#[tokio::test]
async fn a_message_that_waits_for_a_granted_turn_is_not_lost() {
    let world = World::new();
    let sent = world.send(Send::new("pay").queue()).await.expect("sends");
    let begun = world.next().await;
    let other = world.send(Send::new("other").queue().context(&sent.context_id)).await.expect("waits");
    world.send(Send::to(&sent, "more").queue()).await.expect("waits behind it");
    world.finish(&begun, 3, vec![status(S::AuthRequired)]).await;
    let running = world.next().await;
    assert_eq!(running.run.run.task_id, other.id);
    world.grant(&sent.id, |_| {}).await.expect("grants");
    world.finish(&running, 3, vec![status(S::Completed)]).await;
    for message in ["pay", "more"] {
        let begun = world.next().await;
        assert_eq!(text(begun.turn.message.as_ref().expect("a message")), message, "in the order of sending");
        world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
    }
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn only_who_may_grants_and_only_what_waits() {
    let world = World::new();
    let (sent, _) = stopped(&world).await;
    assert_eq!(kind(world.grant(&sent.id, |grant| grant.agent = "other".into()).await), Kind::TaskNotFound);
    assert_eq!(kind(world.grant("nothing", |_| {}).await), Kind::TaskNotFound);
    assert_eq!(kind(world.grant(&sent.id, |grant| grant.commit_id.clear()).await), Kind::InvalidParams);
    world.grant(&sent.id, |grant| grant.agent = AGENT.into()).await.expect("its own agent may");
    let running = world.next().await;
    assert_eq!(kind(world.grant(&sent.id, |_| {}).await), Kind::UnsupportedOperation);
    world.finish(&running, running.turn.next_event, vec![status(S::InputRequired)]).await;
    assert_eq!(kind(world.grant(&sent.id, |_| {}).await), Kind::UnsupportedOperation);
}

#[tokio::test]
async fn a_task_that_waits_for_authorization_can_be_canceled() {
    let world = World::new();
    let (sent, begun) = stopped(&world).await;
    assert_eq!(state(&world.cancel(&sent.id).await.expect("cancels")), S::Canceled);
    assert_eq!(kind(world.grant(&sent.id, |_| {}).await), Kind::UnsupportedOperation);
    assert_eq!(world.entries().await, 0);
    assert_ne!(world.finish(&begun, 5, vec![status(S::Completed)]).await, Outcome::Ok);
    // A canceled Grant leaves nothing behind either.
    let (sent, _) = stopped(&world).await;
    world.grant(&sent.id, |_| {}).await.expect("grants");
    world.cancel(&sent.id).await.expect("cancels");
    let run = world.claim("r").await.expect("its entry");
    assert!(world.begin(&run).await.is_none());
    assert_eq!(world.entries().await, 0);
}

#[tokio::test]
async fn a_message_instead_of_the_grant_is_the_next_turn() {
    let world = World::new();
    let (sent, _) = stopped(&world).await;
    world.send(Send::to(&sent, "never mind")).await.expect("accepted in that state");
    let next = world.next().await;
    assert_eq!((next.turn.number, next.turn.journal.len(), next.turn.granted.is_none()), (2, 0, true));
    assert_eq!(kind(world.grant(&sent.id, |_| {}).await), Kind::UnsupportedOperation, "the first turn is over");
    // Its journal is its own.
    let step = JournalEntry { step: 1, payload: "new".into(), ..JournalEntry::default() };
    let record = RecordRequest { journal: vec![step], ..next.record(next.turn.next_event, vec![]) };
    assert_eq!(world.record_raw(record).await, Outcome::Ok);
    world.finish(&next, next.turn.next_event, vec![status(S::Completed)]).await;
    assert_eq!(state(&world.get(&sent.id).await), S::Completed);
}

#[tokio::test]
async fn a_grant_waits_for_the_turn_that_has_the_context_and_runs_after_it() {
    let world = World::with(engine(2), 2, &Options::default());
    let (sent, _) = stopped(&world).await;
    let other = world.send(Send::new("next").context(&sent.context_id)).await.expect("the context is free meanwhile");
    let busy = world.next().await;
    world.grant(&sent.id, |_| {}).await.expect("grants, though busy messages are refused");
    assert_eq!(world.entries().await, 1, "one turn at a time");
    world.finish(&busy, 3, vec![status(S::Completed)]).await;
    let again = world.next().await;
    assert_eq!(again.run.run.task_id, sent.id);
    assert_eq!(again.turn.granted.as_ref().map(|granted| granted.times), Some(1));
    world.finish(&again, again.turn.next_event, vec![status(S::Completed)]).await;
    assert_eq!((state(&world.get(&sent.id).await), state(&world.get(&other.id).await)), (S::Completed, S::Completed));
}

#[tokio::test]
async fn a_turn_that_was_folded_away_while_it_waited_still_goes_on_and_can_be_taken_back() {
    let options = Options {
        fold_after: std::time::Duration::from_millis(20),
        due_period: std::time::Duration::from_millis(5),
        ..Options::default()
    };
    let world = World::with(engine(2), 2, &options);
    world.background();
    let before = "before ".repeat(300);
    let (sent, _) = stopped_with(&world, &before).await;
    eventually("folded", || async { folded(&world, &sent.id).await }).await;
    world
        .grant(&sent.id, |grant| {
            let value = Value { kind: Some(value::Kind::NumberValue(1.0)) };
            grant.metadata = Some(Struct { fields: [("n".to_owned(), value)].into_iter().collect() });
        })
        .await
        .expect("grants");
    let begun = world.next().await;
    assert_eq!(begun.turn.journal.len(), 1);
    let next = begun.turn.next_event;
    world.record(&begun, next, vec![artifact("a", "lost", true), artifact("b", "lost too", false)]).await;
    let run = world.take_over("r2").await;
    let again = world.begin(&run).await.expect("a turn");
    assert_eq!((again.turn.attempt, again.turn.stale_artifacts.clone()), (2, vec!["b".to_owned()]));
    let task = world.get(&sent.id).await;
    assert_eq!(parts(&task.artifacts[0].parts), before, "what it had said when it stopped stays");
    let next = again.turn.next_event;
    world.finish(&again, next, vec![artifact("a", "after", true), status(S::Completed)]).await;
    let task = world.get(&sent.id).await;
    assert_eq!(
        (parts(&task.artifacts[0].parts), parts(&task.artifacts[1].parts)),
        (format!("{before}after"), String::new())
    );
}
