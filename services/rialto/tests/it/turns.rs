//! Turns with the real task-store, the real runner and a scripted agent, in one process: what happens to them when
//! runners are slow, stop, or are lost.

use std::{path::Path, sync::Arc, time::Duration};

use futures::StreamExt as _;
use rialto_a2a::v1::{Message, Part, Role, Task, TaskState, part::Content, stream_response::Payload};
use rialto_agent_runner::{RunnerOptions, run};
use rialto_rpc::{
    Transport,
    tasks::{self, Follow, GetRequest, GrantRequest, Policy, Scope, SendRequest, TaskStoreClient, Update},
};
use rialto_runtime::{
    config::{self, Agent},
    units::Span,
};
use rialto_store::{
    Engine, EntryId, ReadLimit,
    sqlite::{SqliteConfig, SqliteEngine},
    worker::DEAD,
};
use rialto_task_store::{Options, TaskStore};
use rialto_testkit::cluster::path_with_agents;
use serde_json::Value;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PATIENCE: Duration = Duration::from_secs(60);

struct House {
    engine: Arc<SqliteEngine>,
    tasks: TaskStoreClient,
    agent: Agent,
    counters: tempfile::TempDir,
    stop: CancellationToken,
}

impl Drop for House {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl House {
    fn new(tick: &str) -> Self {
        let engine = SqliteEngine::open(SqliteConfig::memory(2)).unwrap();
        let store = TaskStore::new(engine.clone(), &Options::default());
        let stop = CancellationToken::new();
        store.run_background(&stop, &TaskTracker::new());
        let tasks = tasks::client(Transport::in_memory(tasks::server(store)));
        let counters = tempfile::tempdir().unwrap();
        let binary = Path::new(env!("CARGO_BIN_EXE_rialto"));
        path_with_agents(binary).unwrap();
        let program = binary.with_file_name("scripted_agent");
        let env = [("SCRIPTED_COUNTERS", counters.path().to_str().unwrap()), ("SCRIPTED_TICK_MS", tick)];
        let backend = config::Backend::Command {
            command: vec![program.to_str().unwrap().to_owned()],
            cwd: None,
            env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            persistent: false,
        };
        let agent = Agent { id: "a".to_owned(), backend, lease: Span::secs(1), ..Agent::echo() };
        Self { engine, tasks, agent, counters, stop }
    }

    fn runner(&self, stop_grace: Duration) -> Runner {
        let options = RunnerOptions { agents: vec![self.agent.clone()], stop_grace };
        let stop = CancellationToken::new();
        let running = run(options, self.engine.clone(), self.tasks.clone(), stop.clone());
        Runner { stop, task: tokio::spawn(async move { running.await.unwrap() }) }
    }

    async fn send(&self, text: &str) -> Updates {
        let part = Part { content: Some(Content::Text(text.to_owned())), ..Part::default() };
        let message = Message {
            message_id: format!("m-{text}"),
            context_id: uuid::Uuid::new_v4().to_string(),
            role: Role::User.into(),
            parts: vec![part],
            ..Message::default()
        };
        let request = SendRequest {
            scope: Some(scope()),
            turn_id: uuid::Uuid::new_v4().as_bytes().to_vec().into(),
            message: Some(message),
            policy: Some(Policy::default()),
            follow: Follow::Turn.into(),
            ..SendRequest::default()
        };
        let mut updates = self.tasks.clone().send(request).await.unwrap().into_inner();
        let Some(Payload::Task(task)) = payload(updates.next().await.unwrap().unwrap()) else { panic!("no snapshot") };
        Updates { id: task.id, updates }
    }

    async fn get(&self, id: &str) -> Task {
        let request = GetRequest { scope: Some(scope()), id: id.to_owned(), history_length: None };
        self.tasks.clone().get(request).await.unwrap().into_inner()
    }

    fn counts(&self, key: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.counters.path().join(key)).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits until the agent has counted so far.
    async fn counted(&self, key: &str, lines: usize) {
        let wait = async {
            while self.counts(key).len() < lines {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, wait).await.expect("it counts");
    }

    async fn dead(&self) -> usize {
        let limit = ReadLimit { entries: 100, bytes: 1 << 20 };
        let mut dead = 0;
        for shard in 0..2 {
            dead += self.engine.read(shard, DEAD, EntryId::ZERO, limit).await.unwrap().len();
        }
        dead
    }
}

struct Runner {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Runner {
    async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.expect("it stops").unwrap();
    }

    /// As `kill -9` does.
    async fn kill(self) {
        self.task.abort();
        self.task.await.ok();
    }
}

struct Updates {
    id: String,
    updates: tonic::Streaming<Update>,
}

impl Updates {
    /// Everything that comes, in short, to the end of the stream.
    async fn rest(self) -> Vec<String> {
        let rest = self.updates.map(|update| short(update.unwrap())).collect();
        timeout(PATIENCE, rest).await.expect("the stream ends")
    }
}

fn scope() -> Scope {
    Scope { agent: "a".to_owned(), ..Scope::default() }
}

fn payload(update: Update) -> Option<Payload> {
    update.event.and_then(|event| event.payload)
}

fn texts(parts: &[Part]) -> String {
    parts
        .iter()
        .filter_map(|part| if let Some(Content::Text(text)) = &part.content { Some(&text[..]) } else { None })
        .collect()
}

fn short(update: Update) -> String {
    match payload(update) {
        Some(Payload::StatusUpdate(update)) => update.status.unwrap().state().as_str_name().replace("TASK_STATE_", ""),
        Some(Payload::ArtifactUpdate(update)) => {
            let artifact = update.artifact.unwrap();
            format!("{}{}{}", artifact.artifact_id, if update.append { "+=" } else { "=" }, texts(&artifact.parts))
        }
        other => panic!("{other:?}"),
    }
}

fn state(task: &Task) -> TaskState {
    task.status.as_ref().unwrap().state()
}

/// C121. Ten times the lease, in real time: the lease cannot be shorter on a busy machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_but_living_runner_is_not_taken_for_dead() {
    let house = House::new("1000");
    let runners: Vec<_> = (0..3).map(|_| house.runner(Duration::from_secs(1))).collect();
    let updates = house.send("count:slow:11").await;
    let id = updates.id.clone();
    assert_eq!(updates.rest().await.last().map(String::as_str), Some("COMPLETED"));
    let counts = house.counts("slow");
    let numbers: Vec<_> = counts.iter().map(|count| count["n"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=11).collect::<Vec<_>>(), "one execution");
    assert!(counts.iter().all(|count| count["attempt"] == 1));
    assert_eq!(state(&house.get(&id).await), TaskState::Completed);
    for runner in runners {
        runner.stop().await;
    }
}

/// C123, the second half.
#[tokio::test]
async fn a_message_that_always_crashes_its_agent_ends_and_its_neighbours_do_not_notice() {
    let house = House::new("10");
    let runner = house.runner(Duration::from_secs(1));
    let poison = house.send("exit").await;
    let neighbour = house.send("echo fine").await;
    assert_eq!(neighbour.rest().await, ["WORKING", "answer=fine", "COMPLETED"]);
    let id = poison.id.clone();
    assert_eq!(poison.rest().await.last().map(String::as_str), Some("FAILED"));
    let task = house.get(&id).await;
    let reason = texts(&task.status.unwrap().message.unwrap().parts);
    assert!(reason.contains("lost 4 times"), "{reason}");
    assert_eq!(house.dead().await, 1);
    runner.stop().await;
}

/// C123, the first half, and C135's rule for one turn.
#[tokio::test]
async fn a_planned_stop_is_no_attempt_and_the_turn_goes_on_at_once() {
    let mut house = House::new("200");
    house.agent.max_attempts = 1;
    house.agent.lease = Span::secs(300);
    let first = house.runner(Duration::ZERO);
    let updates = house.send("journal:6:stops").await;
    house.counted("stops", 2).await;
    first.stop().await;
    // Its lease would last for minutes: whoever comes next gets the turn because it was handed back.
    let second = house.runner(Duration::ZERO);
    house.counted("stops", 4).await;
    second.stop().await;
    let third = house.runner(Duration::from_secs(1));
    let rest = updates.rest().await;
    assert_eq!(rest.last().map(String::as_str), Some("COMPLETED"));
    let counts = house.counts("stops");
    assert!(counts.iter().all(|count| count["attempt"] == 1), "{counts:?}");
    assert!(counts.len() <= 8, "at most the step that was not journaled comes again: {counts:?}");
    third.stop().await;
}

/// C137.
#[tokio::test]
async fn a_lost_runner_does_not_repeat_finished_steps_and_the_agent_can_tell_its_attempts_apart() {
    let house = House::new("100");
    let first = house.runner(Duration::from_secs(1));
    let updates = house.send("journal:6:effects").await;
    house.counted("effects", 3).await;
    first.kill().await;
    let second = house.runner(Duration::from_secs(1));
    let id = updates.id.clone();
    assert_eq!(updates.rest().await.last().map(String::as_str), Some("COMPLETED"));
    let counts = house.counts("effects");
    let keys: std::collections::BTreeSet<_> = counts.iter().map(|count| count["key"].to_string()).collect();
    assert_eq!(keys.len(), 1, "one key for side effects");
    let attempts: Vec<_> = counts.iter().map(|count| count["attempt"].as_u64().unwrap()).collect();
    assert!(attempts.is_sorted() && attempts[0] == 1 && attempts.last() == Some(&2), "{attempts:?}");
    assert!(counts.len() <= 7, "only a step that was not journaled may come again: {counts:?}");
    let task = house.get(&id).await;
    assert_eq!(task.artifacts.len(), 1);
    assert!(texts(&task.artifacts[0].parts).starts_with("6 steps"));
    second.stop().await;
}

#[tokio::test]
async fn chunks_of_a_lost_attempt_are_gone_before_the_next_one_speaks() {
    let house = House::new("10");
    let first = house.runner(Duration::from_secs(1));
    let mut updates = house.send("chunks:400x20").await;
    let id = updates.id.clone();
    for _ in 0..5 {
        timeout(PATIENCE, updates.updates.next()).await.unwrap().unwrap().unwrap();
    }
    first.kill().await;
    let second = house.runner(Duration::from_secs(1));
    let mut seen = Vec::new();
    // From the event that takes it back on.
    while seen.last().map(String::as_str) != Some("chunks=") {
        seen.push(short(timeout(PATIENCE, updates.updates.next()).await.unwrap().unwrap().unwrap()));
    }
    assert_eq!(seen[seen.len() - 2], "WORKING", "and a status that says why");
    assert_eq!(short(timeout(PATIENCE, updates.updates.next()).await.unwrap().unwrap().unwrap()), "chunks=1\n");
    assert!(texts(&house.get(&id).await.artifacts[0].parts).starts_with("1\n"));
    second.stop().await;
}

#[tokio::test]
async fn a_stream_stays_open_while_its_task_waits_for_authorization() {
    let house = House::new("10");
    let runner = house.runner(Duration::from_secs(1));
    let mut updates = house.send("auth").await;
    let id = updates.id.clone();
    while short(timeout(PATIENCE, updates.updates.next()).await.unwrap().unwrap().unwrap()) != "AUTH_REQUIRED" {}
    let grant = GrantRequest {
        task_id: id.clone(),
        commit_id: uuid::Uuid::new_v4().as_bytes().to_vec().into(),
        ..GrantRequest::default()
    };
    house.tasks.clone().grant(grant).await.unwrap();
    assert_eq!(updates.rest().await, ["SUBMITTED", "WORKING", "answer=authorized", "COMPLETED"]);
    runner.stop().await;
}
