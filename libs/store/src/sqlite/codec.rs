//! What a record carries beside its value, as bytes: refs, and the last commit with its first result.

use std::collections::BTreeMap;

use crate::{CommitId, Committed, EntryId};

/// Everything about a record but its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) refs: BTreeMap<String, EntryId>,
    pub(super) commit: Option<(CommitId, Committed)>,
}

/// Writes `meta`: numbers are LEB128, texts and lists are preceded by their length.
pub(super) fn encode(meta: &Meta) -> Vec<u8> {
    let mut out = Vec::with_capacity(48 + meta.refs.len() * 24);
    number(&mut out, meta.refs.len() as u64);
    for (name, id) in &meta.refs {
        number(&mut out, name.len() as u64);
        out.extend_from_slice(name.as_bytes());
        entry_id(&mut out, *id);
    }
    if let Some((id, committed)) = &meta.commit {
        out.extend_from_slice(id);
        number(&mut out, committed.versions.len() as u64);
        for version in &committed.versions {
            number(&mut out, *version);
        }
        number(&mut out, committed.entries.len() as u64);
        for id in &committed.entries {
            entry_id(&mut out, *id);
        }
        number(&mut out, committed.at.cast_unsigned());
    }
    out
}

/// Reads what [`encode`] wrote; `None` when it is something else.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Meta> {
    let refs = refs(&mut bytes)?;
    let commit = if bytes.is_empty() { None } else { Some(commit(&mut bytes)?) };
    Some(Meta { refs, commit })
}

/// Reads only the refs.
pub(super) fn refs(bytes: &mut &[u8]) -> Option<BTreeMap<String, EntryId>> {
    let mut refs = BTreeMap::new();
    for _ in 0..take(bytes)? {
        let len = usize::try_from(take(bytes)?).ok()?;
        let (name, rest) = bytes.split_at_checked(len)?;
        *bytes = rest;
        refs.insert(String::from_utf8(name.to_vec()).ok()?, take_id(bytes)?);
    }
    Some(refs)
}

fn commit(bytes: &mut &[u8]) -> Option<(CommitId, Committed)> {
    let (id, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    let mut committed = Committed::default();
    for _ in 0..take(bytes)? {
        committed.versions.push(take(bytes)?);
    }
    for _ in 0..take(bytes)? {
        committed.entries.push(take_id(bytes)?);
    }
    committed.at = take(bytes)?.cast_signed();
    Some((*id, committed))
}

fn entry_id(out: &mut Vec<u8>, id: EntryId) {
    number(out, id.0);
    number(out, id.1);
}

#[expect(clippy::cast_possible_truncation, reason = "only the lowest seven bits are kept")]
fn number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn take_id(bytes: &mut &[u8]) -> Option<EntryId> {
    Some(EntryId(take(bytes)?, take(bytes)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids() -> impl Strategy<Value = EntryId> {
        (any::<u64>(), any::<u64>()).prop_map(|(ms, seq)| EntryId(ms, seq))
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            refs in proptest::collection::btree_map(".{0,8}", ids(), 0..4),
            commit in proptest::option::of((any::<[u8; 16]>(), proptest::collection::vec(any::<u64>(), 0..4),
                proptest::collection::vec(ids(), 0..4), any::<i64>())),
        ) {
            let commit = commit.map(|(id, versions, entries, at)| (id, Committed { versions, entries, at }));
            let meta = Meta { refs, commit };
            prop_assert_eq!(decode(&encode(&meta)), Some(meta));
        }

        #[test]
        fn rubbish_is_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode(&bytes);
        }
    }
}
