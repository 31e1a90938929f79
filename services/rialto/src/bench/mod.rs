//! `rialto bench`: what each operation costs on this machine, beside bare servers in the same run.
//!
//! Ratios within one run mean something; single numbers depend on the machine.

mod fanout;
mod limits;
mod load;
mod servers;

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use clap::ValueEnum;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use self::{
    load::{Call, Figures, Until, as_f64},
    servers::Servers,
};
use crate::output;

/// Measures calls per second, latencies, CPU and memory of each operation.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Bench {
    /// What is measured: processes and store
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Limits, Mode::Ephemeral, Mode::Sqlite, Mode::Redis])]
    mode: Vec<Mode>,
    /// Seconds for each measurement
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Connections, one row of figures for each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    connections: Vec<usize>,
    /// KiB of text that are sent, and come back as the echo
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64, 1024])]
    payload: Vec<usize>,
    /// Tasks that are stored before calls are measured again, growing
    #[arg(long, value_delimiter = ',', default_values_t = [20_000, 100_000])]
    stored: Vec<usize>,
    /// Open streams for the memory figure
    #[arg(long, default_value_t = 1000)]
    streams: usize,
    /// Subscribers of one task
    #[arg(long, default_value_t = 200)]
    subscribers: usize,
    /// When the Redis of the cluster flushes its log: always, everysec, or off for no log
    #[arg(long, default_value = "always")]
    fsync: String,
    /// Serves what the others are compared with, and nothing else
    #[arg(long, hide = true)]
    bare: bool,
    /// Is the agent that the subscribers watch, and nothing else
    #[arg(long, hide = true)]
    agent: bool,
}

/// See [`Bench::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// A bare axum and a bare tonic
    Limits,
    /// `dev --ephemeral`
    Ephemeral,
    /// `dev` on SQLite
    Sqlite,
    /// Gateway, task-store, agent-runner and Redis, each a process
    Redis,
}

impl Bench {
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        if self.bare {
            return limits::serve().await;
        }
        if self.agent {
            return fanout::agent();
        }
        for mode in &self.mode {
            match mode {
                Mode::Limits => limits::measure(&self).await?,
                Mode::Ephemeral => self.measure_mode("`dev --ephemeral`", Servers::embedded(true).await?).await?,
                Mode::Sqlite => self.measure_mode("`dev` on SQLite", Servers::embedded(false).await?).await?,
                Mode::Redis => {
                    let name = format!("services and Redis, appendfsync {}", self.fsync);
                    self.measure_mode(&name, Servers::cluster(&self.fsync).await?).await?;
                }
            }
        }
        Ok(())
    }

    async fn measure_mode(&self, name: &str, servers: Servers) -> anyhow::Result<()> {
        say(&format!("\n## {name}\n\nidle: {}\n", servers.memory()?))?;
        self.open_streams(&servers).await?;
        let id = first_task(&servers, "/", "hello").await?;
        self.title(&servers)?;
        self.row(&servers, "card", &card()).await?;
        self.row(&servers, "GetTask", &get([&id])).await?;
        self.row(&servers, "SendMessage", &send("hello")).await?;
        self.row(&servers, "SendStreamingMessage, 4 events", &stream("hello")).await?;
        for &wanted in &self.stored {
            fill(&servers, wanted).await?;
            let total = stored(&servers).await?;
            let ids = some_ids(&servers).await?;
            self.row(&servers, &format!("ListTasks of 50, {total} stored"), &list()).await?;
            self.row(&servers, &format!("GetTask, {total} stored"), &get(&ids)).await?;
            self.row(&servers, &format!("SendMessage, {total} stored"), &send("hello")).await?;
            say(&format!("| with {} tasks: {} |", stored(&servers).await?, servers.memory()?))?;
        }
        for kib in &self.payload {
            let body = "x".repeat(kib * 1024);
            self.row(&servers, &format!("SendMessage, {kib} KiB"), &send(&body)).await?;
        }
        say(&format!("\n{}", fanout::measure(&servers, self.subscribers).await?))
    }

    fn title(&self, servers: &Servers) -> anyhow::Result<()> {
        let parts = servers.parts.iter().map(|part| part.name).collect::<Vec<_>>().join(" + ");
        say(&format!(
            "| operation | connections | calls/s | p50 ms | p99 ms | CPU µs/call: {parts} |\n|---|---|---|---|---|---|"
        ))
    }

    /// One row of figures for each number of connections.
    async fn row(&self, servers: &Servers, operation: &str, call: &Call) -> anyhow::Result<()> {
        load::run(&servers.address, call, 4, Until::Passed(Duration::from_millis(300))).await?;
        for &connections in &self.connections {
            let before = servers.cpu()?;
            let period = Until::Passed(Duration::from_secs(self.seconds));
            let figures = load::run(&servers.address, call, connections, period).await?;
            let cpu = servers.cpu()?.into_iter().zip(before).map(|(after, before)| after.saturating_sub(before));
            say(&line(operation, connections, &figures, &cpu.collect::<Vec<_>>()))?;
        }
        Ok(())
    }

    /// Memory of the processes while many quiet streams are open.
    async fn open_streams(&self, servers: &Servers) -> anyhow::Result<()> {
        let id = first_task(servers, "/waiting", "hello").await?;
        let open = subscribe(servers, "/waiting", &id, self.streams).await?;
        say(&format!("{} open streams: {}\n", open.len(), servers.memory()?))
    }
}

/// One row of a table of figures; `cpu` is what each process used.
fn line(operation: &str, connections: usize, figures: &Figures, cpu: &[Duration]) -> String {
    let each = |cpu: &Duration| cpu.as_secs_f64() * 1e6 / as_f64(figures.calls.max(1));
    let sum: f64 = cpu.iter().map(each).sum();
    let parts = match cpu {
        [_] => format!("{sum:.0}"),
        parts => {
            let parts: Vec<_> = parts.iter().map(|cpu| format!("{:.0}", each(cpu))).collect();
            format!("{sum:.0}: {}", parts.join(" + "))
        }
    };
    format!(
        "| {operation} | {connections} | {:.0} | {:.2} | {:.2} | {parts} |",
        figures.per_second(),
        figures.percentile(0.5).as_secs_f64() * 1e3,
        figures.percentile(0.99).as_secs_f64() * 1e3,
    )
}

fn say(text: &str) -> anyhow::Result<()> {
    Ok(output::line(text)?)
}

/// A connection, and what still comes on it.
type Open = (load::Connection, hyper::body::Incoming);

/// Opens streams of a task, each seen alive by its first event.
async fn subscribe(servers: &Servers, mount: &str, id: &str, count: usize) -> anyhow::Result<Vec<Open>> {
    let call = Call { path: mount.to_owned(), ..rpc("SubscribeToTask", [json!({ "id": id })]) };
    let mut open = Vec::with_capacity(count);
    for _ in 0..count {
        let mut connection = load::connect(&servers.address).await?;
        let mut body = load::open(&mut connection, &servers.address, &call, 0).await?;
        body.frame().await.context("the stream ended before its first event")??;
        open.push((connection, body));
    }
    Ok(open)
}

/// Sends a message and returns the id of its task.
async fn first_task(servers: &Servers, mount: &str, text: &str) -> anyhow::Result<String> {
    let call = Call { path: mount.to_owned(), ..send(text) };
    let answer = ask(servers, &call).await?;
    let id = answer.pointer("/result/task/id").and_then(Value::as_str);
    Ok(id.with_context(|| format!("no task in {answer}"))?.to_owned())
}

/// Calls once and reads the JSON.
async fn ask(servers: &Servers, call: &Call) -> anyhow::Result<Value> {
    let mut connection = load::connect(&servers.address).await?;
    let answer = load::send(&mut connection, &servers.address, call, 0).await?;
    Ok(serde_json::from_slice(&answer)?)
}

/// Sends messages until so many tasks are stored.
async fn fill(servers: &Servers, wanted: usize) -> anyhow::Result<()> {
    let missing = wanted.saturating_sub(stored(servers).await?);
    load::run(&servers.address, &send("fill"), 64, Until::Calls(missing)).await?;
    Ok(())
}

async fn stored(servers: &Servers) -> anyhow::Result<usize> {
    let page = ask(servers, &rpc("ListTasks", [json!({ "pageSize": 1 })])).await?;
    let total = page.pointer("/result/totalSize").and_then(Value::as_u64);
    Ok(usize::try_from(total.with_context(|| format!("no totalSize in {page}"))?)?)
}

/// Ids of a thousand tasks.
async fn some_ids(servers: &Servers) -> anyhow::Result<Vec<String>> {
    let (mut ids, mut token) = (Vec::new(), String::new());
    while ids.len() < 1000 {
        let page = ask(servers, &rpc("ListTasks", [json!({ "pageSize": 100, "pageToken": token })])).await?;
        let tasks = page.pointer("/result/tasks").and_then(Value::as_array).context("no tasks")?;
        ids.extend(tasks.iter().filter_map(|task| Some(task["id"].as_str()?.to_owned())));
        token = page.pointer("/result/nextPageToken").and_then(Value::as_str).unwrap_or_default().to_owned();
        if token.is_empty() {
            break;
        }
    }
    Ok(ids)
}

fn card() -> Call {
    Call {
        method: Method::GET,
        path: "/.well-known/agent-card.json".to_owned(),
        bodies: vec![Bytes::new()],
        expect: "supportedInterfaces",
    }
}

fn get(ids: impl IntoIterator<Item = impl AsRef<str>>) -> Call {
    let params = ids.into_iter().map(|id| json!({ "id": id.as_ref() }));
    Call { expect: "COMPLETED", ..rpc("GetTask", params) }
}

fn list() -> Call {
    Call { expect: "nextPageToken", ..rpc("ListTasks", [json!({ "pageSize": 50 })]) }
}

fn send(text: &str) -> Call {
    // The state may be INPUT_REQUIRED, of an agent that waits; a failure has no result.
    rpc("SendMessage", [message(text)])
}

fn stream(text: &str) -> Call {
    Call { expect: "COMPLETED", ..rpc("SendStreamingMessage", [message(text)]) }
}

fn message(text: &str) -> Value {
    json!({ "message": { "messageId": "m", "role": "ROLE_USER", "parts": [{ "text": text }] } })
}

fn rpc(method: &str, params: impl IntoIterator<Item = Value>) -> Call {
    let body = |params: Value| json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let bodies = params.into_iter().map(|params| body(params).to_string().into()).collect();
    Call { method: Method::POST, path: "/".to_owned(), bodies, expect: "\"result\"" }
}
