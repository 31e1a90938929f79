//! What a folder keeps, and what it says when it cannot be used.

use std::{fs, path::Path, time::Duration};

use rialto_store::{
    At, Claim, Conflict, EntryId, Error, Order, Rate,
    sqlite::{OpenError, SqliteConfig, SqliteEngine},
    suite::draft::Home,
};

fn open(path: &Path) -> Home {
    Home::new(SqliteEngine::open(SqliteConfig::folder(path, 2)).unwrap())
}

fn refused(config: SqliteConfig) -> OpenError {
    SqliteEngine::open(config).expect_err("this must not open")
}

#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let rate = Rate { burst: 1, interval: Duration::from_secs(600) };
    let (ids, first);
    {
        let home = open(folder.path());
        let draft = home.batch().put("r", "a").put("r", "b").index("i", "m", None, Some(7)).number("log", 4, "x");
        draft.append_into("s", "0", "r", "ref").limit("l", rate).commit().await.unwrap();
        ids = home.give("s", &["1", "2", "3"]).await;
        home.batch().remove("log", EntryId::number(4)).commit().await.unwrap();
        home.batch().delay("s", "d", home.engine.now() + 300, "later").commit().await.unwrap();
        let lead = home.batch().id("lead", [9; 16]).absent("lead").put("lead", "x").append("s", "4");
        first = lead.commit().await.unwrap();
        // Claimed twice and once, and never settled: this process is about to die.
        assert_eq!(home.take("s", "a", 2).await.len(), 2);
        home.batch().hand_back("s", ids[0]).commit().await.unwrap();
        assert_eq!(home.take("s", "a", 1).await[0].entry.id, ids[0]);
        home.batch().put("x", "the next commit writes the deliveries").commit().await.unwrap();
    }
    let home = open(folder.path());
    let record = home.record("r").await.unwrap();
    assert_eq!((record.version, &record.bytes[..], record.refs.len()), (2, &b"b"[..], 1));
    assert_eq!(home.members("i", Order::Ascending, 9).await, [(7, "m".to_owned())]);
    assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), 1);
    let repeat = home.batch().id("lead", [9; 16]).absent("lead").put("lead", "x").append("s", "4");
    assert_eq!(repeat.commit().await.unwrap(), first);
    assert!(matches!(home.batch().limit("l", rate).commit().await, Err(Error::Conflict { .. })));
    let depth = home.engine.depth(home.shard, "s").await.unwrap();
    assert_eq!((depth.waiting, depth.pending, depth.delayed), (5, 0, 1));
    let full = home.batch().shorter("s", 5).commit().await;
    assert_eq!(full, Err(Error::Conflict { check: 0, reason: Conflict::TooLong(5) }));
    home.batch().tail("log", EntryId::number(4)).commit().await.unwrap();
    assert!(matches!(home.batch().number("log", 4, "y").commit().await, Err(Error::Malformed(_))));
    // At once, whatever the lease; and nobody forgot how often.
    let claimed = home.take("s", "b", 3).await;
    let found: Vec<_> = claimed.iter().map(|one| (one.entry.id, one.deliveries)).collect();
    assert_eq!(found[1..], [(ids[0], 3), (ids[1], 1)]);
    assert_eq!(found[0].1, 2);
    // What was delayed comes by itself to a claim that waits, without any tick.
    home.take("s", "b", 9).await;
    assert_eq!(&home.take_one("s", "b").await.entry.payload[..], b"later");
    let next = home.batch().append("s", "5").commit().await.unwrap().entries[0];
    assert!(next > first.entries[0]);
}

#[tokio::test]
async fn a_delayed_entry_wakes_a_claim_that_already_waits() {
    for config in [SqliteConfig::memory(1), SqliteConfig::folder(tempfile::tempdir().unwrap().keep(), 1)] {
        let path = config.path.clone();
        let home = Home::new(SqliteEngine::open(config).unwrap());
        let waiting = tokio::spawn({
            let home = home.clone();
            async move { home.take_one("s", "a").await }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let due = home.engine.now() + 100;
        home.batch().delay("s", "late", due + 1_000_000, "late").commit().await.unwrap();
        home.batch().delay("s", "d", due, "x").commit().await.unwrap();
        let claimed = waiting.await.unwrap();
        let late = home.engine.now() - due;
        assert!((0..1000).contains(&late), "{late} ms late");
        assert_eq!(&claimed.entry.payload[..], b"x");
        drop(home);
        path.map(fs::remove_dir_all).transpose().unwrap();
    }
}

#[tokio::test]
async fn unusable_folders_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = SqliteConfig::folder(folder.path().join("deep/er"), 2);
    let engine = SqliteEngine::open(config.clone()).unwrap();
    let error = refused(config.clone());
    assert!(matches!(&error, OpenError::Locked { .. }));
    assert!(error.to_string().contains("used by another process; stop that one"), "{error}");
    drop(engine);
    drop(SqliteEngine::open(config.clone()).unwrap());

    let error = refused(SqliteConfig { shards: 4, ..config.clone() });
    assert_eq!(
        error.to_string(),
        "the number of shards is 2 in the store, not 4; set shards to 2, or start with an empty folder"
    );
    assert!(matches!(refused(SqliteConfig { shards: 0, ..config }), OpenError::NoShards));

    fs::write(folder.path().join("file"), "x").unwrap();
    for path in [folder.path().join("file"), folder.path().join("file/in/it"), "/proc/rialto".into()] {
        let error = refused(SqliteConfig::folder(&path, 1));
        assert!(matches!(&error, OpenError::Folder { .. }), "{error}");
        assert!(error.to_string().contains("choose another one"), "{error}");
    }

    let newer = folder.path().join("newer");
    drop(SqliteEngine::open(SqliteConfig::folder(&newer, 1)).unwrap());
    rusqlite::Connection::open(newer.join("store.db")).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let error = refused(SqliteConfig::folder(&newer, 1));
    assert!(error.to_string().contains("has format 99, this program knows 1"), "{error}");

    let damaged = folder.path().join("damaged");
    fs::create_dir(&damaged).unwrap();
    fs::write(damaged.join("store.db"), "this is no database".repeat(1000)).unwrap();
    let error = refused(SqliteConfig::folder(&damaged, 1));
    assert!(matches!(&error, OpenError::Damaged { .. }), "{error}");
    assert!(!error.to_string().contains('\n') && error.to_string().contains("restore a backup"), "{error}");
}

/// Fills a store with batches that take room; says how many fit.
async fn fill(home: &Home) -> usize {
    let value = "x".repeat(20_000);
    for n in 0..10_000 {
        let draft = home.batch().put(&format!("fill{n}"), &value).append("s", &n.to_string());
        match draft.commit().await {
            Ok(_) => {}
            Err(Error::Full) => return n,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("it never got full");
}

/// What must still work when there is no room: reading, finishing, and starting again after deleting.
pub(crate) async fn a_full_store_still_finishes(home: &Home) {
    home.batch().put("task", "working").commit().await.unwrap();
    let fits = fill(home).await;
    assert!(fits > 10, "{fits}");
    assert_eq!(home.record(&format!("fill{fits}")).await, None);
    assert_eq!(home.entries("s").await.len(), fits);
    let claimed = home.take("s", "a", 5).await;
    assert_eq!(claimed.len(), 5);
    for one in &claimed {
        let mut finish = home.batch().pending("s", one.entry.id, "a").ack("s", one.entry.id).put("task", "done");
        finish = finish.append("log", "done").index("i", &one.entry.id.to_string(), None, Some(1));
        finish.batch.releasing = true;
        finish.commit().await.unwrap();
    }
    assert_eq!(home.batch().put("more", &"x".repeat(50_000)).commit().await, Err(Error::Full));
    assert_eq!(home.entries("log").await.len(), 5);
    for n in 0..fits {
        let mut delete = home.batch().delete(&format!("fill{n}"));
        delete.batch.releasing = true;
        delete.commit().await.unwrap();
    }
    // It notices by itself, a moment later.
    let start = tokio::time::Instant::now();
    while home.batch().put("again", &"x".repeat(50_000)).commit().await == Err(Error::Full) {
        assert!(start.elapsed() < Duration::from_secs(10), "it stays full");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_size_limit_leaves_room_to_finish() {
    let max_size = Some(24 << 20);
    let memory = SqliteEngine::open(SqliteConfig { max_size, ..SqliteConfig::memory(1) }).unwrap();
    a_full_store_still_finishes(&Home::new(memory)).await;
    let folder = tempfile::tempdir().unwrap();
    let config = SqliteConfig { max_size, durable: false, ..SqliteConfig::folder(folder.path(), 1) };
    a_full_store_still_finishes(&Home::new(SqliteEngine::open(config).unwrap())).await;
    assert!(fs::metadata(folder.path().join("store.db")).unwrap().len() <= (24 << 20) + (5 << 20));
}

/// One malformed batch among many: the others in its transaction are not touched.
#[tokio::test]
async fn who_is_at_fault_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let home = open(folder.path());
    let commits = (0..100_u64).map(|n| {
        let mut draft = home.batch().put(&format!("r{n}"), "x").append("s", "x");
        if n % 10 == 3 {
            draft = draft.append_into("s", "y", "none", "ref");
        }
        async move { draft.commit().await }
    });
    let results = futures::future::join_all(commits).await;
    for (n, result) in results.iter().enumerate() {
        assert_eq!(matches!(result, Err(Error::Malformed(_))), n % 10 == 3, "{n}: {result:?}");
        assert_eq!(home.record(&format!("r{n}")).await.is_some(), result.is_ok());
    }
    assert_eq!(home.entries("s").await.len(), 90);
}

/// A database that errs in the middle (here: a trigger) spoils one batch, and nothing that is remembered.
#[tokio::test]
async fn an_error_of_the_database_spoils_one_batch_only() {
    let folder = tempfile::tempdir().unwrap();
    drop(open(folder.path()));
    let conn = rusqlite::Connection::open(folder.path().join("store.db")).unwrap();
    conn.execute_batch(
        "CREATE TRIGGER broken BEFORE INSERT ON entries WHEN NEW.payload = CAST('broken' AS BLOB)
         BEGIN SELECT RAISE(ABORT, 'broken on purpose'); END",
    )
    .unwrap();
    drop(conn);
    let home = open(folder.path());
    home.batch()
        .put("r", "a")
        .number("log", 1, "1")
        .index("i", "m", None, Some(1))
        .append("s", "1")
        .commit()
        .await
        .unwrap();
    let bad = home.batch().put("r", "b").number("log", 2, "2").index("i", "m", Some(1), None).append("s", "broken");
    let good = home.batch().put("x", "x").append("s", "2");
    let (bad, good) = futures::future::join(bad.commit(), good.commit()).await;
    assert!(matches!(bad, Err(Error::Unavailable(reason)) if reason.contains("on purpose")));
    good.unwrap();
    assert_eq!(home.record("r").await.unwrap().version, 1);
    assert_eq!(home.payloads("s").await, ["1", "2"]);
    let draft = home.batch().version("r", 1).tail("log", EntryId::number(1)).shorter("s", 3);
    draft.number("log", 2, "2").index("i", "m", Some(1), Some(2)).commit().await.unwrap();
    assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), 1);
    assert_eq!(home.members("i", Order::Ascending, 9).await, [(2, "m".to_owned())]);
}

#[tokio::test]
async fn values_that_do_not_fit_are_refused() {
    let home = Home::new(SqliteEngine::open(SqliteConfig::memory(1)).unwrap());
    let huge = home.batch().number("s", u64::MAX, "x");
    assert!(matches!(huge.commit().await, Err(Error::Malformed(_))));
    let nothing = home.batch().limit("l", Rate { burst: 0, interval: Duration::from_secs(1) });
    assert!(matches!(nothing.commit().await, Err(Error::Malformed(_))));
    let past = rialto_store::ReadLimit { entries: 1, bytes: 1 };
    home.batch().number("s", 1, "x").commit().await.unwrap();
    assert_eq!(home.engine.read(0, "s", EntryId(u64::MAX, u64::MAX), past).await.unwrap(), []);
    let mut odd = home.batch();
    odd.batch.ops = vec![rialto_store::Op::Append {
        stream: "s".to_owned(),
        at: At::Number(u64::MAX / 2),
        tag: 0,
        payload: bytes::Bytes::new(),
        into: None,
    }];
    odd.commit().await.unwrap();
    let claim = Claim { streams: vec![(7, "s".to_owned())], ..home.claim("s", "a", 1) };
    assert!(matches!(home.engine.claim(&claim).await, Err(Error::Malformed(_))));
}
