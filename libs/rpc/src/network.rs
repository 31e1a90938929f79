//! Clients over the network: names are resolved again and again, calls go to replicas that serve.
//!
//! Each address has one HTTP/2 connection, kept by a task of its own, which also follows the gRPC health of the other
//! end. Only connections whose other end has shown that it lives get calls, so a replica that is gone or frozen costs
//! no try, and those that serve are preferred. A call that a closing connection did not take is given to another one;
//! one that may have been taken is the caller's to repeat, who knows its identity.

mod replicas;

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use hyper::client::conn::http2::{self, Connection, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::{
    net::{TcpStream, lookup_host},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{
    either::Either,
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tonic::{Streaming, body::Body, codegen::StdError};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus};
use tracing::{debug, info, warn};

use self::replicas::{Balancer, Listed, Replica, Replicas};
use crate::{Identity, Transport};

/// How often names are resolved again: replicas that appear get calls, replicas that vanish get none.
const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// While nothing is known at all, look more often.
const RESOLVE_EVERY_AT_FIRST: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two tries to connect, growing.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Between two questions to a replica that does not serve.
const HEALTH_PAUSE: Duration = Duration::from_millis(500);
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
    /// `http://name:port`, or `https://name:port` with an identity; each name may have many addresses.
    pub urls: Vec<String>,
    /// Shown to the other end, which must show one of the same authority.
    pub identity: Option<Identity>,
}

impl Transport {
    /// Calls whichever replica of a service is reachable and least busy. A call waits a moment for a replica to
    /// appear, so processes may start in any order. Connections are kept until the last clone is dropped.
    ///
    /// # Errors
    /// A URL that is not of that form.
    pub fn network(target: Target) -> Result<Self, String> {
        let scheme = if target.identity.is_some() { "https" } else { "http" };
        let names = target.urls.iter().map(|url| host_and_port(url, scheme)).collect::<Result<Vec<_>, _>>()?;
        let replicas = Arc::new(Replicas::default());
        let end = CancellationToken::new();
        let calls = Caller { service: target.service, tls: target.identity.map(|it| TlsConnector::from(it.client())) };
        let resolving = resolve(calls, RESOLVE_EVERY, move || lookup(names.clone()), Arc::clone(&replicas));
        // Ends with the last clone, and nobody waits for it.
        TaskTracker::new().spawn(end.clone().run_until_cancelled_owned(resolving));
        Ok(Self::new(Balancer::new(replicas, end)))
    }
}

fn host_and_port(url: &str, scheme: &str) -> Result<String, String> {
    let wrong = || format!("{url:?} is not a service URL such as \"{scheme}://task-store:7101\"");
    let uri: http::Uri = url.parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some(scheme) || !matches!(uri.path(), "" | "/") {
        return Err(wrong());
    }
    let authority = uri.authority().ok_or_else(wrong)?;
    authority.port_u16().map(|_| authority.to_string()).ok_or_else(wrong)
}

/// Who calls whom.
#[derive(Clone)]
struct Caller {
    service: String,
    tls: Option<TlsConnector>,
}

/// Addresses, and the name that each was found under.
type Places = BTreeMap<SocketAddr, Arc<str>>;

/// Keeps a connection to every address that there is at the moment.
async fn resolve<F>(caller: Caller, every: Duration, lookup: impl Fn() -> F + Send, replicas: Arc<Replicas>)
where
    F: Future<Output = Result<Places, String>> + Send,
{
    let service = caller.service.clone();
    let keepers = TaskTracker::new();
    let mut known = BTreeMap::<SocketAddr, DropGuard>::new();
    let mut resolved = true;
    loop {
        match lookup().await {
            Ok(found) => {
                let before = known.len();
                known.retain(|address, _| found.contains_key(address));
                let mut changed = known.len() != before;
                for (address, name) in found {
                    known.entry(address).or_insert_with(|| {
                        changed = true;
                        let gone = CancellationToken::new();
                        let (caller, replicas) = (caller.clone(), Arc::clone(&replicas));
                        let kept = async move { keep(&caller, address, &name, &replicas).await };
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
        sleep(if known.is_empty() { RESOLVE_EVERY_AT_FIRST.min(every) } else { every }).await;
    }
}

/// All addresses of all names.
async fn lookup(names: Vec<String>) -> Result<Places, String> {
    let mut found = Places::new();
    for name in names {
        let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host);
        let host: Arc<str> = host.trim_matches(['[', ']']).into();
        let addresses = lookup_host(&name).await.map_err(|error| format!("{name}: {error}"))?;
        found.extend(addresses.map(|address| (address, Arc::clone(&host))));
    }
    Ok(found)
}

/// Keeps an address connected, for ever.
async fn keep(caller: &Caller, address: SocketAddr, name: &str, replicas: &Replicas) {
    let service = &caller.service;
    let mut pause = FIRST_PAUSE;
    let mut told = false;
    loop {
        let failure = match connect(caller, address, name).await {
            Ok((sender, connection)) => {
                let replica = Replica::new(address, sender);
                let mut listed = None;
                let end = tokio::select! {
                    end = connection => end.err(),
                    () = attend(&replica, replicas, &mut listed) => None,
                };
                if listed.take().is_some() {
                    info!(service, %address, error = end.map(tracing::field::display), "a replica is gone");
                    (pause, told) = (FIRST_PAUSE, false);
                    None
                } else {
                    end.map(StdError::from)
                }
            }
            Err(error) => Some(error),
        };
        if let Some(error) = failure {
            // A replica that is not up yet is no news; one that does not trust us, or we it, is.
            if caller.tls.is_some() && !told {
                warn!(service, %address, error, "cannot connect over TLS; trying on");
                told = true;
            } else {
                debug!(service, %address, error, "cannot connect");
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Lists a replica once it has given a sign of life, and then keeps what is known of its health, for ever. Ends when
/// there is no sign: a frozen process accepts connections too.
async fn attend<'r>(replica: &Replica, replicas: &'r Replicas, listed: &mut Option<Listed<'r>>) {
    let mut health = replica.health();
    loop {
        match timeout(CONNECT_TIMEOUT, health.watch(HealthCheckRequest::default())).await {
            // Pings decide whether it still lives.
            Err(_) if listed.is_some() => {}
            Err(_) => return,
            Ok(answer) => {
                listed.get_or_insert_with(|| replicas.list(replica.clone()));
                match answer {
                    Ok(statuses) => follow(statuses.into_inner(), replica).await,
                    // It does not say.
                    Err(status) => replica.serves(status.code() == tonic::Code::Unimplemented),
                }
            }
        }
        sleep(HEALTH_PAUSE).await;
    }
}

/// Follows the health of a replica until it does not serve. One that is about to end waits for its streams, so this
/// one is not kept open then.
async fn follow(mut statuses: Streaming<HealthCheckResponse>, replica: &Replica) {
    while let Ok(Some(status)) = statuses.message().await {
        let serves = status.status() == ServingStatus::Serving;
        replica.serves(serves);
        if !serves {
            return;
        }
    }
}

type Stream = Either<TcpStream, TlsStream<TcpStream>>;
type Conn = Connection<TokioIo<Stream>, Body, TokioExecutor>;

async fn connect(caller: &Caller, address: SocketAddr, name: &str) -> Result<(SendRequest<Body>, Conn), StdError> {
    let tcp = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await??;
    tcp.set_nodelay(true)?;
    let stream = match &caller.tls {
        None => Either::Left(tcp),
        Some(tls) => {
            let name = ServerName::try_from(name.to_owned())?;
            // A frozen process accepts connections too.
            Either::Right(timeout(CONNECT_TIMEOUT, tls.connect(name, tcp)).await??)
        }
    };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    Ok(builder.handshake(TokioIo::new(stream)).await?)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::time::Instant;
    use tonic::transport::server::{Server, TcpIncoming};
    use tonic_health::{
        ServingStatus,
        pb::health_client::HealthClient,
        server::{HealthReporter, health_reporter},
    };

    use super::*;

    /// What holds on a slow machine too.
    const SOON: Duration = Duration::from_secs(10);

    async fn listener() -> (tokio::net::TcpListener, SocketAddr) {
        let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        (tcp, address)
    }

    fn network(addresses: &[SocketAddr]) -> HealthClient<Transport> {
        let urls = addresses.iter().map(|address| format!("http://{address}")).collect();
        HealthClient::new(Transport::network(Target { service: "test".to_owned(), urls, identity: None }).unwrap())
    }

    /// A replica that names itself: it knows one service, which is its name. Ends when dropped.
    struct Named {
        address: SocketAddr,
        reporter: HealthReporter,
        tasks: TaskTracker,
        stop: CancellationToken,
    }

    impl Named {
        async fn start(name: &str) -> Self {
            let (tcp, address) = listener().await;
            let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
            let (reporter, server) = health_reporter();
            reporter.set_service_status(name, ServingStatus::Serving).await;
            let server = Server::builder().add_service(server);
            tasks.spawn(server.serve_with_incoming_shutdown(TcpIncoming::from(tcp), stop.clone().cancelled_owned()));
            Self { address, reporter, tasks, stop }
        }

        async fn health(&self, status: ServingStatus) {
            self.reporter.set_service_status("", status).await;
        }

        async fn end(&self) {
            self.health(ServingStatus::NotServing).await;
            self.stop.cancel();
            self.tasks.close();
            self.tasks.wait().await;
        }
    }

    impl Drop for Named {
        fn drop(&mut self) {
            self.stop.cancel();
        }
    }

    /// Whether a call is answered by the replica of this name.
    async fn answered_by(client: &HealthClient<Transport>, name: &str) -> bool {
        let request = HealthCheckRequest { service: name.to_owned() };
        match timeout(SOON, client.clone().check(request)).await.expect("a call is answered") {
            Ok(_) => true,
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::NotFound, "{status}");
                false
            }
        }
    }

    /// Waits until all of some calls go to one of the replicas.
    async fn until_all_go_to(client: &HealthClient<Transport>, name: &str) {
        let until = Instant::now() + SOON;
        let mut row = 0;
        while row < 20 {
            row = if answered_by(client, name).await { row + 1 } else { 0 };
            assert!(Instant::now() < until, "calls go elsewhere than to {name}");
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn only_replicas_that_answer_get_calls() {
        // The kernel accepts for it; nobody answers.
        let (_frozen, frozen) = listener().await;
        let live = Named::start("live").await;
        let client = network(&[frozen, live.address]);
        for _ in 0..50 {
            assert!(answered_by(&client, "live").await);
        }
        // A drained connection is left at once; the call waits for another one and then says so.
        live.end().await;
        tokio::time::pause();
        let answer = client.clone().check(HealthCheckRequest::default()).await;
        assert_eq!(answer.unwrap_err().code(), tonic::Code::Unavailable);
    }

    #[tokio::test]
    async fn a_replica_that_does_not_serve_gets_calls_only_when_nobody_does() {
        let (one, two) = (Named::start("one").await, Named::start("two").await);
        let client = network(&[one.address, two.address]);
        one.health(ServingStatus::NotServing).await;
        until_all_go_to(&client, "two").await;
        two.health(ServingStatus::NotServing).await;
        one.health(ServingStatus::Serving).await;
        until_all_go_to(&client, "one").await;
        // Whoever is asked says why not: better than to wait for nothing.
        one.health(ServingStatus::NotServing).await;
        answered_by(&client, "one").await;
        two.health(ServingStatus::Serving).await;
        until_all_go_to(&client, "two").await;
    }

    #[tokio::test]
    async fn a_drained_replica_does_not_wait_for_those_who_follow_its_health() {
        let live = Named::start("live").await;
        let client = network(&[live.address]);
        assert!(answered_by(&client, "live").await);
        timeout(SOON, live.end()).await.expect("the stream of its health was not closed");
    }

    #[tokio::test]
    async fn a_name_whose_addresses_change_leads_to_the_new_ones() {
        let (old, new) = (Named::start("old").await, Named::start("new").await);
        let addresses = Arc::new(Mutex::new(Places::from([(old.address, "name".into())])));
        let (replicas, end) = (Arc::new(Replicas::default()), CancellationToken::new());
        let caller = Caller { service: "test".to_owned(), tls: None };
        let looked_up = {
            let addresses = Arc::clone(&addresses);
            move || std::future::ready(Ok(addresses.lock().unwrap().clone()))
        };
        let resolving = resolve(caller, Duration::from_millis(10), looked_up, Arc::clone(&replicas));
        TaskTracker::new().spawn(end.clone().run_until_cancelled_owned(resolving));
        let client = HealthClient::new(Transport::new(Balancer::new(replicas, end)));
        until_all_go_to(&client, "old").await;
        // Both live; only the name decides.
        addresses.lock().unwrap().insert(new.address, "name".into());
        let until = Instant::now() + SOON;
        while !answered_by(&client, "new").await {
            assert!(Instant::now() < until, "the second address is never used");
        }
        addresses.lock().unwrap().remove(&old.address);
        until_all_go_to(&client, "new").await;
    }

    #[test]
    fn a_service_url_names_host_and_port_and_nothing_else() {
        assert_eq!(host_and_port("http://task-store:7101", "http").unwrap(), "task-store:7101");
        assert_eq!(host_and_port("https://[::1]:7101/", "https").unwrap(), "[::1]:7101");
        for wrong in ["task-store:7101", "http://task-store", "https://task-store:7101", "http://a:1/path", ""] {
            assert!(host_and_port(wrong, "http").is_err(), "{wrong}");
        }
    }
}
