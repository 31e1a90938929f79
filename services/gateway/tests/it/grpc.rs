//! What only gRPC can get wrong (cases C139 to C147).

use std::time::Duration;

use rialto_a2a::{
    Error, Kind, json,
    v1::{GetTaskRequest, Part, SendMessageRequest, SubscribeToTaskRequest},
};
use rialto_runtime::{
    config::Config,
    units::{Size, Span},
};
use tokio::time::timeout;
use tonic::{Code, Request, metadata::MetadataValue, transport::Endpoint};

use crate::client::{PATIENCE, Server};

fn with_version<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("a2a-version", "1.0".parse().unwrap());
    request
}

fn get(id: &str) -> Request<GetTaskRequest> {
    with_version(GetTaskRequest { id: id.to_owned(), ..Default::default() })
}

fn message(text: &str) -> SendMessageRequest {
    json::from_str(&format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","parts":[{{"text":"{text}"}}]}}}}"#))
        .unwrap()
}

fn kind(status: &tonic::Status) -> Kind {
    Error::from_status(status).kind
}

#[tokio::test]
async fn service_parameters_are_read_from_metadata() {
    let server = Server::start().await;
    let mut grpc = server.grpc().await;
    for (version, served) in [
        (Some("1.0"), true),
        (Some("1.0.7"), true),
        (Some("0.3"), false),
        (Some("9.9"), false),
        (Some(""), false),
        (None, false),
    ] {
        let mut request = Request::new(GetTaskRequest { id: "t-1".into(), ..Default::default() });
        if let Some(version) = version {
            request.metadata_mut().insert("a2a-version", version.parse().unwrap());
        }
        match grpc.get_task(request).await {
            Ok(_) => assert!(served, "{version:?}"),
            Err(status) => {
                assert!(!served, "{version:?}: {status:?}");
                let error = Error::from_status(&status);
                assert_eq!((status.code(), error.kind), (Code::FailedPrecondition, Kind::VersionNotSupported));
                assert_eq!(error.metadata["supportedVersions"], "1.0");
            }
        }
    }
    let uri = rialto_gateway::EVENT_NUMBER;
    for lines in [vec![format!("urn:x, {uri}")], vec!["urn:x".to_owned(), uri.to_owned()]] {
        let mut request = get("t-1");
        for line in lines {
            request.metadata_mut().append("a2a-extensions", line.parse().unwrap());
        }
        let reply = grpc.get_task(request).await.unwrap();
        assert_eq!(reply.metadata().get("a2a-extensions").unwrap(), uri);
    }
    let mut request = get("t-1");
    request.metadata_mut().insert("authorization", MetadataValue::try_from(&b"\xff\xfe"[..]).unwrap());
    request.metadata_mut().insert_bin("junk-bin", MetadataValue::from_bytes(&[0, 255]));
    grpc.get_task(request).await.unwrap();
}

#[tokio::test]
async fn a_stream_is_resumed_and_numbered_by_metadata() {
    let server = Server::start().await;
    let uri = rialto_gateway::EVENT_NUMBER;
    let mut request = with_version(SubscribeToTaskRequest { id: "t-1".into(), ..Default::default() });
    request.metadata_mut().insert("last-event-id", "2".parse().unwrap());
    request.metadata_mut().insert("a2a-extensions", uri.parse().unwrap());
    let mut events = server.grpc().await.subscribe_to_task(request).await.unwrap().into_inner();
    let mut numbers = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        let event = json::to_value(&event).unwrap();
        numbers.push(event.as_object().unwrap().values().next().unwrap()["metadata"][uri].clone());
    }
    assert_eq!(numbers, [3, 4]);
}

#[tokio::test]
async fn long_mistakes_do_not_kill_the_connection() {
    let server = Server::start().await;
    let mut grpc = server.grpc().await;
    let quiet = with_version(SubscribeToTaskRequest { id: "quiet".into(), ..Default::default() });
    let mut stream = grpc.subscribe_to_task(quiet).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();

    let status = grpc.get_task(get(&"x".repeat(20_000))).await.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::NotFound, Kind::TaskNotFound));
    for count in [200, 3_000] {
        let mut invalid = message("hi");
        invalid.message.as_mut().unwrap().parts = vec![Part { filename: "y".repeat(500), ..Part::default() }; count];
        let status = grpc.send_message(with_version(invalid)).await.unwrap_err();
        assert_eq!((status.code(), kind(&status)), (Code::InvalidArgument, Kind::InvalidParams));
        assert!(status.message().len() + status.details().len() < 5_000);
    }
    let mut wrong = message("hi");
    wrong.message.as_mut().unwrap().parts[0].media_type = "z".repeat(100_000);
    let status = grpc.send_message(with_version(wrong)).await.unwrap_err();
    assert_eq!(kind(&status), Kind::ContentTypeNotSupported);

    // The same connection, and its stream, are well.
    grpc.get_task(get("t-1")).await.unwrap();
    assert!(timeout(Duration::from_millis(50), stream.message()).await.is_err(), "still open");
}

#[tokio::test]
async fn one_limit_for_all_bindings_and_what_is_stored_can_be_read() {
    let mut config = Config::default();
    config.limits.request_size = Size(100_000);
    let server = Server::with(config).await;
    let mut grpc = server.grpc().await;
    let status = grpc.send_message(with_version(message(&"x".repeat(200_000)))).await.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::ResourceExhausted, Kind::PayloadTooLarge));
    let text = "Request too large: the limit is 100000 bytes";
    assert_eq!(status.message(), text);
    let json = json::to_string(&message(&"x".repeat(200_000))).unwrap();
    assert_eq!(server.rest("POST", "/message:send", &json).await.json()["error"]["message"], text);
    assert_eq!(server.rpc("SendMessage", &json).await.json()["error"]["message"], text);

    assert_eq!(grpc.get_task(get("big")).await.unwrap().into_inner().artifacts.len(), 1);
    assert!(server.rest("GET", "/tasks/big", "").await.body.len() > 5_000_000);
}

#[tokio::test]
async fn what_grpc_itself_refuses_is_said_in_terms_of_the_protocol() {
    let server = Server::start().await;
    let channel = Endpoint::from_shared(format!("http://{}", server.addr)).unwrap().connect().await.unwrap();
    let mut raw = tonic::client::Grpc::new(channel);
    raw.ready().await.unwrap();
    // A message of another type, which is no message at all here.
    let codec = tonic_prost::ProstCodec::<GetTaskRequest, GetTaskRequest>::default();
    let path = http::uri::PathAndQuery::from_static("/lf.a2a.v1.A2AService/Nope");
    let status = raw.unary(get("t-1"), path, codec).await.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unimplemented, Kind::MethodNotFound));
    raw.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<GetTaskRequest, GetTaskRequest>::default();
    let path = http::uri::PathAndQuery::from_static("/other.Service/Method");
    let status = raw.unary(get("t-1"), path, codec).await.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unimplemented, Kind::MethodNotFound));
    raw.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<GetTaskRequest, GetTaskRequest>::default();
    let path = http::uri::PathAndQuery::from_static("/lf.a2a.v1.A2AService/SendMessage");
    let status = raw.unary(get("t-1"), path, codec).await.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::InvalidArgument, Kind::Parse));
    // A method that there is, in a compression that there is not: clients try again without.
    let mut compressed = get("t-1");
    compressed.metadata_mut().insert("grpc-encoding", "gzip".parse().unwrap());
    let status = server.grpc().await.get_task(compressed).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unimplemented, "Compressed messages are not supported"));
    assert_eq!(status.metadata().get("grpc-accept-encoding").unwrap(), "identity");
    // Enum numbers that have no name do not come in by this door either.
    let mut request = message("hi");
    request.message.as_mut().unwrap().role = 99;
    let status = server.grpc().await.send_message(with_version(request)).await.unwrap_err();
    assert_eq!(kind(&status), Kind::InvalidParams);
}

#[tokio::test]
async fn a_client_deadline_does_not_cancel_the_task() {
    let server = Server::start().await;
    let mut request = with_version(message("hang"));
    request.set_timeout(Duration::from_millis(300));
    let status = server.grpc().await.send_message(request).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status:?}");
    assert_eq!(server.store.sends.lock().unwrap().len(), 1);
    for _ in 0..20 {
        let mut request = with_version(message("hi"));
        request.set_timeout(Duration::from_millis(1));
        drop(server.grpc().await.send_message(request).await);
    }
    assert_eq!(server.store.cancels.lock().unwrap().len(), 0);
    // No call is left behind.
    server.stop.cancel();
    server.tracker.close();
    timeout(PATIENCE, server.tracker.wait()).await.expect("everything ends");
}

#[tokio::test]
async fn streams_end_with_a_status_when_the_server_stops() {
    let server = Server::start().await;
    let quiet = with_version(SubscribeToTaskRequest { id: "quiet".into(), ..Default::default() });
    let mut stream = server.grpc().await.subscribe_to_task(quiet).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    server.stop.cancel();
    let status = timeout(PATIENCE, stream.message()).await.unwrap().unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unavailable, Kind::Unavailable));
    assert!(status.message().contains("the server stops"));
}

#[tokio::test]
async fn frequent_pings_are_welcome_and_silent_streams_live() {
    let server = Server::start().await;
    let channel = Endpoint::from_shared(format!("http://{}", server.addr))
        .unwrap()
        .http2_keep_alive_interval(Duration::from_millis(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .connect()
        .await
        .unwrap();
    let mut grpc = rialto_rpc::a2a::a2a_service_client::A2aServiceClient::new(channel);
    let quiet = with_version(SubscribeToTaskRequest { id: "quiet".into(), ..Default::default() });
    let mut stream = grpc.subscribe_to_task(quiet).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    assert!(timeout(Duration::from_millis(500), stream.message()).await.is_err(), "still open after 50 pings");
}

#[tokio::test]
async fn health_and_reflection_are_served_on_the_same_port() {
    let server = Server::start().await;
    let channel = Endpoint::from_shared(format!("http://{}", server.addr)).unwrap().connect().await.unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    let check = tonic_health::pb::HealthCheckRequest { service: "lf.a2a.v1.A2AService".into() };
    assert_eq!(health.check(check).await.unwrap().into_inner().status, 1);
    let ask = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(tonic_reflection::pb::v1::server_reflection_request::MessageRequest::ListServices(
            String::new(),
        )),
    };
    let mut reflection = tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(channel);
    let answers = reflection.server_reflection_info(futures::stream::iter([ask])).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    assert!(format!("{answer:?}").contains("lf.a2a.v1.A2AService"));
}

#[tokio::test]
async fn a_message_that_stays_away_is_not_waited_for() {
    let mut config = Config::default();
    config.limits.body_timeout = Span(Duration::from_millis(100));
    let server = Server::with(config).await;
    let channel = Endpoint::from_shared(format!("http://{}", server.addr)).unwrap().connect().await.unwrap();
    let mut raw = tonic::client::Grpc::new(channel);
    raw.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<GetTaskRequest, GetTaskRequest>::default();
    let path = http::uri::PathAndQuery::from_static("/lf.a2a.v1.A2AService/GetTask");
    let nothing = with_version(futures::stream::pending::<GetTaskRequest>());
    let answer = timeout(PATIENCE, raw.client_streaming(nothing, path, codec)).await.expect("an answer in time");
    let status = answer.unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::DeadlineExceeded, Kind::Deadline));
}
