//! Commits and reads.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;
use rialto_store::{
    Batch, Check, Conflict, Engine, EntryId, Error, IndexQuery, Op, Order, Rate, ReadLimit, worker::DeadEntry,
};

use crate::{ZERO, ack, append, batch, claim, connect, named, number, one, put};

#[tokio::test]
async fn a_repeated_commit_answers_like_the_first_and_writes_nothing() {
    let (_server, engine) = one().await;
    let ops = || {
        let mut run = append("runs", &b"\0\xff\r\n"[..]);
        if let Op::Append { into, .. } = &mut run {
            *into = Some(("t:1".to_owned(), "run".to_owned()));
        }
        vec![put("t:1", b"head \0\xff"), put("c:1", b"context"), number("log:1", 1), run]
    };
    let first = engine.commit(named("t:1", 1, ops())).await.unwrap();
    assert_eq!((first.versions.as_slice(), first.entries[0]), (&[1, 1][..], EntryId(1, 0)));
    assert!(first.at > 1_700_000_000_000 && (engine.now() - first.at).abs() < 1000);

    let mut repeat = named("t:1", 1, ops());
    repeat.checks = vec![Check::Absent { key: "t:1".to_owned() }];
    assert_eq!(engine.commit(repeat).await.unwrap(), first);
    let records = engine.get(0, &["t:1", "nothing", "c:1"]).await.unwrap();
    let task = records[0].as_ref().unwrap();
    assert_eq!((task.version, &task.bytes[..], task.refs["run"]), (1, &b"head \0\xff"[..], first.entries[1]));
    assert!(records[1].is_none() && records[2].as_ref().unwrap().refs.is_empty());
    let runs = engine.read_last(0, "runs", 10).await.unwrap();
    assert_eq!((runs.len(), runs[0].tag, &runs[0].payload[..]), (1, 7, &b"\0\xff\r\n"[..]));

    // Ids come in the order of the appends, whatever the order inside.
    let ops =
        vec![append("runs", "a"), append("runs", "b"), number("log:1", 2), append("runs", "c"), number("log:1", 3)];
    let entries = engine.commit(batch(ops)).await.unwrap().entries;
    assert!(entries[0] < entries[1] && entries[1] < entries[3]);
    assert_eq!((entries[2], entries[4], entries.len()), (EntryId(2, 0), EntryId(3, 0), 5));

    // Refs outlive a put, and the next commit has the next version.
    assert_eq!(engine.commit(named("t:1", 2, vec![put("t:1", b"x")])).await.unwrap().versions, [2]);
    assert_eq!(engine.get(0, &["t:1"]).await.unwrap()[0].as_ref().unwrap().refs["run"], first.entries[1]);
    let gone = vec![Op::Delete { key: "t:1".to_owned() }, put("t:1", b"new")];
    assert_eq!(engine.commit(named("t:1", 3, gone)).await.unwrap().versions, [1]);
    assert!(engine.get(0, &["t:1"]).await.unwrap()[0].as_ref().unwrap().refs.is_empty());
}

#[tokio::test]
async fn each_check_says_what_it_found_and_nothing_is_written() {
    let (_server, engine) = one().await;
    engine.commit(batch(vec![put("r", b"1"), put("r", b"2"), number("log", 5), append("runs", "a")])).await.unwrap();
    let claimed = claim(&engine, "me", 1).await;
    let id = claimed[0].entry.id;
    let pending = |consumer: &str| Check::Pending { stream: "runs".to_owned(), id, consumer: consumer.to_owned() };
    let version = |key: &str, version| Check::Version { key: key.to_owned(), version };
    let tail = |stream: &str, id| Check::Tail { stream: stream.to_owned(), id };
    let good = [
        version("r", 2),
        Check::Absent { key: "x".to_owned() },
        pending("me"),
        tail("log", EntryId(5, 0)),
        tail("none", ZERO),
        Check::ShorterThan { stream: "runs".to_owned(), len: 2 },
    ];
    let bad = [
        (version("r", 1), Conflict::Version(Some(2))),
        (version("x", 1), Conflict::Version(None)),
        (Check::Absent { key: "r".to_owned() }, Conflict::Version(Some(2))),
        (pending("you"), Conflict::NotPending),
        (Check::Pending { stream: "none".to_owned(), id, consumer: "me".to_owned() }, Conflict::NotPending),
        (tail("log", EntryId(4, 0)), Conflict::Tail(EntryId(5, 0))),
        (Check::ShorterThan { stream: "runs".to_owned(), len: 1 }, Conflict::TooLong(1)),
    ];
    for (check, reason) in bad {
        let mut checks = good.to_vec();
        checks.push(check);
        let refused = Batch { checks, ops: vec![put("r", b"3")], ..Batch::default() };
        assert_eq!(engine.commit(refused).await, Err(Error::Conflict { check: good.len(), reason }));
    }
    let passing = Batch { checks: good.to_vec(), ops: vec![put("r", b"3")], ..Batch::default() };
    assert_eq!(engine.commit(passing).await.unwrap().versions, [3]);
}

#[tokio::test]
async fn a_malformed_batch_leaves_no_trace() {
    let (_server, engine) = one().await;
    engine.commit(batch(vec![number("log", 5)])).await.unwrap();
    let into = |record: &str| {
        let mut op = append("runs", "x");
        if let Op::Append { into, .. } = &mut op {
            *into = Some((record.to_owned(), "run".to_owned()));
        }
        op
    };
    let delete = |key: &str| Op::Delete { key: key.to_owned() };
    let malformed = [
        batch(vec![put("r", b""), into("none")]),
        batch(vec![put("r", b""), delete("r"), into("r")]),
        batch(vec![put("r", b""), number("log", 5)]),
        batch(vec![put("r", b""), number("other", 2), number("other", 2)]),
        batch(vec![put("r", b""), number("other", u64::MAX)]),
        named("lead", 1, vec![put("r", b"")]),
        Batch { shard: 1, ops: vec![put("r", b"")], ..Batch::default() },
        Batch {
            checks: vec![Check::Limit {
                key: "l".to_owned(),
                rate: Rate { burst: 0, interval: Duration::from_secs(1) },
            }],
            ops: vec![put("r", b"")],
            ..Batch::default()
        },
    ];
    for batch in malformed {
        let text = format!("{batch:?}");
        assert!(matches!(engine.commit(batch).await, Err(Error::Malformed(_))), "{text}");
    }
    assert_eq!(engine.get(0, &["r"]).await.unwrap(), [None]);
    let drop_log = Op::Drop { stream: "log".to_owned() };
    engine.commit(batch(vec![drop_log, number("log", 1), number("log", 2), put("r", b""), into("r")])).await.unwrap();
}

#[tokio::test]
async fn a_limit_lets_a_burst_through_and_then_says_how_long_to_wait() {
    let (_server, engine) = one().await;
    let rate = Rate { burst: 3, interval: Duration::from_secs(60) };
    let check = Check::Limit { key: "sends".to_owned(), rate };
    let take = |checks: Vec<Check>| engine.commit(Batch { checks, ..Batch::default() });
    // A commit that is refused for another reason takes nothing.
    let refused = take(vec![check.clone(), Check::Version { key: "x".to_owned(), version: 1 }]).await;
    assert!(matches!(refused, Err(Error::Conflict { check: 1, .. })));
    take(vec![check.clone(), check.clone()]).await.unwrap();
    take(vec![check.clone()]).await.unwrap();
    let Err(Error::Conflict { check: 0, reason: Conflict::Limited(wait) }) = take(vec![check]).await else {
        panic!("not limited")
    };
    assert!((Duration::from_secs(59)..=Duration::from_secs(60)).contains(&wait), "{wait:?}");
}

#[tokio::test]
async fn streams_are_read_in_bounded_pages() {
    let (_server, engine) = one().await;
    let sizes = [10, 10, 5000, 10, 10];
    let ops = (1..=250).map(|n| {
        let mut op = number("log", n);
        if let Op::Append { payload, .. } = &mut op {
            *payload = vec![b'x'; sizes[usize::try_from(n).unwrap() % 5]].into();
        }
        op
    });
    engine.commit(batch(ops.collect())).await.unwrap();
    let read = async |after, entries, bytes| {
        let limit = ReadLimit { entries, bytes };
        let ids = engine.read(0, "log", EntryId::number(after), limit).await.unwrap();
        ids.iter().map(|entry| entry.id.0).collect::<Vec<_>>()
    };
    assert_eq!(read(0, 1000, usize::MAX).await, (1..=250).collect::<Vec<_>>());
    assert_eq!(read(100, 3, usize::MAX).await, [101, 102, 103]);
    // n = 102 is a large one; one entry comes back whatever its size.
    assert_eq!(read(100, 1000, 100).await, [101]);
    assert_eq!(read(101, 1000, 100).await, [102]);
    assert_eq!(read(102, 1000, 5039).await, [103, 104, 105, 106]);
    assert_eq!(read(250, 10, 100).await, [0; 0]);
    let last = engine.read_last(0, "log", 2).await.unwrap();
    assert_eq!(last.iter().map(|entry| entry.id.0).collect::<Vec<_>>(), [249, 250]);
}

/// Score and member to go on after, lowest and highest score, whether downwards, limit.
type Asked = (i64, String, Option<i64>, Option<i64>, bool, usize);

fn queries() -> impl Strategy<Value = Vec<Asked>> {
    let bound = prop::option::of(-2..6_i64);
    prop::collection::vec((-2..6_i64, "[a-c\u{e9}]{0,2}", bound.clone(), bound, any::<bool>(), 1..5_usize), 20)
}

#[test]
fn any_page_of_an_index_is_what_a_sorted_list_has_there() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_server, engine) = runtime.block_on(one());
    let members = prop::collection::btree_map("[a-c\u{e9}]{0,2}", -2..6_i64, 0..25);
    let runs = std::cell::Cell::new(0);
    proptest!(ProptestConfig::with_cases(40), |(members in members, queries in queries())| {
        runs.set(runs.get() + 1);
        let index = format!("index{}", runs.get());
        let op = |(member, score): (&String, &i64)| {
            Op::Index { index: index.clone(), member: member.clone(), was: None, now: Some(*score) }
        };
        runtime.block_on(engine.commit(batch(members.iter().map(op).collect()))).unwrap();
        let sorted: BTreeSet<_> = members.iter().map(|(member, score)| (*score, member.clone())).collect();
        for (score, member, min, max, descending, limit) in queries {
            for after in [None, Some((score, member))] {
                let order = if descending { Order::Descending } else { Order::Ascending };
                let query = IndexQuery { index: index.clone(), order, after: after.clone(), min, max, limit };
                let found = runtime.block_on(engine.index(0, &query)).unwrap();
                let fits = |row: &&(i64, String)| {
                    min.is_none_or(|min| row.0 >= min) && max.is_none_or(|max| row.0 <= max)
                        && after.as_ref().is_none_or(|after| if descending { *row < after } else { *row > after })
                };
                let fitting = sorted.iter().filter(fits).cloned();
                let expected: Vec<_> =
                    if descending { fitting.rev().take(limit).collect() } else { fitting.take(limit).collect() };
                prop_assert_eq!(&found, &expected, "{:?} of {:?}", query, sorted);
            }
        }
        let all = runtime.block_on(engine.index_count(0, &index, None)).unwrap();
        let some = runtime.block_on(engine.index_count(0, &index, Some(2))).unwrap();
        let many = sorted.iter().filter(|row| row.0 >= 2).count();
        prop_assert_eq!((all, some), (sorted.len() as u64, many as u64));
    });
}

#[tokio::test]
async fn a_buried_entry_becomes_a_dead_one_with_its_story() {
    let (server, engine) = one().await;
    engine.commit(batch(vec![append("runs", &b"\n\0poison\xff"[..])])).await.unwrap();
    let claimed = claim(&engine, "me", 1).await;
    let id = claimed[0].entry.id;
    let bury = || Op::Bury { stream: "runs".to_owned(), id, reason: "line \"one\"\nline two ü".to_owned() };
    engine.commit(batch(vec![bury(), bury()])).await.unwrap();
    let dead = engine.read_last(0, "dead", 5).await.unwrap();
    assert_eq!(dead.len(), 1);
    let entry = DeadEntry::decode(&dead[0].payload).unwrap();
    assert_eq!((entry.stream.as_str(), entry.id, entry.tag, entry.deliveries), ("runs", id, 7, 1));
    assert_eq!((entry.reason.as_str(), &entry.payload[..]), ("line \"one\"\nline two ü", &b"\n\0poison\xff"[..]));
    assert!((engine.now() - entry.at).abs() < 1000);
    assert_eq!(engine.depth(0, "runs").await.unwrap(), rialto_store::Depth::default());
    engine.commit(batch(vec![Op::Remove { stream: "dead".to_owned(), id: dead[0].id }])).await.unwrap();
    assert!(engine.read_last(0, "dead", 5).await.unwrap().is_empty());
    // An operator sees what was counted: the lag stays known.
    engine.commit(batch(vec![append("runs", "next"), ack(&claimed[0])])).await.unwrap();
    let groups = server.command(&["XINFO", "GROUPS", "rialto:{s0}:runs"]).await.unwrap();
    assert_eq!(groups.list()[0].list()[11].int(), 1);
}

#[tokio::test]
async fn notices_reach_listeners_in_other_processes() {
    let (server, engine) = one().await;
    let other = connect(&server.url()).await;
    let mut here = engine.listen(0, "t:1").await.unwrap();
    let mut there = other.listen(0, "t:1").await.unwrap();
    let mut elsewhere = other.listen(0, "t:2").await.unwrap();
    let notify = |topic: &str, payload: &str| Op::Notify { topic: topic.to_owned(), payload: payload.to_owned() };
    engine.commit(batch(vec![notify("t:1", "5"), notify("t:2", "")])).await.unwrap();
    for (notices, payload) in [(&mut here, "5"), (&mut there, "5"), (&mut elsewhere, "")] {
        assert_eq!(crate::within(2000, notices.recv()).await.unwrap().payload, payload);
    }
}
