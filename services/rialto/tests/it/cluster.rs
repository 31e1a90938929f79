//! What a cluster of real processes does while nothing, or little, is wrong with it.

use std::{collections::BTreeSet, fs, time::Duration};

use futures::future::join_all;
use rialto_rpc::{Identity, Target, Transport};
use rialto_testkit::{
    certificates::Authority,
    cluster::{Builder, Cluster, Exit},
};
use tokio::time::sleep;
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::wire::{
    answered, assert_whole, echoed, events, get, http, is_artifact, is_completed, stream, subscribe, task_of, until,
};

/// An agent that echoes at `/`, the scripted one at `/s`.
pub(crate) const AGENTS: &str = "stop-grace: 6s\nagents:\n\
  - {id: echo, backend: echo, lease: 1s}\n\
  - {id: scripted, mount: /s, lease: 1s, backend: {type: command, command: [scripted_agent], persistent: true, \
     env: {SCRIPTED_COUNTERS: $COUNTERS}}}\n";

pub(crate) fn cluster() -> Builder {
    Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(AGENTS)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_starts_in_any_order_answers_through_every_gateway_and_survives_kill_9() {
    let (cluster, client) = (cluster().prepare().await.unwrap(), http());
    // The last first: everybody waits for those behind.
    cluster.redis().kill().unwrap();
    for process in cluster.gateways.iter().chain(&cluster.runners) {
        process.spawn().unwrap();
    }
    let admin = cluster.gateways[0].admin_url();
    until("the gateway lives", async || client.get(format!("{admin}/livez")).send().await.is_ok()).await;
    until("the gateway says what it lacks", async || {
        let (status, reason) = get(&client, format!("{admin}/readyz")).await;
        assert_eq!(status, 503, "{reason}");
        reason["checks"]["task-store"] == "not reachable"
    })
    .await;
    for process in &cluster.task_stores {
        process.spawn().unwrap();
    }
    cluster.redis().restart().await.unwrap();
    cluster.start_all().await.unwrap();
    assert_eq!(get(&client, format!("{admin}/readyz")).await.0, 200);
    let urls = [&cluster.gateways[0].url(), &cluster.gateways[1].url()];
    let scripted = urls.map(|url| format!("{url}/s"));

    // Sent through one, watched through the other.
    let mut sent = stream(&client, &scripted[0], "chunks:40x50").await;
    let mut seen = events(&mut sent, is_artifact).await;
    let task = task_of(&seen);
    let mut watched = subscribe(&client, &scripted[1], &task, None).await;
    assert_eq!(task_of(&events(&mut watched, is_artifact).await), task);

    // A gateway dies in the middle of a stream; the other goes on after the last event.
    cluster.gateways[0].kill();
    seen.extend(events(&mut sent, is_completed).await);
    let mut resumed = subscribe(&client, &scripted[1], &task, seen.last().map(|(number, _)| *number)).await;
    let rest = events(&mut resumed, is_completed).await;
    assert!(rest.len() > 2, "the gateway died too late: {seen:?}");
    seen.extend(rest);
    assert_whole(&seen);

    // A task-store dies under calls and under the stream that still watches; nobody notices.
    let mut sent = stream(&client, &scripted[1], "chunks:40x50").await;
    let mut seen = events(&mut sent, is_artifact).await;
    let texts: Vec<_> = (0..60).map(|n| format!("again {n}")).collect();
    let killed = async {
        sleep(Duration::from_millis(100)).await;
        cluster.task_stores[0].kill();
    };
    let (ids, ()) = tokio::join!(join_all(texts.iter().map(|text| echoed(&client, urls[1], text))), killed);
    assert_eq!(ids.into_iter().collect::<BTreeSet<_>>().len(), 60);
    seen.extend(events(&mut sent, is_completed).await);
    assert_whole(&seen);

    // A planned stop, of each kind: in time, with success.
    for process in [&cluster.gateways[1], &cluster.task_stores[1]].into_iter().chain(&cluster.runners) {
        let Exit { code, stdout, stderr } = process.terminate().await.unwrap();
        assert_eq!((code, stdout.lines().count()), (0, 1), "{stdout}{stderr}");
        assert!(stderr.lines().count() < 40, "{stderr}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_concurrent_messages_are_each_answered_once_and_rightly() {
    // Nobody is to lose a turn, or a connection that is slow to send, because the machine is busy.
    let config = AGENTS.replace("lease: 1s", "lease: 30s") + "limits: {header-timeout: 1m}\n";
    let cluster = cluster().config(config).runners(3);
    let (cluster, client) = (cluster.start().await.unwrap(), http());
    let gateways = [0, 1].map(|n: usize| cluster.gateways[n].url());
    let calls = (0..2000).map(|n| {
        let (gateway, client) = (&gateways[n % 2], &client);
        async move {
            // One in four counts itself in the world outside, under its own name.
            if n % 4 == 0 {
                answered(client, &format!("{gateway}/s"), &format!("count:m{n}")).await["id"].to_string()
            } else {
                echoed(client, gateway, &format!("message {n}")).await
            }
        }
    });
    let ids: BTreeSet<_> = join_all(calls).await.into_iter().collect();
    assert_eq!(ids.len(), 2000);
    for n in (0..2000).step_by(4) {
        assert_eq!(cluster.counted(&format!("m{n}")).len(), 1, "m{n}");
    }
    // All of the runners had a part in it.
    for runner in &cluster.runners {
        let (status, _) = get(&client, format!("{}/readyz", runner.admin_url())).await;
        assert_eq!(status, 200, "{}", runner.name());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_in_one_process_on_redis() {
    let cluster = cluster().gateways(0).task_stores(0).runners(0).other(&["all"]).other(&["all"]);
    let (cluster, client) = (cluster.start().await.unwrap(), http());
    let [all, again] = [0, 1].map(|n: usize| cluster.others[n].url());
    let id = echoed(&client, &all, "hello").await;
    let (_, found) = get(&client, format!("{again}/tasks/{id}")).await;
    assert_eq!(found["status"]["state"], "TASK_STATE_COMPLETED");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_certificates_only_the_cluster_itself_reaches_a_task_store() {
    let cluster = cluster().gateways(1).task_stores(1).runners(1).tls();
    let (cluster, client) = (cluster.start().await.unwrap(), http());
    echoed(&client, &cluster.gateways[0].url(), "encrypted").await;
    let port = cluster.task_stores[0].task_store();
    assert_eq!(cluster.task_stores[0].stdout(), format!("ready: https://{port}\n"));

    let refuses = async |identity: Option<Identity>| {
        let scheme = if identity.is_some() { "https" } else { "http" };
        let target = Target { service: "task-store".to_owned(), urls: vec![format!("{scheme}://{port}")], identity };
        let mut health = HealthClient::new(Transport::network(target).unwrap());
        health.check(HealthCheckRequest::default()).await.is_err_and(|status| status.code() == Code::Unavailable)
    };
    let folder = cluster.folder();
    let [cert, key, ca] = ["CERT", "KEY", "CA"].map(|it| fs::read_to_string(folder.join(format!("{it}.pem"))).unwrap());
    let (host, stranger) = (port.ip().to_string(), Authority::new().unwrap());
    let (strange_cert, strange_key) = stranger.issue(&[&host]).unwrap();
    let (plain, unknown, untrusting, one_of_us) = tokio::join!(
        refuses(None),
        // It would believe the task-store, which does not believe it; and the other way round.
        refuses(Some(Identity::new(&strange_cert, &strange_key, &ca).unwrap())),
        refuses(Some(Identity::new(&cert, &key, stranger.pem()).unwrap())),
        refuses(Some(Identity::new(&cert, &key, &ca).unwrap())),
    );
    assert_eq!((plain, unknown, untrusting, one_of_us), (true, true, true, false));
}
