//! Streams that are worked off.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Dice, conflict,
    draft::{Home, tag, text},
};
use crate::{
    Claim, Claimed, Conflict, Engine, EntryId,
    worker::{DEAD, DeadEntry},
};

/// A lease that a test can wait for.
const SHORT: Duration = Duration::from_millis(150);

fn texts(claimed: &[Claimed]) -> Vec<String> {
    claimed.iter().map(|claimed| text(&claimed.entry.payload)).collect()
}

/// What one has, the other does not get.
pub async fn entries_are_claimed_in_order_and_only_once(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    assert_eq!(home.take("s", "a", 5).await, []);
    let ids = home.give("s", &["1", "2", "3", "4"]).await;
    let first = home.take("s", "a", 2).await;
    assert_eq!(texts(&first), ["1", "2"]);
    assert_eq!(texts(&home.take("s", "b", 1).await), ["3"]);
    assert_eq!(texts(&home.take("s", "a", 9).await), ["4"]);
    assert_eq!(home.take("s", "b", 9).await, []);
    let Claimed { shard, stream, entry, deliveries } = &first[1];
    assert_eq!((*shard, &stream[..], entry.id, *deliveries), (home.shard, "s", ids[1], 1));
    assert_eq!(entry.tag, tag("2"));
}

/// By an append, at once.
pub async fn a_claim_waits_and_is_woken(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    for round in ["1", "2", "3"] {
        let waiting = tokio::spawn({
            let home = home.clone();
            async move { home.take_one("s", "a").await }
        });
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(!waiting.is_finished());
        let start = Instant::now();
        home.give("s", &[round]).await;
        assert_eq!(text(&waiting.await.unwrap().entry.payload), round);
        assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
    }
}

/// Empty-handed, not too early and not much too late.
pub async fn a_claim_gives_up_after_its_wait(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let start = Instant::now();
    let claim = Claim { wait: Duration::from_millis(120), ..home.claim("s", "a", 1) };
    assert_eq!(home.engine.claim(&claim).await.unwrap(), []);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(110) && took < Duration::from_secs(3), "took {took:?}");
}

/// The first stream first, over all shards.
pub async fn streams_are_preferred_in_order(engine: Arc<dyn Engine>) {
    let (one, two) = (Home { engine: Arc::clone(&engine), shard: 0 }, Home::new(engine));
    one.give("low", &["l1", "l2"]).await;
    two.give("high", &["h1"]).await;
    let streams = vec![(two.shard, "high".to_owned()), (one.shard, "low".to_owned())];
    let claim = |wait| Claim { streams: streams.clone(), wait, ..one.claim("", "a", 2) };
    let claimed = one.engine.claim(&claim(Duration::ZERO)).await.unwrap();
    let mut found = texts(&claimed);
    // Those in two shards come from two places, so only the split is sure.
    found.sort();
    assert_eq!(found.len(), 2);
    assert!(found.contains(&"h1".to_owned()), "{found:?}");
    assert_eq!(one.engine.claim(&claim(Duration::ZERO)).await.unwrap().len(), 1);
    // A wait covers all of them.
    for (home, stream) in [(&one, "low"), (&two, "high")] {
        let waiting = tokio::spawn({
            let (engine, claim) = (Arc::clone(&one.engine), claim(Duration::from_secs(20)));
            async move { engine.claim(&claim).await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        home.give(stream, &["late"]).await;
        let claimed = waiting.await.unwrap();
        assert_eq!((claimed[0].shard, &claimed[0].stream[..]), (home.shard, stream));
    }
}

/// Nobody goes empty-handed while there is something.
pub async fn two_waiting_claims_share_two_entries(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let wait = |consumer: &'static str| {
        let home = home.clone();
        tokio::spawn(async move { home.take_one("s", consumer).await })
    };
    let (a, b) = (wait("a"), wait("b"));
    tokio::time::sleep(Duration::from_millis(30)).await;
    home.batch().append("s", "1").append("s", "2").commit().await.unwrap();
    let found: HashSet<_> = [a.await.unwrap(), b.await.unwrap()].iter().map(|one| text(&one.entry.payload)).collect();
    assert_eq!(found.len(), 2);
}

/// However much there is.
pub async fn a_claim_leaves_the_rest_to_others(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let draft = (0..50).fold(home.batch(), |draft, n| draft.append("s", &n.to_string()));
    draft.commit().await.unwrap();
    let mut seen = Vec::new();
    for n in 0..5 {
        let claimed = home.take("s", &format!("c{n}"), 10).await;
        assert_eq!(claimed.len(), 10);
        seen.extend(texts(&claimed));
    }
    assert_eq!(seen, (0..50).map(|n| n.to_string()).collect::<Vec<_>>());
}

/// From every view.
pub async fn acknowledged_entries_are_gone(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["1", "2"]).await;
    home.take("s", "a", 2).await;
    home.batch().pending("s", ids[0], "a").ack("s", ids[0]).put("r", "done").commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["2"]);
    assert_eq!(home.engine.heartbeat(home.shard, "s", "a", &ids).await.unwrap(), [false, true]);
    let again = home.batch().pending("s", ids[0], "a").ack("s", ids[0]).put("r", "twice").commit().await;
    assert_eq!(conflict(again), (0, Conflict::NotPending));
    // Without a check it is no error.
    home.batch().ack("s", ids[0]).commit().await.unwrap();
    // Silence is counted in milliseconds: the heartbeat may have been in this one.
    let lease = Claim { lease: Duration::ZERO, wait: SHORT, ..home.claim("s", "b", 9) };
    assert_eq!(texts(&home.engine.claim(&lease).await.unwrap()), ["2"]);
}

/// Not another one, not before the claim, not for another stream.
pub async fn only_the_owner_passes_a_pending_check(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let id = home.give("s", &["1"]).await[0];
    let check = |stream: &str, consumer: &str| {
        let draft = home.batch().pending(stream, id, consumer).put("r", consumer);
        async move { draft.commit().await }
    };
    assert_eq!(conflict(check("s", "a").await), (0, Conflict::NotPending));
    home.take("s", "a", 1).await;
    assert_eq!(conflict(check("s", "b").await), (0, Conflict::NotPending));
    assert_eq!(conflict(check("t", "a").await), (0, Conflict::NotPending));
    check("s", "a").await.unwrap();
    check("s", "a").await.unwrap();
    let both = home.batch().ack("s", id).put("r", "x").commit().await;
    both.unwrap();
    assert_eq!(conflict(check("s", "a").await), (0, Conflict::NotPending));
}

/// Before younger ones, without waiting for a lease, and for anybody.
pub async fn handed_back_entries_come_first_and_at_once(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["1", "2", "3"]).await;
    home.take("s", "a", 2).await;
    home.batch().pending("s", ids[1], "a").hand_back("s", ids[1]).commit().await.unwrap();
    home.batch().pending("s", ids[0], "a").hand_back("s", ids[0]).commit().await.unwrap();
    assert_eq!(conflict(home.batch().pending("s", ids[0], "a").commit().await), (0, Conflict::NotPending));
    assert_eq!(home.engine.heartbeat(home.shard, "s", "a", &ids[..2]).await.unwrap(), [false, false]);
    // Nothing happens to what is not pending.
    home.batch().hand_back("s", ids[0]).hand_back("s", ids[2]).hand_back("s", EntryId(1, 1)).commit().await.unwrap();
    let depth = home.engine.depth(home.shard, "s").await.unwrap();
    assert_eq!((depth.waiting, depth.pending), (3, 0));
    assert_eq!(texts(&home.take("s", "a", 1).await), ["1"]);
    let rest = home.take("s", "b", 9).await;
    assert_eq!(texts(&rest), ["2", "3"]);
    assert_eq!((rest[0].deliveries, rest[1].deliveries), (2, 1));
}

/// Like a new entry does.
pub async fn handing_back_wakes_a_waiting_claim(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let id = home.give("s", &["1"]).await[0];
    home.take("s", "a", 1).await;
    let waiting = tokio::spawn({
        let home = home.clone();
        async move { home.take_one("s", "b").await }
    });
    tokio::time::sleep(Duration::from_millis(30)).await;
    let start = Instant::now();
    home.batch().hand_back("s", id).commit().await.unwrap();
    assert_eq!(waiting.await.unwrap().entry.id, id);
    assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
}

/// After the lease, by a claim that waits for it, with the old owner locked out.
pub async fn abandoned_entries_are_taken_over(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["1", "2"]).await;
    home.take("s", "a", 2).await;
    let start = Instant::now();
    let claim = Claim { lease: SHORT, wait: Duration::from_secs(20), ..home.claim("s", "b", 9) };
    let mut taken = Vec::new();
    while taken.len() < 2 {
        taken.extend(home.engine.claim(&claim).await.unwrap());
    }
    assert!(start.elapsed() >= SHORT - Duration::from_millis(20), "taken over after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(4), "taken over after {:?}", start.elapsed());
    taken.sort_by_key(|claimed| claimed.entry.id);
    assert_eq!(texts(&taken), ["1", "2"]);
    assert!(taken.iter().all(|claimed| claimed.deliveries == 2));
    assert_eq!(home.engine.heartbeat(home.shard, "s", "a", &ids).await.unwrap(), [false, false]);
    let stale = home.batch().pending("s", ids[0], "a").ack("s", ids[0]).put("r", "a").commit().await;
    assert_eq!(conflict(stale), (0, Conflict::NotPending));
    home.batch().pending("s", ids[0], "b").ack("s", ids[0]).put("r", "b").commit().await.unwrap();
    assert_eq!(home.record("r").await.unwrap().bytes, "b");
}

/// Also when it was taken after the wait began: a wait is much longer than a lease.
pub async fn what_is_abandoned_during_a_wait_is_taken_over(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let claim = Claim { lease: SHORT, wait: Duration::from_secs(25), ..home.claim("s", "b", 1) };
    let waiting = tokio::spawn({
        let (engine, claim) = (Arc::clone(&home.engine), claim.clone());
        async move { engine.claim(&claim).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(30)).await;
    // Two claims, one entry: one of them takes it, and shows no sign of life any more.
    home.give("s", &["1"]).await;
    let rival = Claim { consumer: "a".to_owned(), wait: Duration::from_secs(5), ..claim };
    let start = Instant::now();
    let taken = home.engine.claim(&rival).await.unwrap();
    assert_eq!(taken.len(), 1);
    assert_eq!(waiting.await.unwrap()[0].entry.id, taken[0].entry.id);
    assert!(start.elapsed() < Duration::from_secs(4), "taken over after {:?}", start.elapsed());
}

/// As often as it is needed.
pub async fn a_heartbeat_keeps_an_entry(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["kept", "left"]).await;
    home.take("s", "a", 2).await;
    // Far longer than a pause between two signs of life, even on a busy machine.
    let lease = Duration::from_millis(600);
    let claim = Claim { lease, wait: Duration::from_millis(1800), ..home.claim("s", "b", 9) };
    let rival = tokio::spawn({
        let (engine, claim) = (Arc::clone(&home.engine), claim);
        let until = Instant::now() + Duration::from_millis(1800);
        async move {
            let mut taken = Vec::new();
            while Instant::now() < until {
                taken.extend(engine.claim(&Claim { wait: until - Instant::now(), ..claim.clone() }).await.unwrap());
            }
            taken
        }
    });
    while !rival.is_finished() {
        let kept = home.engine.heartbeat(home.shard, "s", "a", &ids[..1]).await.unwrap();
        assert_eq!(kept, [true]);
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    assert_eq!(texts(&rival.await.unwrap()), ["left"]);
    let other = home.engine.heartbeat(home.shard, "s", "b", &[ids[0], ids[1], EntryId(1, 1)]).await.unwrap();
    assert_eq!(other, [false, true, false]);
    let none = home.engine.heartbeat(home.shard, "none", "b", &[ids[0]]).await.unwrap();
    assert_eq!(none, [false]);
}

/// A slow worker does not compete with itself.
pub async fn own_entries_are_not_taken_over(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.give("s", &["1"]).await;
    home.take("s", "a", 1).await;
    let claim = Claim { lease: SHORT, wait: SHORT * 3, ..home.claim("s", "a", 9) };
    assert_eq!(home.engine.claim(&claim).await.unwrap(), []);
    let claim = Claim { consumer: "b".to_owned(), ..claim };
    assert_eq!(home.engine.claim(&claim).await.unwrap().len(), 1);
}

/// With all that is needed to replay them.
pub async fn buried_entries_tell_their_story(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["poison", "fine"]).await;
    home.take("s", "a", 1).await;
    home.batch().hand_back("s", ids[0]).commit().await.unwrap();
    home.take("s", "a", 1).await;
    let reason = "it \"explodes\"\nevery time ü";
    let before = home.engine.now();
    home.batch().pending("s", ids[0], "a").bury("s", ids[0], reason).commit().await.unwrap();
    // Again, and for one that nobody claimed: nothing happens.
    home.batch().bury("s", ids[0], "again").bury("s", ids[1], "unclaimed").commit().await.unwrap();
    let dead = home.entries(DEAD).await;
    assert_eq!(dead.len(), 1);
    let story = DeadEntry::decode(&dead[0].payload).unwrap();
    assert!(story.at.abs_diff(before) < 60_000);
    assert_eq!(dead[0].tag, tag("poison"));
    let payload = bytes::Bytes::from_static(b"poison");
    let (stream, reason) = ("s".to_owned(), reason.to_owned());
    let expected = DeadEntry { stream, id: ids[0], tag: tag("poison"), payload, deliveries: 2, reason, at: story.at };
    assert_eq!(story, expected);
    assert_eq!(home.payloads("s").await, ["fine"]);
    assert_eq!(texts(&home.take("s", "b", 9).await), ["fine"]);
    home.batch().remove(DEAD, dead[0].id).commit().await.unwrap();
    assert_eq!(home.entries(DEAD).await, []);
}

/// Each way after each other way.
pub async fn settling_twice_is_harmless(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let ids = home.give("s", &["1", "2", "3"]).await;
    home.take("s", "a", 3).await;
    home.batch().ack("s", ids[0]).hand_back("s", ids[0]).bury("s", ids[0], "no").commit().await.unwrap();
    home.batch().bury("s", ids[1], "yes").ack("s", ids[1]).hand_back("s", ids[1]).commit().await.unwrap();
    home.batch().hand_back("s", ids[2]).hand_back("s", ids[2]).commit().await.unwrap();
    assert_eq!(home.payloads("s").await, ["3"]);
    assert_eq!(home.entries(DEAD).await.len(), 1);
    let depth = home.engine.depth(home.shard, "s").await.unwrap();
    assert_eq!((depth.waiting, depth.pending), (1, 0));
    assert_eq!(texts(&home.take("s", "b", 9).await), ["3"]);
    assert_eq!(home.take("s", "c", 9).await, []);
}

/// Whenever it is dropped; others get the entry, at the latest after the lease.
pub async fn a_dropped_claim_loses_nothing(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut dice = Dice::new(3);
    let mut given = HashSet::new();
    let mut taken = HashSet::new();
    for n in 0..40 {
        let claim = Claim { lease: SHORT, wait: Duration::from_secs(5), ..home.claim("s", &format!("a{n}"), 2) };
        let waiting = tokio::spawn({
            let engine = Arc::clone(&home.engine);
            async move { engine.claim(&claim).await.unwrap() }
        });
        for _ in 0..dice.roll(4) {
            tokio::task::yield_now().await;
        }
        let value = n.to_string();
        home.give("s", &[&value]).await;
        given.insert(value);
        for _ in 0..dice.roll(4) {
            tokio::task::yield_now().await;
        }
        waiting.abort();
        if let Ok(claimed) = waiting.await {
            taken.extend(texts(&claimed));
        }
    }
    let claim = Claim { lease: SHORT, wait: Duration::from_secs(5), ..home.claim("s", "z", 100) };
    while taken.len() < given.len() {
        taken.extend(texts(&home.engine.claim(&claim).await.unwrap()));
    }
    assert_eq!(taken, given);
}

/// Waiting, owned, later, and since when.
pub async fn depth_tells_the_state(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let depth = async || home.engine.depth(home.shard, "s").await.unwrap();
    assert_eq!(depth().await, crate::Depth::default());
    let ids = home.give("s", &["1", "2", "3"]).await;
    home.batch().delay("s", "d", home.engine.now() + 1_000_000, "4").commit().await.unwrap();
    let millis = |id: EntryId| Some(i64::try_from(id.0).unwrap());
    let crate::Depth { waiting, pending, delayed, oldest } = depth().await;
    assert_eq!((waiting, pending, delayed, oldest), (3, 0, 1, millis(ids[0])));
    home.take("s", "a", 2).await;
    let crate::Depth { waiting, pending, delayed, oldest } = depth().await;
    assert_eq!((waiting, pending, delayed, oldest), (1, 2, 1, millis(ids[2])));
    home.batch().hand_back("s", ids[0]).ack("s", ids[1]).commit().await.unwrap();
    let crate::Depth { waiting, pending, oldest, .. } = depth().await;
    assert_eq!((waiting, pending, oldest), (2, 0, millis(ids[0])));
    home.take("s", "a", 2).await;
    let crate::Depth { waiting, pending, oldest, .. } = depth().await;
    assert_eq!((waiting, pending, oldest), (0, 2, None));
}

/// Who has claimed, whether or not there was something; and since when nothing was heard.
pub async fn consumers_are_known_with_what_they_own(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let consumers = async || home.engine.consumers(home.shard, "s").await.unwrap();
    let owned = async || consumers().await.into_iter().map(|one| (one.name, one.pending)).collect::<Vec<_>>();
    let owned_by = |name: &str, pending| (name.to_owned(), pending);
    assert_eq!(owned().await, []);
    let ids = home.give("s", &["1", "2", "3"]).await;
    assert_eq!(owned().await, [], "who appends is no consumer");
    home.take("s", "b", 2).await;
    home.take("s", "a", 1).await;
    let waits = Claim { wait: SHORT, ..home.claim("s", "c", 1) };
    assert_eq!(home.engine.claim(&waits).await.unwrap(), []);
    assert_eq!(owned().await, [owned_by("a", 1), owned_by("b", 2), owned_by("c", 0)]);
    home.batch().hand_back("s", ids[0]).ack("s", ids[1]).commit().await.unwrap();
    assert_eq!(owned().await, [owned_by("a", 1), owned_by("b", 0), owned_by("c", 0)]);
    tokio::time::sleep(SHORT).await;
    assert_eq!(home.engine.heartbeat(home.shard, "s", "a", &ids[2..]).await.unwrap(), [true]);
    let now = consumers().await;
    assert!(now[1].idle >= SHORT && now[2].idle >= SHORT, "{now:?}");
    assert!(now[0].idle < now[1].idle, "a heartbeat is a sign of life: {now:?}");
    home.take("s", "c", 1).await;
    let now = consumers().await;
    assert_eq!((now[2].pending, now[2].idle < now[1].idle), (1, true), "{now:?}");
    assert_eq!(home.engine.consumers(home.shard, "other").await.unwrap(), []);
}

/// Many consumers that work, give back, forget and show up late: every entry is settled by exactly one commit.
pub async fn every_entry_is_handled_whatever_happens(engine: Arc<dyn Engine>) {
    const ENTRIES: usize = 120;
    let home = Home::new(engine);
    let settled: Arc<Mutex<HashMap<EntryId, Vec<String>>>> = Arc::default();
    let workers: Vec<_> = (0..5_u64)
        .map(|worker| {
            let (home, settled) = (home.clone(), Arc::clone(&settled));
            tokio::spawn(async move {
                let mut dice = Dice::new(worker + 100);
                let mut life = 0;
                while settled.lock().unwrap().len() < ENTRIES {
                    let consumer = format!("w{worker}.{life}");
                    let limit = usize::try_from(dice.roll(4)).unwrap() + 1;
                    let claim = Claim { lease: SHORT, wait: SHORT, ..home.claim("s", &consumer, limit) };
                    for claimed in home.engine.claim(&claim).await.unwrap() {
                        let id = claimed.entry.id;
                        match dice.roll(10) {
                            // It dies, and comes back as somebody else.
                            0 => life += 1,
                            1 => drop(home.batch().pending("s", id, &consumer).hand_back("s", id).commit().await),
                            // It sleeps over its lease and then wants to write.
                            2 => tokio::time::sleep(SHORT + Duration::from_millis(30)).await,
                            _ => {}
                        }
                        if dice.roll(10) < 7 && consumer == format!("w{worker}.{life}") {
                            let draft = home.batch().pending("s", id, &consumer).ack("s", id);
                            if draft.put(&format!("done:{id}"), &consumer).commit().await.is_ok() {
                                settled.lock().unwrap().entry(id).or_default().push(consumer.clone());
                            }
                        } else {
                            life += 1;
                        }
                    }
                }
            })
        })
        .collect();
    let mut given = HashSet::new();
    for n in 0..ENTRIES {
        given.extend(home.give("s", &[&n.to_string()]).await);
    }
    for worker in workers {
        worker.await.unwrap();
    }
    let settled = settled.lock().unwrap().clone();
    assert_eq!(settled.keys().copied().collect::<HashSet<_>>(), given);
    for (id, by) in &settled {
        assert_eq!(by.len(), 1, "{id} was settled by {by:?}");
        let record = home.record(&format!("done:{id}")).await.unwrap();
        assert_eq!((record.version, text(&record.bytes)), (1, by[0].clone()));
    }
    assert_eq!(home.engine.depth(home.shard, "s").await.unwrap(), crate::Depth::default());
}

/// As long as nothing is given back.
pub async fn one_consumer_sees_the_order_of_the_stream(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let home = home.clone();
            tokio::spawn(async move {
                for n in 0..25 {
                    home.give("s", &[&format!("{writer}.{n:02}")]).await;
                }
            })
        })
        .collect();
    let mut seen: Vec<Claimed> = Vec::new();
    while seen.len() < 100 {
        let claim = Claim { wait: Duration::from_secs(20), ..home.claim("s", "a", 7) };
        let claimed = home.engine.claim(&claim).await.unwrap();
        let acks = claimed.iter().fold(home.batch(), |draft, one| draft.ack("s", one.entry.id));
        acks.commit().await.unwrap();
        seen.extend(claimed);
    }
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(seen.is_sorted_by(|a, b| a.entry.id < b.entry.id));
    for writer in 0..4 {
        let own: Vec<_> = texts(&seen).into_iter().filter(|one| one.starts_with(&writer.to_string())).collect();
        assert_eq!(own, (0..25).map(|n| format!("{writer}.{n:02}")).collect::<Vec<_>>());
    }
}
