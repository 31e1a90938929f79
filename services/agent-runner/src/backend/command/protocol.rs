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
    /// A task of the agent, this or another one, has what it waits for.
    Grant {
        task_id: String,
        metadata: Struct,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TurnLine<'a> {
    r#type: &'static str,
    task_id: &'a str,
    context_id: &'a str,
    tenant: &'a str,
    owner: &'a str,
    turn: u32,
    attempt: u32,
    idempotency_key: &'a str,
    message: &'a Message,
    history: &'a [Message],
    conversation: &'a [Message],
    journal: Vec<Option<&'a RawValue>>,
    metadata: &'a Struct,
    #[serde(skip_serializing_if = "Option::is_none")]
    granted: Option<&'a Struct>,
    #[serde(skip_serializing_if = "str::is_empty")]
    traceparent: &'a str,
}

/// The line that starts a turn.
pub(super) fn turn_line(turn: &Turn) -> Bytes {
    let line = TurnLine {
        r#type: "turn",
        task_id: &turn.task_id,
        context_id: &turn.context_id,
        tenant: &turn.tenant,
        owner: &turn.owner,
        turn: turn.number,
        attempt: turn.attempt,
        idempotency_key: &turn.idempotency_key,
        message: &turn.message,
        history: &turn.history,
        conversation: &turn.conversation,
        // Entries of another backend, from before a change of the configuration, need not be JSON.
        journal: turn.journal.iter().map(|entry| serde_json::from_slice(entry).ok()).collect(),
        metadata: &turn.metadata,
        granted: turn.granted.as_ref(),
        traceparent: &turn.traceparent,
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
    task_id: Option<String>,
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
        "grant" => Said::Grant {
            task_id: line.task_id.take().ok_or("taskId is missing")?,
            metadata: if line.data.is_some() { line.object()? } else { Struct::default() },
        },
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rialto_a2a::v1::Role;

    use super::*;

    #[test]
    fn the_turn_line_is_one_line_of_plain_json() {
        let message = Message {
            message_id: "m".to_owned(),
            role: Role::User.into(),
            parts: vec![text_part("two\nlines\u{2028}")],
            ..Message::default()
        };
        let turn = Turn {
            task_id: "t".to_owned(),
            context_id: "c".to_owned(),
            owner: "o".to_owned(),
            number: 2,
            attempt: 3,
            idempotency_key: "k".to_owned(),
            history: vec![message.clone()],
            message,
            journal: vec![Bytes::from_static(b"{\"a\": 1}"), Bytes::from_static(b"not json")],
            ..Turn::default()
        };
        let line = turn_line(&turn);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let message = r#"{"messageId":"m","role":"ROLE_USER","parts":[{"text":"two\nlines "}]}"#;
        let expected = format!(
            r#"{{"type":"turn","taskId":"t","contextId":"c","tenant":"","owner":"o","turn":2,"attempt":3,"idempotencyKey":"k","message":{message},"history":[{message}],"conversation":[],"journal":[{{"a": 1}},null],"metadata":{{}}}}"#
        );
        let expected: serde_json::Value = serde_json::from_str(&expected.replace("lines ", "lines\u{2028}")).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&line).unwrap(), expected);
    }

    #[test]
    fn every_event_can_be_said() {
        let text = |text: &str| vec![text_part(text)];
        let event = |line: &str| parse(line.as_bytes()).unwrap();
        for (line, said) in [
            (r#"{"type":"text","text":"a"}"#, Said::Event(AgentEvent::Text("a".to_owned()))),
            (r#"{"type":"status","text":"a"}"#, Said::Event(AgentEvent::Status(text("a")))),
            (r#"{"type":"status","parts":[{"text":"a"}]}"#, Said::Event(AgentEvent::Status(text("a")))),
            (
                r#"{"type":"journal","data":{"n": 1}}"#,
                Said::Event(AgentEvent::Journal(Bytes::from_static(b"{\"n\": 1}"))),
            ),
            (r#"{"type":"message","text":"a"}"#, Said::End(End::Done(text("a")))),
            (r#"{"type":"end"}"#, Said::End(End::Done(Vec::new()))),
            (r#"{"type":"completed","text":"a"}"#, Said::End(End::Completed(text("a")))),
            (r#"{"type":"completed"}"#, Said::End(End::Completed(Vec::new()))),
            (r#"{"type":"input-required","text":"a"}"#, Said::End(End::InputRequired(text("a")))),
            (r#"{"type":"auth-required","text":"a"}"#, Said::End(End::AuthRequired(text("a")))),
            (r#"{"type":"failed","reason":"a"}"#, Said::End(End::Failed("a".to_owned()))),
            (
                r#"{"type":"grant","taskId":"t","data":{"k":"v"}}"#,
                Said::Grant { task_id: "t".to_owned(), metadata: [("k", "v")].into_iter().collect() },
            ),
            (r#"{"type":"grant","taskId":"t"}"#, Said::Grant { task_id: "t".to_owned(), metadata: Struct::default() }),
            (r#"{"type":"rejected","reason":"a","later":1}"#, Said::End(End::Rejected("a".to_owned()))),
        ] {
            assert_eq!(event(line), said, "{line}");
        }
        let Said::Event(AgentEvent::Artifact(chunk)) = event(
            r#"{"type":"artifact","artifactId":"x","name":"n","text":"a","append":true,"lastChunk":true,"metadata":{"k":2}}"#,
        ) else {
            panic!("no artifact")
        };
        assert_eq!((chunk.append, chunk.last, chunk.artifact.name.as_str()), (true, true, "n"));
        assert_eq!(chunk.artifact.parts, text("a"));
        assert_eq!(chunk.artifact.metadata, Some([("k", 2)].into_iter().collect()));
        let usage = event(r#"{"type":"usage","data":{"tokens":1}}"#);
        assert_eq!(usage, Said::Event(AgentEvent::Usage([("tokens", 1)].into_iter().collect())));
    }

    #[test]
    fn a_mistake_is_named() {
        for (line, detail) in [
            ("x", "expected value"),
            ("\"text\"", "invalid type"),
            (r#"{"text":"a"}"#, "missing field `type`"),
            (r#"{"type":"tekst"}"#, "the type \"tekst\" is unknown"),
            (r#"{"type":"text"}"#, "text is missing"),
            (r#"{"type":"status","text":"a","parts":[]}"#, "text and parts are both set"),
            (r#"{"type":"artifact","artifactId":"x"}"#, "text or parts is missing"),
            (r#"{"type":"failed"}"#, "reason is missing"),
            (r#"{"type":"usage","data":1}"#, "Invalid parameters"),
            (r#"{"type":"journal"}"#, "data is missing"),
            (r#"{"type":"grant"}"#, "taskId is missing"),
        ] {
            let found = parse(line.as_bytes()).unwrap_err();
            assert!(found.contains(detail), "{line}: {found}");
        }
        assert!(parse(b"{\"type\":\"text\",\"text\":\"\xff\"}").is_err());
    }

    proptest! {
        #[test]
        fn no_line_breaks_the_reader(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse(&line).ok();
        }
    }
}
