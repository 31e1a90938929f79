//! What callers see when a part of a cluster dies, freezes or loses its way to Redis.

use std::time::Duration;

use futures::future::join_all;
use nix::sys::signal::Signal;
use reqwest::Client;
use rialto_testkit::{
    chaos::ChaosProxy,
    cluster::{Cluster, Process},
    redis::{Options, Reply},
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::{
    cluster::{AGENTS, cluster},
    wire::{
        Event, PATIENCE, assert_whole, echoed, events, get, http, is_artifact, is_completed, send, stream, subscribe,
        task_of, text_of, until,
    },
};

/// What an agent says for `chunks:NxM`.
fn chunks(n: u64) -> String {
    (1..=n).map(|n| format!("{n}\n")).collect()
}

/// The task is over, and its artifact is what one attempt makes.
async fn assert_made_once(client: &Client, agent: &str, task: &str, n: u64) {
    let (_, found) = get(client, format!("{agent}/tasks/{task}")).await;
    assert_eq!(found["status"]["state"], "TASK_STATE_COMPLETED", "{found}");
    let artifacts = found["artifacts"].as_array().unwrap();
    let texts: Vec<_> = artifacts.iter().map(text_of).collect();
    assert_eq!(texts, [chunks(n)], "{found}");
}

/// A cluster with one runner at work on a long turn and another one that is idle; what a client saw so far.
async fn a_turn_on_the_first_runner(client: &Client) -> (Cluster, String, reqwest::Response, Vec<Event>) {
    let cluster = cluster().gateways(1).task_stores(1).prepare().await.unwrap();
    let [gateway, task_store, runner] = [&cluster.gateways[0], &cluster.task_stores[0], &cluster.runners[0]];
    tokio::try_join!(gateway.start(), task_store.start(), runner.start()).unwrap();
    let agent = format!("{}/s", gateway.url());
    let mut response = stream(client, &agent, "chunks:60x50").await;
    let seen = events(&mut response, is_artifact).await;
    cluster.runners[1].start().await.unwrap();
    (cluster, agent, response, seen)
}

async fn ready(client: &Client, process: &Process) -> (u16, Value) {
    let (status, body) = get(client, format!("{}/readyz", process.admin_url())).await;
    assert_eq!(body["ready"], json!(status == 200), "{body}");
    (status, body["checks"].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_runner_s_turn_is_taken_over_after_its_lease_and_completes_once() {
    let client = http();
    let (cluster, agent, mut response, mut seen) = a_turn_on_the_first_runner(&client).await;
    cluster.runners[0].kill();
    let killed = Instant::now();
    seen.extend(events(&mut response, is_artifact).await);
    // A lease of 1 s and 1 s more, on a machine ten times as slow.
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    seen.extend(events(&mut response, is_completed).await);
    assert_whole(&seen);
    assert_made_once(&client, &agent, &task_of(&seen), 60).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runner_that_wakes_up_after_its_lease_writes_nothing_more() {
    let client = http();
    let (cluster, agent, mut response, mut seen) = a_turn_on_the_first_runner(&client).await;
    let runner = &cluster.runners[0];
    runner.pause();
    seen.extend(events(&mut response, is_completed).await);
    assert_whole(&seen);
    let task = task_of(&seen);
    let (_, before) = get(&client, format!("{agent}/tasks/{task}")).await;
    runner.resume();
    until("it says that it is fenced", async || runner.stderr().contains("fenced")).await;
    // It is as good as any other again.
    until("it is ready", async || ready(&client, runner).await.0 == 200).await;
    cluster.runners[1].kill();
    echoed(&client, &cluster.gateways[0].url(), "by the first one").await;
    assert_made_once(&client, &agent, &task, 60).await;
    assert_eq!(get(&client, format!("{agent}/tasks/{task}")).await.1, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_leave_a_frozen_task_store() {
    let (cluster, client) = (cluster().gateways(1).runners(1).start().await.unwrap(), http());
    let gateway = cluster.gateways[0].url();
    let mut watched = stream(&client, &format!("{gateway}/s"), "chunks:100x50").await;
    let mut seen = events(&mut watched, is_artifact).await;
    cluster.task_stores[0].pause();
    // Some wait until the connection is given up, which takes 5 s.
    let texts: Vec<_> = (0..40).map(|n| format!("frozen {n}")).collect();
    let calls = join_all(texts.iter().map(|text| echoed(&client, &gateway, text)));
    timeout(Duration::from_secs(50), calls).await.expect("calls are stuck in a frozen task-store");
    seen.extend(events(&mut watched, is_completed).await);
    assert_whole(&seen);
    // From then on none does.
    let start = Instant::now();
    for n in 0..20 {
        echoed(&client, &gateway, &format!("later {n}")).await;
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    until("the gateway is ready", async || ready(&client, &cluster.gateways[0]).await.0 == 200).await;
    // What was taken and never answered is done once all the same.
    cluster.task_stores[0].resume();
    cluster.task_stores[1].kill();
    echoed(&client, &gateway, "by the thawed one").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_store_that_alone_lost_redis_gets_no_calls_and_says_so() {
    let (mut cluster, client) = (cluster().gateways(1).runners(1).prepare().await.unwrap(), http());
    let proxy = ChaosProxy::start(cluster.redis().address()).await.unwrap();
    cluster.task_stores[0].env("RIALTO__REDIS__URL", format!("redis://{}", proxy.address()));
    cluster.start_all().await.unwrap();
    let (gateway, lonely) = (cluster.gateways[0].url(), &cluster.task_stores[0]);
    let channel = Endpoint::from_shared(format!("http://{}", lonely.task_store())).unwrap().connect_lazy();
    let mut health = HealthClient::new(channel);
    let mut serves = async |service: &str| {
        let answer = health.check(HealthCheckRequest { service: service.to_owned() }).await.unwrap();
        answer.into_inner().status() == ServingStatus::Serving
    };
    assert!(serves("").await && serves("rialto.tasks.v1.TaskStore").await);
    assert_eq!(ready(&client, lonely).await, (200, json!({"store": "ok"})));

    for lost in [ChaosProxy::cut, ChaosProxy::stall] {
        lost(&proxy);
        let texts: Vec<_> = (0..40).map(|n| format!("lonely {n}")).collect();
        join_all(texts.iter().map(|text| echoed(&client, &gateway, text))).await;
        until("its health says so", async || !serves("").await).await;
        assert!(!serves("rialto.tasks.v1.TaskStore").await);
        let start = Instant::now();
        let (status, checks) = ready(&client, lonely).await;
        assert!(status == 503 && checks["store"] != "ok", "{checks}");
        assert!(start.elapsed() < Duration::from_secs(1), "readiness waits for a look: {:?}", start.elapsed());
        // Now that it is known, not even a first try is lost.
        let start = Instant::now();
        for n in 0..20 {
            echoed(&client, &gateway, &format!("elsewhere {n}")).await;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        let well = (200, json!({"task-store": "ok"}));
        until("the gateway finds the other one", async || ready(&client, &cluster.gateways[0]).await == well).await;
        proxy.mend();
        until("it serves again", async || serves("").await).await;
        assert_eq!(ready(&client, lonely).await.0, 200);
    }
    cluster.task_stores[1].kill();
    echoed(&client, &gateway, "by the lonely one").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_store_that_takes_connections_and_never_answers_makes_a_gateway_unready_at_once() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut cluster, client) = (cluster().gateways(1).task_stores(0).runners(0).prepare().await.unwrap(), http());
    cluster.gateways[0].env("RIALTO__SERVICES__TASK_STORE", format!("http://{}", silent.local_addr().unwrap()));
    let gateway = &cluster.gateways[0];
    gateway.spawn().unwrap();
    let livez = format!("{}/livez", gateway.admin_url());
    until("the gateway lives", async || client.get(&livez).send().await.is_ok()).await;
    // Before the first look is over, and after it.
    for problem in ["not asked yet", "not reachable"] {
        until(problem, async || {
            let start = Instant::now();
            let (status, checks) = ready(&client, gateway).await;
            assert!(status == 503 && start.elapsed() < Duration::from_secs(1), "{status} after {:?}", start.elapsed());
            checks["task-store"] == problem
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_away_calls_get_503_cards_go_on_and_turns_wait() {
    let durable = Options::new().durable("always");
    let (cluster, client) = (cluster().gateways(1).redis(durable).start().await.unwrap(), http());
    let gateway = cluster.gateways[0].url();
    let (before, agent) = (echoed(&client, &gateway, "before").await, format!("{gateway}/s"));
    let mut running = stream(&client, &agent, "chunks:60x50").await;
    let mut seen = events(&mut running, is_artifact).await;
    let task = task_of(&seen);
    cluster.redis().kill().unwrap();

    let refused = async |request: reqwest::RequestBuilder| {
        let start = Instant::now();
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"), "{response:?}");
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["error"]["status"], "UNAVAILABLE", "{body}");
        start.elapsed()
    };
    let read = || client.get(format!("{agent}/tasks/{task}")).header("a2a-version", "1.0");
    // The first ones still hope for a second or two.
    refused(send(&client, &gateway, "during")).await;
    refused(read()).await;
    for slowest in [refused(send(&client, &gateway, "during")).await, refused(read()).await] {
        assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    }
    for path in [".well-known/agent-card.json", "health"] {
        let start = Instant::now();
        assert_eq!(get(&client, format!("{gateway}/{path}")).await.0, 200);
        assert!(start.elapsed() < Duration::from_secs(2), "{path}: {:?}", start.elapsed());
    }
    for process in cluster.processes() {
        assert_eq!(get(&client, format!("{}/livez", process.admin_url())).await.0, 200);
    }
    // A gateway is as ready as any other could be, and says what is wrong.
    let away = (200, json!({"task-store": "its store is not reachable"}));
    until("the gateway says so", async || ready(&client, &cluster.gateways[0]).await == away).await;
    for process in cluster.task_stores.iter().chain(&cluster.runners) {
        until(process.name(), async || ready(&client, process).await.0 == 503).await;
    }

    cluster.redis().restart().await.unwrap();
    until("all are ready by themselves", async || {
        let all = join_all(cluster.processes().map(|process| ready(&client, process))).await;
        all.iter().all(|(status, checks)| *status == 200 && !checks.to_string().contains("not"))
    })
    .await;
    echoed(&client, &gateway, "after").await;
    assert_eq!(get(&client, format!("{gateway}/tasks/{before}")).await.0, 200);
    // The turn went on; its stream too, or it ended and can be resumed.
    seen.extend(events(&mut running, is_completed).await);
    if !seen.last().is_some_and(|(_, event)| is_completed(event)) {
        let after = seen.last().map(|(number, _)| *number);
        let mut resumed = subscribe(&client, &agent, &task, after).await;
        seen.extend(events(&mut resumed, is_completed).await);
    }
    assert_whole(&seen);
    assert_made_once(&client, &agent, &task, 60).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_flushall_it_serves_again_without_a_restart() {
    let (cluster, client) = (cluster().gateways(1).start().await.unwrap(), http());
    let gateway = cluster.gateways[0].url();
    let agent = format!("{gateway}/s");
    echoed(&client, &gateway, "before").await;
    let mut running = stream(&client, &agent, "chunks:100x50").await;
    let seen = events(&mut running, is_artifact).await;
    cluster.redis().command(&["FLUSHALL"]).await.unwrap();
    let start = Instant::now();
    let after = echoed(&client, &gateway, "after").await;
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    // What was there is gone, and that is what is said.
    let (_, list) = get(&client, format!("{gateway}/tasks")).await;
    let listed: Vec<_> = list["tasks"].as_array().unwrap().iter().map(|task| &task["id"]).collect();
    assert_eq!(listed, [&json!(after)], "{list}");
    let (status, body) = get(&client, format!("{agent}/tasks/{}", task_of(&seen))).await;
    assert_eq!((status, &body["error"]["details"][0]["reason"]), (404, &json!("TASK_NOT_FOUND")), "{body}");
    // So the stream of the turn has an end.
    timeout(PATIENCE, events(&mut running, |_| false)).await.expect("the stream of a task that is gone hangs");
    until("the store is noted again", async || {
        cluster.redis().command(&["HGET", "rialto:{s0}:meta", "shards"]).await.unwrap() == Reply::Text("1".to_owned())
    })
    .await;
    for process in cluster.processes() {
        assert_eq!(ready(&client, process).await.0, 200, "{}", process.name());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_sigterm_ends_a_process_at_once() {
    let agents = AGENTS.replace("stop-grace: 6s", "stop-grace: 1h");
    let (cluster, client) = (cluster().config(agents).gateways(1).runners(1).start().await.unwrap(), http());
    let mut running = stream(&client, &format!("{}/s", cluster.gateways[0].url()), "chunks:100000x20").await;
    events(&mut running, is_artifact).await;
    let runner = &cluster.runners[0];
    runner.signal(Signal::SIGTERM);
    until("the first one is taken", async || runner.stderr().contains("once more to stop at once")).await;
    let (status, checks) = ready(&client, runner).await;
    assert_eq!((status, &checks["process"]), (503, &json!("stopping")));
    runner.signal(Signal::SIGTERM);
    // It had an hour.
    let exit = runner.exit().await.unwrap();
    assert_eq!(exit.code, 143, "{}", exit.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_of_everything_at_once_is_no_attempt_and_repeats_no_step() {
    let agents = AGENTS.replace("mount: /s,", "mount: /s, max-attempts: 1,");
    let (cluster, client) = (cluster().config(agents).start().await.unwrap(), http());
    let agent = format!("{}/s", cluster.gateways[0].url());
    let mut running = stream(&client, &agent, "work:all:40x150").await;
    let task = task_of(&events(&mut running, is_artifact).await);
    // The time that the runner has left is longer than the others need to be gone.
    for process in cluster.processes() {
        process.signal(Signal::SIGTERM);
    }
    for process in cluster.processes() {
        let exit = process.exit().await.unwrap();
        assert_eq!(exit.code, 0, "{}: {}", process.name(), exit.stderr);
    }
    cluster.start_all().await.unwrap();
    until("the turn is over", async || {
        let (_, found) = get(&client, format!("{agent}/tasks/{task}")).await;
        assert_ne!(found["status"]["state"], "TASK_STATE_FAILED", "{found}");
        found["status"]["state"] == "TASK_STATE_COMPLETED"
    })
    .await;
    let counts = cluster.counted("all");
    assert!(counts.iter().all(|count| count["attempt"] == 1), "{counts:?}");
    assert!((40..=41).contains(&counts.len()), "at most the step that was not journaled comes again: {counts:?}");
}
