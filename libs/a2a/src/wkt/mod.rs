//! The well-known types of protobuf that A2A uses, with the JSON that A2A wants.
//!
//! Unlike the usual crates these keep integers integers (`1`, not `1.0`), keys in order, `null` a value, and
//! timestamps in `Z`. They have the wire form and the Rust shape of `prost_types`.

mod json;
mod timestamp;

use std::collections::BTreeMap;

use prost::{
    DecodeError,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType, btree_map, message, skip_field, string},
};

pub(crate) use json::inexact;
pub use timestamp::{Timestamp, TimestampError};

/// The greatest integer that JSON and a double agree on, 2^53 − 1. Greater ones are refused, never rounded.
pub const MAX_SAFE_INTEGER: i64 = (1 << 53) - 1;

/// `google.protobuf.Empty`: `{}`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Empty {}

/// `google.protobuf.Struct`: a JSON object, keys in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Struct {
    /// The members.
    pub fields: BTreeMap<String, Value>,
}

/// By hand for one reason: prost stops at 100 nested messages, and a JSON object costs three (value, struct,
/// map entry), so 32 objects inside a stored task could be written but never read again. Here the entry is free.
impl prost::Message for Struct {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        btree_map::encode(
            string::encode,
            string::encoded_len,
            message::encode,
            message::encoded_len,
            1,
            &self.fields,
            buf,
        );
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        if tag != 1 {
            return skip_field(wire_type, tag, buf, ctx);
        }
        let value = |wire_type, value: &mut Value, buf: &mut _, _| message::merge(wire_type, value, buf, ctx.clone());
        btree_map::merge(string::merge, value, &mut self.fields, buf, ctx.clone())
    }

    fn encoded_len(&self) -> usize {
        btree_map::encoded_len(string::encoded_len, message::encoded_len, 1, &self.fields)
    }

    fn clear(&mut self) {
        self.fields.clear();
    }
}

/// `google.protobuf.ListValue`: a JSON array.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListValue {
    /// The elements.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

/// `google.protobuf.Value`: any JSON value. An unset `kind` reads as `null`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// The value.
    #[prost(oneof = "value::Kind", tags = "1, 2, 3, 4, 5, 6")]
    pub kind: Option<value::Kind>,
}

/// The oneof inside [`Value`].
pub mod value {
    /// What a value can be.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Kind {
        /// `null`.
        #[prost(enumeration = "super::NullValue", tag = "1")]
        NullValue(i32),
        /// A number; integers up to [`MAX_SAFE_INTEGER`](super::MAX_SAFE_INTEGER) are exact.
        #[prost(double, tag = "2")]
        NumberValue(f64),
        /// A string.
        #[prost(string, tag = "3")]
        StringValue(String),
        /// `true` or `false`.
        #[prost(bool, tag = "4")]
        BoolValue(bool),
        /// An object.
        #[prost(message, tag = "5")]
        StructValue(super::Struct),
        /// An array.
        #[prost(message, tag = "6")]
        ListValue(super::ListValue),
    }
}

/// `google.protobuf.NullValue`: `null`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NullValue {
    /// `null`.
    NullValue = 0,
}

impl Value {
    /// The JSON value `null`.
    pub const NULL: Self = Self { kind: Some(value::Kind::NullValue(0)) };
}

impl From<value::Kind> for Value {
    fn from(kind: value::Kind) -> Self {
        Self { kind: Some(kind) }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        value::Kind::StringValue(text).into()
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        value::Kind::BoolValue(truth).into()
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        value::Kind::NumberValue(number).into()
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        f64::from(number).into()
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        f64::from(number).into()
    }
}

impl From<Struct> for Value {
    fn from(object: Struct) -> Self {
        value::Kind::StructValue(object).into()
    }
}

impl From<Vec<Value>> for Value {
    fn from(values: Vec<Value>) -> Self {
        value::Kind::ListValue(ListValue { values }).into()
    }
}

impl<K: Into<String>, V: Into<Value>> FromIterator<(K, V)> for Struct {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(members: I) -> Self {
        Self { fields: members.into_iter().map(|(key, value)| (key.into(), value.into())).collect() }
    }
}
