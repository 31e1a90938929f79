//! What a person or a program sees of a task: text as it arrives, or events as JSON lines.

use std::{
    collections::{HashMap, HashSet},
    io::{self, IsTerminal as _},
};

use rialto_a2a::{
    json,
    v1::{Artifact, Message, Part, Role, StreamResponse, Task, TaskState, part::Content, stream_response::Payload},
};

use crate::output;

/// Shows one call.
#[derive(Debug)]
pub(crate) struct View {
    json: bool,
    /// stdout is a terminal, which obeys escape sequences.
    terminal: bool,
    /// A terminal shows what is going on while there is nothing to print.
    status_line: bool,
    status_shown: bool,
    /// The last character on stdout was not a line end.
    open_line: bool,
    /// Text of artifacts that was printed already; a snapshot repeats it.
    artifacts: HashMap<String, String>,
    messages: HashSet<String>,
    /// The task's id, its context's, and its state.
    task: Option<(String, String, TaskState)>,
    reason: String,
}

impl View {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            terminal: io::stdout().is_terminal(),
            status_line: !json && io::stderr().is_terminal(),
            status_shown: false,
            open_line: false,
            artifacts: HashMap::new(),
            messages: HashSet::new(),
            task: None,
            reason: String::new(),
        }
    }

    /// The state that was seen last; `None` when the answer was a message.
    pub(crate) fn state(&self) -> Option<TaskState> {
        self.task.as_ref().map(|(_, _, state)| *state)
    }

    /// Shows one event.
    pub(crate) fn event(&mut self, event: &StreamResponse) -> io::Result<()> {
        if self.json {
            output::line(&json::to_string(event).map_err(io::Error::other)?)?;
        }
        match &event.payload {
            Some(Payload::Task(task)) => self.task(task),
            Some(Payload::Message(message)) => self.message(message),
            Some(Payload::StatusUpdate(update)) => {
                let status = update.status.as_ref();
                let state = status.map_or(TaskState::Unspecified, rialto_a2a::v1::TaskStatus::state);
                self.status(&update.task_id, &update.context_id, state, status.and_then(|s| s.message.as_ref()))
            }
            Some(Payload::ArtifactUpdate(update)) => match &update.artifact {
                Some(artifact) => self.artifact(artifact, update.append),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Ends the text and says how it ended.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.end_line()?;
        self.clear_status();
        if let (Some((task, context, state)), false) = (&self.task, self.json) {
            let reason = if self.reason.is_empty() { String::new() } else { format!(": {}", self.reason) };
            let line = format!("task {task} {}{reason} (context {context})", state_name(*state));
            output::complain(&output::harmless(&line));
        }
        Ok(())
    }

    fn task(&mut self, task: &Task) -> io::Result<()> {
        for artifact in &task.artifacts {
            self.artifact(artifact, false)?;
        }
        let message = task.status.as_ref().and_then(|status| status.message.as_ref());
        // An agent that answers by messages leaves its answer in the history.
        let last = task.history.last().filter(|last| last.role() == Role::Agent);
        let answer = message.or_else(|| last.filter(|_| self.artifacts.is_empty()));
        self.status(&task.id, &task.context_id, task.state(), answer)
    }

    fn status(&mut self, task: &str, context: &str, state: TaskState, message: Option<&Message>) -> io::Result<()> {
        self.task = Some((task.to_owned(), context.to_owned(), state));
        match (message, state) {
            (Some(message), TaskState::Failed | TaskState::Rejected | TaskState::Canceled) => {
                self.reason = text_of(&message.parts).replace('\n', " ");
            }
            (Some(message), _) => self.message(message)?,
            (None, _) => {}
        }
        if self.status_line && !self.open_line && !state.is_terminal() {
            self.clear_status();
            eprint_now(&format!("· {}", state_name(state)));
            self.status_shown = true;
        }
        Ok(())
    }

    fn message(&mut self, message: &Message) -> io::Result<()> {
        if message.message_id.is_empty() || self.messages.insert(message.message_id.clone()) {
            self.print(&text_of(&message.parts))?;
        }
        Ok(())
    }

    fn artifact(&mut self, artifact: &Artifact, append: bool) -> io::Result<()> {
        let text = text_of(&artifact.parts);
        let is_new = !self.artifacts.contains_key(&artifact.artifact_id);
        let printed = self.artifacts.entry(artifact.artifact_id.clone()).or_default();
        let news = if append {
            printed.push_str(&text);
            text
        } else {
            // A snapshot repeats what was seen and may know more; anything else replaces it.
            let news = text.strip_prefix(printed.as_str()).map(ToOwned::to_owned);
            let replaced = news.is_none();
            *printed = text;
            let news = news.unwrap_or_else(|| printed.clone());
            if replaced || is_new {
                self.end_line()?;
            }
            news
        };
        self.print(&news)
    }

    fn print(&mut self, text: &str) -> io::Result<()> {
        if self.json || text.is_empty() {
            return Ok(());
        }
        self.clear_status();
        self.open_line = !text.ends_with('\n');
        if self.terminal { output::text(&output::harmless(text)) } else { output::text(text) }
    }

    fn end_line(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.open_line) { output::text("\n") } else { Ok(()) }
    }

    fn clear_status(&mut self) {
        if std::mem::take(&mut self.status_shown) {
            eprint_now("\r\u{1b}[2K");
        }
    }
}

fn eprint_now(text: &str) {
    // Decoration: when it cannot be shown, nothing is lost.
    drop(io::Write::write_all(&mut io::stderr().lock(), text.as_bytes()));
}

/// Parts as text; what is no text is named.
fn text_of(parts: &[Part]) -> String {
    parts.iter().map(part_text).collect()
}

fn part_text(part: &Part) -> String {
    let name = if part.filename.is_empty() { &part.media_type } else { &part.filename };
    match &part.content {
        Some(Content::Text(text)) => text.clone(),
        Some(Content::Data(data)) => format!("{}\n", json::to_string(data).unwrap_or_default()),
        Some(Content::Raw(bytes)) => format!("[{name}: {} bytes]\n", bytes.len()),
        Some(Content::Url(url)) => format!("[{name}: {url}]\n"),
        None => String::new(),
    }
}

/// `TASK_STATE_INPUT_REQUIRED` as `input-required`.
pub(crate) fn state_name(state: TaskState) -> String {
    state.as_str_name().trim_start_matches("TASK_STATE_").to_ascii_lowercase().replace('_', "-")
}
