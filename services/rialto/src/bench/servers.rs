//! The servers under test: processes of their own, so that each one's cost is its own.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::load::as_f64;

/// A process has this long to be ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// A set of processes that together are one Rialto, or something to compare it with. Killed on drop.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) parts: Vec<Part>,
    /// `host:port` that clients call.
    pub(super) address: String,
    /// Holds configuration and data.
    _folder: Option<TempDir>,
}

/// One of the processes.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: &'static str,
    child: Child,
}

impl Servers {
    /// This binary with other arguments, alone.
    pub(super) async fn alone(name: &'static str, arguments: &[&str]) -> anyhow::Result<Self> {
        let (part, address) = Part::start(name, arguments).await?;
        Ok(Self { parts: vec![part], address, _folder: None })
    }

    /// `rialto dev`, in memory or on SQLite.
    pub(super) async fn embedded(ephemeral: bool) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = configure(folder.path(), "")?;
        let data = path(&folder.path().join("data"))?;
        let mut arguments =
            vec!["dev", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config", &config];
        if ephemeral {
            arguments.push("--ephemeral");
        } else {
            arguments.extend(["--data", &data]);
        }
        let (part, address) = Part::start("dev", &arguments).await?;
        Ok(Self { parts: vec![part], address, _folder: Some(folder) })
    }

    /// One process for each service, and a Redis that writes its log as `fsync` says.
    pub(super) async fn cluster(fsync: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (redis, redis_address) = Part::redis(folder.path(), fsync).await?;
        let tasks = free_address()?;
        let config = configure(
            folder.path(),
            &format!(
                "store: redis\nredis: {{ url: 'redis://{redis_address}' }}\n\
                 services: {{ task-store: ['http://{tasks}'] }}\n"
            ),
        )?;
        let serve = |role: &'static str, port: &'static str, address: String| {
            let config = config.clone();
            async move {
                let mut arguments = vec!["serve", role, "--config", &config, "--admin-listen", "127.0.0.1:0"];
                if !port.is_empty() {
                    arguments.extend([port, &address]);
                }
                Part::start(role, &arguments).await
            }
        };
        let (store, _) = serve("task-store", "--task-store-listen", tasks.to_string()).await?;
        let (runner, _) = serve("agent-runner", "", String::new()).await?;
        let (gateway, address) = serve("gateway", "--listen", "127.0.0.1:0".to_owned()).await?;
        Ok(Self { parts: vec![gateway, store, runner, redis], address, _folder: Some(folder) })
    }

    /// CPU time of each process so far.
    pub(super) fn cpu(&self) -> anyhow::Result<Vec<Duration>> {
        self.parts.iter().map(Part::cpu).collect()
    }

    /// Resident memory of each process, as `name MiB`.
    pub(super) fn memory(&self) -> anyhow::Result<String> {
        let each = self.parts.iter().map(|part| Ok(format!("{} {:.0} MiB", part.name, part.rss_mib()?)));
        Ok(each.collect::<anyhow::Result<Vec<_>>>()?.join(", "))
    }
}

impl Part {
    /// Starts this same binary with other arguments; waits for its `ready:` line.
    async fn start(name: &'static str, arguments: &[&str]) -> anyhow::Result<(Self, String)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .env("RIALTO_LOG", "error")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().context("stdout was piped")?;
        let mut line = String::new();
        timeout(PATIENCE, BufReader::new(stdout).read_line(&mut line))
            .await
            .with_context(|| format!("{name} is not ready within {} s", PATIENCE.as_secs()))??;
        let address = line.trim().strip_prefix("ready: http://");
        let address = address.with_context(|| format!("unexpected first line of {name}: {line:?}"))?.to_owned();
        Ok((Self { name, child }, address))
    }

    async fn redis(folder: &Path, fsync: &str) -> anyhow::Result<(Self, SocketAddr)> {
        let address = free_address()?;
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &address.port().to_string(), "--save", ""])
            .args(["--appendonly", if fsync == "off" { "no" } else { "yes" }])
            .args(["--appendfsync", if fsync == "off" { "no" } else { fsync }, "--dir", &path(folder)?])
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("redis-server cannot be started; install it, or leave --mode redis out")?;
        let part = Self { name: "redis", child };
        let pings = async {
            while ping(address).await.is_err() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, pings).await.context("redis-server does not answer")?;
        Ok((part, address))
    }

    /// CPU time used so far, all threads.
    fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = self.proc("stat")?;
        // The second field is the program's name in parentheses and may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(')').context("no name in stat")?.1.split_whitespace().collect();
        let ticks =
            |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).context("no times in stat");
        // Linux counts in hundredths of a second towards user space.
        Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
    }

    /// Resident memory, in MiB.
    pub(super) fn rss_mib(&self) -> anyhow::Result<f64> {
        let status = self.proc("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in status")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(as_f64(kib) / 1024.0)
    }

    fn proc(&self, file: &str) -> anyhow::Result<String> {
        let Some(id) = self.child.id() else { bail!("{} has ended", self.name) };
        Ok(fs::read_to_string(Path::new("/proc").join(id.to_string()).join(file))?)
    }
}

/// Writes the configuration that all processes share; `more` says where the store is.
fn configure(folder: &Path, more: &str) -> anyhow::Result<String> {
    let file = folder.join("rialto.yaml");
    let this = path(&std::env::current_exe()?)?;
    // As JSON, so that a path with anything in it is one word.
    let agent = serde_json::json!([this, "bench", "--agent"]);
    let agents = format!(
        "agents:\n  - {{ id: echo, backend: echo }}\n  \
         - {{ id: waiting, mount: /waiting, backend: echo, turn-end: input-required }}\n  \
         - {{ id: many, mount: /many, backend: {{ type: command, command: {agent}, persistent: true }} }}\n"
    );
    fs::write(&file, format!("{more}{agents}"))?;
    path(&file)
}

fn path(path: &Path) -> anyhow::Result<String> {
    Ok(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned())
}

/// An address that nobody listens on.
fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

async fn ping(address: SocketAddr) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"PING\r\n").await?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).await?;
    anyhow::ensure!(answer == *b"+PONG\r\n", "still loading");
    Ok(())
}
