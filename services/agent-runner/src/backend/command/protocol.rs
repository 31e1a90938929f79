//! The lines that agents read and write. `docs/agents.md` is their reference.

use std::borrow::Cow;

use bytes::Bytes;
use rialto_a2a::{
    json,
    v1::{Artifact, Message, Part},
    wkt::Struct,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::super::{AgentEvent, Chunk, End, Turn, text_part};

/// The work is not wanted any more.
pub(super) const CANCEL: &str = "{\"type\":\"cancel\"}\n";
/// The runner wants to stop soon.
pub(super) const STOPPING: &str = "{\"type\":\"stopping\"}\n";

/// What one line says.
#[derive(Debug, PartialEq)]
pub(super) enum Said {
    Event(AgentEvent),
    End(End),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TurnLine<'a> {
    r#type: &'static str,
    task_id: &'a str,
    context_id: &'a str,
    turn: u32,
    attempt: u32,
    idempotency_key: &'a str,
    message: &'a Message,
    history: &'a [Message],
    conversation: &'a [Message],
    journal: Vec<Option<&'a RawValue>>,
    metadata: &'a Struct,
}

/// The line that starts a turn.
pub(super) fn turn_line(turn: &Turn) -> Bytes {
    let line = TurnLine {
        r#type: "turn",
        task_id: &turn.task_id,
        context_id: &turn.context_id,
        turn: turn.number,
        attempt: turn.attempt,
        idempotency_key: &turn.idempotency_key,
        message: &turn.message,
        history: &turn.history,
        conversation: &turn.conversation,
        // Entries of another backend, from before a change of the configuration, need not be JSON.
        journal: turn.journal.iter().map(|entry| serde_json::from_slice(entry).ok()).collect(),
        metadata: &turn.metadata,
    };
    // Messages come from the task-store, which refuses what JSON cannot say.
    let mut bytes = serde_json::to_vec(&line).expect("a stored message can be written as JSON");
    bytes.push(b'\n');
    bytes.into()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    text: Option<String>,
    #[serde(borrow)]
    parts: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    reason: Option<String>,
    #[serde(default)]
    append: bool,
    #[serde(default)]
    last_chunk: bool,
}

impl Line<'_> {
    /// `parts`, or one part with `text`.
    fn parts(&mut self) -> Result<Vec<Part>, String> {
        match (self.parts, self.text.take()) {
            (Some(parts), None) => json::from_str(parts.get()).map_err(|error| error.to_string()),
            (None, Some(text)) => Ok(vec![text_part(text)]),
            (None, None) => Ok(Vec::new()),
            (Some(_), Some(_)) => Err("text and parts are both set".to_owned()),
        }
    }

    fn object(&self) -> Result<Struct, String> {
        let data = self.data.ok_or("data is missing")?;
        json::from_str(data.get()).map_err(|error| error.to_string())
    }

    fn reason(&mut self) -> Result<String, String> {
        self.reason.take().ok_or_else(|| "reason is missing".to_owned())
    }
}

/// Reads a line of an agent.
pub(super) fn parse(bytes: &[u8]) -> Result<Said, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let mut line: Line<'_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let required = |parts: Vec<Part>| if parts.is_empty() { Err("text or parts is missing") } else { Ok(parts) };
    Ok(match &*line.r#type {
        "text" => Said::Event(AgentEvent::Text(line.text.ok_or("text is missing")?)),
        "status" => Said::Event(AgentEvent::Status(required(line.parts()?)?)),
        "artifact" => {
            let mut artifact: Artifact = json::from_str(text).map_err(|error| error.to_string())?;
            artifact.parts = required(line.parts()?)?;
            Said::Event(AgentEvent::Artifact(Box::new(Chunk { artifact, append: line.append, last: line.last_chunk })))
        }
        "journal" => {
            let data = line.data.ok_or("data is missing")?;
            Said::Event(AgentEvent::Journal(Bytes::copy_from_slice(data.get().as_bytes())))
        }
        "usage" => Said::Event(AgentEvent::Usage(line.object()?)),
        "metadata" => Said::Event(AgentEvent::Metadata(line.object()?)),
        "message" => Said::End(End::Done(required(line.parts()?)?)),
        "end" => Said::End(End::Done(line.parts()?)),
        "completed" => Said::End(End::Completed(line.parts()?)),
        "input-required" => Said::End(End::InputRequired(line.parts()?)),
        "auth-required" => Said::End(End::AuthRequired(line.parts()?)),
        "failed" => Said::End(End::Failed(line.reason()?)),
        "rejected" => Said::End(End::Rejected(line.reason()?)),
        other => return Err(format!("the type {other:?} is unknown")),
    })
}
