//! Logs of a process: to stderr, which is for people and log collectors. stdout belongs to the command.

use std::{io, panic};

use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
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
    let wanted = ["RIALTO_LOG", "RUST_LOG"].into_iter().find_map(|name| Some((name, std::env::var(name).ok()?)));
    let (filter, complaint) = match wanted {
        Some((name, text)) if !text.trim().is_empty() => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None),
            Err(error) => (EnvFilter::new(default), Some(format!("{name}: {error}"))),
        },
        _ => (EnvFilter::new(default), None),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // A closed stderr must not take the process with it.
        .log_internal_errors(false);
    let lines = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().flatten_event(true).with_ansi(false).boxed(),
    };
    // A test or an embedding process may have its own subscriber; that one stays.
    if tracing_subscriber::registry().with(lines.with_filter(filter)).try_init().is_ok() {
        panic::set_hook(Box::new(log_panic));
    }
    if let Some(complaint) = complaint {
        tracing::warn!(%complaint, "the log filter cannot be read; using the default");
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
