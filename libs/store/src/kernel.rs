//! The contract that every engine keeps, and that one suite checks on all of them.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use bytes::Bytes;
use tokio::sync::{broadcast, watch};

/// One of the parts that keys are spread over. All keys of a [`Batch`] live in one shard.
pub type Shard = u16;

/// Milliseconds since the Unix epoch, by the store's clock.
pub type Millis = i64;

/// Names one commit, so that a repeat of it is recognised. Made by the caller before the first try.
pub type CommitId = [u8; 16];

/// Result of a kernel call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a kernel call did nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A check of the batch failed; nothing was written.
    #[error("check {} failed: {reason:?}", .check)]
    Conflict {
        /// Index into [`Batch::checks`].
        check: usize,
        /// What was found instead.
        reason: Conflict,
    },
    /// The store has no room for more; releasing batches still pass.
    #[error("the store is full")]
    Full,
    /// The store cannot be reached, or gave up; the commit may or may not have happened.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The batch is malformed: a bug of the caller. Nothing was written.
    #[error("malformed batch: {0}")]
    Malformed(String),
}

impl Error {
    /// Whether the same call may succeed later, unchanged.
    #[must_use]
    pub const fn retryable(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Full)
    }
}

/// What a failed [`Check`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// The record has this version instead; `None` = it does not exist.
    Version(Option<u64>),
    /// The entry is not pending for that consumer (any more).
    NotPending,
    /// The newest entry of the stream is this one instead.
    Tail(EntryId),
    /// The stream has this many entries already.
    TooLong(u64),
    /// The limit has no room for this long.
    Limited(Duration),
}

/// Position of an entry in its stream: `<ms>-<seq>`, as in Redis Streams. Ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64, pub u64);

impl EntryId {
    /// Before every entry.
    pub const ZERO: Self = Self(0, 0);

    /// The id of the n-th entry of a stream whose entries are numbered by the caller ([`At::Number`]).
    #[must_use]
    pub const fn number(n: u64) -> Self {
        Self(n, 0)
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

impl FromStr for EntryId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = || Error::Malformed(format!("entry id {text:?}"));
        let (ms, seq) = text.split_once('-').ok_or_else(malformed)?;
        Ok(Self(ms.parse().map_err(|_| malformed())?, seq.parse().map_err(|_| malformed())?))
    }
}

/// A record as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Counts the writes of this key, from 1. Starts again after a delete.
    pub version: u64,
    /// The value.
    pub bytes: Bytes,
    /// Entry ids that [`Op::Append`] wrote into this record.
    pub refs: BTreeMap<String, EntryId>,
}

/// An entry of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its position.
    pub id: EntryId,
    /// A mark of the caller, readable without decoding the payload.
    pub tag: u8,
    /// The value.
    pub payload: Bytes,
}

/// Changes that happen together or not at all, in one shard.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Where all keys of this batch live.
    pub shard: Shard,
    /// Identity of this commit, kept in the lead record (which the batch must [`Op::Put`]). When the lead
    /// record already carries this id, nothing is checked or written, and the first result comes back.
    pub commit: Option<(String, CommitId)>,
    /// All must hold; they are evaluated in order, before any operation.
    pub checks: Vec<Check>,
    /// Applied in order.
    pub ops: Vec<Op>,
    /// This batch frees more than it takes: it passes when the store is full.
    pub releasing: bool,
    /// Nobody outside is told of this batch before a later one, so it need not be on the disk by itself: if the
    /// machine loses power, it may be undone together with what came after it. The death of a process never undoes
    /// it. Engines may ignore this.
    pub deferred: bool,
}

/// A condition of a [`Batch`].
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// The record is at exactly this version.
    Version {
        /// The record.
        key: String,
        /// The version that the caller read.
        version: u64,
    },
    /// No such record.
    Absent {
        /// The record.
        key: String,
    },
    /// The entry was claimed by this consumer and not taken away since.
    Pending {
        /// The work stream.
        stream: String,
        /// The claimed entry.
        id: EntryId,
        /// Who claimed it.
        consumer: String,
    },
    /// The newest entry of the stream is this one ([`EntryId::ZERO`] = it never had one, or was dropped). Removing
    /// an entry does not change this: its number stays used.
    Tail {
        /// The stream.
        stream: String,
        /// Its newest entry.
        id: EntryId,
    },
    /// The stream has fewer entries than this, claimed ones included.
    ShorterThan {
        /// The stream.
        stream: String,
        /// The bound.
        len: u64,
    },
    /// The limit has room for one more, which the commit takes.
    Limit {
        /// Name of the limit.
        key: String,
        /// Its size.
        rate: Rate,
    },
}

impl Check {
    /// The record is still as it was read: at this version, or absent.
    #[must_use]
    pub fn unchanged(key: impl Into<String>, version: Option<u64>) -> Self {
        let key = key.into();
        match version {
            Some(version) => Self::Version { key, version },
            None => Self::Absent { key },
        }
    }
}

/// A GCRA limit: `burst` at once, then one per `interval`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How many at once.
    pub burst: u32,
    /// Time in which one more becomes free.
    pub interval: Duration,
}

/// Which id an appended entry gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The store's next one. Work streams use this.
    Next,
    /// `<n>-0`, for streams that their writer numbers (logs). Must be above the newest; check [`Check::Tail`].
    Number(u64),
}

/// One change of a [`Batch`].
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes a record and raises its version; refs are kept.
    Put {
        /// The record.
        key: String,
        /// Its new value.
        bytes: Bytes,
    },
    /// Deletes a record, if there.
    Delete {
        /// The record.
        key: String,
    },
    /// Moves a member of an ordered index. The caller says what was there: engines need not look. Indexes whose names
    /// are equal up to a `/` are kept together where that makes it cheaper to change several of them in one batch.
    Index {
        /// The index.
        index: String,
        /// The member; unique in the index.
        member: String,
        /// Its score until now; `None` = not in the index.
        was: Option<i64>,
        /// Its score from now on; `None` = taken out.
        now: Option<i64>,
    },
    /// Appends an entry.
    Append {
        /// The stream.
        stream: String,
        /// Its id.
        at: At,
        /// See [`Entry::tag`].
        tag: u8,
        /// The value.
        payload: Bytes,
        /// Record and ref name that the new id is written to. The record must exist when this op is applied.
        into: Option<(String, String)>,
    },
    /// Appends an entry later: it joins the stream when due (see [`Engine::tick`]).
    Delay {
        /// The work stream that it joins.
        stream: String,
        /// Identifies it among the delayed entries of the stream; the same id replaces.
        id: String,
        /// When.
        due: Millis,
        /// See [`Entry::tag`].
        tag: u8,
        /// The value.
        payload: Bytes,
    },
    /// Takes a delayed entry back, if there.
    Undelay {
        /// The work stream.
        stream: String,
        /// See [`Op::Delay`].
        id: String,
    },
    /// Acknowledges a claimed entry and deletes it. No error when it is gone: check [`Check::Pending`] for that.
    /// Nothing happens to an entry that was not handed out.
    Ack {
        /// The work stream.
        stream: String,
        /// The entry.
        id: EntryId,
    },
    /// Gives a claimed entry back unhandled: it is claimable at once, before younger ones. Nothing happens when
    /// it is not pending.
    HandBack {
        /// The work stream.
        stream: String,
        /// The entry.
        id: EntryId,
    },
    /// Moves a claimed entry to the stream `dead` of the shard, as a [`DeadEntry`](crate::worker::DeadEntry).
    /// Nothing happens when it is gone or was not handed out.
    Bury {
        /// The work stream.
        stream: String,
        /// The entry.
        id: EntryId,
        /// For the operator.
        reason: String,
    },
    /// Removes one entry of a stream that nobody claims from, such as `dead`.
    Remove {
        /// The stream.
        stream: String,
        /// The entry.
        id: EntryId,
    },
    /// Deletes a stream that nobody claims from, with all entries.
    Drop {
        /// The stream.
        stream: String,
    },
    /// Tells listeners of the topic, once the commit is done. May get lost.
    Notify {
        /// See [`Engine::listen`].
        topic: String,
        /// A short text.
        payload: String,
    },
}

/// What a commit wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// The new version for each [`Op::Put`], in order.
    pub versions: Vec<u64>,
    /// The id for each [`Op::Append`], in order.
    pub entries: Vec<EntryId>,
    /// When, by the store's clock.
    pub at: Millis,
}

/// How much a read may return. At least one entry is returned when there is one.
#[derive(Clone, Copy, Debug)]
pub struct ReadLimit {
    /// Entries at most.
    pub entries: usize,
    /// Payload bytes at most.
    pub bytes: usize,
}

/// Direction of an index read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Lowest (score, member) first.
    Ascending,
    /// Highest (score, member) first.
    Descending,
}

/// A page of an index.
#[derive(Clone, Debug)]
pub struct IndexQuery {
    /// The index.
    pub index: String,
    /// Direction.
    pub order: Order,
    /// Continue strictly after this (score, member), in that direction.
    pub after: Option<(i64, String)>,
    /// Only scores ≥ this.
    pub min: Option<i64>,
    /// Only scores ≤ this.
    pub max: Option<i64>,
    /// Members at most.
    pub limit: usize,
}

/// A request for work.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Work streams, in order of preference.
    pub streams: Vec<(Shard, String)>,
    /// Who asks. Unique per process.
    pub consumer: String,
    /// Entries at most.
    pub limit: usize,
    /// Entries of other consumers that showed no sign of life for this long are taken over.
    pub lease: Duration,
    /// How long to wait when there is nothing.
    pub wait: Duration,
}

/// Work that a consumer now owns, until it is acknowledged, handed back, buried, or its lease ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// Where its stream lives.
    pub shard: Shard,
    /// Its stream.
    pub stream: String,
    /// The entry itself.
    pub entry: Entry,
    /// How often it was handed out, this time included, and those after which it was handed back.
    pub deliveries: u32,
}

/// State of a work stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Entries that nobody has claimed.
    pub waiting: u64,
    /// Entries that a consumer owns.
    pub pending: u64,
    /// Entries that are not due yet.
    pub delayed: u64,
    /// When the oldest unclaimed entry was appended.
    pub oldest: Option<Millis>,
}

/// Somebody who claims from a work stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consumer {
    /// As given in [`Claim::consumer`].
    pub name: String,
    /// Entries of the stream that it owns.
    pub pending: u64,
    /// Time since it last claimed, or showed another sign of life. A consumer that claims again and
    /// again, and finds nothing, is silent for as long as its lease at most.
    pub idle: Duration,
}

/// A hint that something changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// As given to [`Op::Notify`].
    pub payload: String,
}

/// Notices of one topic, from the moment of [`Engine::listen`] on. Bounded: a slow listener loses the oldest.
#[derive(Debug)]
pub struct Notices {
    receiver: broadcast::Receiver<Notice>,
    /// Changes when notices of any topic may have been lost on their way to this process.
    losses: Option<watch::Receiver<u64>>,
}

impl Notices {
    /// Wraps the receiving half that an engine's hub hands out.
    #[must_use]
    pub const fn new(receiver: broadcast::Receiver<Notice>) -> Self {
        Self { receiver, losses: None }
    }

    /// Also says "look again" whenever `losses` changes: for engines whose notices come from elsewhere.
    #[must_use]
    pub fn with_losses(self, losses: watch::Receiver<u64>) -> Self {
        Self { losses: Some(losses), ..self }
    }

    /// Changes when notices may have been lost outside of this process: the connection to the store broke, and
    /// behind it may be another server now, which does not know what this one was told last.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.losses.as_ref().map_or(0, |losses| *losses.borrow())
    }

    /// The next notice; `None` means that some may have been lost: look again. Cancel-safe. Never ends while
    /// the engine lives; after that it is pending for ever.
    pub async fn recv(&mut self) -> Option<Notice> {
        let lost = async {
            // Without a sender there is no engine any more, and nothing to be told.
            let told = match &mut self.losses {
                Some(losses) => losses.changed().await.is_ok(),
                None => false,
            };
            if !told {
                std::future::pending().await
            }
        };
        let received = tokio::select! {
            biased;
            () = lost => return None,
            received = self.receiver.recv() => received,
        };
        match received {
            Ok(notice) => Some(notice),
            Err(broadcast::error::RecvError::Lagged(_)) => None,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// A store. Every method may be called from any task at any time, and repeated after a lost reply.
#[async_trait::async_trait]
pub trait Engine: fmt::Debug + Send + Sync + 'static {
    /// How many shards the store was installed with.
    fn shards(&self) -> Shard;

    /// The store's clock, as well as it is known here.
    fn now(&self) -> Millis;

    /// Applies a batch entirely, or not at all.
    ///
    /// # Errors
    /// See [`Error`].
    async fn commit(&self, batch: Batch) -> Result<Committed>;

    /// Reads records of one shard, in the order asked for.
    ///
    /// # Errors
    /// Only [`Error::Unavailable`], as with all reads.
    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>>;

    /// Reads a stream forward, strictly after an id.
    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>>;

    /// Reads the newest `n` entries of a stream, oldest of them first.
    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>>;

    /// Reads a page of an index.
    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>>;

    /// Counts the members of an index with a score ≥ `min`. Without `min` it costs nearly the same for any size.
    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64>;

    /// Waits for work and takes it. Cancel-safe: what was taken and not returned comes back after its lease, or
    /// sooner when the engine can tell.
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>>;

    /// Shows a sign of life for claimed entries; says for each whether it is still owned.
    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>>;

    /// Moves due delayed entries into the streams, in bounded steps; says how many.
    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64>;

    /// State of a work stream.
    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth>;

    /// Who claims from a work stream, by name. Who owns nothing and shows no sign of life is forgotten after an hour
    /// or more; who owns something never is.
    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>>;

    /// Listens to a topic of one shard.
    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices>;
}
