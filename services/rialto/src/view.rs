//! What a person or a program sees of a task: text as it arrives, or events as JSON lines.

use std::{
    collections::{HashMap, HashSet},
    io::{self, IsTerminal as _, Write},
};

use rialto_a2a::{
    json,
    v1::{Artifact, Message, Part, Role, StreamResponse, Task, TaskState, part::Content, stream_response::Payload},
    wkt::Value,
};

use crate::output;

/// Shows one call: what was said on `out`, what is to be known about it on `err`.
#[derive(Debug)]
pub(crate) struct View<O = io::Stdout, E = io::Stderr> {
    out: O,
    err: E,
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
    /// On stdout and stderr; JSON lines, or text for people.
    pub(crate) fn new(json: bool) -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        let (terminal, status_line) = (out.is_terminal(), !json && err.is_terminal());
        Self { terminal, status_line, ..View::on(out, err, json) }
    }
}

impl<O: Write, E: Write> View<O, E> {
    fn on(out: O, err: E, json: bool) -> Self {
        Self {
            out,
            err,
            json,
            terminal: false,
            status_line: false,
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
            self.write(&format!("{}\n", json::to_string(event).map_err(io::Error::other)?))?;
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
            let hint = match state {
                TaskState::InputRequired => {
                    format!("answer with: rialto call TEXT --task {}\n", output::harmless(task))
                }
                _ => String::new(),
            };
            self.note(&format!("{}\n{hint}", output::harmless(&line)));
        }
        Ok(())
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }

    /// Beside the result; when it cannot be shown, nothing is lost.
    fn note(&mut self, text: &str) {
        drop(self.err.write_all(text.as_bytes()));
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
            (Some(message), _) => {
                // A question stands on a line of its own, and so does word of a new attempt.
                let restart = is_restart(message);
                if state.is_interrupted() || restart {
                    self.end_line()?;
                }
                self.message(message)?;
                if restart {
                    self.end_line()?;
                }
            }
            (None, _) => {}
        }
        if self.status_line && !self.open_line && !state.is_terminal() {
            self.clear_status();
            self.note(&format!("· {}", state_name(state)));
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
        if self.terminal { self.write(&output::harmless(text)) } else { self.write(text) }
    }

    fn end_line(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.open_line) { self.write("\n") } else { Ok(()) }
    }

    fn clear_status(&mut self) {
        if std::mem::take(&mut self.status_shown) {
            self.note("\r\u{1b}[2K");
        }
    }
}

/// Whether this is word of a new attempt, after one that was lost.
fn is_restart(message: &Message) -> bool {
    let reason = message.metadata.as_ref().and_then(|metadata| metadata.fields.get("reason"));
    reason.is_some_and(|reason| *reason == Value::from("restarted"))
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

#[cfg(test)]
mod tests {
    use rialto_a2a::v1::{TaskArtifactUpdateEvent, TaskStatus, TaskStatusUpdateEvent};

    use super::*;

    fn shown(events: &[Payload], terminal: bool) -> (String, String) {
        let mut view = View { terminal, ..View::on(Vec::new(), Vec::new(), false) };
        for event in events {
            view.event(&StreamResponse { payload: Some(event.clone()) }).unwrap();
        }
        view.finish().unwrap();
        (String::from_utf8(view.out).unwrap(), String::from_utf8(view.err).unwrap())
    }

    fn parts(text: &str) -> Vec<Part> {
        vec![Part { content: Some(Content::Text(text.to_owned())), ..Part::default() }]
    }

    fn artifact(id: &str, text: &str) -> Artifact {
        Artifact { artifact_id: id.to_owned(), parts: parts(text), ..Artifact::default() }
    }

    fn piece(id: &str, text: &str, append: bool) -> Payload {
        let artifact = Some(artifact(id, text));
        Payload::ArtifactUpdate(TaskArtifactUpdateEvent { artifact, append, ..Default::default() })
    }

    fn status(state: TaskState, message: Option<(&str, &str)>) -> Option<TaskStatus> {
        let message = message.map(|(id, text)| Message {
            message_id: id.to_owned(),
            role: Role::Agent.into(),
            parts: parts(text),
            ..Message::default()
        });
        Some(TaskStatus { state: state.into(), message, timestamp: None })
    }

    fn update(state: TaskState, message: Option<(&str, &str)>) -> Payload {
        let (task_id, context_id) = ("t".to_owned(), "c".to_owned());
        Payload::StatusUpdate(TaskStatusUpdateEvent {
            task_id,
            context_id,
            status: status(state, message),
            metadata: None,
        })
    }

    fn snapshot(artifacts: Vec<Artifact>, state: TaskState, message: Option<(&str, &str)>) -> Payload {
        let (id, context_id) = ("t".to_owned(), "c".to_owned());
        Payload::Task(Task { id, context_id, status: status(state, message), artifacts, ..Task::default() })
    }

    #[test]
    fn a_snapshot_after_a_cut_adds_only_what_is_new() {
        let events = [
            piece("a", "one ", false),
            piece("a", "two ", true),
            snapshot(vec![artifact("a", "one two three ")], TaskState::Working, None),
            piece("a", "four", true),
            snapshot(vec![artifact("a", "one two three four"), artifact("b", "five")], TaskState::Completed, None),
        ];
        let expected = ("one two three four\nfive\n".to_owned(), "task t completed (context c)\n".to_owned());
        assert_eq!(shown(&events, false), expected);
    }

    #[test]
    fn an_artifact_that_is_replaced_begins_a_new_line() {
        let events = [piece("a", "draft", false), piece("a", "final", false)];
        assert_eq!(shown(&events, false).0, "draft\nfinal\n");
    }

    #[test]
    fn word_of_a_new_attempt_stands_on_a_line_of_its_own() {
        let mut restarted = update(TaskState::Working, Some(("r", "again")));
        if let Payload::StatusUpdate(update) = &mut restarted {
            let message = update.status.as_mut().unwrap().message.as_mut().unwrap();
            message.metadata = Some([("reason", Value::from("restarted"))].into_iter().collect());
        }
        let events = [
            update(TaskState::Working, Some(("1", "fetch"))),
            restarted,
            update(TaskState::Working, Some(("2", "think"))),
        ];
        assert_eq!(shown(&events, false).0, "fetch\nagain\nthink\n");
    }

    #[test]
    fn a_message_is_shown_once_however_often_it_comes() {
        let asks = Some(("m", "which one?"));
        let events = [
            update(TaskState::Working, Some(("n", "looking"))),
            update(TaskState::InputRequired, asks),
            snapshot(Vec::new(), TaskState::InputRequired, asks),
        ];
        let (out, err) = shown(&events, false);
        let hint = "task t input-required (context c)\nanswer with: rialto call TEXT --task t\n";
        assert_eq!((out.as_str(), err.as_str()), ("looking\nwhich one?\n", hint));
    }

    #[test]
    fn why_a_task_failed_is_beside_the_result() {
        let (out, err) = shown(&[update(TaskState::Failed, Some(("m", "no\nmoney")))], false);
        assert_eq!((out.as_str(), err.as_str()), ("", "task t failed: no money (context c)\n"));
    }

    #[test]
    fn an_agent_cannot_write_to_the_terminal_what_it_likes() {
        let events = [piece("a", "\u{1b}[2J", false)];
        assert_eq!(shown(&events, true).0, "␛[2J\n");
        // A program that reads it gets what was sent.
        assert_eq!(shown(&events, false).0, "\u{1b}[2J\n");
    }
}
