//! Random batches, against a model of one page.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proptest::prelude::*;

use super::draft::{Draft, Home, text};
use crate::{Conflict, Engine, EntryId, Error, Order};

/// A batch in few words; names are made of small numbers, so that batches meet.
#[derive(Clone, Debug)]
pub struct Step {
    checks: Vec<TryCheck>,
    ops: Vec<TryOp>,
    commit: Option<(u8, u8)>,
    /// Sent twice.
    again: bool,
}

#[derive(Clone, Debug)]
enum TryCheck {
    /// At the version that the model knows, plus this.
    Version(u8, u64),
    Absent(u8),
    /// At the tail that the model knows, plus this.
    Tail(u8, u64),
    Shorter(u8, u64),
}

#[derive(Clone, Debug)]
enum TryOp {
    Put(u8, u8),
    Delete(u8),
    Index(u8, u8, Option<i64>),
    /// The next number, plus this, minus one.
    Number(u8, u64),
    Next(u8),
    Into(u8, u8),
    Remove(u8),
    Drop(u8),
}

/// Histories of up to 30 batches.
pub fn histories() -> impl Strategy<Value = Vec<Step>> {
    let name = || 0..3_u8;
    let check = prop_oneof![
        4 => (name(), prop_oneof![9 => Just(0_u64), 1 => Just(1)]).prop_map(|(key, off)| TryCheck::Version(key, off)),
        1 => name().prop_map(TryCheck::Absent),
        2 => (name(), prop_oneof![9 => Just(0_u64), 1 => Just(1)]).prop_map(|(s, off)| TryCheck::Tail(s, off)),
        1 => (name(), 1..6_u64).prop_map(|(stream, len)| TryCheck::Shorter(stream, len)),
    ];
    let op = prop_oneof![
        4 => (name(), any::<u8>()).prop_map(|(key, value)| TryOp::Put(key, value)),
        1 => name().prop_map(TryOp::Delete),
        3 => (name(), 0..5_u8, proptest::option::weighted(0.8, -2..4_i64)).prop_map(|(i, m, s)| TryOp::Index(i, m, s)),
        3 => (name(), prop_oneof![1 => Just(0_u64), 20 => 1..3_u64]).prop_map(|(s, off)| TryOp::Number(s, off)),
        2 => name().prop_map(TryOp::Next),
        1 => (name(), name()).prop_map(|(key, stream)| TryOp::Into(key, stream)),
        1 => name().prop_map(TryOp::Remove),
        1 => name().prop_map(TryOp::Drop),
    ];
    let step = (
        proptest::collection::vec(check, 0..2),
        proptest::collection::vec(op, 1..6),
        proptest::option::weighted(0.4, (name(), 0..2_u8)),
        any::<bool>(),
    );
    let step = step.prop_map(|(checks, ops, commit, again)| Step { checks, ops, commit, again });
    proptest::collection::vec(step, 1..30)
}

#[derive(Clone, Debug, Default)]
struct Model {
    records: BTreeMap<String, Known>,
    indexes: BTreeMap<String, BTreeMap<String, i64>>,
    streams: BTreeMap<String, Stream>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    version: u64,
    value: String,
    refs: BTreeSet<String>,
    commit: Option<u8>,
}

#[derive(Clone, Debug, Default)]
struct Stream {
    tail: u64,
    values: BTreeMap<u64, String>,
    /// Streams with ids of the store.
    next: Vec<String>,
}

/// What a batch should end with.
#[derive(Debug, PartialEq)]
enum End {
    Done(Vec<u64>),
    Repeated,
    Conflict(usize),
    Malformed,
}

impl Model {
    fn tail(&self, stream: &str) -> u64 {
        self.streams.get(stream).map_or(0, |stream| stream.tail)
    }

    fn version(&self, key: &str) -> u64 {
        self.records.get(key).map_or(0, |known| known.version)
    }

    /// Writes the step down as a batch, and says what it should end with.
    fn run(&mut self, home: &Home, step: &Step, n: usize) -> (Draft, End) {
        let (mut draft, mut next) = (home.batch(), self.clone());
        let mut end = None;
        for (at, check) in step.checks.iter().enumerate() {
            let holds;
            (draft, holds) = match check {
                TryCheck::Version(key, off) => {
                    let key = format!("r{key}");
                    let version = self.version(&key);
                    (draft.version(&key, version.max(1) + off), version > 0 && *off == 0)
                }
                TryCheck::Absent(key) => {
                    let key = format!("r{key}");
                    (draft.absent(&key), self.version(&key) == 0)
                }
                TryCheck::Tail(stream, off) => {
                    let stream = format!("n{stream}");
                    (draft.tail(&stream, EntryId::number(self.tail(&stream) + off)), *off == 0)
                }
                TryCheck::Shorter(stream, len) => {
                    let stream = format!("n{stream}");
                    let found = self.streams.get(&stream).map_or(0, |stream| stream.values.len());
                    (draft.shorter(&stream, *len), (found as u64) < *len)
                }
            };
            if !holds && end.is_none() {
                end = Some(End::Conflict(at));
            }
        }
        let mut versions = Vec::new();
        for op in &step.ops {
            let fine;
            (draft, fine) = next.apply(draft, op, n, &mut versions);
            if !fine && end.is_none() {
                end = Some(End::Malformed);
            }
        }
        if let Some((lead, id)) = step.commit {
            let lead = format!("r{lead}");
            draft = draft.id(&lead, [id; 16]).put(&lead, "lead");
            let repeated = self.records.get(&lead).is_some_and(|known| known.commit == Some(id));
            if repeated {
                end = Some(End::Repeated);
            }
            let known = next.records.entry(lead).or_default();
            known.version += 1;
            known.value = "lead".to_owned();
            known.commit = Some(id);
            versions.push(known.version);
        }
        let end = end.unwrap_or(End::Done(versions));
        if matches!(end, End::Done(_)) {
            *self = next;
        }
        (draft, end)
    }

    fn apply(&mut self, draft: Draft, op: &TryOp, n: usize, versions: &mut Vec<u64>) -> (Draft, bool) {
        let value = format!("v{n}");
        match op {
            TryOp::Put(key, value) => {
                let key = format!("r{key}");
                let known = self.records.entry(key.clone()).or_default();
                known.version += 1;
                known.value = value.to_string();
                versions.push(known.version);
                (draft.put(&key, &value.to_string()), true)
            }
            TryOp::Delete(key) => {
                let key = format!("r{key}");
                self.records.remove(&key);
                (draft.delete(&key), true)
            }
            TryOp::Index(index, member, now) => {
                let (index, member) = (format!("i{index}"), format!("m{member}"));
                let members = self.indexes.entry(index.clone()).or_default();
                let was = members.get(&member).copied();
                match now {
                    Some(now) => drop(members.insert(member.clone(), *now)),
                    None => drop(members.remove(&member)),
                }
                (draft.index(&index, &member, was, *now), true)
            }
            TryOp::Number(stream, off) => {
                let name = format!("n{stream}");
                let stream = self.streams.entry(name.clone()).or_default();
                let number = stream.tail + off;
                if *off > 0 {
                    stream.tail = number;
                    stream.values.insert(number, value.clone());
                }
                (draft.number(&name, number, &value), *off > 0)
            }
            TryOp::Next(stream) => {
                let name = format!("w{stream}");
                self.streams.entry(name.clone()).or_default().next.push(value.clone());
                (draft.append(&name, &value), true)
            }
            TryOp::Into(key, stream) => {
                let (key, name) = (format!("r{key}"), format!("w{stream}"));
                self.streams.entry(name.clone()).or_default().next.push(value.clone());
                let known = self.records.get_mut(&key);
                let exists = known.is_some();
                if let Some(known) = known {
                    known.refs.insert(name.clone());
                }
                (draft.append_into(&name, &value, &key, &name), exists)
            }
            TryOp::Remove(stream) => {
                let name = format!("n{stream}");
                let stream = self.streams.entry(name.clone()).or_default();
                let last = stream.tail;
                stream.values.remove(&last);
                (draft.remove(&name, EntryId::number(last)), true)
            }
            TryOp::Drop(stream) => {
                let name = format!("n{stream}");
                self.streams.remove(&name);
                (draft.drop_stream(&name), true)
            }
        }
    }

    async fn compare(&self, home: &Home) {
        for key in ["r0", "r1", "r2"] {
            let found = home.record(key).await;
            let found = found
                .map(|record| (record.version, text(&record.bytes), record.refs.into_keys().collect::<BTreeSet<_>>()));
            let known = self.records.get(key).map(|known| (known.version, known.value.clone(), known.refs.clone()));
            assert_eq!(found, known, "record {key}");
        }
        for index in ["i0", "i1", "i2"] {
            let members = self.indexes.get(index).into_iter().flatten();
            let mut members: Vec<_> = members.map(|(member, score)| (*score, member.clone())).collect();
            members.sort();
            assert_eq!(home.members(index, Order::Ascending, 2).await, members, "index {index}");
            let count = home.engine.index_count(home.shard, index, None).await.unwrap();
            assert_eq!(count, members.len() as u64, "index {index}");
        }
        for n in 0..3 {
            let (numbered, next) = (format!("n{n}"), format!("w{n}"));
            let found = home.entries(&numbered).await;
            let found: Vec<_> = found.iter().map(|entry| (entry.id.0, text(&entry.payload))).collect();
            let values = self.streams.get(&numbered).map(|stream| stream.values.clone()).unwrap_or_default();
            assert_eq!(found, values.into_iter().collect::<Vec<_>>(), "stream {numbered}");
            let values = self.streams.get(&next).map(|stream| stream.next.clone()).unwrap_or_default();
            assert_eq!(home.payloads(&next).await, values, "stream {next}");
        }
    }
}

/// Runs a history on an empty engine, and compares everything after each batch.
pub async fn follows(engine: Arc<dyn Engine>, history: Vec<Step>) {
    let (home, mut model) = (Home::new(engine), Model::default());
    for (n, step) in history.iter().enumerate() {
        let (draft, expected) = model.run(&home, step, n);
        let result = draft.commit().await;
        let found = match &result {
            Ok(_) if expected == End::Repeated => End::Repeated,
            Ok(done) => End::Done(done.versions.clone()),
            Err(Error::Conflict { check, reason }) => {
                assert!(!matches!(reason, Conflict::NotPending | Conflict::Limited(_)));
                End::Conflict(*check)
            }
            Err(Error::Malformed(_)) => End::Malformed,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(found, expected, "{step:?}");
        if step.again && step.commit.is_some() && result.is_ok() {
            assert_eq!(draft.commit().await, result);
        }
        model.compare(&home).await;
    }
}
