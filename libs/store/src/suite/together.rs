//! Many at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    Dice, conflict,
    draft::{Home, text},
};
use crate::{Claim, Conflict, Engine, EntryId, Error};

/// One commit writes the same number into two records, an index and a stream. Whatever is read first, what is
/// read later is at least as new; two records read together are equal.
pub async fn commits_are_seen_whole_or_not_at_all(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("a", "0").put("b", "0").index("i", "m", None, Some(0)).commit().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|reader| {
            let (home, over) = (home.clone(), Arc::clone(&over));
            tokio::spawn(async move {
                let number = |bytes: &bytes::Bytes| text(bytes).parse::<i64>().unwrap();
                let mut least = 0;
                while !over.load(Ordering::Relaxed) {
                    let found = home.engine.get(home.shard, &["a", "b"]).await.unwrap();
                    let (a, b) = (found[0].clone().unwrap(), found[1].clone().unwrap());
                    assert_eq!(a.bytes, b.bytes);
                    assert_eq!(a.version, b.version);
                    assert!(number(&a.bytes) >= least, "time goes back");
                    let steps: [i64; 2] = if reader == 0 { [0, 1] } else { [1, 0] };
                    least = number(&a.bytes);
                    for step in steps {
                        let seen = if step == 0 {
                            let members = home.lowest("i").await;
                            assert_eq!(members.len(), 1, "{members:?}");
                            members[0].0
                        } else {
                            let last = home.engine.read_last(home.shard, "s", 1).await.unwrap();
                            last.first().map_or(0, |entry| i64::try_from(entry.id.0).unwrap())
                        };
                        assert!(seen >= least, "{seen} after {least}");
                        least = seen;
                    }
                }
                least
            })
        })
        .collect();
    for n in 1..=150_u32 {
        let (was, now) = (i64::from(n) - 1, i64::from(n));
        let draft = home.batch().put("a", &n.to_string()).number("s", n.into(), "x");
        draft.index("i", "m", Some(was), Some(now)).put("b", &n.to_string()).commit().await.unwrap();
        // Once answered, everybody sees it.
        assert_eq!(home.record("a").await.unwrap().bytes, n.to_string());
        assert_eq!(home.lowest("i").await, [(now, "m".to_owned())]);
    }
    over.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.await.unwrap() <= 150);
    }
}

/// Cancel against finish.
pub async fn of_two_commits_on_a_version_one_wins(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    for n in 0..30 {
        let key = format!("r{n}");
        home.batch().put(&key, "working").commit().await.unwrap();
        let race = |end: &'static str| {
            let draft = home.batch().version(&key, 1).put(&key, end).append("log", end);
            tokio::spawn(async move { draft.commit().await })
        };
        let (one, two) = (race("canceled"), race("completed"));
        let (one, two) = (one.await.unwrap(), two.await.unwrap());
        let loser = if one.is_ok() { two } else { one };
        assert_eq!(conflict(loser), (0, Conflict::Version(Some(2))));
        let record = home.record(&key).await.unwrap();
        assert_eq!(record.version, 2);
        assert_eq!(text(&record.bytes), text(&home.entries("log").await[n].payload));
    }
    assert_eq!(home.entries("log").await.len(), 30);
}

/// Read, add one, try again on a conflict.
pub async fn increments_are_not_lost(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    home.batch().put("n", "0").commit().await.unwrap();
    let adders: Vec<_> = (0..8)
        .map(|_| {
            let home = home.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    loop {
                        let record = home.record("n").await.unwrap();
                        let n: u32 = text(&record.bytes).parse().unwrap();
                        let draft = home.batch().version("n", record.version).put("n", &(n + 1).to_string());
                        match draft.commit().await {
                            Ok(_) => break,
                            Err(Error::Conflict { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            })
        })
        .collect();
    for adder in adders {
        adder.await.unwrap();
    }
    let record = home.record("n").await.unwrap();
    assert_eq!((text(&record.bytes).as_str(), record.version), ("80", 81));
}

/// Calls are dropped in the middle, and made again until one is answered: as if each was made once.
pub async fn repeats_and_lost_replies_change_nothing(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let writers: Vec<_> = (0..6_u8)
        .map(|writer| {
            let home = home.clone();
            tokio::spawn(async move {
                let (mut dice, key) = (Dice::new(writer.into()), format!("r{writer}"));
                for n in 1..=20_u8 {
                    let mut draft = home.batch().id(&key, [n; 16]).put(&key, &n.to_string());
                    draft = if n == 1 { draft.absent(&key) } else { draft.version(&key, u64::from(n) - 1) };
                    let was = (n > 1).then(|| i64::from(n) - 1);
                    let draft = draft.append("s", &format!("{key}.{n}")).index("i", &key, was, Some(n.into()));
                    loop {
                        let attempt = tokio::spawn({
                            let draft = draft.clone();
                            async move { draft.commit().await }
                        });
                        for _ in 0..dice.roll(6) {
                            tokio::task::yield_now().await;
                        }
                        if dice.roll(3) == 0 {
                            attempt.abort();
                        }
                        match attempt.await {
                            Ok(result) => {
                                let result = result.unwrap();
                                assert_eq!(result.versions, [u64::from(n)]);
                                assert_eq!(result.entries.len(), 1);
                                if dice.roll(2) == 0 {
                                    assert_eq!(draft.commit().await.unwrap(), result);
                                }
                                break;
                            }
                            Err(dropped) => assert!(dropped.is_cancelled()),
                        }
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let entries = home.payloads("s").await;
    assert_eq!(entries.len(), 6 * 20);
    for writer in 0..6 {
        let key = format!("r{writer}");
        assert_eq!(home.record(&key).await.unwrap().version, 20);
        let own: Vec<_> = entries.iter().filter(|entry| entry.starts_with(&key)).cloned().collect();
        assert_eq!(own, (1..=20).map(|n| format!("{key}.{n}")).collect::<Vec<_>>());
    }
    assert_eq!(home.members("i", crate::Order::Ascending, 4).await.len(), 6);
}

/// Owners pause longer than their lease and then write as if nothing had happened; the record follows only
/// those who own at that moment.
pub async fn a_stale_owner_never_writes(engine: Arc<dyn Engine>) {
    const TURNS: u64 = 40;
    let home = Home::new(engine);
    home.batch().put("r", "0").append("s", "turn").commit().await.unwrap();
    let lease = Duration::from_millis(30);
    let workers: Vec<_> = (0..3_u64)
        .map(|worker| {
            let home = home.clone();
            tokio::spawn(async move {
                let (mut dice, mut written) = (Dice::new(worker + 7), Vec::new());
                let consumer = format!("w{worker}");
                loop {
                    let claim = Claim { lease, wait: lease, ..home.claim("s", &consumer, 1) };
                    let claimed = home.engine.claim(&claim).await.unwrap();
                    if home.record("r").await.unwrap().version > TURNS {
                        return written;
                    }
                    let Some(id) = claimed.first().map(|claimed| claimed.entry.id) else { continue };
                    // The version is read as the owner; both must still hold when writing.
                    let version = home.record("r").await.unwrap().version;
                    for _ in 0..dice.roll(3) {
                        tokio::time::sleep(lease.mul_f64(0.4)).await;
                    }
                    if write(&home, id, &consumer, version).await {
                        written.push(version + 1);
                    }
                    if dice.roll(2) == 0 {
                        tokio::time::sleep(lease * 2).await;
                        // Taken over or not: if it passes, nobody else wrote in between.
                        if write(&home, id, &consumer, version + 1).await {
                            written.push(version + 2);
                        }
                    }
                    drop(home.batch().pending("s", id, &consumer).hand_back("s", id).commit().await);
                }
            })
        })
        .collect();
    let mut written = Vec::new();
    for worker in workers {
        written.extend(worker.await.unwrap());
    }
    written.sort_unstable();
    let last = home.record("r").await.unwrap().version;
    assert_eq!(written, (2..=last).collect::<Vec<_>>(), "each version is written once, by an owner");
}

async fn write(home: &Home, id: EntryId, consumer: &str, version: u64) -> bool {
    let draft = home.batch().pending("s", id, consumer).version("r", version).put("r", consumer);
    match draft.commit().await {
        Ok(done) => done.versions == [version + 1],
        Err(Error::Conflict { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}
