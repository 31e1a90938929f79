//! A client: sends, follows and cancels, and believes what it is told.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use rialto_a2a::{
    Kind as Fault,
    v1::{Message, Part, Role, StreamResponse, Task, TaskState, part::Content, stream_response::Payload},
};
use rialto_rpc::tasks::{
    CancelRequest, Follow, GrantRequest, Idempotency, Policy, SendRequest, Update, WatchRequest, WhenBusy,
    task_store_server::TaskStore as _,
};
use rialto_task_store::TaskStore;
use tokio::time::{Duration, sleep};
use tonic::{Request, Response};

use crate::{
    sim::Actor,
    world::{World, scope},
};

/// One client.
pub(crate) struct Client {
    pub(crate) world: Arc<World>,
    pub(crate) who: Actor,
}

/// The first update of a call that answers with a stream.
async fn first(
    mut updates: impl futures::Stream<Item = Result<Update, tonic::Status>> + Unpin,
) -> Result<Update, tonic::Status> {
    updates.next().await.unwrap_or_else(|| Err(rialto_a2a::Error::unavailable().to_status()))
}

fn payload(update: &Update) -> Option<&Payload> {
    update.event.as_ref().and_then(|event: &StreamResponse| event.payload.as_ref())
}

/// Whether a stream that follows a turn goes on after this, and nobody knows when.
fn needs_authorization(update: &Update) -> bool {
    let status = match payload(update) {
        Some(Payload::Task(task)) => task.status.as_ref(),
        Some(Payload::StatusUpdate(event)) => event.status.as_ref(),
        _ => None,
    };
    status.is_some_and(|status| status.state() == TaskState::AuthRequired)
}

impl Client {
    /// Does a few things, one after the other.
    pub(crate) async fn live(self) {
        for n in 0..1 + self.world.sim.roll(2) {
            let known = {
                let ledger = self.world.sim.ledger();
                ledger.known.clone()
            };
            let task = match known.len() {
                0 => None,
                len => Some(known[self.world.sim.pick(len)].clone()),
            };
            match (self.world.sim.roll(6), task) {
                (3, Some(task)) => self.cancel(&task).await,
                (4, Some(task)) => self.grant(&task).await,
                (1 | 2, Some(task)) => self.send(Some(&task), n).await,
                _ => self.send(None, n).await,
            }
        }
    }

    fn violated(&self, broken: Result<(), String>) {
        if let Err(broken) = broken {
            self.world.sim.violated(broken);
        }
    }

    /// A new task, or the next message of one.
    async fn send(&self, task: Option<&str>, number: u32) {
        let sim = &self.world.sim;
        let turn = self.world.id();
        let context = ["c0", "c1"][usize::from(sim.chance(4))];
        let text = Part { content: Some(Content::Text(format!("{} {number}", self.who))), ..Part::default() };
        let message = Message {
            message_id: uuid::Uuid::from_slice(&turn).expect("16 bytes").to_string(),
            task_id: task.unwrap_or_default().to_owned(),
            context_id: if task.is_some() { String::new() } else { context.to_owned() },
            role: Role::User.into(),
            parts: vec![text],
            ..Message::default()
        };
        let busy = if sim.chance(4) { WhenBusy::Reject } else { WhenBusy::Queue };
        let policy = Policy {
            when_busy: busy.into(),
            queue_timeout_ms: if sim.chance(12) { 2000 } else { 0 },
            ..Policy::default()
        };
        let request = SendRequest {
            scope: Some(scope()),
            turn_id: turn.clone(),
            message: Some(message),
            policy: Some(policy),
            follow: Follow::None.into(),
            ..SendRequest::default()
        };
        let follows = sim.chance(3);
        let what = match task {
            Some(task) => format!("message {:02x?} to {}", &turn[..4], &task[..8]),
            None => format!("message {:02x?} in {context}", &turn[..4]),
        };
        // Whoever gives a message a name may mint its ids anew for each try.
        let named = task.is_none() && sim.chance(4);
        let tried = std::sync::Mutex::new(Vec::<Bytes>::new());
        let call = |service: TaskStore| {
            let mut request = request.clone();
            if named {
                request.turn_id = self.world.id();
                let (key, fingerprint) = (format!("{turn:02x?}"), Bytes::from_static(&[7; 32]));
                request.idempotency = Some(Idempotency { key, fingerprint });
            }
            tried.lock().expect("not poisoned").push(request.turn_id.clone());
            async move { first(service.send(Request::new(request)).await?.into_inner()).await.map(Response::new) }
        };
        let again = |first: &Update, second: &Result<Update, rialto_a2a::Error>| match (payload(first), second) {
            (Some(Payload::Task(first)), Ok(second)) => {
                matches!(payload(second), Some(Payload::Task(second)) if second.id == first.id)
            }
            // It waited for its turn, and its task has ended meanwhile.
            (_, Err(error)) => error.kind == Fault::UnsupportedOperation && task.is_some(),
            _ => false,
        };
        match self.world.insist(self.who, &what, call, again).await {
            Ok(update) => {
                let Some(Payload::Task(task)) = payload(&update) else { panic!("{update:?}") };
                let made = uuid::Uuid::try_parse(&task.id).expect("an id");
                let turn = if named { Bytes::copy_from_slice(made.as_bytes()) } else { turn };
                let accepted = sim.ledger().accepted(&turn, &task.id);
                self.violated(accepted);
                for other in tried.lock().expect("not poisoned").iter().filter(|other| named && **other != turn) {
                    if sim.ledger().has(&uuid::Uuid::from_slice(other).expect("16 bytes").to_string()) {
                        sim.violated("a message with a name became two tasks".to_owned());
                    }
                }
                if follows && !needs_authorization(&update) {
                    self.follow(&task.id.clone(), update).await;
                }
            }
            Err(error) if matches!(error.kind, Fault::UnsupportedOperation | Fault::QueueFull) => {
                for turn in tried.lock().expect("not poisoned").iter() {
                    let refused = sim.ledger().refused(turn);
                    self.violated(refused);
                }
            }
            Err(error) => sim.violated(format!("a message was answered with {error:?}")),
        }
    }

    /// Reads the events of a task from an update on, to the end of a turn, with a new stream whenever one breaks.
    async fn follow(&self, task: &str, update: Update) {
        let mut last = update.number;
        loop {
            let after = last;
            let what = format!("Watch of {} after {after}", &task[..8]);
            let request = WatchRequest {
                scope: Some(scope()),
                id: task.to_owned(),
                after: Some(after),
                follow: Follow::Turn.into(),
                ..WatchRequest::default()
            };
            // Some of the updates: a stream may break at any moment.
            let most = 1 + self.world.sim.pick(4);
            let call = |service: TaskStore| {
                let request = request.clone();
                async move {
                    let mut updates = service.watch(Request::new(request)).await?.into_inner();
                    let mut read = Vec::new();
                    while read.len() < most {
                        match updates.next().await {
                            Some(Ok(update)) => {
                                let stays = needs_authorization(&update);
                                read.push(Some(update));
                                if stays {
                                    break;
                                }
                            }
                            Some(Err(status)) if read.is_empty() => return Err(status),
                            Some(Err(_)) => break,
                            None => {
                                read.push(None);
                                break;
                            }
                        }
                    }
                    Ok(Response::new(read))
                }
            };
            let read = match self.world.insist(self.who, &what, call, |_, _| true).await {
                Ok(read) => read,
                Err(error) => return self.world.sim.violated(format!("a watcher was told {error:?}")),
            };
            for update in read {
                let Some(update) = update else {
                    if !self.world.sim.ledger().ends(task, last) {
                        self.world.sim.violated(format!("a stream of {task} ended in the middle of a turn"));
                    }
                    return;
                };
                let fits = match payload(&update) {
                    Some(Payload::Task(_)) => update.number >= last,
                    Some(Payload::StatusUpdate(_) | Payload::ArtifactUpdate(_)) => update.number == last + 1,
                    _ => false,
                };
                if !fits {
                    let number = update.number;
                    return self.world.sim.violated(format!("a watcher of {task} got {number} after {last}"));
                }
                last = update.number;
                if needs_authorization(&update) {
                    // The stream stays open, perhaps for ever.
                    return;
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// What a task may wait for is there.
    async fn grant(&self, task: &str) {
        let id = self.world.id();
        let what = format!("Grant to {}", &task[..8]);
        let call = |service: TaskStore| {
            let (task_id, commit_id) = (task.to_owned(), self.world.call_id(&id));
            let request = GrantRequest { task_id, commit_id, ..GrantRequest::default() };
            async move { service.grant(Request::new(request)).await }
        };
        match self.world.insist(self.who, &what, call, |_, second| second.is_ok()).await {
            Ok(_) => {}
            Err(error) if error.kind == Fault::UnsupportedOperation => {}
            Err(error) => self.world.sim.violated(format!("a grant was answered with {error:?}")),
        }
    }

    async fn cancel(&self, task: &str) {
        let id = self.world.id();
        let tried = std::sync::Mutex::new(Vec::<Bytes>::new());
        let what = format!("Cancel of {}", &task[..8]);
        let call = |service: TaskStore| {
            let commit_id = self.world.call_id(&id);
            tried.lock().expect("not poisoned").push(commit_id.clone());
            let request = CancelRequest { scope: Some(scope()), id: task.to_owned(), metadata: None, commit_id };
            async move { service.cancel(Request::new(request)).await }
        };
        let again =
            |first: &Task, second: &Result<Task, _>| second.as_ref().is_ok_and(|second| second.status == first.status);
        let answer = self.world.insist(self.who, &what, call, again).await;
        let (state, by) = self.world.sim.ledger().task(task).expect("it is known");
        match answer {
            Ok(_) if state == TaskState::Canceled => {}
            Ok(_) => self.world.sim.violated(format!("a canceled task is {}", state.as_str_name())),
            Err(error) if error.kind == Fault::TaskNotCancelable => {
                if tried.lock().expect("not poisoned").contains(&by) {
                    self.world.sim.violated("a cancel was refused after it was done".to_owned());
                } else if !state.is_terminal() {
                    self.world.sim.violated(format!("a task that is {} cannot be canceled", state.as_str_name()));
                }
            }
            Err(error) => self.world.sim.violated(format!("a cancel was answered with {error:?}")),
        }
    }
}
