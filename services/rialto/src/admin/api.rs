//! The admin API: routes of the admin port that ask task-store, wherever it is. `docs/operations.md` describes them.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{
        DefaultBodyLimit, FromRequestParts, Path, Query, State,
        rejection::{BytesRejection, QueryRejection},
    },
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use rialto_a2a::{Error, Kind, wkt};
use rialto_rpc::tasks::{
    AdminClient, AgentRef, DropDeadRequest, GetDeadRequest, GrantRequest, InspectRequest, ListDeadRequest,
    ListStuckRequest, QueuesRequest, ReplayDeadRequest, RunnersRequest, TaskStoreClient,
};
use rialto_runtime::{
    config::{Agent, Config},
    units::Span,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::timeout;
use tonic::Status;

/// How long task-store may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The largest body of a request.
const MAX_BODY: usize = 64 << 10;

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
            .layer(DefaultBodyLimit::max(MAX_BODY))
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
}

impl Problem {
    /// With this status, and what is wrong in a sentence.
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank".to_owned(),
            title: status.canonical_reason().unwrap_or_default().to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
        }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
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
        let wrong = |rejection: QueryRejection| Problem::new(StatusCode::BAD_REQUEST, rejection.body_text());
        Query::try_from_uri(&parts.uri).map(|Query(asked)| Self(asked)).map_err(wrong)
    }
}

async fn queues(State(mut api): State<Api>) -> Answer<rialto_rpc::tasks::QueuesReply> {
    let agents = api.agents();
    ask(api.admin.queues(QueuesRequest { agents })).await
}

async fn runners(State(mut api): State<Api>) -> Answer<rialto_rpc::tasks::RunnersReply> {
    let agents = api.agents();
    ask(api.admin.runners(RunnersRequest { agents })).await
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct DeadPage {
    agent: String,
    limit: u32,
    after: String,
}

async fn list_dead(
    State(mut api): State<Api>,
    Asked(DeadPage { agent, limit, after }): Asked<DeadPage>,
) -> Answer<rialto_rpc::tasks::ListDeadReply> {
    ask(api.admin.list_dead(ListDeadRequest { agent, limit, after })).await
}

async fn get_dead(State(mut api): State<Api>, Path(id): Path<String>) -> Answer<rialto_rpc::tasks::DeadEntry> {
    ask(api.admin.get_dead(GetDeadRequest { id })).await
}

async fn replay_dead(State(mut api): State<Api>, Path(id): Path<String>) -> Answer<rialto_rpc::tasks::ReplayDeadReply> {
    ask(api.admin.replay_dead(ReplayDeadRequest { id })).await
}

async fn drop_one(State(mut api): State<Api>, Path(id): Path<String>) -> Answer<rialto_rpc::tasks::DropDeadReply> {
    ask(api.admin.drop_dead(DropDeadRequest { id, ..DropDeadRequest::default() })).await
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct DropMany {
    agent: String,
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
    all: bool,
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
    content: bool,
}

async fn inspect(
    State(mut api): State<Api>,
    Path(id): Path<String>,
    Asked(How { content }): Asked<How>,
) -> Answer<rialto_rpc::tasks::TaskFacts> {
    let agents = api.agents();
    ask(api.admin.inspect(InspectRequest { id, agents, content })).await
}

/// What comes with a grant.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Granting {
    /// For the agent alone.
    metadata: Option<wkt::Struct>,
}

/// What a grant did.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Granted {
    pub(super) task_id: String,
    /// As in JSON, such as TASK_STATE_SUBMITTED.
    pub(super) state: String,
}

async fn grant(
    State(mut api): State<Api>,
    Path(task_id): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Granted> {
    let body = body.map_err(|rejection| Problem::new(rejection.status(), rejection.body_text()))?;
    let granting = match body.is_empty() {
        true => Granting::default(),
        false => serde_json::from_slice(&body).map_err(|error| {
            let detail = format!("the body must be JSON such as {{\"metadata\": {{…}}}}: {error}");
            Problem::new(StatusCode::BAD_REQUEST, detail)
        })?,
    };
    let request = GrantRequest {
        task_id,
        agent: String::new(),
        metadata: granting.metadata,
        commit_id: uuid::Uuid::new_v4().into_bytes().to_vec().into(),
    };
    let Json(task) = ask(api.tasks.grant(request)).await?;
    Ok(Json(Granted { state: task.state().as_str_name().to_owned(), task_id: task.id }))
}
