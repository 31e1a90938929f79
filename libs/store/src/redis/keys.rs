//! Names of keys, and the slots that they live in.

use crate::Shard;

/// Makes keys: `<prefix>{s<n>}:` and the rest. What is in braces alone decides the slot.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    shards: Vec<String>,
}

impl Keys {
    pub(super) fn new(prefix: &str, shards: Shard) -> Self {
        Self { shards: (0..shards).map(|shard| format!("{prefix}{{s{shard}}}:")).collect() }
    }

    pub(super) fn shards(&self) -> Shard {
        Shard::try_from(self.shards.len()).unwrap_or(Shard::MAX)
    }

    /// `kind` keeps names of different kinds apart; records and streams have none.
    pub(super) fn key(&self, shard: Shard, kind: &str, name: &str) -> String {
        [&self.shards[usize::from(shard)], kind, name].concat()
    }

    /// As [`Keys::key`], into a buffer.
    pub(super) fn write(&self, shard: Shard, kind: &str, name: &str, bytes: &mut Vec<u8>) {
        for part in [&self.shards[usize::from(shard)], kind, name] {
            bytes.extend_from_slice(part.as_bytes());
        }
    }

    /// The slot of all keys of a shard.
    pub(super) fn slot(shard: Shard) -> u16 {
        crc16(format!("s{shard}").as_bytes()) % 16384
    }
}

/// Kinds of keys that the engine makes beside its callers' names.
pub(super) mod kind {
    /// A record or a stream.
    pub(in crate::redis) const PLAIN: &str = "";
    /// An index: a sorted set.
    pub(in crate::redis) const INDEX: &str = "i:";
    /// Id of the newest entry of a stream, when it was removed.
    pub(in crate::redis) const REMOVED: &str = "removed:";
    /// A limit: when it is full again, in µs.
    pub(in crate::redis) const LIMIT: &str = "limit:";
    /// Delayed entries of a stream: a sorted set of ids by due time.
    pub(in crate::redis) const DUE: &str = "due:";
    /// Delayed entries of a stream: a hash of tag and payload by id.
    pub(in crate::redis) const DELAYED: &str = "delayed:";
    /// A channel.
    pub(in crate::redis) const CHANNEL: &str = "channel:";
}

/// CRC-16/XMODEM, as Redis Cluster has it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ (u16::from(*byte) << 8),
            |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // `CLUSTER KEYSLOT` says so.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(crc16(b"foo") % 16384, 12182);
        assert_eq!([Keys::slot(0), Keys::slot(1), Keys::slot(15)], [11097, 15224, 4362]);
        assert_eq!(Keys::new("r:", 2).key(1, kind::INDEX, "x"), "r:{s1}:i:x");
    }
}
