//! Connections that break, stall, crawl, or take requests and give no answers.

use std::time::Duration;

use rialto_testkit::{
    chaos::ChaosProxy,
    cluster::Process,
    redis::{Options, RedisServer},
};
use tokio::time::sleep;

use crate::{
    caller::{Load, MOMENTS, Traffic},
    dice::{Dice, seed},
    kills::{cluster, gateways},
    ledger::{Ledger, Rules},
};

/// Bad weather between services and Redis, and between gateways, runners and task-stores.
pub(crate) async fn weather(seed: u64, rounds: u64) -> Ledger {
    let dice = Dice::new(seed);
    let redis: RedisServer = Options::new().start().await.unwrap();
    let mut proxies = vec![ChaosProxy::start(redis.address()).await.unwrap()];
    let url = format!("redis://{}", proxies[0].address());
    let mut cluster = cluster().redis_url(url).prepare().await.unwrap();
    for task_store in &cluster.task_stores {
        proxies.push(ChaosProxy::start(task_store.task_store()).await.unwrap());
    }
    let urls: Vec<_> = proxies[1..].iter().map(|proxy| format!("http://{}", proxy.address())).collect();
    for process in cluster.gateways.iter_mut().chain(&mut cluster.runners) {
        Process::env(process, "RIALTO__SERVICES__TASK_STORE", urls.join(","));
    }
    cluster.start_all().await.unwrap();
    let traffic = Traffic::start(gateways(&cluster), Load::default(), &dice);
    for _ in 0..rounds {
        let proxy = dice.pick(&proxies);
        traffic.moment(*dice.pick(&MOMENTS)).await;
        sleep(dice.millis(6)).await;
        let most = match dice.of(0..5) {
            0 => {
                proxy.cut();
                1500
            }
            1 => {
                proxy.stall();
                3000
            }
            2 => {
                proxy.slow(Duration::from_millis(30));
                3000
            }
            3 => {
                proxy.mute();
                1000
            }
            _ => {
                proxy.half_close();
                1500
            }
        };
        sleep(dice.millis(most)).await;
        if dice.chance(50) {
            // What was kept back is lost for good.
            proxy.cut();
        }
        proxy.mend();
        sleep(dice.millis(500)).await;
    }
    assert!(proxies.iter().all(|proxy| proxy.accepted() > 0), "some connections take another way");
    traffic.end(&cluster, &Rules { blind: Duration::from_secs(10), ..Rules::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_connections_between_services_and_to_redis_lose_and_repeat_nothing() {
    weather(seed(), 12).await.check("bad connections");
}
