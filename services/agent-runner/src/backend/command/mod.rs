//! Agents that are processes: JSON lines on stdin and stdout, as `docs/agents.md` describes.

mod lines;
mod pool;
mod process;
mod protocol;

use std::{collections::BTreeMap, io::ErrorKind, path::PathBuf, sync::Arc, time::Duration};

use anyhow::ensure;
use futures::future::join_all;
use nix::sys::signal::Signal;
use rialto_a2a::wkt::Struct;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, warn};

use self::{
    lines::Piece,
    pool::{Idle, Pool},
    process::{Exit, MAX_LATE_LINES, Next, Process, until},
    protocol::Said,
};
use super::{Backend, Crash, End, Events, Grant, Turn};

/// The longest line that an agent may write: below what a task may hold.
const MAX_LINE: usize = 12 << 20;
/// Between the cancel line and SIGTERM, for agents with one process per turn.
const TERM_DELAY: Duration = Duration::from_secs(1);
/// Grants of one agent that may wait for the runner, and of one turn that may be under way.
const WAITING_GRANTS: usize = 16;
/// At the stop of the runner, an idle process sees the end of its stdin, and has this long to leave.
const FAREWELL: Duration = Duration::from_secs(1);

/// How an agent's processes are run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The agent's id, for the log.
    pub agent: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Working folder; the runner's own if not set.
    pub cwd: Option<PathBuf>,
    /// Variables besides PATH, HOME, LANG and TZ; nothing else of the runner's environment is passed on.
    pub env: BTreeMap<String, String>,
    /// Processes take many turns, one at a time.
    pub persistent: bool,
    /// A process that does not end by itself is killed after this.
    pub kill_grace: Duration,
    /// Turns at a time.
    pub slots: usize,
}

/// The backend.
#[derive(Debug)]
pub struct Command {
    options: Options,
    pool: Pool,
    /// Processes that may live at a time: those of the running turns, and as many that are on their way out.
    alive: Arc<Semaphore>,
    tasks: TaskTracker,
    /// Grants that processes report, from them to the runner.
    grants: mpsc::Sender<Grant>,
    granted: tokio::sync::Mutex<mpsc::Receiver<Grant>>,
    /// Whoever has not left by now is killed.
    cut: CancellationToken,
}

impl Command {
    /// A backend that starts no process before its first turn.
    ///
    /// # Errors
    /// Without a program.
    pub fn new(options: Options) -> anyhow::Result<Self> {
        ensure!(options.command.first().is_some_and(|program| !program.is_empty()), "the command is empty");
        let alive = Arc::new(Semaphore::new(options.slots.saturating_mul(2).clamp(2, Semaphore::MAX_PERMITS)));
        let (grants, granted) = mpsc::channel(WAITING_GRANTS);
        Ok(Self {
            options,
            pool: Pool::default(),
            alive,
            tasks: TaskTracker::new(),
            grants,
            granted: tokio::sync::Mutex::new(granted),
            cut: CancellationToken::new(),
        })
    }

    /// A process for the turn; `None` when there can be none, now or later.
    async fn process(&self, turn: &Turn) -> Result<Option<(Process, OwnedSemaphorePermit)>, Crash> {
        if let Some(kept) = self.pool.take(turn).await {
            return Ok(Some(kept));
        }
        let permit = self.alive.clone().acquire_owned().await.expect("the semaphore is never closed");
        match Process::spawn(&self.options, &self.tasks) {
            Ok(process) => Ok(Some((process, permit))),
            // Trying again would not help: the program is not there, or not a program.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
                let (agent, program) = (&self.options.agent, &self.options.command[0]);
                error!(agent, program, %error, "the agent's program cannot be started");
                Ok(None)
            }
            Err(error) => Err(Crash(format!("{:?} cannot be started: {error}", self.options.command[0]))),
        }
    }

    /// Passes on what the process says, until it says how the turn ends.
    async fn converse(&self, process: &mut Process, turn: &Turn, events: &Events) -> Result<End, Lost> {
        let mut line = 0_u64;
        let (mut canceled, mut stopping) = (false, false);
        let mut terminate: Option<Instant> = None;
        let mut granted = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = turn.cancel.cancelled(), if !canceled => {
                    process.say(protocol::CANCEL);
                    canceled = true;
                    terminate = (!self.options.persistent).then(|| Instant::now() + TERM_DELAY);
                }
                () = turn.stopping.cancelled(), if !stopping => {
                    process.say(protocol::STOPPING);
                    stopping = true;
                }
                next = process.next() => match next {
                    Ok(Next::Line(Piece { bytes, whole: true })) => {
                        line += 1;
                        if bytes.trim_ascii().is_empty() {
                            continue;
                        }
                        match protocol::parse(&bytes) {
                            Ok(Said::Event(event)) => events.send(event).await,
                            Ok(Said::Grant { task_id, metadata }) => {
                                if granted.len() >= WAITING_GRANTS {
                                    join_all(granted.drain(..)).await;
                                }
                                granted.push(grant(&self.grants, task_id, metadata).await);
                            }
                            Ok(Said::End(end)) => {
                                // An attempt that is lost before they are stored makes them again.
                                join_all(granted).await;
                                return Ok(end);
                            }
                            Err(detail) => return Err(self.malformed(line, &detail)),
                        }
                    }
                    Ok(Next::Line(_)) => return Err(self.malformed(line + 1, "the line is too long")),
                    Ok(Next::Gone(exit)) => return Err(Lost::Exit(exit, line)),
                    Err(error) => return Err(Lost::Crash(format!("its output cannot be read: {error}"))),
                },
                () = until(terminate) => {
                    process.signal(Signal::SIGTERM);
                    terminate = None;
                }
            }
        }
    }

    /// Listens to a process that has no turn: nothing but grants counts.
    fn idle(&self, process: Process, permit: OwnedSemaphorePermit) -> Idle {
        let (id, needed) = (process.id, CancellationToken::new());
        let (wanted, grants) = (needed.clone(), self.grants.clone());
        let (agent, cut) = (self.options.agent.clone(), self.cut.clone());
        let listened = async move {
            let mut process = process;
            let mut late = 0;
            loop {
                let next = tokio::select! {
                    biased;
                    next = process.next() => next,
                    () = wanted.cancelled() => return Some((process, permit)),
                };
                let Ok(Next::Line(Piece { bytes, whole })) = next else { return None };
                match protocol::parse(&bytes) {
                    Ok(Said::Grant { task_id, metadata }) if whole => {
                        drop(grant(&grants, task_id, metadata).await);
                    }
                    _ => late += 1,
                }
                if late >= MAX_LATE_LINES {
                    warn!(agent, "a process that has no turn writes and writes, and is killed");
                    return None;
                }
            }
        };
        let process = self.tasks.spawn(async move { cut.run_until_cancelled(listened).await.flatten() });
        Idle { id, needed, process }
    }

    fn malformed(&self, line: u64, detail: &str) -> Lost {
        warn!(agent = self.options.agent, line, detail, "the agent wrote a line that is not an event");
        Lost::Invalid(End::invalid(format_args!("line {line} is not an event")))
    }

    /// Lets a process end by itself, for a while.
    fn reap(&self, process: Process, permit: OwnedSemaphorePermit) {
        let cut = self.cut.clone();
        self.tasks.spawn(async move {
            cut.run_until_cancelled(process.leave()).await;
            drop(permit);
        });
    }
}

/// Reports a grant; what comes back ends once it is stored or refused.
async fn grant(grants: &mpsc::Sender<Grant>, task_id: String, metadata: Struct) -> oneshot::Receiver<()> {
    let (done, over) = oneshot::channel();
    // Whoever listens ends with the runner, and this with it.
    grants.send(Grant { task_id, metadata, done }).await.ok();
    over
}

/// Why a process cannot go on.
#[derive(Debug)]
enum Lost {
    /// It ended, after so many lines.
    Exit(Exit, u64),
    Invalid(End),
    Crash(String),
}

#[async_trait::async_trait]
impl Backend for Command {
    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash> {
        loop {
            let Some((mut process, permit)) = self.process(turn).await? else {
                return Ok(End::Failed("the agent cannot be started".to_owned()));
            };
            let reused = process.turns > 0;
            process.turns += 1;
            if !process.say(protocol::turn_line(turn)) && !reused {
                return Err(Crash("it does not read its input".to_owned()));
            }
            // Whoever drops this future drops the process, and with it, the process is killed.
            return match self.converse(&mut process, turn, events).await {
                Ok(end) => {
                    if self.options.persistent {
                        self.pool.keep(turn, || self.idle(process, permit));
                    } else {
                        self.reap(process, permit);
                    }
                    Ok(end)
                }
                Err(Lost::Invalid(end)) => Ok(end),
                Err(Lost::Crash(reason)) => Err(Crash(reason)),
                // It was about to leave when it got the turn, and has not seen it.
                Err(Lost::Exit(Exit::Success, 0)) if reused => continue,
                Err(Lost::Exit(Exit::Success, _)) => {
                    debug!(agent = self.options.agent, "the agent's process ended without a final event");
                    Ok(End::without_result())
                }
                Err(Lost::Exit(Exit::Failure(status), _)) => Err(Crash(format!("its process ended: {status}"))),
            };
        }
    }

    async fn granted(&self) -> Grant {
        match self.granted.lock().await.recv().await {
            Some(grant) => grant,
            None => std::future::pending().await,
        }
    }

    async fn close(&self) {
        let idle = self.pool.close().into_iter().map(|idle| timeout(FAREWELL, idle.take()));
        for (process, permit) in join_all(idle).await.into_iter().filter_map(|idle| idle.ok().flatten()) {
            self.reap(process, permit);
        }
        self.tasks.close();
        if timeout(FAREWELL, self.tasks.wait()).await.is_err() {
            self.cut.cancel();
            // Killed by now; only a pipe that somebody else holds could still be in the way.
            timeout(FAREWELL, self.tasks.wait()).await.ok();
        }
    }
}
