//! The service over a real engine, with runners played by hand.

mod admin;
mod cancel;
mod crash;
mod engine;
mod flaky;
mod grant;
mod later;
mod limits;
mod list;
mod lost;
mod names;
mod random;
mod send;
mod watch;
mod world;
mod write;
