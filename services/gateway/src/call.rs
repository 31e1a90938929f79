//! Who asks what, and how: the part of a request that is the same on every wire.
//!
//! HTTP headers and gRPC metadata are the same thing here, so each rule exists once (spec §3.2.6).

use std::{sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use rialto_a2a::{Error, Kind, Result, v1::AgentExtension, v03};
use rialto_runtime::telemetry::trace;
use tokio::time::Instant;

use crate::{EVENT_NUMBER, agents::Agent};

pub(crate) const A2A_VERSION: HeaderName = HeaderName::from_static("a2a-version");
pub(crate) const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Longest `Idempotency-Key`.
const MAX_KEY: usize = 256;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    /// Only by JSON-RPC, and only on agents that are configured to.
    V03,
}

impl Version {
    /// As `A2A-Version` and cards say it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::V1 => "1.0",
            Self::V03 => "0.3",
        }
    }

    const fn number(self) -> (u32, u32) {
        match self {
            Self::V1 => (1, 0),
            Self::V03 => (0, 3),
        }
    }

    /// Where clients name extensions; answers use the first.
    fn extensions_headers(self) -> &'static [HeaderName] {
        static NAMES: [HeaderName; 2] =
            [HeaderName::from_static(v03::EXTENSIONS_HEADER), HeaderName::from_static("a2a-extensions")];
        match self {
            Self::V1 => &NAMES[1..],
            Self::V03 => &NAMES,
        }
    }

    /// Serves `major.minor` of what is asked for; nothing said means 0.3 (spec §3.6.2).
    fn check(self, headers: &HeaderMap, query: Option<&str>) -> Result<()> {
        let mut said = headers.get_all(A2A_VERSION).iter();
        let version = match (said.next(), said.next()) {
            (None, _) => query.unwrap_or_default(),
            (Some(one), None) => one.to_str().unwrap_or("?"),
            (Some(_), Some(_)) => return Err(self.unsupported("more than one version")),
        };
        match version.trim() {
            "" if self == Self::V03 => Ok(()),
            "" => Err(self.unsupported("no A2A-Version was sent, which means 0.3")),
            version if version == self.name() || major_minor(version) == Some(self.number()) => Ok(()),
            other => Err(self.unsupported(&other.chars().take(32).collect::<String>())),
        }
    }

    fn unsupported(self, version: &str) -> Error {
        let supported = self.name();
        let text = format!("Protocol version not supported: {version}; supported versions: {supported}");
        Error::new(Kind::VersionNotSupported, text).with("supportedVersions", supported)
    }
}

fn major_minor(version: &str) -> Option<(u32, u32)> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (major, rest) = version.split_once('.')?;
    let minor = rest.split('.').next()?;
    if !version.split('.').all(is_number) {
        return None;
    }
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A call on an agent.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) agent: Arc<Agent>,
    version: Version,
    pub(crate) caller: Caller,
    /// Which of the agent's extensions the client declared.
    declared: Vec<bool>,
    /// When the client stops waiting.
    pub(crate) deadline: Option<Instant>,
    /// The `traceparent` that its turn continues, or nothing.
    pub(crate) traceparent: String,
    /// Number of the last event that the client knows.
    pub(crate) last_event: Option<u64>,
    /// The client's own name for the message that it sends.
    pub(crate) idempotency_key: Option<String>,
}

/// Who asks. The owner is empty while authentication is off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    /// As said by the path; the message may say it instead, but not otherwise.
    pub(crate) tenant: String,
    pub(crate) owner: String,
}

impl Call {
    /// Reads service parameters of a request that can only be one of `version`. `query` is the version of the query
    /// string, which counts when no header says it.
    ///
    /// # Errors
    /// VersionNotSupported; a `Last-Event-ID` that is not a number; an `Idempotency-Key` that is none.
    pub(crate) fn new(
        agent: Arc<Agent>,
        version: Version,
        tenant: String,
        headers: &HeaderMap,
        query: Option<&str>,
    ) -> Result<Self> {
        version.check(headers, query)?;
        Ok(Self {
            caller: Caller { tenant, owner: String::new() },
            declared: declared(headers, version, agent.extensions.iter().map(|extension| &extension.uri[..])),
            agent,
            version,
            deadline: headers.get(GRPC_TIMEOUT).and_then(grpc_timeout).map(|timeout| Instant::now() + timeout),
            traceparent: traceparent(headers),
            last_event: last_event(headers)?,
            idempotency_key: idempotency_key(headers)?,
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

    /// The extensions that are in effect, as a header of the response (spec §4.6).
    pub(crate) fn activated(&self) -> Option<(HeaderName, HeaderValue)> {
        let active = self.extensions().filter(|(_, declared)| *declared).map(|(extension, _)| &extension.uri[..]);
        let uris: Vec<&str> = active.collect();
        if uris.is_empty() {
            return None;
        }
        let header = self.version.extensions_headers().first()?.clone();
        Some((header, HeaderValue::from_str(&uris.join(", ")).ok()?))
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

/// Which of the known URIs are in a comma list that may be spread over several headers. What is not known is not
/// kept, so that a long list costs no more than reading it.
fn declared<'k>(headers: &HeaderMap, version: Version, known: impl Iterator<Item = &'k str>) -> Vec<bool> {
    let lines = version.extensions_headers().iter().flat_map(|name| headers.get_all(name));
    let mut lines = lines.filter_map(|line| line.to_str().ok()).peekable();
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

/// Whether a text may be an `Idempotency-Key`: 1 to 256 visible ASCII characters.
#[must_use]
pub fn is_idempotency_key(text: &str) -> bool {
    (1..=MAX_KEY).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// One name, taken as it is.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>> {
    let mut said = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = said.next() else { return Ok(None) };
    match key.to_str() {
        Ok(key) if is_idempotency_key(key) && said.next().is_none() => Ok(Some(key.to_owned())),
        _ => Err(Error::invalid("Idempotency-Key", format!("expected once, 1 to {MAX_KEY} visible ASCII characters"))),
    }
}

fn wrong_event() -> Error {
    Error::invalid("Last-Event-ID", "expected the number of an event, as in its `id`")
}

/// Where in its trace the request stands: our own span if there is one, or else the client's.
fn traceparent(headers: &HeaderMap) -> String {
    let context = trace::current().or_else(|| trace::extract(headers));
    context.as_ref().map(trace::traceparent).unwrap_or_default()
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
        let check = |of: Version, value: &str| of.check(&headers(&[("a2a-version", value)]), None);
        let served = ["1.0", " 1.0 ", "1.0.7", "1.0.0", "01.00"];
        let served_v03 = ["0.3", " 0.3", "0.3.0", "0.3.26", "00.03"];
        let never = [
            "99.0",
            "1",
            "0",
            "1.1",
            "0.2.5",
            "0.30",
            "1.0,0.3",
            "abc",
            "1.",
            ".1",
            "1.0.",
            "0.3.",
            "1.0-rc",
            "v1.0",
            "1..0",
            "4294967297.0",
        ];
        for (of, served, other, name) in
            [(Version::V1, served, served_v03, "1.0"), (Version::V03, served_v03, served, "0.3")]
        {
            for version in served {
                check(of, version).unwrap_or_else(|error| panic!("{version}: {error}"));
            }
            for version in other.iter().chain(&never) {
                let error = check(of, version).expect_err(version);
                assert_eq!(error.kind, Kind::VersionNotSupported, "{version}");
                assert_eq!(error.metadata["supportedVersions"], name);
            }
            let twice = headers(&[("a2a-version", name), ("a2a-version", name)]);
            assert!(of.check(&twice, None).is_err());
            of.check(&HeaderMap::new(), Some(name)).unwrap();
            of.check(&headers(&[("a2a-version", name)]), Some("7.0")).expect("the header wins");
            assert!(of.check(&headers(&[("a2a-version", "7.0")]), Some(name)).is_err(), "the header wins");
        }
        assert!(Version::V1.check(&HeaderMap::new(), None).is_err(), "nothing said means 0.3");
        assert!(check(Version::V1, "").is_err());
        Version::V03.check(&HeaderMap::new(), None).unwrap();
        check(Version::V03, "").unwrap();
    }

    #[test]
    fn lists_and_repeats_of_extensions_are_equal() {
        let of = |version, pairs: &[_]| declared(&headers(pairs), version, ["urn:a", "urn:b", "urn:c"].into_iter());
        let one = of(Version::V1, &[("a2a-extensions", "urn:a, urn:x,urn:B,,urn:a , urn:b")]);
        let two = of(Version::V1, &[("a2a-extensions", "urn:b"), ("a2a-extensions", "urn:a")]);
        let both = of(Version::V03, &[("x-a2a-extensions", "urn:b"), ("a2a-extensions", "urn:a")]);
        for all in [one, two, both] {
            assert_eq!(all, [true, true, false]);
        }
        assert!(of(Version::V1, &[]).is_empty());
        assert!(of(Version::V1, &[("x-a2a-extensions", "urn:a")]).is_empty());
    }

    #[test]
    fn an_idempotency_key_is_short_visible_and_said_once() {
        let of = |values: &[&str]| {
            let pairs: Vec<_> = values.iter().map(|value| ("idempotency-key", *value)).collect();
            idempotency_key(&headers(&pairs))
        };
        assert_eq!(of(&[]), Ok(None));
        let longest = "k".repeat(256);
        for good in ["1", "\"8e03978e-40d5-43dd-bc93-6894a57f9324\"", "~!", &longest] {
            assert_eq!(of(&[good]), Ok(Some(good.to_owned())));
        }
        for bad in ["", "a b", "a\tb", &"k".repeat(257)] {
            let error = of(&[bad]).expect_err(bad);
            assert_eq!((error.kind, &error.violations[0].field[..]), (Kind::InvalidParams, "Idempotency-Key"));
        }
        assert!(of(&["a", "a"]).is_err());
        let mut high = HeaderMap::new();
        high.insert("idempotency-key", HeaderValue::from_bytes(b"k\xe9y").unwrap());
        assert!(idempotency_key(&high).is_err());
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
