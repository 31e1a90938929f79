//! `kill -9`, and disks without room: in processes of their own, which run this same test binary.

use std::{
    collections::HashMap,
    env,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rialto_store::{
    Error, Order,
    sqlite::{SqliteConfig, SqliteEngine},
    suite::draft::Home,
};

const FOLDER: &str = "RIALTO_TEST_FOLDER";
const WRITERS: u64 = 4;

fn open(path: &Path) -> Home {
    Home::new(SqliteEngine::open(SqliteConfig::folder(path, 1)).unwrap())
}

/// The argument list that makes this binary run one test as a helper.
fn helper(test: &str) -> Vec<String> {
    ["--exact", test, "--ignored", "--nocapture"].map(str::to_owned).to_vec()
}

/// Writes until it is killed. After each answer it says so: `<writer> <number>`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a helper process of the tests below"]
async fn writes_for_ever() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let home = open(Path::new(&folder));
    let writers = (0..WRITERS).map(|writer| {
        let home = home.clone();
        tokio::spawn(async move {
            let key = format!("r{writer}");
            let mut n = home.record(&key).await.map_or(0, |record| record.version);
            loop {
                n += 1;
                let (was, now) = ((n > 1).then(|| n.cast_signed() - 1), Some(n.cast_signed()));
                let draft = home.batch().put(&key, &n.to_string()).number(&format!("log{writer}"), n, &n.to_string());
                let draft = draft.index("i", &key, was, now).append("work", &format!("{writer} {n}"));
                let draft = if n == 1 { draft.absent(&key) } else { draft.version(&key, n - 1) };
                match draft.commit().await {
                    Ok(_) => say(&format!("{writer} {n}")),
                    Err(error) => return say(&format!("error {error}")),
                }
                if n % 3 == 0 {
                    home.take("work", "me", 1).await;
                }
            }
        })
    });
    futures::future::join_all(writers).await;
}

fn say(line: &str) {
    std::io::stdout().write_all(format!("\n#{line}\n").as_bytes()).unwrap();
}

/// The last number answered to each writer, and whether there was an error, from what a helper says until it ends
/// (or until `kill` lines were said).
fn listen(mut child: std::process::Child, kill: usize) -> (HashMap<u64, u64>, Vec<String>) {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut answered, mut errors, mut said) = (HashMap::new(), Vec::new(), 0);
    for line in lines.map_while(Result::ok) {
        let Some(line) = line.strip_prefix('#') else { continue };
        if let Some(error) = line.strip_prefix("error ") {
            errors.push(error.to_owned());
        } else if let Some((writer, n)) = line.split_once(' ') {
            answered.insert(writer.parse().unwrap(), n.parse().unwrap());
            said += 1;
        }
        if said == kill {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    (answered, errors)
}

/// What was answered is there, what is there is whole, and at most the one commit under way is there unanswered.
async fn verify(path: &Path, answered: &HashMap<u64, u64>) {
    let home = open(path);
    let mut all = 0;
    for writer in 0..WRITERS {
        let key = format!("r{writer}");
        let n = home.record(&key).await.map_or(0, |record| record.version);
        let said = answered.get(&writer).copied().unwrap_or(0);
        assert!(n == said || n == said + 1, "writer {writer}: {said} answered, {n} there");
        let log = home.payloads(&format!("log{writer}")).await;
        assert_eq!(log, (1..=n).map(|n| n.to_string()).collect::<Vec<_>>());
        let score = home.members("i", Order::Ascending, 9).await.into_iter().find(|(_, member)| *member == key);
        assert_eq!(score.map(|(score, _)| score), (n > 0).then_some(n.cast_signed()));
        all += n;
    }
    // Nobody else has the folder, so nothing is owned: no lease to wait for.
    let depth = home.engine.depth(home.shard, "work").await.unwrap();
    assert_eq!((depth.waiting, depth.pending), (all, 0));
    assert_eq!(home.take("work", "next", usize::MAX).await.len() as u64, all);
}

#[tokio::test]
async fn what_was_answered_survives_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let mut answered = HashMap::new();
    for kill in [1, 7, 40, 111, 300] {
        let child = Command::new(env::current_exe().unwrap())
            .args(helper("crash::writes_for_ever"))
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (more, errors) = listen(child, kill);
        assert_eq!(errors, [""; 0]);
        assert!(!more.is_empty());
        answered.extend(more);
        verify(folder.path(), &answered).await;
        // The check after a round may have found one more than was answered.
        let home = open(folder.path());
        for writer in 0..WRITERS {
            if let Some(record) = home.record(&format!("r{writer}")).await {
                answered.insert(writer, record.version);
            }
        }
    }
}

/// A file that may not grow: an I/O error in the middle of anything.
#[tokio::test]
async fn an_io_error_is_answered_as_such_and_spoils_nothing() {
    let folder = tempfile::tempdir().unwrap();
    drop(open(folder.path()));
    // Reserve and log reach 6 MiB; signals that are ignored stay ignored in the new program.
    let script = "trap '' XFSZ; ulimit -f 6144; exec \"$@\"";
    let child = Command::new("bash")
        .args(["-c", script, "bash"])
        .arg(env::current_exe().unwrap())
        .args(helper("crash::writes_for_ever"))
        .env(FOLDER, folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (answered, errors) = listen(child, usize::MAX);
    assert_eq!(errors.len() as u64, WRITERS, "{errors:?}");
    assert!(answered.values().sum::<u64>() > 100);
    verify(folder.path(), &answered).await;
}

#[tokio::test]
#[ignore = "a helper process of the test below"]
async fn fills_its_disk() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let engine = SqliteEngine::open(SqliteConfig::folder(folder, 1)).unwrap();
    crate::folder::a_full_store_still_finishes(&Home::new(engine)).await;
    say("fine");
}

/// A disk of 40 MiB, in a mount namespace of its own. Skipped where that is not allowed.
#[test]
fn a_full_disk_still_lets_tasks_finish() {
    let folder = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=40m none \"$0\" || exit 99; exec \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script])
        .arg(folder.path())
        .arg(env::current_exe().unwrap())
        .args(helper("crash::fills_its_disk"))
        .env(FOLDER, folder.path())
        .output();
    let Ok(output) = output else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !said.contains("running 1 test") {
        eprintln!("skipped: no mount namespace here: {complained}");
        return;
    }
    assert!(said.contains("#fine"), "{said}\n{complained}");
}

#[tokio::test]
async fn a_store_that_was_closed_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let home = open(folder.path());
    home.batch().put("r", "x").commit().await.unwrap();
    // Someone takes the tables away under a running store.
    let conn = rusqlite::Connection::open(folder.path().join("store.db")).unwrap();
    conn.busy_timeout(Duration::from_secs(5)).unwrap();
    conn.execute_batch("DROP TABLE entries; DROP TABLE records").unwrap();
    let result = home.batch().put("r", "y").append("s", "x").commit().await;
    assert!(matches!(result, Err(Error::Unavailable(_))), "{result:?}");
    let result = home.engine.get(home.shard, &["r"]).await;
    assert!(matches!(result, Err(Error::Unavailable(_))), "{result:?}");
}
