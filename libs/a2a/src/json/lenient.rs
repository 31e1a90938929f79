//! A serde deserializer around another one that adds what generated code lacks, in the same pass: `null` for
//! "unset", the depth limit, integral floats, exactness of integers, and the path to whatever goes wrong.

use std::{
    borrow::Cow,
    cell::RefCell,
    fmt::{self, Write},
};

use serde::{
    Deserializer,
    de::{
        DeserializeSeed, Error, MapAccess, SeqAccess, Unexpected, Visitor,
        value::{MapDeserializer, SeqDeserializer, StrDeserializer, UnitDeserializer},
    },
    forward_to_deserialize_any,
};

use super::MAX_DEPTH;
use crate::{
    text::{camel, cut},
    wkt::{MAX_SAFE_INTEGER, inexact},
};

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
        cut(&path, MAX_PATH)
    }

    /// Whether this float stands in the text as an integer of more than 64 bits, which serde_json rounds.
    fn is_rounded_integer(&self, number: f64) -> bool {
        const BEYOND_I64: f64 = 9.2e18;
        number.abs() >= BEYOND_I64 && self.text.is_some_and(|text| has_integer(text, number))
    }
}

/// Whether a JSON text holds this number as an integer literal. Only asked about absurdly large numbers.
fn has_integer(text: &str, number: f64) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        match bytes[start] {
            b'"' => {
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                while at < bytes.len() && matches!(bytes[at], b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E') {
                    at += 1;
                }
                let token = &text[start..at];
                if !token.contains(['.', 'e', 'E']) && token.parse() == Ok(number) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

/// Where a value stands, which decides what its `null` means.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Place {
    /// The whole text, or an element of a list or map: `null` is wrong unless the type takes it.
    Root,
    /// A field of a message: `null` means "unset".
    Field,
    /// A oneof member of type `Value`: `null` is a value that sets it.
    Data,
}

/// What the generated code asks for.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    /// A `Value`; as a field also an enum or an integer.
    Any,
    Bool,
    Text,
    List,
    Map,
    Message(&'static str),
}

/// The deserializer.
pub(super) struct Lenient<'a, D> {
    inner: D,
    context: Context<'a>,
}

#[derive(Clone, Copy)]
struct Context<'a> {
    trace: &'a Trace<'a>,
    place: Place,
    /// Lists and objects around this value, counted from the innermost message.
    depth: usize,
}

impl<'a, D> Lenient<'a, D> {
    pub(super) fn new(inner: D, trace: &'a Trace<'a>, place: Place) -> Self {
        Self { inner, context: Context { trace, place, depth: 0 } }
    }
}

impl<'de, D: Deserializer<'de>> Lenient<'_, D> {
    fn read<V: Visitor<'de>>(self, wanted: Wanted, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(Reading { visitor, wanted, context: self.context })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Lenient<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::Any, visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::Bool, visitor)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::Text, visitor)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::Text, visitor)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::List, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.read(Wanted::Map, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.read(Wanted::Message(name), visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_option(Optional { visitor, context: self.context })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct newtype_struct tuple
        tuple_struct enum identifier
    }
}

struct Optional<'a, V> {
    visitor: V,
    context: Context<'a>,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Optional<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.visit_none()
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        match self.context.place {
            Place::Data => self.visitor.visit_some(UnitDeserializer::new()),
            Place::Field | Place::Root => self.visitor.visit_none(),
        }
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(Lenient { inner, context: self.context })
    }
}

struct Reading<'a, V> {
    visitor: V,
    wanted: Wanted,
    context: Context<'a>,
}

impl<V> Reading<'_, V> {
    /// The depth inside this list or object.
    fn deeper<E: Error>(&self) -> Result<usize, E> {
        match self.wanted {
            Wanted::Message(_) => Ok(0),
            _ if self.context.depth < MAX_DEPTH => Ok(self.context.depth + 1),
            _ => Err(E::custom(format_args!("nested deeper than {MAX_DEPTH} levels"))),
        }
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Reading<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        if self.context.place != Place::Field {
            return self.visitor.visit_unit();
        }
        match self.wanted {
            Wanted::Any => self.visitor.visit_i64(0),
            Wanted::Bool => self.visitor.visit_bool(false),
            Wanted::Text => self.visitor.visit_str(""),
            Wanted::List => self.visitor.visit_seq(SeqDeserializer::new(std::iter::empty::<()>())),
            Wanted::Map => self.visitor.visit_map(MapDeserializer::new(std::iter::empty::<((), ())>())),
            Wanted::Message(_) => self.visitor.visit_unit(),
        }
    }

    fn visit_bool<E: Error>(self, truth: bool) -> Result<V::Value, E> {
        self.visitor.visit_bool(truth)
    }

    fn visit_i64<E: Error>(self, integer: i64) -> Result<V::Value, E> {
        self.visitor.visit_i64(integer)
    }

    fn visit_u64<E: Error>(self, integer: u64) -> Result<V::Value, E> {
        self.visitor.visit_u64(integer)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "checked to be exact")]
    fn visit_f64<E: Error>(self, number: f64) -> Result<V::Value, E> {
        let integer = number as i64;
        if self.context.place != Place::Field && self.context.trace.is_rounded_integer(number) {
            Err(inexact(number))
        } else if integer != 0 && integer.unsigned_abs() <= MAX_SAFE_INTEGER.unsigned_abs() && integer as f64 == number
        {
            self.visitor.visit_i64(integer)
        } else {
            self.visitor.visit_f64(number)
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.visitor.visit_str(text)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        self.visitor.visit_borrowed_str(text)
    }

    fn visit_string<E: Error>(self, text: String) -> Result<V::Value, E> {
        self.visitor.visit_string(text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        if matches!(self.wanted, Wanted::Message(_)) {
            // Derived code would read a struct from a list, by position.
            return Err(A::Error::invalid_type(Unexpected::Seq, &self));
        }
        let depth = self.deeper()?;
        self.visitor.visit_seq(Elements {
            inner,
            index: 0,
            context: Context { place: Place::Root, depth, ..self.context },
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        let context = Context { depth: self.deeper()?, ..self.context };
        self.visitor.visit_map(Members { inner, wanted: self.wanted, key: Cow::Borrowed(""), context })
    }
}

struct Elements<'a, A> {
    inner: A,
    index: usize,
    context: Context<'a>,
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Elements<'_, A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, A::Error> {
        let index = self.index;
        self.index += 1;
        let element = self.inner.next_element_seed(Seed { seed, context: self.context });
        element.inspect_err(|_| self.context.trace.push(Step::Index(index)))
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

struct Members<'a, 'de, A> {
    inner: A,
    wanted: Wanted,
    key: Cow<'de, str>,
    context: Context<'a>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Members<'_, 'de, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        let Some(key) = self.inner.next_key_seed(Key)? else { return Ok(None) };
        self.key = key;
        seed.deserialize(StrDeserializer::new(&self.key)).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        let place = match self.wanted {
            Wanted::Message("lf.a2a.v1.Part") if self.key == "data" => Place::Data,
            Wanted::Message(_) => Place::Field,
            _ => Place::Root,
        };
        let value = self.inner.next_value_seed(Seed { seed, context: Context { place, ..self.context } });
        value.inspect_err(|_| {
            let key = self.key.to_string();
            self.context.trace.push(if place == Place::Root { Step::Key(key) } else { Step::Field(key) });
        })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

/// Reads a key, borrowed if the text allows.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E: Error>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key.to_owned()))
    }

    fn visit_string<E: Error>(self, key: String) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key))
    }
}

struct Seed<'a, S> {
    seed: S,
    context: Context<'a>,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Seed<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.seed.deserialize(Lenient { inner, context: self.context })
    }
}
