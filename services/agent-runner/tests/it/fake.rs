//! A task-store in memory that refuses whatever the contract forbids.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use futures::stream::{self, BoxStream, StreamExt as _};
use rialto_a2a::{
    Error, Kind,
    v1::{
        Artifact, ListTasksResponse, Message, Part, Role, StreamResponse, Task, TaskState, TaskStatus, part,
        stream_response::Payload,
    },
    wkt::Struct,
};
use rialto_rpc::tasks::{
    BeginReply, BeginRequest, CancelOrder, CancelRequest, Claim, ControlRequest, FinishReply, FinishRequest,
    GetRequest, GrantRequest, Granted, HandBackReply, HandBackRequest, HeartbeatReply, HeartbeatRequest, JournalEntry,
    ListRequest, Outcome, RecordReply, RecordRequest, SendRequest, Turn, Update, WatchRequest,
    task_store_server::TaskStore,
};
use rialto_store::{Batch, Check, Engine, EntryId, Op, sqlite::SqliteEngine};
use tokio::sync::{broadcast, watch};
use tonic::{Request, Response, Status, async_trait};

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
pub(crate) struct State {
    pub tasks: HashMap<String, Kept>,
    pub calls: Vec<&'static str>,
    pub faults: Vec<(&'static str, Fault)>,
    /// Refusal for the next Finish or Record.
    pub refusals: Vec<(&'static str, Error)>,
    pub cut_off_control: bool,
}

/// The fake. Clones are the same store.
#[derive(Clone, Debug)]
pub(crate) struct Fake {
    pub engine: Arc<SqliteEngine>,
    pub state: Arc<Mutex<State>>,
    pub changed: watch::Sender<u64>,
    pub orders: broadcast::Sender<CancelOrder>,
}

impl Fake {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
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
