//! What tests need of the world: real servers, and a network that misbehaves on demand.
//!
//! Only ever a dev-dependency.

pub mod certificates;
pub mod chaos;
pub mod cluster;
pub mod llm;
pub mod otlp;
pub mod redis;
