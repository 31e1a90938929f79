//! Entries that come later.

use std::{sync::Arc, time::Duration};

use super::draft::{Home, text};
use crate::{Claim, Engine};

async fn tick(home: &Home, stream: &str) -> u64 {
    home.engine.tick(home.shard, &[stream.to_owned()]).await.unwrap()
}

/// Not before, and by the order of their times.
pub async fn entries_join_when_due(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let now = home.engine.now();
    let draft = home.batch().delay("s", "c", now + 150, "third").delay("s", "a", now - 5, "second");
    draft.delay("s", "b", 0, "first").delay("t", "a", now - 5, "other").commit().await.unwrap();
    assert_eq!(tick(&home, "s").await, 2);
    assert_eq!(home.payloads("s").await, ["first", "second"]);
    assert_eq!(home.engine.depth(home.shard, "s").await.unwrap().delayed, 1);
    let claimed = home.take("s", "a", 9).await;
    assert_eq!(claimed.len(), 2);
    assert_eq!(claimed[0].entry.tag, super::draft::tag("first"));
    while home.engine.now() < now + 150 {
        let left = u64::try_from(now + 150 - home.engine.now()).unwrap_or(0);
        tokio::time::sleep(Duration::from_millis(left + 2)).await;
    }
    // An engine may move them on its own while somebody claims; a tick must do it in any case.
    tick(&home, "s").await;
    let claim = Claim { wait: Duration::from_secs(10), ..home.claim("s", "a", 9) };
    let claimed = home.engine.claim(&claim).await.unwrap();
    assert_eq!(text(&claimed[0].entry.payload), "third");
    assert!(claimed[0].entry.id.0 >= u64::try_from(now + 149).unwrap());
    assert_eq!(tick(&home, "s").await, 0);
    assert_eq!(home.engine.depth(home.shard, "s").await.unwrap().delayed, 0);
    assert_eq!(home.entries("t").await, []);
}

/// Value and time; and an id is free again once its entry joined.
pub async fn the_same_id_replaces(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let later = home.engine.now() + 1_000_000;
    home.batch().delay("s", "a", later, "old").commit().await.unwrap();
    home.batch()
        .delay("s", "a", 1, "new")
        .delay("s", "b", 1, "old")
        .delay("s", "b", later, "new")
        .commit()
        .await
        .unwrap();
    assert_eq!(home.engine.depth(home.shard, "s").await.unwrap().delayed, 2);
    assert_eq!(tick(&home, "s").await, 1);
    home.batch().delay("s", "a", 1, "newer").commit().await.unwrap();
    assert_eq!(tick(&home, "s").await, 1);
    assert_eq!(home.payloads("s").await, ["new", "newer"]);
}

/// Only that one, and no error when it is not there.
pub async fn undelay_takes_back(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().delay("s", "a", 1, "1").delay("s", "b", 1, "2").commit().await.unwrap();
    home.batch().undelay("s", "a").undelay("s", "none").undelay("t", "b").commit().await.unwrap();
    assert_eq!(tick(&home, "s").await, 1);
    assert_eq!(home.payloads("s").await, ["2"]);
    home.batch().undelay("s", "b").commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["2"]);
}

/// A long list does not stop everybody else.
pub async fn many_join_in_bounded_steps(engine: Arc<dyn Engine>) {
    const MANY: u64 = 1500;
    let home = Home::new(engine);
    let draft = (0..MANY).fold(home.batch(), |draft, n| draft.delay("s", &format!("{n:04}"), 1, &n.to_string()));
    draft.commit().await.unwrap();
    let first = tick(&home, "s").await;
    assert!(first > 0 && first < MANY, "{first} in one step");
    let mut moved = first;
    while moved < MANY {
        let step = tick(&home, "s").await;
        assert!(step > 0, "{moved} moved, and then nothing");
        moved += step;
    }
    assert_eq!(home.payloads("s").await, (0..MANY).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(tick(&home, "s").await, 0);
}

/// Whoever is faster.
pub async fn ticks_at_the_same_time_move_each_entry_once(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = (0..100).fold(home.batch(), |draft, n| draft.delay("s", &n.to_string(), 1, &n.to_string()));
    draft.commit().await.unwrap();
    let ticks = (0..8).map(|_| async { tick(&home, "s").await });
    let moved: u64 = futures::future::join_all(ticks).await.into_iter().sum();
    assert_eq!((moved, home.entries("s").await.len()), (100, 100));
}
