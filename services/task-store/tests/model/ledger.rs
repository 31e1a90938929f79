//! What happened, written down commit by commit beside the store, and the promises that it must keep.
//!
//! The ledger reads what the service stores, but shares no code with it: what it believes about owners, attempts
//! and the order of turns comes from the commits and claims that it saw, not from the checks that they passed.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    state,
    v1::{StreamResponse, TaskState},
};
use rialto_rpc::tasks::RunEntry;
use rialto_store::{At, Batch, Claimed, Committed, EntryId, Millis, Op};

use crate::stored::{Context, Folded, Head, Phase, Reservation, Sweep, Turn};

/// The one work stream.
pub(crate) const RUNS: &str = "runs:echo";

/// The mark of an event with which a task asks for the next message.
const INTERRUPTED: u32 = 4;

/// The mark of the last event.
const TERMINAL: u32 = 3;

/// A promise that was broken.
pub(crate) type Broken = String;

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    tasks: BTreeMap<String, Task>,
    contexts: BTreeMap<String, Context>,
    turns: BTreeMap<Bytes, Life>,
    /// Run entries that there are, and who was given them last.
    entries: BTreeMap<EntryId, Option<String>>,
    /// How often each was given to somebody.
    deliveries: BTreeMap<EntryId, u32>,
    /// Tasks that some client was told of.
    pub(crate) known: Vec<String>,
}

#[derive(Debug)]
struct Task {
    head: Head,
    /// Every event there ever was.
    events: Vec<(u32, Bytes)>,
}

/// What became of one message.
#[derive(Debug, Default)]
struct Life {
    /// A client was told that it is in.
    accepted: bool,
    /// The newest attempt.
    attempt: Option<Attempt>,
    /// The fences under which it stopped for authorization.
    rests: Vec<u64>,
    /// Attempts that were lost for a reason that the ledger saw.
    losses: u32,
    /// The state in which it left its task: once, in the end.
    ends: Vec<TaskState>,
    /// It waited in its context until its task ended, or until its deadline.
    dropped: bool,
    /// The attempt that was told that its end counted, and that end.
    finished: Option<(u64, TaskState)>,
}

#[derive(Debug)]
struct Attempt {
    fence: u64,
    entry: EntryId,
    delivery: u32,
    crashed: bool,
    given_back: bool,
}

/// Whether a turn holds its context.
fn holds(turn: &Turn) -> bool {
    matches!(turn.phase(), Phase::Queued | Phase::Running | Phase::Stopping)
}

fn state_of(head: &Head) -> TaskState {
    head.status.as_ref().map_or(TaskState::Unspecified, |status| status.state())
}

impl Ledger {
    /// A batch became true.
    pub(crate) fn committed(&mut self, batch: &Batch, committed: &Committed) -> Result<(), Broken> {
        let mut heads = Vec::new();
        let mut contexts = Vec::new();
        let mut events: BTreeMap<String, Vec<(u64, u32, Bytes)>> = BTreeMap::new();
        let mut entries = committed.entries.iter();
        for op in &batch.ops {
            match op {
                Op::Put { key, bytes } => {
                    if let Some(id) = key.strip_prefix("t:") {
                        let head = Head::decode(bytes.clone()).expect("a head");
                        let first = head.last_event + 1 - head.events.len() as u64;
                        let newest = (first..).zip(&head.events);
                        let newest = newest.map(|(number, event)| (number, event.tag, event.payload.clone()));
                        events.entry(id.to_owned()).or_default().extend(newest);
                        heads.push((id.to_owned(), head));
                    } else if let Some((_, id)) = key.strip_prefix("c:").and_then(|rest| rest.split_once(':')) {
                        contexts.push((id.to_owned(), Context::decode(bytes.clone()).expect("a context")));
                    }
                }
                Op::Append { stream, at, tag, payload, .. } => {
                    let entry = *entries.next().expect("an id for each append");
                    if stream == RUNS {
                        self.entries.insert(entry, None);
                        self.deliveries.remove(&entry);
                    } else if let (Some(id), At::Number(number)) = (stream.strip_prefix("log:"), at) {
                        let event = (*number, u32::from(*tag), payload.clone());
                        events.entry(id.to_owned()).or_default().push(event);
                    }
                }
                Op::Ack { stream, id } | Op::Bury { stream, id, .. } | Op::Remove { stream, id } if stream == RUNS => {
                    self.entries.remove(id);
                }
                Op::HandBack { stream, id } if stream == RUNS => {
                    if let Some(owner) = self.entries.get_mut(id) {
                        *owner = None;
                    }
                }
                Op::Drop { stream } if stream == RUNS => self.entries.clear(),
                _ => {}
            }
        }
        let touched: BTreeSet<String> = heads.iter().map(|(_, head)| head.context_id.clone()).collect();
        for (id, head) in heads {
            let numbered = events.remove(&id).unwrap_or_default();
            self.write(&id, head, numbered)?;
        }
        if let Some((id, _)) = events.into_iter().find(|(_, events)| !events.is_empty()) {
            return Err(format!("events of {id} without its head"));
        }
        for (id, context) in contexts {
            self.converse(&id, context, committed.at)?;
        }
        for context in touched {
            let holders = self
                .tasks
                .iter()
                .filter(|(_, task)| task.head.context_id == context && task.head.turn.as_ref().is_some_and(holds));
            if holders.clone().count() > 1 {
                let tasks: Vec<_> = holders.map(|(id, _)| id.as_str()).collect();
                return Err(format!("context {context} has more than one turn: {}", tasks.join(", ")));
            }
        }
        Ok(())
    }

    /// A task is as this head says from now on.
    fn write(&mut self, id: &str, head: Head, events: Vec<(u64, u32, Bytes)>) -> Result<(), Broken> {
        if let Some(task) = self.tasks.get(id) {
            let was = &task.head;
            if state_of(was).is_terminal() && was.status != head.status {
                let (was, now) = (state_of(was).as_str_name(), state_of(&head).as_str_name());
                return Err(format!("the terminal state of {id} changed: {was} to {now}"));
            }
            if head.status.as_ref().and_then(|it| it.timestamp) < was.status.as_ref().and_then(|it| it.timestamp) {
                return Err(format!("the time of {id} went back"));
            }
            let said = was.last_event;
            let (was, now) = (was.turn.clone().unwrap_or_default(), head.turn.clone().unwrap_or_default());
            let asks = events.iter().any(|(number, tag, _)| *number > said && *tag == INTERRUPTED);
            self.turn(id, &was, &now, state_of(&head), asks)?;
        }
        let task = self.tasks.entry(id.to_owned()).or_insert_with(|| Task { head: Head::default(), events: vec![] });
        let known = task.events.len() as u64;
        for (number, tag, payload) in events {
            let place = usize::try_from(number).expect("small") - 1;
            match task.events.get(place) {
                Some(event) if *event != (tag, payload.clone()) => {
                    return Err(format!("event {number} of {id} was replaced"));
                }
                Some(_) => {}
                None if place == task.events.len() => task.events.push((tag, payload)),
                None => return Err(format!("event {number} of {id} follows event {}", task.events.len())),
            }
        }
        let newest = task.events.len() as u64;
        if newest != head.last_event {
            return Err(format!("{id} has {newest} events, its head says {}", head.last_event));
        }
        if newest > known && state_of(&task.head).is_terminal() {
            return Err(format!("{id} has events after its end"));
        }
        task.head = head;
        Ok(())
    }

    /// The turn of a task changed from one to the other; `asks` if the task asked for a message meanwhile.
    fn turn(&mut self, id: &str, was: &Turn, now: &Turn, end: TaskState, asks: bool) -> Result<(), Broken> {
        if was.id != now.id {
            if !matches!(was.phase(), Phase::Done | Phase::Resting) && !asks {
                return Err(format!("the next turn of {id} came before the end of the one before"));
            }
            if now.fence != was.fence {
                return Err(format!("the fence of {id} began again"));
            }
            // The one commit that ended the one began the other.
            if was.phase() != Phase::Done {
                let end =
                    if was.phase() == Phase::Resting { TaskState::AuthRequired } else { TaskState::InputRequired };
                self.turns.entry(was.id.clone()).or_default().ends.push(end);
            }
            return Ok(());
        }
        let life = self.turns.entry(now.id.clone()).or_default();
        if now.fence < was.fence {
            return Err(format!("the fence of {id} went down"));
        }
        if now.fence > was.fence && now.phase() == Phase::Done {
            // It is given up, and whoever ran it last is told so.
            life.attempt.as_mut().expect("it ran").fence = now.fence;
        } else if now.fence > was.fence {
            let entry: EntryId = now.entry.parse().expect("an entry");
            let delivery = self.deliveries.get(&entry).copied().unwrap_or(0);
            if let Some(before) = &life.attempt {
                let gone = before.entry != entry && !self.entries.contains_key(&before.entry);
                let again = before.entry == entry && delivery > before.delivery;
                if !(gone || again || before.crashed) {
                    return Err(format!(
                        "attempt {} of {id} began although nothing had happened to the one before",
                        now.attempts
                    ));
                }
                life.losses += u32::from(!before.given_back);
            }
            if now.attempts > life.losses + 1 {
                return Err(format!("{id} has {} attempts after {} losses", now.attempts, life.losses));
            }
            let fence = now.fence;
            life.attempt = Some(Attempt { fence, entry, delivery, crashed: false, given_back: false });
        }
        match (was.phase(), now.phase()) {
            (Phase::Running, phase @ (Phase::Queued | Phase::Resting)) => {
                life.attempt.as_mut().expect("it ran").given_back = true;
                life.rests.extend((phase == Phase::Resting).then_some(now.fence));
            }
            (Phase::Done, Phase::Done) => {}
            (Phase::Done, _) => return Err(format!("an ended turn of {id} came back")),
            (_, Phase::Done) => {
                life.ends.push(end);
                if !end.is_terminal() && !end.is_interrupted() {
                    return Err(format!("a turn of {id} ended as {}", end.as_str_name()));
                }
            }
            _ => {}
        }
        if life.ends.len() > 1 {
            return Err(format!("a turn of {id} ended twice"));
        }
        Ok(())
    }

    /// A context is as this record says from now on; the tasks are already as they will be.
    fn converse(&mut self, id: &str, context: Context, at: Millis) -> Result<(), Broken> {
        if let Some(was) = self.contexts.get(id) {
            let turn = |waiting: &crate::stored::Waiting| waiting.turn.clone().unwrap_or_default().id;
            let before: Vec<Bytes> = was.waiting.iter().map(turn).collect();
            let now: Vec<Bytes> = context.waiting.iter().map(turn).collect();
            let known = |turn: &&Bytes| before.contains(turn);
            if !now.iter().filter(known).eq(before.iter().filter(|turn| now.contains(turn))) {
                return Err(format!("the queue of {id} was rearranged"));
            }
            // Only a turn that goes on after it rested comes before others.
            let rested = |turn: &&Bytes| self.turns.get(*turn).is_some_and(|life| !life.rests.is_empty());
            let pushed = now.iter().rev().take_while(|turn| !before.contains(turn)).count();
            if now.iter().rev().skip(pushed).any(|turn| !before.contains(turn) && !rested(&turn)) {
                return Err(format!("a turn in {id} jumped the queue"));
            }
            let holder = context.holder.as_ref().map(|holder| &holder.turn);
            if let Some(place) = before.iter().position(|turn| Some(turn) == holder)
                && before[..place].iter().any(|turn| now.contains(turn))
            {
                return Err(format!("a turn in {id} was overtaken"));
            }
            for (turn, waiting) in before.iter().zip(&was.waiting) {
                let task = uuid::Uuid::from_slice(&waiting.task).expect("a task").to_string();
                let head = &self.tasks[&task].head;
                let gone = !now.contains(turn) && Some(turn) != holder && !head.knows(turn);
                let deadline = waiting.turn.as_ref().map_or(0, |turn| turn.deadline_ms);
                if gone && !state_of(head).is_terminal() && !(1..=at).contains(&deadline) {
                    return Err(format!("a waiting turn in {id} was lost"));
                }
                if gone {
                    self.turns.entry(turn.clone()).or_default().dropped = true;
                }
            }
        }
        self.contexts.insert(id.to_owned(), context);
        Ok(())
    }

    /// A runner was given an entry.
    pub(crate) fn claimed(&mut self, consumer: &str, claimed: &Claimed) -> Result<(), Broken> {
        let id = claimed.entry.id;
        let Some(owner) = self.entries.get_mut(&id) else {
            return Err(format!("{consumer} was given the entry {id}, which is gone"));
        };
        *owner = Some(consumer.to_owned());
        *self.deliveries.entry(id).or_default() += 1;
        Ok(())
    }

    /// An attempt came to nothing, and its runner begins again with the same entry.
    pub(crate) fn crashed(&mut self, turn: &Bytes, fence: u64) {
        let attempt = self.turns.get_mut(turn).and_then(|life| life.attempt.as_mut());
        if let Some(attempt) = attempt.filter(|attempt| attempt.fence == fence) {
            attempt.crashed = true;
        }
    }

    /// The newest fence of a turn.
    pub(crate) fn fence(&self, turn: &Bytes) -> u64 {
        self.turns.get(turn).and_then(|life| life.attempt.as_ref()).map_or(0, |attempt| attempt.fence)
    }

    /// Whether a turn stopped for authorization under this fence.
    pub(crate) fn rested(&self, turn: &Bytes, fence: u64) -> bool {
        self.turns.get(turn).is_some_and(|life| life.rests.contains(&fence))
    }

    /// A client was told that its message is in.
    pub(crate) fn accepted(&mut self, turn: &Bytes, task: &str) -> Result<(), Broken> {
        if !self.tasks.contains_key(task) {
            return Err(format!("a client was told of {task}, which is not there"));
        }
        self.turns.entry(turn.clone()).or_default().accepted = true;
        if !self.known.iter().any(|known| known == task) {
            self.known.push(task.to_owned());
        }
        Ok(())
    }

    /// A client was told that its message is not taken.
    pub(crate) fn refused(&self, turn: &Bytes) -> Result<(), Broken> {
        match self.tasks.iter().find(|(_, task)| task.head.knows(turn)) {
            Some((id, _)) => Err(format!("a message was refused although it is in {id}")),
            None => Ok(()),
        }
    }

    /// A runner was told that its end of the turn counted.
    pub(crate) fn finished(&mut self, id: &str, turn: &Bytes, fence: u64, end: TaskState) -> Result<(), Broken> {
        if end == TaskState::AuthRequired {
            return Ok(());
        }
        let life = self.turns.entry(turn.clone()).or_default();
        match life.finished {
            Some((other, _)) if other != fence => return Err(format!("two attempts finished the same turn of {id}")),
            Some((_, other)) if other != end => return Err(format!("a turn of {id} was finished in two ways")),
            _ => {}
        }
        life.finished = Some((fence, end));
        if life.ends != [end] {
            return Err(format!("an end of {id} counted, but is not how the turn ended"));
        }
        Ok(())
    }

    /// Whether there is such a task.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.tasks.contains_key(id)
    }

    /// Whether a turn of a task was over, or rested, with this event.
    pub(crate) fn ends(&self, id: &str, event: u64) -> bool {
        let place = usize::try_from(event).expect("small") - 1;
        let event = self.tasks.get(id).and_then(|task| task.events.get(place));
        event.is_some_and(|(tag, _)| matches!(*tag, TERMINAL | INTERRUPTED))
    }

    /// Every task that there is, as its events say.
    pub(crate) fn folded(&self) -> Vec<(String, rialto_a2a::v1::Task)> {
        let fold = |task: &Task| {
            let mut whole = rialto_a2a::v1::Task::default();
            for (_, event) in &task.events {
                let event = StreamResponse::decode(event.clone()).expect("an event");
                state::fold(&mut whole, event).expect("fits");
            }
            whole
        };
        self.tasks.iter().map(|(id, task)| (id.clone(), fold(task))).collect()
    }

    /// The state of a task, and the cancel call that ended it.
    pub(crate) fn task(&self, id: &str) -> Option<(TaskState, Bytes)> {
        self.tasks.get(id).map(|task| (state_of(&task.head), task.head.cancel_commit.clone()))
    }

    /// Whether an entry is still the one that this consumer was given.
    pub(crate) fn owns(&self, consumer: &str, entry: EntryId) -> bool {
        self.entries.get(&entry).is_some_and(|owner| owner.as_deref() == Some(consumer))
    }

    /// Whether an attempt is still the one that runs.
    pub(crate) fn runs(&self, id: &str, turn: &Bytes, fence: u64) -> bool {
        let known = self.tasks.get(id).and_then(|task| task.head.turn.as_ref());
        known.is_some_and(|known| known.id == *turn && known.fence == fence && known.phase() == Phase::Running)
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_idle(&self) -> bool {
        let over = |turn: &Turn| matches!(turn.phase(), Phase::Done | Phase::Resting);
        self.entries.is_empty()
            && self.tasks.values().all(|task| task.head.turn.as_ref().is_none_or(over))
            && self.contexts.values().all(|context| context.holder.is_none() && context.waiting.is_empty())
    }

    /// What must be true once nothing is left to do.
    pub(crate) fn settled(&self) -> Result<(), Broken> {
        for (turn, life) in self.turns.iter().filter(|(_, life)| life.accepted) {
            let rests = self.tasks.values().any(|task| resting(&task.head, turn));
            if !(life.dropped || rests || life.ends.len() == 1) {
                return Err(format!("an accepted message ended {} times", life.ends.len()));
            }
        }
        Ok(())
    }

    /// What is not over yet.
    pub(crate) fn left(&self) -> String {
        let mut left: Vec<String> = self.entries.keys().map(|id| format!("entry {id}")).collect();
        for (id, task) in &self.tasks {
            let phase = task.head.turn.as_ref().map_or(Phase::Done, Turn::phase);
            left.push(format!("{id} {} {}", state_of(&task.head).as_str_name(), phase.as_str_name()));
        }
        for (id, context) in &self.contexts {
            left.push(format!("{id}: held {}, waiting {}", context.holder.is_some(), context.waiting.len()));
        }
        left.join("; ")
    }
}

fn resting(head: &Head, turn: &Bytes) -> bool {
    head.turn.as_ref().is_some_and(|known| known.id == *turn && known.phase() == Phase::Resting)
}

impl Head {
    /// Whether a turn is this task's, now or before.
    fn knows(&self, turn: &Bytes) -> bool {
        self.turn.as_ref().is_some_and(|known| known.id == *turn) || self.past.iter().any(|past| past.id == *turn)
    }
}

/// What a batch is about, in short.
pub(crate) fn short(batch: &Batch) -> String {
    let text = |op: &Op| match op {
        Op::Put { key, bytes } if key.starts_with("t:") => {
            let head = Head::decode(bytes.clone()).expect("a head");
            let turn = head.turn.clone().unwrap_or_default();
            let (state, phase) = (state_of(&head).as_str_name(), turn.phase().as_str_name());
            let (state, phase) = (state.replace("TASK_STATE_", ""), phase.replace("PHASE_", ""));
            let (task, turn, fence) = (key.chars().skip(2).take(8).collect::<String>(), &turn.id[..4], turn.fence);
            Some(format!("task {task} {state}, turn {turn:02x?} {phase} fence {fence}, {} events", head.last_event))
        }
        Op::Put { key, bytes } if key.starts_with("c:") => {
            let context = Context::decode(bytes.clone()).expect("a context");
            let held = context.holder.map(|holder| format!("{:02x?}", &holder.turn[..4]));
            Some(format!("context held by {held:?}, {} wait", context.waiting.len()))
        }
        Op::Put { key, bytes } if key.starts_with("a:") => {
            let to = Folded::decode(bytes.clone()).expect("an artifact").to;
            Some(format!("artifact up to event {to}"))
        }
        Op::Put { key, bytes } if key.starts_with("k:") => {
            let reserved = Reservation::decode(bytes.clone()).expect("a reservation");
            Some(format!("a name for turn {:02x?}", &reserved.turn[..4]))
        }
        Op::Put { key, bytes } if key == "sweep" => {
            let swept = Sweep::decode(bytes.clone()).expect("a sweep");
            Some(format!("swept at {}", swept.swept_ms))
        }
        Op::Put { key, .. } => Some(format!("put {key}")),
        Op::Append { stream, payload, .. } if stream == RUNS => {
            let run = RunEntry::decode(payload.clone()).expect("a run entry");
            Some(format!("queue turn {:02x?}", &run.turn_id[..4]))
        }
        Op::Ack { id, .. } => Some(format!("ack {id}")),
        Op::HandBack { id, .. } => Some(format!("hand back {id}")),
        Op::Bury { id, .. } => Some(format!("bury {id}")),
        Op::Drop { stream } => Some(format!("drop {stream}")),
        _ => None,
    };
    batch.ops.iter().filter_map(text).collect::<Vec<_>>().join("; ")
}
