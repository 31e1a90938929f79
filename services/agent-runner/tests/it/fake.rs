//! A task-store in memory that refuses whatever the contract forbids, and what a test needs around it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::stream::{self, BoxStream, StreamExt as _};
use prost::Message as _;
use rialto_a2a::{
    Error, Kind,
    v1::{
        Artifact, ListTasksResponse, Message, Part, Role, StreamResponse, Task, TaskState, TaskStatus, part,
        stream_response::Payload,
    },
    wkt::Struct,
};
use rialto_agent_runner::{RunnerOptions, backend::Backend};
use rialto_rpc::{
    Transport,
    tasks::{
        BeginReply, BeginRequest, CancelOrder, CancelRequest, Claim, ControlRequest, FinishReply, FinishRequest,
        GetRequest, GrantRequest, Granted, HandBackReply, HandBackRequest, HeartbeatReply, HeartbeatRequest,
        JournalEntry, ListRequest, Outcome, RecordReply, RecordRequest, RunEntry, SendRequest, Turn, Update,
        WatchRequest, task_store_server::TaskStore,
    },
};
use rialto_runtime::{config, units::Span};
use rialto_store::{
    At, Batch, Check, Engine, EntryId, Op,
    sqlite::{SqliteConfig, SqliteEngine},
};
use tokio::{
    sync::{broadcast, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, async_trait};

/// Longer than any test takes; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// A task as the fake keeps it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    pub agent: String,
    pub turn_id: Vec<u8>,
    pub context_id: String,
    pub message: Message,
    pub history: Vec<Message>,
    pub metadata: Struct,
    /// The journal of the last Finish.
    pub finished_journal: Vec<JournalEntry>,
    /// What came with each Grant.
    pub grants: Vec<Struct>,
    pub state: TaskState,
    pub status_message: Option<Message>,
    pub events: Vec<StreamResponse>,
    pub artifacts: Vec<Artifact>,
    /// Artifacts that the running turn wrote, and in which event last.
    pub fresh: HashMap<String, u64>,
    /// Number of the last event that the journal vouches for.
    pub vouched: u64,
    pub journal: Vec<JournalEntry>,
    pub fence: u64,
    pub attempts: u32,
    pub turns: u32,
    pub handed_back: u32,
    /// The turn is not over.
    pub open: bool,
    pub canceled: bool,
    /// The answer of a hidden task.
    pub reply: Option<Message>,
    pub last_begin: Vec<u8>,
}

impl Kept {
    /// The text of an artifact's parts, joined.
    pub(crate) fn artifact_text(&self, id: &str) -> String {
        let artifact = self.artifacts.iter().find(|artifact| artifact.artifact_id == id);
        artifact.unwrap_or_else(|| panic!("no artifact {id}: {:?}", self.artifacts)).parts.iter().map(text_of).collect()
    }

    fn written(&self, which: impl Fn(u64) -> bool) -> Vec<String> {
        self.fresh.iter().filter(|(_, event)| which(**event)).map(|(id, _)| id.clone()).collect()
    }

    pub(crate) fn status_text(&self) -> String {
        self.status_message.iter().flat_map(|message| &message.parts).map(text_of).collect()
    }

    /// What the agent said, one text per message.
    pub(crate) fn agent_texts(&self) -> Vec<String> {
        let said = self.history.iter().filter(|message| message.role() == Role::Agent);
        said.map(|message| message.parts.iter().map(text_of).collect::<Vec<_>>().join("|")).collect()
    }

    /// The texts of the WORKING statuses.
    pub(crate) fn progress(&self) -> Vec<String> {
        let statuses = self.events.iter().filter_map(|event| match &event.payload {
            Some(Payload::StatusUpdate(update)) => update.status.as_ref(),
            _ => None,
        });
        let working = statuses.filter(|status| status.state() == TaskState::Working);
        working.filter_map(|status| status.message.as_ref()).map(|m| m.parts.iter().map(text_of).collect()).collect()
    }
}

pub(crate) fn text_of(part: &Part) -> String {
    match &part.content {
        Some(part::Content::Text(text)) => text.clone(),
        other => format!("{other:?}"),
    }
}

/// What a call is made to suffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing happens, and the caller is told so.
    Unavailable,
    /// It happens, and the reply is lost.
    ReplyLost,
}

#[derive(Debug)]
struct State {
    tasks: HashMap<String, Kept>,
    calls: Vec<&'static str>,
    faults: Vec<(&'static str, Fault)>,
    /// Refusal for the next Finish or Record.
    refusals: Vec<(&'static str, Error)>,
    cut_off_control: bool,
}

/// The fake. Clones are the same store.
#[derive(Clone, Debug)]
pub(crate) struct Fake {
    engine: Arc<SqliteEngine>,
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
    orders: broadcast::Sender<CancelOrder>,
}

impl Fake {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Counts the call, and lets it suffer what is due.
    fn enter(&self, call: &'static str) -> Result<bool, Status> {
        let mut state = self.lock();
        state.calls.push(call);
        if let Some(at) = state.refusals.iter().position(|(name, _)| *name == call) {
            return Err(state.refusals.remove(at).1.to_status());
        }
        let Some(at) = state.faults.iter().position(|(name, _)| *name == call) else { return Ok(false) };
        match state.faults.remove(at).1 {
            Fault::Unavailable => Err(Error::unavailable().to_status()),
            Fault::ReplyLost => Ok(true),
        }
    }

    fn leave<T>(&self, reply: T, lost: bool) -> Result<Response<T>, Status> {
        self.changed.send_modify(|n| *n += 1);
        if lost { Err(Error::unavailable().to_status()) } else { Ok(Response::new(reply)) }
    }

    /// Settles the entry; says whether the claim still held.
    async fn settle(&self, claim: &Claim, op: fn(String, EntryId) -> Op) -> bool {
        let id: EntryId = claim.entry.parse().unwrap();
        let pending = Check::Pending { stream: claim.stream.clone(), id, consumer: claim.consumer.clone() };
        let batch = Batch {
            shard: claim.shard.try_into().unwrap(),
            checks: vec![pending],
            ops: vec![op(claim.stream.clone(), id)],
            releasing: true,
            ..Batch::default()
        };
        self.engine.commit(batch).await.is_ok()
    }
}

/// Applies events as task-store does; nothing changes on a refusal.
fn apply(kept: &mut Kept, first_event: u64, events: &[StreamResponse]) -> Result<(), Error> {
    let mut next = kept.clone();
    let known = next.events.len() as u64 + 1;
    assert!(first_event >= 1 && first_event <= known, "a gap: {first_event} after {}", known - 1);
    let skip = usize::try_from(known - first_event).unwrap();
    for (n, event) in events.iter().enumerate() {
        if n < skip {
            assert_eq!(event, &next.events[usize::try_from(first_event).unwrap() - 1 + n], "a repeat that differs");
            continue;
        }
        assert!(!is_terminal(next.state), "an event after the end: {event:?}");
        match event.payload.as_ref().expect("an event says something") {
            Payload::StatusUpdate(update) => {
                let status = update.status.clone().unwrap();
                if let Some(message) = &status.message {
                    assert!(
                        !message.message_id.is_empty() && message.role() == Role::Agent && !message.parts.is_empty()
                    );
                    assert_eq!(message.context_id, kept.context_id);
                }
                next.state = status.state();
                next.status_message = status.message;
            }
            Payload::ArtifactUpdate(update) => {
                let artifact = update.artifact.clone().unwrap();
                next.fresh.insert(artifact.artifact_id.clone(), next.events.len() as u64 + 1);
                match next.artifacts.iter_mut().find(|kept| kept.artifact_id == artifact.artifact_id) {
                    Some(kept) if update.append => {
                        kept.parts.extend(artifact.parts);
                        if let Some(metadata) = artifact.metadata {
                            kept.metadata.get_or_insert_default().fields.extend(metadata.fields);
                        }
                    }
                    Some(kept) => *kept = artifact,
                    None if update.append => {
                        return Err(Error::new(
                            Kind::InvalidAgentResponse,
                            "append to an artifact that does not exist",
                        ));
                    }
                    None => next.artifacts.push(artifact),
                }
            }
            Payload::Message(message) => {
                next.reply = Some(message.clone());
                next.state = TaskState::Completed;
            }
            Payload::Task(_) => panic!("a runner sends no task"),
        }
        next.events.push(event.clone());
    }
    *kept = next;
    Ok(())
}

fn merge(kept: &mut Kept, metadata: Option<Struct>) {
    kept.metadata.fields.extend(metadata.unwrap_or_default().fields);
}

pub(crate) const fn is_terminal(state: TaskState) -> bool {
    matches!(state, TaskState::Completed | TaskState::Failed | TaskState::Canceled | TaskState::Rejected)
}

type Nothing<T> = BoxStream<'static, Result<T, Status>>;

#[async_trait]
impl TaskStore for Fake {
    type SendStream = Nothing<Update>;
    type WatchStream = Nothing<Update>;
    type ControlStream = Nothing<CancelOrder>;

    async fn send(&self, _: Request<SendRequest>) -> Result<Response<Self::SendStream>, Status> {
        unreachable!("not a runner's call")
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        unreachable!("not a runner's call")
    }

    async fn get(&self, _: Request<GetRequest>) -> Result<Response<Task>, Status> {
        unreachable!("not a runner's call")
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListTasksResponse>, Status> {
        unreachable!("not a runner's call")
    }

    async fn cancel(&self, _: Request<CancelRequest>) -> Result<Response<Task>, Status> {
        unreachable!("not a runner's call")
    }

    async fn grant(&self, request: Request<GrantRequest>) -> Result<Response<Task>, Status> {
        let lost = self.enter("grant")?;
        let request = request.into_inner();
        let mut state = self.lock();
        let kept = state.tasks.get_mut(&request.task_id).filter(|kept| kept.agent == request.agent);
        let Some(kept) = kept else { return Err(Error::from(Kind::TaskNotFound).to_status()) };
        kept.grants.push(request.metadata.unwrap_or_default());
        drop(state);
        self.leave(Task { id: request.task_id, ..Task::default() }, lost)
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        let lost = self.enter("begin")?;
        let request = request.into_inner();
        let (run, claim) = (request.run.unwrap(), request.claim.unwrap());
        let begun = {
            let mut state = self.lock();
            let Some(kept) = state.tasks.get_mut(&run.task_id) else {
                return Err(Error::from(Kind::TaskNotFound).to_status());
            };
            let repeat = kept.last_begin == request.commit_id;
            kept.last_begin = request.commit_id.to_vec();
            if kept.open && !kept.canceled && !repeat && kept.attempts >= request.max_attempts {
                kept.open = false;
                kept.state = TaskState::Failed;
                kept.status_message = Some(agent_message(kept, "the agent crashed"));
            }
            if kept.open && !kept.canceled {
                if !repeat {
                    kept.fence += 1;
                    kept.attempts += 1;
                }
                kept.state = TaskState::Working;
                Some(Turn {
                    fence: kept.fence,
                    attempt: kept.attempts,
                    next_event: kept.events.len() as u64 + 1,
                    task: Some(Task {
                        id: run.task_id.clone(),
                        context_id: kept.context_id.clone(),
                        status: Some(TaskStatus { state: TaskState::Working.into(), ..TaskStatus::default() }),
                        history: window(&kept.history, request.window_messages),
                        metadata: Some(kept.metadata.clone()),
                        ..Task::default()
                    }),
                    message: Some(kept.message.clone()),
                    conversation: window(&kept.history, request.window_messages),
                    journal: kept.journal.clone(),
                    stale_artifacts: kept.written(|event| event > kept.vouched),
                    kept_artifacts: kept.written(|event| event <= kept.vouched),
                    number: kept.turns,
                    granted: kept.grants.last().map(|metadata| Granted {
                        times: u32::try_from(kept.grants.len()).unwrap(),
                        metadata: Some(metadata.clone()),
                    }),
                    ..Turn::default()
                })
            } else {
                None
            }
        };
        if begun.is_none() {
            self.settle(&claim, |stream, id| Op::Ack { stream, id }).await;
        }
        self.leave(BeginReply { turn: begun }, lost)
    }

    async fn heartbeat(&self, request: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        let lost = self.enter("heartbeat")?;
        let turns = request.into_inner().turns;
        let outcomes = turns.iter().map(|turn| {
            let state = self.lock();
            let outcome = outcome(&state.tasks[&turn.task_id], turn.fence);
            outcome as i32
        });
        let reply = HeartbeatReply { outcomes: outcomes.collect() };
        self.leave(reply, lost)
    }

    async fn record(&self, request: Request<RecordRequest>) -> Result<Response<RecordReply>, Status> {
        let lost = self.enter("record")?;
        let request = request.into_inner();
        let reply = {
            let mut state = self.lock();
            let kept = state.tasks.get_mut(&request.task_id).unwrap();
            let outcome = outcome(kept, request.fence);
            if outcome == Outcome::Ok {
                apply(kept, request.first_event, &request.events).map_err(|error| error.to_status())?;
                for entry in request.journal {
                    let steps = u32::try_from(kept.journal.len()).unwrap();
                    assert!(entry.step <= steps + 1, "a gap in the journal");
                    kept.vouched = kept.vouched.max(entry.after_event);
                    if entry.step == steps + 1 {
                        kept.journal.push(entry);
                    }
                }
                merge(kept, request.metadata);
            }
            RecordReply { outcome: outcome.into(), last_event: kept.events.len() as u64 }
        };
        self.leave(reply, lost)
    }

    async fn finish(&self, request: Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        let lost = self.enter("finish")?;
        let request = request.into_inner();
        let outcome = {
            let mut state = self.lock();
            let kept = state.tasks.get_mut(&request.task_id).unwrap();
            match outcome(kept, request.fence) {
                // A repeat of the Finish that ended the turn.
                Outcome::Fenced if !kept.open && kept.fence == request.fence => Outcome::Ok,
                Outcome::Canceled if request.events.is_empty() => {
                    kept.open = false;
                    Outcome::Ok
                }
                Outcome::Ok => {
                    assert!(!request.events.is_empty(), "a Finish without an end");
                    apply(kept, request.first_event, &request.events).map_err(|error| error.to_status())?;
                    merge(kept, request.metadata);
                    let message = kept.message.clone();
                    kept.history.push(message);
                    kept.history.extend(request.history);
                    kept.finished_journal = request.journal;
                    if kept.state == TaskState::AuthRequired {
                        kept.vouched = kept.events.len() as u64;
                    } else {
                        kept.fresh.clear();
                    }
                    kept.journal.clear();
                    kept.open = false;
                    Outcome::Ok
                }
                refused => refused,
            }
        };
        if outcome == Outcome::Ok {
            self.settle(&request.claim.unwrap(), |stream, id| Op::Ack { stream, id }).await;
        }
        self.leave(FinishReply { outcome: outcome.into() }, lost)
    }

    async fn hand_back(&self, request: Request<HandBackRequest>) -> Result<Response<HandBackReply>, Status> {
        let lost = self.enter("hand_back")?;
        for turn in request.into_inner().turns {
            self.settle(&turn.claim.unwrap(), |stream, id| Op::HandBack { stream, id }).await;
            let mut state = self.lock();
            let kept = state.tasks.get_mut(&turn.task_id).unwrap();
            if kept.fence == turn.fence {
                kept.attempts -= u32::from(!turn.crashed);
                kept.handed_back += 1;
            }
        }
        self.leave(HandBackReply {}, lost)
    }

    async fn control(&self, _: Request<ControlRequest>) -> Result<Response<Self::ControlStream>, Status> {
        if self.lock().cut_off_control {
            return Err(Error::unavailable().to_status());
        }
        let orders = self.orders.subscribe();
        self.enter("control")?;
        self.changed.send_modify(|n| *n += 1);
        let orders = stream::unfold(orders, |mut orders| async { Some((Ok(orders.recv().await.ok()?), orders)) });
        Ok(Response::new(orders.boxed()))
    }
}

fn window(history: &[Message], messages: u32) -> Vec<Message> {
    history[history.len().saturating_sub(messages as usize)..].to_vec()
}

/// Whether a write under this fence counts.
fn outcome(kept: &Kept, fence: u64) -> Outcome {
    match () {
        () if kept.fence != fence || !kept.open => Outcome::Fenced,
        () if kept.canceled => Outcome::Canceled,
        () => Outcome::Ok,
    }
}

fn agent_message(kept: &Kept, text: &str) -> Message {
    Message { context_id: kept.context_id.clone(), ..message(Role::Agent, text) }
}

pub(crate) fn message(role: Role, text: &str) -> Message {
    Message {
        message_id: uuid::Uuid::new_v4().to_string(),
        role: role.into(),
        parts: vec![rialto_agent_runner::backend::text_part(text)],
        ..Message::default()
    }
}

/// A store with a runner, and hands to work them.
#[derive(Debug)]
pub(crate) struct Lab {
    pub fake: Fake,
    changed: watch::Receiver<u64>,
    runners: Vec<Runner>,
}

#[derive(Debug)]
struct Runner {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// An agent with short times.
pub(crate) fn agent(backend: config::Backend) -> config::Agent {
    config::Agent {
        id: "a".to_owned(),
        backend,
        lease: Span::secs(3),
        kill_grace: Span(Duration::from_millis(300)),
        turn_timeout: Span::secs(15),
        ..config::Agent::echo()
    }
}

pub(crate) fn echo() -> config::Agent {
    agent(config::Backend::Echo {})
}

impl Lab {
    /// A store without a runner.
    pub(crate) fn new() -> Self {
        let engine = SqliteEngine::open(SqliteConfig::memory(2)).unwrap();
        let (changed, receiver) = watch::channel(0);
        let state = State {
            tasks: HashMap::new(),
            calls: Vec::new(),
            faults: Vec::new(),
            refusals: Vec::new(),
            cut_off_control: false,
        };
        let fake = Fake { engine, state: Arc::new(Mutex::new(state)), changed, orders: broadcast::channel(16).0 };
        Self { fake, changed: receiver, runners: Vec::new() }
    }

    /// A store and a runner of these agents.
    pub(crate) fn with(agents: impl IntoIterator<Item = config::Agent>) -> Self {
        let mut lab = Self::new();
        lab.start(agents, Duration::from_secs(5));
        lab
    }

    /// Starts one more runner.
    pub(crate) fn start(&mut self, agents: impl IntoIterator<Item = config::Agent>, stop_grace: Duration) {
        let options = RunnerOptions { agents: agents.into_iter().collect(), stop_grace };
        let stop = CancellationToken::new();
        let (engine, client) = self.doors();
        let running = rialto_agent_runner::run(options, engine, client, stop.clone());
        let task = tokio::spawn(async move { running.await.unwrap() });
        self.runners.push(Runner { stop, task });
    }

    /// Starts a runner of one agent with a backend of the test's own.
    pub(crate) fn start_with(&mut self, agent: config::Agent, backend: Arc<dyn Backend>) {
        let stop = CancellationToken::new();
        let (engine, client) = self.doors();
        let agents = vec![(agent, backend)];
        let running = rialto_agent_runner::run_with(agents, Duration::from_secs(5), engine, client, stop.clone());
        self.runners.push(Runner { stop, task: tokio::spawn(running) });
    }

    fn doors(&self) -> (Arc<dyn Engine>, rialto_rpc::tasks::TaskStoreClient) {
        let server = rialto_rpc::tasks::server(self.fake.clone());
        (self.fake.engine.clone(), rialto_rpc::tasks::client(Transport::in_memory(server)))
    }

    /// Stops all runners, as a planned stop does.
    pub(crate) async fn stop(&mut self) {
        for runner in self.runners.drain(..) {
            runner.stop.cancel();
            timeout(PATIENCE, runner.task).await.expect("the runner stops").unwrap();
        }
    }

    /// Kills all runners, as `kill -9` does (but for their children).
    pub(crate) async fn kill(&mut self) {
        for runner in self.runners.drain(..) {
            runner.task.abort();
            runner.task.await.ok();
        }
    }

    /// Sends a text to agent `a`, as a new task.
    pub(crate) async fn send(&self, text: &str) -> String {
        self.send_message(message(Role::User, text)).await
    }

    pub(crate) async fn send_message(&self, message: Message) -> String {
        let task_id = uuid::Uuid::new_v4().to_string();
        let kept = Kept { context_id: format!("c-{task_id}"), agent: "a".to_owned(), ..Kept::default() };
        self.fake.lock().tasks.insert(task_id.clone(), kept);
        self.turn(&task_id, message).await;
        task_id
    }

    /// Sends the next message of a task.
    pub(crate) async fn turn(&self, task_id: &str, message: Message) {
        let turn_id = uuid::Uuid::new_v4().as_bytes().to_vec();
        {
            let mut state = self.fake.lock();
            let kept = state.tasks.get_mut(task_id).unwrap();
            assert!(!kept.open, "one turn at a time");
            kept.turn_id = turn_id;
            kept.message = Message { context_id: kept.context_id.clone(), task_id: task_id.to_owned(), ..message };
            kept.open = true;
            kept.attempts = 0;
            kept.turns += 1;
            kept.state = TaskState::Submitted;
        }
        self.queue(task_id).await;
    }

    /// Lets the turn of a task that stopped for authorization go on.
    pub(crate) async fn grant(&self, task_id: &str, metadata: Struct) {
        {
            let mut state = self.fake.lock();
            let kept = state.tasks.get_mut(task_id).unwrap();
            assert_eq!(kept.state, TaskState::AuthRequired);
            kept.grants.push(metadata);
            kept.open = true;
            kept.attempts -= 1;
            kept.journal = std::mem::take(&mut kept.finished_journal);
        }
        self.queue(task_id).await;
    }

    /// Appends a run entry for the task's turn.
    pub(crate) async fn queue(&self, task_id: &str) {
        let kept = self.task(task_id);
        let entry = RunEntry {
            schema: 1,
            agent: kept.agent.clone(),
            task_id: task_id.to_owned(),
            turn_id: kept.turn_id.into(),
            ..RunEntry::default()
        };
        self.append(&kept.agent, entry.encode_to_vec()).await;
    }

    pub(crate) async fn append(&self, agent: &str, payload: Vec<u8>) {
        let append =
            Op::Append { stream: format!("runs:{agent}"), at: At::Next, tag: 0, payload: payload.into(), into: None };
        let batch = Batch { shard: 1, ops: vec![append], ..Batch::default() };
        self.fake.engine.commit(batch).await.unwrap();
    }

    pub(crate) fn task(&self, task_id: &str) -> Kept {
        self.fake.lock().tasks[task_id].clone()
    }

    /// Waits until the task is as wanted.
    pub(crate) async fn until(&self, task_id: &str, wanted: impl Fn(&Kept) -> bool) -> Kept {
        let mut changed = self.changed.clone();
        let found = timeout(PATIENCE, async {
            loop {
                changed.borrow_and_update();
                let kept = self.task(task_id);
                if wanted(&kept) {
                    return kept;
                }
                changed.changed().await.unwrap();
            }
        });
        match found.await {
            Ok(kept) => kept,
            Err(_) => panic!("it never comes: {:#?}\n{:?}", self.task(task_id), self.calls()),
        }
    }

    /// Waits until the turn is over.
    pub(crate) async fn over(&self, task_id: &str) -> Kept {
        self.until(task_id, |kept| !kept.open).await
    }

    /// Sends a text and waits for the end of the turn.
    pub(crate) async fn ask(&self, text: &str) -> Kept {
        let task_id = self.send(text).await;
        self.over(&task_id).await
    }

    /// Cancels the task, and orders its runner to stop unless `silently`.
    pub(crate) fn cancel(&self, task_id: &str, silently: bool) {
        let turn_id = {
            let mut state = self.fake.lock();
            let kept = state.tasks.get_mut(task_id).unwrap();
            kept.canceled = true;
            kept.state = TaskState::Canceled;
            kept.turn_id.clone()
        };
        if !silently {
            let order = CancelOrder { task_id: task_id.to_owned(), turn_id: turn_id.into() };
            self.fake.orders.send(order).unwrap();
        }
    }

    /// Gives the turn to another attempt.
    pub(crate) fn fence(&self, task_id: &str) {
        let mut state = self.fake.lock();
        state.tasks.get_mut(task_id).unwrap().fence += 1;
    }

    /// Lets the next calls of this name suffer.
    pub(crate) fn fault(&self, call: &'static str, fault: Fault, times: usize) {
        self.fake.lock().faults.extend(std::iter::repeat_n((call, fault), times));
    }

    /// Refuses the next call of this name.
    pub(crate) fn refuse(&self, call: &'static str, error: Error) {
        self.fake.lock().refusals.push((call, error));
    }

    /// The calls so far, without heartbeats and Control.
    pub(crate) fn calls(&self) -> Vec<&'static str> {
        let calls = self.fake.lock().calls.clone();
        calls.into_iter().filter(|call| !matches!(*call, "heartbeat" | "control")).collect()
    }

    /// Entries of agent `a` that somebody still owns or will claim.
    pub(crate) async fn entries(&self) -> u64 {
        let depth = self.fake.engine.depth(1, "runs:a").await.unwrap();
        depth.waiting + depth.pending + depth.delayed
    }

    /// Waits until no entry is left.
    pub(crate) async fn settled(&self) {
        timeout(PATIENCE, async {
            while self.entries().await > 0 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("all entries are settled");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for runner in &self.runners {
            runner.task.abort();
        }
    }
}
