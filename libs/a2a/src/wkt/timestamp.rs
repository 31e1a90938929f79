//! `google.protobuf.Timestamp` and its text form.

use std::{fmt, str::FromStr};

use jiff::{SignedDuration, civil};

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
        parse(text).filter(|moment| moment.check().is_ok()).ok_or(TimestampError)
    }
}

/// RFC 3339 and nothing else, unlike the parsers of time libraries; jiff knows the calendar.
fn parse(text: &str) -> Option<Timestamp> {
    let (whole, rest) = text.split_at_checked(19)?;
    let [year, month, day, hour, minute, second] = numbers(whole, "0000-00-00T00:00:00")?;
    let moment =
        civil::DateTime::new(year, small(month)?, small(day)?, small(hour)?, small(minute)?, small(second)?, 0);

    let (fraction, offset) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at_checked(rest.find(|c: char| !c.is_ascii_digit())?)?,
        None => ("0", rest),
    };
    let nanos = match fraction.len() {
        digits @ 1..=9 => fraction.parse::<i32>().ok()? * 10_i32.pow(9 - u32::try_from(digits).ok()?),
        _ => return None,
    };

    let east = if offset.eq_ignore_ascii_case("z") {
        0
    } else {
        let [hours, minutes] = numbers(offset.get(1..)?, "00:00")?;
        let seconds = (hours < 24 && minutes < 60).then(|| (i64::from(hours) * 60 + i64::from(minutes)) * 60)?;
        match offset.as_bytes()[0] {
            b'+' => seconds,
            b'-' => -seconds,
            _ => return None,
        }
    };
    Some(Timestamp { seconds: moment.ok()?.duration_since(EPOCH).as_secs() - east, nanos })
}

/// The numbers of a text that looks like `shape`, where `0` stands for any digit.
fn numbers<const N: usize>(text: &str, shape: &str) -> Option<[i16; N]> {
    let alike =
        |(c, wanted): (u8, u8)| if wanted == b'0' { c.is_ascii_digit() } else { c.eq_ignore_ascii_case(&wanted) };
    if text.len() != shape.len() || !text.bytes().zip(shape.bytes()).all(alike) {
        return None;
    }
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut next = || numbers.next()?.ok();
    let mut all = [0; N];
    for number in &mut all {
        *number = next()?;
    }
    Some(all)
}

fn small(number: i16) -> Option<i8> {
    number.try_into().ok()
}
