//! The replicas of a service, and which of them a call goes to.

use std::{
    fmt,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri, uri::PathAndQuery};
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{
    Code, Status,
    body::Body,
    client::GrpcService,
    codegen::{BoxFuture, Service, StdError},
};
use tonic_health::pb::health_client::HealthClient;

/// How long a call waits for a replica to appear.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(5);
/// Until the head of an answer; a stream may then go on for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Whoever takes longer for the head of an answer gets fewer calls meanwhile.
const SLOW: Duration = Duration::from_secs(1);
/// For how long a replica that could not serve a call is the last choice.
const DOUBT: Duration = Duration::from_secs(1);

fn uri(address: SocketAddr, path: Option<PathAndQuery>) -> Uri {
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let authority = address.to_string();
    Uri::builder().scheme("http").authority(authority).path_and_query(path).build().expect("an address makes a URI")
}

/// The connections that are open.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    open: watch::Sender<Vec<Replica>>,
    /// Where the search for the least busy one begins, so that equals take turns.
    turn: AtomicUsize,
}

/// A connection to a replica.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    address: SocketAddr,
    sender: SendRequest<Body>,
    /// Also tells connections to one address apart.
    state: Arc<State>,
}

/// What is known of a replica.
#[derive(Debug)]
struct State {
    since: Instant,
    /// Under way, streams included.
    calls: AtomicUsize,
    /// As it says itself.
    serves: AtomicBool,
    /// As calls found: until so many ms after `since` it is doubted.
    doubted: AtomicU64,
}

impl State {
    fn doubt(&self) {
        let until = self.since.elapsed() + DOUBT;
        self.doubted.store(u64::try_from(until.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Less is better.
    fn rank(&self) -> (bool, usize) {
        let doubted = u128::from(self.doubted.load(Ordering::Relaxed)) > self.since.elapsed().as_millis();
        (doubted || !self.serves.load(Ordering::Relaxed), self.calls.load(Ordering::Relaxed))
    }

    /// Looks at the status of an answer, in its head or at its end.
    fn judge(&self, status: &HeaderMap) {
        if status.get(Status::GRPC_STATUS).is_some_and(|code| Code::from_bytes(code.as_bytes()) == Code::Unavailable) {
            self.doubt();
        }
    }
}

impl Replica {
    /// Serves only once it says so.
    pub(super) fn new(address: SocketAddr, sender: SendRequest<Body>) -> Self {
        let state = State {
            since: Instant::now(),
            calls: AtomicUsize::new(0),
            serves: AtomicBool::new(false),
            doubted: AtomicU64::new(0),
        };
        Self { address, sender, state: Arc::new(state) }
    }

    /// Notes whether it serves. One that does not gets calls only when nobody does: it then says itself why not.
    pub(super) fn serves(&self, serves: bool) {
        self.state.serves.store(serves, Ordering::Relaxed);
    }

    /// A client of its health service alone.
    pub(super) fn health(&self) -> HealthClient<impl GrpcService<Body, ResponseBody = Incoming, Future: Send>> {
        let sender = self.sender.clone();
        let service = tower::service_fn(move |request| {
            let mut sender = sender.clone();
            async move { sender.try_send_request(request).await.map_err(|failure| failure.into_error()) }
        });
        HealthClient::with_origin(service, uri(self.address, None))
    }
}

/// Keeps a replica in the list.
pub(super) struct Listed<'r>(&'r Replicas, Arc<State>);

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.0.strike(&self.1);
    }
}

impl Replicas {
    pub(super) fn list(&self, replica: Replica) -> Listed<'_> {
        let listed = Listed(self, Arc::clone(&replica.state));
        self.open.send_modify(|open| open.push(replica));
        listed
    }

    fn strike(&self, state: &Arc<State>) {
        self.open.send_modify(|open| open.retain(|replica| !Arc::ptr_eq(&replica.state, state)));
    }

    /// The least busy one of those that serve, as far as is known.
    fn pick(&self) -> Option<Replica> {
        let open = self.open.borrow();
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % open.len().max(1);
        let (before, after) = open.split_at(first);
        after.iter().chain(before).min_by_key(|replica| replica.state.rank()).cloned()
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
            let counted = Counted::new(&replica.state);
            let mut answer = pin!(timeout(ANSWER_TIMEOUT, replica.sender.try_send_request(request)));
            let answer = loop {
                match timeout(SLOW, &mut answer).await {
                    Ok(answer) => break answer,
                    Err(_) => replica.state.doubt(),
                }
            };
            match answer {
                Ok(Ok(response)) => {
                    replica.state.judge(response.headers());
                    return Ok(response.map(|body| Body::new(Answer { body, counted })));
                }
                Ok(Err(mut failure)) => match failure.take_message() {
                    // The connection ends and has not taken it.
                    Some(untaken) => {
                        self.strike(&replica.state);
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
struct Counted(Arc<State>);

impl Counted {
    fn new(state: &Arc<State>) -> Self {
        state.calls.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(state))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer.
struct Answer {
    body: Incoming,
    counted: Counted,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context).map_err(|error| lost(&error));
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.counted.0.judge(trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The service of a [`Transport`](crate::Transport) over [`Replicas`].
#[derive(Clone)]
pub(super) struct Balancer {
    replicas: Arc<Replicas>,
    _end: Arc<DropGuard>,
}

impl Balancer {
    /// Cancels `end` when its last clone is dropped.
    pub(super) fn new(replicas: Arc<Replicas>, end: CancellationToken) -> Self {
        Self { replicas, _end: Arc::new(end.drop_guard()) }
    }
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
