//! Indexes, ordered by score and member.
//!
//! Sorted sets compare scores as floating-point numbers and cannot go on behind a member. So here all members
//! have the same score, and their own, as eight bytes that sort like the number, starts their name. Then Redis
//! orders them by their bytes, exactly, and a page is one `ZRANGE … BYLEX`.

use redis::{Cmd, Value};

use super::value;
use crate::{IndexQuery, Order};

/// Flips the sign, so that negative numbers sort below.
const SIGN: u64 = 1 << 63;

/// A member as it is stored.
pub(super) fn member(score: i64, member: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 + member.len());
    bytes.extend_from_slice(&(score.cast_unsigned() ^ SIGN).to_be_bytes());
    bytes.extend_from_slice(member.as_bytes());
    bytes
}

fn bound(sign: u8, bytes: &[u8]) -> Vec<u8> {
    [&[sign], bytes].concat()
}

/// The lowest member with this score or a higher one.
fn from(min: Option<i64>) -> Vec<u8> {
    min.map_or_else(|| b"-".to_vec(), |min| bound(b'[', &member(min, "")))
}

/// The highest member with this score or a lower one.
fn to(max: Option<i64>) -> Vec<u8> {
    max.and_then(|max| max.checked_add(1)).map_or_else(|| b"+".to_vec(), |above| bound(b'(', &member(above, "")))
}

/// Counts members.
pub(super) fn count(key: &str, min: Option<i64>) -> Cmd {
    match min {
        None => redis::cmd("ZCARD").arg(key).take(),
        Some(_) => redis::cmd("ZLEXCOUNT").arg(key).arg(from(min)).arg("+").take(),
    }
}

/// Reads a page; `None` when there is nothing to read.
pub(super) fn page(key: &str, query: &IndexQuery) -> Option<Cmd> {
    let (mut low, mut high) = (from(query.min), to(query.max));
    if let Some((score, name)) = &query.after {
        let after = bound(b'(', &member(*score, name));
        // Whichever is the narrower one. Behind their first byte, bounds compare like members.
        match query.order {
            Order::Ascending if after[1..] >= low[1..] => low = after,
            Order::Descending if high == b"+" || after[1..] < high[1..] => high = after,
            Order::Ascending | Order::Descending => {}
        }
    }
    if query.limit == 0 {
        return None;
    }
    let mut command = redis::cmd("ZRANGE");
    match query.order {
        Order::Ascending => command.arg(key).arg(low).arg(high).arg("BYLEX"),
        Order::Descending => command.arg(key).arg(high).arg(low).arg("BYLEX").arg("REV"),
    };
    Some(command.arg("LIMIT").arg(0).arg(query.limit).take())
}

/// Reads the answer to [`page`].
pub(super) fn rows(answer: Value) -> Option<Vec<(i64, String)>> {
    let rows = value::list(answer)?.into_iter().map(|row| {
        let row = value::bytes(row)?;
        let (score, name) = row.split_first_chunk::<8>()?;
        let name = std::str::from_utf8(name).ok()?;
        Some(((u64::from_be_bytes(*score) ^ SIGN).cast_signed(), name.to_owned()))
    });
    rows.collect()
}
