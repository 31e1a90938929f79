//! The one that writes to the database: groups waiting commits into transactions.

use std::sync::Arc;

use rusqlite::{Connection, params};
use tokio::sync::{mpsc, oneshot};

use super::{
    Shared,
    data::{self, Data},
    groups::lock,
    schema,
    space::Space,
    sql::{Sql, sql},
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
struct Writer<'c> {
    conn: &'c Connection,
    shared: Arc<Shared>,
    transaction: Transaction<Sql<'c>>,
    space: Space,
    until_sweep: u32,
    /// A rollback went wrong half way: what is remembered is not to be trusted.
    stale: bool,
    /// Whether answered commits must be on the disk.
    durable: bool,
    /// Whether the next transaction will be.
    syncing: bool,
}

/// Writes until nobody can ask any more.
pub(super) fn run(conn: Connection, shared: Arc<Shared>, shards: Shard, space: Space, queue: mpsc::Receiver<Job>) {
    match Sql::new(&conn, shards).and_then(|data| Ok((data, schema::syncs(&conn)?))) {
        Ok((data, durable)) => {
            let transaction = Transaction::new(Arc::clone(&shared), data);
            let writer = Writer {
                conn: &conn,
                shared,
                transaction,
                space,
                until_sweep: SWEEP,
                stale: false,
                durable,
                syncing: durable,
            };
            writer.run(queue);
        }
        // Everybody gets "the store has stopped".
        Err(error) => tracing::error!(%error, "the store cannot be read"),
    }
    if let Err((_, error)) = conn.close() {
        tracing::warn!(%error, "the store was not closed properly");
    }
}

impl<'c> Writer<'c> {
    fn run(mut self, mut queue: mpsc::Receiver<Job>) {
        let mut jobs = Vec::with_capacity(GROUP);
        while queue.blocking_recv_many(&mut jobs, GROUP) > 0 {
            self.group(&mut jobs);
        }
    }

    /// All jobs in one transaction. If that fails, each one in its own: who is at fault fails alone.
    fn group(&mut self, jobs: &mut Vec<Job>) {
        let full = self.space.is_full(self.conn);
        let sync = jobs.iter().any(|job| matches!(job, Job::Commit { batch, .. } if !batch.deferred));
        let together = self.transact(sync, |transaction| {
            jobs.iter().map(|job| attempt(transaction, job, full)).collect::<Result<Vec<_>, _>>()
        });
        let done = together.unwrap_or_else(|error| {
            tracing::debug!(%error, jobs = jobs.len(), "a group of commits failed, now one by one");
            jobs.iter().map(|job| self.alone(job)).collect()
        });
        for (job, done) in jobs.drain(..).zip(done) {
            // Whoever asked may be gone.
            match (job, done) {
                (Job::Commit { reply, .. }, Done::Commit(result)) => drop(reply.send(result)),
                (Job::Tick { reply: Some(reply), .. }, Done::Tick(result)) => drop(reply.send(result)),
                (Job::Tick { shard, streams, reply: None }, Done::Tick(Err(_))) => self.tick_later(shard, &streams),
                _ => {}
            }
        }
        self.transaction.data.trim();
        self.sweep();
    }

    fn alone(&mut self, job: &Job) -> Done {
        match job {
            Job::Commit { batch, .. } => Done::Commit(self.commit_alone(batch)),
            Job::Tick { shard, streams, .. } => {
                Done::Tick(self.transact(false, |transaction| Ok(tick(transaction, *shard, streams)?)))
            }
            Job::WriteDown => Done::WriteDown,
        }
    }

    fn commit_alone(&mut self, batch: &Batch) -> Result<Committed> {
        if !batch.releasing && self.space.is_full(self.conn) {
            return Err(Error::Full);
        }
        let mut result = self.transact(!batch.deferred, |transaction| commit(transaction, batch));
        if matches!(result, Err(Error::Full)) {
            self.space.ran_out();
            if batch.releasing {
                self.space.open(self.conn);
                result = self.transact(!batch.deferred, |transaction| commit(transaction, batch));
                self.space.close(self.conn);
            }
        }
        result?
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

    /// Does the work in one transaction, which is on the disk when this returns if `sync`.
    fn transact<T>(
        &mut self,
        sync: bool,
        work: impl FnOnce(&mut Transaction<Sql<'c>>) -> Result<T, Fail>,
    ) -> Result<T> {
        match self.try_transact(sync, work) {
            Ok(result) => {
                self.transaction.committed();
                Ok(result)
            }
            Err(fail) => {
                self.roll_back();
                match fail {
                    Fail::Refused(error) | Fail::Broken(error) => Err(error),
                }
            }
        }
    }

    fn try_transact<T>(
        &mut self,
        sync: bool,
        work: impl FnOnce(&mut Transaction<Sql<'c>>) -> Result<T, Fail>,
    ) -> Result<T, Fail> {
        let sync = sync && self.durable;
        if sync != self.syncing {
            schema::set_sync(self.conn, sync)?;
            self.syncing = sync;
        }
        if self.stale {
            self.transaction.data.rolled_back(self.conn)?;
            self.stale = false;
        }
        self.transaction.data.statements.begin.execute([])?;
        self.write_deliveries()?;
        let result = work(&mut self.transaction)?;
        self.transaction.data.flush()?;
        self.transaction.data.statements.commit.execute([])?;
        Ok(result)
    }

    fn roll_back(&mut self) {
        // SQLite has done so by itself after some errors.
        if !self.conn.is_autocommit()
            && let Err(error) = self.conn.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "cannot roll back");
        }
        self.transaction.rolled_back();
        self.stale = self.transaction.data.rolled_back(self.conn).is_err();
    }

    /// A rollback loses these; they are then one too low at worst, after a crash.
    fn write_deliveries(&mut self) -> data::Result<()> {
        let delivered = std::mem::take(&mut *lock(&self.shared.delivered));
        let update = &mut self.transaction.data.statements.put_deliveries;
        for one in delivered {
            update.execute(params![one.shard, one.stream, sql(one.id.0), sql(one.id.1), one.deliveries])?;
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
        if let Err(error) = self.transact(false, |transaction| Ok(transaction.data.sweep_limits(now)?)) {
            tracing::warn!(%error, "cannot sweep limits");
        }
    }
}

fn attempt(transaction: &mut Transaction<Sql<'_>>, job: &Job, full: bool) -> Result<Done, Fail> {
    Ok(match job {
        Job::Commit { batch, .. } if full && !batch.releasing => Done::Commit(Err(Error::Full)),
        Job::Commit { batch, .. } => Done::Commit(commit(transaction, batch)?),
        Job::Tick { shard, streams, .. } => Done::Tick(Ok(tick(transaction, *shard, streams)?)),
        Job::WriteDown => Done::WriteDown,
    })
}

/// A refused batch leaves the transaction as it was: others go on in it.
fn commit(transaction: &mut Transaction<Sql<'_>>, batch: &Batch) -> Result<Result<Committed>, Fail> {
    match transaction.apply(batch) {
        Ok(committed) => Ok(Ok(committed)),
        Err(Fail::Refused(error)) => Ok(Err(error)),
        Err(broken) => Err(broken),
    }
}

fn tick(transaction: &mut Transaction<Sql<'_>>, shard: Shard, streams: &[String]) -> data::Result<u64> {
    streams.iter().map(|stream| transaction.tick(shard, stream)).sum()
}
