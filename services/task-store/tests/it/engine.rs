//! The engine of these tests: memory. `tests/redis` runs them on another one.

use std::sync::Arc;

use rialto_store::{
    Engine,
    sqlite::{SqliteConfig, SqliteEngine},
};

/// Whether tests may stop the clock: nothing here waits for another process.
pub(crate) const TIME_CAN_STAND_STILL: bool = true;

pub(crate) fn engine(shards: u16) -> Arc<dyn Engine> {
    SqliteEngine::open(SqliteConfig::memory(shards)).expect("opens")
}
