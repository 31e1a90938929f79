//! What the process itself is: its age and its memory.

use opentelemetry::metrics::Meter;
use tokio::time::Instant;

/// Unit of `/proc/self/statm` on every platform that Rust's Linux targets use by default.
const PAGE: u64 = 4096;

pub(super) fn measure(meter: &Meter) {
    let started = Instant::now();
    meter
        .f64_observable_gauge("process.uptime")
        .with_unit("s")
        .with_description("Time since the process started")
        .with_callback(move |gauge| gauge.observe(started.elapsed().as_secs_f64(), &[]))
        .build();
    meter
        .u64_observable_gauge("process.memory.usage")
        .with_unit("By")
        .with_description("Physical memory in use")
        .with_callback(|gauge| {
            if let Some(bytes) = resident() {
                gauge.observe(bytes, &[]);
            }
        })
        .build();
}

/// Resident memory; `None` where the system does not say.
fn resident() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    statm.split(' ').nth(1)?.parse::<u64>().ok().map(|pages| pages * PAGE)
}
