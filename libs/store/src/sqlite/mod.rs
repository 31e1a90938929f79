//! The embedded engine: one SQLite file, one process.
//!
//! One thread writes; it puts all waiting commits into one transaction, so many callers share one `fsync`, and
//! answers after `COMMIT`. Reads use their own connections and see everything that was answered. In memory there
//! is no database: the same logic works on plain maps, in the thread of the caller.

mod claims;
mod codec;
mod data;
mod groups;
mod heap;
mod memory;
mod read;
mod schema;
mod space;
mod sql;
mod statements;
mod transaction;
mod writer;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use rusqlite::{Connection, ErrorCode};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Semaphore, mpsc, oneshot},
    time::Instant,
};

use self::{
    data::Look,
    groups::{Groups, lock},
    memory::Memory,
    schema::Folder,
    space::Space,
    sql::Sql,
    writer::Job,
};
use crate::{
    Batch, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, Error, IndexQuery, Millis, Notices,
    ReadLimit, Record, Result, Shard, clock::Clock, notices::Hub,
};

/// Connections that read a file.
const READERS: usize = 4;

/// Calls that may wait for the writer before callers are slowed down.
const QUEUE: usize = 1024;

/// How to open a [`SqliteEngine`].
#[derive(Clone, Debug)]
pub struct SqliteConfig {
    /// The data folder; made when missing. `None` keeps everything in memory.
    pub path: Option<PathBuf>,
    /// Fixed when the folder is first used.
    pub shards: Shard,
    /// Whether an answered commit survives a power cut (`fsync` for each group of commits). It survives the death
    /// of the process in any case.
    pub durable: bool,
    /// Bytes that the data may take; beyond that the store says [`Error::Full`].
    pub max_size: Option<u64>,
}

impl SqliteConfig {
    /// In memory, for tests and for trying things out.
    #[must_use]
    pub const fn memory(shards: Shard) -> Self {
        Self { path: None, shards, durable: false, max_size: None }
    }

    /// In a folder, losing nothing.
    #[must_use]
    pub fn folder(path: impl Into<PathBuf>, shards: Shard) -> Self {
        Self { path: Some(path.into()), shards, durable: true, max_size: None }
    }
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Somebody else has it.
    #[error("the data folder {} is used by another process; stop that one, or give this one a folder of its own",
        .path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// No place to write.
    #[error("cannot write to the data folder {}: {reason}; create it for this user, or choose another one",
        .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// From the operating system.
        reason: String,
    },
    /// It was set up differently.
    #[error(
        "the number of shards is {stored} in the store, not {wanted}; set shards to {stored}, or start with an empty folder"
    )]
    Shards {
        /// What the store has.
        stored: Shard,
        /// What was asked for.
        wanted: Shard,
    },
    /// Zero shards.
    #[error("a store has at least one shard; set shards to 1 or more")]
    NoShards,
    /// Written by a later release.
    #[error("the store has format {found}, this program knows {known}; run the newer release that wrote it")]
    Newer {
        /// What the store has.
        found: i64,
        /// The newest that is understood.
        known: i64,
    },
    /// Not a database, or a damaged one.
    #[error("the database {} is damaged: {reason}; restore a backup, or move it away to start empty", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// From SQLite.
        reason: String,
    },
    /// Anything else.
    #[error("cannot open the store: {0}")]
    Other(String),
}

impl OpenError {
    fn from_sql(folder: &Path, error: &rusqlite::Error) -> Self {
        let reason = error.to_string();
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                Self::Damaged { path: folder.join(schema::DATABASE), reason }
            }
            Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::DiskFull) => {
                Self::Folder { path: folder.to_owned(), reason }
            }
            _ => Self::Other(reason),
        }
    }
}

/// What the writer and the callers share.
#[derive(Debug)]
struct Shared {
    clock: Clock,
    hub: Hub,
    groups: Groups,
    /// Deliveries that the next transaction writes down. Always empty in memory.
    delivered: Mutex<Vec<Delivered>>,
}

/// How often an entry was handed out.
#[derive(Debug)]
struct Delivered {
    shard: Shard,
    stream: Arc<str>,
    id: EntryId,
    deliveries: u32,
}

/// The embedded engine. Dropping it finishes what is queued and gives the folder free.
pub struct SqliteEngine {
    shards: Shard,
    shared: Arc<Shared>,
    store: Store,
}

enum Store {
    Memory(Box<Mutex<Memory>>),
    File(File),
}

struct File {
    /// `None` only while being dropped.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    readers: Mutex<Vec<Connection>>,
    permits: Semaphore,
    /// Dropped last: the folder is free when nothing touches it any more.
    _folder: Folder,
}

impl fmt::Debug for SqliteEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_memory = matches!(self.store, Store::Memory(_));
        f.debug_struct("SqliteEngine").field("shards", &self.shards).field("in_memory", &in_memory).finish()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.jobs = None;
        // The writer closes last, which folds the log into the database.
        lock(&self.readers).clear();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the writer of the store had panicked");
        }
    }
}

impl SqliteEngine {
    /// Opens or makes a store.
    ///
    /// # Errors
    /// See [`OpenError`]; each one says what to do.
    #[expect(clippy::needless_pass_by_value, reason = "callers are done with it, and it may keep parts one day")]
    pub fn open(config: SqliteConfig) -> Result<Arc<Self>, OpenError> {
        Self::open_with(&config, Clock::new())
    }

    /// A store in memory for simulations: what it does depends on nothing but the calls and their order. Its clock
    /// begins at a fixed moment and goes with tokio's time.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn simulated(shards: Shard) -> Result<Arc<Self>, OpenError> {
        Self::open_with(&SqliteConfig::memory(shards), Clock::simulated())
    }

    fn open_with(config: &SqliteConfig, clock: Clock) -> Result<Arc<Self>, OpenError> {
        if config.shards == 0 {
            return Err(OpenError::NoShards);
        }
        let shared = Arc::new(Shared {
            clock,
            hub: Hub::new(),
            groups: Groups::new(config.shards),
            delivered: Mutex::default(),
        });
        let store = match &config.path {
            None => {
                Store::Memory(Box::new(Mutex::new(Memory::new(Arc::clone(&shared), config.shards, config.max_size))))
            }
            Some(path) => Store::File(File::open(path, config, Arc::clone(&shared))?),
        };
        Ok(Arc::new(Self { shards: config.shards, shared, store }))
    }

    /// Reads. It is a matter of microseconds, so it is done right here.
    async fn looking<T>(&self, read: impl FnOnce(&dyn Look) -> data::Result<T> + Send) -> Result<T> {
        match &self.store {
            Store::Memory(memory) => read(lock(memory).heap()),
            Store::File(file) => {
                let _permit = file.permits.acquire().await.map_err(|_| stopped())?;
                let Some(conn) = lock(&file.readers).pop() else { return Err(stopped()) };
                let result = read(&conn);
                lock(&file.readers).push(conn);
                result
            }
        }
        .map_err(|error| unavailable(&error))
    }

    fn check_shard(&self, shard: Shard) -> Result<()> {
        if shard < self.shards {
            return Ok(());
        }
        Err(Error::Malformed(format!("shard {shard} of {}", self.shards)))
    }
}

impl File {
    fn open(path: &Path, config: &SqliteConfig, shared: Arc<Shared>) -> Result<Self, OpenError> {
        let folder = Folder::open(path)?;
        let failed = |error| OpenError::from_sql(path, &error);
        let conn = schema::open_writer(&folder, config)?;
        // The writer does this again; what could go wrong is said here.
        Sql::new(&conn, config.shards).map_err(failed)?;
        let space = Space::new(&conn, config.max_size, folder.path()).map_err(failed)?;
        let readers = (0..READERS).map(|_| schema::open_reader(&folder)).collect::<rusqlite::Result<Vec<_>>>();
        let readers = Mutex::new(readers.map_err(failed)?);
        let (jobs, queue) = mpsc::channel(QUEUE);
        let shards = config.shards;
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || writer::run(conn, shared, shards, space, queue))
            .map_err(|error| OpenError::Other(error.to_string()))?;
        let permits = Semaphore::new(READERS);
        Ok(Self { jobs: Some(jobs), thread: Some(thread), readers, permits, _folder: folder })
    }

    /// Room for one more job.
    async fn slot(&self) -> Result<mpsc::Permit<'_, Job>> {
        self.jobs.as_ref().ok_or_else(stopped)?.reserve().await.map_err(|_| stopped())
    }
}

/// Runs something long here, while the other tasks of this thread go elsewhere, if they can.
fn off_the_runtime<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

fn stopped() -> Error {
    Error::Unavailable("the store has stopped".to_owned())
}

fn unavailable(error: &rusqlite::Error) -> Error {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Error::Full,
        _ => Error::Unavailable(error.to_string()),
    }
}

#[async_trait::async_trait]
impl Engine for SqliteEngine {
    fn shards(&self) -> Shard {
        self.shards
    }

    fn now(&self) -> Millis {
        self.shared.clock.now()
    }

    async fn commit(&self, batch: Batch) -> Result<Committed> {
        self.check_shard(batch.shard)?;
        transaction::validate(&batch)?;
        match &self.store {
            Store::Memory(memory) => lock(memory).commit(&batch),
            Store::File(file) => {
                let slot = file.slot().await?;
                let (reply, answer) = oneshot::channel();
                slot.send(Job::Commit { batch, reply });
                answer.await.map_err(|_| stopped())?
            }
        }
    }

    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.looking(|look| look.records(shard, keys)).await
    }

    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.looking(|look| look.entries(shard, stream, after, limit)).await
    }

    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.looking(|look| look.last_entries(shard, stream, n)).await
    }

    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.looking(|look| look.index(shard, query)).await
    }

    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        // With a bound it walks over what it counts: too long for a thread that others wait for.
        self.looking(|look| match min {
            None => look.index_count(shard, index, None),
            Some(_) => off_the_runtime(|| look.index_count(shard, index, min)),
        })
        .await
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        self.claim_or_wait(claim).await
    }

    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        Ok(self.touch(shard, stream, consumer, ids))
    }

    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.check_shard(shard)?;
        match &self.store {
            Store::Memory(memory) => lock(memory).tick(shard, streams),
            Store::File(file) => {
                let slot = file.slot().await?;
                let (reply, answer) = oneshot::channel();
                slot.send(Job::Tick { shard, streams: streams.to_vec(), reply: Some(reply) });
                answer.await.map_err(|_| stopped())?
            }
        }
    }

    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.looking(|look| self.depth_of(look, shard, stream)).await
    }

    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.check_shard(shard)?;
        let cell = self.shared.groups.find(shard, stream);
        Ok(cell.map(|cell| cell.lock().consumers(Instant::now())).unwrap_or_default())
    }

    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        Ok(self.shared.hub.listen(shard, topic))
    }
}
