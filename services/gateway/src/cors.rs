//! Cross-origin access: cards and health are open to everybody, the rest by setting (C169).

use anyhow::ensure;
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header},
};
use rialto_runtime::config::Config;

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
const REQUEST_HEADERS: HeaderValue = HeaderValue::from_static(
    "content-type, authorization, a2a-version, a2a-extensions, x-a2a-extensions, last-event-id, traceparent, tracestate, \
     idempotency-key",
);
const RESPONSE_HEADERS: HeaderValue =
    HeaderValue::from_static("a2a-extensions, x-a2a-extensions, retry-after, www-authenticate");
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const ANY: HeaderValue = HeaderValue::from_static("*");

/// Which origins may call.
#[derive(Debug)]
pub(crate) struct Cors {
    any: bool,
    origins: Vec<HeaderValue>,
}

impl Cors {
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let mut cors = Self { any: false, origins: Vec::new() };
        for origin in &config.cors_origins {
            if origin == "*" {
                cors.any = true;
                continue;
            }
            let scheme = origin.split_once("://").is_some_and(|(_, rest)| !rest.is_empty() && !rest.contains('/'));
            ensure!(scheme, "cors-origins: {origin:?} is not an origin such as \"https://app.example\"");
            cors.origins.push(HeaderValue::from_str(origin)?);
        }
        Ok(cors)
    }

    /// Whether pages of this origin may call, and what to tell the browser.
    fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        if self.any { Some(ANY) } else { self.origins.contains(origin).then(|| origin.clone()) }
    }

    /// Answers a preflight request, if this is one and its origin may call; `public` things may be asked by all.
    pub(crate) fn preflight(&self, method: &Method, request: &HeaderMap, public: bool) -> Option<Response<Body>> {
        let origin = request.get(header::ORIGIN)?;
        if method != Method::OPTIONS || !request.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
            return None;
        }
        let allowed = if public { ANY } else { self.allowed(origin)? };
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, REQUEST_HEADERS);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        allow(allowed, headers);
        Some(response)
    }

    /// Completes the answer to a page of this origin.
    pub(crate) fn complete(&self, origin: &HeaderValue, headers: &mut HeaderMap) {
        if headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) {
            return;
        }
        if let Some(allowed) = self.allowed(origin) {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, RESPONSE_HEADERS);
            allow(allowed, headers);
        }
    }
}

fn allow(origin: HeaderValue, headers: &mut HeaderMap) {
    if origin != ANY {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
}

/// Opens an answer to the pages of all origins.
pub(crate) fn open(mut response: Response<Body>) -> Response<Body> {
    allow(ANY, response.headers_mut());
    response
}
