//! Real redis-servers: alone, as a cluster, behind Sentinels, with TLS, with users.
//!
//! Each server listens on a free port of 127.0.0.1, works in its own temporary folder and dies with its handle.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, anyhow, bail, ensure};
use futures::future::{join_all, try_join_all};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::Instant,
};

use crate::certificates::Authority;

/// How long a server or a group of servers may take to become ready.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where redis-server is: in `PATH`, or in the places that Debian and others install it to.
///
/// # Errors
/// One line that says what to do.
pub fn find_redis_server() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/bin", "/usr/local/bin", "/usr/sbin", "/opt/redis/bin"].map(PathBuf::from))
        .map(|folder| folder.join("redis-server"))
        .find(|file| file.is_file())
        .context("redis-server is neither in PATH nor in /usr/bin or /usr/local/bin: install it (Debian: redis-server)")
}

/// A free port of 127.0.0.1. Somebody else may take it before it is used: callers try again.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Null.
    Nil,
    /// An integer.
    Int(i64),
    /// A status or a bulk string.
    Text(String),
    /// An array.
    List(Vec<Self>),
}

impl Reply {
    /// The text.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn text(&self) -> &str {
        let Self::Text(text) = self else { panic!("not a text: {self:?}") };
        text
    }

    /// The integer.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn int(&self) -> i64 {
        let Self::Int(int) = self else { panic!("not an integer: {self:?}") };
        *int
    }

    /// The elements.
    ///
    /// # Panics
    /// When it is something else.
    #[must_use]
    pub fn list(&self) -> &[Self] {
        let Self::List(list) = self else { panic!("not a list: {self:?}") };
        list
    }
}

/// How to start a server.
#[derive(Clone, Debug, Default)]
pub struct Options {
    args: Vec<String>,
    sentinel: Option<String>,
    tls: bool,
    password: Option<String>,
}

impl Options {
    /// A server that keeps nothing on disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds configuration as on the command line: `["--maxmemory", "20mb"]`.
    #[must_use]
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Keeps an append-only file; `fsync` is `always`, `everysec` or `no`.
    #[must_use]
    pub fn durable(self, fsync: &str) -> Self {
        self.args(["--appendonly", "yes", "--appendfsync", fsync])
    }

    /// Listens with TLS, and with nothing else.
    #[must_use]
    pub const fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Turns the default user's open door off; only `user` with `password` gets in, with the given ACL rules.
    #[must_use]
    pub fn user(self, user: &str, password: &str, rules: &str) -> Self {
        // The test kit itself keeps a way in.
        let user = format!("--user {user} on >{password} {rules}");
        let admin = format!("--user {ADMIN} on >{ADMIN_PASSWORD} ~* &* +@all");
        let words = [&user, &admin, "--user default off"].join(" ");
        let mut options = self.args(words.split(' '));
        options.password = Some(ADMIN_PASSWORD.to_owned());
        options
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Errors
    /// When there is no redis-server, or it does not start: with its last words.
    pub async fn start(self) -> anyhow::Result<RedisServer> {
        let mut tries = 0;
        loop {
            tries += 1;
            match RedisServer::start_once(&self).await {
                Err(error) if tries < 5 && error.to_string().contains("Address already in use") => {}
                other => return other,
            }
        }
    }
}

const ADMIN: &str = "testkit";
const ADMIN_PASSWORD: &str = "testkit-only";

/// A running redis-server.
#[derive(Debug)]
pub struct RedisServer {
    child: Mutex<Option<Child>>,
    folder: TempDir,
    port: u16,
    options: Options,
    ca: Option<String>,
}

impl RedisServer {
    /// Starts a plain server.
    ///
    /// # Errors
    /// See [`Options::start`].
    pub async fn start() -> anyhow::Result<Self> {
        Options::new().start().await
    }

    async fn start_once(options: &Options) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("rialto-redis-")?;
        let ca = if options.tls { Some(write_certificates(folder.path())?) } else { None };
        let server = Self { child: Mutex::new(None), folder, port: free_port()?, options: options.clone(), ca };
        server.launch().await?;
        Ok(server)
    }

    async fn launch(&self) -> anyhow::Result<()> {
        let folder = self.folder.path();
        let port = self.port.to_string();
        let mut command = Command::new(find_redis_server()?);
        if let Some(configuration) = &self.options.sentinel {
            std::fs::write(folder.join("sentinel.conf"), configuration)?;
            command.arg(folder.join("sentinel.conf")).arg("--sentinel");
        }
        command.args(["--bind", "127.0.0.1", "--loglevel", "warning", "--daemonize", "no"]);
        command.arg("--dir").arg(folder).arg("--unixsocket").arg(self.socket());
        if self.options.tls {
            command.args(["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"]);
            command.arg("--tls-cert-file").arg(folder.join("server.pem"));
            command.arg("--tls-key-file").arg(folder.join("server.key"));
            command.arg("--tls-ca-cert-file").arg(folder.join("ca.pem"));
        } else {
            command.args(["--port", &port]);
        }
        if self.options.sentinel.is_none() {
            command.args(["--save", ""]);
        }
        command.args(&self.options.args);
        let log = std::fs::File::create(folder.join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("cannot run redis-server")?;
        *self.child() = Some(child);
        let ready = eventually("the server answers", async || {
            let exited = match self.child().as_mut() {
                Some(child) => child.try_wait()?,
                None => None,
            };
            if let Some(status) = exited {
                let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                // Ends the wait: it will not get better.
                return Ok(Some(Err(anyhow!("redis-server ended with {status}: {log}"))));
            }
            Ok(matches!(self.command(&["PING"]).await, Ok(Reply::Text(pong)) if pong == "PONG").then_some(Ok(())))
        });
        ready.await?
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("redis.sock")
    }

    /// Its TCP port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Its TCP address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// `redis://127.0.0.1:<port>`, or `rediss://…` with TLS. Without user and password.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", if self.options.tls { "rediss" } else { "redis" }, self.port)
    }

    /// The certificate (PEM) that signed the server's, with TLS.
    #[must_use]
    pub fn ca(&self) -> Option<&str> {
        self.ca.as_deref()
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// Asks the server something over its Unix socket, whatever its port is like.
    ///
    /// # Errors
    /// When it cannot be reached, or answers with an error.
    pub async fn command(&self, words: &[&str]) -> anyhow::Result<Reply> {
        let asking = async {
            let mut stream = BufReader::new(UnixStream::connect(self.socket()).await?);
            if let Some(password) = &self.options.password {
                ask(&mut stream, &["AUTH", ADMIN, password]).await?;
            }
            ask(&mut stream, words).await
        };
        tokio::time::timeout(PATIENCE, asking).await.with_context(|| format!("no answer to {words:?}"))?
    }

    /// A number from `INFO`.
    ///
    /// # Errors
    /// When there is no such field, or it is no number.
    pub async fn info(&self, field: &str) -> anyhow::Result<f64> {
        let reply = self.command(&["INFO", "everything"]).await?;
        let value = reply.text().lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.and_then(|value| value.trim().parse().ok()).with_context(|| format!("no number {field:?} in INFO"))
    }

    /// How many commands were run since the last `CONFIG RESETSTAT`, by name: those that clients sent and those
    /// that functions called. `INFO`, `CONFIG` and `AUTH` are left out, which this handle sends itself.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn calls(&self) -> anyhow::Result<Vec<(String, u64)>> {
        let reply = self.command(&["INFO", "commandstats"]).await?;
        let calls = reply.text().lines().filter_map(|line| {
            let (name, numbers) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let calls = numbers.split(',').find_map(|number| number.strip_prefix("calls="))?.parse().ok()?;
            let own = ["info", "config", "auth"].iter().any(|own| name.starts_with(own));
            (!own).then(|| (name.to_owned(), calls))
        });
        Ok(calls.collect())
    }

    /// Kills the process (SIGKILL) and waits for its end.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(&self) -> io::Result<()> {
        match self.child().take() {
            Some(mut child) => {
                child.kill()?;
                child.wait().map(drop)
            }
            None => Ok(()),
        }
    }

    /// Kills the process if it still runs, and starts it again on the same port and folder.
    ///
    /// # Errors
    /// See [`Options::start`].
    pub async fn restart(&self) -> anyhow::Result<()> {
        self.kill()?;
        self.launch().await
    }

    /// Freezes the process (SIGSTOP).
    ///
    /// # Errors
    /// When it does not run.
    pub fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets a frozen process go on (SIGCONT).
    ///
    /// # Errors
    /// When it does not run.
    pub fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = self.pid().context("the server does not run")?;
        Ok(kill(Pid::from_raw(pid.try_into()?), signal)?)
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        drop(self.kill());
    }
}

/// Asks again until there is an answer.
async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = attempt().await? {
            return Ok(answer);
        }
        ensure!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn ask(stream: &mut BufReader<UnixStream>, words: &[&str]) -> anyhow::Result<Reply> {
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(request.as_bytes()).await?;
    read_reply(stream).await
}

async fn read_reply(stream: &mut BufReader<UnixStream>) -> anyhow::Result<Reply> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let line = line.trim_end();
    let (kind, rest) = line.split_at_checked(1).context("the server hung up")?;
    Ok(match kind {
        "+" => Reply::Text(rest.to_owned()),
        "-" => bail!("{rest}"),
        ":" => Reply::Int(rest.parse()?),
        "$" | "*" if rest == "-1" => Reply::Nil,
        "$" => {
            let mut bytes = vec![0; rest.parse::<usize>()? + 2];
            stream.read_exact(&mut bytes).await?;
            bytes.truncate(bytes.len() - 2);
            Reply::Text(String::from_utf8_lossy(&bytes).into_owned())
        }
        "*" => {
            let mut list = Vec::new();
            for _ in 0..rest.parse()? {
                list.push(Box::pin(read_reply(stream)).await?);
            }
            Reply::List(list)
        }
        _ => bail!("not a reply: {line:?}"),
    })
}

/// Writes `ca.pem`, `server.pem` and `server.key`; returns the first.
fn write_certificates(folder: &Path) -> anyhow::Result<String> {
    let authority = Authority::new()?;
    let (certificate, key) = authority.issue(&["localhost", "127.0.0.1"])?;
    std::fs::write(folder.join("ca.pem"), authority.pem())?;
    std::fs::write(folder.join("server.pem"), certificate)?;
    std::fs::write(folder.join("server.key"), key)?;
    Ok(authority.pem().to_owned())
}

/// A Redis cluster of masters without replicas.
#[derive(Debug)]
pub struct RedisCluster {
    /// The masters, in order of their slots.
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts `masters` servers that share the slots evenly, and waits until the cluster works.
    ///
    /// # Errors
    /// When a server does not start or the cluster does not form.
    pub async fn start(masters: u16) -> anyhow::Result<Self> {
        let nodes = try_join_all((0..masters).map(async |_| {
            let bus = free_port()?.to_string();
            let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", &bus];
            Options::new().args(args).start().await
        }))
        .await?;
        let share = 16384_u32.div_ceil(masters.into());
        for (index, node) in (0_u32..).zip(&nodes) {
            let (first, last) = (index * share, ((index + 1) * share).min(16384) - 1);
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]).await?;
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]).await?;
        }
        let bus = nodes[0].command(&["CONFIG", "GET", "cluster-port"]).await?.list()[1].text().to_owned();
        for node in &nodes[1..] {
            node.command(&["CLUSTER", "MEET", "127.0.0.1", &nodes[0].port().to_string(), &bus]).await?;
        }
        eventually("the cluster is up", async || {
            let answers = join_all(nodes.iter().map(|node| node.command(&["CLUSTER", "INFO"]))).await;
            let known = format!("cluster_known_nodes:{masters}");
            let up = answers.into_iter().all(|answer| {
                answer.is_ok_and(|info| info.text().contains("cluster_state:ok") && info.text().contains(&known))
            });
            Ok(up.then_some(()))
        })
        .await?;
        Ok(Self { nodes })
    }

    /// A URL that names all nodes.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().map(|node| node.address().to_string()).collect();
        format!("redis://{}", hosts.join(","))
    }

    /// Moves a slot with all keys in it from one node to another.
    ///
    /// # Errors
    /// When a step of it fails.
    pub async fn move_slot(&self, slot: u16, from: usize, to: usize) -> anyhow::Result<()> {
        let (slot, source, target) = (slot.to_string(), &self.nodes[from], &self.nodes[to]);
        let ids =
            try_join_all([source, target].map(|node| async {
                Ok::<_, anyhow::Error>(node.command(&["CLUSTER", "MYID"]).await?.text().to_owned())
            }))
            .await?;
        target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &ids[0]]).await?;
        source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &ids[1]]).await?;
        loop {
            let keys = source.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]).await?;
            let Some(key) = keys.list().first() else { break };
            let port = target.port().to_string();
            source.command(&["MIGRATE", "127.0.0.1", &port, key.text(), "0", "5000"]).await?;
        }
        for node in [target, source] {
            node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &ids[1]]).await?;
        }
        Ok(())
    }
}

/// A master with one replica, watched by three Sentinels under the name `main`.
#[derive(Debug)]
pub struct SentinelGroup {
    /// The first master and its replica.
    pub servers: [RedisServer; 2],
    /// The Sentinels.
    pub sentinels: Vec<RedisServer>,
}

impl SentinelGroup {
    /// Starts everything and waits until the Sentinels know the replica and one another.
    ///
    /// # Errors
    /// When a server does not start or they do not find together.
    pub async fn start() -> anyhow::Result<Self> {
        let master = RedisServer::start().await?;
        let port = master.port().to_string();
        let replica = Options::new().args(["--replicaof", "127.0.0.1", &port]).start();
        let configuration = format!(
            "sentinel monitor main 127.0.0.1 {port} 2\nsentinel down-after-milliseconds main 500\n\
             sentinel failover-timeout main 3000\n"
        );
        let sentinels = try_join_all((0..3).map(|_| {
            let mut options = Options::new();
            options.sentinel = Some(configuration.clone());
            options.start()
        }));
        let (replica, sentinels) = tokio::try_join!(replica, sentinels)?;
        let group = Self { servers: [master, replica], sentinels };
        eventually("the Sentinels know all", async || {
            let answers = join_all(group.sentinels.iter().map(|it| it.command(&["SENTINEL", "MASTER", "main"]))).await;
            let complete = answers.into_iter().all(|answer| {
                answer.is_ok_and(|facts| {
                    let facts: Vec<_> = facts.list().chunks(2).map(|pair| (pair[0].text(), pair[1].text())).collect();
                    let has = |name, value| facts.contains(&(name, value));
                    has("num-slaves", "1") && has("num-other-sentinels", "2") && has("flags", "master")
                })
            });
            Ok(complete.then_some(()))
        })
        .await?;
        group.replicated().await?;
        Ok(group)
    }

    /// `redis+sentinel://host:port,…/main`.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(|node| node.address().to_string()).collect();
        format!("redis+sentinel://{}/main", hosts.join(","))
    }

    /// Waits until the replica of the moment has all that its master has.
    ///
    /// # Errors
    /// When it does not get there.
    pub async fn replicated(&self) -> anyhow::Result<()> {
        eventually("the replica is in step", async || {
            for server in &self.servers {
                let Ok(role) = server.command(&["ROLE"]).await else { continue };
                if let [Reply::Text(role), Reply::Int(offset), Reply::List(replicas)] = role.list()
                    && role == "master"
                    && let [replica] = replicas.as_slice()
                    && replica.list()[2].text() == offset.to_string()
                {
                    return Ok(Some(()));
                }
            }
            Ok(None)
        })
        .await
    }

    /// Has the replica take over, in order. Returns once a Sentinel has agreed to; it happens a moment later.
    ///
    /// # Errors
    /// When the Sentinel refuses.
    pub async fn fail_over(&self) -> anyhow::Result<()> {
        eventually("a Sentinel fails over", async || {
            Ok(self.sentinels[0].command(&["SENTINEL", "FAILOVER", "main"]).await.ok().map(drop))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_answers_pauses_restarts_and_dies_with_its_handle() {
        let server = Options::new().durable("always").start().await.unwrap();
        server.command(&["SET", "a", "1"]).await.unwrap();
        server.kill().unwrap();
        assert!(server.command(&["PING"]).await.is_err());
        server.restart().await.unwrap();
        assert_eq!(server.command(&["GET", "a"]).await.unwrap(), Reply::Text("1".to_owned()));
        assert!(server.info("used_memory").await.unwrap() > 0.0);
        let address = server.address();
        drop(server);
        assert!(std::net::TcpStream::connect(address).is_err());
    }

    #[tokio::test]
    async fn a_server_that_does_not_start_says_why() {
        let error = Options::new().args(["--nonsense", "1"]).start().await.unwrap_err().to_string();
        assert!(error.contains("Bad directive"), "{error}");
    }
}
