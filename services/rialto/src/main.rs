//! The `rialto` binary: servers, a client, and what an operator needs. The work is in the other rooms.

mod bench;
mod cli;
mod client;
mod config;
mod dev;
mod output;
mod serve;
mod talk;
mod view;

fn main() -> std::process::ExitCode {
    cli::run()
}
