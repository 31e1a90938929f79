//! What clients send that is not quite a request (cases C1 to C23).

use serde_json::{Value, json};

use crate::client::{Answer, Server, config};

fn code(answer: &Answer) -> i64 {
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    answer.json()["error"]["code"].as_i64().unwrap_or_else(|| panic!("no error in {answer:?}"))
}

fn message(part: &str) -> String {
    format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","parts":[{part}]}}}}"#)
}

/// Sends a message by JSON-RPC and REST, and expects the same from both.
async fn send(server: &Server, request: &str) -> Result<(), (String, String)> {
    let rpc = server.rpc("SendMessage", request).await;
    let rest = server.rest("POST", "/message:send", request).await;
    let (rpc, rest) = (rpc.json(), rest.json());
    assert_eq!(rpc["error"]["data"], rest["error"]["details"]);
    assert_eq!(rpc["error"]["message"], rest["error"]["message"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match &rpc["error"] {
        Value::Null => Ok(()),
        error => Err((text(&error["data"][0]["reason"]), text(&error["message"]))),
    }
}

#[tokio::test]
async fn broken_bodies_are_answered_by_the_protocol() {
    let server = Server::start().await;
    let broken = [
        (r#"{"jsonrpc":"2.0","id":7,"params":{}}"#, -32600, json!(7)),
        (r#"{"jsonrpc":"2.0","id":7,"#, -32700, Value::Null),
        ("", -32700, Value::Null),
        (r#""hi""#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":7,"method":5}"#, -32600, json!(7)),
        ("17", -32600, Value::Null),
        ("null", -32600, Value::Null),
        ("{}", -32600, Value::Null),
        ("[]", -32600, Value::Null),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"GetTask"}]"#, -32600, Value::Null),
        ("[1,", -32700, Value::Null),
        (r#"{"jsonrpc":"1.0","id":"x","method":"GetTask"}"#, -32600, json!("x")),
        (r#"{"id":1,"method":"GetTask"}"#, -32600, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1.5,"method":"GetTask"}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":1e2,"method":"GetTask"}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":{"a":1},"method":"GetTask"}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":true,"method":"GetTask"}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"GetTask"}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":1,"method":"Nope"}"#, -32601, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"message/send"}"#, -32601, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":[1]}"#, -32602, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":"x"}"#, -32602, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":5}}"#, -32602, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetTask"}"#, -32602, json!(1)),
        (r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":null}"#, -32602, json!(1)),
    ];
    for (body, expected, id) in &broken {
        let answer = server.rpc_body(body).await;
        assert_eq!((answer.status, code(&answer)), (200, *expected), "{body}");
        assert_eq!(answer.json()["id"], *id, "{body}");
        assert_eq!(answer.json()["jsonrpc"], "2.0");
        if body.starts_with('[') && *expected == -32600 {
            assert_eq!(answer.json()["error"]["message"], "Batch requests are not supported");
        }
        let wrong = server.http("POST", "/", &[("a2a-version", "1.0"), ("content-type", "text/plain")], body).await;
        assert_eq!((wrong.status, code(&wrong), &wrong.json()["id"]), (200, -32005, id), "{body}");
    }
    let latin =
        [&b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\n"[..], b"\"\xe9\""].concat();
    assert_eq!(code(&server.raw(&latin).await), -32700);
}

#[tokio::test]
async fn ids_come_back_as_they_were_sent() {
    let server = Server::start().await;
    for id in [r#""a\u00e9\"b""#, "0", "-7", "123456789012345678901234567890", "null", r#""""#] {
        let body = format!(r#"{{"id" : {id}, "jsonrpc":"2.0","method":"\u0047etTask","params":{{"id":"t-1"}}}}"#);
        let answer = server.rpc_body(&body).await;
        assert!(
            answer.body.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"id":"t-1""#)),
            "{answer:?}"
        );
    }
    let none = server.rpc_body(r#"{"jsonrpc":"2.0","method":"GetTask","params":{"id":"t-1"}}"#).await;
    assert_eq!((&none.json()["id"], &none.json()["result"]["id"]), (&Value::Null, &json!("t-1")));
    let long = format!(r#"{{"jsonrpc":"2.0","id":"{}","method":"GetTask","params":{{"id":"t-1"}}}}"#, "x".repeat(5000));
    assert_eq!(code(&server.rpc_body(&long).await), -32600, "an id is repeated in each event");
}

#[tokio::test]
async fn request_media_types_are_taken_by_their_essence() {
    let server = Server::start().await;
    let body = message(r#"{"text":"hi"}"#);
    let rpc = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{body}}}"#);
    for (sent, mirrored) in [
        ("application/json", "application/json"),
        ("application/json; charset=utf-8", "application/json"),
        ("Application/JSON", "application/json"),
        ("application/a2a+json", "application/a2a+json"),
        ("", "application/a2a+json"),
    ] {
        let headers = [("a2a-version", "1.0"), ("content-type", sent)];
        let headers = if sent.is_empty() { &headers[..1] } else { &headers[..] };
        let answer = server.http("POST", "/message:send", headers, &body).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(mirrored)), "{sent}");
        assert_eq!(server.http("POST", "/", headers, &rpc).await.json()["result"]["task"]["id"], "t-1", "{sent}");
    }
    for sent in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "garbage"] {
        let answer =
            server.http("POST", "/message:send", &[("a2a-version", "1.0"), ("content-type", sent)], &body).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["details"][0]["reason"].as_str()),
            (400, Some("CONTENT_TYPE_NOT_SUPPORTED"))
        );
    }
    let get = |accept| [("a2a-version", "1.0"), ("accept", accept)];
    for (accept, expected) in [("application/json", "application/json"), ("*/*", "application/a2a+json")] {
        let answer = server.http("GET", "/tasks/t-1", &get(accept), "").await;
        assert_eq!(answer.header("content-type"), Some(expected));
    }
    assert_eq!(server.store.sends.lock().unwrap().len(), 10);
}

#[tokio::test]
async fn parts_without_content_are_refused_and_empty_text_is_not() {
    let server = Server::start().await;
    for (part, field) in [
        (r#"{"mediaType":"application/json"}"#, "message.parts[0]"),
        ("{}", "message.parts[0]"),
        (r#"{"text":"a"},{}"#, "message.parts[1]"),
        (r#"{"text":"a","url":"b"}"#, "message.parts[0]"),
    ] {
        let (reason, text) = send(&server, &message(part)).await.unwrap_err();
        assert_eq!(reason, "INVALID_PARAMS");
        assert!(text.contains(field), "{text}");
    }
    assert!(send(&server, r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[]}}"#).await.is_err());
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
    send(&server, &message(r#"{"text":""}"#)).await.unwrap();
}

#[tokio::test]
async fn unknown_members_are_ignored_and_unknown_words_are_not() {
    let server = Server::start().await;
    let future = r#"{"x_new":1,"message":{"x_new":{},"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi","x_new":[]}]},"configuration":{"x_new":1,"blocking":false,"acceptedOutputModes":["image/heic"]}}"#;
    send(&server, future).await.unwrap();
    assert!(!format!("{:?}", server.store.last_send()).contains("x_new"));
    for role in [r#""ROLE_ROBOT""#, "99", r#""user""#, r#""ROLE_AGENT""#, r#""ROLE_UNSPECIFIED""#] {
        let request = message(r#"{"text":"hi"}"#).replace(r#""ROLE_USER""#, role);
        let (reason, text) = send(&server, &request).await.unwrap_err();
        assert!(reason == "INVALID_PARAMS" && text.contains("message.role"), "{role}: {text}");
    }
    for status in ["TASK_STATE_NOPE", "working", "99", "-1", "3.0", ""] {
        let answer = server.rest("GET", &format!("/tasks?status={status}"), "").await;
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains(r#""field":"status""#), "{answer:?}");
    }
    for status in [r#""TASK_STATE_NOPE""#, "99", "-1", r#""""#] {
        assert_eq!(code(&server.rpc("ListTasks", &format!(r#"{{"status":{status}}}"#)).await), -32602);
    }
    let asked = || server.store.lists.lock().unwrap().last().unwrap().query.as_ref().unwrap().status();
    for status in ["TASK_STATE_COMPLETED", "3"] {
        assert_eq!(server.rest("GET", &format!("/tasks?status={status}"), "").await.status, 200);
        assert_eq!(asked(), rialto_a2a::v1::TaskState::Completed, "{status}");
    }
}

#[tokio::test]
async fn unsupported_media_types_make_no_task() {
    let server = Server::start().await;
    for part in [
        r#"{"raw":"AAAA","mediaType":"application/x-nope"}"#,
        r#"{"url":"https://f.example.test/x","mediaType":"video/quux"}"#,
        r#"{"raw":"AAAA"}"#,
        r#"{"text":"ok"},{"text":"<b>","mediaType":"text/html"}"#,
    ] {
        let (reason, text) = send(&server, &message(part)).await.unwrap_err();
        assert!(reason == "CONTENT_TYPE_NOT_SUPPORTED" && text.contains("message.parts["), "{text}");
    }
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
    for part in [r#"{"text":"hi"}"#, r#"{"text":"hi","mediaType":"text/plain; charset=utf-8"}"#, r#"{"data":{"a":1}}"#]
    {
        send(&server, &message(part)).await.unwrap();
    }
}

#[tokio::test]
async fn history_lengths_and_page_sizes_are_checked_on_every_binding() {
    let server = Server::start().await;
    for bad in ["-1", "2147483648", r#""abc""#, "1.5"] {
        let query = bad.trim_matches('"');
        let request =
            message(r#"{"text":"hi"}"#).replacen('{', &format!(r#"{{"configuration":{{"historyLength":{bad}}},"#), 1);
        assert_eq!(send(&server, &request).await.unwrap_err().0, "INVALID_PARAMS", "{bad}");
        assert_eq!(code(&server.rpc("GetTask", &format!(r#"{{"id":"t-1","historyLength":{bad}}}"#)).await), -32602);
        assert_eq!(code(&server.rpc("ListTasks", &format!(r#"{{"historyLength":{bad}}}"#)).await), -32602);
        for path in ["/tasks/t-1", "/tasks"] {
            let answer = server.rest("GET", &format!("{path}?historyLength={query}"), "").await;
            assert_eq!(answer.status, 400, "{path} {bad}");
            assert!(answer.body.contains(r#""field":"historyLength""#), "{answer:?}");
        }
    }
    for good in [0, 1, 2] {
        server.rest("GET", &format!("/tasks/t-1?historyLength={good}"), "").await;
        assert_eq!(server.store.gets.lock().unwrap().last().unwrap().history_length, Some(good));
    }
    for (size, status) in
        [("0", 400), ("-1", 400), ("1", 200), ("100", 200), ("101", 400), ("1000000000", 400), ("x", 400), ("", 400)]
    {
        let answer = server.rest("GET", &format!("/tasks?pageSize={size}&pageToken="), "").await;
        assert_eq!(answer.status, status, "{size}");
    }
    let plus = server.rest("GET", "/tasks?statusTimestampAfter=2026-01-01T00:00:00+01:00", "").await;
    assert!(plus.status == 400 && plus.body.contains("%2B"), "{plus:?}");
    for (query, status) in [
        ("includeArtifacts=yes", 400),
        ("statusTimestampAfter=yesterday", 400),
        ("statusTimestampAfter=", 400),
        ("includeArtifacts=", 400),
        ("status=", 400),
        ("contextId=a&contextId=b", 400),
        ("pageSize=1&pageSize=1", 400),
        ("status=TASK_STATE_WORKING&status=", 400),
        ("tenant=&tenant=", 400),
        ("unknown=1&unknown=2&contextId=a", 200),
    ] {
        assert_eq!(server.rest("GET", &format!("/tasks?{query}"), "").await.status, status, "{query}");
    }
    assert_eq!(server.store.lists.lock().unwrap().last().unwrap().query.as_ref().unwrap().context_id, "a");
}

#[tokio::test]
async fn ids_are_checked_before_they_are_used() {
    let server = Server::start().await;
    let with = |field: &str, id: &str| {
        format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","{field}":"{id}","parts":[{{"text":"hi"}}]}}}}"#)
    };
    for bad in ["a b", "é", "a/b", &"x".repeat(129), "a\\u0000"] {
        let (reason, text) = send(&server, &with("contextId", bad)).await.unwrap_err();
        assert!(reason == "INVALID_PARAMS" && text.contains("message.contextId"), "{text}");
    }
    assert_eq!(send(&server, &with("taskId", "nope")).await.unwrap_err().0, "TASK_NOT_FOUND");
    assert_eq!(send(&server, &with("taskId", &"x".repeat(20_000))).await.unwrap_err().0, "TASK_NOT_FOUND");
    send(&server, &with("contextId", &"x".repeat(128))).await.unwrap();
    send(&server, &with("taskId", "t-1")).await.unwrap();
    assert_eq!(server.store.last_send().message.unwrap().context_id, "", "the task says its context");
    send(&server, &message(r#"{"text":"hi"}"#)).await.unwrap();
    assert_eq!(server.store.last_send().message.unwrap().context_id.len(), 36, "minted before the first try");
    for path in ["/tasks/a%2Fb", "/tasks/..%2f..%2fmetrics", "/tasks/%00", "/tasks/nope"] {
        assert_eq!(
            server.rest("GET", path, "").await.json()["error"]["details"][0]["reason"],
            "TASK_NOT_FOUND",
            "{path}"
        );
    }
}

#[tokio::test]
async fn deep_and_many_things_are_refused() {
    let server = Server::with(config(|_| {})).await;
    let nest = |depth: usize| format!(r#"{{"data":{}1{}}}"#, "[".repeat(depth), "]".repeat(depth));
    send(&server, &message(&nest(32))).await.unwrap();
    for depth in [33, 100, 100_000] {
        let (reason, _) = send(&server, &message(&nest(depth))).await.unwrap_err();
        assert!(["INVALID_PARAMS", "PARSE_ERROR"].contains(&&reason[..]), "{depth}: {reason}");
    }
    let parts = |count| message(&vec![r#"{"text":"x"}"#; count].join(","));
    send(&server, &parts(256)).await.unwrap();
    let (reason, text) = send(&server, &parts(257)).await.unwrap_err();
    assert_eq!(
        (&reason[..], &text[..]),
        ("INVALID_PARAMS", "Invalid parameters: message.parts: has 257 parts, the limit is 256")
    );
    let (_, text) = send(&server, &message(&vec!["{}"; 200].join(","))).await.unwrap_err();
    assert!(text.len() < 1100);
}

#[tokio::test]
async fn a_webhook_inside_a_message_is_refused_while_there_are_none() {
    let server = Server::start().await;
    let hook = message(r#"{"text":"hi"}"#).replacen(
        '{',
        r#"{"configuration":{"taskPushNotificationConfig":{"url":"http://127.0.0.1/"}},"#,
        1,
    );
    assert_eq!(send(&server, &hook).await.unwrap_err().0, "PUSH_NOTIFICATION_NOT_SUPPORTED");
    assert_eq!(code(&server.rpc("CreateTaskPushNotificationConfig", "{}").await), -32003);
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
}
