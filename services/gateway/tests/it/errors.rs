//! Every error on every binding, and that the page about errors tells the truth.

use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::GetRequest;
use tonic::Request;

use crate::client::Server;

const PAGE: &str = include_str!("../../../../docs/errors.md");

#[tokio::test]
async fn every_error_on_every_binding() {
    let server = Server::start().await;
    let mut grpc = server.grpc().await;
    let mut table = String::new();
    for kind in Kind::ALL {
        let wire = kind.wire();
        let id = format!("kind:{}", wire.reason);
        let rpc = server.rpc("GetTask", &format!(r#"{{"id":"{id}"}}"#)).await;
        let rest = server.rest("GET", &format!("/tasks/{id}"), "").await;
        let mut ask = Request::new(rialto_a2a::v1::GetTaskRequest { id: id.clone(), ..Default::default() });
        ask.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
        let status = grpc.get_task(ask).await.unwrap_err();

        let (rpc_json, rest_json) = (rpc.json(), rest.json());
        assert_eq!(rpc_json["error"]["data"], rest_json["error"]["details"]);
        assert_eq!(rpc.header("retry-after"), rest.header("retry-after"));
        assert_eq!(rest.header("content-type"), Some("application/json"));
        assert_eq!(Error::from_status(&status).kind, kind);
        assert_eq!(
            (rpc_json["error"]["code"].as_i64(), rest.status, status.code()),
            (Some(wire.jsonrpc.into()), wire.http, wire.grpc)
        );
        table += &format!(
            "{:<36} {} {:>6} | {} {:<19} | {:<18} | retry {}\n",
            wire.reason,
            rpc.status,
            rpc_json["error"]["code"],
            rest.status,
            rest_json["error"]["status"].as_str().unwrap(),
            format!("{:?}", status.code()),
            rest.header("retry-after").unwrap_or("-"),
        );
    }
    insta::assert_snapshot!(table);
}

#[tokio::test]
async fn the_page_about_errors_has_every_kind_on_every_wire() {
    for kind in Kind::ALL {
        let wire = kind.wire();
        let code = Error::from(kind).to_rest().1["error"]["status"].as_str().unwrap().to_owned();
        let row = format!("| `{}` | {} | {} | {code} |", wire.reason, wire.jsonrpc, wire.http);
        assert!(PAGE.contains(&row), "docs/errors.md lacks the row\n{row}");
    }
    let rows = PAGE.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, Kind::ALL.len(), "docs/errors.md has a row about something that is no error");
}

#[tokio::test]
async fn internal_text_never_reaches_a_client() {
    let server = Server::start().await;
    for id in ["foreign", "panic"] {
        let rpc = server.rpc("GetTask", &format!(r#"{{"id":"{id}"}}"#)).await;
        let rest = server.rest("GET", &format!("/tasks/{id}"), "").await;
        for answer in [rpc, rest] {
            assert!(answer.body.contains("Internal error") && !answer.body.contains("hunter2"), "{answer:?}");
            assert!(!answer.body.contains("as ordered"));
        }
        let mut ask = Request::new(rialto_a2a::v1::GetTaskRequest { id: id.into(), ..Default::default() });
        ask.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
        let status = server.grpc().await.get_task(ask).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (tonic::Code::Internal, "Internal error"));
    }
    // A panic in one call is no end of the others.
    assert_eq!(server.rest("GET", "/tasks/t-1", "").await.status, 200);
}

#[tokio::test]
async fn a_store_that_is_away_for_one_call_is_not_noticed() {
    let server = Server::start().await;
    let away = |calls| server.store.away.store(calls, std::sync::atomic::Ordering::SeqCst);
    away(1);
    assert_eq!(server.rest("GET", "/tasks/t-1", "").await.status, 200);
    away(2);
    let answer = server.rest("GET", "/tasks/t-1", "").await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    let gets: Vec<GetRequest> = server.store.gets.lock().unwrap().clone();
    assert_eq!(gets.len(), 4);

    away(1);
    let send = r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#;
    assert_eq!(server.rest("POST", "/message:send", send).await.status, 200);
    let sends = server.store.sends.lock().unwrap();
    assert_eq!(sends.len(), 2);
    assert_eq!(sends[0], sends[1], "the second try is the same turn");
}
