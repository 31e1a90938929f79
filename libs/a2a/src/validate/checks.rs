//! How each type of field is checked and completed.

use std::{collections::BTreeMap, fmt::Write, ops::RangeInclusive};

use serde_json::Value as Json;

use super::{MAX_VIOLATIONS, Violation};
use crate::{
    json::MAX_DEPTH,
    text::{camel, cut},
    wkt::{Struct, Timestamp, Value, value::Kind},
};

/// Longest path in a violation.
const MAX_PATH: usize = 200;

/// What is wrong so far, and where the check stands.
#[derive(Debug, Default)]
pub(super) struct Faults<'m> {
    pub(super) violations: Vec<Violation>,
    path: Vec<Step<'m>>,
}

#[derive(Clone, Copy, Debug)]
enum Step<'m> {
    Field(&'static str),
    Key(&'m str),
    Index(usize),
}

impl<'m> Faults<'m> {
    fn step(&mut self, step: Step<'m>, check: impl FnOnce(&mut Self)) {
        self.path.push(step);
        check(self);
        self.path.pop();
    }

    /// Checks a field, given by its proto name.
    pub(super) fn at(&mut self, field: &'static str, check: impl FnOnce(&mut Self)) {
        self.step(Step::Field(field), check);
    }

    /// Notes a fault of whatever is being checked.
    pub(super) fn note(&mut self, description: impl Into<String>) {
        if self.violations.len() >= MAX_VIOLATIONS {
            return;
        }
        let mut field = String::new();
        for step in &self.path {
            let dot = if field.is_empty() { "" } else { "." };
            match step {
                Step::Field(name) => write!(field, "{dot}{}", camel(name)),
                Step::Key(key) => write!(field, "{dot}{key}"),
                Step::Index(index) => write!(field, "[{index}]"),
            }
            .expect("a String takes everything");
        }
        self.violations.push(Violation { field: cut(&field, MAX_PATH), description: description.into() });
    }

    /// Checks the number of an enum; 0 is "unspecified".
    pub(super) fn known<E: TryFrom<i32>>(&mut self, number: i32, name: &str, required: bool) {
        if number == 0 && required {
            self.note("is required");
        } else if E::try_from(number).is_err() {
            self.note(format!("{number} is no {name}"));
        }
    }

    /// Checks an integer that may be left out.
    pub(super) fn within(&mut self, number: Option<i32>, range: &RangeInclusive<i32>) {
        match number {
            Some(number) if !range.contains(&number) && *range.end() == i32::MAX => {
                self.note(format!("must be {} or more", range.start()));
            }
            Some(number) if !range.contains(&number) => {
                self.note(format!("must be from {} to {}", range.start(), range.end()));
            }
            _ => {}
        }
    }
}

/// Anything that a field can hold; messages get it from the table in `rules.rs`.
pub(super) trait Check {
    /// Notes every fault.
    fn check<'m>(&'m self, faults: &mut Faults<'m>);

    /// Adds REQUIRED fields that its JSON lacks.
    fn fill(&self, _json: &mut Json) {}
}

/// A field that can be REQUIRED.
pub(super) trait Require: Check {
    fn is_set(&self) -> bool;

    /// The JSON of this field when it is not set.
    fn empty() -> Json;

    fn require<'m>(&'m self, faults: &mut Faults<'m>) {
        match self.is_set() {
            true => self.check(faults),
            false => faults.note("is required"),
        }
    }
}

/// Completes a field inside the JSON of its message.
pub(super) fn fill_field<T: Check>(json: &mut Json, name: &str, field: &T, empty: Option<Json>) {
    let Some(members) = json.as_object_mut() else { return };
    let name = camel(name);
    if let Some(empty) = empty {
        members.entry(name.clone()).or_insert(empty);
    }
    if let Some(json) = members.get_mut(&name) {
        field.fill(json);
    }
}

impl Check for String {
    fn check<'m>(&'m self, _faults: &mut Faults<'m>) {}
}

impl Require for String {
    fn is_set(&self) -> bool {
        !self.is_empty()
    }

    fn empty() -> Json {
        Json::from("")
    }
}

impl<T: Check> Check for Option<T> {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        if let Some(field) = self {
            field.check(faults);
        }
    }

    fn fill(&self, json: &mut Json) {
        if let Some(field) = self {
            field.fill(json);
        }
    }
}

impl<T: Check> Require for Option<T> {
    fn is_set(&self) -> bool {
        self.is_some()
    }

    fn empty() -> Json {
        Json::Object(serde_json::Map::new())
    }
}

impl<T: Check> Check for Vec<T> {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        for (index, element) in self.iter().enumerate() {
            faults.step(Step::Index(index), |faults| element.check(faults));
        }
    }

    fn fill(&self, json: &mut Json) {
        for (element, json) in self.iter().zip(json.as_array_mut().into_iter().flatten()) {
            element.fill(json);
        }
    }
}

impl<T: Check> Require for Vec<T> {
    fn is_set(&self) -> bool {
        !self.is_empty()
    }

    fn empty() -> Json {
        Json::Array(Vec::new())
    }

    fn require<'m>(&'m self, faults: &mut Faults<'m>) {
        match self.is_set() {
            true => self.check(faults),
            false => faults.note("must have at least one element"),
        }
    }
}

impl<T: Check> Check for BTreeMap<String, T> {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        for (key, value) in self {
            faults.step(Step::Key(key), |faults| value.check(faults));
        }
    }

    fn fill(&self, json: &mut Json) {
        for (key, value) in self {
            if let Some(json) = json.get_mut(key) {
                value.fill(json);
            }
        }
    }
}

impl<T: Check> Require for BTreeMap<String, T> {
    fn is_set(&self) -> bool {
        !self.is_empty()
    }

    fn empty() -> Json {
        Json::Object(serde_json::Map::new())
    }
}

impl Check for Timestamp {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        if let Err(error) = Self::check(self) {
            faults.note(error.to_string());
        }
    }
}

impl Check for Struct {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        check_members(self, 1, faults);
    }
}

impl Check for Value {
    fn check<'m>(&'m self, faults: &mut Faults<'m>) {
        check_value(self, 0, faults);
    }
}

/// `depth`: the lists and objects around this value.
fn check_value<'m>(value: &'m Value, depth: usize, faults: &mut Faults<'m>) {
    match &value.kind {
        Some(Kind::NumberValue(number)) if !number.is_finite() => faults.note("NaN and Infinity are not JSON"),
        Some(Kind::StructValue(_) | Kind::ListValue(_)) if depth >= MAX_DEPTH => {
            faults.note(format!("nested deeper than {MAX_DEPTH} levels"));
        }
        Some(Kind::StructValue(object)) => check_members(object, depth + 1, faults),
        Some(Kind::ListValue(list)) => {
            for (index, value) in list.values.iter().enumerate() {
                faults.step(Step::Index(index), |faults| check_value(value, depth + 1, faults));
            }
        }
        _ => {}
    }
}

fn check_members<'m>(object: &'m Struct, depth: usize, faults: &mut Faults<'m>) {
    for (key, value) in &object.fields {
        faults.step(Step::Key(key), |faults| check_value(value, depth, faults));
    }
}
