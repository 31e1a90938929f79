//! Event streams: framing, resuming, slow readers, the end of the process (cases C25 to C45).

use std::{sync::atomic::Ordering, time::Duration};

use rialto_runtime::{config::Config, units::Span};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::client::{PATIENCE, Server, request};

fn send(text: &str) -> String {
    format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","parts":[{{"text":"{text}"}}]}}}}"#)
}

/// A stream that is read as the test likes.
struct Reader(TcpStream, String);

impl Reader {
    async fn open(server: &Server, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Self {
        let mut tcp = TcpStream::connect(server.addr).await.unwrap();
        let headers = [&[("a2a-version", "1.0")], headers].concat();
        tcp.write_all(request(method, path, &headers, body).as_bytes()).await.unwrap();
        Self(tcp, String::new())
    }

    /// Reads until the text that came so far holds this.
    async fn until(&mut self, text: &str) -> &str {
        let mut bytes = vec![0; 65_536];
        while !self.1.contains(text) {
            let read = timeout(PATIENCE, self.0.read(&mut bytes)).await.expect("in time").unwrap();
            assert!(read > 0, "ended before {text:?}: {}", self.1);
            self.1 += &String::from_utf8_lossy(&bytes[..read]);
        }
        &self.1
    }

    /// Reads to the end.
    async fn rest(mut self) -> String {
        let mut bytes = Vec::new();
        timeout(PATIENCE, self.0.read_to_end(&mut bytes)).await.expect("in time").unwrap();
        self.1 + &String::from_utf8_lossy(&bytes)
    }
}

/// Waits for what has to become true.
async fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        tokio::task::yield_now().await;
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn errors_known_before_the_stream_are_no_stream() {
    let server = Server::start().await;
    let unknown = send("hi").replace(r#""messageId""#, r#""taskId":"nope","messageId""#);
    for (method, path, body, status) in [
        ("POST", "/message:stream", &unknown[..], 404),
        ("POST", "/tasks/nope:subscribe", "", 404),
        ("GET", "/tasks/nope:subscribe", "", 404),
        ("GET", "/tasks/done:subscribe", "", 400),
        ("POST", "/message:stream", "{}", 400),
        ("POST", "/message:stream", "{", 400),
    ] {
        let answer = server.rest(method, path, body).await;
        assert_eq!((answer.status, answer.header("content-type")), (status, Some("application/json")), "{path}");
        assert_eq!(answer.json()["error"]["code"], status);
    }
    for (method, params, code) in [
        ("SendStreamingMessage", &unknown[..], -32001),
        ("SubscribeToTask", r#"{"id":"nope"}"#, -32001),
        ("SubscribeToTask", r#"{"id":"done"}"#, -32004),
        ("SendStreamingMessage", "{}", -32602),
    ] {
        let answer = server.rpc(method, params).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
        assert_eq!((&answer.json()["error"]["code"], &answer.json()["id"]), (&code.into(), &1.into()));
    }
}

#[tokio::test]
async fn streams_pass_proxies_and_hold_one_member_per_event() {
    let server = Server::start().await;
    let headers = [("a2a-version", "1.0"), ("accept-encoding", "gzip, br")];
    let answer = server.http("POST", "/message:stream", &headers, &send("hi")).await;
    assert_eq!(answer.header("cache-control"), Some("no-cache, no-transform"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert_eq!(answer.header("content-encoding"), None);
    assert_eq!(answer.header("content-length"), None);
    assert_eq!(
        answer.body.lines().filter(|line| line.starts_with("id: ")).collect::<Vec<_>>(),
        ["id: 1", "id: 2", "id: 3", "id: 4"]
    );
    for event in answer.events() {
        let event = event.as_object().unwrap();
        let members =
            ["task", "message", "statusUpdate", "artifactUpdate"].iter().filter(|name| event.contains_key(**name));
        assert_eq!((members.count(), event.len()), (1, 1), "{event:?}");
        let text = serde_json::to_string(event).unwrap();
        assert!(!text.contains(r#""kind""#) && !text.contains(r#""final""#));
    }
}

#[tokio::test]
async fn the_first_event_comes_at_once_and_silence_is_kept_alive() {
    let mut config = Config::default();
    config.limits.keep_alive = Span(Duration::from_millis(50));
    let server = Server::with(config).await;
    let mut reader = Reader::open(&server, "POST", "/message:stream", &[], &send("hang")).await;
    let start = Instant::now();
    reader.until("id: 1\ndata: ").await;
    assert!(start.elapsed() < Duration::from_secs(1));
    reader.until("3\r\n:\n\n\r\n3\r\n:\n\n\r\n").await;
    // A subscription that is resumed has nothing to say yet, and begins all the same.
    let last = [("last-event-id", "1")];
    let mut reader = Reader::open(&server, "GET", "/tasks/quiet:subscribe", &last, "").await;
    reader.until("200 OK").await;
    reader.until(":\n\n").await;
    assert!(!reader.1.contains("data:"));
}

#[tokio::test]
async fn a_subscription_is_resumed_after_the_last_event_on_every_binding() {
    let server = Server::start().await;
    for (id, from) in [(Some("2"), 3), (Some("0"), 1), (Some("4"), 5), (Some(""), 1), (None, 1)] {
        let headers: Vec<_> = [("a2a-version", "1.0")].into_iter().chain(id.map(|id| ("Last-Event-ID", id))).collect();
        let body = r#"{"jsonrpc":"2.0","id":"s","method":"SubscribeToTask","params":{"id":"t-1"}}"#;
        for answer in [
            server.http("GET", "/tasks/t-1:subscribe", &headers, "").await,
            server.http("POST", "/tasks/t-1:subscribe", &headers, "").await,
            server.http("POST", "/", &headers, body).await,
        ] {
            let ids: Vec<u64> =
                answer.body.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect();
            assert_eq!(ids, (from..=4).collect::<Vec<_>>(), "{id:?}");
            assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        }
        assert_eq!(server.store.watches.lock().unwrap().last().unwrap().after, id.and_then(|id| id.parse().ok()));
    }
    let wrong = server.http("GET", "/tasks/t-1:subscribe", &[("a2a-version", "1.0"), ("last-event-id", "x")], "").await;
    assert_eq!((wrong.status, wrong.json()["error"]["details"][0]["reason"].as_str()), (400, Some("INVALID_PARAMS")));
    let high =
        server.http("GET", "/tasks/t-1:subscribe", &[("a2a-version", "1.0"), ("last-event-id", "1001")], "").await;
    let field = &high.json()["error"]["details"][1]["fieldViolations"][0]["field"];
    assert_eq!((high.status, field.as_str()), (400, Some("Last-Event-ID")), "as the client knows it");
    // The end of an ended task is told to whoever asks for the rest.
    let rest = server.http("GET", "/tasks/done:subscribe", &[("a2a-version", "1.0"), ("last-event-id", "3")], "").await;
    assert_eq!(rest.events().len(), 1);
    let rest = server.http("GET", "/tasks/done:subscribe", &[("a2a-version", "1.0"), ("last-event-id", "4")], "").await;
    assert_eq!((rest.status, rest.events().len()), (200, 0));
}

#[tokio::test]
async fn a_lost_store_is_a_pause_and_no_end() {
    let server = Server::start().await;
    // The stream of the send ends after two events, which the task did not; the store is away for a moment, too.
    server.store.away.store(0, Ordering::SeqCst);
    let answer = server.rest("POST", "/message:stream", &send("cut")).await;
    let ids: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3", "4"], "nothing lost, nothing twice");
    let last = answer.events().pop().unwrap();
    assert_eq!(last["statusUpdate"]["status"]["state"], "TASK_STATE_COMPLETED");
    let watches = std::mem::take(&mut *server.store.watches.lock().unwrap());
    assert_eq!((watches.len(), watches[0].after), (1, Some(2)));
    assert_eq!(watches[0].turn_id, server.store.last_send().turn_id);
    // The turn of a message that was sent before under its name is the one of the first time.
    server.rest("POST", "/message:stream", &send("sent before, cut")).await;
    assert_eq!(server.store.watches.lock().unwrap()[0].turn_id[..], [7; 16]);
}

#[tokio::test]
async fn an_error_in_the_middle_is_the_last_event() {
    let server = Server::start().await;
    let rest = server.rest("POST", "/message:stream", &send("break")).await;
    let last = rest.events().pop().unwrap();
    assert_eq!(
        (rest.events().len(), &last["error"]["status"], &last["error"]["code"]),
        (2, &"INTERNAL".into(), &500.into())
    );
    let rpc = server.rpc("SendStreamingMessage", &send("break")).await;
    let last = rpc.events().pop().unwrap();
    assert_eq!((&last["error"]["code"], &last["id"], &last["jsonrpc"]), (&(-32006).into(), &1.into(), &"2.0".into()));
    assert!(!rpc.body.contains("event:") && !rest.body.contains("event:"), "unnamed");
}

#[tokio::test]
async fn events_carry_numbers_in_metadata_when_asked_to() {
    let server = Server::start().await;
    let uri = rialto_gateway::EVENT_NUMBER;
    let headers = [("a2a-version", "1.0"), ("a2a-extensions", uri)];
    let answer = server.http("POST", "/message:stream", &headers, &send("hi")).await;
    assert_eq!(answer.header("a2a-extensions"), Some(uri));
    let number = |event: &Value| event.as_object().unwrap().values().next().unwrap()["metadata"][uri].clone();
    assert_eq!(answer.events().iter().map(number).collect::<Vec<_>>(), [1, 2, 3, 4].map(Value::from));
    let answer = server.rest("POST", "/message:stream", &send("hi")).await;
    assert!(answer.events().iter().all(|event| number(event).is_null()));
}

#[tokio::test]
async fn a_reader_that_stalls_costs_little_and_misses_nothing() {
    const COUNT: u64 = 20_000;
    let server = Server::start().await;
    let mut slow = Vec::new();
    for _ in 0..3 {
        let mut reader =
            Reader::open(&server, "POST", "/message:stream", &[], &send(&format!("chunks:{COUNT}:1000"))).await;
        reader.until("id: 1\n").await;
        slow.push(reader);
    }
    // They do not read: their streams inside are given up, whatever the sockets hold.
    eventually("streams of stalled readers are given up", || server.store.open.load(Ordering::SeqCst) == 0).await;
    let pulled = server.store.pulled.load(Ordering::SeqCst) as u64;
    assert!(pulled < 3 * COUNT * 2 / 3, "{pulled} events were pulled for nobody");
    // Others are not disturbed, and a reader that moves again gets everything.
    assert_eq!(server.rest("POST", "/message:stream", &send("hi")).await.events().len(), 4);
    let all = slow.pop().unwrap().rest().await;
    let ids: Vec<u64> = all.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect();
    assert!(ids.into_iter().eq(1..=COUNT + 2), "in order, none lost, none twice");
    assert!(server.store.watches.lock().unwrap().iter().any(|watch| watch.after.is_some()), "by watching again");
}

#[tokio::test]
async fn streams_are_bounded_and_free_their_place() {
    let mut config = Config::default();
    config.limits.streams = 2;
    let server = Server::with(config).await;
    let mut one = Reader::open(&server, "POST", "/message:stream", &[], &send("hang")).await;
    let mut two = Reader::open(&server, "GET", "/tasks/quiet:subscribe", &[], "").await;
    one.until("data:").await;
    two.until("data:").await;
    let sends = server.store.sends.lock().unwrap().len();
    let answer = server.rest("POST", "/message:stream", &send("hi")).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(server.store.sends.lock().unwrap().len(), sends, "refused before anything is stored");
    drop(one);
    let start = Instant::now();
    while server.rest("POST", "/message:stream", &send("hi")).await.status != 200 {
        assert!(start.elapsed() < PATIENCE, "a client that hangs up frees its place");
    }
}

#[tokio::test]
async fn streams_end_at_an_event_boundary_when_the_server_stops() {
    let server = Server::start().await;
    let mut readers = Vec::new();
    for (method, path, body) in
        [("POST", "/message:stream", send("hang")), ("GET", "/tasks/quiet:subscribe", String::new())]
    {
        let mut reader = Reader::open(&server, method, path, &[], &body).await;
        reader.until("data:").await;
        readers.push(reader);
    }
    server.stop.cancel();
    for reader in readers {
        let all = reader.rest().await;
        assert!(all.contains(": the server stops; subscribe again with Last-Event-ID\nretry: 1000\n\n"), "{all}");
        assert!(all.ends_with("0\r\n\r\n"), "a complete body");
    }
    server.tracker.close();
    timeout(PATIENCE, server.tracker.wait()).await.expect("everything ends");
}

#[tokio::test]
async fn a_blocking_send_that_a_stop_cuts_off_is_not_said_to_be_refused() {
    let server = Server::with(Config { stop_grace: Span(Duration::ZERO), ..Config::default() }).await;
    let hang = send("hang");
    let stopped = async {
        eventually("the message is stored", || server.store.sends.lock().unwrap().len() == 1).await;
        server.stop.cancel();
    };
    let (answer, ()) = tokio::join!(server.rest("POST", "/message:send", &hang), stopped);
    assert_eq!((answer.status, answer.json()["error"]["details"][0]["reason"].as_str()), (504, Some("DEADLINE")));
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("it goes on"));
}

#[tokio::test]
async fn a_subscription_that_is_idle_for_long_ends() {
    let mut config = Config::default();
    config.limits.subscription_idle = Span(Duration::from_millis(100));
    let server = Server::with(config).await;
    let reader = Reader::open(&server, "GET", "/tasks/quiet:subscribe", &[], "").await;
    assert!(reader.rest().await.contains(": nothing happened for a long time"));
    let mut send = Reader::open(&server, "POST", "/message:stream", &[], &send("hang")).await;
    send.until("data:").await;
    sleep(Duration::from_millis(200)).await;
    server.stop.cancel();
    assert!(send.rest().await.contains(": the server stops"), "a turn may be silent");
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_cancel() {
    let server = Server::start().await;
    let mut reader = Reader::open(&server, "POST", "/message:stream", &[], &send("hang")).await;
    reader.until("data:").await;
    drop(reader);
    let blocking = Reader::open(&server, "POST", "/message:send", &[], &send("hang")).await;
    eventually("the message is stored", || server.store.sends.lock().unwrap().len() == 2).await;
    drop(blocking);
    server.rest("GET", "/tasks/t-1", "").await;
    assert_eq!(server.store.cancels.lock().unwrap().len(), 0);
}
