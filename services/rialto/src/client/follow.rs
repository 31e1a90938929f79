//! One stream out of many connections: a stream that is cut goes on where it was.

use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use rialto_a2a::v1::{SendMessageRequest, StreamResponse, SubscribeToTaskRequest, TaskState, stream_response::Payload};
use tokio::time::sleep;

use super::{Answered, Client, Failure, Result, Update, Updates};

/// Waits between tries to get a connection back; after the last one the stream has failed.
const PAUSES: [u64; 10] = [100, 200, 500, 1000, 2000, 3000, 5000, 5000, 5000, 5000];

struct Following<'a> {
    client: &'a Client,
    /// Followed to its terminal state, not only through one turn.
    whole_task: bool,
    /// `None` while there is no connection.
    updates: Option<Updates>,
    /// There was a connection, so it is worth trying to get it back.
    connected: bool,
    task: Option<String>,
    last: Option<u64>,
    seen: Seen,
    tries: usize,
}

/// How far the stream has come.
#[derive(Clone, Copy)]
enum Seen {
    State(TaskState),
    /// Nothing follows a message.
    Message,
}

impl Client {
    /// Sends a message, under a name of its own (`Idempotency-Key`) if it has one, and follows its turn: until it
    /// ends or asks for something.
    pub(crate) async fn stream(
        &self,
        request: SendMessageRequest,
        key: Option<&str>,
    ) -> Result<impl Stream<Item = Result<Update>> + use<'_>> {
        let updates = self.wire.stream(SendMessageRequest { tenant: self.tenant.clone(), ..request }, key).await?;
        Ok(self.follow(Some(updates), None, None))
    }

    /// Follows a task to its end, from event `after` or from a snapshot. Of a task that has ended that is all.
    pub(crate) fn watch(&self, task: &str, after: Option<u64>) -> impl Stream<Item = Result<Update>> {
        self.follow(None, Some(task.to_owned()), after)
    }

    fn follow(
        &self,
        updates: Option<Updates>,
        task: Option<String>,
        last: Option<u64>,
    ) -> impl Stream<Item = Result<Update>> {
        let following = Following {
            client: self,
            whole_task: task.is_some(),
            connected: updates.is_some(),
            updates,
            task,
            last,
            seen: Seen::State(TaskState::Unspecified),
            tries: 0,
        };
        stream::try_unfold(following, |mut following| async move {
            Ok(following.next().await?.map(|update| (update, following)))
        })
    }
}

impl Following<'_> {
    async fn next(&mut self) -> Result<Option<Update>> {
        loop {
            let Some(updates) = &mut self.updates else {
                match self.open().await? {
                    Some(snapshot) => return Ok(Some(snapshot)),
                    None => continue,
                }
            };
            match updates.next().await {
                Some(Ok(update)) => {
                    // What a server repeats is not passed on.
                    if is_snapshot(&update) || update.number.is_none() || update.number > self.last {
                        self.note(&update);
                        return Ok(Some(update));
                    }
                    continue;
                }
                None if self.may_end() => return Ok(None),
                // An end in the middle of a turn is a cut: a proxy, or a server that stops.
                None => {}
                Some(Err(_)) if self.has_ended() => return Ok(None),
                Some(Err(failure)) if failure.is_passing() => tracing::debug!(%failure, "the stream was cut"),
                Some(Err(failure)) => return Err(failure),
            }
            self.updates = None;
            if self.task.is_none() {
                let problem = "the stream was cut before the task was known; it may or may not run";
                return Err(Failure::Unreachable(problem.to_owned()));
            }
        }
    }

    /// Gets a connection (`None`), or the last there is to know of a task that has ended.
    async fn open(&mut self) -> Result<Option<Update>> {
        let id = self.task.clone().expect("streams without a task are not opened again");
        let pause = PAUSES.get(self.tries).copied();
        if self.connected {
            self.tries += 1;
            sleep(Duration::from_millis(pause.unwrap_or_default())).await;
        }
        let request = SubscribeToTaskRequest { tenant: self.client.tenant.clone(), id: id.clone() };
        match self.client.wire.subscribe(request, self.last).await {
            Ok(updates) => {
                self.updates = Some(updates);
                self.connected = true;
            }
            Err(failure) if self.connected && failure.is_passing() && pause.is_some() => {
                tracing::debug!(%failure, "the stream is not back yet");
            }
            Err(Failure::Answer(Answered { code, .. })) if is_unsupported(&code) => {
                let task = self.client.get(&id, None).await?;
                let update = Update { number: None, event: StreamResponse { payload: Some(Payload::Task(task)) } };
                self.note(&update);
                self.updates = Some(stream::empty().boxed());
                self.connected = true;
                return Ok(Some(update));
            }
            Err(failure) => return Err(failure),
        }
        Ok(None)
    }

    fn note(&mut self, update: &Update) {
        if !is_snapshot(update) {
            self.tries = 0;
        }
        self.last = update.number.or(self.last);
        let (task, status) = match &update.event.payload {
            Some(Payload::Task(task)) => (&task.id, task.status.as_ref()),
            Some(Payload::StatusUpdate(update)) => (&update.task_id, update.status.as_ref()),
            Some(Payload::ArtifactUpdate(update)) => (&update.task_id, None),
            Some(Payload::Message(_)) => {
                self.seen = Seen::Message;
                return;
            }
            None => return,
        };
        if self.task.is_none() && !task.is_empty() {
            self.task = Some(task.clone());
        }
        if let Some(status) = status {
            self.seen = Seen::State(status.state());
        }
    }

    /// Nothing more can come.
    fn has_ended(&self) -> bool {
        match self.seen {
            Seen::Message => true,
            // The turn of a send goes on by itself after an authorization.
            Seen::State(TaskState::InputRequired) => !self.whole_task,
            Seen::State(state) => state.is_terminal(),
        }
    }

    /// A server may end the stream here: the task waits for somebody.
    fn may_end(&self) -> bool {
        self.has_ended() || matches!(self.seen, Seen::State(state) if state.is_interrupted())
    }
}

const fn is_snapshot(update: &Update) -> bool {
    matches!(update.event.payload, Some(Payload::Task(_)))
}

/// UnsupportedOperation, as each binding codes it.
fn is_unsupported(code: &str) -> bool {
    code.contains("UNSUPPORTED_OPERATION") || code.ends_with("-32004")
}
