//! What operators see and do.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{
    AgentRef, DeadEntry, DropDeadReply, DropDeadRequest, GetDeadRequest, InspectRequest, ListDeadReply,
    ListDeadRequest, ListStuckRequest, Outcome, Queue, QueuesRequest, ReplayDeadReply, ReplayDeadRequest, Runner,
    RunnersRequest, StuckTask, TaskFacts, admin_server::Admin as _,
};
use rialto_store::{At, Batch, Engine, Op, worker};
use rialto_task_store::Options;
use tonic::Request;

use crate::{
    engine::{TIME_CAN_STAND_STILL, engine},
    world::*,
};

fn agents() -> Vec<AgentRef> {
    vec![AgentRef { id: AGENT.into(), lease_ms: 1000 }]
}

async fn queue(world: &World) -> Queue {
    let request = QueuesRequest { agents: agents() };
    let mut queues = world.calls().queues(Request::new(request)).await.expect("answers").into_inner().queues;
    assert_eq!(queues.len(), 1, "{queues:?}");
    queues.remove(0)
}

async fn runners(world: &World) -> Vec<Runner> {
    let request = RunnersRequest { agents: agents() };
    world.calls().runners(Request::new(request)).await.expect("answers").into_inner().runners
}

async fn dead(world: &World, with: impl FnOnce(&mut ListDeadRequest)) -> ListDeadReply {
    let mut request = ListDeadRequest::default();
    with(&mut request);
    world.calls().list_dead(Request::new(request)).await.expect("answers").into_inner()
}

async fn show(world: &World, id: &str) -> Result<DeadEntry, Error> {
    let shown = world.calls().get_dead(Request::new(GetDeadRequest { id: id.into() })).await;
    shown.map(tonic::Response::into_inner).map_err(|status| error(&status))
}

async fn replay(world: &World, replica: usize, id: &str) -> Result<ReplayDeadReply, Error> {
    let replayed = world.replicas[replica].replay_dead(Request::new(ReplayDeadRequest { id: id.into() })).await;
    replayed.map(tonic::Response::into_inner).map_err(|status| error(&status))
}

async fn drop_dead(world: &World, request: DropDeadRequest) -> Result<DropDeadReply, Error> {
    let dropped = world.calls().drop_dead(Request::new(request)).await;
    dropped.map(tonic::Response::into_inner).map_err(|status| error(&status))
}

async fn stuck(world: &World, with: impl FnOnce(&mut ListStuckRequest)) -> Vec<StuckTask> {
    let mut request = ListStuckRequest { agents: agents(), ..ListStuckRequest::default() };
    with(&mut request);
    let mut all = Vec::new();
    loop {
        let reply = world.calls().list_stuck(Request::new(request.clone())).await.expect("answers").into_inner();
        all.extend(reply.tasks);
        if reply.next.is_empty() {
            return all;
        }
        request.after = reply.next;
    }
}

async fn facts(world: &World, id: &str, content: bool) -> Result<TaskFacts, Error> {
    let request = InspectRequest { id: id.into(), agents: agents(), content };
    let found = world.calls().inspect(Request::new(request)).await;
    found.map(tonic::Response::into_inner).map_err(|status| error(&status))
}

/// A task that crashed once too often, and its dead entry.
async fn poisoned(world: &World, send: Send) -> (rialto_a2a::v1::Task, String) {
    let before: BTreeSet<_> = dead(world, |_| {}).await.entries.into_iter().map(|entry| entry.id).collect();
    let sent = world.send(send).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    world.begin_with(&run, |begin| begin.max_attempts = 1).await.expect("a turn");
    let run = world.claim_after("r2", Duration::ZERO).await.expect("taken over");
    assert!(world.begin_with(&run, |begin| begin.max_attempts = 1).await.is_none());
    let entries = dead(world, |list| list.limit = 500).await.entries;
    let new: Vec<_> = entries.into_iter().filter(|entry| !before.contains(&entry.id)).collect();
    assert_eq!(new.len(), 1, "{new:?}");
    (sent, new[0].id.clone())
}

/// Dead entries of nobody's making, in every shard in turn.
async fn bury(engine: &Arc<dyn Engine>, agent: &str, count: usize) {
    let shards = usize::from(engine.shards());
    for shard in 0..shards {
        let mine = count / shards + usize::from(shard < count % shards);
        for batch in (0..mine).collect::<Vec<_>>().chunks(500) {
            let entry = worker::DeadEntry {
                stream: format!("runs:{agent}"),
                id: "1-1".parse().expect("an id"),
                tag: 0,
                payload: "rubbish \u{1b}[2J".into(),
                deliveries: 5,
                reason: "it fell\nover".into(),
                at: engine.now(),
            };
            let payload = entry.encode().into();
            let op = Op::Append { stream: worker::DEAD.into(), at: At::Next, tag: 0, payload, into: None };
            let shard = shard.try_into().expect("few");
            let batch = Batch { shard, ops: vec![op; batch.len()], ..Batch::default() };
            engine.commit(batch).await.expect("commits");
        }
    }
}

#[tokio::test]
async fn queues_count_what_waits_what_runs_and_what_was_given_up() {
    let world = World::new();
    assert_eq!(queue(&world).await, Queue { agent: AGENT.into(), ..Queue::default() });
    for n in 0..3 {
        world.send(Send::new(&n.to_string())).await.expect("sends");
    }
    let begun = world.next().await;
    let now = queue(&world).await;
    assert_eq!((now.length, now.lag, now.pending, now.delayed, now.dead, now.runners), (3, 2, 1, 0, 0, 1), "{now:?}");
    assert!(now.oldest_ms.is_some_and(|age| age < 60_000), "{now:?}");
    world.finish(&begun, 3, vec![status(S::Completed)]).await;
    world.run_to(S::Completed).await;
    world.run_to(S::Completed).await;
    poisoned(&world, Send::new("bad")).await;
    let now = queue(&world).await;
    assert_eq!((now.length, now.lag, now.pending, now.oldest_ms, now.dead), (0, 0, 0, None, 1), "{now:?}");
    bury(&world.engine, "retired", 2).await;
    let request = QueuesRequest { agents: agents() };
    let queues = world.calls().queues(Request::new(request)).await.expect("answers").into_inner().queues;
    let counts: Vec<_> = queues.iter().map(|queue| (queue.agent.as_str(), queue.dead)).collect();
    assert_eq!(counts, [(AGENT, 1), ("retired", 2)], "what nobody asked about is not hidden");
}

#[tokio::test]
async fn runners_are_known_by_what_they_own_and_by_their_silence() {
    let world = World::new();
    assert_eq!(runners(&world).await, []);
    world.send(Send::new("1")).await.expect("sends");
    world.send(Send::new("2")).await.expect("sends");
    let name = worker::consumer_name("runner");
    world.claim(&name).await.expect("an entry");
    world.claim("odd").await.expect("an entry");
    let found = runners(&world).await;
    assert_eq!(found.iter().map(|one| one.turns).sum::<u64>(), 2, "{found:?}");
    assert!(found.iter().all(|one| one.alive && one.agents == [AGENT]), "{found:?}");
    let ours = found.iter().find(|one| one.consumer == name).expect("it is there");
    assert_eq!((ours.pid, ours.host.is_empty()), (std::process::id(), false));
    if TIME_CAN_STAND_STILL {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(20)).await;
        let found = runners(&world).await;
        assert!(found.iter().all(|one| !one.alive && one.idle_ms >= 20_000 && one.turns == 1), "{found:?}");
        assert_eq!(queue(&world).await.runners, 0);
    }
}

#[tokio::test]
async fn a_dead_entry_tells_its_story_and_junk_says_that_it_is() {
    let world = World::new();
    let (sent, id) = poisoned(&world, Send::new("bad")).await;
    let entry = show(&world, &id).await.expect("it is there");
    let run = entry.run.clone().expect("a run entry");
    assert_eq!((entry.agent.as_str(), run.task_id, entry.attempts), (AGENT, sent.id.clone(), 1));
    assert_eq!((entry.replay.as_str(), entry.task_state.as_str()), ("new-task", "TASK_STATE_FAILED"));
    assert!(entry.reason.starts_with("the agent crashed once"), "{}", entry.reason);
    assert_eq!(run.message_id, world.get(&sent.id).await.history[0].message_id);
    assert!(!format!("{entry:?}").contains("bad"), "nothing of the message is shown");

    bury(&world.engine, AGENT, 1).await;
    let junk = dead(&world, |_| {}).await.entries.into_iter().find(|entry| entry.id != id).expect("there are two");
    let junk = show(&world, &junk.id).await.expect("it is there");
    assert_eq!((junk.run.is_none(), junk.replay.as_str()), (true, "none"));
    assert!(junk.payload_hex.starts_with("72756262697368"), "{junk:?}");
    let refused = replay(&world, 0, &junk.id).await.expect_err("nothing to run");
    assert_eq!(refused.kind, Kind::UnsupportedOperation);
    assert!(refused.message.contains("no run entry"), "{refused}");
    for unknown in ["", "x", "0-1-1", "99-1-1", "65535-1-1"] {
        assert_eq!(show(&world, unknown).await.expect_err("nothing").kind, Kind::TaskNotFound, "{unknown}");
        assert_eq!(replay(&world, 0, unknown).await.expect_err("nothing").kind, Kind::TaskNotFound, "{unknown}");
    }
}

#[tokio::test]
async fn a_replayed_message_runs_once_however_often_it_is_replayed() {
    let world = World::with(engine(4), 2, &Options::default());
    let (sent, id) = poisoned(&world, Send::new("bad")).await;
    let (one, two) = tokio::join!(replay(&world, 0, &id), replay(&world, 1, &id));
    let (one, two) = (one.expect("replays"), two.expect("replays"));
    assert_eq!((&one.task_id, one.replay.as_str()), (&two.task_id, "new-task"));
    assert_ne!(one.task_id, sent.id, "what has failed stays so");
    let again = replay(&world, 1, &id).await.expect("again");
    assert_eq!((again.task_id, again.repeated), (one.task_id.clone(), true));
    assert_eq!(dead(&world, |_| {}).await.entries, []);

    let task = world.get(&one.task_id).await;
    assert_eq!((&task.context_id, state(&task)), (&sent.context_id, S::Submitted));
    assert_eq!(world.entries().await, 1);
    let begun = world.run_to(S::Completed).await;
    assert_eq!((text(&begun.turn.message.expect("a message")), begun.turn.attempt), ("bad".into(), 1));
    assert_eq!(state(&world.get(&one.task_id).await), S::Completed);
    assert_eq!(state(&world.get(&sent.id).await), S::Failed);
    assert!(world.claim("r1").await.is_none());
}

#[tokio::test]
async fn a_replay_waits_its_turn_in_a_busy_context() {
    let world = World::new();
    let (sent, id) = poisoned(&world, Send::new("bad")).await;
    let running = world.send(Send::new("next").context(&sent.context_id)).await.expect("sends");
    let begun = world.next().await;
    let replayed = replay(&world, 0, &id).await.expect("replays").task_id;
    let waiting = facts(&world, &replayed, false).await.expect("it is there");
    assert_eq!((waiting.waits_for.as_str(), waiting.context_holder), ("turn", running.id.clone()));
    assert!(waiting.detail.contains(&running.id), "{}", waiting.detail);
    assert_eq!(waiting.waiting.iter().map(|one| &one.task_id).collect::<Vec<_>>(), [&replayed]);
    world.finish(&begun, 3, vec![status(S::Completed)]).await;
    world.run_to(S::Completed).await;
    assert_eq!(state(&world.get(&replayed).await), S::Completed);
}

#[tokio::test]
async fn a_turn_that_lost_its_entry_is_queued_again_by_a_replay() {
    let world = World::new();
    // It is too late to begin it but for the replay.
    let soon = Send::new("hi").policy(|policy| policy.queue_timeout_ms = 1);
    let sent = world.send(soon).await.expect("sends");
    tokio::time::sleep(Duration::from_millis(5)).await;
    let run = world.claim("r1").await.expect("an entry");
    let (stream, entry) = (run.claim.stream.clone(), run.claim.entry.parse().expect("an id"));
    let op = Op::Bury { stream, id: entry, reason: "the handler panicked".into() };
    let shard = run.claim.shard.try_into().expect("a shard");
    world.engine.commit(Batch { shard, ops: vec![op], ..Batch::default() }).await.expect("buries");
    assert_eq!(facts(&world, &sent.id, false).await.expect("it is there").waits_for, "entry");
    let id = dead(&world, |_| {}).await.entries.remove(0).id;
    assert_eq!(show(&world, &id).await.expect("it is there").replay, "same-turn");
    let replayed = replay(&world, 0, &id).await.expect("replays");
    assert_eq!((replayed.task_id, replayed.replay.as_str()), (sent.id.clone(), "same-turn"));
    assert_eq!((world.entries().await, dead(&world, |_| {}).await.entries.len()), (1, 0));
    assert_eq!(replay(&world, 0, &id).await.expect_err("it is done").kind, Kind::TaskNotFound);
    world.run_to(S::Completed).await;
    assert_eq!(state(&world.get(&sent.id).await), S::Completed);
}

#[tokio::test]
async fn a_turn_that_is_queued_already_is_not_queued_twice() {
    let world = World::new();
    world.send(Send::new("hi")).await.expect("sends");
    let run = world.claim("r1").await.expect("an entry");
    // A second entry of the same turn is given up, and the first one is not.
    let op = Op::Append {
        stream: run.claim.stream.clone(),
        at: At::Next,
        tag: 0,
        payload: prost::Message::encode_to_vec(&run.run).into(),
        into: None,
    };
    let shard = run.claim.shard.try_into().expect("a shard");
    world.engine.commit(Batch { shard, ops: vec![op], ..Batch::default() }).await.expect("appends");
    let second = world.claim("r2").await.expect("an entry");
    let id = second.claim.entry.parse().expect("an id");
    let op = Op::Bury { stream: second.claim.stream, id, reason: "odd".into() };
    world.engine.commit(Batch { shard, ops: vec![op], ..Batch::default() }).await.expect("buries");
    let id = dead(&world, |_| {}).await.entries.remove(0).id;
    let refused = replay(&world, 0, &id).await.expect_err("it is queued");
    assert_eq!(refused.kind, Kind::UnsupportedOperation);
    assert!(refused.message.contains("queued already"), "{refused}");
    assert_eq!(drop_dead(&world, DropDeadRequest { id, ..Default::default() }).await.expect("drops").dropped, 1);
    assert_eq!(world.entries().await, 1);
}

#[tokio::test]
async fn ten_thousand_dead_entries_come_in_pages_and_go_in_bounded_steps() {
    const MANY: usize = 10_000;
    let world = World::new();
    bury(&world.engine, "gone", MANY).await;
    bury(&world.engine, AGENT, 3).await;
    assert_eq!(
        world
            .calls()
            .list_dead(Request::new(ListDeadRequest { limit: 501, ..Default::default() }))
            .await
            .map_err(|status| error(&status).kind)
            .expect_err("too large"),
        Kind::InvalidParams
    );
    let (mut seen, mut after, mut last) = (BTreeSet::new(), String::new(), 0);
    loop {
        let page = dead(&world, |list| (list.limit, list.after) = (500, after)).await;
        assert!(page.entries.len() <= 500);
        for entry in page.entries {
            let at: u64 = entry.id.split('-').nth(1).expect("a time").parse().expect("a number");
            assert!(at >= last, "the oldest first");
            last = at;
            assert!(seen.insert(entry.id), "none twice");
        }
        after = page.next;
        if after.is_empty() {
            break;
        }
    }
    assert_eq!(seen.len(), MANY + 3);
    // Those of one agent lie behind all others; a page may be short, and the walk goes on.
    let (mut found, mut after, mut pages) = (0, String::new(), 0);
    loop {
        let page = dead(&world, |list| (list.agent, list.after) = (AGENT.into(), after)).await;
        found += page.entries.len();
        pages += 1;
        after = page.next;
        if after.is_empty() {
            break;
        }
    }
    assert_eq!((found, pages > 1), (3, true));

    let request = QueuesRequest { agents: agents() };
    let queues = world.calls().queues(Request::new(request)).await.expect("answers").into_inner().queues;
    assert_eq!(queues.iter().map(|queue| queue.dead).collect::<Vec<_>>(), [3, MANY as u64]);
    let mut whole = DropDeadReply::default();
    let mut calls = 0;
    loop {
        let request = DropDeadRequest { agent: "gone".into(), until_at_ms: whole.until_at_ms, ..Default::default() };
        let reply = drop_dead(&world, request).await.expect("drops");
        assert!(reply.dropped <= 1100, "{reply:?}");
        whole = DropDeadReply { dropped: whole.dropped + reply.dropped, ..reply };
        calls += 1;
        if !whole.more {
            break;
        }
    }
    assert_eq!((whole.dropped, calls > 5), (MANY as u64, true));
    assert_eq!(queue(&world).await.dead, 3);
    let early = DropDeadRequest { until_at_ms: 1, ..Default::default() };
    assert_eq!(drop_dead(&world, early).await.expect("drops").dropped, 0, "they came later");
    assert_eq!(drop_dead(&world, DropDeadRequest::default()).await.expect("drops").dropped, 3);
    assert_eq!((queue(&world).await.dead, dead(&world, |_| {}).await.entries.len()), (0, 0));
}

#[tokio::test]
async fn large_dead_entries_make_short_pages() {
    let world = World::new();
    for _ in 0..12 {
        let entry = worker::DeadEntry {
            stream: format!("runs:{AGENT}"),
            id: "1-1".parse().expect("an id"),
            tag: 0,
            payload: vec![b'x'; 1 << 20].into(),
            deliveries: 1,
            reason: "r".repeat(100_000),
            at: world.engine.now(),
        };
        let payload = entry.encode().into();
        let op = Op::Append { stream: worker::DEAD.into(), at: At::Next, tag: 0, payload, into: None };
        world.engine.commit(Batch { shard: 1, ops: vec![op], ..Batch::default() }).await.expect("commits");
    }
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let page = dead(&world, |list| (list.limit, list.after) = (500, after)).await;
        assert!(page.entries.len() < 6, "{}", page.entries.len());
        found.extend(page.entries);
        after = page.next;
        if after.is_empty() {
            break;
        }
    }
    assert_eq!(found.len(), 12);
    assert!(found.iter().all(|entry| entry.bytes == 1 << 20 && entry.reason.len() < 10_000), "cut for people");
}

#[tokio::test]
async fn stuck_tasks_say_what_they_wait_for() {
    let world = World::new();
    let waits = async |id: &str| facts(&world, id, false).await.expect("it is there").waits_for;
    let sent = world.send(Send::new("1")).await.expect("sends");
    assert_eq!(waits(&sent.id).await, "runner", "nobody ever claimed anything");
    let begun = world.next().await;
    assert_eq!(waits(&sent.id).await, "agent");
    let behind = world.send(Send::new("2").queue().context(&sent.context_id)).await.expect("sends");
    let queued = world.send(Send::new("3")).await.expect("sends");
    let asks = world.send(Send::new("4")).await.expect("sends");

    let names = |found: Vec<StuckTask>| -> Vec<(String, String)> {
        let mut names: Vec<_> = found.into_iter().map(|task| (task.task_id, task.waits_for)).collect();
        names.sort_by_key(|(id, _)| [&sent.id, &behind.id, &queued.id, &asks.id].iter().position(|it| *it == id));
        names
    };
    let named = |id: &rialto_a2a::v1::Task, wait: &str| (id.id.clone(), wait.to_owned());
    assert_eq!(
        names(stuck(&world, |_| {}).await),
        [named(&behind, "turn"), named(&queued, "queue"), named(&asks, "queue")]
    );
    assert_eq!(
        names(stuck(&world, |list| (list.all, list.limit) = (true, 1)).await),
        [named(&sent, "agent"), named(&behind, "turn"), named(&queued, "queue"), named(&asks, "queue")]
    );
    assert_eq!(stuck(&world, |list| list.older_ms = 3_600_000).await, [], "they are young");
    assert_eq!(stuck(&world, |list| list.agent = "other".into()).await, []);

    // Whoever is next asks; and the other one as well.
    let mut asked = Vec::new();
    for end in [S::InputRequired, S::AuthRequired] {
        let next = world.next().await;
        world.finish(&next, 3, vec![status(end)]).await;
        asked.push(next.run.run.task_id);
    }
    assert_eq!(waits(&asked[0]).await, "input");
    assert_eq!(waits(&asked[1]).await, "authorization");
    let found = stuck(&world, |_| {}).await;
    let interrupted: BTreeSet<_> = found
        .iter()
        .filter(|task| asked.contains(&task.task_id))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|task| task.waits_for.as_str())
        .collect();
    assert_eq!(interrupted, BTreeSet::from(["authorization", "input"]));
    world.cancel(&asked[0]).await.expect("cancels");
    world.cancel(&asked[1]).await.expect("cancels");
    world.cancel(&sent.id).await.expect("cancels");
    assert_eq!(waits(&sent.id).await, "cancel");
    world.finish(&begun, 3, vec![]).await;
    assert_eq!(waits(&sent.id).await, "nothing");
    world.run_to(S::Completed).await;
    assert_eq!(stuck(&world, |list| list.all = true).await, [], "all is done");
}

#[tokio::test]
async fn a_silent_runner_is_told_from_one_at_work() {
    if !TIME_CAN_STAND_STILL {
        return;
    }
    let world = World::new();
    let sent = world.send(Send::new("1")).await.expect("sends");
    world.next().await;
    assert_eq!(stuck(&world, |_| {}).await, []);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(30)).await;
    let found = stuck(&world, |_| {}).await;
    assert_eq!((found[0].task_id.as_str(), found[0].waits_for.as_str()), (sent.id.as_str(), "lease"));
    assert!(found[0].detail.contains("silent for 30 s"), "{}", found[0].detail);
}

#[tokio::test]
async fn a_task_is_shown_without_what_it_says_unless_that_is_asked_for() {
    let world = World::new();
    let sent = world.send(Send::new("my password").owner("ann")).await.expect("sends");
    let begun = world.next().await;
    world.record(&begun, 3, vec![artifact("a", "a secret answer", false)]).await;
    let shown = facts(&world, &sent.id, false).await.expect("it is there");
    assert!(!format!("{shown:?}").contains("password") && !format!("{shown:?}").contains("secret"), "{shown:?}");
    assert_eq!((shown.owner.as_str(), shown.agent.as_str(), shown.messages), ("ann", AGENT, 1));
    assert_eq!((shown.state.as_str(), shown.first_event, shown.last_event), ("TASK_STATE_WORKING", 1, 3));
    let turn = shown.turn.expect("a turn");
    assert_eq!((turn.phase.as_str(), turn.attempts, turn.entry_exists), ("running", 1, true));
    assert_eq!(turn.fence, begun.turn.fence);
    assert_eq!((turn.consumer.as_str(), turn.consumer_alive), ("r1", true));
    assert_eq!(shown.artifacts.len(), 1);
    let content = facts(&world, &sent.id, true).await.expect("it is there").content.expect("asked for");
    assert_eq!(
        (text(&content.history[0]), parts(&content.artifacts[0].parts)),
        ("my password".into(), "a secret answer".into())
    );
    assert_eq!(world.finish(&begun, 4, vec![status(S::Completed)]).await, Outcome::Ok);
    assert_eq!(facts(&world, "nothing", false).await.expect_err("nothing").kind, Kind::TaskNotFound);
    assert_eq!(facts(&world, &unique(), false).await.expect_err("nothing").kind, Kind::TaskNotFound);
}
