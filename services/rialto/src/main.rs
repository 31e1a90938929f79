//! The `rialto` binary: servers, a client, and what an operator needs. The work is in the other rooms.

mod admin;
mod bench;
mod cli;
mod client;
mod config;
mod dev;
mod output;
mod serve;
mod talk;
mod view;

/// Every call of a service allocates and frees on several threads; the system's allocator makes them wait.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::run()
}
