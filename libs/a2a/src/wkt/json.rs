//! serde for the well-known types. The rules about `null`, depth and paths are in `crate::json`.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
    ser::{self, SerializeMap},
};

use super::{Empty, ListValue, MAX_SAFE_INTEGER, NullValue, Struct, Timestamp, Value, value::Kind};

impl Serialize for Empty {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_map(Some(0))?.end()
    }
}

impl<'de> Deserialize<'de> for Empty {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::<String, IgnoredAny>::deserialize(deserializer).map(|_| Self {})
    }
}

impl Serialize for NullValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}

impl<'de> Deserialize<'de> for NullValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <()>::deserialize(deserializer).map(|()| Self::NullValue)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.check().map_err(ser::Error::custom)?;
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Timestamp;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an RFC 3339 timestamp")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl Serialize for Struct {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.fields)
    }
}

impl<'de> Deserialize<'de> for Struct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(|fields| Self { fields })
    }
}

impl Serialize for ListValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.values)
    }
}

impl<'de> Deserialize<'de> for ListValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(|values| Self { values })
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.kind {
            None | Some(Kind::NullValue(_)) => serializer.serialize_unit(),
            Some(Kind::NumberValue(number)) => serialize_number(*number, serializer),
            Some(Kind::StringValue(text)) => serializer.serialize_str(text),
            Some(Kind::BoolValue(truth)) => serializer.serialize_bool(*truth),
            Some(Kind::StructValue(object)) => object.serialize(serializer),
            Some(Kind::ListValue(list)) => list.serialize(serializer),
        }
    }
}

/// Integers are written as integers as far as they are exact; beyond, the float form says that they are not.
#[expect(clippy::cast_possible_truncation, reason = "checked to be an integer within range")]
fn serialize_number<S: Serializer>(number: f64, serializer: S) -> Result<S::Ok, S::Error> {
    if !number.is_finite() {
        return Err(ser::Error::custom("NaN and Infinity are not JSON"));
    }
    let integer = number as i64;
    if integer.unsigned_abs() <= MAX_SAFE_INTEGER.unsigned_abs() && integer as f64 == number {
        serializer.serialize_i64(integer)
    } else {
        serializer.serialize_f64(number)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::NULL)
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<Value, E> {
        Ok(truth.into())
    }

    fn visit_i64<E: de::Error>(self, integer: i64) -> Result<Value, E> {
        exact(integer.into()).map(Value::from)
    }

    fn visit_u64<E: de::Error>(self, integer: u64) -> Result<Value, E> {
        exact(integer.into()).map(Value::from)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Value, E> {
        match number.is_finite() {
            true => Ok(number.into()),
            false => Err(E::custom("NaN and Infinity are not JSON")),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = elements.next_element()? {
            values.push(value);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((key, value)) = members.next_entry()? {
            fields.insert(key, value);
        }
        Ok(Struct { fields }.into())
    }
}

/// An integer as a double, if that does not change it.
#[expect(clippy::cast_precision_loss, reason = "checked to be exact")]
fn exact<E: de::Error>(integer: i128) -> Result<f64, E> {
    match integer.abs() <= MAX_SAFE_INTEGER.into() {
        true => Ok(integer as f64),
        false => Err(inexact(integer)),
    }
}

/// The refusal of an integer that a double would round.
pub(crate) fn inexact<E: de::Error>(integer: impl fmt::Display) -> E {
    E::custom(format_args!("the integer {integer} is beyond ±(2^53 − 1) and would change; send it as a string"))
}
