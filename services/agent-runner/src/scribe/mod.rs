//! Turns what a backend says into A2A events, by the agent's configuration. Pure: no clock, no I/O.

use std::{collections::HashSet, sync::Arc};

use bytes::Bytes;
use prost::Message as _;
use rialto_a2a::{
    v1::{
        Artifact, Message, Part, Role, StreamResponse, TaskArtifactUpdateEvent, TaskState, TaskStatus,
        TaskStatusUpdateEvent, stream_response::Payload,
    },
    validate::Validate,
    wkt::{Struct, value},
};
use rialto_rpc::tasks::JournalEntry;
use rialto_runtime::config::{Answer, Reply, TurnEnd};

use crate::backend::{AgentEvent, Chunk, End, text_part};

/// Waiting bytes that make a flush due.
const FLUSH_BYTES: usize = 64 << 10;
/// Waiting bytes and events beyond which the backend has to wait.
const FULL_BYTES: usize = 256 << 10;
const FULL_EVENTS: usize = 256;
/// The answer's text of one turn, which is also kept in memory, for the history.
const MAX_TEXT: usize = 8 << 20;
/// A failure's reason as callers see it.
const MAX_REASON: usize = 4 << 10;

/// What the configuration says about answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Style {
    pub answer: Answer,
    pub reply: Reply,
    pub turn_end: TurnEnd,
}

/// Where a turn stands in its task.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    pub task_id: String,
    pub context_id: String,
    /// From 1.
    pub turn: u32,
    /// Number that the next event gets.
    pub next_event: u64,
    /// The journal so far.
    pub journal: Vec<JournalEntry>,
    /// Artifacts of lost attempts that were taken back: what is written to them first replaces them.
    pub stale: HashSet<String>,
    /// What the task's metadata has under `iac_code`.
    pub iac_code: Struct,
    /// Artifacts that earlier attempts at this turn wrote, and that stay.
    pub kept: HashSet<String>,
}

/// The backend broke a rule; the text says which.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Invalid(pub String);

/// How soon an event wants to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Within the flush window.
    Soon,
    /// As soon as no other event is ready.
    Now,
}

/// Where agents that answer by status and stay open keep what is theirs in a task's metadata, as the first of their
/// kind did; the clients of those look there.
const IAC_CODE: &str = "iac_code";

/// Events, journal entries and metadata that are stored together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Page {
    pub first_event: u64,
    pub events: Vec<StreamResponse>,
    pub journal: Vec<JournalEntry>,
    pub metadata: Option<Struct>,
}

/// What ends a turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Closing {
    pub page: Page,
    /// What the agent said in this turn, if anything.
    pub history: Option<Message>,
}

/// Writes down one attempt at a turn.
#[derive(Debug)]
pub(crate) struct Scribe {
    style: Style,
    place: Place,
    /// Text that is no event yet: it merges with what follows.
    text: String,
    /// Events that are not stored and not on their way.
    page: Page,
    page_bytes: usize,
    /// A page on its way: stored or not, nobody knows. What follows must not change it.
    sent: Option<Arc<Page>>,
    /// All text of this turn.
    said: String,
    /// Bytes of it that the journal has.
    journaled: usize,
    /// Steps in the journal.
    steps: u32,
    /// Artifacts that this attempt may extend.
    written: HashSet<String>,
    /// Results of a hidden task, which go into its message.
    results: Vec<Artifact>,
    /// Whether the journal lacks some of them.
    new_results: bool,
    results_bytes: usize,
}

impl Scribe {
    pub(crate) fn new(style: Style, mut place: Place) -> Self {
        // What was said before the last step counts as said by this attempt, which goes on after it.
        let journal = std::mem::take(&mut place.journal);
        let said: String = journal.iter().map(|entry| entry.text.as_str()).collect();
        let steps = journal.last().map_or(0, |entry| entry.step);
        let results = journal.into_iter().rev().map(|entry| entry.results).find(|results| !results.is_empty());
        let results = results.unwrap_or_default();
        let page = Page { first_event: place.next_event, ..Page::default() };
        Self {
            style,
            text: String::new(),
            page,
            page_bytes: 0,
            sent: None,
            journaled: said.len(),
            said,
            steps,
            written: std::mem::take(&mut place.kept),
            results_bytes: results.iter().map(prost::Message::encoded_len).sum(),
            results,
            new_results: false,
            place,
        }
    }

    /// Takes an event down.
    pub(crate) fn push(&mut self, event: AgentEvent) -> Result<Urgency, Invalid> {
        match event {
            AgentEvent::Text(text) => {
                if self.said.len() + text.len() > MAX_TEXT {
                    return Err(Invalid(format!("the answer is longer than {} MiB", MAX_TEXT >> 20)));
                }
                self.said.push_str(&text);
                if !self.hidden() {
                    self.text.push_str(&text);
                }
                Ok(Urgency::Soon)
            }
            AgentEvent::Status(parts) => {
                let message = self.message(parts);
                valid(&message, "a status")?;
                if !self.hidden() {
                    self.write(self.status(TaskState::Working, Some(message)));
                }
                Ok(Urgency::Now)
            }
            AgentEvent::Artifact(chunk) => {
                self.artifact(*chunk)?;
                Ok(Urgency::Soon)
            }
            AgentEvent::Journal(step) => {
                self.journal(step);
                Ok(Urgency::Now)
            }
            AgentEvent::Usage(usage) => {
                self.usage(usage);
                Ok(Urgency::Soon)
            }
            AgentEvent::Metadata(metadata) => {
                if metadata.fields.contains_key(IAC_CODE) {
                    self.place.iac_code = iac_code(&metadata);
                }
                self.merge(metadata.fields);
                Ok(Urgency::Soon)
            }
        }
    }

    /// Whether the backend may go on. Otherwise something must be stored first.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting_bytes() < FULL_BYTES && self.page.events.len() < FULL_EVENTS
    }

    /// Whether there is so much to store that waiting longer gains nothing.
    pub(crate) fn is_due(&self) -> bool {
        self.waiting_bytes() >= FLUSH_BYTES || self.page.events.len() >= FULL_EVENTS
    }

    /// Whether something waits to be stored.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.text.is_empty() || self.page_bytes > 0
    }

    /// What is to be stored next. It counts as stored only after [`Scribe::stored`].
    pub(crate) fn send(&mut self) -> Arc<Page> {
        debug_assert!(self.sent.is_none(), "one page at a time");
        self.write_text(false);
        let next = Page { first_event: self.page.first_event + self.page.events.len() as u64, ..Page::default() };
        let page = Arc::new(std::mem::replace(&mut self.page, next));
        self.page_bytes = 0;
        self.sent = Some(page.clone());
        page
    }

    /// The page on its way has arrived.
    pub(crate) fn stored(&mut self) {
        self.sent = None;
    }

    /// Drops what was refused or not sent, so that the turn can still end.
    pub(crate) fn discard(&mut self) {
        let first_event = self.sent.take().map_or(self.page.first_event, |page| page.first_event);
        self.text.clear();
        self.page = Page { first_event, ..Page::default() };
        self.page_bytes = 0;
    }

    /// Everything that is not stored, and the end.
    pub(crate) fn close(&mut self, end: End) -> Closing {
        let (state, closing) = match end {
            End::Done(parts) => match self.style.turn_end {
                TurnEnd::Completed => (TaskState::Completed, parts),
                TurnEnd::InputRequired => (TaskState::InputRequired, parts),
            },
            End::Completed(parts) => (TaskState::Completed, parts),
            End::InputRequired(parts) => (TaskState::InputRequired, parts),
            End::AuthRequired(parts) => (TaskState::AuthRequired, parts),
            End::Failed(reason) => (TaskState::Failed, vec![text_part(shorten(reason))]),
            End::Rejected(reason) => (TaskState::Rejected, vec![text_part(shorten(reason))]),
        };
        let refused = matches!(state, TaskState::Failed | TaskState::Rejected);
        self.write_text(!refused);

        let status_message = (!closing.is_empty()).then(|| self.message(closing.clone()));
        let history = match &status_message {
            Some(message) if self.said.is_empty() => Some(message.clone()),
            None if self.said.is_empty() => None,
            _ => {
                let said = text_part(std::mem::take(&mut self.said));
                Some(self.message(std::iter::once(said).chain(closing).collect()))
            }
        };
        let (last, history) = if self.hidden() && !refused {
            let message = self.reply(history);
            (StreamResponse { payload: Some(Payload::Message(message.clone())) }, Some(message))
        } else {
            (self.status(state, status_message), history)
        };
        self.page.events.push(last);

        let first_event = self.sent.as_ref().map_or(self.page.first_event, |sent| sent.first_event);
        let mut page = std::mem::replace(&mut self.page, Page { first_event, ..Page::default() });
        self.page_bytes = 0;
        if let Some(sent) = self.sent.take() {
            page.first_event = first_event;
            page.events.splice(0..0, sent.events.iter().cloned());
            page.journal.splice(0..0, sent.journal.iter().cloned());
            if let Some(metadata) = &sent.metadata {
                let newer = page.metadata.take().unwrap_or_default();
                let mut merged = metadata.clone();
                merged.fields.extend(newer.fields);
                page.metadata = Some(merged);
            }
        }
        Closing { page, history }
    }

    fn hidden(&self) -> bool {
        self.style.reply == Reply::Message
    }

    fn waiting_bytes(&self) -> usize {
        self.text.len() + self.page_bytes
    }

    /// `answer`, and in later turns of the task `answer-<n>`: an artifact id is used once per task.
    fn answer_id(&self) -> String {
        if self.place.turn <= 1 { "answer".to_owned() } else { format!("answer-{}", self.place.turn) }
    }

    /// Makes events of the text so far; with `last`, marks the end of the answer.
    fn write_text(&mut self, last: bool) {
        let text = std::mem::take(&mut self.text);
        if self.hidden() {
            return;
        }
        match self.style.answer {
            Answer::Status if !text.is_empty() => {
                let message = self.message(vec![text_part(text)]);
                self.write(self.status(TaskState::Working, Some(message)));
            }
            Answer::Status => {}
            Answer::Artifact => {
                let id = self.answer_id();
                let begun = self.written.contains(&id);
                if text.is_empty() && !(last && begun) {
                    return;
                }
                if text.is_empty() && self.mark_last(&id) {
                    return;
                }
                // With nothing left to say and the last words stored, the end is an empty piece: an artifact
                // update without parts is not valid.
                let artifact =
                    Artifact { artifact_id: id.clone(), parts: vec![text_part(text)], ..Artifact::default() };
                self.write(self.artifact_update(artifact, begun, last));
                self.written.insert(id);
            }
        }
    }

    /// Marks the last waiting event of the artifact as its end, if there is one.
    fn mark_last(&mut self, id: &str) -> bool {
        let update = self.page.events.iter_mut().rev().find_map(|event| match &mut event.payload {
            Some(Payload::ArtifactUpdate(update)) if update.artifact.as_ref().is_some_and(|a| a.artifact_id == id) => {
                Some(update)
            }
            _ => None,
        });
        update.map(|update| update.last_chunk = true).is_some()
    }

    fn artifact(&mut self, chunk: Chunk) -> Result<(), Invalid> {
        let Chunk { artifact, append, last } = chunk;
        valid(&artifact, "an artifact")?;
        // Text before it is an artifact too, perhaps this one.
        self.write_text(false);
        let id = &artifact.artifact_id;
        let written = self.written.contains(id);
        // Artifacts of earlier turns are known to the task-store only: it refuses what the first turn cannot tell.
        let written = written || self.hidden() && self.results.iter().any(|kept| kept.artifact_id == *id);
        if append && !written && self.place.turn <= 1 && !self.place.stale.contains(id) {
            return Err(Invalid(format!("append to the artifact {:?}, which does not exist", shorten(id.clone()))));
        }
        let append = append && (written || !self.place.stale.contains(id));
        self.written.insert(id.clone());
        if self.hidden() {
            return self.result(artifact, append);
        }
        self.write(self.artifact_update(artifact, append, last));
        Ok(())
    }

    /// Keeps a result of a hidden task.
    fn result(&mut self, artifact: Artifact, append: bool) -> Result<(), Invalid> {
        self.new_results = true;
        self.results_bytes += artifact.encoded_len();
        if self.results_bytes > MAX_TEXT {
            return Err(Invalid(format!("the answer is longer than {} MiB", MAX_TEXT >> 20)));
        }
        match self.results.iter_mut().find(|kept| kept.artifact_id == artifact.artifact_id) {
            Some(kept) if append => kept.parts.extend(artifact.parts),
            Some(kept) => *kept = artifact,
            None => self.results.push(artifact),
        }
        Ok(())
    }

    /// The one message of a hidden task: what was said, then the results.
    fn reply(&mut self, said: Option<Message>) -> Message {
        let results = std::mem::take(&mut self.results).into_iter().flat_map(|artifact| artifact.parts);
        let mut message = said.unwrap_or_else(|| self.message(Vec::new()));
        message.parts.extend(results);
        // A message has parts, and the task behind this one is nobody's business.
        if message.parts.is_empty() {
            message.parts.push(text_part(""));
        }
        message.task_id.clear();
        message
    }

    fn journal(&mut self, payload: Bytes) {
        // What was said before the step must be an event before it: later ones are taken back with the attempt.
        self.write_text(false);
        self.steps += 1;
        let results = if std::mem::take(&mut self.new_results) { self.results.clone() } else { Vec::new() };
        let entry = JournalEntry {
            step: self.steps,
            payload,
            after_event: self.page.first_event + self.page.events.len() as u64 - 1,
            text: self.said[self.journaled..].to_owned(),
            results,
        };
        self.journaled = self.said.len();
        self.page_bytes += entry.encoded_len();
        self.page.journal.push(entry);
    }

    /// Notes what was used: as `usage`, or as `iac_code.usage` beside what else is there.
    fn usage(&mut self, usage: Struct) {
        let (usage, iac_code) =
            (("usage".to_owned(), value::Kind::StructValue(usage).into()), &mut self.place.iac_code);
        if self.style.answer == Answer::Status && self.style.turn_end == TurnEnd::InputRequired {
            iac_code.fields.extend([usage]);
            let own = value::Kind::StructValue(iac_code.clone()).into();
            self.merge([(IAC_CODE.to_owned(), own)]);
        } else {
            self.merge([usage]);
        }
    }

    fn merge(&mut self, members: impl IntoIterator<Item = (String, rialto_a2a::wkt::Value)>) {
        let metadata = self.page.metadata.get_or_insert_default();
        for (key, value) in members {
            self.page_bytes += key.len() + value.encoded_len() + 1;
            metadata.fields.insert(key, value);
        }
    }

    fn write(&mut self, event: StreamResponse) {
        // Text that came first stays first.
        if !self.text.is_empty() {
            self.write_text(false);
        }
        self.page_bytes += event.encoded_len();
        self.page.events.push(event);
    }

    fn message(&self, parts: Vec<Part>) -> Message {
        Message {
            message_id: uuid::Uuid::now_v7().to_string(),
            context_id: self.place.context_id.clone(),
            task_id: self.place.task_id.clone(),
            role: Role::Agent.into(),
            parts,
            ..Message::default()
        }
    }

    fn status(&self, state: TaskState, message: Option<Message>) -> StreamResponse {
        let status = TaskStatus { state: state.into(), message, timestamp: None };
        StreamResponse {
            payload: Some(Payload::StatusUpdate(TaskStatusUpdateEvent {
                task_id: self.place.task_id.clone(),
                context_id: self.place.context_id.clone(),
                status: Some(status),
                metadata: None,
            })),
        }
    }

    fn artifact_update(&self, artifact: Artifact, append: bool, last_chunk: bool) -> StreamResponse {
        StreamResponse {
            payload: Some(Payload::ArtifactUpdate(TaskArtifactUpdateEvent {
                task_id: self.place.task_id.clone(),
                context_id: self.place.context_id.clone(),
                artifact: Some(artifact),
                append,
                last_chunk,
                metadata: None,
            })),
        }
    }
}

/// What a task's metadata has for agents of that style.
pub(crate) fn iac_code(metadata: &Struct) -> Struct {
    match metadata.fields.get(IAC_CODE).and_then(|it| it.kind.as_ref()) {
        Some(value::Kind::StructValue(own)) => own.clone(),
        _ => Struct::default(),
    }
}

/// What every message and artifact of A2A must have (spec §5.7).
fn valid(said: &impl Validate, what: &str) -> Result<(), Invalid> {
    said.validate().map_err(|error| Invalid(format!("{what}: {}", error.message)))
}

/// At most [`MAX_REASON`] bytes of a reason.
fn shorten(mut reason: String) -> String {
    if reason.len() > MAX_REASON {
        let cut = reason.floor_char_boundary(MAX_REASON - '…'.len_utf8());
        reason.truncate(cut);
        reason.push('…');
    }
    reason
}

#[cfg(test)]
mod tests;
