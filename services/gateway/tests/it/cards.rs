//! What the card says is there (cases C105, C169, C171).

use rialto_a2a::{v1::AgentCard, validate::Validate as _};
use rialto_runtime::config::{Agent, Card, Config, Extension, Provider, Skill};
use serde_json::Value;
use tonic::Request;

use crate::client::Server;

const PATH: &str = "/.well-known/agent-card.json";
const SEND: &str = r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#;

fn agents() -> Vec<Agent> {
    let mut full = Agent {
        id: "desk".into(),
        mount: "/support/desk".into(),
        tenants: vec!["acme".into(), "globex".into()],
        ..Agent::echo()
    };
    full.card.name = Some("Help desk".into());
    full.card.provider = Some(Provider { organization: "Acme".into(), url: "https://acme.example".into() });
    full.card.documentation_url = Some("https://acme.example/docs".into());
    full.card.icon_url = Some("https://acme.example/icon.png".into());
    full.card.skills = vec![Skill {
        id: "s".into(),
        name: "S".into(),
        description: "Does s.".into(),
        tags: vec!["t".into()],
        examples: vec!["e".into()],
        input_modes: vec!["image/png".into()],
        output_modes: vec![],
    }];
    let params = serde_json::json!({"a": 1, "b": [true, null]}).as_object().cloned();
    full.card.extensions = vec![Extension { uri: "urn:x".into(), description: "X".into(), required: false, params }];
    vec![Agent::echo(), full]
}

#[tokio::test]
async fn cards_say_everything_that_is_configured() {
    let config = Config { agents: agents(), public_url: Some("https://a.example".into()), ..Config::default() };
    let server = Server::with(config).await;
    insta::assert_json_snapshot!("card_of_the_echo_agent", server.http("GET", PATH, &[], "").await.json());
    insta::assert_json_snapshot!(
        "card_of_a_mounted_agent",
        server.http("GET", &format!("/support/desk{PATH}"), &[], "").await.json()
    );
}

#[tokio::test]
async fn a_card_has_everything_that_is_required_whatever_is_configured() {
    let agent = |id: &str| Agent { id: id.into(), mount: format!("/{id}"), ..Agent::echo() };
    let mut all = vec![agent("plain"), agent("nothing"), agent("blank"), agent("provided"), agent("old")];
    all[1].card = Card::default();
    all[2].card = Card { name: Some(" ".into()), description: "\n".into(), ..Card::default() };
    all[3].card.provider = Some(Provider { organization: "Acme".into(), url: String::new() });
    all[4].a2a_v03 = true;
    let ids: Vec<_> = all.iter().map(|agent| agent.id.clone()).collect();
    let all = all.into_iter().chain(agents()).collect();
    let server = Server::with(Config { agents: all, ..Config::default() }).await;
    for mount in ids.iter().map(|id| format!("/{id}")).chain([String::new(), "/support/desk".into()]) {
        let text = server.http("GET", &format!("{mount}{PATH}"), &[], "").await.body;
        let card: AgentCard = rialto_a2a::json::from_str(&text).unwrap();
        card.validate().unwrap_or_else(|error| panic!("{mount}: {error}"));
    }
    let card = server.http("GET", &format!("/nothing{PATH}"), &[], "").await.json();
    let skill = serde_json::json!({"id": "nothing", "name": "nothing", "description": "nothing", "tags": ["nothing"]});
    assert_eq!((&card["name"], &card["description"]), (&"nothing".into(), &"nothing".into()));
    assert_eq!(card["skills"], serde_json::json!([skill]));
    let card = server.http("GET", &format!("/provided{PATH}"), &[], "").await.json();
    assert_eq!(card["provider"]["url"], format!("http://{}", server.addr));
}

#[tokio::test]
async fn cards_are_cached_by_tag_and_by_date() {
    let server = Server::start().await;
    let first = server.http("GET", PATH, &[], "").await;
    assert_eq!(first.header("cache-control"), Some("public, max-age=60"));
    assert_eq!(first.header("content-type"), Some("application/json"));
    let (etag, date) = (first.header("etag").unwrap().to_owned(), first.header("last-modified").unwrap().to_owned());
    assert!(date.ends_with(" GMT"), "{date}");
    let weak = format!("\"x\", W/{etag}");
    for (name, value, status) in [
        ("if-none-match", &etag[..], 304),
        ("if-none-match", &weak, 304),
        ("if-none-match", "*", 304),
        ("if-none-match", "\"other\"", 200),
        ("if-modified-since", &date, 304),
        ("if-modified-since", "Mon, 01 Jan 2001 00:00:00 GMT", 200),
        ("if-modified-since", "nonsense", 200),
    ] {
        let answer = server.http("GET", PATH, &[(name, value)], "").await;
        assert_eq!((answer.status, answer.header("etag")), (status, Some(&etag[..])), "{name}: {value}");
        assert_eq!(answer.body.is_empty(), status == 304);
    }
    let both = server.http("GET", PATH, &[("if-none-match", "\"other\""), ("if-modified-since", &date)], "").await;
    assert_eq!(both.status, 200, "the tag decides");
    let head = server.http("HEAD", PATH, &[], "").await;
    assert_eq!((head.status, &head.body[..], head.header("etag")), (200, "", Some(&etag[..])));
    assert_eq!(head.header("content-length"), Some(&first.body.len().to_string()[..]));
    assert_eq!(server.http("POST", PATH, &[], "{}").await.status, 405);

    // Every replica serves the same bytes.
    let config = || Config { public_url: Some("https://a.example".into()), ..Config::default() };
    let (one, two) = (Server::with(config()).await, Server::with(config()).await);
    let (one, two) = (one.http("GET", PATH, &[], "").await, two.http("GET", PATH, &[], "").await);
    assert_eq!((one.header("etag"), one.body.clone()), (two.header("etag"), two.body.clone()));
    assert_ne!(one.header("etag"), Some(&etag[..]), "another URL is another card");
}

#[tokio::test]
async fn every_interface_of_a_card_reaches_its_agent_as_it_stands() {
    let server = Server::with(Config { agents: agents(), ..Config::default() }).await;
    let local = format!("http://{}", server.addr);
    let mut interfaces = Vec::new();
    for (mount, agent) in [("", "echo"), ("/support/desk", "desk")] {
        let card = server.http("GET", &format!("{mount}{PATH}"), &[], "").await.json();
        let list = card["supportedInterfaces"].as_array().unwrap().clone();
        assert!(list.len() % 3 == 0 && !list.is_empty());
        interfaces.extend(list.into_iter().map(|interface| (agent, interface)));
    }
    let version = [("a2a-version", "1.0")];
    for (agent, interface) in interfaces {
        assert_eq!(interface["protocolVersion"], "1.0");
        let url = interface["url"].as_str().unwrap();
        let tenant = interface["tenant"].as_str().unwrap_or_default();
        match interface["protocolBinding"].as_str().unwrap() {
            "JSONRPC" => {
                let path = url.strip_prefix(&local).unwrap();
                let path = if path.is_empty() { "/" } else { path };
                let params = SEND.replacen('{', &format!(r#"{{"tenant":"{tenant}","#), 1);
                let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{params}}}"#);
                assert_eq!(server.http("POST", path, &version, &body).await.json()["result"]["task"]["id"], "t-1");
            }
            "HTTP+JSON" => {
                let path = url.strip_prefix(&local).unwrap();
                let base = if tenant.is_empty() { path.to_owned() } else { format!("{path}/{tenant}") };
                assert_eq!(server.http("POST", &format!("{base}/message:send"), &version, SEND).await.status, 200);
                assert_eq!(server.http("GET", &format!("{base}/tasks"), &version, "").await.status, 200);
                let extended = server.http("GET", &format!("{base}/extendedAgentCard"), &version, "").await;
                assert_eq!(extended.json()["error"]["details"][0]["reason"], "UNSUPPORTED_OPERATION");
            }
            "GRPC" => {
                assert_eq!(url, server.addr.to_string());
                let mut send: rialto_a2a::v1::SendMessageRequest = rialto_a2a::json::from_str(SEND).unwrap();
                send.tenant = tenant.to_owned();
                let mut request = Request::new(send);
                request.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
                server.grpc().await.send_message(request).await.unwrap();
            }
            other => panic!("{other}"),
        }
        let scope = server.store.last_send().scope.unwrap();
        let expected = tenant.rsplit('/').next().filter(|name| ["acme", "globex"].contains(name)).unwrap_or_default();
        assert_eq!((&scope.agent[..], &scope.tenant[..]), (agent, expected), "{interface}");
    }
}

#[tokio::test]
async fn a_card_and_what_it_promises_agree_about_streams() {
    let silent = Server::with(crate::client::config(|agent| agent.card.streaming = false)).await;
    let card = silent.http("GET", PATH, &[], "").await.json();
    assert_eq!(card["capabilities"]["streaming"], Value::Bool(false));
    assert_eq!(card["capabilities"]["pushNotifications"], Value::Bool(false));
    for (method, params) in [("SendStreamingMessage", SEND), ("SubscribeToTask", r#"{"id":"t-1"}"#)] {
        assert_eq!(silent.rpc(method, params).await.json()["error"]["code"], -32004);
    }
    for (method, path, body) in [("POST", "/message:stream", SEND), ("GET", "/tasks/t-1:subscribe", "")] {
        let answer = silent.rest(method, path, body).await;
        assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")));
    }
    let mut request = Request::new(rialto_a2a::v1::SubscribeToTaskRequest { id: "t-1".into(), ..Default::default() });
    request.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
    let status = silent.grpc().await.subscribe_to_task(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert_eq!(silent.store.sends.lock().unwrap().len(), 0);

    // The method decides, not Accept.
    let server = Server::start().await;
    let headers = |accept| [("a2a-version", "1.0"), ("accept", accept), ("content-type", "application/json")];
    let answer = server.http("POST", "/message:send", &headers("text/event-stream"), SEND).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let answer = server.http("POST", "/message:stream", &headers("application/json"), SEND).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
}
