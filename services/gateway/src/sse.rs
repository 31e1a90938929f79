//! Server-sent events: a stream of a task's events as an HTTP body.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    http::{HeaderValue, Response, header},
};
use bytes::Bytes;
use http_body::Frame;
use rialto_a2a::{
    Error,
    v1::{StreamResponse, TaskState, stream_response::Payload},
    v03,
};
use rialto_rpc::tasks::Update;
use tracing::error;

use crate::{
    bindings::jsonrpc,
    call::Version,
    follow::{Events, Idle, Step},
};

/// How long a client waits before it comes back, when we end its stream.
const RETRY_MS: u32 = 1000;

/// How a binding writes into `data:`. One line each.
#[derive(Debug)]
pub(crate) enum Framing {
    /// In a JSON-RPC envelope with this id, which is JSON.
    JsonRpc(String),
    /// The same with the objects of 0.3.
    JsonRpcV03 {
        id: String,
        /// Whether the stream ends when the task waits for input.
        ends_at_input: bool,
    },
    /// Bare.
    Rest,
}

impl Framing {
    fn event(&self, event: &StreamResponse, out: &mut Vec<u8>) -> serde_json::Result<()> {
        match self {
            Self::Rest => serde_json::to_writer(out, event),
            Self::JsonRpc(id) => jsonrpc::write_result(id, event, out),
            Self::JsonRpcV03 { id, ends_at_input } => {
                let last = *ends_at_input && waits_for_input(event);
                jsonrpc::write_result(id, &v03::Event { event, last }, out)
            }
        }
    }

    fn error(&self, error: &Error) -> String {
        match self {
            Self::Rest => error.to_rest().1.to_string(),
            Self::JsonRpc(id) => jsonrpc::error(id, Version::V1, error),
            Self::JsonRpcV03 { id, .. } => jsonrpc::error(id, Version::V03, error),
        }
    }

    fn failure(&self, error: &Error) -> String {
        format!("data: {}\n\n", self.error(error))
    }

    /// Ends a comment, perhaps with a field. What the SDK of 0.3 for Python reads with takes every empty line after
    /// an `id` for an event, one without data, and then cannot read it.
    fn end_comment(&self, field: &str) -> String {
        match self {
            Self::JsonRpcV03 { .. } => "\n".to_owned(),
            Self::JsonRpc(_) | Self::Rest => format!("\n{field}\n"),
        }
    }
}

fn waits_for_input(event: &StreamResponse) -> bool {
    let Some(Payload::StatusUpdate(update)) = &event.payload else { return false };
    update.status.as_ref().is_some_and(|status| status.state() == TaskState::InputRequired)
}

/// Answers with a stream that begins with its first event and is never silent for longer than `keep_alive`.
pub(crate) fn respond(events: Events, framing: Framing, keep_alive: Duration) -> Response<Body> {
    open(Body::new(Sse { events, framing, keep_alive: Idle::new(keep_alive), over: false }))
}

/// Answers with a stream of nothing but an error.
pub(crate) fn refuse(framing: &Framing, error: &Error) -> Response<Body> {
    open(Body::from(framing.failure(error)))
}

fn open(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/event-stream"),
        // Neither caches nor proxies may hold events back, and compressing would.
        (header::CACHE_CONTROL, "no-cache, no-transform"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

struct Sse {
    events: Events,
    framing: Framing,
    keep_alive: Idle,
    over: bool,
}

impl Sse {
    fn event(&self, update: &Update) -> Result<Vec<u8>, Error> {
        let mut out = Vec::with_capacity(512);
        if update.number > 0 {
            out.extend_from_slice(format!("id: {}\n", update.number).as_bytes());
        }
        out.extend_from_slice(b"data: ");
        let written = match &update.event {
            Some(event) => self.framing.event(event, &mut out).map_err(|fault| fault.to_string()),
            None => Err("an update without an event".to_owned()),
        };
        written.map_err(|fault| {
            error!(fault, number = update.number, "cannot write an event");
            Error::internal()
        })?;
        out.extend_from_slice(b"\n\n");
        Ok(out)
    }

    fn failure(&mut self, error: &Error) -> Vec<u8> {
        self.over = true;
        self.framing.failure(error).into_bytes()
    }
}

impl http_body::Body for Sse {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        let bytes = match this.events.poll_step(context) {
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Step::Update(update))) => this.event(&update).unwrap_or_else(|error| this.failure(&error)),
            Poll::Ready(Some(Step::Failed(error))) => this.failure(&error),
            Poll::Ready(Some(Step::Paused(why))) => {
                this.over = true;
                let end = this.framing.end_comment(&format!("retry: {RETRY_MS}\n"));
                format!(": {why}; subscribe again with Last-Event-ID{end}").into_bytes()
            }
            Poll::Pending => match this.keep_alive.poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => format!(":{}", this.framing.end_comment("")).into_bytes(),
            },
        };
        this.keep_alive.reset();
        Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
    }
}
