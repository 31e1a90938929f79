//! Where things are kept: task ids, shards, and the name of every record, stream and index.

use std::fmt;

use aws_lc_rs::digest;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use rialto_rpc::tasks::Scope;
use rialto_store::Shard;

/// Identity of a turn, minted by the caller of Send.
pub(crate) type TurnId = [u8; 16];

/// Id of a task: made from the id of its first turn, with the shard as the last byte, so that the id alone says
/// where to look.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TaskId([u8; 16]);

impl TaskId {
    /// The id of the task that a turn creates.
    pub(crate) fn new(turn: TurnId, shard: Shard) -> Self {
        let mut id = turn;
        id[15] = u8::try_from(shard).expect("a store has at most 256 shards");
        Self(id)
    }

    /// Reads an id as clients send it. `None` for what this store cannot have made; no read is needed to know.
    pub(crate) fn parse(text: &str, shards: Shard) -> Option<Self> {
        // One spelling per task: the index rows and cursors compare text.
        let canonical = text.len() == 36 && !text.bytes().any(|byte| byte.is_ascii_uppercase());
        let id = Self(uuid::Uuid::try_parse(text).ok().filter(|_| canonical)?.into_bytes());
        (id.shard() < shards).then_some(id)
    }

    /// Reads an id as it is stored.
    pub(crate) fn stored(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Where the task lives.
    pub(crate) const fn shard(self) -> Shard {
        self.0[15] as Shard
    }

    pub(crate) const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The id as text, behind a prefix. Names are made for each row of each commit, which formatting is too slow for.
    fn named(self, prefix: &str) -> String {
        let mut text = [0; 36];
        [prefix, uuid::Uuid::from_bytes(self.0).as_hyphenated().encode_lower(&mut text)].concat()
    }

    /// The id as clients see it.
    pub(crate) fn text(self) -> String {
        self.named("")
    }

    /// The task's record.
    pub(crate) fn head(self) -> String {
        self.named("t:")
    }

    /// The record of the n-th artifact.
    pub(crate) fn artifact(self, n: usize) -> String {
        format!("a:{self}:{n}")
    }

    /// The stream of events.
    pub(crate) fn log(self) -> String {
        self.named("log:")
    }

    /// The stream of messages.
    pub(crate) fn history(self) -> String {
        self.named("h:")
    }

    /// The stream of completed steps of the turn that runs.
    pub(crate) fn journal(self) -> String {
        self.named("j:")
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        uuid::Uuid::from_bytes(self.0).as_hyphenated().fmt(f)
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Where the tasks and the conversation of a context live. The agent is not part of it: the turns of several
/// agents in one context stay together.
pub(crate) fn shard(scope: &Scope, context: &str, shards: Shard) -> Shard {
    let parts = [scope.tenant.as_bytes(), &[0], scope.owner.as_bytes(), &[0], context.as_bytes()];
    crc16(parts.into_iter().flatten().copied()) % shards.max(1)
}

/// CRC16/XMODEM, the one of Redis Cluster.
fn crc16(bytes: impl IntoIterator<Item = u8>) -> u16 {
    const TABLE: [u16; 256] = {
        let mut table = [0; 256];
        let mut byte: u16 = 0;
        while byte < 256 {
            let mut crc = byte << 8;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
                bit += 1;
            }
            table[byte as usize] = crc;
            byte += 1;
        }
        table
    };
    bytes.into_iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

/// A scope as a short name without structure, for keys: the parts are strangers' text. The records behind the
/// keys carry the whole scope and are compared with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScopeKey(String);

impl ScopeKey {
    pub(crate) fn new(scope: &Scope) -> Self {
        let mut hash = digest::Context::new(&digest::SHA256);
        for part in [&scope.agent, &scope.tenant, &scope.owner] {
            hash.update(&(part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        Self(BASE64_URL_SAFE_NO_PAD.encode(&hash.finish().as_ref()[..15]))
    }

    /// The record of a context.
    pub(crate) fn context(&self, context: &str) -> String {
        ["c:", &self.0, ":", context].concat()
    }

    /// The scope and the id of the context that a record is about.
    pub(crate) fn of_context(key: &str) -> Option<(Self, &str)> {
        let (scope, context) = key.strip_prefix("c:")?.split_once(':')?;
        Some((Self(scope.to_owned()), context))
    }

    /// The index of the tasks of this scope that match a filter, by the time of their status. Those of all states and
    /// of one are moved together, so they are kept together.
    pub(crate) fn list(&self, context: Option<&str>, state: Option<i32>) -> String {
        let mut name = ["i:", &self.0].concat();
        if let Some(context) = context {
            name.reserve(context.len() + 8);
            name.push_str(":c:");
            name.push_str(context);
        }
        if let Some(state) = state {
            name.push('/');
            name.push_str(&state.to_string());
        }
        name
    }

    /// The index of this scope's tasks whose turn waits, is queued or runs.
    pub(crate) fn turns(&self) -> String {
        format!("turns:{}", self.0)
    }

    /// The index of the hidden tasks of a context: part of its conversation, and of nothing else.
    pub(crate) fn hidden(&self, context: &str) -> String {
        format!("i:{}:h:{context}", self.0)
    }
}

/// The record of what was sent first under a client's name for it, and where it lives. Names are strangers' text.
pub(crate) fn reservation(scope: &Scope, name: &str, shards: Shard) -> (Shard, String) {
    let hash = digest::digest(&digest::SHA256, name.as_bytes());
    let key = format!("{RESERVED}{}:{}", ScopeKey::new(scope).0, BASE64_URL_SAFE_NO_PAD.encode(hash.as_ref()));
    (crc16(key.bytes()) % shards.max(1), key)
}

/// The record that says that a message with a client's name was accepted.
pub(crate) fn accepted(turn: &[u8]) -> String {
    let id = turn.try_into().unwrap_or_default();
    format!("{ACCEPTED}{}", uuid::Uuid::from_bytes(id).as_simple())
}

/// How the keys of [`reservation`] and [`accepted`] begin.
pub(crate) const RESERVED: &str = "k:";
pub(crate) const ACCEPTED: &str = "s:";

/// The index of turns that wait, are queued or run, by the time they were accepted.
pub(crate) const ACTIVE: &str = "active";

/// The index of tasks that wait for input or authorization, by since when.
pub(crate) const PARKED: &str = "parked";

/// The index of records that the background work has to look at, by when. Members are keys of records.
pub(crate) const DUE: &str = "due";

/// The record that says where the sweep of the shard stands.
pub(crate) const SWEEP: &str = "sweep";

/// The record that says until when one replica cleans up in the shard.
pub(crate) const CLEANING: &str = "cleaning";

/// The record in shard 0 with the key that seals list cursors.
pub(crate) const CURSOR_KEY: &str = "cursor-key";

/// The topic on which every commit with events says `<task> <newest number>`: one per shard, because a
/// subscription per task would cost more than the task.
pub(crate) const EVENTS: &str = "events";

/// The name, in the refs of a task, of its run entry.
pub(crate) const RUN: &str = "run";

/// The work stream of an agent.
pub(crate) fn runs(agent: &str) -> String {
    format!("runs:{agent}")
}

/// The topic of cancel orders for one runner.
pub(crate) fn control(consumer: &str) -> String {
    format!("control:{consumer}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc16_is_the_one_of_redis() {
        assert_eq!(crc16(*b"123456789"), 0x31c3);
    }

    #[test]
    fn an_id_says_where_its_task_lives() {
        let id = TaskId::new([7; 16], 12);
        assert_eq!(id.shard(), 12);
        assert_eq!(TaskId::parse(&id.to_string(), 16), Some(id));
        assert!(id.to_string().ends_with("0c"));
        assert_eq!(TaskId::parse(&id.to_string(), 12), None, "no such shard");
        for foreign in ["", "x", "123", &id.to_string().to_uppercase(), &id.to_string().replace('-', "")] {
            assert_eq!(TaskId::parse(foreign, 16), None, "{foreign}");
        }
    }

    #[test]
    fn scopes_that_only_look_alike_have_different_keys() {
        let scope = |agent: &str, tenant: &str, owner: &str| {
            ScopeKey::new(&Scope { agent: agent.into(), tenant: tenant.into(), owner: owner.into() })
        };
        assert_ne!(scope("a", "b", ""), scope("a", "", "b"));
        assert_ne!(scope("ab", "", ""), scope("a", "b", ""));
        assert_eq!(scope("a", "b", "c"), scope("a", "b", "c"));
    }
}
