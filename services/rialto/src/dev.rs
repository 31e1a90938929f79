//! `rialto dev`: every service in this process, on the embedded store.
//!
//! The services talk through the same gRPC calls as in a cluster, in memory.

use std::{env, process::ExitCode};

use rialto_runtime::{
    config::{Config, Flag, StoreKind},
    telemetry,
};
use serde_json::json;

use crate::{
    cli::{DevArgs, fail},
    config::load_or_complain,
    output,
    serve::{self, Services},
};

pub(crate) async fn run(args: DevArgs) -> ExitCode {
    if args.model.is_some() && env::var_os("OPENAI_API_KEY").is_none_or(|key| key.is_empty()) {
        return fail(2, "--model needs OPENAI_API_KEY in the environment; an endpoint that asks for no key takes any");
    }
    let flags = flags(&args);
    let config = match load_or_complain(args.config, flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if config.store == StoreKind::Redis {
        return fail(2, "dev keeps tasks in a folder of its own; with store: redis use `rialto serve all`");
    }
    serve::run(config, Services::ALL, greet).await
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

fn greet(config: &Config, base: &str) {
    // They share stderr with the log, which is for programs then.
    if telemetry::Format::from_env() == telemetry::Format::Json {
        return;
    }
    let program = env::args().next().unwrap_or_else(|| "rialto".to_owned());
    for line in hints(config, base, &program) {
        output::complain(&line);
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
}
