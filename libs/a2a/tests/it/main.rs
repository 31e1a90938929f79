//! The A2A types against the official Python SDK, and against themselves.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod contract;
mod golden;
mod round_trip;
mod v03;
mod v03_round_trip;
