//! The tables, and opening what an earlier process left.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, config::DbConfig};

use super::{OpenError, SqliteConfig};
use crate::Shard;

/// Raised with each change of the tables.
const VERSION: i64 = 1;

/// Name of the database in the data folder.
pub(super) const DATABASE: &str = "store.db";

/// Times and positions are kept as the caller gave them. `meta` precedes `bytes`, so that a look at it does not
/// read a large value. `member` has no type: bounds below and above every text are bound to it (see `read.rs`).
const TABLES: &str = "
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records(shard INTEGER NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL, meta BLOB NOT NULL,
    bytes BLOB NOT NULL, PRIMARY KEY(shard, key)) WITHOUT ROWID;
CREATE TABLE indexes(shard INTEGER NOT NULL, name TEXT NOT NULL, id INTEGER NOT NULL, members INTEGER NOT NULL,
    PRIMARY KEY(shard, name)) WITHOUT ROWID;
CREATE TABLE members(id INTEGER NOT NULL, score INTEGER NOT NULL, member BLOB NOT NULL,
    PRIMARY KEY(id, score, member)) WITHOUT ROWID;
CREATE TABLE streams(shard INTEGER NOT NULL, name TEXT NOT NULL, ms INTEGER NOT NULL, seq INTEGER NOT NULL,
    entries INTEGER NOT NULL, PRIMARY KEY(shard, name)) WITHOUT ROWID;
CREATE TABLE entries(shard INTEGER NOT NULL, stream TEXT NOT NULL, ms INTEGER NOT NULL, seq INTEGER NOT NULL,
    tag INTEGER NOT NULL, deliveries INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY(shard, stream, ms, seq)) WITHOUT ROWID;
CREATE TABLE delayed(shard INTEGER NOT NULL, stream TEXT NOT NULL, id TEXT NOT NULL, due INTEGER NOT NULL,
    tag INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY(shard, stream, id)) WITHOUT ROWID;
CREATE INDEX delayed_by_due ON delayed(shard, stream, due);
CREATE TABLE limits(shard INTEGER NOT NULL, key TEXT NOT NULL, full_at INTEGER NOT NULL,
    PRIMARY KEY(shard, key)) WITHOUT ROWID;
";

/// The data folder, held until this is dropped (or the process dies, however).
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let unusable = |error: std::io::Error| OpenError::Folder { path: path.to_owned(), reason: error.to_string() };
        fs::create_dir_all(path).map_err(unusable)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"));
        let lock = lock.map_err(unusable)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(OpenError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(unusable(error)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn database(&self) -> PathBuf {
        self.path.join(DATABASE)
    }
}

/// Opens the connection that writes.
pub(super) fn open_writer(folder: &Folder, config: &SqliteConfig) -> Result<Connection, OpenError> {
    let failed = |error| OpenError::from_sql(folder.path(), &error);
    let mut conn = Connection::open(folder.database()).map_err(failed)?;
    tune(&conn, -32_768).map_err(failed)?;
    prepare_file(&conn, config.durable).map_err(failed)?;
    migrate(&mut conn, folder, config.shards)?;
    Ok(conn)
}

/// Opens a connection that only reads.
pub(super) fn open_reader(folder: &Folder) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(folder.database(), flags)?;
    tune(&conn, -8192)?;
    Ok(conn)
}

fn tune(conn: &Connection, cache: i64) -> rusqlite::Result<()> {
    conn.set_prepared_statement_cache_capacity(64);
    conn.busy_timeout(Duration::from_secs(5))?;
    // Plans must not depend on what is bound, or statements are compiled again and again.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    conn.pragma_update(None, "temp_store", "MEMORY")?;
    conn.pragma_update(None, "cache_size", cache)
}

fn prepare_file(conn: &Connection, durable: bool) -> rusqlite::Result<()> {
    // Only counts before the first table is made.
    conn.pragma_update(None, "page_size", i64::try_from(PAGE).unwrap_or(4096))?;
    conn.pragma_update(None, "journal_mode", "WAL")?;
    set_sync(conn, durable)?;
    conn.pragma_update(None, "wal_autocheckpoint", 4096)?;
    conn.pragma_update(None, "journal_size_limit", 64_i64 << 20)
}

/// Whether the next transaction is on the disk once it is committed; if not, it is with the next one that is.
pub(super) fn set_sync(conn: &Connection, sync: bool) -> rusqlite::Result<()> {
    conn.pragma_update(None, "synchronous", if sync { "FULL" } else { "NORMAL" })
}

/// Whether [`set_sync`] was last called with `true`.
pub(super) fn syncs(conn: &Connection) -> rusqlite::Result<bool> {
    const FULL: i64 = 2;
    conn.pragma_query_value(None, "synchronous", |row| Ok(row.get::<_, i64>(0)? == FULL))
}

/// Bytes per page.
pub(super) const PAGE: u64 = 4096;

fn migrate(conn: &mut Connection, folder: &Folder, wanted: Shard) -> Result<(), OpenError> {
    let failed = |error| OpenError::from_sql(folder.path(), &error);
    let version: i64 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed)?;
    match version {
        0 => {
            let tx = conn.transaction().map_err(failed)?;
            tx.execute_batch(TABLES).map_err(failed)?;
            tx.execute("INSERT INTO meta VALUES('shards', ?1), ('next_index', 1)", [wanted]).map_err(failed)?;
            tx.pragma_update(None, "user_version", VERSION).map_err(failed)?;
            tx.commit().map_err(failed)
        }
        VERSION => {
            let stored = conn.query_row("SELECT value FROM meta WHERE name = 'shards'", [], |row| row.get(0));
            let stored: Shard = stored.map_err(failed)?;
            if stored == wanted { Ok(()) } else { Err(OpenError::Shards { stored, wanted }) }
        }
        found => Err(OpenError::Newer { found, known: VERSION }),
    }
}
