//! What types cannot say about a configuration.

use std::{collections::BTreeSet, net::IpAddr, net::SocketAddr};

use url::Url;

use super::{Agent, Backend, Card, Config, Limits, Telemetry, load::Broken};
use crate::{
    Secret,
    units::{Size, Span},
};

/// First path segments that belong to Rialto itself, on every host: the hub, cards, REST.
const RESERVED: [&str; 17] = [
    "a2a",
    "task",
    "bounty",
    "billing",
    "report",
    "claim",
    "account",
    "oauth",
    "device",
    "docs",
    "tasks",
    "v1",
    "health",
    "extendedAgentCard",
    ".well-known",
    "skill.md",
    "llms.txt",
];

/// First segments that start like this are operations or gRPC services.
const RESERVED_PREFIXES: [&str; 3] = ["message:", "lf.a2a.", "grpc."];

/// Segments that lead to operations below every mount.
const OPERATIONS: [&str; 4] = ["tasks", "extendedAgentCard", ".well-known", "v1"];

/// A task of this size still fits every message between services.
const MAX_TASK: Size = Size::mib(16);

/// Characters that nobody guesses.
const MIN_ADMIN_TOKEN: usize = 16;

/// All broken rules of a configuration.
pub(super) fn check(config: &Config) -> Vec<Broken> {
    let mut rules = Rules(Vec::new());
    rules.addresses(config);
    rules.backends(config);
    rules.positive("stop-grace", config.stop_grace);
    rules.telemetry(&config.telemetry);
    for (at, network) in config.trusted_proxies.iter().enumerate() {
        rules.require(is_network(network), &format!("trusted-proxies[{at}]"), || {
            format!("{network:?} is not a network such as \"10.0.0.0/8\" or \"fd00::/8\"")
        });
    }
    for (at, origin) in config.cors_origins.iter().enumerate() {
        rules.require(origin == "*" || is_origin(origin), &format!("cors-origins[{at}]"), || {
            format!("{origin:?} is not an origin such as \"https://app.example.com\", and not \"*\"")
        });
    }
    rules.limits(&config.limits);
    rules.require(!config.agents.is_empty(), "agents", || "at least one agent is needed".to_owned());
    for (at, agent) in config.agents.iter().enumerate() {
        rules.agent(&format!("agents[{at}]"), agent);
    }
    rules.neighbours(&config.agents);
    rules.0
}

struct Rules(Vec<Broken>);

impl Rules {
    fn broken(&mut self, key: &str, problem: impl Into<String>) {
        self.0.push((key.to_owned(), problem.into()));
    }

    fn require(&mut self, holds: bool, key: &str, problem: impl FnOnce() -> String) {
        if !holds {
            self.broken(key, problem());
        }
    }

    fn positive(&mut self, key: &str, span: Span) {
        self.require(!span.0.is_zero(), key, || "must be longer than 0".to_owned());
    }

    fn at_least_one(&mut self, key: &str, number: u64) {
        self.require(number > 0, key, || "must be at least 1".to_owned());
    }

    fn filled(&mut self, key: &str, text: &str) {
        self.require(!text.trim().is_empty(), key, || "must not be empty".to_owned());
    }

    fn telemetry(&mut self, telemetry: &Telemetry) {
        let Some(endpoint) = &telemetry.otlp_endpoint else { return };
        self.require(is_web_url(endpoint), "telemetry.otlp-endpoint", || {
            "must be an http or https URL such as \"http://127.0.0.1:4317\"".to_owned()
        });
        // What is printed of a configuration shows it.
        let names_a_user = |url: Url| !url.username().is_empty() || url.password().is_some();
        self.require(!Url::parse(endpoint).is_ok_and(names_a_user), "telemetry.otlp-endpoint", || {
            "must be without user name and password; OTEL_EXPORTER_OTLP_HEADERS takes credentials".to_owned()
        });
    }

    fn addresses(&mut self, config: &Config) {
        let mut address = |key: &str, text: &str| {
            let parsed = text.parse::<SocketAddr>().ok();
            self.require(parsed.is_some(), key, || {
                format!("{text:?} is not an address and port such as \"127.0.0.1:8080\" or \"[::]:8080\"")
            });
            parsed
        };
        let listen = address("listen", &config.listen);
        let task_store = address("task-store-listen", &config.task_store_listen);
        let admin = address("admin-listen", &config.admin_listen);
        if let (Some(listen), Some(admin)) = (listen, admin) {
            self.require(listen != admin || listen.port() == 0, "admin-listen", || {
                format!("{admin} is the address of `listen` already; the admin port needs its own")
            });
        }
        if let Some(own) = task_store {
            let taken = [listen, admin].contains(&Some(own)) && own.port() != 0;
            self.require(!taken, "task-store-listen", || {
                format!("{own} is the address of `listen` or `admin-listen` already; task-store needs its own")
            });
        }
        if let Some(admin) = admin {
            let safe = config.admin_token.is_some() || admin.ip().to_canonical().is_loopback();
            self.require(safe, "admin-listen", || {
                format!("{admin} is reachable from other machines, which needs an admin-token-file")
            });
        }
        if let Some(token) = &config.admin_token {
            let strong = token.expose().len() >= MIN_ADMIN_TOKEN && is_token(token.expose());
            self.require(strong, "admin-token", || {
                format!("must be one line of at least {MIN_ADMIN_TOKEN} visible characters")
            });
        }
        if let Some(url) = &config.public_url
            && let Err(problem) = check_public_url(url)
        {
            self.broken("public-url", problem);
        }
    }

    /// What is behind this process: the store and other services.
    fn backends(&mut self, config: &Config) {
        // The store knows the form of the URL.
        let redis = &config.redis;
        self.require(!redis.prefix.contains(['{', '}', '@', ' ', '\n']), "redis.prefix", || {
            format!("{:?} must not have braces, spaces or \"@\"", redis.prefix)
        });
        self.require(redis.shards.is_none_or(|shards| (1..=256).contains(&shards)), "redis.shards", || {
            "must be from 1 to 256".to_owned()
        });
        let urls = &config.services.task_store;
        self.require(!urls.is_empty(), "services.task-store", || "at least one URL is needed".to_owned());
        let scheme = if config.services.tls.is_some() { "https" } else { "http" };
        for (at, url) in urls.iter().enumerate() {
            self.require(is_service_url(url, scheme), &format!("services.task-store[{at}]"), || {
                let why = if url.starts_with("https:") { "; https needs services.tls" } else { "" };
                format!("{url:?} is not a URL such as \"{scheme}://task-store:7101\"{why}")
            });
        }
    }

    fn limits(&mut self, limits: &Limits) {
        for (key, size) in [("request-size", limits.request_size), ("task-size", limits.task_size)] {
            self.require(size.0 > 0, &format!("limits.{key}"), || "must be larger than 0".to_owned());
        }
        self.require(limits.task_size <= MAX_TASK, "limits.task-size", || format!("must be {MAX_TASK} or less"));
        self.require(limits.request_size <= limits.task_size, "limits.request-size", || {
            format!("{} is more than a task may hold (limits.task-size: {})", limits.request_size, limits.task_size)
        });
        for (key, number) in [
            ("parts", limits.parts),
            ("connections", limits.connections),
            ("streams", limits.streams),
            ("streams-per-connection", limits.streams_per_connection as usize),
        ] {
            self.at_least_one(&format!("limits.{key}"), number as u64);
        }
        for (key, span) in [
            ("header-timeout", limits.header_timeout),
            ("body-timeout", limits.body_timeout),
            ("blocking-timeout", limits.blocking_timeout),
            ("subscription-idle", limits.subscription_idle),
            ("keep-alive", limits.keep_alive),
            ("ping-interval", limits.ping_interval),
            ("ping-timeout", limits.ping_timeout),
            ("send-timeout", limits.send_timeout),
        ] {
            self.positive(&format!("limits.{key}"), span);
        }
    }

    fn agent(&mut self, at: &str, agent: &Agent) {
        let key = |name: &str| format!("{at}.{name}");
        let id = &agent.id;
        let is_id = (1..=32).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        self.require(is_id, &key("id"), || format!("{id:?} must be 1 to 32 of a-z, 0-9 and \"-\""));
        if let Err(problem) = check_mount(&agent.mount) {
            self.broken(&key("mount"), format!("{:?} {problem}", agent.mount));
        }
        if let Some(host) = &agent.host {
            self.require(is_host(host), &key("host"), || {
                format!("{host:?} is not a host name in lower case, without scheme and port")
            });
        }
        for (index, tenant) in agent.tenants.iter().enumerate() {
            let tenant_key = format!("{at}.tenants[{index}]");
            self.require(is_segment(tenant) && tenant.len() <= 64, &tenant_key, || {
                format!("{tenant:?} must be 1 to 64 of letters, digits, \".\", \"_\", \"~\" and \"-\"")
            });
            self.require(!is_reserved(tenant), &tenant_key, || format!("{tenant:?} is a path of Rialto's own"));
            self.require(!agent.tenants[..index].contains(tenant), &tenant_key, || {
                format!("{tenant:?} is there twice")
            });
        }
        match &agent.backend {
            Backend::Echo {} => {}
            Backend::Command { command, .. } => {
                let program = command.first().map(String::as_str).unwrap_or_default();
                self.require(!program.is_empty(), &key("backend.command"), || {
                    "must name a program, such as [\"python3\", \"agent.py\"]".to_owned()
                });
            }
            Backend::Openai {
                model,
                base_url,
                api_key,
                temperature,
                max_output_tokens,
                first_token_timeout,
                stall_timeout,
                ..
            } => {
                let key = |name: &str| format!("{at}.backend.{name}");
                self.filled(&key("model"), model);
                if let Some(Err(problem)) = base_url.as_deref().map(check_base_url) {
                    self.broken(&key("base-url"), problem);
                }
                match api_key.as_ref().map(Secret::expose) {
                    Some(secret) => self.require(is_token(secret), &key("api-key"), || {
                        "must be one line of visible characters".to_owned()
                    }),
                    None => self.require(base_url.is_some(), &key("api-key"), || {
                        "is needed, here or as OPENAI_API_KEY in the environment".to_owned()
                    }),
                }
                self.require(temperature.is_none_or(|it| (0.0..=2.0).contains(&it)), &key("temperature"), || {
                    "must be 0 to 2".to_owned()
                });
                self.at_least_one(&key("max-output-tokens"), max_output_tokens.map_or(1, u64::from));
                self.positive(&key("first-token-timeout"), *first_token_timeout);
                self.positive(&key("stall-timeout"), *stall_timeout);
            }
        }
        self.at_least_one(&key("max-concurrent"), agent.max_concurrent as u64);
        self.at_least_one(&key("max-attempts"), u64::from(agent.max_attempts));
        self.require(agent.lease >= Span::secs(1), &key("lease"), || format!("{} is less than 1s", agent.lease));
        self.positive(&key("turn-timeout"), agent.turn_timeout);
        self.positive(&key("kill-grace"), agent.kill_grace);
        self.card(&key("card"), &agent.card);
    }

    fn card(&mut self, at: &str, card: &Card) {
        let key = |name: &str| format!("{at}.{name}");
        if let Some(name) = &card.name {
            self.filled(&key("name"), name);
        }
        self.filled(&key("version"), &card.version);
        if let Some(provider) = &card.provider {
            self.filled(&key("provider.organization"), &provider.organization);
        }
        for (name, url) in [("documentation-url", &card.documentation_url), ("icon-url", &card.icon_url)] {
            if let Some(url) = url {
                self.require(is_web_url(url), &key(name), || format!("{url:?} is not an http or https URL"));
            }
        }
        self.require(!card.bindings.is_empty(), &key("bindings"), || {
            "at least one of jsonrpc, rest, grpc is needed".to_owned()
        });
        for (index, binding) in card.bindings.iter().enumerate() {
            self.require(!card.bindings[..index].contains(binding), &format!("{at}.bindings[{index}]"), || {
                "is there twice".to_owned()
            });
        }
        for (name, modes) in [("input-modes", &card.input_modes), ("output-modes", &card.output_modes)] {
            self.require(!modes.is_empty(), &key(name), || "at least one media type is needed".to_owned());
            self.media_types(&key(name), modes);
        }
        for (index, skill) in card.skills.iter().enumerate() {
            let at = format!("{at}.skills[{index}]");
            for (name, text) in [("id", &skill.id), ("name", &skill.name), ("description", &skill.description)] {
                self.filled(&format!("{at}.{name}"), text);
            }
            self.require(!skill.tags.is_empty(), &format!("{at}.tags"), || "at least one tag is needed".to_owned());
            self.media_types(&format!("{at}.input-modes"), &skill.input_modes);
            self.media_types(&format!("{at}.output-modes"), &skill.output_modes);
            self.require(card.skills[..index].iter().all(|other| other.id != skill.id), &format!("{at}.id"), || {
                format!("{:?} is the id of another skill already", skill.id)
            });
        }
        for (index, extension) in card.extensions.iter().enumerate() {
            let at = format!("{at}.extensions[{index}].uri");
            self.filled(&at, &extension.uri);
            self.require(card.extensions[..index].iter().all(|other| other.uri != extension.uri), &at, || {
                format!("{:?} is declared already", extension.uri)
            });
        }
    }

    fn media_types(&mut self, at: &str, types: &[String]) {
        for (index, text) in types.iter().enumerate() {
            self.require(is_media_type(text), &format!("{at}[{index}]"), || {
                format!("{text:?} is not a media type such as \"text/plain\"")
            });
        }
    }

    /// Rules between agents: ids, and who answers at which path.
    fn neighbours(&mut self, agents: &[Agent]) {
        let mut ids = BTreeSet::new();
        for (index, agent) in agents.iter().enumerate() {
            self.require(ids.insert(&agent.id), &format!("agents[{index}].id"), || {
                format!("{:?} is the id of another agent already", agent.id)
            });
            for (other_index, other) in agents.iter().enumerate() {
                self.require(
                    other_index >= index || other.host != agent.host || other.mount != agent.mount,
                    &format!("agents[{index}].mount"),
                    || {
                        let hint = "give one of the two another mount, or different hosts";
                        format!("{:?} belongs to agent {:?} already; {hint}", agent.mount, other.id)
                    },
                );
                // One without a host answers on every host.
                let meet = agent.host.is_none() || other.host.is_none() || agent.host == other.host;
                for (tenant_index, tenant) in agent.tenants.iter().enumerate().filter(|_| meet) {
                    let path = format!("{}/{tenant}", agent.mount.trim_end_matches('/'));
                    let below =
                        other.mount.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
                    self.require(!below, &format!("agents[{index}].tenants[{tenant_index}]"), || {
                        format!("{path} would be this tenant, and leads to agent {:?} already", other.id)
                    });
                }
            }
        }
    }
}

/// Problems do not quote the URL, which may hold a password.
fn check_public_url(text: &str) -> Result<(), &'static str> {
    let url = Url::parse(text).map_err(|_| "must be a URL such as \"https://agents.example.com\"")?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("must begin with http:// or https://");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not hold a user name or password: every client sees it");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("must not have a query or fragment: paths are appended to it");
    }
    let path = url.path();
    if path != "/" && (path.ends_with('/') || path.contains("//") || path.contains('%')) {
        return Err("must have a plain path without \"/\" at its end");
    }
    Ok(())
}

/// Problems do not quote the URL, which may hold a password.
fn check_base_url(text: &str) -> Result<(), &'static str> {
    const EXAMPLE: &str = "must be an http or https URL such as \"http://127.0.0.1:11434/v1\"";
    let url = Url::parse(text).map_err(|_| EXAMPLE)?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(EXAMPLE);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not hold a user name or password; use api-key");
    }
    Ok(())
}

/// Something that can be sent as a bearer token.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn check_mount(mount: &str) -> Result<(), String> {
    if mount == "/" {
        return Ok(());
    }
    let Some(path) = mount.strip_prefix('/') else { return Err("must begin with \"/\"".to_owned()) };
    if path.ends_with('/') {
        return Err("must not end with \"/\"".to_owned());
    }
    for (depth, segment) in path.split('/').enumerate() {
        if !is_segment(segment) {
            return Err("must be segments of letters, digits, \".\", \"_\", \"~\" and \"-\"".to_owned());
        }
        if depth == 0 && is_reserved(segment) || OPERATIONS.contains(&segment) {
            return Err(format!("holds {segment:?}, which is a path of Rialto's own"));
        }
    }
    Ok(())
}

/// Whether a path that starts with this segment is not an agent's or a tenant's.
fn is_reserved(segment: &str) -> bool {
    RESERVED.contains(&segment) || RESERVED_PREFIXES.iter().any(|prefix| segment.starts_with(prefix))
}

/// A path segment that nobody needs to percent-encode and that no proxy resolves.
fn is_segment(text: &str) -> bool {
    !text.is_empty()
        && text != "."
        && text != ".."
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._~-".contains(&byte))
}

fn is_host(host: &str) -> bool {
    host.len() <= 253
        && host.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

fn is_network(text: &str) -> bool {
    let (address, length) = text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
    let Ok(address) = address.parse::<IpAddr>() else { return false };
    let most = if address.is_ipv4() { 32 } else { 128 };
    length.is_none_or(|length| length.parse::<u8>().is_ok_and(|length| length <= most))
}

fn is_origin(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https") && url.origin().ascii_serialization() == text.to_ascii_lowercase()
    })
}

fn is_web_url(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| matches!(url.scheme(), "http" | "https"))
}

/// Host and port, and nothing that would be ignored.
fn is_service_url(text: &str, scheme: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        let bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        url.scheme() == scheme && url.username().is_empty() && url.password().is_none() && bare
    }) && text.trim_end_matches('/').rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

/// `type/subtype` of RFC 9110, parameters allowed.
fn is_media_type(text: &str) -> bool {
    let token = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    };
    let mut pieces = text.split(';').map(str::trim);
    let kind = pieces.next().and_then(|kind| kind.split_once('/'));
    kind.is_some_and(|(kind, subtype)| token(kind) && token(subtype) && (kind != "*" || subtype == "*"))
        && pieces.all(|parameter| {
            parameter.split_once('=').is_some_and(|(name, value)| {
                let quoted = value.len() >= 2 && value.starts_with('"') && value.ends_with('"');
                token(name) && (quoted || token(value))
            })
        })
}
