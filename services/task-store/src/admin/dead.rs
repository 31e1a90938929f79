//! Entries that were given up: what they were, and what can be done about them.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use prost::Message as _;
use rialto_a2a::{Error, Kind, v1::Message};
use rialto_rpc::tasks::{
    self, DeadRun, DropDeadReply, DropDeadRequest, ListDeadReply, ListDeadRequest, Policy, ReplayDeadReply, RunEntry,
    WhenBusy,
};
use rialto_store::{
    Batch, Entry, EntryId, Millis, Op, ReadLimit, Shard,
    worker::{DEAD, DeadEntry},
};

use super::{AT_ONCE, MAX_LOOKS, page, unsigned};
use crate::{
    Inner,
    cancel::hex,
    change::{Change, Decide, Decision, Draft, State},
    keys::{self, TaskId, TurnId},
    send::{Send, Sent},
    store::{Start, Store, before, failed},
    stored::{Head, Held, Phase, Place},
};

/// Entries that one read of a shard returns, and bytes.
const READ: ReadLimit = ReadLimit { entries: 64, bytes: 256 << 10 };

/// Bytes of entries after which a page ends early: ids of messages are strangers' text.
const PAGE_BYTES: usize = 4 << 20;

/// Entries that one call drops.
const DROPPED: usize = 1000;

/// Characters of a reason that are shown.
const MAX_REASON: usize = 2000;

/// Bytes of a payload that are shown when it is no run entry.
const MAX_PAYLOAD: usize = 256;

/// Where a dead entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeadId {
    shard: Shard,
    id: EntryId,
}

impl fmt::Display for DeadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.shard, self.id)
    }
}

impl FromStr for DeadId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (shard, id) = text.split_once('-').ok_or(())?;
        Ok(Self { shard: shard.parse().map_err(drop)?, id: id.parse().map_err(drop)? })
    }
}

/// The agent whose work stream this is.
fn agent_of(stream: &str) -> &str {
    stream.strip_prefix("runs:").unwrap_or(stream)
}

/// An entry with what was in it.
#[derive(Debug)]
struct Found {
    id: DeadId,
    bytes: usize,
    /// `None` when it is not what [`Op::Bury`] writes.
    dead: Option<DeadEntry>,
    /// `None` when there was something else in it.
    run: Option<(TaskId, RunEntry)>,
}

impl Found {
    fn read(id: DeadId, entry: &Entry) -> Self {
        let bytes = entry.payload.len();
        let dead = DeadEntry::decode(&entry.payload);
        let run = dead.as_ref().and_then(|dead| RunEntry::decode(dead.payload.clone()).ok()).and_then(|run| {
            let task = TaskId::parse(&run.task_id, Shard::MAX).filter(|task| task.shard() == id.shard)?;
            Some((task, run)).filter(|(_, run)| run.turn_id.len() == 16)
        });
        Self { id, bytes, dead, run }
    }

    fn agent(&self) -> &str {
        self.dead.as_ref().map_or("", |dead| agent_of(&dead.stream))
    }

    fn describe(&self, now: Millis) -> tasks::DeadEntry {
        let mut entry =
            tasks::DeadEntry { id: self.id.to_string(), agent: self.agent().to_owned(), ..Default::default() };
        match &self.dead {
            Some(dead) => {
                entry.reason = cut(&dead.reason);
                entry.at_ms = unsigned(dead.at);
                entry.deliveries = dead.deliveries;
                entry.stream.clone_from(&dead.stream);
                entry.entry = dead.id.to_string();
                entry.tag = dead.tag.into();
                entry.bytes = dead.payload.len() as u64;
            }
            None => {
                entry.reason = "it is not in the form of dead entries".to_owned();
                entry.at_ms = self.id.id.0;
                entry.bytes = self.bytes as u64;
            }
        }
        entry.age_ms = unsigned(now).saturating_sub(entry.at_ms);
        if let Some((_, run)) = &self.run {
            entry.attempts = run.attempts;
            entry.run = Some(DeadRun {
                schema: run.schema,
                agent: run.agent.clone(),
                task_id: run.task_id.clone(),
                turn_id: hex(&run.turn_id),
                message_id: run.message_id.clone(),
                queued_at_ms: unsigned(run.queued_at_ms),
                traceparent: run.traceparent.clone(),
            });
        }
        entry
    }
}

/// The beginning of a text.
fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// What a replay would do.
#[derive(Debug)]
enum Outlook {
    /// The task has ended: the message is sent again.
    NewTask(Box<Head>, Message),
    /// The turn is queued again.
    SameTurn(Held<Head>),
    /// Nothing; and why not.
    Nothing(&'static str),
}

/// How many dead entries there are of each agent. Counted once, then only when something has changed.
#[derive(Debug, Default)]
pub(crate) struct Counts(Mutex<BTreeMap<Shard, Counted>>);

#[derive(Clone, Debug, Default)]
struct Counted {
    newest: EntryId,
    entries: u64,
    agents: BTreeMap<String, u64>,
}

impl Counts {
    pub(super) async fn by_agent(&self, store: &Store) -> Result<BTreeMap<String, u64>, Error> {
        let counted = stream::iter(0..store.engine.shards()).map(|shard| self.shard(store, shard));
        let counted: Vec<_> = counted.buffer_unordered(AT_ONCE).try_collect().await?;
        let mut agents = BTreeMap::new();
        for (agent, entries) in counted.into_iter().flat_map(|counted| counted.agents) {
            *agents.entry(agent).or_default() += entries;
        }
        Ok(agents)
    }

    async fn shard(&self, store: &Store, shard: Shard) -> Result<Counted, Error> {
        let entries = store.engine.depth(shard, DEAD).await.map_err(|error| failed(&error))?.waiting;
        if entries == 0 {
            return Ok(Counted::default());
        }
        let newest = store.engine.read_last(shard, DEAD, 1).await.map_err(|error| failed(&error))?;
        let newest = newest.first().map_or(EntryId::ZERO, |entry| entry.id);
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&shard).cloned().unwrap_or_default();
        // Ids only rise: with the newest and the number the same, so are the others.
        if (known.newest, known.entries) == (newest, entries) {
            return Ok(known);
        }
        let mut counted = Counted::default();
        loop {
            let read = store.engine.read(shard, DEAD, counted.newest, READ).await.map_err(|error| failed(&error))?;
            let Some(last) = read.last() else { break };
            counted.newest = last.id;
            counted.entries += read.len() as u64;
            for entry in read {
                let dead = DeadEntry::decode(&entry.payload);
                let agent = dead.as_ref().map_or("", |dead| agent_of(&dead.stream));
                match counted.agents.get_mut(agent) {
                    Some(count) => *count += 1,
                    None => drop(counted.agents.insert(agent.to_owned(), 1)),
                }
            }
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, counted.clone());
        Ok(counted)
    }
}

/// The dead entries of one shard, as far as they were read.
#[derive(Debug)]
struct Lane {
    shard: Shard,
    after: EntryId,
    ready: VecDeque<Entry>,
    ended: bool,
}

impl Lane {
    async fn fill(&mut self, store: &Store) -> Result<(), Error> {
        if self.ended || !self.ready.is_empty() {
            return Ok(());
        }
        let read = store.engine.read(self.shard, DEAD, self.after, READ).await.map_err(|error| failed(&error))?;
        match read.last() {
            Some(last) => self.after = last.id,
            None => self.ended = true,
        }
        self.ready.extend(read);
        Ok(())
    }
}

/// A place among the dead entries of all shards: after this one, by (id, shard).
fn read_cursor(text: &str) -> Result<(EntryId, Shard), Error> {
    let read = || {
        let (id, shard) = text.rsplit_once('-')?;
        Some((id.parse().ok()?, shard.parse().ok()?))
    };
    read().ok_or_else(|| Error::invalid("after", "is not the `next` of another page"))
}

impl Inner {
    pub(super) async fn list_dead(&self, request: &ListDeadRequest) -> Result<ListDeadReply, Error> {
        let limit = page(request.limit)?;
        let cursor = match request.after.as_str() {
            "" => None,
            after => Some(read_cursor(after)?),
        };
        let now = self.store.engine.now();
        let mut lanes: Vec<Lane> = (0..self.store.engine.shards())
            .map(|shard| {
                let after = match cursor {
                    None => EntryId::ZERO,
                    Some((id, last)) if shard <= last => id,
                    Some((id, _)) => before(id),
                };
                Lane { shard, after, ready: VecDeque::new(), ended: false }
            })
            .collect();
        let (mut reply, mut bytes) = (ListDeadReply::default(), 0);
        for look in 0.. {
            try_join_all(lanes.iter_mut().map(|lane| lane.fill(&self.store))).await?;
            let next = lanes.iter_mut().filter(|lane| !lane.ready.is_empty()).min_by_key(|lane| lane.ready[0].id);
            let Some(lane) = next else {
                reply.next.clear();
                break;
            };
            if look == MAX_LOOKS || reply.entries.len() == limit || bytes > PAGE_BYTES {
                break;
            }
            let Some(entry) = lane.ready.pop_front() else { break };
            bytes += entry.payload.len();
            reply.next = format!("{}-{}", entry.id, lane.shard);
            let found = Found::read(DeadId { shard: lane.shard, id: entry.id }, &entry);
            if request.agent.is_empty() || found.agent() == request.agent {
                reply.entries.push(found.describe(now));
            }
        }
        Ok(reply)
    }

    pub(super) async fn get_dead(&self, id: &str) -> Result<tasks::DeadEntry, Error> {
        let found = self.find(id).await?.ok_or_else(|| no_entry(id))?;
        let mut entry = found.describe(self.store.engine.now());
        match self.outlook(&found).await? {
            Outlook::NewTask(..) => entry.replay = NEW_TASK.to_owned(),
            Outlook::SameTurn(_) => entry.replay = SAME_TURN.to_owned(),
            Outlook::Nothing(why) => {
                entry.replay = "none".to_owned();
                entry.hindrance = why.to_owned();
            }
        }
        match &found.run {
            Some((task, _)) => {
                let head = self.store.head(*task).await?;
                entry.task_state = head.map(|held| held.value.state().as_str_name().to_owned()).unwrap_or_default();
            }
            None => {
                let payload = found.dead.as_ref().map(|dead| dead.payload.clone()).unwrap_or_default();
                entry.payload_hex = hex(&payload[..payload.len().min(MAX_PAYLOAD)]);
            }
        }
        Ok(entry)
    }

    /// Reads one entry.
    async fn find(&self, text: &str) -> Result<Option<Found>, Error> {
        let Some(id) = text.parse::<DeadId>().ok().filter(|id| id.shard < self.store.engine.shards()) else {
            return Ok(None);
        };
        let limit = ReadLimit { entries: 1, ..READ };
        let read = self.store.engine.read(id.shard, DEAD, before(id.id), limit).await;
        let read = read.map_err(|error| failed(&error))?.into_iter().find(|entry| entry.id == id.id);
        Ok(read.map(|entry| Found::read(id, &entry)))
    }

    async fn outlook(&self, found: &Found) -> Result<Outlook, Error> {
        let Some((task, run)) = &found.run else {
            return Ok(Outlook::Nothing("it is no run entry, so there is nothing to run"));
        };
        let Some(held) = self.store.head(*task).await?.filter(|held| held.value.agent() == run.agent) else {
            return Ok(Outlook::Nothing("its task is gone, and the message with it"));
        };
        let head = &held.value;
        let newest = head.turn.as_ref().filter(|turn| turn.id == run.turn_id);
        if head.state().is_terminal() {
            let place = Place::new(*task, &head.context_id);
            let number = newest.map_or(0, |turn| turn.message);
            let mut found = self.store.messages(*task, head, &place, number.saturating_sub(1), number).await?;
            if found.is_empty() && !run.message_id.is_empty() {
                let all = self.store.messages(*task, head, &place, 0, head.history_len).await?;
                found.extend(all.into_iter().find(|message| message.message_id == run.message_id));
            }
            return Ok(match found.pop() {
                Some(message) => Outlook::NewTask(Box::new(Head::clone(head)), message),
                None => Outlook::Nothing("its task has ended, and the message is not in its history"),
            });
        }
        let Some(turn) = newest.filter(|turn| matches!(turn.phase(), Phase::Queued | Phase::Running)) else {
            return Ok(Outlook::Nothing("its turn is over or waits for somebody, and its task goes on without this"));
        };
        if self.has_entry(*task, &held).await? {
            return Ok(Outlook::Nothing(match turn.phase() {
                Phase::Running => "its turn runs already",
                _ => "its turn is queued already",
            }));
        }
        Ok(Outlook::SameTurn(held))
    }

    /// Whether the work stream has the run entry of a task.
    pub(super) async fn has_entry(&self, task: TaskId, held: &Held<Head>) -> Result<bool, Error> {
        let Some(run) = held.run else { return Ok(false) };
        let (stream, limit) = (keys::runs(held.value.agent()), ReadLimit { entries: 1, bytes: 1 });
        let read = self.store.engine.read(task.shard(), &stream, before(run), limit).await;
        Ok(read.map_err(|error| failed(&error))?.first().is_some_and(|entry| entry.id == run))
    }

    pub(super) async fn replay_dead(&self, text: &str) -> Result<ReplayDeadReply, Error> {
        let id = text.parse::<DeadId>().map_err(|()| no_entry(text))?;
        // The same for each replay of this entry, and known to nobody else.
        let turn = self.seal.turn(&self.store, &format!("replay {id}")).await?;
        let sent = TaskId::new(turn, id.shard.min(Shard::from(u8::MAX)));
        let Some(found) = self.find(text).await? else {
            let known = id.shard < self.store.engine.shards() && self.store.head(sent).await?.is_some();
            return match known {
                true => Ok(ReplayDeadReply { task_id: sent.to_string(), replay: NEW_TASK.to_owned(), repeated: true }),
                false => Err(no_entry(text)),
            };
        };
        match self.outlook(&found).await? {
            Outlook::Nothing(why) => {
                Err(Error::new(Kind::UnsupportedOperation, format!("{id} cannot be replayed: {why}")))
            }
            Outlook::NewTask(head, message) => self.send_again(found.id, turn, &head, message).await,
            Outlook::SameTurn(was) => {
                let (task, _) = found.run.ok_or_else(Error::internal)?;
                let requeue = Requeue { was, dead: found.id };
                self.store.transact(Start::Known(task), &requeue).await?;
                Ok(ReplayDeadReply { task_id: task.to_string(), replay: SAME_TURN.to_owned(), repeated: false })
            }
        }
    }

    /// Sends the message of an ended task again.
    async fn send_again(
        &self,
        dead: DeadId,
        turn: TurnId,
        head: &Head,
        mut message: Message,
    ) -> Result<ReplayDeadReply, Error> {
        message.task_id.clear();
        let mut policy = Policy {
            hidden: head.hidden,
            task_ttl_ms: head.task_ttl_ms,
            context_idle_ms: head.context_idle_ms,
            max_task_bytes: head.max_bytes,
            ..Policy::default()
        };
        policy.set_when_busy(WhenBusy::Queue);
        let (scope, task) = (head.scope(), TaskId::new(turn, dead.shard));
        let send = Send {
            scope: &scope,
            turn,
            task,
            context_id: &head.context_id,
            follow_up: false,
            message: &message,
            metadata: head.metadata.as_ref(),
            policy: &policy,
            shards: self.store.engine.shards(),
            traceparent: "",
            named_until: None,
            caller_full: false,
        };
        let context = head.scope_key().context(&head.context_id);
        let sent = self.store.transact(Start::New(task, context), &Replay { send, dead }).await?;
        let repeated = !matches!(sent, Sent::Created(_));
        if repeated {
            self.remove(dead.shard, vec![dead.id]).await?;
        }
        Ok(ReplayDeadReply { task_id: task.to_string(), replay: NEW_TASK.to_owned(), repeated })
    }

    pub(super) async fn drop_dead(&self, request: &DropDeadRequest) -> Result<DropDeadReply, Error> {
        if !request.id.is_empty() {
            let found = self.find(&request.id).await?.ok_or_else(|| no_entry(&request.id))?;
            self.remove(found.id.shard, vec![found.id.id]).await?;
            return Ok(DropDeadReply { dropped: 1, ..DropDeadReply::default() });
        }
        let until = match request.until_at_ms {
            0 => unsigned(self.store.engine.now()),
            until => until,
        };
        let mut reply = DropDeadReply { until_at_ms: until, ..DropDeadReply::default() };
        for shard in 0..self.store.engine.shards() {
            let mut after = EntryId::ZERO;
            loop {
                let read = self.store.engine.read(shard, DEAD, after, READ).await.map_err(|error| failed(&error))?;
                let Some(last) = read.last().map(|last| last.id).filter(|_| read[0].id.0 <= until) else { break };
                after = last;
                let wanted = read.into_iter().filter(|entry| entry.id.0 <= until);
                let found = wanted.map(|entry| Found::read(DeadId { shard, id: entry.id }, &entry));
                let found = found.filter(|found| request.agent.is_empty() || found.agent() == request.agent);
                let ids: Vec<EntryId> = found.map(|found| found.id.id).collect();
                if ids.is_empty() {
                    continue;
                }
                if usize::try_from(reply.dropped).unwrap_or(usize::MAX) >= DROPPED {
                    return Ok(DropDeadReply { more: true, ..reply });
                }
                reply.dropped += ids.len() as u64;
                self.remove(shard, ids).await?;
            }
        }
        Ok(reply)
    }

    async fn remove(&self, shard: Shard, ids: Vec<EntryId>) -> Result<(), Error> {
        let ops = ids.into_iter().map(remove).collect();
        let batch = Batch { shard, ops, releasing: true, ..Batch::default() };
        self.store.engine.commit(batch).await.map_err(|error| failed(&error)).map(drop)
    }
}

const NEW_TASK: &str = "new-task";
const SAME_TURN: &str = "same-turn";

fn remove(id: EntryId) -> Op {
    Op::Remove { stream: DEAD.to_owned(), id }
}

fn no_entry(id: &str) -> Error {
    Error::new(Kind::TaskNotFound, format!("there is no dead entry {id}; it may have been replayed or dropped"))
}

/// A message is sent again, and its dead entry is gone with the same commit.
#[derive(Debug)]
struct Replay<'a> {
    send: Send<'a>,
    dead: DeadId,
}

impl Decide for Replay<'_> {
    type Reply = Sent;

    fn decide(&self, state: &State, now: Millis) -> Decision<Sent> {
        match self.send.decide(state, now) {
            Decision::Commit(mut change, sent) => {
                change.ops.push(remove(self.dead.id));
                Decision::Commit(change, sent)
            }
            other => other,
        }
    }
}

/// A turn whose run entry is gone is queued again, with all its attempts before it.
#[derive(Debug)]
struct Requeue {
    was: Held<Head>,
    dead: DeadId,
}

impl Decide for Requeue {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        let same = |held: &&Held<Head>| held.version == self.was.version && held.run == self.was.run;
        let Some(held) = state.head().filter(same) else {
            return Error::new(Kind::UnsupportedOperation, "its task is being worked at; look again").into();
        };
        let mut draft = Draft::edit(state.task, held, now);
        if let Some(turn) = draft.head.turn.as_mut() {
            turn.attempts = 0;
        }
        draft.append_run();
        let mut change = Change::of(draft);
        change.ops.push(remove(self.dead.id));
        change.releasing = true;
        Decision::Commit(Box::new(change), ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_dead_entry_is_one_word() {
        let id = DeadId { shard: 3, id: EntryId(1_764_525_600_000, 7) };
        assert_eq!(id.to_string(), "3-1764525600000-7");
        assert_eq!("3-1764525600000-7".parse(), Ok(id));
        for other in ["", "3", "3-7", "x-1-2", "3-1-2-3", "-1-2", "99999-1-2"] {
            assert_eq!(other.parse::<DeadId>(), Err(()), "{other}");
        }
    }
}
