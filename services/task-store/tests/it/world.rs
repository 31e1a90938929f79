//! A store, some replicas of the service, and what clients and runners do to them.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use prost::Message as _;
use rialto_a2a::{
    Error, Kind,
    v1::{
        Artifact, Message, Part, Role, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus,
        TaskStatusUpdateEvent, part::Content, stream_response::Payload,
    },
};
use rialto_rpc::tasks::{
    self, BeginRequest, CancelRequest, FinishRequest, Follow, GetRequest, GrantRequest, HeldTurn, Idempotency,
    ListRequest, Outcome, Policy, RecordRequest, RunEntry, Scope, SendRequest, Turn, Update, WatchRequest, WhenBusy,
    task_store_server::TaskStore as Calls,
};
use rialto_store::{Engine, IndexQuery, Order};
use rialto_task_store::{Options, TaskStore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Status};

pub(crate) use rialto_a2a::v1::TaskState as S;

pub(crate) use crate::engine::engine;

pub(crate) const AGENT: &str = "echo";

/// A run entry that was claimed.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) run: RunEntry,
    pub(crate) claim: tasks::Claim,
}

impl Run {
    /// The call that begins this turn, with an identity of its own.
    pub(crate) fn begin(&self, max_attempts: u32) -> BeginRequest {
        BeginRequest {
            run: Some(self.run.clone()),
            claim: Some(self.claim.clone()),
            max_attempts,
            commit_id: id_bytes().to_vec().into(),
            ..BeginRequest::default()
        }
    }
}

/// A turn that was begun.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) run: Run,
    pub(crate) turn: Turn,
}

impl Begun {
    /// The call that stores these events.
    pub(crate) fn record(&self, first_event: u64, events: Vec<StreamResponse>) -> RecordRequest {
        RecordRequest {
            task_id: self.run.run.task_id.clone(),
            turn_id: self.run.run.turn_id.clone(),
            fence: self.turn.fence,
            first_event,
            events,
            ..RecordRequest::default()
        }
    }

    /// The call that ends this turn with these events.
    pub(crate) fn finish(&self, first_event: u64, events: Vec<StreamResponse>) -> FinishRequest {
        FinishRequest {
            task_id: self.run.run.task_id.clone(),
            turn_id: self.run.run.turn_id.clone(),
            fence: self.turn.fence,
            claim: Some(self.run.claim.clone()),
            first_event,
            events,
            ..FinishRequest::default()
        }
    }

    pub(crate) fn held(&self) -> HeldTurn {
        HeldTurn {
            task_id: self.run.run.task_id.clone(),
            turn_id: self.run.run.turn_id.clone(),
            fence: self.turn.fence,
            claim: Some(self.run.claim.clone()),
            crashed: false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) replicas: Vec<TaskStore>,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl World {
    /// One replica over four shards.
    pub(crate) fn new() -> Self {
        Self::with(engine(4), 1, &Options::default())
    }

    pub(crate) fn with(engine: Arc<dyn Engine>, replicas: usize, options: &Options) -> Self {
        let replicas: Vec<_> = (0..replicas).map(|_| TaskStore::new(Arc::clone(&engine), options)).collect();
        Self { engine, replicas, stop: CancellationToken::new() }
    }

    /// Starts the background work of all replicas.
    pub(crate) fn background(&self) {
        for replica in &self.replicas {
            replica.run_background(&self.stop, &TaskTracker::new());
        }
    }

    /// The members of an index in all shards, up to 1,000 of each.
    pub(crate) async fn members(&self, index: &str) -> Vec<String> {
        let mut members = Vec::new();
        for shard in 0..self.engine.shards() {
            let (index, order) = (index.to_owned(), Order::Ascending);
            let query = IndexQuery { index, order, after: None, min: None, max: None, limit: 1000 };
            let rows = self.engine.index(shard, &query).await.expect("reads");
            members.extend(rows.into_iter().map(|(_, member)| member));
        }
        members
    }

    /// How many records, by the beginning of their keys, the background work is still to look at.
    pub(crate) async fn due(&self, kind: &str) -> usize {
        self.members("due").await.iter().filter(|member| member.starts_with(kind)).count()
    }

    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    pub(crate) fn calls(&self) -> &TaskStore {
        &self.replicas[0]
    }

    /// Sends and returns the first update as a task.
    pub(crate) async fn send(&self, send: Send) -> Result<Task, Error> {
        let update = self.updates(send).await?.next().await.expect("an update").map_err(|it| error(&it))?;
        Ok(task(update))
    }

    pub(crate) async fn updates(&self, send: Send) -> Result<Updates, Error> {
        self.updates_at(0, send).await
    }

    pub(crate) async fn updates_at(&self, replica: usize, send: Send) -> Result<Updates, Error> {
        let sent = Calls::send(&self.replicas[replica], Request::new(send.0)).await;
        Ok(sent.map_err(|status| error(&status))?.into_inner())
    }

    pub(crate) async fn watch(&self, id: &str, after: Option<u64>) -> Result<Updates, Error> {
        self.watch_at(0, id, after, Follow::Task).await
    }

    pub(crate) async fn watch_at(
        &self,
        replica: usize,
        id: &str,
        after: Option<u64>,
        follow: Follow,
    ) -> Result<Updates, Error> {
        let request =
            WatchRequest { scope: Some(scope("")), id: id.into(), after, follow: follow.into(), ..Default::default() };
        let watched = self.replicas[replica].watch(Request::new(request)).await;
        Ok(watched.map_err(|status| error(&status))?.into_inner())
    }

    /// What is left of a turn after an event, as a stream that broke off goes on.
    pub(crate) async fn rest_of(&self, id: &str, turn: &[u8], after: u64) -> Updates {
        let request = WatchRequest {
            scope: Some(scope("")),
            id: id.into(),
            after: Some(after),
            follow: Follow::Turn.into(),
            turn_id: turn.to_vec().into(),
        };
        self.replicas[0].watch(Request::new(request)).await.expect("watches").into_inner()
    }

    pub(crate) async fn get(&self, id: &str) -> Task {
        self.get_as("", id, None).await.expect("the task")
    }

    /// The task, if it is there by now.
    pub(crate) async fn calls_get(&self, id: &str) -> Option<Task> {
        self.get_as("", id, None).await.ok()
    }

    pub(crate) async fn get_as(&self, owner: &str, id: &str, history_length: Option<i32>) -> Result<Task, Error> {
        let request = GetRequest { scope: Some(scope(owner)), id: id.into(), history_length };
        let replica = self.replicas.last().expect("a replica");
        Ok(replica.get(Request::new(request)).await.map_err(|status| error(&status))?.into_inner())
    }

    pub(crate) async fn list(
        &self,
        owner: &str,
        query: rialto_a2a::v1::ListTasksRequest,
    ) -> Result<rialto_a2a::v1::ListTasksResponse, Error> {
        let request = ListRequest { scope: Some(scope(owner)), query: Some(query) };
        Ok(self.calls().list(Request::new(request)).await.map_err(|status| error(&status))?.into_inner())
    }

    pub(crate) async fn cancel(&self, id: &str) -> Result<Task, Error> {
        self.cancel_as("", id, id_bytes().to_vec()).await
    }

    pub(crate) async fn cancel_as(&self, owner: &str, id: &str, commit: Vec<u8>) -> Result<Task, Error> {
        let request =
            CancelRequest { scope: Some(scope(owner)), id: id.into(), metadata: None, commit_id: commit.into() };
        Ok(self.calls().cancel(Request::new(request)).await.map_err(|status| error(&status))?.into_inner())
    }

    pub(crate) async fn grant(&self, id: &str, with: impl FnOnce(&mut GrantRequest)) -> Result<Task, Error> {
        let mut request =
            GrantRequest { task_id: id.into(), commit_id: id_bytes().to_vec().into(), ..GrantRequest::default() };
        with(&mut request);
        Ok(self.calls().grant(Request::new(request)).await.map_err(|status| error(&status))?.into_inner())
    }

    /// Claims one run entry, if there is one.
    pub(crate) async fn claim(&self, consumer: &str) -> Option<Run> {
        self.claim_after(consumer, Duration::from_secs(60)).await
    }

    /// Claims one run entry, even of a consumer that was silent for this long.
    pub(crate) async fn claim_after(&self, consumer: &str, lease: Duration) -> Option<Run> {
        let claim = rialto_store::Claim {
            streams: (0..self.engine.shards()).map(|shard| (shard, format!("runs:{AGENT}"))).collect(),
            consumer: consumer.into(),
            limit: 1,
            lease,
            // Silence is counted in milliseconds: the consumer may have claimed in this one.
            wait: if lease.is_zero() { Duration::from_millis(20) } else { Duration::ZERO },
        };
        let claimed = self.engine.claim(&claim).await.expect("claims").pop()?;
        let run = RunEntry::decode(claimed.entry.payload).expect("a run entry");
        let claim = tasks::Claim {
            shard: claimed.shard.into(),
            stream: claimed.stream,
            entry: claimed.entry.id.to_string(),
            consumer: consumer.into(),
        };
        Some(Run { run, claim })
    }

    /// Claims the entry that a consumer has, which is not heard of any more.
    pub(crate) async fn take_over(&self, consumer: &str) -> Run {
        let claimed = async {
            loop {
                match self.claim_after(consumer, Duration::ZERO).await {
                    Some(run) => return run,
                    None => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), claimed).await.expect("an entry in time")
    }

    pub(crate) async fn begin(&self, run: &Run) -> Option<Begun> {
        self.begin_with(run, |_| {}).await
    }

    pub(crate) async fn begin_with(&self, run: &Run, with: impl FnOnce(&mut BeginRequest)) -> Option<Begun> {
        let mut request = run.begin(3);
        with(&mut request);
        let replica = self.replicas.last().expect("a replica");
        let turn = replica.begin(Request::new(request)).await.expect("begins").into_inner().turn?;
        Some(Begun { run: run.clone(), turn })
    }

    /// Claims and begins the next turn at this replica.
    pub(crate) async fn begin_at(&self, replica: usize) -> Begun {
        let run = self.claim("r1").await.expect("a run entry");
        let request = run.begin(3);
        let reply = self.replicas[replica].begin(Request::new(request)).await.expect("begins").into_inner();
        Begun { run, turn: reply.turn.expect("a turn") }
    }

    /// Claims and begins the next turn.
    pub(crate) async fn next(&self) -> Begun {
        let run = self.claim("r1").await.expect("a run entry");
        self.begin(&run).await.expect("a turn")
    }

    pub(crate) async fn record(&self, begun: &Begun, first_event: u64, events: Vec<StreamResponse>) -> Outcome {
        let request = begun.record(first_event, events);
        self.record_raw(request).await
    }

    pub(crate) async fn record_raw(&self, request: RecordRequest) -> Outcome {
        self.calls().record(Request::new(request)).await.expect("records").into_inner().outcome()
    }

    pub(crate) async fn finish(&self, begun: &Begun, first_event: u64, events: Vec<StreamResponse>) -> Outcome {
        self.finish_with(begun, first_event, events, |_| {}).await
    }

    pub(crate) async fn finish_with(
        &self,
        begun: &Begun,
        first_event: u64,
        events: Vec<StreamResponse>,
        with: impl FnOnce(&mut FinishRequest),
    ) -> Outcome {
        let mut request = begun.finish(first_event, events);
        with(&mut request);
        self.calls().finish(Request::new(request)).await.expect("finishes").into_inner().outcome()
    }

    /// Runs the next turn of anybody to this state.
    pub(crate) async fn run_to(&self, state: TaskState) -> Begun {
        let begun = self.next().await;
        assert_eq!(self.finish(&begun, begun.turn.next_event, vec![status(state)]).await, Outcome::Ok);
        begun
    }

    /// Entries on the work streams, claimed ones included.
    pub(crate) async fn entries(&self) -> u64 {
        let mut entries = 0;
        for shard in 0..self.engine.shards() {
            let depth = self.engine.depth(shard, &format!("runs:{AGENT}")).await.expect("depth");
            entries += depth.waiting + depth.pending;
        }
        entries
    }
}

pub(crate) type Updates = <TaskStore as Calls>::SendStream;

pub(crate) fn error(status: &Status) -> Error {
    Error::from_status(status)
}

pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> Kind {
    result.expect_err("an error").kind
}

pub(crate) fn scope(owner: &str) -> Scope {
    Scope { agent: AGENT.into(), tenant: String::new(), owner: owner.into() }
}

pub(crate) fn id_bytes() -> [u8; 16] {
    uuid::Uuid::new_v4().into_bytes()
}

pub(crate) fn unique() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// A message that is to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Send(pub(crate) SendRequest);

impl Send {
    /// To a new task in a new context.
    pub(crate) fn new(text: &str) -> Self {
        let message = Message { context_id: unique(), ..said(Role::User, text) };
        Self(SendRequest {
            scope: Some(scope("")),
            turn_id: id_bytes().to_vec().into(),
            message: Some(message),
            policy: Some(Policy::default()),
            ..SendRequest::default()
        })
    }

    /// To a task.
    pub(crate) fn to(task: &Task, text: &str) -> Self {
        let mut send = Self::new(text);
        let message = send.message();
        message.task_id.clone_from(&task.id);
        message.context_id.clear();
        send
    }

    pub(crate) fn message(&mut self) -> &mut Message {
        self.0.message.as_mut().expect("a message")
    }

    pub(crate) fn context(mut self, id: &str) -> Self {
        self.message().context_id = id.into();
        self
    }

    pub(crate) fn owner(mut self, owner: &str) -> Self {
        self.0.scope = Some(scope(owner));
        self
    }

    pub(crate) fn follow(mut self, follow: Follow) -> Self {
        self.0.set_follow(follow);
        self
    }

    pub(crate) fn policy(mut self, with: impl FnOnce(&mut Policy)) -> Self {
        with(self.0.policy.as_mut().expect("a policy"));
        self
    }

    /// With the client's own name for it.
    pub(crate) fn named(mut self, key: &str) -> Self {
        let message = self.0.message.clone().expect("a message");
        let asked = format!("{}{}{}", text(&message), message.task_id, message.message_id);
        self.0.idempotency = Some(Idempotency { key: key.into(), fingerprint: asked.into_bytes().into() });
        self
    }

    /// The same message as a client that lost the answer sends it again: with other ids of the gateway's.
    pub(crate) fn again(&self) -> Self {
        let mut again = self.clone();
        again.0.turn_id = id_bytes().to_vec().into();
        if again.message().task_id.is_empty() {
            again.message().context_id = unique();
        }
        again
    }

    pub(crate) fn queue(self) -> Self {
        self.policy(|policy| policy.set_when_busy(WhenBusy::Queue))
    }
}

pub(crate) fn said(role: Role, text: &str) -> Message {
    let part = Part { content: Some(Content::Text(text.into())), ..Part::default() };
    Message { message_id: unique(), role: role.into(), parts: vec![part], ..Message::default() }
}

pub(crate) fn text(message: &Message) -> String {
    parts(&message.parts)
}

pub(crate) fn parts(parts: &[Part]) -> String {
    let text = |part: &Part| match &part.content {
        Some(Content::Text(text)) => text.clone(),
        _ => String::new(),
    };
    parts.iter().map(text).collect()
}

pub(crate) fn history(task: &Task) -> Vec<String> {
    task.history.iter().map(text).collect()
}

pub(crate) fn status(state: TaskState) -> StreamResponse {
    let status = Some(TaskStatus { state: state.into(), ..TaskStatus::default() });
    StreamResponse { payload: Some(Payload::StatusUpdate(TaskStatusUpdateEvent { status, ..Default::default() })) }
}

pub(crate) fn artifact(id: &str, text: &str, append: bool) -> StreamResponse {
    let part = Part { content: Some(Content::Text(text.into())), ..Part::default() };
    let artifact = Artifact { artifact_id: id.into(), parts: vec![part], ..Artifact::default() };
    let update = TaskArtifactUpdateEvent { artifact: Some(artifact), append, ..Default::default() };
    StreamResponse { payload: Some(Payload::ArtifactUpdate(update)) }
}

pub(crate) fn task(update: Update) -> Task {
    match update.event.and_then(|event| event.payload) {
        Some(Payload::Task(task)) => task,
        other => panic!("not a task: {other:?}"),
    }
}

/// What an update is, in short.
pub(crate) fn short(update: &Update) -> String {
    let what = match update.event.as_ref().and_then(|event| event.payload.as_ref()) {
        Some(Payload::Task(task)) => format!("task {}", state(task).as_str_name()),
        Some(Payload::StatusUpdate(update)) => {
            update.status.as_ref().map_or(S::Unspecified, |status| status.state()).as_str_name().to_owned()
        }
        Some(Payload::ArtifactUpdate(update)) => {
            let artifact = update.artifact.as_ref().expect("an artifact");
            format!("{}{}{}", artifact.artifact_id, if update.append { "+=" } else { "=" }, parts(&artifact.parts))
        }
        Some(Payload::Message(message)) => format!("message {}", text(message)),
        None => "nothing".into(),
    };
    format!("{} {}", update.number, what.replace("TASK_STATE_", ""))
}

pub(crate) fn state(task: &Task) -> TaskState {
    task.status.as_ref().map_or(S::Unspecified, |status| status.state())
}

pub(crate) fn reason(task: &Task) -> String {
    use rialto_a2a::wkt::value::Kind::StringValue;
    let metadata = task.status.as_ref().and_then(|it| it.message.as_ref()).and_then(|it| it.metadata.as_ref());
    match metadata.and_then(|it| it.fields.get("reason")).and_then(|it| it.kind.as_ref()) {
        Some(StringValue(reason)) => reason.clone(),
        _ => String::new(),
    }
}

/// The last event that stays, of a status that says that the work was interrupted.
pub(crate) fn kept_event(event: &StreamResponse) -> Option<usize> {
    use rialto_a2a::wkt::value::Kind::NumberValue;
    let Some(Payload::StatusUpdate(update)) = &event.payload else { return None };
    let metadata = update.status.as_ref()?.message.as_ref()?.metadata.as_ref()?;
    match metadata.fields.get("keptEvent")?.kind.as_ref()? {
        NumberValue(kept) => Some(format!("{kept}").parse().expect("a number")),
        _ => None,
    }
}

/// Everything until the stream ends.
pub(crate) async fn all(updates: Updates) -> Vec<Update> {
    let collect = updates.map(|update| update.expect("no error")).collect();
    tokio::time::timeout(Duration::from_secs(20), collect).await.expect("the stream ends")
}

pub(crate) async fn shorts(updates: Updates) -> Vec<String> {
    all(updates).await.iter().map(short).collect()
}

/// The next update of a stream that goes on.
pub(crate) async fn one(updates: &mut Updates) -> Update {
    let next = tokio::time::timeout(Duration::from_secs(20), updates.next()).await.expect("an update in time");
    next.expect("not the end").expect("no error")
}

/// Whether the stream has ended.
pub(crate) async fn ended(updates: &mut Updates) -> bool {
    tokio::time::timeout(Duration::from_secs(20), updates.next()).await.expect("an end in time").is_none()
}

/// Nothing comes for a moment; for streams that must stay open.
pub(crate) async fn silent(updates: &mut Updates) -> bool {
    tokio::time::timeout(Duration::from_millis(50), updates.next()).await.is_err()
}

/// Whether the events of a task cannot be read one by one any more.
pub(crate) async fn folded(world: &World, id: &str) -> bool {
    let mut updates = world.watch(id, Some(0)).await.expect("watches");
    matches!(one(&mut updates).await.event.and_then(|event| event.payload), Some(Payload::Task(_)))
}

/// Numbers of the events of a task until now.
pub(crate) async fn numbers(world: &World, id: &str) -> Vec<u64> {
    let updates = world.watch(id, Some(0)).await.expect("watches");
    match world.watch(id, None).await {
        Ok(mut snapshot) => {
            let newest = one(&mut snapshot).await.number;
            all(Box::pin(updates.take(usize::try_from(newest).expect("few")))).await
        }
        // It has ended.
        Err(_) => all(updates).await,
    }
    .iter()
    .map(|update| update.number)
    .collect()
}

pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, check: impl Fn() -> F) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(15);
    while !check().await {
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
