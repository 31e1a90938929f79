//! Who takes turns, as the work streams know it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rialto_a2a::Error;
use rialto_rpc::tasks::{AgentRef, Runner};
use rialto_runtime::config::Agent;
use rialto_store::worker::CLAIM_WAIT;

use super::by_shard;
use crate::{
    Inner, keys,
    store::{Store, failed},
};

/// What a sign of life may be late.
const SLACK: Duration = Duration::from_secs(3);

/// The runners of some agents.
#[derive(Debug, Default)]
pub(super) struct Crew {
    /// By agent and name.
    members: BTreeMap<(String, String), Member>,
}

/// A runner of one agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) turns: u64,
    pub(super) idle: Duration,
    pub(super) alive: bool,
}

impl Crew {
    /// Asks the streams of these agents.
    pub(super) async fn of(store: &Store, agents: impl IntoIterator<Item = &AgentRef>) -> Result<Self, Error> {
        let mut crew = Self::default();
        for agent in agents {
            let stream = keys::runs(&agent.id);
            let consumers = by_shard(store, |shard| store.engine.consumers(shard, &stream)).await;
            let consumers = consumers.map_err(|error| failed(&error))?;
            for consumer in consumers.into_iter().flatten() {
                let key = (agent.id.clone(), consumer.name);
                let idle = consumer.idle;
                let member = crew.members.entry(key).or_insert(Member { turns: 0, idle, alive: false });
                member.turns += consumer.pending;
                // Each shard saw it at another time, and it is one process.
                member.idle = member.idle.min(idle);
                member.alive = member.idle <= silence(agent);
            }
        }
        Ok(crew)
    }

    /// What is known about a runner of an agent.
    pub(super) fn member(&self, agent: &str, name: &str) -> Option<Member> {
        self.members.get(&(agent.to_owned(), name.to_owned())).copied()
    }

    /// How many runners of an agent are alive.
    pub(super) fn alive(&self, agent: &str) -> usize {
        self.members.iter().filter(|((of, _), member)| of == agent && member.alive).count()
    }

    /// All, with the agents of each together.
    fn runners(&self) -> Vec<Runner> {
        let mut runners: BTreeMap<&str, (BTreeSet<&str>, Member)> = BTreeMap::new();
        for ((agent, name), member) in &self.members {
            let none = Member { turns: 0, ..*member };
            let (agents, whole) = runners.entry(name).or_insert((BTreeSet::new(), none));
            agents.insert(agent);
            whole.turns += member.turns;
            whole.idle = whole.idle.min(member.idle);
            whole.alive |= member.alive;
        }
        let runner = |(name, (agents, member)): (&str, (BTreeSet<&str>, Member))| {
            let (host, pid) = place(name).unwrap_or_default();
            Runner {
                consumer: name.to_owned(),
                host: host.to_owned(),
                pid,
                agents: agents.into_iter().map(ToOwned::to_owned).collect(),
                turns: member.turns,
                idle_ms: u64::try_from(member.idle.as_millis()).unwrap_or(u64::MAX),
                alive: member.alive,
            }
        };
        let mut runners: Vec<_> = runners.into_iter().map(runner).collect();
        runners.sort_by_key(|runner| !runner.alive);
        runners
    }
}

impl Inner {
    pub(super) async fn runners(&self, agents: &[AgentRef]) -> Result<Vec<Runner>, Error> {
        Ok(Crew::of(&self.store, agents).await?.runners())
    }
}

/// How long a living runner of an agent may be silent: the longest of its pauses.
fn silence(agent: &AgentRef) -> Duration {
    let lease = match agent.lease_ms {
        0 => Agent::LEASE.0,
        lease => Duration::from_millis(lease),
    };
    lease.max(CLAIM_WAIT) + SLACK
}

/// Host and process of a consumer, as [`rialto_store::worker::consumer_name`] names it.
fn place(name: &str) -> Option<(&str, u32)> {
    let (_, rest) = name.split_once('-')?;
    let (rest, _random) = rest.rsplit_once('-')?;
    let (host, pid) = rest.rsplit_once('-')?;
    Some((host, pid.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn a_consumer_says_where_it_runs() {
        assert_eq!(place("runner-node-7.zone-b-4711-0a1b2c3d"), Some(("node-7.zone-b", 4711)));
        let made = rialto_store::worker::consumer_name("runner");
        assert_eq!(place(&made).unwrap().1, std::process::id());
        for other in ["", "r1", "a-b", "runner-host-x-1"] {
            assert_eq!(place(other), None, "{other}");
        }
    }
}
