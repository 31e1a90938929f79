//! W3C trace context: whose trace the running code belongs to, and how it travels.
//!
//! Spans are `tracing` spans with the target [`TARGET`] and the level TRACE, so that they are no part of log lines;
//! the log filter has no say in what is exported. Without a collector they are not made.

use std::{
    str::FromStr as _,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context, KeyValue, StringValue, Value, global,
    trace::{
        Span as _, SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, Tracer as _,
        get_active_span,
    },
};
use tracing::Span;

/// Of spans that exist for the trace alone.
pub const TARGET: &str = "rialto::trace";

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// What everybody passes on (W3C §3.3.1.5); longer ones are dropped.
const MAX_TRACESTATE: usize = 512;
/// A later version may have more fields, but not any number of them.
const MAX_TRACEPARENT: usize = 512;

/// Name of the one tracer.
pub(super) const TRACER: &str = "rialto";

static ON: AtomicBool = AtomicBool::new(false);

/// Whether spans are exported.
#[must_use]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

pub(super) fn turn_on() {
    ON.store(true, Ordering::Relaxed);
}

/// Where the running code stands in a trace. `None` outside of one, and always when no spans are exported.
#[must_use]
pub fn current() -> Option<SpanContext> {
    if !is_on() {
        return None;
    }
    let context = Context::map_current(|context| context.span().span_context().clone());
    context.is_valid().then_some(context)
}

/// Makes a span that continues somebody else's trace, or begins one.
pub fn under(parent: impl FnOnce() -> Option<SpanContext>, make: impl FnOnce() -> Span) -> Span {
    if !is_on() {
        return make();
    }
    let context = match parent() {
        Some(parent) => Context::new().with_remote_span_context(parent),
        None => Context::new(),
    };
    let _guard = context.attach();
    make()
}

/// Makes a span inside of the trace that the running code belongs to; outside of one, none.
pub fn child(make: impl FnOnce() -> Span) -> Span {
    if current().is_some() { make() } else { Span::none() }
}

/// Runs a future in somebody else's trace, without a span of its own.
pub async fn within<F: Future>(parent: Option<SpanContext>, future: F) -> F::Output {
    use opentelemetry::context::FutureExt as _;
    match parent.filter(|_| is_on()) {
        Some(parent) => future.with_context(Context::new().with_remote_span_context(parent)).await,
        None => future.await,
    }
}

/// Renames the span of the running code, which may have begun before anybody knew what it is about.
pub fn rename(name: &'static str) {
    if is_on() {
        get_active_span(|span| span.update_name(name));
    }
}

/// Adds a list to the span of the running code; fields of `tracing` have no lists.
pub fn set_list(key: &'static str, values: Vec<StringValue>) {
    if is_on() {
        get_active_span(|span| span.set_attribute(KeyValue::new(key, Value::Array(values.into()))));
    }
}

/// Adds a span for something that is over, such as waiting. It ends now.
pub fn passed(name: &'static str, parent: SpanContext, since: SystemTime, attributes: Vec<KeyValue>) {
    if !is_on() {
        return;
    }
    let tracer = global::tracer(TRACER);
    let builder = tracer.span_builder(name).with_start_time(since).with_attributes(attributes);
    let mut span = builder.start_with_context(&tracer, &Context::new().with_remote_span_context(parent));
    // Another machine's clock may be ahead.
    span.end_with_timestamp(opentelemetry::time::now().max(since));
}

/// How long ago this was by this machine's clock; zero if that clock is behind.
#[must_use]
pub fn elapsed_since(since: SystemTime) -> Duration {
    opentelemetry::time::now().duration_since(since).unwrap_or_default()
}

/// Reads a `traceparent` by the rules of W3C Trace Context; anything else is as good as none.
#[must_use]
pub fn parse(text: &str) -> Option<SpanContext> {
    let is_hex = |text: &str, len: usize| {
        text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let mut fields = text.splitn(5, '-');
    let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let valid = text.len() <= MAX_TRACEPARENT
        && is_hex(version, 2)
        && version != "ff"
        && is_hex(trace, 32)
        && is_hex(span, 16)
        && is_hex(flags, 2)
        // Later versions may append fields; this one has none.
        && (version != "00" || fields.next().is_none());
    if !valid {
        return None;
    }
    let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let context = SpanContext::new(trace, span, flags, true, TraceState::default());
    context.is_valid().then_some(context)
}

/// Reads the trace context of a request. Two parents are as good as none.
#[must_use]
pub fn extract(headers: &HeaderMap) -> Option<SpanContext> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    let (Some(one), None) = (all.next(), all.next()) else { return None };
    let context = parse(one.to_str().ok()?)?;
    let states: Vec<&str> = headers.get_all(TRACESTATE).iter().filter_map(|state| state.to_str().ok()).collect();
    let states = states.join(",");
    if states.is_empty() || states.len() > MAX_TRACESTATE {
        return Some(context);
    }
    let state = TraceState::from_str(&states).unwrap_or_default();
    Some(SpanContext::new(context.trace_id(), context.span_id(), context.trace_flags(), true, state))
}

/// The `traceparent` of a span.
#[must_use]
pub fn traceparent(context: &SpanContext) -> String {
    let flags = context.trace_flags() & TraceFlags::SAMPLED;
    format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), flags.to_u8())
}

/// Tells the other end of a request where in the trace it was made.
pub fn inject(context: &SpanContext, headers: &mut HeaderMap) {
    if let Ok(value) = HeaderValue::try_from(traceparent(context)) {
        headers.insert(TRACEPARENT, value);
    }
    let state = context.trace_state().header();
    if let Ok(value) = HeaderValue::try_from(state)
        && !value.is_empty()
    {
        headers.insert(TRACESTATE, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_malformed_traceparent_is_as_good_as_none() {
        let unsampled = format!("{}00", &GOOD[..53]);
        for good in [GOOD, &unsampled] {
            assert_eq!(traceparent(&parse(good).unwrap()), good);
        }
        assert!(!parse(&unsampled).unwrap().is_sampled());
        let later = format!("01{}-more", &GOOD[2..]);
        assert_eq!(traceparent(&parse(&later).unwrap()), GOOD);
        let many_flags = format!("{}ff", &GOOD[..53]);
        assert_eq!(traceparent(&parse(&many_flags).unwrap()), GOOD);
        for bad in [
            "00-0-0-00",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "",
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
        assert!(parse(&format!("01{}-{}", &GOOD[2..], "x".repeat(600))).is_none());
        assert!(extract(&headers(&[("traceparent", GOOD), ("traceparent", GOOD)])).is_none());
        assert!(extract(&headers(&[])).is_none());
    }

    #[test]
    fn a_tracestate_travels_unless_it_is_unfit() {
        let state = |states: &[(&'static str, &str)]| {
            let pairs: Vec<_> = [("traceparent", GOOD)].into_iter().chain(states.iter().copied()).collect();
            extract(&headers(&pairs)).unwrap().trace_state().header()
        };
        assert_eq!(state(&[("tracestate", "a=1,b=2")]), "a=1,b=2");
        assert_eq!(state(&[("tracestate", "a=1"), ("tracestate", "b=2")]), "a=1,b=2");
        assert_eq!(state(&[("tracestate", "no state")]), "");
        assert_eq!(state(&[("tracestate", &format!("a={}", "x".repeat(8192)))]), "");

        let context = extract(&headers(&[("traceparent", GOOD), ("tracestate", "a=1")])).unwrap();
        let mut sent = HeaderMap::new();
        inject(&context, &mut sent);
        assert_eq!(sent, headers(&[("traceparent", GOOD), ("tracestate", "a=1")]));
        let mut sent = HeaderMap::new();
        inject(&parse(GOOD).unwrap(), &mut sent);
        assert_eq!(sent, headers(&[("traceparent", GOOD)]), "an empty tracestate is none");
    }
}
