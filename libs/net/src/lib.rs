//! Bytes in and out: the listener that serves HTTP/1.1, h2c and gRPC on one port, and bounded request bodies,
//! and the reader of other servers' event streams.
//!
//! Knows nothing of A2A, agents or tasks: it is given an [`axum::Router`] and an order to stop.

mod body;
mod clock;
mod listener;
pub mod sse;

pub use body::{BodyError, Deadline, read};
pub use listener::{BindError, Limits, Listener, Peer};
