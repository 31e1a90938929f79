//! Clients of protocol 0.3, on the same URL as those of 1.0.

use std::time::Duration;

use rialto_a2a::{Error, Kind, v03::Method};
use rialto_runtime::{
    config::{Agent, Config, Extension, WhenBusy},
    units::Span,
};
use serde_json::{Value, json};

use crate::client::{Answer, Server, config, redact};

const PATH: &str = "/.well-known/agent-card.json";
const SEND: &str =
    r#"{"message":{"kind":"message","messageId":"m-1","role":"user","parts":[{"kind":"text","text":"hi"}]}}"#;
const HOOK: &str = r#"{"taskId":"t-1","pushNotificationConfig":{"id":"h-1","url":"https://hook.example/"}}"#;
const NO_HEADERS: &[(&str, &str)] = &[];

async fn start() -> Server {
    Server::with(config(|agent| agent.a2a_v03 = true)).await
}

fn sends(text: &str) -> String {
    SEND.replace(r#""text":"hi""#, &format!(r#""text":"{text}""#))
}

async fn ask(server: &Server, headers: &[(&str, &str)], method: &str, params: &str) -> Answer {
    let body = format!(r#"{{"jsonrpc":"2.0","id":"q","method":"{method}","params":{params}}}"#);
    server.http("POST", "/", &[headers, &[("content-type", "application/json")]].concat(), &body).await
}

/// The result of a call, or the code of its error.
async fn result(server: &Server, method: &str, params: &str) -> Result<Value, i64> {
    let answer = ask(server, NO_HEADERS, method, params).await.json();
    answer["error"]["code"].as_i64().map_or_else(|| Ok(answer["result"].clone()), Err)
}

#[tokio::test]
async fn every_method_of_0_3() {
    let server = start().await;
    let not_at_once = SEND.replacen('{', r#"{"configuration":{"blocking":false,"historyLength":1},"#, 1);
    let with_hook =
        SEND.replacen('{', r#"{"configuration":{"pushNotificationConfig":{"url":"https://hook.example/"}},"#, 1);
    let cases = [
        ("message/send", SEND.to_owned()),
        ("message/send", not_at_once),
        ("message/send", sends("message")),
        ("message/send", sends("ask").replace(r#""messageId""#, r#""taskId":"t-1","messageId""#)),
        ("message/send", with_hook),
        ("message/send", r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#.to_owned()),
        ("message/send", "{}".to_owned()),
        ("message/send", r#"["m"]"#.to_owned()),
        ("message/stream", SEND.to_owned()),
        ("message/stream", sends("message")),
        ("message/stream", sends("ask")),
        ("message/stream", sends("auth")),
        ("message/stream", sends("break")),
        ("message/stream", sends("kind:UNSUPPORTED_OPERATION")),
        ("tasks/get", r#"{"id":"t-1","historyLength":2}"#.to_owned()),
        ("tasks/get", r#"{"id":"nope"}"#.to_owned()),
        ("tasks/cancel", r#"{"id":"t-1","metadata":{"why":1}}"#.to_owned()),
        ("tasks/cancel", r#"{"id":"done"}"#.to_owned()),
        ("tasks/resubscribe", r#"{"id":"t-1"}"#.to_owned()),
        ("tasks/resubscribe", r#"{"id":"done"}"#.to_owned()),
        ("tasks/pushNotificationConfig/set", HOOK.to_owned()),
        ("tasks/pushNotificationConfig/get", r#"{"id":"t-1","pushNotificationConfigId":"h-1"}"#.to_owned()),
        ("tasks/pushNotificationConfig/get", r#"{"id":"t-1"}"#.to_owned()),
        ("tasks/pushNotificationConfig/list", r#"{"id":"t-1"}"#.to_owned()),
        ("tasks/pushNotificationConfig/delete", r#"{"id":"t-1","pushNotificationConfigId":"h-1"}"#.to_owned()),
        ("agent/getAuthenticatedExtendedCard", "{}".to_owned()),
        ("tasks/list", "{}".to_owned()),
    ];
    let mut page = String::new();
    for (method, params) in &cases {
        let answer = ask(&server, NO_HEADERS, method, params).await;
        let kind = answer.header("content-type").unwrap_or_default();
        page += &format!("# {method} {params}\n\n{} {kind}\n{}\n\n\n", answer.status, redact(answer.body.trim_end()));
    }
    insta::assert_snapshot!(page);
    for method in Method::ALL {
        assert!(cases.iter().any(|(name, _)| *name == method.name()), "{method:?}");
    }
}

#[tokio::test]
async fn what_0_3_asks_for_arrives_as_1_0() {
    let server = start().await;
    let with = |configuration: &str| SEND.replacen('{', &format!(r#"{{"configuration":{configuration},"#), 1);
    for (configuration, history, at_once) in [
        ("{}", None, false),
        (r#"{"historyLength":0}"#, None, false),
        (r#"{"historyLength":3,"blocking":true}"#, Some(3), false),
        (r#"{"blocking":false}"#, None, true),
    ] {
        let task = result(&server, "message/send", &with(configuration)).await.unwrap();
        assert_eq!(task["status"]["state"], if at_once { "submitted" } else { "completed" }, "{configuration}");
        assert_eq!(server.store.last_send().history_length, history, "{configuration}");
    }
    for (params, history) in
        [(r#"{"id":"t-1","historyLength":0}"#, None), (r#"{"id":"t-1","historyLength":1}"#, Some(1))]
    {
        result(&server, "tasks/get", params).await.unwrap();
        assert_eq!(server.store.gets.lock().unwrap().last().unwrap().history_length, history);
    }
    result(&server, "tasks/cancel", r#"{"id":"t-1","metadata":{"why":1}}"#).await.unwrap();
    assert!(server.store.cancels.lock().unwrap().last().unwrap().metadata.is_some());
}

/// The name of a method decides which version is spoken, and only then the header whether it is served.
#[tokio::test]
async fn both_versions_share_a_url() {
    let server = start().await;
    let old = ("tasks/get", r#"{"id":"t-1"}"#);
    let new = ("GetTask", r#"{"id":"t-1"}"#);
    for (version, (method, params), code) in [
        (None, old, None),
        (Some(""), old, None),
        (Some("0.3"), old, None),
        (Some("0.3.0"), old, None),
        (Some("1.0"), old, Some(-32603)),
        (Some("0.2.5"), old, Some(-32603)),
        (None, new, Some(-32009)),
        (Some(""), new, Some(-32009)),
        (Some("0.3"), new, Some(-32009)),
        (Some("1.0"), new, None),
    ] {
        let headers: Vec<_> = version.map(|version| ("a2a-version", version)).into_iter().collect();
        let answer = ask(&server, &headers, method, params).await.json();
        assert_eq!(answer["error"]["code"].as_i64(), code, "{method} with {version:?}");
        assert_eq!(
            answer["result"]["kind"],
            if code.is_none() && method == old.0 { json!("task") } else { Value::Null }
        );
        if code == Some(-32603) {
            let version = version.unwrap();
            let text = format!("Protocol version not supported: {version}; supported versions: 0.3");
            assert_eq!(answer["error"], json!({"code": -32603, "message": text}));
        }
    }
    let query = r#"{"jsonrpc":"2.0","id":1,"method":"tasks/get","params":{"id":"t-1"}}"#;
    assert_eq!(server.http("POST", "/?A2A-Version=0.3", &[], query).await.json()["result"]["id"], "t-1");
    assert_eq!(server.http("POST", "/?A2A-Version=1.0", &[], query).await.json()["error"]["code"], -32603);
    // The other bindings of 0.3 are not served.
    let rest = server.http("GET", "/tasks/t-1", &[("a2a-version", "0.3")], "").await;
    assert_eq!(rest.json()["error"]["details"][0]["reason"], "VERSION_NOT_SUPPORTED");
}

#[tokio::test]
async fn agents_that_do_not_speak_0_3_do_not_know_its_methods() {
    let old = Agent { id: "old".into(), mount: "/old".into(), a2a_v03: true, ..Agent::echo() };
    let server = Server::with(Config { agents: vec![Agent::echo(), old], ..Config::default() }).await;
    for method in Method::ALL {
        for version in ["", "0.3", "1.0"] {
            let answer = ask(&server, &[("a2a-version", version)], method.name(), "{}").await;
            assert_eq!((answer.status, &answer.json()["error"]["code"]), (200, &json!(-32601)), "{method:?}");
        }
    }
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tasks/get","params":{"id":"t-1"}}"#;
    assert_eq!(server.http("POST", "/old", &[], body).await.json()["result"]["kind"], "task");
    let card = server.http("GET", PATH, &[], "").await.json();
    assert!(card.get("url").is_none() && card.get("protocolVersion").is_none(), "{card}");
}

#[tokio::test]
async fn errors_have_the_form_of_0_3_and_the_same_http_status() {
    let server = start().await;
    for kind in Kind::ALL {
        let params = format!(r#"{{"id":"kind:{}"}}"#, kind.wire().reason);
        let answer = ask(&server, NO_HEADERS, "tasks/get", &params).await;
        let same = server.rpc("GetTask", &params).await;
        assert_eq!((answer.status, answer.header("retry-after")), (same.status, same.header("retry-after")));
        let error = answer.json()["error"].clone();
        assert_eq!(error, rialto_a2a::v03::error(&Error::from(kind)), "{kind:?}");
        assert!(error.get("data").is_none());
    }
    let answer = ask(&server, NO_HEADERS, "tasks/get", "{}").await.json();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!("q"), &json!(-32602)));
}

#[tokio::test]
async fn streams_of_0_3_say_final_where_they_end() {
    async fn finals(server: &Server, method: &str, params: &str) -> Vec<bool> {
        let events = ask(server, NO_HEADERS, method, params).await.events();
        events.iter().filter_map(|event| event["result"]["final"].as_bool()).collect()
    }
    let server = start().await;
    assert_eq!(finals(&server, "message/stream", SEND).await, [false, true]);
    assert_eq!(finals(&server, "message/stream", &sends("ask")).await, [false, true], "it is the client's turn");
    assert_eq!(finals(&server, "message/stream", &sends("auth")).await, [false, true], "it goes on once granted");
    assert_eq!(finals(&server, "tasks/resubscribe", r#"{"id":"t-1"}"#).await, [true]);
    assert_eq!(
        finals(&server, "tasks/resubscribe", r#"{"id":"asking"}"#).await,
        [false, true],
        "until the end of the task"
    );
    // A turn that waits behind others sees them ask, and its stream goes on: the end of the stream says it all.
    let queue = |agent: &mut Agent| (agent.a2a_v03, agent.when_busy) = (true, WhenBusy::Queue);
    let server = Server::with(config(queue)).await;
    assert_eq!(finals(&server, "message/stream", &sends("ask")).await, [false, false]);
    assert_eq!(finals(&server, "message/stream", SEND).await, [false, true]);
}

/// SDKs of 0.3 read nothing but events there, unless the HTTP status says that it went wrong.
#[tokio::test]
async fn errors_of_streaming_methods_are_events() {
    let server = start().await;
    for (headers, method, params, code) in [
        (NO_HEADERS, "message/stream", sends("kind:UNSUPPORTED_OPERATION"), -32004),
        (NO_HEADERS, "message/stream", "{}".to_owned(), -32602),
        (NO_HEADERS, "message/stream", "[]".to_owned(), -32602),
        (&[("a2a-version", "1.0")], "message/stream", SEND.to_owned(), -32603),
        (NO_HEADERS, "tasks/resubscribe", r#"{"id":"nope"}"#.to_owned(), -32001),
        (NO_HEADERS, "tasks/resubscribe", r#"{"id":"done"}"#.to_owned(), -32004),
        (&[("last-event-id", "x")], "tasks/resubscribe", r#"{"id":"t-1"}"#.to_owned(), -32602),
    ] {
        let answer = ask(&server, headers, method, &params).await;
        let events = answer.events();
        assert_eq!((answer.status, events.len(), &events[0]["error"]["code"]), (200, 1, &code.into()), "{params}");
        assert_eq!(events[0]["id"], "q");
    }
    let answer = ask(&server, NO_HEADERS, "message/stream", &sends("kind:UNAVAILABLE")).await;
    assert_eq!((answer.status, answer.header("content-type")), (503, Some("application/json")));
    assert_eq!(answer.header("retry-after"), Some("2"));
}

/// The SDK for Python takes every empty line after an `id` for an event, and fails on one without data.
#[tokio::test]
async fn silence_on_a_stream_of_0_3_has_no_empty_lines() {
    let mut config = config(|agent| agent.a2a_v03 = true);
    config.limits.keep_alive = Span(Duration::from_millis(20));
    config.limits.subscription_idle = Span(Duration::from_millis(200));
    let server = Server::with(config).await;
    let body = ask(&server, NO_HEADERS, "tasks/resubscribe", r#"{"id":"quiet"}"#).await.body;
    let (event, silence) = body.split_once("\n\n").unwrap();
    assert!(event.starts_with("id: 1\ndata: {"), "{body}");
    assert!(silence.starts_with(":\n:\n"), "{silence:?}");
    assert!(silence.ends_with("\n: nothing happened for a long time; subscribe again with Last-Event-ID\n"));
    assert!(!silence.contains("\n\n"), "{silence:?}");
}

#[tokio::test]
async fn a_stream_of_0_3_is_resumed_after_the_last_event() {
    let server = start().await;
    for (last, from) in [("2", 3), ("0", 1), ("4", 5), ("", 1)] {
        let answer = ask(&server, &[("last-event-id", last)], "tasks/resubscribe", r#"{"id":"t-1"}"#).await;
        let ids: Vec<u64> = answer.body.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect();
        assert_eq!(ids, (from..=4).collect::<Vec<_>>(), "{last:?}");
        assert_eq!(answer.events().len(), ids.len());
    }
    for bad in ["x", "1001"] {
        let answer = ask(&server, &[("last-event-id", bad)], "tasks/resubscribe", r#"{"id":"t-1"}"#).await;
        let error = &answer.events()[0]["error"];
        assert_eq!(error["code"], -32602);
        assert!(error["message"].as_str().unwrap().contains("Last-Event-ID"), "{error}");
    }
}

#[tokio::test]
async fn extensions_are_declared_and_echoed_in_the_header_of_0_3() {
    let extension =
        |uri: &str, required| Extension { uri: uri.to_owned(), description: String::new(), required, params: None };
    let server = Server::with(config(|agent| {
        agent.a2a_v03 = true;
        agent.card.extensions = vec![extension("urn:must", true), extension("urn:may", false)];
    }))
    .await;
    for method in ["message/send", "message/stream"] {
        let missing = ask(&server, &[("x-a2a-extensions", "urn:may")], method, SEND).await;
        assert!(missing.body.contains(r#""error":{"code":-32603,"#), "0.3 has no code for it: {missing:?}");
        for headers in [
            &[("X-A2A-Extensions", "urn:may, urn:must")][..],
            &[("x-a2a-extensions", "urn:must"), ("a2a-extensions", "urn:may")],
        ] {
            let answer = ask(&server, headers, method, SEND).await;
            assert_eq!(answer.header("x-a2a-extensions"), Some("urn:must, urn:may"), "{answer:?}");
            assert_eq!(answer.header("a2a-extensions"), None);
        }
    }
    let numbers = [("x-a2a-extensions", "urn:must, urn:rialto:event-number:v1")];
    let events = ask(&server, &numbers, "message/stream", SEND).await.events();
    assert_eq!(events[1]["result"]["metadata"]["urn:rialto:event-number:v1"], 2);
    // Those of 1.0 do not know the header.
    let answer = ask(&server, &[("a2a-version", "1.0"), numbers[0]], "GetTask", r#"{"id":"t-1"}"#).await;
    assert_eq!((answer.header("x-a2a-extensions"), answer.header("a2a-extensions")), (None, None));
}

#[tokio::test]
async fn a_card_says_it_to_clients_of_both_versions() {
    let mut desk = Agent { id: "desk".into(), mount: "/desk".into(), tenants: vec!["acme".into()], ..Agent::echo() };
    desk.a2a_v03 = true;
    let config = Config { agents: vec![desk], public_url: Some("https://a.example".into()), ..Config::default() };
    let server = Server::with(config).await;
    insta::assert_json_snapshot!(server.http("GET", &format!("/desk{PATH}"), &[], "").await.json());
}
