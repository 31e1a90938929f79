//! Traces, metrics and logs of real processes, as a collector and a scraper see them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, TcpListener},
    process::Command,
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use reqwest::{Client, RequestBuilder};
use rialto_testkit::{
    chaos::ChaosProxy,
    llm::{KEY, Llm},
    otlp::{Collector, Mood, Span, Taken},
    redis::RedisServer,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, timeout};

use crate::process::{Dev, rialto, scripted, scripted_agent_path};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn http() -> Client {
    // Already there if another test was quicker.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Client::builder().no_proxy().tls_certs_only([]).timeout(Duration::from_secs(30)).build().unwrap()
}

fn rpc(client: &Client, url: &str, method: &str, params: &Value) -> RequestBuilder {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    client.post(url).header("a2a-version", "1.0").header("content-type", "application/json").body(body)
}

fn message(text: &str) -> Value {
    json!({"message": {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}})
}

/// Sends a message with a `traceparent` and waits for its end.
async fn send(client: &Client, url: &str, text: &str, traceparent: &[&str]) {
    let mut request = rpc(client, url, "SendMessage", &message(text));
    for value in traceparent {
        request = request.header("traceparent", *value);
    }
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["result"]["task"]["status"]["state"], "TASK_STATE_COMPLETED", "{answer}");
}

/// A process that exports at once.
fn exporting(mut command: Command, endpoint: &str) -> Command {
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).env("OTEL_BSP_SCHEDULE_DELAY", "20");
    command.env("OTEL_BLRP_SCHEDULE_DELAY", "20");
    command
}

async fn started(command: Command) -> Dev {
    let starting = thread::spawn(|| Dev::spawn(command));
    tokio::task::spawn_blocking(|| starting.join().unwrap()).await.unwrap()
}

/// A `rialto dev` with echo, whose admin port is known.
fn dev(arguments: &[&str]) -> (Command, String) {
    let admin = free();
    let all = ["dev", "--ephemeral", "--listen", "127.0.0.1:0", "--admin-listen", &admin.to_string()];
    (rialto(&[&all, arguments].concat()), format!("http://{admin}/metrics"))
}

/// All series of a process: name and labels, and their values.
async fn scrape(client: &Client, url: &str) -> BTreeMap<String, f64> {
    let response = client.get(url).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4");
    let text = response.text().await.unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// The sum of all series of a metric.
fn sum(series: &BTreeMap<String, f64>, name: &str) -> f64 {
    series.iter().filter(|(key, _)| key.split('{').next() == Some(name)).map(|(_, value)| value).sum()
}

/// The one span of a service with this name and kind.
fn one<'t>(taken: &'t Taken, service: &str, name: &str, kind: &str) -> &'t Span {
    let of_trace = taken.spans.iter().filter(|span| span.trace == TRACE);
    let mut found = of_trace.filter(|span| (&*span.service, &*span.name, span.kind) == (service, name, kind));
    let span = found.next().unwrap_or_else(|| panic!("no {kind} span {name} of {service}"));
    assert!(found.next().is_none(), "{name} of {service} twice");
    span
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_streamed_message_is_one_trace_through_separate_processes() {
    let (redis, collector, llm) =
        (RedisServer::start().await.unwrap(), Collector::start().await.unwrap(), Llm::start().await.unwrap());
    let (folder, task_store) = (TempDir::new().unwrap(), free());
    let file = folder.path().join("rialto.yaml");
    let yaml = format!(
        "store: redis\nredis: {{url: '{}'}}\nstop-grace: 6s\nservices: {{task-store: ['http://{task_store}']}}\n\
         telemetry: {{otlp-endpoint: '{}'}}\nagents:\n  - id: helper\n    backend: \
         {{type: openai, model: fake, temperature: 0.5, base-url: '{}', api-key: {KEY}}}\n",
        redis.url(),
        collector.endpoint(),
        llm.base_url()
    );
    std::fs::write(&file, yaml).unwrap();
    let start = |role: &str| {
        let listen = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let port = task_store.to_string();
        let arguments = ["serve", role, "--config", file.to_str().unwrap(), "--task-store-listen", &port];
        let mut command = rialto(&[&arguments[..], &listen].concat());
        // The log has no say in it.
        command.env("RIALTO_LOG", "error").env("OTEL_BSP_SCHEDULE_DELAY", "20");
        started(command)
    };
    let (gateway, _store, _runner) = tokio::join!(start("gateway"), start("task-store"), start("agent-runner"));

    let stream = rpc(&http(), &gateway.url, "SendStreamingMessage", &message("text:20x1"));
    let stream = stream.header("traceparent", format!("00-{TRACE}-{PARENT}-01"));
    let events = stream.send().await.unwrap().text().await.unwrap();
    assert!(events.contains("TASK_STATE_COMPLETED"), "{events}");

    let names = |taken: &Taken, name: &str| taken.spans.iter().filter(|span| span.name == name).count();
    let taken = collector
        .until(|taken| {
            // The client and the server of each call, and what ends last in each process.
            ["rialto.tasks.v1.TaskStore/Begin", "rialto.tasks.v1.TaskStore/Finish"]
                .iter()
                .all(|name| names(taken, name) == 2)
                && ["turn", "a2a SendStreamingMessage"].iter().all(|name| names(taken, name) == 1)
        })
        .await;
    let (gateway, store, runner) = ("rialto-gateway", "rialto-task-store", "rialto-agent-runner");

    let request = one(&taken, gateway, "a2a SendStreamingMessage", "server");
    assert_eq!(request.parent, PARENT);
    assert_eq!(request.attributes["a2a.binding"], "jsonrpc");
    let call = |name: &str, caller: &str, parent: &Span| -> Span {
        let name = format!("rialto.tasks.v1.TaskStore/{name}");
        let (client, server) = (one(&taken, caller, &name, "client"), one(&taken, store, &name, "server"));
        assert_eq!((&client.parent, &server.parent), (&parent.id, &client.id), "{name}");
        assert!(client.start <= server.start && server.end <= client.end + 1_000_000, "{name}");
        server.clone()
    };
    let sent = call("Send", gateway, request);
    let begun = call("Begin", runner, request);
    let turn = one(&taken, runner, "turn", "consumer");
    assert_eq!((&turn.parent, &*turn.attributes["attempt"]), (&request.id, "1"));
    assert_eq!(turn.attributes["outcome"], "completed");
    let finished = call("Finish", runner, turn);
    for server in [&sent, &begun, &finished] {
        let commits = taken.spans.iter().filter(|span| span.name == "store commit" && span.parent == server.id);
        assert!(commits.clone().count() >= 1, "{} commits nothing", server.name);
    }

    let waited = one(&taken, runner, "queue wait", "internal");
    assert_eq!(waited.parent, request.id);
    // It begins by the store's clock, which a process knows as well as its round trips to the store are short.
    assert!(waited.start >= request.start - 1_000_000_000 && waited.end <= turn.end, "{waited:?} {request:?}");

    let chat = one(&taken, runner, "chat fake", "client");
    assert_eq!(chat.parent, turn.id);
    for (key, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "openai"),
        ("gen_ai.request.model", "fake"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.response.finish_reasons", "stop"),
        ("gen_ai.usage.input_tokens", "10"),
        ("gen_ai.usage.output_tokens", "20"),
        ("server.address", "127.0.0.1"),
    ] {
        assert_eq!(chat.attributes.get(key).map(String::as_str), Some(value), "{key}: {chat:?}");
    }

    // All of it is one trace, and every name is one of a short list.
    let spans: Vec<_> = taken.spans.iter().filter(|span| span.trace == TRACE).collect();
    let ids: BTreeSet<_> = spans.iter().map(|span| &*span.id).chain([PARENT]).collect();
    for span in &spans {
        assert!(ids.contains(&*span.parent), "{} hangs in the air", span.name);
        assert!(!span.failed, "{span:?}");
    }
    let names: BTreeSet<_> =
        spans.iter().map(|span| span.name.trim_start_matches("rialto.tasks.v1.TaskStore/")).collect();
    let known = ["Begin", "Finish", "Record", "Send", "a2a SendStreamingMessage", "chat fake", "queue wait"];
    assert!(names.iter().all(|name| known.contains(name) || ["store commit", "turn"].contains(name)), "{names:?}");
    assert_eq!(taken.resource["service.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(taken.resource["service.instance.id"].len(), 36);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_waits_or_is_tried_again_stays_in_its_own_senders_trace() {
    let (collector, folder) = (Collector::start().await.unwrap(), TempDir::new().unwrap());
    let file = scripted(folder.path(), "    when-busy: queue\n    max-attempts: 2\n");
    let (command, _) = dev(&["--config", &file]);
    let mut command = exporting(command, &collector.endpoint());
    command.env("PATH", scripted_agent_path());
    let (dev, client) = (started(command).await, http());
    let other = "1af7651916cd43dd8448eb211c80319c";
    let sent = async |text: &str, trace: &str, at_once: bool| {
        let mut params = message(text);
        params["message"]["contextId"] = "c".into();
        params["configuration"] = json!({"returnImmediately": at_once});
        let request = rpc(&client, &dev.url, "SendMessage", &params);
        let answer = request.header("traceparent", format!("00-{trace}-{PARENT}-01")).send().await.unwrap();
        answer.json::<Value>().await.unwrap()["result"]["task"]["status"]["state"].as_str().unwrap().to_owned()
    };
    sent("chunks:5x20", TRACE, true).await;
    assert_eq!(sent("panic", other, false).await, "TASK_STATE_FAILED");
    let turns = |taken: &Taken| taken.spans.iter().filter(|span| span.name == "turn").cloned().collect::<Vec<_>>();
    let taken = collector.until(|taken| turns(taken).len() == 3).await;
    let told: Vec<_> = turns(&taken)
        .iter()
        .map(|turn| (turn.trace.clone(), turn.attributes["attempt"].clone(), turn.attributes["outcome"].clone()))
        .collect();
    let turn = |trace: &str, attempt: &str, outcome: &str| (trace.to_owned(), attempt.to_owned(), outcome.to_owned());
    assert_eq!(told, [turn(TRACE, "1", "completed"), turn(other, "1", "crashed"), turn(other, "2", "crashed")]);
    let waits: Vec<_> = taken.spans.iter().filter(|span| span.name == "queue wait").collect();
    assert_eq!(waits.iter().map(|span| &*span.trace).collect::<Vec<_>>(), [TRACE, other]);
    assert!(waits[1].end - waits[1].start > 50_000_000, "it waited for the turn before it: {waits:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_is_told_the_trace_of_its_turn_with_and_without_a_collector() {
    let (collector, folder) = (Collector::start().await.unwrap(), TempDir::new().unwrap());
    let (script, file) = (folder.path().join("agent.sh"), folder.path().join("r.yaml"));
    let lines = r#"IFS= read -r line; rest=${line##*\"traceparent\":\"}
printf '{"type":"message","text":"%s"}\n' "${rest%%\"*}"
"#;
    std::fs::write(&script, lines).unwrap();
    let backend = format!("{{type: command, command: [sh, {}]}}", script.display());
    std::fs::write(&file, format!("agents: [{{id: shows, reply: message, backend: {backend}}}]")).unwrap();
    let shown = async |endpoint: Option<String>| {
        let (mut command, _) = dev(&["--config", file.to_str().unwrap()]);
        command.env("PATH", std::env::var("PATH").unwrap());
        if let Some(endpoint) = endpoint {
            command = exporting(command, &endpoint);
        }
        let (dev, client) = (started(command).await, http());
        let request = rpc(&client, &dev.url, "SendMessage", &message("x"));
        let answer = request.header("traceparent", format!("00-{TRACE}-{PARENT}-01")).send().await.unwrap();
        let answer: Value = answer.json().await.unwrap();
        dev.signal(Signal::SIGTERM);
        tokio::task::spawn_blocking(|| dev.wait()).await.unwrap();
        answer["result"]["message"]["parts"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    let told = shown(Some(collector.endpoint())).await;
    let taken = collector.taken();
    assert_eq!(told, format!("00-{TRACE}-{}-01", one(&taken, "rialto", "turn", "consumer").id));
    assert_eq!(shown(None).await, format!("00-{TRACE}-{PARENT}-01"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c155_a_malformed_traceparent_breaks_neither_request_nor_trace() {
    let collector = Collector::start().await.unwrap();
    let mut command = exporting(dev(&[]).0, &collector.endpoint());
    command.env("RIALTO_LOG", "error").env("OTEL_SERVICE_NAME", "mine").env("OTEL_RESOURCE_ATTRIBUTES", "team=a");
    let (dev, client) = (started(command).await, http());
    let good = format!("00-{TRACE}-{PARENT}-01");
    let root = |span: &Span| span.name == "a2a SendMessage";
    let roots = |taken: &Taken| taken.spans.iter().filter(|span| root(span)).count();
    let two = [&*good, &*good];
    let bad: [&[&str]; 6] = [
        &["00-0-0-00"],
        &[&format!("00-{}-{PARENT}-01", "0".repeat(32))],
        &[&format!("00-{TRACE}-{}-01", "0".repeat(16))],
        &[&format!("ff-{TRACE}-{PARENT}-01")],
        &two,
        &[""],
    ];
    for (n, traceparent) in bad.iter().enumerate() {
        send(&client, &dev.url, "x", traceparent).await;
        let taken = collector.until(|taken| roots(taken) == n + 1).await;
        let span = taken.spans.iter().rfind(|span| root(span)).unwrap();
        assert!(span.parent.is_empty() && span.trace != TRACE, "{traceparent:?}: {span:?}");
    }
    // A long tracestate is dropped, the trace goes on.
    let request = rpc(&client, &dev.url, "SendMessage", &message("x")).header("traceparent", &good);
    let answer = request.header("tracestate", format!("a={}", "x".repeat(8000))).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let taken = collector.until(|taken| roots(taken) == bad.len() + 1).await;
    assert!(taken.spans.iter().any(|span| root(span) && span.trace == TRACE && span.parent == PARENT));
    assert_eq!((&*taken.resource["service.name"], &*taken.resource["team"]), ("mine", "a"));

    // Who does not sample is not sampled, at no hop.
    let other = "1af7651916cd43dd8448eb211c80319c";
    send(&client, &dev.url, "x", &[&format!("00-{other}-{PARENT}-00")]).await;
    send(&client, &dev.url, "x", &[]).await;
    let taken = collector.until(|taken| roots(taken) == bad.len() + 2).await;
    assert!(taken.spans.iter().all(|span| span.trace != other));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c157_metrics_do_not_grow_with_what_clients_make_up() {
    let (command, metrics) = dev(&[]);
    let (dev, client) = (started(command).await, http());
    send(&client, &dev.url, "warm", &[]).await;
    let before = scrape(&client, &metrics).await;
    for n in 0..150 {
        let id = format!("{n:032x}");
        drop(rpc(&client, &dev.url, "GetTask", &json!({"id": id})).send().await.unwrap());
        drop(rpc(&client, &dev.url, &format!("Method{n}"), &json!({})).send().await.unwrap());
        drop(client.get(format!("{}/path/{n}?q={n}", dev.url)).header("a2a-version", "1.0").send().await.unwrap());
        drop(client.get(format!("{}/tasks/{id}", dev.url)).header("a2a-version", "1.0").send().await.unwrap());
    }
    let after = scrape(&client, &metrics).await;
    let new: Vec<_> = after.keys().filter(|key| !before.contains_key(*key)).collect();
    assert!(new.len() < 50, "{} new series: {new:#?}", new.len());
    assert!(sum(&after, "rialto_gateway_requests_total") >= 600.0, "{after:#?}");
    let unknown = r#"rialto_gateway_requests_total{binding="rest",operation="unknown",outcome="METHOD_NOT_FOUND"}"#;
    assert_eq!(after.get(unknown), Some(&150.0), "{after:#?}");
}

/// Lines that the process has written about its collector.
fn warnings(stderr: &str) -> usize {
    stderr.lines().filter(|line| line.contains("collector")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c153_a_collector_that_is_down_or_refuses_is_one_warning_and_a_count() {
    let collector = Collector::start().await.unwrap();
    collector.set_mood(Mood::Refuses);
    for endpoint in [format!("http://{}", free()), collector.endpoint()] {
        let (command, metrics) = dev(&[]);
        let (dev, client) = (started(exporting(command, &endpoint)).await, http());
        for n in 0..20 {
            send(&client, &dev.url, &n.to_string(), &[]).await;
        }
        let until = Instant::now() + Duration::from_secs(20);
        while sum(&scrape(&client, &metrics).await, "rialto_telemetry_export_failures_total") < 2.0 {
            assert!(Instant::now() < until, "no failed export was counted");
        }
        assert!(sum(&scrape(&client, &metrics).await, "rialto_telemetry_dropped_total") > 0.0);
        dev.signal(Signal::SIGTERM);
        let stopped = Instant::now();
        let (code, _, stderr) = tokio::task::spawn_blocking(|| dev.wait()).await.unwrap();
        assert_eq!((code, warnings(&stderr)), (0, 1), "{stderr}");
        assert!(stopped.elapsed() < Duration::from_secs(10));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c153_a_collector_that_goes_away_under_load_and_comes_back_is_used_again() {
    let collector = Collector::start().await.unwrap();
    let proxy = ChaosProxy::start(collector.address()).await.unwrap();
    let (command, metrics) = dev(&[]);
    let command = exporting(command, &format!("http://{}", proxy.address()));
    let (dev, client) = (started(command).await, http());
    send(&client, &dev.url, "before", &[]).await;
    collector.until(|taken| !taken.spans.is_empty()).await;
    proxy.cut();
    let sends = (0..50).map(|n| {
        let (client, url) = (client.clone(), dev.url.clone());
        async move { send(&client, &url, &n.to_string(), &[]).await }
    });
    timeout(Duration::from_secs(20), futures::future::join_all(sends)).await.expect("requests wait for the collector");
    let until = Instant::now() + Duration::from_secs(20);
    while sum(&scrape(&client, &metrics).await, "rialto_telemetry_export_failures_total") == 0.0 {
        assert!(Instant::now() < until, "no failed export was counted");
    }
    proxy.mend();
    // The first ones may still meet the old connection.
    let until = Instant::now() + Duration::from_secs(20);
    while !collector.taken().spans.iter().any(|span| span.trace == TRACE && span.name == "turn") {
        assert!(Instant::now() < until, "nothing came in any more");
        send(&client, &dev.url, "after", &[&format!("00-{TRACE}-{PARENT}-01")]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c153_a_collector_that_never_answers_holds_nothing_up() {
    let collector = Collector::start().await.unwrap();
    collector.set_mood(Mood::Deaf);
    let (command, metrics) = dev(&[]);
    let (dev, client) = (started(exporting(command, &collector.endpoint())).await, http());
    // More than the queue holds.
    let until = Instant::now() + Duration::from_secs(40);
    while sum(&scrape(&client, &metrics).await, "rialto_telemetry_dropped_total") == 0.0 {
        assert!(Instant::now() < until, "the queue has no end");
        let sends = (0..64).map(|n| async move { n.to_string() }).map(|text| {
            let (client, url) = (client.clone(), dev.url.clone());
            async move { send(&client, &url, &text.await, &[]).await }
        });
        timeout(Duration::from_secs(20), futures::future::join_all(sends))
            .await
            .expect("requests wait for the collector");
    }
    dev.signal(Signal::SIGTERM);
    let stopped = Instant::now();
    let (code, _, stderr) = tokio::task::spawn_blocking(|| dev.wait()).await.unwrap();
    assert_eq!(code, 0, "{stderr}");
    assert!(warnings(&stderr) <= 1, "{stderr}");
    assert!(stopped.elapsed() < Duration::from_secs(15), "the end waits for the collector");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c153_the_last_spans_arrive_before_the_process_ends() {
    let collector = Collector::start().await.unwrap();
    let mut command = exporting(dev(&[]).0, &collector.endpoint());
    command.env("OTEL_BSP_SCHEDULE_DELAY", "600000").env("OTEL_BLRP_SCHEDULE_DELAY", "600000");
    let (dev, client) = (started(command).await, http());
    send(&client, &dev.url, "x", &[&format!("00-{TRACE}-{PARENT}-01")]).await;
    dev.signal(Signal::SIGTERM);
    assert_eq!(tokio::task::spawn_blocking(|| dev.wait()).await.unwrap().0, 0);
    let taken = collector.taken();
    for (name, kind) in [("a2a SendMessage", "server"), ("turn", "consumer")] {
        one(&taken, "rialto", name, kind);
    }
    assert!(taken.records.iter().any(|record| record.body.contains("stopping")), "{:?}", taken.records);
    assert!(taken.metrics.contains_key("rialto.gateway.requests"), "{:?}", taken.metrics);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_line_of_a_turn_names_its_trace() {
    let (collector, llm) = (Collector::start().await.unwrap(), Llm::start().await.unwrap());
    let mut command = exporting(dev(&["--model", "fake"]).0, &collector.endpoint());
    command.env("OPENAI_BASE_URL", llm.base_url()).env("OPENAI_API_KEY", KEY).env("RIALTO_LOG_FORMAT", "json");
    let (dev, client) = (started(command).await, http());
    let failing = rpc(&client, &dev.url, "SendMessage", &message("code:403:any"));
    let failing = failing.header("traceparent", format!("00-{TRACE}-{PARENT}-01"));
    let answer: Value = failing.send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["result"]["task"]["status"]["state"], "TASK_STATE_FAILED", "{answer}");
    let said = "the model gave no answer";
    let taken = collector
        .until(|taken| {
            taken.records.iter().any(|record| record.body == said)
                && ["chat fake", "turn"].iter().all(|name| taken.spans.iter().any(|span| span.name == *name))
        })
        .await;
    let chat = one(&taken, "rialto", "chat fake", "client");
    assert!(chat.failed && chat.attributes["error.type"] == "403", "{chat:?}");
    let record = taken.records.iter().find(|record| record.body == said).unwrap();
    assert_eq!((&*record.trace, &record.span), (TRACE, &chat.id));

    dev.signal(Signal::SIGTERM);
    let (_, _, stderr) = tokio::task::spawn_blocking(|| dev.wait()).await.unwrap();
    let lines: Vec<Value> = stderr.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let line = lines.iter().find(|line| line["message"] == said).unwrap_or_else(|| panic!("{stderr}"));
    assert_eq!((&line["trace_id"], &line["span_id"]), (&json!(TRACE), &json!(chat.id)), "{line}");
    assert!(!stderr.contains(KEY));
}

/// Rows of the tables of the page whose first cell is code: all cells, without the backquotes.
fn rows(section: &str) -> Vec<Vec<String>> {
    let page = include_str!("../../../../docs/telemetry.md");
    let section = page.split("\n## ").find(|text| text.starts_with(section)).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.split('|').skip(1).map(|cell| cell.trim().replace('`', "")).collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_names_every_metric_with_its_unit_and_labels_and_no_other() {
    let (collector, llm) = (Collector::start().await.unwrap(), Llm::start().await.unwrap());
    let (command, metrics) = dev(&["--model", "fake"]);
    let mut command = exporting(command, &collector.endpoint());
    command.env("OPENAI_BASE_URL", llm.base_url()).env("OPENAI_API_KEY", KEY);
    let (dev, client) = (started(command).await, http());
    send(&client, &dev.url, "hello", &[]).await;
    let stream = rpc(&client, &dev.url, "SendStreamingMessage", &message("code:403:any")).send().await.unwrap();
    assert!(stream.text().await.unwrap().contains("TASK_STATE_FAILED"));
    let scraped = scrape(&client, &metrics).await;
    dev.signal(Signal::SIGTERM);
    assert_eq!(tokio::task::spawn_blocking(|| dev.wait()).await.unwrap().0, 0);

    let rows = rows("Metrics");
    let documented: BTreeMap<String, String> = rows.iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    let exported = collector.taken().metrics;
    assert_eq!(exported, documented, "left: in the code, right: in docs/telemetry.md");

    // Names and labels of the text form; what histograms add is not part of either.
    let mut labels = BTreeMap::<String, BTreeSet<String>>::new();
    for series in scraped.keys().filter(|series| !series.starts_with("target_info")) {
        let (name, rest) = series.split_once('{').unwrap_or((series, ""));
        let stem = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let known = labels.entry(stem.to_owned()).or_default();
        known.extend(
            rest.split("\",").filter_map(|pair| Some(pair.split_once('=')?.0.to_owned())).filter(|it| it != "le"),
        );
    }
    let documented = rows.iter().map(|row| {
        let labels = row[3].split(',').map(|label| label.trim().replace('.', "_")).filter(|label| !label.is_empty());
        (row[2].clone(), labels.collect())
    });
    assert_eq!(labels, documented.collect::<BTreeMap<_, BTreeSet<_>>>(), "left: in /metrics, right: in the page");
}
