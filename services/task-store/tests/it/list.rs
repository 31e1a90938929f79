//! ListTasks.

use std::collections::BTreeSet;

use rialto_a2a::{
    Kind,
    v1::{ListTasksRequest, Task},
    wkt::Timestamp,
};
use rialto_rpc::tasks::{ListRequest, task_store_server::TaskStore as Calls};
use rialto_store::{Batch, Op};
use rialto_task_store::Options;
use tonic::Request;

use crate::{engine::engine, world::*};

fn at(task: &Task) -> Timestamp {
    task.status.as_ref().and_then(|status| status.timestamp).expect("a time")
}

async fn filled(owner: &str, tasks: usize) -> (World, Vec<Task>) {
    let world = World::new();
    let mut sent = Vec::new();
    for n in 0..tasks {
        sent.push(world.send(Send::new(&n.to_string()).owner(owner)).await.expect("sends"));
    }
    while let Some(run) = world.claim("r").await {
        let begun = world.begin(&run).await.expect("a turn");
        world.finish(&begun, 3, vec![artifact("a", "x", false), status(S::Completed)]).await;
    }
    (world, sent)
}

#[tokio::test]
async fn tasks_with_equal_timestamps_are_skipped() {
    let (world, sent) = filled("a", 60).await;
    for page_size in [1, 7, 50, 60, 100] {
        let (mut seen, mut query) = (Vec::new(), ListTasksRequest { page_size: Some(page_size), ..Default::default() });
        loop {
            let page = world.list("a", query.clone()).await.expect("lists");
            assert_eq!((page.total_size, page.page_size), (60, page_size));
            seen.extend(page.tasks);
            query.page_token = page.next_page_token;
            if query.page_token.is_empty() {
                break;
            }
        }
        let ids: BTreeSet<&str> = seen.iter().map(|task| task.id.as_str()).collect();
        assert_eq!((seen.len(), ids.len()), (60, 60));
        let order: Vec<_> = seen.iter().map(|task| (at(task), task.id.clone())).collect();
        assert!(order.is_sorted_by(|one, next| one > next), "newest first, then by id");
    }
    let one = world.list("a", ListTasksRequest { page_size: Some(60), ..Default::default() }).await.expect("lists");
    assert_eq!(one.next_page_token, "");
    assert_eq!(sent.len(), 60);
}

#[tokio::test]
async fn page_sizes_and_tokens_are_not_trusted() {
    let (world, _) = filled("a", 10).await;
    let list = |query: ListTasksRequest| world.list("a", query);
    for size in [0, -1, 101, 1_000_000_000, i32::MIN] {
        let refused = list(ListTasksRequest { page_size: Some(size), ..Default::default() }).await;
        assert_eq!(refused.expect_err("refuses").violations[0].field, "pageSize");
    }
    assert_eq!(list(ListTasksRequest::default()).await.expect("lists").page_size, 50);
    let query = ListTasksRequest { page_size: Some(3), ..Default::default() };
    let token = list(query.clone()).await.expect("lists").next_page_token;
    let with = |page_token: String| ListTasksRequest { page_token, ..query.clone() };
    let mut tampered = Vec::new();
    for n in 0..token.len() {
        let mut bytes = token.clone().into_bytes();
        bytes[n] = if bytes[n] == b'A' { b'B' } else { b'A' };
        tampered.push(String::from_utf8(bytes).expect("ASCII"));
    }
    tampered.extend(["x".into(), "x".repeat(100_000), token[1..].to_owned(), format!("{token}AA")]);
    for token in tampered {
        let refused = list(with(token.clone())).await.expect_err("refuses");
        assert_eq!((refused.kind, refused.violations[0].field.as_str()), (Kind::InvalidParams, "pageToken"), "{token}");
    }
    assert!(world.list("b", with(token.clone())).await.is_err(), "of another owner");
    let other = ListTasksRequest { status: S::Completed.into(), ..with(token.clone()) };
    assert!(list(other).await.is_err(), "of another filter");
    // Another replica has the same key, and so has one that starts later.
    let later = World::with(std::sync::Arc::clone(&world.engine), 1, &rialto_task_store::Options::default());
    assert_eq!(later.list("a", with(token)).await.expect("lists").tasks.len(), 3);
}

#[tokio::test]
async fn filters_are_combined_and_the_bound_is_inclusive() {
    let (world, sent) = filled("a", 5).await;
    let waiting = world.send(Send::new("x").owner("a").context(&sent[0].context_id)).await.expect("sends");
    let list = async |query: ListTasksRequest| {
        let listed = world.list("a", query).await.expect("lists");
        assert_eq!(usize::try_from(listed.total_size).expect("few"), listed.tasks.len());
        listed.tasks.into_iter().map(|task| task.id).collect::<Vec<_>>()
    };
    let context_id = sent[0].context_id.clone();
    assert_eq!(list(ListTasksRequest::default()).await.len(), 6);
    assert_eq!(list(ListTasksRequest { context_id: context_id.clone(), ..Default::default() }).await.len(), 2);
    let submitted = ListTasksRequest { status: S::Submitted.into(), ..Default::default() };
    assert_eq!(list(submitted).await, std::slice::from_ref(&waiting.id));
    let both = ListTasksRequest { status: S::Completed.into(), context_id, ..Default::default() };
    assert_eq!(list(both).await, std::slice::from_ref(&sent[0].id));
    let unknown = ListTasksRequest { context_id: "unknown".into(), ..Default::default() };
    assert!(list(unknown).await.is_empty());
    let since = |time: Timestamp| ListTasksRequest { status_timestamp_after: Some(time), ..Default::default() };
    let time = at(&waiting);
    assert!(list(since(time)).await.contains(&waiting.id), "equal is included");
    let finer = Timestamp { nanos: time.nanos + 1, ..time };
    assert!(!list(since(finer)).await.contains(&waiting.id), "a nanosecond later");
    let earlier = Timestamp { nanos: time.nanos - 1, ..time };
    assert!(list(since(earlier)).await.contains(&waiting.id), "a nanosecond before");
    assert!(world.list("b", ListTasksRequest::default()).await.expect("lists").tasks.is_empty());
}

#[tokio::test]
async fn a_list_shows_what_was_asked_for() {
    let (world, _) = filled("a", 2).await;
    let bare = world.list("a", ListTasksRequest::default()).await.expect("lists");
    assert!(bare.tasks.iter().all(|task| task.artifacts.is_empty() && task.history.is_empty()));
    let query = ListTasksRequest { include_artifacts: Some(true), history_length: Some(1), ..Default::default() };
    for task in world.list("a", query).await.expect("lists").tasks {
        assert_eq!(task, world.get_as("a", &task.id, Some(1)).await.expect("reads"));
        assert_eq!((task.artifacts.len(), task.history.len()), (1, 1));
    }
    let negative = ListTasksRequest { history_length: Some(-1), ..Default::default() };
    assert_eq!(kind(world.list("a", negative).await), Kind::InvalidParams);
    let unknown = ListTasksRequest { status: 77, ..Default::default() };
    assert_eq!(kind(world.list("a", unknown).await), Kind::InvalidParams);
}

#[tokio::test]
async fn artifact_updates_do_not_move_a_task() {
    let world = World::new();
    let first = world.send(Send::new("1")).await.expect("sends");
    let begun = world.next().await;
    tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    let second = world.send(Send::new("2")).await.expect("sends");
    world.record(&begun, 3, vec![artifact("a", "x", false)]).await;
    let order = world.list("", ListTasksRequest::default()).await.expect("lists");
    assert_eq!(order.tasks.iter().map(|task| &task.id).collect::<Vec<_>>(), [&second.id, &first.id]);
    tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    world.record(&begun, 4, vec![status(S::Working)]).await;
    let order = world.list("", ListTasksRequest::default()).await.expect("lists");
    assert_eq!(order.tasks.iter().map(|task| &task.id).collect::<Vec<_>>(), [&first.id, &second.id]);
}

#[tokio::test]
async fn a_page_of_large_tasks_is_shorter_and_goes_on() {
    let world = World::new();
    for _ in 0..5 {
        world.send(Send::new(&"x".repeat(2_000_000))).await.expect("sends");
    }
    let mut query = ListTasksRequest { history_length: Some(1), ..Default::default() };
    let mut seen = BTreeSet::new();
    loop {
        let page = world.list("", query.clone()).await.expect("lists");
        assert!(!page.tasks.is_empty() && page.tasks.len() < 5);
        seen.extend(page.tasks.into_iter().map(|task| task.id));
        query.page_token = page.next_page_token;
        if query.page_token.is_empty() {
            break;
        }
    }
    assert_eq!(seen.len(), 5);
}

#[tokio::test]
async fn after_flushall_pages_go_on_at_any_replica() {
    let world = World::with(engine(1), 2, &Options::default());
    for text in ["1", "2"] {
        world.send(Send::new(text)).await.expect("sends");
    }
    let query = ListTasksRequest { page_size: Some(1), ..ListTasksRequest::default() };
    let page = async |replica: usize, page_token: &str| {
        let query = ListTasksRequest { page_token: page_token.to_owned(), ..query.clone() };
        let request = ListRequest { scope: Some(scope("")), query: Some(query) };
        let answer = Calls::list(&world.replicas[replica], Request::new(request)).await;
        answer.map(|answer| answer.into_inner().next_page_token).map_err(|status| error(&status).kind)
    };
    page(0, "").await.expect("the first replica knows the key now");
    let lost = Batch { ops: vec![Op::Delete { key: "cursor-key".to_owned() }], ..Batch::default() };
    world.engine.commit(lost).await.expect("loses it");
    let token = page(1, "").await.expect("the second one makes another");
    assert_eq!(page(1, &token).await, Ok(String::new()));
    assert_eq!(page(0, &token).await, Ok(String::new()), "and the first one finds it");
}
