//! From a [`Node`] to a typed value. The first fault ends the reading, so the loader mends it and reads again.
//!
//! What this knows beyond plain serde: keys with `_`, suggestions for unknown keys, texts of the environment
//! that take the type that is asked for, `<key>-file` for secrets, enums told apart by their `type`, and holes.

use std::{borrow::Cow, fmt, fs::File, io::Read as _};

use serde::{
    Deserializer,
    de::{
        DeserializeSeed, EnumAccess, Error as _, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
        VariantAccess, Visitor, value::StrDeserializer,
    },
    forward_to_deserialize_any,
};

use super::tree::{Node, Origin, Path, Step, Value, canonical};
use crate::secret::Secret;

/// A secret is a line, not a book.
const MAX_SECRET: u64 = 64 << 10;

/// Where reading stopped, and why.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) path: Path,
    pub(super) problem: String,
    /// The key at `path` means nothing; without it reading can go on.
    pub(super) unknown: bool,
}

impl Fault {
    fn new(problem: impl Into<String>) -> Self {
        Self { path: Path::default(), problem: problem.into(), unknown: false }
    }

    fn unknown_key(key: &str, known: &[&str]) -> Self {
        let hint = match closest(&key.replace('_', "-").to_lowercase(), known) {
            Some(close) => format!("did you mean {close}?"),
            None if known.is_empty() => "nothing else belongs here".to_owned(),
            None => format!("known here: {}", known.join(", ")),
        };
        Self { unknown: true, ..Self::new(format!("unknown key; {hint}")) }.at(Step::Key(key.to_owned()))
    }

    fn at(mut self, step: Step) -> Self {
        self.path.0.insert(0, step);
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.problem)
    }
}

impl std::error::Error for Fault {}

impl serde::de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let quotes = match found {
            Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_) | Unexpected::Bool(_)
                if expected.to_string().contains("string") =>
            {
                " (put it in quotes)"
            }
            _ => "",
        };
        Self::new(format!("expected {}, found {}{quotes}", wanted(expected), Found(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(format!("expected {}, found {}", wanted(expected), Found(found)))
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        let hint = closest(variant, known).map(|close| format!("; did you mean {close}?")).unwrap_or_default();
        Self::new(format!("{variant:?} is not one of {}{hint}", known.join(", ")))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::unknown_key(field, known)
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new("is required").at(Step::Key(field.to_owned()))
    }
}

/// An expected value in the words of somebody who writes YAML.
fn wanted(expected: &dyn Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "usize" | "u8" | "u16" | "u32" | "u64" => "a whole number that is not negative".to_owned(),
        "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        _ if text.starts_with("struct ") => "a map".to_owned(),
        _ => text,
    }
}

/// A found value in the words of somebody who writes YAML.
struct Found<'a>(Unexpected<'a>);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Unexpected::Bool(value) => write!(f, "{value}"),
            Unexpected::Signed(value) => write!(f, "the number {value}"),
            Unexpected::Unsigned(value) => write!(f, "the number {value}"),
            Unexpected::Float(value) => write!(f, "the number {value}"),
            Unexpected::Str(value) => write!(f, "{value:?}"),
            Unexpected::Seq => f.write_str("a list"),
            Unexpected::Map => f.write_str("a map"),
            Unexpected::Unit | Unexpected::Option => f.write_str("nothing"),
            ref other => write!(f, "{other}"),
        }
    }
}

/// The known word that was most likely meant.
pub(super) fn closest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |candidate: &&str| strsim::osa_distance(word, candidate);
    let close = known.iter().copied().min_by_key(|candidate| distance(candidate))?;
    (distance(&close) <= (word.len().max(close.len()) / 3).max(1)).then_some(close)
}

/// A node that is asked for its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct De<'a> {
    node: &'a Node,
    /// The key ended in `-file`: the value is the name of a file, and only a [`Secret`] may be read from one.
    file: bool,
}

impl<'a> De<'a> {
    pub(super) const fn new(node: &'a Node) -> Self {
        Self { node, file: false }
    }

    fn value(self) -> Result<&'a Value, Fault> {
        if self.file {
            return Err(Fault { unknown: true, ..Fault::new("unknown key; only secrets may be read from a file") });
        }
        Ok(&self.node.value)
    }

    /// Text that stands for whatever type is asked for.
    fn loose(self) -> Option<&'a str> {
        match &self.node.value {
            Value::Text(text) if !matches!(self.node.origin, Origin::File(_)) => Some(text),
            _ => None,
        }
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.loose().map(str::trim) {
            Some(text) => match text.parse::<i64>() {
                Ok(number) => visitor.visit_i64(number),
                Err(_) => Err(Fault::invalid_type(Unexpected::Str(text), &visitor)),
            },
            None => self.scalar(visitor, |visitor| visitor.visit_i64(0)),
        }
    }

    fn scalar<'de, V: Visitor<'de>>(
        self,
        visitor: V,
        zero: impl FnOnce(V) -> Result<V::Value, Fault>,
    ) -> Result<V::Value, Fault> {
        match self.value()? {
            Value::Hole => zero(visitor),
            _ => self.deserialize_any(visitor),
        }
    }

    fn fields<'de, V: Visitor<'de>>(
        self,
        known: &'static [&'static str],
        tag: Option<&str>,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.value()? {
            Value::Map(map) => {
                let mut fields = Vec::with_capacity(map.len());
                // Names of variables have no dots, so `a2a-0-3` is `a2a-0.3`.
                let find = |key: &str| known.iter().find(|known| **known == key || known.replace('.', "-") == key);
                for (key, node) in map {
                    let field = canonical(key, &node.origin);
                    if matches!(node.value, Value::Null) || tag == Some(&field) {
                        continue;
                    }
                    let (name, file) = match find(&field) {
                        Some(name) => (*name, false),
                        None => match field.strip_suffix("-file").and_then(find) {
                            Some(name) => (*name, true),
                            None => return Err(Fault::unknown_key(&field, known)),
                        },
                    };
                    if fields.iter().any(|(_, other, _)| *other == name) {
                        let twice = Fault::new(format!("{name} is set twice"));
                        return Err(Fault { unknown: true, ..twice }.at(Step::Key(key.clone())));
                    }
                    fields.push((Cow::Owned(field), name, De { node, file }));
                }
                visitor.visit_map(Entries { entries: fields.into_iter(), value: None })
            }
            Value::Hole => {
                let holes: Vec<_> = known.iter().map(|name| (Cow::Borrowed(*name), *name, self)).collect();
                visitor.visit_map(Entries { entries: holes.into_iter(), value: None })
            }
            // `backend: echo` is short for a map with nothing but the type.
            Value::Text(_) if tag.is_some() => {
                visitor.visit_map(Entries { entries: Vec::new().into_iter(), value: None })
            }
            _ => self.deserialize_any(visitor),
        }
    }

    /// The secret itself, or the first lines of the file that holds it, without the line end.
    fn secret(self) -> Result<Cow<'a, str>, Fault> {
        let text = match &self.node.value {
            Value::Text(text) => text,
            Value::Hole => return Ok("0".into()),
            _ => return Err(Fault::new("expected a string (put it in quotes)")),
        };
        if !self.file {
            return Ok(text.into());
        }
        let mut secret = String::new();
        let read = File::open(text).and_then(|file| file.take(MAX_SECRET + 1).read_to_string(&mut secret));
        read.map_err(|error| Fault::new(format!("cannot read {text:?}: {error}")))?;
        if secret.len() as u64 > MAX_SECRET {
            return Err(Fault::new(format!("{text:?} is too large to be a secret")));
        }
        secret.truncate(secret.trim_end_matches(['\r', '\n']).len());
        Ok(secret.into())
    }
}

macro_rules! numbers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            self.number(visitor)
        }
    )*};
}

macro_rules! texts {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            // "0" is also the text of every unit's zero.
            self.scalar(visitor, |visitor| visitor.visit_str("0"))
        }
    )*};
}

impl<'de> Deserializer<'de> for De<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value()? {
            Value::Null | Value::Hole => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(list) => visitor.visit_seq(Elements { list: list.iter().map(De::new).collect(), next: 0 }),
            Value::Map(map) => {
                let entries: Vec<_> =
                    map.iter().map(|(key, node)| (Cow::Borrowed(&**key), &**key, De::new(node))).collect();
                visitor.visit_map(Entries { entries: entries.into_iter(), value: None })
            }
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let text = match &self.node.value {
            _ if self.file => None,
            // Words to everybody but YAML 1.2.
            Value::Text(text) if matches!(text.as_str(), "on" | "off") => Some(text.as_str()),
            _ => self.loose().map(str::trim),
        };
        match text {
            Some("true" | "on") => visitor.visit_bool(true),
            Some("false" | "off") => visitor.visit_bool(false),
            Some(text) => Err(Fault::new(format!("expected true or false, found {text:?}"))),
            None => self.scalar(visitor, |visitor| visitor.visit_bool(false)),
        }
    }

    numbers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.loose().map(|text| text.trim().parse()) {
            Some(Ok(number)) => visitor.visit_f64(number),
            _ => self.scalar(visitor, |visitor| visitor.visit_f64(0.0)),
        }
    }

    texts! { deserialize_str deserialize_string deserialize_identifier }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null | Value::Hole => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Fault> {
        if name == Secret::NAME { visitor.visit_str(&self.secret()?) } else { visitor.visit_newtype_struct(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if let Some(text) = self.loose() {
            let items: Vec<_> = text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
            let text = |item: &&str| Node { value: Value::Text((*item).to_owned()), origin: self.node.origin.clone() };
            let items: Vec<_> = items.iter().map(text).collect();
            return visitor.visit_seq(Elements { list: items.iter().map(De::new).collect(), next: 0 });
        }
        self.scalar(visitor, |visitor| visitor.visit_seq(Elements { list: Vec::new(), next: 0 }))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.scalar(visitor, |visitor| visitor.visit_map(Entries { entries: Vec::new().into_iter(), value: None }))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.fields(fields, None, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let first = variants.first().copied().unwrap_or_default();
        let (name, below, node): (&str, _, _) = match self.value()? {
            Value::Text(text) => (text, None, self),
            Value::Hole => (first, None, self),
            Value::Map(map) => match map.get("type").or_else(|| map.get("TYPE")) {
                Some(Node { value: Value::Text(text), .. }) => (text, Some("type"), self),
                // Nobody knows which keys belong to a type that nobody knows.
                Some(kind @ Node { value: Value::Hole, .. }) => (first, None, De::new(kind)),
                Some(_) => return Err(Fault::new("expected a word").at(Step::Key("type".to_owned()))),
                None => {
                    let missing = Fault::missing_field("type");
                    return Err(Fault { problem: format!("is required: one of {}", variants.join(", ")), ..missing });
                }
            },
            _ => return Err(Fault::new(format!("expected one of {}", variants.join(", ")))),
        };
        visitor.visit_enum(Variant { name: canonical(name, &self.node.origin), below, node })
    }

    forward_to_deserialize_any! {
        i128 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct ignored_any
    }
}

struct Elements<'a> {
    list: Vec<De<'a>>,
    next: usize,
}

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some(element) = self.list.get(self.next) else { return Ok(None) };
        let index = self.next;
        self.next += 1;
        seed.deserialize(*element).map(Some).map_err(|fault| fault.at(Step::Index(index)))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.list.len() - self.next)
    }
}

/// Keys for the path, keys for serde, and their values.
struct Entries<'a> {
    entries: std::vec::IntoIter<(Cow<'a, str>, &'a str, De<'a>)>,
    value: Option<(Cow<'a, str>, De<'a>)>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((step, known, value)) = self.entries.next() else { return Ok(None) };
        self.value = Some((step, value));
        let key: StrDeserializer<'_, Fault> = known.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (key, value) = self.value.take().expect("serde asks for a key first");
        seed.deserialize(value).map_err(|fault| fault.at(Step::Key(key.into_owned())))
    }
}

struct Variant<'a> {
    name: String,
    /// The key that names the variant, when the variant is a map.
    below: Option<&'static str>,
    node: De<'a>,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = Fault;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Fault> {
        let name: StrDeserializer<'_, Fault> = self.name.as_str().into_deserializer();
        let variant = seed.deserialize(name).map_err(|fault| match self.below {
            Some(key) => fault.at(Step::Key(key.to_owned())),
            None => fault,
        })?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        match self.below {
            Some(_) => self.node.fields(&[], self.below, serde::de::IgnoredAny).map(drop),
            None => Ok(()),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Fault> {
        seed.deserialize(self.node)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, Fault> {
        Err(Fault::invalid_type(Unexpected::TupleVariant, &visitor))
    }

    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value, Fault> {
        // A word alone, or a hole, is a map with nothing but its type.
        self.node.fields(fields, Some(self.below.unwrap_or("type")), visitor)
    }
}
