//! The runner against a task-store that keeps the contract in memory, and notes every call.
#![expect(clippy::disallowed_methods, reason = "tests stop what they started")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod command;
mod echo;
mod examples;
mod fake;
mod grants;
mod lab;
mod openai;
mod runner;
mod scripted;
