//! A batch as one function call.

use std::{borrow::Cow, collections::BTreeMap, fmt::Display, str::FromStr};

use redis::Cmd;

use super::{
    RedisEngine, index,
    keys::{Keys, kind},
    library::Function,
    link::Lost,
    record, value,
};
use crate::{At, Batch, Check, Committed, EntryId, Error, Op, Rate, Result, Shard, worker::DEAD};

/// Whole numbers beyond this are not exact as doubles, which Lua counts in.
const EXACT: i64 = 1 << 53;

/// Members in one command at most: Lua's stack is not large.
const MEMBERS: usize = 1000;

impl RedisEngine {
    pub(super) async fn commit_batch(&self, batch: &Batch) -> Result<Committed> {
        self.check_shard(batch.shard)?;
        let call = Call::new(&self.link.keys, batch, self.publish())?;
        let function = if batch.releasing { Function::Release } else { Function::Commit };
        let mut command = self.link.library.call(function);
        call.write(&mut command);
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

/// Keys and arguments of `commit` in `library.lua`, which reads both front to back.
struct Call<'a> {
    names: &'a Keys,
    shard: Shard,
    keys: Vec<String>,
    args: Vec<Cow<'a, [u8]>>,
}

impl<'a> Call<'a> {
    fn new(names: &'a Keys, batch: &'a Batch, publish: &'static str) -> Result<Self> {
        let mut call =
            Self { names, shard: batch.shard, keys: Vec::new(), args: Vec::with_capacity(4 * batch.ops.len() + 8) };
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
        call.number(batch.checks.len());
        for check in &batch.checks {
            call.check(check)?;
        }
        let first = first_append(&batch.ops);
        call.needs(&batch.ops, first)?;
        if let Some(op) = first.and_then(|first| batch.ops.get(first)) {
            let start = call.args.len();
            call.operation(op, publish);
            call.args[start] = Cow::Borrowed(b"append_first");
        }
        call.indexes(&batch.ops);
        for (n, op) in batch.ops.iter().enumerate() {
            if Some(n) != first {
                call.operation(op, publish);
            }
        }
        Ok(call)
    }

    fn write(&self, command: &mut Cmd) {
        command.arg(self.keys.len());
        for key in &self.keys {
            command.arg(key.as_bytes());
        }
        for arg in &self.args {
            command.arg(&arg[..]);
        }
    }

    fn key(&mut self, kind: &str, name: &str) {
        self.keys.push(self.names.key(self.shard, kind, name));
    }

    fn bytes(&mut self, arg: &'a [u8]) {
        self.args.push(Cow::Borrowed(arg));
    }

    fn text(&mut self, arg: &'a str) {
        self.bytes(arg.as_bytes());
    }

    fn number(&mut self, arg: impl Display) {
        self.args.push(Cow::Owned(arg.to_string().into_bytes()));
    }

    fn check(&mut self, check: &'a Check) -> Result<()> {
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
    fn needs(&mut self, ops: &'a [Op], first: Option<usize>) -> Result<()> {
        let at = self.args.len();
        let mut count = 0;
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
                        self.text("record");
                        self.key(kind::PLAIN, record);
                        count += 1;
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
                        self.text("above");
                        self.key(kind::PLAIN, stream);
                        self.key(kind::REMOVED, stream);
                        self.number(EntryId::number(*number));
                        count += 1;
                    }
                }
            }
        }
        self.args.insert(at, Cow::Owned(count.to_string().into_bytes()));
        Ok(())
    }

    /// Changes of indexes: for each sorted set, one command that takes members out and one that puts members in.
    /// What the last operation on a member leaves is all that counts.
    fn indexes(&mut self, ops: &'a [Op]) {
        let mut sets: BTreeMap<&str, BTreeMap<Vec<u8>, bool>> = BTreeMap::new();
        for op in ops {
            let Op::Index { index, member, was, now } = op else { continue };
            let place = index::Place::of(index);
            let members = sets.entry(place.set).or_default();
            if let Some(was) = was.filter(|_| was != now) {
                members.insert(place.member(was, member), false);
            }
            if let Some(now) = now {
                members.insert(place.member(*now, member), true);
            }
        }
        for (set, members) in sets {
            let (joining, leaving): (Vec<_>, Vec<_>) = members.into_iter().partition(|(_, stays)| *stays);
            for leaving in leaving.chunks(MEMBERS) {
                self.text("unindex");
                self.key(kind::INDEX, set);
                self.number(leaving.len());
                self.args.extend(leaving.iter().map(|(member, _)| member.clone().into()));
            }
            for joining in joining.chunks(MEMBERS) {
                self.text("index");
                self.key(kind::INDEX, set);
                self.number(2 * joining.len());
                for (member, _) in joining {
                    self.text("0");
                    self.args.push(member.clone().into());
                }
            }
        }
    }

    fn operation(&mut self, op: &'a Op, publish: &'static str) {
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
                self.key(kind::PLAIN, stream);
                match at {
                    At::Next => self.text("*"),
                    At::Number(number) => self.number(EntryId::number(*number)),
                }
                self.number(tag);
                self.bytes(payload);
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
                let mut body = Vec::with_capacity(1 + payload.len());
                body.push(*tag);
                body.extend_from_slice(payload);
                self.args.push(Cow::Owned(body));
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
                self.text(publish);
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
                self.text(publish);
                self.key(kind::CHANNEL, super::notices::NOTICES);
                self.args.push(Cow::Owned(super::notices::encode(topic, payload)));
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
