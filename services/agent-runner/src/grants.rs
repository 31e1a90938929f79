//! Grants that agents report: on to task-store, until it has answered.

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use rialto_rpc::tasks::{GrantRequest, TaskStoreClient};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backend::{Backend, Grant},
    calls::persist,
};

/// Grants of one agent that are under way; the agent waits while there are so many.
const MAX_CALLS: usize = 16;

/// Passes on what the agent reports, for ever.
pub(crate) async fn pass_on(agent: String, backend: Arc<dyn Backend>, tasks: TaskStoreClient) {
    let mut calls = FuturesUnordered::new();
    loop {
        tokio::select! {
            grant = backend.granted(), if calls.len() < MAX_CALLS => calls.push(pass(&agent, grant, &tasks).boxed()),
            Some(()) = calls.next() => {}
        }
    }
}

async fn pass(agent: &str, grant: Grant, tasks: &TaskStoreClient) {
    let Grant { task_id, metadata, done } = grant;
    let request = GrantRequest {
        task_id,
        agent: agent.to_owned(),
        metadata: Some(metadata),
        commit_id: Bytes::copy_from_slice(uuid::Uuid::now_v7().as_bytes()),
    };
    // No lease runs out here.
    let lost = CancellationToken::new();
    let granted = persist("Grant", &lost, || {
        let (mut client, request) = (tasks.clone(), request.clone());
        async move { client.grant(request).await }
    });
    match granted.await {
        Ok(_) => info!(agent, task.id = request.task_id, "the agent granted what a task waits for"),
        Err(failure) => warn!(agent, task.id = request.task_id, ?failure, "the agent's grant is refused"),
    }
    drop(done);
}
