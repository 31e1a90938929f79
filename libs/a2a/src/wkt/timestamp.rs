//! `google.protobuf.Timestamp` and its text form.

use std::{fmt, str::FromStr};

use jiff::{SignedDuration, civil, fmt::temporal::Pieces};

const EPOCH: civil::DateTime = civil::date(1970, 1, 1).at(0, 0, 0, 0);
/// 0001-01-01T00:00:00Z, the first second that protobuf allows.
const FIRST: i64 = -62_135_596_800;
/// 9999-12-31T23:59:59Z, the last one.
const LAST: i64 = 253_402_300_799;

/// `google.protobuf.Timestamp`: a moment in UTC.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Message)]
pub struct Timestamp {
    /// Seconds since 1970.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// Nanoseconds after that second, never negative.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// Why a text or a pair of numbers is no timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an RFC 3339 timestamp with Z or an offset, in the years 1 to 9999")]
pub struct TimestampError;

impl Timestamp {
    /// The moment that is `millis` milliseconds after 1970.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "a remainder below 1000")]
    pub const fn from_millis(millis: i64) -> Self {
        Self { seconds: millis.div_euclid(1000), nanos: millis.rem_euclid(1000) as i32 * 1_000_000 }
    }

    /// Milliseconds since 1970, rounded down.
    #[must_use]
    pub const fn as_millis(&self) -> i64 {
        self.seconds.saturating_mul(1000).saturating_add(self.nanos as i64 / 1_000_000)
    }

    /// Fails unless both numbers are in the range of protobuf.
    ///
    /// # Errors
    /// When they are not.
    pub const fn check(&self) -> Result<(), TimestampError> {
        if self.seconds >= FIRST && self.seconds <= LAST && self.nanos >= 0 && self.nanos < 1_000_000_000 {
            Ok(())
        } else {
            Err(TimestampError)
        }
    }
}

/// RFC 3339 in UTC with 0, 3, 6 or 9 digits of fraction.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.check().map_err(|_| fmt::Error)?;
        let moment = EPOCH.checked_add(SignedDuration::from_secs(self.seconds)).map_err(|_| fmt::Error)?;
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
            moment.year(),
            moment.month(),
            moment.day(),
            moment.hour(),
            moment.minute(),
            moment.second()
        )?;
        match self.nanos {
            0 => f.write_str("Z"),
            n if n % 1_000_000 == 0 => write!(f, ".{:03}Z", n / 1_000_000),
            n if n % 1_000 == 0 => write!(f, ".{:06}Z", n / 1_000),
            n => write!(f, ".{n:09}Z"),
        }
    }
}

impl FromStr for Timestamp {
    type Err = TimestampError;

    fn from_str(text: &str) -> Result<Self, TimestampError> {
        // `Pieces` and not `jiff::Timestamp`, whose last day is 9999-12-30. It reads more than RFC 3339.
        let pieces = Pieces::parse(text).map_err(|_| TimestampError)?;
        let (Some(time), Some(offset), None) = (pieces.time(), pieces.to_numeric_offset(), pieces.time_zone_annotation())
        else {
            return Err(TimestampError);
        };
        let since = pieces.date().to_datetime(time).duration_since(EPOCH);
        let since = since - SignedDuration::from_secs(offset.seconds().into());
        let moment = Self {
            seconds: i64::try_from(since.as_nanos().div_euclid(1_000_000_000)).map_err(|_| TimestampError)?,
            nanos: since.subsec_nanos().rem_euclid(1_000_000_000),
        };
        moment.check().map(|()| moment)
    }
}
