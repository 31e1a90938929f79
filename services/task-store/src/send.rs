//! Accepting a message: a new task, or the next turn of one.

use prost::Message as _;
use rialto_a2a::{
    Error, Kind,
    v1::{Message, TaskState},
    wkt::Struct,
};
use rialto_rpc::tasks::{Policy, Scope, WhenBusy};
use rialto_store::{Check, Millis, Op};

use crate::{
    change::{Change, Decide, Decision, Draft, State},
    keys::{self, TaskId, TurnId},
    stored::{Context, Head, Held, Holder, Phase, Reservation, Turn, Waiting},
    turn::span,
};

/// Turns that may wait in one context.
const MAX_WAITING: usize = 32;

/// Bytes of messages that may wait in one context; a first one may be larger.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// The largest task of all: what the internal calls can carry.
pub(crate) const MAX_TASK_BYTES: u64 = 16 << 20;

/// The text of the seed; clients compare it.
const BUSY: &str = "Task is already working.";

/// A message that was sent.
#[derive(Debug)]
pub(crate) struct Send<'a> {
    pub(crate) scope: &'a Scope,
    pub(crate) turn: TurnId,
    /// The task that the message names, or the one that it would create.
    pub(crate) task: TaskId,
    /// Of the message; empty when it names a task only.
    pub(crate) context_id: &'a str,
    /// Whether the message names a task.
    pub(crate) follow_up: bool,
    pub(crate) message: &'a Message,
    pub(crate) metadata: Option<&'a Struct>,
    pub(crate) policy: &'a Policy,
    pub(crate) shards: u16,
    pub(crate) traceparent: &'a str,
    /// Until when it is remembered that this message was accepted; only for those with a client's name.
    pub(crate) named_until: Option<Millis>,
    /// The caller has as many tasks under way as it may have.
    pub(crate) caller_full: bool,
}

/// What became of a message.
#[derive(Debug)]
pub(crate) enum Sent {
    /// It made this task.
    Created(Box<Head>),
    /// It is the next message of this task, now or when others are done.
    Added(Box<Head>),
    /// It had been accepted before; where its turn stands is to be looked up.
    Before,
    /// The same, so long ago that the task does not know its turn any more.
    LongBefore,
}

impl Decide for Send<'_> {
    type Reply = Sent;

    fn mark(&self) -> Option<String> {
        self.named_until.map(|_| keys::accepted(&self.turn))
    }

    fn decide(&self, state: &State, now: Millis) -> Decision<Sent> {
        let decided = match self.follow_up {
            false => self.create(state, now),
            true => self.follow_up(state, now),
        };
        decided.unwrap_or_else(|other| other)
    }
}

impl Send<'_> {
    fn create(&self, state: &State, now: Millis) -> Result<Decision<Sent>, Decision<Sent>> {
        if let Some(held) = state.head() {
            // Nobody else mints this turn id, so this is what an earlier try did.
            return match held.value.scope.as_ref() == Some(self.scope) {
                true => Ok(Decision::Reply(Sent::Before)),
                false => Err(Error::invalid("turn_id", "is in use").into()),
            };
        }
        if state.marked == Some(true) {
            // It was, and is forgotten.
            return Err(Error::from(Kind::TaskNotFound).into());
        }
        let head = Head {
            counted: self.policy.max_caller_turns > 0,
            scope: Some(self.scope.clone()),
            context_id: self.context_id.to_owned(),
            hidden: self.policy.hidden,
            created_ms: now,
            first_event: 1,
            task_ttl_ms: self.policy.task_ttl_ms,
            context_idle_ms: self.policy.context_idle_ms,
            max_bytes: match self.policy.max_task_bytes {
                0 => MAX_TASK_BYTES,
                bytes => bytes.min(MAX_TASK_BYTES),
            },
            ..Head::default()
        };
        let known = state.context(&head)?;
        let mut context = self.context(&head, known, now);
        if known.is_some() {
            context.tasks += 1;
        }
        let mut draft = Draft::create(self.task, head, now);
        draft.say(self.message.clone());
        let turn = Turn { number: 1, message: 1, first_event: 1, ..self.turn(now) };
        draft.head.due_ms = turn.deadline_ms;
        draft.head.turn = Some(turn);
        draft.status(TaskState::Submitted, None, self.metadata.cloned()).map_err(|_| Error::internal())?;
        draft.fits().map_err(|_| Error::from(Kind::PayloadTooLarge))?;
        let mut change = Change::of(draft);
        match context.holder {
            None => {
                change.drafts[0].queue();
                self.hold(&mut context, &mut change)?;
            }
            Some(_) => self.wait(&mut context, None, now)?,
        }
        self.remember(&mut change);
        let sent = Sent::Created(Box::new(change.drafts[0].head.clone()));
        change.context = Some(Some(context));
        Ok(Decision::Commit(Box::new(change), sent))
    }

    fn follow_up(&self, state: &State, now: Millis) -> Result<Decision<Sent>, Decision<Sent>> {
        let Some(held) = state.head().filter(|held| held.value.visible_to(self.scope)) else {
            return Err(Error::from(Kind::TaskNotFound).into());
        };
        let head = &held.value;
        if !self.context_id.is_empty() && self.context_id != head.context_id {
            return Err(Error::invalid("message.contextId", "is not the context of the task").into());
        }
        if head.knows(&self.turn) {
            return Ok(Decision::Reply(Sent::Before));
        }
        // Before the mark is looked at: both are then of one moment, and a message that expires loses both at once.
        let known = state.context(head)?;
        if state.marked == Some(true) {
            let waits = known.is_some_and(|held| held.value.has_waiting(&self.turn));
            return Ok(Decision::Reply(if waits { Sent::Before } else { Sent::LongBefore }));
        }
        if head.state().is_terminal() {
            let text = "Task is in a terminal state and takes no more messages.";
            return Err(Error::new(Kind::UnsupportedOperation, text).into());
        }
        let mut context = self.context(head, known, now);
        if context.has_waiting(&self.turn) {
            return Ok(Decision::Reply(Sent::Before));
        }
        let mut draft = Draft::edit(self.task, held, now);
        // A task that is at work keeps its context, whatever the record says.
        let at_work = !head.is_at_rest();
        if context.holder.is_some() || at_work {
            self.wait(&mut context, Some(self.message.clone()), now)?;
            let mut change = Change { context: Some(Some(context)), ..Change::default() };
            self.remember(&mut change);
            return Ok(Decision::Commit(Box::new(change), Sent::Added(Box::new(draft.head))));
        }
        let turn = self.turn(now);
        draft
            .admit(turn, self.message.clone(), self.metadata.cloned())
            .map_err(|_| Error::new(Kind::UnsupportedOperation, BUSY))?;
        draft.fits().map_err(|_| Error::from(Kind::PayloadTooLarge))?;
        draft.head.counted = self.policy.max_caller_turns > 0;
        draft.queue();
        let mut change = Change::of(draft);
        self.hold(&mut context, &mut change)?;
        self.remember(&mut change);
        let sent = Sent::Added(Box::new(change.drafts[0].head.clone()));
        change.context = Some(Some(context));
        Ok(Decision::Commit(Box::new(change), sent))
    }

    fn turn(&self, now: Millis) -> Turn {
        let mut turn = Turn {
            id: self.turn.to_vec().into(),
            queued_ms: now,
            deadline_ms: match self.policy.queue_timeout_ms {
                0 => 0,
                timeout => now + span(timeout),
            },
            traceparent: self.traceparent.to_owned(),
            ..Turn::default()
        };
        turn.set_phase(Phase::Waiting);
        turn
    }

    /// The conversation, which this message uses.
    fn context(&self, head: &Head, known: Option<&Held<Context>>, now: Millis) -> Context {
        Context { idle_ms: self.policy.context_idle_ms, ..Context::of(head, known, now) }
    }

    /// Takes the context for this turn.
    fn hold(&self, context: &mut Context, change: &mut Change) -> Result<(), Error> {
        if self.caller_full {
            return Err(queue_full());
        }
        let task = self.task.bytes().to_vec().into();
        context.holder = Some(Holder { task, turn: self.turn.to_vec().into() });
        context.due_ms = context.next_expiry();
        if self.policy.max_turns > 0 {
            // Contexts spread evenly over the shards, and a batch sees one of them.
            let len = self.policy.max_turns.div_ceil(u64::from(self.shards.max(1)));
            change.checks.push(Check::ShorterThan { stream: keys::runs(&self.scope.agent), len });
        }
        Ok(())
    }

    /// Keeps that this message was accepted, for as long as its name counts: the task may be gone by then.
    fn remember(&self, change: &mut Change) {
        let (Some(until), Some(key)) = (self.named_until, self.mark()) else { return };
        change.checks.push(Check::Absent { key: key.clone() });
        let bytes = Reservation { expires_ms: until, ..Reservation::default() }.encode_to_vec().into();
        change.ops.push(Op::Put { key: key.clone(), bytes });
        change.ops.push(Op::Index { index: keys::DUE.to_owned(), member: key, was: None, now: Some(until) });
    }

    /// Lets this turn wait for the one that has the context.
    fn wait(&self, context: &mut Context, message: Option<Message>, now: Millis) -> Result<(), Error> {
        if self.policy.when_busy() == WhenBusy::Reject {
            return Err(Error::new(Kind::UnsupportedOperation, BUSY));
        }
        let size = |message: &Option<Message>| message.as_ref().map_or(0, prost::Message::encoded_len);
        let waiting: usize = context.waiting.iter().map(|waiting| size(&waiting.message)).sum();
        let too_large = waiting > 0 && waiting + size(&message) > MAX_WAITING_BYTES;
        if context.waiting.len() >= MAX_WAITING || too_large || self.caller_full {
            return Err(queue_full());
        }
        let task = self.task.bytes().to_vec().into();
        let metadata = message.is_some().then(|| self.metadata.cloned()).flatten();
        context.waiting.push(Waiting { task, turn: Some(self.turn(now)), message, metadata });
        context.due_ms = context.next_expiry();
        Ok(())
    }
}

/// Too many turns wait.
pub(crate) fn queue_full() -> Error {
    Error::from(Kind::QueueFull).retry_after(std::time::Duration::from_secs(1))
}
