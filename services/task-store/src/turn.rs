//! What the end of a turn means for its task and for its context.

use std::time::Duration;

use rialto_a2a::v1::TaskState;
use rialto_store::{Millis, Op};

use crate::{
    change::{Change, Draft, Fault, Need, State},
    keys::{self, TaskId},
    stored::{Context, Holder, Phase, Turn, Waiting},
};

/// What the operator may set.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// How long the log stays after the end of a turn.
    pub(crate) fold_after: Millis,
    /// How long a canceled turn keeps its context when nobody confirms.
    pub(crate) cancel_grace: Millis,
    /// No context is forgotten earlier than this after its last activity.
    pub(crate) min_context_idle: Millis,
}

/// A duration in the store's unit.
pub(crate) fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX / 4)
}

/// A length of time from a request, in the store's unit, that can be added to a time.
pub(crate) fn span(ms: u64) -> Millis {
    Millis::try_from(ms).unwrap_or(Millis::MAX).min(Millis::MAX / 4)
}

impl Rules {
    /// When a context without a turn is forgotten, or what waits in one with a turn expires.
    pub(crate) fn context_due(&self, context: &Context) -> Millis {
        match (context.idle_ms, &context.holder) {
            (_, Some(_)) => context.next_expiry(),
            (1.., None) => context.active_ms + span(context.idle_ms).max(self.min_context_idle),
            _ => 0,
        }
    }

    /// When an ended or parked task is looked at next; 0 = never.
    pub(crate) fn task_due(&self, draft: &Draft, now: Millis) -> Millis {
        let end = match (draft.head.state().is_terminal(), draft.head.task_ttl_ms) {
            (true, ttl @ 1..) => Some(span(ttl)),
            _ => None,
        };
        let fold = draft.head.has_long_log().then_some(self.fold_after);
        end.into_iter().chain(fold).min().map_or(0, |wait| now + wait)
    }

    /// Ends the turn of the first draft, whose status says already how, and gives its context to the next one.
    pub(crate) fn end_turn(&self, state: &State, change: &mut Change, now: Millis) -> Result<(), Need> {
        let draft = &mut change.drafts[0];
        let Some(turn) = draft.head.turn.as_mut() else { return Ok(()) };
        turn.set_phase(Phase::Done);
        let id = turn.id.clone();
        turn.grant = None;
        if std::mem::take(&mut turn.journal) > 0 {
            turn.journal_bytes = 0;
            draft.ops.push(Op::Drop { stream: draft.task.journal() });
        }
        draft.settle_artifacts();
        draft.head.due_ms = self.task_due(draft, now);
        self.release(state, change, &id, now)
    }

    /// Gives the context that a turn holds to the next one that waits and can run, or to nobody. Turns of a task
    /// that has ended wait no longer.
    pub(crate) fn release(&self, state: &State, change: &mut Change, turn: &[u8], now: Millis) -> Result<(), Need> {
        let (task, ended) = (change.drafts[0].task, change.drafts[0].head.state().is_terminal());
        let Some(held) = state.context(&change.drafts[0].head)? else { return Ok(()) };
        let mut context = Context::clone(&held.value);
        if ended {
            context.waiting.retain(|waiting| waiting.task != task.bytes()[..]);
        }
        if context.is_held_by(task, turn) || context.holder.is_none() && !context.waiting.is_empty() {
            context.holder = None;
            context.active_ms = context.active_ms.max(now);
            while context.holder.is_none() && !context.waiting.is_empty() {
                let next = context.waiting.remove(0);
                context.holder = start(state, change, next, now)?;
            }
            context.due_ms = self.context_due(&context);
        } else if context.waiting.len() == held.value.waiting.len() {
            return Ok(());
        }
        change.context = Some(Some(context));
        Ok(())
    }
}

/// Starts a turn that waited, unless its task is gone or has moved on.
fn start(state: &State, change: &mut Change, next: Waiting, now: Millis) -> Result<Option<Holder>, Need> {
    let Some(task) = TaskId::stored(&next.task) else { return Ok(None) };
    let turn = next.turn.unwrap_or_default();
    let holder = Holder { task: next.task, turn: turn.id.clone() };
    let place = match change.drafts.iter().position(|draft| draft.task == task) {
        Some(place) => place,
        None => match state.other(task) {
            None => return Err(Need::Head(task)),
            Some(None) => return Ok(None),
            Some(Some(held)) => {
                change.drafts.push(Draft::edit(task, held, now));
                change.drafts.len() - 1
            }
        },
    };
    let draft = &mut change.drafts[place];
    let startable = match &next.message {
        None => draft.head.turn.as_ref().is_some_and(|known| known.id == turn.id && known.phase() == Phase::Waiting),
        // A message that is late is dropped, not the task with it.
        Some(_) if turn.is_late(now) => {
            change.ops.push(unmark(&turn));
            false
        }
        Some(_) => draft.head.state().is_interrupted() && draft.head.is_at_rest(),
    };
    let admitted = match next.message {
        _ if !startable => Err(Fault::Invalid("the task has moved on".to_owned())),
        None => Ok(()),
        Some(message) => draft.admit(turn, message, next.metadata),
    };
    if let Err(fault) = admitted {
        tracing::debug!(%task, %fault, "a waiting turn is dropped");
        if place > 0 && draft.events.is_empty() && draft.ops.is_empty() {
            change.drafts.remove(place);
        }
        return Ok(None);
    }
    draft.queue();
    Ok(Some(holder))
}

/// Forgets that a message was accepted, in the commit that drops it before it was begun: it has not used its name up,
/// and runs when it is sent again. The row that says until when the name counts stays, and that is the same then.
pub(crate) fn unmark(turn: &Turn) -> Op {
    Op::Delete { key: keys::accepted(&turn.id) }
}

/// Fails the task of the first draft in the service's own name, and ends its turn.
pub(crate) fn fail(
    rules: &Rules,
    state: &State,
    change: &mut Change,
    (reason, text): (&str, &str),
    now: Millis,
) -> Result<(), Need> {
    change.drafts[0].status_because(TaskState::Failed, reason, text);
    change.releasing = true;
    rules.end_turn(state, change, now)
}
