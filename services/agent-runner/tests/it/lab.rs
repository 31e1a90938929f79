//! What a test needs around the fake task-store: runners, and hands to send, cancel, fence and wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use prost::Message as _;
use rialto_a2a::{
    Error,
    v1::{Message, Role, TaskState},
    wkt::Struct,
};
use rialto_agent_runner::{RunnerOptions, backend::Backend};
use rialto_rpc::{
    Transport,
    tasks::{CancelOrder, RunEntry},
};
use rialto_runtime::{config, units::Span};
use rialto_store::{
    At, Batch, Engine, Op,
    sqlite::{SqliteConfig, SqliteEngine},
};
use tokio::{
    sync::{broadcast, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::fake::{Fake, Fault, Kept, State, message};

/// Longer than any test takes; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

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
            let order = CancelOrder { task_id: task_id.to_owned(), turn_id: turn_id.into(), stopping: false };
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

    /// Waits until streams of cancel orders were opened this often.
    pub(crate) async fn listened(&self, times: usize) {
        let mut changed = self.changed.clone();
        timeout(PATIENCE, async {
            while self.fake.lock().calls.iter().filter(|call| **call == "control").count() < times {
                changed.changed().await.unwrap();
            }
        })
        .await
        .expect("the runner listens");
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
