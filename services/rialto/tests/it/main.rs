//! The built binary, as a user and an operator meet it.

mod config;
mod cuts;
mod dev;
mod process;
mod talk;
