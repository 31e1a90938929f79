//! The configuration of a Rialto process, as typed structs. `docs/configuration.md` explains every key.
//!
//! One file (YAML or TOML), then `RIALTO__SECTION__KEY` variables, then flags. Keys are kebab-case; `_` is read
//! as `-`. An unknown key is an error with a suggestion, and all faults are reported at once.

mod check;
mod de;
mod load;
mod print;
mod tree;

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use self::{
    load::{Broken, Fault, Faults, Flag, Loaded, Sources, load, load_with, parse_yaml},
    print::to_yaml,
};

use crate::{
    Secret,
    units::{Size, Span},
};

/// Everything that can be set.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Config {
    /// Address of the public port (JSON-RPC, REST, gRPC, cards).
    pub listen: String,
    /// Address of the admin port (liveness, readiness, metrics, admin). Loopback unless a token is set.
    pub admin_listen: String,
    /// What the admin port asks for (`Authorization: Bearer …`), apart from liveness and readiness.
    pub admin_token: Option<Secret>,
    /// Address on which task-store serves the other services of `rialto serve`.
    pub task_store_listen: String,
    /// The URL under which clients reach the public port; cards advertise it. Default: the listening address,
    /// or what trusted proxies say in forwarded headers.
    pub public_url: Option<String>,
    /// Where tasks live.
    pub store: StoreKind,
    /// The Redis of `store: redis`.
    pub redis: Redis,
    /// Where the services are that do not run in this process.
    pub services: Services,
    /// Folder of the embedded store. Default: `rialto` in the user's data folder.
    pub data: Option<PathBuf>,
    /// The embedded store lives in memory and is gone with the process.
    pub ephemeral: bool,
    /// The agents that this installation serves.
    pub agents: Vec<Agent>,
    /// Bounds that hold on all bindings.
    pub limits: Limits,
    /// Networks (CIDR) whose `X-Forwarded-*` and `Forwarded` headers are believed.
    pub trusted_proxies: Vec<String>,
    /// Cross-origin access to everything but cards and health, which are open: allowed origins, or `*`.
    pub cors_origins: Vec<String>,
    /// How long a stopping process lets running work end.
    pub stop_grace: Span,
    /// What a process tells about itself, and whom.
    pub telemetry: Telemetry,
}

/// See [`Config::telemetry`]. The standard variables of OpenTelemetry say the rest.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Telemetry {
    /// An OpenTelemetry collector (OTLP by gRPC) that gets traces, metrics and logs. Default:
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` of the environment, or else none.
    pub otlp_endpoint: Option<String>,
}

/// Which engine keeps tasks and streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// Embedded: one process, one folder.
    #[default]
    Sqlite,
    /// Redis 7 or later: many processes.
    Redis,
}

/// See [`Config::redis`].
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Redis {
    /// `redis://[user[:password]@]host[:port]…`; also `rediss`, `redis+sentinel` and `rediss+sentinel`. Default: a
    /// Redis on this machine.
    pub url: Option<Secret>,
    /// Starts every key, so that several installations share a Redis.
    pub prefix: String,
    /// Number of shards of a new store, and a check of an old one. Default: as stored; of a new store 1, on a
    /// cluster 16.
    pub shards: Option<u16>,
}

/// See [`Config::services`].
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Services {
    /// `http://name:port`, with `tls` `https://name:port`; each name may stand for many replicas.
    pub task_store: Vec<String>,
    /// Calls between processes are encrypted, and both ends show a certificate.
    pub tls: Option<Identity>,
}

/// Who a process is to the others of its cluster, and whom it believes. PEM, mostly as `<key>-file`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Identity {
    /// Its certificate, and those between it and the authority. Shown as server and as client.
    pub cert: Secret,
    /// The private key of the certificate.
    pub key: Secret,
    /// The authority that signs the certificates of all processes, and of nobody else.
    pub ca: Secret,
}

/// One agent.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Agent {
    /// Names the agent inside Rialto: `[a-z0-9-]{1,32}`. Part of every key, so never reuse one.
    pub id: String,
    /// Path under which the agent is reached; `/` for one agent per host.
    #[serde(default = "root")]
    pub mount: String,
    /// Only for requests with this `Host`. Needed when two agents share a mount.
    #[serde(default)]
    pub host: Option<String>,
    /// Tenants that may appear in paths and parameters. Empty = the agent knows no tenants.
    #[serde(default)]
    pub tenants: Vec<String>,
    /// What the agent card says.
    #[serde(default)]
    pub card: Card,
    /// What answers: a map with a `type`, or the type alone.
    #[serde(serialize_with = "print::tagged")]
    pub backend: Backend,
    /// A second message while a turn of its context runs.
    #[serde(default)]
    pub when_busy: WhenBusy,
    /// Where text deltas go.
    #[serde(default)]
    pub answer: Answer,
    /// Whether callers get tasks or plain messages.
    #[serde(default)]
    pub reply: Reply,
    /// State in which a turn without a final event of its own ends.
    #[serde(default)]
    pub turn_end: TurnEnd,
    /// A message with a contextId but no taskId continues the one task of that context that waits for input.
    #[serde(default)]
    pub continue_waiting: bool,
    /// Clients of protocol 0.3 are served too: by JSON-RPC, under the same URL, and the card says so.
    #[serde(default, rename = "a2a-0.3")]
    pub a2a_v03: bool,
    /// Turns that one runner process works on at a time.
    #[serde(default = "max_concurrent")]
    pub max_concurrent: usize,
    /// A runner that shows no sign of life for this long loses its turns.
    #[serde(default = "lease")]
    pub lease: Span,
    /// A running turn is cut off after this.
    #[serde(default = "turn_timeout")]
    pub turn_timeout: Span,
    /// A turn that has not started by then ends as FAILED; `0` = waits for ever.
    #[serde(default)]
    pub queue_timeout: Span,
    /// Turns that may wait, beyond those that one runner works on, before QUEUE_FULL; 0 = no bound.
    #[serde(default = "max_waiting")]
    pub max_waiting: u64,
    /// Tasks of one caller that may wait or run before QUEUE_FULL; 0 = no bound.
    #[serde(default)]
    pub max_waiting_per_caller: u64,
    /// Attempts at a turn; when the last one crashes, it is FAILED.
    #[serde(default = "max_attempts")]
    pub max_attempts: u32,
    /// A backend that ignores cancel or the end of its turn is killed after this.
    #[serde(default = "kill_grace")]
    pub kill_grace: Span,
    /// An ended task is kept this long; `0` = for ever.
    #[serde(default)]
    pub task_ttl: Span,
    /// A context without running turn is forgotten after this; `0` = never.
    #[serde(default)]
    pub context_idle_timeout: Span,
    /// How much earlier conversation of the context a turn is given.
    #[serde(default)]
    pub context_window: ContextWindow,
}

/// A bound on conversation history.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct ContextWindow {
    /// Messages at most.
    pub messages: u32,
    /// Bytes at most.
    pub bytes: Size,
}

/// What answers for an agent. In a configuration the key `type` tells which one; it is not a serde tag,
/// because serde would buffer the section and lose the place of a fault.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub enum Backend {
    /// Answers with the message's text.
    Echo {},
    /// A process that speaks JSON lines (`docs/agents.md`).
    Command {
        /// Program and arguments.
        command: Vec<String>,
        /// Working folder.
        #[serde(default)]
        cwd: Option<PathBuf>,
        /// Variables added to the process's environment. Their values may be secrets.
        #[serde(default, serialize_with = "print::redacted")]
        env: BTreeMap<String, String>,
        /// Processes stay and take many turns, instead of one process per turn.
        #[serde(default)]
        persistent: bool,
    },
    /// A model behind an OpenAI-compatible chat-completions endpoint (`docs/agents.md`).
    Openai {
        /// The model, by the endpoint's name.
        model: String,
        /// Where the API is. Default: `OPENAI_BASE_URL` of the environment, or else OpenAI's own.
        #[serde(default)]
        base_url: Option<String>,
        /// Default: `OPENAI_API_KEY` of the environment.
        #[serde(default)]
        api_key: Option<Secret>,
        /// What the model is told before the conversation.
        #[serde(default)]
        system_prompt: Option<String>,
        /// How freely it speaks, 0 to 2. Default: the endpoint's.
        #[serde(default)]
        temperature: Option<f64>,
        /// Tokens of one answer at most. Default: the endpoint's.
        #[serde(default)]
        max_output_tokens: Option<u32>,
        /// Images of messages are shown to the model, instead of being mentioned.
        #[serde(default)]
        images: bool,
        /// From a request to the first sign of an answer.
        #[serde(default = "first_token_timeout")]
        first_token_timeout: Span,
        /// Between two pieces of an answer.
        #[serde(default = "stall_timeout")]
        stall_timeout: Span,
    },
}

/// See [`Agent::when_busy`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenBusy {
    /// Refuse it; nothing else changes.
    #[default]
    Reject,
    /// Run it after the turns before it.
    Queue,
}

/// See [`Agent::answer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// Appended to the artifact `answer`.
    #[default]
    Artifact,
    /// WORKING status messages.
    Status,
}

/// See [`Agent::reply`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Tasks.
    #[default]
    Task,
    /// One message; the work behind it is not visible.
    Message,
}

/// See [`Agent::turn_end`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TurnEnd {
    /// The task is done.
    #[default]
    Completed,
    /// The task stays open for the next message.
    InputRequired,
}

/// What an agent card says; anything left out is filled in from the agent's section.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Card {
    /// Display name. Default: the agent's id.
    pub name: Option<String>,
    /// What the agent is for.
    pub description: String,
    /// The agent's own version.
    pub version: String,
    /// Who runs it.
    pub provider: Option<Provider>,
    /// A page for people.
    pub documentation_url: Option<String>,
    /// A picture.
    pub icon_url: Option<String>,
    /// Media types that messages may hold.
    pub input_modes: Vec<String>,
    /// Media types that answers hold.
    pub output_modes: Vec<String>,
    /// What it can do.
    pub skills: Vec<Skill>,
    /// Whether streams and subscriptions are offered.
    pub streaming: bool,
    /// Extensions that it knows.
    pub extensions: Vec<Extension>,
    /// Bindings that the card lists, in order of preference.
    pub bindings: Vec<Binding>,
    /// How long clients may cache the card.
    pub max_age: Span,
}

/// A binding of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Binding {
    /// JSON-RPC 2.0 over HTTP.
    Jsonrpc,
    /// REST.
    Rest,
    /// gRPC.
    Grpc,
}

/// See [`Card::provider`].
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Provider {
    /// Its name.
    pub organization: String,
    /// Its site.
    #[serde(default)]
    pub url: String,
}

/// See [`Card::skills`].
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Skill {
    /// Unique in the card.
    pub id: String,
    /// Display name.
    pub name: String,
    /// What it does.
    pub description: String,
    /// Words to find it by.
    pub tags: Vec<String>,
    /// Messages that show it.
    #[serde(default)]
    pub examples: Vec<String>,
    /// Overrides the card's.
    #[serde(default)]
    pub input_modes: Vec<String>,
    /// Overrides the card's.
    #[serde(default)]
    pub output_modes: Vec<String>,
}

/// See [`Card::extensions`].
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Extension {
    /// Names it.
    pub uri: String,
    /// What it is for.
    #[serde(default)]
    pub description: String,
    /// Clients that do not declare it are refused.
    #[serde(default)]
    pub required: bool,
    /// The extension's own.
    #[serde(default)]
    pub params: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Bounds that hold on all bindings.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Limits {
    /// A request body or gRPC message.
    pub request_size: Size,
    /// History, artifacts and metadata of one task.
    pub task_size: Size,
    /// Parts of one message.
    pub parts: usize,
    /// Connections to the public port.
    pub connections: usize,
    /// Open streams on the public port.
    pub streams: usize,
    /// Streams of one HTTP/2 connection.
    pub streams_per_connection: u32,
    /// Time to receive the head of a request.
    pub header_timeout: Span,
    /// Time to receive a request body.
    pub body_timeout: Span,
    /// A blocking send answers by then with DEADLINE; the task goes on.
    pub blocking_timeout: Span,
    /// A subscription without events ends after this.
    pub subscription_idle: Span,
    /// Silence on an event stream before a keep-alive comment.
    pub keep_alive: Span,
    /// Silence of a client before it is asked whether it is still there (HTTP/2 PING, TCP keep-alive).
    pub ping_interval: Span,
    /// A client that does not answer that is given up after this.
    pub ping_timeout: Span,
    /// So is one that takes nothing of what is sent to it for this long.
    pub send_timeout: Span,
}

fn root() -> String {
    "/".to_owned()
}

const fn max_concurrent() -> usize {
    64
}

const fn lease() -> Span {
    Agent::LEASE
}

const fn turn_timeout() -> Span {
    Span::secs(3600)
}

const fn max_waiting() -> u64 {
    10_000
}

const fn max_attempts() -> u32 {
    4
}

const fn kill_grace() -> Span {
    Span::secs(5)
}

const fn first_token_timeout() -> Span {
    Span::secs(120)
}

const fn stall_timeout() -> Span {
    Span::secs(60)
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".to_owned(),
            admin_listen: "127.0.0.1:8081".to_owned(),
            admin_token: None,
            task_store_listen: "127.0.0.1:7101".to_owned(),
            public_url: None,
            store: StoreKind::Sqlite,
            redis: Redis::default(),
            services: Services::default(),
            data: None,
            ephemeral: false,
            agents: vec![Agent::echo()],
            limits: Limits::default(),
            trusted_proxies: Vec::new(),
            cors_origins: Vec::new(),
            stop_grace: Span::secs(25),
            telemetry: Telemetry::default(),
        }
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self { url: None, prefix: "rialto:".to_owned(), shards: None }
    }
}

impl Redis {
    /// Where it is. May hold a password.
    #[must_use]
    pub fn url(&self) -> &str {
        self.url.as_ref().map_or("redis://127.0.0.1:6379", Secret::expose)
    }
}

impl Default for Services {
    fn default() -> Self {
        Self { task_store: vec!["http://127.0.0.1:7101".to_owned()], tls: None }
    }
}

impl Agent {
    /// The lease of one that says nothing else.
    pub const LEASE: Span = Span::secs(15);

    /// The built-in agent of `rialto dev`.
    #[must_use]
    pub fn echo() -> Self {
        Self {
            id: "echo".to_owned(),
            mount: root(),
            host: None,
            tenants: Vec::new(),
            card: Card { description: "Answers with the text that it is sent.".to_owned(), ..Card::default() },
            backend: Backend::Echo {},
            when_busy: WhenBusy::default(),
            answer: Answer::default(),
            reply: Reply::default(),
            turn_end: TurnEnd::default(),
            continue_waiting: false,
            a2a_v03: false,
            max_concurrent: max_concurrent(),
            lease: lease(),
            turn_timeout: turn_timeout(),
            queue_timeout: Span::default(),
            max_waiting: max_waiting(),
            max_waiting_per_caller: 0,
            max_attempts: max_attempts(),
            kill_grace: kill_grace(),
            task_ttl: Span::default(),
            context_idle_timeout: Span::default(),
            context_window: ContextWindow::default(),
        }
    }
}

impl Default for ContextWindow {
    fn default() -> Self {
        Self { messages: 50, bytes: Size(256 << 10) }
    }
}

impl Default for Card {
    fn default() -> Self {
        Self {
            name: None,
            description: String::new(),
            version: "1.0.0".to_owned(),
            provider: None,
            documentation_url: None,
            icon_url: None,
            input_modes: vec!["text/plain".to_owned(), "application/json".to_owned()],
            output_modes: vec!["text/plain".to_owned()],
            skills: Vec::new(),
            streaming: true,
            extensions: Vec::new(),
            bindings: vec![Binding::Jsonrpc, Binding::Rest, Binding::Grpc],
            max_age: Span::secs(60),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_size: Size::mib(10),
            task_size: Size::mib(16),
            parts: 256,
            connections: 10_000,
            streams: 10_000,
            streams_per_connection: 256,
            header_timeout: Span::secs(10),
            body_timeout: Span::secs(30),
            blocking_timeout: Span::secs(600),
            subscription_idle: Span::secs(3600),
            keep_alive: Span::secs(4),
            ping_interval: Span::secs(20),
            ping_timeout: Span::secs(10),
            send_timeout: Span::secs(120),
        }
    }
}

#[cfg(test)]
mod tests;
