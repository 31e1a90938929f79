//! Redis goes down, or over to its replica, while tasks come in (50 a second): what was answered is done, and done
//! once. What Redis itself has forgotten can only be what came in shortly before.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use prost::Message as _;
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{self, RunEntry, task_store_server::TaskStore as Calls};
use rialto_store::{
    Claim, Claimed, Engine,
    redis::{RedisConfig, RedisEngine},
};
use rialto_task_store::Options;
use rialto_testkit::{
    chaos::ChaosProxy,
    redis::{Options as Server, SentinelGroup},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::{Request, Status};

use crate::world::*;

/// Between two messages.
const PACE: Duration = Duration::from_millis(20);

/// No call may take longer: the deadline of the engine, and a little for a busy machine.
const HANG: Duration = Duration::from_secs(7);

/// How long anything else may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A runner that is silent for this long has lost its turns.
const LEASE: Duration = Duration::from_secs(1);

/// Messages, runners, and what the world outside sees of them.
struct Traffic {
    world: World,
    sending: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// When each task was promised.
    answered: BTreeMap<String, Instant>,
    /// When the agent worked at each.
    executed: BTreeMap<String, Vec<Instant>>,
    longest: Duration,
}

impl Traffic {
    /// Starts to send, and two runners.
    async fn start(url: &str, tasks: &mut JoinSet<()>) -> Arc<Self> {
        let engine: Arc<dyn Engine> = RedisEngine::connect(RedisConfig::new(url)).await.unwrap();
        let options = Options { sweep_period: Duration::from_millis(500), ..Options::default() };
        let world = World::with(engine, 2, &options);
        world.background();
        let traffic = Arc::new(Self { world, sending: AtomicBool::new(true), seen: Mutex::default() });
        for name in ["r1", "r2"] {
            let traffic = Arc::clone(&traffic);
            tasks.spawn(async move { traffic.run(name).await });
        }
        let this = Arc::clone(&traffic);
        tasks.spawn(async move {
            let mut sends = JoinSet::new();
            while this.sending.load(Ordering::Relaxed) {
                let this = Arc::clone(&this);
                sends.spawn(async move { this.send().await });
                sleep(PACE).await;
            }
            sends.join_all().await;
        });
        traffic
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    fn took(&self, time: Duration) {
        let mut seen = self.seen();
        seen.longest = seen.longest.max(time);
    }

    /// Asks for as long as the store is away, as every caller does.
    async fn insist<T, F: Future<Output = Result<T, Status>>>(&self, call: impl Fn() -> F) -> Result<T, Error> {
        loop {
            let asked = Instant::now();
            let answer = call().await.map_err(|status| error(&status));
            self.took(asked.elapsed());
            match answer {
                Err(error) if error.kind == Kind::Unavailable => sleep(Duration::from_millis(50)).await,
                answer => return answer,
            }
        }
    }

    async fn send(&self) {
        let send = Send::new("hi");
        let sent = self.insist(|| Calls::send(self.world.calls(), Request::new(send.0.clone()))).await;
        let first = all(sent.expect("accepted").into_inner()).await.remove(0);
        self.seen().answered.insert(task(first).id, Instant::now());
    }

    async fn run(&self, name: &str) {
        let claim = Claim {
            streams: vec![(0, format!("runs:{AGENT}"))],
            consumer: name.into(),
            limit: 4,
            lease: LEASE,
            wait: Duration::from_millis(200),
        };
        loop {
            match self.world.engine.claim(&claim).await {
                Ok(claimed) => {
                    for claimed in claimed {
                        self.turn(name, claimed).await;
                    }
                }
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn turn(&self, name: &str, claimed: Claimed) {
        let run = RunEntry::decode(claimed.entry.payload).unwrap();
        let claim = tasks::Claim {
            shard: claimed.shard.into(),
            stream: claimed.stream,
            entry: claimed.entry.id.to_string(),
            consumer: name.into(),
        };
        let run = Run { run, claim };
        let begin = run.begin(100);
        let replica = &self.world.replicas[1];
        let begun = self.insist(|| replica.begin(Request::new(begin.clone()))).await;
        let Some(turn) = begun.expect("begins").into_inner().turn else { return };
        self.seen().executed.entry(run.run.task_id.clone()).or_default().push(Instant::now());
        let next = turn.next_event;
        let finish = Begun { run, turn }.finish(next, vec![status(S::Completed)]);
        self.insist(|| replica.finish(Request::new(finish.clone()))).await.expect("finishes");
    }

    /// Waits until every promised task has ended or is unknown; those are the answer, by when they were promised.
    async fn settle(&self) -> BTreeMap<String, Instant> {
        // One that has seen nothing yet: the others remember tasks that Redis has forgotten.
        let fresh = World::with(Arc::clone(&self.world.engine), 1, &Options::default());
        let mut lost = BTreeMap::new();
        let deadline = Instant::now() + PATIENCE;
        let answered = self.seen().answered.clone();
        for (id, at) in answered {
            loop {
                match fresh.get_as("", &id, None).await {
                    Ok(task) if state(&task).is_terminal() => {
                        assert_eq!(state(&task), S::Completed);
                        break;
                    }
                    Err(error) if error.kind == Kind::TaskNotFound => {
                        lost.insert(id, at);
                        break;
                    }
                    _ => assert!(Instant::now() < deadline, "{id} never ends"),
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
        lost
    }
}

/// Lets traffic run for a while, calls `fault` in the middle of it, and checks what became of everything.
/// `fault` says since when Redis may have forgotten something, and until when.
async fn survives(url: &str, fault: impl AsyncFnOnce() -> (Instant, Instant)) {
    let mut tasks = JoinSet::new();
    let traffic = Traffic::start(url, &mut tasks).await;
    sleep(Duration::from_secs(1)).await;
    let (from, to) = timeout(PATIENCE, fault()).await.expect("the fault happens");
    sleep(Duration::from_secs(1)).await;
    traffic.sending.store(false, Ordering::Relaxed);
    // The sender is the first of the three to end: the runners never do.
    timeout(PATIENCE, tasks.join_next()).await.expect("every message is answered").unwrap().unwrap();
    let lost = traffic.settle().await;
    let seen = traffic.seen();
    let (mut once, mut again) = (0, 0);
    for (id, times) in &seen.executed {
        match times[..] {
            [_] => once += 1,
            // Redis has forgotten that it was done.
            [first, _] if from <= first && first <= to => again += 1,
            _ => panic!("{id} was executed {} times", times.len()),
        }
    }
    for (id, at) in &lost {
        // The answer is a moment younger than the commit.
        assert!(from <= *at && *at <= to + Duration::from_millis(500), "{id} is lost without a reason");
    }
    let promised = seen.answered.len();
    eprintln!("{promised} promised, {once} done once, {again} twice, {} lost; {:?}", lost.len(), seen.longest);
    assert!(promised > 50 && once > 50, "there was traffic");
    assert!(once + again + lost.len() >= promised);
    assert!(seen.longest < HANG, "a call took {:?}", seen.longest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_killed_and_comes_back_forgets_two_seconds_at_most() {
    let server = Server::new().durable("everysec").start().await.unwrap();
    survives(&server.url(), async || {
        let killed = Instant::now();
        server.restart().await.unwrap();
        (killed - Duration::from_secs(2), killed)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_to_a_replica_that_lags_behind_forgets_only_what_it_did_not_get() {
    let group = SentinelGroup::start().await.unwrap();
    let [master, replica] = &group.servers;
    let link = ChaosProxy::start(master.address()).await.unwrap();
    let port = link.address().port().to_string();
    replica.command(&["REPLICAOF", "127.0.0.1", &port]).await.unwrap();
    group.replicated().await.unwrap();
    survives(&group.url(), async || {
        link.stall();
        let stalled = Instant::now();
        sleep(Duration::from_millis(500)).await;
        // A replica is sent what functions did, and runs none itself.
        let serves =
            async || replica.calls().await.is_ok_and(|calls| calls.iter().any(|(command, _)| command == "fcall"));
        let mut asked = None::<Instant>;
        while !serves().await {
            // A Sentinel may agree, and give it up again.
            if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(5)) {
                group.fail_over().await.unwrap();
                asked = Some(Instant::now());
            }
            sleep(Duration::from_millis(5)).await;
        }
        (stalled - Duration::from_millis(100), Instant::now())
    })
    .await;
}
