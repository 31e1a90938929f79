//! The consumer group of each work stream: who owns which entry.
//!
//! Kept in memory alone: one process has the folder, so when it dies every entry it owned is free at once. What
//! must outlive it, the number of deliveries, is written along with the next commit.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{Consumer, Entry, EntryId, Millis, Shard};

/// How soon to look again at an entry whose lease ended while a commit was touching it.
pub(super) const BUSY: Duration = Duration::from_millis(10);

/// New entries kept at hand for the next claim; beyond that they are read when wanted.
const READY: usize = 256;

/// How long a consumer that owns nothing is idle when it is taken for gone.
const FORGET: Duration = Duration::from_secs(3600);

/// Payload bytes kept at hand.
const READY_BYTES: usize = 1 << 20;

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
    /// Everything up to here was handed out by this process, or is at hand.
    pub(super) cursor: EntryId,
    /// There may be entries after the cursor.
    pub(super) more: bool,
    /// Never handed out by this process, with the deliveries of earlier ones.
    ready: VecDeque<(Entry, u32)>,
    ready_bytes: usize,
    /// Handed out before, owned by nobody, with the deliveries so far.
    returned: BTreeMap<EntryId, (Entry, u32)>,
    pending: HashMap<EntryId, Pending>,
    /// When each consumer last showed a sign of life.
    consumers: BTreeMap<Arc<str>, Instant>,
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
    entry: Entry,
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
            ready: VecDeque::new(),
            ready_bytes: 0,
            returned: BTreeMap::new(),
            pending: HashMap::new(),
            consumers: BTreeMap::new(),
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
    /// Never held across an await. Who needs the data as well takes that first.
    pub(super) fn lock(&self) -> MutexGuard<'_, Group> {
        lock(&self.state)
    }
}

impl Group {
    /// An entry was appended.
    pub(super) fn push(&mut self, entry: Entry) {
        // What is read from the data may have been committed, but not told, a moment before.
        if entry.id <= self.cursor {
            return;
        }
        let bytes = self.ready_bytes + entry.payload.len();
        if self.more || self.ready.len() >= READY || bytes > READY_BYTES {
            self.more = true;
            return;
        }
        self.cursor = entry.id;
        self.ready_bytes = bytes;
        self.ready.push_back((entry, 0));
    }

    /// Entries after the cursor were read, as many as were asked for if `more`.
    pub(super) fn fetched(&mut self, entries: Vec<(Entry, u32)>, more: bool) {
        if let Some((last, _)) = entries.last() {
            self.cursor = last.id;
        }
        self.more = more;
        self.ready_bytes += entries.iter().map(|(entry, _)| entry.payload.len()).sum::<usize>();
        self.ready.extend(entries);
    }

    /// How many entries have to be read for a claim of `room`, if the data has them.
    pub(super) fn missing(&self, room: usize) -> usize {
        if self.more { room.saturating_sub(self.ready.len() + self.returned.len()) } else { 0 }
    }

    /// Hands out up to `room` entries: given back or left alone by their owner first, new ones after.
    pub(super) fn take(
        &mut self,
        consumer: &Arc<str>,
        lease: Duration,
        room: usize,
        now: Instant,
    ) -> Vec<(Entry, u32)> {
        self.saw(consumer, now);
        let mut taken = Vec::new();
        for id in self.again(consumer, lease, now, room) {
            let Some((entry, deliveries)) = self.returned.remove(&id).or_else(|| self.disown(id)) else { continue };
            taken.push(self.hand_out(entry, deliveries, consumer, now));
        }
        while taken.len() < room
            && let Some((entry, deliveries)) = self.ready.pop_front()
        {
            self.ready_bytes = self.ready_bytes.saturating_sub(entry.payload.len());
            taken.push(self.hand_out(entry, deliveries, consumer, now));
        }
        taken
    }

    /// Whether a claim would find something at once, whoever makes it.
    pub(super) fn has_work(&self) -> bool {
        self.more || !self.ready.is_empty() || !self.returned.is_empty()
    }

    fn again(&self, consumer: &str, lease: Duration, now: Instant, room: usize) -> Vec<EntryId> {
        let expired = self
            .ages
            .iter()
            .take_while(|(since, _)| *since + lease <= now)
            .filter(|(_, id)| self.pending.get(id).is_some_and(|owner| owner.busy == 0 && &*owner.consumer != consumer))
            .map(|(_, id)| *id);
        let mut ids: Vec<_> = self.returned.keys().copied().take(room).chain(expired).collect();
        ids.sort_unstable();
        ids.truncate(room);
        ids
    }

    fn hand_out(&mut self, entry: Entry, before: u32, consumer: &Arc<str>, now: Instant) -> (Entry, u32) {
        let deliveries = before.saturating_add(1);
        self.ages.insert((now, entry.id));
        let (entry, consumer) = (entry, Arc::clone(consumer));
        self.pending.insert(entry.id, Pending { entry: entry.clone(), consumer, since: now, deliveries, busy: 0 });
        (entry, deliveries)
    }

    /// Takes an entry from its owner.
    fn disown(&mut self, id: EntryId) -> Option<(Entry, u32)> {
        let owner = self.pending.remove(&id)?;
        self.ages.remove(&(owner.since, id));
        Some((owner.entry, owner.deliveries))
    }

    /// When the next entry of another consumer may be taken over.
    pub(super) fn next_expiry(&self, consumer: &str, lease: Duration, now: Instant) -> Option<Instant> {
        let (since, owner) = self.ages.iter().find_map(|(since, id)| {
            let owner = self.pending.get(id).filter(|owner| &*owner.consumer != consumer)?;
            Some((*since, owner))
        })?;
        Some(if owner.busy == 0 { since + lease } else { (since + lease).max(now + BUSY) })
    }

    /// The entry is gone.
    pub(super) fn forget(&mut self, id: EntryId) {
        if self.disown(id).is_none() && self.returned.remove(&id).is_none() {
            self.ready.retain(|(entry, _)| entry.id != id);
        }
    }

    /// The stream was dropped: what comes next is another one.
    pub(super) fn reset(&mut self) {
        *self = Self { due: self.due, consumers: std::mem::take(&mut self.consumers), ..Self::default() };
    }

    /// Takes an entry from its owner, who gives it back.
    pub(super) fn hand_back(&mut self, id: EntryId) {
        if let Some(back) = self.disown(id) {
            self.returned.insert(id, back);
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
        let consumer = Arc::clone(&owner.consumer);
        self.saw(&consumer, now);
        true
    }

    /// Notes a sign of life. A new face is the occasion to forget old ones.
    fn saw(&mut self, consumer: &Arc<str>, now: Instant) {
        if let Some(seen) = self.consumers.get_mut(consumer) {
            *seen = now;
            return;
        }
        let owners: BTreeSet<_> = self.pending.values().map(|owner| Arc::clone(&owner.consumer)).collect();
        self.consumers.retain(|name, seen| now.duration_since(*seen) < FORGET || owners.contains(name));
        self.consumers.insert(Arc::clone(consumer), now);
    }

    /// Who claims here.
    pub(super) fn consumers(&self, now: Instant) -> Vec<Consumer> {
        let mut pending: BTreeMap<&str, u64> = BTreeMap::new();
        for owner in self.pending.values() {
            *pending.entry(&*owner.consumer).or_default() += 1;
        }
        let consumer = |(name, seen): (&Arc<str>, &Instant)| Consumer {
            name: name.to_string(),
            pending: pending.get(&**name).copied().unwrap_or_default(),
            idle: now.duration_since(*seen),
        };
        self.consumers.iter().map(consumer).collect()
    }

    /// How often an entry was handed out that is owned or was given back.
    pub(super) fn deliveries(&self, id: EntryId) -> Option<u32> {
        let pending = self.pending.get(&id).map(|owner| owner.deliveries);
        pending.or_else(|| self.returned.get(&id).map(|(_, deliveries)| *deliveries))
    }

    pub(super) fn pending(&self) -> u64 {
        self.pending.len() as u64
    }

    /// The oldest entry that nobody owns, as far as is known here.
    pub(super) fn oldest(&self) -> Option<EntryId> {
        let returned = self.returned.keys().next().copied();
        returned.into_iter().chain(self.ready.front().map(|(entry, _)| entry.id)).min()
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
}

/// Locks a mutex whose state is sound at every moment, so that a panic elsewhere cannot spoil it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
