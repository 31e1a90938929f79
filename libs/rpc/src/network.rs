//! Clients over the network: names are resolved again and again, calls are balanced over all addresses.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use tokio::{net::lookup_host, sync::mpsc, time};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Channel, Endpoint, channel::Change};
use tower::ServiceExt as _;
use tracing::{info, warn};

use crate::Transport;

/// How often names are resolved again: replicas that appear get calls, replicas that vanish get none.
const RESOLVE_EVERY: Duration = Duration::from_secs(5);
/// While nothing is known at all, look more often.
const RESOLVE_EVERY_AT_FIRST: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Until the head of an answer; a stream may then go on for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A peer that is gone without a word is noticed within the interval and the time-out.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the replicas of a service are.
#[derive(Clone, Debug)]
pub struct Target {
    /// For logs: `task-store`.
    pub service: String,
    /// `http://name:port`; each name may have many addresses.
    pub urls: Vec<String>,
}

impl Transport {
    /// Calls whichever replica of a service is reachable and least busy. A call waits at most the answer
    /// time-out for a replica to appear, so processes may start in any order.
    ///
    /// # Errors
    /// A URL that is not `http://host:port`.
    pub fn network(target: Target, tasks: &TaskTracker, stop: CancellationToken) -> Result<Self, String> {
        let names = target.urls.iter().map(|url| host_and_port(url)).collect::<Result<Vec<_>, _>>()?;
        let (channel, changes) = Channel::balance_channel::<SocketAddr>(64);
        tasks.spawn(resolve(target.service, names, changes, stop));
        let bounded = tower::timeout::Timeout::new(channel, ANSWER_TIMEOUT);
        Ok(Self::new(bounded.map_err(Into::into)))
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

/// Keeps the balancer's set of addresses equal to what the names say.
async fn resolve(
    service: String,
    names: Vec<String>,
    changes: mpsc::Sender<Change<SocketAddr, Endpoint>>,
    stop: CancellationToken,
) {
    let mut known = BTreeSet::new();
    loop {
        if let Some(found) = lookup(&service, &names).await {
            for gone in known.difference(&found) {
                if changes.send(Change::Remove(*gone)).await.is_err() {
                    return;
                }
            }
            for new in found.difference(&known) {
                if changes.send(Change::Insert(*new, endpoint(*new))).await.is_err() {
                    return;
                }
            }
            if known != found {
                info!(service, replicas = found.len(), "replicas resolved");
            }
            known = found;
        }
        let pause = if known.is_empty() { RESOLVE_EVERY_AT_FIRST } else { RESOLVE_EVERY };
        tokio::select! {
            () = stop.cancelled() => return,
            () = time::sleep(pause) => {}
        }
    }
}

/// All addresses of all names; `None` when a name cannot be resolved just now, so that a short fault of the
/// name service does not empty the set.
async fn lookup(service: &str, names: &[String]) -> Option<BTreeSet<SocketAddr>> {
    let mut found = BTreeSet::new();
    for name in names {
        match lookup_host(name).await {
            Ok(addresses) => found.extend(addresses),
            Err(error) => {
                warn!(service, name, %error, "name not resolved");
                return None;
            }
        }
    }
    Some(found)
}

fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::from_shared(format!("http://{address}"))
        .expect("a socket address makes a valid URL")
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
}

#[cfg(test)]
mod tests {
    use super::host_and_port;

    #[test]
    fn a_service_url_names_host_and_port_and_nothing_else() {
        assert_eq!(host_and_port("http://task-store:7101").unwrap(), "task-store:7101");
        assert_eq!(host_and_port("http://[::1]:7101/").unwrap(), "[::1]:7101");
        for wrong in ["task-store:7101", "http://task-store", "https://task-store:7101", "http://a:1/path", ""] {
            assert!(host_and_port(wrong).is_err(), "{wrong}");
        }
    }
}
