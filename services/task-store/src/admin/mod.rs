//! What an operator sees and does, beside what clients and runners do. Nothing here is on their way.

mod crew;
mod dead;
mod facts;
mod measure;
mod queues;
mod replay;
mod stuck;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{
    DeadEntry, DropDeadReply, DropDeadRequest, GetDeadRequest, InspectRequest, ListDeadReply, ListDeadRequest,
    ListStuckReply, ListStuckRequest, QueuesReply, QueuesRequest, ReplayDeadReply, ReplayDeadRequest, RunnersReply,
    RunnersRequest, TaskFacts, admin_server::Admin,
};
use rialto_store::{Millis, Shard};
use tonic::{Request, Response, Status};

pub(crate) use self::dead::Counts;
pub use self::dead::is_dead_id;
use crate::{TaskStore, keys::TaskId, service::answer, store::Store};

/// Rows of a page when the caller does not say.
const PAGE: usize = 50;

/// Rows of the largest page of what operators list.
pub const MAX_PAGE: u32 = 500;

/// What one call looks at before it answers with a short page.
const MAX_LOOKS: usize = 2000;

/// Reads at the store that one call has under way.
const AT_ONCE: usize = 16;

/// The size of a page.
fn page(limit: u32) -> Result<usize, Error> {
    match limit {
        0 => Ok(PAGE),
        1..=MAX_PAGE => Ok(limit as usize),
        _ => Err(Error::invalid("limit", format!("must be from 1 to {MAX_PAGE}"))),
    }
}

/// Why a page does not begin where it should.
fn no_such_page() -> Error {
    Error::invalid("after", "must be the `next` of an earlier page")
}

/// Asks every shard something, [`AT_ONCE`] at a time. The answers come in any order.
async fn by_shard<T, E, F>(store: &Store, ask: impl Fn(Shard) -> F) -> Result<Vec<T>, E>
where
    F: Future<Output = Result<T, E>>,
{
    stream::iter(0..store.engine.shards()).map(ask).buffer_unordered(AT_ONCE).try_collect().await
}

/// A time of the store, as replies have it.
fn unsigned(ms: Millis) -> u64 {
    u64::try_from(ms).unwrap_or(0)
}

/// How long ago something was.
fn age(now: Millis, at: Millis) -> u64 {
    unsigned(now.saturating_sub(at))
}

/// Whether a text has the form of the id of a task.
#[must_use]
pub fn is_task_id(text: &str) -> bool {
    TaskId::parse(text, Shard::MAX).is_some()
}

fn no_task(id: &str) -> Error {
    Error::new(Kind::TaskNotFound, format!("there is no task {id}"))
}

#[tonic::async_trait]
impl Admin for TaskStore {
    async fn queues(&self, request: Request<QueuesRequest>) -> Result<Response<QueuesReply>, Status> {
        let queues = self.0.queues(&request.into_inner().agents).await;
        answer(queues.map(|queues| QueuesReply { queues }))
    }

    async fn runners(&self, request: Request<RunnersRequest>) -> Result<Response<RunnersReply>, Status> {
        let runners = self.0.runners(&request.into_inner().agents).await;
        answer(runners.map(|runners| RunnersReply { runners }))
    }

    async fn list_dead(&self, request: Request<ListDeadRequest>) -> Result<Response<ListDeadReply>, Status> {
        answer(self.0.list_dead(&request.into_inner()).await)
    }

    async fn get_dead(&self, request: Request<GetDeadRequest>) -> Result<Response<DeadEntry>, Status> {
        answer(self.0.get_dead(&request.into_inner().id).await)
    }

    async fn replay_dead(&self, request: Request<ReplayDeadRequest>) -> Result<Response<ReplayDeadReply>, Status> {
        answer(self.0.replay_dead(&request.into_inner().id).await)
    }

    async fn drop_dead(&self, request: Request<DropDeadRequest>) -> Result<Response<DropDeadReply>, Status> {
        answer(self.0.drop_dead(&request.into_inner()).await)
    }

    async fn list_stuck(&self, request: Request<ListStuckRequest>) -> Result<Response<ListStuckReply>, Status> {
        answer(self.0.list_stuck(&request.into_inner()).await)
    }

    async fn inspect(&self, request: Request<InspectRequest>) -> Result<Response<TaskFacts>, Status> {
        answer(self.0.inspect(&request.into_inner()).await)
    }
}
