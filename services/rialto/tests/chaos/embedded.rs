//! One process on SQLite: killed in the middle of commits, and on a disk without room.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rialto_testkit::cluster::path_with_agents;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::{
    caller::{AGENTS, Load, MOMENTS, Traffic},
    dice::{Dice, seed},
    ledger::{Ledger, Rules},
    wire::{Binding, Wire, http},
};

/// A place for a `rialto dev`.
struct Dev {
    folder: TempDir,
    address: String,
    child: Option<Child>,
}

impl Dev {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let counters = folder.path().join("counters");
        fs::create_dir(&counters).unwrap();
        let config = AGENTS.replace("$COUNTERS", counters.to_str().unwrap());
        fs::write(folder.path().join("rialto.yaml"), config).unwrap();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        Self { folder, address, child: None }
    }

    /// Starts it, after these words of a shell, and waits until it serves.
    fn start(&mut self, before: &str) {
        let folder = self.folder.path();
        let binary = env!("CARGO_BIN_EXE_rialto");
        let mut command = Command::new("bash");
        command.args(["-c", &format!("{before} exec \"$@\""), "bash", binary, "dev", "--listen", &self.address]);
        command.args(["--admin-listen", "127.0.0.1:0", "--config"]).arg(folder.join("rialto.yaml"));
        command.arg("--data").arg(folder.join("data")).env("PATH", path_with_agents(Path::new(binary)).unwrap());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "{line:?}");
        self.child = Some(child);
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn traffic(&self, dice: &Dice) -> Traffic {
        Traffic::start([format!("http://{}", self.address)], Load::default(), dice)
    }

    async fn end(&self, traffic: Traffic, rules: &Rules) -> Ledger {
        let counters = self.folder.path().join("counters");
        let counted = |key: &str| -> Vec<Value> {
            let lines = fs::read_to_string(counters.join(key)).unwrap_or_default();
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        traffic.close(rules, counted).await
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) async fn kill(seed: u64, rounds: u64) -> Ledger {
    let (dice, mut dev) = (Dice::new(seed), Dev::new());
    dev.start("");
    let traffic = dev.traffic(&dice);
    for _ in 0..rounds {
        sleep(dice.millis(500)).await;
        traffic.moment(*dice.pick(&MOMENTS)).await;
        sleep(dice.millis(6)).await;
        dev.kill();
        sleep(dice.millis(100)).await;
        dev.start("");
    }
    dev.end(traffic, &Rules::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_loses_nothing_when_dev_is_killed_in_the_middle_of_commits() {
    kill(seed(), 12).await.check("kill -9 of dev");
}

/// A file that may not grow, as a disk without room: sends are refused until there is room again.
pub(crate) async fn full(seed: u64) -> Ledger {
    let (dice, mut dev) = (Dice::new(seed), Dev::new());
    // Signals that are ignored stay ignored in the new program; a write fails instead.
    dev.start("trap '' XFSZ; ulimit -f 6144;");
    // Most of the room, so that the traffic need not take it in small tasks.
    let wire = Wire::new(&http(), &format!("http://{}", dev.address), "/echo", Binding::Rest);
    let long = json!({"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "x".repeat(64 << 10)}]}});
    for n in 0..12 {
        drop(wire.send(&long, &format!("fill-{n}")).await);
    }
    let traffic = dev.traffic(&dice);
    let until = Instant::now() + Duration::from_secs(120);
    while !traffic.is_refused() {
        assert!(Instant::now() < until, "nothing was refused");
        sleep(Duration::from_millis(100)).await;
    }
    sleep(Duration::from_secs(1)).await;
    dev.kill();
    dev.start("");
    sleep(Duration::from_secs(1)).await;
    // A full disk takes no journal entries either, from before the first send that it refuses.
    dev.end(traffic, &Rules { blind: Duration::from_secs(60), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_an_honest_refusal_and_loses_nothing() {
    full(seed()).await.check("full disk");
}
