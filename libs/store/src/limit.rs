//! Limits: the generic cell rate algorithm.

use std::time::Duration;

use crate::Rate;

/// Takes one. `full_at` is when the limit has all its room again (µs since the epoch), `None` when it never was
/// used; the answer is the new one, or how long to wait.
pub(crate) fn take(full_at: Option<i64>, rate: Rate, now: i64) -> Result<i64, Duration> {
    let interval = i64::try_from(rate.interval.as_micros()).unwrap_or(i64::MAX);
    let room = interval.saturating_mul(i64::from(rate.burst));
    let next = full_at.map_or(now, |full_at| full_at.max(now)).saturating_add(interval);
    let over = next.saturating_sub(now).saturating_sub(room);
    if over > 0 { Err(Duration::from_micros(over.cast_unsigned())) } else { Ok(next) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_per_interval() {
        let rate = Rate { burst: 3, interval: Duration::from_secs(1) };
        let mut full_at = None;
        for _ in 0..3 {
            full_at = Some(take(full_at, rate, 500).unwrap());
        }
        assert_eq!(take(full_at, rate, 500), Err(Duration::from_secs(1)));
        assert_eq!(take(full_at, rate, 500_500), Err(Duration::from_millis(500)));
        let full_at = take(full_at, rate, 1_000_500).unwrap();
        assert!(take(Some(full_at), rate, 1_000_501).is_err());
        // Long unused, it has its burst again, not more.
        let later = take(Some(full_at), rate, 90_000_000).unwrap();
        assert_eq!(later, 91_000_000);
    }
}
