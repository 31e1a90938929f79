//! Takes answers apart. Each returns `None` when the answer is something else.

use bytes::Bytes;
use redis::Value;

use crate::{Entry, EntryId, Error};

pub(super) fn list(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(list) | Value::Set(list) => Some(list),
        Value::Map(pairs) => Some(pairs.into_iter().flat_map(|(key, value)| [key, value]).collect()),
        Value::Nil => Some(Vec::new()),
        _ => None,
    }
}

pub(super) fn bytes(value: Value) -> Option<Bytes> {
    match value {
        Value::BulkString(bytes) => Some(bytes.into()),
        Value::SimpleString(text) => Some(text.into()),
        _ => None,
    }
}

pub(super) fn text(value: Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

/// A number, also when written as a text.
pub(super) fn int(value: &Value) -> Option<i64> {
    match value {
        Value::Int(int) => Some(*int),
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
        _ => None,
    }
}

pub(super) fn id(value: &Value) -> Option<EntryId> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
        _ => None,
    }
}

/// The entries of XRANGE and XREADGROUP: `[[id, [t, tag, p, payload]]…]`. Those that others wrote there are
/// left out.
pub(super) fn entries(value: Value) -> Option<Vec<Entry>> {
    let entries = list(value)?.into_iter().map(|entry| {
        let mut parts = list(entry)?.into_iter();
        let (id, fields) = (id(&parts.next()?)?, parts.next()?);
        let mut fields = list(fields)?.into_iter();
        let (tag, payload) = (fields.nth(1)?, fields.nth(1)?);
        Some(Entry { id, tag: u8::try_from(int(&tag)?).ok()?, payload: bytes(payload)? })
    });
    Some(entries.flatten().collect())
}

/// The error for an answer that cannot be taken apart.
pub(super) fn strange() -> Error {
    Error::Unavailable("redis answers something unexpected".to_owned())
}
