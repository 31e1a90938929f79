use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use rialto_store::{
    At, Batch, Check, Claim, Engine, EntryId, Op, ReadLimit,
    sqlite::{SqliteConfig, SqliteEngine},
    worker::{Handler, Outcome, Work, Worker, consumer_name},
};
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
struct Echo(Arc<dyn Engine>, CancellationToken);

#[async_trait::async_trait]
impl Handler for Echo {
    async fn handle(&self, work: Work) -> Outcome {
        let claimed = &work.claimed;
        let (stream, id) = (claimed.stream.clone(), claimed.entry.id);
        let batch = Batch {
            shard: claimed.shard,
            commit: Some(("t:1".to_owned(), [2; 16])),
            checks: vec![
                Check::Version { key: "t:1".to_owned(), version: 1 },
                Check::Pending { stream: stream.clone(), id, consumer: work.consumer.to_string() },
            ],
            ops: vec![
                Op::Put { key: "t:1".to_owned(), bytes: Bytes::from_static(b"done") },
                Op::Append { stream: "log".to_owned(), at: At::Number(1), tag: 0, payload: Bytes::new(), into: None },
                Op::Ack { stream, id },
            ],
            ..Batch::default()
        };
        self.0.commit(batch).await.unwrap();
        self.1.cancel();
        Outcome::Settled
    }
}

async fn runs(engine: Arc<dyn Engine>) {
    let batch = Batch {
        commit: Some(("t:1".to_owned(), [1; 16])),
        checks: vec![Check::Absent { key: "t:1".to_owned() }],
        ops: vec![
            Op::Put { key: "t:1".to_owned(), bytes: Bytes::from_static(b"new") },
            Op::Append {
                stream: "runs".to_owned(),
                at: At::Next,
                tag: 1,
                payload: Bytes::from_static(b"t:1"),
                into: Some(("t:1".to_owned(), "run".to_owned())),
            },
        ],
        ..Batch::default()
    };
    let stop = CancellationToken::new();
    let worker = Worker {
        engine: Arc::clone(&engine),
        streams: vec![(0, "runs".to_owned())],
        consumer: consumer_name("test"),
        slots: 4,
        lease: Duration::from_secs(15),
        heartbeat: Duration::from_secs(5),
        tick: None,
    };
    let handler = Arc::new(Echo(Arc::clone(&engine), stop.clone()));
    let running = tokio::spawn(worker.run(handler, stop, Duration::from_secs(1)));
    let first = engine.commit(batch.clone()).await.unwrap();
    running.await.unwrap();
    let record = engine.get(0, &["t:1"]).await.unwrap().remove(0).unwrap();
    assert_eq!((record.version, &record.bytes[..]), (2, &b"done"[..]));
    assert_eq!(record.refs.get("run"), Some(&first.entries[0]));
    let log = engine.read(0, "log", EntryId::ZERO, ReadLimit { entries: 9, bytes: 9 }).await.unwrap();
    assert_eq!(log.len(), 1);
    let depth = engine.depth(0, "runs").await.unwrap();
    assert_eq!((depth.waiting, depth.pending), (0, 0));
}

#[tokio::test]
async fn a_task_travels_through_memory() {
    runs(SqliteEngine::open(SqliteConfig::memory(1)).unwrap()).await;
}

#[tokio::test]
async fn a_task_travels_through_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    runs(SqliteEngine::open(SqliteConfig::folder(folder.path(), 1)).unwrap()).await;
    // The folder is free again, and the shards are remembered.
    let again = SqliteEngine::open(SqliteConfig::folder(folder.path(), 2));
    assert!(again.is_err_and(|error| error.to_string().contains("has 1 shards, not 2")));
    let engine = SqliteEngine::open(SqliteConfig::folder(folder.path(), 1)).unwrap();
    let claim = Claim {
        streams: vec![(0, "runs".to_owned())],
        consumer: "c".to_owned(),
        limit: 1,
        lease: Duration::from_secs(1),
        wait: Duration::ZERO,
    };
    assert_eq!(engine.claim(&claim).await.unwrap(), []);
}
