//! Random lives of a task: answers get lost, calls are repeated, runners die, clients come and go and cancel.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures::{StreamExt as _, future::join_all};
use proptest::prelude::*;
use rialto_a2a::{
    Error, Kind,
    state::fold,
    v1::{StreamResponse, Task, stream_response::Payload},
};
use rialto_rpc::tasks::{CancelRequest, Follow, JournalEntry, Outcome, task_store_server::TaskStore as _};
use rialto_task_store::Options;
use tokio::sync::Mutex;
use tonic::{Request, Status};

use crate::{flaky::Flaky, world::*};

/// A small generator, so that one number tells the whole story.
#[derive(Clone, Debug)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    fn fork(&mut self) -> Self {
        Self(self.roll(u64::MAX >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
}

struct Life {
    world: World,
    flaky: Arc<Flaky>,
    dice: Mutex<Dice>,
    /// The highest fence that anybody was given.
    fence: AtomicU64,
}

impl Life {
    fn new(seed: u64) -> Self {
        let flaky = Flaky::new(engine(3));
        let world = World::with(flaky.clone(), 3, &Options::default());
        Self { world, flaky, dice: Mutex::new(Dice(seed | 1)), fence: AtomicU64::new(0) }
    }

    async fn roll(&self, sides: u64) -> u64 {
        self.dice.lock().await.roll(sides)
    }

    /// Repeats a call at random replicas until it is answered, and sometimes once more.
    async fn insist<T, F: Future<Output = Result<T, Status>>>(&self, call: impl Fn(usize) -> F) -> Result<T, Error> {
        let mut answer = None;
        for _ in 0..100 {
            let replica = usize::try_from(self.roll(3).await).expect("small");
            match call(replica).await.map_err(|status| error(&status)) {
                Err(error) if error.kind == Kind::Unavailable => {}
                other => {
                    answer = Some(other);
                    if self.roll(4).await > 0 {
                        break;
                    }
                }
            }
            tokio::task::yield_now().await;
        }
        answer.expect("an answer after so many tries")
    }

    async fn send(&self, send: &Send) -> Task {
        let sent = self.insist(|replica| async move {
            let mut updates = self.world.replicas[replica].send(Request::new(send.0.clone())).await?.into_inner();
            updates.next().await.expect("an update")
        });
        task(sent.await.expect("sends"))
    }

    async fn begin(&self, run: &Run) -> Option<Begun> {
        let request = run.begin(1000);
        let begun = self.insist(|replica| self.world.replicas[replica].begin(Request::new(request.clone())));
        let turn = begun.await.expect("begins").into_inner().turn?;
        self.fence.fetch_max(turn.fence, Ordering::SeqCst);
        Some(Begun { run: run.clone(), turn })
    }

    async fn record(&self, begun: &Begun, first_event: u64, events: Vec<StreamResponse>) -> Outcome {
        self.record_step(begun, first_event, events, None).await
    }

    /// The same, and perhaps a step of the journal after the last event.
    async fn record_step(
        &self,
        begun: &Begun,
        first_event: u64,
        events: Vec<StreamResponse>,
        step: Option<u32>,
    ) -> Outcome {
        let mut request = begun.record(first_event, events);
        let after_event = first_event + request.events.len() as u64 - 1;
        request.journal.extend(step.map(|step| JournalEntry { step, after_event, ..JournalEntry::default() }));
        let recorded = self.insist(|replica| self.world.replicas[replica].record(Request::new(request.clone())));
        recorded.await.expect("records").into_inner().outcome()
    }

    async fn finish(&self, begun: &Begun, first_event: u64, events: Vec<StreamResponse>) -> Outcome {
        let request = begun.finish(first_event, events);
        let finished = self.insist(|replica| self.world.replicas[replica].finish(Request::new(request.clone())));
        finished.await.expect("finishes").into_inner().outcome()
    }

    async fn cancel(&self, id: &str) -> Result<Task, Error> {
        let request = CancelRequest {
            scope: Some(scope("")),
            id: id.into(),
            metadata: None,
            commit_id: id_bytes().to_vec().into(),
        };
        let canceled = self.insist(|replica| self.world.replicas[replica].cancel(Request::new(request.clone())));
        canceled.await.map(tonic::Response::into_inner)
    }

    /// A runner that works at whatever there is, and sometimes dies, until `done`.
    async fn runner(&self, name: usize, done: impl AsyncFn() -> bool) {
        let mut zombies: Vec<(Begun, u64)> = Vec::new();
        for round in 0.. {
            if done().await {
                break;
            }
            tokio::task::yield_now().await;
            let lease = match self.roll(3).await {
                0 => std::time::Duration::ZERO,
                _ => std::time::Duration::from_secs(60),
            };
            let Some(run) = self.world.claim_after(&format!("r{name}-{round}"), lease).await else { continue };
            let Some(begun) = self.begin(&run).await else { continue };
            let mut next = begun.turn.next_event;
            let mut written = begun.turn.kept_artifacts == ["a"];
            let mut steps = u32::try_from(begun.turn.journal.len()).expect("small");
            loop {
                tokio::task::yield_now().await;
                let mut events = Vec::new();
                for _ in 0..self.roll(3).await {
                    let append = written && self.roll(3).await > 0;
                    events.push(match self.roll(4).await {
                        0 => status(S::Working),
                        _ => artifact("a", &format!("{name}-{round}-{} ", events.len() as u64 + next), append),
                    });
                    written |= matches!(events.last(), Some(event) if *event != status(S::Working));
                }
                let count = events.len() as u64;
                match self.roll(8).await {
                    // Dies, and perhaps wakes up again.
                    0 => {
                        zombies.push((begun, next));
                        break;
                    }
                    1 | 2 => {
                        let ends = [S::Completed, S::InputRequired, S::InputRequired, S::Failed];
                        let end = ends[usize::try_from(self.roll(4).await).expect("small")];
                        events.push(status(end));
                        if self.finish(&begun, next, events).await == Outcome::Canceled {
                            self.finish(&begun, next, vec![]).await;
                        }
                        break;
                    }
                    _ => {
                        steps += u32::from(self.roll(4).await == 0);
                        let step = (steps > 0).then_some(steps);
                        match self.record_step(&begun, next, events.clone(), step).await {
                            Outcome::Ok => {
                                if self.roll(3).await == 0 {
                                    // The same again, long after it was answered.
                                    self.record(&begun, next, events).await;
                                }
                                next += count;
                            }
                            Outcome::Canceled => {
                                self.finish(&begun, next, vec![]).await;
                                break;
                            }
                            Outcome::Fenced => break,
                        }
                    }
                }
            }
            if self.roll(2).await == 0
                && let Some((zombie, next)) = zombies.pop()
            {
                // Whether somebody took over is known before the write, and not undone by it.
                let stale = zombie.turn.fence < self.fence.load(Ordering::SeqCst);
                let text = format!("zombie-{name}-{round}");
                let recorded = self.record(&zombie, next, vec![artifact("z", &text, false)]).await;
                let finished = self.finish(&zombie, next, vec![status(S::Failed)]).await;
                if stale {
                    assert_ne!(recorded, Outcome::Ok, "a stale fence never writes");
                    assert_ne!(finished, Outcome::Ok, "a stale fence never ends a turn");
                }
            }
        }
    }

    /// Follows the task from wherever it is now, hanging up from time to time, and says what it must be.
    async fn watcher(&self, id: &str) -> Task {
        let mut dice = self.dice.lock().await.fork();
        let mut rebuilt = Task::default();
        let mut last = None;
        while !over(&rebuilt) {
            tokio::task::yield_now().await;
            let replica = usize::try_from(dice.roll(3)).expect("small");
            let resume = last.filter(|_| dice.roll(3) > 0);
            let mut stream = match self.world.watch_at(replica, id, resume, Follow::Task).await {
                Ok(stream) => stream,
                Err(error) if error.kind == Kind::UnsupportedOperation => {
                    // It has ended; the rest of it can still be read.
                    rebuilt = if last.is_none() { return self.world.get(id).await } else { rebuilt };
                    self.world.watch_at(replica, id, last, Follow::Task).await.expect("the rest")
                }
                Err(error) => panic!("{error:?}"),
            };
            for n in 0.. {
                if n > 0 && dice.roll(6) == 0 {
                    break;
                }
                let Some(update) = stream.next().await else {
                    assert!(over(&rebuilt), "a clean end of a task that goes on");
                    break;
                };
                let update = update.expect("no error");
                let event = update.event.expect("an event");
                let snapshot = matches!(event.payload, Some(Payload::Task(_)));
                if let (Some(last), false) = (last, snapshot) {
                    assert_eq!(update.number, last + 1, "nothing lost, nothing twice");
                }
                last = Some(update.number);
                fold(&mut rebuilt, event).expect("fits");
            }
        }
        rebuilt
    }
}

/// The artifacts that were not taken back.
fn visible(task: &Task) -> Vec<(String, String)> {
    let artifacts = task.artifacts.iter().filter(|artifact| artifact.metadata.is_none());
    artifacts.map(|artifact| (artifact.artifact_id.clone(), parts(&artifact.parts))).collect()
}

fn over(task: &Task) -> bool {
    state(task).is_terminal()
}

/// One task with follow-ups, two runners that die, watchers that come and go, and perhaps somebody who cancels.
async fn life(seed: u64) {
    let life = Life::new(seed);
    life.world.background();
    let queue = life.roll(2).await == 0;
    let cancels = life.roll(2).await == 0;
    life.flaky.chaos(Some(seed.wrapping_mul(3) | 1));
    let with = |send: Send| if queue { send.queue() } else { send };
    let sent = life.send(&with(Send::new("hi"))).await;
    let id = sent.id.as_str();
    let ended = async || {
        let task = life.world.calls_get(id).await;
        task.is_some_and(|task| over(&task))
    };
    let client = async {
        let mut messages = vec!["hi".to_owned()];
        while !ended().await {
            tokio::task::yield_now().await;
            let text = format!("m{}", messages.len());
            let send = with(Send::to(&sent, &text));
            let accepted = life
                .insist(|replica| life.world.replicas[replica].send(Request::new(send.0.clone())))
                .await
                .map(|_| messages.push(text));
            if let Err(refused) = accepted {
                assert!(matches!(refused.kind, Kind::UnsupportedOperation | Kind::QueueFull), "{refused:?}");
            }
        }
        messages
    };
    let canceler = async {
        if !cancels {
            return None;
        }
        for _ in 0..life.roll(200).await {
            tokio::task::yield_now().await;
        }
        Some(life.cancel(id).await)
    };
    let runners = join_all((0..2).map(|name| life.runner(name, ended)));
    let watchers = join_all((0..4).map(|_| life.watcher(id)));
    let (messages, canceled, _, rebuilt) = tokio::join!(client, canceler, runners, watchers);
    life.flaky.chaos(None);

    let task = life.world.get(id).await;
    match canceled {
        Some(Ok(canceled)) => {
            assert_eq!(state(&task), S::Canceled);
            assert_eq!(canceled.status, task.status);
        }
        Some(Err(refused)) => {
            assert_eq!(refused.kind, Kind::TaskNotCancelable);
            assert_ne!(state(&task), S::Canceled);
        }
        None => assert_ne!(state(&task), S::Canceled),
    }
    let log = all(life.world.watch(id, Some(0)).await.expect("the log")).await;
    let numbers: Vec<u64> = log.iter().map(|update| update.number).collect();
    assert_eq!(numbers, (1..=log.len() as u64).collect::<Vec<_>>(), "dense");
    let mut tokens = std::collections::BTreeSet::new();
    let mut states = vec![Task::default()];
    let mut taken_back = None;
    for (n, update) in log.iter().enumerate() {
        let mut next = states.last().expect("one").clone();
        fold(&mut next, update.event.clone().expect("an event")).expect("fits");
        for artifact in &next.artifacts {
            let empty = parts(&artifact.parts).is_empty();
            assert_eq!(artifact.metadata.is_some(), empty, "marked while there is nothing in it: {artifact:?}");
        }
        let known = |token: &str| tokens.contains(token);
        let restores = |update: &StreamResponse| match &update.payload {
            Some(Payload::ArtifactUpdate(update)) => {
                let text = parts(&update.artifact.as_ref().expect("an artifact").parts);
                !update.append && text.split_whitespace().all(known)
            }
            _ => false,
        };
        if let Some(kept) = taken_back {
            if restores(update.event.as_ref().expect("an event")) {
                states.push(next);
                continue;
            }
            let before: &Task = &states[kept];
            assert_eq!(visible(states.last().expect("one")), visible(before), "back to what is kept");
            taken_back = None;
        }
        states.push(next);
        match update.event.as_ref().and_then(|event| event.payload.as_ref()) {
            Some(Payload::StatusUpdate(status)) => {
                let terminal = status.status.as_ref().expect("a status").state().is_terminal();
                assert_eq!(terminal, n + 1 == log.len(), "one end, at the end");
                taken_back = kept_event(update.event.as_ref().expect("an event"));
            }
            Some(Payload::ArtifactUpdate(update)) => {
                let text = parts(&update.artifact.as_ref().expect("an artifact").parts);
                assert!(tokens.insert(text.trim().to_owned()), "no event twice");
            }
            other => panic!("{other:?}"),
        }
    }
    let mut folded = Task::default();
    for update in log {
        fold(&mut folded, update.event.expect("an event")).expect("fits");
    }
    let bare = |task: Task| Task { history: Vec::new(), ..task };
    for other in rebuilt.into_iter().chain([folded]) {
        assert_eq!(bare(other), bare(task.clone()));
    }
    // Every message that became a turn is there once, in order.
    let said = history(&task);
    let expected: Vec<_> = messages.iter().filter(|message| said.contains(message)).cloned().collect();
    assert_eq!(said, expected);
    if !queue {
        assert_eq!(said, messages, "what was accepted is there");
    }
    // Nothing is left behind: the context is free, and every entry settles.
    while let Some(run) = life.world.claim_after("last", std::time::Duration::ZERO).await {
        assert!(life.world.begin(&run).await.is_none());
    }
    assert_eq!(life.world.entries().await, 0);
    let next = Send::new("next").context(&task.context_id);
    life.world.send(next).await.expect("the context is free");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_a_task_ends_once_and_everybody_agrees(seed: u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::time::timeout(std::time::Duration::from_secs(60), life(seed)).await.expect("an end");
        });
    }
}
