//! Start-up: is this a Redis that keeps what it is given?

use std::{sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError, Value, aio::MultiplexedConnection};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::{
    config::{Place, RedisConfig, Target},
    installed,
    keys::Keys,
    link::{Link, Slots},
    node::master,
    rights, value,
};
use crate::Shard;

/// How long one server may take to answer at start.
const PATIENCE: Duration = Duration::from_secs(3);

/// Most shards of a store.
const MOST_SHARDS: Shard = 256;

/// Why the store cannot be opened: one line that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL cannot be read.
    #[error("redis url: {0}")]
    Url(String),
    /// A setting makes no sense.
    #[error("redis: {0}")]
    Setting(String),
    /// Nobody answers.
    #[error("redis cannot be reached at {place}: {reason}")]
    Unreachable {
        /// Host and port.
        place: String,
        /// What the network said.
        reason: String,
    },
    /// It answers, but not us.
    #[error("redis at {place} refuses: {reason}; check user and password in the url and what the user may do")]
    Denied {
        /// Host and port.
        place: String,
        /// What it said.
        reason: String,
    },
    /// It lets us in, but not do all that is needed.
    #[error(
        "redis at {place} does not let the user do all that is needed; what is missing: ACL SETUSER {user} {rights}"
    )]
    Rights {
        /// Host and port.
        place: String,
        /// Who we are there.
        user: String,
        /// In the form of an ACL rule.
        rights: String,
    },
    /// Something else listens there.
    #[error("what answers at {place} cannot be used as redis: {reason}; check host, port and scheme of the url")]
    Stranger {
        /// Host and port.
        place: String,
        /// What it does.
        reason: String,
    },
    /// It does not have the database.
    #[error("redis at {place} has no database {number}: {reason}; change the number at the end of the url")]
    Database {
        /// Host and port.
        place: String,
        /// As asked for.
        number: i64,
        /// What it said.
        reason: String,
    },
    /// It is too old.
    #[error("redis at {place} is version {found}; 7.0 or later is needed")]
    Version {
        /// Host and port.
        place: String,
        /// Its version.
        found: String,
    },
    /// It throws data away when its memory is full.
    #[error("redis at {place} has maxmemory-policy {policy} and would drop tasks; set it to noeviction")]
    Eviction {
        /// Host and port.
        place: String,
        /// Its policy.
        policy: String,
    },
    /// It is a replica or a Sentinel.
    #[error("redis at {place} is a {role}; give the url of the master, or redis+sentinel://host:port,…/<master name>")]
    Role {
        /// Host and port.
        place: String,
        /// What it is.
        role: &'static str,
    },
    /// The number of shards is not the one that the store was installed with.
    #[error(
        "the number of shards is {stored} in the store and {asked} in the configuration; it cannot be changed: set redis.shards to {stored}"
    )]
    Shards {
        /// As installed.
        stored: Shard,
        /// As configured.
        asked: Shard,
    },
    /// The store is of another version.
    #[error("the store has layout {stored} and this version of rialto works with {own}; use the version that made it")]
    Layout {
        /// As installed.
        stored: u32,
        /// What we know.
        own: u32,
    },
    /// It works, but refuses what the store needs.
    #[error("the store cannot be set up in redis: {0}; check what the user may do")]
    Setup(String),
}

/// Finds out what the URL leads to, checks it, and sets the store up there.
pub(super) async fn open(config: &RedisConfig) -> Result<Arc<Link>, OpenError> {
    if config.prefix.contains(['{', '}', '@', ' ', '\n']) {
        return Err(OpenError::Setting(format!("the prefix {:?} must not have braces or spaces", config.prefix)));
    }
    if config.shards.is_some_and(|shards| shards == 0 || shards > MOST_SHARDS) {
        return Err(OpenError::Setting(format!("shards must be from 1 to {MOST_SHARDS}")));
    }
    let target = Arc::new(Target::new(config)?);
    if target.tls() && rustls::crypto::CryptoProvider::get_default().is_none() {
        // Somebody else may do it at the same moment, which is as good.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    }
    let slots =
        if target.sentinel.is_some() { check_master(&target).await.map(|()| None)? } else { look(&target).await? };
    let connect = |shards| {
        let keys = Keys::new(&config.prefix, shards);
        match &slots {
            Some(slots) => Link::cluster(Arc::clone(&target), keys, config.deadline, slots),
            None => Link::single(Arc::clone(&target), keys, config.deadline),
        }
    };
    let default = if slots.is_some() { 16 } else { 1 };
    let asked = config.shards.unwrap_or(default);
    let link = connect(asked);
    let stored = installed::install(&link, asked).await?;
    if stored == asked {
        return Ok(link);
    }
    link.stop.cancel();
    match config.shards {
        Some(asked) => Err(OpenError::Shards { stored, asked }),
        None => Ok(connect(stored)),
    }
}

/// Checks all servers that the URL leads to. Answers the slots when it is a cluster.
async fn look(target: &Target) -> Result<Option<Slots>, OpenError> {
    let mut first = Err(OpenError::Url("it names no host".to_owned()));
    let mut place = &target.hosts[0];
    for host in &target.hosts {
        place = host;
        first = inspect(target, host).await;
        if first.is_ok() {
            break;
        }
    }
    if !first?.cluster {
        return match target.hosts.as_slice() {
            [_] => Ok(None),
            _ => Err(OpenError::Setting(format!(
                "the url names several hosts, but {} is no cluster; name one host, or use redis+sentinel://",
                written(place)
            ))),
        };
    }
    if target.db() != 0 {
        return Err(OpenError::Setting("a cluster has no databases; leave the number out of the url".to_owned()));
    }
    let unreachable =
        || OpenError::Unreachable { place: written(place), reason: "no answer to CLUSTER SLOTS".to_owned() };
    let slots = Slots::ask(target, std::slice::from_ref(place)).await.ok_or_else(unreachable)?;
    for master in slots.masters() {
        if master != *place {
            inspect(target, &master).await?;
        }
    }
    Ok(Some(slots))
}

async fn inspect(target: &Target, place: &Place) -> Result<Facts, OpenError> {
    match timeout(PATIENCE, ask(target, place)).await {
        Ok(Err(OpenError::Stranger { place: named, reason })) => {
            let reason = first_words(place).await.unwrap_or(reason);
            Err(OpenError::Stranger { place: named, reason })
        }
        Ok(asked) => asked,
        Err(_) => {
            Err(OpenError::Unreachable { place: written(place), reason: format!("no answer within {PATIENCE:?}") })
        }
    }
}

async fn ask(target: &Target, place: &Place) -> Result<Facts, OpenError> {
    let named = written(place);
    let refused = |error: RedisError| refused(&error, named.clone());
    // The database is asked for afterwards, because the client does not tell why it is refused.
    let client = target.entrance(place).map_err(refused)?;
    let mut connection = client.get_multiplexed_async_connection().await.map_err(refused)?;
    let info = redis::cmd("INFO").arg("everything").query_async::<String>(&mut connection).await;
    let facts = match info {
        Ok(info) => Ok(check(&info, fsync(&mut connection).await.as_deref(), &named)?),
        // What else the user may not do is said with it.
        Err(error) if error.code() == Some("NOPERM") => Err(refused(error)),
        Err(error) => return Err(refused(error)),
    };
    let cluster = facts.as_ref().is_ok_and(|facts| facts.cluster);
    let rights = rights::lacking(&mut connection, target.prefix(), cluster).await.map_err(refused)?;
    if !rights.is_empty() {
        return Err(OpenError::Rights { place: named, user: target.user().to_owned(), rights: rights.join(" ") });
    }
    let (facts, number) = (facts?, target.db());
    if number != 0 && !cluster {
        let select = redis::cmd("SELECT").arg(number).query_async::<()>(&mut connection).await;
        select.map_err(|error| match error.detail() {
            Some(reason) if error.code() == Some("ERR") => {
                OpenError::Database { place: named.clone(), number, reason: reason.to_owned() }
            }
            _ => refused(error),
        })?;
    }
    Ok(facts.warn(&named))
}

/// What something that is not Redis says to a PING, for the person who has to find out what it is.
async fn first_words(place: &Place) -> Option<String> {
    let asking = async {
        let mut stream = TcpStream::connect((&*place.0, place.1)).await.ok()?;
        stream.write_all(b"*1\r\n$4\r\nPING\r\n").await.ok()?;
        let mut words = [0; 64];
        let read = stream.read(&mut words).await.ok()?;
        let line = std::str::from_utf8(&words[..read]).ok()?.lines().next().filter(|line| !line.is_empty())?;
        Some(format!("it answers {line:?}"))
    };
    timeout(PATIENCE, asking).await.ok().flatten()
}

/// `appendfsync`, if we may know.
async fn fsync(connection: &mut MultiplexedConnection) -> Option<String> {
    let answer: Value = redis::cmd("CONFIG").arg("GET").arg("appendfsync").query_async(connection).await.ok()?;
    value::list(answer)?.into_iter().nth(1).and_then(value::text)
}

/// Checks the master that the Sentinels name.
async fn check_master(target: &Target) -> Result<(), OpenError> {
    let asked = format!("the master {:?} of the sentinels", target.sentinel.as_deref().unwrap_or_default());
    let place = match master(target).await {
        Ok(place) => place,
        Err(error) => return Err(refused(&error, asked)),
    };
    match inspect(target, &place).await {
        // The Sentinels lag behind a fail-over.
        Err(OpenError::Role { .. }) => {
            Err(OpenError::Unreachable { place: asked, reason: format!("{} is not a master", written(&place)) })
        }
        checked => checked.map(drop),
    }
}

/// Tells what waiting mends from what it does not.
fn refused(error: &RedisError, place: String) -> OpenError {
    let reason = error.to_string();
    let denied = error.kind() == ErrorKind::AuthenticationFailed
        || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED"));
    let stranger = match error.kind() {
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType | ErrorKind::RESP3NotSupported => true,
        ErrorKind::Server(_) => reason.contains("unknown command"),
        // So the client of TLS calls what does not speak it.
        ErrorKind::Io => reason.contains("corrupt message"),
        _ => false,
    };
    match () {
        () if denied => OpenError::Denied { place, reason },
        () if stranger => OpenError::Stranger { place, reason },
        () => OpenError::Unreachable { place, reason },
    }
}

fn written((host, port): &Place) -> String {
    format!("{host}:{port}")
}

/// What matters of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    cluster: bool,
    /// Why it may lose something.
    doubt: Option<&'static str>,
}

impl Facts {
    fn warn(self, place: &str) -> Self {
        if let Some(doubt) = self.doubt {
            tracing::warn!("redis at {place} {doubt}");
        }
        self
    }
}

/// Judges a server by its `INFO`.
fn check(info: &str, fsync: Option<&str>, place: &str) -> Result<Facts, OpenError> {
    let field = |name: &str| {
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map_or("", str::trim)
    };
    let place = place.to_owned();
    let found = field("redis_version");
    // Valkey also says which Redis it is like.
    let mut numbers = found.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    if numbers.next().unwrap_or(0) < 7 {
        return Err(OpenError::Version { place, found: found.to_owned() });
    }
    if field("redis_mode") == "sentinel" {
        return Err(OpenError::Role { place, role: "sentinel" });
    }
    if matches!(field("role"), "slave" | "replica") {
        return Err(OpenError::Role { place, role: "replica" });
    }
    let policy = field("maxmemory_policy");
    if !matches!(policy, "noeviction" | "") {
        return Err(OpenError::Eviction { place, policy: policy.to_owned() });
    }
    let doubt = if field("aof_enabled") == "0" {
        Some("keeps no append-only file: what it answered may be gone when it restarts; set appendonly yes")
    } else if fsync.is_some_and(|fsync| fsync != "always") {
        Some("may lose the last seconds when it crashes; with appendfsync always it loses nothing")
    } else {
        None
    };
    Ok(Facts { cluster: field("redis_mode") == "cluster", doubt })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n# Memory\r\n\
                        maxmemory_policy:noeviction\r\n# Persistence\r\naof_enabled:1\r\n# Replication\r\nrole:master\r\n";

    fn judge(from: &str, to: &str) -> String {
        match check(&GOOD.replace(from, to), Some("always"), "r:1") {
            Ok(Facts { cluster, doubt }) => format!("cluster {cluster}, {}", doubt.unwrap_or("no doubt")),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_unfit_server_gets_a_line_that_says_what_to_do() {
        assert_eq!(judge("standalone", "standalone"), "cluster false, no doubt");
        assert_eq!(judge("standalone", "cluster"), "cluster true, no doubt");
        let off = judge("aof_enabled:1", "aof_enabled:0");
        assert!(off.ends_with("may be gone when it restarts; set appendonly yes"), "{off}");
        let everysec = check(GOOD, Some("everysec"), "r:1").map(|facts| facts.doubt.is_some());
        assert_eq!(everysec, Ok(true));
        assert_eq!(judge("7.0.15", "6.2.14"), "redis at r:1 is version 6.2.14; 7.0 or later is needed");
        assert_eq!(judge("redis_version", "x"), "redis at r:1 is version ; 7.0 or later is needed");
        assert_eq!(
            judge("noeviction", "allkeys-lru"),
            "redis at r:1 has maxmemory-policy allkeys-lru and would drop tasks; set it to noeviction"
        );
        assert_eq!(
            judge("role:master", "role:slave"),
            "redis at r:1 is a replica; give the url of the master, or redis+sentinel://host:port,…/<master name>"
        );
        assert!(judge("standalone", "sentinel").starts_with("redis at r:1 is a sentinel; "));
    }
}
