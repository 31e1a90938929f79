//! All campaigns in turn, for a given time.

use std::time::Duration;

use futures::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::{
    dice::{Dice, seed},
    embedded, kills,
    ledger::Ledger,
    network, redis, scale,
};

type Campaign = (&'static str, fn(u64) -> LocalBoxFuture<'static, Ledger>);

const CAMPAIGNS: [Campaign; 13] = [
    ("kill -9 of anything", |seed| Box::pin(kills::kill(seed, 100))),
    ("frozen past the lease", |seed| Box::pin(kills::freeze(seed, 20))),
    ("rolling restart", |seed| Box::pin(kills::restart(seed, 3))),
    ("kill -9 of Redis, always", |seed| Box::pin(redis::crash(seed, 10, "always"))),
    ("kill -9 of Redis, everysec", |seed| Box::pin(redis::crash(seed, 10, "everysec"))),
    ("frozen Redis", |seed| Box::pin(redis::freeze(seed, 1, Duration::from_secs(60)))),
    ("full memory", |seed| Box::pin(redis::full(seed, 3))),
    ("fail-over", |seed| Box::pin(redis::fail_over(seed, 4))),
    ("moving shards", |seed| Box::pin(redis::reshard(seed, 20))),
    ("wrecked work streams", |seed| Box::pin(redis::wreck(seed, 40))),
    ("bad connections", |seed| Box::pin(network::weather(seed, 40))),
    ("kill -9 of dev", |seed| Box::pin(embedded::kill(seed, 50))),
    ("full disk", |seed| Box::pin(embedded::full(seed))),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes CHAOS_SECONDS: make chaos SECONDS=3600"]
async fn everything_for_a_given_time() {
    let seconds = std::env::var("CHAOS_SECONDS").expect("CHAOS_SECONDS is set").parse().expect("a number");
    let (until, dice, mut sum) = (Instant::now() + Duration::from_secs(seconds), Dice::new(seed()), Ledger::default());
    let [first, last] = scale::drain(10_000).await;
    println!("10,000 waiting turns: {first:.1} Redis commands for each of the first, {last:.1} of the last");
    assert!((0.75..1.33).contains(&(last / first)), "{first} and {last}");
    for (title, campaign) in CAMPAIGNS.iter().cycle() {
        if Instant::now() >= until {
            break;
        }
        let seed = dice.of(0..1 << 32);
        let title = format!("{title}, CHAOS_SEED={seed}");
        let ledger = campaign(seed).await;
        ledger.check(&title);
        sum += ledger;
    }
    println!("in all: {sum}");
}
