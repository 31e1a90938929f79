//! TLS, clusters, Sentinels.

use std::{sync::Arc, time::Duration};

use rialto_store::{
    Batch, Claim, Engine, Op, ReadLimit,
    redis::{RedisConfig, RedisEngine},
};
use rialto_testkit::redis::{Options, RedisCluster, SentinelGroup};

use crate::{ZERO, again, append, batch, claim, connect, named, payloads, put, request, shards, within};

#[tokio::test]
async fn tls_works_with_the_right_authority_and_with_no_other() {
    let server = Options::new().tls().start().await.unwrap();
    let ca = server.ca().map(|ca| ca.as_bytes().to_vec());
    let engine = RedisEngine::connect(RedisConfig { ca, ..RedisConfig::new(server.url()) }).await.unwrap();
    let mut notices = engine.listen(0, "t").await.unwrap();
    let notify = Op::Notify { topic: "t".to_owned(), payload: "x".to_owned() };
    engine.commit(batch(vec![append("runs", "a"), notify])).await.unwrap();
    assert_eq!(payloads(&claim(&engine, "me", 1).await), ["a"]);
    assert_eq!(notices.recv().await.unwrap().payload, "x");
    let wait = Duration::from_millis(20);
    assert!(engine.claim(&Claim { wait, ..request("me", 1) }).await.unwrap().is_empty());

    let error = RedisEngine::connect(RedisConfig::new(server.url())).await.map(drop).unwrap_err().to_string();
    assert!(error.contains("cannot be reached") && error.to_lowercase().contains("certificate"), "{error}");
}

/// Everything in every shard, with claims over all of them.
async fn exercise(engine: &Arc<RedisEngine>) {
    let mut notices = Vec::new();
    for shard in shards(engine) {
        notices.push(engine.listen(shard, "t").await.unwrap());
    }
    let streams: Vec<_> = shards(engine).map(|shard| (shard, "runs".to_owned())).collect();
    let ask = |limit| Claim { streams: streams.clone(), wait: Duration::from_secs(10), ..request("me", limit) };
    let waiting = tokio::spawn({
        let (engine, ask) = (Arc::clone(engine), ask(1));
        async move { engine.claim(&ask).await }
    });
    for shard in shards(engine) {
        let notify = Op::Notify { topic: "t".to_owned(), payload: shard.to_string() };
        let index = Op::Index { index: "i".to_owned(), member: "m".to_owned(), was: None, now: Some(shard.into()) };
        let ops = vec![put("r", b"x"), put("s", b"y"), append("runs", shard.to_string()), index, notify];
        engine.commit(Batch { shard, ..named("r", 1, ops) }).await.unwrap();
        assert!(engine.get(shard, &["r", "s"]).await.unwrap().iter().all(Option::is_some));
    }
    for (shard, notices) in shards(engine).zip(&mut notices) {
        assert_eq!(within(2000, notices.recv()).await.unwrap().payload, shard.to_string());
    }
    let mut seen: Vec<_> = waiting.await.unwrap().unwrap();
    while seen.len() < usize::from(engine.shards()) {
        let claimed = engine.claim(&ask(2)).await.unwrap();
        assert!((1..=2).contains(&claimed.len()), "{claimed:?}");
        seen.extend(claimed);
    }
    let mut numbers: Vec<_> = payloads(&seen).into_iter().map(str::to_owned).collect();
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), usize::from(engine.shards()), "each once");
    for claimed in &seen {
        assert_eq!(claimed.shard.to_string().as_bytes(), &claimed.entry.payload);
        let ack = Batch { shard: claimed.shard, ..batch(vec![crate::ack(claimed)]) };
        engine.commit(ack).await.unwrap();
        assert_eq!(engine.depth(claimed.shard, "runs").await.unwrap(), rialto_store::Depth::default());
    }
}

#[tokio::test]
async fn a_cluster_of_one_node_with_four_shards() {
    let cluster = RedisCluster::start(1).await.unwrap();
    let config = RedisConfig { shards: Some(4), ..RedisConfig::new(cluster.url()) };
    exercise(&RedisEngine::connect(config).await.unwrap()).await;
}

#[tokio::test]
async fn a_cluster_of_three_masters_also_while_a_shard_moves() {
    let cluster = RedisCluster::start(3).await.unwrap();
    // One node is enough to find the others.
    let engine = connect(&cluster.nodes[2].url()).await;
    assert_eq!(engine.shards(), 16);
    exercise(&engine).await;

    // Shard 0 lives in slot 11097, on the last node, and moves to the first one under load.
    let stop = tokio_util::sync::CancellationToken::new();
    let writing = tokio::spawn({
        let (engine, stop) = (Arc::clone(&engine), stop.clone());
        async move {
            let mut written = 0_u64;
            while !stop.is_cancelled() {
                let ops = vec![put("moving", b"x"), append("moved", written.to_string())];
                let mut batch = named("moving", 0, ops);
                batch.commit.as_mut().unwrap().1[..8].copy_from_slice(&written.to_be_bytes());
                engine.commit(batch).await.unwrap();
                written += 1;
            }
            written
        }
    });
    let mut notices = engine.listen(0, "t").await.unwrap();
    cluster.move_slot(11097, 2, 0).await.unwrap();
    let limit = ReadLimit { entries: 100_000, bytes: usize::MAX };
    let before = engine.read(0, "moved", ZERO, limit).await.unwrap().len();
    again("writing on", || async {
        let more = engine.read(0, "moved", ZERO, limit).await?.len();
        if more > before { Ok(()) } else { Err(rialto_store::Error::Unavailable("nothing written".to_owned())) }
    })
    .await;
    stop.cancel();
    let written = writing.await.unwrap();
    let entries = engine.read(0, "moved", ZERO, limit).await.unwrap();
    let expected: Vec<_> = (0..written).map(|n| n.to_string()).collect();
    assert!(entries.iter().map(|entry| &entry.payload[..]).eq(expected.iter().map(String::as_bytes)));
    // The subscription moves too, and says that something may be missing.
    assert_eq!(within(5000, notices.recv()).await, None);
    let notify = Op::Notify { topic: "t".to_owned(), payload: "x".to_owned() };
    engine.commit(batch(vec![notify])).await.unwrap();
    assert_eq!(within(5000, notices.recv()).await.unwrap().payload, "x");
}

#[tokio::test]
async fn a_fail_over_by_sentinel_is_followed_and_the_new_master_gets_what_it_lacks() {
    let group = SentinelGroup::start().await.unwrap();
    let engine = connect(&group.url()).await;
    exercise(&engine).await;
    engine.commit(named("r", 1, vec![put("r", b"before")])).await.unwrap();
    group.replicated().await.unwrap();
    // As if the replica had never heard of the functions.
    group.servers[1].command(&["CONFIG", "SET", "replica-read-only", "no"]).await.unwrap();
    group.servers[1].command(&["FUNCTION", "FLUSH"]).await.unwrap();
    group.servers[1].command(&["CONFIG", "SET", "replica-read-only", "yes"]).await.unwrap();

    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move {
            let ask = Claim { wait: Duration::from_secs(20), ..request("me", 1) };
            again("claiming", || engine.claim(&ask)).await
        }
    });
    group.servers[0].kill().unwrap();
    let start = tokio::time::Instant::now();
    let refused = engine.commit(named("r", 2, vec![put("r", b"during")])).await;
    assert!(matches!(refused, Err(rialto_store::Error::Unavailable(_))), "{refused:?}");
    assert!(start.elapsed() < Duration::from_secs(5), "a call hangs no longer than its deadline");
    again("committing", || engine.commit(named("r", 3, vec![put("r", b"after"), append("runs", "a")]))).await;
    assert_eq!(engine.get(0, &["r"]).await.unwrap()[0].as_ref().unwrap().version, 2);
    assert_eq!(payloads(&within(15_000, waiting).await.unwrap()), ["a"]);
}

#[tokio::test]
async fn a_planned_fail_over_is_followed_although_the_old_master_still_answers() {
    let group = SentinelGroup::start().await.unwrap();
    let engine = connect(&group.url()).await;
    let mut notices = engine.listen(0, "t").await.unwrap();
    engine.commit(named("r", 1, vec![put("r", b"before")])).await.unwrap();
    group.replicated().await.unwrap();
    let waiting = tokio::spawn({
        let engine = Arc::clone(&engine);
        async move {
            let ask = Claim { wait: Duration::from_secs(20), ..request("me", 1) };
            again("claiming", || engine.claim(&ask)).await
        }
    });
    group.fail_over().await.unwrap();
    // The old master goes on taking writes for some ten seconds, and forgets them then.
    within(5000, async {
        // A Sentinel cuts all connections of a server whose role it changes, also this one.
        let role = async || group.servers[1].command(&["ROLE"]).await;
        while !role().await.is_ok_and(|role| role.list()[0].text() == "master") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let notify = || Op::Notify { topic: "t".to_owned(), payload: "x".to_owned() };
    within(5000, async {
        loop {
            again("committing", || engine.commit(batch(vec![put("r", b"after")]))).await;
            let there = group.servers[1].command(&["GETRANGE", "rialto:{s0}:r", "-5", "-1"]).await;
            if there.is_ok_and(|there| there.text() == "after") {
                break;
            }
        }
    })
    .await;
    again("committing", || engine.commit(named("s", 1, vec![put("s", b""), append("runs", "a"), notify()]))).await;
    assert_eq!(payloads(&within(15_000, waiting).await.unwrap()), ["a"]);
    let heard = within(10_000, async {
        loop {
            match notices.recv().await {
                Some(notice) => return notice.payload,
                // Something may be missing: the caller looks, and here says it again.
                None => drop(engine.commit(batch(vec![notify()])).await),
            }
        }
    });
    assert_eq!(heard.await, "x");
}

#[tokio::test]
async fn sentinels_that_want_a_password_get_it() {
    let group = SentinelGroup::start().await.unwrap();
    for sentinel in &group.sentinels {
        let rules = ["ACL", "SETUSER", "ann", "on", ">sesame", "+@all", "&*"];
        sentinel.command(&rules).await.unwrap();
        sentinel.command(&["ACL", "SETUSER", "default", "resetpass", ">unknown"]).await.unwrap();
    }
    let refused = async |query: &str| {
        let config = RedisConfig::new(format!("{}{query}", group.url()));
        RedisEngine::connect(config).await.map(drop).unwrap_err().to_string()
    };
    for query in ["", "?sentinel-user=ann&sentinel-password=guess"] {
        let text = refused(query).await;
        assert!(text.contains("refuses") && !text.contains("guess"), "{text}");
    }
    let engine = connect(&format!("{}?sentinel-user=ann&sentinel-password=sesame", group.url())).await;
    engine.commit(batch(vec![put("r", b"1")])).await.unwrap();
}
