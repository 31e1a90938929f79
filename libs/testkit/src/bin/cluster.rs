//! Runs a cluster of real `rialto serve` processes, for tests in other languages and for trying things out.
//!
//! ```text
//! cluster [--gateways 2] [--task-stores 2] [--runners 3] [--redis URL] [--binary PATH] [CONFIG]
//! ```
//!
//! CONFIG is a configuration as `rialto dev --config` takes it (YAML); store, Redis, ports and addresses of services
//! are the cluster's. Without it there is one agent that echoes. `scripted_agent` is in the `PATH` of the processes.
//! `--redis` names a Redis to use; otherwise one is started. `--binary` is `rialto`, by default the one beside this
//! program.
//!
//! When all processes are ready, one line of JSON is written to stdout:
//!
//! ```text
//! {"gateways": ["http://127.9.8.7:1234", …], "redis": "redis://…",
//!  "processes": [{"name": "gateway-0", "pid": 77, "admin": "http://127.9.8.7:1235", "stderr": "/tmp/…"}, …]}
//! ```
//!
//! Everything ends at the end of stdin, or with SIGTERM or SIGINT; the exit code is 0 then. A cluster that does not
//! start is a line on stderr and exit code 1.
#![expect(clippy::print_stdout, reason = "its purpose")]

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser;
use rialto_testkit::cluster::{Cluster, Process};
use serde_json::{Value, json};
use tokio::{
    io::AsyncReadExt as _,
    signal::unix::{SignalKind, signal},
};

/// Runs a cluster of `rialto serve` processes until stdin ends.
#[derive(Debug, Parser)]
struct Arguments {
    /// Configuration (YAML) of all processes; store and addresses are the cluster's
    config: Option<PathBuf>,
    #[arg(long, default_value_t = 2)]
    gateways: usize,
    #[arg(long, default_value_t = 2)]
    task_stores: usize,
    #[arg(long, default_value_t = 3)]
    runners: usize,
    /// A Redis that is there already
    #[arg(long)]
    redis: Option<String>,
    /// `rialto`; by default the one beside this program
    #[arg(long)]
    binary: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(run(Arguments::parse()));
    // A read of stdin that is under way must not hold us up.
    runtime.shutdown_background();
    result
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let binary = match arguments.binary {
        Some(binary) => binary,
        None => std::env::current_exe()?.with_file_name("rialto"),
    };
    let mut builder = Cluster::builder(binary)
        .gateways(arguments.gateways)
        .task_stores(arguments.task_stores)
        .runners(arguments.runners);
    if let Some(file) = arguments.config {
        builder =
            builder.config(std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    if let Some(url) = arguments.redis {
        builder = builder.redis_url(url);
    }
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stdin_ends() => {}
        }
    };
    let run = async {
        let cluster = builder.start().await?;
        let gateways: Vec<_> = cluster.gateways.iter().map(Process::url).collect();
        let processes: Vec<_> = cluster.processes().map(described).collect();
        println!("{}", json!({"gateways": gateways, "redis": cluster.redis_url(), "processes": processes}));
        std::future::pending().await
    };
    // Whichever it is, the processes die with the cluster.
    tokio::select! {
        () = stop => Ok(()),
        failed = run => failed,
    }
}

fn described(process: &Process) -> Value {
    json!({"name": process.name(), "pid": process.pid(), "admin": process.admin_url(),
           "stderr": process.stderr_file()})
}

async fn stdin_ends() {
    let (mut stdin, mut bytes) = (tokio::io::stdin(), [0; 1024]);
    while !matches!(stdin.read(&mut bytes).await, Ok(0) | Err(_)) {}
}
