//! Going on when the store does not answer: ever longer pauses, few words.

use std::time::Duration;

use tokio::time::Instant;

use crate::Error;

/// First pause.
const FIRST: Duration = Duration::from_millis(100);

/// Longest pause.
const LONGEST: Duration = Duration::from_secs(5);

/// Time between two lines about the same trouble.
const LINES: Duration = Duration::from_secs(10);

/// Pauses that double, each shortened at random by up to a half so that many processes do not move in step.
#[derive(Debug)]
pub(super) struct Backoff {
    pause: Duration,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { pause: FIRST }
    }

    pub(super) const fn reset(&mut self) {
        self.pause = FIRST;
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST);
        let random = uuid::Uuid::new_v4().as_bytes()[0];
        pause - pause * u32::from(random) / 512
    }
}

/// Trouble with one kind of call.
#[derive(Debug)]
pub(super) struct Trouble {
    call: &'static str,
    backoff: Backoff,
    pause: Option<Duration>,
    said: Option<Instant>,
    unsaid: u32,
}

impl Trouble {
    pub(super) const fn new(call: &'static str) -> Self {
        Self { call, backoff: Backoff::new(), pause: None, said: None, unsaid: 0 }
    }

    /// It went wrong again.
    pub(super) fn met(&mut self, error: &Error) {
        let pause = self.backoff.next();
        self.pause = Some(pause);
        let now = Instant::now();
        if self.said.is_some_and(|said| now < said + LINES) {
            self.unsaid += 1;
            return;
        }
        let (call, unsaid) = (self.call, std::mem::take(&mut self.unsaid));
        tracing::warn!(call, %error, unsaid, "the store does not answer");
        self.said = Some(now);
    }

    /// It works.
    pub(super) fn over(&mut self) {
        if self.pause.take().is_some() {
            self.backoff.reset();
            tracing::info!(call = self.call, "the store answers again");
        }
    }

    /// How long to wait before the next try, after trouble.
    pub(super) const fn pause(&self) -> Option<Duration> {
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = (0..20).map(|_| backoff.next()).collect();
        assert!(pauses[0] <= FIRST && pauses[0] >= FIRST / 2);
        assert!(pauses.iter().all(|pause| *pause <= LONGEST));
        assert!(pauses[10..].iter().all(|pause| *pause >= LONGEST / 2));
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}
