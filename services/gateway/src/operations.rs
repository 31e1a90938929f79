//! The eleven operations of A2A, once, for every binding (spec §3).
//!
//! Everything that can be refused is refused here before task-store hears of it. Ids are minted before the first
//! try, so that a try whose answer was lost can be repeated.

use std::time::Duration;

use aws_lc_rs::digest;
use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    Error, Kind, Result,
    v1::{
        AgentCard, CancelTaskRequest, DeleteTaskPushNotificationConfigRequest, GetExtendedAgentCardRequest,
        GetTaskPushNotificationConfigRequest, GetTaskRequest, ListTaskPushNotificationConfigsRequest,
        ListTaskPushNotificationConfigsResponse, ListTasksRequest, ListTasksResponse, Message, Part, Role,
        SendMessageConfiguration, SendMessageRequest, SendMessageResponse, SubscribeToTaskRequest, Task,
        TaskPushNotificationConfig, TaskState, part, send_message_response, stream_response,
    },
    validate::Validate,
};
use rialto_rpc::tasks::{
    CancelRequest, Follow, GetRequest, Idempotency, ListRequest, Scope, SendRequest, TaskStoreClient, Update,
    WatchRequest,
};
use rialto_runtime::{config::Config, telemetry::Seldom};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Response, Status, Streaming};
use tracing::{Instrument as _, error, warn};
use uuid::Uuid;

use crate::{
    call::Call,
    follow::{Events, Follower, RECOVERY},
};

/// How long task-store may take for anything but an agent's work.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(15);
/// Before the second try of a call that task-store could not take.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// At a stop, blocking sends answer this long before connections are cut.
const STOP_MARGIN: Duration = Duration::from_secs(2);
/// Longest id that is looked up; ids of tasks are far shorter.
const MAX_ID: usize = 128;

static SILENT: Seldom = Seldom::new(Duration::from_secs(10));

/// The operations.
#[derive(Debug)]
pub(crate) struct Operations {
    tasks: TaskStoreClient,
    follower: Follower,
    tracker: TaskTracker,
    stop: CancellationToken,
    max_parts: usize,
    blocking_timeout: Duration,
    stop_patience: Duration,
}

impl Operations {
    pub(crate) fn new(
        config: &Config,
        tasks: TaskStoreClient,
        follower: Follower,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            tasks,
            follower,
            tracker,
            stop,
            max_parts: config.limits.parts,
            blocking_timeout: config.limits.blocking_timeout.0,
            stop_patience: config.stop_grace.0.saturating_sub(STOP_MARGIN),
        }
    }

    /// Sends a message and waits for the turn to end, unless it is to return at once (spec §3.1.1, §3.2.2).
    pub(crate) async fn send_message(&self, call: &Call, request: SendMessageRequest) -> Result<SendMessageResponse> {
        let at_once = request.configuration.as_ref().is_some_and(|configuration| configuration.return_immediately);
        let follow = if at_once { Follow::None } else { Follow::Result };
        let send = self.prepare(call, request, follow).await?;
        let limit = Instant::now() + self.blocking_timeout;
        let deadline = call.deadline.map_or(limit, |earlier| earlier.min(limit));
        let answer = tokio::select! {
            answer = timeout_at(deadline, self.result(send)) => answer.map_err(|_| {
                Error::new(Kind::Deadline, "The turn did not end in time; it goes on, see GetTask and SubscribeToTask")
            })??,
            () = self.stopping() => {
                // Not UNAVAILABLE: whoever tries that again, runs the message twice.
                let why = "The server stops before the turn has ended; it goes on, see ListTasks and SubscribeToTask";
                return Err(Error::new(Kind::Deadline, why));
            }
        };
        let payload = match answer.event.and_then(|event| event.payload) {
            Some(stream_response::Payload::Task(task)) => send_message_response::Payload::Task(task),
            Some(stream_response::Payload::Message(message)) => send_message_response::Payload::Message(message),
            other => {
                error!(?other, "task-store answered a send with neither a task nor a message");
                return Err(Error::internal());
            }
        };
        Ok(SendMessageResponse { payload: Some(payload) })
    }

    /// The one update of a send. A task-store that goes away while the turn runs is asked again: the same turn id
    /// gives the same turn.
    async fn result(&self, send: SendRequest) -> Result<Update> {
        let mut lost_since = None;
        loop {
            let mut updates = self.send(send.clone()).await?;
            let error = match updates.message().await {
                Ok(Some(update)) => return Ok(update),
                Ok(None) => Error::unavailable(),
                Err(status) => stored(&status),
            };
            let since = *lost_since.get_or_insert_with(Instant::now);
            if error.kind != Kind::Unavailable || since.elapsed() >= RECOVERY {
                return Err(error);
            }
            sleep(RETRY_PAUSE * 4).await;
        }
    }

    /// Sends a message and streams what becomes of it (spec §3.1.2).
    pub(crate) async fn send_streaming_message(&self, call: &Call, request: SendMessageRequest) -> Result<Events> {
        check_streaming(call)?;
        let permit = self.follower.admit()?;
        let send = self.prepare(call, request, Follow::Turn).await?;
        let watch = WatchRequest {
            scope: send.scope.clone(),
            turn_id: send.turn_id.clone(),
            follow: send.follow,
            ..WatchRequest::default()
        };
        let updates = within(call, self.send(send)).await??;
        self.follower.follow(permit, call, watch, updates).await
    }

    /// Reads one task (spec §3.1.3).
    pub(crate) async fn get_task(&self, call: &Call, request: GetTaskRequest) -> Result<Task> {
        let scope = self.scope(call, &request.tenant)?;
        request.validate()?;
        check_id(&request.id)?;
        let request = GetRequest { scope: Some(scope), id: request.id, history_length: request.history_length };
        self.ask(call, |mut tasks| {
            let request = request.clone();
            async move { tasks.get(request).await }
        })
        .await
    }

    /// Lists the caller's tasks, newest status first (spec §3.1.4).
    pub(crate) async fn list_tasks(&self, call: &Call, mut request: ListTasksRequest) -> Result<ListTasksResponse> {
        let scope = self.scope(call, &request.tenant)?;
        request.validate()?;
        request.tenant.clear();
        let request = ListRequest { scope: Some(scope), query: Some(request) };
        self.ask(call, |mut tasks| {
            let request = request.clone();
            async move { tasks.list(request).await }
        })
        .await
    }

    /// Cancels a task that has not ended (spec §3.1.5).
    pub(crate) async fn cancel_task(&self, call: &Call, request: CancelTaskRequest) -> Result<Task> {
        let scope = self.scope(call, &request.tenant)?;
        request.validate()?;
        check_id(&request.id)?;
        let request =
            CancelRequest { scope: Some(scope), id: request.id, metadata: request.metadata, commit_id: new_identity() };
        self.ask(call, |mut tasks| {
            let request = request.clone();
            async move { tasks.cancel(request).await }
        })
        .await
    }

    /// Streams a task that has not ended, or its events after the last one that the client knows (spec §3.1.6).
    pub(crate) async fn subscribe_to_task(&self, call: &Call, request: SubscribeToTaskRequest) -> Result<Events> {
        check_streaming(call)?;
        let scope = self.scope(call, &request.tenant)?;
        request.validate()?;
        check_id(&request.id)?;
        let permit = self.follower.admit()?;
        let watch = WatchRequest {
            scope: Some(scope),
            id: request.id,
            after: call.last_event,
            follow: Follow::Task.into(),
            ..WatchRequest::default()
        };
        let updates = self
            .ask(call, |mut tasks| {
                let watch = watch.clone();
                async move { tasks.watch(watch).await }
            })
            .await
            .map_err(|error| if call.last_event.is_some() { about_last_event(error) } else { error })?;
        self.follower.follow(permit, call, watch, updates).await
    }

    /// Creates or replaces a webhook (spec §3.1.7).
    pub(crate) fn create_push_config(
        &self,
        call: &Call,
        request: &TaskPushNotificationConfig,
    ) -> Result<TaskPushNotificationConfig> {
        self.no_push(call, &request.tenant)
    }

    /// Reads a webhook (spec §3.1.8).
    pub(crate) fn get_push_config(
        &self,
        call: &Call,
        request: &GetTaskPushNotificationConfigRequest,
    ) -> Result<TaskPushNotificationConfig> {
        self.no_push(call, &request.tenant)
    }

    /// Lists the webhooks of a task (spec §3.1.9).
    pub(crate) fn list_push_configs(
        &self,
        call: &Call,
        request: &ListTaskPushNotificationConfigsRequest,
    ) -> Result<ListTaskPushNotificationConfigsResponse> {
        self.no_push(call, &request.tenant)
    }

    /// Deletes a webhook (spec §3.1.10).
    pub(crate) fn delete_push_config(
        &self,
        call: &Call,
        request: &DeleteTaskPushNotificationConfigRequest,
    ) -> Result<()> {
        self.no_push(call, &request.tenant)
    }

    /// Reads the card for authenticated callers (spec §3.1.11).
    pub(crate) fn get_extended_card(&self, call: &Call, request: &GetExtendedAgentCardRequest) -> Result<AgentCard> {
        self.scope(call, &request.tenant)?;
        Err(Error::new(Kind::UnsupportedOperation, "The agent has no extended card"))
    }

    fn no_push<T>(&self, call: &Call, tenant: &str) -> Result<T> {
        self.scope(call, tenant)?;
        Err(Kind::PushNotificationNotSupported.into())
    }

    /// Whose tasks a call is about. A tenant that the agent does not know looks like a task that is not there.
    fn scope(&self, call: &Call, tenant: &str) -> Result<Scope> {
        let said = &call.caller.tenant;
        if !said.is_empty() && !tenant.is_empty() && said != tenant {
            return Err(Error::invalid("tenant", "differs from the tenant in the path"));
        }
        let tenant = if said.is_empty() { tenant } else { said };
        if !call.agent.knows(tenant) {
            return Err(Kind::TaskNotFound.into());
        }
        Ok(Scope { agent: call.agent.id.clone(), tenant: tenant.to_owned(), owner: call.caller.owner.clone() })
    }

    /// Checks a message, and mints its identity.
    async fn prepare(&self, call: &Call, request: SendMessageRequest, follow: Follow) -> Result<SendRequest> {
        call.check_required_extensions()?;
        let scope = self.scope(call, &request.tenant)?;
        self.check_message(call, &request)?;
        let idempotency =
            call.idempotency_key.clone().map(|key| Idempotency { key, fingerprint: fingerprint(&request) });
        let mut message = request.message.unwrap_or_default();
        if call.agent.continue_waiting && message.task_id.is_empty() && !message.context_id.is_empty() {
            message.task_id = self.waiting_task(call, &scope, &message.context_id).await?;
        }
        if message.context_id.is_empty() && message.task_id.is_empty() {
            message.context_id = Uuid::new_v4().to_string();
        }
        Ok(SendRequest {
            scope: Some(scope),
            turn_id: new_identity(),
            message: Some(message),
            metadata: request.metadata,
            policy: Some(call.agent.policy),
            follow: follow.into(),
            history_length: request.configuration.and_then(|configuration| configuration.history_length),
            traceparent: call.traceparent.clone(),
            idempotency,
        })
    }

    /// Stores a message. The call outlives a caller that hangs up: from here on the message counts.
    async fn send(&self, send: SendRequest) -> Result<Streaming<Update>> {
        let tasks = self.tasks.clone();
        let sending = async move {
            retried(tasks, |mut tasks| {
                let send = send.clone();
                async move { tasks.send(send).await }
            })
            .await
        };
        let sent = self.tracker.spawn(sending.in_current_span());
        sent.await.unwrap_or_else(|panicked| {
            error!(error = %panicked, "a send panicked");
            Err(Error::internal())
        })
    }

    /// What the protocol and the card ask of a message, before anything is stored.
    fn check_message(&self, call: &Call, request: &SendMessageRequest) -> Result<()> {
        // Counted first: the rest walks through all of them.
        let parts = request.message.as_ref().map_or(0, |message| message.parts.len());
        if parts > self.max_parts {
            let text = format!("has {parts} parts, the limit is {}", self.max_parts);
            return Err(Error::invalid("message.parts", text));
        }
        if request.configuration.as_ref().is_some_and(|conf| conf.task_push_notification_config.is_some()) {
            return Err(Kind::PushNotificationNotSupported.into());
        }
        request.validate()?;
        let Some(message) = &request.message else { return Err(Error::invalid("message", "is required")) };
        if message.role != i32::from(Role::User) {
            return Err(Error::invalid("message.role", "must be ROLE_USER: clients speak for the user"));
        }
        if !message.context_id.is_empty() && !is_context_id(&message.context_id) {
            let text = "must be 1 to 128 characters of A-Z a-z 0-9 _ . : -";
            return Err(Error::invalid("message.contextId", text));
        }
        if !message.task_id.is_empty() {
            check_id(&message.task_id)?;
        }
        check_media_types(call, message)
    }

    /// The one task of a context that waits for input, if there is exactly one.
    async fn waiting_task(&self, call: &Call, scope: &Scope, context: &str) -> Result<String> {
        let query = ListTasksRequest {
            context_id: context.to_owned(),
            status: TaskState::InputRequired.into(),
            page_size: Some(2),
            ..ListTasksRequest::default()
        };
        let request = ListRequest { scope: Some(scope.clone()), query: Some(query) };
        let mut waiting = self
            .ask(call, |mut tasks| {
                let request = request.clone();
                async move { tasks.list(request).await }
            })
            .await?
            .tasks;
        Ok(if waiting.len() == 1 { waiting.swap_remove(0).id } else { String::new() })
    }

    /// Asks task-store, twice if it is away, for as long as the caller waits.
    async fn ask<T, F, Fut>(&self, call: &Call, request: F) -> Result<T>
    where
        F: Fn(TaskStoreClient) -> Fut,
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        within(call, retried(self.tasks.clone(), request)).await?
    }

    /// Resolves when there is just enough time left to answer before connections are cut.
    async fn stopping(&self) {
        self.stop.cancelled().await;
        sleep(self.stop_patience).await;
    }
}

async fn retried<T, F, Fut>(tasks: TaskStoreClient, request: F) -> Result<T>
where
    F: Fn(TaskStoreClient) -> Fut,
    Fut: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = Instant::now() + STORE_TIMEOUT;
    let once = || async {
        match timeout_at(deadline, request(tasks.clone())).await {
            Ok(answer) => answer.map(Response::into_inner).map_err(|status| stored(&status)),
            Err(_) => {
                if let Some(unsaid) = SILENT.may_say() {
                    warn!(after_s = STORE_TIMEOUT.as_secs(), unsaid, "task-store does not answer");
                }
                Err(Error::unavailable())
            }
        }
    };
    match once().await {
        Err(error) if error.kind == Kind::Unavailable && Instant::now() < deadline => {
            sleep(RETRY_PAUSE).await;
            once().await
        }
        answer => answer,
    }
}

/// An error of task-store. What it does not explain in terms of the protocol stays in the log.
pub(crate) fn stored(status: &Status) -> Error {
    let error = Error::from_status(status);
    if matches!(error.kind, Kind::Internal) {
        error!(%status, "task-store failed");
    }
    error
}

/// The client's deadline holds for what is done for it.
async fn within<T>(call: &Call, work: impl Future<Output = T>) -> Result<T> {
    match call.deadline {
        Some(deadline) => timeout_at(deadline, work).await.map_err(|_| Kind::Deadline.into()),
        None => Ok(work.await),
    }
}

/// The only thing that task-store can find wrong in what it is asked to watch is where to begin; clients say that in a
/// header.
fn about_last_event(error: Error) -> Error {
    match error.violations.first() {
        Some(violation) if error.kind == Kind::InvalidParams => {
            Error::invalid("Last-Event-ID", violation.description.clone())
        }
        _ => error,
    }
}

fn check_streaming(call: &Call) -> Result<()> {
    match call.agent.streaming {
        true => Ok(()),
        false => Err(Error::new(Kind::UnsupportedOperation, "The agent does not stream")),
    }
}

fn check_media_types(call: &Call, message: &Message) -> Result<()> {
    let refused = message.parts.iter().map(media_type).position(|media_type| !call.agent.takes(media_type));
    let Some(at) = refused else { return Ok(()) };
    let named: String = media_type(&message.parts[at]).chars().take(100).collect();
    let text = format!("Content type not supported: message.parts[{at}] is {named}");
    Err(Error::new(Kind::ContentTypeNotSupported, text))
}

/// What a part does not say is what its content says.
fn media_type(part: &Part) -> &str {
    match &part.content {
        _ if !part.media_type.is_empty() => &part.media_type,
        Some(part::Content::Text(_)) => "text/plain",
        Some(part::Content::Data(_)) => "application/json",
        _ => "application/octet-stream",
    }
}

fn check_id(id: &str) -> Result<()> {
    if id.len() <= MAX_ID { Ok(()) } else { Err(Kind::TaskNotFound.into()) }
}

fn is_context_id(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:-".contains(&b))
}

/// What a client asks to be done, apart from how it wants to hear of it. The same on every binding.
fn fingerprint(request: &SendMessageRequest) -> Bytes {
    let webhook = request.configuration.as_ref().and_then(|it| it.task_push_notification_config.as_ref());
    let asked = SendMessageRequest {
        message: request.message.clone(),
        metadata: request.metadata.clone(),
        configuration: webhook.map(|webhook| SendMessageConfiguration {
            task_push_notification_config: Some(webhook.clone()),
            ..SendMessageConfiguration::default()
        }),
        ..SendMessageRequest::default()
    };
    Bytes::copy_from_slice(digest::digest(&digest::SHA256, &asked.encode_to_vec()).as_ref())
}

fn new_identity() -> Bytes {
    Bytes::copy_from_slice(Uuid::now_v7().as_bytes())
}
