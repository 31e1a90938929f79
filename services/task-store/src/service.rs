//! The gRPC contract over the operations: requests are checked here, and results get their form.

use std::{
    collections::{BTreeMap, VecDeque},
    pin::Pin,
    sync::Arc,
};

use futures::{Stream, StreamExt as _, future::try_join_all, stream};
use rialto_a2a::{
    Error, Kind,
    v1::{ListTasksResponse, Task, TaskState},
};
use rialto_rpc::tasks::{
    self, BeginReply, BeginRequest, CancelOrder, CancelRequest, ControlRequest, FinishReply, FinishRequest, GetRequest,
    GrantRequest, HandBackReply, HandBackRequest, HeartbeatReply, HeartbeatRequest, HeldTurn, ListRequest, Outcome,
    RecordReply, RecordRequest, Scope, SendRequest, Update, WatchRequest, task_store_server,
};
use rialto_store::{Batch, Check, EntryId, Error as KernelError, Millis, Op, Shard};
use tonic::{Request, Response, Status};

use crate::{
    Inner, TaskStore,
    cancel::Cancel,
    change::RUN_SCHEMA,
    grant::Grant,
    keys::{self, ScopeKey, TaskId, TurnId},
    list,
    read::{Shape, bare_task, snapshot_event},
    run::{Begin, Begun, Claim, HandBack, Write, Written},
    runner,
    send::{Send as SendMessage, Sent},
    store::{Start, Stop, failed},
    stored::{Head, Held, Phase, Place, Reservation},
    watch::{Follow, Until, has_turn},
};

type Updates = Pin<Box<dyn Stream<Item = Result<Update, Status>> + Send>>;

/// How much longer than a client's name for it is remembered that a message was accepted.
const MARGIN: Millis = 3_600_000;

/// A field that one of our own services must set.
fn required<T>(field: Option<T>, name: &'static str) -> Result<T, Error> {
    field.ok_or_else(|| Error::invalid(name, "is required"))
}

fn sixteen(bytes: &[u8], name: &'static str) -> Result<TurnId, Error> {
    bytes.try_into().map_err(|_| Error::invalid(name, "must be 16 bytes"))
}

/// Ids of contexts, which become parts of keys.
fn check_context(id: &str) -> Result<(), Error> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    match (1..=128).contains(&id.len()) && id.bytes().all(allowed) {
        true => Ok(()),
        false => Err(Error::invalid("message.contextId", "must be 1 to 128 letters, digits, or any of _ . : -")),
    }
}

impl Claim {
    fn read(claim: &tasks::Claim) -> Result<Self, Error> {
        let entry: EntryId = claim.entry.parse().map_err(|_| Error::invalid("claim.entry", "must be <ms>-<seq>"))?;
        Ok(Self { stream: claim.stream.clone(), entry, consumer: claim.consumer.clone() })
    }
}

impl Inner {
    fn shards(&self) -> Shard {
        self.store.engine.shards()
    }

    /// The one place that decides whether a task exists for a caller.
    async fn visible(&self, scope: Option<&Scope>, id: &str) -> Result<(TaskId, Held<Head>), Error> {
        let scope = required(scope, "scope")?;
        let task = TaskId::parse(id, self.shards()).ok_or(Kind::TaskNotFound)?;
        let held = match self.store.ended(task) {
            Some(held) => Some(held),
            None => self.store.head(task).await?,
        };
        let held = held.filter(|held| held.value.visible_to(scope)).ok_or(Kind::TaskNotFound)?;
        Ok((task, held))
    }

    async fn get(&self, request: GetRequest) -> Result<Task, Error> {
        let shape = Shape::history("historyLength", request.history_length)?;
        let (task, held) = self.visible(request.scope.as_ref(), &request.id).await?;
        let (_, whole) = self.store.task_from(task, Some(held), shape).await?.ok_or(Kind::TaskNotFound)?;
        Ok(whole)
    }

    async fn cancel(&self, request: CancelRequest) -> Result<Task, Error> {
        let scope = required(request.scope.as_ref(), "scope")?;
        let task = TaskId::parse(&request.id, self.shards()).ok_or(Kind::TaskNotFound)?;
        let (rules, metadata) = (&self.rules, request.metadata.as_ref());
        let cancel = Cancel { rules, scope, metadata, commit: &request.commit_id };
        self.store.transact(Start::Known(task), &cancel).await?;
        let shape = Shape { history: None, artifacts: true };
        let (_, whole) = self.store.task(task, shape).await?.ok_or(Kind::TaskNotFound)?;
        Ok(whole)
    }

    async fn grant(&self, request: GrantRequest) -> Result<Task, Error> {
        sixteen(&request.commit_id, "commitId")?;
        let task = TaskId::parse(&request.task_id, self.shards()).ok_or(Kind::TaskNotFound)?;
        let (rules, metadata) = (&self.rules, request.metadata.as_ref());
        let grant = Grant { rules, agent: &request.agent, metadata, commit: &request.commit_id };
        let head = self.store.transact(Start::Known(task), &grant).await?;
        Ok(bare_task(task, &head, &Place::new(task, &head.context_id)))
    }

    async fn send(&self, mut request: SendRequest) -> Result<Updates, Error> {
        let scope = required(request.scope.take(), "scope")?;
        let mut turn = sixteen(&request.turn_id, "turnId")?;
        let mut message = required(request.message.take(), "message")?;
        let shape = Shape::history("configuration.historyLength", request.history_length)?;
        let policy = request.policy.take().unwrap_or_default();
        let until = match request.follow() {
            // Of a hidden task, there is nothing to see but its result.
            _ if policy.hidden => Some(Until::Result),
            tasks::Follow::None => None,
            tasks::Follow::Result => Some(Until::Result),
            tasks::Follow::Turn => Some(Until::Turn),
            tasks::Follow::Task => Some(Until::Task),
        };
        let shards = self.shards();
        let follow_up = !message.task_id.is_empty();
        if !follow_up || !message.context_id.is_empty() {
            check_context(&message.context_id)?;
        }
        let mut named_until = None;
        if let Some(named) = &request.idempotency {
            let wanted = Reservation {
                fingerprint: named.fingerprint.clone(),
                turn: turn.to_vec().into(),
                task_id: std::mem::take(&mut message.task_id),
                context_id: std::mem::take(&mut message.context_id),
                expires_ms: 0,
            };
            let reserved = self.store.reserve(&scope, named, wanted, self.keep_names).await?;
            turn = sixteen(&reserved.turn, "turnId")?;
            named_until = Some(reserved.expires_ms + MARGIN);
            (message.task_id, message.context_id) = (reserved.task_id, reserved.context_id);
        }
        let follow_up = !message.task_id.is_empty();
        let (task, start) = match follow_up {
            true => {
                let task = TaskId::parse(&message.task_id, shards).ok_or(Kind::TaskNotFound)?;
                (task, Start::Known(task))
            }
            false => {
                let task = TaskId::new(turn, keys::shard(&scope, &message.context_id, shards));
                (task, Start::New(task, ScopeKey::new(&scope).context(&message.context_id)))
            }
        };
        // Before the commit, so that nothing is missed after it.
        let follow = until.map(|until| (until, self.store.tails.open(task)));
        let send = SendMessage {
            scope: &scope,
            turn,
            task,
            context_id: &message.context_id,
            follow_up,
            message: &message,
            metadata: request.metadata.as_ref(),
            policy: &policy,
            shards,
            traceparent: &request.traceparent,
            named_until,
            caller_full: match policy.max_caller_turns {
                0 => false,
                most => self.store.turns_of(&ScopeKey::new(&scope)).await? >= most,
            },
        };
        let sent = self.store.transact(start, &send).await?;

        let waits_for_result = until == Some(Until::Result);
        let long_ago = matches!(sent, Sent::LongBefore);
        let (head, snapshot) = match sent {
            Sent::Created(head) if waits_for_result => (head, None),
            Sent::Created(head) => {
                let place = Place::new(task, &head.context_id);
                let mut whole = bare_task(task, &head, &place);
                if shape.history != Some(0) {
                    let mut message = message.clone();
                    place.name(&mut message);
                    whole.history.push(message);
                }
                (head, Some(whole))
            }
            Sent::Added(head) if waits_for_result => (head, None),
            Sent::Added(_) | Sent::Before | Sent::LongBefore => {
                let (head, whole) = self.store.task(task, shape).await?.ok_or(Kind::TaskNotFound)?;
                (Box::new(Head::clone(&head)), Some(whole))
            }
        };
        let is_over = long_ago || head.is_over(&turn);
        let first = match snapshot {
            Some(whole) if !waits_for_result || is_over => {
                let mut update = snapshot_event(&self.store, task, &head, whole).await?;
                if turn[..] != request.turn_id[..] {
                    update.turn_id = turn.to_vec().into();
                }
                Some(update)
            }
            _ => None,
        };
        let Some((until, seat)) = follow else { return Ok(Box::pin(stream::iter(first.map(Ok)))) };
        let over = match until {
            Until::Result => is_over,
            Until::Turn => is_over && head.state() != TaskState::AuthRequired,
            Until::Task => head.state().is_terminal(),
        };
        let is_newest = head.turn.as_ref().is_some_and(|newest| newest.id == turn[..]);
        Ok(Box::pin(
            Follow {
                store: Arc::clone(&self.store),
                seat,
                task,
                place: Place::new(task, &head.context_id),
                until,
                behind: (!is_newest && !is_over).then(|| turn.to_vec()),
                cursor: head.last_event,
                newest: head.last_event,
                first,
                over,
                shape,
                stop: self.stop.clone(),
                queue: VecDeque::new(),
            }
            .updates(),
        ))
    }

    async fn watch(&self, request: WatchRequest) -> Result<Updates, Error> {
        let task = TaskId::parse(&request.id, self.shards()).ok_or(Kind::TaskNotFound)?;
        // Before the read, so that nothing is missed after it.
        let seat = self.store.tails.open(task);
        let (task, held) = self.visible(request.scope.as_ref(), &request.id).await?;
        let head = &held.value;
        let until = match request.follow() {
            tasks::Follow::Turn => Until::Turn,
            _ => Until::Task,
        };
        let named = until == Until::Turn && !request.turn_id.is_empty();
        let known = named && has_turn(&self.store, task, head, &request.turn_id).await?;
        let turn = known.then(|| request.turn_id.to_vec());
        let mut follow = Follow {
            store: Arc::clone(&self.store),
            seat,
            task,
            place: Place::new(task, &head.context_id),
            until,
            behind: turn.clone(),
            cursor: head.last_event,
            newest: head.last_event,
            first: None,
            over: head.state().is_terminal(),
            shape: Shape { history: None, artifacts: true },
            stop: self.stop.clone(),
            queue: VecDeque::new(),
        };
        match request.after {
            None if head.state().is_terminal() => {
                let text = "The task is in a terminal state; there is nothing to follow.";
                return Err(Error::new(Kind::UnsupportedOperation, text));
            }
            Some(after) if after > head.last_event => {
                return Err(Error::invalid("lastEventId", "is higher than the number of any event of the task"));
            }
            Some(after) if after + 1 >= head.first_event => {
                // Whoever has seen the end of the turn, and then lost the stream, has seen everything.
                let turn_over = until == Until::Turn
                    && head.state() == TaskState::InputRequired
                    && turn.as_ref().is_none_or(|turn| head.is_over(turn));
                follow.cursor = after;
                follow.over = after == head.last_event && (follow.over || turn_over);
            }
            None | Some(_) => {
                let shape = follow.shape;
                let (head, whole) = self.store.task_from(task, Some(held), shape).await?.ok_or(Kind::TaskNotFound)?;
                follow.cursor = head.last_event;
                follow.newest = head.last_event;
                follow.over = head.state().is_terminal();
                follow.first = Some(snapshot_event(&self.store, task, &head, whole).await?);
            }
        }
        Ok(Box::pin(follow.updates()))
    }

    async fn begin(&self, request: BeginRequest) -> Result<BeginReply, Error> {
        let run = required(request.run.as_ref(), "run")?;
        let claim = Claim::read(required(request.claim.as_ref(), "claim")?)?;
        if run.schema > RUN_SCHEMA {
            return Err(Error::new(Kind::Unavailable, "The run entry is for a newer version"));
        }
        let shard = Shard::try_from(required(request.claim.as_ref(), "claim")?.shard).unwrap_or(Shard::MAX);
        let Some(task) = TaskId::parse(&run.task_id, self.shards()).filter(|task| task.shard() == shard) else {
            self.bury(shard, claim).await?;
            return Ok(BeginReply::default());
        };
        let begin = Begin {
            rules: &self.rules,
            run,
            claim,
            max_attempts: request.max_attempts,
            crash: &request.crash,
            commit: &request.commit_id,
        };
        match self.store.transact(Start::Known(task), &begin).await {
            Ok(Begun::Run(head)) => {
                let turn = runner::briefing(&self.store, task, &head, &request).await?;
                Ok(BeginReply { turn: Some(turn) })
            }
            Ok(Begun::Settled) | Err(Stop::NotPending) => Ok(BeginReply::default()),
            Err(Stop::Refused(error)) => Err(error),
        }
    }

    /// Puts an entry away that names no task that could exist.
    async fn bury(&self, shard: Shard, claim: Claim) -> Result<(), Error> {
        let Claim { stream, entry: id, consumer } = claim;
        let batch = Batch {
            shard,
            checks: vec![Check::Pending { stream: stream.clone(), id, consumer }],
            ops: vec![Op::Bury { stream, id, reason: "it names no task".to_owned() }],
            releasing: true,
            ..Batch::default()
        };
        match self.store.engine.commit(batch).await {
            Ok(_) | Err(KernelError::Conflict { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }

    async fn write(&self, task_id: &str, write: Write<'_>) -> Result<Written, Error> {
        let Some(task) = TaskId::parse(task_id, self.shards()) else {
            return Ok(Written { outcome: Outcome::Fenced, last_event: 0 });
        };
        let written = self.store.transact(Start::Known(task), &write).await?;
        if written.last_event > 0 && write.first_event > written.last_event + 1 {
            tracing::warn!(%task, "the store has forgotten what an attempt wrote; the turn goes on from what is there");
        }
        Ok(written)
    }

    async fn heartbeat(&self, turns: &[HeldTurn]) -> Result<Vec<Outcome>, Error> {
        let mut outcomes = vec![Outcome::Fenced; turns.len()];
        let mut groups = BTreeMap::<(Shard, String, String), Vec<(usize, EntryId)>>::new();
        let mut shards = BTreeMap::<Shard, Vec<(usize, TaskId)>>::new();
        for (n, turn) in turns.iter().enumerate() {
            let Some(task) = TaskId::parse(&turn.task_id, self.shards()) else { continue };
            let claim = Claim::read(required(turn.claim.as_ref(), "claim")?)?;
            groups.entry((task.shard(), claim.stream, claim.consumer)).or_default().push((n, claim.entry));
            shards.entry(task.shard()).or_default().push((n, task));
        }
        let signs = try_join_all(groups.iter().map(|((shard, stream, consumer), entries)| async move {
            let ids: Vec<EntryId> = entries.iter().map(|(_, id)| *id).collect();
            self.store.engine.heartbeat(*shard, stream, consumer, &ids).await.map_err(|error| failed(&error))
        }));
        let heads = try_join_all(shards.iter().map(|(shard, tasks)| {
            let tasks: Vec<TaskId> = tasks.iter().map(|(_, task)| *task).collect();
            async move { self.store.heads(*shard, &tasks).await }
        }));
        let (signs, heads) = futures::future::try_join(signs, heads).await?;
        let mut owned = vec![false; turns.len()];
        for (entries, signs) in groups.values().zip(signs) {
            entries.iter().zip(signs).for_each(|((n, _), sign)| owned[*n] = sign);
        }
        for (tasks, heads) in shards.values().zip(heads) {
            for ((n, _), held) in tasks.iter().zip(heads) {
                let Some(held) = held else { continue };
                outcomes[*n] = standing(&held.value, &turns[*n], owned[*n]);
            }
        }
        Ok(outcomes)
    }

    async fn hand_back(&self, turns: &[HeldTurn]) -> Result<(), Error> {
        let one = |turn: &HeldTurn| {
            let turn = turn.clone();
            async move {
                let Some(task) = TaskId::parse(&turn.task_id, self.shards()) else { return Ok(()) };
                let claim = Claim::read(required(turn.claim.as_ref(), "claim")?)?;
                let hand_back = HandBack { turn: &turn.turn_id, fence: turn.fence, claim, crashed: turn.crashed };
                self.store.transact(Start::Known(task), &hand_back).await.map_err(Error::from)
            }
        };
        // Each for itself: one that fails must not keep the others.
        let results: Vec<Result<(), Error>> = stream::iter(turns.iter().map(one)).buffer_unordered(16).collect().await;
        results.into_iter().collect()
    }

    async fn control(&self, consumer: &str) -> Result<impl Stream<Item = Result<CancelOrder, Status>> + use<>, Error> {
        let here = self.runners.token();
        if self.stop.is_cancelled() {
            return Err(Error::unavailable());
        }
        let topic = keys::control(consumer);
        let shards = try_join_all((0..self.shards()).map(|shard| self.store.engine.listen(shard, &topic)));
        let shards = shards.await.map_err(|error| failed(&error))?;
        let orders = shards.into_iter().map(|notices| {
            stream::unfold(notices, |mut notices| async move {
                loop {
                    // Lost ones are told by the heartbeats.
                    if let Some(order) = notices.recv().await.and_then(|notice| order(&notice.payload)) {
                        return Some((Ok(order), notices));
                    }
                }
            })
            .boxed()
        });
        let stopping = stream::once(self.stop.clone().cancelled_owned());
        let stopping = stopping.map(|()| Ok(CancelOrder { stopping: true, ..CancelOrder::default() }));
        let orders = stream::select(stream::select_all(orders), stopping);
        Ok(orders.zip(stream::repeat(here)).map(|(order, _here)| order))
    }
}

/// Reads a cancel order.
fn order(payload: &str) -> Option<CancelOrder> {
    let (task, turn) = payload.split_once(' ')?;
    let byte = |n: usize| u8::from_str_radix(turn.get(2 * n..2 * n + 2)?, 16).ok();
    let turn_id: Option<Vec<u8>> = (0..turn.len() / 2).map(byte).collect();
    Some(CancelOrder { task_id: task.to_owned(), turn_id: turn_id?.into(), stopping: false })
}

/// What a runner is told about a turn that it believes to own.
fn standing(head: &Head, claimed: &HeldTurn, owned: bool) -> Outcome {
    let Some(turn) = &head.turn else { return Outcome::Fenced };
    if turn.id != claimed.turn_id || turn.fence != claimed.fence {
        return Outcome::Fenced;
    }
    match turn.phase() {
        Phase::Running if owned => Outcome::Ok,
        Phase::Stopping => Outcome::Canceled,
        Phase::Done if head.state() == TaskState::Canceled => Outcome::Canceled,
        Phase::Running | Phase::Done | Phase::Resting | Phase::Queued | Phase::Waiting => Outcome::Fenced,
    }
}

/// An answer, or the error in its form between services.
pub(crate) fn answer<T>(result: Result<T, Error>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|error| error.to_status())
}

#[tonic::async_trait]
impl task_store_server::TaskStore for TaskStore {
    type SendStream = Updates;
    type WatchStream = Updates;
    type ControlStream = Pin<Box<dyn Stream<Item = Result<CancelOrder, Status>> + Send>>;

    async fn send(&self, request: Request<SendRequest>) -> Result<Response<Updates>, Status> {
        answer(self.0.send(request.into_inner()).await)
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Updates>, Status> {
        answer(self.0.watch(request.into_inner()).await)
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Task>, Status> {
        answer(self.0.get(request.into_inner()).await)
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListTasksResponse>, Status> {
        let request = request.into_inner();
        let listed = async {
            let scope = required(request.scope.as_ref(), "scope")?;
            list::list(&self.0.store, &self.0.seal, scope, &request.query.unwrap_or_default()).await
        };
        answer(listed.await)
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Task>, Status> {
        answer(self.0.cancel(request.into_inner()).await)
    }

    async fn grant(&self, request: Request<GrantRequest>) -> Result<Response<Task>, Status> {
        answer(self.0.grant(request.into_inner()).await)
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        answer(self.0.begin(request.into_inner()).await)
    }

    async fn heartbeat(&self, request: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        let outcomes = self.0.heartbeat(&request.into_inner().turns).await;
        answer(outcomes.map(|outcomes| HeartbeatReply { outcomes: outcomes.into_iter().map(Into::into).collect() }))
    }

    async fn record(&self, request: Request<RecordRequest>) -> Result<Response<RecordReply>, Status> {
        let request = request.into_inner();
        let write = Write {
            rules: &self.0.rules,
            turn: &request.turn_id,
            fence: request.fence,
            first_event: request.first_event,
            events: &request.events,
            journal: &request.journal,
            history: &[],
            metadata: request.metadata.as_ref(),
            finish: false,
            claim: None,
        };
        let written = self.0.write(&request.task_id, write).await;
        answer(written.map(|Written { outcome, last_event }| RecordReply { outcome: outcome.into(), last_event }))
    }

    async fn finish(&self, request: Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        let request = request.into_inner();
        let finished = async {
            let write = Write {
                rules: &self.0.rules,
                turn: &request.turn_id,
                fence: request.fence,
                first_event: request.first_event,
                events: &request.events,
                journal: &request.journal,
                history: &request.history,
                metadata: request.metadata.as_ref(),
                finish: true,
                claim: request.claim.as_ref().map(Claim::read).transpose()?,
            };
            self.0.write(&request.task_id, write).await
        };
        answer(finished.await.map(|written| FinishReply { outcome: written.outcome.into() }))
    }

    async fn hand_back(&self, request: Request<HandBackRequest>) -> Result<Response<HandBackReply>, Status> {
        answer(self.0.hand_back(&request.into_inner().turns).await.map(|()| HandBackReply {}))
    }

    async fn control(&self, request: Request<ControlRequest>) -> Result<Response<Self::ControlStream>, Status> {
        let orders = self.0.control(&request.into_inner().consumer).await;
        answer(orders.map(|orders| Box::pin(orders) as Self::ControlStream))
    }
}
