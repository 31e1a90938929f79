//! A TCP proxy that misbehaves on demand.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How the network is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weather {
    Fine,
    /// Every connection is closed, and new ones right after they were accepted.
    Cut,
    /// Connections stay up and new ones are accepted; no byte moves any more.
    Stalled,
    /// Each chunk waits this long, in both directions.
    Slow(Duration),
    /// The client sees the end of the stream, yet may go on writing.
    HalfClosed,
    /// Bytes reach the server; its answers do not come back.
    Mute,
}

/// Stands between a client and a server, on a free port of 127.0.0.1. Stops when dropped.
#[derive(Debug)]
pub struct ChaosProxy {
    address: SocketAddr,
    weather: watch::Sender<Weather>,
    accepted: Arc<AtomicUsize>,
    /// Ends the connections that there are.
    lifeline: Lifeline,
    stop: CancellationToken,
}

type Lifeline = Arc<Mutex<CancellationToken>>;

impl ChaosProxy {
    /// Starts to forward to `target`.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (weather, watching) = watch::channel(Weather::Fine);
        let accepted = Arc::new(AtomicUsize::new(0));
        let lifeline = Lifeline::default();
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let accepting = accept(listener, target, watching, accepted.clone(), lifeline.clone(), tasks.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(accepting));
        Ok(Self { address, weather, accepted, lifeline, stop })
    }

    /// Where clients connect.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections were accepted so far.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Closes all connections, and new ones at once, until mended.
    pub fn cut(&self) {
        self.weather.send_replace(Weather::Cut);
        // Whoever is slow to look at the weather must not miss it.
        std::mem::take(&mut *self.lifeline.lock().unwrap_or_else(PoisonError::into_inner)).cancel();
    }

    /// Fine weather again. Connections that were closed stay closed.
    pub fn mend(&self) {
        self.weather.send_replace(Weather::Fine);
    }

    /// Holds each chunk back for `delay`, in both directions.
    pub fn slow(&self, delay: Duration) {
        self.weather.send_replace(Weather::Slow(delay));
    }

    /// Leaves connections half-open: nothing is closed and nothing moves. What was sent meanwhile arrives
    /// when mended.
    pub fn stall(&self) {
        self.weather.send_replace(Weather::Stalled);
    }

    /// Lets requests through and keeps the answers back, so that a caller cannot know what happened. Cut
    /// afterwards to lose them for good.
    pub fn mute(&self) {
        self.weather.send_replace(Weather::Mute);
    }

    /// Ends the stream towards clients (FIN) and goes on taking what they send.
    pub fn half_close(&self) {
        self.weather.send_replace(Weather::HalfClosed);
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        self.stop.cancel();
        self.cut();
    }
}

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    weather: watch::Receiver<Weather>,
    accepted: Arc<AtomicUsize>,
    lifeline: Lifeline,
    tasks: TaskTracker,
) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        accepted.fetch_add(1, Ordering::Relaxed);
        let lifeline = lifeline.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if *weather.borrow() != Weather::Cut {
            let forwarding = forward(client, target, weather.clone());
            tasks.spawn(async move {
                tokio::select! {
                    // First of all: not a byte more when the line is cut.
                    biased;
                    () = lifeline.cancelled() => {}
                    () = forwarding => {}
                }
            });
        }
    }
}

async fn forward(client: TcpStream, target: SocketAddr, weather: watch::Receiver<Weather>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    if client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let there = pump(from_client, to_server, weather.clone(), false);
    let back = pump(from_server, to_client, weather, true);
    futures::future::join(there, back).await;
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut weather: watch::Receiver<Weather>,
    towards_client: bool,
) {
    let mut chunk = vec![0; 16 * 1024];
    // Bytes of the chunk that are on their way.
    let mut held = 0;
    loop {
        let current = *weather.borrow_and_update();
        match current {
            // For good: a stream that ended cannot be continued.
            Weather::HalfClosed if towards_client => return drop(to.shutdown().await),
            Weather::Stalled => {}
            Weather::Mute if towards_client => {}
            _ if held > 0 => {
                if let Weather::Slow(delay) = current {
                    tokio::time::sleep(delay).await;
                }
                if to.write_all(&chunk[..held]).await.is_err() {
                    return;
                }
                held = 0;
                continue;
            }
            _ => {
                let read = tokio::select! {
                    read = from.read(&mut chunk) => read,
                    changed = weather.changed() => if changed.is_err() { return } else { continue },
                };
                match read {
                    // The weather may have changed meanwhile: looked at again before it goes on.
                    Ok(size @ 1..) => held = size,
                    // The other direction ends by itself, or goes on.
                    Ok(0) | Err(_) => return drop(to.shutdown().await),
                }
                continue;
            }
        }
        if weather.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the echo server ends with its runtime")]
mod tests {
    use super::*;

    async fn echo_server() -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    drop(tokio::io::copy(&mut from, &mut to).await);
                });
            }
        });
        address
    }

    async fn echo(stream: &mut TcpStream, text: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(text).await?;
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await?;
        Ok(back)
    }

    #[tokio::test]
    async fn each_weather_does_what_it_says() {
        let proxy = ChaosProxy::start(echo_server().await).await.unwrap();
        let connect = || TcpStream::connect(proxy.address());
        let mut stream = connect().await.unwrap();
        assert_eq!(echo(&mut stream, b"fine").await.unwrap(), b"fine");

        proxy.stall();
        stream.write_all(b"late").await.unwrap();
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(50), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "{silence:?}");
        proxy.mend();
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"late");

        proxy.slow(Duration::from_millis(30));
        let start = tokio::time::Instant::now();
        echo(&mut stream, b"slow").await.unwrap();
        assert!(start.elapsed() >= Duration::from_millis(60));

        proxy.half_close();
        assert_eq!(stream.read(&mut back).await.unwrap(), 0);
        stream.write_all(b"still taken").await.unwrap();

        proxy.mend();
        let mut other = connect().await.unwrap();
        echo(&mut other, b"again").await.unwrap();
        proxy.cut();
        assert!(matches!(other.read(&mut back).await, Ok(0) | Err(_)));
        let mut refused = connect().await.unwrap();
        assert!(echo(&mut refused, b"no").await.is_err());
        proxy.mend();
        assert_eq!(echo(&mut connect().await.unwrap(), b"back").await.unwrap(), b"back");
        assert_eq!(proxy.accepted(), 4);
    }
}
