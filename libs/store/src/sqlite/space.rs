//! Room to finish with when there is no room to start.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::Connection;
use tokio::time::Instant;

use super::schema::PAGE;

/// What is kept free for batches that release more than they take.
const RESERVE: u64 = 4 << 20;

/// How long the store stays full without trying again.
const PAUSE: Duration = Duration::from_millis(200);

/// Pages that no limit was set for.
const UNLIMITED: i64 = 0xffff_fffe;

/// Keeps a reserve: a file that takes room on the disk, and pages below the configured size.
#[derive(Debug)]
pub(super) struct Space {
    /// Pages for everybody, when limited.
    pages: Option<i64>,
    reserve: PathBuf,
    /// The reserve is given away.
    spent: bool,
    full_until: Option<Instant>,
}

impl Space {
    pub(super) fn new(conn: &Connection, max_size: Option<u64>, folder: &Path) -> rusqlite::Result<Self> {
        let pages = max_size.map(|bytes| i64::try_from(bytes / PAGE).unwrap_or(UNLIMITED).clamp(1, UNLIMITED));
        let mut space = Self { pages, reserve: folder.join("reserve"), spent: true, full_until: None };
        space.limit(conn, 0)?;
        if !space.refill() {
            tracing::warn!(folder = %folder.display(), "the disk is too full: new work is refused until there is room");
            space.full_until = Some(Instant::now());
        }
        Ok(space)
    }

    /// Whether a batch that takes room is refused without trying.
    pub(super) fn is_full(&mut self, conn: &Connection) -> bool {
        let Some(until) = self.full_until else { return false };
        let now = Instant::now();
        if now < until {
            return true;
        }
        // Others may try when the reserve is there again, or enough is free inside the database.
        self.full_until = if self.refill() || has_free_pages(conn) { None } else { Some(now + PAUSE) };
        self.full_until.is_some()
    }

    /// There was no room.
    pub(super) fn ran_out(&mut self) {
        self.full_until = Some(Instant::now() + PAUSE);
    }

    /// Gives the reserve to one releasing batch; [`Space::close`] afterwards.
    pub(super) fn open(&mut self, conn: &Connection) {
        if !self.spent && fs::remove_file(&self.reserve).is_ok() {
            self.spent = true;
        }
        self.try_limit(conn, i64::try_from(RESERVE / PAGE).unwrap_or(0));
    }

    /// Ends what [`Space::open`] allowed.
    pub(super) fn close(&self, conn: &Connection) {
        self.try_limit(conn, 0);
    }

    fn try_limit(&self, conn: &Connection, extra: i64) {
        if let Err(error) = self.limit(conn, extra) {
            tracing::warn!(%error, "cannot change the size limit of the store");
        }
    }

    fn limit(&self, conn: &Connection, extra: i64) -> rusqlite::Result<()> {
        let Some(pages) = self.pages else { return Ok(()) };
        conn.pragma_update_and_check(None, "max_page_count", pages + extra, |_| Ok(()))
    }

    /// Makes the reserve file again; says whether it is there.
    fn refill(&mut self) -> bool {
        if self.spent {
            self.spent = write_reserve(&self.reserve).is_err();
            if self.spent && fs::remove_file(&self.reserve).is_err() {
                tracing::debug!("no reserve file was made");
            }
        }
        !self.spent
    }
}

fn has_free_pages(conn: &Connection) -> bool {
    let free = conn.pragma_query_value(None, "freelist_count", |row| row.get::<_, i64>(0));
    free.is_ok_and(|free| free.unsigned_abs() * PAGE >= 2 * RESERVE)
}

fn write_reserve(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.len() == RESERVE) {
        return Ok(());
    }
    let mut file = fs::File::create(path)?;
    let zeros = vec![0; 1 << 16];
    for _ in 0..RESERVE >> 16 {
        file.write_all(&zeros)?;
    }
    file.sync_all()
}
