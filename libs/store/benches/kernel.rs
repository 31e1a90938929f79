//! Tasks per second: three commits and a claim each, of the size that an echo task has.
//!
//! `cargo bench -p rialto-store` prints one line per engine and number of callers. `BENCH_SECONDS` is the time for
//! each, `BENCH_ONLY="durable 64"` picks one.

#![expect(clippy::disallowed_methods, reason = "this is a program of its own, and it measures")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use rialto_store::{
    At, Batch, Check, Claim, Engine, EntryId, Op,
    sqlite::{SqliteConfig, SqliteEngine},
};

const RUNS: &str = "runs:echo";

fn main() {
    let seconds = std::env::var("BENCH_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let only = std::env::var("BENCH_ONLY").ok();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    for (name, durable, in_memory) in [("durable", true, false), ("not synced", false, false), ("memory", false, true)]
    {
        for callers in [1, 64] {
            if only.as_ref().is_some_and(|only| *only != format!("{name} {callers}")) {
                continue;
            }
            let folder = tempfile::tempdir().expect("a folder");
            let path = (!in_memory).then(|| folder.path().to_owned());
            let config = SqliteConfig { path, shards: 1, durable, max_size: None };
            let engine: Arc<dyn Engine> = SqliteEngine::open(config).expect("a store");
            let (tasks, took, cpu) = runtime.block_on(measure(&engine, callers, Duration::from_secs(seconds)));
            let rate = tasks as f64 / took.as_secs_f64();
            let cost = cpu.as_micros() as f64 / tasks as f64;
            eprintln!("{name:>10}, {callers:>2} callers: {rate:>8.0} tasks/s, {cost:>6.0} µs CPU per task");
        }
    }
}

async fn measure(engine: &Arc<dyn Engine>, callers: usize, span: Duration) -> (u64, Duration, Duration) {
    let done = Arc::new(AtomicU64::new(0));
    let (start, cpu) = (Instant::now(), cpu_time());
    let end = start + span;
    let callers: Vec<_> = (0..callers)
        .map(|caller| {
            let (engine, done) = (Arc::clone(engine), Arc::clone(&done));
            tokio::spawn(async move {
                let mut n = 0;
                while Instant::now() < end {
                    n += 1;
                    task(&*engine, caller, n).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.expect("a caller");
    }
    (done.load(Ordering::Relaxed), start.elapsed(), cpu_time().saturating_sub(cpu))
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<i64> =
        stat.rsplit(')').next().unwrap_or_default().split(' ').filter_map(|f| f.parse().ok()).collect();
    // After the state: utime and stime are the 11th and 12th numbers, in hundredths of a second.
    let ticks = fields.get(10).unwrap_or(&0) + fields.get(11).unwrap_or(&0);
    Duration::from_millis(10 * ticks.unsigned_abs())
}

async fn task(engine: &dyn Engine, caller: usize, n: u64) {
    let time = engine.now();
    let id = format!("{time:013x}-{caller:04x}-{n:012x}00");
    engine.commit(submit(&id, time)).await.expect("submit");
    let claim = Claim {
        streams: vec![(0, RUNS.to_owned())],
        consumer: format!("bench-{caller}"),
        limit: 1,
        lease: Duration::from_secs(15),
        wait: Duration::from_secs(5),
    };
    let claimed = engine.claim(&claim).await.expect("claim").remove(0);
    let run = (claimed.entry.id, claim.consumer);
    let id = String::from_utf8(claimed.entry.payload[..33].to_vec()).expect("an id");
    engine.commit(begin(&id, time, &run)).await.expect("begin");
    engine.commit(finish(&id, time, &run)).await.expect("finish");
}

fn put(key: String, len: usize) -> Op {
    Op::Put { key, bytes: Bytes::from(vec![b'x'; len]) }
}

fn index(index: String, member: &str, was: Option<i64>, now: Option<i64>) -> Op {
    Op::Index { index, member: member.to_owned(), was, now }
}

fn log(id: &str, n: u64) -> Op {
    Op::Append {
        stream: format!("log:{id}"),
        at: At::Number(n),
        tag: 1,
        payload: Bytes::from(vec![b'e'; 200]),
        into: None,
    }
}

fn submit(id: &str, time: i64) -> Batch {
    let mut payload = id.as_bytes().to_vec();
    payload.resize(300, b' ');
    let run = Op::Append {
        stream: RUNS.to_owned(),
        at: At::Next,
        tag: 0,
        payload: payload.into(),
        into: Some((format!("t:{id}"), "run".to_owned())),
    };
    Batch {
        commit: Some((format!("t:{id}"), [1; 16])),
        checks: vec![
            Check::Absent { key: format!("t:{id}") },
            Check::Absent { key: format!("c:owner:{id}") },
            Check::ShorterThan { stream: RUNS.to_owned(), len: 10_000 },
        ],
        ops: vec![
            put(format!("t:{id}"), 350),
            put(format!("c:owner:{id}"), 150),
            index("i:owner".to_owned(), id, None, Some(time)),
            index(format!("i:owner:c:{id}"), id, None, Some(time)),
            index("i:owner:s:submitted".to_owned(), id, None, Some(time)),
            index("i:active".to_owned(), id, None, Some(time)),
            log(id, 1),
            run,
        ],
        ..Batch::default()
    }
}

fn pending((id, consumer): &(EntryId, String)) -> Check {
    Check::Pending { stream: RUNS.to_owned(), id: *id, consumer: consumer.clone() }
}

fn begin(id: &str, time: i64, run: &(EntryId, String)) -> Batch {
    Batch {
        commit: Some((format!("t:{id}"), [2; 16])),
        checks: vec![Check::Version { key: format!("t:{id}"), version: 1 }, pending(run)],
        ops: vec![
            put(format!("t:{id}"), 360),
            index("i:owner:s:submitted".to_owned(), id, Some(time), None),
            index("i:owner:s:working".to_owned(), id, None, Some(time)),
            log(id, 2),
            Op::Notify { topic: format!("t:{id}"), payload: "2".to_owned() },
        ],
        ..Batch::default()
    }
}

fn finish(id: &str, time: i64, run: &(EntryId, String)) -> Batch {
    Batch {
        commit: Some((format!("t:{id}"), [3; 16])),
        checks: vec![Check::Version { key: format!("t:{id}"), version: 2 }, pending(run)],
        ops: vec![
            put(format!("t:{id}"), 380),
            put(format!("c:owner:{id}"), 150),
            put(format!("a:{id}"), 200),
            index("i:owner:s:working".to_owned(), id, Some(time), None),
            index("i:owner:s:completed".to_owned(), id, None, Some(time)),
            index("i:active".to_owned(), id, Some(time), None),
            log(id, 3),
            Op::Ack { stream: RUNS.to_owned(), id: run.0 },
            Op::Notify { topic: format!("t:{id}"), payload: "3".to_owned() },
        ],
        releasing: true,
        ..Batch::default()
    }
}
