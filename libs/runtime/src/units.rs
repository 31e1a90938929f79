//! Sizes and times as people write them: `"30s"`, `"4MiB"`.

use std::{fmt, str::FromStr, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, Unexpected, Visitor},
};

/// A length of time: a number and `ms`, `s`, `m`, `h` or `d`. `0` alone is allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// A number of bytes: a number and `B`, `kB`, `KiB`, `MB`, `MiB`, `GB` or `GiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Span {
    /// Whole seconds.
    #[must_use]
    pub const fn secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// Whole milliseconds.
    #[must_use]
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Size {
    /// Whole mebibytes.
    #[must_use]
    pub const fn mib(mebibytes: u64) -> Self {
        Self(mebibytes << 20)
    }

    /// As a length in memory.
    #[must_use]
    pub fn as_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

const SPANS: [(&str, u64); 5] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
const SIZES: [(&str, u64); 7] = [
    ("B", 1),
    ("kB", 1_000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
];

/// Splits `4MiB` into its number and the factor of its unit.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    if text == "0" {
        return Some(0);
    }
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(split);
    let factor = units.iter().find(|(name, _)| *name == unit.trim())?.1;
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Writes a number in the largest unit that divides it.
fn write(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let (name, factor) = units
        .iter()
        .filter(|(_, factor)| value.is_multiple_of(*factor))
        .max_by_key(|(_, factor)| *factor)
        .unwrap_or(&units[0]);
    if value == 0 { f.write_str("0") } else { write!(f, "{}{name}", value / factor) }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let millis = parse(text, &SPANS).ok_or_else(|| format!("{text:?} is not a time such as \"30s\" or \"10m\""))?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, &SIZES).map(Self).ok_or_else(|| format!("{text:?} is not a size such as \"64KiB\" or \"4MiB\""))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.as_millis(), &SPANS)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.0, &SIZES)
    }
}

macro_rules! as_text {
    ($($unit:ident, $expecting:literal;)*) => {$(
        impl Serialize for $unit {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $unit {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;

                impl Visitor<'_> for Text {
                    type Value = $unit;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }

                    fn visit_i64<E: de::Error>(self, number: i64) -> Result<$unit, E> {
                        match number {
                            0 => Ok($unit::default()),
                            _ => Err(E::invalid_type(Unexpected::Signed(number), &self)),
                        }
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$unit, E> {
                        text.parse().map_err(E::custom)
                    }
                }

                deserializer.deserialize_str(Text)
            }
        }
    )*};
}

as_text! {
    Span, "a time such as \"30s\" or \"10m\"";
    Size, "a size such as \"64KiB\" or \"4MiB\"";
}
