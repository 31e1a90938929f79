//! Notices and limits.

use std::{sync::Arc, time::Duration};

use super::{conflict, draft::Home};
use crate::{Conflict, Engine, Rate};

/// From the moment they listen, all of them.
pub async fn listeners_hear_commits_in_order(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().notify("topic", "before").commit().await.unwrap();
    let mut one = home.engine.listen(home.shard, "topic").await.unwrap();
    let mut two = home.engine.listen(home.shard, "topic").await.unwrap();
    home.batch().put("r", "x").notify("topic", "1").notify("topic", "2").commit().await.unwrap();
    home.batch().notify("topic", "").commit().await.unwrap();
    for notices in [&mut one, &mut two] {
        for expected in ["1", "2", ""] {
            assert_eq!(notices.recv().await.unwrap().payload, expected);
        }
    }
    drop(one);
    home.batch().notify("topic", "3").commit().await.unwrap();
    assert_eq!(two.recv().await.unwrap().payload, "3");
    // What a notice announces can be read.
    let mut late = home.engine.listen(home.shard, "topic").await.unwrap();
    for n in 2..20 {
        home.batch().put("r", "y").notify("topic", "written").commit().await.unwrap();
        late.recv().await.unwrap();
        assert!(home.record("r").await.unwrap().version >= n);
    }
}

/// By name, and by shard.
pub async fn topics_are_separate(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut here = home.engine.listen(home.shard, "a").await.unwrap();
    let mut there = home.engine.listen(home.shard, "ab").await.unwrap();
    let elsewhere = Home { engine: Arc::clone(&home.engine), shard: 0 };
    home.batch().notify("ab", "1").commit().await.unwrap();
    if elsewhere.shard != home.shard {
        elsewhere.batch().notify("a", "2").commit().await.unwrap();
    }
    home.batch().notify("a", "3").commit().await.unwrap();
    assert_eq!(here.recv().await.unwrap().payload, "3");
    assert_eq!(there.recv().await.unwrap().payload, "1");
}

/// Nor a repeated one.
pub async fn a_failed_commit_is_not_heard(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut notices = home.engine.listen(home.shard, "t").await.unwrap();
    assert!(home.batch().version("r", 1).notify("t", "failed").commit().await.is_err());
    assert!(home.batch().notify("t", "malformed").append_into("s", "x", "none", "ref").commit().await.is_err());
    let once = home.batch().id("r", [1; 16]).put("r", "x").notify("t", "once");
    once.commit().await.unwrap();
    once.commit().await.unwrap();
    home.batch().notify("t", "last").commit().await.unwrap();
    assert_eq!(notices.recv().await.unwrap().payload, "once");
    assert_eq!(notices.recv().await.unwrap().payload, "last");
}

/// Memory stays bounded, and the newest is there.
pub async fn a_slow_listener_is_told_so(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut notices = home.engine.listen(home.shard, "t").await.unwrap();
    for n in 0..2000 {
        home.batch().notify("t", &n.to_string()).commit().await.unwrap();
    }
    let (mut heard, mut lost) = (0, 0);
    loop {
        match notices.recv().await {
            Some(notice) if notice.payload == "1999" => break,
            Some(_) => heard += 1,
            None => lost += 1,
        }
    }
    assert!(lost > 0 && heard < 1999, "{heard} heard, told {lost} times");
}

/// By the store's clock.
pub async fn a_limit_has_a_burst_and_an_interval(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let rate = Rate { burst: 3, interval: Duration::from_millis(400) };
    let take = |key: &'static str| {
        let draft = home.batch().limit(key, rate);
        async move { draft.commit().await }
    };
    let start = tokio::time::Instant::now();
    for _ in 0..3 {
        take("a").await.unwrap();
    }
    let (check, Conflict::Limited(wait)) = conflict(take("a").await) else { panic!("not limited") };
    assert!(check == 0 && wait > Duration::ZERO && wait <= rate.interval, "{wait:?}");
    take("b").await.unwrap();
    tokio::time::sleep(wait + Duration::from_millis(10)).await;
    take("a").await.unwrap();
    if start.elapsed() < rate.interval * 2 {
        let (_, Conflict::Limited(wait)) = conflict(take("a").await) else { panic!("not limited") };
        assert!(wait <= rate.interval);
    }
}

/// Whichever check it was that failed.
pub async fn a_refused_batch_takes_nothing_from_a_limit(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let rate = Rate { burst: 1, interval: Duration::from_secs(600) };
    for _ in 0..3 {
        let refused = home.batch().limit("a", rate).version("none", 1).commit().await;
        assert_eq!(conflict(refused), (1, Conflict::Version(None)));
        let malformed = home.batch().limit("a", rate).append_into("s", "x", "none", "ref").commit().await;
        assert!(super::is_malformed(&malformed));
    }
    home.batch().limit("a", rate).put("r", "x").commit().await.unwrap();
    let (_, Conflict::Limited(wait)) = conflict(home.batch().limit("a", rate).commit().await) else {
        panic!("not limited")
    };
    assert!(wait > Duration::from_secs(500));
}

/// Two checks see each other.
pub async fn one_batch_can_take_twice(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let rate = Rate { burst: 3, interval: Duration::from_secs(600) };
    let twice = home.batch().limit("a", rate).limit("a", rate);
    twice.commit().await.unwrap();
    assert!(matches!(conflict(twice.commit().await), (1, Conflict::Limited(_))));
    home.batch().limit("a", rate).commit().await.unwrap();
    assert!(matches!(conflict(home.batch().limit("a", rate).commit().await), (0, Conflict::Limited(_))));
}
