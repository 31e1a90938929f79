//! Start-up: what is refused, and with which words.

use rialto_store::{
    Engine,
    redis::{OpenError, RedisConfig, RedisEngine},
};
use rialto_testkit::redis::{Options, RedisServer};

use crate::{append, batch, claim, connect, one, payloads, put};

async fn refused(config: RedisConfig) -> String {
    RedisEngine::connect(config).await.map(drop).unwrap_err().to_string()
}

#[tokio::test]
async fn an_eviction_policy_that_drops_tasks_is_refused() {
    let server = Options::new().args(["--maxmemory-policy", "allkeys-lru"]).start().await.unwrap();
    let text = refused(RedisConfig::new(server.url())).await;
    let expected = format!(
        "redis at {} has maxmemory-policy allkeys-lru and would drop tasks; set it to noeviction",
        server.address()
    );
    assert_eq!(text, expected);
}

#[tokio::test]
async fn the_number_of_shards_is_fixed_at_install() {
    let (server, engine) = one().await;
    assert_eq!(engine.shards(), 1);
    let config =
        |prefix: &str, shards| RedisConfig { prefix: prefix.to_owned(), shards, ..RedisConfig::new(server.url()) };
    let error = RedisEngine::connect(config("rialto:", Some(4))).await.map(drop).unwrap_err();
    assert_eq!(error, OpenError::Shards { stored: 1, asked: 4 });
    assert_eq!(
        error.to_string(),
        "the store has 1 shards and the configuration says 4; the number cannot be changed: set redis.shards to 1"
    );
    let other = RedisEngine::connect(config("other:", Some(4))).await.unwrap();
    assert_eq!(other.shards(), 4);
    assert_eq!(RedisEngine::connect(config("other:", None)).await.unwrap().shards(), 4);
    // Two installations do not see one another.
    engine.commit(batch(vec![put("r", b"")])).await.unwrap();
    assert_eq!(other.get(0, &["r"]).await.unwrap(), [None]);
    assert!(refused(config("x{y}", None)).await.contains("must not have braces"));
    assert_eq!(refused(config("z:", Some(0))).await, "redis: shards must be from 1 to 256");
}

#[tokio::test]
async fn replicas_sentinels_and_silence_are_told_apart() {
    let server = RedisServer::start().await.unwrap();
    let replica = Options::new().args(["--replicaof", "127.0.0.1", &server.port().to_string()]).start().await.unwrap();
    let text = refused(RedisConfig::new(replica.url())).await;
    assert!(
        text.contains(&format!("redis at {} is a replica; give the url of the master", replica.address())),
        "{text}"
    );
    let address = server.address();
    drop(server);
    let text = refused(RedisConfig::new(format!("redis://:hunter2@{address}"))).await;
    assert!(
        text.starts_with(&format!("redis cannot be reached at {address}: ")) && !text.contains("hunter2"),
        "{text}"
    );
}

#[tokio::test]
async fn a_user_with_just_the_rights_of_the_documentation_can_do_everything() {
    let rules = "~rialto:* &rialto:* +@read +@write +@stream +@scripting +@pubsub +@connection +info +time +role \
                 +cluster|slots +config|get +client|id +client|unblock +function|load";
    let server = Options::new().user("ann", "p@ss/word", rules).start().await.unwrap();
    let url = |user: &str| server.url().replace("redis://", &format!("redis://{user}@"));
    let text = refused(RedisConfig::new(url("ann:wrong"))).await;
    assert!(
        text.contains(" refuses: ") && text.contains("check user and password") && !text.contains("wrong@"),
        "{text}"
    );
    assert!(refused(RedisConfig::new(server.url())).await.contains(" refuses: "));

    let engine = connect(&url("ann:p%40ss%2Fword")).await;
    let mut notices = engine.listen(0, "topic").await.unwrap();
    let notify = rialto_store::Op::Notify { topic: "topic".to_owned(), payload: "x".to_owned() };
    engine.commit(batch(vec![put("r", b""), append("runs", "a"), notify])).await.unwrap();
    assert_eq!(notices.recv().await.unwrap().payload, "x");
    let claimed = claim(&engine, "me", 1).await;
    assert_eq!(payloads(&claimed), ["a"]);
    engine.commit(batch(vec![crate::hand_back(&claimed[0])])).await.unwrap();
    assert_eq!(claim(&engine, "me", 1).await.len(), 1);
    assert!(engine.get(0, &["r", "x"]).await.unwrap()[0].is_some());
    engine.depth(0, "runs").await.unwrap();
    let waiting = rialto_store::Claim { wait: std::time::Duration::from_millis(50), ..crate::request("me", 1) };
    assert!(engine.claim(&waiting).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_user_without_the_rights_is_told_so_and_a_server_that_is_away_is_told_apart() {
    // It may read, and ask what kind of server it is; not load functions, nor note anything.
    let rules = "~rialto:* &rialto:* +@read +@connection +info +config|get";
    let server = Options::new().user("ann", "pass", rules).start().await.unwrap();
    let url = server.url().replace("redis://", "redis://ann:pass@");
    let error = RedisEngine::connect(RedisConfig::new(&url)).await.map(drop).unwrap_err();
    assert!(matches!(error, OpenError::Setup(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("the store cannot be set up in redis: ") && text.contains("hsetnx"), "{text}");
    // Once somebody else has, that is enough to start.
    server.command(&["HSET", "rialto:{s0}:meta", "shards", "1", "layout", "1"]).await.unwrap();
    connect(&url).await;
    server.kill().unwrap();
    let error = RedisEngine::connect(RedisConfig::new(&url)).await.map(drop).unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_store_of_another_version_is_left_alone() {
    let (server, engine) = one().await;
    drop(engine);
    server.command(&["HSET", "rialto:{s0}:meta", "layout", "2"]).await.unwrap();
    let text = refused(RedisConfig::new(server.url())).await;
    assert_eq!(text, "the store has layout 2 and this version of rialto works with 1; use the version that made it");
}
