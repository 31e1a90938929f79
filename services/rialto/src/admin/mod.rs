//! `rialto admin`: what waits, what was given up, what does not move, who works; and the API behind it.

mod api;
mod client;
mod show;

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{
    Args, Subcommand,
    builder::{NonEmptyStringValueParser, TypedValueParser},
    value_parser,
};
use rialto_rpc::tasks::{
    DeadEntry, DropDeadReply, ListDeadReply, ListStuckReply, QueuesReply, ReplayDeadReply, RunnersReply, TaskFacts,
};
use rialto_runtime::{supervise::Signals, units::Span};
use rialto_task_store::MAX_PAGE;
use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use url::Url;

pub(crate) use self::api::{Api, Problem, agents};
use self::{
    api::{Granted, dead_id, task_id},
    client::{Client, Failure, read_token},
};
use crate::{
    cli::{fail, positive_span, web_url},
    config::load_or_complain,
    output, serve,
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  there is no such task or entry, or it cannot be done to it
  2  the command line is wrong, or the admin port does not answer or refuses the token";

/// `rialto admin`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct AdminArgs {
    #[command(subcommand)]
    command: AdminCommand,
    #[command(flatten)]
    port: PortArgs,
}

/// Which admin port, and how answers are printed.
#[derive(Debug, Args)]
struct PortArgs {
    /// The admin port of any process [default: that of --config, or http://127.0.0.1:8081]
    #[arg(long, global = true, env = "RIALTO_ADMIN_URL", value_name = "URL", value_parser = web_url)]
    admin_url: Option<Url>,
    /// The file with its token [default: the token of --config]
    #[arg(long, global = true, env = "RIALTO_ADMIN_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Take address and token from this configuration (YAML or TOML)
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON; the default when stdout is not a terminal
    #[arg(long, global = true)]
    json: bool,
    /// Print for people; the default on a terminal
    #[arg(long, global = true, conflicts_with = "json")]
    text: bool,
}

#[derive(Debug, Subcommand)]
enum AdminCommand {
    /// Print how long the queue of each agent is
    Queues {
        /// Print it again and again, until Ctrl-C
        #[arg(long)]
        watch: bool,
        /// Between two prints of --watch
        #[arg(long, value_name = "TIME", default_value = "2s", requires = "watch", value_parser = positive_span)]
        every: Duration,
    },
    /// Print who takes turns, or did within the last hour
    Runners,
    /// Work with entries that were given up
    #[command(subcommand)]
    Dead(DeadCommand),
    /// Look at tasks, whoever owns them
    #[command(subcommand)]
    Tasks(TasksCommand),
    /// Give a task what it waits for, so that its turn goes on after AUTH_REQUIRED
    Grant {
        /// The task
        #[arg(value_parser = task_id)]
        task: String,
        /// A JSON object for the agent alone
        #[arg(long, value_name = "JSON", value_parser = object)]
        metadata: Option<serde_json::Map<String, serde_json::Value>>,
    },
}

#[derive(Debug, Subcommand)]
enum DeadCommand {
    /// Print entries that were given up, the oldest first
    List {
        /// Only of this agent
        #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
        agent: Option<String>,
        /// At most this many
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = limit())]
        limit: u32,
        /// Go on after a list that was not complete
        #[arg(long, value_name = "PLACE", value_parser = NonEmptyStringValueParser::new())]
        after: Option<String>,
    },
    /// Print everything about one
    Show {
        /// The entry
        #[arg(value_parser = dead_id)]
        id: String,
    },
    /// Run the messages of some again
    Replay {
        /// The entries
        #[arg(required = true, value_name = "ID", value_parser = dead_id)]
        ids: Vec<String>,
    },
    /// Remove some, or all
    Drop {
        /// The entries
        #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "ID", value_parser = dead_id)]
        ids: Vec<String>,
        /// All that there are by now
        #[arg(long)]
        all: bool,
        /// Only of this agent
        #[arg(long, value_name = "ID", requires = "all", value_parser = NonEmptyStringValueParser::new())]
        agent: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
enum TasksCommand {
    /// Print turns without a sign of life and tasks that wait for somebody, and what they wait for
    Stuck {
        /// For at least this long
        #[arg(long, value_name = "TIME", default_value = "1m")]
        older: Span,
        /// Only of this agent
        #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
        agent: Option<String>,
        /// Turns that a living runner works at as well
        #[arg(long)]
        all: bool,
        /// At most this many
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = limit())]
        limit: u32,
        /// Go on after a list that was not complete
        #[arg(long, value_name = "PLACE", value_parser = NonEmptyStringValueParser::new())]
        after: Option<String>,
    },
    /// Print everything that is known about a task
    Show {
        /// The task
        #[arg(value_parser = task_id)]
        id: String,
        /// What its messages and artifacts say as well
        #[arg(long)]
        content: bool,
    },
}

/// Lengths of lists: those that the API has, too.
fn limit() -> impl TypedValueParser<Value = u32> {
    value_parser!(u32).range(1..=i64::from(MAX_PAGE))
}

fn object(text: &str) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("must be a JSON object: {error}"))
}

/// Why a command ended early.
enum Stop {
    Failed(Failure),
    Output(io::Error),
    /// What went wrong is said already.
    Said(ExitCode),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

pub(crate) async fn run(args: AdminArgs) -> ExitCode {
    let json = args.port.json || (!args.port.text && !io::stdout().is_terminal());
    let done = async {
        let client = connect(args.port)?;
        Session { client, json }.run(args.command).await
    };
    match done.await {
        Ok(code) | Err(Stop::Said(code)) => code,
        Err(Stop::Failed(Failure::Refused(problem))) => fail(1, &output::harmless(&problem)),
        Err(Stop::Failed(Failure::Usage(problem) | Failure::Unusable(problem))) => fail(2, &output::harmless(&problem)),
        // Whoever read it has seen enough.
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Stop::Output(error)) => fail(2, &format!("cannot write to stdout: {error}")),
    }
}

/// Finds the admin port, and the token that it asks for.
fn connect(port: PortArgs) -> Result<Client, Stop> {
    let (mut url, mut token) = (port.admin_url, None);
    if let Some(file) = port.config {
        let config = load_or_complain(Some(file), Vec::new()).map_err(Stop::Said)?;
        if url.is_none() {
            let address = config.admin_listen.parse().map_err(|_| {
                Failure::Unusable(format!(
                    "admin-listen: {} is no address and port; use --admin-url",
                    config.admin_listen
                ))
            })?;
            url = Url::parse(&serve::url(address)).ok();
        }
        token = config.admin_token;
    }
    if let Some(file) = port.token_file {
        token = Some(read_token(&file)?);
    }
    let url = url.or_else(|| Url::parse("http://127.0.0.1:8081").ok());
    let url = url.ok_or_else(|| Failure::Unusable("there is no admin port to ask; use --admin-url".to_owned()))?;
    Ok(Client::new(url, token)?)
}

/// One command.
struct Session {
    client: Client,
    json: bool,
}

impl Session {
    async fn run(&self, command: AdminCommand) -> Result<ExitCode, Stop> {
        match command {
            AdminCommand::Queues { watch: false, .. } => {
                self.queues(false).await?;
                Ok(ExitCode::SUCCESS)
            }
            AdminCommand::Queues { watch: true, every } => self.watch(every).await,
            AdminCommand::Runners => {
                let reply: RunnersReply = self.client.get(&["runners"], &[]).await?;
                self.print(&reply, || match reply.runners.as_slice() {
                    [] => "no runners\n".to_owned(),
                    runners => show::runners(runners),
                })
            }
            AdminCommand::Dead(command) => self.dead(command).await,
            AdminCommand::Tasks(command) => self.tasks(command).await,
            AdminCommand::Grant { task, metadata } => {
                let body = metadata.map(|metadata| json!({"metadata": metadata}).to_string());
                let granted: Granted = self.client.post(&["tasks", &task, "grant"], body).await?;
                self.print(&granted, || format!("task {} goes on\n", granted.task_id))
            }
        }
    }

    /// Prints an answer as it is, or as people read it.
    fn print<T: Serialize>(&self, answer: &T, text: impl FnOnce() -> String) -> Result<ExitCode, Stop> {
        match self.json {
            true => output::line(&serde_json::to_string(answer).map_err(io::Error::other)?)?,
            false => output::text(&text())?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Prints the queues, on a screen of their own or after what was printed before.
    async fn queues(&self, screen: bool) -> Result<ExitCode, Stop> {
        let reply: QueuesReply = self.client.get(&["queues"], &[]).await?;
        if screen {
            // Home, and everything after it goes.
            output::text("\u{1b}[H\u{1b}[J")?;
        }
        self.print(&reply, || show::queues(&reply.queues))
    }

    /// Prints the queues until somebody has seen enough. A port that is away for a while does not end this.
    async fn watch(&self, every: Duration) -> Result<ExitCode, Stop> {
        let signals =
            Signals::new().map_err(|error| Failure::Unusable(format!("cannot watch for signals: {error}")))?;
        let screen = !self.json && io::stdout().is_terminal();
        let printing = async {
            for round in 0_u64.. {
                if round > 0 {
                    sleep(every).await;
                }
                match self.queues(screen).await {
                    Err(Stop::Failed(Failure::Unusable(problem))) if round > 0 => {
                        output::complain(&output::harmless(&problem));
                    }
                    other => drop(other?),
                }
                if !screen && !self.json {
                    output::line("")?;
                }
            }
            Ok(ExitCode::SUCCESS)
        };
        let stop = CancellationToken::new();
        tokio::select! {
            ended = printing => ended,
            () = stop.cancelled() => Ok(ExitCode::SUCCESS),
            code = signals.watch(stop.clone()) => Ok(ExitCode::from(code)),
        }
    }

    async fn dead(&self, command: DeadCommand) -> Result<ExitCode, Stop> {
        match command {
            DeadCommand::List { agent, limit, after } => {
                let limit = limit as usize;
                let mut all = ListDeadReply { next: after.unwrap_or_default(), ..ListDeadReply::default() };
                loop {
                    let query = page(limit - all.entries.len(), &all.next, agent.as_deref());
                    let reply: ListDeadReply = self.client.get(&["dead"], &query).await?;
                    all.entries.extend(reply.entries);
                    all.next = reply.next;
                    if all.next.is_empty() || all.entries.len() >= limit {
                        break;
                    }
                }
                self.print(&all, || match all.entries.as_slice() {
                    [] => none("dead entries", agent.as_deref()),
                    entries => show::dead_list(entries),
                })?;
                self.more(&all.next)
            }
            DeadCommand::Show { id } => {
                let entry: DeadEntry = self.client.get(&["dead", &id], &[]).await?;
                self.print(&entry, || show::dead(&entry))
            }
            DeadCommand::Replay { ids } => {
                self.each(ids, async |id| {
                    let reply: ReplayDeadReply = self.client.post(&["dead", id, "replay"], None).await?;
                    let what = match (reply.replay.as_str(), reply.repeated) {
                        ("new-task", false) => "sent again as the new task",
                        ("new-task", true) => "was sent again before, as the task",
                        _ => "queued again, the turn of task",
                    };
                    self.print(&reply, || format!("{id}: {what} {}\n", reply.task_id))
                })
                .await
            }
            DeadCommand::Drop { ids, all: false, .. } => {
                self.each(ids, async |id| {
                    let reply: DropDeadReply = self.client.delete(&["dead", id], &[]).await?;
                    self.print(&reply, || format!("{id}: dropped\n"))
                })
                .await
            }
            DeadCommand::Drop { agent, .. } => {
                let mut whole = DropDeadReply::default();
                loop {
                    let mut query = vec![("until", whole.until_at_ms.to_string())];
                    query.extend(agent.clone().map(|agent| ("agent", agent)));
                    let reply: DropDeadReply = self.client.delete(&["dead"], &query).await?;
                    whole.dropped += reply.dropped;
                    whole.until_at_ms = reply.until_at_ms;
                    if !reply.more {
                        break;
                    }
                }
                self.print(&whole, || match whole.dropped {
                    0 => none("dead entries", agent.as_deref()),
                    1 => "dropped 1 entry\n".to_owned(),
                    dropped => format!("dropped {dropped} entries\n"),
                })
            }
        }
    }

    /// Does something to each of some entries; what cannot be done to one does not keep the others.
    async fn each(
        &self,
        ids: Vec<String>,
        act: impl AsyncFn(&str) -> Result<ExitCode, Stop>,
    ) -> Result<ExitCode, Stop> {
        let mut code = ExitCode::SUCCESS;
        for id in &ids {
            match act(id).await {
                Err(Stop::Failed(Failure::Refused(problem))) => code = fail(1, &output::harmless(&problem)),
                other => drop(other?),
            }
        }
        Ok(code)
    }

    async fn tasks(&self, command: TasksCommand) -> Result<ExitCode, Stop> {
        match command {
            TasksCommand::Stuck { older, agent, all, limit, after } => {
                let limit = limit as usize;
                let mut whole = ListStuckReply { next: after.unwrap_or_default(), ..ListStuckReply::default() };
                loop {
                    let mut query = page(limit - whole.tasks.len(), &whole.next, agent.as_deref());
                    query.extend([("older", older.to_string()), ("all", all.to_string())]);
                    let reply: ListStuckReply = self.client.get(&["tasks", "stuck"], &query).await?;
                    whole.tasks.extend(reply.tasks);
                    whole.next = reply.next;
                    if whole.next.is_empty() || whole.tasks.len() >= limit {
                        break;
                    }
                }
                self.print(&whole, || match whole.tasks.as_slice() {
                    [] => none("stuck tasks", agent.as_deref()),
                    _ => show::stuck(&whole),
                })?;
                self.more(&whole.next)
            }
            TasksCommand::Show { id, content } => {
                let query = [("content", content.to_string())];
                let facts: TaskFacts = self.client.get(&["tasks", &id], &query).await?;
                self.print(&facts, || show::facts(&facts))
            }
        }
    }

    /// Says how to go on after a list that was not complete.
    fn more(&self, next: &str) -> Result<ExitCode, Stop> {
        if !self.json && !next.is_empty() {
            output::complain(&format!("there are more: go on with --after {}", output::harmless(next)));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// How an empty list is said: a mistyped agent is to be seen.
fn none(what: &str, agent: Option<&str>) -> String {
    match agent {
        Some(agent) => format!("no {what} of agent {}\n", output::harmless(agent)),
        None => format!("no {what}\n"),
    }
}

/// The query for the next page of a list.
fn page(left: usize, after: &str, agent: Option<&str>) -> Vec<(&'static str, String)> {
    let mut query = vec![("limit", left.to_string())];
    if !after.is_empty() {
        query.push(("after", after.to_owned()));
    }
    query.extend(agent.map(|agent| ("agent", agent.to_owned())));
    query
}
