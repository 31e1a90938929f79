//! A configuration as YAML that can be read back, without what must not be seen.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Serialize, Serializer, ser::Error as _};
use serde_json::{Map, Value};

use super::Config;

/// The whole configuration, defaults included, as YAML. Values that may be secret read `(secret)`.
#[must_use]
pub fn to_yaml(config: &Config) -> String {
    let value = serde_json::to_value(config).expect("a configuration has string keys and finite numbers");
    block(&value, 0)
}

/// `{"command": {"cwd": …}}` as `{"type": "command", "cwd": …}`.
pub(super) fn tagged<T: Serialize, S: Serializer>(variant: &T, serializer: S) -> Result<S::Ok, S::Error> {
    let value = serde_json::to_value(variant).map_err(S::Error::custom)?;
    let mut tagged = Map::new();
    match value {
        Value::Object(map) => {
            for (name, fields) in map {
                tagged.insert("type".to_owned(), name.into());
                if let Value::Object(fields) = fields {
                    tagged.extend(fields);
                }
            }
        }
        name => drop(tagged.insert("type".to_owned(), name)),
    }
    tagged.serialize(serializer)
}

/// The keys of a map whose values may be secrets.
pub(super) fn redacted<S: Serializer>(map: &BTreeMap<String, String>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(map.keys().map(|key| (key, "(secret)")))
}

/// The lines of a map or list that is not empty.
fn block(value: &Value, indent: usize) -> String {
    let mut yaml = String::new();
    let margin = " ".repeat(indent);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let key = scalar(&Value::from(key.as_str()));
                match value {
                    _ if is_block(value) => write!(yaml, "{margin}{key}:\n{}", block(value, indent + 2)),
                    _ => writeln!(yaml, "{margin}{key}: {}", scalar(value)),
                }
                .expect("writing to a string");
            }
        }
        Value::Array(list) => {
            for value in list {
                match value {
                    _ if is_block(value) => write!(yaml, "{margin}- {}", block(value, indent + 2).trim_start()),
                    _ => writeln!(yaml, "{margin}- {}", scalar(value)),
                }
                .expect("writing to a string");
            }
        }
        _ => {}
    }
    yaml
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    }
}

/// JSON is YAML; quotes go where the word cannot be taken for anything else.
fn scalar(value: &Value) -> String {
    const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    match value {
        Value::String(text)
            if text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "._/+-".contains(c))
                && !WORDS.contains(&text.to_ascii_lowercase().as_str()) =>
        {
            text.clone()
        }
        other => other.to_string(),
    }
}
