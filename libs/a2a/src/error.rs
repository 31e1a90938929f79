//! The one error taxonomy of Rialto, and what each error looks like on every wire.
//!
//! A room that cannot do what was asked answers with an [`Error`]: a [`Kind`] that decides codes on every
//! wire, a message that is safe to show to a stranger, and optional facts for machines. [`Kind::wire`] is the
//! only table that maps kinds to JSON-RPC, HTTP and gRPC (spec §5.4, with Rialto's additions of design §7).
//! Internal text (a database message, a path, a panic) never goes in here: log it, and answer
//! [`Error::internal`].

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

/// The `domain` of every `google.rpc.ErrorInfo` that Rialto sends.
pub const DOMAIN: &str = "a2a-protocol.org";

/// What went wrong, in the terms of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The task does not exist, or is not the caller's.
    TaskNotFound,
    /// The task has already ended.
    TaskNotCancelable,
    /// The agent has no webhooks.
    PushNotificationNotSupported,
    /// The agent does not offer this operation, or not in this state.
    UnsupportedOperation,
    /// A part or a body has a media type that the agent does not take.
    ContentTypeNotSupported,
    /// The agent, or an agent behind it, answered something that is not A2A.
    InvalidAgentResponse,
    /// An extended card is declared but not configured.
    ExtendedAgentCardNotConfigured,
    /// The card requires an extension that the client did not declare.
    ExtensionSupportRequired,
    /// The requested protocol version is not served here.
    VersionNotSupported,
    /// The body is not JSON.
    Parse,
    /// The body is JSON but not a request.
    InvalidRequest,
    /// No such operation or route.
    MethodNotFound,
    /// The route exists, the HTTP verb does not (405, with `Allow`).
    MethodNotAllowed,
    /// A parameter is missing or wrong; [`Error::violations`] name it.
    InvalidParams,
    /// Our fault. The log has the detail.
    Internal,
    /// No valid credential.
    Unauthenticated,
    /// A valid credential without the right.
    Forbidden,
    /// A part of the platform is away; try again later.
    Unavailable,
    /// The caller sends too much.
    RateLimited,
    /// Too much work is waiting.
    QueueFull,
    /// The request is larger than the limit.
    PayloadTooLarge,
    /// Not done in time.
    Deadline,
    /// An `Idempotency-Key` was used again with another request.
    IdempotencyKeyReused,
}

/// How one [`Kind`] is written on each wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// `reason` of the `google.rpc.ErrorInfo`.
    pub reason: &'static str,
    /// JSON-RPC error code.
    pub jsonrpc: i32,
    /// HTTP status of the REST binding.
    pub http: u16,
    /// gRPC status code; its canonical name is also the `status` of REST error bodies.
    pub grpc: tonic::Code,
    /// The message used when nothing more exact can be said.
    pub message: &'static str,
}

impl Kind {
    /// Every kind, for tests and documentation that walk the table.
    pub const ALL: [Self; 23] = [
        Self::TaskNotFound,
        Self::TaskNotCancelable,
        Self::PushNotificationNotSupported,
        Self::UnsupportedOperation,
        Self::ContentTypeNotSupported,
        Self::InvalidAgentResponse,
        Self::ExtendedAgentCardNotConfigured,
        Self::ExtensionSupportRequired,
        Self::VersionNotSupported,
        Self::Parse,
        Self::InvalidRequest,
        Self::MethodNotFound,
        Self::MethodNotAllowed,
        Self::InvalidParams,
        Self::Internal,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::Unavailable,
        Self::RateLimited,
        Self::QueueFull,
        Self::PayloadTooLarge,
        Self::Deadline,
        Self::IdempotencyKeyReused,
    ];

    /// The table.
    #[must_use]
    pub const fn wire(self) -> Wire {
        use tonic::Code::{
            DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied,
            ResourceExhausted, Unauthenticated, Unavailable, Unimplemented,
        };
        const fn row(reason: &'static str, jsonrpc: i32, http: u16, grpc: tonic::Code, message: &'static str) -> Wire {
            Wire { reason, jsonrpc, http, grpc, message }
        }
        #[rustfmt::skip]
        let wire = match self {
            Self::TaskNotFound => row("TASK_NOT_FOUND", -32001, 404, NotFound, "Task not found"),
            Self::TaskNotCancelable => row("TASK_NOT_CANCELABLE", -32002, 400, FailedPrecondition, "Task cannot be canceled"),
            Self::PushNotificationNotSupported => row("PUSH_NOTIFICATION_NOT_SUPPORTED", -32003, 400, FailedPrecondition, "Push notifications are not supported"),
            Self::UnsupportedOperation => row("UNSUPPORTED_OPERATION", -32004, 400, FailedPrecondition, "This operation is not supported"),
            Self::ContentTypeNotSupported => row("CONTENT_TYPE_NOT_SUPPORTED", -32005, 400, InvalidArgument, "Content type not supported"),
            Self::InvalidAgentResponse => row("INVALID_AGENT_RESPONSE", -32006, 500, Internal, "The agent gave an invalid response"),
            Self::ExtendedAgentCardNotConfigured => row("EXTENDED_AGENT_CARD_NOT_CONFIGURED", -32007, 400, FailedPrecondition, "No extended agent card is configured"),
            Self::ExtensionSupportRequired => row("EXTENSION_SUPPORT_REQUIRED", -32008, 400, FailedPrecondition, "The agent requires an extension that the client did not declare"),
            Self::VersionNotSupported => row("VERSION_NOT_SUPPORTED", -32009, 400, FailedPrecondition, "Protocol version not supported"),
            Self::Parse => row("PARSE_ERROR", -32700, 400, InvalidArgument, "Invalid JSON payload"),
            Self::InvalidRequest => row("INVALID_REQUEST", -32600, 400, InvalidArgument, "Request payload validation error"),
            Self::MethodNotFound => row("METHOD_NOT_FOUND", -32601, 404, Unimplemented, "Method not found"),
            Self::MethodNotAllowed => row("METHOD_NOT_ALLOWED", -32600, 405, Unimplemented, "Method not allowed"),
            Self::InvalidParams => row("INVALID_PARAMS", -32602, 400, InvalidArgument, "Invalid parameters"),
            Self::Internal => row("INTERNAL_ERROR", -32603, 500, Internal, "Internal error"),
            Self::Unauthenticated => row("UNAUTHENTICATED", -31401, 401, Unauthenticated, "Unauthorized"),
            Self::Forbidden => row("FORBIDDEN", -31403, 403, PermissionDenied, "Forbidden"),
            Self::Unavailable => row("UNAVAILABLE", -32603, 503, Unavailable, "Temporarily unavailable"),
            Self::RateLimited => row("RATE_LIMITED", -32603, 429, ResourceExhausted, "Too many requests"),
            Self::QueueFull => row("QUEUE_FULL", -32603, 503, ResourceExhausted, "Too much work is waiting"),
            Self::PayloadTooLarge => row("PAYLOAD_TOO_LARGE", -32600, 413, ResourceExhausted, "Request too large"),
            Self::Deadline => row("DEADLINE", -32603, 504, DeadlineExceeded, "Deadline exceeded"),
            Self::IdempotencyKeyReused => row("IDEMPOTENCY_KEY_REUSED", -32602, 400, InvalidArgument, "This Idempotency-Key was used with another request"),
        };
        wire
    }

    /// The kind whose [`Wire::reason`] this is: how an error survives a hop between services.
    #[must_use]
    pub fn from_reason(reason: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.wire().reason == reason)
    }
}

/// A field that a request got wrong, as in `google.rpc.BadRequest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// JSON path of the field, such as `message.parts[1]`.
    pub field: String,
    /// What is wrong with it, and what would be right.
    pub description: String,
}

/// An answer that is not a result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Decides the codes.
    pub kind: Kind,
    /// One sentence for a person; safe to show to a stranger.
    pub message: Cow<'static, str>,
    /// The wrong fields, if the request is at fault.
    pub violations: Vec<Violation>,
    /// Facts for machines: `ErrorInfo.metadata`.
    pub metadata: BTreeMap<String, String>,
    /// When to try again (`Retry-After`, `google.rpc.RetryInfo`).
    pub retry_after: Option<Duration>,
}

/// The result of anything that can be refused.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Kind> for Error {
    fn from(kind: Kind) -> Self {
        Self::new(kind, kind.wire().message)
    }
}

impl Error {
    /// An error with a message of its own.
    pub fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into(), violations: Vec::new(), metadata: BTreeMap::new(), retry_after: None }
    }

    /// [`Kind::InvalidParams`] about one field. The message names it, for clients that show nothing else.
    pub fn invalid(field: impl Into<String>, description: impl Into<String>) -> Self {
        let violation = Violation { field: field.into(), description: description.into() };
        let message = format!("Invalid parameters: {}: {}", violation.field, violation.description);
        Self { violations: vec![violation], ..Self::new(Kind::InvalidParams, message) }
    }

    /// [`Kind::Internal`] with no detail.
    #[must_use]
    pub fn internal() -> Self {
        Kind::Internal.into()
    }

    /// [`Kind::Unavailable`], to be tried again after a second.
    #[must_use]
    pub fn unavailable() -> Self {
        Self::from(Kind::Unavailable).retry_after(Duration::from_secs(1))
    }

    /// Adds a fact for machines.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<String>) -> Self {
        self.metadata.insert(key.to_owned(), value.into());
        self
    }

    /// Says when to try again.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }
}
