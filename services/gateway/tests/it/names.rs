//! `Idempotency-Key`, the same on every binding.

use rialto_a2a::{Error, Kind, json, v1::SendMessageRequest};
use rialto_runtime::config::Agent;
use tonic::Request;

use crate::client::{Server, config};

const SEND: &str = r#"{"message":{"messageId":"m-1","role":"ROLE_USER","parts":[{"text":"hi"}],"metadata":{"b":1,"a":[null,"x"]}},"metadata":{"k":2}}"#;

fn headers(key: &str) -> [(&str, &str); 3] {
    [("a2a-version", "1.0"), ("content-type", "application/json"), ("idempotency-key", key)]
}

fn grpc(key: &str, body: &str) -> Request<SendMessageRequest> {
    let mut request = Request::new(json::from_str::<SendMessageRequest>(body).unwrap());
    request.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
    request.metadata_mut().insert("idempotency-key", key.parse().unwrap());
    request
}

fn rpc(body: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{body}}}"#)
}

#[tokio::test]
async fn one_message_has_one_fingerprint_on_every_binding_however_it_is_to_be_answered() {
    let server = Server::with(config(|agent: &mut Agent| agent.tenants = vec!["acme".to_owned()])).await;
    server.http("POST", "/message:send", &headers("k-1"), SEND).await;
    server.http("POST", "/message:stream", &headers("k-1"), SEND).await;
    server.http("POST", "/", &headers("k-1"), &rpc(SEND)).await;
    let mut client = server.grpc().await;
    client.send_message(grpc("k-1", SEND)).await.unwrap();
    client.send_streaming_message(grpc("k-1", SEND)).await.unwrap();
    let now = SEND.replace(
        r#""metadata":{"k":2}"#,
        r#""metadata":{"k":2},"configuration":{"returnImmediately":true,"historyLength":3}"#,
    );
    server.http("POST", "/message:send", &headers("k-1"), &now).await;
    server.http("POST", "/acme/message:send", &headers("k-1"), SEND).await;
    let reordered = SEND.replace(r#"{"b":1,"a":[null,"x"]}"#, r#"{"a":[null,"x"],"b":1.0}"#);
    server.http("POST", "/message:send", &headers("k-1"), &reordered).await;
    let sends = std::mem::take(&mut *server.store.sends.lock().unwrap());
    assert_eq!(sends.len(), 8);
    for send in &sends {
        assert_eq!(send.idempotency.as_ref().expect("a name").key, "k-1");
        assert_eq!(send.idempotency, sends[0].idempotency);
        let same = sends.iter().filter(|other| other.turn_id == send.turn_id);
        assert_eq!(same.count(), 1, "ids are new each time");
    }
    for other in [
        SEND.replace("\"hi\"", "\"ho\""),
        SEND.replace("m-1", "m-2"),
        SEND.replace(r#""k":2"#, r#""k":3"#),
        SEND.replace(r#""role""#, r#""contextId":"c-9","role""#),
    ] {
        server.http("POST", "/message:send", &headers("k-1"), &other).await;
        let send = server.store.last_send();
        assert_ne!(send.idempotency, sends[0].idempotency, "{other}");
    }
    server.rest("POST", "/message:send", SEND).await;
    assert_eq!(server.store.last_send().idempotency, None);
}

#[tokio::test]
async fn a_key_that_is_none_is_a_wrong_parameter_with_a_name() {
    let server = Server::start().await;
    for key in ["", "two words", &"k".repeat(257)] {
        let rest = server.http("POST", "/message:send", &headers(key), SEND).await;
        assert_eq!(rest.status, 400, "{rest:?}");
        assert!(rest.body.contains("Idempotency-Key"), "{rest:?}");
        let answer = server.http("POST", "/", &headers(key), &rpc(SEND)).await.json();
        assert_eq!(answer["error"]["code"], -32602);
        assert!(answer["error"]["message"].as_str().unwrap().contains("Idempotency-Key"));
        let refused = server.grpc().await.send_message(grpc(key, SEND)).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        let error = Error::from_status(&refused);
        assert_eq!((error.kind, &error.violations[0].field[..]), (Kind::InvalidParams, "Idempotency-Key"));
    }
    assert!(server.store.sends.lock().unwrap().is_empty());
}
