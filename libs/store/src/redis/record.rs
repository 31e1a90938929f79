//! Records as they are stored; `library.lua` writes them.
//!
//! A string: version and the lengths of the next two as big-endian 32-bit numbers, the refs as lines `<name>=<id>`,
//! the last commit that the record led, and the value. A string of one piece costs Redis a quarter of what a hash of
//! the same would, and its head can be read without the rest.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::Record;

/// Three numbers.
const HEADER: usize = 12;

/// What would end the name of a ref.
pub(super) const RESERVED: [char; 2] = ['=', '\n'];

/// Reads a record; `None` when it is none.
pub(super) fn parse(stored: Vec<u8>) -> Option<Record> {
    let mut stored = Bytes::from(stored);
    let header = stored.split_to_checked(HEADER)?;
    let mut numbers = header.chunks_exact(4).filter_map(|four| Some(u32::from_be_bytes(four.try_into().ok()?)));
    let version = numbers.next()?.into();
    let lines = stored.split_to_checked(usize::try_from(numbers.next()?).ok()?)?;
    stored.split_to_checked(usize::try_from(numbers.next()?).ok()?)?;
    let mut refs = BTreeMap::new();
    for line in std::str::from_utf8(&lines).ok()?.lines() {
        let (name, id) = line.split_once('=')?;
        refs.insert(name.to_owned(), id.parse().ok()?);
    }
    Some(Record { version, bytes: stored, refs })
}

trait SplitTo: Sized {
    fn split_to_checked(&mut self, at: usize) -> Option<Self>;
}

impl SplitTo for Bytes {
    /// The first bytes, if there are so many.
    fn split_to_checked(&mut self, at: usize) -> Option<Self> {
        (at <= self.len()).then(|| self.split_to(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EntryId;

    #[test]
    fn a_record_is_its_header_refs_last_commit_and_value() {
        let stored = [&[0, 0, 1, 2, 0, 0, 0, 14, 0, 0, 0, 3], &b"a=1-0\nrun=2-1\nxyzvalue\n"[..]].concat();
        let record = parse(stored.clone()).unwrap();
        assert_eq!((record.version, &record.bytes[..]), (258, &b"value\n"[..]));
        assert_eq!(
            record.refs.into_iter().collect::<Vec<_>>(),
            [("a".to_owned(), EntryId(1, 0)), ("run".to_owned(), EntryId(2, 1))]
        );
        for short in 0..HEADER + 17 {
            assert!(parse(stored[..short].to_vec()).is_none(), "{short}");
        }
    }
}
