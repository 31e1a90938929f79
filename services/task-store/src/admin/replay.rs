//! Running what was given up once more: a new task when the old one has ended, else the same turn.

use rialto_a2a::{Error, Kind, v1::Message};
use rialto_rpc::tasks::{Policy, ReplayDeadReply, WhenBusy};
use rialto_store::{Millis, Shard};

use super::dead::{DeadId, Found, no_entry, remove};
use crate::{
    Inner,
    change::{Change, Decide, Decision, Draft, State},
    keys::{TaskId, TurnId},
    send::{Send, Sent},
    store::Start,
    stored::{Head, Held, Phase, Place},
};

const NEW_TASK: &str = "new-task";
const SAME_TURN: &str = "same-turn";

/// What a replay would do.
#[derive(Debug)]
pub(super) enum Outlook {
    /// The task has ended: the message is sent again.
    NewTask(Box<Head>, Message),
    /// The turn is queued again.
    SameTurn(Held<Head>),
    /// Nothing; and why not.
    Nothing(&'static str),
}

impl Outlook {
    /// Its name, and what is in the way, as replies have them.
    pub(super) const fn told(&self) -> (&'static str, &'static str) {
        match self {
            Self::NewTask(..) => (NEW_TASK, ""),
            Self::SameTurn(_) => (SAME_TURN, ""),
            Self::Nothing(why) => ("none", why),
        }
    }
}

impl Inner {
    /// Finds out what a replay of an entry would do.
    pub(super) async fn outlook(&self, found: &Found) -> Result<Outlook, Error> {
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
            // Whoever replays it wants it run, however late it is.
            turn.deadline_ms = 0;
        }
        draft.append_run();
        let mut change = Change::of(draft);
        change.ops.push(remove(self.dead.id));
        change.releasing = true;
        Decision::Commit(Box::new(change), ())
    }
}
