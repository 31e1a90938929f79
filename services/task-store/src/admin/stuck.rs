//! What does not move, and what it waits for.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use rialto_a2a::{Error, v1::TaskState};
use rialto_rpc::tasks::{ListStuckReply, ListStuckRequest, StuckTask};
use rialto_store::{IndexQuery, Millis, Order, ReadLimit, Shard};

use super::{AT_ONCE, MAX_LOOKS, age, crew::Crew, no_such_page, page};
use crate::{
    Inner,
    keys::{self, TaskId},
    store::{before, failed},
    stored::{Head, Held, Phase},
    turn::span,
};

/// Rows that one look at an index returns.
const ROWS: usize = 128;

/// The indexes that are looked at, in this order: turns that somebody should work at, tasks that wait for somebody.
const INDEXES: [&str; 2] = [keys::ACTIVE, keys::PARKED];

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Nothing,
    Queue,
    Runner,
    Turn,
    Agent,
    Lease,
    Entry,
    Cancel,
    Input,
    Authorization,
}

impl Wait {
    /// As replies have it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Queue => "queue",
            Self::Runner => "runner",
            Self::Turn => "turn",
            Self::Agent => "agent",
            Self::Lease => "lease",
            Self::Entry => "entry",
            Self::Cancel => "cancel",
            Self::Input => "input",
            Self::Authorization => "authorization",
        }
    }
}

/// Where a walk over all shards stands: the next row is after this one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cursor {
    shard: Shard,
    /// In [`INDEXES`].
    index: usize,
    after: Option<(Millis, String)>,
}

impl Cursor {
    fn read(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Ok(Self { shard: 0, index: 0, after: None });
        }
        let read = || {
            let mut parts = text.splitn(4, '.');
            let mut next = || parts.next();
            let (shard, index) = (next()?.parse().ok()?, next()?.parse().ok()?);
            let after = (next()?.parse().ok()?, next()?.to_owned());
            (index < INDEXES.len()).then_some(Self { shard, index, after: Some(after) })
        };
        read().ok_or_else(no_such_page)
    }

    fn write(&self) -> String {
        let (score, member) = self.after.clone().unwrap_or_default();
        format!("{}.{}.{score}.{member}", self.shard, self.index)
    }

    /// The next index, if there is one.
    fn advance(self, shards: Shard) -> Option<Self> {
        let (shard, index) = match self.index + 1 < INDEXES.len() {
            true => (self.shard, self.index + 1),
            false => (self.shard + 1, 0),
        };
        (shard < shards).then_some(Self { shard, index, after: None })
    }
}

impl Inner {
    pub(super) async fn list_stuck(&self, request: &ListStuckRequest) -> Result<ListStuckReply, Error> {
        let limit = page(request.limit)?;
        let (engine, shards) = (&self.store.engine, self.store.engine.shards());
        let crew = Crew::of(&self.store, &request.agents).await?;
        let now = engine.now();
        let latest = now.saturating_sub(span(request.older_ms));
        let mut cursor = Some(Cursor::read(&request.after)?).filter(|cursor| cursor.shard < shards);
        let mut reply = ListStuckReply::default();
        let mut looks = 0;
        while let Some(at) = cursor {
            if reply.tasks.len() >= limit || looks >= MAX_LOOKS {
                reply.next = at.write();
                break;
            }
            let query = IndexQuery {
                index: INDEXES[at.index].to_owned(),
                order: Order::Ascending,
                after: at.after.clone(),
                min: None,
                max: Some(latest),
                limit: ROWS.min(limit - reply.tasks.len()),
            };
            let rows = engine.index(at.shard, &query).await.map_err(|error| failed(&error))?;
            looks += rows.len();
            let last = rows.last().cloned();
            let full = rows.len() == query.limit;
            let tasks: Vec<(Millis, TaskId)> =
                rows.into_iter().filter_map(|(since, id)| Some((since, TaskId::parse(&id, Shard::MAX)?))).collect();
            let ids: Vec<TaskId> = tasks.iter().map(|(_, task)| *task).collect();
            let found = tasks.into_iter().zip(self.store.heads(at.shard, &ids).await?);
            let wanted = found.filter_map(|((since, task), held)| Some((since, task, held?)));
            let wanted = wanted.filter(|(_, _, held)| request.agent.is_empty() || held.value.agent() == request.agent);
            let judged = wanted.map(|(since, task, held)| {
                let crew = &crew;
                async move {
                    let (wait, detail) = self.waits_for(task, &held, crew).await?;
                    let stuck = wait != Wait::Nothing && (request.all || wait != Wait::Agent);
                    Ok::<_, Error>(stuck.then(|| describe(task, &held.value, wait, detail, age(now, since))))
                }
            });
            let judged: Vec<_> = stream::iter(judged.collect::<Vec<_>>()).buffered(AT_ONCE).try_collect().await?;
            reply.tasks.extend(judged.into_iter().flatten());
            cursor = match full {
                true => Some(Cursor { after: last, ..at }),
                false => at.advance(shards),
            };
        }
        Ok(reply)
    }

    /// What a task waits for, and the same for people.
    pub(super) async fn waits_for(
        &self,
        task: TaskId,
        held: &Held<Head>,
        crew: &Crew,
    ) -> Result<(Wait, String), Error> {
        let head = &held.value;
        let agent = head.agent();
        let gone = "its run entry is gone; the sweep queues it again";
        let said = match head.phase() {
            Phase::Waiting => {
                let context = self.store.context(task.shard(), &head.scope_key().context(&head.context_id)).await?;
                let holder = context.as_ref().and_then(|held| held.value.holder.as_ref());
                let holder = holder.and_then(|holder| TaskId::stored(&holder.task));
                let behind = holder.map_or_else(|| "another one".to_owned(), |holder| format!("that of {holder}"));
                (Wait::Turn, format!("behind {behind} in its context"))
            }
            Phase::Queued | Phase::Running if !self.has_entry(task, held).await? => (Wait::Entry, gone.to_owned()),
            Phase::Queued => match crew.alive(agent) {
                0 => (Wait::Runner, format!("no runner of {agent} shows a sign of life")),
                1 => (Wait::Queue, "queued; 1 runner is alive".to_owned()),
                alive => (Wait::Queue, format!("queued; {alive} runners are alive")),
            },
            Phase::Running => {
                let consumer = head.turn.as_ref().map_or("", |turn| &turn.consumer);
                match crew.member(agent, consumer) {
                    Some(member) if member.alive && member.turns > 0 => {
                        (Wait::Agent, "its runner is at work".to_owned())
                    }
                    Some(member) => {
                        let idle = member.idle.as_secs();
                        (Wait::Lease, format!("its runner is silent for {idle} s; another takes over after the lease"))
                    }
                    None => (Wait::Lease, "its runner is gone; another takes over after the lease".to_owned()),
                }
            }
            Phase::Stopping => (Wait::Cancel, "canceled; its runner has not stopped yet".to_owned()),
            Phase::Resting | Phase::Done => match head.state() {
                TaskState::InputRequired => (Wait::Input, "for the next message of its client".to_owned()),
                TaskState::AuthRequired => {
                    (Wait::Authorization, "until it is granted: rialto admin grant TASK".to_owned())
                }
                _ => (Wait::Nothing, String::new()),
            },
        };
        Ok(said)
    }

    /// Whether the work stream has the run entry of a task.
    pub(super) async fn has_entry(&self, task: TaskId, held: &Held<Head>) -> Result<bool, Error> {
        let Some(run) = held.run else { return Ok(false) };
        let (stream, limit) = (keys::runs(held.value.agent()), ReadLimit { entries: 1, bytes: 1 });
        let read = self.store.engine.read(task.shard(), &stream, before(run), limit).await;
        Ok(read.map_err(|error| failed(&error))?.first().is_some_and(|entry| entry.id == run))
    }
}

fn describe(task: TaskId, head: &Head, wait: Wait, detail: String, age_ms: u64) -> StuckTask {
    let scope = head.scope();
    let turn = head.turn.clone().unwrap_or_default();
    StuckTask {
        task_id: task.to_string(),
        agent: scope.agent,
        context_id: head.context_id.clone(),
        tenant: scope.tenant,
        owner: scope.owner,
        state: head.state().as_str_name().to_owned(),
        waits_for: wait.name().to_owned(),
        detail,
        age_ms,
        attempts: turn.attempts,
        consumer: turn.consumer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_goes_over_every_index_of_every_shard_and_can_be_resumed_anywhere() {
        let mut seen = vec![Cursor::read("").unwrap()];
        while let Some(next) = seen.last().cloned().and_then(|at| at.advance(3)) {
            seen.push(next);
        }
        assert_eq!(
            seen.iter().map(|at| (at.shard, at.index)).collect::<Vec<_>>(),
            [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        );
        let at = Cursor { shard: 2, index: 1, after: Some((-7, "a.b".to_owned())) };
        assert_eq!(Cursor::read(&at.write()).unwrap(), at);
        for other in ["x", "1", "1.0", "1.2.3.x", "1.0.x.y"] {
            Cursor::read(other).unwrap_err();
        }
    }
}
