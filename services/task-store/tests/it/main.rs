//! The service over a real engine, with runners played by hand.

mod cancel;
mod crash;
mod engine;
mod flaky;
mod later;
mod list;
mod random;
mod send;
mod watch;
mod world;
mod write;
