//! `rialto dev`: every service in this process, on the embedded store.
//!
//! The services talk through the same gRPC calls as in a cluster, in memory.

use std::{
    env,
    ffi::OsString,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use rialto_agent_runner::RunnerOptions;
use rialto_gateway::Gateway;
use rialto_net::{BindError, Limits, Listener};
use rialto_rpc::{Transport, tasks};
use rialto_runtime::{
    config::{Config, Flag},
    supervise::{Failure, Signals, Supervisor},
};
use rialto_store::{
    Engine,
    sqlite::{SqliteConfig, SqliteEngine},
};
use rialto_task_store::TaskStore;
use serde_json::json;
use tokio::time::sleep;
use url::Url;

use crate::{
    cli::{DevArgs, fail},
    client::{self, fetch_card},
    config::load_or_complain,
    output,
};

/// One Redis or one file is one shard (design §4).
const SHARDS: u16 = 1;

/// After the grace for running work: time to hand back what did not end.
const HAND_BACK: Duration = Duration::from_secs(4);

/// Between two looks whether the process answers already.
const READY_PAUSE: Duration = Duration::from_millis(5);

pub(crate) async fn run(args: DevArgs) -> ExitCode {
    if args.model.is_some() && env::var_os("OPENAI_API_KEY").is_none_or(|key| key.is_empty()) {
        return fail(2, "--model needs OPENAI_API_KEY in the environment; an endpoint that asks for no key takes any");
    }
    let flags = flags(&args);
    let config = match load_or_complain(args.config, flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    // As set in the shell is often 1024, which is less than the connections that are served.
    if let Err(error) = rlimit() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    match serve(config).await {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => fail(1, &failure.to_string()),
        Err(problem) => fail(2, &problem),
    }
}

fn flags(args: &DevArgs) -> Vec<Flag> {
    let text = |text: &Option<String>| text.clone();
    let data = args.data.as_ref().map(|data| data.display().to_string());
    [
        ("--model", "agents", args.model.as_deref().map(model_agent)),
        ("--listen", "listen", text(&args.listen)),
        ("--admin-listen", "admin-listen", text(&args.admin_listen)),
        ("--data", "data", data),
        ("--data", "ephemeral", args.data.is_some().then(|| "false".to_owned())),
        ("--ephemeral", "ephemeral", args.ephemeral.then(|| "true".to_owned())),
    ]
    .into_iter()
    .filter_map(|(name, key, value)| Some(Flag { name, key, value: value? }))
    .collect()
}

/// The agents of `--model`; endpoint and key come from the environment.
fn model_agent(model: &str) -> String {
    let card = json!({"name": model, "description": format!("Answers with the model {model}.")});
    json!([{"id": "assistant", "card": card, "backend": {"type": "openai", "model": model}}]).to_string()
}

/// The outer error is one of starting, the inner one of running.
async fn serve(config: Config) -> Result<Result<(), Failure>, String> {
    let signals = Signals::new().map_err(|error| format!("cannot watch for signals: {error}"))?;
    let public = bind(&config.listen, "listen").await?;
    let admin = bind(&config.admin_listen, "admin-listen").await?;
    let engine = open(&config).await?;

    let supervisor = Supervisor::new();
    let stop = supervisor.stop();
    let tracker = supervisor.tracker();
    let store = TaskStore::new(Arc::clone(&engine), &rialto_task_store::Options::default());
    store.run_background(&stop, &tracker);
    let client = tasks::client(Transport::in_memory(tasks::server(store)));
    let grace = config.stop_grace.0;
    let (public_addr, admin_addr) = (public.local_addr(), admin.local_addr());
    let gateway = Gateway::new(&config, client.clone(), public_addr, &tracker, stop.clone())
        .map_err(|error| format!("{error:#}"))?;
    let runner = RunnerOptions { agents: config.agents.clone(), stop_grace: grace.saturating_sub(HAND_BACK) };
    supervisor.part("agent-runner", {
        let run = rialto_agent_runner::run(runner, engine, client, stop.clone());
        async move { run.await.map_err(|error| format!("{error:#}")) }
    });
    let limits = Limits {
        connections: config.limits.connections,
        streams_per_connection: config.limits.streams_per_connection,
        header_timeout: config.limits.header_timeout.0,
    };
    for (name, listener, router) in [("gateway", public, gateway.router()), ("admin port", admin, gateway.admin())] {
        let stop = stop.clone();
        supervisor.part(name, async move {
            listener.serve(router, limits, stop, grace).await;
            Ok::<_, String>(())
        });
    }
    // Not one of the tasks that the process waits for: it lives until the process ends.
    let watch = signals.watch(stop.clone());
    let run = supervisor.run(grace + HAND_BACK);
    let announce = async {
        tokio::select! {
            () = ready(public_addr, admin_addr) => announce(&config, public_addr),
            () = stop.cancelled() => {}
        }
    };
    let result = tokio::select! {
        (result, ()) = async { tokio::join!(run, announce) } => result,
        never = watch => match never {},
    };
    Ok(result)
}

async fn bind(address: &str, key: &str) -> Result<Listener, String> {
    Listener::bind(address).await.map_err(|error| match error {
        BindError::InUse(address) => {
            format!("{address} is used by another process; stop that one, or choose another address with --{key}")
        }
        other => format!("{key}: {other}; choose another address with --{key}"),
    })
}

async fn open(config: &Config) -> Result<Arc<dyn Engine>, String> {
    let sqlite = if config.ephemeral {
        SqliteConfig::memory(SHARDS)
    } else {
        let folder = config.data.clone().or_else(|| default_data(env::var_os("XDG_DATA_HOME"), env::var_os("HOME")));
        let folder = folder.ok_or("there is no home folder to keep tasks in; use --data DIR or --ephemeral")?;
        SqliteConfig::folder(folder, SHARDS)
    };
    let opened = tokio::task::spawn_blocking(|| SqliteEngine::open(sqlite)).await;
    opened
        .map_err(|error| format!("cannot open the store: {error}"))?
        .map_err(|error| error.to_string())
        .map(|e| e as _)
}

/// `rialto` in the user's data folder, as the XDG base directories have it: relative paths there are ignored.
fn default_data(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let base = xdg.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(".local/share")))?;
    Some(base.join("rialto"))
}

/// Raises the soft limit of open files to the hard one.
fn rlimit() -> nix::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
}

/// Waits until both ports answer, and the services behind them.
async fn ready(public: SocketAddr, admin: SocketAddr) {
    let public = Url::parse(&url(public)).expect("an address makes a URL");
    // An agent with a host of its own has no card here; that is an answer too.
    while matches!(fetch_card(&public).await, Err(client::Failure::Unreachable(_))) {
        sleep(READY_PAUSE).await;
    }
    while client::probe(&url(admin), "/readyz").await.is_err() {
        sleep(READY_PAUSE).await;
    }
}

/// The URL at which this machine reaches a listening address.
fn url(address: SocketAddr) -> String {
    let reachable = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from((Ipv4Addr::LOCALHOST, v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => SocketAddr::from((Ipv6Addr::LOCALHOST, v6.port())),
        address => address,
    };
    format!("http://{reachable}")
}

fn announce(config: &Config, public: SocketAddr) {
    let base = url(public);
    let program = env::args().next().unwrap_or_else(|| "rialto".to_owned());
    for line in hints(config, &base, &program) {
        output::complain(&line);
    }
    if let Err(error) = output::line(&format!("ready: {base}")) {
        tracing::warn!(%error, "cannot write to stdout");
    }
}

/// Three commands to copy: they work as they are.
fn hints(config: &Config, base: &str, program: &str) -> Vec<String> {
    // An agent that any host name leads to, if there is one.
    let agent = config.agents.iter().find(|agent| agent.host.is_none()).or(config.agents.first());
    let mount = agent.map_or("", |agent| agent.mount.trim_end_matches('/'));
    let host = agent.and_then(|agent| agent.host.as_ref());
    let mut curl = "-H 'Content-Type: application/json' -H 'A2A-Version: 1.0'".to_owned();
    if let Some(host) = host {
        curl.push_str(&format!(" -H 'Host: {host}'"));
    }
    let rpc = |method: &str| {
        let message = r#"{"messageId":"m1","role":"ROLE_USER","parts":[{"text":"hello"}]}"#;
        format!(r#"'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{"message":{message}}}}}'"#)
    };
    let endpoint = format!("{base}{mount}");
    let url = if endpoint == "http://127.0.0.1:8080" { String::new() } else { format!(" --url {endpoint}") };
    let post = if mount.is_empty() { format!("{base}/") } else { endpoint };
    let mut hints = vec![
        "Try it:".to_owned(),
        format!("  curl -s {post} {curl} -d {}", rpc("SendMessage")),
        format!("  curl -sN {post} {curl} -d {}", rpc("SendStreamingMessage")),
    ];
    if host.is_none() {
        hints.push(format!("  {} call hello{url}", quoted(program)));
    }
    hints
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use rialto_runtime::config::parse_yaml;

    use super::*;

    #[test]
    fn data_goes_where_the_desktop_says() {
        let data = |xdg: Option<&str>, home: Option<&str>| default_data(xdg.map(Into::into), home.map(Into::into));
        assert_eq!(data(Some("/x"), Some("/h")), Some("/x/rialto".into()));
        assert_eq!(data(Some("x"), Some("/h")), Some("/h/.local/share/rialto".into()));
        assert_eq!(data(None, None), None);
    }

    #[test]
    fn hints_fit_the_configuration() {
        let config = parse_yaml("r.yaml", "agents: [{id: a, backend: echo, mount: /team/a}]").unwrap();
        insta::assert_snapshot!(hints(&config, "http://127.0.0.1:9", "/opt/it's/rialto").join("\n"), @r#"
            Try it:
              curl -s http://127.0.0.1:9/team/a -H 'Content-Type: application/json' -H 'A2A-Version: 1.0' -d '{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"message":{"messageId":"m1","role":"ROLE_USER","parts":[{"text":"hello"}]}}}'
              curl -sN http://127.0.0.1:9/team/a -H 'Content-Type: application/json' -H 'A2A-Version: 1.0' -d '{"jsonrpc":"2.0","id":1,"method":"SendStreamingMessage","params":{"message":{"messageId":"m1","role":"ROLE_USER","parts":[{"text":"hello"}]}}}'
              '/opt/it'\''s/rialto' call hello --url http://127.0.0.1:9/team/a
        "#);
        let config = parse_yaml("r.yaml", "agents: [{id: a, backend: echo, host: a.test}]").unwrap();
        insta::assert_snapshot!(hints(&config, "http://127.0.0.1:8080", "rialto").join("\n"), @r#"
            Try it:
              curl -s http://127.0.0.1:8080/ -H 'Content-Type: application/json' -H 'A2A-Version: 1.0' -H 'Host: a.test' -d '{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"message":{"messageId":"m1","role":"ROLE_USER","parts":[{"text":"hello"}]}}}'
              curl -sN http://127.0.0.1:8080/ -H 'Content-Type: application/json' -H 'A2A-Version: 1.0' -H 'Host: a.test' -d '{"jsonrpc":"2.0","id":1,"method":"SendStreamingMessage","params":{"message":{"messageId":"m1","role":"ROLE_USER","parts":[{"text":"hello"}]}}}'
        "#);
    }

    #[test]
    fn wildcards_are_reached_on_loopback() {
        assert_eq!(url("0.0.0.0:80".parse().unwrap()), "http://127.0.0.1:80");
        assert_eq!(url("[::]:80".parse().unwrap()), "http://[::1]:80");
        assert_eq!(url("10.1.2.3:80".parse().unwrap()), "http://10.1.2.3:80");
    }
}
