//! The one that writes: groups waiting commits into transactions.

use std::sync::Arc;

use rusqlite::{Connection, params};
use tokio::sync::{mpsc, oneshot};

use super::{
    Shared,
    cache::{Cache, sql},
    groups::lock,
    space::Space,
    transaction::{Fail, Transaction},
};
use crate::{Batch, Committed, Error, Result, Shard};

/// Commits per transaction.
const GROUP: usize = 256;

/// Transactions between two looks for limits that are full again.
const SWEEP: u32 = 4096;

/// What callers ask of the writer.
#[derive(Debug)]
pub(super) enum Job {
    Commit {
        batch: Batch,
        reply: oneshot::Sender<Result<Committed>>,
    },
    Tick {
        shard: Shard,
        streams: Vec<String>,
        reply: Option<oneshot::Sender<Result<u64>>>,
    },
    /// Only to have the deliveries written.
    WriteDown,
}

/// What a job brought.
enum Done {
    Commit(Result<Committed>),
    Tick(Result<u64>),
    WriteDown,
}

#[derive(Debug)]
pub(super) struct Writer {
    conn: Connection,
    shared: Arc<Shared>,
    transaction: Transaction,
    space: Space,
    until_sweep: u32,
}

impl Writer {
    pub(super) fn new(conn: Connection, shared: Arc<Shared>, shards: Shard, space: Space) -> rusqlite::Result<Self> {
        let cache = Cache::new(&conn, shards)?;
        let transaction = Transaction::new(Arc::clone(&shared), cache);
        Ok(Self { conn, shared, transaction, space, until_sweep: SWEEP })
    }

    /// For reads in memory.
    pub(super) const fn connection(&self) -> &Connection {
        &self.conn
    }

    /// Writes until nobody can ask any more.
    pub(super) fn run(mut self, mut queue: mpsc::Receiver<Job>) {
        let mut jobs = Vec::with_capacity(GROUP);
        while queue.blocking_recv_many(&mut jobs, GROUP) > 0 {
            self.group(jobs.drain(..).collect());
        }
        if let Err(error) = self.conn.close() {
            tracing::warn!(error = %error.1, "the store was not closed properly");
        }
    }

    /// One batch in a transaction of its own.
    pub(super) fn commit_one(&mut self, batch: &Batch) -> Result<Committed> {
        if !batch.releasing && self.space.is_full() {
            return Err(Error::Full);
        }
        let mut result = self.transact(|transaction, conn| commit(transaction, conn, batch));
        if matches!(result, Err(Error::Full)) {
            self.space.ran_out();
            if batch.releasing {
                self.space.open(&self.conn);
                result = self.transact(|transaction, conn| commit(transaction, conn, batch));
                self.space.close(&self.conn);
            }
        }
        result?
    }

    /// One step of [`Engine::tick`](crate::Engine::tick).
    pub(super) fn tick_one(&mut self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.transact(|transaction, conn| tick(transaction, conn, shard, streams))
    }

    /// All jobs in one transaction. If that fails, each one in its own: who is at fault fails alone.
    fn group(&mut self, jobs: Vec<Job>) {
        let full = self.space.is_full();
        let done = match self.transact(|transaction, conn| {
            jobs.iter().map(|job| attempt(transaction, conn, job, full)).collect::<Result<Vec<_>, _>>()
        }) {
            Ok(done) => done,
            Err(error) => {
                tracing::debug!(%error, jobs = jobs.len(), "a group of commits failed, now one by one");
                jobs.iter().map(|job| self.alone(job)).collect()
            }
        };
        for (job, done) in jobs.into_iter().zip(done) {
            // Whoever asked may be gone.
            match (job, done) {
                (Job::Commit { reply, .. }, Done::Commit(result)) => drop(reply.send(result)),
                (Job::Tick { reply: Some(reply), .. }, Done::Tick(result)) => drop(reply.send(result)),
                (Job::Tick { shard, streams, reply: None }, Done::Tick(Err(_))) => self.tick_later(shard, &streams),
                _ => {}
            }
        }
        self.sweep();
    }

    fn alone(&mut self, job: &Job) -> Done {
        match job {
            Job::Commit { batch, .. } => Done::Commit(self.commit_one(batch)),
            Job::Tick { shard, streams, .. } => Done::Tick(self.tick_one(*shard, streams)),
            Job::WriteDown => Done::WriteDown,
        }
    }

    /// The claimant who asked for this does not wait for it, and nobody else would ask again.
    fn tick_later(&self, shard: Shard, streams: &[String]) {
        for stream in streams {
            if let Some(cell) = self.shared.groups.find(shard, stream) {
                cell.lock().set_due(Some(self.shared.clock.now() + 1000));
                cell.wake.notify_waiters();
            }
        }
    }

    fn transact<T>(&mut self, work: impl FnOnce(&mut Transaction, &Connection) -> Result<T, Fail>) -> Result<T> {
        match self.try_transact(work) {
            Ok(result) => {
                self.transaction.committed();
                Ok(result)
            }
            Err(fail) => {
                if !self.conn.is_autocommit()
                    && let Err(error) = self.conn.execute_batch("ROLLBACK")
                {
                    tracing::error!(%error, "cannot roll back");
                }
                self.transaction.rolled_back();
                match fail {
                    Fail::Refused(error) | Fail::Broken(error) => Err(error),
                }
            }
        }
    }

    fn try_transact<T>(
        &mut self,
        work: impl FnOnce(&mut Transaction, &Connection) -> Result<T, Fail>,
    ) -> Result<T, Fail> {
        if !self.conn.is_autocommit() {
            // A panic in the middle of the last one, in memory: what it wrote is not wanted.
            self.conn.execute_batch("ROLLBACK")?;
            self.transaction.rolled_back();
        }
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        self.write_deliveries()?;
        let result = work(&mut self.transaction, &self.conn)?;
        self.transaction.cache.flush(&self.conn)?;
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(result)
    }

    /// A rollback loses these; they are then one too low at worst, after a crash.
    fn write_deliveries(&self) -> rusqlite::Result<()> {
        let delivered = std::mem::take(&mut *lock(&self.shared.delivered));
        for one in delivered {
            self.conn
                .prepare_cached(
                    "UPDATE entries SET deliveries = ?5 WHERE shard = ?1 AND stream = ?2 AND ms = ?3 AND seq = ?4",
                )?
                .execute(params![one.shard, one.stream, sql(one.id.0), sql(one.id.1), one.deliveries])?;
        }
        Ok(())
    }

    /// Forgets limits that have all their room again: they are as good as never used.
    fn sweep(&mut self) {
        self.until_sweep -= 1;
        if self.until_sweep > 0 {
            return;
        }
        self.until_sweep = SWEEP;
        let now = self.shared.clock.micros();
        let swept = self.transact(|_, conn| {
            conn.prepare_cached("DELETE FROM limits WHERE full_at < ?1")?.execute([now]).map_err(Fail::from)
        });
        if let Err(error) = swept {
            tracing::warn!(%error, "cannot sweep limits");
        }
    }
}

fn attempt(transaction: &mut Transaction, conn: &Connection, job: &Job, full: bool) -> Result<Done, Fail> {
    Ok(match job {
        Job::Commit { batch, .. } if full && !batch.releasing => Done::Commit(Err(Error::Full)),
        Job::Commit { batch, .. } => Done::Commit(commit(transaction, conn, batch)?),
        Job::Tick { shard, streams, .. } => Done::Tick(Ok(tick(transaction, conn, *shard, streams)?)),
        Job::WriteDown => Done::WriteDown,
    })
}

/// A refused batch leaves the transaction as it was: others go on in it.
fn commit(transaction: &mut Transaction, conn: &Connection, batch: &Batch) -> Result<Result<Committed>, Fail> {
    match transaction.apply(conn, batch) {
        Ok(committed) => Ok(Ok(committed)),
        Err(Fail::Refused(error)) => Ok(Err(error)),
        Err(broken) => Err(broken),
    }
}

fn tick(transaction: &mut Transaction, conn: &Connection, shard: Shard, streams: &[String]) -> Result<u64, Fail> {
    let mut moved = 0;
    for stream in streams {
        moved += transaction.tick(conn, shard, stream)?;
    }
    Ok(moved)
}
