//! Start-up: what is refused, and with which words.

use std::net::SocketAddr;

use rialto_store::{
    Engine,
    redis::{OpenError, RedisConfig, RedisEngine},
};
use rialto_testkit::redis::{Options, RedisCluster, RedisServer};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{batch, connect, documented_rights, documented_user, one, put};

/// A way to one server and then to another; to change it cuts what there is.
struct Switch {
    address: SocketAddr,
    target: watch::Sender<String>,
}

impl Switch {
    async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, target) = (listener.local_addr().unwrap(), watch::Sender::new(target));
        let targets = target.subscribe();
        tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let mut targets = targets.clone();
                tokio::spawn(async move {
                    let target = targets.borrow_and_update().clone();
                    let mut server = TcpStream::connect(target).await.unwrap();
                    tokio::select! {
                        copied = tokio::io::copy_bidirectional(&mut client, &mut server) => drop(copied),
                        changed = targets.changed() => drop(changed),
                    }
                });
            }
        });
        Self { address, target }
    }

    fn lead_to(&self, target: String) {
        self.target.send_replace(target);
    }
}

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
        "the number of shards is 1 in the store and 4 in the configuration; it cannot be changed: set redis.shards to 1"
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
async fn a_wrong_password_is_told_without_repeating_it() {
    let server = Options::new().user("ann", "p@ss/word", "+@all").start().await.unwrap();
    let text = refused(RedisConfig::new(server.url().replace("redis://", "redis://ann:wrong@"))).await;
    assert!(
        text.contains(" refuses: ") && text.contains("check user and password") && !text.contains("wrong@"),
        "{text}"
    );
    assert!(refused(RedisConfig::new(server.url())).await.contains(" refuses: "));
}

/// Takes each of these rights away, one at a time. (The contract suite runs with all that are documented.)
async fn each_is_missed(server: &RedisServer, rights: &[&str]) {
    let url = documented_user(&server.url(), std::slice::from_ref(server)).await;
    let set = async |rule: &[&str]| server.command(&[&["ACL", "SETUSER", "rialto"], rule].concat()).await.unwrap();
    connect(&url).await;
    for right in rights {
        let without = match right.split_at(1) {
            ("+", command) => vec![format!("-{command}")],
            ("~", _) => vec!["resetkeys".to_owned(), "~other:*".to_owned()],
            _ => vec!["resetchannels".to_owned(), "&other:*".to_owned()],
        };
        set(&without.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let error = RedisEngine::connect(RedisConfig::new(&url)).await.map(drop).unwrap_err();
        let expected = OpenError::Rights {
            place: server.address().to_string(),
            user: "rialto".to_owned(),
            rights: (*right).to_owned(),
        };
        // Nobody can ask without this one.
        let eval = *right == "+eval" && error.to_string().contains("'eval'");
        assert!(error == expected || eval, "{right}: {error}");
        set(&[*right]).await;
    }
    connect(&url).await;
}

const OF_CLUSTERS: [&str; 4] = ["+cluster|slots", "+asking", "+spublish", "+ssubscribe"];
/// For a warning.
const OPTIONAL: &str = "+config|get";

#[tokio::test]
async fn a_user_without_one_of_the_documented_rights_is_told_which_at_the_start() {
    let server = RedisServer::start().await.unwrap();
    let mut rights = documented_rights();
    rights.retain(|right| !OF_CLUSTERS.contains(right) && *right != OPTIONAL);
    each_is_missed(&server, &rights).await;
    // All that are missing are said at once.
    let url = documented_user(&server.url(), std::slice::from_ref(&server)).await;
    server.command(&["ACL", "SETUSER", "rialto", "-xack", "-info", "resetchannels", "-config|get"]).await.unwrap();
    let text = refused(RedisConfig::new(&url)).await;
    let expected = format!(
        "redis at {} does not let the user do all that is needed; what is missing: \
         ACL SETUSER rialto &rialto:* +info +xack",
        server.address()
    );
    assert_eq!(text, expected);
    // Nothing was written before that was known.
    assert_eq!(server.command(&["DBSIZE"]).await.unwrap().int(), 1, "the note of the connections before");
}

#[tokio::test]
async fn a_user_of_a_cluster_without_one_of_the_documented_rights_is_told_which_at_the_start() {
    let cluster = RedisCluster::start(1).await.unwrap();
    each_is_missed(&cluster.nodes[0], &OF_CLUSTERS).await;
}

#[tokio::test]
async fn a_server_that_is_away_is_told_apart_from_one_that_refuses() {
    let server = RedisServer::start().await.unwrap();
    connect(&server.url()).await;
    server.kill().unwrap();
    let error = RedisEngine::connect(RedisConfig::new(server.url())).await.map(drop).unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_database_that_the_server_does_not_have_is_refused() {
    let server = RedisServer::start().await.unwrap();
    connect(&format!("{}/3", server.url())).await;
    assert_eq!(
        refused(RedisConfig::new(format!("{}/99", server.url()))).await,
        format!(
            "redis at {} has no database 99: DB index is out of range; change the number at the end of the url",
            server.address()
        )
    );
    let cluster = RedisCluster::start(1).await.unwrap();
    let text = refused(RedisConfig::new(format!("{}/3", cluster.url()))).await;
    assert_eq!(text, "redis: a cluster has no databases; leave the number out of the url");
}

/// Answers everybody with this.
async fn stranger(words: impl Into<Vec<u8>>) -> String {
    let words = words.into();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            drop(stream.read(&mut [0; 64]).await);
            drop(stream.write_all(&words).await);
            // Not closed before what was asked is read: a reset would overtake the answer.
            tokio::spawn(async move { drop(tokio::io::copy(&mut stream, &mut tokio::io::sink()).await) });
        }
    });
    address.to_string()
}

#[tokio::test]
async fn something_else_than_redis_is_refused_and_what_it_says_is_said() {
    let http = stranger(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    for scheme in ["redis://", "redis://:hunter2@"] {
        assert_eq!(
            refused(RedisConfig::new(format!("{scheme}{http}"))).await,
            format!(
                "what answers at {http} cannot be used as redis: it answers \"HTTP/1.1 400 Bad Request\"; \
                 check host, port and scheme of the url"
            )
        );
    }
    for words in [&b"SSH-2.0-OpenSSH_9.2\r\n"[..], b"\x15\x03\x01\x00\x02\x02\x46", b"\xff\xfe\xfd\xfc"] {
        let place = stranger(words).await;
        let text = refused(RedisConfig::new(format!("redis://{place}"))).await;
        assert!(text.starts_with(&format!("what answers at {place} cannot be used as redis: ")), "{text}");
    }
    let text = refused(RedisConfig::new(format!("redis+sentinel://{http}/main"))).await;
    assert!(text.starts_with("what answers at the master \"main\" of the sentinels cannot be used"), "{text}");
    // The right one, by the wrong scheme.
    let server = RedisServer::start().await.unwrap();
    for url in [format!("rediss://{http}"), format!("redis+sentinel://{}/main", server.address())] {
        let error = RedisEngine::connect(RedisConfig::new(&url)).await.map(drop).unwrap_err();
        assert!(matches!(error, OpenError::Stranger { .. }), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_is_only_busy_is_waited_for() {
    for words in [
        "-LOADING Redis is loading the dataset in memory\r\n",
        "-MASTERDOWN Link with MASTER is down\r\n",
        "-ERR max number of clients reached\r\n",
        "-BUSY Redis is busy running a script\r\n",
        "",
    ] {
        // Once for each command that a connection begins with, and then for the next one.
        let place = stranger(words.repeat(5)).await;
        let error = RedisEngine::connect(RedisConfig::new(format!("redis://{place}/1"))).await.map(drop).unwrap_err();
        assert!(matches!(error, OpenError::Unreachable { .. }), "{words}: {error}");
    }
}

#[tokio::test]
async fn a_running_engine_outlives_nonsense_on_the_way() {
    let (server, _) = one().await;
    let nonsense = stranger(b"HTTP/1.1 502 Bad Gateway\r\n\r\n").await;
    let proxy = Switch::start(server.address().to_string()).await;
    let engine = connect(&format!("redis://{}", proxy.address)).await;
    engine.commit(batch(vec![put("r", b"")])).await.unwrap();
    proxy.lead_to(nonsense);
    let refused = engine.get(0, &["r"]).await;
    assert!(matches!(refused, Err(rialto_store::Error::Unavailable(_))), "{refused:?}");
    proxy.lead_to(server.address().to_string());
    assert!(crate::again("reading", || engine.get(0, &["r"])).await[0].is_some());
}

#[tokio::test]
async fn a_store_of_another_version_is_left_alone() {
    let (server, engine) = one().await;
    drop(engine);
    server.command(&["HSET", "rialto:{s0}:meta", "layout", "2"]).await.unwrap();
    let text = refused(RedisConfig::new(server.url())).await;
    assert_eq!(text, "the store has layout 2 and this version of rialto works with 1; use the version that made it");
}
