//! Versions, verbs, extensions, limits, browsers: what is around a request.

use std::time::Duration;

use rialto_runtime::{
    config::{Config, Extension},
    units::{Size, Span},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::client::{Server, answer, config, request};

const SEND: &str = r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#;

#[tokio::test]
async fn the_version_is_negotiated_the_same_on_both_http_bindings() {
    let server = Server::start().await;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":"t-1"}}"#;
    for (version, served) in [
        (Some("1.0"), true),
        (Some("1.0.7"), true),
        (Some(" 1.0 "), true),
        (Some("99.0"), false),
        (Some("1"), false),
        (Some("1.0,0.3"), false),
        (Some("abc"), false),
        (Some("0.3"), false),
        (Some(""), false),
        (None, false),
    ] {
        let headers: Vec<_> = version.iter().map(|&version| ("A2A-Version", version)).collect();
        let rpc = server.http("POST", "/", &headers, body).await;
        let rest = server.http("GET", "/tasks/t-1", &headers, "").await;
        if served {
            assert_eq!((rpc.json()["result"]["id"].as_str(), rest.status), (Some("t-1"), 200), "{version:?}");
            continue;
        }
        assert_eq!((rpc.status, rpc.json()["error"]["code"].as_i64()), (200, Some(-32009)), "{version:?}");
        let info = &rest.json()["error"]["details"][0];
        assert_eq!(
            (rest.status, &info["reason"], &info["metadata"]["supportedVersions"]),
            (400, &"VERSION_NOT_SUPPORTED".into(), &"1.0".into())
        );
    }
    let twice = server.http("GET", "/tasks/t-1?A2A-Version=1.0&A2A-Version=0.3", &[], "").await;
    assert_eq!(twice.json()["error"]["details"][0]["reason"], "VERSION_NOT_SUPPORTED");
    for query in ["A2A-Version=1.0", "x=1&a2a-version=1.0"] {
        assert_eq!(server.http("GET", &format!("/tasks/t-1?{query}"), &[], "").await.status, 200);
        assert_eq!(server.http("POST", &format!("/?{query}"), &[], body).await.json()["result"]["id"], "t-1");
    }
}

#[tokio::test]
async fn verbs_and_paths_that_are_none_are_answered_by_the_protocol() {
    let server = Server::start().await;
    for (method, path, status, allow) in [
        ("PUT", "/tasks/t-1:subscribe", 405, Some("GET, POST")),
        ("PUT", "/tasks/t-1", 405, Some("GET")),
        ("GET", "/tasks/t-1:cancel", 405, Some("POST")),
        ("GET", "/message:send", 405, Some("POST")),
        ("GET", "/", 405, Some("POST")),
        ("DELETE", "/tasks", 405, Some("GET")),
        ("POST", "/health", 405, Some("GET, HEAD")),
        ("OPTIONS", "/", 405, Some("POST")),
        ("GET", "//tasks/t-1", 404, None),
        ("GET", "/tasks/t-1/", 404, None),
        ("GET", "/metrics", 404, None),
        ("GET", "/livez", 404, None),
        ("POST", "/message:other", 404, None),
        ("GET", "/%2e%2e/metrics", 404, None),
        ("GET", "/tasks/%ff", 404, None),
    ] {
        let answer = server.rest(method, path, "").await;
        assert_eq!((answer.status, answer.header("allow")), (status, allow), "{method} {path}");
        assert_eq!(answer.json()["error"]["code"], status, "{method} {path}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
    let cancel = server.rest("POST", "/tasks/t-1%3Acancel", "").await;
    assert_eq!((cancel.status, cancel.json()["status"]["state"].as_str()), (200, Some("TASK_STATE_CANCELED")));
    // curl -d '' says that it sends a form.
    let form = [("a2a-version", "1.0"), ("content-type", "application/x-www-form-urlencoded")];
    assert_eq!(server.http("POST", "/tasks/t-1:cancel", &form, "").await.status, 200);
    let other = server.rest("POST", "/tasks/t-1:cancel", r#"{"id":"t-2"}"#).await;
    assert_eq!((other.status, other.json()["error"]["details"][0]["reason"].as_str()), (400, Some("INVALID_PARAMS")));
    assert_eq!(server.http("GET", "/health", &[], "").await.body, r#"{"status":"healthy"}"#);

    let nobody = Server::with(config(|agent| agent.mount = "/a".to_owned())).await;
    let answer = nobody.http("POST", "/", &[], "{}").await;
    assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (404, Some("No agent is mounted here")));
}

#[tokio::test]
async fn extensions_are_activated_echoed_and_required() {
    let extension =
        |uri: &str, required| Extension { uri: uri.to_owned(), description: String::new(), required, params: None };
    let server = Server::with(config(|agent| {
        agent.card.extensions = vec![extension("urn:must", true), extension("urn:may", false)];
    }))
    .await;
    let send = |path: &'static str, value: &'static str| {
        let headers = [("a2a-version", "1.0"), ("A2A-EXTENSIONS", value)];
        let server = &server;
        async move { server.http("POST", path, &headers, SEND).await }
    };
    for path in ["/message:send", "/message:stream"] {
        for missing in ["", "urn:may", "urn:MUST", "urn:must/v2"] {
            let answer = send(path, missing).await;
            let info = &answer.json()["error"]["details"][0];
            assert_eq!((answer.status, &info["reason"]), (400, &"EXTENSION_SUPPORT_REQUIRED".into()));
            assert_eq!(info["metadata"]["requiredExtensions"], "urn:must");
        }
        let answer = send(path, "urn:unknown, urn:may ,urn:must").await;
        assert_eq!((answer.status, answer.header("a2a-extensions")), (200, Some("urn:must, urn:may")));
    }
    let twice = [("a2a-version", "1.0"), ("a2a-extensions", "urn:may"), ("a2a-extensions", "urn:must")];
    let answer = server.http("POST", "/message:send", &twice, SEND).await;
    assert_eq!((answer.status, answer.header("a2a-extensions")), (200, Some("urn:must, urn:may")));
    // Only sends ask for it; and an error tells what is in effect, too.
    let answer = server.rest("GET", "/tasks/t-1", "").await;
    assert_eq!((answer.status, answer.header("a2a-extensions")), (200, None));
    let answer = server.http("GET", "/tasks/nope", &twice, "").await;
    assert_eq!((answer.status, answer.header("a2a-extensions")), (404, Some("urn:must, urn:may")));
}

#[tokio::test]
async fn a_request_that_is_too_large_gets_its_413_while_it_is_still_sending() {
    let mut config = Config::default();
    config.limits.request_size = Size(100_000);
    let server = Server::with(config).await;
    let body = SEND.replace("hi", &"x".repeat(8_000_000));
    let rpc = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{body}}}"#);
    for (path, body) in [("/message:send", &body), ("/", &rpc)] {
        let answer = server.rest("POST", path, body).await;
        assert_eq!(answer.status, 413, "{path}");
        assert!(answer.body.contains("the limit is 100000 bytes"), "{answer:?}");
    }
    // Without a length, too.
    let head = "POST /message:send HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("f4240\r\n{}\r\n", "x".repeat(1_000_000));
    let chunked = format!("{head}a2a-version: 1.0\r\n");
    let chunked = chunked.replacen("\r\n\r\na2a-version: 1.0\r\n", "\r\na2a-version: 1.0\r\n\r\n", 1);
    let answer = server.raw(format!("{chunked}{}0\r\n\r\n", chunk.repeat(3)).as_bytes()).await;
    assert_eq!(answer.status, 413);
    // A client that asks first is told at once.
    let mut tcp = TcpStream::connect(server.addr).await.unwrap();
    let ask = "POST /message:send HTTP/1.1\r\nhost: x\r\na2a-version: 1.0\r\nexpect: 100-continue\r\ncontent-length: 9000000\r\n\r\n";
    tcp.write_all(ask.as_bytes()).await.unwrap();
    let mut bytes = vec![0; 4096];
    let read = timeout(Duration::from_secs(1), tcp.read(&mut bytes)).await.expect("no waiting for the body").unwrap();
    assert_eq!(answer_status(&bytes[..read]), 413);
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
}

fn answer_status(bytes: &[u8]) -> u16 {
    answer(bytes).status
}

#[tokio::test]
async fn a_request_for_two_hosts_is_read_as_one_for_the_first() {
    let server = Server::start().await;
    let get = |version: &str, hosts: &str| {
        format!("GET /tasks/t-1 HTTP/{version}\r\n{hosts}a2a-version: 1.0\r\nconnection: close\r\n\r\n")
    };
    for hosts in [
        "",
        "host: a.test\r\nhost: a.test\r\n",
        "host: a.test\r\nHost: b.test\r\n",
        "host: a.test b.test\r\n",
        "host: a.test/b\r\n",
        "host: user@a.test\r\n",
        "host: a.test:x:y\r\n",
        "host: \u{e4}.test\r\n",
    ] {
        let answer = server.raw(get("1.1", hosts).as_bytes()).await;
        assert_eq!(answer.status, 400, "{hosts:?}");
        let info = &answer.json()["error"]["details"][0];
        assert_eq!(info["reason"], "INVALID_REQUEST", "{hosts:?}");
    }
    for hosts in ["host: a.test\r\n", "host: a_b:80\r\n", "host: [::1]:8080\r\n", "host:\r\n"] {
        assert_eq!(server.raw(get("1.1", hosts).as_bytes()).await.status, 200, "{hosts:?}");
    }
    assert_eq!(server.raw(get("1.0", "").as_bytes()).await.status, 200, "older than the header");
}

#[tokio::test]
async fn a_compressed_body_is_read_as_broken_json() {
    let server = Server::start().await;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{}}"#;
    for encoding in ["gzip", "br", "zstd", "deflate", "identity, gzip"] {
        let headers = [("a2a-version", "1.0"), ("content-type", "application/json"), ("content-encoding", encoding)];
        let rest = server.http("POST", "/message:send", &headers, SEND).await;
        let error = &rest.json()["error"];
        assert_eq!((rest.status, &error["details"][0]["reason"]), (400, &"CONTENT_TYPE_NOT_SUPPORTED".into()));
        assert!(error["message"].as_str().unwrap().contains("uncompressed"), "{rest:?}");
        let rpc = server.http("POST", "/", &headers, body).await;
        assert_eq!((rpc.status, rpc.json()["error"]["code"].as_i64()), (200, Some(-32005)), "{encoding}");
    }
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
    let plain = [("a2a-version", "1.0"), ("content-type", "application/json"), ("content-encoding", "Identity")];
    assert_eq!(server.http("POST", "/message:send", &plain, SEND).await.status, 200);
}

#[tokio::test]
async fn binary_junk_in_authorization_is_a_panic() {
    let server = Server::start().await;
    for junk in [&b"\x80\xff\xfe"[..], b"Bearer \xff", b"Bearer", b"", b"Basic ====", &[b'x'; 8000]] {
        let mut request =
            b"GET /tasks/t-1 HTTP/1.1\r\nhost: x\r\na2a-version: 1.0\r\nconnection: close\r\nauthorization: ".to_vec();
        request.extend_from_slice(junk);
        request.extend_from_slice(b"\r\n\r\n");
        let status = server.raw(&request).await.status;
        assert!([200, 401].contains(&status), "{junk:?}: {status}");
    }
}

#[tokio::test]
async fn a_body_that_stays_away_is_not_waited_for() {
    let mut config = Config::default();
    config.limits.body_timeout = Span(Duration::from_millis(100));
    let server = Server::with(config).await;
    let text = request("POST", "/message:send", &[("a2a-version", "1.0")], SEND);
    let answer = server.raw(&text.as_bytes()[..text.len() - 5]).await;
    assert_eq!((answer.status, answer.json()["error"]["details"][0]["reason"].as_str()), (504, Some("DEADLINE")));
}

#[tokio::test]
async fn a_blocking_send_ends_with_its_deadline_and_the_turn_goes_on() {
    let mut config = Config::default();
    config.limits.blocking_timeout = Span(Duration::from_millis(100));
    let server = Server::with(config).await;
    let hang = SEND.replace("hi", "hang");
    let answer = server.rest("POST", "/message:send", &hang).await;
    assert_eq!((answer.status, answer.json()["error"]["details"][0]["reason"].as_str()), (504, Some("DEADLINE")));
    let answer = server.rpc("SendMessage", &hang).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_i64()), (504, Some(-32603)));
    assert_eq!(server.store.sends.lock().unwrap().len(), 2);
    assert_eq!(server.store.cancels.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn a_blocking_send_survives_the_loss_of_its_stream_as_the_same_turn() {
    let server = Server::start().await;
    let answer = server.rest("POST", "/message:send", &SEND.replace("hi", "lost once")).await;
    assert_eq!((answer.status, answer.json()["task"]["id"].as_str()), (200, Some("t-1")));
    let sends = server.store.sends.lock().unwrap().clone();
    assert_eq!(sends.len(), 2);
    assert_eq!(sends[0], sends[1]);
    let answer = server.rest("POST", "/message:send", &SEND.replace("hi", "nonsense")).await;
    assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (500, Some("Internal error")));
}

#[tokio::test]
async fn a_malformed_traceparent_does_not_break_the_request() {
    let server = Server::start().await;
    let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
    for (sent, kept) in
        [(good, good), ("00-0-0-00", ""), ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "")]
    {
        let headers = [("a2a-version", "1.0"), ("traceparent", sent), ("tracestate", &"x".repeat(8000))];
        assert_eq!(server.http("POST", "/message:send", &headers, SEND).await.status, 200);
        assert_eq!(server.store.last_send().traceparent, kept);
    }
}

#[tokio::test]
async fn only_cards_are_open_to_browsers_by_default() {
    let preflight = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "a2a-version,authorization,last-event-id"),
    ];
    let closed = Server::start().await;
    let answer = closed.http("OPTIONS", "/", &preflight, "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (405, None));
    let card = closed.http("GET", "/.well-known/agent-card.json", &preflight[..1], "").await;
    assert_eq!((card.status, card.header("access-control-allow-origin")), (200, Some("*")));
    let card = closed.http("OPTIONS", "/.well-known/agent-card.json", &preflight, "").await;
    assert_eq!((card.status, card.header("access-control-allow-origin")), (204, Some("*")));

    let open = Server::with(Config { cors_origins: vec!["https://app.example".into()], ..Config::default() }).await;
    let answer = open.http("OPTIONS", "/", &preflight, "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("https://app.example")));
    let allowed = answer.header("access-control-allow-headers").unwrap();
    assert!(["a2a-version", "authorization", "last-event-id"].iter().all(|name| allowed.contains(name)));
    let answer = open.http("GET", "/tasks/t-1", &[("a2a-version", "1.0"), ("origin", "https://app.example")], "").await;
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(answer.header("vary"), Some("origin"));
    assert!(answer.header("access-control-expose-headers").unwrap().contains("a2a-extensions"));
    let answer =
        open.http("GET", "/tasks/t-1", &[("a2a-version", "1.0"), ("origin", "https://evil.example")], "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None));
}

#[tokio::test]
async fn only_a_context_continues_the_one_task_that_waits_if_configured() {
    let turn = r#"{"message":{"messageId":"m","contextId":"c-1","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#;
    let server = Server::start().await;
    server.rest("POST", "/message:send", turn).await;
    assert_eq!(server.store.last_send().message.unwrap().task_id, "", "a new task in the same context");
    let server = Server::with(config(|agent| agent.continue_waiting = true)).await;
    server.rest("POST", "/message:send", turn).await;
    assert_eq!(server.store.last_send().message.unwrap().task_id, "t-1");
    server.rest("POST", "/message:send", &turn.replace("c-1", "none")).await;
    assert_eq!(server.store.last_send().message.unwrap().task_id, "");
}
