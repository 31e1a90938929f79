//! Processes of agents do not outlive the process that started them.

use std::fs;

use nix::sys::signal::Signal;
use rialto_testkit::cluster::Cluster;
use serde_json::json;
use tempfile::TempDir;

use crate::{
    process::{Dev, rialto},
    wire::{answered, events, http, stream, until},
};

/// An agent that nothing but SIGKILL ends, and that has a child which is no different. It answers `quick`, and works
/// on all else for long.
struct Stubborn {
    /// Holds a file in which agent and child note their numbers.
    folder: TempDir,
}

impl Stubborn {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A configuration with this agent at `/`.
    fn config(&self, stop_grace: &str) -> String {
        let script = format!(
            r#"
            trap '' TERM INT HUP
            sleep 120 &
            echo $$ $! >> '{}'
            while IFS= read -r line; do
                case $line in *quick*) echo '{{"type":"completed"}}' ;; esac
            done
            sleep 120"#,
            self.folder.path().join("pids").display()
        );
        let backend = json!({"type": "command", "command": ["sh", "-c", script], "persistent": true});
        let agents = json!([{"id": "stubborn", "lease": "1s", "backend": backend}]);
        json!({"stop-grace": stop_grace, "agents": agents}).to_string()
    }

    /// All numbers that were noted.
    fn pids(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.path().join("pids")).unwrap_or_default();
        text.split_whitespace().map(ToOwned::to_owned).collect()
    }

    /// Of the server at `url`, has one process at work and another one that waits for its next turn.
    async fn busy(&self, url: &str) {
        let client = http();
        let mut working = stream(&client, url, "slow").await;
        events(&mut working, |event| event["statusUpdate"]["status"]["state"] == "TASK_STATE_WORKING").await;
        until("the first process works", async || self.pids().len() == 2).await;
        answered(&client, url, "quick").await;
        assert!(self.pids().len() == 4 && self.pids().iter().all(|pid| is_alive(pid)), "{:?}", self.pids());
    }

    /// They are killed by now; the kernel clears them away in its own time.
    async fn gone(&self) {
        until("agents and their children are gone", async || !self.pids().iter().any(|pid| is_alive(pid))).await;
    }
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie that nobody reaps is dead enough.
    !stat.is_empty() && !stat.contains(") Z ")
}

async fn a_second_signal_ends_the_agents_of(services: &[&str], signal: Signal, code: i32) {
    let agent = Stubborn::new();
    let file = agent.folder.path().join("rialto.yaml");
    fs::write(&file, agent.config("1h")).unwrap();
    let options = ["--config", file.to_str().unwrap(), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let mut command = rialto(&[services, &options].concat());
    command.env("RIALTO__EPHEMERAL", "true");
    let server = Dev::spawn(command);
    agent.busy(&server.url).await;

    server.signal(signal);
    // The second one counts once the first is handled; until then they may be one to the kernel.
    while server.client(&["card", "--timeout", "1s"]).status.success() {}
    assert!(agent.pids().iter().take(2).all(|pid| is_alive(pid)), "the turn has an hour to end");
    server.signal(signal);
    let (ended, _, stderr) = server.wait();
    assert_eq!(ended, code, "{stderr}");
    agent.gone().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_sigterm_of_dev_leaves_no_process_of_an_agent() {
    a_second_signal_ends_the_agents_of(&["dev"], Signal::SIGTERM, 143).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_ctrl_c_of_serve_leaves_no_process_of_an_agent() {
    a_second_signal_ends_the_agents_of(&["serve", "all"], Signal::SIGINT, 130).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runner_that_runs_out_of_time_leaves_no_process_of_an_agent() {
    let agent = Stubborn::new();
    let cluster = Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(agent.config("1ms"));
    let cluster = cluster.gateways(1).task_stores(1).runners(1).start().await.unwrap();
    agent.busy(&cluster.gateways[0].url()).await;
    // The turn cannot be handed back, so the runner does not come to sending its idle processes away.
    cluster.redis().pause().unwrap();
    let exit = cluster.runners[0].terminate().await.unwrap();
    assert!(exit.code == 1 && exit.stderr.contains("stopped before all work had ended"), "{exit:?}");
    agent.gone().await;
    cluster.redis().resume().unwrap();
}
