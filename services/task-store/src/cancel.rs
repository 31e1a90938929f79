//! Ending a task from outside.

use rialto_a2a::{Error, Kind, v1::TaskState, wkt::Struct};
use rialto_rpc::tasks::Scope;
use rialto_store::{Millis, Op};

use crate::{
    change::{Change, Decide, Decision, Draft, Need, State},
    keys,
    stored::{Context, Head, Phase, Waiting},
    turn::{self, Rules},
};

/// A caller cancels a task.
#[derive(Debug)]
pub(crate) struct Cancel<'a> {
    pub(crate) rules: &'a Rules,
    pub(crate) scope: &'a Scope,
    pub(crate) metadata: Option<&'a Struct>,
    pub(crate) commit: &'a [u8],
}

impl Decide for Cancel<'_> {
    type Reply = Box<Head>;

    fn decide(&self, state: &State, now: Millis) -> Decision<Box<Head>> {
        self.cancel(state, now).unwrap_or_else(Decision::Need)
    }
}

impl Cancel<'_> {
    fn cancel(&self, state: &State, now: Millis) -> Result<Decision<Box<Head>>, Need> {
        let Some(held) = state.head().filter(|held| held.value.visible_to(self.scope)) else {
            return Ok(Error::from(Kind::TaskNotFound).into());
        };
        if !self.commit.is_empty() && held.value.cancel_commit == self.commit {
            return Ok(Decision::Reply(Box::new(Head::clone(&held.value))));
        }
        let mut draft = Draft::edit(state.task, held, now);
        if draft.status(TaskState::Canceled, None, self.metadata.cloned()).is_err() {
            return Ok(Error::from(Kind::TaskNotCancelable).into());
        }
        if draft.fits().is_err() {
            // What the caller wants to say about it does not fit; that it wants it, does.
            draft = Draft::edit(state.task, held, now);
            draft.status(TaskState::Canceled, None, None).expect("it was possible a moment ago");
        }
        draft.head.cancel_commit = self.commit.to_vec().into();
        let mut change = Change::of(draft);
        change.releasing = true;
        match held.value.phase() {
            Phase::Running => {
                let head = &mut change.drafts[0].head;
                head.due_ms = now + self.rules.cancel_grace;
                let turn = head.turn.as_mut().expect("it runs");
                turn.set_phase(Phase::Stopping);
                let payload = format!("{} {}", state.task, hex(&turn.id));
                change.ops.push(Op::Notify { topic: keys::control(&turn.consumer), payload });
                // Turns of this task that wait will never run; the context itself stays with the runner.
                self.rules.release(state, &mut change, &[], now)?;
            }
            // The run entry, if there is one, is settled by whoever claims it.
            _ => self.rules.end_turn(state, &mut change, now)?,
        }
        let reply = Box::new(change.drafts[0].head.clone());
        Ok(Decision::Commit(Box::new(change), reply))
    }
}

/// The runner of a canceled turn did not confirm in time: its context goes on without it.
#[derive(Debug)]
pub(crate) struct Abandon<'a> {
    pub(crate) rules: &'a Rules,
}

impl Decide for Abandon<'_> {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        let Some(held) = state.head().filter(|held| held.value.phase() == Phase::Stopping && held.value.due_ms <= now)
        else {
            return Decision::Reply(());
        };
        let mut change = Change::of(Draft::edit(state.task, held, now));
        change.releasing = true;
        match self.rules.end_turn(state, &mut change, now) {
            Ok(()) => Decision::Commit(Box::new(change), ()),
            Err(need) => need.into(),
        }
    }
}

/// A turn was not begun in time, or its task waited too long for an answer.
#[derive(Debug)]
pub(crate) struct Expire<'a> {
    pub(crate) rules: &'a Rules,
    /// Only when the context is due to be forgotten: ends a task that is parked in it.
    pub(crate) context: bool,
}

impl Decide for Expire<'_> {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        let Some(held) = state.head() else { return Decision::Reply(()) };
        let head = &held.value;
        let reason = match self.context {
            true => {
                let due = |context: &Context| context.due_ms > 0 && context.due_ms <= now;
                match state.context(head) {
                    Err(need) => return need.into(),
                    Ok(context) if head.state().is_interrupted() && context.is_some_and(|held| due(&held.value)) => {
                        ("context-expired", "Nobody answered in time; the conversation is closed.")
                    }
                    Ok(_) => return Decision::Reply(()),
                }
            }
            false => {
                let queued = matches!(head.phase(), Phase::Queued | Phase::Waiting);
                if !queued || !head.turn.as_ref().is_some_and(|turn| turn.is_late(now)) {
                    return Decision::Reply(());
                }
                crate::run::EXPIRED
            }
        };
        let mut change = Change::of(Draft::edit(state.task, held, now));
        match turn::fail(self.rules, state, &mut change, reason, now) {
            Ok(()) => Decision::Commit(Box::new(change), ()),
            Err(need) => need.into(),
        }
    }
}

/// Messages that waited too long for a turn of their context, and whose tasks go on without them.
#[derive(Debug)]
pub(crate) struct ExpireWaiting<'a> {
    pub(crate) rules: &'a Rules,
}

impl Decide for ExpireWaiting<'_> {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        let Some(held) = state.head() else { return Decision::Reply(()) };
        let known = match state.context(&held.value) {
            Ok(Some(known)) => known,
            Ok(None) => return Decision::Reply(()),
            Err(need) => return need.into(),
        };
        let mut context = Context::clone(&known.value);
        let late = |waiting: &Waiting| waiting.turn.as_ref().is_some_and(|turn| turn.is_late(now));
        let mut change = Change { releasing: true, ..Change::default() };
        let expired = context.waiting.extract_if(.., |waiting| waiting.message.is_some() && late(waiting));
        change.ops.extend(expired.filter_map(|waiting| waiting.turn).map(|turn| turn::unmark(&turn)));
        if change.ops.is_empty() {
            return Decision::Reply(());
        }
        context.due_ms = self.rules.context_due(&context);
        change.context = Some(Some(context));
        Decision::Commit(Box::new(change), ())
    }
}

/// Bytes as text, for notices.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
