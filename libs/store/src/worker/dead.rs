//! What became of work that could not be done.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{EntryId, Millis};

/// The stream, in each shard, that [`Op::Bury`](crate::Op::Bury) moves entries to.
pub const DEAD: &str = "dead";

/// An entry that was given up: where it came from, and why.
///
/// Stored as one line of JSON, a line feed, and the payload as it was. So an operator can read it with common
/// tools, and an engine can write it where its data is, whatever the language there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadEntry {
    /// The work stream that it was in.
    pub stream: String,
    /// Its id there.
    pub id: EntryId,
    /// See [`Entry::tag`](crate::Entry::tag).
    pub tag: u8,
    /// Its value.
    pub payload: Bytes,
    /// How often it was handed out.
    pub deliveries: u32,
    /// Why it was given up.
    pub reason: String,
    /// When.
    pub at: Millis,
}

#[derive(Serialize, Deserialize)]
struct Line<'a> {
    stream: std::borrow::Cow<'a, str>,
    id: String,
    tag: u8,
    deliveries: u32,
    reason: std::borrow::Cow<'a, str>,
    at: Millis,
}

impl DeadEntry {
    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let line = Line {
            stream: self.stream.as_str().into(),
            id: self.id.to_string(),
            tag: self.tag,
            deliveries: self.deliveries,
            reason: self.reason.as_str().into(),
            at: self.at,
        };
        let mut bytes = serde_json::to_vec(&line).expect("texts and numbers have a JSON form");
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// Reads what [`DeadEntry::encode`] wrote; `None` when it is something else.
    #[must_use]
    pub fn decode(bytes: &Bytes) -> Option<Self> {
        // JSON escapes line feeds, so the first one is the end of the line.
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        let line: Line<'_> = serde_json::from_slice(&bytes[..end]).ok()?;
        Some(Self {
            stream: line.stream.into_owned(),
            id: line.id.parse().ok()?,
            tag: line.tag,
            payload: bytes.slice(end + 1..),
            deliveries: line.deliveries,
            reason: line.reason.into_owned(),
            at: line.at,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_payload_is_untouched() {
        let dead = DeadEntry {
            stream: "runs:\n\"x\"".to_owned(),
            id: EntryId(7, 1),
            tag: 3,
            payload: Bytes::from_static(b"\n\xff\0{}\n"),
            deliveries: 4,
            reason: "line one\nline two ü".to_owned(),
            at: 1_700_000_000_000,
        };
        assert_eq!(DeadEntry::decode(&dead.encode().into()), Some(dead));
        for rubbish in ["", "{}", "{}\n", "no json\nx"] {
            assert_eq!(DeadEntry::decode(&Bytes::from_static(rubbish.as_bytes())), None);
        }
    }
}
