//! An agent that does what the message says, for tests: JSON lines on stdin and stdout (`docs/agents.md`), in
//! both modes of the `command` backend.
//!
//! | message | what happens |
//! |---|---|
//! | `echo T` | answers T; so does any other text |
//! | `sleep:S` | waits S seconds (`0.2` is fine), then echoes |
//! | `silent:S` | says nothing for S seconds, then is done |
//! | `ask` | asks; the next message of the task is echoed |
//! | `auth` | needs authorization; goes on once granted, or with the next message |
//! | `chunks:NxM` | artifact `chunks` in N numbered pieces, M ms apart |
//! | `text:NxM` | N pieces of answer text, M ms apart |
//! | `status:NxM` | N status messages, M ms apart |
//! | `artifact3` | artifact `a1`: created, extended with metadata, replaced |
//! | `unknownappend` | extends an artifact that was never created |
//! | `bytes:N` | artifact `bytes` of N bytes |
//! | `data` | artifact `data` with the data parts of the message |
//! | `message T` | the plain reply T |
//! | `usage` | reports usage and metadata, then echoes |
//! | `remember: X`, `what did I say?` | remembers within the context |
//! | `fail`, `reject` | ends as failed, rejected |
//! | `noend` | ends normally without an end |
//! | `panic`, `exit` | ends with a status other than 0, aborts |
//! | `hang` | never ends, ignores cancel and SIGTERM |
//! | `killrunner[:N]` | kills its parent in the first N attempts (1), then echoes |
//! | `count:KEY[:N]` | N counts (1), one per tick, the first at once |
//! | `journal:N[:KEY]` | N steps, each counted once under KEY (`journal`), then written to the journal |
//! | `work:KEY:NxM` | N steps, M ms apart: counted under KEY, a piece of the artifact `work`, written to the journal |
//!
//! A count is a line `{"attempt", "key", "n", "at"}` appended to the file `$SCRIPTED_COUNTERS/KEY`; `key` is the
//! idempotency key. `$SCRIPTED_TICK_MS` (1000) is the time between counts, `$SCRIPTED_DELAY_MS` (0) a pause before
//! each turn.
#![expect(clippy::disallowed_methods, reason = "a process of its own, without a runtime or a clock to pause")]

use std::{
    fs::OpenOptions,
    io::{BufRead as _, Write as _},
    path::Path,
    process::{abort, exit},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    time::{Duration, Instant, SystemTime},
};

use nix::{
    sys::signal::{SigSet, Signal, kill},
    unistd::getppid,
};
use serde_json::{Value, json};

/// Pieces that `bytes` is made of.
const PIECE: usize = 1 << 20;
const NEEDS_AUTH: &str = "authorization needed";

/// The work is not wanted any more.
struct Canceled;

fn main() {
    // The cancel line is what stops this agent. Blocked before the first thread starts, so in all of them.
    let mut term = SigSet::empty();
    term.add(Signal::SIGTERM);
    term.thread_block().expect("SIGTERM can be blocked");

    let (sender, input) = sync_channel(16);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let line = line.expect("stdin can be read");
            let line: Value = serde_json::from_str(&line).expect("the runner writes JSON");
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    while let Ok(line) = input.recv() {
        if line["type"] != "turn" {
            continue;
        }
        let turn = Turn { line, input: &input };
        if turn.run().is_err() {
            say(&json!({"type": "failed", "reason": "canceled"}));
        }
    }
}

struct Turn<'a> {
    line: Value,
    input: &'a Receiver<Value>,
}

impl Turn<'_> {
    fn run(&self) -> Result<(), Canceled> {
        self.wait(millis("SCRIPTED_DELAY_MS", 0))?;
        let text = text_of(&self.line["message"]);
        let end = self.obey(&text)?;
        say(&end);
        Ok(())
    }

    /// Does what the text says; returns the final event.
    fn obey(&self, text: &str) -> Result<Value, Canceled> {
        let end = || json!({"type": "end"});
        let echo = |text: &str| {
            say(&json!({"type": "text", "text": text}));
            end()
        };
        if self.answers("ask") || self.answers("auth") {
            return Ok(echo(text));
        }
        if let Some(rest) = text.strip_prefix("echo ") {
            return Ok(echo(rest));
        }
        if let Some(rest) = text.strip_prefix("message ") {
            return Ok(json!({"type": "message", "text": rest}));
        }
        if text.starts_with("remember: ") {
            return Ok(echo("remembered"));
        }
        let (command, argument) = text.split_once(':').unwrap_or((text, ""));
        match command {
            "sleep" => {
                self.wait(seconds(argument))?;
                return Ok(echo(text));
            }
            "silent" => self.wait(seconds(argument))?,
            "ask" => return Ok(json!({"type": "input-required", "text": "what do you want?"})),
            "auth" if !self.is_granted() => {
                say(&json!({"type": "journal", "data": {"asked": true}}));
                return Ok(json!({"type": "auth-required", "text": NEEDS_AUTH}));
            }
            "auth" => return Ok(echo("authorized")),
            "chunks" => self.repeat(argument, 1, |n, last| {
                say(&json!({"type": "artifact", "artifactId": "chunks", "parts": [{"text": format!("{n}\n")}],
                            "append": n > 1, "lastChunk": last}));
            })?,
            "text" => self.repeat(argument, 1, |n, _| say(&json!({"type": "text", "text": format!("{n}\n")})))?,
            "status" => {
                self.repeat(argument, 1, |n, _| say(&json!({"type": "status", "text": format!("status {n}")})))?;
            }
            "artifact3" => {
                say(&json!({"type": "artifact", "artifactId": "a1", "parts": [{"text": "Hello"}]}));
                say(&json!({"type": "artifact", "artifactId": "a1", "parts": [{"text": " world"}],
                            "metadata": {"k": 2}, "append": true}));
                say(&json!({"type": "artifact", "artifactId": "a1", "parts": [{"text": "new"}]}));
            }
            "unknownappend" => {
                say(&json!({"type": "artifact", "artifactId": "never-made", "text": "x", "append": true}));
            }
            "bytes" => {
                let all: usize = argument.parse().expect("bytes:N");
                for from in (0..all).step_by(PIECE) {
                    let text = "x".repeat(PIECE.min(all - from));
                    say(&json!({"type": "artifact", "artifactId": "bytes", "text": text,
                                "append": from > 0, "lastChunk": from + PIECE >= all}));
                }
            }
            "data" => {
                let parts = self.line["message"]["parts"].as_array().expect("parts");
                let data: Vec<_> = parts.iter().filter(|part| part.get("data").is_some()).collect();
                say(&json!({"type": "artifact", "artifactId": "data", "parts": data}));
            }
            "usage" => {
                say(&json!({"type": "usage", "data": {"inputTokens": 3, "outputTokens": 5}}));
                say(&json!({"type": "metadata", "data": {"model": "scripted"}}));
                return Ok(echo(text));
            }
            "what did I say?" => return Ok(echo(&self.remembered())),
            "fail" => return Ok(json!({"type": "failed", "reason": "failed on request"})),
            "reject" => return Ok(json!({"type": "rejected", "reason": "rejected on request"})),
            "noend" => exit(0),
            "panic" => panic!("on request"),
            "exit" => abort(),
            "hang" => loop {
                // Only the end of stdin counts: the runner is gone.
                drop(self.wait(Duration::from_secs(3600)));
            },
            "killrunner" if self.attempt() <= argument.parse().unwrap_or(1) => {
                kill(getppid(), Signal::SIGKILL).expect("the parent can be killed");
                exit(0);
            }
            "count" => {
                let (key, counts) = argument.split_once(':').unwrap_or((argument, "1"));
                let counts: u64 = counts.parse().expect("count:KEY:N");
                for n in 1..=counts {
                    if n > 1 {
                        self.wait(millis("SCRIPTED_TICK_MS", 1000))?;
                    }
                    self.count(key, n);
                }
                return Ok(echo(text));
            }
            "journal" => {
                let (steps, key) = argument.split_once(':').unwrap_or((argument, "journal"));
                let steps: u64 = steps.parse().expect("journal:N");
                let done = self.line["journal"].as_array().map_or(0, Vec::len) as u64;
                for n in done + 1..=steps {
                    self.count(key, n);
                    say(&json!({"type": "journal", "data": {"step": n}}));
                    self.wait(millis("SCRIPTED_TICK_MS", 1000))?;
                }
                return Ok(echo(&format!("{steps} steps, {done} of them earlier")));
            }
            "work" => {
                let (key, steps) = argument.split_once(':').expect("work:KEY:NxM");
                let done = self.line["journal"].as_array().map_or(0, Vec::len) as u64;
                // A later attempt writes the artifact anew, and works only on what no earlier one has journaled.
                self.repeat(steps, done + 1, |n, last| {
                    if n > done {
                        self.count(key, n);
                    }
                    say(&json!({"type": "artifact", "artifactId": "work", "parts": [{"text": format!("{n}\n")}],
                                "append": n > 1, "lastChunk": last}));
                    if n > done {
                        say(&json!({"type": "journal", "data": {"step": n}}));
                    }
                })?;
            }
            _ => return Ok(echo(text)),
        }
        Ok(end())
    }

    /// Waits, unless canceled. Exits when the runner is gone.
    fn wait(&self, time: Duration) -> Result<(), Canceled> {
        let end = Instant::now() + time;
        loop {
            match self.input.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) if line["type"] == "cancel" => return Err(Canceled),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => exit(0),
            }
        }
    }

    /// `NxM`: does a thing N times, M ms apart; those before `first` at once.
    fn repeat(&self, argument: &str, first: u64, thing: impl Fn(u64, bool)) -> Result<(), Canceled> {
        let (times, apart) = argument.split_once('x').expect("NxM");
        let times: u64 = times.parse().expect("NxM");
        let apart = Duration::from_millis(apart.parse().expect("NxM"));
        for n in 1..=times {
            if n > first && !apart.is_zero() {
                self.wait(apart)?;
            }
            thing(n, n == times);
        }
        Ok(())
    }

    fn attempt(&self) -> u64 {
        self.line["attempt"].as_u64().expect("an attempt")
    }

    /// Whether this message answers an earlier one of the task.
    fn answers(&self, question: &str) -> bool {
        let history = self.line["history"].as_array();
        let earlier = history.and_then(|history| history.iter().rfind(|message| message["role"] == "ROLE_USER"));
        earlier.is_some_and(|message| text_of(message) == question)
    }

    fn is_granted(&self) -> bool {
        let journal = self.line["journal"].as_array().is_some_and(|journal| !journal.is_empty());
        let history = self.line["history"].as_array();
        journal || history.is_some_and(|history| history.iter().any(|message| text_of(message) == NEEDS_AUTH))
    }

    fn remembered(&self) -> String {
        let conversation = self.line["conversation"].as_array().cloned().unwrap_or_default();
        let said = conversation.iter().filter(|message| message["role"] == "ROLE_USER").map(text_of);
        let last = said.filter_map(|text| Some(text.strip_prefix("remember: ")?.to_owned())).next_back();
        last.unwrap_or_else(|| "nothing".to_owned())
    }

    fn count(&self, key: &str, n: u64) {
        assert!(key.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)), "the key is a file name");
        let folder = std::env::var("SCRIPTED_COUNTERS").expect("SCRIPTED_COUNTERS is set");
        let at = SystemTime::UNIX_EPOCH.elapsed().expect("a clock after 1970").as_millis();
        let line = json!({"attempt": self.attempt(), "key": self.line["idempotencyKey"], "n": n, "at": u64::try_from(at).expect("a date")});
        let mut file =
            OpenOptions::new().create(true).append(true).open(Path::new(&folder).join(key)).expect("counter");
        file.write_all(format!("{line}\n").as_bytes()).expect("a count can be written");
    }
}

/// The text parts of a message, joined.
fn text_of(message: &Value) -> String {
    let parts = message["parts"].as_array().into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
}

fn seconds(text: &str) -> Duration {
    Duration::from_secs_f64(text.parse().expect("seconds"))
}

fn millis(variable: &str, default: u64) -> Duration {
    let value = std::env::var(variable).ok().map(|value| value.parse().expect("milliseconds"));
    Duration::from_millis(value.unwrap_or(default))
}

/// Writes a line, at once.
fn say(event: &Value) {
    let mut line = event.to_string();
    line.push('\n');
    let mut stdout = std::io::stdout().lock();
    // A runner that does not read any more has lost interest.
    if stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).is_err() {
        exit(0);
    }
}
