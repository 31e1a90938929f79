//! `a2a-client-lf`, unmodified, on the bindings that it has.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use a2a::*;
use a2a_client::{A2AClient, A2AClientFactory, Transport, agent_card::AgentCardResolver};
use anyhow::{Context, Result, bail};
use futures::{StreamExt, future::join_all};
use serde_json::{Value, json};

type Client = A2AClient<Box<dyn Transport>>;

const BINDINGS: [&str; 2] = [TRANSPORT_PROTOCOL_JSONRPC, TRANSPORT_PROTOCOL_HTTP_JSON];

/// `rialto dev` with the scripted agent at `/`, killed when dropped; or a cluster that is there already.
struct Rialto {
    url: String,
    dev: Option<(Child, tempfile::TempDir)>,
}

impl Rialto {
    fn start() -> Result<Self> {
        if let Ok(cluster) = env::var("RIALTO_TESTS_CLUSTER") {
            let cluster: Value = serde_json::from_str(&cluster)?;
            let url = cluster["url"].as_str().context("the cluster's URL")?;
            return Ok(Self { url: url.to_owned(), dev: None });
        }
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("rialto.yaml");
        let backend = json!({"type": "command", "command": [built("SCRIPTED_AGENT_BIN", "scripted_agent")?], "persistent": true});
        // JSON is YAML.
        fs::write(&config, json!({"agents": [{"id": "scripted", "mount": "/", "backend": backend}]}).to_string())?;
        let mut process = Command::new(built("RIALTO_BIN", "rialto")?)
            .args(["dev", "--ephemeral", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(folder.path().join("stderr.log"))?)
            .spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("stdout is piped")?).read_line(&mut line)?;
        let Some(url) = line.strip_prefix("ready: ") else {
            bail!("not ready: {line:?}\n{}", fs::read_to_string(folder.path().join("stderr.log"))?);
        };
        Ok(Self { url: url.trim().to_owned(), dev: Some((process, folder)) })
    }

    async fn client(&self, binding: &str) -> Result<Client> {
        let card = AgentCardResolver::new(None).resolve(&self.url).await?;
        let factory = A2AClientFactory::builder().preferred_bindings(vec![binding.to_owned()]).build();
        let (client, interface) = factory.create_from_card_with_interface(&card).await?;
        assert_eq!((interface.protocol_binding.as_str(), interface.protocol_version.as_str()), (binding, "1.0"));
        Ok(client)
    }
}

impl Drop for Rialto {
    fn drop(&mut self) {
        if let Some((process, _)) = &mut self.dev {
            process.kill().and_then(|()| process.wait()).ok();
        }
    }
}

/// The file that the variable names, or what was built last.
fn built(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target");
    let profiles = ["debug", "ci-release", "release"].map(|profile| target.join(profile).join(name));
    let newest = profiles.into_iter().filter(|path| path.exists()).max_by_key(|path| path.metadata().and_then(|it| it.modified()).ok());
    newest.with_context(|| format!("no {name}: build it first, or name it in {variable}"))
}

fn request(text: &str, task: Option<&str>, context: Option<&str>, configuration: Value) -> SendMessageRequest {
    let mut message = Message::new(Role::User, vec![Part::text(text)]);
    message.task_id = task.map(str::to_owned);
    message.context_id = context.map(str::to_owned);
    let configuration = serde_json::from_value(configuration).expect("a configuration");
    SendMessageRequest { message, configuration: Some(configuration), metadata: None, tenant: None }
}

async fn send(client: &Client, request: &SendMessageRequest) -> Result<Task> {
    match client.send_message(request).await? {
        SendMessageResponse::Task(task) => Ok(task),
        SendMessageResponse::Message(message) => bail!("a message instead of a task: {message:?}"),
    }
}

async fn say(client: &Client, text: &str) -> Result<Task> {
    send(client, &request(text, None, None, json!({}))).await
}

async fn post(client: &Client, text: &str) -> Result<Task> {
    send(client, &request(text, None, None, json!({"returnImmediately": true}))).await
}

async fn get(client: &Client, id: &str, history_length: Option<i32>) -> Result<Task, A2AError> {
    client.get_task(&GetTaskRequest { id: id.to_owned(), history_length, tenant: None }).await
}

fn answer(task: &Task) -> String {
    let parts = task.artifacts.iter().flatten().flat_map(|artifact| &artifact.parts);
    parts.filter_map(|part| if let PartContent::Text(text) = &part.content { Some(text.as_str()) } else { None }).collect()
}

/// The task as a client sees it after these events.
fn fold(events: Vec<StreamResponse>) -> Task {
    let mut events = events.into_iter();
    let Some(StreamResponse::Task(mut task)) = events.next() else { panic!("the first event is the task") };
    for event in events {
        match event {
            StreamResponse::Task(snapshot) => task = snapshot,
            StreamResponse::StatusUpdate(update) => {
                assert_eq!(update.task_id, task.id);
                task.status = update.status;
            }
            StreamResponse::ArtifactUpdate(update) => {
                assert_eq!(update.task_id, task.id);
                let artifacts = task.artifacts.get_or_insert_default();
                match artifacts.iter_mut().find(|one| one.artifact_id == update.artifact.artifact_id) {
                    Some(old) if update.append == Some(true) => old.parts.extend(update.artifact.parts),
                    Some(old) => *old = update.artifact,
                    None => artifacts.push(update.artifact),
                }
            }
            StreamResponse::Message(message) => panic!("a message on a task's stream: {message:?}"),
        }
    }
    task
}

async fn collect(stream: a2a_client::BoxStream<'static, Result<StreamResponse, A2AError>>) -> Result<Vec<StreamResponse>, A2AError> {
    stream.collect::<Vec<_>>().await.into_iter().collect()
}

async fn code<T: std::fmt::Debug>(call: impl Future<Output = Result<T, A2AError>>) -> i32 {
    call.await.expect_err("refused").code
}

#[tokio::test]
async fn send_get_and_list() -> Result<()> {
    let rialto = Rialto::start()?;
    for binding in BINDINGS {
        let client = rialto.client(binding).await?;
        let task = say(&client, "echo hello").await?;
        assert_eq!((task.status.state.clone(), answer(&task)), (TaskState::Completed, "hello".to_owned()));
        assert!(task.status.timestamp.is_some());
        assert_eq!(get(&client, &task.id, None).await?, task);
        assert_eq!(get(&client, &task.id, Some(1)).await?.history.map(|history| history.len()), Some(1));

        let context = format!("ctx-{}", new_message_id());
        let mut sent = Vec::new();
        for n in 0..5 {
            sent.push(send(&client, &request(&format!("echo {n}"), None, Some(&context), json!({}))).await?.id);
        }
        sent.reverse();
        let (mut found, mut token) = (Vec::new(), None);
        loop {
            let page = client
                .list_tasks(&ListTasksRequest { context_id: Some(context.clone()), page_size: Some(2), page_token: token, ..serde_json::from_value(json!({}))? })
                .await?;
            assert_eq!((page.page_size, page.total_size), (2, 5));
            found.extend(page.tasks.into_iter().map(|task| task.id));
            if page.next_page_token.is_empty() {
                break;
            }
            token = Some(page.next_page_token);
        }
        assert_eq!(found, sent);
        let empty = client.list_tasks(&serde_json::from_value(json!({"contextId": "nobody"}))?).await?;
        assert_eq!((empty.tasks.len(), empty.total_size), (0, 0));
    }
    Ok(())
}

#[tokio::test]
async fn streams_and_subscriptions() -> Result<()> {
    let rialto = Rialto::start()?;
    for binding in BINDINGS {
        let client = rialto.client(binding).await?;
        let events = collect(client.send_streaming_message(&request("chunks:20x5", None, None, json!({}))).await?).await?;
        let seen = fold(events);
        let stored = get(&client, &seen.id, None).await?;
        assert_eq!((&seen.artifacts, &seen.status), (&stored.artifacts, &stored.status));

        let task = post(&client, "chunks:40x20").await?;
        let subscription = SubscribeToTaskRequest { id: task.id.clone(), tenant: None };
        let mut first = client.subscribe_to_task(&subscription).await?;
        assert!(matches!(first.next().await, Some(Ok(StreamResponse::Task(snapshot))) if snapshot.id == task.id));
        drop(first);
        let seen = fold(collect(client.subscribe_to_task(&subscription).await?).await?);
        let stored = get(&client, &task.id, None).await?;
        assert_eq!(stored.status.state, TaskState::Completed);
        assert_eq!(seen.artifacts, stored.artifacts);
    }
    Ok(())
}

#[tokio::test]
async fn turns_questions_and_credentials() -> Result<()> {
    let rialto = Rialto::start()?;
    for binding in BINDINGS {
        let client = rialto.client(binding).await?;
        let asked = say(&client, "ask").await?;
        assert_eq!(asked.status.state, TaskState::InputRequired);
        let done = send(&client, &request("seven", Some(&asked.id), None, json!({}))).await?;
        assert_eq!((done.status.state.clone(), &done.id, &done.context_id), (TaskState::Completed, &asked.id, &asked.context_id));
        assert!(answer(&done).contains("seven"));
        let next = send(&client, &request("echo two", None, Some(&asked.context_id), json!({}))).await?;
        assert!(next.id != asked.id && next.context_id == asked.context_id);
        let waiting = say(&client, "auth").await?;
        assert_eq!(waiting.status.state, TaskState::AuthRequired);
        let done = send(&client, &request("granted", Some(&waiting.id), None, json!({}))).await?;
        assert_eq!(done.status.state, TaskState::Completed);
    }
    Ok(())
}

#[tokio::test]
async fn cancel_and_refusals() -> Result<()> {
    let rialto = Rialto::start()?;
    for binding in BINDINGS {
        let client = rialto.client(binding).await?;
        let task = post(&client, "sleep:60").await?;
        let cancel = CancelTaskRequest { id: task.id.clone(), metadata: None, tenant: None };
        assert_eq!(client.cancel_task(&cancel).await?.status.state, TaskState::Canceled);
        assert_eq!(code(client.cancel_task(&cancel)).await, error_code::TASK_NOT_CANCELABLE);
        assert_eq!(code(get(&client, "nope", None)).await, error_code::TASK_NOT_FOUND);
        assert_eq!(code(get(&client, &task.id, Some(-1))).await, error_code::INVALID_PARAMS);
        let late = request("echo x", Some(&task.id), None, json!({}));
        assert_eq!(code(client.send_message(&late)).await, error_code::UNSUPPORTED_OPERATION);
        let push = serde_json::from_value(json!({"taskId": task.id, "url": "https://hook.example.test/"}))?;
        assert_eq!(code(client.create_push_config(&push)).await, error_code::PUSH_NOTIFICATION_NOT_SUPPORTED);
        let subscription = SubscribeToTaskRequest { id: task.id, tenant: None };
        let refused = match client.subscribe_to_task(&subscription).await {
            Ok(mut stream) => stream.next().await.context("an event")?.expect_err("refused"),
            Err(error) => error,
        };
        assert_eq!(refused.code, error_code::UNSUPPORTED_OPERATION);
    }
    Ok(())
}

#[tokio::test]
async fn many_calls_at_once() -> Result<()> {
    let rialto = Rialto::start()?;
    for binding in BINDINGS {
        let client = rialto.client(binding).await?;
        let texts: Vec<_> = (0..100).map(|n| format!("echo {n}")).collect();
        let tasks = tokio::time::timeout(Duration::from_secs(60), join_all(texts.iter().map(|text| say(&client, text)))).await?;
        for (n, task) in tasks.into_iter().enumerate() {
            assert_eq!(answer(&task?), n.to_string());
        }
    }
    Ok(())
}
