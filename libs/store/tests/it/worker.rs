//! The worker loop, on an engine in memory, mostly in time that the test winds forward.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use rialto_store::{
    Batch, Claim, Claimed, Committed, Consumer, Depth, Engine, Entry, EntryId, Error, IndexQuery, Millis, Notices,
    ReadLimit, Record, Result, Shard,
    sqlite::{SqliteConfig, SqliteEngine},
    suite::draft::Home,
    worker::{self, DEAD, DeadEntry, Handler, Held, Outcome, Verdict, Work, Worker, consumer_name},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// An engine that counts calls, and fails when told to.
#[derive(Debug)]
struct Flaky {
    inner: Arc<dyn Engine>,
    down: AtomicBool,
    claims: AtomicUsize,
    heartbeats: AtomicUsize,
    commits: AtomicUsize,
    ticks: AtomicUsize,
}

impl Flaky {
    fn new() -> Arc<Self> {
        let inner = SqliteEngine::open(SqliteConfig::memory(1)).unwrap();
        let (claims, heartbeats, commits, ticks) = Default::default();
        Arc::new(Self { inner, down: AtomicBool::new(false), claims, heartbeats, commits, ticks })
    }

    fn counted(&self, count: &AtomicUsize) -> Result<()> {
        count.fetch_add(1, SeqCst);
        if self.down.load(SeqCst) { Err(Error::Unavailable("unplugged".to_owned())) } else { Ok(()) }
    }
}

#[async_trait]
impl Engine for Flaky {
    fn shards(&self) -> Shard {
        self.inner.shards()
    }
    fn now(&self) -> Millis {
        self.inner.now()
    }
    async fn commit(&self, batch: Batch) -> Result<Committed> {
        self.counted(&self.commits)?;
        self.inner.commit(batch).await
    }
    async fn get(&self, shard: Shard, keys: &[&str]) -> Result<Vec<Option<Record>>> {
        self.inner.get(shard, keys).await
    }
    async fn read(&self, shard: Shard, stream: &str, after: EntryId, limit: ReadLimit) -> Result<Vec<Entry>> {
        self.inner.read(shard, stream, after, limit).await
    }
    async fn read_last(&self, shard: Shard, stream: &str, n: usize) -> Result<Vec<Entry>> {
        self.inner.read_last(shard, stream, n).await
    }
    async fn index(&self, shard: Shard, query: &IndexQuery) -> Result<Vec<(i64, String)>> {
        self.inner.index(shard, query).await
    }
    async fn index_count(&self, shard: Shard, index: &str, min: Option<i64>) -> Result<u64> {
        self.inner.index_count(shard, index, min).await
    }
    async fn claim(&self, claim: &Claim) -> Result<Vec<Claimed>> {
        self.counted(&self.claims)?;
        self.inner.claim(claim).await
    }
    async fn heartbeat(&self, shard: Shard, stream: &str, consumer: &str, ids: &[EntryId]) -> Result<Vec<bool>> {
        self.counted(&self.heartbeats)?;
        self.inner.heartbeat(shard, stream, consumer, ids).await
    }
    async fn tick(&self, shard: Shard, streams: &[String]) -> Result<u64> {
        self.counted(&self.ticks)?;
        self.inner.tick(shard, streams).await
    }
    async fn depth(&self, shard: Shard, stream: &str) -> Result<Depth> {
        self.inner.depth(shard, stream).await
    }
    async fn consumers(&self, shard: Shard, stream: &str) -> Result<Vec<Consumer>> {
        self.inner.consumers(shard, stream).await
    }
    async fn listen(&self, shard: Shard, topic: &str) -> Result<Notices> {
        self.inner.listen(shard, topic).await
    }
}

/// What a handler does with an entry is written in it: `<name> <what>`.
#[derive(Debug, Default)]
struct Script {
    /// By name: how often it was started.
    started: Mutex<HashMap<String, usize>>,
    ended: Mutex<Vec<String>>,
    running: AtomicUsize,
    most: AtomicUsize,
    cancel: AtomicBool,
}

struct Gone<'a>(&'a AtomicUsize);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[async_trait]
impl Handler for Script {
    async fn handle(&self, work: Work) -> Outcome {
        let text = String::from_utf8(work.claimed.entry.payload.to_vec()).unwrap();
        let (name, what) = text.split_once(' ').unwrap();
        let times = {
            let mut started = self.started.lock().unwrap();
            let times = started.entry(name.to_owned()).or_default();
            *times += 1;
            *times
        };
        self.most.fetch_max(self.running.fetch_add(1, SeqCst) + 1, SeqCst);
        let _gone = Gone(&self.running);
        let outcome = match what {
            "ack" => Outcome::Ack,
            "nap" => {
                sleep(Duration::from_millis(50)).await;
                Outcome::Ack
            }
            "minute" => {
                sleep(Duration::from_secs(60)).await;
                Outcome::Ack
            }
            "once-back" if times == 1 => Outcome::HandBack,
            "once-retry" if times == 1 => Outcome::Retry { after: Duration::from_millis(60) },
            "bury" => Outcome::Bury { reason: "no good".to_owned() },
            "once-panic" if times == 1 => panic!("once"),
            "panic" => panic!("always, {name}"),
            "lost" => {
                work.lost.cancelled().await;
                Outcome::Ack
            }
            "canceled" => {
                work.canceled.cancelled().await;
                Outcome::Ack
            }
            "polite" => {
                work.stopping.cancelled().await;
                Outcome::HandBack
            }
            "stubborn" => std::future::pending().await,
            _ => Outcome::Ack,
        };
        self.ended.lock().unwrap().push(name.to_owned());
        outcome
    }

    async fn heartbeat(&self, engine: &dyn Engine, held: &[Held]) -> Result<Vec<Verdict>> {
        let mut verdicts = worker::heartbeat(engine, held).await?;
        if self.cancel.load(SeqCst) {
            verdicts.fill(Verdict::Canceled);
        }
        Ok(verdicts)
    }
}

impl Script {
    fn started(&self, name: &str) -> usize {
        self.started.lock().unwrap().get(name).copied().unwrap_or(0)
    }
}

/// A running worker.
struct Run {
    engine: Arc<Flaky>,
    home: Home,
    script: Arc<Script>,
    stop: CancellationToken,
    running: JoinHandle<()>,
}

const GRACE: Duration = Duration::from_secs(8);

fn start(engine: &Arc<Flaky>, slots: usize) -> Run {
    let worker = Worker {
        engine: Arc::clone(engine) as Arc<dyn Engine>,
        streams: vec![(0, "s".to_owned()), (0, "t".to_owned())],
        consumer: consumer_name("test"),
        slots,
        lease: Duration::from_secs(15),
        heartbeat: Duration::from_secs(5),
        tick: None,
    };
    let (script, stop) = (Arc::new(Script::default()), CancellationToken::new());
    let running = tokio::spawn(worker.run(Arc::clone(&script), stop.clone(), GRACE));
    let home = Home::new(Arc::clone(&engine.inner));
    Run { engine: Arc::clone(engine), home, script, stop, running }
}

impl Run {
    async fn until(&self, what: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !what(self) {
            assert!(start.elapsed() < Duration::from_secs(600), "{:?}", self.script);
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn ended(&self, count: usize) {
        self.until(|run| run.script.ended.lock().unwrap().len() >= count).await;
    }

    async fn depth(&self) -> (u64, u64) {
        let depth = self.home.engine.depth(0, "s").await.unwrap();
        (depth.waiting, depth.pending)
    }

    /// Stops it; says how long that took.
    async fn stop(self) -> Duration {
        let start = Instant::now();
        self.stop.cancel();
        self.running.await.unwrap();
        start.elapsed()
    }
}

#[tokio::test(start_paused = true)]
async fn slots_bound_what_runs_and_everything_runs_once() {
    let run = start(&Flaky::new(), 4);
    for n in 0..50 {
        run.home.give(if n % 2 == 0 { "s" } else { "t" }, &[&format!("{n} nap")]).await;
    }
    run.ended(50).await;
    assert_eq!(run.script.most.load(SeqCst), 4);
    assert!((0..50).all(|n| run.script.started(&n.to_string()) == 1));
    run.until(|run| run.engine.commits.load(SeqCst) == 50).await;
    assert_eq!(run.home.engine.depth(0, "t").await.unwrap(), Depth::default());
    assert_eq!(run.depth().await, (0, 0));
    // While all slots are taken nothing is claimed: it stays for others.
    for n in 0..6 {
        run.home.give("s", &[&format!("full{n} minute")]).await;
    }
    run.until(|run| run.script.running.load(SeqCst) == 4).await;
    assert_eq!(run.depth().await, (2, 4));
    run.ended(56).await;
    assert!(run.stop().await < Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn a_long_task_stays_ours_by_few_calls() {
    let engine = Flaky::new();
    let (one, two) = (start(&engine, 2), start(&engine, 2));
    one.home.give("s", &["a minute", "b minute", "c minute"]).await;
    one.until(|_| one.script.running.load(SeqCst) + two.script.running.load(SeqCst) == 3).await;
    let (before, claims) = (engine.heartbeats.load(SeqCst), engine.claims.load(SeqCst));
    one.until(|_| one.script.ended.lock().unwrap().len() + two.script.ended.lock().unwrap().len() == 3).await;
    for name in ["a", "b", "c"] {
        assert_eq!(one.script.started(name) + two.script.started(name), 1);
    }
    // One call per worker and 5 s, however many entries of a stream it holds.
    let beats = engine.heartbeats.load(SeqCst) - before;
    assert!((22..=26).contains(&beats), "{beats} heartbeats");
    assert!(engine.claims.load(SeqCst) - claims < 30);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn who_lost_an_entry_is_told_and_writes_nothing() {
    let run = start(&Flaky::new(), 2);
    run.home.give("s", &["a lost"]).await;
    run.until(|run| run.script.started("a") == 1).await;
    sleep(Duration::from_secs(1)).await;
    let claim = Claim { lease: Duration::ZERO, ..run.home.claim("s", "thief", 1) };
    assert_eq!(run.home.engine.claim(&claim).await.unwrap().len(), 1);
    run.ended(1).await;
    sleep(Duration::from_secs(20)).await;
    assert_eq!((run.depth().await, run.engine.commits.load(SeqCst)), ((0, 1), 0));
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn canceled_work_is_told_so() {
    let run = start(&Flaky::new(), 2);
    run.home.give("s", &["a canceled"]).await;
    run.until(|run| run.script.started("a") == 1).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!(run.script.ended.lock().unwrap().len(), 0);
    run.script.cancel.store(true, SeqCst);
    run.ended(1).await;
    run.until(|run| run.engine.commits.load(SeqCst) == 1).await;
    assert_eq!(run.depth().await, (0, 0));
    run.stop().await;
}

#[tokio::test]
async fn outcomes_are_carried_out() {
    let run = start(&Flaky::new(), 4);
    run.home.give("s", &["a ack", "b once-back", "c once-retry", "d bury"]).await;
    run.ended(6).await;
    run.until(|run| run.engine.commits.load(SeqCst) == 6).await;
    let times = ["a", "b", "c", "d"].map(|name| run.script.started(name));
    assert_eq!(times, [1, 2, 2, 1]);
    assert_eq!(run.home.engine.depth(0, "s").await.unwrap(), Depth::default());
    let dead = run.home.entries(DEAD).await;
    let dead = DeadEntry::decode(&dead[0].payload).unwrap();
    assert_eq!((&dead.payload[..], &dead.reason[..], dead.deliveries), (&b"d bury"[..], "no good", 1));
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_a_crash_and_poison_ends_in_the_dead_stream() {
    let run = start(&Flaky::new(), 2);
    run.home.give("s", &["a once-panic", "b panic", "c ack"]).await;
    run.ended(2).await;
    assert_eq!((run.script.started("a"), run.script.started("c")), (2, 1));
    let start = Instant::now();
    while run.home.entries(DEAD).await.is_empty() {
        sleep(Duration::from_millis(50)).await;
        assert!(start.elapsed() < Duration::from_secs(120));
    }
    let dead = DeadEntry::decode(&run.home.entries(DEAD).await[0].payload).unwrap();
    assert_eq!(dead.reason, "the handler panicked, delivery 10: always, b");
    assert_eq!(run.script.started("b"), 10);
    assert_eq!(run.depth().await, (0, 0));
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_hands_back_at_once_what_does_not_end() {
    let engine = Flaky::new();
    // Nothing to do: nothing to wait for.
    let run = start(&engine, 4);
    sleep(Duration::from_secs(1)).await;
    assert!(run.stop().await < Duration::from_millis(100));

    let run = start(&engine, 4);
    run.home.give("s", &["a polite", "b nap"]).await;
    run.until(|run| run.script.running.load(SeqCst) == 2).await;
    let home = run.home.clone();
    assert!(run.stop().await < Duration::from_secs(1));
    assert_eq!(home.payloads("s").await, ["a polite"]);
    let again = home.take("s", "other", 9).await;
    assert_eq!((again.len(), again[0].deliveries), (1, 2));
    home.batch().ack("s", again[0].entry.id).commit().await.unwrap();

    let run = start(&engine, 4);
    run.home.give("s", &["c stubborn", "d minute", "e polite"]).await;
    run.until(|run| run.script.running.load(SeqCst) == 3).await;
    run.home.give("s", &["f stubborn"]).await;
    run.until(|run| run.script.running.load(SeqCst) == 4).await;
    let (home, script) = (run.home.clone(), Arc::clone(&run.script));
    let stopping = tokio::spawn(run.stop());
    sleep(Duration::from_secs(1)).await;
    home.give("s", &["g ack"]).await;
    let took = stopping.await.unwrap();
    assert!(took >= GRACE && took < GRACE + Duration::from_millis(500), "{took:?}");
    assert_eq!((script.running.load(SeqCst), script.started("g")), (0, 0));
    // In their order, without waiting for a lease.
    let texts: Vec<_> = home.take("s", "other", 9).await.iter().map(|one| one.entry.payload.clone()).collect();
    assert_eq!(texts, ["c stubborn", "d minute", "e polite", "f stubborn", "g ack"]);
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_waited_for_with_patience() {
    let engine = Flaky::new();
    let run = start(&engine, 4);
    run.home.give("s", &["a nap"]).await;
    run.until(|run| run.script.running.load(SeqCst) == 1).await;
    engine.down.store(true, SeqCst);
    let (claims, commits) = (engine.claims.load(SeqCst), engine.commits.load(SeqCst));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(run.script.ended.lock().unwrap().len(), 1, "what runs goes on");
    let (claims, commits) = (engine.claims.load(SeqCst) - claims, engine.commits.load(SeqCst) - commits);
    assert!((10..30).contains(&claims), "{claims} claims in a minute without a store");
    assert!((10..30).contains(&commits), "{commits} commits in a minute without a store");
    engine.down.store(false, SeqCst);
    run.home.give("s", &["b ack"]).await;
    let start = Instant::now();
    run.ended(2).await;
    assert!(start.elapsed() <= Duration::from_secs(6), "{:?}", start.elapsed());
    sleep(Duration::from_secs(6)).await;
    assert_eq!(run.depth().await, (0, 0));
    assert_eq!(run.script.started("a"), 1);
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_slots_were_taken_in_an_outage_takes_nothing_from_the_living() {
    let engine = Flaky::new();
    let run = start(&engine, 1);
    run.home.give("s", &["a minute"]).await;
    run.until(|run| run.script.started("a") == 1).await;
    run.home.give("s", &["b ack"]).await;
    let theirs = run.home.take("s", "other", 1).await;
    // With no slot free it claims nothing, and learns of the outage from its signs of life alone.
    engine.down.store(true, SeqCst);
    sleep(Duration::from_secs(59)).await;
    engine.down.store(false, SeqCst);
    run.ended(1).await;
    sleep(Duration::from_secs(6)).await;
    assert_eq!(run.script.started("b"), 0, "nobody could be heard");
    assert_eq!(engine.inner.heartbeat(0, "s", "other", &[theirs[0].entry.id]).await.unwrap(), [true]);
    // Silence that no outage explains counts as before.
    let start = Instant::now();
    run.until(|run| run.script.started("b") == 1).await;
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn idleness_costs_nearly_nothing() {
    let engine = Flaky::new();
    let run = start(&engine, 4);
    sleep(Duration::from_secs(60)).await;
    let calls = engine.claims.load(SeqCst) + engine.heartbeats.load(SeqCst) + engine.commits.load(SeqCst);
    assert!(calls <= 13, "{calls} calls in an idle minute");
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn due_entries_are_moved_when_asked_to() {
    let engine = Flaky::new();
    let worker = Worker {
        engine: Arc::clone(&engine) as Arc<dyn Engine>,
        streams: vec![(0, "s".to_owned())],
        consumer: consumer_name("test"),
        slots: 1,
        lease: Duration::from_secs(15),
        heartbeat: Duration::from_secs(5),
        tick: Some(Duration::from_secs(1)),
    };
    let stop = CancellationToken::new();
    let running = tokio::spawn(worker.run(Arc::new(Script::default()), stop.clone(), GRACE));
    sleep(Duration::from_millis(10_500)).await;
    assert_eq!(engine.ticks.load(SeqCst), 10);
    stop.cancel();
    running.await.unwrap();
}

#[test]
fn consumer_names_differ() {
    let (one, two) = (consumer_name("runner"), consumer_name("runner"));
    assert!(one.starts_with("runner-") && one != two);
    assert!(one.contains(&format!("-{}-", std::process::id())));
}
