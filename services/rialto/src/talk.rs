//! The commands that talk to an agent.

use std::{
    future::Future,
    io::{self, IsTerminal as _},
    pin::pin,
    process::ExitCode,
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use rialto_a2a::{
    json,
    v1::{
        ListTasksRequest, Message, Part, Role, SendMessageRequest, StreamResponse, Task, TaskState, part::Content,
        send_message_response, stream_response::Payload,
    },
};
use tokio::io::AsyncReadExt as _;
use uuid::Uuid;

use crate::{
    cli::{SendArgs, ServerArgs, TaskCommand, fail},
    client::{Client, Failure, Update, fetch_card},
    output,
    view::{View, state_name},
};

/// A message may run for a while; everything else is answered from a store.
const RESULT: Duration = Duration::from_secs(600);
const ANSWER: Duration = Duration::from_secs(30);

/// The largest text that is read from stdin.
const MAX_TEXT: u64 = 10 << 20;

/// The largest page to ask for.
const PAGE: usize = 100;

/// Why a command ended early.
enum Stop {
    Failed(Failure),
    Output(io::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

pub(crate) async fn call(args: SendArgs) -> ExitCode {
    run(args.server.timeout.or(Some(RESULT)), async {
        let request = request(&args).await?;
        let client = Client::connect(&args.server.url, args.server.binding).await?;
        let response = client.send(request, args.idempotency_key.as_deref()).await?;
        let payload = match response.payload {
            Some(send_message_response::Payload::Task(task)) => Some(Payload::Task(task)),
            Some(send_message_response::Payload::Message(message)) => Some(Payload::Message(message)),
            None => None,
        };
        let mut view = view(&args.server);
        view.event(&StreamResponse { payload })?;
        view.finish()?;
        Ok(exit_code(view.state()))
    })
    .await
}

pub(crate) async fn stream(args: SendArgs) -> ExitCode {
    run(args.server.timeout, async {
        let request = request(&args).await?;
        let client = Client::connect(&args.server.url, args.server.binding).await?;
        show(&args.server, client.stream(request, args.idempotency_key.as_deref()).await?).await
    })
    .await
}

pub(crate) async fn card(args: ServerArgs) -> ExitCode {
    run(args.timeout.or(Some(ANSWER)), async {
        let card = fetch_card(&args.url).await?;
        let card: serde_json::Value = serde_json::from_slice(&card)
            .map_err(|error| Failure::Usage(format!("{} has no agent card: {error}", args.url)))?;
        let text = if as_json(&args) { card.to_string() } else { format!("{card:#}") };
        output::line(&output::harmless(&text))?;
        Ok(ExitCode::SUCCESS)
    })
    .await
}

pub(crate) async fn task(command: TaskCommand) -> ExitCode {
    match command {
        TaskCommand::Get { id, history, server } => {
            run(server.timeout.or(Some(ANSWER)), async {
                let client = Client::connect(&server.url, server.binding).await?;
                print_task(&server, client.get(&id, history).await?)
            })
            .await
        }
        TaskCommand::Cancel { id, server } => {
            run(server.timeout.or(Some(ANSWER)), async {
                let client = Client::connect(&server.url, server.binding).await?;
                print_task(&server, client.cancel(&id).await?)
            })
            .await
        }
        TaskCommand::List { context, status, limit, server } => {
            run(server.timeout.or(Some(ANSWER)), async {
                let client = Client::connect(&server.url, server.binding).await?;
                list(&client, as_json(&server), context, status, limit).await
            })
            .await
        }
        TaskCommand::Watch { id, after, server } => {
            run(server.timeout, async {
                let client = Client::connect(&server.url, server.binding).await?;
                show(&server, client.watch(&id, after)).await
            })
            .await
        }
    }
}

/// `working` or `TASK_STATE_WORKING`.
pub(crate) fn parse_state(text: &str) -> Result<TaskState, String> {
    let name = text.to_ascii_uppercase().replace('-', "_");
    let name = if name.starts_with("TASK_STATE_") { name } else { format!("TASK_STATE_{name}") };
    match TaskState::from_str_name(&name) {
        Some(TaskState::Unspecified) | None => {
            let states = (1..=8).filter_map(|number| TaskState::try_from(number).ok()).map(state_name);
            Err(format!("must be one of {}", states.collect::<Vec<_>>().join(", ")))
        }
        Some(state) => Ok(state),
    }
}

/// Runs a command for at most `timeout` and turns what became of it into an exit code.
async fn run(timeout: Option<Duration>, command: impl Future<Output = Result<ExitCode, Stop>>) -> ExitCode {
    let result = match timeout {
        None => command.await,
        Some(timeout) => match tokio::time::timeout(timeout, command).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Timeout(timeout).into()),
        },
    };
    match result {
        Ok(code) => code,
        // `| head` has seen enough.
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Stop::Output(error)) => fail(2, &format!("cannot write to stdout: {error}")),
        Err(Stop::Failed(failure)) => {
            let code = match failure {
                Failure::Usage(_) => 2,
                Failure::Unreachable(_) | Failure::Timeout(_) => 3,
                Failure::Answer(_) => 4,
            };
            fail(code, &output::harmless(&failure.to_string()).replace('\n', " "))
        }
    }
}

fn exit_code(state: Option<TaskState>) -> ExitCode {
    match state {
        Some(TaskState::Failed | TaskState::Rejected | TaskState::Canceled) => ExitCode::FAILURE,
        Some(TaskState::InputRequired | TaskState::AuthRequired) => ExitCode::from(5),
        _ => ExitCode::SUCCESS,
    }
}

fn as_json(server: &ServerArgs) -> bool {
    server.json || !(server.text || io::stdout().is_terminal())
}

fn view(server: &ServerArgs) -> View {
    View::new(as_json(server))
}

async fn request(args: &SendArgs) -> Result<SendMessageRequest, Failure> {
    let text = if args.message == "-" { stdin().await? } else { args.message.clone() };
    let part = Part { content: Some(Content::Text(text)), ..Part::default() };
    let message = Message {
        // The message that has this name must be the same each time.
        message_id: args.idempotency_key.clone().unwrap_or_else(|| Uuid::new_v4().to_string()),
        context_id: args.context.clone().unwrap_or_default(),
        task_id: args.task.clone().unwrap_or_default(),
        role: Role::User.into(),
        parts: vec![part],
        ..Message::default()
    };
    Ok(SendMessageRequest { message: Some(message), ..SendMessageRequest::default() })
}

/// The text on stdin, without the line end that `echo` adds.
async fn stdin() -> Result<String, Failure> {
    let mut text = String::new();
    let read = tokio::io::stdin().take(MAX_TEXT + 1).read_to_string(&mut text).await;
    read.map_err(|error| Failure::Usage(format!("cannot read stdin: {error}")))?;
    if text.len() as u64 > MAX_TEXT {
        return Err(Failure::Usage("the text on stdin is larger than 10MiB".to_owned()));
    }
    let end = text.strip_suffix('\n').map_or(text.len(), |text| text.strip_suffix('\r').unwrap_or(text).len());
    text.truncate(end);
    Ok(text)
}

async fn show(server: &ServerArgs, updates: impl Stream<Item = Result<Update, Failure>>) -> Result<ExitCode, Stop> {
    let mut view = view(server);
    let mut updates = pin!(updates);
    while let Some(update) = updates.next().await {
        match update {
            Ok(update) => view.event(&update.event)?,
            Err(failure) => {
                view.finish()?;
                return Err(failure.into());
            }
        }
    }
    view.finish()?;
    Ok(exit_code(view.state()))
}

/// A task that was asked for; its state is information, not the outcome of the command.
fn print_task(server: &ServerArgs, task: Task) -> Result<ExitCode, Stop> {
    if as_json(server) {
        output::line(&json::to_string(&task).map_err(io::Error::other)?)?;
    } else {
        let mut view = View::new(false);
        view.event(&StreamResponse { payload: Some(Payload::Task(task)) })?;
        view.finish()?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(
    client: &Client,
    as_json: bool,
    context: Option<String>,
    status: Option<TaskState>,
    limit: u32,
) -> Result<ExitCode, Stop> {
    let mut request = ListTasksRequest {
        context_id: context.unwrap_or_default(),
        status: status.unwrap_or_default().into(),
        ..ListTasksRequest::default()
    };
    let mut left = limit as usize;
    while left > 0 {
        request.page_size = i32::try_from(left.min(PAGE)).ok();
        let page = client.list(request.clone()).await?;
        for task in page.tasks.iter().take(left) {
            let line = if as_json { json::to_string(task).map_err(io::Error::other)? } else { summary(task) };
            output::line(&line)?;
        }
        left = left.saturating_sub(page.tasks.len());
        // A server that gives the same page again would be asked for ever.
        if page.next_page_token.is_empty() || page.next_page_token == request.page_token || page.tasks.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(task: &Task) -> String {
    let since = task.status.as_ref().and_then(|status| status.timestamp.as_ref());
    let since = since.and_then(|time| json::to_value(time).ok()).unwrap_or_default();
    let (id, context, state) = (&task.id, &task.context_id, state_name(task.state()));
    let line = format!("{id}  {state:<14}  {:<24}  {context}", since.as_str().unwrap_or_default());
    output::harmless(&line).into_owned()
}
