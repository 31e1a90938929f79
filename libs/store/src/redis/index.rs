//! Indexes, ordered by score and member.
//!
//! Sorted sets compare scores as floating-point numbers and cannot go on behind a member. So here all members
//! have the same score, and their own, as eight bytes that sort like the number, stands before their name. Then
//! Redis orders them by their bytes, exactly, and a page is one `ZRANGE … BYLEX`.
//!
//! Indexes whose names are equal up to the first slash share a sorted set, because a command costs more than a
//! member, and a key as well: what follows the slash starts the members.

use redis::{Cmd, Value};

use super::value;
use crate::{IndexQuery, Order};

/// Flips the sign, so that negative numbers sort below.
const SIGN: u64 = 1 << 63;

/// Where an index is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place<'a> {
    /// The sorted set.
    pub(super) set: &'a str,
    /// What its members start with: no part is the start of another one.
    part: &'a str,
}

impl<'a> Place<'a> {
    pub(super) fn of(index: &'a str) -> Self {
        let (set, part) = index.split_once('/').unwrap_or((index, ""));
        Self { set, part }
    }

    /// Writes a member as it is stored: the part, a byte that is in no text, the score, the name.
    pub(super) fn write(&self, score: i64, member: &str, bytes: &mut Vec<u8>) {
        self.write_part(bytes);
        bytes.extend_from_slice(&(score.cast_unsigned() ^ SIGN).to_be_bytes());
        bytes.extend_from_slice(member.as_bytes());
    }

    fn write_part(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.part.as_bytes());
        bytes.push(0xff);
    }

    /// A bound of a range: a sign and a member.
    fn bound(&self, sign: u8, score: i64, member: &str) -> Vec<u8> {
        let mut bytes = vec![sign];
        self.write(score, member, &mut bytes);
        bytes
    }

    /// The lowest member with this score or a higher one.
    fn from(&self, min: Option<i64>) -> Vec<u8> {
        self.bound(b'[', min.unwrap_or(i64::MIN), "")
    }

    /// The highest member with this score or a lower one.
    fn to(&self, max: Option<i64>) -> Vec<u8> {
        match max.and_then(|max| max.checked_add(1)) {
            Some(above) => self.bound(b'(', above, ""),
            None => {
                let mut bytes = vec![b'('];
                self.write_part(&mut bytes);
                // Higher than every score with any name.
                bytes.extend_from_slice(&[0xff; 9]);
                bytes
            }
        }
    }
}

/// Counts members.
pub(super) fn count(key: &str, place: &Place<'_>, min: Option<i64>) -> Cmd {
    redis::cmd("ZLEXCOUNT").arg(key).arg(place.from(min)).arg(place.to(None)).take()
}

/// Reads a page; `None` when there is nothing to read.
pub(super) fn page(key: &str, place: &Place<'_>, query: &IndexQuery) -> Option<Cmd> {
    let (mut low, mut high) = (place.from(query.min), place.to(query.max));
    if let Some((score, name)) = &query.after {
        let after = place.bound(b'(', *score, name);
        // Whichever is the narrower one. Behind their first byte, bounds compare like members.
        match query.order {
            Order::Ascending if after[1..] >= low[1..] => low = after,
            Order::Descending if after[1..] < high[1..] => high = after,
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
pub(super) fn rows(place: &Place<'_>, answer: Value) -> Option<Vec<(i64, String)>> {
    let rows = value::list(answer)?.into_iter().map(|row| {
        let row = value::bytes(row)?;
        let (score, name) = row.get(place.part.len() + 1..)?.split_first_chunk::<8>()?;
        let name = std::str::from_utf8(name).ok()?;
        Some(((u64::from_be_bytes(*score) ^ SIGN).cast_signed(), name.to_owned()))
    });
    rows.collect()
}
