//! The way to an OpenTelemetry collector, by gRPC. The standard variables (`OTEL_…`) hold where the configuration
//! says nothing.

use std::{env, sync::Arc, time::Duration};

use opentelemetry::{global, trace::TracerProvider as _};
use opentelemetry_otlp::{LogExporter, MetricExporter, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    logs::{LogBatch, LogExporter as _, SdkLoggerProvider},
    metrics::{MeterProviderBuilder, PeriodicReader, Temporality, data::ResourceMetrics, exporter::PushMetricExporter},
    trace::{SdkTracer, SdkTracerProvider, SpanExporter as _},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    batch::{Losses, Queue, Record},
    trace,
};
use crate::config;

/// What can be exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    Traces,
    Metrics,
    Logs,
}

impl Signal {
    pub(super) const ALL: [Self; 3] = [Self::Traces, Self::Metrics, Self::Logs];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
            Self::Logs => "logs",
        }
    }
}

/// Makes exporters.
pub(super) struct Otlp {
    /// For all signals.
    endpoint: Option<String>,
    resource: Resource,
    exporters: TaskTracker,
    stop: CancellationToken,
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// A time in milliseconds.
fn millis(name: &str, default: Duration) -> Duration {
    variable(name).and_then(|text| text.trim().parse().ok()).map_or(default, Duration::from_millis)
}

impl Otlp {
    pub(super) fn new(
        config: &config::Telemetry,
        resource: Resource,
        exporters: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self { endpoint: config.otlp_endpoint.clone(), resource, exporters, stop }
    }

    /// What the environment asks for in vain.
    pub(super) fn complaint(&self) -> Option<&'static str> {
        let other = variable("OTEL_EXPORTER_OTLP_PROTOCOL").is_some_and(|protocol| protocol != "grpc");
        let exports = Signal::ALL.into_iter().any(|signal| self.endpoint(signal).is_some());
        (other && exports)
            .then_some("OTEL_EXPORTER_OTLP_PROTOCOL asks for something else than grpc, which is all there is")
    }

    /// Where a signal goes, if anywhere.
    pub(super) fn endpoint(&self, signal: Signal) -> Option<String> {
        let off = variable("OTEL_SDK_DISABLED").is_some_and(|off| off.eq_ignore_ascii_case("true"));
        let name = signal.name().to_uppercase();
        let none = variable(&format!("OTEL_{name}_EXPORTER")).is_some_and(|it| it.eq_ignore_ascii_case("none"));
        if off || none {
            return None;
        }
        variable(&format!("OTEL_EXPORTER_OTLP_{name}_ENDPOINT")).or_else(|| self.endpoint.clone())
    }

    /// Begins to export spans.
    pub(super) fn spans(&self, endpoint: &str, losses: &Arc<Losses>) -> Result<SdkTracer, String> {
        let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(unusable)?;
        let mut exporter = exporter;
        exporter.set_resource(&self.resource);
        let exporter = Arc::new(exporter);
        let delay = millis("OTEL_BSP_SCHEDULE_DELAY", Duration::from_secs(5));
        let export = move |batch| {
            let exporter = Arc::clone(&exporter);
            async move { told(exporter.export(batch).await) }
        };
        let queue = Queue::start(Signal::Traces, losses, delay, &self.exporters, self.stop.clone(), export);
        let provider =
            SdkTracerProvider::builder().with_resource(self.resource.clone()).with_span_processor(queue).build();
        let tracer = provider.tracer(trace::TRACER);
        global::set_tracer_provider(provider);
        trace::turn_on();
        Ok(tracer)
    }

    /// Begins to export log records.
    pub(super) fn records(&self, endpoint: &str, losses: &Arc<Losses>) -> Result<SdkLoggerProvider, String> {
        let mut exporter = LogExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(unusable)?;
        exporter.set_resource(&self.resource);
        let exporter = Arc::new(exporter);
        let delay = millis("OTEL_BLRP_SCHEDULE_DELAY", Duration::from_secs(1));
        let export = move |batch: Vec<Record>| {
            let exporter = Arc::clone(&exporter);
            async move {
                let records: Vec<_> = batch.iter().map(|(record, scope)| (record, scope)).collect();
                told(exporter.export(LogBatch::new(&records)).await)
            }
        };
        let queue = Queue::start(Signal::Logs, losses, delay, &self.exporters, self.stop.clone(), export);
        Ok(SdkLoggerProvider::builder().with_resource(self.resource.clone()).with_log_processor(queue).build())
    }

    /// Has metrics exported every minute, or as `OTEL_METRIC_EXPORT_INTERVAL` says.
    pub(super) fn metrics(
        &self,
        meters: MeterProviderBuilder,
        endpoint: &str,
        losses: &Arc<Losses>,
    ) -> Result<MeterProviderBuilder, String> {
        let exporter = MetricExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(unusable)?;
        let exporter = Counted { exporter, losses: Arc::clone(losses) };
        Ok(meters.with_reader(PeriodicReader::builder(exporter).build()))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unusable(error: opentelemetry_otlp::ExporterBuildError) -> String {
    format!("telemetry: {error}")
}

fn told(result: OTelSdkResult) -> Result<(), String> {
    result.map_err(|error| error.to_string())
}

/// Counts what goes wrong.
struct Counted {
    exporter: MetricExporter,
    losses: Arc<Losses>,
}

impl PushMetricExporter for Counted {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let result = self.exporter.export(metrics).await;
        let (result, told) = match result {
            Ok(()) => (Ok(()), Ok(())),
            Err(error) => {
                let text = error.to_string();
                (Err(error), Err(text))
            }
        };
        // Nothing is lost: the next export has the sums.
        self.losses.exported(Signal::Metrics, 0, &told);
        result
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}
