//! Notices: one subscription per process (on a cluster, per server), handed out here to who listens.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use redis::{AsyncConnectionConfig, PushInfo, PushKind, Value, aio::MultiplexedConnection};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{config::Place, keys::kind, link::Link, value};
use crate::{Error, Notice, Notices, Result, Shard, notices::Hub};

/// Channel of a shard for [`Op::Notify`](crate::Op::Notify).
pub(super) const NOTICES: &str = "notices";

/// Channel of a shard that names streams to which an entry was handed back.
pub(super) const HANDED_BACK: &str = "handed-back";

/// How often a silent connection is tried.
const PING: Duration = Duration::from_secs(10);

/// How long an answer on the subscription's connections may take.
const ANSWER: Duration = Duration::from_secs(3);

/// Messages on their way from a connection to the listeners.
const BUFFER: usize = 4096;

/// Back-off between tries: doubles from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

type Channel = (Shard, &'static str);

/// What this process listens to.
#[derive(Debug)]
pub(super) struct Subscription {
    shared: Arc<Shared>,
    wanted: watch::Sender<BTreeSet<Channel>>,
    /// Channels that Redis has confirmed and that are not cut since.
    confirmed: watch::Receiver<BTreeSet<Channel>>,
}

#[derive(Debug)]
struct Shared {
    hub: Hub,
    /// Counts the times that notices may have been lost.
    lost: watch::Sender<u64>,
    /// Counts the times that a handed-back entry may be waiting.
    handed_back: watch::Sender<u64>,
}

/// Writes a notice as it travels: its topic, a zero byte, its payload.
pub(super) fn encode(topic: &str, payload: &str, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(topic.as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(payload.as_bytes());
}

impl Subscription {
    pub(super) fn new(link: &Arc<Link>) -> Self {
        let shared = Shared { hub: Hub::new(), lost: watch::Sender::new(0), handed_back: watch::Sender::new(0) };
        let shared = Arc::new(shared);
        let wanted = watch::Sender::new(BTreeSet::new());
        let (confirm, confirmed) = watch::channel(BTreeSet::new());
        let keeping = keep_up(Arc::downgrade(link), Arc::clone(&shared), wanted.subscribe(), confirm);
        link.spawn(keeping);
        Self { shared, wanted, confirmed }
    }

    /// Listens from now on: what is told after this returned arrives, or is said to be lost.
    pub(super) async fn listen(&self, shard: Shard, topic: &str, deadline: Instant) -> Result<Notices> {
        let notices = self.shared.hub.listen(shard, topic);
        let channel = (shard, NOTICES);
        let mut confirmed = self.confirmed.clone();
        self.want(channel);
        match timeout_at(deadline, confirmed.wait_for(|channels| channels.contains(&channel))).await {
            Ok(Ok(_)) => Ok(notices.with_losses(self.shared.lost.subscribe())),
            Ok(Err(_)) | Err(_) => Err(Error::Unavailable("cannot subscribe to notices in redis".to_owned())),
        }
    }

    /// Changes whenever a handed-back entry may be waiting in one of the shards.
    pub(super) fn watch_handed_back(&self, shards: impl Iterator<Item = Shard>) -> watch::Receiver<u64> {
        for shard in shards {
            self.want((shard, HANDED_BACK));
        }
        self.shared.handed_back.subscribe()
    }

    pub(super) fn handed_back(&self) {
        self.shared.handed_back.send_modify(|count| *count += 1);
    }

    fn want(&self, channel: Channel) {
        self.wanted.send_if_modified(|wanted| wanted.insert(channel));
    }
}

async fn keep_up(
    link: Weak<Link>,
    shared: Arc<Shared>,
    mut wanted: watch::Receiver<BTreeSet<Channel>>,
    confirm: watch::Sender<BTreeSet<Channel>>,
) {
    let mut pause = PAUSES.0;
    let mut told = false;
    while wanted.wait_for(|wanted| !wanted.is_empty()).await.is_ok() {
        let Some(link) = link.upgrade() else { return };
        let Err(error) = session(&link, &shared, &mut wanted, &confirm).await else { return };
        drop(link);
        let lasted = !confirm.send_replace(BTreeSet::new()).is_empty();
        if lasted {
            (pause, told) = (PAUSES.0, false);
            // At once, and once more when there is another: whoever remembers what it read must have forgotten it
            // before the first call to a server that may not know it.
            shared.lost.send_modify(|count| *count += 1);
        }
        if !told {
            tracing::warn!(%error, "the subscription to redis broke; subscribing again");
            told = true;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Subscribes to everything wanted and serves until something breaks.
async fn session(
    link: &Link,
    shared: &Shared,
    wanted: &mut watch::Receiver<BTreeSet<Channel>>,
    confirm: &watch::Sender<BTreeSet<Channel>>,
) -> Result<()> {
    let (sender, mut pushes) = mpsc::channel(BUFFER);
    let overflown = Arc::new(AtomicBool::new(false));
    let mut session = Session {
        link,
        sender,
        overflown,
        connections: HashMap::new(),
        channels: HashMap::new(),
        replaced: FuturesUnordered::new(),
    };
    let mut first = true;
    loop {
        let channels = wanted.borrow_and_update().clone();
        for channel in &channels {
            if !confirm.borrow().contains(channel) {
                session.subscribe(*channel).await?;
            }
        }
        if std::mem::take(&mut first) {
            // Whatever was told while nothing was subscribed is gone.
            shared.lost.send_modify(|count| *count += 1);
            shared.handed_back.send_modify(|count| *count += 1);
        }
        confirm.send_replace(channels);
        loop {
            tokio::select! {
                push = pushes.recv() => match push {
                    Some(push) => session.heard(push, shared)?,
                    None => return Ok(()),
                },
                changed = wanted.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return Ok(()),
                },
                // Another server may be the one to listen to now.
                Some(()) = session.replaced.next() => {
                    return Err(Error::Unavailable("the connection to redis was replaced".to_owned()));
                }
                () = sleep(PING) => session.ping().await?,
            }
        }
    }
}

struct Session<'a> {
    link: &'a Link,
    sender: mpsc::Sender<PushInfo>,
    /// A push found the buffer full.
    overflown: Arc<AtomicBool>,
    connections: HashMap<Place, MultiplexedConnection>,
    channels: HashMap<String, Channel>,
    /// One for each connection: when the calls go elsewhere.
    replaced: FuturesUnordered<BoxFuture<'a, ()>>,
}

impl Session<'_> {
    async fn subscribe(&mut self, channel: Channel) -> Result<()> {
        let (shard, name) = channel;
        let place = self.link.place(shard);
        if !self.connections.contains_key(&place) {
            let connection = self.connect(shard).await?;
            self.connections.insert(place.clone(), connection);
        }
        let Some(connection) = self.connections.get_mut(&place) else { return Err(value::strange()) };
        let key = self.link.keys.key(shard, kind::CHANNEL, name);
        let mut command = redis::cmd(if self.link.is_cluster() { "SSUBSCRIBE" } else { "SUBSCRIBE" });
        answer(command.arg(&key).query_async::<Value>(connection)).await?;
        self.channels.insert(key, channel);
        Ok(())
    }

    async fn connect(&mut self, shard: Shard) -> Result<MultiplexedConnection> {
        let link = self.link;
        let up = link.up(shard, link.deadline()).await?;
        self.replaced.push(link.replaced(shard, up.generation).boxed());
        let (sender, overflown) = (self.sender.clone(), Arc::clone(&self.overflown));
        let push = move |push: PushInfo| {
            sender.try_send(push).inspect_err(|_| overflown.store(true, Ordering::Relaxed)).map_err(drop)
        };
        let settings = AsyncConnectionConfig::new().set_response_timeout(None).set_push_sender(push);
        answer(up.client.get_multiplexed_async_connection_with_config(&settings)).await
    }

    fn heard(&self, push: PushInfo, shared: &Shared) -> Result<()> {
        if self.overflown.swap(false, Ordering::Relaxed) {
            shared.lost.send_modify(|count| *count += 1);
        }
        match push.kind {
            PushKind::Message | PushKind::SMessage => {
                let mut data = push.data.into_iter().filter_map(value::text);
                let (Some(channel), Some(text)) = (data.next(), data.next()) else { return Ok(()) };
                match self.channels.get(&channel) {
                    Some((shard, NOTICES)) => {
                        if let Some((topic, payload)) = text.split_once('\0') {
                            shared.hub.send(*shard, topic.to_owned(), Notice { payload: payload.to_owned() });
                        }
                    }
                    Some(_) => shared.handed_back.send_modify(|count| *count += 1),
                    None => {}
                }
                Ok(())
            }
            // The shard lives elsewhere now.
            PushKind::SUnsubscribe => Err(Error::Unavailable("a channel moved".to_owned())),
            PushKind::Disconnection => Err(Error::Unavailable("the connection broke".to_owned())),
            _ => Ok(()),
        }
    }

    /// A half-open connection looks like silence.
    async fn ping(&mut self) -> Result<()> {
        for connection in self.connections.values_mut() {
            answer(redis::cmd("PING").query_async::<Value>(connection)).await?;
        }
        Ok(())
    }
}

async fn answer<T>(asking: impl Future<Output = redis::RedisResult<T>>) -> Result<T> {
    match timeout(ANSWER, asking).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Error::Unavailable(error.to_string())),
        Err(_) => Err(Error::Unavailable("redis does not answer".to_owned())),
    }
}
