//! More processes, more work, many who look on, and nothing to do.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use futures::{StreamExt as _, future::join_all, stream};
use rialto_testkit::cluster::{Cluster, Process};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    caller::patiently,
    wire::{Binding, Wire, http, http2},
};

/// Patience with states that are waited for.
const PATIENCE: Duration = Duration::from_secs(100);

/// An agent at `/` that takes eight turns at a time, and one that echoes.
const AGENTS: &str = "\
limits: {keep-alive: 1500ms}
agents:
  - id: scripted
    max-concurrent: 8
    max-waiting: 0
    backend: {type: command, command: [scripted_agent], persistent: true, env: {SCRIPTED_COUNTERS: $COUNTERS}}
  - {id: echo, mount: /echo, max-waiting: 0, backend: echo}
";

/// Everything but runners.
async fn without_runners(runners: usize) -> Cluster {
    let cluster = Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(AGENTS).runners(runners);
    let cluster = cluster.prepare().await.unwrap();
    for process in cluster.gateways.iter().chain(&cluster.task_stores) {
        process.spawn().unwrap();
    }
    for process in cluster.gateways.iter().chain(&cluster.task_stores) {
        process.ready().await.unwrap();
    }
    cluster
}

fn wire(cluster: &Cluster, mount: &str) -> Wire {
    Wire::new(&http(), &cluster.gateways[0].url(), mount, Binding::Rest)
}

/// Has so many turns wait; returns the id of the last task.
async fn queue(wire: &Wire, text: &str, turns: usize) -> String {
    let message = json!({"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]});
    let params = json!({"message": message, "configuration": {"returnImmediately": true}});
    let (params, salt) = (&params, format!("{:?}", Instant::now()));
    let sends = (0..turns).map(|n| {
        let key = format!("{}{n}", salt.replace(|c: char| !c.is_ascii_digit(), ""));
        async move { patiently(|| wire.send(params, &key)).await.unwrap()["task"]["id"].as_str().unwrap().to_owned() }
    });
    let ids: Vec<_> = stream::iter(sends).buffer_unordered(16).collect().await;
    ids.last().unwrap().clone()
}

async fn until(what: &str, mut state: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !state().await {
        assert!(Instant::now() < end, "waited {PATIENCE:?} in vain until {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Turns per second that so many runners get through, by the clocks of the agents, while there is enough to do.
async fn rate(cluster: &Cluster, runners: usize, wait: u64) -> f64 {
    let key = format!("scale-{runners}");
    let slots = runners * 8;
    // As many as they need for their start, and then for some rounds.
    let turns = slots * 12;
    queue(&wire(cluster, ""), &format!("work:{key}:2x{wait}"), turns).await;
    let runners = &cluster.runners[..runners];
    for runner in runners {
        runner.spawn().unwrap();
    }
    join_all(runners.iter().map(Process::ready)).await.into_iter().for_each(Result::unwrap);
    let ends = || -> Vec<u64> {
        let counted = cluster.counted(&key).into_iter();
        let mut ends: Vec<_> = counted.filter(|it| it["n"] == 2).map(|it| it["at"].as_u64().unwrap()).collect();
        ends.sort_unstable();
        ends
    };
    until("all turns are done", async || ends().len() == turns).await;
    runners.iter().for_each(Process::kill);
    let ends = ends();
    let (from, to) = (slots * 4, turns - slots);
    1000.0 * (to - from) as f64 / (ends[to] - ends[from]) as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twice_the_runners_do_twice_the_work() {
    // The agent waits, so that two cores are enough for four runners; a quick build needs less of a pause.
    let wait = if cfg!(debug_assertions) { 600 } else { 50 };
    let cluster = without_runners(4).await;
    let rates = [rate(&cluster, 1, wait).await, rate(&cluster, 2, wait).await, rate(&cluster, 4, wait).await];
    println!("1, 2 and 4 runners, turns of {wait} ms: {rates:.1?} turns/s");
    assert!(rates[1] / rates[0] >= 1.9 && rates[2] / rates[0] >= 3.6, "{rates:?}");
}

/// Redis commands for each of the first and of the last turns of a long queue.
pub(crate) async fn drain(turns: usize) -> [f64; 2] {
    let cluster = without_runners(1).await;
    queue(&wire(&cluster, "/echo"), "hello", turns).await;
    cluster.runners[0].spawn().unwrap();
    let redis = cluster.redis();
    // Turns done, and commands so far, without those of this test.
    let state = async || {
        let left = redis.command(&["XLEN", "rialto:{s0}:runs:echo"]).await.unwrap().int();
        let calls = redis.calls().await.unwrap();
        let calls: u64 = calls.iter().filter(|(name, _)| name != "xlen").map(|(_, calls)| calls).sum();
        (turns - usize::try_from(left).unwrap(), calls)
    };
    let mut marks = Vec::new();
    for part in [1, 3, 7, 9] {
        until("the queue is shorter", async || {
            let (done, calls) = state().await;
            let reached = done >= turns * part / 10;
            if reached {
                marks.push((done, calls));
            }
            reached
        })
        .await;
    }
    let cost = |from: usize| {
        let [(done, calls), (done_then, calls_then)] = [marks[from], marks[from + 1]];
        (calls_then - calls) as f64 / (done_then - done).max(1) as f64
    };
    [cost(0), cost(2)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_a_long_queue_costs_what_one_of_a_short_queue_costs() {
    let [first, last] = drain(2_000).await;
    println!("2,000 waiting turns: {first:.1} Redis commands for each of the first, {last:.1} of the last");
    assert!((0.75..1.33).contains(&(last / first)), "{first} and {last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_subscribers_see_all_events_in_order() {
    const EVENTS: u64 = 30;
    let cluster = without_runners(1).await;
    let task = queue(&wire(&cluster, ""), &format!("chunks:{EVENTS}x20"), 1).await;
    // Ten connections of two hundred streams each.
    let connections: Vec<_> =
        (0..10).map(|n| Wire::new(&http2(), &cluster.gateways[n % 2].url(), "", Binding::Rest)).collect();
    let wires = (0..2_000).map(|n| connections[n % 10].clone());
    let task = task.as_str();
    let opened = stream::iter(wires).map(async |wire| {
        let mut events = wire.subscribe(task, None).await.unwrap();
        // The snapshot says that it is in.
        let (first, event) = events.next().await.unwrap().unwrap();
        assert!(event.get("task").is_some(), "{event}");
        (events, first)
    });
    let opened: Vec<_> = opened.buffer_unordered(64).collect().await;
    cluster.runners[0].spawn().unwrap();
    let read = opened.into_iter().map(async |(mut events, mut last)| {
        let mut pieces = 0;
        while let Some((number, event)) = events.next().await.unwrap() {
            assert_eq!(number, last + 1, "{event}");
            last = number;
            if let Some(update) = event.get("artifactUpdate") {
                pieces += 1;
                assert_eq!(update["artifact"]["parts"][0]["text"], format!("{pieces}\n"));
            }
        }
        assert_eq!(pieces, EVENTS);
        last
    });
    let lasts = join_all(read).await;
    assert_eq!(lasts.len(), 2_000);
    assert!(lasts.iter().all(|last| *last == lasts[0]), "some saw less");
}

/// Commands that clients send to Redis within a time, by name; not those that functions call.
async fn heard(address: SocketAddr, time: Duration) -> BTreeMap<String, usize> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"MONITOR\r\n").await.unwrap();
    let mut lines = BufReader::new(stream).lines();
    let (mut heard, end) = (BTreeMap::new(), Instant::now() + time);
    while let Ok(line) = timeout_at(end, lines.next_line()).await {
        let line = line.unwrap().unwrap();
        if let Some((client, command)) = line.split_once("] \"")
            && !client.ends_with(" lua")
        {
            let name = command.split('"').next().unwrap_or_default().to_lowercase();
            *heard.entry(name).or_default() += 1;
        }
    }
    heard
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_nothing_to_do_asks_redis_for_little() {
    let cluster = without_runners(3).await;
    cluster.start_all().await.unwrap();
    // Gateways know no Redis.
    let processes = cluster.task_stores.len() + cluster.runners.len();
    for case in ["idle", "while one turn is pending"] {
        if case != "idle" {
            queue(&wire(&cluster, ""), "silent:60", 1).await;
        }
        // What a start and a send leave to be done.
        sleep(Duration::from_secs(3)).await;
        let time = Duration::from_secs(12);
        let heard = heard(cluster.redis().address(), time).await;
        let rate = heard.values().sum::<usize>() as f64 / time.as_secs_f64() / processes as f64;
        println!("{case}: {rate:.2} calls a second for each process: {heard:?}");
        assert!(rate <= 2.0, "{case}: {rate}: {heard:?}");
    }
}
