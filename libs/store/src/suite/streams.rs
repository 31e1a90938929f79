//! Streams that are read.

use std::sync::Arc;

use super::{
    conflict,
    draft::{Home, tag},
    is_malformed,
};
use crate::{Conflict, Engine, EntryId, ReadLimit};

/// Within a batch, between batches, and not by accident.
pub async fn next_ids_rise(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut ids = Vec::new();
    for n in 0..20 {
        let draft = (0..=n % 3).fold(home.batch(), |draft, m| draft.append("s", &format!("{n}.{m}")));
        ids.extend(draft.commit().await.unwrap().entries);
    }
    assert!(ids.is_sorted_by(|a, b| a < b) && ids[0] > EntryId::ZERO);
    let found = home.entries("s").await;
    assert_eq!(found.iter().map(|entry| entry.id).collect::<Vec<_>>(), ids);
    assert!(found.iter().all(|entry| entry.tag == tag(&super::draft::text(&entry.payload))));
    let now = u64::try_from(home.engine.now()).unwrap();
    assert!(ids[0].0.abs_diff(now) < 60_000, "the first part is the time");
}

/// At least one entry, however small the limit.
pub async fn reads_go_on_after_an_id_within_limits(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = (1..=9).fold(home.batch(), |draft, n| draft.number("s", n, &"x".repeat(10)));
    draft.commit().await.unwrap();
    let read = |after, entries, bytes| {
        let home = home.clone();
        async move {
            let found = home.engine.read(home.shard, "s", after, ReadLimit { entries, bytes }).await.unwrap();
            found.into_iter().map(|entry| entry.id.0).collect::<Vec<_>>()
        }
    };
    assert_eq!(read(EntryId::ZERO, 3, 1000).await, [1, 2, 3]);
    assert_eq!(read(EntryId::number(3), 3, 1000).await, [4, 5, 6]);
    assert_eq!(read(EntryId(3, 7), 2, 1000).await, [4, 5]);
    assert_eq!(read(EntryId::number(8), 3, 1000).await, [9]);
    assert_eq!(read(EntryId::number(9), 3, 1000).await, [0; 0]);
    assert_eq!(read(EntryId::ZERO, 100, 30).await, [1, 2, 3]);
    assert_eq!(read(EntryId::ZERO, 100, 39).await, [1, 2, 3]);
    assert_eq!(read(EntryId::ZERO, 100, 1).await, [1]);
    assert_eq!(read(EntryId::ZERO, 0, 0).await, [1]);
    let none = home.engine.read(home.shard, "none", EntryId::ZERO, ReadLimit { entries: 1, bytes: 1 }).await;
    assert_eq!(none.unwrap(), []);
}

/// As a history is shown.
pub async fn the_newest_are_read_oldest_first(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = (1..=5).fold(home.batch(), |draft, n| draft.number("s", n, &n.to_string()));
    draft.commit().await.unwrap();
    for (n, expected) in [(0, &[][..]), (1, &[5][..]), (3, &[3, 4, 5][..]), (9, &[1, 2, 3, 4, 5][..])] {
        let found = home.engine.read_last(home.shard, "s", n).await.unwrap();
        assert_eq!(found.iter().map(|entry| entry.id.0).collect::<Vec<_>>(), expected);
    }
}

/// Equal or below is a bug of the writer; gaps are its business.
pub async fn numbers_must_rise(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let done = home.batch().number("s", 1, "a").number("s", 5, "b").commit().await.unwrap();
    assert_eq!(done.entries, [EntryId::number(1), EntryId::number(5)]);
    for n in [0, 1, 4, 5] {
        assert!(is_malformed(&home.batch().put("r", "x").number("s", n, "c").commit().await));
    }
    assert!(is_malformed(&home.batch().number("s", 7, "c").number("s", 6, "d").commit().await));
    assert!(is_malformed(&home.batch().number("s", 7, "c").number("s", 7, "d").commit().await));
    assert!(is_malformed(&home.batch().number("t", 0, "c").commit().await));
    assert_eq!(home.payloads("s").await, ["a", "b"]);
    assert_eq!((home.record("r").await, home.entries("t").await), (None, vec![]));
    home.batch().number("s", 6, "c").commit().await.unwrap();
}

/// So a writer that is behind learns the truth instead of an error.
pub async fn the_tail_is_checked_before_the_number(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().tail("s", EntryId::ZERO).number("s", 1, "a").commit().await.unwrap();
    let behind = home.batch().tail("s", EntryId::ZERO).number("s", 1, "b").commit().await;
    assert_eq!(conflict(behind), (0, Conflict::Tail(EntryId::number(1))));
    let ahead = home.batch().tail("s", EntryId::number(2)).number("s", 3, "b").commit().await;
    assert_eq!(conflict(ahead), (0, Conflict::Tail(EntryId::number(1))));
    home.batch().tail("s", EntryId::number(1)).number("s", 2, "b").commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["a", "b"]);
}

/// A reader that was there before must not take a new entry for an old one.
pub async fn numbers_are_not_used_again_after_removal(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().number("s", 1, "a").number("s", 2, "b").number("s", 3, "c").commit().await.unwrap();
    home.batch().remove("s", EntryId::number(3)).remove("s", EntryId::number(1)).commit().await.unwrap();
    home.batch().remove("s", EntryId::number(9)).commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["b"]);
    assert!(is_malformed(&home.batch().put("r", "x").number("s", 3, "d").commit().await));
    assert_eq!(home.record("r").await, None);
    home.batch().remove("s", EntryId::number(2)).commit().await.unwrap();
    assert!(is_malformed(&home.batch().put("r", "x").number("s", 3, "d").commit().await));
    home.batch().tail("s", EntryId::number(3)).number("s", 4, "d").commit().await.unwrap();
    let last = home.batch().append("t", "x").commit().await.unwrap().entries[0];
    home.batch().remove("t", last).commit().await.unwrap();
    assert!(home.batch().append("t", "y").commit().await.unwrap().entries[0] > last);
}

/// Everything of it is gone.
pub async fn a_dropped_stream_is_as_new(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().number("s", 1, "a").number("s", 2, "b").number("t", 1, "t").commit().await.unwrap();
    home.batch().drop_stream("s").drop_stream("none").commit().await.unwrap();
    assert_eq!((home.payloads("s").await, home.payloads("t").await), (vec![], vec!["t".to_owned()]));
    home.batch().tail("s", EntryId::ZERO).shorter("s", 1).number("s", 1, "c").commit().await.unwrap();
    home.batch().drop_stream("s").number("s", 1, "d").commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["d"]);
    home.batch().number("s", 2, "e").drop_stream("s").commit().await.unwrap();
    assert_eq!(home.payloads("s").await, [""; 0]);
}

/// Claiming makes no room, acknowledging does.
pub async fn length_counts_claimed_entries_too(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.give("s", &["a", "b"]).await;
    let full = home.batch().shorter("s", 2).append("s", "c");
    assert_eq!(conflict(full.commit().await), (0, Conflict::TooLong(2)));
    let claimed = home.take("s", "c", 1).await.remove(0);
    assert_eq!(conflict(full.commit().await), (0, Conflict::TooLong(2)));
    home.batch().ack("s", claimed.entry.id).commit().await.unwrap();
    full.commit().await.unwrap();
    assert_eq!(conflict(full.commit().await), (0, Conflict::TooLong(2)));
    // Delayed entries are not in the stream yet.
    home.batch().shorter("s", 3).delay("s", "d", i64::MAX / 2000, "later").commit().await.unwrap();
    home.batch().shorter("s", 3).put("r", "x").commit().await.unwrap();
}
