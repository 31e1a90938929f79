//! ProtoJSON, as A2A wants it (spec §5.5 to §5.7): the only way to read or write these types as JSON.
//!
//! Reading is lenient where the protocol asks for it (unknown members, `snake_case`, enum numbers, `null` for
//! "unset", integers as strings, both base64 alphabets) and strict where leniency would change what was said
//! (unknown enum values, two members of a oneof, integers that a double cannot hold, depth). A refusal names
//! the field by its JSON path. Required fields are [`crate::validate`]'s.

mod lenient;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use serde::{
    Serialize,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::error::Category;

use self::lenient::{Lenient, Place, Trace};
use crate::{
    error::{Error, Kind, Result, Violation},
    text::cut,
};

/// How deep a `Struct` or `Value` may nest. Protobuf decoders stop at 100 nested messages, of which a JSON object
/// takes three: with more, what is accepted here could not be read there.
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
    message.map_err(|error| {
        // A wrong field may hide a missing brace further on; then the text is the trouble, not the field.
        let malformed = match error.classify() {
            Category::Syntax | Category::Eof if !error.to_string().starts_with(TOO_LARGE) => Some(error.to_string()),
            _ => serde_json::from_str::<IgnoredAny>(text).err().map(|error| error.to_string()),
        };
        match malformed {
            Some(reason) => Error::new(Kind::Parse, format!("Invalid JSON payload: {reason}")),
            None => refusal(&error, &trace),
        }
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

/// What serde_json calls a number beyond a double, which is good JSON all the same.
const TOO_LARGE: &str = "number out of range";

fn refusal(error: &serde_json::Error, trace: &Trace<'_>) -> Error {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    let description = cut(&explain(text), MAX_DESCRIPTION);
    Error::from_violations(vec![Violation { field: trace.path(), description }])
}

/// serde's words in terms of the protocol.
fn explain(text: &str) -> Cow<'_, str> {
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
    if text == TOO_LARGE {
        return "the number is too large".into();
    }
    text.replace("struct lf.a2a.v1.", "an object, ").replace("expected expected", "expected").into()
}
