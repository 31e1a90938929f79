//! From bytes to calls and back: which binding a request speaks, and what all HTTP answers share.

mod grpc;
pub(crate) mod jsonrpc;
mod rest;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{
        HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header, request::Parts, uri::Authority,
    },
};
use bytes::Bytes;
use futures::FutureExt as _;
use jiff::Timestamp;
use rialto_a2a::{Error, Kind, Result};
use rialto_net::{BodyError, Peer};
use rialto_runtime::config::Config;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::error;

use self::grpc::Grpc;
use crate::{
    agents::{Agent, Agents},
    call::Call,
    cors::{self, Cors},
    follow::Events,
    forwarded::Forwarded,
    observe::{self, Operation, observed},
    operations::Operations,
};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const A2A_JSON: HeaderValue = HeaderValue::from_static("application/a2a+json");
const CARD: &str = "/.well-known/agent-card.json";
const HEALTH: &str = "/health";

/// All bindings of all agents.
#[derive(Debug)]
pub(crate) struct Doors {
    agents: Arc<Agents>,
    operations: Arc<Operations>,
    grpc: Grpc,
    forwarded: Forwarded,
    cors: Cors,
    limits: Limits,
    /// Since when cards are what they are.
    started: Timestamp,
}

/// What holds for every HTTP request.
#[derive(Clone, Copy, Debug)]
struct Limits {
    request_size: usize,
    body_timeout: Duration,
    keep_alive: Duration,
}

/// What a call over HTTP gives back.
enum Reply {
    /// The JSON of a whole response.
    Whole(Vec<u8>),
    Stream(Box<Events>),
}

impl Doors {
    pub(crate) fn new(
        config: &Config,
        agents: Agents,
        operations: Operations,
        forwarded: Forwarded,
        cors: Cors,
        tracker: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let limits = Limits {
            request_size: config.limits.request_size.as_len(),
            body_timeout: config.limits.body_timeout.0,
            keep_alive: config.limits.keep_alive.0,
        };
        let (agents, operations) = (Arc::new(agents), Arc::new(operations));
        let grpc = Grpc::new(Arc::clone(&agents), Arc::clone(&operations), limits, tracker, stop);
        Self { agents, operations, grpc, forwarded, cors, limits, started: Timestamp::now() }
    }

    async fn answer(self: Arc<Self>, request: Request<Body>) -> Response<Body> {
        if request.version() == Version::HTTP_11
            && let Err(error) = check_host(request.headers())
        {
            return refuse(&error);
        }
        if grpc::is_grpc(request.headers()) {
            let answer = AssertUnwindSafe(self.grpc.answer(request)).catch_unwind().await;
            let response = answer.unwrap_or_else(|_| {
                error!("a gRPC call panicked");
                Error::internal().to_status().into_http()
            });
            return observe::by("grpc", response);
        }
        let origin = request.headers().get(header::ORIGIN).cloned();
        if origin.is_some() && request.method() == Method::OPTIONS {
            let (parts, body) = request.into_parts();
            let public = self.is_public(&parts);
            if let Some(mut response) = self.cors.preflight(&parts.method, &parts.headers, public) {
                Operation::new("Preflight").note(&mut response);
                return response;
            }
            return self.http(Request::from_parts(parts, body)).await;
        }
        let mut response = AssertUnwindSafe(self.http(request)).catch_unwind().await.unwrap_or_else(|_| {
            error!("a call panicked");
            refuse(&Error::internal())
        });
        if let Some(origin) = origin {
            self.cors.complete(&origin, response.headers_mut());
        }
        response
    }

    async fn http(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        if parts.uri.path() == HEALTH {
            return health(&parts.method);
        }
        let Some((agent, rest)) = self.agents.find(host(&parts), parts.uri.path()) else {
            return refuse(&Error::new(Kind::MethodNotFound, "No agent is mounted here"));
        };
        match rest {
            "" | "/" => match parts.method {
                Method::POST => observe::by("jsonrpc", jsonrpc::answer(self, agent, &parts, body).await),
                _ => not_allowed("POST"),
            },
            CARD => self.card(agent, &parts),
            HEALTH => health(&parts.method),
            _ => observe::by("rest", rest::answer(self, agent, rest, &parts, body).await),
        }
    }

    /// Whether this asks for something that everybody may read.
    fn is_public(&self, parts: &Parts) -> bool {
        let path = parts.uri.path();
        let rest = self.agents.find(host(parts), path).map_or(path, |(_, rest)| rest);
        path == HEALTH || rest == CARD || rest == HEALTH
    }

    fn card(&self, agent: &Arc<Agent>, parts: &Parts) -> Response<Body> {
        if parts.method != Method::GET && parts.method != Method::HEAD {
            return not_allowed("GET, HEAD");
        }
        let peer = parts.extensions.get::<Peer>().map(|peer| peer.addr.ip());
        let base = self.forwarded.base(&parts.headers, peer, agent.host.as_deref());
        match agent.card.at(agent, &base) {
            Ok(card) => {
                let mut response = cors::open(card.respond(&parts.headers, agent.max_age_secs, self.started));
                Operation::new("AgentCard").note(&mut response);
                response
            }
            Err(error) => refuse(&error),
        }
    }

    /// Reads a body within the limits.
    async fn read(&self, parts: &Parts, body: Body) -> Result<Bytes> {
        check_encoding(&parts.headers)?;
        let Limits { request_size, body_timeout, .. } = self.limits;
        rialto_net::read(&parts.headers, body, request_size, body_timeout).await.map_err(|error| match error {
            BodyError::TooLarge(limit) => too_large(limit),
            BodyError::TimedOut => body_timed_out(),
            BodyError::Broken => Error::new(Kind::InvalidRequest, "The request body ended early"),
        })
    }
}

/// The one text about the one limit.
fn too_large(limit: usize) -> Error {
    Error::new(Kind::PayloadTooLarge, format!("Request too large: the limit is {limit} bytes"))
        .with("limit", limit.to_string())
}

fn body_timed_out() -> Error {
    Error::new(Kind::Deadline, "The request body did not arrive in time")
}

pub(crate) fn router(doors: Arc<Doors>) -> Router {
    // Paths with a colon, an encoded slash, a tenant in front: the routes of A2A are not those of a path router.
    Router::new().fallback(move |request: Request<Body>| {
        let doors = Arc::clone(&doors);
        observed(request, |request| doors.answer(request))
    })
}

/// What the client called us.
fn host(parts: &Parts) -> Option<&str> {
    let in_header = || parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    parts.uri.host().or_else(in_header)
}

/// HTTP/1.1 wants exactly one (RFC 9112 §3.2): who sends two may mean to be one host here and another one at a proxy.
fn check_host(headers: &HeaderMap) -> Result<()> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let valid = |host: &HeaderValue| {
        let is_authority = |authority: Authority| !authority.as_str().contains('@');
        host.is_empty() || Authority::try_from(host.as_bytes()).is_ok_and(is_authority)
    };
    match (hosts.next(), hosts.next()) {
        (Some(host), None) if valid(host) => Ok(()),
        (None, _) => Err(Error::new(Kind::InvalidRequest, "The request has no Host header")),
        (Some(_), Some(_)) => Err(Error::new(Kind::InvalidRequest, "The request has more than one Host header")),
        (Some(_), None) => Err(Error::new(Kind::InvalidRequest, "The Host header is not valid")),
    }
}

fn health(method: &Method) -> Response<Body> {
    if method != Method::GET && method != Method::HEAD {
        return not_allowed("GET, HEAD");
    }
    let mut response = cors::open(json(StatusCode::OK, JSON, r#"{"status":"healthy"}"#));
    Operation::new("Health").note(&mut response);
    response
}

fn json(status: StatusCode, media_type: HeaderValue, body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, media_type);
    response
}

/// An error as every HTTP answer but JSON-RPC's carries it.
fn refuse(error: &Error) -> Response<Body> {
    let (status, body) = error.to_rest();
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, JSON, body.to_string());
    observe::refused(error.kind, &mut response);
    retry_after(error, &mut response);
    response
}

fn retry_after(error: &Error, response: &mut Response<Body>) {
    if let Some(after) = error.retry_after {
        // Whole seconds, and never "at once".
        let seconds = after.as_millis().div_ceil(1000).max(1).to_string();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::try_from(seconds).expect("digits"));
    }
}

fn not_allowed(allow: &'static str) -> Response<Body> {
    let mut response = refuse(&Kind::MethodNotAllowed.into());
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
    response
}

/// Tells the client which extensions are in effect.
fn echo_extensions(call: &Call, headers: &mut HeaderMap) {
    headers.extend(call.activated());
}

/// Refuses a body that says that it is not JSON; one that says nothing is taken for it.
fn check_content_type(headers: &HeaderMap) -> Result<()> {
    let Some(content_type) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = essence(content_type);
    if essence.is_some_and(|essence| ["", "application/json", "application/a2a+json"].contains(&&essence[..])) {
        return Ok(());
    }
    Err(Error::new(
        Kind::ContentTypeNotSupported,
        "Content type not supported: send application/json or application/a2a+json",
    ))
}

/// Refuses a body that has to be unpacked first: a small one may become any size.
fn check_encoding(headers: &HeaderMap) -> Result<()> {
    let is_plain = |value: &HeaderValue| value.is_empty() || value.as_bytes().eq_ignore_ascii_case(b"identity");
    match headers.get_all(header::CONTENT_ENCODING).iter().all(is_plain) {
        true => Ok(()),
        false => {
            Err(Error::new(Kind::ContentTypeNotSupported, "Content encoding not supported: send the body uncompressed"))
        }
    }
}

/// `type/subtype` in lower case.
fn essence(value: &HeaderValue) -> Option<String> {
    let text = value.to_str().ok()?;
    Some(text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}
