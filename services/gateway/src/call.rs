//! Who asks what, and how: the part of a request that is the same on every wire.
//!
//! HTTP headers and gRPC metadata are the same thing here, so each rule exists once (spec §3.2.6).

use std::{sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use rialto_a2a::{Error, Kind, Result, v1::AgentExtension};
use tokio::time::Instant;

use crate::{EVENT_NUMBER, VERSIONS, agents::Agent};

pub(crate) const A2A_VERSION: HeaderName = HeaderName::from_static("a2a-version");
pub(crate) const A2A_EXTENSIONS: HeaderName = HeaderName::from_static("a2a-extensions");
pub(crate) const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// A call on an agent.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) agent: Arc<Agent>,
    pub(crate) caller: Caller,
    /// Which of the agent's extensions the client declared.
    declared: Vec<bool>,
    /// When the client stops waiting.
    pub(crate) deadline: Option<Instant>,
    /// A valid W3C `traceparent`, or nothing.
    pub(crate) traceparent: String,
    /// Number of the last event that the client knows.
    pub(crate) last_event: Option<u64>,
}

/// Who asks. The owner is empty while authentication is off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    /// As said by the path; the message may say it instead, but not otherwise.
    pub(crate) tenant: String,
    pub(crate) owner: String,
}

impl Call {
    /// Reads service parameters. `version` is the one of the query string, which counts when no header says it.
    ///
    /// # Errors
    /// VersionNotSupported; a `Last-Event-ID` that is not a number.
    pub(crate) fn new(agent: Arc<Agent>, tenant: String, headers: &HeaderMap, version: Option<&str>) -> Result<Self> {
        check_version(headers, version)?;
        Ok(Self {
            caller: Caller { tenant, owner: String::new() },
            declared: declared(headers, agent.extensions.iter().map(|extension| &extension.uri[..])),
            agent,
            deadline: headers.get(GRPC_TIMEOUT).and_then(grpc_timeout).map(|timeout| Instant::now() + timeout),
            traceparent: traceparent(headers).unwrap_or_default().to_owned(),
            last_event: last_event(headers)?,
        })
    }

    /// The agent's extensions, with whether they are in effect for this call.
    fn extensions(&self) -> impl Iterator<Item = (&AgentExtension, bool)> {
        // Most calls declare none, and then there is no list.
        let declared = self.declared.iter().copied().chain(std::iter::repeat(false));
        self.agent.extensions.iter().zip(declared)
    }

    /// Whether events carry their numbers in metadata.
    pub(crate) fn numbers_events(&self) -> bool {
        self.extensions().any(|(extension, declared)| declared && extension.uri == EVENT_NUMBER)
    }

    /// The extensions that are in effect, for the response's `A2A-Extensions` (spec §4.6).
    pub(crate) fn activated(&self) -> Option<HeaderValue> {
        let active = self.extensions().filter(|(_, declared)| *declared).map(|(extension, _)| &extension.uri[..]);
        let uris: Vec<&str> = active.collect();
        if uris.is_empty() { None } else { HeaderValue::from_str(&uris.join(", ")).ok() }
    }

    /// Refuses a client that does not know what this agent requires (spec §3.3.4).
    pub(crate) fn check_required_extensions(&self) -> Result<()> {
        let missing = self.extensions().filter(|(extension, declared)| extension.required && !declared);
        let missing: Vec<&str> = missing.map(|(extension, _)| &extension.uri[..]).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let missing = missing.join(", ");
        let text =
            format!("The agent requires extensions that the request does not declare in A2A-Extensions: {missing}");
        Err(Error::new(Kind::ExtensionSupportRequired, text).with("requiredExtensions", missing))
    }
}

/// Serves `major.minor` of what is asked for; nothing said means 0.3 (spec §3.6.2).
fn check_version(headers: &HeaderMap, query: Option<&str>) -> Result<()> {
    let mut said = headers.get_all(A2A_VERSION).iter();
    let version = match (said.next(), said.next()) {
        (None, _) => query.unwrap_or_default(),
        (Some(one), None) => one.to_str().unwrap_or("?"),
        (Some(_), Some(_)) => return Err(unsupported("more than one version")),
    };
    let version = version.trim();
    if version == VERSIONS[0] {
        return Ok(());
    }
    let mut numbers = version.split('.');
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let well_formed = version.split('.').all(is_number) && version.contains('.');
    let number = |text: Option<&str>| text.map(|text| text.trim_start_matches('0').to_owned());
    match (number(numbers.next()), number(numbers.next())) {
        (Some(major), Some(minor)) if well_formed && major == "1" && minor.is_empty() => Ok(()),
        _ if version.is_empty() => Err(unsupported("0.3, which no A2A-Version means,")),
        _ => Err(unsupported(&version.chars().take(32).collect::<String>())),
    }
}

fn unsupported(version: &str) -> Error {
    let supported = VERSIONS.join(", ");
    let text = format!("Protocol version not supported: {version}; supported versions: {supported}");
    Error::new(Kind::VersionNotSupported, text).with("supportedVersions", supported)
}

/// Which of the known URIs are in a comma list that may be spread over several headers. What is not known is not
/// kept, so that a long list costs no more than reading it.
fn declared<'k>(headers: &HeaderMap, known: impl Iterator<Item = &'k str>) -> Vec<bool> {
    let mut lines = headers.get_all(A2A_EXTENSIONS).iter().filter_map(|line| line.to_str().ok()).peekable();
    if lines.peek().is_none() {
        return Vec::new();
    }
    let mut all: Vec<(&str, bool)> = known.map(|uri| (uri, false)).collect();
    for element in lines.flat_map(|line| line.split(',')).map(str::trim) {
        if let Some((_, declared)) = all.iter_mut().find(|(uri, _)| *uri == element) {
            *declared = true;
        }
    }
    all.into_iter().map(|(_, declared)| declared).collect()
}

fn last_event(headers: &HeaderMap) -> Result<Option<u64>> {
    let Some(id) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    match id.to_str().map(str::trim) {
        Ok("") => Ok(None),
        Ok(id) if id.bytes().all(|b| b.is_ascii_digit()) => id.parse().map(Some).map_err(|_| wrong_event()),
        _ => Err(wrong_event()),
    }
}

fn wrong_event() -> Error {
    Error::invalid("Last-Event-ID", "expected the number of an event, as in its `id`")
}

/// A `traceparent` that W3C Trace Context would accept; anything else is as good as none.
fn traceparent(headers: &HeaderMap) -> Option<&str> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    let (Some(one), None) = (all.next(), all.next()) else { return None };
    let text = one.to_str().ok()?;
    let is_hex = |text: &str, len: usize| {
        text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let mut fields = text.splitn(5, '-');
    let (version, trace, parent, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let valid = is_hex(version, 2)
        && version != "ff"
        && is_hex(trace, 32)
        && trace.bytes().any(|b| b != b'0')
        && is_hex(parent, 16)
        && parent.bytes().any(|b| b != b'0')
        && is_hex(flags, 2)
        // Later versions may append fields; this one has none.
        && (version != "00" || fields.next().is_none())
        && text.len() <= 512;
    valid.then_some(text)
}

/// `grpc-timeout`: at most eight digits and a unit.
fn grpc_timeout(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn versions_are_compared_by_major_and_minor() {
        let version = |value: &str| check_version(&headers(&[("a2a-version", value)]), None);
        for served in ["1.0", " 1.0 ", "1.0.7", "1.0.0", "01.00"] {
            version(served).unwrap_or_else(|error| panic!("{served}: {error}"));
        }
        for refused in ["99.0", "1", "1.1", "0.3", "1.0,0.3", "abc", "", "1.", ".1", "1.0.", "1.0-rc", "v1.0", "1..0"] {
            let error = version(refused).expect_err(refused);
            assert_eq!(error.kind, Kind::VersionNotSupported, "{refused}");
            assert_eq!(error.metadata["supportedVersions"], "1.0");
        }
        assert!(check_version(&HeaderMap::new(), None).is_err());
        check_version(&HeaderMap::new(), Some("1.0")).unwrap();
        assert!(check_version(&headers(&[("a2a-version", "0.3")]), Some("1.0")).is_err(), "the header wins");
        assert!(check_version(&headers(&[("a2a-version", "1.0"), ("a2a-version", "1.0")]), None).is_err());
    }

    #[test]
    fn lists_and_repeats_of_extensions_are_equal() {
        let known = || ["urn:a", "urn:b", "urn:c"].into_iter();
        let one = declared(&headers(&[("a2a-extensions", "urn:a, urn:x,urn:B,,urn:a , urn:b")]), known());
        let two = declared(&headers(&[("a2a-extensions", "urn:b"), ("a2a-extensions", "urn:a")]), known());
        assert_eq!((&one[..], &two[..]), (&[true, true, false][..], &[true, true, false][..]));
        assert!(declared(&HeaderMap::new(), known()).is_empty());
    }

    #[test]
    fn a_malformed_traceparent_is_as_good_as_none() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        let of = |value: &str| traceparent(&headers(&[("traceparent", value)])).map(str::to_owned);
        assert_eq!(of(good).as_deref(), Some(good));
        let later = format!("01{}-more", &good[2..]);
        assert_eq!(of(&later), Some(later));
        for bad in [
            "00-0-0-00",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert_eq!(traceparent(&headers(&[("traceparent", good), ("traceparent", good)])), None);
    }

    #[test]
    fn times_and_numbers_are_read_strictly() {
        let timeout = |text: &'static str| grpc_timeout(&HeaderValue::from_static(text));
        assert_eq!(timeout("1m"), Some(Duration::from_millis(1)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "1", "m", "123456789S", "1x", "-1S"] {
            assert_eq!(timeout(bad), None, "{bad}");
        }
        let event = |id: &str| last_event(&headers(&[("last-event-id", id)]));
        assert_eq!(event("17"), Ok(Some(17)));
        assert_eq!(event(""), Ok(None));
        for bad in ["x", "-1", "+1", "1.0", "99999999999999999999"] {
            assert_eq!(event(bad).unwrap_err().kind, Kind::InvalidParams, "{bad}");
        }
    }
}
