use std::{
    fmt, io,
    process::{ExitStatus, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt as _;
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    process::{Child, ChildStderr, ChildStdin, ChildStdout},
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tracing::{info, warn};

use super::{
    MAX_LINE, Options,
    lines::{Lines, Piece},
};

/// What a process gets of the runner's environment.
const INHERITED: [&str; 4] = ["PATH", "HOME", "LANG", "TZ"];
/// Lines that may wait until the process reads them.
const WAITING_LINES: usize = 4;
/// The longest line of stderr that goes into the log in one piece.
const MAX_LOG_LINE: usize = 4 << 10;
/// What a process wrote before it ended is there by then.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Lines of stderr per second that go into the log.
const MAX_LOG_RATE: u32 = 50;
/// Late lines that an idle process is forgiven.
pub(super) const MAX_LATE_LINES: usize = 1_000;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    Success,
    /// A status other than 0, or a signal.
    Failure(String),
}

/// What a process does next.
#[derive(Debug)]
pub(super) enum Next {
    Line(Piece),
    Gone(Exit),
}

/// A running agent process in a group of its own, which is killed as a whole when this is dropped: with the task that
/// holds it, so at the latest with the runtime.
pub(super) struct Process {
    /// Different for each process of this runner.
    pub id: u64,
    /// Turns that it was given.
    pub turns: u64,
    child: Child,
    /// `None` once the process is reaped: the number may be another's then.
    group: Option<Pid>,
    /// Lines to its stdin; `None` once closed.
    input: Option<mpsc::Sender<Bytes>>,
    output: Lines<BufReader<ChildStdout>>,
    /// When its stdout ended.
    closed: Option<Instant>,
    /// How and when the process ended.
    exit: Option<(Exit, Instant)>,
    grace: Duration,
    /// Ends the helper tasks, should something outside the group hold the pipes.
    _helpers: DropGuard,
}

impl Process {
    pub(super) fn spawn(options: &Options, tasks: &TaskTracker) -> io::Result<Self> {
        let mut command = tokio::process::Command::new(&options.command[0]);
        command
            .args(&options.command[1..])
            .env_clear()
            .envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .envs(&options.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        if let Some(cwd) = &options.cwd {
            command.current_dir(cwd);
        }
        let mut child = command.spawn()?;
        let pid = child.id().expect("a child that was not waited for has an id");
        let stdin = child.stdin.take().expect("piped above");
        let stdout = child.stdout.take().expect("piped above");
        let stderr = child.stderr.take().expect("piped above");

        let helpers = CancellationToken::new();
        let (input, lines) = mpsc::channel(WAITING_LINES);
        tasks.spawn(helpers.clone().run_until_cancelled_owned(write(stdin, lines)));
        tasks.spawn(helpers.clone().run_until_cancelled_owned(log(stderr, options.agent.clone(), pid)));

        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            turns: 0,
            child,
            group: i32::try_from(pid).ok().map(Pid::from_raw),
            input: Some(input),
            output: Lines::new(BufReader::with_capacity(16 << 10, stdout), MAX_LINE),
            closed: None,
            exit: None,
            grace: options.kill_grace,
            _helpers: helpers.drop_guard(),
        })
    }

    /// Queues a line for its stdin; false when it does not read, or is gone.
    pub(super) fn say(&self, line: impl Into<Bytes>) -> bool {
        self.input.as_ref().is_some_and(|input| input.try_send(line.into()).is_ok())
    }

    /// What it says next, or how it ended. An end without a status (it closed its stdout and stays) counts as
    /// success, after it was killed. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Next> {
        loop {
            let limit = match (&self.exit, self.closed) {
                (Some((exit, _)), Some(_)) => return Ok(Next::Gone(exit.clone())),
                (Some((_, at)), None) => Some(*at + LAST_WORDS),
                (None, Some(at)) => Some(at + self.grace),
                (None, None) => None,
            };
            tokio::select! {
                biased;
                piece = self.output.next(), if self.closed.is_none() => match piece? {
                    Some(piece) => return Ok(Next::Line(piece)),
                    None => {
                        self.input = None;
                        self.closed = Some(Instant::now());
                    }
                },
                status = self.child.wait(), if self.exit.is_none() => self.ended(status.map(describe)),
                () = until(limit) => {
                    // Either somebody outside its group holds the pipe, or it stays without a word.
                    self.closed = Some(Instant::now());
                    if self.exit.is_none() {
                        self.kill();
                        self.child.wait().await?;
                        self.ended(Ok(Exit::Success));
                    }
                }
            }
        }
    }

    /// Closes its stdin and waits for its end, but not for long: then it is killed. What it writes meanwhile is
    /// thrown away.
    pub(super) async fn leave(mut self) {
        self.input = None;
        let grace = self.grace;
        let over = async { while let Ok(Next::Line(_)) = self.next().await {} };
        timeout(grace, over).await.ok();
    }

    fn ended(&mut self, exit: io::Result<Exit>) {
        // What is left of its group goes with it; afterwards the number may be another's.
        self.kill();
        self.group = None;
        let exit = exit.unwrap_or_else(|error| Exit::Failure(error.to_string()));
        self.exit = Some((exit, Instant::now()));
    }

    pub(super) fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // Gone already is as good.
            killpg(group, signal).ok();
        }
    }

    /// Whether it lives and has nothing more to say; late lines of its last turn are thrown away.
    pub(super) fn is_fresh(&mut self) -> bool {
        for _ in 0..MAX_LATE_LINES {
            match self.output.next().now_or_never() {
                None => return matches!(self.child.try_wait(), Ok(None)),
                Some(Ok(Some(_))) => {}
                Some(Ok(None) | Err(_)) => return false,
            }
        }
        false
    }

    fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("id", &self.id).field("pid", &self.group).finish_non_exhaustive()
    }
}

fn describe(status: ExitStatus) -> Exit {
    if status.success() { Exit::Success } else { Exit::Failure(status.to_string()) }
}

/// Waits for a time that may not come.
pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Writes lines until the sender is dropped, then closes the pipe.
async fn write(mut stdin: ChildStdin, mut lines: mpsc::Receiver<Bytes>) {
    while let Some(line) = lines.recv().await {
        // An agent that does not read is found out by what it writes, or does not.
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

/// Copies stderr into the log: bounded lines, a bounded rate.
async fn log(stderr: ChildStderr, agent: String, pid: u32) {
    let mut lines = Lines::new(BufReader::new(stderr), MAX_LOG_LINE);
    let mut window = Instant::now();
    let (mut logged, mut dropped) = (0, 0_u64);
    while let Ok(Some(piece)) = lines.next().await {
        if window.elapsed() >= Duration::from_secs(1) {
            if dropped > 0 {
                warn!(agent, pid, dropped, "the agent writes more to stderr than is logged");
            }
            (window, logged, dropped) = (Instant::now(), 0, 0);
        }
        if logged < MAX_LOG_RATE {
            logged += 1;
            info!(target: "agent", agent, pid, "{}", String::from_utf8_lossy(&piece.bytes).escape_debug());
        } else {
            dropped += 1;
        }
    }
}
