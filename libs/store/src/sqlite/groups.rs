//! The consumer group of each work stream: who owns which entry.
//!
//! Kept in memory alone: one process has the folder, so when it dies every entry it owned is free at once. What
//! must outlive it, the number of deliveries, is written along with the next commit.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{EntryId, Millis, Shard};

/// How soon to look again at an entry whose lease ended while a commit was touching it.
const BUSY: Duration = Duration::from_millis(10);

/// All groups of an engine. A group exists from the first claim on.
#[derive(Debug)]
pub(super) struct Groups {
    shards: Vec<Mutex<HashMap<String, Arc<Cell>>>>,
}

/// A group, and where its claimants wait.
#[derive(Debug, Default)]
pub(super) struct Cell {
    state: Mutex<Group>,
    /// One claimant is woken per change, in the order of arrival; it wakes the next one when it leaves something.
    pub(super) wake: Notify,
}

/// State of one group.
#[derive(Debug)]
pub(super) struct Group {
    /// Everything after this was never handed out (by this process).
    pub(super) cursor: EntryId,
    /// There may be entries after the cursor.
    pub(super) more: bool,
    /// Handed out before, owned by nobody, with the deliveries so far.
    returned: BTreeMap<EntryId, u32>,
    pending: HashMap<EntryId, Pending>,
    /// The pending ones by their last sign of life.
    ages: BTreeSet<(Instant, EntryId)>,
    /// When the next delayed entry is due.
    pub(super) due: Due,
}

/// What is known about delayed entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nobody has looked yet.
    Unknown,
    /// There is none, or somebody is moving them right now.
    Never,
    /// The next one.
    At(Millis),
}

#[derive(Debug)]
struct Pending {
    consumer: Arc<str>,
    since: Instant,
    deliveries: u32,
    /// Commits in progress that rely on this ownership; nobody takes it over meanwhile.
    busy: u32,
}

impl Default for Group {
    fn default() -> Self {
        Self {
            cursor: EntryId::ZERO,
            more: true,
            returned: BTreeMap::new(),
            pending: HashMap::new(),
            ages: BTreeSet::new(),
            due: Due::Unknown,
        }
    }
}

impl Groups {
    pub(super) fn new(shards: Shard) -> Self {
        Self { shards: (0..shards).map(|_| Mutex::default()).collect() }
    }

    /// The group, if anybody ever claimed from the stream.
    pub(super) fn find(&self, shard: Shard, stream: &str) -> Option<Arc<Cell>> {
        lock(self.shards.get(usize::from(shard))?).get(stream).cloned()
    }

    /// The group, made when there is none. `None` when there is no such shard.
    pub(super) fn get(&self, shard: Shard, stream: &str) -> Option<Arc<Cell>> {
        let mut groups = lock(self.shards.get(usize::from(shard))?);
        if let Some(cell) = groups.get(stream) {
            return Some(Arc::clone(cell));
        }
        Some(Arc::clone(groups.entry(stream.to_owned()).or_default()))
    }
}

impl Cell {
    /// Never held across an await; a database connection, when one is needed, is taken before.
    pub(super) fn lock(&self) -> MutexGuard<'_, Group> {
        lock(&self.state)
    }

    /// Wakes one claimant when there is something left to claim.
    pub(super) fn pass_on(&self, group: &Group) {
        if group.more || !group.returned.is_empty() {
            self.wake.notify_one();
        }
    }
}

impl Group {
    /// The oldest entries that may be handed out again: given back, or left alone by their owner for `lease`.
    pub(super) fn again(&self, consumer: &str, lease: Duration, now: Instant, limit: usize) -> Vec<EntryId> {
        let expired = self
            .ages
            .iter()
            .take_while(|(since, _)| *since + lease <= now)
            .filter(|(_, id)| self.pending.get(id).is_some_and(|owner| owner.busy == 0 && &*owner.consumer != consumer))
            .map(|(_, id)| *id);
        let mut ids: Vec<_> = self.returned.keys().copied().take(limit).chain(expired).collect();
        ids.sort_unstable();
        ids.truncate(limit);
        ids
    }

    /// When the next entry of another consumer may be taken over.
    pub(super) fn next_expiry(&self, consumer: &str, lease: Duration, now: Instant) -> Option<Instant> {
        let (since, owner) = self.ages.iter().find_map(|(since, id)| {
            let owner = self.pending.get(id).filter(|owner| &*owner.consumer != consumer)?;
            Some((*since, owner))
        })?;
        Some(if owner.busy == 0 { since + lease } else { (since + lease).max(now + BUSY) })
    }

    /// Hands an entry out; says how often it was by now. `before` counts when this process does not know it yet.
    pub(super) fn hand_out(&mut self, id: EntryId, consumer: &Arc<str>, before: u32, now: Instant) -> u32 {
        let known = self.returned.remove(&id).or_else(|| {
            let owner = self.pending.remove(&id)?;
            self.ages.remove(&(owner.since, id));
            Some(owner.deliveries)
        });
        let deliveries = known.unwrap_or(before).saturating_add(1);
        self.ages.insert((now, id));
        self.pending.insert(id, Pending { consumer: Arc::clone(consumer), since: now, deliveries, busy: 0 });
        deliveries
    }

    /// The entry is gone.
    pub(super) fn forget(&mut self, id: EntryId) {
        self.returned.remove(&id);
        if let Some(owner) = self.pending.remove(&id) {
            self.ages.remove(&(owner.since, id));
        }
    }

    /// Takes an entry from its owner, who gives it back.
    pub(super) fn hand_back(&mut self, id: EntryId) {
        if let Some(owner) = self.pending.remove(&id) {
            self.ages.remove(&(owner.since, id));
            self.returned.insert(id, owner.deliveries);
        }
    }

    /// Whether the consumer owns the entry; if so it stays so until [`Group::release`].
    pub(super) fn hold(&mut self, id: EntryId, consumer: &str) -> bool {
        match self.pending.get_mut(&id) {
            Some(owner) if &*owner.consumer == consumer => {
                owner.busy += 1;
                true
            }
            _ => false,
        }
    }

    /// Ends a [`Group::hold`].
    pub(super) fn release(&mut self, id: EntryId) {
        if let Some(owner) = self.pending.get_mut(&id) {
            owner.busy = owner.busy.saturating_sub(1);
        }
    }

    /// Notes a sign of life; says whether the consumer still owns the entry.
    pub(super) fn touch(&mut self, id: EntryId, consumer: &str, now: Instant) -> bool {
        let Some(owner) = self.pending.get_mut(&id).filter(|owner| &*owner.consumer == consumer) else {
            return false;
        };
        self.ages.remove(&(owner.since, id));
        owner.since = now;
        self.ages.insert((now, id));
        true
    }

    /// How often a known entry was handed out.
    pub(super) fn deliveries(&self, id: EntryId) -> Option<u32> {
        self.pending.get(&id).map(|owner| owner.deliveries).or_else(|| self.returned.get(&id).copied())
    }

    /// The stream was dropped: what comes next is another one.
    pub(super) fn reset(&mut self) {
        *self = Self { due: self.due, ..Self::default() };
    }

    /// An entry was delayed; says whether it is due before all that were known.
    pub(super) fn expect_due(&mut self, due: Millis) -> bool {
        match self.due {
            Due::Unknown => false,
            Due::At(known) if known <= due => false,
            Due::Never | Due::At(_) => {
                self.due = Due::At(due);
                true
            }
        }
    }

    /// Somebody looked.
    pub(super) fn set_due(&mut self, due: Option<Millis>) {
        self.due = due.map_or(Due::Never, Due::At);
    }

    pub(super) fn pending(&self) -> u64 {
        self.pending.len() as u64
    }

    pub(super) fn first_returned(&self) -> Option<EntryId> {
        self.returned.keys().next().copied()
    }
}

/// Locks a mutex whose state is sound at every moment, so that a panic elsewhere cannot spoil it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
