//! The storage kernel: what changes together, commits together.
//!
//! Owns records, ordered indexes, streams with their consumer group, notices and limits, and the one atomic
//! [`Engine::commit`] over all of them (design §4). Knows nothing of A2A: keys, scores and payloads are its
//! callers' business. Nobody else names SQL or `redis` for tasks and streams.

mod clock;
pub mod kernel;
mod limit;
mod notices;
pub mod redis;
pub mod sqlite;
#[cfg(feature = "suite")]
pub mod suite;
pub mod worker;

pub use kernel::{
    At, Batch, Check, Claim, Claimed, CommitId, Committed, Conflict, Consumer, Depth, Engine, Entry, EntryId, Error,
    IndexQuery, Millis, Notice, Notices, Op, Order, Rate, ReadLimit, Record, Result, Shard,
};
