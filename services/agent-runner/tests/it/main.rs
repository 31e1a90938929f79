//! The runner against a task-store that keeps the contract in memory, and notes every call.

mod echo;
mod fake;
