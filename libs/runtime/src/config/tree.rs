//! A configuration before it is typed: values, each with the place that it comes from.

use std::{collections::BTreeMap, fmt, mem, sync::Arc};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A file, by its name.
    File(Arc<str>),
    /// A variable of the environment. Its text takes the type that is asked for.
    Variable(Arc<str>),
    /// A flag of the command line. Its text takes the type that is asked for.
    Flag(Arc<str>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(name) | Self::Flag(name) => f.write_str(name),
            Self::Variable(name) => write!(f, "{name} in the environment"),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(BTreeMap<String, Node>),
    /// A faulty value was here; reads as a zero of any type, so that the search for faults can go on.
    Hole,
}

/// One step from a node to a node below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// Steps from the root; displayed as `agents[0].mount`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Path(pub(super) Vec<Step>);

impl Path {
    /// Reads what [`Path`] displays. Keys with dots or brackets in them do not survive the way back.
    pub(super) fn parse(text: &str) -> Self {
        let steps = text.split(['.', '[']).filter(|step| !step.is_empty()).map(|step| {
            let index = step.strip_suffix(']').and_then(|index| index.parse().ok());
            index.map_or_else(|| Step::Key(step.to_owned()), Step::Index)
        });
        Self(steps.collect())
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if at == 0 => write!(f, "{}", key.escape_debug())?,
                Step::Key(key) => write!(f, ".{}", key.escape_debug())?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// A key as the typed configuration knows it: kebab-case, and lower case where it was a variable's name.
pub(super) fn canonical(key: &str, origin: &Origin) -> String {
    let key = key.replace('_', "-");
    if matches!(origin, Origin::Variable(_)) { key.to_ascii_lowercase() } else { key }
}

impl Node {
    pub(super) fn map(origin: Origin) -> Self {
        Self { value: Value::Map(BTreeMap::new()), origin }
    }

    /// The node at `path`, or the last one before the path breaks off, and how many steps lead there.
    pub(super) fn nearest(&self, path: &Path) -> (&Self, usize) {
        let mut node = self;
        for (depth, step) in path.0.iter().enumerate() {
            let next = match (&node.value, step) {
                (Value::Map(map), Step::Key(key)) => spelling(map, key).and_then(|key| map.get(&key)),
                (Value::List(list), Step::Index(index)) => list.get(*index),
                _ => None,
            };
            match next {
                Some(next) => node = next,
                None => return (node, depth),
            }
        }
        (node, path.0.len())
    }

    fn at_mut(&mut self, path: &[Step]) -> Option<&mut Self> {
        let mut node = self;
        for step in path {
            node = match (&mut node.value, step) {
                (Value::Map(map), Step::Key(key)) => map.get_mut(&spelling(map, key)?)?,
                (Value::List(list), Step::Index(index)) => list.get_mut(*index)?,
                _ => return None,
            };
        }
        Some(node)
    }

    /// Puts a hole at `path`; false when there is one already, or no place for one.
    pub(super) fn cut(&mut self, path: &Path) -> bool {
        if let Some(node) = self.at_mut(&path.0) {
            return !matches!(mem::replace(&mut node.value, Value::Hole), Value::Hole);
        }
        let Some((Step::Key(key), parent)) = path.0.split_last() else { return false };
        match self.at_mut(parent) {
            Some(Self { value: Value::Map(map), origin }) => {
                map.insert(key.clone(), Self { value: Value::Hole, origin: origin.clone() }).is_none()
            }
            _ => false,
        }
    }

    /// Takes the key that `path` ends in out of its map; false when it is not there.
    pub(super) fn remove(&mut self, path: &Path) -> bool {
        let Some((Step::Key(key), parent)) = path.0.split_last() else { return false };
        match self.at_mut(parent) {
            Some(Self { value: Value::Map(map), .. }) => {
                spelling(map, key).is_some_and(|key| map.remove(&key).is_some())
            }
            _ => false,
        }
    }

    /// Reads a text of the environment or a flag, which is a whole list or map, as JSON; false when it is not.
    pub(super) fn expand(&mut self, path: &Path) -> bool {
        let Some(node) = self.at_mut(&path.0) else { return false };
        let Value::Text(text) = &node.value else { return false };
        if matches!(node.origin, Origin::File(_)) || !text.trim_start().starts_with(['{', '[']) {
            return false;
        }
        let Ok(json) = serde_json::from_str(text) else { return false };
        // What the JSON quotes is text, and its keys are spelled as in a file.
        node.value = from_json(json, &Origin::File(node.origin.to_string().into())).value;
        true
    }

    /// Lays `over` on this node: maps key by key, everything else as a whole.
    pub(super) fn merge(&mut self, over: Self) {
        match (&mut self.value, over.value) {
            (Value::Map(under), Value::Map(over)) => {
                for (key, node) in over {
                    match spelling(under, &key).and_then(|key| under.get_mut(&key)) {
                        Some(below) => below.merge(node),
                        None => drop(under.insert(key, node)),
                    }
                }
            }
            (_, Value::Null) => {}
            (value, over_value) => {
                *value = over_value;
                self.origin = over.origin;
            }
        }
    }

    /// Sets the value at `path`, making maps where there is nothing.
    ///
    /// # Errors
    /// Why the path leads nowhere.
    pub(super) fn set(&mut self, path: &[&str], text: String, origin: &Origin) -> Result<(), String> {
        let Some((step, rest)) = path.split_first() else {
            *self = Self { value: Value::Text(text), origin: origin.clone() };
            return Ok(());
        };
        if matches!(self.value, Value::Null) {
            let numbered = step.parse::<usize>().is_ok();
            self.value = if numbered { Value::List(Vec::new()) } else { Value::Map(BTreeMap::new()) };
            self.origin = origin.clone();
        }
        match &mut self.value {
            Value::List(list) => {
                let len = list.len();
                let index: usize = step.parse().map_err(|_| format!("{step:?} is not a number from 0 to {len}"))?;
                if index == len {
                    list.push(Self { value: Value::Null, origin: origin.clone() });
                }
                let node =
                    list.get_mut(index).ok_or_else(|| format!("the list has {len} entries; {index} is past them"))?;
                node.set(rest, text, origin)
            }
            Value::Map(map) => {
                let written = spelling(map, step);
                let null = Self { value: Value::Null, origin: origin.clone() };
                let mut node = written.as_ref().and_then(|key| map.remove(key)).unwrap_or(null);
                let set = node.set(rest, text, origin);
                // A variable's spelling only counts for what variables have set.
                let key = written.filter(|_| matches!(origin, Origin::Variable(_)));
                map.insert(key.unwrap_or_else(|| (*step).to_owned()), node);
                set
            }
            _ => Err(format!("the key above it holds a single value, set in {}", self.origin)),
        }
    }
}

/// Whether two spellings mean one key. Names of variables have no dots, so `a2a-0-3` is `a2a-0.3`.
fn is_same_key(one: &str, other: &str) -> bool {
    let plain = |byte: u8| if matches!(byte, b'_' | b'.') { b'-' } else { byte.to_ascii_lowercase() };
    one.bytes().map(plain).eq(other.bytes().map(plain))
}

/// The spelling under which a map holds a key.
fn spelling(map: &BTreeMap<String, Node>, key: &str) -> Option<String> {
    if map.contains_key(key) {
        return Some(key.to_owned());
    }
    map.keys().find(|candidate| is_same_key(candidate, key)).cloned()
}

fn from_json(json: serde_json::Value, origin: &Origin) -> Node {
    use serde_json::Value as Json;
    let value = match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => {
            number.as_i64().map_or_else(|| Value::Float(number.as_f64().unwrap_or(f64::NAN)), Value::Int)
        }
        Json::String(text) => Value::Text(text),
        Json::Array(list) => Value::List(list.into_iter().map(|json| from_json(json, origin)).collect()),
        Json::Object(map) => Value::Map(map.into_iter().map(|(key, json)| (key, from_json(json, origin))).collect()),
    };
    Node { value, origin: origin.clone() }
}

/// Takes over what the `config` crate read from a file.
pub(super) fn from_file(value: config::ValueKind, origin: &Origin) -> Node {
    use config::ValueKind as Kind;
    let value = match value {
        Kind::Nil => Value::Null,
        Kind::Boolean(value) => Value::Bool(value),
        Kind::I64(value) => Value::Int(value),
        Kind::I128(value) => i64::try_from(value).map_or_else(|_| Value::Text(value.to_string()), Value::Int),
        Kind::U64(value) => i64::try_from(value).map_or_else(|_| Value::Text(value.to_string()), Value::Int),
        Kind::U128(value) => i64::try_from(value).map_or_else(|_| Value::Text(value.to_string()), Value::Int),
        Kind::Float(value) => Value::Float(value),
        Kind::String(text) => Value::Text(text),
        Kind::Table(map) => {
            Value::Map(map.into_iter().map(|(key, value)| (key, from_file(value.kind, origin))).collect())
        }
        Kind::Array(list) => Value::List(list.into_iter().map(|value| from_file(value.kind, origin)).collect()),
    };
    Node { value, origin: origin.clone() }
}
