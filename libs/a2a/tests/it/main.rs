//! The A2A types against the official Python SDK, and against themselves.

mod contract;
mod golden;
mod round_trip;
