//! What a runner tells about turns: a span and some figures each (`docs/telemetry.md`).

use std::{
    sync::{Arc, LazyLock},
    time::{Duration, SystemTime},
};

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
    trace::SpanContext,
};
use rialto_rpc::tasks::RunEntry;
use rialto_runtime::{
    config::TurnEnd,
    telemetry::{self, trace},
};
use tokio::time::Instant;

use crate::backend::End;

struct Meters {
    attempts: Counter<u64>,
    duration: Histogram<f64>,
    queue_wait: Histogram<f64>,
    slots_used: UpDownCounter<i64>,
    slots_limit: UpDownCounter<i64>,
}

static METERS: LazyLock<Meters> = LazyLock::new(|| {
    let meter = telemetry::meter();
    let seconds = |name, description| {
        let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
        histogram.with_boundaries(telemetry::SECONDS.to_vec()).build()
    };
    let slots =
        |name, description| meter.i64_up_down_counter(name).with_unit("{slot}").with_description(description).build();
    Meters {
        attempts: meter
            .u64_counter("rialto.runner.attempts")
            .with_unit("{attempt}")
            .with_description("Attempts at turns, by how they ended")
            .build(),
        duration: seconds("rialto.runner.attempt.duration", "From the beginning of an attempt to its end"),
        queue_wait: seconds("rialto.runner.queue.wait", "From a message's arrival to its first attempt"),
        slots_used: slots("rialto.runner.slots.used", "Turns that are worked on"),
        slots_limit: slots("rialto.runner.slots.limit", "Turns that can be worked on at a time"),
    }
});

/// The labels of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Figures(Arc<str>);

impl Figures {
    pub(crate) fn new(agent: &str) -> Self {
        Self(agent.into())
    }

    fn agent(&self) -> KeyValue {
        KeyValue::new("agent", Arc::clone(&self.0))
    }

    /// Slots that there are, until the guard is dropped.
    pub(crate) fn open(&self, slots: usize) -> impl Drop + use<> {
        Counted::new(&METERS.slots_limit, i64::try_from(slots).unwrap_or(i64::MAX), self.agent())
    }

    /// A slot is in use, until the guard is dropped.
    pub(crate) fn slot(&self) -> impl Drop + use<> {
        Counted::new(&METERS.slots_used, 1, self.agent())
    }

    /// A turn has begun; says how long it waited.
    pub(crate) fn begun(&self, run: &RunEntry, sender: Option<&SpanContext>) {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(run.queued_at_ms).unwrap_or(0));
        METERS.queue_wait.record(trace::elapsed_since(since).as_secs_f64(), &[self.agent()]);
        if let Some(sender) = sender {
            trace::passed("queue wait", sender.clone(), since, vec![self.agent()]);
        }
    }

    /// An attempt has ended.
    pub(crate) fn ended(&self, started: Instant, outcome: &'static str) {
        METERS.attempts.add(1, &[self.agent(), KeyValue::new("outcome", outcome)]);
        METERS.duration.record(started.elapsed().as_secs_f64(), &[self.agent()]);
    }
}

/// Something that is there for a while.
struct Counted(&'static UpDownCounter<i64>, i64, KeyValue);

impl Counted {
    fn new(counter: &'static UpDownCounter<i64>, count: i64, label: KeyValue) -> Self {
        counter.add(count, std::slice::from_ref(&label));
        Self(counter, count, label)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.add(-self.1, std::slice::from_ref(&self.2));
    }
}

/// How an end is called in figures.
pub(crate) const fn outcome(end: &End, turn_end: TurnEnd) -> &'static str {
    match (end, turn_end) {
        (End::Done(_), TurnEnd::Completed) | (End::Completed(_), _) => "completed",
        (End::Done(_), TurnEnd::InputRequired) | (End::InputRequired(_), _) => "input_required",
        (End::AuthRequired(_), _) => "auth_required",
        (End::Failed(_), _) => "failed",
        (End::Rejected(_), _) => "rejected",
    }
}

/// The figures of models, by the GenAI semantic conventions.
pub(crate) struct ModelMeters {
    pub(crate) tokens: Histogram<u64>,
    pub(crate) duration: Histogram<f64>,
}

pub(crate) static MODELS: LazyLock<ModelMeters> = LazyLock::new(|| {
    let meter = telemetry::meter();
    // Powers of 4 and of 2, as the conventions ask for.
    let tokens: Vec<f64> = (0..14).map(|n| 4_f64.powi(n)).collect();
    let seconds: Vec<f64> = (0..14).map(|n| 0.01 * 2_f64.powi(n)).collect();
    ModelMeters {
        tokens: meter
            .u64_histogram("gen_ai.client.token.usage")
            .with_unit("{token}")
            .with_description("Tokens of a request to a model, and of its answer")
            .with_boundaries(tokens)
            .build(),
        duration: meter
            .f64_histogram("gen_ai.client.operation.duration")
            .with_unit("s")
            .with_description("From a request to a model to the end of its answer, further tries included")
            .with_boundaries(seconds)
            .build(),
    }
});
