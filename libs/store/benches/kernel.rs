//! Tasks per second: a bare loop of the three commits and the claim that an echo task takes, and nothing else.
//!
//! `cargo bench -p rialto-store` prints one line per engine and number of callers: tasks per second, and the CPU time
//! per task of this process and of Redis, and the commands that Redis ran. `BENCH_SECONDS` is the time for each, `BENCH_ONLY="durable 64"` picks one.

#![expect(clippy::disallowed_methods, reason = "this is a program of its own, and it measures")]

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use rialto_store::{
    At, Batch, Check, Claim, Claimed, Engine, EntryId, Op,
    redis::{RedisConfig, RedisEngine},
    sqlite::{SqliteConfig, SqliteEngine},
};
use rialto_testkit::redis::{Options, RedisServer};
use tokio::sync::oneshot;

const RUNS: &str = "runs:echo";

/// Owns every claim.
const CONSUMER: &str = "bench";

/// Claims at once, as of an agent with so many slots.
const SLOTS: usize = 64;

fn main() {
    let seconds = std::env::var("BENCH_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let only = std::env::var("BENCH_ONLY").ok();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    for name in ["durable", "not synced", "memory", "redis", "redis everysec", "redis always"] {
        for callers in [1, 64] {
            if only.as_ref().is_some_and(|only| *only != format!("{name} {callers}")) {
                continue;
            }
            let folder = tempfile::tempdir().expect("a folder");
            let redis = name.strip_prefix("redis").map(|fsync| {
                let options = match fsync.trim() {
                    "" => Options::new(),
                    fsync => Options::new().durable(fsync),
                };
                runtime.block_on(options.start()).expect("redis-server")
            });
            let engine: Arc<dyn Engine> = match &redis {
                Some(server) => {
                    runtime.block_on(RedisEngine::connect(RedisConfig::new(server.url()))).expect("a store")
                }
                None => {
                    let path = (name != "memory").then(|| folder.path().to_owned());
                    let config = SqliteConfig { path, shards: 1, durable: name == "durable", max_size: None };
                    SqliteEngine::open(config).expect("a store")
                }
            };
            let span = Duration::from_secs(seconds);
            let line = runtime.block_on(measure(&engine, redis.as_ref(), callers, span));
            eprintln!("{name:>14}, {callers:>2} callers: {line}");
        }
    }
}

async fn measure(engine: &Arc<dyn Engine>, redis: Option<&RedisServer>, callers: usize, span: Duration) -> String {
    let bench = Arc::new(Bench { engine: Arc::clone(engine), waiting: Mutex::default(), done: AtomicU64::new(0) });
    let runner = tokio::spawn(run(Arc::clone(&bench)));
    let redis_before = redis_cpu(redis).await;
    let (start, cpu) = (Instant::now(), own_cpu());
    let end = start + span;
    let callers: Vec<_> = (0..callers)
        .map(|caller| {
            let bench = Arc::clone(&bench);
            tokio::spawn(async move {
                for n in 0.. {
                    if Instant::now() >= end {
                        break;
                    }
                    bench.send(caller, n).await;
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.expect("a caller");
    }
    let (took, cpu) = (start.elapsed(), own_cpu().saturating_sub(cpu));
    let redis_cpu = redis_cpu(redis).await - redis_before;
    runner.abort();
    let tasks = bench.done.load(Ordering::Relaxed) as f64;
    let rate = tasks / took.as_secs_f64();
    let own = cpu.as_micros() as f64 / tasks;
    match redis {
        Some(redis) => {
            let commands: u64 = redis.calls().await.expect("statistics").iter().map(|(_, calls)| calls).sum();
            let (cpu, commands) = (redis_cpu * 1e6 / tasks, commands as f64 / tasks);
            format!("{rate:>8.0} tasks/s, {own:>6.0} + {cpu:>6.0} µs CPU and {commands:.0} commands per task")
        }
        None => format!("{rate:>8.0} tasks/s, {own:>6.0} µs CPU per task"),
    }
}

/// User and system time of this process.
fn own_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<i64> =
        stat.rsplit(')').next().unwrap_or_default().split(' ').filter_map(|f| f.parse().ok()).collect();
    // After the state: utime and stime are the 11th and 12th numbers, in hundredths of a second.
    let ticks = fields.get(10).unwrap_or(&0) + fields.get(11).unwrap_or(&0);
    Duration::from_millis(10 * ticks.unsigned_abs())
}

/// The same of Redis, in seconds.
async fn redis_cpu(redis: Option<&RedisServer>) -> f64 {
    let Some(redis) = redis else { return 0.0 };
    let time = async |field: &str| redis.info(field).await.expect("a number");
    time("used_cpu_user").await + time("used_cpu_sys").await
}

/// What callers and the runner share.
struct Bench {
    engine: Arc<dyn Engine>,
    /// Who waits for which task.
    waiting: Mutex<HashMap<String, oneshot::Sender<()>>>,
    done: AtomicU64,
}

impl Bench {
    fn waiting(&self) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<()>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message and waits until its task has ended.
    async fn send(&self, caller: usize, n: u64) {
        let time = self.engine.now();
        let id = format!("{time:013x}-{caller:04x}-{n:012x}00");
        let (tell, told) = oneshot::channel();
        self.waiting().insert(id.clone(), tell);
        self.engine.commit(submit(&id, time)).await.expect("submit");
        told.await.expect("an end");
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs a turn.
    async fn turn(&self, claimed: Claimed) {
        let id = std::str::from_utf8(&claimed.entry.payload[..33]).expect("an id");
        let time = i64::from_str_radix(&id[..13], 16).expect("a time");
        self.engine.commit(begin(id, time, claimed.entry.id)).await.expect("begin");
        self.engine.commit(finish(id, time, claimed.entry.id)).await.expect("finish");
        self.waiting().remove(id).and_then(|tell| tell.send(()).ok()).expect("a caller");
    }
}

/// Claims turns and runs them side by side.
async fn run(bench: Arc<Bench>) {
    let slots = Arc::new(tokio::sync::Semaphore::new(SLOTS));
    loop {
        let free = slots.available_permits();
        if free == 0 {
            drop(slots.acquire().await);
            continue;
        }
        let claim = Claim {
            streams: vec![(0, RUNS.to_owned())],
            consumer: CONSUMER.to_owned(),
            limit: free,
            lease: Duration::from_secs(15),
            wait: Duration::from_secs(5),
        };
        for claimed in bench.engine.claim(&claim).await.expect("claim") {
            let slot = Arc::clone(&slots).acquire_owned().await.expect("never closed");
            let bench = Arc::clone(&bench);
            tokio::spawn(async move {
                bench.turn(claimed).await;
                drop(slot);
            });
        }
    }
}

fn put(key: String, len: usize) -> Op {
    Op::Put { key, bytes: Bytes::from(vec![b'x'; len]) }
}

/// Moves a task from one state to another, in the lists of its caller and of its context.
fn list(id: &str, was: Option<(u8, i64)>, now: (u8, i64), ops: &mut Vec<Op>) {
    let mut index = |index: String, was, now| ops.push(Op::Index { index, member: id.to_owned(), was, now });
    for set in ["i:0123456789abcdefghij".to_owned(), format!("i:0123456789abcdefghij:c:{id}")] {
        index(set.clone(), was.map(|(_, time)| time), Some(now.1));
        if let Some((state, time)) = was {
            index(format!("{set}/{state}"), Some(time), None);
        }
        index(format!("{set}/{}", now.0), None, Some(now.1));
    }
}

fn row(index: &str, id: &str, was: Option<i64>, now: Option<i64>) -> Op {
    Op::Index { index: index.to_owned(), member: id.to_owned(), was, now }
}

fn notify(id: &str, n: u64) -> Op {
    Op::Notify { topic: "events".to_owned(), payload: format!("{id} {n}") }
}

fn submit(id: &str, time: i64) -> Batch {
    let mut payload = id.as_bytes().to_vec();
    payload.resize(120, b' ');
    let run = Op::Append {
        stream: RUNS.to_owned(),
        at: At::Next,
        tag: 0,
        payload: payload.into(),
        into: Some((format!("t:{id}"), "run".to_owned())),
    };
    let mut ops =
        vec![put(format!("t:{id}"), 450), put(format!("c:owner:{id}"), 100), row("active", id, None, Some(time))];
    list(id, None, (1, time), &mut ops);
    ops.push(run);
    Batch {
        commit: Some((format!("t:{id}"), [1; 16])),
        checks: vec![
            Check::Absent { key: format!("t:{id}") },
            Check::Absent { key: format!("c:owner:{id}") },
            Check::ShorterThan { stream: RUNS.to_owned(), len: 10_000 },
        ],
        ops,
        ..Batch::default()
    }
}

fn begin(id: &str, time: i64, run: EntryId) -> Batch {
    let mut ops = vec![put(format!("t:{id}"), 550)];
    list(id, Some((1, time)), (2, time + 1), &mut ops);
    ops.push(notify(id, 2));
    Batch {
        commit: Some((format!("t:{id}"), [2; 16])),
        checks: vec![
            Check::Pending { stream: RUNS.to_owned(), id: run, consumer: CONSUMER.to_owned() },
            Check::Version { key: format!("t:{id}"), version: 1 },
        ],
        ops,
        releasing: true,
        deferred: true,
        ..Batch::default()
    }
}

fn finish(id: &str, time: i64, run: EntryId) -> Batch {
    let mut ops = vec![
        put(format!("t:{id}"), 850),
        put(format!("c:owner:{id}"), 60),
        row("active", id, Some(time), None),
        Op::Ack { stream: RUNS.to_owned(), id: run },
    ];
    list(id, Some((2, time + 1)), (3, time + 2), &mut ops);
    ops.push(notify(id, 4));
    Batch {
        commit: Some((format!("t:{id}"), [3; 16])),
        checks: vec![
            Check::Version { key: format!("t:{id}"), version: 2 },
            Check::Version { key: format!("c:owner:{id}"), version: 1 },
        ],
        ops,
        releasing: true,
        ..Batch::default()
    }
}
