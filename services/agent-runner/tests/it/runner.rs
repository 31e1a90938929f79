//! Rules of the runner itself, with backends made for the purpose.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use prost::Message as _;
use rialto_a2a::{Error, Kind, v1::TaskState};
use rialto_agent_runner::backend::{Backend, Crash, End, Events, Turn};
use rialto_rpc::tasks::{CancelOrder, RunEntry};
use tokio::time::timeout;
use tonic::async_trait;

use crate::lab::{Lab, echo};

/// Panics in its first attempts.
#[derive(Debug)]
struct Panics(u32);

#[async_trait]
impl Backend for Panics {
    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash> {
        events.text(format!("attempt {}", turn.attempt)).await;
        assert!(turn.attempt > self.0, "on purpose");
        Ok(End::Done(Vec::new()))
    }
}

#[tokio::test]
async fn a_panic_is_a_crash() {
    let mut lab = Lab::new();
    lab.start_with(echo(), Arc::new(Panics(2)));
    let task = lab.ask("x").await;
    assert_eq!((task.state, task.attempts), (TaskState::Completed, 3));
    // Nothing of the lost attempts is mixed in.
    assert_eq!(task.artifact_text("answer"), "attempt 3");
    assert_eq!(task.agent_texts(), ["attempt 3"]);
}

/// Counts what it gets rid of.
#[derive(Debug, Default)]
struct Floods(Arc<AtomicU32>);

#[async_trait]
impl Backend for Floods {
    async fn run(&self, _: &Turn, events: &Events) -> Result<End, Crash> {
        for _ in 0..100_000 {
            events.text("x".repeat(1000)).await;
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        Ok(End::Done(Vec::new()))
    }
}

#[tokio::test]
async fn a_backend_waits_while_nothing_can_be_stored() {
    let mut lab = Lab::new();
    let sent = Arc::new(AtomicU32::new(0));
    lab.fault("record", crate::fake::Fault::Unavailable, 1_000_000);
    lab.start_with(echo(), Arc::new(Floods(sent.clone())));
    let task_id = lab.send("x").await;
    lab.until(&task_id, |_| lab.calls().iter().filter(|call| **call == "record").count() >= 2).await;
    let kept = sent.load(Ordering::Relaxed);
    assert!((64..1000).contains(&kept), "{kept} kB are kept");
}

#[tokio::test]
async fn an_answer_that_is_too_long_ends_the_turn() {
    let mut lab = Lab::new();
    lab.start_with(echo(), Arc::new(Floods::default()));
    let task = lab.ask("x").await;
    assert_eq!(task.state, TaskState::Failed);
    assert_eq!(task.status_text(), "invalid agent response: the answer is longer than 8 MiB");
}

#[tokio::test]
async fn what_the_store_refuses_fails_the_turn() {
    let lab = Lab::with([echo()]);
    lab.refuse("finish", Kind::PayloadTooLarge.into());
    let task = lab.ask("x").await;
    assert_eq!((task.state, task.status_text()), (TaskState::Failed, "the task is too large".to_owned()));
    assert_eq!(task.artifacts.len(), 0);
    lab.settled().await;
}

#[tokio::test]
async fn a_store_that_refuses_every_end_is_tried_again() {
    let lab = Lab::with([echo()]);
    for _ in 0..2 {
        lab.refuse("finish", Error::new(Kind::InvalidParams, "no"));
    }
    let task = lab.ask("x").await;
    assert_eq!((task.state, task.attempts), (TaskState::Completed, 2));
}

/// The runner asks so often before it believes an internal error.
const TRIES: usize = 5;

/// Says something, and comes to an end in later attempts only.
#[derive(Debug)]
struct Hesitates;

#[async_trait]
impl Backend for Hesitates {
    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash> {
        events.text(format!("attempt {}", turn.attempt)).await;
        match turn.attempt {
            1 => std::future::pending().await,
            _ => Ok(End::Done(Vec::new())),
        }
    }
}

#[tokio::test]
async fn an_internal_error_of_task_store_is_not_the_end_of_a_task() {
    for (call, backend) in [("record", Arc::new(Hesitates) as Arc<dyn Backend>), ("finish", Arc::new(Panics(0)))] {
        let mut lab = Lab::new();
        for _ in 0..TRIES {
            lab.refuse(call, Error::internal());
        }
        lab.start_with(echo(), backend);
        let task = lab.ask("x").await;
        assert_eq!((task.state, task.attempts), (TaskState::Completed, 2), "{call}");
        assert_eq!(task.artifact_text("answer"), "attempt 2");
    }
}

#[tokio::test]
async fn a_task_store_that_is_broken_for_good_costs_a_bounded_number_of_attempts() {
    let (mut lab, mut agent) = (Lab::new(), echo());
    agent.max_attempts = 2;
    for _ in 0..2 * TRIES {
        lab.refuse("finish", Error::internal());
    }
    lab.start([agent], Duration::from_secs(1));
    let task = lab.ask("x").await;
    // As task-store itself says, and not an internal error.
    assert_eq!((task.state, task.status_text()), (TaskState::Failed, "the agent crashed".to_owned()));
    assert_eq!(task.attempts, 2);
    lab.settled().await;
}

#[tokio::test]
async fn a_canceled_task_is_never_begun() {
    let mut lab = Lab::new();
    let task_id = lab.send("x").await;
    lab.cancel(&task_id, true);
    lab.start([echo()], Duration::from_secs(1));
    lab.settled().await;
    assert_eq!(lab.calls(), ["begin"]);
}

#[tokio::test]
async fn what_is_no_run_entry_is_buried_and_the_next_one_runs() {
    let lab = Lab::with([echo()]);
    lab.append("a", b"\xff\xff not protobuf".to_vec()).await;
    lab.append("a", RunEntry { schema: 1, task_id: "unknown".to_owned(), ..RunEntry::default() }.encode_to_vec()).await;
    assert_eq!(lab.ask("x").await.state, TaskState::Completed);
    lab.settled().await;
}

#[tokio::test]
async fn an_entry_of_a_newer_release_is_left_alone() {
    let mut lab = Lab::with([echo()]);
    lab.append("a", RunEntry { schema: 2, task_id: "new".to_owned(), ..RunEntry::default() }.encode_to_vec()).await;
    assert_eq!(lab.ask("x").await.state, TaskState::Completed);
    lab.stop().await;
    assert_eq!(lab.entries().await, 1);
    assert_eq!(lab.calls(), ["begin", "finish"]);
}

#[tokio::test]
async fn one_runner_hosts_many_agents() {
    let (one, mut two) = (echo(), echo());
    two.id = "b".to_owned();
    let lab = Lab::with([one, two]);
    let entry = RunEntry { schema: 1, task_id: lab.send("x").await, ..RunEntry::default() };
    lab.over(&entry.task_id).await;
    lab.append("b", RunEntry { task_id: "unknown".to_owned(), ..entry }.encode_to_vec()).await;
    timeout(Duration::from_secs(10), async {
        while lab.calls().len() < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("agent b takes its entry");
}

#[tokio::test]
async fn a_command_without_a_program_stops_the_start() {
    let mut agent = echo();
    agent.backend = rialto_runtime::config::Backend::Command {
        command: Vec::new(),
        cwd: None,
        env: Default::default(),
        persistent: false,
    };
    let error = rialto_agent_runner::backend::open(&agent).unwrap_err();
    assert_eq!(error.to_string(), "the command is empty");
}

#[tokio::test]
async fn a_runner_that_goes_on_leaves_a_task_store_that_stops() {
    let lab = Lab::with([echo()]);
    lab.listened(1).await;
    lab.fake.orders.send(CancelOrder { stopping: true, ..CancelOrder::default() }).unwrap();
    lab.listened(2).await;
    assert_eq!(lab.ask("hi").await.state, TaskState::Completed);
}
