//! What task-store tells about its commits and followers (`docs/telemetry.md`).

use std::sync::LazyLock;

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
};
use rialto_runtime::telemetry::{self, trace};
use rialto_store::{Batch, Committed, Engine, Error, Result};
use tokio::time::Instant;
use tracing::{Instrument as _, field::Empty, trace_span};

struct Meters {
    commits: Counter<u64>,
    duration: Histogram<f64>,
    watchers: UpDownCounter<i64>,
}

static METERS: LazyLock<Meters> = LazyLock::new(|| {
    let meter = telemetry::meter();
    Meters {
        commits: meter
            .u64_counter("rialto.task_store.commits")
            .with_unit("{commit}")
            .with_description("Commits, by how they ended")
            .build(),
        duration: meter
            .f64_histogram("rialto.task_store.commit.duration")
            .with_unit("s")
            .with_description("How long the store takes for a commit")
            .with_boundaries(telemetry::SECONDS.to_vec())
            .build(),
        watchers: meter
            .i64_up_down_counter("rialto.task_store.watchers")
            .with_unit("{watcher}")
            .with_description("Followers of tasks")
            .build(),
    }
});

/// Commits a batch. In a trace, that is a span.
pub(crate) async fn commit(engine: &dyn Engine, batch: Batch) -> Result<Committed> {
    let span = trace::child(|| {
        trace_span!(
            target: trace::TARGET,
            "store commit",
            otel.kind = "client",
            otel.status_code = Empty,
            operations = batch.ops.len(),
            outcome = Empty,
        )
    });
    let started = Instant::now();
    let committed = engine.commit(batch).instrument(span.clone()).await;
    let outcome = match &committed {
        Ok(_) => "ok",
        // Somebody else was faster; what was decided is decided again.
        Err(Error::Conflict { .. }) => "conflict",
        Err(Error::Full) => "full",
        Err(Error::Unavailable(_)) => "unavailable",
        Err(Error::Malformed(_)) => "malformed",
    };
    METERS.duration.record(started.elapsed().as_secs_f64(), &[]);
    METERS.commits.add(1, &[KeyValue::new("outcome", outcome)]);
    span.record("outcome", outcome);
    if !matches!(outcome, "ok" | "conflict") {
        span.record("otel.status_code", "error");
    }
    committed
}

/// A follower came, or went.
pub(crate) fn watchers(change: i64) {
    METERS.watchers.add(change, &[]);
}
