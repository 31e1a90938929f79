//! A runner: the real worker, and a handler that makes the calls of agent-runner in its order, for an agent that
//! does anything.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::v1::{
    Artifact, Message, Part, Role, StreamResponse, TaskArtifactUpdateEvent, TaskState, TaskStatus,
    TaskStatusUpdateEvent, part::Content, stream_response::Payload,
};
use rialto_rpc::tasks::{
    BeginReply, BeginRequest, Claim, FinishReply, FinishRequest, HandBackRequest, HeartbeatRequest, HeldTurn,
    JournalEntry, Outcome as Answer, RecordRequest, RunEntry, Turn, task_store_server::TaskStore as _,
};
use rialto_store::{
    Engine, EntryId,
    worker::{self, Handler, Held, Outcome, Verdict, Work, Worker},
};
use rialto_task_store::TaskStore;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::Request;

use crate::{
    ledger::RUNS,
    sim::{Actor, Mutant, Sim},
    world::{LEASE, World},
};

/// How long a stopping runner lets turns end.
const GRACE: Duration = Duration::from_millis(800);

/// What one runner does with its entries.
#[derive(Debug)]
pub(crate) struct Hands {
    world: Arc<World>,
    who: Actor,
    /// Turns that have begun here.
    held: Mutex<BTreeMap<EntryId, HeldTurn>>,
}

/// What is left to do after an attempt.
enum Attempt {
    Over(Outcome),
    Again,
}

impl Hands {
    pub(crate) fn new(world: Arc<World>, n: usize) -> Self {
        Self { world, who: Actor::Runner(n), held: Mutex::default() }
    }

    /// The life of the process.
    pub(crate) async fn work_as(self, consumer: String, engine: Arc<dyn Engine>, stop: CancellationToken) {
        let streams = vec![(0, RUNS.to_owned())];
        let worker = Worker { engine, streams, consumer, slots: 1, lease: LEASE, heartbeat: LEASE / 3, tick: None };
        worker.run(Arc::new(self), stop, GRACE).await;
    }

    fn roll(&self, sides: u32) -> u32 {
        self.world.sim.roll(sides)
    }

    async fn turn(&self, work: &Work) -> Outcome {
        let run = RunEntry::decode(work.claimed.entry.payload.clone()).expect("a run entry");
        let claim = Claim {
            shard: work.claimed.shard.into(),
            stream: work.claimed.stream.clone(),
            entry: work.claimed.entry.id.to_string(),
            consumer: work.consumer.to_string(),
        };
        loop {
            let Some(begun) = self.begin(&run, &claim).await else { return Outcome::Settled };
            let held = HeldTurn {
                task_id: run.task_id.clone(),
                turn_id: run.turn_id.clone(),
                fence: begun.fence,
                claim: Some(claim.clone()),
                ..HeldTurn::default()
            };
            self.held().insert(work.claimed.entry.id, held.clone());
            let attempt = self.attempt(&held, begun, work).await;
            self.held().remove(&work.claimed.entry.id);
            match attempt {
                Attempt::Over(outcome) => return outcome,
                Attempt::Again => self.world.sim.ledger().crashed(&held.turn_id, held.fence),
            }
        }
    }

    fn held(&self) -> std::sync::MutexGuard<'_, BTreeMap<EntryId, HeldTurn>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn begin(&self, run: &RunEntry, claim: &Claim) -> Option<Turn> {
        let id = self.world.id();
        let request = || BeginRequest {
            run: Some(run.clone()),
            claim: Some(claim.clone()),
            max_attempts: self.world.max_attempts,
            commit_id: self.world.call_id(&id),
            ..BeginRequest::default()
        };
        let what = format!("Begin of {}", &run.task_id[..8]);
        let call = |service: TaskStore| {
            let request = request();
            async move { service.begin(Request::new(request)).await }
        };
        let again = |first: &BeginReply, second: &Result<BeginReply, _>| {
            let fence = |reply: &BeginReply| reply.turn.as_ref().map(|turn| turn.fence);
            let (first, second) = (fence(first), second.as_ref().map(fence));
            let ledger = self.world.sim.ledger();
            let over = first.is_none_or(|fence| !ledger.runs(&run.task_id, &run.turn_id, fence));
            // Once the entry is gone, it does not matter what becomes of the turn that had begun.
            let lost = !ledger.owns(&claim.consumer, claim.entry.parse().expect("an entry"));
            second == Ok(first) || over && second == Ok(None) || lost && second.is_ok()
        };
        self.world.insist(self.who, &what, call, again).await.expect("begins").turn
    }

    /// Whatever an agent may do, until it ends, its process dies, or nobody wants it any more.
    async fn attempt(&self, held: &HeldTurn, begun: Turn, work: &Work) -> Attempt {
        let mut next = begun.next_event;
        let mut step = begun.journal.last().map_or(0, |entry| entry.step);
        let mut written = false;
        for _ in 0..self.roll(3) {
            if work.canceled.is_cancelled() {
                return self.confirm(held).await;
            }
            if work.stopping.is_cancelled() && self.roll(2) == 0 {
                return self.hand_back(held).await;
            }
            match self.roll(12) {
                9 => return Attempt::Again,
                10 => return Attempt::Over(Outcome::HandBack),
                11 => sleep(LEASE * 2).await,
                _ => {}
            }
            let mut events = Vec::new();
            for _ in 0..1 + self.roll(2) {
                // Short ones stay in the head of the task, long ones go to its log, and artifacts to their records.
                let size = match self.roll(16) {
                    14 => 300,
                    15 => 3000,
                    _ => 0,
                };
                events.push(match self.roll(3) {
                    2 => says(size),
                    _ => {
                        let append = std::mem::replace(&mut written, true);
                        artifact(held.fence, next + events.len() as u64, size, append)
                    }
                });
            }
            let journal = if self.roll(3) == 2 {
                step += 1;
                vec![JournalEntry { step, payload: Bytes::from_static(b"step"), ..JournalEntry::default() }]
            } else {
                Vec::new()
            };
            let count = events.len() as u64;
            match self.record(held, next, events, journal).await {
                Answer::Ok => next += count,
                Answer::Canceled => return self.confirm(held).await,
                Answer::Fenced => return Attempt::Over(Outcome::Settled),
            }
        }
        let ends = [TaskState::Completed, TaskState::InputRequired, TaskState::Failed, TaskState::AuthRequired];
        let end = ends[self.world.sim.pick(ends.len())];
        match self.finish(held, next, vec![status(end)]).await {
            Answer::Ok => {
                let told = self.world.sim.ledger().finished(&held.task_id, &held.turn_id, held.fence, end);
                if let Err(broken) = told {
                    self.world.sim.violated(broken);
                }
                Attempt::Over(Outcome::Settled)
            }
            Answer::Canceled => self.confirm(held).await,
            Answer::Fenced => Attempt::Over(Outcome::Settled),
        }
    }

    async fn record(
        &self,
        held: &HeldTurn,
        first_event: u64,
        events: Vec<StreamResponse>,
        journal: Vec<JournalEntry>,
    ) -> Answer {
        let what = format!("Record of {} under fence {}", &held.task_id[..8], held.fence);
        let call = |service: TaskStore| {
            let pen = self.pen(held);
            let request = RecordRequest {
                task_id: held.task_id.clone(),
                turn_id: held.turn_id.clone(),
                fence: pen.fence,
                first_event,
                events: events.clone(),
                journal: journal.clone(),
                ..RecordRequest::default()
            };
            async move { service.record(Request::new(request)).await.inspect(|it| pen.wrote(it.get_ref().outcome())) }
        };
        self.world.insist(self.who, &what, call, |_, _| true).await.expect("records").outcome()
    }

    async fn finish(&self, held: &HeldTurn, first_event: u64, events: Vec<StreamResponse>) -> Answer {
        let what = match events.is_empty() {
            true => format!("confirmation of {}", &held.task_id[..8]),
            false => format!("Finish of {} under fence {}", &held.task_id[..8], held.fence),
        };
        let call = |service: TaskStore| {
            let pen = self.pen(held);
            let request = FinishRequest {
                task_id: held.task_id.clone(),
                turn_id: held.turn_id.clone(),
                fence: pen.fence,
                claim: held.claim.clone(),
                first_event,
                events: events.clone(),
                ..FinishRequest::default()
            };
            async move { service.finish(Request::new(request)).await.inspect(|it| pen.wrote(it.get_ref().outcome())) }
        };
        let again = |first: &FinishReply, second: &Result<FinishReply, _>| {
            // A turn that has asked for something may be canceled after that.
            let canceled = || self.world.sim.ledger().task(&held.task_id).is_some_and(|it| it.0 == TaskState::Canceled);
            match second.as_ref().map(FinishReply::outcome) {
                Ok(Answer::Ok) => true,
                Ok(Answer::Canceled) => first.outcome() == Answer::Canceled || canceled(),
                _ => first.outcome() != Answer::Ok,
            }
        };
        self.world.insist(self.who, &what, call, again).await.expect("finishes").outcome()
    }

    async fn confirm(&self, held: &HeldTurn) -> Attempt {
        self.finish(held, 0, Vec::new()).await;
        Attempt::Over(Outcome::Settled)
    }

    async fn hand_back(&self, held: &HeldTurn) -> Attempt {
        let what = format!("HandBack of {}", &held.task_id[..8]);
        let call = |service: TaskStore| {
            let request = HandBackRequest { turns: vec![held.clone()] };
            async move { service.hand_back(Request::new(request)).await }
        };
        match self.world.insist(self.who, &what, call, |_, second| second.is_ok()).await {
            Ok(_) => Attempt::Over(Outcome::Settled),
            Err(_) => Attempt::Over(Outcome::HandBack),
        }
    }

    /// What a write is signed with.
    fn pen(&self, held: &HeldTurn) -> Pen {
        let newest = self.world.sim.ledger().fence(&held.turn_id);
        Pen {
            sim: Arc::clone(&self.world.sim),
            turn: held.turn_id.clone(),
            late: (newest > held.fence).then_some(held.fence),
            fence: if self.world.sim.mutant == Some(Mutant::Fence) { newest } else { held.fence },
        }
    }
}

/// Signs one write of an attempt.
struct Pen {
    sim: Arc<Sim>,
    turn: Bytes,
    /// The fence, when another attempt has begun before this write was made.
    late: Option<u64>,
    fence: u64,
}

impl Pen {
    fn wrote(&self, answer: Answer) {
        // Unless it says once more that the turn stops for authorization.
        if let Some(fence) = self.late
            && answer == Answer::Ok
            && !self.sim.ledger().rested(&self.turn, fence)
        {
            self.sim.violated("a write counted after the next attempt had begun".to_owned());
        }
    }
}

#[tonic::async_trait]
impl Handler for Hands {
    async fn handle(&self, work: Work) -> Outcome {
        // One that does not listen finds out when its writes are refused.
        let deaf = self.roll(3) == 2;
        tokio::select! {
            biased;
            () = work.lost.cancelled(), if !deaf => Outcome::Settled,
            outcome = self.turn(&work) => outcome,
        }
    }

    async fn heartbeat(&self, engine: &dyn Engine, held: &[Held]) -> rialto_store::Result<Vec<Verdict>> {
        let mut verdicts = Vec::new();
        for one in held {
            let begun = self.held().get(&one.claimed.entry.id).cloned();
            let told = match begun {
                Some(turn) => {
                    let call = |service: TaskStore| {
                        let request = HeartbeatRequest { turns: vec![turn.clone()] };
                        async move { service.heartbeat(Request::new(request)).await }
                    };
                    self.world.call(self.who, "Heartbeat", call, |_, _| true).await.ok()
                }
                None => None,
            };
            verdicts.push(match told.and_then(|reply| reply.outcomes().next()) {
                Some(Answer::Ok) => Verdict::Owned,
                Some(Answer::Canceled) => Verdict::Canceled,
                Some(Answer::Fenced) => Verdict::Lost,
                None => worker::heartbeat(engine, std::slice::from_ref(one)).await?[0],
            });
        }
        Ok(verdicts)
    }
}

fn status(state: TaskState) -> StreamResponse {
    let status = Some(TaskStatus { state: state.into(), ..TaskStatus::default() });
    StreamResponse { payload: Some(Payload::StatusUpdate(TaskStatusUpdateEvent { status, ..Default::default() })) }
}

/// Progress, in many words.
fn says(size: usize) -> StreamResponse {
    let mut event = status(TaskState::Working);
    if let Some(Payload::StatusUpdate(update)) = &mut event.payload
        && let Some(status) = &mut update.status
    {
        let parts = vec![text(" ".repeat(size))];
        status.message = Some(Message { role: Role::Agent.into(), parts, ..Message::default() });
    }
    event
}

/// Text that says which attempt wrote it as which event.
fn artifact(fence: u64, number: u64, size: usize, append: bool) -> StreamResponse {
    let parts = vec![text(format!("{fence}/{number}{}", " ".repeat(size)))];
    let artifact = Artifact { artifact_id: "a".into(), parts, ..Artifact::default() };
    let update = TaskArtifactUpdateEvent { artifact: Some(artifact), append, ..Default::default() };
    StreamResponse { payload: Some(Payload::ArtifactUpdate(update)) }
}

fn text(text: String) -> Part {
    Part { content: Some(Content::Text(text)), ..Part::default() }
}
