//! A task-store that does as it is told: by the id that is asked for, or by the text of a message.

use std::{
    pin::Pin,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use rialto_a2a::{
    Error, Kind,
    v1::{
        Artifact, ListTasksResponse, Message, Part, Role, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState,
        TaskStatus, TaskStatusUpdateEvent, part, stream_response::Payload,
    },
    wkt::Timestamp,
};
use rialto_rpc::tasks::{
    BeginReply, BeginRequest, CancelOrder, CancelRequest, ControlRequest, FinishReply, FinishRequest, Follow,
    GetRequest, GrantRequest, HandBackReply, HandBackRequest, HeartbeatReply, HeartbeatRequest, ListRequest,
    RecordReply, RecordRequest, SendRequest, Update, WatchRequest, task_store_server::TaskStore,
};
use tonic::{Request, Response, Status};

/// Everything that was asked, and what is to happen.
#[derive(Debug, Default)]
pub(crate) struct Store {
    pub(crate) sends: Mutex<Vec<SendRequest>>,
    pub(crate) watches: Mutex<Vec<WatchRequest>>,
    pub(crate) lists: Mutex<Vec<ListRequest>>,
    pub(crate) gets: Mutex<Vec<GetRequest>>,
    pub(crate) cancels: Mutex<Vec<CancelRequest>>,
    /// So many calls fail as if the store were away.
    pub(crate) away: AtomicUsize,
    /// Updates that readers took from streams of `chunks`.
    pub(crate) pulled: AtomicUsize,
    /// Streams of `chunks` that are open.
    pub(crate) open: AtomicUsize,
}

type Updates = Pin<Box<dyn Stream<Item = Result<Update, Status>> + Send>>;

fn task(id: &str, context: &str, state: TaskState) -> Task {
    Task {
        id: id.to_owned(),
        context_id: context.to_owned(),
        status: Some(TaskStatus { state: state.into(), message: None, timestamp: Some(Timestamp::from_millis(1_500)) }),
        ..Task::default()
    }
}

fn part(text: &str) -> Part {
    Part { content: Some(part::Content::Text(text.to_owned())), ..Part::default() }
}

fn update(number: u64, payload: Payload) -> Update {
    Update { number, event: Some(StreamResponse { payload: Some(payload) }), ..Update::default() }
}

pub(crate) fn status(number: u64, state: TaskState) -> Update {
    let status = task("", "", state).status;
    let event = TaskStatusUpdateEvent { task_id: "t-1".into(), context_id: "c-1".into(), status, metadata: None };
    update(number, Payload::StatusUpdate(event))
}

fn artifact(number: u64, text: &str) -> Update {
    let artifact = Artifact { artifact_id: "answer".into(), parts: vec![part(text)], ..Artifact::default() };
    let event = TaskArtifactUpdateEvent {
        task_id: "t-1".into(),
        context_id: "c-1".into(),
        artifact: Some(artifact),
        append: number > 2,
        ..TaskArtifactUpdateEvent::default()
    };
    update(number, Payload::ArtifactUpdate(event))
}

/// The error that a name such as `kind:TASK_NOT_FOUND` asks for.
fn ordered(name: &str) -> Option<Status> {
    let kind = Kind::from_reason(name.strip_prefix("kind:")?)?;
    let error = Error::from(kind);
    Some(
        match kind {
            Kind::Unavailable | Kind::RateLimited => error.retry_after(Duration::from_millis(1500)),
            _ => error,
        }
        .to_status(),
    )
}

impl Store {
    fn present(&self) -> Result<(), Status> {
        let leave = |left: usize| left.checked_sub(1);
        match self.away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, leave) {
            Ok(_) => Err(Error::unavailable().to_status()),
            Err(_) => Ok(()),
        }
    }

    pub(crate) fn last_send(&self) -> SendRequest {
        self.sends.lock().unwrap().last().expect("something was sent").clone()
    }
}

/// Counts itself as an open stream.
struct Open(std::sync::Arc<Store>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Server(pub(crate) std::sync::Arc<Store>);

impl Server {
    /// Events `after + 1 ..= count + 2` of a task that began with a snapshot and gives `count` chunks of `size` bytes.
    fn chunks(&self, after: u64, count: u64, size: usize) -> Updates {
        self.0.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(std::sync::Arc::clone(&self.0));
        let text = "x".repeat(size);
        Box::pin(stream::iter(after + 1..=count + 2).map(move |number| {
            open.0.pulled.fetch_add(1, Ordering::SeqCst);
            Ok(match number {
                1 => update(1, Payload::Task(task(&format!("chunks:{count}:{size}"), "c-1", TaskState::Working))),
                last if last == count + 2 => status(last, TaskState::Completed),
                number => artifact(number, &text),
            })
        }))
    }
}

#[tonic::async_trait]
impl TaskStore for Server {
    type SendStream = Updates;
    type WatchStream = Updates;
    type ControlStream = Pin<Box<dyn Stream<Item = Result<CancelOrder, Status>> + Send>>;

    async fn send(&self, request: Request<SendRequest>) -> Result<Response<Updates>, Status> {
        let send = request.into_inner();
        self.0.sends.lock().unwrap().push(send.clone());
        self.0.present()?;
        let message = send.message.clone().unwrap_or_default();
        let text = match message.parts.first().and_then(|part| part.content.clone()) {
            Some(part::Content::Text(text)) => text,
            _ => String::new(),
        };
        if let Some(error) = ordered(&text) {
            return Err(error);
        }
        if !message.task_id.is_empty() && message.task_id != "t-1" {
            return Err(Error::from(Kind::TaskNotFound).to_status());
        }
        let context = if message.context_id.is_empty() { "c-of-the-task" } else { &message.context_id };
        let snapshot = |state| {
            let history = match send.history_length {
                Some(0) => vec![],
                _ => vec![message.clone()],
            };
            update(1, Payload::Task(Task { history, ..task("t-1", context, state) }))
        };
        if let Some((count, size)) = text.strip_prefix("chunks:").and_then(|args| args.split_once(':')) {
            return Ok(Response::new(self.chunks(0, count.parse().unwrap(), size.parse().unwrap())));
        }
        let end = if text == "ask" { TaskState::InputRequired } else { TaskState::Completed };
        let endless = stream::pending::<Result<Update, Status>>();
        let updates: Updates = match (Follow::try_from(send.follow).unwrap(), &text[..]) {
            (Follow::None, _) => Box::pin(stream::iter([Ok(snapshot(TaskState::Submitted))])),
            (Follow::Result, "hang") => Box::pin(endless),
            (_, "hang") => Box::pin(stream::iter([Ok(snapshot(TaskState::Working))]).chain(endless)),
            (_, "nonsense") => Box::pin(stream::iter([Ok(Update { number: 1, ..Update::default() })])),
            (_, "message") => {
                let message = Message {
                    message_id: "m-2".into(),
                    context_id: context.into(),
                    role: Role::Agent.into(),
                    parts: vec![part("hello")],
                    ..Message::default()
                };
                Box::pin(stream::iter([Ok(update(0, Payload::Message(message)))]))
            }
            (Follow::Result, "lost once") if self.0.sends.lock().unwrap().len() == 1 => {
                Box::pin(stream::iter([Err(Error::unavailable().to_status())]))
            }
            (Follow::Result, _) => Box::pin(stream::iter([Ok(snapshot(end))])),
            // The rest comes by Watch.
            (_, "auth") => Box::pin(stream::iter([
                Ok(snapshot(TaskState::Submitted)),
                Ok(status(2, TaskState::AuthRequired)),
                Ok(status(3, TaskState::Completed)),
            ])),
            (_, "cut") => Box::pin(stream::iter([Ok(snapshot(TaskState::Working)), Ok(artifact(2, "one"))])),
            (_, "sent before, cut") => {
                let first = Update { turn_id: vec![7; 16].into(), ..snapshot(TaskState::Working) };
                Box::pin(stream::iter([Ok(first), Ok(artifact(2, "one"))]))
            }
            (_, "break") => Box::pin(stream::iter([
                Ok(snapshot(TaskState::Working)),
                Err(Error::from(Kind::InvalidAgentResponse).to_status()),
            ])),
            _ => Box::pin(stream::iter([
                Ok(snapshot(TaskState::Submitted)),
                Ok(status(2, TaskState::Working)),
                Ok(artifact(3, &text)),
                Ok(status(4, end)),
            ])),
        };
        Ok(Response::new(updates))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Updates>, Status> {
        let watch = request.into_inner();
        self.0.watches.lock().unwrap().push(watch.clone());
        self.0.present()?;
        if let Some(error) = ordered(&watch.id) {
            return Err(error);
        }
        if let Some((count, size)) = watch.id.strip_prefix("chunks:").and_then(|args| args.split_once(':')) {
            return Ok(Response::new(self.chunks(
                watch.after.unwrap_or(0),
                count.parse().unwrap(),
                size.parse().unwrap(),
            )));
        }
        let all = match &watch.id[..] {
            _ if watch.after.is_some_and(|after| after > 1000) => {
                return Err(Error::invalid("after", "is higher than the number of any event of the task").to_status());
            }
            "t-1" => vec![
                update(1, Payload::Task(task("t-1", "c-1", TaskState::Working))),
                artifact(2, "one"),
                artifact(3, "two"),
                status(4, TaskState::Completed),
            ],
            "asking" => vec![
                update(1, Payload::Task(task("asking", "c-1", TaskState::Working))),
                status(2, TaskState::InputRequired),
                status(3, TaskState::Completed),
            ],
            "quiet" => vec![update(1, Payload::Task(task("quiet", "c-1", TaskState::Working)))],
            "done" if watch.after.is_none() => return Err(Error::from(Kind::UnsupportedOperation).to_status()),
            "done" => vec![status(4, TaskState::Completed)],
            _ => return Err(Error::from(Kind::TaskNotFound).to_status()),
        };
        let rest = all.into_iter().filter(move |update| update.number > watch.after.unwrap_or(0)).map(Ok);
        Ok(Response::new(match &watch.id[..] {
            "quiet" => Box::pin(stream::iter(rest).chain(stream::pending())),
            _ => Box::pin(stream::iter(rest)),
        }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Task>, Status> {
        let get = request.into_inner();
        self.0.gets.lock().unwrap().push(get.clone());
        self.0.present()?;
        if let Some(error) = ordered(&get.id) {
            return Err(error);
        }
        match &get.id[..] {
            "t-1" => Ok(Response::new(task("t-1", "c-1", TaskState::Working))),
            "big" => {
                let artifact = Artifact {
                    artifact_id: "a".into(),
                    parts: vec![part(&"x".repeat(5_000_000))],
                    ..Artifact::default()
                };
                Ok(Response::new(Task { artifacts: vec![artifact], ..task("big", "c-1", TaskState::Completed) }))
            }
            "panic" => panic!("as ordered"),
            "foreign" => Err(Status::unknown("password=hunter2")),
            _ => Err(Error::from(Kind::TaskNotFound).to_status()),
        }
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListTasksResponse>, Status> {
        let list = request.into_inner();
        self.0.lists.lock().unwrap().push(list.clone());
        self.0.present()?;
        let query = list.query.unwrap_or_default();
        let tasks = match &query.context_id[..] {
            "none" => vec![],
            context => vec![task("t-1", context, TaskState::InputRequired)],
        };
        let total_size = i32::try_from(tasks.len()).unwrap();
        let page_size = query.page_size.unwrap_or(50);
        Ok(Response::new(ListTasksResponse { tasks, next_page_token: String::new(), page_size, total_size }))
    }

    async fn grant(&self, _: Request<GrantRequest>) -> Result<Response<Task>, Status> {
        unreachable!("not a gateway's call")
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Task>, Status> {
        let cancel = request.into_inner();
        self.0.cancels.lock().unwrap().push(cancel.clone());
        self.0.present()?;
        match &cancel.id[..] {
            "t-1" => Ok(Response::new(task("t-1", "c-1", TaskState::Canceled))),
            "done" => Err(Error::from(Kind::TaskNotCancelable).to_status()),
            _ => Err(Error::from(Kind::TaskNotFound).to_status()),
        }
    }

    async fn begin(&self, _: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }

    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }

    async fn record(&self, _: Request<RecordRequest>) -> Result<Response<RecordReply>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }

    async fn finish(&self, _: Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }

    async fn hand_back(&self, _: Request<HandBackRequest>) -> Result<Response<HandBackReply>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }

    async fn control(&self, _: Request<ControlRequest>) -> Result<Response<Self::ControlStream>, Status> {
        Err(Status::unimplemented("not of the gateway"))
    }
}
