//! The command line: what can be asked for, and with which exit code it ends.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand, builder::NonEmptyStringValueParser};
use rialto_runtime::{telemetry, units::Span};
use url::Url;

use crate::{
    admin, bench,
    client::Binding,
    config, dev, output,
    serve::{self, Role},
    talk,
};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the task failed, was rejected or canceled; or a running server failed
  2    the command line, the configuration or the machine does not allow it
  3    the server cannot be reached, or gave no answer in time
  4    the server answered an error
  5    the task waits for input or authorization
  130  stopped at once by a second Ctrl-C (143: SIGTERM)";

/// At the end of a server: its tasks are dropped in some milliseconds, unless the machine does not let them.
const LAST_DROPS: Duration = Duration::from_secs(2);

/// Serves AI agents over A2A 1.0, and talks to any that are.
#[derive(Debug, Parser)]
#[command(version, about, after_help = EXIT_CODES, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve agents in one process, with nothing else to install
    Dev(DevArgs),
    /// Serve some of the services, or all, as a part of a cluster
    Serve(ServeArgs),
    /// Send a message and print its result
    Call(SendArgs),
    /// Send a message and print what becomes of it, as it happens
    Stream(SendArgs),
    /// Print an agent's card
    Card(ServerArgs),
    /// Work with tasks
    #[command(subcommand)]
    Task(TaskCommand),
    /// See and do what an operator needs, over the admin port
    Admin(admin::AdminArgs),
    /// Work with configurations
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Measure what each operation costs on this machine
    Bench(bench::Bench),
}

/// Options of `dev`.
#[derive(Debug, Args)]
pub(crate) struct DevArgs {
    /// Serve the agents of this file (YAML or TOML) instead of the built-in one
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Serve this model of the endpoint OPENAI_BASE_URL, with the key OPENAI_API_KEY
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) model: Option<String>,
    /// Keep tasks in this folder [default: `rialto` in the user's data folder]
    #[arg(long, value_name = "DIR", conflicts_with = "ephemeral")]
    pub(crate) data: Option<PathBuf>,
    /// Keep tasks in memory; they are gone with the process
    #[arg(long)]
    pub(crate) ephemeral: bool,
    /// Address of the public port; port 0 takes any free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,
    /// Address of the admin port (probes, metrics, `rialto admin`) [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin_listen: Option<String>,
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The services of this process; they call each other in memory, and others over the network
    #[arg(value_enum, required = true, value_name = "SERVICE")]
    pub(crate) services: Vec<Role>,
    /// The configuration (YAML or TOML), the same one for every process
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address of the public port, for gateway [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,
    /// Address of the admin port (probes, metrics, `rialto admin`) [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin_listen: Option<String>,
    /// Address of task-store for the other services [default: 127.0.0.1:7101]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) task_store_listen: Option<String>,
}

/// Which agent to talk to, and how.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// Where the agent is; its card is below
    #[arg(long, env = "RIALTO_URL", default_value = "http://127.0.0.1:8080", value_parser = web_url)]
    pub(crate) url: Url,
    /// The binding to speak [default: the first one that the card lists]
    #[arg(long, value_enum)]
    pub(crate) binding: Option<Binding>,
    /// Print JSON, one object per line; the default when stdout is not a terminal
    #[arg(long)]
    pub(crate) json: bool,
    /// Print for people; the default on a terminal
    #[arg(long, conflicts_with = "json")]
    pub(crate) text: bool,
    /// Give up after this, such as 30s or 10m; the task goes on [default: 10m, streams: never]
    #[arg(long, value_name = "TIME", value_parser = positive_span)]
    pub(crate) timeout: Option<Duration>,
}

/// A message and where to send it.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// The message; `-` reads it from stdin
    #[arg(value_name = "TEXT")]
    pub(crate) message: String,
    /// Continue this conversation
    #[arg(long, value_name = "CONTEXT_ID")]
    pub(crate) context: Option<String>,
    /// Continue this task
    #[arg(long, value_name = "TASK_ID")]
    pub(crate) task: Option<String>,
    /// Name the message: sent again with the same key it is the same task, for 24 hours
    #[arg(long, value_name = "KEY", value_parser = idempotency_key)]
    pub(crate) idempotency_key: Option<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// What to do with tasks.
#[derive(Debug, Subcommand)]
pub(crate) enum TaskCommand {
    /// Print a task
    Get {
        /// The task
        id: String,
        /// The newest messages of its history that are printed [default: all]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(0..))]
        history: Option<i32>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Print tasks, the one that changed last first
    List {
        /// Only of this conversation
        #[arg(long, value_name = "CONTEXT_ID")]
        context: Option<String>,
        /// Only in this state, such as working or input-required
        #[arg(long, value_name = "STATE", value_parser = talk::parse_state)]
        status: Option<rialto_a2a::v1::TaskState>,
        /// At most this many
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Cancel a task
    Cancel {
        /// The task
        id: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Print what becomes of a task, until it ends
    Watch {
        /// The task
        id: String,
        /// Go on after this event instead of beginning with the whole task
        #[arg(long, value_name = "NUMBER")]
        after: Option<u64>,
        #[command(flatten)]
        server: ServerArgs,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Print everything that is wrong with a configuration
    Check {
        /// The file (YAML or TOML)
        file: PathBuf,
    },
    /// Print what results from a file and the environment, without secrets
    Print {
        /// The file (YAML or TOML); without it: the built-in configuration
        file: Option<PathBuf>,
    },
}

/// A URL of a server.
pub(crate) fn web_url(text: &str) -> Result<Url, String> {
    match Url::parse(text) {
        Ok(url) if matches!(url.scheme(), "http" | "https") => Ok(url),
        _ => Err("must be a URL such as http://127.0.0.1:8080".to_owned()),
    }
}

/// A name for a message, as servers take it.
fn idempotency_key(text: &str) -> Result<String, &'static str> {
    match rialto_gateway::is_idempotency_key(text) {
        true => Ok(text.to_owned()),
        false => Err("must be 1 to 256 visible ASCII characters"),
    }
}

/// A length of time that is more than none.
pub(crate) fn positive_span(text: &str) -> Result<Duration, String> {
    match text.parse::<Span>()?.0 {
        Duration::ZERO => Err("must be longer than 0".to_owned()),
        span => Ok(span),
    }
}

/// Does what the command line says.
pub(crate) fn run() -> ExitCode {
    // Another provider somewhere in the graph would make TLS panic; this one is installed before anything asks.
    // A second call in one process finds its own work done.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let command = Cli::parse().command;
    let serves = matches!(command, Command::Dev(_) | Command::Serve(_));
    // Servers start their telemetry when they know their configuration.
    match serves {
        true => output::log_problems(telemetry::Format::from_env()),
        false => telemetry::init(telemetry::Format::from_env(), "warn"),
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(2, &format!("cannot start threads: {error}")),
    };
    let code = match command {
        Command::Config(ConfigCommand::Check { file }) => config::check(file),
        Command::Config(ConfigCommand::Print { file }) => config::print(file),
        Command::Dev(args) => runtime.block_on(dev::run(args)),
        Command::Serve(args) => runtime.block_on(serve::serve(args)),
        Command::Call(args) => runtime.block_on(talk::call(args)),
        Command::Stream(args) => runtime.block_on(talk::stream(args)),
        Command::Card(args) => runtime.block_on(talk::card(args)),
        Command::Task(command) => runtime.block_on(talk::task(command)),
        Command::Admin(args) => runtime.block_on(admin::run(args)),
        Command::Bench(bench) => match runtime.block_on(bench.run()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(1, &format!("{error:#}")),
        },
    };
    if serves {
        // Ends every task, whatever it was at, and with it what it held: the processes of agents are killed here.
        runtime.shutdown_timeout(LAST_DROPS);
    } else {
        // Blocking reads of stdin cannot be ended; they must not hold the process.
        runtime.shutdown_background();
    }
    code
}

/// Ends a command with one line of explanation.
pub(crate) fn fail(code: u8, problem: &str) -> ExitCode {
    output::error(problem);
    ExitCode::from(code)
}
