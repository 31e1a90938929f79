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

const SPANS_DELAY: (&str, u64) = ("OTEL_BSP_SCHEDULE_DELAY", 5000);
const RECORDS_DELAY: (&str, u64) = ("OTEL_BLRP_SCHEDULE_DELAY", 1000);
const METRICS_INTERVAL: (&str, u64) = ("OTEL_METRIC_EXPORT_INTERVAL", 60_000);

/// A time in milliseconds, and what it is if the environment does not say.
fn millis((name, default): (&str, u64)) -> Duration {
    Duration::from_millis(variable(name).and_then(|text| positive(&text)).unwrap_or(default))
}

fn positive(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|number| *number > 0)
}

/// What cannot be done of what the variables say. Values are not repeated: some are secrets, and any may be one that
/// was pasted into the wrong place.
fn complaints(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut expect = |name: &str, holds: &dyn Fn(&str) -> bool, form: &str, used: &str| {
        if variable(name).is_some_and(|text| !holds(&text)) {
            lines.push(format!("{name} is not {form}; using {used}"));
        }
    };
    let signals = Signal::ALL.map(|signal| signal.name().to_uppercase());
    expect("OTEL_SDK_DISABLED", &|text| ["true", "false"].contains(&&*text.to_lowercase()), "true or false", "false");
    for signal in &signals {
        let known = |text: &str| ["otlp", "none"].contains(&&*text.to_lowercase());
        expect(&format!("OTEL_{signal}_EXPORTER"), &known, "otlp or none", "otlp");
    }
    let all_and_each = |what: &str| {
        let each = signals.iter().map(|signal| format!("OTEL_EXPORTER_OTLP_{signal}_{what}"));
        [format!("OTEL_EXPORTER_OTLP_{what}")].into_iter().chain(each).collect::<Vec<_>>()
    };
    for name in all_and_each("PROTOCOL") {
        expect(&name, &|text| text == "grpc", "grpc, which is all there is", "grpc");
    }
    for name in all_and_each("TIMEOUT") {
        expect(&name, &|text| text.parse::<u64>().is_ok(), "a number of milliseconds", "what is set for all, or 10000");
    }
    for (name, default) in [SPANS_DELAY, RECORDS_DELAY, METRICS_INTERVAL] {
        let form = "a number of milliseconds above 0";
        expect(name, &|text| positive(text).is_some(), form, &default.to_string());
    }
    let pairs = |text: &str| {
        let mut pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
        pairs.all(|pair| pair.split_once('=').is_some_and(|(name, _)| !name.trim().is_empty()))
    };
    for name in all_and_each("HEADERS").iter().map(String::as_str).chain(["OTEL_RESOURCE_ATTRIBUTES"]) {
        expect(name, &pairs, "a list of name=value", "those of it that are");
    }
    const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
    const BY_RATIO: [&str; 2] = ["traceidratio", "parentbased_traceidratio"];
    const OTHERS: [&str; 4] = ["always_on", "always_off", "parentbased_always_on", "parentbased_always_off"];
    let known = |text: &str| BY_RATIO.contains(&text) || OTHERS.contains(&text);
    let form = [&BY_RATIO[..], &OTHERS].concat().join(", ");
    expect(SAMPLER, &known, &format!("one of {form}"), "parentbased_always_on");
    let sampler = variable(SAMPLER).unwrap_or_default();
    if BY_RATIO.contains(&&*sampler) {
        let argument = variable("OTEL_TRACES_SAMPLER_ARG");
        let number = argument.as_deref().and_then(|text| text.parse::<f64>().ok());
        // As the SDK has it.
        let used = if number.is_none_or(|number| number >= 1.0) { "1" } else { "0" };
        if !number.is_some_and(|number| (0.0..=1.0).contains(&number)) {
            lines.push(format!("OTEL_TRACES_SAMPLER_ARG is not a number from 0 to 1; using {used}"));
        }
    }
    lines
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

    /// What the environment asks for in vain, one line each.
    pub(super) fn complaints(&self) -> Vec<String> {
        let exports = Signal::ALL.into_iter().any(|signal| self.endpoint(signal).is_some());
        if exports { complaints(variable) } else { Vec::new() }
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
        let delay = millis(SPANS_DELAY);
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
        let delay = millis(RECORDS_DELAY);
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
        Ok(meters.with_reader(PeriodicReader::builder(exporter).with_interval(millis(METRICS_INTERVAL)).build()))
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

#[cfg(test)]
mod tests {
    fn complaints(variables: &[(&str, &str)]) -> String {
        let variable = |name: &str| Some(variables.iter().find(|(known, _)| *known == name)?.1.to_owned());
        super::complaints(variable).join("\n")
    }

    #[test]
    fn what_variables_ask_for_in_vain_is_said_with_what_is_done_instead() {
        insta::assert_snapshot!(complaints(&[
            ("OTEL_SDK_DISABLED", "hunter2"),
            ("OTEL_LOGS_EXPORTER", "hunter2"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "hunter2"),
            ("OTEL_BSP_SCHEDULE_DELAY", "5s"),
            ("OTEL_BLRP_SCHEDULE_DELAY", "-1"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key: hunter2"),
            ("OTEL_RESOURCE_ATTRIBUTES", "a=b,hunter2"),
            ("OTEL_TRACES_SAMPLER", "hunter2"),
            ("OTEL_TRACES_SAMPLER_ARG", "hunter2"),
        ]), @r"
        OTEL_SDK_DISABLED is not true or false; using false
        OTEL_LOGS_EXPORTER is not otlp or none; using otlp
        OTEL_EXPORTER_OTLP_PROTOCOL is not grpc, which is all there is; using grpc
        OTEL_EXPORTER_OTLP_TRACES_TIMEOUT is not a number of milliseconds; using what is set for all, or 10000
        OTEL_BSP_SCHEDULE_DELAY is not a number of milliseconds above 0; using 5000
        OTEL_BLRP_SCHEDULE_DELAY is not a number of milliseconds above 0; using 1000
        OTEL_METRIC_EXPORT_INTERVAL is not a number of milliseconds above 0; using 60000
        OTEL_EXPORTER_OTLP_HEADERS is not a list of name=value; using those of it that are
        OTEL_RESOURCE_ATTRIBUTES is not a list of name=value; using those of it that are
        OTEL_TRACES_SAMPLER is not one of traceidratio, parentbased_traceidratio, always_on, always_off, parentbased_always_on, parentbased_always_off; using parentbased_always_on
        ");
        let ratio = |ratio| complaints(&[("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", ratio)]);
        for (bad, used) in [("", "1"), ("half", "1"), ("NaN", "0"), ("2", "1"), ("-0.5", "0")] {
            assert_eq!(
                ratio(bad),
                format!("OTEL_TRACES_SAMPLER_ARG is not a number from 0 to 1; using {used}"),
                "{bad}"
            );
        }
        let good = [
            ("OTEL_SDK_DISABLED", "False"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%3Db,x=y"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_BSP_SCHEDULE_DELAY", " 20 "),
            ("OTEL_TRACES_SAMPLER", "always_off"),
            ("OTEL_TRACES_SAMPLER_ARG", "unused"),
        ];
        assert_eq!((complaints(&good), ratio("0.25")), (String::new(), String::new()));
    }
}
