//! Claiming, giving back, taking over, waiting.

use std::{sync::Arc, time::Duration};

use rialto_store::{
    Batch, Claim, Depth, Engine, Error, Op,
    worker::{Handler, Outcome, Work, Worker},
};
use rialto_testkit::chaos::ChaosProxy;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{ack, append, batch, claim, connect, hand_back, one, payloads, request, within};

fn patient(consumer: &str) -> Claim {
    Claim { wait: Duration::from_secs(10), ..request(consumer, 4) }
}

#[tokio::test]
async fn a_waiting_claim_gets_new_work_at_once_also_after_longer_than_the_clients_own_time_out() {
    let (_server, engine) = one().await;
    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move { engine.claim(&patient("me")).await }
    });
    // The client's default response time-out is 500 ms.
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(!waiting.is_finished());
    let start = Instant::now();
    engine.commit(batch(vec![append("runs", "a")])).await.unwrap();
    let claimed = waiting.await.unwrap().unwrap();
    assert_eq!((payloads(&claimed), claimed[0].deliveries, claimed[0].entry.tag), (vec!["a"], 1, 7));
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_claim_takes_streams_in_order_and_never_more_than_asked_for() {
    let (_server, engine) = one().await;
    let streams = vec![(0, "first".to_owned()), (0, "second".to_owned())];
    let ask = |limit, wait| Claim { streams: streams.clone(), wait, ..request("me", limit) };
    engine.commit(batch(vec![append("second", "c"), append("first", "a"), append("first", "b")])).await.unwrap();
    let claimed = engine.claim(&ask(2, Duration::ZERO)).await.unwrap();
    assert_eq!(payloads(&claimed), ["a", "b"]);
    assert_eq!(payloads(&engine.claim(&ask(2, Duration::ZERO)).await.unwrap()), ["c"]);
    // The streams are empty now, so the next claim goes straight to a blocking read, which takes up to the
    // limit of each stream. What is too much goes back, to the front.
    engine.commit(batch(vec![append("first", "d"), append("second", "e"), append("second", "f")])).await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let claimed = engine.claim(&ask(1, Duration::from_secs(5))).await.unwrap();
        assert_eq!(claimed.len(), 1);
        seen.push(payloads(&claimed)[0].to_owned());
    }
    assert_eq!(seen, ["d", "e", "f"]);
    assert_eq!(engine.depth(0, "second").await.unwrap().pending, 3);
}

#[tokio::test]
async fn what_is_handed_back_wakes_a_waiting_claim_elsewhere_and_comes_before_younger_entries() {
    let (server, engine) = one().await;
    let other = connect(&server.url()).await;
    engine.commit(batch(vec![append("runs", "old")])).await.unwrap();
    let old = claim(&engine, "me", 1).await;
    let waiting = tokio::spawn({
        let other = Arc::clone(&other);
        async move { other.claim(&patient("you")).await }
    });
    until_blocked(&server, 1).await;
    let start = Instant::now();
    engine.commit(batch(vec![hand_back(&old[0])])).await.unwrap();
    let claimed = waiting.await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!((payloads(&claimed), claimed[0].entry.id, claimed[0].deliveries), (vec!["old"], old[0].entry.id, 2));
    // It was handed back by somebody who does not own it any more: nothing happens to it, and nobody else can.
    assert_eq!(engine.heartbeat(0, "runs", "me", &[old[0].entry.id]).await.unwrap(), [false]);
    assert_eq!(engine.heartbeat(0, "runs", "you", &[old[0].entry.id]).await.unwrap(), [true]);

    other.commit(batch(vec![append("runs", "young"), hand_back(&claimed[0])])).await.unwrap();
    assert_eq!(payloads(&claim(&other, "you", 4).await), ["old", "young"]);
}

async fn until_blocked(server: &rialto_testkit::redis::RedisServer, clients: u32) {
    within(10_000, async {
        while server.info("blocked_clients").await.unwrap() < clients.into() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn entries_without_a_sign_of_life_are_taken_over_right_after_the_lease_and_living_ones_never() {
    let (_server, engine) = one().await;
    engine.commit(batch(vec![append("runs", "dies"), append("runs", "lives")])).await.unwrap();
    let lease = Duration::from_millis(600);
    let mine = engine.claim(&Claim { lease, ..request("me", 2) }).await.unwrap();
    let start = Instant::now();
    let lives = mine[1].entry.id;
    let beating = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move {
            loop {
                tokio::time::sleep(Duration::from_millis(200)).await;
                assert_eq!(engine.heartbeat(0, "runs", "me", &[lives]).await.unwrap(), [true]);
            }
        }
    });
    // The owner itself is not handed its own entry again.
    assert!(claim(&engine, "me", 2).await.is_empty());
    let taken = engine.claim(&Claim { lease, ..patient("you") }).await.unwrap();
    let elapsed = start.elapsed();
    assert_eq!((payloads(&taken), taken[0].deliveries), (vec!["dies"], 2));
    assert!(elapsed >= lease - Duration::from_millis(50) && elapsed < lease * 2, "{elapsed:?}");
    assert!(!beating.is_finished());
    beating.abort();
    let stale = Batch {
        checks: vec![rialto_store::Check::Pending {
            stream: "runs".to_owned(),
            id: mine[0].entry.id,
            consumer: "me".to_owned(),
        }],
        ops: vec![ack(&mine[0])],
        ..Batch::default()
    };
    assert!(matches!(engine.commit(stale).await, Err(Error::Conflict { .. })));
}

#[tokio::test]
async fn pending_entries_whose_body_is_gone_neither_stop_nor_repeat_a_takeover() {
    let (server, engine) = one().await;
    let ops = (0..10).map(|n| append("runs", n.to_string())).collect();
    engine.commit(batch(ops)).await.unwrap();
    let mine = claim(&engine, "me", 10).await;
    server.command(&["XDEL", "rialto:{s0}:runs", &mine[0].entry.id.to_string()]).await.unwrap();
    assert_eq!(engine.heartbeat(0, "runs", "me", &[mine[0].entry.id]).await.unwrap(), [false]);
    server.command(&["XTRIM", "rialto:{s0}:runs", "MAXLEN", "3"]).await.unwrap();
    let lease = Duration::from_millis(50);
    let taken = engine.claim(&Claim { lease, limit: 20, ..patient("you") }).await.unwrap();
    assert_eq!(payloads(&taken), ["7", "8", "9"]);
    assert_eq!(engine.depth(0, "runs").await.unwrap().pending, 3);
    engine.commit(batch(taken.iter().chain(&mine).map(ack).collect())).await.unwrap();
    assert_eq!(engine.depth(0, "runs").await.unwrap(), Depth::default());
}

#[tokio::test]
async fn an_ack_of_an_entry_that_nobody_has_read_deletes_nothing() {
    let (server, engine) = one().await;
    let id = engine.commit(batch(vec![append("runs", "a")])).await.unwrap().entries[0];
    let ack = || batch(vec![Op::Ack { stream: "runs".to_owned(), id }]);
    engine.commit(ack()).await.unwrap();
    assert_eq!(payloads(&claim(&engine, "me", 1).await), ["a"]);
    engine.commit(ack()).await.unwrap();
    engine.commit(ack()).await.unwrap();
    assert!(engine.read_last(0, "runs", 1).await.unwrap().is_empty());
    let groups = server.command(&["XINFO", "GROUPS", "rialto:{s0}:runs"]).await.unwrap();
    assert_eq!(groups.list()[0].list()[11].int(), 0, "the lag is known");
}

#[tokio::test]
async fn delayed_entries_join_when_due_and_can_be_replaced_and_taken_back() {
    let (_server, engine) = one().await;
    let delay = |id: &str, due, payload: &'static str| Op::Delay {
        stream: "runs".to_owned(),
        id: id.to_owned(),
        due,
        tag: 255,
        payload: payload.into(),
    };
    let now = engine.now();
    let mut ops: Vec<_> = (0..300).map(|n| delay(&format!("n{n}"), now - 1000 + n, "x")).collect();
    ops.extend([delay("a", now - 5000, "old"), delay("a", now - 4000, "a"), delay("b", now + 60_000, "b")]);
    ops.extend([delay("c", now, "c"), Op::Undelay { stream: "runs".to_owned(), id: "c".to_owned() }]);
    engine.commit(batch(ops)).await.unwrap();
    assert_eq!(engine.depth(0, "runs").await.unwrap(), Depth { delayed: 302, ..Depth::default() });
    assert_eq!(engine.tick(0, &["other".to_owned(), "runs".to_owned()]).await.unwrap(), 256);
    assert_eq!(engine.tick(0, &["runs".to_owned()]).await.unwrap(), 45);
    assert_eq!(engine.tick(0, &["runs".to_owned()]).await.unwrap(), 0);
    let depth = engine.depth(0, "runs").await.unwrap();
    assert_eq!((depth.waiting, depth.pending, depth.delayed), (301, 0, 1));
    assert!((engine.now() - depth.oldest.unwrap()).abs() < 5000);
    let claimed = claim(&engine, "me", 1).await;
    assert_eq!((payloads(&claimed), claimed[0].entry.tag), (vec!["a"], 255));
}

#[tokio::test]
async fn depth_counts_what_was_handed_back_as_waiting() {
    let (_server, engine) = one().await;
    let ids = engine.commit(batch(vec![append("runs", "a"), append("runs", "b")])).await.unwrap().entries;
    let oldest = i64::try_from(ids[0].0).ok();
    let depth = |waiting, pending, oldest| Depth { waiting, pending, delayed: 0, oldest };
    assert_eq!(engine.depth(0, "runs").await.unwrap(), depth(2, 0, oldest));
    let claimed = claim(&engine, "me", 2).await;
    assert_eq!(engine.depth(0, "runs").await.unwrap(), depth(0, 2, None));
    engine.commit(batch(vec![hand_back(&claimed[0])])).await.unwrap();
    assert_eq!(engine.depth(0, "runs").await.unwrap(), depth(1, 1, oldest));
    assert_eq!(engine.depth(0, "none").await.unwrap(), Depth::default());
}

#[tokio::test]
async fn what_a_dropped_claim_had_read_comes_with_the_next_one() {
    let (server, engine) = one().await;
    // Makes the group, and leaves the stream drained.
    assert!(claim(&engine, "me", 4).await.is_empty());
    engine.commit(batch(vec![append("runs", "held")])).await.unwrap();
    let held = claim(&engine, "me", 4).await;
    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move { engine.claim(&patient("me")).await }
    });
    until_blocked(&server, 1).await;
    // What the reader gets and cannot deliver: as if the answer were on its way when the future is dropped.
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    engine.commit(batch(vec![append("runs", "lost")])).await.unwrap();
    server.command(&["XREADGROUP", "GROUP", "workers", "me", "STREAMS", "rialto:{s0}:runs", ">"]).await.unwrap();
    let claimed = claim(&engine, "me", 4).await;
    assert_eq!((payloads(&claimed), claimed[0].deliveries), (vec!["lost"], 1));
    assert_eq!(payloads(&held), ["held"]);
    // And its connection was closed, not left behind in a blocking read.
    assert_eq!(server.info("blocked_clients").await.unwrap(), 0.0);
}

#[tokio::test]
async fn a_group_or_stream_that_vanishes_is_made_again_from_the_beginning() {
    let (server, engine) = one().await;
    let key = "rialto:{s0}:runs";
    for destroy in [&["XGROUP", "DESTROY", key, "workers"][..], &["DEL", key], &["FLUSHALL"]] {
        assert!(claim(&engine, "me", 1).await.is_empty());
        let waiting = tokio::spawn({
            let engine = Arc::clone(&engine);
            async move { engine.claim(&patient("me")).await }
        });
        until_blocked(&server, 1).await;
        server.command(destroy).await.unwrap();
        engine.commit(batch(vec![append("runs", "a")])).await.unwrap();
        let claimed = within(3000, waiting).await.unwrap().unwrap();
        assert_eq!(payloads(&claimed), ["a"], "{destroy:?}");
        engine.commit(batch(vec![ack(&claimed[0])])).await.unwrap();
    }
    // Without anybody waiting, and with entries there already.
    engine.commit(batch(vec![append("runs", "b")])).await.unwrap();
    server.command(&["XGROUP", "DESTROY", key, "workers"]).await.unwrap();
    assert_eq!(payloads(&claim(&engine, "me", 4).await), ["b"]);
}

#[tokio::test]
async fn consumers_that_nobody_uses_any_more_are_removed_and_owners_are_not() {
    let (server, engine) = one().await;
    engine.commit(batch(vec![append("runs", "a")])).await.unwrap();
    assert_eq!(claim(&engine, "owner", 1).await.len(), 1);
    let key = "rialto:{s0}:runs";
    server.command(&["XGROUP", "CREATECONSUMER", key, "workers", "gone"]).await.unwrap();
    // The engine waits for an hour. Here the same function is told to wait for a millisecond.
    let libraries = server.command(&["FUNCTION", "LIST"]).await.unwrap();
    let function = format!("{}_claim", libraries.list()[0].list()[1].text());
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.command(&["FCALL", &function, "1", key, "new", "1", "0", "1", "0"]).await.unwrap();
    let consumers = server.command(&["XINFO", "CONSUMERS", key, "workers"]).await.unwrap();
    let names: Vec<_> = consumers.list().iter().map(|facts| facts.list()[1].text()).collect();
    assert_eq!(names, ["owner"]);
    assert_eq!(engine.depth(0, "runs").await.unwrap().pending, 1);
}

#[tokio::test]
async fn an_idle_worker_costs_less_than_two_calls_a_second() {
    let (server, engine) = one().await;
    // With one entry stuck at another consumer.
    engine.commit(batch(vec![append("runs", "stuck")])).await.unwrap();
    assert_eq!(claim(&engine, "other", 1).await.len(), 1);
    let streams = vec![(0, "runs".to_owned()), (0, "push".to_owned())];
    let lease = Duration::from_secs(15);
    let ask = Claim { streams, lease, wait: Duration::from_secs(5), ..request("me", 4) };
    let waiting = tokio::spawn({
        let (engine, ask) = (Arc::clone(&engine), Claim { wait: Duration::from_secs(1), ..ask });
        async move {
            loop {
                assert!(engine.claim(&ask).await.unwrap().is_empty());
            }
        }
    });
    until_blocked(&server, 1).await;
    server.command(&["CONFIG", "RESETSTAT"]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let calls = server.calls().await.unwrap();
    waiting.abort();
    // Redis also counts what functions do inside it; and connections may still have been opening.
    let others = ["time", "xpending", "xclaim", "xgroup", "xinfo", "hello", "client", "subscribe"];
    let sent = calls.iter().filter(|(name, _)| !others.iter().any(|other| name.starts_with(other)));
    // Even with claims five times as short as a worker's.
    assert!(sent.map(|(_, calls)| calls).sum::<u64>() <= 8, "{calls:?}");
}

/// Takes three leases for each entry, and counts who began what.
#[derive(Debug)]
struct Slow(Arc<std::sync::Mutex<Vec<String>>>);

#[async_trait::async_trait]
impl Handler for Slow {
    async fn handle(&self, work: Work) -> Outcome {
        let payload = String::from_utf8_lossy(&work.claimed.entry.payload).into_owned();
        self.0.lock().unwrap().push(payload);
        tokio::time::sleep(LEASE * 3).await;
        assert!(!work.lost.is_cancelled());
        Outcome::Ack
    }
}

const LEASE: Duration = Duration::from_millis(600);

#[tokio::test]
async fn a_slow_but_living_worker_is_not_taken_for_dead() {
    let (server, engine) = one().await;
    let begun = Arc::default();
    let stop = CancellationToken::new();
    let mut workers = Vec::new();
    for n in 0..3 {
        let worker = Worker {
            engine: connect(&server.url()).await,
            streams: vec![(0, "runs".to_owned())],
            consumer: format!("worker-{n}"),
            slots: 2,
            lease: LEASE,
            heartbeat: LEASE / 6,
            tick: None,
        };
        let handler = Arc::new(Slow(Arc::clone(&begun)));
        workers.push(tokio::spawn(worker.run(handler, stop.clone(), Duration::from_secs(5))));
    }
    engine.commit(batch((0..6).map(|n| append("runs", n.to_string())).collect())).await.unwrap();
    within(20_000, async {
        while begun.lock().unwrap().len() < 6 || engine.depth(0, "runs").await.unwrap() != Depth::default() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    let mut begun = begun.lock().unwrap().clone();
    begun.sort();
    assert_eq!(begun, ["0", "1", "2", "3", "4", "5"]);
}

/// Says what it was given.
#[derive(Debug)]
struct Telling(tokio::sync::mpsc::Sender<String>);

#[async_trait::async_trait]
impl Handler for Telling {
    async fn handle(&self, work: Work) -> Outcome {
        self.0.send(String::from_utf8_lossy(&work.claimed.entry.payload).into_owned()).await.unwrap();
        Outcome::Ack
    }
}

#[tokio::test]
async fn an_outage_longer_than_the_lease_takes_nothing_from_the_living() {
    let (server, engine) = one().await;
    let proxy = ChaosProxy::start(server.address()).await.unwrap();
    engine.commit(batch(vec![append("runs", "mine")])).await.unwrap();
    let held = engine.claim(&request("me", 1)).await.unwrap();
    let beat = async || engine.heartbeat(0, "runs", "me", &[held[0].entry.id]).await.unwrap();

    let lease = Duration::from_secs(1);
    let worker = Worker {
        engine: connect(&format!("redis://{}", proxy.address())).await,
        streams: vec![(0, "runs".to_owned())],
        consumer: "other".to_owned(),
        slots: 2,
        lease,
        heartbeat: lease / 3,
        tick: None,
    };
    let (told, mut given) = tokio::sync::mpsc::channel(9);
    let stop = CancellationToken::new();
    let worker = tokio::spawn(worker.run(Arc::new(Telling(told)), stop.clone(), lease));
    engine.commit(batch(vec![append("runs", "new")])).await.unwrap();
    assert_eq!(within(20_000, given.recv()).await.unwrap(), "new");
    assert_eq!(beat().await, [true]);

    proxy.cut();
    tokio::time::sleep(lease * 2).await;
    proxy.mend();
    engine.commit(batch(vec![append("runs", "newer")])).await.unwrap();
    // Who takes new entries would have taken over old ones first.
    assert_eq!(within(20_000, given.recv()).await.unwrap(), "newer");
    assert_eq!(beat().await, [true]);
    // Silence that no outage explains counts as before.
    assert_eq!(within(40_000, given.recv()).await.unwrap(), "mine");
    stop.cancel();
    worker.await.unwrap();
}
