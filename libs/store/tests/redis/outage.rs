//! Cuts, stalls, lost answers, full memory, missing functions.

use std::{sync::Arc, time::Duration};

use rialto_store::{
    Claim, Engine, Error, Op,
    redis::{RedisConfig, RedisEngine},
};
use rialto_testkit::{
    chaos::ChaosProxy,
    redis::{Options, RedisServer, Reply},
};
use tokio::time::Instant;

use crate::{again, append, batch, claim, named, one, payloads, put, request, within};

/// An engine that reaches its server through a proxy.
async fn proxied(deadline: Duration) -> (RedisServer, ChaosProxy, Arc<RedisEngine>) {
    let server = RedisServer::start().await.unwrap();
    let proxy = ChaosProxy::start(server.address()).await.unwrap();
    let config = RedisConfig { deadline, ..RedisConfig::new(format!("redis://{}", proxy.address())) };
    let engine = RedisEngine::connect(config).await.unwrap();
    (server, proxy, engine)
}

/// Behind the next connection may be a server that does not know what this one was told last: what was read by then
/// must not be believed any more.
#[tokio::test]
async fn listeners_look_again_before_there_is_another_server() {
    let (_server, proxy, engine) = proxied(Duration::from_secs(5)).await;
    let mut notices = engine.listen(0, "t").await.unwrap();
    let cuts = notices.cuts();
    proxy.cut();
    assert_eq!(within(5000, notices.recv()).await, None);
    assert!(notices.cuts() > cuts);
}

#[tokio::test]
async fn a_cut_connection_is_replaced_and_an_outage_is_answered_quickly() {
    let (_server, proxy, engine) = proxied(Duration::from_secs(5)).await;
    engine.commit(batch(vec![put("r", b"1")])).await.unwrap();
    let mut notices = engine.listen(0, "t").await.unwrap();
    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move {
            let ask = Claim { wait: Duration::from_secs(20), ..request("me", 1) };
            again("claiming", || engine.claim(&ask)).await
        }
    });
    // A blink is not even seen: the read waits for the new connection.
    proxy.cut();
    proxy.mend();
    assert!(engine.get(0, &["r"]).await.unwrap()[0].is_some());

    proxy.cut();
    let down = Instant::now();
    assert!(matches!(engine.get(0, &["r"]).await, Err(Error::Unavailable(_))));
    assert!(down.elapsed() < Duration::from_millis(2500), "{:?}", down.elapsed());
    let quick = Instant::now();
    assert!(matches!(engine.get(0, &["r"]).await, Err(Error::Unavailable(_))));
    assert!(matches!(engine.commit(batch(vec![put("r", b"no")])).await, Err(Error::Unavailable(_))));
    assert!(quick.elapsed() < Duration::from_millis(100), "{:?}", quick.elapsed());
    let tries = proxy.accepted();
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Three things reconnect: calls, the subscription, the claim. With back-off.
    assert!(proxy.accepted() - tries <= 12, "{} tries in a second", proxy.accepted() - tries);

    proxy.mend();
    let back = Instant::now();
    again("reading", || engine.get(0, &["r"])).await;
    assert!(back.elapsed() < Duration::from_secs(2), "{:?}", back.elapsed());
    // Listeners are told to look again, and then hear as before.
    assert_eq!(within(5000, notices.recv()).await, None);
    again("listening", || engine.listen(0, "t")).await;
    let notify = Op::Notify { topic: "t".to_owned(), payload: "x".to_owned() };
    engine.commit(batch(vec![notify, append("runs", "a")])).await.unwrap();
    let heard = within(5000, async {
        loop {
            if let Some(notice) = notices.recv().await {
                return notice.payload;
            }
        }
    });
    assert_eq!(heard.await, "x");
    assert_eq!(payloads(&within(5000, waiting).await.unwrap()), ["a"]);
}

#[tokio::test]
async fn a_half_open_connection_costs_one_deadline_and_is_then_replaced() {
    let (_server, proxy, engine) = proxied(Duration::from_millis(500)).await;
    engine.commit(batch(vec![put("r", b"1")])).await.unwrap();
    proxy.stall();
    let start = Instant::now();
    assert!(matches!(engine.get(0, &["r"]).await, Err(Error::Unavailable(_))));
    assert!((400..900).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    proxy.mend();
    again("reading", || engine.get(0, &["r"])).await;
    // Ends of streams are noticed even while nothing is asked.
    proxy.half_close();
    proxy.mend();
    again("reading", || engine.get(0, &["r"])).await;
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_happens_once_and_is_answered_with_its_first_result() {
    let (server, proxy, engine) = proxied(Duration::from_secs(5)).await;
    for id in 1..=5 {
        proxy.mute();
        let committing = tokio::spawn({
            let engine = Arc::clone(&engine);
            async move { engine.commit(named("r", id, vec![put("r", b"x"), append("log", "x")])).await }
        });
        within(3000, async {
            while server.command(&["XLEN", "rialto:{s0}:log"]).await.unwrap().int() < id.into() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        proxy.cut();
        proxy.mend();
        let committed = committing.await.unwrap().unwrap();
        assert_eq!(committed.versions, [u64::from(id)]);
        let log = engine.read_last(0, "log", 10).await.unwrap();
        assert_eq!((log.len(), log.last().unwrap().id), (usize::from(id), committed.entries[0]));
    }
    // Without an id nobody can know, and the caller is told so.
    proxy.mute();
    let committing = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move { engine.commit(batch(vec![append("log", "x")])).await }
    });
    within(3000, async {
        while server.command(&["XLEN", "rialto:{s0}:log"]).await.unwrap().int() < 6 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    proxy.cut();
    proxy.mend();
    assert!(matches!(committing.await.unwrap(), Err(Error::Unavailable(_))));
    assert_eq!(engine.read_last(0, "log", 10).await.unwrap().len(), 6);
}

#[tokio::test]
async fn entries_whose_claim_was_answered_into_a_cut_connection_come_with_the_next_claim() {
    let (server, proxy, engine) = proxied(Duration::from_secs(1)).await;
    assert!(claim(&engine, "me", 4).await.is_empty());
    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move { engine.claim(&Claim { wait: Duration::from_secs(10), ..request("me", 4) }).await }
    });
    within(5000, async {
        while server.info("blocked_clients").await.unwrap() < 1.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    proxy.mute();
    server.command(&["XADD", "rialto:{s0}:runs", "*", "t", "0", "p", "a"]).await.unwrap();
    within(5000, async {
        while server.command(&["XPENDING", "rialto:{s0}:runs", "workers"]).await.unwrap().list()[0].int() < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    proxy.cut();
    assert!(matches!(waiting.await.unwrap(), Err(Error::Unavailable(_))));
    proxy.mend();
    let ask = request("me", 4);
    let claimed = again("claiming", || engine.claim(&ask)).await;
    assert_eq!((payloads(&claimed), claimed[0].deliveries), (vec!["a"], 1));
}

#[tokio::test]
async fn a_server_that_lost_its_functions_gets_them_again() {
    let (server, engine) = one().await;
    server.command(&["FUNCTION", "FLUSH"]).await.unwrap();
    engine.commit(batch(vec![put("r", b"1")])).await.unwrap();
    server.command(&["FUNCTION", "FLUSH"]).await.unwrap();
    assert!(engine.get(0, &["r"]).await.unwrap()[0].is_some());
    server.command(&["FUNCTION", "FLUSH"]).await.unwrap();
    assert!(claim(&engine, "me", 1).await.is_empty());
    // All at once, after a restart with nothing kept.
    server.restart().await.unwrap();
    let many = (0..32).map(|n| {
        let engine = Arc::clone(&engine);
        tokio::spawn(async move {
            let key = format!("r{n}");
            again("committing", || engine.commit(named(&key, 1, vec![put(&key, b"")]))).await
        })
    });
    for one in futures::future::join_all(many).await {
        assert_eq!(one.unwrap().versions, [1]);
    }
}

#[tokio::test]
async fn with_a_full_memory_sends_are_refused_and_finishing_works() {
    let server = Options::new().args(["--maxmemory", "100mb"]).start().await.unwrap();
    let engine = crate::connect(&server.url()).await;
    engine.commit(batch(vec![put("r", b"1"), append("runs", "a"), append("runs", "b")])).await.unwrap();
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await.unwrap();
    assert_eq!(engine.commit(batch(vec![put("r", b"2")])).await, Err(Error::Full));
    assert!(Error::Full.retryable());
    let claimed = claim(&engine, "me", 2).await;
    assert_eq!(payloads(&claimed), ["a", "b"]);
    assert_eq!(engine.heartbeat(0, "runs", "me", &[claimed[0].entry.id]).await.unwrap(), [true]);
    let mut finish = named("r", 1, vec![put("r", b"done"), crate::ack(&claimed[0]), crate::hand_back(&claimed[1])]);
    finish.releasing = true;
    assert_eq!(engine.commit(finish).await.unwrap().versions, [2]);
    assert_eq!(payloads(&claim(&engine, "me", 2).await), ["b"]);
    assert!(engine.get(0, &["r"]).await.unwrap()[0].is_some());
    engine.tick(0, &["runs".to_owned()]).await.unwrap();
    server.command(&["CONFIG", "SET", "maxmemory", "100mb"]).await.unwrap();
    engine.commit(batch(vec![put("r", b"2")])).await.unwrap();
}

#[tokio::test]
async fn a_frozen_server_is_answered_for_at_the_deadline_and_works_on_when_it_thaws() {
    let server = RedisServer::start().await.unwrap();
    let deadline = Duration::from_millis(500);
    let engine = RedisEngine::connect(RedisConfig { deadline, ..RedisConfig::new(server.url()) }).await.unwrap();
    server.pause().unwrap();
    let start = Instant::now();
    let lost = engine.commit(named("r", 1, vec![put("r", b"1")])).await;
    assert!(matches!(lost, Err(Error::Unavailable(_))) && start.elapsed() < Duration::from_secs(1), "{lost:?}");
    server.resume().unwrap();
    // The first try may have happened; the repeat says the same in both cases.
    let again = again("committing", || engine.commit(named("r", 1, vec![put("r", b"1")]))).await;
    assert_eq!(again.versions, [1]);
}

#[tokio::test]
async fn after_flushall_the_store_is_noted_again_and_no_two_kinds_of_it_are_mixed() {
    let (server, engine) = one().await;
    let config = |shards| RedisConfig { shards: Some(shards), ..RedisConfig::new(server.url()) };
    server.command(&["FLUSHALL"]).await.unwrap();
    engine.commit(batch(vec![put("r", b"1")])).await.unwrap();
    let noted = async || server.command(&["HGET", "rialto:{s0}:meta", "shards"]).await.unwrap();
    within(30_000, async {
        while noted().await == Reply::Nil {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(RedisEngine::connect(config(2)).await.is_err(), "two processes see different stores");

    // Somebody is quicker, and has it otherwise.
    server.command(&["FLUSHALL"]).await.unwrap();
    let other = RedisEngine::connect(config(2)).await.unwrap();
    within(30_000, async {
        while engine.get(0, &["r"]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let refused = engine.commit(batch(vec![put("r", b"2")])).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("shards")), "{refused:?}");
    other.commit(batch(vec![put("r", b"3")])).await.unwrap();
    // And should it go back to what it was, so do we.
    drop(other);
    server.command(&["FLUSHALL"]).await.unwrap();
    again("reading", || engine.get(0, &["r"])).await;
}
