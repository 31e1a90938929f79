//! HTTP+JSON (spec §11): paths, query strings and bodies.

use std::{borrow::Cow, sync::Arc};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts},
};
use bytes::Bytes;
use rialto_a2a::{
    Error, Kind, Result, json as protojson,
    v1::{
        CancelTaskRequest, DeleteTaskPushNotificationConfigRequest, GetExtendedAgentCardRequest,
        GetTaskPushNotificationConfigRequest, GetTaskRequest, ListTaskPushNotificationConfigsRequest, ListTasksRequest,
        ListTasksResponse, SendMessageRequest, SubscribeToTaskRequest, Task, TaskPushNotificationConfig, TaskState,
    },
    wkt::{Empty, Timestamp},
};
use serde::{Serialize, Serializer, de::DeserializeOwned, ser::SerializeStruct};
use serde_json::value::RawValue;
use tracing::error;
use url::form_urlencoded;

use super::{A2A_JSON, Doors, JSON, Reply, check_content_type, echo_extensions, essence, json, not_allowed, refuse};
use crate::{
    agents::Agent,
    call::{Call, Version},
    observe::Operation,
    sse::{self, Framing},
};

/// What a path means, its variable parts decoded.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    Send,
    Stream,
    Tasks,
    Task(String),
    Cancel(String),
    Subscribe(String),
    PushConfigs(String),
    PushConfig(String, String),
    ExtendedCard,
}

impl Route {
    /// The verbs that it has.
    fn allow(&self) -> &'static str {
        match self {
            Self::Send | Self::Stream | Self::Cancel(_) => "POST",
            Self::Tasks | Self::Task(_) | Self::ExtendedCard => "GET",
            Self::Subscribe(_) | Self::PushConfigs(_) => "GET, POST",
            Self::PushConfig(..) => "GET, DELETE",
        }
    }
}

impl Route {
    fn operation(&self, verb: &Method) -> Operation {
        Operation::new(match self {
            Self::Send => "SendMessage",
            Self::Stream => "SendStreamingMessage",
            Self::Tasks => "ListTasks",
            Self::Task(_) => "GetTask",
            Self::Cancel(_) => "CancelTask",
            Self::Subscribe(_) => "SubscribeToTask",
            Self::PushConfigs(_) if verb == Method::POST => "CreateTaskPushNotificationConfig",
            Self::PushConfigs(_) => "ListTaskPushNotificationConfigs",
            Self::PushConfig(..) if verb == Method::DELETE => "DeleteTaskPushNotificationConfig",
            Self::PushConfig(..) => "GetTaskPushNotificationConfig",
            Self::ExtendedCard => "GetExtendedAgentCard",
        })
    }
}

/// Reads a path behind the mount: a route, or a tenant and a route.
fn route(path: &str) -> Option<(String, Route)> {
    let segments: Vec<String> = path.strip_prefix('/')?.split('/').map(decode).collect::<Option<_>>()?;
    if let Some(route) = untenanted(&segments) {
        return Some((String::new(), route));
    }
    let (tenant, rest) = segments.split_first()?;
    if tenant.is_empty() {
        return None;
    }
    Some((tenant.clone(), untenanted(rest)?))
}

fn untenanted(segments: &[String]) -> Option<Route> {
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    match segments[..] {
        ["message:send"] => Some(Route::Send),
        ["message:stream"] => Some(Route::Stream),
        ["extendedAgentCard"] => Some(Route::ExtendedCard),
        ["tasks"] => Some(Route::Tasks),
        ["tasks", ""] => None,
        // The last colon parts the id from the verb; ids may have colons too.
        ["tasks", name] => Some(match name.rsplit_once(':') {
            Some((id, "cancel")) => Route::Cancel(id.to_owned()),
            Some((id, "subscribe")) => Route::Subscribe(id.to_owned()),
            _ => Route::Task(name.to_owned()),
        }),
        ["tasks", id, "pushNotificationConfigs"] => Some(Route::PushConfigs(id.to_owned())),
        ["tasks", id, "pushNotificationConfigs", config] if !config.is_empty() => {
            Some(Route::PushConfig(id.to_owned(), config.to_owned()))
        }
        _ => None,
    }
}

/// Undoes percent-encoding, once; `None` if the result is not text.
fn decode(segment: &str) -> Option<String> {
    if !segment.contains('%') {
        return Some(segment.to_owned());
    }
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.split_at_checked(2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let value = digit(digits.0[0])? * 16 + digit(digits.0[1])?;
        bytes.push(u8::try_from(value).ok()?);
        rest = digits.1;
    }
    String::from_utf8(bytes).ok()
}

/// The parameters of a query string. Unknown names are ignored; each of ours has one value, so it is there once.
struct Query<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Query<'a> {
    fn parse(parts: &'a Parts) -> Self {
        Self(form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).collect())
    }

    fn get(&self, name: &str) -> Result<Option<&str>> {
        let mut values = self.0.iter().filter(|(known, _)| known == name).map(|(_, value)| &value[..]);
        match (values.next(), values.next()) {
            (value, None) => Ok(value),
            (_, Some(_)) => Err(Error::invalid(name, "is given more than once")),
        }
    }

    /// Empty text is no text, as everywhere in the protocol.
    fn text(&self, name: &str) -> Result<String> {
        Ok(self.get(name)?.unwrap_or_default().to_owned())
    }

    fn integer(&self, name: &str) -> Result<Option<i32>> {
        let parse = |text: &str| text.parse().map_err(|_| Error::invalid(name, "expected a 32-bit integer"));
        self.get(name)?.map(parse).transpose()
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>> {
        let parse = |text: &str| text.parse().map_err(|_| Error::invalid(name, "expected true or false"));
        self.get(name)?.map(parse).transpose()
    }

    /// By name or, as in all of ProtoJSON, by number.
    fn state(&self, name: &str) -> Result<i32> {
        let Some(text) = self.get(name)? else { return Ok(0) };
        let by_number = || TaskState::try_from(text.parse::<i32>().ok()?).ok();
        match TaskState::from_str_name(text).or_else(by_number) {
            Some(state) => Ok(state.into()),
            None => Err(Error::invalid(name, "expected a TaskState such as TASK_STATE_WORKING")),
        }
    }

    fn timestamp(&self, name: &str) -> Result<Option<Timestamp>> {
        let Some(text) = self.get(name)? else { return Ok(None) };
        if text.contains(' ') {
            return Err(Error::invalid(name, "expected an RFC 3339 timestamp; write a `+` as %2B"));
        }
        text.parse().map(Some).map_err(|_| Error::invalid(name, "expected an RFC 3339 timestamp"))
    }
}

/// `A2A-Version` for clients that cannot set headers, such as a browser's EventSource (spec §3.6.1). Said twice it is
/// a list, which is no version.
pub(super) fn version_in_query(query: &str) -> Option<String> {
    form_urlencoded::parse(query.as_bytes())
        .filter(|(name, _)| name.eq_ignore_ascii_case("a2a-version"))
        .map(|(_, version)| version.into_owned())
        .reduce(|first, more| format!("{first}, {more}"))
}

pub(super) async fn answer(doors: &Doors, agent: &Arc<Agent>, path: &str, parts: &Parts, body: Body) -> Response<Body> {
    let Some((tenant, route)) = route(path) else {
        return refuse(&Error::new(Kind::MethodNotFound, "No such path"));
    };
    if !route.allow().split(", ").any(|verb| verb == parts.method.as_str()) {
        return not_allowed(route.allow());
    }
    let operation = route.operation(&parts.method);
    let version = parts.uri.query().and_then(version_in_query);
    let call = match Call::new(Arc::clone(agent), Version::V1, tenant, &parts.headers, version.as_deref()) {
        Ok(call) => call,
        Err(error) => {
            let mut response = refuse(&error);
            operation.note(&mut response);
            return response;
        }
    };
    let mut response = match run(doors, &call, route, parts, body).await {
        Ok(Reply::Whole(bytes)) => json(StatusCode::OK, media_type(&parts.headers), bytes),
        Ok(Reply::Stream(events)) => sse::respond(*events, Framing::Rest, doors.limits.keep_alive),
        Err(error) => refuse(&error),
    };
    echo_extensions(&call, response.headers_mut());
    operation.note(&mut response);
    response
}

/// The media type of an answer is that of the question.
fn media_type(request: &HeaderMap) -> HeaderValue {
    let names_json = |value: &HeaderValue| essence(value).is_some_and(|essence| essence == "application/json");
    let accepts_json = |value: &HeaderValue| {
        let Ok(list) = value.to_str() else { return false };
        list.split(',').any(|range| range.split(';').next().unwrap_or_default().trim() == "application/json")
    };
    let by_body = request.get(header::CONTENT_TYPE).is_some_and(names_json);
    if by_body || request.get(header::ACCEPT).is_some_and(accepts_json) { JSON } else { A2A_JSON }
}

async fn run(doors: &Doors, call: &Call, route: Route, parts: &Parts, body: Body) -> Result<Reply> {
    let operations = &doors.operations;
    let query = Query::parse(parts);
    let tenant = query.text("tenant")?;
    // Bodies of verbs that have none are not read.
    let body = match parts.method {
        Method::POST => body_of(doors, parts, body).await?,
        _ => Bytes::new(),
    };
    match route {
        Route::Send => {
            let request: SendMessageRequest = required(&body)?;
            whole(&operations.send_message(call, request).await?)
        }
        Route::Stream => {
            let request: SendMessageRequest = required(&body)?;
            Ok(Reply::Stream(Box::new(operations.send_streaming_message(call, request).await?)))
        }
        Route::Tasks => {
            let request = ListTasksRequest {
                tenant,
                context_id: query.text("contextId")?,
                status: query.state("status")?,
                page_size: query.integer("pageSize")?,
                page_token: query.text("pageToken")?,
                history_length: query.integer("historyLength")?,
                status_timestamp_after: query.timestamp("statusTimestampAfter")?,
                include_artifacts: query.boolean("includeArtifacts")?,
            };
            let include_artifacts = request.include_artifacts();
            let page = operations.list_tasks(call, request).await?;
            whole(&Page { page: &page, include_artifacts })
        }
        Route::Task(id) => {
            let request = GetTaskRequest { tenant, id, history_length: query.integer("historyLength")? };
            whole(&operations.get_task(call, request).await?)
        }
        Route::Cancel(id) => {
            let mut request: CancelTaskRequest = optional(&body)?;
            same("id", &id, &mut request.id)?;
            whole(&operations.cancel_task(call, request).await?)
        }
        Route::Subscribe(id) => {
            let mut request: SubscribeToTaskRequest = optional(&body)?;
            same("id", &id, &mut request.id)?;
            if request.tenant.is_empty() {
                request.tenant = tenant;
            }
            Ok(Reply::Stream(Box::new(operations.subscribe_to_task(call, request).await?)))
        }
        Route::PushConfigs(task_id) if parts.method == Method::POST => {
            let mut request: TaskPushNotificationConfig = required(&body)?;
            same("taskId", &task_id, &mut request.task_id)?;
            whole(&operations.create_push_config(call, &request)?)
        }
        Route::PushConfigs(task_id) => {
            let page_size = query.integer("pageSize")?.unwrap_or(0);
            let page_token = query.text("pageToken")?;
            let request = ListTaskPushNotificationConfigsRequest { task_id, page_size, page_token, tenant };
            whole(&operations.list_push_configs(call, &request)?)
        }
        Route::PushConfig(task_id, id) if parts.method == Method::DELETE => {
            operations.delete_push_config(call, &DeleteTaskPushNotificationConfigRequest { tenant, task_id, id })?;
            whole(&Empty {})
        }
        Route::PushConfig(task_id, id) => {
            whole(&operations.get_push_config(call, &GetTaskPushNotificationConfigRequest { tenant, task_id, id })?)
        }
        Route::ExtendedCard => whole(&operations.get_extended_card(call, &GetExtendedAgentCardRequest { tenant })?),
    }
}

/// Reads a body; the type of an empty one does not matter.
async fn body_of(doors: &Doors, parts: &Parts, body: Body) -> Result<Bytes> {
    let body = doors.read(parts, body).await?;
    if !body.is_empty() {
        check_content_type(&parts.headers)?;
    }
    Ok(body)
}

fn required<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    protojson::from_slice(body)
}

fn optional<T: DeserializeOwned + Default>(body: &[u8]) -> Result<T> {
    if body.trim_ascii().is_empty() { Ok(T::default()) } else { protojson::from_slice(body) }
}

/// What the path says goes into the message, which may say it too, but not otherwise.
fn same(name: &str, path: &str, field: &mut String) -> Result<()> {
    if field.is_empty() {
        path.clone_into(field);
    }
    if field == path { Ok(()) } else { Err(Error::invalid(name, "differs from the one in the path")) }
}

fn whole<T: Serialize>(message: &T) -> Result<Reply> {
    serde_json::to_vec(message).map(Reply::Whole).map_err(|fault| {
        error!(%fault, "cannot write an answer");
        Error::internal()
    })
}

/// A page of tasks in which artifacts are always a list when they were asked for, and absent when not
/// (spec §3.1.4); ProtoJSON alone would leave an empty list out.
pub(super) struct Page<'a> {
    pub(super) page: &'a ListTasksResponse,
    pub(super) include_artifacts: bool,
}

impl Serialize for Page<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !self.include_artifacts {
            return self.page.serialize(serializer);
        }
        let ListTasksResponse { tasks, next_page_token, page_size, total_size } = self.page;
        let mut page = serializer.serialize_struct("ListTasksResponse", 4)?;
        page.serialize_field("tasks", &tasks.iter().map(WithArtifacts).collect::<Vec<_>>())?;
        page.serialize_field("nextPageToken", next_page_token)?;
        page.serialize_field("pageSize", page_size)?;
        page.serialize_field("totalSize", total_size)?;
        page.end()
    }
}

struct WithArtifacts<'a>(&'a Task);

impl Serialize for WithArtifacts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !self.0.artifacts.is_empty() {
            return self.0.serialize(serializer);
        }
        let bare = serde_json::to_string(self.0).map_err(serde::ser::Error::custom)?;
        let inside = bare.strip_prefix('{').unwrap_or(&bare);
        let comma = if inside == "}" { "" } else { "," };
        let json = format!(r#"{{"artifacts":[]{comma}{inside}"#);
        RawValue::from_string(json).map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_mean_one_thing_however_they_are_encoded() {
        let route = |path| route(path).map(|(tenant, route)| format!("{tenant}>{route:?}"));
        let is = |path, expected: &str| assert_eq!(route(path).as_deref(), Some(expected), "{path}");
        is("/message:send", ">Send");
        is("/message%3Asend", ">Send");
        is("/acme/message:stream", "acme>Stream");
        is("/tasks", ">Tasks");
        is("/acme/tasks", "acme>Tasks");
        is("/tasks/1", r#">Task("1")"#);
        is("/tasks/1:cancel", r#">Cancel("1")"#);
        is("/tasks/1%3Acancel", r#">Cancel("1")"#);
        is("/acme/tasks/1:2:subscribe", r#"acme>Subscribe("1:2")"#);
        is("/tasks/1:other", r#">Task("1:other")"#);
        is("/tasks/a%2Fb", r#">Task("a/b")"#);
        is("/tasks/..%2f..%2fmetrics", r#">Task("../../metrics")"#);
        is("/tasks/%00", r#">Task("\0")"#);
        is("/tasks/1/pushNotificationConfigs/2", r#">PushConfig("1", "2")"#);
        is("/tasks/tasks", r#">Task("tasks")"#);
        for nothing in [
            "/",
            "//tasks/1",
            "/tasks/1/",
            "/tasks/",
            "/a/b/tasks",
            "/acme//tasks",
            "/tasks/%ff",
            "/tasks/%zz",
            "/tasks/%2",
            "/message:other",
            "/tasks/1/pushNotificationConfigs/",
            "/%2e%2e",
            "/x",
        ] {
            assert_eq!(route(nothing), None, "{nothing}");
        }
    }

    /// As a proxy might encode it: everything, or only what it must.
    fn encode(segment: &str, all: bool) -> String {
        let plain = |byte: &u8| !all && (byte.is_ascii_alphanumeric() || b"-_.~:".contains(byte));
        let encode = |byte: u8| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") };
        segment.bytes().map(encode).collect()
    }

    proptest! {
        #[test]
        fn any_id_comes_through_whole(id in ".{1,40}", tenant in "[a-z]{0,5}", all: bool) {
            let prefix = if tenant.is_empty() { String::new() } else { format!("/{tenant}") };
            for (verb, expected) in [
                (":cancel", Route::Cancel(id.clone())),
                (":subscribe", Route::Subscribe(id.clone())),
            ] {
                let path = format!("{prefix}/tasks/{}", encode(&format!("{id}{verb}"), all));
                prop_assert_eq!(route(&path), Some((tenant.clone(), expected)));
            }
        }

        #[test]
        fn no_path_is_too_odd(path in "(/|%|:|[a-z.]{1,3}|%2f|%2e|tasks|message:send|é){0,12}") {
            if let Some((_, Route::Task(id))) = route(&path) {
                prop_assert!(!id.is_empty());
            }
        }
    }
}
