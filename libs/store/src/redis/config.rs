//! Where Redis is and how to speak to it.

use std::{fmt, time::Duration};

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, RedisResult,
    TlsCertificates,
};

use super::OpenError;
use crate::Shard;

/// What [`RedisEngine::connect`](super::RedisEngine::connect) needs to know.
#[derive(Clone)]
pub struct RedisConfig {
    /// `redis://[user[:password]@]host[:port][,host[:port]…][/db]` for a server, or for a cluster, of which some
    /// nodes are enough; `redis+sentinel://…/<master name>[/db]` for the master that Sentinels name. `rediss` in
    /// place of `redis` for TLS. User and password are those of the servers; those of the Sentinels, if they ask for
    /// any, follow as `?sentinel-password=…` and `&sentinel-user=…`. All are percent-encoded.
    pub url: String,
    /// Starts every key, so that several installations share a Redis.
    pub prefix: String,
    /// Number of shards when the store is installed, and afterwards a check of it. `None` = what is stored, at
    /// the first start 1, on a cluster 16.
    pub shards: Option<Shard>,
    /// How long a call may take, retries included. Waiting for work is not a call.
    pub deadline: Duration,
    /// Certificates (PEM) that sign the servers', instead of those of the system.
    pub ca: Option<Vec<u8>>,
    /// Certificate and key (PEM) that this client shows.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl RedisConfig {
    /// Everything at its default but the URL.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "rialto:".to_owned(),
            shards: None,
            deadline: Duration::from_secs(5),
            ca: None,
            identity: None,
        }
    }

    /// Whether the URL can be understood. [`RedisEngine::connect`](super::RedisEngine::connect) looks as well.
    ///
    /// # Errors
    /// What it must be like. The URL is not repeated, which may hold a password.
    pub fn check_url(&self) -> Result<(), String> {
        match Target::new(self) {
            Ok(_) => Ok(()),
            Err(OpenError::Url(problem)) => Err(problem),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the URL and the key: they hold secrets.
        let Self { url: _, prefix, shards, deadline, ca: _, identity: _ } = self;
        f.debug_struct("RedisConfig")
            .field("prefix", prefix)
            .field("shards", shards)
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}

/// Host and port.
pub(super) type Place = (String, u16);

/// A [`RedisConfig`]'s URL, understood.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// The servers, or Sentinels, that the URL names.
    pub(super) hosts: Vec<Place>,
    /// Name of the master, when the hosts are Sentinels.
    pub(super) sentinel: Option<String>,
    settings: RedisConnectionInfo,
    sentinel_settings: RedisConnectionInfo,
    tls: bool,
    certificates: Option<TlsCertificates>,
    prefix: String,
}

impl Target {
    pub(super) fn new(config: &RedisConfig) -> Result<Self, OpenError> {
        let form = || {
            OpenError::Url(
                "it must read redis://[user:password@]host:port[/db], rediss://… with TLS, \
                 or redis+sentinel://host:port,…/<master name>[?sentinel-password=…]"
                    .to_owned(),
            )
        };
        let (scheme, rest) = config.url.split_once("://").ok_or_else(form)?;
        let (server, default_port, sentinel) = match scheme {
            "redis" => ("redis", 6379, false),
            "rediss" => ("rediss", 6379, false),
            "redis+sentinel" => ("redis", 26379, true),
            "rediss+sentinel" => ("rediss", 26379, true),
            _ => return Err(form()),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let (master, db) = if sentinel { path.split_once('/').unwrap_or((path, "")) } else { ("", path) };
        if sentinel && master.is_empty() {
            return Err(OpenError::Url("redis+sentinel:// must end in /<name of the master>".to_owned()));
        }
        let mut places = Vec::new();
        let mut settings = None;
        for host in hosts.split(',') {
            // The client's own parser knows how ports, escapes and IPv6 addresses are written.
            let info = format!("{server}://{user}{host}/{db}").into_connection_info().map_err(|_| form())?;
            let written = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            match info.addr() {
                ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                    places.push((host.clone(), if written { *port } else { default_port }));
                }
                _ => return Err(form()),
            }
            settings = Some(info.redis_settings().clone());
        }
        let (mut sentinel_user, mut sentinel_password) = ("", None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("sentinel-user", user)) if sentinel => sentinel_user = user,
                Some(("sentinel-password", password)) if sentinel => sentinel_password = Some(password),
                _ => return Err(form()),
            }
        }
        let sentinel_settings = match sentinel_password {
            // Again: the client's parser knows how they are written.
            Some(password) => format!("redis://{sentinel_user}:{password}@sentinel")
                .into_connection_info()
                .map_err(|_| form())?
                .redis_settings()
                .clone(),
            None if sentinel_user.is_empty() => RedisConnectionInfo::default(),
            None => return Err(OpenError::Url("sentinel-user without sentinel-password".to_owned())),
        };
        let certificates = (config.ca.is_some() || config.identity.is_some()).then(|| TlsCertificates {
            client_tls: config
                .identity
                .clone()
                .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
            root_cert: config.ca.clone(),
        });
        Ok(Self {
            hosts: places,
            sentinel: sentinel.then(|| master.to_owned()),
            settings: settings.ok_or_else(form)?,
            sentinel_settings,
            tls: server == "rediss",
            certificates,
            prefix: config.prefix.clone(),
        })
    }

    pub(super) const fn tls(&self) -> bool {
        self.tls
    }

    pub(super) fn db(&self) -> i64 {
        self.settings.db()
    }

    pub(super) fn user(&self) -> &str {
        self.settings.username().unwrap_or("default")
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A client of one server. Opens no connection.
    pub(super) fn server(&self, place: &Place) -> RedisResult<Client> {
        self.client(place, self.settings.clone().set_protocol(redis::ProtocolVersion::RESP3))
    }

    /// As [`Target::server`], in the database that every server has.
    pub(super) fn entrance(&self, place: &Place) -> RedisResult<Client> {
        self.client(place, self.settings.clone().set_protocol(redis::ProtocolVersion::RESP3).set_db(0))
    }

    /// A client of one Sentinel.
    pub(super) fn sentinel(&self, place: &Place) -> RedisResult<Client> {
        self.client(place, self.sentinel_settings.clone())
    }

    fn client(&self, (host, port): &Place, settings: RedisConnectionInfo) -> RedisResult<Client> {
        let address = if self.tls {
            ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host.clone(), *port)
        };
        let info: ConnectionInfo = address.into_connection_info()?.set_redis_settings(settings);
        match &self.certificates {
            Some(certificates) if self.tls => Client::build_with_tls(info, certificates.clone()),
            _ => Client::open(info),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, OpenError> {
        Target::new(&RedisConfig::new(url))
    }

    #[test]
    fn urls_name_servers_clusters_and_sentinels() {
        let one = target("redis://127.0.0.1").unwrap();
        assert_eq!((one.hosts, one.sentinel, one.tls), (vec![("127.0.0.1".to_owned(), 6379)], None, false));
        let many = target("rediss://ann:p%40ss,w@a:1,b,[::1]:7/2").unwrap();
        assert_eq!(many.hosts.iter().map(|(_, port)| *port).collect::<Vec<_>>(), [1, 6379, 7]);
        assert_eq!((many.settings.username(), many.settings.password()), (Some("ann"), Some("p@ss,w")));
        assert_eq!((many.tls, many.db()), (true, 2));
        let watched = target("redis+sentinel://:secret@s1,s2:5/main/3").unwrap();
        assert_eq!(watched.hosts, [("s1".to_owned(), 26379), ("s2".to_owned(), 5)]);
        assert_eq!((watched.sentinel.as_deref(), watched.db()), (Some("main"), 3));
        assert_eq!((watched.settings.password(), watched.sentinel_settings.password()), (Some("secret"), None));
        let guarded = target("redis+sentinel://s1/main?sentinel-user=ann&sentinel-password=p%40ss%26%3F").unwrap();
        let settings = &guarded.sentinel_settings;
        assert_eq!((settings.username(), settings.password()), (Some("ann"), Some("p@ss&?")));
        assert_eq!((guarded.settings.password(), guarded.sentinel.as_deref()), (None, Some("main")));
        let guarded = target("rediss+sentinel://s1/main/3?sentinel-password=x").unwrap();
        assert_eq!((guarded.sentinel_settings.password(), guarded.db()), (Some("x"), 3));
    }

    #[test]
    fn a_url_that_says_nothing_is_refused_without_repeating_its_password() {
        let sentinels = "redis+sentinel://x/main?password=hunter2";
        let unasked = "redis://x?sentinel-password=hunter2";
        let nobody = "redis+sentinel://x/main?sentinel-user=hunter2";
        let others = ["", "127.0.0.1:6379", "http://:hunter2@x", "redis://:hunter2@", "redis+sentinel://:hunter2@x"];
        for url in others.into_iter().chain([sentinels, unasked, nobody]) {
            let text = target(url).unwrap_err().to_string();
            assert!(text.starts_with("redis url: ") && !text.contains("hunter2"), "{text}");
        }
        let text = format!("{:?}", RedisConfig::new("redis://:hunter2@x"));
        assert!(!text.contains("hunter2"), "{text}");
    }
}
