//! Turns that stop for authorization, and go on once they have it (spec §7.6).

use rialto_a2a::{Error, Kind, v1::TaskState, wkt::Struct};
use rialto_store::Millis;

use crate::{
    change::{Change, Decide, Decision, Draft, Need, State},
    stored::{Context, Head, Holder, Phase, Waiting},
    turn::Rules,
};

impl Rules {
    /// Lets the turn of the first draft, whose status is AUTH_REQUIRED, rest: its context is free for others, its
    /// journal stays.
    pub(crate) fn rest_turn(&self, state: &State, change: &mut Change, now: Millis) -> Result<(), Need> {
        let draft = &mut change.drafts[0];
        let Some(turn) = draft.head.turn.as_mut() else { return Ok(()) };
        turn.set_phase(Phase::Resting);
        turn.rested_fence = turn.fence;
        // It stopped as it should: that cost no attempt, and what it said stays.
        turn.attempts = turn.attempts.saturating_sub(1);
        turn.kept_event = draft.head.last_event;
        turn.base_event = draft.head.last_event;
        let id = turn.id.clone();
        draft.settle_artifacts();
        draft.head.due_ms = self.task_due(draft, now);
        self.release(state, change, &id, now)
    }
}

/// What a task waits for is there.
#[derive(Debug)]
pub(crate) struct Grant<'a> {
    pub(crate) rules: &'a Rules,
    /// Only when the task is this agent's; empty = whoever's it is.
    pub(crate) agent: &'a str,
    pub(crate) metadata: Option<&'a Struct>,
    pub(crate) commit: &'a [u8],
}

impl Decide for Grant<'_> {
    type Reply = Box<Head>;

    fn decide(&self, state: &State, now: Millis) -> Decision<Box<Head>> {
        self.grant(state, now).unwrap_or_else(Decision::Need)
    }
}

impl Grant<'_> {
    fn grant(&self, state: &State, now: Millis) -> Result<Decision<Box<Head>>, Need> {
        let theirs = |head: &Head| !head.hidden && (self.agent.is_empty() || head.agent() == self.agent);
        let Some(held) = state.head().filter(|held| theirs(&held.value)) else {
            return Ok(Error::from(Kind::TaskNotFound).into());
        };
        if held.value.grant_commit == self.commit {
            return Ok(Decision::Reply(Box::new(Head::clone(&held.value))));
        }
        let resting = held.value.phase() == Phase::Resting && held.value.state() == TaskState::AuthRequired;
        let mut draft = Draft::edit(state.task, held, now);
        let Some(turn) = draft.head.turn.as_mut().filter(|_| resting) else {
            let text = "The task does not wait for authorization.";
            return Ok(Error::new(Kind::UnsupportedOperation, text).into());
        };
        turn.grants += 1;
        turn.grant = self.metadata.cloned();
        // It has begun long ago.
        turn.deadline_ms = 0;
        turn.set_phase(Phase::Waiting);
        let id = turn.id.clone();
        draft.head.grant_commit = self.commit.to_vec().into();
        draft.head.due_ms = 0;
        if draft.status(TaskState::Submitted, None, None).is_err() || draft.fits().is_err() {
            return Ok(Error::from(Kind::PayloadTooLarge).into());
        }
        if let Some(turn) = &mut draft.head.turn {
            turn.kept_event = draft.head.last_event;
        }
        let mut context = Context::of(&held.value, state.context(&held.value)?, now);
        let task = state.task.bytes().to_vec().into();
        match context.holder {
            None => {
                context.holder = Some(Holder { task, turn: id });
                draft.queue();
            }
            // Whatever `when-busy` says: this turn was accepted before, and before messages that wait for its task.
            Some(_) => {
                let place = context.waiting.iter().position(|waiting| waiting.task == task);
                let waiting = Waiting { task, turn: draft.head.turn.clone(), ..Waiting::default() };
                context.waiting.insert(place.unwrap_or(context.waiting.len()), waiting);
            }
        }
        context.due_ms = self.rules.context_due(&context);
        let mut change = Change::of(draft);
        change.context = Some(Some(context));
        let reply = Box::new(change.drafts[0].head.clone());
        Ok(Decision::Commit(Box::new(change), reply))
    }
}
