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
use rialto_a2a::{Error, v1::StreamResponse};
use rialto_rpc::tasks::Update;
use tracing::error;

use crate::follow::{Events, Idle, Step};

/// How long a client waits before it comes back, when we end its stream.
const RETRY_MS: u32 = 1000;

/// How a binding writes into `data:`. One line each.
#[derive(Debug)]
pub(crate) enum Framing {
    /// In a JSON-RPC envelope with this id, which is JSON.
    JsonRpc(String),
    /// Bare.
    Rest,
}

impl Framing {
    fn event(&self, event: &StreamResponse, out: &mut Vec<u8>) -> serde_json::Result<()> {
        match self {
            Self::Rest => serde_json::to_writer(out, event),
            Self::JsonRpc(id) => {
                out.extend_from_slice(br#"{"jsonrpc":"2.0","id":"#);
                out.extend_from_slice(id.as_bytes());
                out.extend_from_slice(br#","result":"#);
                serde_json::to_writer(&mut *out, event)?;
                out.push(b'}');
                Ok(())
            }
        }
    }

    fn error(&self, error: &Error) -> String {
        match self {
            Self::Rest => error.to_rest().1.to_string(),
            Self::JsonRpc(id) => format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{}}}"#, error.to_jsonrpc()),
        }
    }
}

/// Answers with a stream that begins with its first event and is never silent for longer than `keep_alive`.
pub(crate) fn respond(events: Events, framing: Framing, keep_alive: Duration) -> Response<Body> {
    let body = Sse { events, framing, keep_alive: Idle::new(keep_alive), over: false };
    let mut response = Response::new(Body::new(body));
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
        format!("data: {}\n\n", self.framing.error(error)).into_bytes()
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
                format!(": {why}; subscribe again with Last-Event-ID\nretry: {RETRY_MS}\n\n").into_bytes()
            }
            Poll::Pending => match this.keep_alive.poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => b":\n\n".to_vec(),
            },
        };
        this.keep_alive.reset();
        Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
    }
}
