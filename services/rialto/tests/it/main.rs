//! The built binary, as a user and an operator meet it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::disallowed_methods, reason = "real processes live by the wall clock")]

mod admin;
mod again;
mod cluster;
mod config;
mod cuts;
mod dev;
mod faults;
mod model;
mod orphans;
mod process;
mod serve;
mod talk;
mod telemetry;
mod turns;
mod wire;
