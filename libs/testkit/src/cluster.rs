//! A cluster of real `rialto serve` processes around a real Redis.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use rialto_testkit::cluster::Cluster;
//!
//! let cluster = Cluster::builder("target/debug/rialto").gateways(2).runners(3).start().await?;
//! cluster.runners[0].kill();
//! cluster.runners[0].start().await?;
//! println!("{} {}", cluster.gateways[0].url(), cluster.task_stores[1].admin_url());
//! # Ok(())
//! # }
//! ```
//!
//! Each process keeps its addresses over restarts. All of a cluster's are on a loopback address of its own, so that
//! neither other tests nor outgoing connections take the ports of a process that is down. Processes die with the
//! handle.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    hash::{BuildHasher as _, RandomState},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use futures::future::try_join_all;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::{
    certificates::Authority,
    redis::{Options, RedisServer},
};

/// How long a process may take to be ready, or to end.
const PATIENCE: Duration = Duration::from_secs(60);
const PACE: Duration = Duration::from_millis(5);

/// What a cluster is to consist of.
#[derive(Debug)]
pub struct Builder {
    binary: PathBuf,
    gateways: usize,
    task_stores: usize,
    runners: usize,
    others: Vec<Vec<String>>,
    config: String,
    redis: Where,
    tls: bool,
    env: Vec<(OsString, OsString)>,
}

#[derive(Debug)]
enum Where {
    Own(Options),
    Given(String),
}

impl Builder {
    /// How many gateways; 2 unless said.
    #[must_use]
    pub const fn gateways(mut self, n: usize) -> Self {
        self.gateways = n;
        self
    }

    /// How many task-stores; 2 unless said.
    #[must_use]
    pub const fn task_stores(mut self, n: usize) -> Self {
        self.task_stores = n;
        self
    }

    /// How many runners; 2 unless said.
    #[must_use]
    pub const fn runners(mut self, n: usize) -> Self {
        self.runners = n;
        self
    }

    /// One more process, with these services: `["all"]`, or `["task-store", "agent-runner"]`.
    #[must_use]
    pub fn other(mut self, services: &[&str]) -> Self {
        self.others.push(services.iter().map(|&service| service.to_owned()).collect());
        self
    }

    /// The configuration (YAML) of all processes. Store, Redis and the addresses of services are the cluster's; a
    /// program `scripted_agent` is in `PATH`. `$COUNTERS` stands for the folder that [`Cluster::counted`] reads, for
    /// agents with `env: {SCRIPTED_COUNTERS: $COUNTERS}`.
    #[must_use]
    pub fn config(mut self, yaml: impl Into<String>) -> Self {
        self.config = yaml.into();
        self
    }

    /// A Redis of the cluster's own, with these options; a plain one unless said.
    #[must_use]
    pub fn redis(mut self, options: Options) -> Self {
        self.redis = Where::Own(options);
        self
    }

    /// A Redis that is there already.
    #[must_use]
    pub fn redis_url(mut self, url: impl Into<String>) -> Self {
        self.redis = Where::Given(url.into());
        self
    }

    /// Calls between processes are encrypted; all show the same certificate.
    #[must_use]
    pub const fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// A variable in the environment of all processes.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Starts all processes and waits until they are ready.
    ///
    /// # Errors
    /// When Redis or a process does not start: with its last words.
    pub async fn start(self) -> anyhow::Result<Cluster> {
        let cluster = self.prepare().await?;
        cluster.start_all().await?;
        Ok(cluster)
    }

    /// Starts Redis, and no process yet.
    ///
    /// # Errors
    /// When Redis does not start.
    pub async fn prepare(self) -> anyhow::Result<Cluster> {
        let redis = match self.redis {
            Where::Own(options) => Ok(options.start().await?),
            Where::Given(url) => Err(url),
        };
        let redis_url = redis.as_ref().map_or_else(Clone::clone, RedisServer::url);
        let folder = TempDir::with_prefix("rialto-cluster-")?;
        let counters = folder.path().join("counters");
        fs::create_dir(&counters)?;
        let config = self.config.replace("$COUNTERS", counters.to_str().context("a path that is text")?);
        fs::write(folder.path().join("rialto.yaml"), config)?;

        let mut ports = Ports::new();
        let task_store_ports = (0..self.task_stores).map(|_| ports.next()).collect::<io::Result<Vec<_>>>()?;
        let urls: Vec<_> = task_store_ports
            .iter()
            .map(|port| format!("{}://{port}", if self.tls { "https" } else { "http" }))
            .collect();
        let mut env: Vec<(OsString, OsString)> = vec![
            ("PATH".into(), path_with_agents(&self.binary)?),
            ("RIALTO__STORE".into(), "redis".into()),
            ("RIALTO__REDIS__URL".into(), redis_url.into()),
        ];
        if !urls.is_empty() {
            env.push(("RIALTO__SERVICES__TASK_STORE".into(), urls.join(",").into()));
        }
        if self.tls {
            env.extend(identity(folder.path(), ports.host)?);
        }
        env.extend(self.env);
        let shared = Arc::new(Shared { binary: self.binary, folder, env });

        let mut process = |services: &[&str], n: usize, task_store: Option<SocketAddr>| {
            let services = services.iter().map(|&service| service.to_owned()).collect();
            let task_store = task_store.map_or_else(|| ports.next(), Ok)?;
            Process::new(&shared, services, n, [ports.next()?, ports.next()?, task_store])
        };
        let gateways = (0..self.gateways).map(|n| process(&["gateway"], n, None)).collect::<io::Result<_>>()?;
        let task_stores = task_store_ports.into_iter().enumerate();
        let task_stores =
            task_stores.map(|(n, port)| process(&["task-store"], n, Some(port))).collect::<io::Result<_>>()?;
        let runners = (0..self.runners).map(|n| process(&["agent-runner"], n, None)).collect::<io::Result<_>>()?;
        let others = self.others.iter().enumerate().map(|(n, services)| {
            let services: Vec<_> = services.iter().map(String::as_str).collect();
            process(&services, n, None)
        });
        let others = others.collect::<io::Result<_>>()?;
        Ok(Cluster { gateways, task_stores, runners, others, redis, shared })
    }
}

/// The processes of a cluster, and its Redis.
#[derive(Debug)]
pub struct Cluster {
    /// The gateways.
    pub gateways: Vec<Process>,
    /// The task-stores.
    pub task_stores: Vec<Process>,
    /// The runners.
    pub runners: Vec<Process>,
    /// What [`Builder::other`] added.
    pub others: Vec<Process>,
    // After the processes: it is dropped after them, so that none complains of a Redis that is gone.
    redis: Result<RedisServer, String>,
    shared: Arc<Shared>,
}

/// What all processes of a cluster have in common.
#[derive(Debug)]
struct Shared {
    binary: PathBuf,
    folder: TempDir,
    env: Vec<(OsString, OsString)>,
}

impl Cluster {
    /// Two of each, on a Redis of their own, with one agent that echoes. `binary` is `rialto`; in its own tests
    /// `env!("CARGO_BIN_EXE_rialto")`.
    #[must_use]
    pub fn builder(binary: impl Into<PathBuf>) -> Builder {
        Builder {
            binary: binary.into(),
            gateways: 2,
            task_stores: 2,
            runners: 2,
            others: Vec::new(),
            config: "agents: [{id: echo, backend: echo, lease: 1s}]\n".to_owned(),
            redis: Where::Own(Options::new()),
            tls: false,
            env: Vec::new(),
        }
    }

    /// The Redis of its own.
    ///
    /// # Panics
    /// When the cluster was given one.
    #[must_use]
    pub fn redis(&self) -> &RedisServer {
        self.redis.as_ref().expect("the Redis is not the cluster's own")
    }

    /// Where its Redis is.
    #[must_use]
    pub fn redis_url(&self) -> String {
        self.redis.as_ref().map_or_else(Clone::clone, RedisServer::url)
    }

    /// Where its files are: the configuration, what processes wrote, and `CERT.pem`, `KEY.pem` and `CA.pem` with
    /// [`Builder::tls`].
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.shared.folder.path()
    }

    /// All processes.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        [&self.gateways, &self.task_stores, &self.runners, &self.others].into_iter().flatten()
    }

    /// Starts what does not run, and waits until everything is ready.
    ///
    /// # Errors
    /// See [`Process::start`].
    pub async fn start_all(&self) -> anyhow::Result<()> {
        try_join_all(self.processes().map(Process::start)).await.map(drop)
    }

    /// The lines that the scripted agent counted under a key, over all attempts at all turns, in order.
    ///
    /// # Panics
    /// When a counter cannot be read or is not what the scripted agent writes.
    #[must_use]
    pub fn counted(&self, key: &str) -> Vec<serde_json::Value> {
        match fs::read_to_string(self.shared.folder.path().join("counters").join(key)) {
            Ok(text) => text.lines().map(|line| serde_json::from_str(line).expect("a count is JSON")).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => panic!("counter {key}: {error}"),
        }
    }
}

/// A place for a process, which may be started and killed many times.
#[derive(Debug)]
pub struct Process {
    services: Vec<String>,
    name: String,
    listen: SocketAddr,
    admin: SocketAddr,
    task_store: SocketAddr,
    env: Vec<(OsString, OsString)>,
    child: Mutex<Option<Child>>,
    shared: Arc<Shared>,
}

/// How a process ended.
#[derive(Debug)]
pub struct Exit {
    /// Exit code; of a process that was killed, the negative number of the signal.
    pub code: i32,
    /// Lines on stdout in that life.
    pub stdout: String,
    /// Lines on stderr in all of its lives.
    pub stderr: String,
}

impl Process {
    fn new(
        shared: &Arc<Shared>,
        services: Vec<String>,
        n: usize,
        [listen, admin, task_store]: [SocketAddr; 3],
    ) -> io::Result<Self> {
        let name = format!("{}-{n}", services.join("-"));
        // So that there is something to read before the first start.
        File::create(shared.folder.path().join(format!("{name}.err")))?;
        let (env, child) = (Vec::new(), Mutex::new(None));
        Ok(Self { services, name, listen, admin, task_store, env, child, shared: Arc::clone(shared) })
    }

    /// Adds a variable to the environment of this process alone, or replaces one of all: from its next start on.
    pub fn env(&mut self, name: impl Into<OsString>, value: impl Into<OsString>) {
        self.env.push((name.into(), value.into()));
    }

    /// `task-store-1`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Base URL of its public port, if it has one.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Base URL of its admin port.
    #[must_use]
    pub fn admin_url(&self) -> String {
        format!("http://{}", self.admin)
    }

    /// Where its task-store serves other processes, if it has one.
    #[must_use]
    pub const fn task_store(&self) -> SocketAddr {
        self.task_store
    }

    /// The command that starts it, to be run in another way.
    ///
    /// # Panics
    /// When the temporary folder's name is not text.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.shared.binary);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("RIALTO") || text.starts_with("RUST_") {
                command.env_remove(&name);
            }
        }
        command.arg("serve").args(&self.services);
        command.arg("--config").arg(self.shared.folder.path().join("rialto.yaml"));
        for (flag, address) in
            [("--listen", self.listen), ("--admin-listen", self.admin), ("--task-store-listen", self.task_store)]
        {
            command.arg(flag).arg(address.to_string());
        }
        command.envs(self.shared.env.iter().chain(&self.env).map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }

    /// Starts it if it does not run, and waits until it is ready.
    ///
    /// # Errors
    /// When it ends instead, or takes too long: with its last words.
    pub async fn start(&self) -> anyhow::Result<()> {
        self.spawn()?;
        self.ready().await
    }

    /// Starts it if it does not run.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn spawn(&self) -> anyhow::Result<()> {
        let mut child = self.child();
        if child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            return Ok(());
        }
        let stderr = OpenOptions::new().append(true).create(true).open(self.file("err"))?;
        let mut command = self.command();
        command.stdout(File::create(self.file("out"))?).stderr(stderr);
        let started = command.spawn().with_context(|| format!("cannot run {}", self.shared.binary.display()))?;
        *child = Some(started);
        Ok(())
    }

    /// Waits until it is ready.
    ///
    /// # Errors
    /// When it ends instead, or takes too long: with its last words.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.stdout().starts_with("ready: ") {
            if let Some(status) = self.ended()? {
                bail!("{} ended ({status}): {}", self.name, self.stderr());
            }
            ensure!(Instant::now() < until, "{} is not ready within {PATIENCE:?}: {}", self.name, self.stderr());
            sleep(PACE).await;
        }
        Ok(())
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When it does not run.
    pub fn signal(&self, signal: Signal) {
        let pid = self.pid().and_then(|pid| i32::try_from(pid).ok()).expect("the process runs");
        kill(Pid::from_raw(pid), signal).expect("a child can be signalled");
    }

    /// Freezes it (SIGSTOP).
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Panics
    /// When it does not run.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it (SIGKILL), if it runs; it is gone afterwards.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&self) {
        if let Some(mut child) = self.child().take() {
            child.kill().expect("a child can be killed");
            child.wait().expect("a child can be waited for");
        }
    }

    /// Asks it to end (SIGTERM), and waits until it did.
    ///
    /// # Errors
    /// When it takes too long.
    ///
    /// # Panics
    /// When it does not run.
    pub async fn terminate(&self) -> anyhow::Result<Exit> {
        self.signal(Signal::SIGTERM);
        self.exit().await
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// When it takes too long.
    pub async fn exit(&self) -> anyhow::Result<Exit> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.ended()? {
                *self.child() = None;
                let code = status.code().unwrap_or_else(|| -status.signal().unwrap_or_default());
                return Ok(Exit { code, stdout: self.stdout(), stderr: self.stderr() });
            }
            ensure!(Instant::now() < until, "{} has not ended within {PATIENCE:?}: {}", self.name, self.stderr());
            sleep(PACE).await;
        }
    }

    /// What it wrote to stderr so far, over all of its lives.
    #[must_use]
    pub fn stderr(&self) -> String {
        read(&self.file("err"))
    }

    /// Where that is.
    #[must_use]
    pub fn stderr_file(&self) -> PathBuf {
        self.file("err")
    }

    /// What it wrote to stdout in this life.
    #[must_use]
    pub fn stdout(&self) -> String {
        read(&self.file("out"))
    }

    /// How it ended, if it did.
    fn ended(&self) -> anyhow::Result<Option<ExitStatus>> {
        self.child().as_mut().with_context(|| format!("{} was not started", self.name))?.try_wait().map_err(Into::into)
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.shared.folder.path().join(format!("{}.{kind}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn read(file: &Path) -> String {
    fs::read(file).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// Writes a certificate for a host, and names the files as the configuration wants them.
fn identity(folder: &Path, host: IpAddr) -> anyhow::Result<Vec<(OsString, OsString)>> {
    let authority = Authority::new()?;
    let (cert, key) = authority.issue(&[&host.to_string()])?;
    let parts = [("CERT", cert.as_str()), ("KEY", key.as_str()), ("CA", authority.pem())];
    let written = parts.into_iter().map(|(name, pem)| {
        let file = folder.join(format!("{name}.pem"));
        fs::write(&file, pem)?;
        Ok((format!("RIALTO__SERVICES__TLS__{name}_FILE").into(), file.into()))
    });
    written.collect()
}

/// `PATH`, and before it the folder of `binary`, where the scripted agent lies too. Builds it if it is missing.
///
/// # Errors
/// When it cannot be built.
pub fn path_with_agents(binary: &Path) -> anyhow::Result<OsString> {
    let folder = binary.canonicalize().with_context(|| format!("there is no {}", binary.display()))?;
    let folder = folder.parent().context("a file is in a folder")?.to_owned();
    if !folder.join("scripted_agent").exists() {
        // Tests of one process must not build it at the same time; Cargo itself keeps other processes apart.
        static BUILDING: Mutex<()> = Mutex::new(());
        let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--locked", "-p", "rialto-testkit", "--bin", "scripted_agent"]);
        if let Some(profile) = folder.file_name().and_then(|name| name.to_str()).filter(|name| *name != "debug") {
            build.args(["--profile", profile]);
        }
        ensure!(build.status()?.success(), "the scripted agent cannot be built");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&path)))?)
}

/// Free ports, each given out once.
struct Ports {
    host: IpAddr,
    /// Keeps them from being given out twice; free again when all are known.
    taken: Vec<TcpListener>,
}

impl Ports {
    /// On an address that hardly anybody else has.
    fn new() -> Self {
        let [a, b, c, ..] = RandomState::new().hash_one(std::process::id()).to_le_bytes();
        let own = IpAddr::from(Ipv4Addr::new(127, a | 1, b, c.clamp(1, 254)));
        // Some systems have 127.0.0.1 alone.
        let host = if TcpListener::bind((own, 0)).is_ok() { own } else { Ipv4Addr::LOCALHOST.into() };
        Self { host, taken: Vec::new() }
    }

    fn next(&mut self) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind((self.host, 0))?;
        let address = listener.local_addr()?;
        self.taken.push(listener);
        Ok(address)
    }
}
