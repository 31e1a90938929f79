//! Every operation on every binding, from one table.

use rialto_a2a::{json, v1};
use rialto_runtime::config::{Agent, Config};
use tonic::{Request, Status};

use crate::client::{Answer, Server, redact};

/// An operation, its parameters as JSON, and its form in REST.
struct Case {
    method: &'static str,
    params: &'static str,
    rest: (&'static str, &'static str, &'static str),
}

const fn case(
    method: &'static str,
    params: &'static str,
    verb: &'static str,
    path: &'static str,
    body: &'static str,
) -> Case {
    Case { method, params, rest: (verb, path, body) }
}

const SEND: &str = r#"{"message":{"messageId":"m-1","role":"ROLE_USER","parts":[{"text":"hi"}]}}"#;
const SEND_NOW: &str = r#"{"message":{"messageId":"m-1","contextId":"c-9","role":"ROLE_USER","parts":[{"text":"hi"}]},"configuration":{"returnImmediately":true,"historyLength":0}}"#;
const SEND_MESSAGE: &str =
    r#"{"message":{"messageId":"m-1","contextId":"c-9","role":"ROLE_USER","parts":[{"text":"message"}]}}"#;
const SEND_ASK: &str = r#"{"message":{"messageId":"m-1","taskId":"t-1","role":"ROLE_USER","parts":[{"text":"ask"}]}}"#;
const HOOK: &str = r#"{"taskId":"t-1","id":"h-1","url":"https://hook.example/"}"#;

const CASES: &[Case] = &[
    case("SendMessage", SEND, "POST", "/message:send", SEND),
    case("SendMessage", SEND_NOW, "POST", "/message:send", SEND_NOW),
    case("SendMessage", SEND_MESSAGE, "POST", "/message:send", SEND_MESSAGE),
    case("SendMessage", SEND_ASK, "POST", "/message:send", SEND_ASK),
    case("SendStreamingMessage", SEND, "POST", "/message:stream", SEND),
    case("SendStreamingMessage", SEND_MESSAGE, "POST", "/message:stream", SEND_MESSAGE),
    case("GetTask", r#"{"id":"t-1","historyLength":2}"#, "GET", "/tasks/t-1?historyLength=2", ""),
    case(
        "ListTasks",
        r#"{"contextId":"c-1","status":"TASK_STATE_INPUT_REQUIRED","pageSize":7,"statusTimestampAfter":"2026-01-01T01:00:00+01:00","includeArtifacts":true}"#,
        "GET",
        "/tasks?contextId=c-1&status=TASK_STATE_INPUT_REQUIRED&pageSize=7&statusTimestampAfter=2026-01-01T01:00:00%2B01:00&includeArtifacts=true",
        "",
    ),
    case("ListTasks", r#"{"contextId":"none"}"#, "GET", "/tasks?contextId=none", ""),
    case(
        "CancelTask",
        r#"{"id":"t-1","metadata":{"why":1}}"#,
        "POST",
        "/tasks/t-1:cancel",
        r#"{"metadata":{"why":1}}"#,
    ),
    case("SubscribeToTask", r#"{"id":"t-1"}"#, "GET", "/tasks/t-1:subscribe", ""),
    case("SubscribeToTask", r#"{"id":"t-1"}"#, "POST", "/tasks/t-1:subscribe", r#"{"id":"t-1"}"#),
    case("CreateTaskPushNotificationConfig", HOOK, "POST", "/tasks/t-1/pushNotificationConfigs", HOOK),
    case(
        "GetTaskPushNotificationConfig",
        r#"{"taskId":"t-1","id":"h-1"}"#,
        "GET",
        "/tasks/t-1/pushNotificationConfigs/h-1",
        "",
    ),
    case("ListTaskPushNotificationConfigs", r#"{"taskId":"t-1"}"#, "GET", "/tasks/t-1/pushNotificationConfigs", ""),
    case(
        "DeleteTaskPushNotificationConfig",
        r#"{"taskId":"t-1","id":"h-1"}"#,
        "DELETE",
        "/tasks/t-1/pushNotificationConfigs/h-1",
        "",
    ),
    case("GetExtendedAgentCard", "{}", "GET", "/extendedAgentCard", ""),
];

fn show(answer: &Answer) -> String {
    format!(
        "{} {}\n{}",
        answer.status,
        answer.header("content-type").unwrap_or_default(),
        redact(answer.body.trim_end())
    )
}

/// The same call by gRPC, its result as JSON lines.
async fn by_grpc(server: &Server, method: &str, params: &str) -> String {
    fn ask<T: serde::de::DeserializeOwned>(params: &str) -> Request<T> {
        let mut request = Request::new(json::from_str(params).unwrap());
        request.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
        request
    }
    fn one<T: serde::Serialize>(answer: Result<tonic::Response<T>, Status>) -> Result<String, Status> {
        answer.map(|answer| json::to_string(answer.get_ref()).unwrap())
    }
    async fn all(
        answer: Result<tonic::Response<tonic::Streaming<v1::StreamResponse>>, Status>,
    ) -> Result<String, Status> {
        let (mut events, mut lines) = (answer?.into_inner(), Vec::new());
        while let Some(event) = events.message().await? {
            lines.push(json::to_string(&event).unwrap());
        }
        Ok(lines.join("\n"))
    }
    let mut grpc = server.grpc().await;
    let answer = match method {
        "SendMessage" => one(grpc.send_message(ask(params)).await),
        "SendStreamingMessage" => all(grpc.send_streaming_message(ask(params)).await).await,
        "GetTask" => one(grpc.get_task(ask(params)).await),
        "ListTasks" => one(grpc.list_tasks(ask(params)).await),
        "CancelTask" => one(grpc.cancel_task(ask(params)).await),
        "SubscribeToTask" => all(grpc.subscribe_to_task(ask(params)).await).await,
        "CreateTaskPushNotificationConfig" => one(grpc.create_task_push_notification_config(ask(params)).await),
        "GetTaskPushNotificationConfig" => one(grpc.get_task_push_notification_config(ask(params)).await),
        "ListTaskPushNotificationConfigs" => one(grpc.list_task_push_notification_configs(ask(params)).await),
        "DeleteTaskPushNotificationConfig" => one(grpc.delete_task_push_notification_config(ask(params)).await),
        "GetExtendedAgentCard" => one(grpc.get_extended_agent_card(ask(params)).await),
        other => panic!("{other}"),
    };
    match answer {
        Ok(lines) => redact(&lines),
        Err(status) => format!("{:?}: {}", status.code(), status.message()),
    }
}

#[tokio::test]
async fn every_operation_on_every_binding() {
    let server = Server::start().await;
    let mut page = String::new();
    for Case { method, params, rest: (verb, path, body) } in CASES {
        let rpc = show(&server.rpc(method, params).await);
        let rest = show(&server.rest(verb, path, body).await);
        let grpc = by_grpc(&server, method, params).await;
        page += &format!("# {method} {params}\n\nJSON-RPC {rpc}\n\n{verb} {path} {rest}\n\ngRPC\n{grpc}\n\n\n");
    }
    insta::assert_snapshot!(page);

    // What task-store was asked is the same, whichever door it came by.
    let lists = server.store.lists.lock().unwrap();
    assert_eq!(lists.len() % 3, 0);
    for same in lists.chunks(3) {
        assert_eq!((&same[0], &same[1]), (&same[1], &same[2]));
    }
    let cancels = server.store.cancels.lock().unwrap();
    assert!(cancels.iter().all(|cancel| cancel.commit_id.len() == 16 && cancel.metadata == cancels[0].metadata));
    let sends = server.store.sends.lock().unwrap();
    assert!(sends.iter().all(|send| send.turn_id.len() == 16));
    let turns: std::collections::BTreeSet<_> = sends.iter().map(|send| &send.turn_id).collect();
    assert_eq!(turns.len(), sends.len(), "each send is a turn of its own");
}

/// The same agent under a mount and a tenant.
#[tokio::test]
async fn tenants_and_mounts_reach_the_agent_on_every_binding() {
    let agent = Agent { id: "desk".into(), mount: "/support".into(), tenants: vec!["acme".into()], ..Agent::echo() };
    let server = Server::with(Config { agents: vec![Agent::echo(), agent], ..Config::default() }).await;
    let seen = || {
        let gets = server.store.gets.lock().unwrap();
        let scope = gets.last().unwrap().scope.clone().unwrap();
        (scope.agent, scope.tenant)
    };
    let desk = |tenant: &str| ("desk".to_owned(), tenant.to_owned());

    for path in ["/support/tasks/t-1", "/support/acme/tasks/t-1", "/support/tasks/t-1?tenant=acme"] {
        assert_eq!(server.rest("GET", path, "").await.status, 200, "{path}");
        assert_eq!(seen(), desk(if path.contains("acme") { "acme" } else { "" }));
    }
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":"t-1","tenant":"acme"}}"#;
    for path in ["/support", "/support/"] {
        let answer = server.http("POST", path, &[("a2a-version", "1.0")], body).await;
        assert_eq!(answer.json()["result"]["id"], "t-1");
        assert_eq!(seen(), desk("acme"));
    }
    for (tenant, expected) in
        [("", ("echo".to_owned(), String::new())), ("support", desk("")), ("support/acme", desk("acme"))]
    {
        let params = format!(r#"{{"id":"t-1","tenant":"{tenant}"}}"#);
        assert!(by_grpc(&server, "GetTask", &params).await.starts_with(r#"{"id":"t-1""#));
        assert_eq!(seen(), expected);
    }

    // Unknown tenants look like unknown tasks, before the store is asked.
    let asked = server.store.gets.lock().unwrap().len();
    let nobody = server.rest("GET", "/tasks/nope", "").await.body;
    for path in ["/support/other/tasks/t-1", "/other/tasks/t-1", "/support/tasks/t-1?tenant=other"] {
        let answer = server.rest("GET", path, "").await;
        assert_eq!((answer.status, &answer.body), (404, &nobody), "{path}");
    }
    for tenant in ["other", "support/other", "../acme", "/"] {
        let params = format!(r#"{{"id":"t-1","tenant":"{tenant}"}}"#);
        assert_eq!(by_grpc(&server, "GetTask", &params).await, "NotFound: Task not found", "{tenant}");
    }
    let unknown = server.rpc("SendMessage", &SEND.replacen('{', r#"{"tenant":"acme","#, 1)).await;
    assert_eq!(unknown.json()["error"]["code"], -32001);
    let wrong = server.rest("POST", "/support/acme/message:send", &SEND.replacen('{', r#"{"tenant":"b","#, 1)).await;
    assert_eq!((wrong.status, wrong.json()["error"]["details"][0]["reason"].as_str()), (400, Some("INVALID_PARAMS")));
    assert_eq!(server.store.gets.lock().unwrap().len(), asked + 1);
    assert_eq!(server.store.sends.lock().unwrap().len(), 0);
}
