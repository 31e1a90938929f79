//! JSON-RPC 2.0 over HTTP (spec §9): one URL, one object, one answer or one event stream.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode, request::Parts},
};
use rialto_a2a::{Error, Kind, Result, json as protojson};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use tracing::error;

use super::{Doors, JSON, Reply, check_content_type, echo_extensions, json, retry_after};
use crate::{
    agents::Agent,
    bindings::rest::version_in_query,
    call::Call,
    sse::{self, Framing},
};

/// Ids are repeated in every event of a stream.
const MAX_ID: usize = 1024;
/// HTTP statuses that intermediaries and clients act on; all other answers are 200.
const TELLING: [u16; 6] = [401, 403, 413, 429, 503, 504];

/// The operations by their names on this wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    SendMessage,
    SendStreamingMessage,
    GetTask,
    ListTasks,
    CancelTask,
    SubscribeToTask,
    CreatePushConfig,
    GetPushConfig,
    ListPushConfigs,
    DeletePushConfig,
    GetExtendedCard,
}

impl Method {
    /// Names are of one protocol version each: those of 0.3 (`message/send`) are not among these, so that the name
    /// decides which protocol is spoken before any header is looked at.
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "SendMessage" => Self::SendMessage,
            "SendStreamingMessage" => Self::SendStreamingMessage,
            "GetTask" => Self::GetTask,
            "ListTasks" => Self::ListTasks,
            "CancelTask" => Self::CancelTask,
            "SubscribeToTask" => Self::SubscribeToTask,
            "CreateTaskPushNotificationConfig" => Self::CreatePushConfig,
            "GetTaskPushNotificationConfig" => Self::GetPushConfig,
            "ListTaskPushNotificationConfigs" => Self::ListPushConfigs,
            "DeleteTaskPushNotificationConfig" => Self::DeletePushConfig,
            "GetExtendedAgentCard" => Self::GetExtendedCard,
            _ => return None,
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
        Err(error) => return refuse("null", &error),
    };
    let envelope = parse(&body);
    let id = envelope.as_ref().map_or("null", |envelope| id_of(envelope).unwrap_or("null"));
    if let Err(error) = check_content_type(&parts.headers) {
        return refuse(id, &error);
    }
    let (method, params) = match envelope.and_then(|envelope| read(&envelope)) {
        Ok(request) => request,
        Err(error) => return refuse(id, &error),
    };
    let version = parts.uri.query().and_then(version_in_query);
    let call = match Call::new(Arc::clone(agent), String::new(), &parts.headers, version.as_deref()) {
        Ok(call) => call,
        Err(error) => return refuse(id, &error),
    };
    let mut response = match run(doors, &call, method, params, id).await {
        Ok(Reply::Whole(bytes)) => json(StatusCode::OK, JSON, bytes),
        Ok(Reply::Stream(events)) => sse::respond(*events, Framing::JsonRpc(id.to_owned()), doors.limits.keep_alive),
        Err(error) => refuse(id, &error),
    };
    echo_extensions(call.activated(), response.headers_mut());
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

fn read<'a>(envelope: &Envelope<'a>) -> Result<(Method, &'a str)> {
    id_of(envelope)?;
    if envelope.jsonrpc.is_none_or(|version| version.get() != r#""2.0""#) {
        return Err(invalid("`jsonrpc` must be \"2.0\""));
    }
    let method = envelope.method.ok_or_else(|| invalid("`method` is required"))?;
    let name: std::borrow::Cow<'_, str> =
        serde_json::from_str(method.get()).map_err(|_| invalid("`method` must be a string"))?;
    let method = Method::parse(&name).ok_or(Kind::MethodNotFound)?;
    // serde reads structs from arrays too, by position; named parameters are the only ones here.
    match envelope.params.map_or("{}", RawValue::get) {
        params if params.starts_with('{') => Ok((method, params)),
        _ => Err(Error::new(Kind::InvalidParams, "Invalid parameters: `params` must be an object")),
    }
}

async fn run(doors: &Doors, call: &Call, method: Method, params: &str, id: &str) -> Result<Reply> {
    fn params_of<T: DeserializeOwned>(params: &str) -> Result<T> {
        protojson::from_str(params)
    }
    let whole = |bytes| Ok(Reply::Whole(bytes));
    let stream = |events| Ok(Reply::Stream(Box::new(events)));
    let operations = &doors.operations;
    match method {
        Method::SendMessage => whole(result(id, &operations.send_message(call, params_of(params)?).await?)?),
        Method::SendStreamingMessage => stream(operations.send_streaming_message(call, params_of(params)?).await?),
        Method::GetTask => whole(result(id, &operations.get_task(call, params_of(params)?).await?)?),
        Method::ListTasks => {
            let request: rialto_a2a::v1::ListTasksRequest = params_of(params)?;
            let include_artifacts = request.include_artifacts();
            let page = operations.list_tasks(call, request).await?;
            whole(result(id, &super::rest::Page { page: &page, include_artifacts })?)
        }
        Method::CancelTask => whole(result(id, &operations.cancel_task(call, params_of(params)?).await?)?),
        Method::SubscribeToTask => stream(operations.subscribe_to_task(call, params_of(params)?).await?),
        Method::CreatePushConfig => whole(result(id, &operations.create_push_config(call, &params_of(params)?)?)?),
        Method::GetPushConfig => whole(result(id, &operations.get_push_config(call, &params_of(params)?)?)?),
        Method::ListPushConfigs => whole(result(id, &operations.list_push_configs(call, &params_of(params)?)?)?),
        Method::DeletePushConfig => {
            operations.delete_push_config(call, &params_of(params)?)?;
            whole(result(id, &())?)
        }
        Method::GetExtendedCard => whole(result(id, &operations.get_extended_card(call, &params_of(params)?)?)?),
    }
}

fn result<T: Serialize>(id: &str, result: &T) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(br#"{"jsonrpc":"2.0","id":"#);
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(br#","result":"#);
    serde_json::to_writer(&mut out, result).map_err(|fault| {
        error!(%fault, "cannot write a result");
        Error::internal()
    })?;
    out.push(b'}');
    Ok(out)
}

fn refuse(id: &str, error: &Error) -> Response<Body> {
    let http = error.kind.wire().http;
    let status = if TELLING.contains(&http) { http } else { 200 };
    let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{}}}"#, error.to_jsonrpc());
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    let mut response = json(status, HeaderValue::from_static("application/json"), body);
    retry_after(error, &mut response);
    response
}
