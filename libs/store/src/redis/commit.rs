//! A batch as one function call.

use std::{fmt::Display, io::Write as _, str::FromStr};

use redis::Cmd;

use super::{
    RedisEngine,
    index::Place,
    keys::{Keys, kind},
    library::{Function, Library},
    link::Lost,
    record, value,
};
use crate::{At, Batch, Check, Committed, EntryId, Error, Op, Rate, Result, Shard, worker::DEAD};

/// Whole numbers beyond this are not exact as doubles, which Lua counts in.
const EXACT: i64 = 1 << 53;

impl RedisEngine {
    pub(super) async fn commit_batch(&self, batch: &Batch) -> Result<Committed> {
        self.check_shard(batch.shard)?;
        let call = Call::new(&self.link.keys, batch, self.publish())?;
        let function = if batch.releasing { Function::Release } else { Function::Commit };
        let command = call.command(&self.link.library, function);
        // Only a commit id makes a repeat harmless.
        let lost = if batch.commit.is_some() { Lost::RepeatOnce } else { Lost::Fail };
        let asked = tokio::time::Instant::now();
        let answer = self.link.call(batch.shard, &command, lost).await?;
        let text = value::text(answer).ok_or_else(value::strange)?;
        let committed = match text.strip_prefix('=') {
            Some(first) => parse(first),
            None => parse(&text).inspect(|committed| self.clock.heard(committed.at, asked)),
        };
        self.settled(batch);
        let mut committed = committed.ok_or_else(value::strange)?;
        if let Some(first) = first_append(&batch.ops) {
            // It was done before the others, and belongs between them.
            let before = batch.ops[..first].iter().filter(|op| matches!(op, Op::Append { .. })).count();
            committed.entries.get_mut(..=before).ok_or_else(value::strange)?.rotate_left(1);
        }
        Ok(committed)
    }

    /// What a commit means for claims of this process.
    fn settled(&self, batch: &Batch) {
        for op in &batch.ops {
            match op {
                Op::Ack { stream, id } | Op::Bury { stream, id, .. } => {
                    self.arrived.forget(batch.shard, stream, *id);
                }
                Op::HandBack { stream, id } => {
                    self.arrived.forget(batch.shard, stream, *id);
                    // The same news comes through Redis, a moment later.
                    self.notices.handed_back();
                }
                _ => {}
            }
        }
    }

    /// The command that reaches a channel's listeners.
    pub(super) fn publish(&self) -> &'static str {
        if self.link.is_cluster() { "SPUBLISH" } else { "PUBLISH" }
    }
}

/// Reads `<at>;<version>,…;<entry>,…`.
fn parse(text: &str) -> Option<Committed> {
    fn list<T: FromStr>(text: &str) -> Option<Vec<T>> {
        text.split_terminator(',').map(|word| word.parse().ok()).collect()
    }
    let mut parts = text.split(';');
    let at = parts.next()?.parse().ok()?;
    Some(Committed { versions: list(parts.next()?)?, entries: list(parts.next()?)?, at })
}

/// Texts one after the other, in one piece of memory.
#[derive(Debug, Default)]
struct Texts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Texts {
    /// Adds what is written.
    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len());
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.ends.iter().scan(0, |start, end| Some(&self.bytes[std::mem::replace(start, *end)..*end]))
    }
}

/// Keys and arguments of `commit` in `library.lua`, which reads both front to back.
struct Call<'a> {
    names: &'a Keys,
    shard: Shard,
    publish: &'static str,
    keys: Texts,
    args: Texts,
}

impl<'a> Call<'a> {
    fn new(names: &'a Keys, batch: &'a Batch, publish: &'static str) -> Result<Self> {
        let mut call = Self { names, shard: batch.shard, publish, keys: Texts::default(), args: Texts::default() };
        call.args.bytes.reserve(1024);
        call.keys.bytes.reserve(1024);
        match &batch.commit {
            Some((lead, id)) => {
                let last = batch.ops.iter().rfind(|op| record_of(op) == Some(lead));
                if !matches!(last, Some(Op::Put { .. })) {
                    return Err(Error::Malformed(format!("the lead record {lead} is not put")));
                }
                call.key(kind::PLAIN, lead);
                call.bytes(id);
            }
            None => call.bytes(b""),
        }
        for check in &batch.checks {
            call.check(check)?;
        }
        let first = first_append(&batch.ops);
        call.needs(&batch.ops, first)?;
        if let Some(Op::Append { stream, at, tag, payload, into: None }) = first.and_then(|first| batch.ops.get(first))
        {
            call.text("append_first");
            call.append(stream, *at, *tag, payload);
        }
        call.indexes(&batch.ops);
        for (n, op) in batch.ops.iter().enumerate() {
            if Some(n) != first {
                call.operation(op);
            }
        }
        Ok(call)
    }

    /// The command that calls a function with this.
    fn command(&self, library: &Library, function: Function) -> Cmd {
        let texts = self.keys.ends.len() + self.args.ends.len();
        let mut command = library.call_with(function, texts + 1, self.keys.bytes.len() + self.args.bytes.len() + 8);
        command.arg(self.keys.ends.len());
        for text in self.keys.iter().chain(self.args.iter()) {
            command.arg(text);
        }
        command
    }

    fn key(&mut self, kind: &str, name: &str) {
        self.keys.push(|bytes| self.names.write(self.shard, kind, name, bytes));
    }

    fn bytes(&mut self, arg: &[u8]) {
        self.args.push(|bytes| bytes.extend_from_slice(arg));
    }

    fn text(&mut self, arg: &str) {
        self.bytes(arg.as_bytes());
    }

    fn number(&mut self, arg: impl Display) {
        // Writing to memory does not fail.
        self.args.push(|bytes| drop(write!(bytes, "{arg}")));
    }

    fn check(&mut self, check: &Check) -> Result<()> {
        match check {
            Check::Version { key, version } => {
                self.text("version");
                self.key(kind::PLAIN, key);
                self.number(version);
            }
            Check::Absent { key } => {
                self.text("absent");
                self.key(kind::PLAIN, key);
            }
            Check::Pending { stream, id, consumer } => {
                self.text("pending");
                self.key(kind::PLAIN, stream);
                self.number(id);
                self.text(consumer);
            }
            Check::Tail { stream, id } => {
                self.text("tail");
                self.key(kind::PLAIN, stream);
                self.key(kind::REMOVED, stream);
                self.number(id);
            }
            Check::ShorterThan { stream, len } => {
                self.text("shorter");
                self.key(kind::PLAIN, stream);
                self.number(len);
            }
            Check::Limit { key, rate: Rate { burst: 0, .. } } => {
                return Err(Error::Malformed(format!("limit {key} lets nothing through")));
            }
            Check::Limit { key, rate } => {
                self.text("limit");
                self.key(kind::LIMIT, key);
                self.number(rate.burst);
                self.number(rate.interval.as_micros().min(EXACT.unsigned_abs().into()));
            }
        }
        Ok(())
    }

    /// Operations that could fail half way, and what Redis must look at beforehand so that they do not.
    fn needs(&mut self, ops: &[Op], first: Option<usize>) -> Result<()> {
        for (n, op) in ops.iter().enumerate() {
            let Op::Append { stream, at, into, .. } = op else { continue };
            if let Some((record, name)) = into {
                if name.contains(record::RESERVED) {
                    return Err(Error::Malformed(format!("a ref cannot be named {name:?}")));
                }
                match ops[..n].iter().rfind(|op| record_of(op) == Some(record)) {
                    Some(Op::Put { .. }) => {}
                    Some(_) => return Err(Error::Malformed(format!("no record {record} to write a ref into"))),
                    None => {
                        self.text("needs_record");
                        self.key(kind::PLAIN, record);
                    }
                }
            }
            if let At::Number(number) = at {
                let low = || Error::Malformed(format!("entry {number}-0 of {stream} is not above the newest"));
                if *number == 0 {
                    return Err(low());
                }
                if *number > EXACT.unsigned_abs() {
                    return Err(Error::Malformed(format!("entry number {number} of {stream} is too large")));
                }
                let before = ops[..n].iter().rfind(|op| match op {
                    Op::Append { stream: other, .. } | Op::Drop { stream: other } => other == stream,
                    _ => false,
                });
                match before {
                    Some(Op::Drop { .. }) => {}
                    Some(Op::Append { at: At::Number(before), .. }) if before < number => {}
                    Some(_) => return Err(low()),
                    // That is found out by doing it.
                    None if Some(n) == first => {}
                    None => {
                        self.text("needs_above");
                        self.key(kind::PLAIN, stream);
                        self.key(kind::REMOVED, stream);
                        self.number(EntryId::number(*number));
                    }
                }
            }
        }
        Ok(())
    }

    /// Changes of indexes: for each sorted set, one command that takes members out and one that puts members in, as
    /// long as they are two at most, which is what a task needs. What the last operation on a member leaves is all
    /// that counts.
    fn indexes(&mut self, ops: &[Op]) {
        let mut changes: Vec<(Place<'_>, i64, &str, bool)> = Vec::new();
        for op in ops {
            let Op::Index { index, member, was, now } = op else { continue };
            let place = Place::of(index);
            let leaves = was.filter(|_| was != now).map(|was| (place, was, &**member, false));
            changes.extend(leaves.into_iter().chain(now.map(|now| (place, now, &**member, true))));
        }
        // Stable: of changes to the same member, the last one stays the last.
        changes.sort_by(|one, other| (one.0, one.1, one.2).cmp(&(other.0, other.1, other.2)));
        let same = |one: &(Place<'_>, i64, &str, bool), other: &(Place<'_>, i64, &str, bool)| {
            (one.0, one.1, one.2) == (other.0, other.1, other.2)
        };
        for set in changes.chunk_by(|one, other| one.0.set == other.0.set) {
            for (stays, step, step_two) in [(false, "unindex", "unindex_two"), (true, "index", "index_two")] {
                let members: Vec<_> = set.chunk_by(same).filter_map(<[_]>::last).filter(|it| it.3 == stays).collect();
                for members in members.chunks(2) {
                    self.text(if members.len() == 2 { step_two } else { step });
                    self.key(kind::INDEX, set[0].0.set);
                    for (place, score, member, _) in members {
                        self.args.push(|bytes| place.write(*score, member, bytes));
                    }
                }
            }
        }
    }

    fn append(&mut self, stream: &str, at: At, tag: u8, payload: &[u8]) {
        self.key(kind::PLAIN, stream);
        match at {
            At::Next => self.text("*"),
            At::Number(number) => self.number(EntryId::number(number)),
        }
        self.number(tag);
        self.bytes(payload);
    }

    fn operation(&mut self, op: &Op) {
        match op {
            Op::Put { key, bytes } => {
                self.text("put");
                self.key(kind::PLAIN, key);
                self.bytes(bytes);
            }
            Op::Delete { key } => {
                self.text("delete");
                self.key(kind::PLAIN, key);
            }
            // All of them were written before.
            Op::Index { .. } => {}
            Op::Append { stream, at, tag, payload, into } => {
                self.text(if into.is_some() { "append_into" } else { "append" });
                self.append(stream, *at, *tag, payload);
                if let Some((record, name)) = into {
                    self.key(kind::PLAIN, record);
                    self.text(name);
                }
            }
            Op::Delay { stream, id, due, tag, payload } => {
                self.text("delay");
                self.key(kind::DUE, stream);
                self.key(kind::DELAYED, stream);
                self.text(id);
                // Due times are scores, and Lua counts in doubles.
                self.number(due.clamp(&-EXACT, &EXACT));
                self.args.push(|bytes| {
                    bytes.push(*tag);
                    bytes.extend_from_slice(payload);
                });
            }
            Op::Undelay { stream, id } => {
                self.text("undelay");
                self.key(kind::DUE, stream);
                self.key(kind::DELAYED, stream);
                self.text(id);
            }
            Op::Ack { stream, id } => self.entry("ack", stream, *id),
            Op::HandBack { stream, id } => {
                self.entry("hand_back", stream, *id);
                self.text(self.publish);
                self.key(kind::CHANNEL, super::notices::HANDED_BACK);
                self.text(stream);
            }
            Op::Bury { stream, id, reason } => {
                self.entry("bury", stream, *id);
                self.key(kind::PLAIN, DEAD);
                self.text(stream);
                self.text(reason);
            }
            Op::Remove { stream, id } => {
                self.text("remove");
                self.key(kind::PLAIN, stream);
                self.key(kind::REMOVED, stream);
                self.number(id);
            }
            Op::Drop { stream } => {
                self.text("drop");
                self.key(kind::PLAIN, stream);
                self.key(kind::REMOVED, stream);
            }
            Op::Notify { topic, payload } => {
                self.text("notify");
                self.text(self.publish);
                self.key(kind::CHANNEL, super::notices::NOTICES);
                self.args.push(|bytes| super::notices::encode(topic, payload, bytes));
            }
        }
    }

    fn entry(&mut self, operation: &'static str, stream: &str, id: EntryId) {
        self.text(operation);
        self.key(kind::PLAIN, stream);
        self.number(id);
    }
}

/// The append with a number of its own that is done before all else: then it may fail without a look beforehand.
fn first_append(ops: &[Op]) -> Option<usize> {
    let first = ops.iter().position(|op| matches!(op, Op::Append { at: At::Number(_), .. }))?;
    let Op::Append { stream, into: None, .. } = &ops[first] else { return None };
    let touched = ops[..first].iter().any(|op| match op {
        Op::Append { stream: other, .. } | Op::Drop { stream: other } | Op::Remove { stream: other, .. } => {
            other == stream
        }
        _ => false,
    });
    (!touched).then_some(first)
}

/// The record that an operation writes or deletes.
fn record_of(op: &Op) -> Option<&String> {
    match op {
        Op::Put { key, .. } | Op::Delete { key } => Some(key),
        _ => None,
    }
}
