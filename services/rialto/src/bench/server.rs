//! The server under test: a process of its own, so that its cost is its own.

use std::{fs, path::Path, process::Stdio, time::Duration};

use anyhow::Context as _;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

/// A running child that printed `ready: http://…`. Killed on drop.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    /// `host:port`.
    pub(super) address: String,
}

impl Server {
    /// Starts this same binary with other arguments.
    pub(super) async fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .env("RIALTO_LOG", "error")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().context("stdout was piped")?;
        let mut line = String::new();
        timeout(Duration::from_secs(30), BufReader::new(stdout).read_line(&mut line))
            .await
            .context("not ready within 30 s")??;
        let address = line
            .trim()
            .strip_prefix("ready: http://")
            .with_context(|| format!("unexpected first line {line:?}"))?
            .to_owned();
        Ok(Self { child, address })
    }

    /// CPU time used so far, all threads.
    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = fs::read_to_string(self.proc("stat")?)?;
        // The second field is the program's name in parentheses and may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(')').context("no name in stat")?.1.split_whitespace().collect();
        let ticks =
            |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).context("no times in stat");
        // Linux counts in hundredths of a second towards user space.
        Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
    }

    /// Resident memory, in MiB.
    pub(super) fn rss_mib(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(self.proc("status")?)?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in status")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(super::load::as_f64(kib) / 1024.0)
    }

    fn proc(&self, file: &str) -> anyhow::Result<impl AsRef<Path>> {
        Ok(Path::new("/proc").join(self.child.id().context("the server has ended")?.to_string()).join(file))
    }
}
