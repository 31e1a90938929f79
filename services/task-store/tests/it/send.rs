//! Accepting messages: new tasks, follow-ups, busy contexts, repeats.

use futures::StreamExt as _;
use rialto_a2a::{Kind, v1::Role};
use rialto_rpc::tasks::{Follow, Outcome};

use crate::world::*;

#[tokio::test]
async fn an_echo_task_takes_three_commits_and_everybody_sees_the_same() {
    let world = World::new();
    let mut stream = world.updates(Send::new("hi").follow(Follow::Turn)).await.expect("sends");
    let first = one(&mut stream).await;
    assert_eq!(short(&first), "1 task SUBMITTED");
    let submitted = task(first);
    assert_eq!(history(&submitted), ["hi"]);
    assert_eq!(submitted.history[0].task_id, submitted.id);
    assert_eq!(submitted.history[0].context_id, submitted.context_id);
    assert_eq!(world.get(&submitted.id).await, submitted);

    let result = world.watch(&submitted.id, None).await.expect("watches");
    let begun = world.next().await;
    assert_eq!(begun.turn.message.as_ref().map(text), Some("hi".into()));
    assert_eq!((begun.turn.attempt, begun.turn.next_event), (1, 3));
    let events = vec![artifact("a", "hi", false), status(S::Completed)];
    let answer = vec![said(Role::Agent, "hi")];
    let done = world.finish_with(&begun, 3, events, |finish| finish.history = answer).await;
    assert_eq!(done, Outcome::Ok);

    assert_eq!(shorts(stream).await, ["2 WORKING", "3 a=hi", "4 COMPLETED"]);
    assert_eq!(shorts(result).await, ["1 task SUBMITTED", "2 WORKING", "3 a=hi", "4 COMPLETED"]);
    let task = world.get(&submitted.id).await;
    assert_eq!(history(&task), ["hi", "hi"]);
    assert_eq!(parts(&task.artifacts[0].parts), "hi");
    assert_eq!(numbers(&world, &task.id).await, [1, 2, 3, 4]);
    assert_eq!(world.entries().await, 0, "the run entry is settled");
}

#[tokio::test]
async fn a_blocking_answer_is_what_get_returns() {
    let world = World::new();
    let stream = world.updates(Send::new("hi").follow(Follow::Result)).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![artifact("a", "1", false), artifact("a", "2", true)]).await;
    world.finish(&begun, 5, vec![status(S::Completed)]).await;
    let updates = all(stream).await;
    assert_eq!(updates.len(), 1);
    assert_eq!(updates[0].number, 5);
    let answer = task(updates[0].clone());
    assert_eq!(answer, world.get(&answer.id).await);
    assert_eq!(parts(&answer.artifacts[0].parts), "12");
}

#[tokio::test]
async fn a_blocking_call_hangs_when_the_agent_asks_something() {
    for asks in [S::InputRequired, S::AuthRequired] {
        let world = World::new();
        let stream = world.updates(Send::new("hi").follow(Follow::Result)).await.expect("sends");
        world.run_to(asks).await;
        let updates = all(stream).await;
        assert_eq!(updates.len(), 1);
        assert_eq!(state(&task(updates[0].clone())), asks);
    }
}

#[tokio::test]
async fn history_length_counts_from_the_newest() {
    let world = World::new();
    let mut sent = world.send(Send::new("1")).await.expect("sends");
    for n in ["2", "3"] {
        world.run_to(S::InputRequired).await;
        sent = world.send(Send::to(&sent, n)).await.expect("sends");
    }
    let (world, id) = (&world, &sent.id);
    let read = |length| async move { world.get_as("", id, length).await.map(|task| history(&task)) };
    assert_eq!(sent.history.len(), 3);
    for (length, expected) in [
        (None, vec!["1", "2", "3"]),
        (Some(0), vec![]),
        (Some(2), vec!["2", "3"]),
        (Some(i32::MAX), vec!["1", "2", "3"]),
    ] {
        assert_eq!(read(length).await.expect("reads"), expected);
    }
    assert_eq!(kind(read(Some(-1)).await), Kind::InvalidParams);
    let mut send = Send::new("x");
    send.0.history_length = Some(-1);
    assert_eq!(kind(world.send(send).await), Kind::InvalidParams);
    let mut send = Send::new("x");
    send.0.history_length = Some(0);
    assert!(world.send(send).await.expect("sends").history.is_empty());
}

#[tokio::test]
async fn each_state_accepts_messages_or_says_why_not() {
    for ended in [S::Completed, S::Failed, S::Rejected, S::Canceled] {
        let world = World::new();
        let sent = world.send(Send::new("hi")).await.expect("sends");
        match ended {
            S::Canceled => drop(world.cancel(&sent.id).await.expect("cancels")),
            _ => drop(world.run_to(ended).await),
        }
        let before = world.get(&sent.id).await;
        let refused = world.send(Send::to(&sent, "more")).await.expect_err("refuses");
        assert_eq!(refused.kind, Kind::UnsupportedOperation, "{ended:?}");
        assert!(refused.message.contains("terminal state"), "{refused}");
        assert_eq!(world.get(&sent.id).await, before);
    }
    for asks in [S::InputRequired, S::AuthRequired] {
        let world = World::new();
        let sent = world.send(Send::new("hi")).await.expect("sends");
        world.run_to(asks).await;
        let again = world.send(Send::to(&sent, "more")).await.expect("accepts");
        assert_eq!((again.id.clone(), state(&again)), (sent.id, S::Submitted));
        let begun = world.next().await;
        assert_eq!(begun.turn.message.as_ref().map(text), Some("more".into()));
        assert_eq!(begun.turn.attempt, 1);
    }
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    for _ in 0..2 {
        let before = world.get(&sent.id).await;
        let refused = world.send(Send::to(&sent, "more")).await.expect_err("refuses");
        assert_eq!((refused.kind, &*refused.message), (Kind::UnsupportedOperation, "Task is already working."));
        assert_eq!(world.get(&sent.id).await, before, "nothing else changes");
        let context = world.send(Send::new("other").context(&sent.context_id)).await;
        assert_eq!(kind(context), Kind::UnsupportedOperation);
        if world.entries().await == 1
            && let Some(run) = world.claim("r1").await
        {
            world.begin(&run).await.expect("now it works");
        }
    }
}

#[tokio::test]
async fn a_follow_up_stays_in_the_context_of_its_task() {
    let world = World::new();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    world.run_to(S::InputRequired).await;
    let other = world.send(Send::new("other")).await.expect("sends");
    let before = world.get(&sent.id).await;
    for context in [&other.context_id, &unique()] {
        let refused = world.send(Send::to(&sent, "more").context(context)).await.expect_err("refuses");
        assert_eq!(refused.kind, Kind::InvalidParams);
        assert_eq!(refused.violations[0].field, "message.contextId");
        assert_eq!(world.get(&sent.id).await, before);
    }
    let again = world.send(Send::to(&sent, "more")).await.expect("accepts");
    assert_eq!(again.context_id, sent.context_id);
    assert_eq!(again.history[1].context_id, sent.context_id);
}

#[tokio::test]
async fn what_is_not_yours_does_not_exist() {
    let world = World::new();
    let sent = world.send(Send::new("hi").owner("a")).await.expect("sends");
    world.run_to(S::InputRequired).await;
    assert_eq!(kind(world.get_as("b", &sent.id, None).await), Kind::TaskNotFound);
    assert_eq!(kind(world.cancel_as("b", &sent.id, vec![1; 16]).await), Kind::TaskNotFound);
    assert_eq!(kind(world.send(Send::to(&sent, "x").owner("b")).await), Kind::TaskNotFound);
    assert!(world.watch(&sent.id, None).await.is_err());
    let mine = world.send(Send::new("x").owner("b").context(&sent.context_id)).await.expect("another context");
    assert_ne!(mine.id, sent.id);
    for id in ["", "nope", "00000000-0000-0000-0000-0000000000ff", &sent.id.to_uppercase(), &"x".repeat(20_000)] {
        assert_eq!(kind(world.get_as("a", id, None).await), Kind::TaskNotFound);
        assert_eq!(kind(world.cancel_as("a", id, vec![1; 16]).await), Kind::TaskNotFound);
        let mut send = Send::to(&sent, "x").owner("a");
        send.message().task_id = id.into();
        if !id.is_empty() {
            assert_eq!(kind(world.send(send).await), Kind::TaskNotFound);
        }
    }
}

#[tokio::test]
async fn a_context_id_that_would_break_keys_is_refused() {
    let world = World::new();
    for bad in ["", "a b", "a/b", "ä", "a\0b", &"x".repeat(129)] {
        assert_eq!(kind(world.send(Send::new("x").context(bad)).await), Kind::InvalidParams, "{bad}");
    }
    for good in ["a", "A.b_c:d-1", &"x".repeat(128)] {
        assert_eq!(world.send(Send::new("x").context(good)).await.expect("sends").context_id, good);
    }
}

#[tokio::test]
async fn a_machine_answers_the_moment_the_question_shows() {
    let world = World::with(engine(4), 2, &rialto_task_store::Options::default());
    world.background();
    let sent = world.send(Send::new("hi")).await.expect("sends");
    for n in 0..100_u32 {
        let begun = world.next().await;
        let asked = async {
            loop {
                if state(&world.get(&sent.id).await) == S::InputRequired {
                    return world.updates_at(1, Send::to(&sent, &n.to_string())).await.map(drop);
                }
                tokio::task::yield_now().await;
            }
        };
        let finish = world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]);
        let (outcome, sent) = tokio::join!(finish, asked);
        assert_eq!(outcome, Outcome::Ok);
        sent.expect("no refusal");
    }
}

#[tokio::test]
async fn a_retry_after_a_lost_answer_makes_no_second_turn() {
    let world = World::with(engine(4), 2, &rialto_task_store::Options::default());
    let send = Send::new("hi");
    let sent = world.send(send.clone()).await.expect("sends");
    for replica in [0, 1] {
        let mut again = world.updates_at(replica, send.clone()).await.expect("repeats");
        assert_eq!(task(one(&mut again).await).id, sent.id);
    }
    assert_eq!(world.entries().await, 1);
    world.run_to(S::InputRequired).await;
    let follow_up = Send::to(&sent, "more");
    world.send(follow_up.clone()).await.expect("sends");
    world.run_to(S::Completed).await;
    for (replica, send) in [(0, &send), (1, &send), (0, &follow_up), (1, &follow_up)] {
        let result = world.updates_at(replica, send.clone().follow(Follow::Result)).await.expect("repeats");
        let updates = all(result).await;
        assert_eq!(state(&task(updates[0].clone())), S::Completed);
    }
    assert_eq!(world.entries().await, 0);
    assert_eq!(history(&world.get(&sent.id).await), ["hi", "more"]);
}

#[tokio::test]
async fn the_same_message_id_is_a_new_message() {
    let world = World::new();
    let mut one = Send::new("hi");
    one.message().message_id = "m-1".into();
    let mut other = Send::new("hi");
    other.message().message_id = "m-1".into();
    let first = world.send(one).await.expect("sends");
    assert_ne!(world.send(other).await.expect("sends").id, first.id);
}

#[tokio::test]
async fn turns_of_a_context_run_one_after_the_other() {
    let world = World::new();
    let first = world.send(Send::new("1").queue()).await.expect("sends");
    let second = world.send(Send::new("2").queue().context(&first.context_id)).await.expect("waits");
    let third = world.send(Send::new("3").queue().context(&first.context_id)).await.expect("waits");
    assert_eq!(state(&second), S::Submitted);
    assert_eq!(world.entries().await, 1, "only the head of the context");
    for expected in [&first, &second, &third] {
        let begun = world.next().await;
        assert_eq!(begun.turn.task.as_ref().map(|task| &task.id), Some(&expected.id));
        assert!(world.claim("r2").await.is_none());
        world.finish(&begun, begun.turn.next_event, vec![status(S::Completed)]).await;
    }
    assert_eq!(world.entries().await, 0);
    for task in [first, second, third] {
        assert_eq!(numbers(&world, &task.id).await, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_message_to_a_busy_task_waits_for_its_turn() {
    let world = World::new();
    let sent = world.send(Send::new("1").queue()).await.expect("sends");
    let begun = world.next().await;
    let waits = Send::to(&sent, "2").queue();
    let result = world.updates(waits.clone().follow(Follow::Result)).await.expect("waits");
    let stream = world.updates(waits.follow(Follow::Turn)).await.expect("repeats");
    world
        .finish_with(&begun, 3, vec![status(S::InputRequired)], |finish| {
            finish.history = vec![said(Role::Agent, "1?")];
        })
        .await;
    let run = world.claim("r1").await.expect("the next");
    let begun = world.begin_with(&run, |begin| {
        begin.window_messages = 10;
        begin.window_bytes = 10_000;
    });
    let begun = begun.await.expect("the next");
    assert_eq!(begun.turn.message.as_ref().map(text), Some("2".into()));
    assert_eq!(begun.turn.conversation.iter().map(text).collect::<Vec<_>>(), ["1", "1?"]);
    world.finish(&begun, begun.turn.next_event, vec![status(S::Completed)]).await;
    let updates = all(result).await;
    assert_eq!((updates.len(), short(&updates[0])), (1, "6 task COMPLETED".into()));
    assert_eq!(shorts(stream).await, ["2 task WORKING", "3 INPUT_REQUIRED", "4 SUBMITTED", "5 WORKING", "6 COMPLETED"]);
    assert_eq!(history(&world.get(&sent.id).await), ["1", "1?", "2"]);
}

#[tokio::test]
async fn a_stream_of_a_waiting_message_that_goes_on_elsewhere_does_not_end_with_another_turn() {
    let world = World::new();
    let sent = world.send(Send::new("1").queue()).await.expect("sends");
    let begun = world.next().await;
    let waits = Send::to(&sent, "2").queue();
    let turn = waits.0.turn_id.clone();
    drop(world.updates(waits.follow(Follow::Turn)).await.expect("waits"));
    let rest = world.rest_of(&sent.id, &turn, 2).await;
    let strangers = world.rest_of(&sent.id, &[9; 16], 2).await;
    world.finish(&begun, 3, vec![status(S::InputRequired)]).await;
    assert_eq!(shorts(strangers).await, ["3 INPUT_REQUIRED"]);
    let late = world.rest_of(&sent.id, &turn, 3).await;
    let begun = world.next().await;
    world.finish(&begun, begun.turn.next_event, vec![status(S::InputRequired)]).await;
    assert_eq!(shorts(rest).await, ["3 INPUT_REQUIRED", "4 SUBMITTED", "5 WORKING", "6 INPUT_REQUIRED"]);
    assert_eq!(shorts(late).await, ["4 SUBMITTED", "5 WORKING", "6 INPUT_REQUIRED"]);
    // Whoever has seen the end is done.
    assert!(all(world.rest_of(&sent.id, &turn, 6).await).await.is_empty());
}

#[tokio::test]
async fn a_waiting_message_that_is_sent_again_under_its_name_does_not_end_with_another_turn() {
    let world = World::new();
    let sent = world.send(Send::new("1").queue()).await.expect("sends");
    let begun = world.next().await;
    let first = Send::to(&sent, "2").queue().named("k").follow(Follow::Turn);
    let again = first.again();
    let turn = first.0.turn_id.clone();
    assert_ne!(again.0.turn_id, turn);
    assert!(one(&mut world.updates(first).await.expect("waits")).await.turn_id.is_empty(), "it is the caller's");
    let repeated = one(&mut world.updates(again).await.expect("waits")).await;
    assert_eq!(repeated.turn_id, turn);
    let rest = world.rest_of(&sent.id, &repeated.turn_id, 2).await;
    world.finish(&begun, 3, vec![status(S::InputRequired)]).await;
    world.run_to(S::InputRequired).await;
    assert_eq!(shorts(rest).await, ["3 INPUT_REQUIRED", "4 SUBMITTED", "5 WORKING", "6 INPUT_REQUIRED"]);
}

#[tokio::test]
async fn a_message_that_waits_for_a_task_that_ends_is_told_so() {
    let world = World::new();
    let sent = world.send(Send::new("1").queue()).await.expect("sends");
    let begun = world.next().await;
    let result = world.updates(Send::to(&sent, "2").queue().follow(Follow::Result)).await.expect("waits");
    let behind = world.send(Send::new("3").queue().context(&sent.context_id)).await.expect("waits");
    world.finish(&begun, 3, vec![status(S::Completed)]).await;
    assert_eq!(shorts(result).await, ["3 task COMPLETED"]);
    let next = world.next().await;
    assert_eq!(next.turn.task.expect("a task").id, behind.id);
}

#[tokio::test]
async fn a_parked_task_is_answered_while_another_one_runs() {
    let world = World::new();
    let parked = world.send(Send::new("1").queue()).await.expect("sends");
    world.run_to(S::InputRequired).await;
    let other = world.send(Send::new("2").queue().context(&parked.context_id)).await.expect("a new task");
    assert_ne!(other.id, parked.id, "a message with a context only is a new task");
    let begun = world.next().await;
    let stream = world.updates(Send::to(&parked, "3").queue().follow(Follow::Result)).await.expect("waits");
    assert_eq!(world.entries().await, 1);
    world.finish(&begun, 3, vec![status(S::Completed)]).await;
    let begun = world.next().await;
    assert_eq!(begun.turn.task.as_ref().map(|task| &task.id), Some(&parked.id));
    assert_eq!(begun.turn.message.as_ref().map(text), Some("3".into()));
    world.finish(&begun, begun.turn.next_event, vec![status(S::Completed)]).await;
    assert_eq!(shorts(stream).await, ["6 task COMPLETED"]);
}

#[tokio::test]
async fn too_many_waiting_turns_are_refused_with_a_time_to_come_back() {
    let world = World::with(engine(1), 1, &rialto_task_store::Options::default());
    for n in 0..4 {
        let sent = world.send(Send::new("x").policy(|policy| policy.max_turns = 3)).await;
        assert_eq!(sent.is_ok(), n < 3, "{n}");
        if let Err(refused) = sent {
            assert_eq!(refused.kind, Kind::QueueFull);
            assert!(refused.retry_after.is_some());
        }
    }
    let sent = world.send(Send::new("x").queue()).await.expect("no bound of its own");
    let mut refused = 0;
    for _ in 0..40 {
        let waits = world.send(Send::new("x").queue().context(&sent.context_id)).await;
        refused += u32::from(waits.is_err_and(|error| error.kind == Kind::QueueFull));
    }
    assert_eq!(refused, 8, "a context lets 32 wait");
}

#[tokio::test]
async fn a_hidden_task_is_known_to_its_sender_only() {
    let world = World::new();
    let hidden = Send::new("hi").policy(|policy| policy.hidden = true);
    let result = world.updates(hidden.clone().follow(Follow::Result)).await.expect("sends");
    let stream = world.updates(hidden.clone().follow(Follow::Turn)).await.expect("sends");
    let at_once = world.updates(hidden.clone().follow(Follow::None)).await.expect("sends");
    let begun = world.next().await;
    let id = begun.run.run.task_id.clone();
    assert_eq!(kind(world.get_as("", &id, None).await), Kind::TaskNotFound);
    assert_eq!(kind(world.cancel(&id).await), Kind::TaskNotFound);
    assert_eq!(kind(world.watch(&id, None).await.map(drop)), Kind::TaskNotFound);
    let answer = rialto_a2a::v1::StreamResponse {
        payload: Some(rialto_a2a::v1::stream_response::Payload::Message(said(Role::Agent, "ho"))),
    };
    assert_eq!(world.finish(&begun, 3, vec![answer]).await, Outcome::Ok);
    assert_eq!(shorts(result).await, ["3 message ho"]);
    assert_eq!(shorts(stream).await, ["3 message ho"]);
    assert_eq!(shorts(at_once).await, ["3 message ho"], "returnImmediately changes nothing");
    let again = world.updates(hidden.follow(Follow::Result)).await.expect("repeats");
    assert_eq!(shorts(again).await, ["3 message ho"]);
    assert_eq!(world.list("", Default::default()).await.expect("lists").total_size, 0);
}

#[tokio::test]
async fn the_answer_of_a_hidden_task_names_no_task_that_nobody_can_get() {
    let world = World::new();
    let hidden = || Send::new("hi").policy(|policy| policy.hidden = true).follow(Follow::Result);
    let mut updates = world.updates(hidden()).await.expect("sends");
    let begun = world.next().await;
    let answer = rialto_a2a::v1::StreamResponse {
        payload: Some(rialto_a2a::v1::stream_response::Payload::Message(said(Role::Agent, "ho"))),
    };
    world.finish(&begun, 3, vec![answer]).await;
    let event = updates.next().await.expect("an update").expect("no error").event.expect("an event");
    let Some(rialto_a2a::v1::stream_response::Payload::Message(message)) = event.payload else { panic!("{event:?}") };
    assert_eq!((message.task_id.as_str(), message.context_id.is_empty()), ("", false));

    let mut updates = world.updates(hidden()).await.expect("sends");
    let begun = world.next().await;
    world.finish(&begun, 3, vec![status(S::Failed)]).await;
    let error = updates.next().await.expect("an update").expect_err("a failure is no answer");
    assert_eq!(rialto_a2a::Error::from_status(&error).kind, Kind::InvalidAgentResponse);
}

#[tokio::test]
async fn conversations_do_not_leak() {
    let world = World::new();
    let window = |begin: &mut rialto_rpc::tasks::BeginRequest| {
        begin.window_messages = 3;
        begin.window_bytes = 1000;
    };
    let mut context: Option<String> = None;
    let mut seen = Vec::new();
    for n in 0..5 {
        let mut send = Send::new(&format!("q{n}"));
        if let Some(context) = &context {
            send = send.context(context);
        }
        context = Some(world.send(send).await.expect("sends").context_id);
        world.send(Send::new("noise").owner("b").context(context.as_ref().expect("set"))).await.expect("sends");
        while let Some(run) = world.claim("r").await {
            let begun = world.begin_with(&run, window).await.expect("a turn");
            let asked = begun.turn.message.as_ref().map(text).expect("a message");
            if asked != "noise" {
                seen.push(begun.turn.conversation.iter().map(text).collect::<Vec<_>>().join(" "));
            }
            let answer = vec![said(Role::Agent, &asked.replace('q', "a"))];
            world.finish_with(&begun, 3, vec![status(S::Completed)], |finish| finish.history = answer).await;
        }
        // Tasks are ordered by the time of their last status.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    assert_eq!(seen, ["", "q0 a0", "a0 q1 a1", "a1 q2 a2", "a2 q3 a3"]);
}

#[tokio::test]
async fn a_client_that_hangs_up_changes_nothing() {
    let world = World::new();
    let mut stream = world.updates(Send::new("hi").follow(Follow::Turn)).await.expect("sends");
    let id = task(one(&mut stream).await).id;
    let begun = world.next().await;
    stream.next().await;
    drop(stream);
    assert_eq!(world.finish(&begun, 3, vec![status(S::Completed)]).await, Outcome::Ok);
    assert_eq!(state(&world.get(&id).await), S::Completed);
    assert!(format!("{:?}", world.calls()).contains("watched: 0"), "no tail is left behind");
}
