//! The turns that this process works on, for heartbeats and cancel orders.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rialto_rpc::tasks::{CancelOrder, HeldTurn};
use rialto_store::{Claimed, EntryId, Shard};
use tokio_util::sync::CancellationToken;

/// The entry that stands for a turn.
type Key = (Shard, String, EntryId);

/// All turns that this process works on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(Arc<Mutex<HashMap<Key, (HeldTurn, CancellationToken)>>>);

impl Held {
    /// Adds a turn that has begun, until the guard is dropped. `canceled` fires when its task is canceled.
    pub(crate) fn add(&self, claimed: &Claimed, turn: HeldTurn, canceled: CancellationToken) -> HoldGuard {
        let key = key(claimed);
        let fence = turn.fence;
        self.lock().insert(key.clone(), (turn, canceled));
        HoldGuard { held: self.clone(), key, fence }
    }

    /// The turn behind an entry, once it has begun.
    pub(crate) fn turn(&self, claimed: &Claimed) -> Option<HeldTurn> {
        self.lock().get(&key(claimed)).map(|(turn, _)| turn.clone())
    }

    /// Passes on that a task was canceled.
    pub(crate) fn cancel(&self, order: &CancelOrder) {
        let turns = self.lock();
        let ordered = turns.values().find(|(turn, _)| turn.task_id == order.task_id && turn.turn_id == order.turn_id);
        if let Some((_, canceled)) = ordered {
            canceled.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, (HeldTurn, CancellationToken)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(claimed: &Claimed) -> Key {
    (claimed.shard, claimed.stream.clone(), claimed.entry.id)
}

/// Keeps a turn in [`Held`].
#[derive(Debug)]
pub(crate) struct HoldGuard {
    held: Held,
    key: Key,
    fence: u64,
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        let mut turns = self.held.lock();
        // A turn that task-store took away may have come back before its first attempt was cleared away.
        if turns.get(&self.key).is_some_and(|(turn, _)| turn.fence == self.fence) {
            turns.remove(&self.key);
        }
    }
}
