//! Clients over the network: names are resolved again and again, calls go to replicas that answer.
//!
//! Each address has one HTTP/2 connection, kept by a task of its own. Only connections whose other end has shown
//! that it lives get calls, so a replica that is gone or frozen costs no try. A call that a closing connection did
//! not take is given to another one; one that may have been taken is the caller's to repeat, who knows its identity.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Uri, header, uri::PathAndQuery};
use http_body::{Frame, SizeHint};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::http2::{self, Connection, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    net::{TcpStream, lookup_host},
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tonic::{
    Status,
    body::Body,
    codegen::{BoxFuture, Service, StdError},
};
use tracing::{debug, info, warn};

use crate::Transport;

/// How often names are resolved again: replicas that appear get calls, replicas that vanish get none.
const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// While nothing is known at all, look more often.
const RESOLVE_EVERY_AT_FIRST: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two tries to connect, growing.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a call waits for a replica to appear.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(5);
/// Until the head of an answer; a stream may then go on for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A peer that is gone without a word is noticed within the interval and the time-out.
const PING_INTERVAL: Duration = Duration::from_secs(3);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Unread bytes of one stream, and of a connection: a slow reader holds its own stream and not its neighbours'.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Where the replicas of a service are.
#[derive(Clone, Debug)]
pub struct Target {
    /// For logs: `task-store`.
    pub service: String,
    /// `http://name:port`; each name may have many addresses.
    pub urls: Vec<String>,
}

impl Transport {
    /// Calls whichever replica of a service is reachable and least busy. A call waits a moment for a replica to
    /// appear, so processes may start in any order. Connections are kept until the last clone is dropped.
    ///
    /// # Errors
    /// A URL that is not `http://host:port`.
    pub fn network(target: Target) -> Result<Self, String> {
        let names = target.urls.iter().map(|url| host_and_port(url)).collect::<Result<Vec<_>, _>>()?;
        let replicas = Arc::new(Replicas::default());
        let end = CancellationToken::new();
        let resolving = resolve(target.service, names, Arc::clone(&replicas));
        // Ends with the last clone, and nobody waits for it.
        TaskTracker::new().spawn(end.clone().run_until_cancelled_owned(resolving));
        Ok(Self::new(Balancer { replicas, _end: Arc::new(end.drop_guard()) }))
    }
}

fn host_and_port(url: &str) -> Result<String, String> {
    let wrong = || format!("{url:?} is not a service URL such as \"http://task-store:7101\"");
    let uri: http::Uri = url.parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") {
        return Err(wrong());
    }
    let authority = uri.authority().ok_or_else(wrong)?;
    authority.port_u16().map(|_| authority.to_string()).ok_or_else(wrong)
}

/// Keeps a connection to every address that the names stand for.
async fn resolve(service: String, names: Vec<String>, replicas: Arc<Replicas>) {
    let keepers = TaskTracker::new();
    let mut known = BTreeMap::<SocketAddr, DropGuard>::new();
    let mut resolved = true;
    loop {
        match lookup(&names).await {
            Ok(found) => {
                let before = known.len();
                known.retain(|address, _| found.contains(address));
                let mut changed = known.len() != before;
                for address in found {
                    known.entry(address).or_insert_with(|| {
                        changed = true;
                        let gone = CancellationToken::new();
                        let (service, replicas) = (service.clone(), Arc::clone(&replicas));
                        let kept = async move { keep(&service, address, &replicas).await };
                        keepers.spawn(gone.clone().run_until_cancelled_owned(kept));
                        gone.drop_guard()
                    });
                }
                if changed {
                    info!(service, addresses = known.len(), "replicas resolved");
                }
                resolved = true;
            }
            // A short fault of the name service does not empty the set.
            Err(problem) if resolved => {
                warn!(service, problem, "trying again until it is resolved");
                resolved = false;
            }
            Err(_) => {}
        }
        sleep(if known.is_empty() { RESOLVE_EVERY_AT_FIRST } else { RESOLVE_EVERY }).await;
    }
}

/// All addresses of all names.
async fn lookup(names: &[String]) -> Result<Vec<SocketAddr>, String> {
    let mut found = Vec::new();
    for name in names {
        found.extend(lookup_host(name).await.map_err(|error| format!("{name}: {error}"))?);
    }
    Ok(found)
}

/// Keeps an address connected, for ever.
async fn keep(service: &str, address: SocketAddr, replicas: &Replicas) {
    let mut pause = FIRST_PAUSE;
    loop {
        match connect(address).await {
            Ok((sender, connection)) => {
                let mut connection = pin!(connection);
                // A frozen process accepts connections too.
                let alive = tokio::select! {
                    _ = &mut connection => false,
                    alive = timeout(CONNECT_TIMEOUT, ping(sender.clone(), address)) => alive == Ok(true),
                };
                if alive {
                    debug!(service, %address, "connected");
                    let listed = replicas.list(Replica { address, sender, calls: Arc::default() });
                    let end = connection.await;
                    drop(listed);
                    info!(service, %address, error = end.err().map(tracing::field::display), "a replica is gone");
                    pause = FIRST_PAUSE;
                }
            }
            Err(error) => debug!(service, %address, error, "cannot connect"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

type Conn = Connection<TokioIo<TcpStream>, Body, TokioExecutor>;

async fn connect(address: SocketAddr) -> Result<(SendRequest<Body>, Conn), StdError> {
    let tcp = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await??;
    tcp.set_nodelay(true)?;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    Ok(builder.handshake(TokioIo::new(tcp)).await?)
}

/// Whether the other end answers at all. What it answers, its callers find out.
async fn ping(mut sender: SendRequest<Body>, address: SocketAddr) -> bool {
    // A health check of everything: an empty message.
    let mut request = Request::new(Body::new(Full::new(Bytes::from_static(&[0; 5]))));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = uri(address, Some(PathAndQuery::from_static("/grpc.health.v1.Health/Check")));
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, header::HeaderValue::from_static("trailers"));
    sender.try_send_request(request).await.is_ok()
}

fn uri(address: SocketAddr, path: Option<PathAndQuery>) -> Uri {
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let authority = address.to_string();
    Uri::builder().scheme("http").authority(authority).path_and_query(path).build().expect("an address makes a URI")
}

/// The connections that are open, and what goes on over them.
#[derive(Debug, Default)]
struct Replicas {
    open: watch::Sender<Vec<Replica>>,
    /// Where the search for the least busy one begins, so that equals take turns.
    turn: AtomicUsize,
}

#[derive(Clone, Debug)]
struct Replica {
    address: SocketAddr,
    sender: SendRequest<Body>,
    /// Under way, streams included. Also tells connections to one address apart.
    calls: Arc<AtomicUsize>,
}

/// Keeps a replica in the list.
struct Listed<'r>(&'r Replicas, Arc<AtomicUsize>);

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.0.strike(&self.1);
    }
}

impl Replicas {
    fn list(&self, replica: Replica) -> Listed<'_> {
        let listed = Listed(self, Arc::clone(&replica.calls));
        self.open.send_modify(|open| open.push(replica));
        listed
    }

    fn strike(&self, calls: &Arc<AtomicUsize>) {
        self.open.send_modify(|open| open.retain(|replica| !Arc::ptr_eq(&replica.calls, calls)));
    }

    /// The least busy one.
    fn pick(&self) -> Option<Replica> {
        let open = self.open.borrow();
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % open.len().max(1);
        let (before, after) = open.split_at(first);
        after.iter().chain(before).min_by_key(|replica| replica.calls.load(Ordering::Relaxed)).cloned()
    }

    async fn call(&self, mut request: Request<Body>) -> Result<Response<Body>, Status> {
        let deadline = Instant::now() + REPLICA_TIMEOUT;
        let path = request.uri().path_and_query().cloned();
        loop {
            let Some(mut replica) = self.pick() else {
                let mut open = self.open.subscribe();
                let appeared = timeout_at(deadline, open.wait_for(|open| !open.is_empty())).await;
                if !matches!(appeared, Ok(Ok(_))) {
                    return Err(Status::unavailable("no replica is reachable"));
                }
                continue;
            };
            *request.uri_mut() = uri(replica.address, path.clone());
            let counted = Counted::new(&replica.calls);
            match timeout(ANSWER_TIMEOUT, replica.sender.try_send_request(request)).await {
                Ok(Ok(response)) => return Ok(response.map(|body| Body::new(Answer { body, _counted: counted }))),
                Ok(Err(mut failure)) => match failure.take_message() {
                    // The connection ends and has not taken it.
                    Some(untaken) => {
                        self.strike(&replica.calls);
                        request = untaken;
                    }
                    None => return Err(lost(&failure.into_error())),
                },
                Err(_) => return Err(Status::unavailable("no answer in time")),
            }
        }
    }
}

/// Whatever ends a connection: the call may be repeated.
fn lost(error: &hyper::Error) -> Status {
    Status::unavailable(format!("the connection is lost: {error}"))
}

/// A call under way.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(calls: &Arc<AtomicUsize>) -> Self {
        calls.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(calls))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer.
struct Answer {
    body: Incoming,
    _counted: Counted,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context).map_err(|error| lost(&error))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A [`Transport`] over [`Replicas`].
#[derive(Clone)]
struct Balancer {
    replicas: Arc<Replicas>,
    _end: Arc<DropGuard>,
}

impl fmt::Debug for Balancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balancer").field("replicas", &self.replicas).finish_non_exhaustive()
    }
}

impl Service<Request<Body>> for Balancer {
    type Response = Response<Body>;
    type Error = StdError;
    type Future = BoxFuture<Response<Body>, StdError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let replicas = Arc::clone(&self.replicas);
        Box::pin(async move { replicas.call(request).await.map_err(StdError::from) })
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::{Server, TcpIncoming};
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    use super::*;

    async fn listener() -> (tokio::net::TcpListener, String) {
        let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", tcp.local_addr().unwrap());
        (tcp, url)
    }

    #[tokio::test]
    async fn only_replicas_that_answer_get_calls() {
        // The kernel accepts for it; nobody answers.
        let (_frozen, frozen) = listener().await;
        let (live, url) = listener().await;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let server = Server::builder().add_service(tonic_health::server::health_reporter().1);
        let incoming = TcpIncoming::from(live);
        tasks.spawn(server.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));

        let target = Target { service: "test".to_owned(), urls: vec![frozen, url] };
        let client = HealthClient::new(Transport::network(target).unwrap());
        let calls = (0..50).map(|_| {
            let mut client = client.clone();
            async move { client.check(HealthCheckRequest::default()).await }
        });
        for call in calls {
            timeout(Duration::from_secs(2), call).await.expect("a call went to the frozen one").unwrap();
        }
        // A drained connection is left at once; the call waits for another one and then says so.
        stop.cancel();
        tasks.close();
        tasks.wait().await;
        tokio::time::pause();
        let mut client = client;
        let answer = client.check(HealthCheckRequest::default()).await;
        assert_eq!(answer.unwrap_err().code(), tonic::Code::Unavailable);
    }

    #[test]
    fn a_service_url_names_host_and_port_and_nothing_else() {
        assert_eq!(host_and_port("http://task-store:7101").unwrap(), "task-store:7101");
        assert_eq!(host_and_port("http://[::1]:7101/").unwrap(), "[::1]:7101");
        for wrong in ["task-store:7101", "http://task-store", "https://task-store:7101", "http://a:1/path", ""] {
            assert!(host_and_port(wrong).is_err(), "{wrong}");
        }
    }
}
