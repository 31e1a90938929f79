//! The service over Redis: what `tests/it` asks of it, and what a task costs there.

#![expect(clippy::unwrap_used, reason = "a panic is how tests fail, in their helpers as well")]

mod budget;
mod engine;
mod failover;
mod wrecked;

#[path = "../it/admin.rs"]
mod admin;
#[path = "../it/cancel.rs"]
mod cancel;
#[path = "../it/crash.rs"]
mod crash;
#[path = "../it/flaky.rs"]
mod flaky;
#[path = "../it/grant.rs"]
mod grant;
#[path = "../it/later.rs"]
mod later;
#[path = "../it/limits.rs"]
mod limits;
#[path = "../it/list.rs"]
mod list;
#[path = "../it/lost.rs"]
mod lost;
#[path = "../it/names.rs"]
mod names;
#[path = "../it/random.rs"]
mod random;
#[path = "../it/send.rs"]
mod send;
#[path = "../it/watch.rs"]
mod watch;
#[path = "../it/world.rs"]
mod world;
#[path = "../it/write.rs"]
mod write;
