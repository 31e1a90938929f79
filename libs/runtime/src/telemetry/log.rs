//! Logs of a process: to stderr, which is for people and log collectors. stdout belongs to the command.

use std::{fmt, io, panic};

use opentelemetry_appender_tracing::layer::OpenTelemetryTracingBridge;
use opentelemetry_sdk::{logs::SdkLoggerProvider, trace::SdkTracer};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer as _,
    filter::FilterFn,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt as _,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use super::trace;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line; in a trace, with `trace_id` and `span_id`.
    Json,
}

impl Format {
    /// `RIALTO_LOG_FORMAT`: `text` (default) or `json`.
    #[must_use]
    pub fn from_env() -> Self {
        match std::env::var("RIALTO_LOG_FORMAT") {
            Ok(format) if format.eq_ignore_ascii_case("json") => Self::Json,
            _ => Self::Text,
        }
    }
}

/// Starts logging and turns panics into log lines. Call it once, first in `main`.
///
/// `RIALTO_LOG`, or `RUST_LOG` without it, says what is logged (`info,rialto_gateway=debug`); `default` does
/// when neither is set or the filter cannot be read.
pub fn init(format: Format, default: &str) {
    install(format, default, None, None);
}

/// As [`init`], with an export of spans and records beside the lines.
pub(super) fn install(format: Format, default: &str, spans: Option<SdkTracer>, records: Option<&SdkLoggerProvider>) {
    let (filter, complaint) = filter(default);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // A closed stderr must not take the process with it.
        .log_internal_errors(false);
    let lines = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().flatten_event(true).with_ansi(false).map_event_format(InTrace).boxed(),
    };
    let spans = spans.map(|tracer| {
        let layer = tracing_opentelemetry::layer().with_tracer(tracer);
        let layer = layer.with_location(false).with_threads(false).with_level(false).with_target(false);
        layer.with_tracked_inactivity(false).with_filter(FilterFn::new(is_traced))
    });
    let records = records.map(|provider| {
        let (filter, _) = self::filter(default);
        OpenTelemetryTracingBridge::new(provider).with_filter(FilterFn::new(is_exported)).with_filter(filter)
    });
    let registry = tracing_subscriber::registry().with(spans).with(lines.with_filter(filter)).with(records);
    // A test or an embedding process may have its own subscriber; that one stays.
    if registry.try_init().is_ok() {
        panic::set_hook(Box::new(log_panic));
    }
    if let Some(complaint) = complaint {
        tracing::warn!(%complaint, "the log filter cannot be read; using the default");
    }
}

/// Writes one line into a log of JSON lines without being logged: what a server says before its log begins, and why
/// it ends. No filter hides it.
pub fn say_json(level: Level, text: &str) {
    let lines = tracing_subscriber::fmt().json().flatten_event(true).with_ansi(false);
    let lines = lines.with_writer(io::stderr).log_internal_errors(false).finish();
    tracing::subscriber::with_default(lines, || match level {
        Level::ERROR => tracing::error!(target: "rialto", "{text}"),
        _ => tracing::warn!(target: "rialto", "{text}"),
    });
}

/// What is logged, and what is wrong with the text that should say it.
fn filter(default: &str) -> (EnvFilter, Option<String>) {
    let wanted = ["RIALTO_LOG", "RUST_LOG"].into_iter().find_map(|name| Some((name, std::env::var(name).ok()?)));
    match wanted {
        Some((name, text)) if !text.trim().is_empty() => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None),
            Err(error) => (EnvFilter::new(default), Some(format!("{name}: {error}"))),
        },
        _ => (EnvFilter::new(default), None),
    }
}

/// Spans of Rialto, whatever is logged. Those of the exporter's own connections would be exported for ever.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    metadata.is_span() && (target == trace::TARGET || target.starts_with("rialto_") && *metadata.level() <= Level::INFO)
}

/// Records of anything but what exports them.
fn is_exported(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    !["h2", "hyper", "tonic", "tower", "opentelemetry"].iter().any(|own| target.starts_with(own))
}

/// Adds to a JSON line where in a trace it was written.
struct InTrace<F>(F);

impl<S, N, F> FormatEvent<S, N> for InTrace<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(at) = trace::current() else { return self.0.format_event(context, writer, event) };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        match line.trim_end().strip_suffix('}') {
            Some(open) => writeln!(writer, r#"{open},"trace_id":"{}","span_id":"{}"}}"#, at.trace_id(), at.span_id()),
            None => writer.write_str(&line),
        }
    }
}

fn log_panic(info: &panic::PanicHookInfo<'_>) {
    let message = info.payload_as_str().unwrap_or("(no message)");
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    let backtrace = std::backtrace::Backtrace::capture();
    match backtrace.status() {
        std::backtrace::BacktraceStatus::Captured => tracing::error!(message, location, %backtrace, "panic"),
        _ => tracing::error!(message, location, "panic"),
    }
}
