//! Which agent a host and a path mean.
//!
//! Agents are reached under their mount; tenants are one more segment behind it and share that namespace. So a
//! path such as `/support/acme/tasks` has one reading, and so has the tenant `support/acme` of a gRPC message,
//! whose wire has no path to put an agent into.

use std::{collections::BTreeSet, sync::Arc};

use rialto_a2a::v1::AgentExtension;
use rialto_rpc::tasks::{Policy, WhenBusy};
use rialto_runtime::config::{self, Config, Reply};

use crate::card;

/// One agent, as its doors see it. Made once, shared by all calls.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) id: String,
    /// Without `/` at the end; empty for the root.
    pub(crate) mount: String,
    /// Lower case, without port.
    pub(crate) host: Option<String>,
    pub(crate) tenants: BTreeSet<String>,
    pub(crate) policy: Policy,
    pub(crate) streaming: bool,
    /// See `continue-waiting` of the configuration.
    pub(crate) continue_waiting: bool,
    /// Whether protocol 0.3 is served.
    pub(crate) serves_v03: bool,
    pub(crate) extensions: Vec<AgentExtension>,
    pub(crate) max_age_secs: u64,
    pub(crate) card: card::Template,
    input_modes: Vec<Mode>,
}

/// A media type that a card offers, perhaps with wildcards.
#[derive(Debug, PartialEq, Eq)]
struct Mode {
    /// `None` is `*`.
    kind: Option<String>,
    subtype: Option<String>,
}

impl Agent {
    /// From a configuration without faults.
    fn new(agent: &config::Agent, limits: &config::Limits) -> anyhow::Result<Self> {
        let modes = agent.card.input_modes.iter().chain(agent.card.skills.iter().flat_map(|skill| &skill.input_modes));
        let extensions = card::extensions(&agent.card)?;
        Ok(Self {
            id: agent.id.clone(),
            mount: agent.mount.trim_end_matches('/').to_owned(),
            host: agent.host.clone(),
            tenants: agent.tenants.iter().cloned().collect(),
            policy: policy(agent, limits),
            streaming: agent.card.streaming,
            continue_waiting: agent.continue_waiting,
            serves_v03: agent.a2a_v03,
            card: card::Template::new(agent, extensions.clone()),
            extensions,
            max_age_secs: agent.card.max_age.as_millis() / 1000,
            input_modes: modes.filter_map(|mode| Mode::parse(mode)).collect(),
        })
    }

    /// Whether the agent can be asked for this tenant; everybody can be asked for none.
    pub(crate) fn knows(&self, tenant: &str) -> bool {
        tenant.is_empty() || self.tenants.contains(tenant)
    }

    /// Whether messages may hold parts of this media type.
    pub(crate) fn takes(&self, media_type: &str) -> bool {
        let essence = media_type.split(';').next().unwrap_or_default().trim();
        let Some((kind, subtype)) = essence.split_once('/') else { return false };
        self.input_modes.iter().any(|mode| mode.matches(kind, subtype))
    }
}

impl Mode {
    fn parse(mode: &str) -> Option<Self> {
        let essence = mode.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let part = |text: &str| (text != "*").then(|| text.to_owned());
        essence.split_once('/').map(|(kind, subtype)| Self { kind: part(kind), subtype: part(subtype) })
    }

    fn matches(&self, kind: &str, subtype: &str) -> bool {
        let same = |own: &Option<String>, other: &str| own.as_ref().is_none_or(|own| own.eq_ignore_ascii_case(other));
        same(&self.kind, kind) && same(&self.subtype, subtype)
    }
}

fn policy(agent: &config::Agent, limits: &config::Limits) -> Policy {
    let when_busy = match agent.when_busy {
        config::WhenBusy::Reject => WhenBusy::Reject,
        config::WhenBusy::Queue => WhenBusy::Queue,
    };
    Policy {
        when_busy: when_busy.into(),
        hidden: agent.reply == Reply::Message,
        task_ttl_ms: agent.task_ttl.as_millis(),
        context_idle_ms: agent.context_idle_timeout.as_millis(),
        queue_timeout_ms: agent.queue_timeout.as_millis(),
        // The store counts what runs as well; the turns that one runner works on are not waiting.
        max_turns: match agent.max_waiting {
            0 => 0,
            waiting => waiting.saturating_add(agent.max_concurrent as u64),
        },
        max_task_bytes: limits.task_size.0,
        max_caller_turns: agent.max_waiting_per_caller,
    }
}

/// The name in a `Host` header: lower case, without port.
pub(crate) fn host_name(host: &str) -> String {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    };
    name.to_ascii_lowercase()
}

/// All agents of an installation.
#[derive(Debug)]
pub(crate) struct Agents {
    /// Longest mount first, and those with a host before those without.
    agents: Vec<Arc<Agent>>,
    /// Whether any agent cares for the host.
    hosts: bool,
}

impl Agents {
    /// From a configuration without faults: ids, mounts and tenants are told apart there.
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let new = |agent: &config::Agent| {
            let made = Agent::new(agent, &config.limits);
            made.map(Arc::new).map_err(|error| error.context(format!("agent {:?}", agent.id)))
        };
        let mut agents = config.agents.iter().map(new).collect::<anyhow::Result<Vec<_>>>()?;
        agents.sort_by(|a, b| b.mount.len().cmp(&a.mount.len()).then(b.host.is_some().cmp(&a.host.is_some())));
        let hosts = agents.iter().any(|agent| agent.host.is_some());
        Ok(Self { agents, hosts })
    }

    /// The agent that is mounted on the longest start of `path`, and what follows its mount.
    pub(crate) fn find<'p>(&self, host: Option<&str>, path: &'p str) -> Option<(&Arc<Agent>, &'p str)> {
        let host = if self.hosts { host.map(host_name) } else { None };
        self.agents.iter().find_map(|agent| {
            if agent.host.is_some() && agent.host != host {
                return None;
            }
            let rest = path.strip_prefix(&agent.mount[..])?;
            (rest.is_empty() || rest.starts_with('/')).then_some((agent, rest))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(id: &str, mount: &str) -> config::Agent {
        config::Agent { id: id.to_owned(), mount: mount.to_owned(), ..config::Agent::echo() }
    }

    fn agents(agents: Vec<config::Agent>) -> anyhow::Result<Agents> {
        Agents::new(&Config { agents, ..Config::default() })
    }

    #[test]
    fn the_longest_mount_wins_at_segment_boundaries() {
        let hosted = config::Agent { host: Some("two.example".to_owned()), ..agent("two", "/") };
        let all = agents(vec![agent("root", "/"), agent("a", "/a"), agent("ab", "/a/b"), hosted]).unwrap();
        let find = |host, path| all.find(host, path).map(|(agent, rest)| (&agent.id[..], rest));
        assert_eq!(find(None, "/"), Some(("root", "/")));
        assert_eq!(find(None, "/tasks/1"), Some(("root", "/tasks/1")));
        assert_eq!(find(None, "/a"), Some(("a", "")));
        assert_eq!(find(None, "/a/"), Some(("a", "/")));
        assert_eq!(find(None, "/ab"), Some(("root", "/ab")));
        assert_eq!(find(None, "/a/b/tasks"), Some(("ab", "/tasks")));
        assert_eq!(find(Some("two.EXAMPLE"), "/tasks"), Some(("two", "/tasks")));
        assert_eq!(find(Some("two.example:8080"), "/tasks"), Some(("two", "/tasks")));
        assert_eq!(find(Some("[::1]:8080"), "/tasks"), Some(("root", "/tasks")));
        assert_eq!(agents(vec![agent("a", "/a")]).unwrap().find(None, "/").map(|found| found.1), None);
    }

    #[test]
    fn parts_are_held_against_the_input_modes() {
        let modes = |modes: &[&str]| {
            let mut agent = agent("x", "/");
            agent.card.input_modes = modes.iter().map(|&mode| mode.to_owned()).collect();
            agents(vec![agent]).unwrap().agents.remove(0)
        };
        let plain = modes(&["text/plain", "application/json"]);
        for taken in ["text/plain", "TEXT/Plain; charset=utf-8", "application/json"] {
            assert!(plain.takes(taken), "{taken}");
        }
        for refused in ["application/x-nope", "video/quux", "text/markdown", "text", "", "/", "*/*"] {
            assert!(!plain.takes(refused), "{refused}");
        }
        assert!(modes(&["*/*"]).takes("application/octet-stream"));
        let text = modes(&["text/*"]);
        assert!(text.takes("text/markdown") && !text.takes("application/json"));
    }
}
