//! The engine without a database: the callers write themselves, one at a time.

use std::sync::Arc;

use super::{
    Shared,
    heap::Heap,
    transaction::{Fail, Transaction},
};
use crate::{Batch, Committed, Error, Result, Shard};

/// Commits between two looks for limits that are full again.
const SWEEP: u32 = 65_536;

#[derive(Debug)]
pub(super) struct Memory {
    shared: Arc<Shared>,
    transaction: Transaction<Heap>,
    max_size: u64,
    until_sweep: u32,
}

impl Memory {
    pub(super) fn new(shared: Arc<Shared>, shards: Shard, max_size: Option<u64>) -> Self {
        let transaction = Transaction::new(Arc::clone(&shared), Heap::new(shards));
        Self { shared, transaction, max_size: max_size.unwrap_or(u64::MAX), until_sweep: SWEEP }
    }

    pub(super) const fn heap(&self) -> &Heap {
        &self.transaction.data
    }

    pub(super) fn commit(&mut self, batch: &Batch) -> Result<Committed> {
        if !batch.releasing && self.heap().size >= self.max_size {
            return Err(Error::Full);
        }
        self.until_sweep -= 1;
        if self.until_sweep == 0 {
            self.until_sweep = SWEEP;
            let now = self.shared.clock.micros();
            self.transact(|transaction| Ok(crate::sqlite::data::Data::sweep_limits(&mut transaction.data, now)?))?;
        }
        self.transact(|transaction| transaction.apply(batch))
    }

    pub(super) fn tick(&mut self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.transact(|transaction| {
            let moved = streams.iter().map(|stream| transaction.tick(shard, stream));
            Ok(moved.sum::<super::data::Result<u64>>()?)
        })
    }

    fn transact<T>(&mut self, work: impl FnOnce(&mut Transaction<Heap>) -> Result<T, Fail>) -> Result<T> {
        match work(&mut self.transaction) {
            Ok(result) => {
                self.transaction.committed();
                Ok(result)
            }
            // Maps do not fail, so whatever failed did so before the first change.
            Err(Fail::Refused(error) | Fail::Broken(error)) => {
                self.transaction.rolled_back();
                Err(error)
            }
        }
    }
}
