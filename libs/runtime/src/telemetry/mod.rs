//! What a process tells about itself: log lines on stderr, metrics on its admin port, and, when a collector is
//! configured, traces, metrics and logs over OTLP. `docs/telemetry.md` has names, units and settings.
//!
//! Nothing here may disturb the product: what a collector does not take is counted and dropped, and without a
//! collector no span is made at all.

mod batch;
mod log;
mod otlp;
mod process;
mod seldom;
pub mod trace;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use opentelemetry::{KeyValue, global, metrics::Meter};
use opentelemetry_sdk::{
    Resource,
    metrics::{MeterProviderBuilder, SdkMeterProvider},
};
use prometheus::{Encoder as _, Registry, TextEncoder};
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    batch::Losses,
    otlp::{Otlp, Signal},
};
pub use self::{
    log::{Format, init, say_json},
    seldom::Seldom,
};
use crate::config;

/// Bounds of the buckets of every histogram of seconds: from a commit to a model's answer.
pub const SECONDS: [f64; 9] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0];

/// All instruments of Rialto belong to this one.
///
/// Instruments are made once per process, after [`start`]; those made before it, or without it, measure nothing.
/// Whoever has a figure rather than an event (the length of a queue) registers an observable gauge: its callback
/// runs at every scrape, must not wait, and so reads what a task of its own keeps up to date.
#[must_use]
pub fn meter() -> Meter {
    global::meter("rialto")
}

/// Media type of [`metrics_text`].
pub const METRICS_TYPE: &str = prometheus::TEXT_FORMAT;

static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// All metrics of the process in the text format of Prometheus.
///
/// # Errors
/// A metric that cannot be written, which is a bug.
pub fn metrics_text() -> Result<Vec<u8>, String> {
    let mut text = Vec::with_capacity(16 << 10);
    let families = REGISTRY.get().map(Registry::gather).unwrap_or_default();
    TextEncoder::new().encode(&families, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

/// Which process tells.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `rialto`, or `rialto-<role>`. `OTEL_SERVICE_NAME` overrides it.
    pub service: String,
    /// Of the program.
    pub version: &'static str,
}

/// What runs until the process ends.
#[derive(Debug)]
#[must_use = "spans that are not flushed at the end are lost"]
pub struct Telemetry {
    meters: SdkMeterProvider,
    exporters: TaskTracker,
    stop: CancellationToken,
}

/// Starts logs, metrics and, if it is configured, the export to a collector. Call it once, inside of the runtime;
/// in place of [`init`]. A collector need not be there.
///
/// # Errors
/// An endpoint that cannot be used.
pub fn start(config: &config::Telemetry, identity: Identity, format: Format) -> Result<Telemetry, String> {
    let resource = resource(identity);
    let (exporters, stop) = (TaskTracker::new(), CancellationToken::new());
    let otlp = Otlp::new(config, resource.clone(), exporters.clone(), stop.clone());

    let registry = Registry::new();
    let scrape = opentelemetry_prometheus::exporter().with_registry(registry.clone()).scope_info_enabled(false);
    let scrape = scrape.build().map_err(|error| format!("metrics: {error}"))?;
    let mut meters = SdkMeterProvider::builder().with_resource(resource).with_reader(scrape);
    let losses = Arc::new(Losses::default());
    if let Some(endpoint) = otlp.endpoint(Signal::Metrics) {
        meters = otlp.metrics(meters, &endpoint, &losses)?;
    }
    let meters = MeterProviderBuilder::build(meters);
    global::set_meter_provider(meters.clone());
    // One process has one telemetry; a second one, in a test, shows the metrics of the first.
    drop(REGISTRY.set(registry));
    losses.measure(&meter());
    process::measure(&meter());

    let spans = otlp.endpoint(Signal::Traces).map(|endpoint| otlp.spans(&endpoint, &losses)).transpose()?;
    let records = otlp.endpoint(Signal::Logs).map(|endpoint| otlp.records(&endpoint, &losses)).transpose()?;
    log::install(format, "info", spans, records.as_ref());
    for complaint in otlp.complaints() {
        tracing::warn!("{complaint}");
    }
    Ok(Telemetry { meters, exporters, stop })
}

/// Attributes of everything that is exported. Those of the environment (`OTEL_RESOURCE_ATTRIBUTES`,
/// `OTEL_SERVICE_NAME`) win.
fn resource(identity: Identity) -> Resource {
    let said = Resource::builder().build();
    let is_said = |key: &'static str| {
        said.iter().any(|(known, value)| known.as_str() == key && !value.as_str().starts_with("unknown_service"))
    };
    let own = [
        ("service.name", identity.service),
        ("service.version", identity.version.to_owned()),
        ("service.instance.id", uuid::Uuid::new_v4().to_string()),
    ];
    let missing = own.into_iter().filter(|(key, _)| !is_said(key));
    Resource::builder().with_attributes(missing.map(|(key, value)| KeyValue::new(key, value))).build()
}

impl Telemetry {
    /// Hands over what is left, which takes `grace` at most; what a collector does not take by then is lost.
    pub async fn stop(self, grace: Duration) {
        self.stop.cancel();
        self.exporters.close();
        let meters = self.meters;
        // Its last export blocks a thread.
        let metrics = tokio::task::spawn_blocking(move || meters.shutdown_with_timeout(grace));
        let over = async { tokio::join!(self.exporters.wait(), metrics) };
        drop(timeout(grace, over).await);
    }
}
