//! Processes that are killed, frozen and restarted, again and again.

use std::time::Duration;

use rialto_testkit::{
    cluster::{Builder, Cluster, Exit, Process},
    redis::Options,
};
use tokio::time::{Instant, sleep};

use crate::{
    caller::{AGENTS, Load, MOMENTS, Traffic},
    dice::{Dice, seed},
    ledger::{Ledger, Rules},
};

pub(crate) fn cluster() -> Builder {
    Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(AGENTS).runners(3)
}

pub(crate) fn gateways(cluster: &Cluster) -> impl Iterator<Item = String> {
    cluster.gateways.iter().map(Process::url)
}

/// Kills at a moment that some client sees, or a few milliseconds later: around commits and ends of turns.
pub(crate) async fn kill(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().redis(Options::new().durable("always")).start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    let kinds = [&cluster.gateways, &cluster.task_stores, &cluster.runners];
    for _ in 0..rounds {
        let kind = *dice.pick(&kinds);
        let victims: Vec<_> = match dice.of(0..10) {
            0 => kind.iter().collect(),
            1..3 => kinds.iter().map(|kind| dice.pick(kind)).collect(),
            _ => vec![dice.pick(kind)],
        };
        traffic.moment(*dice.pick(&MOMENTS)).await;
        sleep(dice.millis(6)).await;
        for victim in &victims {
            victim.kill();
        }
        sleep(dice.millis(400)).await;
        for victim in victims {
            victim.start().await.unwrap();
        }
    }
    traffic.end(&cluster, &Rules::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_survives_kill_9_of_anything_at_any_moment() {
    kill(seed(), 40).await.check("kill -9 of anything");
}

/// Freezes processes for longer than the lease, and lets them go on.
pub(crate) async fn freeze(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let cluster = cluster().start().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    let kinds = [&cluster.gateways, &cluster.task_stores, &cluster.runners, &cluster.runners];
    for _ in 0..rounds {
        let kind = *dice.pick(&kinds);
        let victim = dice.pick(kind);
        traffic.moment(*dice.pick(&MOMENTS)).await;
        sleep(dice.millis(6)).await;
        victim.pause();
        sleep(Duration::from_millis(dice.of(1200..4000))).await;
        victim.resume();
        sleep(dice.millis(300)).await;
    }
    // An agent goes on working while its runner stands still.
    traffic.end(&cluster, &Rules { blind: Duration::from_secs(5), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_wakes_up_after_its_lease_repeats_nothing() {
    freeze(seed(), 6).await.check("frozen past the lease");
}

/// Restarts every process in order, under traffic of turns that often take longer than a stopping runner waits.
pub(crate) async fn restart(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let config = AGENTS.replace("stop-grace: 4s", "stop-grace: 1s");
    let cluster = cluster().config(config).start().await.unwrap();
    let load = Load { callers: 12, steps: 40, apart: 60 };
    let traffic = Traffic::start(gateways(&cluster), load, &dice);
    for _ in 0..rounds {
        for process in cluster.processes() {
            sleep(dice.millis(300)).await;
            let begun = Instant::now();
            let Exit { code, stderr, .. } = process.terminate().await.unwrap();
            assert_eq!(code, 0, "{}: {stderr}", process.name());
            let took = begun.elapsed();
            // The grace, and a second for the last words; ten times that on a busy machine.
            assert!(took < Duration::from_secs(15), "{} took {took:?} to stop: {stderr}", process.name());
            process.start().await.unwrap();
        }
    }
    // Nobody crashed: no attempt is counted, and work goes on at once.
    let rules = Rules { most_attempts: 1, longest_gap: Duration::from_secs(2), ..Rules::default() };
    traffic.end(&cluster, &rules).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_loses_nothing_counts_no_attempt_and_makes_nobody_wait() {
    restart(seed(), 1).await.check("rolling restart");
}
