//! What is stored, and the index rows that follow from it.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    v1::{self, Message, StreamResponse, TaskArtifactUpdateEvent, TaskState, stream_response::Payload},
    wkt::Struct,
};
use rialto_rpc::tasks::Scope;
use rialto_store::{Entry, EntryId, Millis, Op, Record};

use crate::keys::{self, ScopeKey, TaskId};

#[expect(clippy::all, unreachable_pub, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/rialto.tasks.v1.stored.rs"));
}

pub(crate) use generated::{
    Artifact, Context, Event, Folded, Head, Holder, PastTurn, Phase, Reservation, Sweep, Turn, Waiting,
};

/// Bytes of events, of messages, and of artifacts that a head holds itself. Each change of state writes them again,
/// and each list reads them; beyond this, that costs more than streams of their own. A question and an answer of 1 KiB
/// each fit.
pub(crate) const INLINED: usize = 3 << 10;

/// Bytes of events that a head keeps for good: to fold so few away would cost more than they do.
const KEPT: usize = 256;

/// Marks of log entries, so that readers can pass over payloads.
pub(crate) mod tag {
    /// A status that is neither terminal nor interrupted.
    pub(crate) const STATE: u8 = 1;
    /// An artifact update.
    pub(crate) const ARTIFACT: u8 = 2;
    /// A terminal status, or the answer of a hidden task: the last event.
    pub(crate) const TERMINAL: u8 = 3;
    /// An interrupted status.
    pub(crate) const INTERRUPTED: u8 = 4;
    /// In a journal: a whole `JournalEntry`, not only its payload.
    pub(crate) const JOURNAL: u8 = 1;
}

/// A record that was read, with what a later commit must find unchanged.
#[derive(Debug)]
pub(crate) struct Held<T> {
    pub(crate) version: u64,
    pub(crate) value: Arc<T>,
    /// The run entry of the newest turn that got one.
    pub(crate) run: Option<EntryId>,
}

impl<T> Clone for Held<T> {
    fn clone(&self) -> Self {
        Self { version: self.version, value: Arc::clone(&self.value), run: self.run }
    }
}

impl<T: prost::Message + Default> Held<T> {
    /// Decodes a record.
    ///
    /// # Errors
    /// When the bytes are not what this service writes.
    pub(crate) fn decode(record: Record) -> Result<Self, prost::DecodeError> {
        let run = record.refs.get(keys::RUN).copied();
        Ok(Self { version: record.version, value: Arc::new(T::decode(record.bytes)?), run })
    }
}

impl Head {
    pub(crate) fn state(&self) -> TaskState {
        self.status.as_ref().map_or(TaskState::Unspecified, |status| status.state())
    }

    /// When the task got its status: the score of the list indexes.
    pub(crate) fn status_ms(&self) -> Millis {
        self.status.as_ref().and_then(|status| status.timestamp).map_or(0, |at| at.as_millis())
    }

    pub(crate) fn scope(&self) -> Scope {
        self.scope.clone().unwrap_or_default()
    }

    pub(crate) fn scope_key(&self) -> ScopeKey {
        ScopeKey::new(self.scope.as_ref().unwrap_or(&Scope::default()))
    }

    pub(crate) fn agent(&self) -> &str {
        self.scope.as_ref().map_or("", |scope| &scope.agent)
    }

    /// Whether the task exists for a caller.
    pub(crate) fn visible_to(&self, scope: &Scope) -> bool {
        !self.hidden && self.scope.as_ref() == Some(scope)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.turn.as_ref().map_or(Phase::Done, Turn::phase)
    }

    /// Whether nobody works, or should work, at the task: its turn is over, or waits for authorization.
    pub(crate) fn is_at_rest(&self) -> bool {
        matches!(self.phase(), Phase::Done | Phase::Resting)
    }

    /// Whether this turn was accepted for this task and is not waiting in the context.
    pub(crate) fn knows(&self, turn: &[u8]) -> bool {
        self.turn.as_ref().is_some_and(|known| known.id == turn) || self.past.iter().any(|past| past.id == turn)
    }

    /// Whether nothing more comes of a turn by itself. Turns that still wait in the context are not over.
    pub(crate) fn is_over(&self, turn: &[u8]) -> bool {
        if self.state().is_terminal() {
            return true;
        }
        match &self.turn {
            Some(known) if known.id == turn => self.is_at_rest(),
            _ => self.past.iter().any(|past| past.id == turn),
        }
    }

    /// Whether this event, which ended a turn, ended that one: it may have had to wait for others.
    pub(crate) fn ends(&self, event: u64, turn: &[u8]) -> bool {
        let past = self.past.iter().map(|past| (&past.id, past.first_event));
        let known = self.turn.iter().map(|known| (&known.id, known.first_event)).chain(past);
        let first = known.into_iter().find(|(id, _)| *id == turn).map_or(0, |(_, first)| first);
        self.is_over(turn) && event >= first
    }

    /// Number of the newest event that went to the log: the head has those after it.
    pub(crate) const fn logged(&self) -> u64 {
        self.last_event - self.events.len() as u64
    }

    /// Number of the newest message that went to the stream of the history: the head has those after it.
    pub(crate) const fn filed(&self) -> u64 {
        self.history_len - self.messages.len() as u64
    }

    /// Whether the events are worth to be folded away some time after the turn.
    pub(crate) fn has_long_log(&self) -> bool {
        let kept: usize = self.events.iter().map(|event| event.payload.len()).sum();
        self.first_event <= self.logged() || kept > KEPT
    }

    /// The events after a number that the head has.
    pub(crate) fn events_after(&self, after: u64) -> impl Iterator<Item = Entry> + '_ {
        let first = self.logged() + 1;
        let events = (first..).zip(&self.events).skip(usize::try_from((after + 1).saturating_sub(first)).unwrap_or(0));
        events.map(|(number, event)| Entry {
            id: EntryId::number(number),
            tag: u8::try_from(event.tag).unwrap_or_default(),
            payload: event.payload.clone(),
        })
    }

    /// The artifacts that the head itself has, by their place in the list.
    ///
    /// # Errors
    /// When the bytes are not what this service writes.
    pub(crate) fn inlined(&self) -> Result<BTreeMap<usize, v1::Artifact>, prost::DecodeError> {
        let inlined = self.artifacts.iter().enumerate().filter(|(_, artifact)| !artifact.inlined.is_empty());
        inlined.map(|(place, artifact)| Ok((place, v1::Artifact::decode(artifact.inlined.clone())?))).collect()
    }

    /// The artifact events that no fold has seen; `None` when some of them are in the log.
    ///
    /// # Errors
    /// When the bytes are not what this service writes.
    pub(crate) fn unfolded(&self) -> Result<Option<Vec<TaskArtifactUpdateEvent>>, prost::DecodeError> {
        if self.unfolded_bytes == 0 {
            return Ok(Some(Vec::new()));
        }
        if self.folded_to < self.logged() {
            return Ok(None);
        }
        let events = self.events_after(self.folded_to).filter(|entry| entry.tag == tag::ARTIFACT);
        let updates = events.filter_map(|entry| match StreamResponse::decode(entry.payload) {
            Ok(StreamResponse { payload: Some(Payload::ArtifactUpdate(update)) }) => Some(Ok(update)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        });
        updates.collect::<Result<_, _>>().map(Some)
    }

    /// The events whose artifact updates no record holds: those after the first number up to the second. What was
    /// folded away before is not among them.
    pub(crate) fn unfolded_range(&self) -> (u64, u64) {
        match self.unfolded_bytes {
            0 => (self.last_event, self.last_event),
            _ => (self.folded_to.max(self.first_event - 1), self.last_event),
        }
    }

    /// Bytes of history, artifacts, metadata and status.
    pub(crate) fn bytes(&self) -> u64 {
        let artifacts: u64 = self.artifacts.iter().map(|artifact| artifact.bytes).sum();
        let metadata = self.metadata.as_ref().map_or(0, prost::Message::encoded_len);
        let status = self.status.as_ref().map_or(0, prost::Message::encoded_len);
        self.history_bytes + artifacts + (metadata + status) as u64
    }

    /// What decides in which lists of its scope the task stands, and where in them.
    fn row(&self) -> (TaskState, i64) {
        (self.state(), self.status_ms())
    }

    /// Since when the task has a turn that is not over and not stopping.
    fn active(&self) -> Option<i64> {
        let turn = self.turn.as_ref()?;
        matches!(turn.phase(), Phase::Waiting | Phase::Queued | Phase::Running).then_some(turn.queued_ms)
    }

    /// The same, where it is counted per caller.
    fn counted(&self) -> Option<i64> {
        self.active().filter(|_| self.counted)
    }

    /// Since when the task waits for somebody outside.
    fn parked(&self) -> Option<i64> {
        (self.state().is_interrupted() && !self.hidden).then(|| self.status_ms())
    }

    fn due(&self) -> Option<i64> {
        (self.due_ms > 0).then_some(self.due_ms)
    }
}

impl Turn {
    /// Whether it is too late to begin it.
    pub(crate) fn is_late(&self, now: Millis) -> bool {
        self.attempts == 0 && self.deadline_ms > 0 && self.deadline_ms <= now
    }
}

impl Context {
    /// The conversation of a task, which somebody uses now: as it is known, or begun with this task.
    pub(crate) fn of(head: &Head, known: Option<&Held<Self>>, now: Millis) -> Self {
        let mut context = match known {
            Some(known) => Self::clone(&known.value),
            None => Self { since_ms: head.created_ms, tasks: 1, idle_ms: head.context_idle_ms, ..Self::default() },
        };
        context.active_ms = context.active_ms.max(now);
        context
    }

    /// When the first message that waits in here expires; 0 = none does. New tasks that wait expire by themselves.
    pub(crate) fn next_expiry(&self) -> Millis {
        let turns = self.waiting.iter().filter(|waiting| waiting.message.is_some());
        let turns = turns.filter_map(|waiting| waiting.turn.as_ref()).map(|turn| turn.deadline_ms);
        turns.filter(|deadline| *deadline > 0).min().unwrap_or(0)
    }

    /// Whether this turn waits in here.
    pub(crate) fn has_waiting(&self, turn: &[u8]) -> bool {
        self.waiting.iter().any(|waiting| waiting.turn.as_ref().is_some_and(|waiting| waiting.id == turn))
    }

    /// Whether this turn of this task has the context.
    pub(crate) fn is_held_by(&self, task: TaskId, turn: &[u8]) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.task == task.bytes()[..] && holder.turn == turn)
    }
}

/// The operations that move a task from the rows of one head to those of another. They follow from the heads
/// alone, so no caller can forget one.
pub(crate) fn reindex(task: TaskId, was: Option<&Head>, now: Option<&Head>, ops: &mut Vec<Op>) {
    let Some(head) = now.or(was) else { return };
    let mut single = |index: String, member: String, was: Option<i64>, now: Option<i64>| {
        if was != now {
            ops.push(Op::Index { index, member, was, now });
        }
    };
    let both = |value: fn(&Head) -> Option<i64>| (was.and_then(value), now.and_then(value));
    for (index, member, (was, now)) in [
        (keys::ACTIVE, TaskId::text as fn(TaskId) -> String, both(Head::active)),
        (keys::PARKED, TaskId::text, both(Head::parked)),
        (keys::DUE, TaskId::head, both(Head::due)),
    ] {
        if was != now {
            single(index.to_owned(), member(task), was, now);
        }
    }
    let (before, after, counted) = (was.map(Head::row), now.map(Head::row), both(Head::counted));
    if before == after && counted.0 == counted.1 {
        return;
    }
    // Whose a task is, and where it belongs, never changes.
    let (id, scope, context) = (task.text(), head.scope_key(), head.context_id.as_str());
    single(scope.turns(), id.clone(), counted.0, counted.1);
    let at = |row: Option<(TaskState, i64)>| row.map(|(_, at)| at);
    if head.hidden {
        return single(scope.hidden(context), id, at(before), at(after));
    }
    let state = |row: Option<(TaskState, i64)>| row.map(|(state, _)| state);
    let states = [state(before), state(after).filter(|_| state(before) != state(after))];
    for context in [None, Some(context)] {
        single(scope.list(context, None), id.clone(), at(before), at(after));
        for state in states.into_iter().flatten() {
            let within = |row: Option<(TaskState, i64)>| at(row.filter(|(other, _)| *other == state));
            single(scope.list(context, Some(state.into())), id.clone(), within(before), within(after));
        }
    }
}

/// The same for the one row of a context.
pub(crate) fn reindex_context(key: &str, was: Option<&Context>, now: Option<&Context>, ops: &mut Vec<Op>) {
    let due = |context: &Context| (context.due_ms > 0).then_some(context.due_ms);
    let (was, now) = (was.and_then(due), now.and_then(due));
    if was != now {
        ops.push(Op::Index { index: keys::DUE.to_owned(), member: key.to_owned(), was, now });
    }
}

/// Where a message or an event belongs: it is stored without, because the key says it already.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    pub(crate) task: String,
    pub(crate) context: String,
}

impl Place {
    pub(crate) fn new(task: TaskId, context: &str) -> Self {
        Self { task: task.text(), context: context.to_owned() }
    }

    /// Names the place in a message.
    pub(crate) fn name(&self, message: &mut Message) {
        message.task_id.clone_from(&self.task);
        message.context_id.clone_from(&self.context);
    }

    /// Names the place in an event.
    pub(crate) fn name_event(&self, event: &mut StreamResponse) {
        match &mut event.payload {
            Some(Payload::StatusUpdate(update)) => {
                update.task_id.clone_from(&self.task);
                update.context_id.clone_from(&self.context);
                if let Some(message) = update.status.as_mut().and_then(|status| status.message.as_mut()) {
                    self.name(message);
                }
            }
            Some(Payload::ArtifactUpdate(update)) => {
                update.task_id.clone_from(&self.task);
                update.context_id.clone_from(&self.context);
            }
            // The answer of a hidden task: nobody may know that there is one.
            Some(Payload::Message(message)) => message.context_id.clone_from(&self.context),
            Some(Payload::Task(_)) | None => {}
        }
    }

    /// Reads an event as it is stored.
    ///
    /// # Errors
    /// When the bytes are not what this service writes.
    pub(crate) fn event(&self, payload: Bytes) -> Result<StreamResponse, prost::DecodeError> {
        let mut event = StreamResponse::decode(payload)?;
        self.name_event(&mut event);
        Ok(event)
    }

    /// Reads a message as it is stored.
    ///
    /// # Errors
    /// When the bytes are not what this service writes.
    pub(crate) fn message(&self, payload: Bytes) -> Result<Message, prost::DecodeError> {
        let mut message = Message::decode(payload)?;
        self.name(&mut message);
        Ok(message)
    }
}

/// Adds members, the newer one of two with the same key.
pub(crate) fn merge(current: &mut Option<Struct>, newer: Option<Struct>) {
    if let Some(newer) = newer
        && !newer.fields.is_empty()
    {
        current.get_or_insert_default().fields.extend(newer.fields);
    }
}
