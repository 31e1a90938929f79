//! A serde deserializer around another one that adds what generated code lacks, in the same pass: `null` for
//! "unset", the depth limit, integral floats, exactness of integers, and the path to whatever goes wrong.

use std::{
    borrow::Cow,
    cell::RefCell,
    fmt::{self, Write},
    marker::PhantomData,
};

use serde::{
    Deserializer,
    de::{
        self, DeserializeSeed, EnumAccess, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::{MapDeserializer, SeqDeserializer, StrDeserializer, UnitDeserializer},
    },
};

use super::{MAX_DEPTH, cut};
use crate::wkt::{MAX_SAFE_INTEGER, inexact};

/// Longest path in a refusal; keys come from the caller.
const MAX_PATH: usize = 200;

/// What one read remembers: its text, and after a failure the path to it, innermost step first.
#[derive(Default)]
pub(super) struct Trace<'t> {
    text: Option<&'t str>,
    steps: RefCell<Vec<Step>>,
}

enum Step {
    Field(String),
    Key(String),
    Index(usize),
}

impl<'t> Trace<'t> {
    pub(super) fn of(text: &'t str) -> Self {
        Self { text: Some(text), ..Self::default() }
    }

    fn push(&self, step: Step) {
        self.steps.borrow_mut().push(step);
    }

    /// The path in JSON names, such as `message.parts[0].data.over`.
    pub(super) fn path(&self) -> String {
        let mut path = String::new();
        for step in self.steps.borrow().iter().rev() {
            let dot = if path.is_empty() { "" } else { "." };
            let written = match step {
                Step::Field(name) => write!(path, "{dot}{}", camel(name)),
                Step::Key(key) => write!(path, "{dot}{key}"),
                Step::Index(index) => write!(path, "[{index}]"),
            };
            written.expect("a String takes everything");
        }
        cut(path, MAX_PATH)
    }

    /// Whether this float stands in the text as an integer of more than 64 bits, which serde_json rounds.
    fn is_rounded_integer(&self, number: f64) -> bool {
        const BEYOND_I64: f64 = 9.2e18;
        number.abs() >= BEYOND_I64 && self.text.is_some_and(|text| integers(text).any(|n| n.parse() == Ok(number)))
    }
}

/// The long integer literals of a JSON text that is valid so far. Only called for absurdly large numbers.
fn integers(text: &str) -> impl Iterator<Item = &str> {
    let outside = text.split('"').scan(false, |escaped, piece| {
        // Pieces alternate between outside and inside of strings, except after an escaped quote.
        let _ = escaped;
        Some(piece)
    });
    outside
        .flat_map(|piece| piece.split(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')))
        .filter(|token| token.len() >= 19 && token.bytes().all(|b| b.is_ascii_digit() || b == b'-'))
}

/// A field name in lowerCamelCase, whichever form was sent.
pub(crate) fn camel(name: &str) -> String {
    let mut camel = String::with_capacity(name.len());
    let mut upper = false;
    for c in name.chars() {
        match c {
            '_' => upper = true,
            c if upper => {
                camel.extend(c.to_uppercase());
                upper = false;
            }
            c => camel.push(c),
        }
    }
    camel
}
