//! Cross-origin access: cards and health are open to everybody, the rest by setting (C169).

use anyhow::ensure;
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Response, header},
};
use rialto_runtime::config::Config;

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
const REQUEST_HEADERS: HeaderValue = HeaderValue::from_static(
    "content-type, authorization, a2a-version, a2a-extensions, last-event-id, traceparent, tracestate, idempotency-key",
);
const RESPONSE_HEADERS: HeaderValue = HeaderValue::from_static("a2a-extensions, retry-after, www-authenticate");
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

    /// What a browser may know about a response to this request; `public` is for cards and health.
    fn allowed(&self, request: &HeaderMap, public: bool) -> Option<HeaderValue> {
        if public {
            return Some(ANY);
        }
        let origin = request.get(header::ORIGIN)?;
        if self.any { Some(ANY) } else { self.origins.contains(origin).then(|| origin.clone()) }
    }

    /// Answers a preflight request, if this is one and its origin may call.
    pub(crate) fn preflight(&self, method: &Method, request: &HeaderMap, public: bool) -> Option<Response<Body>> {
        if method != Method::OPTIONS || !request.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
            return None;
        }
        self.allowed(request, public)?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = axum::http::StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, REQUEST_HEADERS);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        Some(response)
    }

    /// Completes a response for a browser.
    pub(crate) fn complete(&self, request_origin: Option<HeaderValue>, public: bool, response: &mut Response<Body>) {
        let mut request = HeaderMap::new();
        if let Some(origin) = request_origin {
            request.insert(header::ORIGIN, origin);
        }
        let Some(allowed) = self.allowed(&request, public) else { return };
        let headers = response.headers_mut();
        if allowed != ANY {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if !public {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, RESPONSE_HEADERS);
        }
    }
}
