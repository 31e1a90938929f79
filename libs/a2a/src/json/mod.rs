//! ProtoJSON, as A2A wants it (spec §5.5 to §5.7): the only way to read or write these types as JSON.
//!
//! Reading is lenient where the protocol asks for it (unknown members, `snake_case`, enum numbers, `null` for
//! "unset", integers as strings, both base64 alphabets) and strict where leniency would change what was said
//! (unknown enum values, two members of a oneof, integers that a double cannot hold, depth). A refusal names
//! the field by its JSON path. Required fields are [`crate::validate`]'s.

mod lenient;
#[cfg(test)]
mod tests;

use serde::{Serialize, de::DeserializeOwned};
use serde_json::error::Category;

use self::lenient::{Lenient, Place, Trace};
use crate::error::{Error, Kind, Result};

/// How deep a `Struct` or `Value` may nest. More would meet the limit of 100 messages that most protobuf
/// decoders have: accepted here, unreadable there.
pub const MAX_DEPTH: usize = 32;

/// Longest description that a refusal quotes; serde repeats the caller's whole string.
const MAX_DESCRIPTION: usize = 300;

/// Reads a message from JSON bytes.
///
/// # Errors
/// [`Kind::Parse`] when this is not JSON, [`Kind::InvalidParams`] when it is not a `T`.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    // Checked as a whole, which is faster than string by string, and covers the strings that are skipped.
    match std::str::from_utf8(bytes) {
        Ok(text) => from_str(text),
        Err(_) => Err(Error::new(Kind::Parse, "Invalid JSON payload: not UTF-8")),
    }
}

/// Reads a message from JSON text, such as a `RawValue`'s.
///
/// # Errors
/// [`Kind::Parse`] when this is not JSON, [`Kind::InvalidParams`] when it is not a `T`.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T> {
    let trace = Trace::of(text);
    let mut json = serde_json::Deserializer::from_str(text);
    let message = T::deserialize(Lenient::new(&mut json, &trace, Place::Root)).and_then(|message| {
        json.end()?;
        Ok(message)
    });
    message.map_err(|error| match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Err(malformed) => Error::new(Kind::Parse, format!("Invalid JSON payload: {malformed}")),
        Ok(_) => refusal(&error, &trace),
    })
}

/// Reads a message from a JSON tree.
///
/// Prefer [`from_str`]: a tree has already rounded integers of more than 64 bits.
///
/// # Errors
/// [`Kind::InvalidParams`] when it is not a `T`.
pub fn from_value<T: DeserializeOwned>(value: serde_json::Value) -> Result<T> {
    let trace = Trace::default();
    T::deserialize(Lenient::new(value, &trace, Place::Root)).map_err(|error| refusal(&error, &trace))
}

/// Writes a message as compact JSON bytes.
///
/// # Errors
/// [`Kind::Internal`] when the message holds what JSON cannot (NaN, an enum number without a name, a timestamp
/// out of range); [`crate::validate`] refuses such messages.
pub fn to_vec<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(message).map_err(|_| Error::internal())
}

/// Writes a message as compact JSON text.
///
/// # Errors
/// As [`to_vec`].
pub fn to_string<T: Serialize>(message: &T) -> Result<String> {
    serde_json::to_string(message).map_err(|_| Error::internal())
}

/// Writes a message as a JSON tree.
///
/// # Errors
/// As [`to_vec`].
pub fn to_value<T: Serialize>(message: &T) -> Result<serde_json::Value> {
    serde_json::to_value(message).map_err(|_| Error::internal())
}

fn refusal(error: &serde_json::Error, trace: &Trace<'_>) -> Error {
    debug_assert!(error.classify() != Category::Io, "there is no reader");
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    Error::invalid(trace.path(), cut(explain(text).into_owned(), MAX_DESCRIPTION))
}

/// serde's words in terms of the protocol.
fn explain(text: &str) -> std::borrow::Cow<'_, str> {
    const NOT_INT: [&str; 4] =
        ["data did not match any variant of untagged", "invalid digit found", "number too", "cannot parse integer"];
    if NOT_INT.iter().any(|start| text.starts_with(start)) {
        return "expected a 32-bit integer, as a number or a decimal string".into();
    }
    if let Some(field) = text.strip_prefix("duplicate field ") {
        return format!("{field} is set twice, or together with another member of its oneof").into();
    }
    if text.starts_with("Invalid ") {
        return format!("not base64: {text}").into();
    }
    if text == "number out of range" {
        return "the number is too large".into();
    }
    text.replace("struct lf.a2a.v1.", "an object, ").replace("expected expected", "expected").into()
}

/// `text`, at most `max` bytes of it.
pub(crate) fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        let mut end = max - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
