//! The admin API: routes of the admin port that ask task-store, wherever it is. `docs/operations.md` describes them.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{FromRequestParts, Path, Request, State, rejection::PathRejection},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use bytes::Bytes;
use rialto_a2a::{Error, Kind, wkt};
use rialto_net::BodyError;
use rialto_rpc::tasks::{
    AdminClient, AgentRef, DropDeadRequest, GetDeadRequest, GrantRequest, InspectRequest, ListDeadRequest,
    ListStuckRequest, QueuesRequest, ReplayDeadRequest, RunnersRequest, TaskStoreClient,
};
use rialto_runtime::{
    config::{Agent, Config},
    units::Span,
};
use rialto_task_store::{MAX_PAGE, is_dead_id, is_task_id};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        DeserializeOwned, Error as _,
        value::{self, MapDeserializer},
    },
};
use serde_json::{Map, Value};
use tokio::time::timeout;
use tonic::Status;
use url::form_urlencoded;

/// How long task-store may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The largest body of a request, and how long it may take to arrive.
const MAX_BODY: usize = 64 << 10;
const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// Age from which a turn may be stuck, when nobody says.
const OLDER: Span = Span::secs(60);

/// Who answers.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    admin: AdminClient,
    tasks: TaskStoreClient,
    agents: Arc<[AgentRef]>,
}

impl Api {
    /// By task-store, about the agents of a configuration.
    pub(crate) fn new(config: &Config, admin: AdminClient, tasks: TaskStoreClient) -> Self {
        Self { admin, tasks, agents: agents(config).into() }
    }

    fn agents(&self) -> Vec<AgentRef> {
        self.agents.to_vec()
    }

    /// The routes. They check no token: that is for whoever serves them.
    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/admin/v1/queues", get(queues))
            .route("/admin/v1/runners", get(runners))
            .route("/admin/v1/dead", get(list_dead).delete(drop_dead))
            .route("/admin/v1/dead/{id}", get(get_dead).merge(delete(drop_one)))
            .route("/admin/v1/dead/{id}/replay", post(replay_dead))
            .route("/admin/v1/tasks/stuck", get(stuck))
            .route("/admin/v1/tasks/{id}", get(inspect))
            .route("/admin/v1/tasks/{id}/grant", post(grant))
            .method_not_allowed_fallback(async || {
                Problem::new(StatusCode::METHOD_NOT_ALLOWED, "this cannot be done by this method")
            })
            .with_state(self)
    }
}

/// The agents that task-store is asked about.
pub(crate) fn agents(config: &Config) -> Vec<AgentRef> {
    let agent = |agent: &Agent| AgentRef { id: agent.id.clone(), lease_ms: agent.lease.as_millis() };
    config.agents.iter().map(agent).collect()
}

/// An error as `application/problem+json` (RFC 9457).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Problem {
    #[serde(rename = "type")]
    kind: String,
    title: String,
    status: u16,
    /// What is wrong, for a person.
    pub(super) detail: String,
    /// The parameter, or the member of the body, that is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) field: Option<String>,
}

impl Problem {
    /// With this status, and what is wrong in a sentence.
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank".to_owned(),
            title: status.canonical_reason().unwrap_or_default().to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            field: None,
        }
    }

    /// What is wrong with a parameter or a member of the body, to be read after its name.
    fn wrong(field: &str, why: &str) -> Self {
        let detail = format!("{field}: {why}");
        Self { field: Some(field.to_owned()), ..Self::new(StatusCode::BAD_REQUEST, detail) }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        if let Some(violation) = error.violations.first() {
            return Self::wrong(&violation.field, &violation.description);
        }
        let status = match error.kind {
            // The operator may do it, but not in this state.
            Kind::UnsupportedOperation => StatusCode::CONFLICT,
            kind => StatusCode::from_u16(kind.wire().http).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        };
        let detail = match error.kind {
            Kind::Unavailable if error.message == Kind::Unavailable.wire().message => {
                "task-store, or the store behind it, does not answer".to_owned()
            }
            _ => error.message.into_owned(),
        };
        Self::new(status, detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = HeaderValue::from_static("application/problem+json");
        (status, [(header::CONTENT_TYPE, kind)], serde_json::to_string(&self).unwrap_or_default()).into_response()
    }
}

type Answer<T> = Result<Json<T>, Problem>;

/// Waits for an answer of task-store.
async fn ask<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Answer<T> {
    match timeout(PATIENCE, call).await {
        Ok(Ok(reply)) => Ok(Json(reply.into_inner())),
        Ok(Err(status)) if status.code() == tonic::Code::Unimplemented => {
            let detail = "task-store is of an earlier version and does not know this call";
            Err(Problem::new(StatusCode::NOT_IMPLEMENTED, detail))
        }
        Ok(Err(status)) => Err(Error::from_status(&status).into()),
        Err(_) => Err(Error::unavailable().into()),
    }
}

/// The query of a request; an unknown key is an error, for it was meant to change something.
struct Asked<T>(T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        asked(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

/// Reads a query. Keys are read one after the other, so the last one that was seen is the one that is wrong.
fn asked<T: DeserializeOwned>(query: &str) -> Result<T, Problem> {
    let mut seen = Vec::new();
    let pairs = form_urlencoded::parse(query.as_bytes()).inspect(|(key, _)| seen.push(key.clone()));
    T::deserialize(MapDeserializer::new(pairs)).map_err(|error: value::Error| {
        let key = seen.pop().unwrap_or_default();
        match seen.contains(&key) {
            true => Problem::wrong(&key, "must be given once"),
            false => Problem::wrong(&key, &error.to_string()),
        }
    })
}

/// Reads a value from its text, which `must` be something.
fn parsed<'de, D: Deserializer<'de>, T>(
    text: D,
    parse: impl FnOnce(&str) -> Option<T>,
    must: &str,
) -> Result<T, D::Error> {
    parse(&String::deserialize(text)?).ok_or_else(|| D::Error::custom(format_args!("must be {must}")))
}

fn flag<'de, D: Deserializer<'de>>(text: D) -> Result<bool, D::Error> {
    parsed(text, |text| text.parse().ok(), "true or false")
}

fn instant<'de, D: Deserializer<'de>>(text: D) -> Result<u64, D::Error> {
    parsed(text, |text| text.parse().ok(), "a number of milliseconds since 1970")
}

/// The size of a page, as task-store takes it; 0, which nobody can ask for, is its own.
fn limit<'de, D: Deserializer<'de>>(text: D) -> Result<u32, D::Error> {
    let parse = |text: &str| text.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
    parsed(text, parse, &format!("from 1 to {MAX_PAGE}"))
}

/// A variable that was not set must not mean every agent.
fn one_agent<'de, D: Deserializer<'de>>(text: D) -> Result<String, D::Error> {
    let parse = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    parsed(text, parse, "the id of an agent; without it, the entries of all agents are dropped")
}

/// The id of a task, as commands and paths have it.
pub(super) fn task_id(text: &str) -> Result<String, &'static str> {
    let wrong = "must be the id of a task, such as 01932f5c-3b1e-7d2a-9c4f-5e8a7b6d0c00";
    is_task_id(text).then(|| text.to_owned()).ok_or(wrong)
}

/// The id of a dead entry, as commands and paths have it.
pub(super) fn dead_id(text: &str) -> Result<String, &'static str> {
    let wrong = "must be the id of a dead entry, such as 0-1764525600000-0";
    is_dead_id(text).then(|| text.to_owned()).ok_or(wrong)
}

/// What stands for `{id}` in a path; an error is text that is no UTF-8.
type InPath = Result<Path<String>, PathRejection>;

/// Reads an id that is a part of a path.
fn in_path(id: InPath, read: fn(&str) -> Result<String, &'static str>) -> Result<String, Problem> {
    // What is no text is no id either.
    read(&id.map(|Path(id)| id).unwrap_or_default()).map_err(|why| Problem::wrong("id", why))
}

/// The query of a route that can be asked nothing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

async fn queues(State(mut api): State<Api>, _: Asked<Nothing>) -> Answer<rialto_rpc::tasks::QueuesReply> {
    let agents = api.agents();
    ask(api.admin.queues(QueuesRequest { agents })).await
}

async fn runners(State(mut api): State<Api>, _: Asked<Nothing>) -> Answer<rialto_rpc::tasks::RunnersReply> {
    let agents = api.agents();
    ask(api.admin.runners(RunnersRequest { agents })).await
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct DeadPage {
    agent: String,
    #[serde(deserialize_with = "limit")]
    limit: u32,
    after: String,
}

async fn list_dead(
    State(mut api): State<Api>,
    Asked(DeadPage { agent, limit, after }): Asked<DeadPage>,
) -> Answer<rialto_rpc::tasks::ListDeadReply> {
    ask(api.admin.list_dead(ListDeadRequest { agent, limit, after })).await
}

async fn get_dead(State(mut api): State<Api>, id: InPath, _: Asked<Nothing>) -> Answer<rialto_rpc::tasks::DeadEntry> {
    let id = in_path(id, dead_id)?;
    ask(api.admin.get_dead(GetDeadRequest { id })).await
}

async fn replay_dead(
    State(mut api): State<Api>,
    id: InPath,
    _: Asked<Nothing>,
) -> Answer<rialto_rpc::tasks::ReplayDeadReply> {
    let id = in_path(id, dead_id)?;
    ask(api.admin.replay_dead(ReplayDeadRequest { id })).await
}

async fn drop_one(
    State(mut api): State<Api>,
    id: InPath,
    _: Asked<Nothing>,
) -> Answer<rialto_rpc::tasks::DropDeadReply> {
    let id = in_path(id, dead_id)?;
    ask(api.admin.drop_dead(DropDeadRequest { id, ..DropDeadRequest::default() })).await
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct DropMany {
    #[serde(deserialize_with = "one_agent")]
    agent: String,
    #[serde(deserialize_with = "instant")]
    until: u64,
}

async fn drop_dead(
    State(mut api): State<Api>,
    Asked(DropMany { agent, until }): Asked<DropMany>,
) -> Answer<rialto_rpc::tasks::DropDeadReply> {
    ask(api.admin.drop_dead(DropDeadRequest { id: String::new(), agent, until_at_ms: until })).await
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct StuckPage {
    older: Span,
    agent: String,
    #[serde(deserialize_with = "flag")]
    all: bool,
    #[serde(deserialize_with = "limit")]
    limit: u32,
    after: String,
}

impl Default for StuckPage {
    fn default() -> Self {
        Self { older: OLDER, agent: String::new(), all: false, limit: 0, after: String::new() }
    }
}

async fn stuck(
    State(mut api): State<Api>,
    Asked(StuckPage { older, agent, all, limit, after }): Asked<StuckPage>,
) -> Answer<rialto_rpc::tasks::ListStuckReply> {
    let (agents, older_ms) = (api.agents(), older.as_millis());
    ask(api.admin.list_stuck(ListStuckRequest { agents, agent, older_ms, all, limit, after })).await
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct How {
    #[serde(deserialize_with = "flag")]
    content: bool,
}

async fn inspect(
    State(mut api): State<Api>,
    id: InPath,
    Asked(How { content }): Asked<How>,
) -> Answer<rialto_rpc::tasks::TaskFacts> {
    let id = in_path(id, task_id)?;
    let agents = api.agents();
    ask(api.admin.inspect(InspectRequest { id, agents, content })).await
}

/// Reads the body of a request. What is left of one that did not arrive in time ends with its connection.
async fn body(request: Request, patience: Duration) -> Result<Bytes, Problem> {
    let (parts, body) = request.into_parts();
    rialto_net::read(&parts.headers, body, MAX_BODY, patience).await.map_err(|error| {
        let status = match error {
            BodyError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::TimedOut => StatusCode::REQUEST_TIMEOUT,
            BodyError::Broken => StatusCode::BAD_REQUEST,
        };
        Problem::new(status, error.to_string())
    })
}

/// What comes with a grant, for the agent alone: `{"metadata": {…}}`, or nothing.
fn granting(body: &[u8]) -> Result<Option<wkt::Struct>, Problem> {
    if body.is_empty() {
        return Ok(None);
    }
    let mut members: Map<String, Value> = serde_json::from_slice(body).map_err(|error| {
        Problem::wrong("body", &format!("must be a JSON object such as {{\"metadata\": {{…}}}}: {error}"))
    })?;
    let metadata = match members.remove("metadata").unwrap_or_default() {
        Value::Null => None,
        metadata => {
            let metadata = serde_json::from_value(metadata);
            Some(metadata.map_err(|error| Problem::wrong("metadata", &format!("must be a JSON object: {error}")))?)
        }
    };
    match members.keys().next() {
        Some(unknown) => Err(Problem::wrong(unknown, "is not known; the body may have metadata and nothing else")),
        None => Ok(metadata),
    }
}

/// What a grant did.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Granted {
    pub(super) task_id: String,
    /// As in JSON, such as TASK_STATE_SUBMITTED.
    pub(super) state: String,
}

async fn grant(State(mut api): State<Api>, id: InPath, _: Asked<Nothing>, request: Request) -> Answer<Granted> {
    let task_id = in_path(id, task_id)?;
    let metadata = granting(&body(request, BODY_PATIENCE).await?)?;
    let request = GrantRequest {
        task_id,
        agent: String::new(),
        metadata,
        commit_id: uuid::Uuid::new_v4().into_bytes().to_vec().into(),
    };
    let Json(task) = ask(api.tasks.grant(request)).await?;
    Ok(Json(Granted { state: task.state().as_str_name().to_owned(), task_id: task.id }))
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, extract::Request};
    use rialto_net::{Limits, Listener};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;

    #[test]
    fn what_is_wrong_in_a_query_is_known_by_its_key() {
        fn wrong<T: DeserializeOwned>(query: &str) -> (String, String) {
            let problem = asked::<T>(query).err().unwrap();
            assert_eq!(problem.status, 400, "{query}");
            (problem.field.unwrap(), problem.detail)
        }
        for (query, field, detail) in [
            ("limit=-1", "limit", "limit: must be from 1 to 500"),
            ("limit=x", "limit", "limit: must be from 1 to 500"),
            ("limit=", "limit", "limit: must be from 1 to 500"),
            ("limit=0", "limit", "limit: must be from 1 to 500"),
            ("after=a&limit=501&x=1", "limit", "limit: must be from 1 to 500"),
            ("limit=1&all=true&limit=1", "limit", "limit: must be given once"),
            ("agent=a&agent=b", "agent", "agent: must be given once"),
            ("all=maybe", "all", "all: must be true or false"),
            ("all", "all", "all: must be true or false"),
            ("older=1", "older", "older: \"1\" is not a time such as \"30s\" or \"10m\""),
            ("x%20y=1", "x y", "x y: unknown field `x y`, expected one of `older`, `agent`, `all`, `limit`, `after`"),
        ] {
            assert_eq!(wrong::<StuckPage>(query), (field.to_owned(), detail.to_owned()), "{query}");
        }
        let detail = "until: must be a number of milliseconds since 1970";
        assert_eq!(wrong::<DropMany>("until=x"), ("until".to_owned(), detail.to_owned()));
        let detail = "agent: must be the id of an agent; without it, the entries of all agents are dropped";
        assert_eq!(wrong::<DropMany>("agent="), ("agent".to_owned(), detail.to_owned()));
        let detail = "x: unknown field `x`, there are no fields";
        assert_eq!(wrong::<Nothing>("x=1"), ("x".to_owned(), detail.to_owned()));
    }

    #[test]
    fn a_query_says_what_it_says_and_the_rest_is_as_usual() {
        let StuckPage { older, agent, all, limit, after } = asked("").unwrap();
        assert_eq!((older, &agent[..], all, limit, &after[..]), (OLDER, "", false, 0, ""));
        let query = "after=1%2B2&all=true&limit=500&older=2h&agent=a+b";
        let StuckPage { older, agent, all, limit, after } = asked(query).unwrap();
        assert_eq!((older, &agent[..], all, limit, &after[..]), (Span::secs(7200), "a b", true, 500, "1+2"));
        let DropMany { agent, until } = asked("until=1764525600000").unwrap();
        assert_eq!((&agent[..], until), ("", 1_764_525_600_000));
        asked::<Nothing>("").unwrap();
    }

    #[tokio::test]
    async fn a_body_that_is_too_large_is_refused() {
        let sent = async |size| body(Request::new(Body::from(vec![b' '; size])), BODY_PATIENCE).await;
        assert_eq!(sent(MAX_BODY).await.unwrap().len(), MAX_BODY);
        let problem = sent(MAX_BODY + 1).await.unwrap_err();
        assert_eq!((problem.status, &problem.detail[..]), (413, "the body is larger than 65536 bytes"));
    }

    #[tokio::test]
    async fn half_a_body_does_not_hold_its_connection_for_ever() {
        let listener = Listener::bind("127.0.0.1:0").await.unwrap();
        let mut tcp = TcpStream::connect(listener.local_addr()).await.unwrap();
        let router = Router::new()
            .route("/", post(async |request: Request| body(request, Duration::from_millis(1)).await.map(drop)));
        let long = Duration::from_secs(3600);
        let limits = Limits {
            connections: 1,
            streams_per_connection: 1,
            header_timeout: long,
            ping_interval: long,
            ping_timeout: long,
            send_timeout: long,
        };
        let serving = listener.serve(router, limits, CancellationToken::new(), long);
        tcp.write_all(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\n\r\n{\"metada").await.unwrap();
        let mut answer = String::new();
        // To the end of the connection.
        let ended = timeout(Duration::from_secs(60), tcp.read_to_string(&mut answer));
        tokio::select! {
            () = serving => panic!("nobody has stopped it"),
            ended = ended => ended.expect("the connection ends").unwrap(),
        };
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("application/problem+json"), "{answer}");
        assert!(answer.ends_with(r#""status":408,"detail":"the body did not arrive in time"}"#), "{answer}");
    }
}
