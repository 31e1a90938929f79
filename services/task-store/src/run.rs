//! What runners do to a turn: begin it, write to it, finish it, hand it back.

use std::borrow::Cow;

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    v1::{Message, StreamResponse, TaskState, stream_response::Payload},
    wkt::Struct,
};
use rialto_rpc::tasks::{JournalEntry, Outcome, RunEntry};
use rialto_store::{
    At, Check, EntryId, Millis, Op,
    worker::{DEAD, DeadEntry},
};

use crate::{
    artifacts,
    change::{Change, Decide, Decision, Draft, Fault, Need, State},
    keys::{self, TaskId},
    lost,
    stored::{self, Head, Held, Phase, Turn},
    turn::{self, Rules},
};

/// A claimed run entry.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) stream: String,
    pub(crate) entry: EntryId,
    pub(crate) consumer: String,
}

impl Claim {
    fn pending(&self) -> Check {
        Check::Pending { stream: self.stream.clone(), id: self.entry, consumer: self.consumer.clone() }
    }

    fn ack(&self) -> Op {
        Op::Ack { stream: self.stream.clone(), id: self.entry }
    }
}

/// A runner wants to start the turn that it claimed.
#[derive(Debug)]
pub(crate) struct Begin<'a> {
    pub(crate) rules: &'a Rules,
    pub(crate) run: &'a RunEntry,
    pub(crate) claim: Claim,
    pub(crate) max_attempts: u32,
    /// How the attempt before this one ended, if that is known.
    pub(crate) crash: &'a str,
    pub(crate) commit: &'a [u8],
}

/// Whether there is something to run.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The turn is the caller's; the head is as it is from now on.
    Run(Box<Head>),
    /// There is nothing to do, and the entry is settled.
    Settled,
}

impl Decide for Begin<'_> {
    type Reply = Begun;

    fn decide(&self, state: &State, now: Millis) -> Decision<Begun> {
        self.begin(state, now).unwrap_or_else(Decision::Need)
    }
}

impl Begin<'_> {
    fn begin(&self, state: &State, now: Millis) -> Result<Decision<Begun>, Need> {
        let held = state.head().filter(|held| held.value.agent() == self.run.agent);
        let Some((held, turn)) = held.and_then(|held| Some((held, held.value.turn.as_ref()?))) else {
            return Ok(self.settle(Change::default()));
        };
        if turn.id != self.run.turn_id {
            return Ok(self.settle(Change::default()));
        }
        let mut draft = Draft::edit(state.task, held, now);
        match turn.phase() {
            Phase::Running if turn.begin_commit == self.commit => {
                return Ok(Decision::Reply(Begun::Run(Box::new(draft.head))));
            }
            // Two entries for one turn: only the newest counts.
            Phase::Running | Phase::Queued if held.run.is_some_and(|run| run != self.claim.entry) => {
                return Ok(self.settle(Change::default()));
            }
            Phase::Running | Phase::Queued => {}
            // Whoever ran it is gone, so nobody will confirm.
            Phase::Stopping => {
                let mut change = Change::of(draft);
                self.rules.end_turn(state, &mut change, now)?;
                return Ok(self.settle(change));
            }
            Phase::Waiting | Phase::Resting | Phase::Done => return Ok(self.settle(Change::default())),
        }
        if turn.is_late(now) {
            let mut change = Change::of(draft);
            turn::fail(self.rules, state, &mut change, EXPIRED, now)?;
            return Ok(self.settle(change));
        }
        if turn.attempts >= self.max_attempts.max(1) {
            let times = match turn.attempts {
                1 => "once".to_owned(),
                times => format!("{times} times"),
            };
            let last = if self.crash.is_empty() { "its runner was lost" } else { self.crash };
            let text = format!("The agent or its runner was lost {times} on this message; it is not tried again.");
            let why = format!("the agent crashed {times}; the last time, {last}");
            return self.give_up(state, draft, ("crashed", &text), why, now);
        }
        if draft.head.state() != TaskState::Working {
            draft.status(TaskState::Working, None, None).expect("a queued task has not ended");
        } else if let Err(lost::Unknown) = lost::take_back(&mut draft, state)? {
            return self.give_up(state, draft, DAMAGED, "the log of the task has a gap".to_owned(), now);
        }
        let last_event = draft.head.last_event;
        draft.head.due_ms = 0;
        let turn = draft.head.turn.as_mut().expect("it was there");
        turn.kept_event = last_event;
        turn.set_phase(Phase::Running);
        turn.fence = next_fence(turn, now);
        turn.attempts += 1;
        turn.entry = self.claim.entry.to_string();
        turn.consumer.clone_from(&self.claim.consumer);
        turn.begin_commit = self.commit.to_vec().into();
        let reply = Begun::Run(Box::new(draft.head.clone()));
        let mut change = Change::of(draft);
        // When the store is full, the way out is that work gets done.
        change.releasing = true;
        // Undone by a loss of power, the turn is queued again and begins again.
        change.deferred = true;
        change.checks.push(self.claim.pending());
        Ok(Decision::Commit(Box::new(change), reply))
    }

    /// The turn cannot go on: the task fails, and whoever operates this finds everything about it in one place.
    fn give_up(
        &self,
        state: &State,
        mut draft: Draft,
        said: (&str, &str),
        reason: String,
        now: Millis,
    ) -> Result<Decision<Begun>, Need> {
        let Some(message) = &state.message else { return Err(Need::Message) };
        // The last attempt may be alive after all. Its end does not count, and it must be told so.
        if let Some(turn) = &mut draft.head.turn {
            turn.fence = next_fence(turn, now);
        }
        let attempts = draft.head.turn.as_ref().map_or(0, |turn| turn.attempts);
        let mut change = Change::of(draft);
        turn::fail(self.rules, state, &mut change, said, now)?;
        let run = RunEntry {
            message_id: message.as_ref().map(|message| message.message_id.clone()).unwrap_or_default(),
            attempts,
            ..self.run.clone()
        };
        let dead = DeadEntry {
            stream: self.claim.stream.clone(),
            id: self.claim.entry,
            tag: 0,
            payload: run.encode_to_vec().into(),
            deliveries: attempts,
            reason,
            at: now,
        };
        let payload = dead.encode().into();
        change.ops.push(Op::Append { stream: DEAD.to_owned(), at: At::Next, tag: 0, payload, into: None });
        Ok(self.settle(change))
    }

    fn settle(&self, mut change: Change) -> Decision<Begun> {
        change.checks.push(self.claim.pending());
        change.ops.push(self.claim.ack());
        change.releasing = true;
        Decision::Commit(Box::new(change), Begun::Settled)
    }
}

/// A fence that no attempt had before, not even one that the store has forgotten in a fail-over and whose runner goes
/// on. So it is a time and no count.
fn next_fence(turn: &Turn, now: Millis) -> u64 {
    (turn.fence + 1).max(u64::try_from(now).unwrap_or_default())
}

/// Why a turn ends that would have to take back what nobody can read any more.
const DAMAGED: (&str, &str) =
    ("damaged", "A part of what was said in this task is lost; it cannot go on after an interruption.");

/// Why a turn ends without having begun.
pub(crate) const EXPIRED: (&str, &str) = ("expired", "The message expired in the queue; it was not started.");

/// A runner writes to its turn, and perhaps finishes it.
#[derive(Debug)]
pub(crate) struct Write<'a> {
    pub(crate) rules: &'a Rules,
    pub(crate) turn: &'a [u8],
    pub(crate) fence: u64,
    pub(crate) first_event: u64,
    pub(crate) events: &'a [StreamResponse],
    pub(crate) journal: &'a [JournalEntry],
    pub(crate) history: &'a [Message],
    pub(crate) metadata: Option<&'a Struct>,
    /// Ends the turn.
    pub(crate) finish: bool,
    pub(crate) claim: Option<Claim>,
}

/// What became of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) outcome: Outcome,
    pub(crate) last_event: u64,
}

impl Decide for Write<'_> {
    type Reply = Written;

    fn decide(&self, state: &State, now: Millis) -> Decision<Written> {
        self.write(state, now).unwrap_or_else(Decision::Need)
    }
}

impl Write<'_> {
    fn write(&self, state: &State, now: Millis) -> Result<Decision<Written>, Need> {
        let reply = |outcome, last_event| Ok(Decision::Reply(Written { outcome, last_event }));
        let Some(held) = state.head() else { return reply(Outcome::Fenced, 0) };
        let head = &held.value;
        let canceled = head.state() == TaskState::Canceled;
        let turn = match &head.turn {
            Some(turn) if turn.id == self.turn && turn.fence == self.fence => turn,
            // A repeat of a Finish whose answer was lost, after the next turn came.
            _ if self.finish && head.past.iter().any(|past| past.id == self.turn && past.fence == self.fence) => {
                return reply(Outcome::Ok, head.last_event);
            }
            // The same, after a Grant.
            Some(turn) if self.finish && turn.id == self.turn && turn.rested_fence == self.fence => {
                return reply(Outcome::Ok, head.last_event);
            }
            _ => return reply(Outcome::Fenced, head.last_event),
        };
        // What the log holds already came with a call whose answer was lost.
        let known = usize::try_from((head.last_event + 1).saturating_sub(self.first_event)).unwrap_or(usize::MAX);
        let events = self.events.get(known..).unwrap_or_default();
        let journal = self.journal.iter().skip_while(|entry| entry.step <= turn.journal);
        match turn.phase() {
            Phase::Running if self.is_ahead(head.last_event, turn.journal) => {
                let change = give_back(state.task, held, self.entry(head), false, now);
                let written = Written { outcome: Outcome::Fenced, last_event: head.last_event };
                return Ok(Decision::Commit(Box::new(change), written));
            }
            Phase::Running => {}
            Phase::Stopping if self.finish => return self.confirm(state, now),
            Phase::Stopping => return reply(Outcome::Canceled, head.last_event),
            Phase::Resting | Phase::Queued | Phase::Waiting if self.finish && turn.rested_fence == self.fence => {
                return reply(Outcome::Ok, head.last_event);
            }
            Phase::Done if self.finish && (!canceled || self.events.is_empty()) => {
                return reply(Outcome::Ok, head.last_event);
            }
            Phase::Done if canceled => return reply(Outcome::Canceled, head.last_event),
            Phase::Done if events.is_empty() => return reply(Outcome::Ok, head.last_event),
            Phase::Done | Phase::Resting | Phase::Queued | Phase::Waiting => {
                return reply(Outcome::Fenced, head.last_event);
            }
        }
        let mut draft = Draft::edit(state.task, held, now);
        let mut kept = turn.kept_event;
        for (step, entry) in (turn.journal + 1..).zip(journal) {
            let turn = draft.head.turn.as_mut().expect("it was there");
            let payload: Bytes = entry.encode_to_vec().into();
            turn.journal = step;
            turn.journal_bytes += payload.len() as u64;
            kept = kept.max(entry.after_event);
            let (stream, at, tag) = (draft.task.journal(), At::Number(step.into()), stored::tag::JOURNAL);
            draft.ops.push(Op::Append { stream, at, tag, payload, into: None });
        }
        if let Err(fault) = self.apply(&mut draft, events) {
            return self.fail(state, &fault, now);
        }
        let last_event = draft.head.last_event;
        if let Some(turn) = &mut draft.head.turn {
            turn.kept_event = kept.min(last_event);
        }
        if !self.finish && draft.events.is_empty() && draft.ops.is_empty() && draft.head == **head {
            return reply(Outcome::Ok, head.last_event);
        }
        if (self.finish || draft.head.may_fold_early() && artifacts::is_worth_folding(&draft.head))
            && let Err(refusal) = artifacts::fold(&mut draft, state)?
        {
            return self.fail(state, &refusal.into(), now);
        }
        let mut change = Change::of(draft);
        if self.finish {
            change.releasing = true;
            change.ops.extend(self.claim.as_ref().map(Claim::ack));
            match change.drafts[0].head.state() {
                TaskState::AuthRequired => self.rules.rest_turn(state, &mut change, now)?,
                _ => self.rules.end_turn(state, &mut change, now)?,
            }
        }
        Ok(Decision::Commit(Box::new(change), Written { outcome: Outcome::Ok, last_event }))
    }

    /// Whether this builds on something that is not there. The store was told it and has forgotten it, as in a
    /// fail-over; what would be written now had a hole. Nobody crashed, so the turn goes on from what is there.
    fn is_ahead(&self, last_event: u64, steps: u32) -> bool {
        let lacks_events = self.first_event > last_event + 1;
        let lacks_steps = self.journal.iter().find(|entry| entry.step > steps).is_some_and(|it| it.step > steps + 1);
        // A runner ends a turn without a word only to confirm a cancel.
        let lacks_cancel = self.finish && self.events.is_empty();
        lacks_events || lacks_steps || lacks_cancel
    }

    /// Applies what the agent said.
    fn apply(&self, draft: &mut Draft, events: &[StreamResponse]) -> Result<(), Fault> {
        let turn = draft.head.turn.as_ref().map_or(0, |turn| turn.number);
        // The metadata belongs to the last status, if there is one: whoever folds the events then has it too.
        let is_status =
            |event: &StreamResponse| matches!(event.payload, Some(Payload::StatusUpdate(_) | Payload::Message(_)));
        let mut metadata = self.metadata;
        let with_metadata = events.iter().rposition(is_status);
        for (n, event) in events.iter().enumerate() {
            let is_last = n + 1 == events.len();
            let extra = if Some(n) == with_metadata { metadata.take() } else { None };
            match event.payload.clone() {
                Some(Payload::StatusUpdate(update)) => {
                    let status =
                        update.status.ok_or_else(|| Fault::Invalid("a status update without a status".into()))?;
                    let next = status.state();
                    if next == TaskState::Submitted {
                        return Err(Fault::Invalid("an agent does not submit tasks".into()));
                    }
                    let ends = next.is_terminal() || next.is_interrupted();
                    if ends != (self.finish && is_last) {
                        return Err(Fault::Invalid(format!("{} in the middle of a turn", next.as_str_name())));
                    }
                    let mut merged = update.metadata;
                    stored::merge(&mut merged, extra.cloned());
                    draft.status(next, status.message, merged)?;
                }
                Some(Payload::ArtifactUpdate(update)) => draft.artifact(update, turn)?,
                Some(Payload::Message(message)) if self.finish && is_last && draft.head.hidden => {
                    draft.answer(message, extra.cloned())?;
                }
                Some(Payload::Message(_)) => return Err(Fault::Invalid("a message instead of a task".into())),
                Some(Payload::Task(_)) | None => return Err(Fault::Invalid("an event without an update".into())),
            }
        }
        stored::merge(&mut draft.head.metadata, metadata.cloned());
        let ended = draft.head.state().is_terminal() || draft.head.state().is_interrupted();
        if self.finish && !ended {
            return Err(Fault::Invalid("the turn ended without a result".into()));
        }
        for message in self.history {
            draft.say(message.clone());
        }
        draft.fits()
    }

    /// Ends the turn as failed; nothing of this call is kept.
    fn fail(&self, state: &State, fault: &Fault, now: Millis) -> Result<Decision<Written>, Need> {
        let held = state.head().expect("the turn was found in it");
        let mut change = Change::of(Draft::edit(state.task, held, now));
        let (reason, text) = match fault {
            Fault::Invalid(_) => ("invalid-agent-response", format!("The agent gave an invalid response: {fault}")),
            Fault::TooLarge(_) | Fault::TooLong(_) => {
                ("too-large", format!("The agent's answer is too large: {fault}"))
            }
        };
        let text: Cow<'_, str> = match text.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
            None => text.into(),
        };
        turn::fail(self.rules, state, &mut change, (reason, &text), now)?;
        change.ops.extend(self.ack(&held.value));
        let outcome = if self.finish { Outcome::Ok } else { Outcome::Fenced };
        let last_event = change.drafts[0].head.last_event;
        Ok(Decision::Commit(Box::new(change), Written { outcome, last_event }))
    }

    /// The runner of a canceled turn has stopped.
    fn confirm(&self, state: &State, now: Millis) -> Result<Decision<Written>, Need> {
        let held = state.head().expect("the turn was found in it");
        let mut change = Change::of(Draft::edit(state.task, held, now));
        change.releasing = true;
        change.ops.extend(self.ack(&held.value));
        self.rules.end_turn(state, &mut change, now)?;
        let outcome = if self.events.is_empty() { Outcome::Ok } else { Outcome::Canceled };
        Ok(Decision::Commit(Box::new(change), Written { outcome, last_event: held.value.last_event }))
    }

    /// The run entry, which is in the head when the call does not name it.
    fn entry(&self, head: &Head) -> Option<EntryId> {
        let entry = || head.turn.as_ref()?.entry.parse().ok();
        self.claim.as_ref().map(|claim| claim.entry).or_else(entry)
    }

    fn ack(&self, head: &Head) -> Option<Op> {
        self.entry(head).map(|id| Op::Ack { stream: keys::runs(head.agent()), id })
    }
}

/// Characters of a reason that clients are shown.
const MAX_TEXT: usize = 1000;

/// A runner that is about to stop gives a turn back.
#[derive(Debug)]
pub(crate) struct HandBack<'a> {
    pub(crate) turn: &'a [u8],
    pub(crate) fence: u64,
    pub(crate) claim: Claim,
    /// The attempt was over by then.
    pub(crate) crashed: bool,
}

impl Decide for HandBack<'_> {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        let runs = |turn: &Turn| turn.id == self.turn && turn.fence == self.fence && turn.phase() == Phase::Running;
        let Some(held) = state.head().filter(|held| held.value.turn.as_ref().is_some_and(runs)) else {
            return Decision::Reply(());
        };
        let change = give_back(state.task, held, Some(self.claim.entry), self.crashed, now);
        Decision::Commit(Box::new(change), ())
    }
}

/// Puts a running turn back into the queue, before all others. Only a crash costs an attempt.
fn give_back(task: TaskId, held: &Held<Head>, entry: Option<EntryId>, crashed: bool, now: Millis) -> Change {
    let mut draft = Draft::edit(task, held, now);
    if let Some(turn) = &mut draft.head.turn {
        turn.set_phase(Phase::Queued);
        turn.attempts = turn.attempts.saturating_sub(u32::from(!crashed));
        // A deadline for the beginning is long met.
        turn.deadline_ms = 0;
    }
    let mut change = Change::of(draft);
    change.releasing = true;
    change.ops.extend(entry.map(|id| Op::HandBack { stream: keys::runs(held.value.agent()), id }));
    change
}
