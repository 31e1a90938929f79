//! Values that must not be seen.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A password, a key or a token. Printing it, in whatever form, shows `(secret)`.
///
/// In a configuration the key may be written as `<key>-file`, naming a file that holds the value.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Name under which [`Secret`] asks a deserializer for a newtype: how a configuration knows that it may
    /// read a file instead, and that it must not quote the value.
    pub(crate) const NAME: &str = "rialto secret";

    /// The value itself, to be used and not kept.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("(secret)")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Secret;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Secret, E> {
                Ok(Secret(value.to_owned()))
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<Secret, D::Error> {
                String::deserialize(inner).map(Secret)
            }
        }

        deserializer.deserialize_newtype_struct(Self::NAME, Visitor)
    }
}
