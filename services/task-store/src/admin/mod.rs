//! What an operator sees and does, beside what clients and runners do. Nothing here is on their way.

mod crew;
mod dead;
mod facts;
mod measure;
mod queues;
mod stuck;

use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{
    DeadEntry, DropDeadReply, DropDeadRequest, GetDeadRequest, InspectRequest, ListDeadReply, ListDeadRequest,
    ListStuckReply, ListStuckRequest, QueuesReply, QueuesRequest, ReplayDeadReply, ReplayDeadRequest, RunnersReply,
    RunnersRequest, TaskFacts, admin_server::Admin,
};
use rialto_store::Millis;
use tonic::{Request, Response, Status};

pub(crate) use self::dead::Counts;
use crate::{TaskStore, service::answer};

/// Rows of a page when the caller does not say.
const PAGE: usize = 50;

/// Rows of the largest page.
const MAX_PAGE: usize = 500;

/// What one call looks at before it answers with a short page.
const MAX_LOOKS: usize = 2000;

/// Reads at the store that one call has under way.
const AT_ONCE: usize = 16;

/// The size of a page.
fn page(limit: u32) -> Result<usize, Error> {
    match usize::try_from(limit) {
        Ok(0) => Ok(PAGE),
        Ok(limit @ 1..=MAX_PAGE) => Ok(limit),
        _ => Err(Error::invalid("limit", format!("must be from 1 to {MAX_PAGE}"))),
    }
}

/// A time of the store, as replies have it.
fn unsigned(ms: Millis) -> u64 {
    u64::try_from(ms).unwrap_or(0)
}

/// How long ago something was.
fn age(now: Millis, at: Millis) -> u64 {
    unsigned(now.saturating_sub(at))
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
