//! `rialto bench`: what each operation costs on this machine, beside a bare axum echo in the same run.
//!
//! Ratios within one run mean something; single numbers depend on the machine.

mod load;
mod server;

use std::{io::Write as _, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use axum::{Json, Router, routing::post};
use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use self::{
    load::{Call, as_f64},
    server::Server,
};

/// Measures requests per second, latencies and CPU of the operations of one process.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Bench {
    /// Seconds for each measurement.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Connections, one row of figures for each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    connections: Vec<usize>,
    /// Open streams for the memory figure.
    #[arg(long, default_value_t = 1000)]
    streams: usize,
    /// Tasks stored before ListTasks is measured.
    #[arg(long, default_value_t = 20_000)]
    stored: usize,
    /// Serves the bare echo that the others are compared with, and nothing else.
    #[arg(long, hide = true)]
    bare: bool,
}

impl Bench {
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        if self.bare {
            return serve_bare().await;
        }
        let mut out = std::io::stdout();
        writeln!(out, "| server | operation | connections | calls/s | p50 ms | p99 ms | server CPU µs/call |")?;
        writeln!(out, "|---|---|---|---|---|---|---|")?;

        let bare = Server::start(&["bench", "--bare"]).await?;
        self.measure("bare axum", "echo", &bare, &rpc_send("hello"), "hello").await?;
        drop(bare);

        let folder = std::env::temp_dir().join(format!("rialto-bench-{}", std::process::id()));
        let data = folder.to_str().context("the temporary folder has no UTF-8 name")?.to_owned();
        let modes: [(&str, Vec<&str>); 2] =
            [("dev --ephemeral", vec!["--ephemeral"]), ("dev (SQLite)", vec!["--data", &data])];
        for (name, arguments) in modes {
            let started = Server::start(&dev(&arguments)).await?;
            let idle = started.rss_mib()?;
            self.operations(name, &started).await?;
            writeln!(out, "\n{name}: RSS {idle:.0} MiB when idle, {:.0} MiB after the run\n", started.rss_mib()?)?;
        }
        std::fs::remove_dir_all(&folder).ok();
        self.open_streams().await
    }

    async fn operations(&self, name: &str, server: &Server) -> anyhow::Result<()> {
        let mut connection = load::connect(&server.address).await?;
        let sent = load::send(&mut connection, &server.address, &rpc_send("hello")).await?;
        let sent: Value = serde_json::from_slice(&sent)?;
        let id =
            sent.pointer("/result/task/id").and_then(Value::as_str).with_context(|| format!("no task in {sent}"))?;

        let card = Call {
            method: Method::GET,
            path: "/.well-known/agent-card.json".to_owned(),
            body: Bytes::new(),
            expect: "supportedInterfaces",
        };
        self.measure(name, "card", server, &card, "supportedInterfaces").await?;
        self.measure(name, "GetTask", server, &rpc("GetTask", &json!({ "id": id })), "COMPLETED").await?;
        self.measure(name, "SendMessage", server, &rpc_send("hello"), "COMPLETED").await?;
        let stream = rpc("SendStreamingMessage", &message("hello"));
        self.measure(name, "SendStreamingMessage", server, &stream, "COMPLETED").await?;

        let missing = self.stored.saturating_sub(stored(&mut connection, server).await?);
        for _ in 0..missing {
            load::send(&mut connection, &server.address, &rpc_send("fill")).await?;
        }
        let list = rpc("ListTasks", &json!({ "pageSize": 50 }));
        self.measure(name, "ListTasks of 50", server, &list, "nextPageToken").await
    }

    async fn measure(
        &self,
        name: &str,
        operation: &str,
        server: &Server,
        call: &Call,
        expect: &'static str,
    ) -> anyhow::Result<()> {
        let call = Call { expect, ..call.clone() };
        let period = Duration::from_secs(self.seconds);
        load::run(&server.address, &call, 4, Duration::from_millis(300)).await?;
        for &connections in &self.connections {
            let before = server.cpu()?;
            let figures = load::run(&server.address, &call, connections, period).await?;
            let cpu = server.cpu()?.saturating_sub(before);
            writeln!(
                std::io::stdout(),
                "| {name} | {operation} | {connections} | {:.0} | {:.2} | {:.2} | {:.0} |",
                figures.per_second(),
                figures.percentile(0.5).as_secs_f64() * 1e3,
                figures.percentile(0.99).as_secs_f64() * 1e3,
                cpu.as_secs_f64() * 1e6 / as_f64(figures.calls.max(1)),
            )?;
        }
        Ok(())
    }

    /// Memory of a process that holds many quiet streams.
    async fn open_streams(&self) -> anyhow::Result<()> {
        let config = std::env::temp_dir().join(format!("rialto-bench-{}.yaml", std::process::id()));
        std::fs::write(&config, "agents: [{ id: echo, backend: { type: echo }, turn-end: input-required }]\n")?;
        let path = config.to_str().context("the temporary folder has no UTF-8 name")?;
        let server = Server::start(&dev(&["--ephemeral", "--config", path])).await?;
        let idle = server.rss_mib()?;

        let mut connection = load::connect(&server.address).await?;
        let sent = load::send(&mut connection, &server.address, &rpc_send("hello")).await?;
        let sent: Value = serde_json::from_slice(&sent)?;
        let id = sent.pointer("/result/task/id").context("no task")?.clone();
        let subscribe = rpc("SubscribeToTask", &json!({ "id": id }));
        let mut open = Vec::with_capacity(self.streams);
        for _ in 0..self.streams {
            let mut connection = load::connect(&server.address).await?;
            let mut body = load::open(&mut connection, &server.address, &subscribe).await?;
            body.frame().await.context("the stream ended before its first event")??;
            open.push((connection, body));
        }
        writeln!(
            std::io::stdout(),
            "RSS {idle:.0} MiB idle, {:.0} MiB with {} open streams",
            server.rss_mib()?,
            open.len()
        )?;
        std::fs::remove_file(config).ok();
        Ok(())
    }
}

fn dev<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["dev", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"], arguments].concat()
}

fn message(text: &str) -> Value {
    json!({ "message": { "messageId": "m", "role": "ROLE_USER", "parts": [{ "text": text }] } })
}

fn rpc(method: &str, params: &Value) -> Call {
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    Call { method: Method::POST, path: "/".to_owned(), body: body.to_string().into(), expect: "result" }
}

fn rpc_send(text: &str) -> Call {
    rpc("SendMessage", &message(text))
}

async fn stored(
    connection: &mut hyper::client::conn::http1::SendRequest<http_body_util::Full<Bytes>>,
    server: &Server,
) -> anyhow::Result<usize> {
    let page = load::send(connection, &server.address, &rpc("ListTasks", &json!({ "pageSize": 1 }))).await?;
    let page: Value = serde_json::from_slice(&page)?;
    let total =
        page.pointer("/result/totalSize").and_then(Value::as_u64).with_context(|| format!("no totalSize in {page}"))?;
    Ok(usize::try_from(total)?)
}

/// Reads JSON and answers with it: the least that a JSON server on this stack can do.
async fn serve_bare() -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    let mut out = std::io::stdout();
    writeln!(out, "ready: http://{}", listener.local_addr()?)?;
    out.flush()?;
    Ok(axum::serve(listener, Router::new().route("/", post(async |Json(body): Json<Value>| Json(body)))).await?)
}
