//! The gateway over a real socket, in front of a task-store that does as the message says.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bodies;
mod cards;
mod client;
mod errors;
mod grpc;
mod http;
mod names;
mod operations;
mod store;
mod streams;
mod v03;
