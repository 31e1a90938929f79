//! The real engine behind the gates: what goes wrong on the way there and back, and what is missing when a guard is
//! taken away.

use std::sync::Arc;

use prost::Message as _;
use rialto_a2a::v1::TaskState;
use rialto_store::{
    Batch, Check, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, Error, IndexQuery, Millis,
    Notices, Op, ReadLimit, Record, Result, Shard,
};

use crate::{
    ledger::short,
    sim::{Actor, Fate, Kind, Mutant, Sim},
    stored::Head,
};

/// One actor's way to the engine.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) who: Actor,
    pub(crate) sim: Arc<Sim>,
    pub(crate) engine: Arc<dyn Engine>,
}

fn away() -> Error {
    Error::Unavailable("the answer is lost".into())
}

/// Whether a check or an operation is about the record of a context.
fn is_context(key: &str) -> bool {
    key.starts_with("c:")
}

impl Door {
    /// Does what a batch says, and writes down what came of it.
    async fn apply(&self, batch: &Batch) -> Result<Committed> {
        let written = self.without_guard(batch);
        let mut committed = self.engine.commit(written.clone()).await;
        match &mut committed {
            Ok(committed) => {
                if let Err(broken) = self.sim.ledger().committed(&written, committed) {
                    self.sim.violated(broken);
                }
                if self.sim.mutant == Some(Mutant::ContextQueue) {
                    let puts = batch.ops.iter().filter_map(|op| match op {
                        Op::Put { key, .. } => Some(key),
                        _ => None,
                    });
                    for (n, _) in puts.enumerate().filter(|(_, key)| is_context(key)) {
                        committed.versions.insert(n, 1);
                    }
                }
            }
            Err(error) => self.sim.note(|| format!("    {error}")),
        }
        committed
    }

    /// What reaches the engine of a batch.
    fn without_guard(&self, batch: &Batch) -> Batch {
        let mut batch = batch.clone();
        match self.sim.mutant {
            Some(Mutant::Pending) => batch.checks.retain(|check| !matches!(check, Check::Pending { .. })),
            Some(Mutant::CommitId) => batch.commit = None,
            Some(Mutant::ContextQueue) => {
                batch.checks.retain(|check| match check {
                    Check::Version { key, .. } | Check::Absent { key } => !is_context(key),
                    _ => true,
                });
                batch.ops.retain(|op| !matches!(op, Op::Put { key, .. } if is_context(key)));
            }
            _ => {}
        }
        batch
    }

    /// What a reader sees of a record.
    fn seen(&self, key: &str, record: Record) -> Option<Record> {
        match self.sim.mutant {
            Some(Mutant::ContextQueue) if is_context(key) => None,
            Some(Mutant::TerminalGuard) if key.starts_with("t:") => {
                let mut head = Head::decode(record.bytes.clone()).expect("a head");
                let status = head.status.as_mut().expect("a status");
                if status.state().is_terminal() {
                    status.set_state(TaskState::Working);
                }
                Some(Record { bytes: head.encode_to_vec().into(), ..record })
            }
            _ => Some(record),
        }
    }

    async fn read_gate(&self, what: impl FnOnce() -> String) -> Result<()> {
        match self.sim.gate(self.who, Kind::Read, what).await {
            Fate::Pass => Ok(()),
            _ => Err(away()),
        }
    }
}

#[tonic::async_trait]
impl Engine for Door {
    fn shards(&self) -> Shard {
        self.engine.shards()
    }

    fn now(&self) -> Millis {
        self.engine.now()
    }

    async fn commit(&self, batch: Batch) -> Result<Committed> {
        let kind = Kind::Commit { id: batch.commit.is_some() };
        match self.sim.gate(self.who, kind, || format!("commits {}", short(&batch))).await {
            Fate::Pass => self.apply(&batch).await,
            Fate::Refuse => Err(away()),
            Fate::Forget => {
                // Whatever it was.
                drop(self.apply(&batch).await);
                Err(away())
            }
            Fate::Twice => {
                let first = self.apply(&batch).await;
                let again = self.engine.commit(self.without_guard(&batch)).await;
                let entries = |result: &Result<Committed>| result.as_ref().ok().map(|it| it.entries.clone());
                if first.is_ok() && entries(&first) != entries(&again) {
                    self.sim.violated("a repeated commit had another result".to_owned());
                }
                first.and(again)
            }
        }
    }

    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.read_gate(|| format!("gets {}", keys.join(", "))).await?;
        let records = self.engine.get(shard, keys).await?;
        Ok(records.into_iter().zip(keys).map(|(record, key)| self.seen(key, record?)).collect())
    }

    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.read_gate(|| format!("reads {stream} after {after}")).await?;
        self.engine.read(shard, stream, after, limit).await
    }

    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.read_gate(|| format!("reads the end of {stream}")).await?;
        self.engine.read_last(shard, stream, n).await
    }

    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.read_gate(|| format!("looks at the index {}", query.index)).await?;
        self.engine.index(shard, query).await
    }

    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        self.read_gate(|| format!("counts the index {index}")).await?;
        self.engine.index_count(shard, index, min).await
    }

    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        let fate = self.sim.gate(self.who, Kind::Claim, || format!("claims as {}", claim.consumer)).await;
        if fate == Fate::Refuse {
            return Err(away());
        }
        let claimed = self.engine.claim(claim).await?;
        for claimed in &claimed {
            self.sim.note(|| format!("    {} gets {}", claim.consumer, claimed.entry.id));
            if let Err(broken) = self.sim.ledger().claimed(&claim.consumer, claimed) {
                self.sim.violated(broken);
            }
        }
        if fate == Fate::Forget { Err(away()) } else { Ok(claimed) }
    }

    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        match self.sim.gate(self.who, Kind::Heartbeat, || format!("shows a sign of life of {consumer}")).await {
            Fate::Pass => self.engine.heartbeat(shard, stream, consumer, ids).await,
            _ => Err(away()),
        }
    }

    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.engine.tick(shard, streams).await
    }

    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.engine.depth(shard, stream).await
    }

    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.engine.consumers(shard, stream).await
    }

    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        self.engine.listen(shard, topic).await
    }
}
