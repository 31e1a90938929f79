//! Claims: what is there at once by one function call, what comes later by a blocking read.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use redis::{AsyncConnectionConfig, Value, aio::MultiplexedConnection};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::{RedisEngine, config::Place, keys::kind, library::Function, link::Lost, node::Up, value};
use crate::{Batch, Claim, Claimed, Consumer, Entry, EntryId, Error, Op, Result, Shard};

/// The consumer group of every work stream.
const GROUP: &str = "workers";

/// The consumer that stands for entries that were given back, as the functions name it.
const HANDED_BACK: &str = "handed-back";

/// A blocking read that is still out this long after it should have ended came to a half-open connection.
const OVERDUE: Duration = Duration::from_secs(3);

/// How long readers may take to come back when they are told to.
const RECALL: Duration = Duration::from_millis(500);

/// How long a consumer that owns nothing is idle when it is taken for gone. Living ones read more often.
const FORGET: Duration = Duration::from_secs(3600);

/// Shortest time between two looks for idle entries, whatever is about to become idle.
const LOOK: Duration = Duration::from_millis(50);

/// Pause when a stream or its group vanished under a reader: doubles from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Connections for blocking reads that are free.
pub(super) type Readers = Mutex<Vec<Reader>>;

/// What is remembered between the claims of one consumer for the same streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    /// When entries of others may have become idle for as long as the lease.
    next_look: Instant,
    /// The lease that this was found out for.
    lease: Duration,
    /// When to look for forgotten consumers.
    next_prune: Instant,
    /// The last claim left nothing to take.
    drained: bool,
    /// An answer with entries may have been lost: they are pending, and nobody knows.
    lost: bool,
    /// State of the handed-back counter at the last look.
    handed_back: u64,
    pause: Duration,
}

/// Seats that nobody sits on. A second claim at the same time gets one of its own.
pub(super) type Seats = Mutex<HashMap<(String, Vec<(Shard, String)>), Seat>>;

impl RedisEngine {
    pub(super) async fn claim_or_wait(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        for (shard, _) in &claim.streams {
            self.check_shard(*shard)?;
        }
        if claim.streams.is_empty() || claim.limit == 0 {
            sleep(claim.wait).await;
            return Ok(Vec::new());
        }
        let mut taken = Taken::new(&self.seats, claim);
        let claimed = self.claim_seated(claim, &mut taken.seat).await?;
        self.arrived.note(claim, &claimed);
        Ok(claimed)
    }

    /// Whoever drops this future, or gets an error from it, leaves the seat marked "lost".
    async fn claim_seated(&self, claim: &Claim, seat: &mut Seat) -> Result<Vec<Claimed>> {
        let deadline = Instant::now() + claim.wait;
        let mut handed_back = self.notices.watch_handed_back(claim.streams.iter().map(|(shard, _)| *shard));
        let groups = self.groups(claim);
        if claim.lease < std::mem::replace(&mut seat.lease, claim.lease) {
            seat.next_look = Instant::now();
        }
        // Who does not wait gets what is there.
        let mut look = claim.wait.is_zero();
        loop {
            // Before the look, so nothing falls in between.
            let news = *handed_back.borrow_and_update();
            let due = Instant::now() >= seat.next_look;
            if std::mem::take(&mut look) || due || !seat.drained || seat.lost || seat.handed_back != news {
                let claimed = self.look(claim, &groups, seat, due).await?;
                seat.handed_back = news;
                if !claimed.is_empty() {
                    return Ok(claimed);
                }
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(Vec::new());
            }
            let claimed = self.wait(claim, &groups, seat, deadline.min(seat.next_look) - now, &mut handed_back).await?;
            if !claimed.is_empty() {
                return Ok(claimed);
            }
        }
    }

    /// Streams that one command can read: all of them, or on a cluster those of one shard.
    fn groups<'a>(&self, claim: &'a Claim) -> Vec<Group<'a>> {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for (shard, stream) in &claim.streams {
            let known = groups.iter_mut().find(|group| group.shard == *shard || !self.link.is_cluster());
            let stream = (*shard, stream.as_str(), self.link.keys.key(*shard, kind::PLAIN, stream));
            match known {
                Some(group) => group.streams.push(stream),
                None => groups.push(Group { shard: *shard, streams: vec![stream] }),
            }
        }
        groups
    }

    /// Takes what is there: handed back, lost, idle, new.
    async fn look(&self, claim: &Claim, groups: &[Group<'_>], seat: &mut Seat, idle: bool) -> Result<Vec<Claimed>> {
        let mut claimed = Vec::new();
        let lost = std::mem::replace(&mut seat.lost, true);
        let prune = Instant::now() >= seat.next_prune;
        let forget = if prune { millis(FORGET) } else { 0 };
        let lease = if idle { millis(claim.lease).max(1) } else { 0 };
        let mut next_look = claim.lease;
        for group in groups {
            let room = claim.limit - claimed.len();
            if room == 0 {
                // What the others have is looked for next time.
                next_look = Duration::ZERO;
                break;
            }
            let mut command = self.link.library.call(Function::Claim);
            command.arg(group.streams.len());
            for (_, _, key) in &group.streams {
                command.arg(key);
            }
            command.arg(&claim.consumer).arg(room).arg(lease).arg(forget);
            for (shard, stream, key) in &group.streams {
                let ids = if lost { self.lost(claim, *shard, stream, key).await? } else { Vec::new() };
                command.arg(ids.len());
                for id in ids {
                    command.arg(id.to_string());
                }
            }
            let asked = Instant::now();
            let answer = self.link.call(group.shard, &command, Lost::Fail).await?;
            let (at, until_idle, made) = group.read(answer, &mut claimed).ok_or_else(value::strange)?;
            self.clock.heard(at, asked);
            next_look = next_look.min(Duration::from_millis(until_idle));
            if made > 0 {
                tracing::info!(groups = made, "made the consumer group of work streams");
            }
        }
        // With the limit reached, some that were lost may be left.
        seat.lost = lost && claimed.len() == claim.limit;
        seat.drained = claimed.len() < claim.limit;
        let now = Instant::now();
        if idle {
            seat.next_look = now + next_look.max(LOOK.min(claim.lease));
        }
        if prune {
            seat.next_prune = now + FORGET / 2;
        }
        Ok(claimed)
    }

    /// Entries that are pending for this consumer and never reached it.
    async fn lost(&self, claim: &Claim, shard: Shard, stream: &str, key: &str) -> Result<Vec<EntryId>> {
        let mut command = redis::cmd("XPENDING");
        command.arg(key).arg(GROUP).arg("-").arg("+").arg(1000).arg(&claim.consumer);
        let rows = match self.link.call(shard, &command, Lost::Repeat).await {
            Err(Error::Unavailable(text)) if text.contains("NOGROUP") => return Ok(Vec::new()),
            answer => value::list(answer?).ok_or_else(value::strange)?,
        };
        let ids = rows.into_iter().filter_map(|row| value::id(value::list(row)?.first()?));
        Ok(ids.filter(|id| !self.arrived.contains(shard, stream, *id)).collect())
    }

    /// Waits for new entries with one blocking read for each group, or for other news.
    async fn wait(
        &self,
        claim: &Claim,
        groups: &[Group<'_>],
        seat: &mut Seat,
        most: Duration,
        handed_back: &mut watch::Receiver<u64>,
    ) -> Result<Vec<Claimed>> {
        let mut readers = Vec::with_capacity(groups.len());
        for group in groups {
            readers.push(self.reader(group).await?);
        }
        let ids: Vec<_> = readers.iter().map(|reader| (reader.shard, reader.id)).collect();
        // From here on entries may be ours without our knowledge.
        seat.lost = true;
        let block = millis(most).max(1);
        let reads = groups.iter().zip(readers).map(|(group, reader)| {
            let replaced = self.link.replaced(reader.shard, reader.generation);
            reader.read(group, claim, block, replaced)
        });
        let mut reads: FuturesUnordered<_> = reads.collect();
        let mut outcome = Outcome::default();
        tokio::select! {
            Some(read) = reads.next() => self.done(read, &mut outcome),
            changed = handed_back.changed() => if changed.is_err() {
                return Err(Error::Unavailable("the engine is closed".to_owned()));
            },
        }
        if !reads.is_empty() {
            self.recall(&ids).await;
            while let Ok(Some(read)) = timeout(RECALL, reads.next()).await {
                self.done(read, &mut outcome);
            }
            // Those that did not come back are dropped, which closes their connections.
            outcome.lost |= !reads.is_empty();
        }
        let Outcome { mut claimed, lost, vanished, error } = outcome;
        if claimed.len() > claim.limit {
            self.give_back(claimed.split_off(claim.limit)).await?;
        }
        seat.lost = lost;
        seat.drained = claimed.len() < claim.limit;
        if !vanished {
            seat.pause = PAUSES.0;
        } else if claimed.is_empty() {
            // The next look makes the group again.
            seat.next_look = Instant::now();
            sleep(seat.pause).await;
            seat.pause = (seat.pause * 2).min(PAUSES.1);
        }
        match error {
            Some(error) if claimed.is_empty() => Err(error),
            _ => Ok(claimed),
        }
    }

    fn done(&self, (reader, read): (Reader, Read), outcome: &mut Outcome) {
        match read {
            Read::Entries(claimed) => outcome.claimed.extend(claimed),
            Read::Vanished => outcome.vanished = true,
            Read::Cut => {
                outcome.lost = true;
                outcome.vanished = true;
                return;
            }
            Read::Failed(error) => {
                outcome.lost = true;
                outcome.error = Some(error);
                return;
            }
        }
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
    }

    /// Ends blocking reads early.
    async fn recall(&self, ids: &[(Shard, i64)]) {
        let unblock = ids.iter().map(|(shard, id)| async {
            let mut command = redis::cmd("CLIENT");
            command.arg("UNBLOCK").arg(*id);
            let call = self.link.call(*shard, &command, Lost::Repeat);
            // Without success the reader does not come back, and is dropped.
            drop(timeout(RECALL, call).await);
        });
        futures::future::join_all(unblock).await;
    }

    /// Hands back what is more than was asked for.
    async fn give_back(&self, surplus: Vec<Claimed>) -> Result<()> {
        let mut shards: HashMap<Shard, Vec<Op>> = HashMap::new();
        for claimed in surplus {
            let op = Op::HandBack { stream: claimed.stream, id: claimed.entry.id };
            shards.entry(claimed.shard).or_default().push(op);
        }
        for (shard, ops) in shards {
            self.commit_batch(&Batch { shard, ops, releasing: true, ..Batch::default() }).await?;
        }
        Ok(())
    }

    /// Who claims from a stream, but for the one that stands for "handed back".
    pub(super) async fn consumers_of(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        let mut command = redis::cmd("XINFO");
        command.arg("CONSUMERS").arg(self.link.keys.key(shard, kind::PLAIN, stream)).arg(GROUP);
        let rows = match self.link.call(shard, &command, Lost::Repeat).await {
            Err(Error::Unavailable(text)) if text.contains("NOGROUP") || text.contains("no such key") => {
                return Ok(Vec::new());
            }
            answer => value::list(answer?).ok_or_else(value::strange)?,
        };
        let consumers = rows.into_iter().map(|row| consumer(row).ok_or_else(value::strange));
        let mut consumers = consumers.collect::<Result<Vec<_>>>()?;
        consumers.retain(|consumer| consumer.name != HANDED_BACK);
        consumers.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(consumers)
    }

    async fn reader(&self, group: &Group<'_>) -> Result<Reader> {
        let shard = group.shard;
        let up = self.link.up(shard, self.link.deadline()).await?;
        let place = self.link.place(shard);
        let free = {
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            // Those of a connection that broke broke with it.
            readers.retain(|reader| reader.place != place || reader.generation == up.generation);
            let fitting = readers.iter().position(|reader| reader.place == place);
            fitting.map(|index| readers.swap_remove(index))
        };
        match free {
            Some(reader) => Ok(Reader { shard, ..reader }),
            None => Reader::open(shard, place, &up).await,
        }
    }
}

/// Reads one row of `XINFO CONSUMERS`.
fn consumer(row: Value) -> Option<Consumer> {
    let (mut name, mut pending, mut idle) = (None, None, None);
    let mut parts = value::list(row)?.into_iter();
    while let (Some(field), Some(found)) = (parts.next(), parts.next()) {
        match value::text(field)?.as_str() {
            "name" => name = value::text(found),
            "pending" => pending = value::int(&found).and_then(|count| u64::try_from(count).ok()),
            "idle" => idle = value::int(&found).and_then(|millis| u64::try_from(millis).ok()),
            _ => {}
        }
    }
    Some(Consumer { name: name?, pending: pending?, idle: Duration::from_millis(idle?) })
}

/// A seat while somebody sits on it.
struct Taken<'a> {
    seats: &'a Seats,
    key: (String, Vec<(Shard, String)>),
    seat: Seat,
}

impl<'a> Taken<'a> {
    fn new(seats: &'a Seats, claim: &Claim) -> Self {
        let key = (claim.consumer.clone(), claim.streams.clone());
        let seat = seats.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        let now = Instant::now();
        let new = || Seat {
            next_look: now,
            lease: claim.lease,
            next_prune: now,
            drained: false,
            lost: false,
            handed_back: 0,
            pause: PAUSES.0,
        };
        Self { seats, key, seat: seat.unwrap_or_else(new) }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).insert(std::mem::take(&mut self.key), self.seat);
    }
}

/// What readers came back with.
#[derive(Default)]
struct Outcome {
    claimed: Vec<Claimed>,
    lost: bool,
    vanished: bool,
    error: Option<Error>,
}

/// Streams that one command can read.
struct Group<'a> {
    shard: Shard,
    /// Shard, name and key of each.
    streams: Vec<(Shard, &'a str, String)>,
}

impl Group<'_> {
    /// Reads the answer of `claim`: now, ms until something is idle, groups made; the entries are added.
    fn read(&self, answer: Value, claimed: &mut Vec<Claimed>) -> Option<(i64, u64, i64)> {
        let mut parts = value::list(answer)?.into_iter();
        let at = value::int(&parts.next()?)?;
        let until_idle = u64::try_from(value::int(&parts.next()?)?).unwrap_or(0);
        let made = value::int(&parts.next()?)?;
        while let Some(position) = parts.next() {
            let position = usize::try_from(value::int(&position)?).ok()?.checked_sub(1)?;
            let (shard, stream, _) = self.streams.get(position)?;
            let id = value::id(&parts.next()?)?;
            let tag = u8::try_from(value::int(&parts.next()?)?).ok()?;
            let payload = value::bytes(parts.next()?)?;
            let deliveries = u32::try_from(value::int(&parts.next()?)?).ok()?;
            let entry = Entry { id, tag, payload };
            claimed.push(Claimed { shard: *shard, stream: (*stream).to_owned(), entry, deliveries });
        }
        Some((at, until_idle, made))
    }
}

/// A connection for blocking reads, one at a time. Dropped in the middle of one, it closes.
#[derive(Debug)]
pub(super) struct Reader {
    shard: Shard,
    place: Place,
    /// Of the shared connection that it was opened beside.
    generation: u64,
    connection: MultiplexedConnection,
    /// Its id for `CLIENT UNBLOCK`.
    id: i64,
}

enum Read {
    Entries(Vec<Claimed>),
    /// The stream or its group is gone.
    Vanished,
    /// The connection is of no use any more. Whether Redis is there, the next look finds out.
    Cut,
    Failed(Error),
}

impl Reader {
    async fn open(shard: Shard, place: Place, up: &Up) -> Result<Self> {
        // By default an answer may take 500 ms, which would end every longer wait with an error.
        let settings = AsyncConnectionConfig::new().set_response_timeout(None);
        let opening = async {
            let mut connection = up.client.get_multiplexed_async_connection_with_config(&settings).await?;
            let id = redis::cmd("CLIENT").arg("ID").query_async(&mut connection).await?;
            Ok(Self { shard, place, generation: up.generation, connection, id })
        };
        match timeout(OVERDUE, opening).await {
            Ok(opened) => opened.map_err(|error: redis::RedisError| Error::Unavailable(error.to_string())),
            Err(_) => Err(Error::Unavailable("redis does not answer".to_owned())),
        }
    }

    async fn read(
        mut self,
        group: &Group<'_>,
        claim: &Claim,
        block: u64,
        replaced: impl Future<Output = ()>,
    ) -> (Self, Read) {
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(GROUP).arg(&claim.consumer).arg("COUNT").arg(claim.limit);
        command.arg("BLOCK").arg(block).arg("STREAMS");
        for (_, _, key) in &group.streams {
            command.arg(key);
        }
        for _ in &group.streams {
            command.arg(">");
        }
        let answer = tokio::select! {
            answer = command.query_async(&mut self.connection) => answer,
            () = sleep(Duration::from_millis(block) + OVERDUE) => return (self, Read::Cut),
            // Or this server is not the one to read from any more.
            () = replaced => return (self, Read::Cut),
        };
        let read = match answer {
            Ok(answer) => match group.read_streams(answer) {
                Some(claimed) => Read::Entries(claimed),
                None => Read::Failed(value::strange()),
            },
            // Also what a master says that became a replica; the next look finds out.
            Err(error) if matches!(error.code(), Some("NOGROUP" | "UNBLOCKED")) => Read::Vanished,
            Err(error) if error.is_io_error() => Read::Cut,
            Err(error) => Read::Failed(Error::Unavailable(error.to_string())),
        };
        (self, read)
    }
}

impl Group<'_> {
    /// Reads the answer of `XREADGROUP`.
    fn read_streams(&self, answer: Value) -> Option<Vec<Claimed>> {
        let mut parts = match answer {
            // RESP3 has a map here, RESP2 a list of pairs.
            Value::Array(pairs) => {
                pairs.into_iter().map(value::list).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect()
            }
            other => value::list(other)?,
        }
        .into_iter();
        let mut claimed = Vec::new();
        while let Some(key) = parts.next() {
            let key = value::text(key)?;
            let (shard, stream, _) = self.streams.iter().find(|(_, _, known)| *known == key)?;
            let entries = value::entries(parts.next()?)?;
            claimed.extend(entries.into_iter().map(|entry| Claimed {
                shard: *shard,
                stream: (*stream).to_owned(),
                entry,
                deliveries: 1,
            }));
        }
        Some(claimed)
    }
}

/// Entries that were handed to callers and showed signs of life since: those that are not lost.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    streams: Mutex<HashMap<(Shard, String), HashMap<EntryId, Instant>>>,
}

impl Arrived {
    fn note(&self, claim: &Claim, claimed: &[Claimed]) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        for one in claimed {
            let entries = streams.entry((one.shard, one.stream.clone())).or_default();
            // They may be acknowledged by other processes, of which nothing is heard here. Without a sign of
            // life they are not ours any more after the lease anyway.
            if entries.len() == entries.capacity() {
                entries.retain(|_, seen| now.duration_since(*seen) < claim.lease);
            }
            entries.insert(one.entry.id, now);
        }
    }

    /// Notes what a heartbeat found.
    pub(super) fn seen(&self, shard: Shard, stream: &str, ids: &[EntryId], owned: &[bool]) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = streams.entry((shard, stream.to_owned())).or_default();
        let now = Instant::now();
        for (id, owned) in ids.iter().zip(owned) {
            if *owned {
                entries.insert(*id, now);
            } else {
                entries.remove(id);
            }
        }
    }

    pub(super) fn forget(&self, shard: Shard, stream: &str, id: EntryId) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entries) = streams.get_mut(&(shard, stream.to_owned())) {
            entries.remove(&id);
        }
    }

    fn contains(&self, shard: Shard, stream: &str, id: EntryId) -> bool {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.get(&(shard, stream.to_owned())).is_some_and(|entries| entries.contains_key(&id))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
