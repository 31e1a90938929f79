//! A Redis that dies, stands still, is full, is replaced, or loses its work streams.

use std::time::Duration;

use rialto_testkit::redis::{Options, RedisCluster, RedisServer, SentinelGroup};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{
    caller::{AGENTS, Load, MOMENTS, Traffic, patiently},
    dice::{Dice, seed},
    kills::{cluster, gateways},
    ledger::{Ledger, Rules},
    wire::{Binding, Trouble, Wire, http},
};

/// What `appendfsync everysec` may lose.
const EVERYSEC: Duration = Duration::from_secs(2);

/// `kill -9` of Redis, which is started again on what it wrote.
pub(crate) async fn crash(seed: u64, rounds: u64, fsync: &str) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().redis(Options::new().durable(fsync)).start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    let mut rules = Rules { blind: Duration::from_secs(5), ..Rules::default() };
    for _ in 0..rounds {
        sleep(dice.millis(1500)).await;
        traffic.moment(*dice.pick(&MOMENTS)).await;
        sleep(dice.millis(6)).await;
        let killed = Instant::now();
        cluster.redis().kill().unwrap();
        sleep(dice.millis(1000)).await;
        cluster.redis().restart().await.unwrap();
        if fsync != "always" {
            rules.lossy.push((killed - EVERYSEC, Instant::now()));
        }
    }
    traffic.end(&cluster, &rules).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_fsync_always_a_killed_redis_loses_no_answer() {
    crash(seed(), 4, "always").await.check("kill -9 of Redis, always");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_fsync_everysec_a_killed_redis_loses_at_most_two_seconds() {
    crash(seed(), 3, "everysec").await.check("kill -9 of Redis, everysec");
}

/// Redis stands still for a while, again and again.
pub(crate) async fn freeze(seed: u64, rounds: u64, time: Duration) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    for _ in 0..rounds {
        sleep(Duration::from_secs(1)).await;
        cluster.redis().pause().unwrap();
        sleep(time).await;
        cluster.redis().resume().unwrap();
    }
    sleep(Duration::from_secs(1)).await;
    traffic.end(&cluster, &Rules { blind: time + Duration::from_secs(3), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_stands_still_loses_nothing() {
    freeze(seed(), 1, Duration::from_secs(5)).await.check("frozen Redis");
}

/// A memory without room, for a while: turns that can end do, cancels work, sends are refused.
pub(crate) async fn full(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().start().await.unwrap();
    let wire = Wire::new(&http(), &cluster.gateways[0].url(), "", Binding::Rest);
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    let limit = async |bytes: &str| {
        cluster.redis().command(&["CONFIG", "SET", "maxmemory", bytes]).await.unwrap();
    };
    let task = async |text: &str| {
        let message = json!({"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]});
        let params = json!({"message": message, "configuration": {"returnImmediately": true}});
        let key = format!("{:x}", dice.next());
        wire.send(&params, &key).await.map(|answer| answer["task"]["id"].as_str().unwrap().to_owned())
    };
    let becomes = async |task: &str, state: &str| {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let now = patiently(|| wire.task(task)).await.unwrap();
            if now["status"]["state"] == state {
                return;
            }
            assert!(Instant::now() < until, "not {state} while memory is full: {now}");
            sleep(Duration::from_millis(50)).await;
        }
    };
    for _ in 0..rounds {
        let [ends, canceled] = [task("silent:2").await.unwrap(), task("silent:60").await.unwrap()];
        for task in [&ends, &canceled] {
            becomes(task, "TASK_STATE_WORKING").await;
        }
        limit("1").await;
        let refused = task("silent:0").await;
        assert!(matches!(refused, Err(Trouble::Busy(_))), "{refused:?}");
        becomes(&ends, "TASK_STATE_COMPLETED").await;
        patiently(|| wire.cancel(&canceled)).await.unwrap();
        becomes(&canceled, "TASK_STATE_CANCELED").await;
        limit("0").await;
        sleep(Duration::from_secs(1)).await;
    }
    traffic.end(&cluster, &Rules { blind: Duration::from_secs(10), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_redis_refuses_sends_ends_what_runs_and_recovers() {
    let ledger = full(seed(), 1).await;
    ledger.check("full memory");
    assert!(ledger.refused > 0);
}

/// Fail-overs by Sentinels, planned ones and those of a killed master.
pub(crate) async fn fail_over(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let group = SentinelGroup::start().await.unwrap();
    // Attempts are taken over meanwhile, or outlive the store that they began in.
    let config = AGENTS.replace("lease: 1s", &format!("lease: {}", dice.pick(&["1s", "15s"])));
    let cluster = cluster().config(config).redis_url(group.url()).start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    let mut rules = Rules { blind: Duration::from_secs(10), ..Rules::default() };
    for round in 0..rounds {
        sleep(Duration::from_secs(2)).await;
        traffic.moment(*dice.pick(&MOMENTS)).await;
        let begun = Instant::now();
        let old = usize::from(!is_master(&group.servers[0]).await);
        let [old, new] = [&group.servers[old], &group.servers[1 - old]];
        if (seed + round).is_multiple_of(2) {
            group.fail_over().await.unwrap();
        } else {
            old.kill().unwrap();
        }
        let until = Instant::now() + Duration::from_secs(30);
        while !is_master(new).await {
            assert!(Instant::now() < until, "no fail-over");
            sleep(Duration::from_millis(20)).await;
        }
        // What the replica had not received, and what the old master took before it learnt of the new one.
        rules.lossy.push((begun - Duration::from_secs(1), Instant::now() + Duration::from_secs(6)));
        // Not before the other has taken over: one that comes back empty at once would empty its replica.
        if old.pid().is_none() {
            old.restart().await.unwrap();
        }
        // A master that comes back is one, empty, until the Sentinels tell it whom to follow.
        while round + 1 < rounds && !follows(old).await {
            assert!(Instant::now() < until, "no replica");
            sleep(Duration::from_millis(20)).await;
        }
    }
    // By then no replica remembers what its store lost.
    sleep(Duration::from_secs(10)).await;
    traffic.end(&cluster, &rules).await
}

async fn is_master(server: &RedisServer) -> bool {
    server.command(&["ROLE"]).await.is_ok_and(|role| role.list()[0].text() == "master")
}

/// Whether it is a replica that has caught up once.
async fn follows(server: &RedisServer) -> bool {
    let role = server.command(&["ROLE"]).await;
    role.is_ok_and(|role| role.list()[0].text() == "slave" && role.list()[3].text() == "connected")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_loses_at_most_what_the_replica_had_not_received() {
    fail_over(seed(), 1).await.check("fail-over");
}

/// A cluster whose shards move from node to node, with all that is in them.
pub(crate) async fn reshard(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let redis = RedisCluster::start(3).await.unwrap();
    let cluster = cluster().redis_url(redis.url()).start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    // Slots of the shards 0, 1 and 15, and where they are.
    let mut places = [(11097, 2), (15224, 2), (4362, 0)];
    for _ in 0..rounds {
        sleep(dice.millis(1000)).await;
        let which = usize::try_from(dice.of(0..3)).unwrap();
        let (slot, from) = places[which];
        let to = (from + 1) % redis.nodes.len();
        redis.move_slot(slot, from, to).await.unwrap();
        places[which].1 = to;
    }
    sleep(Duration::from_secs(1)).await;
    traffic.end(&cluster, &Rules { blind: Duration::from_secs(5), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_that_move_from_node_to_node_lose_nothing() {
    reshard(seed(), 6).await.check("moving shards");
}

/// Work streams that somebody deletes, trims, or robs of their group.
pub(crate) async fn wreck(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    for _ in 0..rounds {
        traffic.moment(*dice.pick(&MOMENTS)).await;
        let key = *dice.pick(&["rialto:{s0}:runs:scripted", "rialto:{s0}:runs:echo"]);
        let redis = cluster.redis();
        match dice.of(0..4) {
            0 => drop(redis.command(&["DEL", key]).await.unwrap()),
            1 => drop(redis.command(&["XTRIM", key, "MAXLEN", "0"]).await.unwrap()),
            // There may be none, after the others.
            2 => drop(redis.command(&["XGROUP", "DESTROY", key, "workers"]).await),
            _ => {
                let first = redis.command(&["XRANGE", key, "-", "+", "COUNT", "1"]).await.unwrap();
                if let Some(entry) = first.list().first() {
                    redis.command(&["XDEL", key, entry.list()[0].text()]).await.unwrap();
                }
            }
        }
        sleep(dice.millis(1000)).await;
    }
    traffic.end(&cluster, &Rules { blind: Duration::from_secs(3), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_whose_work_streams_are_wrecked_are_queued_again() {
    wreck(seed(), 10).await.check("wrecked work streams");
}
