//! JSON-RPC 2.0 over HTTP (spec §9): one URL, one object, one answer or one event stream.
//!
//! The only binding on which clients of protocol 0.3 are served: the name of a method says which version it is of.

mod current;
mod legacy;

use std::{borrow::Cow, sync::Arc};

use axum::{
    body::Body,
    http::{Response, StatusCode, request::Parts},
};
use rialto_a2a::{Error, Kind, Result, v03};
use rialto_rpc::tasks::WhenBusy;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tracing::error;

use super::{Doors, JSON, Reply, check_content_type, echo_extensions, json, rest::version_in_query, retry_after};
use crate::{
    agents::Agent,
    call::{Call, Version},
    observe::{self, Operation},
    sse::{self, Framing},
};

/// Ids are repeated in every event of a stream.
const MAX_ID: usize = 1024;
/// HTTP statuses that intermediaries and clients act on; all other answers are 200.
const TELLING: [u16; 6] = [401, 403, 413, 429, 503, 504];

/// What a name means. Names are of one protocol version each (`SendMessage`, `message/send`), so that the name decides
/// which protocol is spoken before any header is looked at.
#[derive(Clone, Copy, Debug)]
enum Method {
    Current(current::Method),
    Legacy(v03::Method),
}

impl Method {
    fn parse(name: &str, agent: &Agent) -> Result<Self> {
        let legacy = || v03::Method::parse(name).filter(|_| agent.serves_v03).map(Self::Legacy);
        current::Method::parse(name).map(Self::Current).or_else(legacy).ok_or_else(|| Kind::MethodNotFound.into())
    }

    const fn version(self) -> Version {
        match self {
            Self::Current(_) => Version::V1,
            Self::Legacy(_) => Version::V03,
        }
    }

    async fn run(self, doors: &Doors, call: &Call, params: &str, id: &str) -> Result<Reply> {
        // serde reads structs from arrays too, by position; named parameters are the only ones here.
        if !params.starts_with('{') {
            return Err(Error::new(Kind::InvalidParams, "Invalid parameters: `params` must be an object"));
        }
        match self {
            Self::Current(method) => current::run(&doors.operations, call, method, params, id).await,
            Self::Legacy(method) => legacy::run(&doors.operations, call, method, params, id).await,
        }
    }

    fn framing(self, agent: &Agent, id: &str) -> Framing {
        let id = id.to_owned();
        match self {
            Self::Current(_) => Framing::JsonRpc(id),
            // The stream of a turn that waits behind others sees them ask, and goes on.
            Self::Legacy(method) => Framing::JsonRpcV03 {
                id,
                ends_at_input: method == v03::Method::SendStreamingMessage
                    && agent.policy.when_busy() == WhenBusy::Reject,
            },
        }
    }

    fn refuse(self, agent: &Agent, id: &str, error: &Error) -> Response<Body> {
        let response = refuse(id, self.version(), error);
        let mut response = match self {
            // The SDKs of 0.3 read nothing but events in answer to what streams.
            Self::Legacy(v03::Method::SendStreamingMessage | v03::Method::SubscribeToTask)
                if response.status() == StatusCode::OK =>
            {
                let mut response = sse::refuse(&self.framing(agent, id), error);
                observe::refused(error.kind, &mut response);
                response
            }
            _ => response,
        };
        self.operation().note(&mut response);
        response
    }

    fn operation(self) -> Operation {
        Operation::new(match self {
            Self::Current(method) => method.name(),
            Self::Legacy(method) => method.operation(),
        })
    }
}

/// A request whose members are not yet looked at.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    jsonrpc: Option<&'a RawValue>,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

pub(super) async fn answer(doors: &Doors, agent: &Arc<Agent>, parts: &Parts, body: Body) -> Response<Body> {
    let body = match doors.read(parts, body).await {
        Ok(body) => body,
        Err(error) => return refuse("null", Version::V1, &error),
    };
    let envelope = parse(&body);
    let id = envelope.as_ref().map_or("null", |envelope| id_of(envelope).unwrap_or("null"));
    if let Err(error) = check_content_type(&parts.headers) {
        return refuse(id, Version::V1, &error);
    }
    let (method, params) = match envelope.and_then(|envelope| read(&envelope, agent)) {
        Ok(request) => request,
        Err(error) => return refuse(id, Version::V1, &error),
    };
    let in_query = parts.uri.query().and_then(version_in_query);
    let call = match Call::new(Arc::clone(agent), method.version(), String::new(), &parts.headers, in_query.as_deref())
    {
        Ok(call) => call,
        Err(error) => return method.refuse(agent, id, &error),
    };
    let mut response = match method.run(doors, &call, params, id).await {
        Ok(Reply::Whole(bytes)) => json(StatusCode::OK, JSON, bytes),
        Ok(Reply::Stream(events)) => sse::respond(*events, method.framing(agent, id), doors.limits.keep_alive),
        Err(error) => method.refuse(agent, id, &error),
    };
    echo_extensions(&call, response.headers_mut());
    method.operation().note(&mut response);
    response
}

/// Reads the outer object.
fn parse(body: &[u8]) -> Result<Envelope<'_>> {
    let text = std::str::from_utf8(body).map_err(|_| Error::new(Kind::Parse, "Invalid JSON payload: not UTF-8"))?;
    if text.trim_start().starts_with('[') && is_json(text) {
        return Err(Error::new(Kind::InvalidRequest, "Batch requests are not supported"));
    }
    serde_json::from_str(text).map_err(|fault| match is_json(text) {
        true => Error::new(Kind::InvalidRequest, "Request payload validation error: expected one object"),
        false => Error::new(Kind::Parse, format!("Invalid JSON payload: {fault}")),
    })
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// The id as it was sent: a string, an integer or null.
fn id_of<'a>(envelope: &Envelope<'a>) -> Result<&'a str> {
    let Some(id) = envelope.id.map(RawValue::get) else { return Ok("null") };
    let is_integer = |text: &str| text.strip_prefix('-').unwrap_or(text).bytes().all(|b| b.is_ascii_digit());
    match id {
        long if long.len() > MAX_ID => Err(invalid(format!("`id` is longer than {MAX_ID} bytes"))),
        id if id.starts_with('"') || is_integer(id) => Ok(id),
        _ => Err(invalid("`id` must be a string, an integer or null")),
    }
}

fn invalid(what: impl std::fmt::Display) -> Error {
    Error::new(Kind::InvalidRequest, format!("Request payload validation error: {what}"))
}

fn read<'a>(envelope: &Envelope<'a>, agent: &Agent) -> Result<(Method, &'a str)> {
    id_of(envelope)?;
    if envelope.jsonrpc.is_none_or(|version| version.get() != r#""2.0""#) {
        return Err(invalid("`jsonrpc` must be \"2.0\""));
    }
    let method = envelope.method.ok_or_else(|| invalid("`method` is required"))?;
    let name: Cow<'_, str> = serde_json::from_str(method.get()).map_err(|_| invalid("`method` must be a string"))?;
    Ok((Method::parse(&name, agent)?, envelope.params.map_or("{}", RawValue::get)))
}

fn whole<T: Serialize>(id: &str, result: &T) -> Result<Reply> {
    let mut out = Vec::with_capacity(1024);
    write_result(id, result, &mut out).map_err(|fault| {
        error!(%fault, "cannot write a result");
        Error::internal()
    })?;
    Ok(Reply::Whole(out))
}

/// Writes the envelope of a result. `id` is JSON.
pub(crate) fn write_result<T: Serialize>(id: &str, result: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    out.extend_from_slice(br#"{"jsonrpc":"2.0","id":"#);
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(br#","result":"#);
    serde_json::to_writer(&mut *out, result)?;
    out.push(b'}');
    Ok(())
}

/// The envelope of an error. `id` is JSON.
pub(crate) fn error(id: &str, version: Version, error: &Error) -> String {
    let error = match version {
        Version::V1 => error.to_jsonrpc(),
        Version::V03 => v03::error(error),
    };
    format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)
}

fn refuse(id: &str, version: Version, error: &Error) -> Response<Body> {
    let http = error.kind.wire().http;
    let status = if TELLING.contains(&http) { http } else { 200 };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    let mut response = json(status, JSON, self::error(id, version, error));
    observe::refused(error.kind, &mut response);
    retry_after(error, &mut response);
    response
}
