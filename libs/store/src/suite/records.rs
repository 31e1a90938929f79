//! Records, checks on them, and commits as a whole.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;

use super::{conflict, draft::Home, is_malformed};
use crate::{Conflict, Engine, EntryId, Op, Rate};

/// Each put raises the version, also twice in a batch.
pub async fn puts_count_versions_from_one(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    assert_eq!(home.record("r").await, None);
    assert_eq!(home.batch().put("r", "a").commit().await.unwrap().versions, [1]);
    assert_eq!(home.batch().put("r", "b").put("x", "x").put("r", "c").commit().await.unwrap().versions, [2, 1, 3]);
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, &record.bytes[..], record.refs), (3, &b"c"[..], BTreeMap::new()));
}

/// After a delete, nothing is left.
pub async fn a_deleted_record_starts_again(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("r", "a").put("r", "b").append_into("s", "e", "r", "ref").commit().await.unwrap();
    home.batch().version("r", 2).delete("r").commit().await.unwrap();
    assert_eq!(home.record("r").await, None);
    home.batch().absent("r").delete("r").commit().await.unwrap();
    assert_eq!(home.batch().absent("r").put("r", "c").commit().await.unwrap().versions, [1]);
    assert_eq!(home.record("r").await.unwrap().refs, BTreeMap::new());
}

/// Also when some are missing or asked for twice.
pub async fn get_answers_in_the_order_asked(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("a", "1").put("b", "2").commit().await.unwrap();
    let found = home.engine.get(home.shard, &["b", "no", "a", "b"]).await.unwrap();
    let found: Vec<_> = found.into_iter().map(|record| record.map(|record| record.bytes)).collect();
    let (one, two) = (Bytes::from_static(b"1"), Bytes::from_static(b"2"));
    assert_eq!(found, [Some(two.clone()), None, Some(one), Some(two)]);
    assert_eq!(home.engine.get(home.shard, &[]).await.unwrap(), []);
}

/// Nothing, everything, and much.
pub async fn values_are_bytes_of_any_size(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let all: Vec<u8> = (0..=255).collect();
    for value in [Bytes::new(), Bytes::from(all.clone()), Bytes::from(all.repeat(4096))] {
        let mut draft = home.batch();
        draft.batch.ops = vec![
            Op::Put { key: "r".to_owned(), bytes: value.clone() },
            Op::Append { stream: "s".to_owned(), at: crate::At::Next, tag: 255, payload: value.clone(), into: None },
        ];
        draft.commit().await.unwrap();
        assert_eq!(home.record("r").await.unwrap().bytes, value);
        let entry = home.engine.read_last(home.shard, "s", 1).await.unwrap().remove(0);
        assert_eq!((entry.tag, entry.payload), (255, value));
    }
}

/// A ref is no write of the record: its version stays.
pub async fn refs_are_written_by_append_and_kept_by_put(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let first = home.batch().put("r", "a").append_into("s", "1", "r", "run").commit().await.unwrap();
    assert_eq!((first.versions.len(), first.entries.len()), (1, 1));
    let second = home.batch().append_into("s", "2", "r", "other").append("s", "3").commit().await.unwrap();
    let refs = BTreeMap::from([("run".to_owned(), first.entries[0]), ("other".to_owned(), second.entries[0])]);
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, record.refs), (1, refs.clone()));
    home.batch().version("r", 1).put("r", "b").commit().await.unwrap();
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, &record.bytes[..], record.refs), (2, &b"b"[..], refs));
    let third = home.batch().append_into("s", "4", "r", "run").put("r", "c").commit().await.unwrap();
    assert_eq!(home.record("r").await.unwrap().refs["run"], third.entries[0]);
}

/// What the batch did before the fault is undone.
pub async fn a_ref_into_no_record_is_malformed_and_nothing_is_written(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = home.batch().put("other", "x").index("i", "m", None, Some(1)).append_into("s", "1", "r", "ref");
    assert!(is_malformed(&draft.commit().await));
    home.batch().put("r", "a").commit().await.unwrap();
    let late = home.batch().put("other", "x").delete("r").append_into("s", "1", "r", "ref").put("r", "b");
    assert!(is_malformed(&late.commit().await), "the record must exist when the op is applied");
    assert_eq!((home.record("other").await, home.entries("s").await), (None, vec![]));
    assert_eq!(home.record("r").await.unwrap().version, 1);
    assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), 0);
}

/// Put after delete is a new record; append into a record put before is fine.
pub async fn operations_apply_in_order(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("r", "a").put("r", "b").append_into("s", "0", "r", "ref").commit().await.unwrap();
    let done = home.batch().put("r", "c").delete("r").put("r", "d").append_into("s", "1", "r", "new").commit().await;
    let done = done.unwrap();
    assert_eq!(done.versions, [3, 1]);
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, &record.bytes[..]), (1, &b"d"[..]));
    assert_eq!(record.refs, BTreeMap::from([("new".to_owned(), done.entries[0])]));
    home.batch().put("gone", "x").delete("gone").commit().await.unwrap();
    assert_eq!(home.record("gone").await, None);
}

/// In their order, with what was found.
pub async fn the_first_failed_check_is_named(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("r", "a").put("r", "b").append("s", "1").commit().await.unwrap();
    let tail = home.entries("s").await[0].id;
    let fails = |draft: super::draft::Draft| async move { conflict(draft.put("w", "w").commit().await) };
    assert_eq!(fails(home.batch().version("r", 1)).await, (0, Conflict::Version(Some(2))));
    assert_eq!(fails(home.batch().version("r", 2).version("no", 1)).await, (1, Conflict::Version(None)));
    assert_eq!(fails(home.batch().absent("no").absent("r")).await, (1, Conflict::Version(Some(2))));
    assert_eq!(fails(home.batch().tail("s", EntryId::ZERO).absent("r")).await, (0, Conflict::Tail(tail)));
    assert_eq!(fails(home.batch().shorter("s", 2).shorter("s", 1)).await, (1, Conflict::TooLong(1)));
    assert_eq!(fails(home.batch().pending("s", tail, "c")).await, (0, Conflict::NotPending));
    assert_eq!(home.record("w").await, None);
    let all = home.batch().version("r", 2).absent("w").tail("s", tail).shorter("s", 2).tail("none", EntryId::ZERO);
    all.put("w", "w").commit().await.unwrap();
}

/// One batch with every operation, refused.
pub async fn a_conflict_writes_nothing_at_all(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let setup = home.batch().put("r", "a").put("gone", "g").index("i", "m", None, Some(5)).number("log", 1, "1");
    setup.append("work", "w1").append("work", "w2").append("work", "w3").commit().await.unwrap();
    let claimed: Vec<_> = home.take("work", "c", 3).await.into_iter().map(|claimed| claimed.entry.id).collect();
    let mut notices = home.engine.listen(home.shard, "topic").await.unwrap();
    let rate = Rate { burst: 1, interval: std::time::Duration::from_secs(600) };
    let refused = home
        .batch()
        .limit("l", rate)
        .absent("r")
        .put("r", "b")
        .put("new", "n")
        .delete("gone")
        .index("i", "m", Some(5), Some(6))
        .index("i", "n", None, Some(7))
        .number("log", 2, "2")
        .append_into("work", "w4", "r", "ref")
        .delay("work", "d", 0, "later")
        .ack("work", claimed[0])
        .hand_back("work", claimed[1])
        .bury("work", claimed[2], "bad")
        .notify("topic", "refused");
    assert_eq!(conflict(refused.commit().await), (1, Conflict::Version(Some(1))));
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, record.refs.len()), (1, 0));
    assert!(home.record("new").await.is_none() && home.record("gone").await.is_some());
    assert_eq!(home.members("i", crate::Order::Ascending, 9).await, [(5, "m".to_owned())]);
    assert_eq!(home.payloads("log").await, ["1"]);
    assert_eq!(home.payloads("work").await, ["w1", "w2", "w3"]);
    assert_eq!(home.payloads(crate::worker::DEAD).await, [""; 0]);
    assert_eq!(home.engine.heartbeat(home.shard, "work", "c", &claimed).await.unwrap(), [true; 3]);
    let depth = home.engine.depth(home.shard, "work").await.unwrap();
    assert_eq!((depth.waiting, depth.pending, depth.delayed), (0, 3, 0));
    home.batch().limit("l", rate).notify("topic", "applied").commit().await.unwrap();
    assert_eq!(notices.recv().await.unwrap().payload, "applied");
}

/// The same names in two shards are two things.
pub async fn shards_are_worlds_apart(engine: Arc<dyn Engine>) {
    let beyond = crate::Batch { shard: engine.shards(), ..crate::Batch::default() };
    assert!(is_malformed(&engine.commit(beyond).await));
    if engine.shards() == 1 {
        return;
    }
    let (one, two) = (Home { engine: Arc::clone(&engine), shard: 0 }, Home { engine, shard: 1 });
    one.batch()
        .put("r", "1")
        .index("i", "m", None, Some(1))
        .number("s", 5, "1")
        .append("w", "1")
        .commit()
        .await
        .unwrap();
    let fresh = two.batch().absent("r").tail("s", EntryId::ZERO).shorter("w", 1);
    fresh.put("r", "2").index("i", "m", None, Some(2)).number("s", 3, "2").append("w", "2").commit().await.unwrap();
    for (home, n) in [(&one, "1"), (&two, "2")] {
        assert_eq!(home.record("r").await.unwrap().bytes, n);
        assert_eq!(home.payloads("s").await, [n]);
        assert_eq!(home.members("i", crate::Order::Ascending, 9).await, [(n.parse().unwrap(), "m".to_owned())]);
        let claimed = home.take("w", "c", 9).await;
        assert_eq!((claimed.len(), claimed[0].shard), (1, home.shard));
    }
}

/// The same id: nothing is checked or written again.
pub async fn a_repeated_commit_returns_its_first_result(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = home.batch().id("r", [7; 16]).absent("r").put("r", "a").put("x", "x").append("s", "1");
    let draft = draft.append_into("s", "2", "r", "ref").index("i", "m", None, Some(3));
    let first = draft.commit().await.unwrap();
    assert_eq!((&first.versions[..], first.entries.len()), (&[1, 1][..], 2));
    assert!(first.at > 1_600_000_000_000);
    for _ in 0..3 {
        assert_eq!(draft.commit().await.unwrap(), first);
    }
    assert_eq!(home.record("r").await.unwrap().version, 1);
    assert_eq!(home.payloads("s").await, ["1", "2"]);
    // Other writes that leave the record alone do not matter.
    home.batch().put("x", "y").append("s", "3").commit().await.unwrap();
    assert_eq!(draft.commit().await.unwrap(), first);
    // A batch that wrote nothing but its lead record.
    let bare = home.batch().id("bare", [0; 16]).put("bare", "");
    assert_eq!(bare.commit().await.unwrap(), bare.commit().await.unwrap());
}

/// Ids are compared with the last one only, and another id is another commit.
pub async fn only_the_last_commit_is_recognised(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let first = home.batch().id("r", [1; 16]).absent("r").put("r", "a");
    let second = home.batch().id("r", [2; 16]).version("r", 1).put("r", "b");
    first.commit().await.unwrap();
    let result = second.commit().await.unwrap();
    assert_eq!(second.commit().await.unwrap(), result);
    assert_eq!(conflict(first.commit().await), (0, Conflict::Version(Some(2))));
    home.batch().delete("r").commit().await.unwrap();
    assert_eq!(conflict(second.commit().await), (0, Conflict::Version(None)));
    assert_eq!(first.commit().await.unwrap().versions, [1]);
}

/// Otherwise it would be kept nowhere.
pub async fn a_commit_id_needs_its_lead_record(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    assert!(is_malformed(&home.batch().id("r", [1; 16]).put("x", "x").commit().await));
    assert_eq!(home.record("x").await, None);
}
