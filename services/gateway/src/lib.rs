//! The doors of Rialto: every A2A binding, on one port, in front of task-store.
//!
//! Three layers. [`bindings`] turn JSON-RPC, REST and gRPC into typed requests with a [`call::Call`] and errors
//! into each wire. [`operations`] are the operations of A2A, once: who may ask what, what is refused before
//! anything is stored, how long is waited. [`agents`] know which agent a host and path mean, and what its card
//! says. Keeps nothing that matters: any replica answers for any task.

mod agents;
mod bindings;
mod call;
mod card;
mod cors;
mod follow;
mod forwarded;
mod observe;
mod operations;
mod sse;

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use axum::Router;
use rialto_rpc::tasks::TaskStoreClient;
use rialto_runtime::config::Config;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::call::is_idempotency_key;
use crate::{
    agents::Agents, bindings::Doors, cors::Cors, follow::Follower, forwarded::Forwarded, operations::Operations,
};

/// URI of the extension by which events carry their number in `metadata` under this same key, on all bindings.
/// Event streams over HTTP carry it as the `id` of each event in any case.
pub const EVENT_NUMBER: &str = "urn:rialto:event-number:v1";

/// Everything that one process needs to serve its agents.
#[derive(Clone, Debug)]
pub struct Gateway {
    doors: Arc<Doors>,
}

impl Gateway {
    /// Prepares to serve the agents of `config`, whose tasks live behind `tasks`.
    ///
    /// `local` is the address that the public port listens on; cards advertise it unless `public-url` is set or a
    /// trusted proxy says better. `stop` ends all event streams at an event boundary. Background work runs in
    /// `tracker`.
    ///
    /// # Errors
    /// Agents that cannot be told apart, reserved names, URLs and networks that are none.
    pub fn new(
        config: &Config,
        tasks: TaskStoreClient,
        local: SocketAddr,
        tracker: &TaskTracker,
        stop: CancellationToken,
    ) -> anyhow::Result<Self> {
        let forwarded = Forwarded::new(config, local)?;
        let agents = Agents::new(config).context("agents")?;
        let follower = Follower::new(&config.limits, tasks.clone(), tracker, stop.clone());
        let operations = Operations::new(config, tasks, follower, tracker.clone(), stop.clone());
        let doors = Doors::new(config, agents, operations, forwarded, Cors::new(config)?, tracker, stop);
        Ok(Self { doors: Arc::new(doors) })
    }

    /// What the public port serves.
    pub fn router(&self) -> Router {
        bindings::router(Arc::clone(&self.doors))
    }
}
