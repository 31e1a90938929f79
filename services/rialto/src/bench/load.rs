//! Keeps connections busy for a while and measures what comes back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request,
    client::conn::http1::{SendRequest, handshake},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};

/// A connection that carries one call at a time.
pub(super) type Connection = SendRequest<Full<Bytes>>;

/// A request that can be sent again and again.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) method: http::Method,
    pub(super) path: String,
    /// What is sent, in turn.
    pub(super) bodies: Vec<Bytes>,
    /// What a right answer holds; anything else ends the measurement.
    pub(super) expect: &'static str,
}

/// What a measurement found.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    pub(super) calls: u64,
    pub(super) elapsed: Duration,
    latencies: Vec<Duration>,
}

impl Figures {
    pub(super) fn new(mut latencies: Vec<Duration>, elapsed: Duration) -> Self {
        latencies.sort_unstable();
        Self { calls: latencies.len() as u64, elapsed, latencies }
    }

    pub(super) fn per_second(&self) -> f64 {
        as_f64(self.calls) / self.elapsed.as_secs_f64().max(f64::EPSILON)
    }

    /// The latency that this share of the calls stayed below.
    pub(super) fn percentile(&self, share: f64) -> Duration {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a length")]
        let index = (as_f64(self.latencies.len() as u64) * share) as usize;
        self.latencies.get(index.min(self.latencies.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
pub(super) const fn as_f64(count: u64) -> f64 {
    count as f64
}

/// When a measurement is over.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    /// After this time.
    Passed(Duration),
    /// After this many calls.
    Calls(usize),
}

/// Sends the call over and over on `connections` connections, one at a time on each.
pub(super) async fn run(address: &str, call: &Call, connections: usize, until: Until) -> anyhow::Result<Figures> {
    let started = Instant::now();
    let left = Arc::new(AtomicUsize::new(if let Until::Calls(calls) = until { calls } else { usize::MAX }));
    let end = if let Until::Passed(period) = until { Some(started + period) } else { None };
    let call = Arc::new(call.clone());
    let mut workers = JoinSet::new();
    for _ in 0..connections {
        workers.spawn(worker(address.to_owned(), Arc::clone(&call), end, Arc::clone(&left)));
    }
    let mut latencies = Vec::new();
    while let Some(more) = workers.join_next().await {
        latencies.extend(more??);
    }
    Ok(Figures::new(latencies, started.elapsed()))
}

async fn worker(
    address: String,
    call: Arc<Call>,
    end: Option<Instant>,
    left: Arc<AtomicUsize>,
) -> anyhow::Result<Vec<Duration>> {
    let mut connection = connect(&address).await?;
    let mut latencies = Vec::new();
    // Counts down, and says so once there is nothing left.
    let take = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    while end.is_none_or(|end| Instant::now() < end) && take() {
        let sent = Instant::now();
        let body = timeout(Duration::from_secs(30), send(&mut connection, &address, &call, latencies.len()))
            .await
            .context("no answer within 30 s")??;
        latencies.push(sent.elapsed());
        ensure!(contains(&body, call.expect.as_bytes()), "unexpected answer: {}", String::from_utf8_lossy(&body));
    }
    Ok(latencies)
}

/// Opens one HTTP/1.1 connection.
#[expect(
    clippy::disallowed_methods,
    reason = "the connection ends with its sender, and the process with the measurement"
)]
pub(super) async fn connect(address: &str) -> anyhow::Result<Connection> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // Ends with the sender; its outcome shows there.
    drop(tokio::spawn(connection));
    Ok(sender)
}

/// Sends the n-th body of a call and reads the whole answer.
pub(super) async fn send(connection: &mut Connection, address: &str, call: &Call, n: usize) -> anyhow::Result<Bytes> {
    Ok(open(connection, address, call, n).await?.collect().await?.to_bytes())
}

/// Sends the n-th body of a call and hands out the answer as it comes.
pub(super) async fn open(
    connection: &mut Connection,
    address: &str,
    call: &Call,
    n: usize,
) -> anyhow::Result<hyper::body::Incoming> {
    connection.ready().await?;
    let request = Request::builder()
        .method(call.method.clone())
        .uri(&call.path)
        .header(HOST, address)
        .header(CONTENT_TYPE, "application/json")
        .header("A2A-Version", "1.0")
        .body(Full::new(call.bodies.get(n % call.bodies.len().max(1)).cloned().unwrap_or_default()))?;
    Ok(connection.send_request(request).await?.into_body())
}

/// Whether it is there; looks from the end, where the answers of a large echo say how it went.
fn contains(body: &[u8], expected: &[u8]) -> bool {
    body.windows(expected.len()).rev().any(|window| window == expected)
}
