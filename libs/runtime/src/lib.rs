//! What every Rialto process needs around its services: configuration, logs, signals, supervised tasks.
//!
//! Knows no wire and no store; services take their section of the [`config::Config`] from here.

pub mod config;
mod secret;
pub mod supervise;
pub mod telemetry;
pub mod units;

pub use secret::Secret;
