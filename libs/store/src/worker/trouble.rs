//! Going on when the store does not answer: ever longer pauses, few words.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Duration,
};

use tokio::time::Instant;

use crate::Error;

/// First pause.
const FIRST: Duration = Duration::from_millis(100);

/// Longest pause.
const LONGEST: Duration = Duration::from_secs(5);

/// Time between two lines about the same trouble.
const LINES: Duration = Duration::from_secs(10);

/// Pauses that double, each shortened by up to a half so that many processes do not move in step. How much depends
/// on the name of the consumer, and on nothing else: a simulation can be repeated.
#[derive(Debug)]
pub(super) struct Backoff {
    pause: Duration,
    dice: DefaultHasher,
}

impl Backoff {
    pub(super) fn new(consumer: &str) -> Self {
        let mut dice = DefaultHasher::new();
        consumer.hash(&mut dice);
        Self { pause: FIRST, dice }
    }

    pub(super) const fn reset(&mut self) {
        self.pause = FIRST;
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST);
        self.dice.write_u8(0);
        let [random, ..] = self.dice.finish().to_le_bytes();
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
    pub(super) fn new(call: &'static str, consumer: &str) -> Self {
        Self { call, backoff: Backoff::new(consumer), pause: None, said: None, unsaid: 0 }
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
        let mut backoff = Backoff::new("runner-host-1-abcdef00");
        let pauses: Vec<_> = (0..20).map(|_| backoff.next()).collect();
        assert!(pauses[0] <= FIRST && pauses[0] >= FIRST / 2);
        assert!(pauses.iter().all(|pause| *pause <= LONGEST));
        assert!(pauses[10..].iter().all(|pause| *pause >= LONGEST / 2));
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}
