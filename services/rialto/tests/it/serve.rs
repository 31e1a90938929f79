//! How `rialto serve` starts, and what it refuses to start with.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    path::Path,
};

use rialto_testkit::{certificates::Authority, cluster::Cluster, redis::Options};
use serde_json::json;

use crate::{
    process::{run, shown},
    wire::{get, http},
};

#[test]
fn what_is_not_there_yet_is_one_clear_line() {
    for service in ["card-signer", "push-dispatcher", "hub-scoring"] {
        let output = shown(&run(&["serve", service, "gateway"]), &[(service, "SERVICE")]);
        assert_eq!(
            output,
            "exit 2\n---\nerror: SERVICE is not in this version; there are gateway, task-store, agent-runner, \
             and all of them: all\n"
        );
    }
    insta::assert_snapshot!(shown(&run(&["serve", "gateway", "task-store"]), &[]), @r"
        exit 2
        ---
        error: store: sqlite is for one process, which is `rialto serve all`; services in processes of their own need store: redis
    ");
}

/// A process that does not start: exit code, and its one line.
fn refused(folder: &Path, arguments: &[&str], yaml: &str) -> String {
    let file = folder.join("r.yaml");
    std::fs::write(&file, yaml).unwrap();
    let mut all = vec!["serve", "--config", file.to_str().unwrap()];
    for flag in ["--admin-listen", "--task-store-listen", "--listen"] {
        if !arguments.contains(&flag) {
            all.extend([flag, "127.0.0.1:0"]);
        }
    }
    all.extend(arguments);
    let text = shown(&run(&all), &[]);
    assert!(text.starts_with("exit 2\n---\nerror: ") && text.lines().count() == 3, "{text}");
    text.lines().last().unwrap().to_owned()
}

/// Nothing to warn of.
fn durable() -> Options {
    Options::new().durable("always")
}

fn refused_redis(folder: &Path, url: &str, more: &str) -> String {
    refused(folder, &["task-store"], &format!("store: redis\nredis: {{url: '{url}'{more}}}\n"))
}

#[tokio::test]
async fn a_redis_that_will_never_do_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let drops = durable().args(["--maxmemory-policy", "allkeys-lru"]).start().await.unwrap();
    let text = refused_redis(folder.path(), &drops.url(), "");
    assert!(text.starts_with("error: redis at 127.0.0.1:") && text.contains("allkeys-lru"), "{text}");

    let closed = durable().user("app", "right", "~rialto:* +@read +@connection +info").start().await.unwrap();
    let wrong = closed.url().replace("//", "//app:hunter2@");
    let text = refused_redis(folder.path(), &wrong, "");
    assert!(text.starts_with("error: redis at 127.0.0.1:") && !text.contains("hunter2"), "{text}");
    // The right password, and hardly a right.
    let right = closed.url().replace("//", "//app:right@");
    closed.command(&["ACL", "SETUSER", "app", "+eval"]).await.unwrap();
    let text = refused_redis(folder.path(), &right, "");
    let rights =
        "does not let the user do all that is needed; what is missing: ACL SETUSER app &rialto:* +time +fcall ";
    assert!(text.contains(rights) && text.contains(" +xack ") && !text.contains("app:right"), "{text}");

    let server = durable().start().await.unwrap();
    let text = refused_redis(folder.path(), &format!("{}/99", server.url()), "");
    assert!(text.contains("has no database 99: DB index is out of range; change the number"), "{text}");
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", web.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in web.incoming() {
            let mut stream = stream.unwrap();
            drop(stream.read(&mut [0; 1024]));
            drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        }
    });
    let text = refused_redis(folder.path(), &url, "");
    assert!(text.contains("cannot be used as redis: it answers \"HTTP/1.1 400 Bad Request\"; check host"), "{text}");
}

#[tokio::test]
async fn a_store_that_was_installed_otherwise_is_one_clear_line() {
    let (folder, server) = (tempfile::tempdir().unwrap(), durable().start().await.unwrap());
    let note = async |field: &str, value: &str| server.command(&["HSET", "rialto:{s0}:meta", field, value]).await;
    note("shards", "4").await.unwrap();
    insta::assert_snapshot!(
        refused_redis(folder.path(), &server.url(), ", shards: 2"),
        @"error: the number of shards is 4 in the store and 2 in the configuration; it cannot be changed: set redis.shards to 4"
    );
    note("layout", "9").await.unwrap();
    insta::assert_snapshot!(
        refused_redis(folder.path(), &server.url(), ""),
        @"error: the store has layout 9 and this version of rialto works with 1; use the version that made it"
    );
}

/// One line, from `config check` and from the start.
fn faulty(folder: &Path, yaml: &str) -> String {
    let started = refused(folder, &["task-store"], yaml);
    let file = folder.join("r.yaml");
    let checked = shown(&run(&["config", "check", file.to_str().unwrap()]), &[]);
    assert_eq!(checked, format!("exit 2\n---\n{started}\n"));
    started.replace(file.to_str().unwrap(), "FILE")
}

#[test]
fn certificates_of_no_use_are_one_clear_line() {
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new().unwrap());
    let (cert, key) = authority.issue(&["task-store"]).unwrap();
    let (_, other_key) = authority.issue(&["task-store"]).unwrap();
    let (old, old_key) = authority.issue_until(&["task-store"], 2020).unwrap();
    let refused = |cert: &str, key: &str, ca: &str| {
        let tls = json!({"cert": cert, "key": key, "ca": ca});
        let yaml = json!({"store": "redis", "services": {"task-store": ["https://task-store:1"], "tls": tls}});
        faulty(folder.path(), &yaml.to_string())
    };
    let ca = authority.pem();
    insta::assert_snapshot!(refused("x", &key, ca), @"error: services.tls.cert: it holds no certificate in PEM (FILE)");
    insta::assert_snapshot!(refused(&cert, &key, ""), @"error: services.tls.ca: it holds no certificate in PEM (FILE)");
    insta::assert_snapshot!(refused(&cert, &key, &key), @"error: services.tls.ca: it holds no certificate in PEM (FILE)");
    insta::assert_snapshot!(refused(&cert, "x", ca), @"error: services.tls.key: it holds no private key in PEM (FILE)");
    insta::assert_snapshot!(refused(&cert, &other_key, ca), @"error: services.tls.key: it does not belong to the certificate (FILE)");
    insta::assert_snapshot!(refused(&old, &old_key, ca), @"error: services.tls.cert: it has expired, or one between it and the authority (FILE)");
}

#[test]
fn a_redis_url_that_nobody_understands_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    for url in ["redis://:hunter2@127.0.0.1:99999", "http://:hunter2@x", "redis://:hunter2@", "redis://x/hunter2"] {
        let text = faulty(folder.path(), &format!("store: redis\nredis: {{url: '{url}'}}\n"));
        assert!(text.starts_with("error: redis.url: it must read redis://") && text.ends_with(" (FILE)"), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    let text = faulty(folder.path(), "store: redis\nredis: {url: 'redis+sentinel://x'}\n");
    assert!(text.starts_with("error: redis.url: redis+sentinel:// must end in /<name of the master>"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_port_is_for_whoever_has_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let open = refused(folder.path(), &["gateway", "--admin-listen", "0.0.0.0:0"], "store: redis\n");
    assert_eq!(
        open,
        "error: admin-listen: 0.0.0.0:0 is reachable from other machines, which needs an admin-token-file \
         (--admin-listen)"
    );
    let token = folder.path().join("token");
    std::fs::write(&token, "short\n").unwrap();
    let yaml = format!("ephemeral: true\nadmin-token-file: {}\n", token.display());
    let short = refused(folder.path(), &["all"], &yaml);
    assert!(short.contains("admin-token: must be one line of at least 16"), "{short}");

    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    let cluster = Cluster::builder(env!("CARGO_BIN_EXE_rialto")).config(yaml);
    let cluster = cluster.gateways(0).task_stores(0).runners(0).other(&["all"]).start().await.unwrap();
    let (client, admin) = (http(), cluster.others[0].admin_url());
    for path in ["livez", "readyz"] {
        assert_eq!(get(&client, format!("{admin}/{path}")).await.0, 200, "{path}");
    }
    let asked = async |bearer: Option<&str>| {
        let mut request = client.get(format!("{admin}/nothing-here"));
        if let Some(bearer) = bearer {
            request = request.bearer_auth(bearer);
        }
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(asked(None).await, 401);
    assert_eq!(asked(Some("0123456789abcdeF")).await, 401);
    assert_eq!(asked(Some("0123456789abcdef")).await, 404);
}
