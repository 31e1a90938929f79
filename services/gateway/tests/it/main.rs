//! The gateway over a real socket, in front of a task-store that does as the message says.

mod bodies;
mod cards;
mod client;
mod errors;
mod grpc;
mod http;
mod operations;
mod store;
mod streams;
