//! How an operation says what it wants: from what is stored, purely, to one batch.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    Error,
    state::{self, Refusal},
    v1::{
        Artifact, Message, Part, Role, StreamResponse, TaskArtifactUpdateEvent, TaskState, TaskStatus,
        TaskStatusUpdateEvent, part::Content, stream_response::Payload,
    },
    wkt::{Struct, Timestamp, Value},
};
use rialto_store::{At, Batch, Check, CommitId, Entry, EntryId, Millis, Op};

use crate::{
    artifacts::Unfolded,
    keys::{self, TaskId},
    stored::{self, Context, Head, Held, Phase, Turn, tag},
};

/// What an operation may look at: the task that it is about, and what it asked for.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) task: TaskId,
    /// The task, and others that were asked for. `None` = there is no such task.
    pub(crate) heads: Vec<(TaskId, Option<Held<Head>>)>,
    /// The context with its key, once it was asked for.
    pub(crate) context: Option<(String, Option<Held<Context>>)>,
    /// The artifact events that no record holds yet, once they were asked for.
    pub(crate) unfolded: Option<Unfolded>,
    /// Artifacts as they were at an event, once they were asked for; the inner `None` = nobody can know, for the log
    /// has a gap.
    pub(crate) kept: Option<(u64, Option<BTreeMap<usize, Artifact>>)>,
    /// Whether [`Decide::mark`] is there, once that was looked at.
    pub(crate) marked: Option<bool>,
    /// The message of the turn, once it was asked for; the inner `None` = it is gone.
    pub(crate) message: Option<Option<Message>>,
}

impl State {
    /// The task that the operation is about.
    pub(crate) fn head(&self) -> Option<&Held<Head>> {
        self.heads.first().and_then(|(_, head)| head.as_ref())
    }

    /// Another task; the outer `None` = not read yet.
    pub(crate) fn other(&self, task: TaskId) -> Option<Option<&Held<Head>>> {
        self.heads.iter().find(|(known, _)| *known == task).map(|(_, head)| head.as_ref())
    }

    /// The context; asks for it when it was not read yet.
    pub(crate) fn context(&self, head: &Head) -> Result<Option<&Held<Context>>, Need> {
        match &self.context {
            Some((_, held)) => Ok(held.as_ref()),
            None => Err(Need::Context(head.scope_key().context(&head.context_id))),
        }
    }
}

/// What an operation must see before it can decide.
#[derive(Debug)]
pub(crate) enum Need {
    /// The context with this key.
    Context(String),
    /// Another task of the shard.
    Head(TaskId),
    /// The unfolded events of the task, the records that they need, and these records.
    Unfolded(BTreeSet<usize>),
    /// The artifacts as they were at this event.
    Kept(u64),
    /// The message of the turn.
    Message,
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Decision<R> {
    /// Write this, and answer that once it is written.
    Commit(Box<Change>, R),
    /// Nothing has to be written.
    Reply(R),
    /// No.
    Refuse(Error),
    /// Cannot say yet.
    Need(Need),
}

impl<R> From<Need> for Decision<R> {
    fn from(need: Need) -> Self {
        Self::Need(need)
    }
}

impl<R> From<Error> for Decision<R> {
    fn from(error: Error) -> Self {
        Self::Refuse(error)
    }
}

/// An operation on a task: a pure function of what is stored, the request (`self`) and the time. It is asked again
/// whenever what it saw turns out to be old.
pub(crate) trait Decide {
    /// The answer.
    type Reply;

    /// A record that exists, or not; looked at when anything turns out to be old.
    fn mark(&self) -> Option<String> {
        None
    }

    /// Decides.
    fn decide(&self, state: &State, now: Millis) -> Decision<Self::Reply>;
}

/// What an operation wants to write.
#[derive(Debug, Default)]
pub(crate) struct Change {
    /// Tasks as they will be.
    pub(crate) drafts: Vec<Draft>,
    /// Tasks that are deleted.
    pub(crate) deletes: Vec<(TaskId, Held<Head>)>,
    /// The context as it will be; the inner `None` deletes it.
    pub(crate) context: Option<Option<Context>>,
    /// Conditions beyond the versions of what is written.
    pub(crate) checks: Vec<Check>,
    /// Operations on anything else.
    pub(crate) ops: Vec<Op>,
    /// Passes when the store is full.
    pub(crate) releasing: bool,
    /// See [`Batch::deferred`].
    pub(crate) deferred: bool,
}

impl Change {
    /// A change of one task.
    pub(crate) fn of(draft: Draft) -> Self {
        Self { drafts: vec![draft], ..Self::default() }
    }

    /// The batch that makes this change, if nothing that it was decided on has changed.
    pub(crate) fn batch(&mut self, state: &State, id: CommitId) -> Batch {
        let mut batch =
            Batch { shard: state.task.shard(), releasing: self.releasing, deferred: self.deferred, ..Batch::default() };
        let (pending, other): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.checks).into_iter().partition(|check| matches!(check, Check::Pending { .. }));
        batch.checks = pending;
        // Whatever was looked at, not only what is written.
        for (task, held) in &state.heads {
            batch.checks.push(Check::unchanged(task.head(), held.as_ref().map(|held| held.version)));
        }
        if let Some((key, held)) = &state.context {
            batch.checks.push(Check::unchanged(key.as_str(), held.as_ref().map(|held| held.version)));
        }
        batch.checks.extend(other);

        for draft in &mut self.drafts {
            draft.spill();
            batch.ops.push(Op::Put { key: draft.task.head(), bytes: draft.head.encode_to_vec().into() });
        }
        batch.commit = self.drafts.first().map(|draft| (draft.task.head(), id));
        if let Some((key, held)) = &state.context
            && let Some(context) = &self.context
        {
            let key = || key.clone();
            batch.ops.push(match context {
                Some(context) => Op::Put { key: key(), bytes: context.encode_to_vec().into() },
                None => Op::Delete { key: key() },
            });
            let was = held.as_ref().map(|held| &*held.value);
            stored::reindex_context(&key(), was, context.as_ref(), &mut batch.ops);
        }
        for (task, held) in &self.deletes {
            batch.ops.push(Op::Delete { key: task.head() });
            stored::reindex(*task, Some(&held.value), None, &mut batch.ops);
        }
        for draft in &mut self.drafts {
            stored::reindex(draft.task, draft.was.as_ref().map(|held| &*held.value), Some(&draft.head), &mut batch.ops);
            batch.ops.append(&mut draft.ops);
            // Nobody can have been told of a task that does not exist yet.
            if !draft.events.is_empty() && draft.was.is_some() {
                let payload = format!("{} {}", draft.task, draft.head.last_event);
                batch.ops.push(Op::Notify { topic: keys::EVENTS.to_owned(), payload });
            }
        }
        batch.ops.append(&mut self.ops);
        batch
    }
}

/// Why an agent's events or messages were not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// They are not A2A.
    #[error("{0}")]
    Invalid(String),
    /// They make the task larger than it may be.
    #[error("the task would be larger than {0} bytes")]
    TooLarge(u64),
    /// One turn says more than a log may hold.
    #[error("the events of one turn would take more than {0} bytes")]
    TooLong(u64),
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        Self::Invalid(refusal.to_string())
    }
}

/// Artifacts that one task may have: the head lists them.
const MAX_ARTIFACTS: usize = 1000;

/// Bytes of events that one turn may write.
const MAX_TURN_LOG: u64 = 64 << 20;

/// A task that is being changed.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) task: TaskId,
    pub(crate) was: Option<Held<Head>>,
    pub(crate) head: Head,
    /// New events, numbered; the head has them too.
    pub(crate) events: Vec<Entry>,
    /// The artifact events among them.
    pub(crate) updates: Vec<TaskArtifactUpdateEvent>,
    /// Operations on the task's other keys.
    pub(crate) ops: Vec<Op>,
    now: Millis,
}

impl Draft {
    /// A task that does not exist yet.
    pub(crate) fn create(task: TaskId, head: Head, now: Millis) -> Self {
        Self { task, was: None, head, events: Vec::new(), updates: Vec::new(), ops: Vec::new(), now }
    }

    /// A change of a task.
    pub(crate) fn edit(task: TaskId, held: &Held<Head>, now: Millis) -> Self {
        Self { was: Some(held.clone()), ..Self::create(task, Head::clone(&held.value), now) }
    }

    fn push(&mut self, tag: u8, payload: Payload) -> Option<Payload> {
        self.head.last_event += 1;
        let event = StreamResponse { payload: Some(payload) };
        let bytes: Bytes = event.encode_to_vec().into();
        if tag == tag::ARTIFACT {
            self.head.unfolded_bytes += bytes.len() as u64;
        }
        if let Some(turn) = &mut self.head.turn {
            turn.log_bytes += bytes.len() as u64;
        }
        self.head.events.push(stored::Event { tag: tag.into(), payload: bytes.clone() });
        self.events.push(Entry { id: EntryId::number(self.head.last_event), tag, payload: bytes });
        event.payload
    }

    /// Moves events and messages that are too many for the head to their streams.
    fn spill(&mut self) {
        let (logged, filed) = (self.head.logged(), self.head.filed());
        if self.head.events.iter().map(|event| event.payload.len()).sum::<usize>() > stored::INLINED {
            for (number, event) in (logged + 1..).zip(std::mem::take(&mut self.head.events)) {
                let (tag, stream) = (u8::try_from(event.tag).unwrap_or_default(), self.task.log());
                let at = At::Number(number);
                self.ops.push(Op::Append { stream, at, tag, payload: event.payload, into: None });
            }
        }
        if self.head.messages.iter().map(Bytes::len).sum::<usize>() > stored::INLINED {
            for (number, payload) in (filed + 1..).zip(std::mem::take(&mut self.head.messages)) {
                let (stream, at) = (self.task.history(), At::Number(number));
                self.ops.push(Op::Append { stream, at, tag: 0, payload, into: None });
            }
        }
    }

    /// Gives the task a status as of now, with an event that says so.
    pub(crate) fn status(
        &mut self,
        state: TaskState,
        message: Option<Message>,
        metadata: Option<Struct>,
    ) -> Result<(), Fault> {
        let message = message.map(bare);
        let next = TaskStatus { state: state.into(), message, timestamp: Some(Timestamp::from_millis(self.now)) };
        let status = self.head.status.get_or_insert_default();
        state::set_status(status, next)?;
        let (status, tag) = (
            Some(status.clone()),
            match state {
                _ if state.is_terminal() => tag::TERMINAL,
                _ if state.is_interrupted() => tag::INTERRUPTED,
                _ => tag::STATE,
            },
        );
        stored::merge(&mut self.head.metadata, metadata.clone());
        self.push(tag, Payload::StatusUpdate(TaskStatusUpdateEvent { status, metadata, ..Default::default() }));
        Ok(())
    }

    /// Gives the task a status in the service's own name.
    pub(crate) fn status_because(&mut self, state: TaskState, reason: &str, text: &str) {
        self.status_with(state, [("reason", Value::from(reason))].into_iter().collect(), text);
    }

    /// The same, with more than a reason.
    pub(crate) fn status_with(&mut self, state: TaskState, metadata: Struct, text: &str) {
        let part = Part { content: Some(Content::Text(text.to_owned())), ..Part::default() };
        let message = Message {
            // As good as random: nobody else numbers the events of this task.
            message_id: format!("{}-{}", self.task, self.head.last_event + 1),
            role: Role::Agent.into(),
            parts: vec![part],
            metadata: Some(metadata),
            ..Message::default()
        };
        self.status(state, Some(message), None).expect("callers looked that the task has not ended");
    }

    /// Adds an artifact event of the agent.
    pub(crate) fn artifact(&mut self, mut update: TaskArtifactUpdateEvent, turn: u32) -> Result<(), Fault> {
        let artifact = update.artifact.as_mut().ok_or(Refusal::Empty)?;
        if artifact.artifact_id.is_empty() {
            return Err(Fault::Invalid("an artifact without an artifactId".to_owned()));
        }
        let place = self.head.artifacts.iter().position(|known| known.id == artifact.artifact_id);
        let place = match place {
            Some(place) => place,
            None if update.append => return Err(Refusal::UnknownArtifact(artifact.artifact_id.clone()).into()),
            None if self.head.artifacts.len() >= MAX_ARTIFACTS => {
                return Err(Fault::Invalid(format!("more than {MAX_ARTIFACTS} artifacts")));
            }
            None => {
                let id = artifact.artifact_id.clone();
                self.head.artifacts.push(stored::Artifact { id, ..Default::default() });
                self.head.artifacts.len() - 1
            }
        };
        let known = &mut self.head.artifacts[place];
        let bytes = artifact.encoded_len() as u64;
        known.bytes = if update.append { known.bytes + bytes } else { bytes };
        known.turn = turn;
        known.last_event = self.head.last_event + 1;
        known.discarded = false;
        update.task_id.clear();
        update.context_id.clear();
        if let Some(Payload::ArtifactUpdate(update)) = self.push(tag::ARTIFACT, Payload::ArtifactUpdate(update)) {
            self.updates.push(update);
        }
        Ok(())
    }

    /// Ends a hidden task with its answer.
    pub(crate) fn answer(&mut self, message: Message, metadata: Option<Struct>) -> Result<(), Fault> {
        let message = bare(message);
        let timestamp = Some(Timestamp::from_millis(self.now));
        let next = TaskStatus { state: TaskState::Completed.into(), message: None, timestamp };
        state::set_status(self.head.status.get_or_insert_default(), next)?;
        stored::merge(&mut self.head.metadata, metadata);
        self.push(tag::TERMINAL, Payload::Message(message));
        Ok(())
    }

    /// Appends to the history.
    pub(crate) fn say(&mut self, message: Message) {
        let payload: Bytes = bare(message).encode_to_vec().into();
        self.head.history_len += 1;
        self.head.history_bytes += payload.len() as u64;
        self.head.messages.push(payload);
    }

    /// Whether the task is within its size, and its log as well: an agent that only ever replaces things could
    /// write for ever.
    pub(crate) fn fits(&self) -> Result<(), Fault> {
        let (journal, log) = self.head.turn.as_ref().map_or((0, 0), |turn| (turn.journal_bytes, turn.log_bytes));
        match (self.head.bytes() + journal, log) {
            (bytes, _) if bytes > self.head.max_bytes => Err(Fault::TooLarge(self.head.max_bytes)),
            (_, log) if log > MAX_TURN_LOG => Err(Fault::TooLong(MAX_TURN_LOG)),
            _ => Ok(()),
        }
    }

    /// Lets the turn be run next in its context.
    pub(crate) fn queue(&mut self) {
        if let Some(turn) = self.head.turn.as_mut() {
            turn.set_phase(Phase::Queued);
        }
        self.append_run();
    }

    /// Puts the turn on the work stream of its agent.
    pub(crate) fn append_run(&mut self) {
        let agent = self.head.agent().to_owned();
        let Some(turn) = self.head.turn.as_ref() else { return };
        let run = rialto_rpc::tasks::RunEntry {
            schema: RUN_SCHEMA,
            task_id: self.task.text(),
            turn_id: turn.id.clone(),
            traceparent: turn.traceparent.clone(),
            queued_at_ms: turn.queued_ms,
            agent,
            ..Default::default()
        };
        self.ops.push(Op::Append {
            stream: keys::runs(&run.agent),
            at: At::Next,
            tag: 0,
            payload: run.encode_to_vec().into(),
            into: Some((self.task.head(), keys::RUN.to_owned())),
        });
    }

    /// The next message of a task that waits for one.
    pub(crate) fn admit(&mut self, mut turn: Turn, message: Message, metadata: Option<Struct>) -> Result<(), Fault> {
        let before = self.head.turn.take().unwrap_or_default();
        turn.number = before.number + 1;
        turn.fence = before.fence;
        let deadline = turn.deadline_ms;
        let past = stored::PastTurn { id: before.id, fence: before.fence, first_event: before.first_event };
        self.head.past.push(past);
        if self.head.past.len() > PAST_TURNS {
            self.head.past.remove(0);
        }
        self.say(message);
        turn.message = self.head.history_len;
        turn.first_event = self.head.last_event + 1;
        self.head.turn = Some(turn);
        if before.journal > 0 {
            // It rested, and is not wanted any more.
            self.ops.push(Op::Drop { stream: self.task.journal() });
        }
        self.head.due_ms = deadline;
        self.status(TaskState::Submitted, None, metadata)
    }
}

/// A message as it is stored: the key says where it belongs.
fn bare(mut message: Message) -> Message {
    message.task_id.clear();
    message.context_id.clear();
    message
}

/// The schema of run entries that this version writes, and the newest that it understands.
pub(crate) const RUN_SCHEMA: u32 = 1;

/// Earlier turns that a head remembers: a repeat of a call comes soon, or never.
const PAST_TURNS: usize = 16;
