//! A client of any A2A 1.0 agent: finds its card, speaks one of its bindings, follows streams through cuts.
//!
//! Knows nothing of how answers are shown. The agent is not trusted: what is read is bounded, and its text is
//! handed on as it came, for whoever shows it to clean.

mod card;
mod follow;
mod grpc;
mod http;
mod jsonrpc;
mod rest;

use std::{fmt, time::Duration};

use futures::stream::BoxStream;
use rialto_a2a::v1::{
    CancelTaskRequest, GetTaskRequest, ListTasksRequest, ListTasksResponse, SendMessageRequest, SendMessageResponse,
    StreamResponse, SubscribeToTaskRequest, Task,
};
use url::Url;

pub(crate) use self::{
    card::fetch as fetch_card,
    http::{cause, connector},
};

/// The version of the protocol that this client speaks.
const VERSION: &str = "1.0";

/// By this extension events carry their number in their metadata: what to resume after, on any binding.
const EVENT_NUMBER: &str = "urn:rialto:event-number:v1";

/// The largest answer or event that is read.
const MAX_ANSWER: usize = 24 << 20;

/// A stream that is silent for this long is taken for dead and opened again.
const SILENCE: Duration = Duration::from_secs(60);

/// Time to get a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// A binding of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Binding {
    /// JSON-RPC over HTTP
    Jsonrpc,
    /// REST (HTTP+JSON)
    Rest,
    /// gRPC
    Grpc,
}

impl Binding {
    const ALL: [Self; 3] = [Self::Jsonrpc, Self::Rest, Self::Grpc];

    /// As cards name it.
    const fn name(self) -> &'static str {
        match self {
            Self::Jsonrpc => "JSONRPC",
            Self::Rest => "HTTP+JSON",
            Self::Grpc => "GRPC",
        }
    }
}

/// Why there is no result.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The request makes no sense; nothing was sent.
    Usage(String),
    /// No connection, or it broke before the answer.
    Unreachable(String),
    /// No answer in time.
    Timeout(Duration),
    /// The server answered an error, or something that is no A2A answer.
    Answer(Answered),
}

/// An error that a server answered.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    /// One sentence.
    pub(crate) message: String,
    /// Reason and code, such as `TASK_NOT_FOUND, -32001`; empty when the server gave none.
    pub(crate) code: String,
    /// Trying again may help.
    pub(crate) passing: bool,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(problem) | Self::Unreachable(problem) => f.write_str(problem),
            Self::Timeout(after) => {
                write!(f, "no answer within {}; see --timeout", rialto_runtime::units::Span(*after))
            }
            Self::Answer(Answered { message, code, .. }) if code.is_empty() => f.write_str(message),
            Self::Answer(Answered { message, code, .. }) => write!(f, "{message} ({code})"),
        }
    }
}

impl Failure {
    /// An answer that is none.
    fn garbage(what: impl fmt::Display) -> Self {
        Self::Answer(Answered { message: format!("not an A2A answer: {what}"), code: String::new(), passing: false })
    }

    const fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Answer(Answered { passing: true, .. }))
    }
}

/// One thing that a stream says.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    /// Number of the event, where the server tells: what to resume after.
    number: Option<u64>,
    /// The event.
    pub(crate) event: StreamResponse,
}

/// Updates in order. Ends where the server ended it; a broken connection is a [`Failure::Unreachable`].
type Updates = BoxStream<'static, Result<Update>>;

/// A binding, connected to one interface of an agent. A `key` is the client's name for a message: the same message
/// may be sent again under it, and is accepted once.
#[tonic::async_trait]
trait Wire: fmt::Debug + Send + Sync {
    async fn send(&self, request: SendMessageRequest, key: Option<&str>) -> Result<SendMessageResponse>;
    async fn get(&self, request: GetTaskRequest) -> Result<Task>;
    async fn list(&self, request: ListTasksRequest) -> Result<ListTasksResponse>;
    async fn cancel(&self, request: CancelTaskRequest) -> Result<Task>;
    async fn stream(&self, request: SendMessageRequest, key: Option<&str>) -> Result<Updates>;
    async fn subscribe(&self, request: SubscribeToTaskRequest, after: Option<u64>) -> Result<Updates>;
}

/// Whether something answers well at a path.
pub(crate) async fn probe(base: &str, path: &str) -> Result<()> {
    http::Http::new(base)?.get_bytes(path, MAX_ANSWER).await.map(drop)
}

/// An agent that can be talked to.
#[derive(Debug)]
pub(crate) struct Client {
    wire: Box<dyn Wire>,
    tenant: String,
}

impl Client {
    /// Reads the card at `url` and picks the interface to talk to: of `binding`, or the first one that this
    /// client speaks. Without a card, or without such an interface in it, that is `url` itself.
    pub(crate) async fn connect(url: &Url, binding: Option<Binding>) -> Result<Self> {
        let card = match card::read(url).await {
            Ok(card) => Some(card),
            Err(Failure::Answer(_)) if binding.is_some() => None,
            Err(failure) => return Err(failure),
        };
        let interface = card.as_ref().and_then(|card| card::pick(card, binding));
        let (binding, address, tenant) = match interface {
            Some((binding, interface)) => (binding, interface.url.clone(), interface.tenant.clone()),
            None => (binding.unwrap_or(Binding::Jsonrpc), url.to_string(), String::new()),
        };
        let wire: Box<dyn Wire> = match binding {
            Binding::Jsonrpc => Box::new(jsonrpc::JsonRpc::new(http::Http::new(&address)?)),
            Binding::Rest => Box::new(rest::Rest::new(http::Http::new(&address)?)),
            Binding::Grpc => Box::new(grpc::Grpc::connect(&address).await?),
        };
        Ok(Self { wire, tenant })
    }

    /// Sends a message, under a name of its own (`Idempotency-Key`) if it has one, and waits for its result.
    pub(crate) async fn send(&self, request: SendMessageRequest, key: Option<&str>) -> Result<SendMessageResponse> {
        self.wire.send(SendMessageRequest { tenant: self.tenant.clone(), ..request }, key).await
    }

    /// Reads a task.
    pub(crate) async fn get(&self, id: &str, history_length: Option<i32>) -> Result<Task> {
        self.wire.get(GetTaskRequest { tenant: self.tenant.clone(), id: id.to_owned(), history_length }).await
    }

    /// Reads a page of tasks.
    pub(crate) async fn list(&self, request: ListTasksRequest) -> Result<ListTasksResponse> {
        self.wire.list(ListTasksRequest { tenant: self.tenant.clone(), ..request }).await
    }

    /// Cancels a task.
    pub(crate) async fn cancel(&self, id: &str) -> Result<Task> {
        self.wire.cancel(CancelTaskRequest { tenant: self.tenant.clone(), id: id.to_owned(), metadata: None }).await
    }
}
