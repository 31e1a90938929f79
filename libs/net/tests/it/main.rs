//! The listener as its peers see it, the rude ones included.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{convert::Infallible, future::pending, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use bytes::Bytes;
use futures::stream;
use http_body_util::Empty;
use hyper::{Request, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rialto_net::{BindError, BodyError, Limits, Listener, Peer};
use rialto_testkit::chaos::ChaosProxy;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PATIENCE: Duration = Duration::from_secs(10);
const GET: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

struct Server {
    addr: SocketAddr,
    stop: CancellationToken,
    tracker: TaskTracker,
    /// Lets `/wait` answer.
    go: Arc<Notify>,
    /// Says that `/wait` was asked.
    asked: Arc<Notify>,
}

impl Server {
    async fn start(change: impl FnOnce(&mut Limits), grace: Duration) -> Self {
        let mut limits = Limits {
            connections: 16,
            streams_per_connection: 4,
            header_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(20),
            ping_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(120),
        };
        change(&mut limits);
        let (go, asked) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (let_go, was_asked) = (Arc::clone(&go), Arc::clone(&asked));
        let router = Router::new()
            .route("/", get(|peer: axum::Extension<Peer>| async move { peer.addr.ip().to_string() }))
            .route(
                "/wait",
                get(|| async move {
                    was_asked.notify_one();
                    let_go.notified().await;
                    "waited"
                }),
            )
            .route("/endless", get(|| async { Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()) }))
            .route("/hang", get(pending::<()>))
            .route(
                "/flood",
                get(|| async {
                    Body::from_stream(stream::repeat_with(|| {
                        Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 64 << 10]))
                    }))
                }),
            )
            .route(
                "/read",
                post(|headers: HeaderMap, body: Body| async move {
                    match rialto_net::read(&headers, body, 1000, Duration::from_millis(200)).await {
                        Ok(body) => (StatusCode::OK, body.len().to_string()),
                        Err(BodyError::TooLarge(limit)) => (StatusCode::PAYLOAD_TOO_LARGE, limit.to_string()),
                        Err(error) => (StatusCode::REQUEST_TIMEOUT, error.to_string()),
                    }
                }),
            );
        let listener = Listener::bind("localhost:0").await.unwrap();
        let (addr, stop, tracker) = (listener.local_addr(), CancellationToken::new(), TaskTracker::new());
        tracker.spawn(listener.serve(router, limits, stop.clone(), grace));
        tracker.close();
        Self { addr, stop, tracker, go, asked }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    async fn ended(&self) {
        timeout(PATIENCE, self.tracker.wait()).await.expect("the server ends");
    }
}

async fn send(tcp: &mut TcpStream, text: &str) {
    tcp.write_all(text.as_bytes()).await.unwrap();
}

/// Reads until the text ends like this.
async fn until(tcp: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        let mut bytes = [0; 4096];
        let read = timeout(PATIENCE, tcp.read(&mut bytes)).await.expect("in time").unwrap();
        assert!(read > 0, "ended after {text:?}");
        text += &String::from_utf8_lossy(&bytes[..read]);
    }
    text
}

/// What comes until the connection ends.
async fn rest(tcp: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    drop(timeout(PATIENCE, tcp.read_to_end(&mut bytes)).await.expect("the connection ends"));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn a_taken_address_and_no_address_are_told_apart() {
    let first = Listener::bind("127.0.0.1:0").await.unwrap();
    let taken = first.local_addr().to_string();
    let error = Listener::bind(&taken).await.unwrap_err();
    assert!(matches!(error, BindError::InUse(_)));
    assert_eq!(error.to_string(), format!("address in use: {taken}"));
    for none in ["192.0.2.1:0", "127.0.0.1", "nowhere", "127.0.0.1:99999", ""] {
        assert!(matches!(Listener::bind(none).await.unwrap_err(), BindError::Other { .. }), "{none}");
    }
}

#[tokio::test]
async fn connections_are_used_again_and_know_their_peer() {
    let server = Server::start(|_| {}, PATIENCE).await;
    let mut tcp = server.connect().await;
    for _ in 0..3 {
        send(&mut tcp, GET).await;
        until(&mut tcp, &server.addr.ip().to_string()).await;
    }
}

#[tokio::test]
async fn whoever_sends_no_head_is_cut() {
    let server = Server::start(|limits| limits.header_timeout = Duration::from_millis(200), PATIENCE).await;
    for start in ["", "P", "GET / HTTP/1.1\r\nhost", "PRI * HTTP/2.0\r\n"] {
        let mut tcp = server.connect().await;
        send(&mut tcp, start).await;
        assert_eq!(rest(&mut tcp).await, "", "{start:?}");
    }
    // The first request was in time, the second is not.
    let mut tcp = server.connect().await;
    send(&mut tcp, GET).await;
    until(&mut tcp, &server.addr.ip().to_string()).await;
    send(&mut tcp, "GET / HT").await;
    assert_eq!(rest(&mut tcp).await, "");
}

#[tokio::test]
async fn a_pause_between_requests_and_a_slow_answer_are_no_slow_heads() {
    let server = Server::start(|limits| limits.header_timeout = Duration::from_millis(100), PATIENCE).await;
    let mut tcp = server.connect().await;
    send(&mut tcp, GET).await;
    until(&mut tcp, &server.addr.ip().to_string()).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    send(&mut tcp, &GET.replace("/ ", "/wait ")).await;
    server.asked.notified().await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    server.go.notify_one();
    until(&mut tcp, "waited").await;
}

#[tokio::test]
async fn more_connections_than_allowed_wait_for_their_turn() {
    let server = Server::start(|limits| limits.connections = 1, PATIENCE).await;
    let mut first = server.connect().await;
    send(&mut first, GET).await;
    until(&mut first, &server.addr.ip().to_string()).await;
    let mut second = server.connect().await;
    send(&mut second, GET).await;
    let mut byte = [0];
    assert!(timeout(Duration::from_millis(200), second.read(&mut byte)).await.is_err(), "not served yet");
    drop(first);
    until(&mut second, &server.addr.ip().to_string()).await;
}

#[tokio::test]
async fn a_stop_closes_idle_connections_and_waits_for_answers() {
    let server = Server::start(|_| {}, PATIENCE).await;
    let (mut idle, mut fresh, mut busy) = (server.connect().await, server.connect().await, server.connect().await);
    send(&mut idle, GET).await;
    until(&mut idle, &server.addr.ip().to_string()).await;
    send(&mut busy, &GET.replace("/ ", "/wait ")).await;
    server.asked.notified().await;
    server.stop.cancel();
    assert_eq!((rest(&mut idle).await, rest(&mut fresh).await), (String::new(), String::new()));
    assert!(TcpStream::connect(server.addr).await.is_err(), "nobody listens");
    server.go.notify_one();
    assert!(rest(&mut busy).await.ends_with("waited"));
    server.ended().await;
}

#[tokio::test]
async fn what_does_not_end_is_cut_at_the_end_of_the_grace() {
    let server = Server::start(|_| {}, Duration::from_millis(200)).await;
    let (mut endless, mut hanging) = (server.connect().await, server.connect().await);
    send(&mut endless, &GET.replace("/ ", "/endless ")).await;
    until(&mut endless, "\r\n\r\n").await;
    send(&mut hanging, &GET.replace("/ ", "/hang ")).await;
    let start = Instant::now();
    server.stop.cancel();
    server.ended().await;
    assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < Duration::from_secs(5));
    rest(&mut endless).await;
    rest(&mut hanging).await;
}

#[tokio::test]
async fn bodies_are_bounded_and_refusals_are_read_by_who_still_writes() {
    let server = Server::start(|_| {}, PATIENCE).await;
    let post = |headers: &str, body: &str| format!("POST /read HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n{body}");
    let length = |len: usize| format!("content-length: {len}");
    for (text, status, answer) in [
        (post(&length(1000), &"x".repeat(1000)), 200, "1000"),
        (post(&length(0), ""), 200, "0"),
        (post("transfer-encoding: chunked", "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), 200, "5"),
        (post(&length(1001), &"x".repeat(1001)), 413, "1000"),
        (post(&length(20_000_000), &"x".repeat(20_000_000)), 413, "1000"),
        (
            post(
                "transfer-encoding: chunked",
                &format!("{}0\r\n\r\n", "100\r\n".to_owned() + &"x".repeat(256) + "\r\n").repeat(1),
            ),
            200,
            "256",
        ),
        (
            post(
                "transfer-encoding: chunked",
                &format!("{}0\r\n\r\n", ("100\r\n".to_owned() + &"x".repeat(256) + "\r\n").repeat(5)),
            ),
            413,
            "1000",
        ),
        (post("expect: 100-continue\r\ncontent-length: 5000", ""), 413, "1000"),
        (post(&length(10), "abc"), 408, "in time"),
    ] {
        let mut tcp = server.connect().await;
        send(&mut tcp, &text).await;
        let reply = until(&mut tcp, answer).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{reply}");
    }
}

#[tokio::test]
async fn http2_is_spoken_without_upgrade_and_says_goodbye() {
    let server = Server::start(|_| {}, PATIENCE).await;
    let io = TokioIo::new(server.connect().await);
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let tasks = TaskTracker::new();
    let connection = tasks.spawn(connection);
    let ask = |path: &str| Request::get(format!("http://x{path}")).body(Empty::<Bytes>::new()).unwrap();
    assert_eq!(client.send_request(ask("/")).await.unwrap().status(), 200);
    let waiting = client.send_request(ask("/wait"));
    let waiting = tasks.spawn(waiting);
    server.asked.notified().await;
    server.stop.cancel();
    server.go.notify_one();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200, "answered after the stop");
    drop(client);
    timeout(PATIENCE, connection).await.expect("closed by the server").unwrap().unwrap();
    server.ended().await;
}

#[tokio::test]
async fn a_peer_that_vanished_from_a_silent_connection_keeps_its_slot() {
    let limits = |limits: &mut Limits| {
        limits.connections = 1;
        (limits.ping_interval, limits.ping_timeout) = (Duration::from_millis(200), Duration::from_millis(200));
    };
    let server = Server::start(limits, PATIENCE).await;
    let proxy = ChaosProxy::start(server.addr).await.unwrap();
    let io = TokioIo::new(TcpStream::connect(proxy.address()).await.unwrap());
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let tasks = TaskTracker::new();
    tasks.spawn(connection);
    let endless = Request::get("http://x/endless").body(Empty::<Bytes>::new()).unwrap();
    let answer = client.send_request(endless).await.unwrap();
    // Pings are answered: nothing happens for many intervals.
    let mut second = server.connect().await;
    send(&mut second, GET).await;
    let mut byte = [0];
    assert!(timeout(Duration::from_secs(2), second.read(&mut byte)).await.is_err(), "the slot is still taken");
    proxy.stall();
    until(&mut second, &server.addr.ip().to_string()).await;
    drop(answer);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_reader_that_reads_nothing_keeps_its_slot() {
    let limits = |limits: &mut Limits| (limits.connections, limits.send_timeout) = (1, Duration::from_millis(500));
    let server = Server::start(limits, PATIENCE).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stalled = socket.connect(server.addr).await.unwrap();
    send(&mut stalled, &GET.replace("/ ", "/flood ")).await;
    let mut byte = [0];
    stalled.read_exact(&mut byte).await.unwrap();
    let mut second = server.connect().await;
    send(&mut second, GET).await;
    until(&mut second, &server.addr.ip().to_string()).await;
    drop(stalled);
}
