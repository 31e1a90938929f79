//! The one clock of this crate: wall time that never goes backwards.

use std::{
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

use crate::Millis;

/// Wall time in milliseconds, never lower than what it said before.
///
/// When the machine's clock is set back, this one goes on at half speed until it is caught up with: due times
/// and limits neither stand still nor jump.
#[derive(Debug)]
pub(crate) struct Clock {
    last: Mutex<(i64, Instant)>,
    /// Where a simulated clock began: it reads tokio's time instead of the wall.
    simulated: Option<Instant>,
}

/// What a simulated clock says at its beginning, in microseconds.
const BEGINNING: i64 = 1_000_000_000_000_000;

impl Clock {
    pub(crate) fn new() -> Self {
        Self { last: Mutex::new((wall(), Instant::now())), simulated: None }
    }

    /// A clock that begins at a fixed moment and goes with tokio's time, which a simulation pauses.
    pub(crate) fn simulated() -> Self {
        let now = Instant::now();
        Self { last: Mutex::new((BEGINNING, now)), simulated: Some(now) }
    }

    /// Milliseconds since the epoch.
    pub(crate) fn now(&self) -> Millis {
        self.micros() / 1000
    }

    /// Microseconds since the epoch.
    pub(crate) fn micros(&self) -> i64 {
        if let Some(beginning) = self.simulated {
            return BEGINNING + i64::try_from(beginning.elapsed().as_micros()).unwrap_or(i64::MAX / 2);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = advance(*last, wall(), Instant::now());
        last.0
    }
}

fn advance((micros, at): (i64, Instant), wall: i64, now: Instant) -> (i64, Instant) {
    if wall >= micros {
        return (wall, now);
    }
    let elapsed = i64::try_from(now.saturating_duration_since(at).as_micros()).unwrap_or(0);
    if elapsed < 2 { (micros, at) } else { (micros.saturating_add(elapsed / 2), now) }
}

#[expect(clippy::disallowed_methods, reason = "the one place of this crate that reads the wall clock")]
fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_set_back_is_caught_up_with_slowly() {
        let start = Instant::now();
        let mut last = (10_000_000, start);
        // The wall says 5 s less from now on: time goes on, but at half speed.
        for second in 1..=10_u32 {
            let before = last.0;
            last = advance(last, 5_000_000 + i64::from(second) * 1_000_000, start + Duration::from_secs(second.into()));
            assert!(last.0 >= before + 500_000 || last.0 == 14_000_000, "second {second}: {} after {before}", last.0);
        }
        assert_eq!(last.0, 15_000_000);
        assert_eq!(advance(last, 15_000_001, start + Duration::from_secs(11)).0, 15_000_001);
    }
}
