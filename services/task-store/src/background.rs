//! What nobody asks for and must happen all the same: turns whose run entry is gone are queued again, logs are
//! folded away, tasks and contexts are forgotten. Any number of replicas may do it at once: each step decides on
//! what is stored, like any other operation.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use prost::Message as _;
use rialto_a2a::{Error, Kind, v1::TaskState};
use rialto_store::{Batch, Check, Error as KernelError, IndexQuery, Millis, Op, Order, ReadLimit, Shard};
use tokio::time::{Instant, sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info, warn};

use crate::{
    artifacts,
    cancel::{Abandon, Expire, ExpireWaiting},
    change::{Change, Decide, Decision, Draft, Need, State},
    keys::{self, ScopeKey, TaskId},
    store::{Start, Stop, Store, before, failed},
    stored::{self, Context, Head, Held, Holder, Phase, Sweep, Waiting},
    turn::{Rules, millis, span},
};

/// Rows that one look at an index returns.
const ROWS: usize = 128;

/// Of these, how many are worked at together.
const AT_ONCE: usize = 8;

/// How long one replica has the cleaning of a shard to itself.
const TURF: Millis = 4000;

/// Turns that one sweep of a shard looks at.
const SWEPT: usize = 512;

/// How often the background work looks around.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// For what is due.
    pub(crate) due: Duration,
    /// For turns that nobody works at; one replica per shard and time.
    pub(crate) sweep: Duration,
}

/// Starts the work on every shard, until stopped.
pub(crate) fn start(store: &Arc<Store>, rules: &Rules, pace: Pace, stop: &CancellationToken, tracker: &TaskTracker) {
    for shard in 0..store.engine.shards() {
        let (this, until) = (Arc::clone(store), stop.clone());
        tracker.spawn(async move { until.run_until_cancelled(listen(&this, shard)).await });
        let (this, until, rules) = (Arc::clone(store), stop.clone(), rules.clone());
        tracker.spawn(async move { until.run_until_cancelled(work(&this, &rules, pace, shard)).await });
    }
}

/// Keeps the notices of a shard coming.
async fn listen(store: &Store, shard: Shard) {
    loop {
        match store.engine.listen(shard, keys::EVENTS).await {
            Ok(notices) => store.tails.listen(shard, notices, || store.forget_all()).await,
            Err(error) => {
                debug!(%error, shard, "cannot listen");
                sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn work(store: &Store, rules: &Rules, pace: Pace, shard: Shard) {
    let (mut swept, mut turf) = (Instant::now(), Turf::default());
    loop {
        sleep(pace.due.min(pace.sweep)).await;
        let worked = async {
            due(store, rules, shard, &mut turf).await?;
            if swept.elapsed() >= pace.sweep {
                swept = Instant::now();
                sweep(store, pace, shard).await?;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = worked.await {
            // Reported where it was found; nothing is lost by doing it later.
            debug!(%error, shard, "background work failed");
        }
    }
}

/// That this replica is the one that cleans up in a shard, while there is much to do: several would get in each
/// other's way. A little is done by whoever sees it first.
#[derive(Debug, Default)]
struct Turf {
    version: u64,
    until: Millis,
}

impl Turf {
    /// Takes it for a while, unless another replica has it.
    async fn take(&mut self, store: &Store, shard: Shard) -> Result<bool, Error> {
        let now = store.engine.now();
        if now + TURF / 2 < self.until {
            return Ok(true);
        }
        let record = store.records(shard, &[keys::CLEANING]).await?.pop().flatten();
        let key = keys::CLEANING.to_owned();
        let check = match record {
            None => Check::Absent { key: key.clone() },
            Some(record) => {
                let theirs = record.version != self.version;
                if theirs && Sweep::decode(record.bytes).is_ok_and(|sweep| sweep.swept_ms > now) {
                    return Ok(false);
                }
                Check::Version { key: key.clone(), version: record.version }
            }
        };
        let until = now + TURF;
        let bytes = Sweep { swept_ms: until, ..Sweep::default() }.encode_to_vec().into();
        let ops = vec![Op::Put { key, bytes }];
        match store.engine.commit(Batch { shard, checks: vec![check], ops, releasing: true, ..Batch::default() }).await
        {
            Ok(committed) => {
                *self = Self { version: committed.versions.first().copied().unwrap_or_default(), until };
                Ok(true)
            }
            Err(KernelError::Conflict { .. }) => Ok(false),
            Err(error) => Err(failed(&error)),
        }
    }
}

/// Does everything that is due in a shard.
async fn due(store: &Store, rules: &Rules, shard: Shard, turf: &mut Turf) -> Result<(), Error> {
    let mut after = None;
    loop {
        let query = IndexQuery {
            index: keys::DUE.to_owned(),
            order: Order::Ascending,
            after: after.take(),
            min: None,
            max: Some(store.engine.now()),
            limit: ROWS,
        };
        let rows = store.engine.index(shard, &query).await.map_err(|error| failed(&error))?;
        if rows.len() == ROWS && !turf.take(store, shard).await? {
            return Ok(());
        }
        let named = |member: &str| member.starts_with(keys::RESERVED) || member.starts_with(keys::ACCEPTED);
        let names: Vec<_> = rows.iter().filter(|row| named(&row.1)).map(|(score, key)| (*score, &key[..])).collect();
        if !names.is_empty() {
            store.forget_names(shard, &names).await?;
        }
        let works = rows.iter().filter(|row| !named(&row.1));
        let works: Vec<_> = works.map(|(score, member)| clean(store, rules, shard, *score, member)).collect();
        stream::iter(works).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        match rows.into_iter().nth(ROWS - 1) {
            Some(last) => after = Some(last),
            None => return Ok(()),
        }
    }
}

/// Does what is due for one member of the index.
async fn clean(store: &Store, rules: &Rules, shard: Shard, score: Millis, member: &str) -> Result<(), Error> {
    let done = match (member.strip_prefix("t:"), ScopeKey::of_context(member)) {
        (Some(task), _) => match TaskId::parse(task, Shard::MAX).filter(|task| task.shard() == shard) {
            Some(task) => retire(store, rules, task, score).await,
            None => Ok(()),
        },
        (None, Some((scope, context))) => forget(store, rules, shard, member, &scope, context).await,
        (None, None) => Ok(()),
    };
    match done {
        // One that cannot be done must not keep the others waiting.
        Err(error) if error.kind != Kind::Unavailable => {
            warn!(%member, %error, "cannot clean up");
            Ok(())
        }
        done => done,
    }
}

/// Does what is due for one task.
async fn retire(store: &Store, rules: &Rules, task: TaskId, score: Millis) -> Result<(), Error> {
    let Some(held) = store.head(task).await? else {
        // A row without a task; only a store that lost something has these.
        let row = Op::Index { index: keys::DUE.to_owned(), member: task.head(), was: Some(score), now: None };
        let checks = vec![Check::Absent { key: task.head() }];
        let batch = Batch { shard: task.shard(), checks, ops: vec![row], releasing: true, ..Batch::default() };
        return match store.engine.commit(batch).await {
            Ok(_) | Err(KernelError::Conflict { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        };
    };
    let done = match held.value.phase() {
        Phase::Stopping => store.transact(Start::Known(task), &Abandon { rules }).await,
        Phase::Queued | Phase::Waiting => store.transact(Start::Known(task), &Expire { rules, context: false }).await,
        _ => match store.transact(Start::Known(task), &Retire { rules, fold: true }).await {
            // What the log lost is folded by nobody, and was reported when it was missed.
            Err(Stop::Refused(error)) if error.kind == Kind::Internal => {
                store.transact(Start::Known(task), &Retire { rules, fold: false }).await
            }
            done => done,
        },
    };
    Ok(done?)
}

/// The next step in the afterlife of a task: its log goes first, later everything.
#[derive(Debug)]
struct Retire<'a> {
    rules: &'a Rules,
    /// Whether the log can be folded. Else it stays, for somebody to look at; the task goes when its time comes.
    fold: bool,
}

impl Decide for Retire<'_> {
    type Reply = ();

    fn decide(&self, state: &State, now: Millis) -> Decision<()> {
        self.retire(state, now).unwrap_or_else(Decision::Need)
    }
}

impl Retire<'_> {
    fn retire(&self, state: &State, now: Millis) -> Result<Decision<()>, Need> {
        let Some(held) = state.head().filter(|held| held.value.due_ms > 0 && held.value.due_ms <= now) else {
            return Ok(Decision::Reply(()));
        };
        let head = &held.value;
        if !head.is_at_rest() {
            return Ok(Decision::Reply(()));
        }
        let ends = match (head.state().is_terminal(), head.task_ttl_ms) {
            (true, ttl @ 1..) => head.status_ms().saturating_add(span(ttl)),
            _ => 0,
        };
        if ends > 0 && ends <= now {
            return self.delete(state, held, now);
        }
        let mut draft = Draft::edit(state.task, held, now);
        let folded = self.fold && {
            let folded = artifacts::fold(&mut draft, state)?;
            if let Err(refusal) = &folded {
                warn!(task = %state.task, %refusal, "the log does not fit the artifacts");
            }
            folded.is_ok()
        };
        if !folded {
            draft = Draft::edit(state.task, held, now);
        } else if head.first_event <= head.last_event {
            if head.first_event <= head.logged() {
                draft.ops.push(Op::Drop { stream: state.task.log() });
            }
            draft.head.first_event = head.last_event + 1;
            draft.head.events.clear();
        }
        draft.head.due_ms = ends;
        let mut change = Change::of(draft);
        change.releasing = true;
        Ok(Decision::Commit(Box::new(change), ()))
    }

    fn delete(&self, state: &State, held: &Held<Head>, now: Millis) -> Result<Decision<()>, Need> {
        let (task, head) = (state.task, &held.value);
        let mut change = Change { deletes: vec![(task, held.clone())], releasing: true, ..Change::default() };
        if let Some(context) = state.context(head)?
            && context.value.since_ms <= head.created_ms
        {
            let mut context = Context::clone(&context.value);
            context.tasks = context.tasks.saturating_sub(1);
            let idle = context.tasks == 0 && context.holder.is_none() && context.waiting.is_empty();
            let until = context.active_ms + self.rules.min_context_idle;
            change.context = match idle {
                true if until <= now => Some(None),
                true => {
                    context.due_ms = until;
                    Some(Some(context))
                }
                false => Some(Some(context)),
            };
        }
        let stored = head.artifacts.iter().enumerate().filter(|(_, artifact)| artifact.stored);
        change.ops.extend(stored.map(|(place, _)| Op::Delete { key: task.artifact(place) }));
        if head.filed() > 0 {
            change.ops.push(Op::Drop { stream: task.history() });
        }
        if head.first_event <= head.logged() {
            change.ops.push(Op::Drop { stream: task.log() });
        }
        Ok(Decision::Commit(Box::new(change), ()))
    }
}

/// Forgets a conversation that is due, after the tasks that are parked in it; or, while one is at work, the messages
/// that waited too long for it.
async fn forget(
    store: &Store,
    rules: &Rules,
    shard: Shard,
    key: &str,
    scope: &ScopeKey,
    context: &str,
) -> Result<(), Error> {
    let now = store.engine.now();
    let due = |held: &Held<Context>| held.value.due_ms > 0 && held.value.due_ms <= now;
    let Some(held) = store.context(shard, key).await?.filter(due) else { return Ok(()) };
    if held.value.holder.is_some() {
        let waiting = held.value.waiting.iter().find_map(|waiting| TaskId::stored(&waiting.task));
        let Some(task) = waiting else { return Ok(()) };
        return Ok(store.transact(Start::Known(task), &ExpireWaiting { rules }).await?);
    }
    for state in [TaskState::InputRequired, TaskState::AuthRequired] {
        let query = IndexQuery {
            index: scope.list(Some(context), Some(state as i32)),
            order: Order::Ascending,
            after: None,
            min: None,
            max: None,
            limit: ROWS,
        };
        let parked = store.engine.index(shard, &query).await.map_err(|error| failed(&error))?;
        for (_, id) in &parked {
            if let Some(task) = TaskId::parse(id, Shard::MAX) {
                store.transact(Start::Known(task), &Expire { rules, context: true }).await?;
            }
        }
        if parked.len() == ROWS {
            return Ok(());
        }
    }
    let mut ops = vec![Op::Delete { key: key.to_owned() }];
    stored::reindex_context(key, Some(&held.value), None, &mut ops);
    let checks = vec![Check::Version { key: key.to_owned(), version: held.version }];
    match store.engine.commit(Batch { shard, checks, ops, releasing: true, ..Batch::default() }).await {
        Ok(_) | Err(KernelError::Conflict { .. }) => Ok(()),
        Err(error) => Err(failed(&error)),
    }
}

/// Looks at turns that somebody should be working at, unless another replica did so lately.
pub(crate) async fn sweep(store: &Store, pace: Pace, shard: Shard) -> Result<(), Error> {
    let record = store.records(shard, &[keys::SWEEP]).await?.pop().flatten();
    let version = record.as_ref().map(|record| record.version);
    let last = record.and_then(|record| Sweep::decode(record.bytes).ok()).unwrap_or_default();
    let now = store.engine.now();
    if last.swept_ms + millis(pace.sweep) > now {
        return Ok(());
    }
    let query = IndexQuery {
        index: keys::ACTIVE.to_owned(),
        order: Order::Ascending,
        after: (!last.after_member.is_empty()).then_some((last.after_score, last.after_member)),
        min: None,
        max: None,
        limit: SWEPT,
    };
    let rows = store.engine.index(shard, &query).await.map_err(|error| failed(&error))?;
    if rows.is_empty() && query.after.is_none() {
        return Ok(());
    }
    // From where the next sweep goes on; from the beginning again after a short page.
    let next = rows.get(SWEPT - 1).cloned().unwrap_or_default();
    let swept = Sweep { swept_ms: now, after_score: next.0, after_member: next.1 };
    let key = keys::SWEEP.to_owned();
    let check = Check::unchanged(key.as_str(), version);
    let ops = vec![Op::Put { key, bytes: swept.encode_to_vec().into() }];
    match store.engine.commit(Batch { shard, checks: vec![check], ops, releasing: true, ..Batch::default() }).await {
        Ok(_) => {}
        Err(KernelError::Conflict { .. }) => return Ok(()),
        Err(error) => return Err(failed(&error)),
    }
    let tasks: Vec<TaskId> = rows.iter().filter_map(|(_, id)| TaskId::parse(id, Shard::MAX)).collect();
    for tasks in tasks.chunks(ROWS) {
        for (task, held) in tasks.iter().zip(store.heads(shard, tasks).await?) {
            let Some(held) = held else { continue };
            match rescue(store, *task, &held).await {
                Ok(()) => {}
                Err(error) if error.kind == Kind::Unavailable => return Err(error),
                Err(error) => warn!(%task, %error, "cannot look after a turn"),
            }
        }
    }
    Ok(())
}

async fn rescue(store: &Store, task: TaskId, held: &Held<Head>) -> Result<(), Error> {
    let head = &held.value;
    if let (Phase::Queued | Phase::Running, Some(run)) = (head.phase(), held.run) {
        let one = ReadLimit { entries: 1, bytes: 1 };
        let stream = keys::runs(head.agent());
        let found = store.engine.read(task.shard(), &stream, before(run), one).await.map_err(|error| failed(&error))?;
        if found.first().is_some_and(|entry| entry.id == run) {
            return Ok(());
        }
    }
    match store.transact(Start::Known(task), &Rescue { was: held.clone() }).await {
        Ok(true) => {
            info!(%task, "queued again: its run entry was gone");
            Ok(())
        }
        Ok(false) => Ok(()),
        Err(Stop::NotPending) => Ok(()),
        Err(Stop::Refused(error)) => Err(error),
    }
}

/// A turn that nobody can work at, as it was seen, is queued again.
#[derive(Debug)]
struct Rescue {
    was: Held<Head>,
}

impl Decide for Rescue {
    type Reply = bool;

    fn decide(&self, state: &State, now: Millis) -> Decision<bool> {
        let Some(held) = state.head().filter(|held| held.version == self.was.version && held.run == self.was.run)
        else {
            return Decision::Reply(false);
        };
        let mut draft = Draft::edit(state.task, held, now);
        let Some(turn) = draft.head.turn.clone() else { return Decision::Reply(false) };
        match turn.phase() {
            // Whoever runs it may go on until somebody else begins.
            Phase::Queued | Phase::Running => {
                draft.append_run();
                let mut change = Change::of(draft);
                change.releasing = true;
                Decision::Commit(Box::new(change), true)
            }
            Phase::Waiting => {
                let known = match state.context(&held.value) {
                    Ok(known) => known,
                    Err(need) => return need.into(),
                };
                let mut context = Context::of(&held.value, known, now);
                let task = state.task.bytes().to_vec();
                let is_this = |waiting: &Waiting| waiting.task == task[..];
                let mut change = Change { releasing: true, ..Change::default() };
                if context.holder.is_none() {
                    context.waiting.retain(|waiting| !is_this(waiting));
                    context.holder = Some(Holder { task: task.into(), turn: turn.id });
                    context.due_ms = context.next_expiry();
                    draft.queue();
                    change.drafts.push(draft);
                } else if context.waiting.iter().any(is_this) {
                    return Decision::Reply(false);
                } else {
                    context.waiting.push(Waiting { task: task.into(), turn: Some(turn), ..Waiting::default() });
                }
                change.context = Some(Some(context));
                Decision::Commit(Box::new(change), true)
            }
            Phase::Stopping | Phase::Resting | Phase::Done => Decision::Reply(false),
        }
    }
}
