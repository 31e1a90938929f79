//! One accept loop for HTTP/1.1, h2c and gRPC.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream, lookup_host},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service as _;
use tracing::{debug, warn};

use crate::clock::{Active, Clock, Verdict, Watched};

/// Connections that the kernel may hold while all slots are taken.
const BACKLOG: u32 = 1024;
/// An HTTP/1.1 connection without a request is closed after this.
const IDLE: Duration = Duration::from_secs(75);
/// Tries of the kernel's keep-alive within [`Limits::ping_timeout`].
const PROBES: u32 = 3;
/// What one answer may hold in memory while its reader is slow.
const SEND_BUFFER: usize = 64 << 10;
/// What one HTTP/2 stream, and all streams of a connection, may send us unread.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// After a failed accept, which is mostly a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An address could not be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process has it.
    #[error("address in use: {0}")]
    InUse(String),
    /// Not an address, or not one of this machine.
    #[error("cannot listen on {address}: {error}")]
    Other {
        /// As configured.
        address: String,
        /// What the system says.
        error: io::Error,
    },
}

/// Bounds of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time; further ones wait.
    pub connections: usize,
    /// Concurrent streams of one HTTP/2 connection.
    pub streams_per_connection: u32,
    /// Time to receive the head of a request.
    pub header_timeout: Duration,
    /// A peer that was silent for this long is asked whether it is still there: by a PING of HTTP/2, by the kernel's
    /// keep-alive on connections that wait for nothing. In whole seconds for the latter.
    pub ping_interval: Duration,
    /// One that does not answer within this is given up, and its requests with it.
    pub ping_timeout: Duration,
    /// So is one that takes nothing of what was sent for this long: it is gone, or does not read.
    pub send_timeout: Duration,
}

/// The other end of the connection that a request came by; an extension of every request.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its address.
    pub addr: SocketAddr,
}

/// A port that is listened on and not yet served.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    addr: SocketAddr,
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl Listener {
    /// Listens on `address`, such as `127.0.0.1:8080`, `[::]:8080` or `localhost:0`.
    ///
    /// # Errors
    /// [`BindError`].
    pub async fn bind(address: &str) -> Result<Self, BindError> {
        let fault = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse(address.to_owned()),
            _ => BindError::Other { address: address.to_owned(), error },
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for addr in lookup_host(address).await.map_err(fault)? {
            match listen(addr).and_then(|tcp| Ok(Self { addr: tcp.local_addr()?, tcp, tls: None })) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(fault(last))
    }

    /// The address that was taken; tells the port when port 0 was asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Speaks TLS, and nothing else.
    #[must_use]
    pub fn with_tls(mut self, config: Arc<rustls::ServerConfig>) -> Self {
        self.tls = Some(config);
        self
    }

    /// Serves until `stop`, then drains: no new connections, idle ones are closed, requests under way get their
    /// answers within `grace`, and what is left is cut. Endless answers have to end on `stop` themselves.
    pub async fn serve(self, router: Router, limits: Limits, stop: CancellationToken, grace: Duration) {
        let slots = Arc::new(Semaphore::new(limits.connections));
        let tls = self.tls.map(TlsAcceptor::from);
        let server = Arc::new(Server { http: http(&limits), tls, router, limits, stop: stop.clone() });
        let connections = TaskTracker::new();
        // Ends connections that outlive the grace.
        let cut = CancellationToken::new();
        let accept = async {
            loop {
                let slot = Arc::clone(&slots).acquire_owned().await.expect("the semaphore is never closed");
                let (tcp, addr) = match self.tcp.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) if is_of_one_connection(&error) => continue,
                    Err(error) => {
                        warn!(%error, "cannot accept connections");
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                tune(&tcp, &limits);
                let (server, cut) = (Arc::clone(&server), cut.clone());
                connections.spawn(async move {
                    cut.run_until_cancelled(server.accepted(tcp, addr, slot)).await;
                });
            }
        };
        stop.run_until_cancelled(accept).await;
        drop(self.tcp);
        connections.close();
        if timeout(grace, connections.wait()).await.is_err() {
            warn!(
                connections = connections.len(),
                grace_s = grace.as_secs(),
                "cut connections at the end of the grace period"
            );
            cut.cancel();
            connections.wait().await;
        }
    }
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart need not wait for connections of the last run to leave TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Small answers leave at once; a peer that vanished is noticed.
fn tune(tcp: &TcpStream, limits: &Limits) {
    let second = Duration::from_secs(1);
    let keepalive = TcpKeepalive::new()
        .with_time(limits.ping_interval.max(second))
        .with_interval((limits.ping_timeout / PROBES).max(second))
        .with_retries(PROBES);
    let socket = SockRef::from(tcp);
    let tuned = tcp.set_nodelay(true).and_then(|()| socket.set_tcp_keepalive(&keepalive));
    // An event stream that nobody reads any more still has comments to send, so that the keep-alive never runs.
    #[cfg(target_os = "linux")]
    let tuned = tuned.and_then(|()| socket.set_tcp_user_timeout(Some(limits.send_timeout)));
    if let Err(error) = tuned {
        debug!(%error, "cannot tune a connection");
    }
}

fn http(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    // The clock keeps the time of heads: it also covers the bytes before the protocol is known, and does not
    // take a pause between two requests for a slow head.
    http.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(SEND_BUFFER);
    http.http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(limits.ping_interval)
        .keep_alive_timeout(limits.ping_timeout)
        .max_concurrent_streams(limits.streams_per_connection)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER);
    http
}

struct Server {
    http: auto::Builder<TokioExecutor>,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
}

impl Server {
    async fn accepted(&self, tcp: TcpStream, addr: SocketAddr, slot: OwnedSemaphorePermit) {
        let Some(tls) = &self.tls else { return self.connection(tcp, addr, slot).await };
        match timeout(self.limits.header_timeout, tls.accept(tcp)).await {
            Ok(Ok(tls)) => self.connection(tls, addr, slot).await,
            Ok(Err(error)) => debug!(%addr, %error, "a TLS handshake failed"),
            Err(_) => debug!(%addr, "closed a connection without a TLS handshake in time"),
        }
    }

    /// Serves one connection to its end.
    async fn connection<I>(&self, io: I, addr: SocketAddr, _slot: OwnedSemaphorePermit)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let clock = Clock::start();
        let io = TokioIo::new(Watched { io, clock: clock.clone() });
        let service = hyper::service::service_fn(|request| self.answer(request, addr, clock.request()));
        let mut connection = pin!(self.http.serve_connection(io, service));
        let mut draining = false;
        loop {
            let verdict = clock.check(self.limits.header_timeout, IDLE);
            let look_again = match verdict {
                Verdict::Stalled => return debug!(%addr, "closed a connection that sent no request in time"),
                Verdict::Fine(at) => at,
                Verdict::Idle => {
                    connection.as_mut().graceful_shutdown();
                    Instant::now() + IDLE
                }
            };
            tokio::select! {
                end = connection.as_mut() => {
                    if let Err(error) = end {
                        debug!(%addr, error, "connection ended");
                    }
                    return;
                }
                () = self.stop.cancelled(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = sleep_until(look_again) => {}
            }
        }
    }

    fn answer(
        &self,
        request: Request<Incoming>,
        addr: SocketAddr,
        active: Active,
    ) -> impl Future<Output = Result<Response<Tracked>, Infallible>> + use<> {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer { addr });
        let answer = self.router.clone().call(request);
        async move { Ok(answer.await?.map(|body| Tracked { body, active })) }
    }
}

/// A response body that keeps its request counted as active.
struct Tracked {
    body: Body,
    #[expect(dead_code, reason = "held for its drop")]
    active: Active,
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
