//! Calls: sent to the server that owns the shard, repeated where that is safe, inside one deadline.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    config::{Place, Target},
    keys::Keys,
    library::Library,
    node::{Node, Up, Which},
    value,
};
use crate::{Conflict, Error, Result, Shard};

/// Pause before a server that is not ready is asked again.
const NOT_READY: Duration = Duration::from_millis(50);

/// Least time between two looks at the cluster's slots.
const REFRESH: Duration = Duration::from_millis(200);

/// What to do when the answer to a call got lost, so that nobody knows whether it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// Call again: doing it twice is the same as once.
    Repeat,
    /// Call again once.
    RepeatOnce,
    /// Say so.
    Fail,
}

/// The way to Redis.
#[derive(Debug)]
pub(super) struct Link {
    target: Arc<Target>,
    pub(super) keys: Keys,
    pub(super) library: Library,
    deadline: Duration,
    /// Who owns each shard. One place for all, unless this is a cluster.
    owners: RwLock<Vec<Which>>,
    nodes: Mutex<HashMap<Place, Arc<Node>>>,
    refresh: Option<(mpsc::Sender<()>, watch::Receiver<u64>)>,
    /// The store is another one than this link was made for.
    foreign: AtomicBool,
    tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// Redis refuses it.
    Refused(Error),
    /// Redis cannot be reached, or not in time; another time it may.
    Away(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Away(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (Failure::Refused(error) | Failure::Away(error)) = failure;
        error
    }
}

impl Link {
    /// A link to one server, or to the master of Sentinels.
    pub(super) fn single(target: Arc<Target>, keys: Keys, deadline: Duration) -> Arc<Self> {
        let which = if target.sentinel.is_some() { Which::Master } else { Which::At(target.hosts[0].clone()) };
        Self::new(target, keys, deadline, vec![which], None)
    }

    /// A link to a cluster with these slots.
    pub(super) fn cluster(target: Arc<Target>, keys: Keys, deadline: Duration, slots: &Slots) -> Arc<Self> {
        let owners = slots.owners(&keys, &target);
        let (request, requests) = mpsc::channel(1);
        let (done, refreshed) = watch::channel(0);
        let link = Self::new(target, keys, deadline, owners, Some((request, refreshed)));
        let looking = keep_current(Arc::downgrade(&link), requests, done);
        link.tasks.spawn(link.stop.clone().run_until_cancelled_owned(looking));
        link
    }

    fn new(
        target: Arc<Target>,
        keys: Keys,
        deadline: Duration,
        owners: Vec<Which>,
        refresh: Option<(mpsc::Sender<()>, watch::Receiver<u64>)>,
    ) -> Arc<Self> {
        Arc::new(Self {
            target,
            keys,
            library: Library::new(),
            deadline,
            owners: RwLock::new(owners),
            nodes: Mutex::default(),
            refresh,
            foreign: AtomicBool::new(false),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// Runs a task for as long as the link lives.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(self.stop.clone().run_until_cancelled_owned(task));
    }

    pub(super) const fn is_cluster(&self) -> bool {
        self.refresh.is_some()
    }

    /// When a call that starts now must be over.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.deadline
    }

    /// Where a shard lives. Shards with equal places share a server.
    pub(super) fn place(&self, shard: Shard) -> Place {
        match self.owner(shard) {
            Which::At(place) => place,
            // Whoever it is: there is only one.
            Which::Master => Place::default(),
        }
    }

    fn owner(&self, shard: Shard) -> Which {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners[if self.is_cluster() { usize::from(shard) } else { 0 }].clone()
    }

    fn node(&self, which: Which) -> Arc<Node> {
        let place = match &which {
            Which::At(place) => place.clone(),
            Which::Master => Place::default(),
        };
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Node::new(Arc::clone(&self.target), which, &self.tasks, &self.stop));
        Arc::clone(nodes.entry(place).or_insert_with(new))
    }

    /// Says whether the store is another one than this link was made for: then nothing is read or written.
    pub(super) fn set_foreign(&self, foreign: bool) -> bool {
        self.foreign.swap(foreign, Ordering::Relaxed)
    }

    /// The connection to the server of a shard, to open others like it.
    pub(super) async fn up(&self, shard: Shard, deadline: Instant) -> Result<Arc<Up>> {
        self.check_ours()?;
        self.reach(shard, deadline).await
    }

    fn check_ours(&self) -> Result<()> {
        if self.foreign.load(Ordering::Relaxed) {
            return Err(Error::Unavailable("the store was installed anew, with another number of shards".to_owned()));
        }
        Ok(())
    }

    /// As [`Link::up`], whatever store it is.
    async fn reach(&self, shard: Shard, deadline: Instant) -> Result<Arc<Up>> {
        match self.node(self.owner(shard)).up(deadline).await {
            Ok(up) => Ok(up),
            Err(error) if self.is_cluster() => {
                // Perhaps another server has taken over.
                self.look_again(deadline).await;
                self.node(self.owner(shard)).up(deadline).await.map_err(|_| error)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until this connection to the server of a shard is of no use any more.
    pub(super) async fn replaced(&self, shard: Shard, generation: u64) {
        self.node(self.owner(shard)).replaced(generation).await;
    }

    /// Sends a command to the server of a shard.
    ///
    /// # Errors
    /// All but [`Error::Conflict`]s and [`Error::Full`] mean that it may or may not have been done.
    pub(super) async fn call(&self, shard: Shard, command: &Cmd, lost: Lost) -> Result<Value> {
        self.check_ours()?;
        Ok(self.ask(shard, command, lost).await?)
    }

    /// As [`Link::call`], whatever store it is.
    pub(super) async fn ask(&self, shard: Shard, command: &Cmd, lost: Lost) -> Result<Value, Failure> {
        let deadline = self.deadline();
        let mut repeats = match lost {
            Lost::Repeat => u32::MAX,
            Lost::RepeatOnce => 1,
            Lost::Fail => 0,
        };
        let mut detour = None;
        loop {
            // A detour serves one try; after it the owner is asked again.
            let (node, asking) = match detour.take() {
                Some(place) => (Some(self.node(Which::At(place))), true),
                None => (None, false),
            };
            let up = match &node {
                Some(node) => node.up(deadline).await?,
                None => self.reach(shard, deadline).await?,
            };
            let mut connection = up.connection.clone();
            let answer = async {
                if asking {
                    let mut pipeline = redis::pipe();
                    pipeline.cmd("ASKING").ignore().add_command(command.clone());
                    let (answer,): (Value,) = pipeline.query_async(&mut connection).await?;
                    Ok(answer)
                } else {
                    command.query_async(&mut connection).await
                }
            };
            let error = match timeout_at(deadline, answer).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => {
                    // Perhaps half-open: nothing would ever come back on it.
                    node.unwrap_or_else(|| self.node(self.owner(shard))).broken(up.generation);
                    let reason = format!("redis does not answer within {:?}", self.deadline);
                    return Err(Failure::Away(Error::Unavailable(reason)));
                }
            };
            match verdict(&error) {
                Verdict::Moved(place) => {
                    self.moved(shard, place);
                    self.request_refresh();
                }
                Verdict::Ask(place) => detour = Some(place),
                Verdict::NoFunction => self.load(&up, deadline).await?,
                Verdict::Demoted => {
                    node.unwrap_or_else(|| self.node(self.owner(shard))).broken(up.generation);
                    self.pause(&error, deadline).await?;
                    self.request_refresh();
                }
                Verdict::NotReady => {
                    self.pause(&error, deadline).await?;
                    self.request_refresh();
                }
                Verdict::Lost => {
                    node.unwrap_or_else(|| self.node(self.owner(shard))).broken(up.generation);
                    if repeats == 0 || Instant::now() >= deadline {
                        return Err(Failure::Away(Error::Unavailable(error.to_string())));
                    }
                    repeats -= 1;
                }
                Verdict::Final(error) => return Err(Failure::Refused(error)),
            }
        }
    }

    async fn pause(&self, error: &RedisError, deadline: Instant) -> Result<()> {
        let until = Instant::now() + NOT_READY;
        if until >= deadline {
            return Err(Error::Unavailable(error.to_string()));
        }
        sleep_until(until).await;
        Ok(())
    }

    async fn load(&self, up: &Up, deadline: Instant) -> Result<(), Failure> {
        let mut connection = up.connection.clone();
        match timeout_at(deadline, self.library.load().query_async::<Value>(&mut connection)).await {
            Ok(Ok(_)) => {
                tracing::info!(library = self.library.name(), "loaded the functions into redis");
                Ok(())
            }
            // Somebody else was quicker.
            Ok(Err(error)) if error.to_string().contains("already exists") => Ok(()),
            Ok(Err(error)) => {
                let failure = Error::Unavailable(format!("cannot load the functions: {error}"));
                Err(if error.is_io_error() { Failure::Away(failure) } else { Failure::Refused(failure) })
            }
            Err(_) => Err(Failure::Away(Error::Unavailable("redis does not answer".to_owned()))),
        }
    }

    fn moved(&self, shard: Shard, place: Place) {
        if self.is_cluster() {
            self.owners.write().unwrap_or_else(PoisonError::into_inner)[usize::from(shard)] = Which::At(place);
        }
    }

    fn request_refresh(&self) {
        if let Some((request, _)) = &self.refresh {
            // One that waits is enough.
            request.try_send(()).ok();
        }
    }

    async fn look_again(&self, deadline: Instant) {
        if let Some((_, refreshed)) = &self.refresh {
            let mut refreshed = refreshed.clone();
            refreshed.mark_unchanged();
            self.request_refresh();
            drop(timeout_at(deadline, refreshed.changed()).await);
        }
    }

    /// Takes new owners over and forgets servers that own nothing.
    fn adopt(&self, slots: &Slots) {
        let owners = slots.owners(&self.keys, &self.target);
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|place, _| owners.iter().any(|which| matches!(which, Which::At(owner) if owner == place)));
        drop(nodes);
        *self.owners.write().unwrap_or_else(PoisonError::into_inner) = owners;
    }
}

async fn keep_current(link: std::sync::Weak<Link>, mut requests: mpsc::Receiver<()>, done: watch::Sender<u64>) {
    while requests.recv().await.is_some() {
        let Some(link) = link.upgrade() else { return };
        let next = Instant::now() + REFRESH;
        let mut places = link.target.hosts.clone();
        let nodes: Vec<_> = link.nodes.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
        places.extend(nodes);
        if let Some(slots) = Slots::ask(&link.target, &places).await {
            link.adopt(&slots);
        }
        done.send_modify(|count| *count += 1);
        drop(link);
        sleep_until(next).await;
    }
}

/// Which master owns which slots.
#[derive(Clone, Debug)]
pub(super) struct Slots(Vec<(u16, u16, Place)>);

impl Slots {
    /// Asks these servers, in order, until one knows.
    pub(super) async fn ask(target: &Target, places: &[Place]) -> Option<Self> {
        for place in places {
            let asking = async {
                let mut connection = target.server(place)?.get_multiplexed_async_connection().await?;
                redis::cmd("CLUSTER").arg("SLOTS").query_async::<Value>(&mut connection).await
            };
            if let Ok(Ok(slots)) = timeout(Duration::from_secs(1), asking).await
                && let Some(slots) = Self::parse(slots, &place.0)
            {
                return Some(slots);
            }
        }
        None
    }

    fn parse(slots: Value, asked: &str) -> Option<Self> {
        let ranges = value::list(slots)?.into_iter().map(|range| {
            let mut range = value::list(range)?.into_iter();
            let first = u16::try_from(value::int(&range.next()?)?).ok()?;
            let last = u16::try_from(value::int(&range.next()?)?).ok()?;
            let mut master = value::list(range.next()?)?.into_iter();
            let host = master.next().and_then(value::text).unwrap_or_default();
            let port = u16::try_from(value::int(&master.next()?)?).ok()?;
            // A node that does not know its own address means the one it was asked at.
            Some((first, last, (if host.is_empty() { asked.to_owned() } else { host }, port)))
        });
        ranges.collect::<Option<Vec<_>>>().filter(|ranges| !ranges.is_empty()).map(Self)
    }

    /// All masters.
    pub(super) fn masters(&self) -> Vec<Place> {
        let mut masters: Vec<_> = self.0.iter().map(|(_, _, place)| place.clone()).collect();
        masters.sort();
        masters.dedup();
        masters
    }

    /// The owner of each shard. A slot without one is asked for at the first host, which says so.
    fn owners(&self, keys: &Keys, target: &Target) -> Vec<Which> {
        let owner = |slot| {
            let range = self.0.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
            Which::At(range.map_or_else(|| target.hosts[0].clone(), |(_, _, place)| place.clone()))
        };
        (0..keys.shards()).map(|shard| owner(Keys::slot(shard))).collect()
    }
}

/// What an error means for the call.
enum Verdict {
    Moved(Place),
    Ask(Place),
    NoFunction,
    /// Nothing was done: this server is not a master any more.
    Demoted,
    /// Nothing was done: not at the moment.
    NotReady,
    /// Nobody knows whether it was done.
    Lost,
    Final(Error),
}

fn verdict(error: &RedisError) -> Verdict {
    let redirect = || {
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        Some((host.to_owned(), port.parse().ok()?)).filter(|(host, _)| !host.is_empty())
    };
    let text = || error.detail().unwrap_or_default().to_owned();
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => redirect().map_or(Verdict::NotReady, Verdict::Moved),
        ErrorKind::Server(ServerErrorKind::Ask) => redirect().map_or(Verdict::NotReady, Verdict::Ask),
        ErrorKind::Server(ServerErrorKind::ReadOnly) => Verdict::Demoted,
        ErrorKind::Server(
            ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::BusyLoading,
        ) => Verdict::NotReady,
        ErrorKind::Server(ServerErrorKind::ResponseError) if text().contains("Function not found") => {
            Verdict::NoFunction
        }
        ErrorKind::Server(_) | ErrorKind::Extension => Verdict::Final(match error.code() {
            Some("OOM") => Error::Full,
            Some("CONFLICT") => conflict(&text()),
            Some("MALFORMED") => Error::Malformed(text()),
            Some("BUSY") => return Verdict::NotReady,
            _ => Error::Unavailable(error.to_string()),
        }),
        ErrorKind::Io | ErrorKind::Parse => Verdict::Lost,
        _ => Verdict::Final(Error::Unavailable(error.to_string())),
    }
}

/// Reads `<check> <kind> <value>`.
fn conflict(text: &str) -> Error {
    let read = || {
        let mut words = text.split(' ');
        let check = words.next()?.parse().ok()?;
        let (kind, value) = (words.next()?, words.next()?);
        let reason = match kind {
            "version" => Conflict::Version(value.parse().ok()),
            "pending" => Conflict::NotPending,
            "tail" => Conflict::Tail(value.parse().ok()?),
            "length" => Conflict::TooLong(value.parse().ok()?),
            "limit" => Conflict::Limited(Duration::from_micros(value.parse().ok()?)),
            _ => return None,
        };
        Some(Error::Conflict { check, reason })
    };
    read().unwrap_or_else(|| Error::Unavailable(format!("redis answers CONFLICT {text}")))
}
