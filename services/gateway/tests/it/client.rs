//! A gateway on a port of its own, and clients that write their bytes by hand.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rialto_gateway::Gateway;
use rialto_net::{Limits, Listener};
use rialto_rpc::{Transport, a2a::a2a_service_client::A2aServiceClient, tasks};
use rialto_runtime::config::{Agent, Config};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Channel, Endpoint};

use crate::store::{self, Store};

pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) store: Arc<Store>,
    pub(crate) stop: CancellationToken,
    pub(crate) tracker: TaskTracker,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| &value[..])
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The `data:` of each event.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

pub(crate) fn config(change: impl FnOnce(&mut Agent)) -> Config {
    let mut config = Config::default();
    change(&mut config.agents[0]);
    config
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(Config::default()).await
    }

    pub(crate) async fn with(config: Config) -> Self {
        let listener = Listener::bind("127.0.0.1:0").await.unwrap();
        let (addr, store, stop, tracker) =
            (listener.local_addr(), Arc::new(Store::default()), CancellationToken::new(), TaskTracker::new());
        let tasks = tasks::client(Transport::in_memory(tasks::server(store::Server(Arc::clone(&store)))));
        let gateway = Gateway::new(&config, tasks, addr, &tracker, stop.clone()).unwrap();
        let limits = Limits {
            connections: config.limits.connections,
            streams_per_connection: config.limits.streams_per_connection,
            header_timeout: config.limits.header_timeout.0,
            ping_interval: config.limits.ping_interval.0,
            ping_timeout: config.limits.ping_timeout.0,
            send_timeout: config.limits.send_timeout.0,
        };
        tracker.spawn(listener.serve(gateway.router(), limits, stop.clone(), Duration::from_secs(5)));
        Self { addr, store, stop, tracker }
    }

    /// Sends bytes, and reads until the connection ends.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> Answer {
        let mut tcp = TcpStream::connect(self.addr).await.unwrap();
        tcp.write_all(bytes).await.unwrap();
        let mut all = Vec::new();
        timeout(PATIENCE, tcp.read_to_end(&mut all)).await.expect("an answer in time").unwrap();
        answer(&all)
    }

    pub(crate) async fn http(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.raw(request(method, path, headers, body).as_bytes()).await
    }

    /// REST with a version and, if there is a body, its type.
    pub(crate) async fn rest(&self, method: &str, path: &str, body: &str) -> Answer {
        let headers: &[(&str, &str)] = match body {
            "" => &[("a2a-version", "1.0")],
            _ => &[("a2a-version", "1.0"), ("content-type", "application/json")],
        };
        self.http(method, path, headers, body).await
    }

    /// A JSON-RPC body at the root agent.
    pub(crate) async fn rpc_body(&self, body: &str) -> Answer {
        self.http("POST", "/", &[("a2a-version", "1.0"), ("content-type", "application/json")], body).await
    }

    pub(crate) async fn rpc(&self, method: &str, params: &str) -> Answer {
        self.rpc_body(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#)).await
    }

    pub(crate) async fn grpc(&self) -> A2aServiceClient<Channel> {
        let channel = Endpoint::from_shared(format!("http://{}", self.addr)).unwrap().connect().await.unwrap();
        A2aServiceClient::new(channel).max_decoding_message_size(64 << 20)
    }
}

pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: gateway.test\r\nconnection: close\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() || method == "POST" {
        text += &format!("content-length: {}\r\n", body.len());
    }
    text + "\r\n" + body
}

pub(crate) fn answer(bytes: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let pair = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap();
    let mut answer = Answer { status, headers: lines.map(pair).collect(), body: body.to_owned() };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = unchunk(body);
    }
    answer
}

fn unchunk(mut text: &str) -> String {
    let mut body = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        body += &rest[..size];
        text = &rest[size + 2..];
    }
    body
}

/// Stands for ids that are new each time.
pub(crate) fn redact(text: &str) -> String {
    let is_uuid = |word: &str| {
        word.len() == 36
            && word
                .char_indices()
                .all(|(at, c)| if [8, 13, 18, 23].contains(&at) { c == '-' } else { c.is_ascii_hexdigit() })
    };
    text.split_inclusive('"')
        .map(|piece| if is_uuid(piece.trim_end_matches('"')) { "[uuid]\"" } else { piece })
        .collect()
}
