//! How long the queues are.

use futures::future::try_join;
use rialto_a2a::Error;
use rialto_rpc::tasks::{AgentRef, Queue};

use super::{age, by_shard, crew::Crew};
use crate::{Inner, keys, store::failed};

impl Inner {
    pub(super) async fn queues(&self, agents: &[AgentRef]) -> Result<Vec<Queue>, Error> {
        let crew = Crew::of(&self.store, agents);
        let (crew, mut dead) = try_join(crew, self.dead.by_agent(&self.store)).await?;
        let mut queues = Vec::with_capacity(agents.len());
        for agent in agents {
            let mut queue = self.queue(&agent.id).await?;
            queue.dead = dead.remove(&agent.id).unwrap_or_default();
            queue.runners = u32::try_from(crew.alive(&agent.id)).unwrap_or(u32::MAX);
            queues.push(queue);
        }
        queues.extend(dead.into_iter().map(|(agent, dead)| Queue { agent, dead, ..Queue::default() }));
        Ok(queues)
    }

    /// The stream of one agent, all shards together.
    async fn queue(&self, agent: &str) -> Result<Queue, Error> {
        let (engine, stream) = (&self.store.engine, keys::runs(agent));
        let depths = by_shard(&self.store, |shard| engine.depth(shard, &stream)).await;
        let depths = depths.map_err(|error| failed(&error))?;
        let oldest = depths.iter().filter_map(|depth| depth.oldest).min();
        let mut queue = Queue { agent: agent.to_owned(), ..Queue::default() };
        for depth in depths {
            queue.lag += depth.waiting;
            queue.pending += depth.pending;
            queue.delayed += depth.delayed;
        }
        queue.length = queue.lag + queue.pending;
        queue.oldest_ms = oldest.map(|oldest| age(engine.now(), oldest));
        Ok(queue)
    }
}
