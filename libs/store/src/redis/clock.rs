//! The store's clock, seen from here.

use std::sync::atomic::{AtomicI64, Ordering};

use tokio::time::Instant;

use crate::Millis;

/// Follows the clock of Redis by the times in its answers. Never goes backwards.
#[derive(Debug)]
pub(super) struct Clock {
    start: Instant,
    /// Redis' time minus milliseconds since `start`.
    offset: AtomicI64,
    last: AtomicI64,
}

impl Clock {
    /// Knows nothing before the first answer.
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), offset: AtomicI64::new(i64::MIN), last: AtomicI64::new(0) }
    }

    /// Takes the time in an answer into account. Redis looked at its clock at some moment since `asked`.
    pub(super) fn heard(&self, at: Millis, asked: Instant) {
        let (lowest, highest) = (at - self.elapsed(Instant::now()), at - self.elapsed(asked));
        let known = self.offset.load(Ordering::Relaxed);
        // What is known stays as long as it is possible: a slow answer says less than a quick one.
        self.offset.store(if known == i64::MIN { lowest } else { known.clamp(lowest, highest) }, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> Millis {
        let now = self.offset.load(Ordering::Relaxed).saturating_add(self.elapsed(Instant::now()));
        self.last.fetch_max(now, Ordering::Relaxed).max(now)
    }

    fn elapsed(&self, at: Instant) -> Millis {
        i64::try_from(at.saturating_duration_since(self.start).as_millis()).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_follows_redis_and_never_goes_back() {
        let clock = Clock::new();
        let asked = Instant::now();
        advance(Duration::from_millis(100)).await;
        clock.heard(1_000_000, asked);
        assert_eq!(clock.now(), 1_000_000);
        advance(Duration::from_millis(50)).await;
        assert_eq!(clock.now(), 1_000_050);
        // A slow answer that fits changes nothing.
        let asked = Instant::now();
        advance(Duration::from_millis(500)).await;
        clock.heard(1_000_200, asked);
        assert_eq!(clock.now(), 1_000_550);
        // Redis is another one now, with a clock that is behind: time stands still until it is caught up with.
        clock.heard(1_000_400, Instant::now());
        assert_eq!(clock.now(), 1_000_550);
        advance(Duration::from_millis(151)).await;
        assert_eq!(clock.now(), 1_000_551);
        // And one that is ahead.
        clock.heard(2_000_000, Instant::now());
        assert_eq!(clock.now(), 2_000_000);
    }
}
