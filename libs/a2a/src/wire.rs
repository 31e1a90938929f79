//! What an [`Error`] looks like as JSON-RPC, REST and gRPC, and how it comes back from gRPC.
//!
//! All three carry the same facts in the same limits: a caller may not make an answer long by sending a long
//! mistake, and a gRPC status that outgrows the header limit kills every stream on its connection.

use std::{collections::HashMap, time::Duration};

use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

use crate::{
    error::{DOMAIN, Error, Kind, Violation},
    text::cut,
};

/// Limits in bytes. Their sum, with names and types, stays below 4 kB.
const MAX_MESSAGE: usize = 1024;
const MAX_VIOLATIONS: usize = 1536;
const MAX_FIELD: usize = 200;
const MAX_METADATA: usize = 1024;
const MAX_FACT: usize = 256;

impl Error {
    /// [`Kind::InvalidParams`] about these fields. The message names the first, for clients that show nothing else.
    #[must_use]
    pub fn from_violations(violations: Vec<Violation>) -> Self {
        let message = match violations.first() {
            None => return Kind::InvalidParams.into(),
            Some(Violation { field, description }) if field.is_empty() => format!("Invalid parameters: {description}"),
            Some(Violation { field, description }) => format!("Invalid parameters: {field}: {description}"),
        };
        let message = match violations.len() - 1 {
            0 => message,
            more => format!("{} (and {more} more)", cut(&message, MAX_MESSAGE / 2)),
        };
        Self { violations, ..Self::new(Kind::InvalidParams, message) }
    }

    /// The same error about the same fields of something that is itself the field `prefix`.
    #[must_use]
    pub fn within(self, prefix: &str) -> Self {
        if self.kind != Kind::InvalidParams || self.violations.is_empty() {
            return self;
        }
        let nested = |Violation { field, description }| Violation {
            field: match field.as_str() {
                "" => prefix.to_owned(),
                list if list.starts_with('[') => format!("{prefix}{list}"),
                field => format!("{prefix}.{field}"),
            },
            description,
        };
        let named = Self::from_violations(self.violations.into_iter().map(nested).collect());
        Self { metadata: self.metadata, retry_after: self.retry_after, ..named }
    }

    /// The `error` member of a JSON-RPC response.
    #[must_use]
    pub fn to_jsonrpc(&self) -> Value {
        json!({"code": self.kind.wire().jsonrpc, "message": self.short_message(), "data": self.details()})
    }

    /// Status and body of a REST answer.
    #[must_use]
    pub fn to_rest(&self) -> (u16, Value) {
        let wire = self.kind.wire();
        let error = json!({
            "code": wire.http,
            "status": code_name(wire.grpc),
            "message": self.short_message(),
            "details": self.details(),
        });
        (wire.http, json!({ "error": error }))
    }

    /// A gRPC status with `google.rpc` details.
    #[must_use]
    pub fn to_status(&self) -> Status {
        let wire = self.kind.wire();
        let facts: HashMap<String, String> = self.short_metadata().collect();
        let mut details = ErrorDetails::with_error_info(wire.reason, DOMAIN, facts);
        for (field, description) in self.short_violations() {
            details.add_bad_request_violation(field, description);
        }
        if let Some(after) = self.retry_after {
            details.set_retry_info(Some(after));
        }
        Status::with_error_details(wire.grpc, self.short_message(), details)
    }

    /// The error that another service answered. Text that did not come from a Rialto service, or from another
    /// A2A agent on purpose, is not passed on.
    #[must_use]
    pub fn from_status(status: &Status) -> Self {
        let details = status.get_error_details();
        let kind =
            details.error_info().filter(|info| info.domain == DOMAIN).and_then(|info| Kind::from_reason(&info.reason));
        let Some(kind) = kind else { return Self::from_foreign(status) };
        let violations = details.bad_request().map(|bad| bad.field_violations.as_slice()).unwrap_or_default();
        Self {
            violations: violations
                .iter()
                .map(|FieldViolation { field, description, .. }| Violation {
                    field: field.clone(),
                    description: description.clone(),
                })
                .collect(),
            metadata: details.error_info().map(|info| info.metadata.clone().into_iter().collect()).unwrap_or_default(),
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
            ..Self::new(kind, status.message().to_owned())
        }
    }

    fn from_foreign(status: &Status) -> Self {
        match status.code() {
            Code::DeadlineExceeded => Kind::Deadline.into(),
            // What tonic makes of its own time-outs.
            Code::Cancelled if status.message() == "Timeout expired" => Kind::Deadline.into(),
            Code::Unavailable | Code::Cancelled => Self::unavailable(),
            Code::ResourceExhausted | Code::OutOfRange => Kind::PayloadTooLarge.into(),
            Code::Unimplemented => Kind::MethodNotFound.into(),
            // A status from the wire has no source; one with a source was made here when the connection broke.
            _ if std::error::Error::source(status).is_some() => Self::unavailable(),
            _ => Self::internal(),
        }
    }

    fn short_message(&self) -> String {
        cut(&self.message, MAX_MESSAGE)
    }

    fn short_metadata(&self) -> impl Iterator<Item = (String, String)> {
        let facts = self.metadata.iter().map(|(key, value)| (cut(key, MAX_FACT), cut(value, MAX_FACT)));
        fitting(facts, MAX_METADATA)
    }

    fn short_violations(&self) -> impl Iterator<Item = (String, String)> {
        let short = |v: &Violation| (cut(&v.field, MAX_FIELD), cut(&v.description, MAX_FACT));
        fitting(self.violations.iter().map(short), MAX_VIOLATIONS)
    }

    /// The details as ProtoJSON `Any`s, `ErrorInfo` first.
    fn details(&self) -> Vec<Value> {
        let mut info = json!({
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": self.kind.wire().reason,
            "domain": DOMAIN,
        });
        if !self.metadata.is_empty() {
            info["metadata"] = self.short_metadata().map(|(key, value)| (key, Value::from(value))).collect();
        }
        let mut details = vec![info];
        if !self.violations.is_empty() {
            let violation = |(field, description)| json!({"field": field, "description": description});
            details.push(json!({
                "@type": "type.googleapis.com/google.rpc.BadRequest",
                "fieldViolations": self.short_violations().map(violation).collect::<Vec<_>>(),
            }));
        }
        if let Some(after) = self.retry_after {
            details.push(json!({
                "@type": "type.googleapis.com/google.rpc.RetryInfo",
                "retryDelay": seconds(after),
            }));
        }
        details
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        error.to_status()
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::from_status(&status)
    }
}

/// As many pairs as fit.
fn fitting(pairs: impl Iterator<Item = (String, String)>, max: usize) -> impl Iterator<Item = (String, String)> {
    /// What a pair costs beside its texts.
    const FRAME: usize = 8;
    pairs.scan(max, |room, (name, text)| {
        *room = room.checked_sub(name.len() + text.len() + FRAME)?;
        Some((name, text))
    })
}

/// A `google.protobuf.Duration` as ProtoJSON.
fn seconds(duration: Duration) -> String {
    match duration.subsec_millis() {
        0 => format!("{}s", duration.as_secs()),
        millis => format!("{}.{millis:03}s", duration.as_secs()),
    }
}

/// The canonical name of a gRPC code, as REST bodies carry it.
const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    #[test]
    fn every_kind_on_every_wire() {
        let mut table = String::new();
        for kind in Kind::ALL {
            let error = Error::from(kind);
            let (rpc, (http, rest), status) = (error.to_jsonrpc(), error.to_rest(), error.to_status());
            assert_eq!(rest["error"]["details"], rpc["data"]);
            assert_eq!(rest["error"]["message"], rpc["message"]);
            assert_eq!(rest["error"]["code"], http);
            let info = &rpc["data"][0];
            assert_eq!(info["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
            assert_eq!(info["domain"], DOMAIN);
            assert_eq!(code_name(status.code()), rest["error"]["status"]);
            assert_eq!(Error::from_status(&status), error);
            let status = &rest["error"]["status"].as_str().unwrap();
            let (reason, message) = (&info["reason"].as_str().unwrap(), error.message);
            writeln!(table, "{reason:<37} {:>6} {http} {status:<19} {message}", rpc["code"]).unwrap();
        }
        insta::assert_snapshot!(table, @r"
        TASK_NOT_FOUND                        -32001 404 NOT_FOUND           Task not found
        TASK_NOT_CANCELABLE                   -32002 400 FAILED_PRECONDITION Task cannot be canceled
        PUSH_NOTIFICATION_NOT_SUPPORTED       -32003 400 FAILED_PRECONDITION Push notifications are not supported
        UNSUPPORTED_OPERATION                 -32004 400 FAILED_PRECONDITION This operation is not supported
        CONTENT_TYPE_NOT_SUPPORTED            -32005 400 INVALID_ARGUMENT    Content type not supported
        INVALID_AGENT_RESPONSE                -32006 500 INTERNAL            The agent gave an invalid response
        EXTENDED_AGENT_CARD_NOT_CONFIGURED    -32007 400 FAILED_PRECONDITION No extended agent card is configured
        EXTENSION_SUPPORT_REQUIRED            -32008 400 FAILED_PRECONDITION The agent requires an extension that the client did not declare
        VERSION_NOT_SUPPORTED                 -32009 400 FAILED_PRECONDITION Protocol version not supported
        PARSE_ERROR                           -32700 400 INVALID_ARGUMENT    Invalid JSON payload
        INVALID_REQUEST                       -32600 400 INVALID_ARGUMENT    Request payload validation error
        METHOD_NOT_FOUND                      -32601 404 UNIMPLEMENTED       Method not found
        METHOD_NOT_ALLOWED                    -32600 405 UNIMPLEMENTED       Method not allowed
        INVALID_PARAMS                        -32602 400 INVALID_ARGUMENT    Invalid parameters
        INTERNAL_ERROR                        -32603 500 INTERNAL            Internal error
        UNAUTHENTICATED                       -31401 401 UNAUTHENTICATED     Unauthorized
        FORBIDDEN                             -31403 403 PERMISSION_DENIED   Forbidden
        UNAVAILABLE                           -32603 503 UNAVAILABLE         Temporarily unavailable
        RATE_LIMITED                          -32603 429 RESOURCE_EXHAUSTED  Too many requests
        QUEUE_FULL                            -32603 503 RESOURCE_EXHAUSTED  Too much work is waiting
        PAYLOAD_TOO_LARGE                     -32600 413 RESOURCE_EXHAUSTED  Request too large
        DEADLINE                              -32603 504 DEADLINE_EXCEEDED   Deadline exceeded
        IDEMPOTENCY_KEY_REUSED                -32602 400 INVALID_ARGUMENT    This Idempotency-Key was used with another request
        ");
    }

    #[test]
    fn all_facts_survive_a_hop_and_are_the_same_on_each_wire() {
        let error = Error::from_violations(vec![
            Violation { field: "message.parts[0]".into(), description: "a part needs content".into() },
            Violation { field: "message.role".into(), description: "is required".into() },
        ])
        .with("supportedVersions", "1.0,0.3")
        .retry_after(Duration::from_millis(1500));
        assert_eq!(Error::from_status(&error.to_status()), error);
        insta::assert_json_snapshot!(error.to_jsonrpc(), @r#"
        {
          "code": -32602,
          "data": [
            {
              "@type": "type.googleapis.com/google.rpc.ErrorInfo",
              "domain": "a2a-protocol.org",
              "metadata": {
                "supportedVersions": "1.0,0.3"
              },
              "reason": "INVALID_PARAMS"
            },
            {
              "@type": "type.googleapis.com/google.rpc.BadRequest",
              "fieldViolations": [
                {
                  "description": "a part needs content",
                  "field": "message.parts[0]"
                },
                {
                  "description": "is required",
                  "field": "message.role"
                }
              ]
            },
            {
              "@type": "type.googleapis.com/google.rpc.RetryInfo",
              "retryDelay": "1.500s"
            }
          ],
          "message": "Invalid parameters: message.parts[0]: a part needs content (and 1 more)"
        }
        "#);
        insta::assert_json_snapshot!(Error::from(Kind::TaskNotFound).to_rest(), @r#"
        [
          404,
          {
            "error": {
              "code": 404,
              "details": [
                {
                  "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                  "domain": "a2a-protocol.org",
                  "reason": "TASK_NOT_FOUND"
                }
              ],
              "message": "Task not found",
              "status": "NOT_FOUND"
            }
          }
        ]
        "#);
    }

    #[test]
    fn a_long_error_message_does_not_kill_the_connection() {
        let long = "ü".repeat(50_000);
        let violations =
            (0..3000).map(|i| Violation { field: format!("message.parts[{i}]"), description: long.clone() }).collect();
        let mut error = Error { message: long.clone().into(), ..Error::from_violations(violations) };
        for fact in 0..100 {
            error = error.with(&format!("fact{fact}"), long.clone());
        }
        let status = error.to_status();
        assert!(status.message().len() <= 1024 && status.message().ends_with('…'));
        assert!(status.details().len() <= 4096, "{}", status.details().len());
        let back = Error::from_status(&status);
        assert_eq!((back.kind, &back.violations[0].field[..]), (Kind::InvalidParams, "message.parts[0]"));
        assert!(error.to_jsonrpc().to_string().len() <= 5000);
        assert!(error.to_rest().1.to_string().len() <= 5000);
    }

    #[test]
    fn a_foreign_status_keeps_its_text_to_itself() {
        let kind = |code| Error::from_status(&Status::new(code, "password=hunter2"));
        for (code, expected) in [
            (Code::Unavailable, Kind::Unavailable),
            (Code::Cancelled, Kind::Unavailable),
            (Code::DeadlineExceeded, Kind::Deadline),
            (Code::ResourceExhausted, Kind::PayloadTooLarge),
            (Code::OutOfRange, Kind::PayloadTooLarge),
            (Code::Unimplemented, Kind::MethodNotFound),
            (Code::NotFound, Kind::Internal),
            (Code::Unknown, Kind::Internal),
            (Code::PermissionDenied, Kind::Internal),
        ] {
            let error = kind(code);
            assert_eq!(error.kind, expected, "{code:?}");
            assert_eq!(error.message, expected.wire().message);
        }
        assert_eq!(kind(Code::Unavailable).retry_after, Some(Duration::from_secs(1)));
        assert_eq!(Error::from_status(&Status::cancelled("Timeout expired")).kind, Kind::Deadline);
        let broken = Status::from_error(Box::new(std::io::Error::other("connection reset by 10.0.0.7")));
        assert_eq!(Error::from_status(&broken), Error::unavailable());
        let other = ErrorDetails::with_error_info("TASK_NOT_FOUND", "example.test", HashMap::new());
        let other = Status::with_error_details(Code::NotFound, "x", other);
        assert_eq!(Error::from_status(&other).kind, Kind::Internal);
    }

    #[test]
    fn a_nested_fault_is_named_from_the_outside() {
        let field = |error: Error| error.within("params").violations.remove(0).field;
        assert_eq!(field(Error::invalid("id", "x")), "params.id");
        assert_eq!(field(Error::invalid("", "x")), "params");
        assert_eq!(field(Error::invalid("[3].id", "x")), "params[3].id");
        assert_eq!(Error::invalid("id", "is required").within("a").message, "Invalid parameters: a.id: is required");
        assert_eq!(Error::internal().within("a"), Error::internal());
    }
}
