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

/// The store may have been away for this long before the first call that failed did.
const UNSEEN: Duration = Duration::from_secs(15);

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
        // How often since the last line; nothing when there was none.
        let unsaid = Some(std::mem::take(&mut self.unsaid)).filter(|unsaid| *unsaid > 0);
        let call = self.call;
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

/// While the store is away, the living are as silent as the dead.
#[derive(Debug, Default)]
pub(super) struct Silence {
    since: Option<Instant>,
    /// When the last one was over, and how long it was.
    last: Option<(Instant, Duration)>,
}

impl Silence {
    /// The store did not answer.
    pub(super) fn begins(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// The store answered.
    pub(super) fn ends(&mut self) {
        let Some(since) = self.since.take() else { return };
        // A short one right after a long one: the others may not have been heard in between.
        let before = self.last.filter(|(end, _)| end.elapsed() < UNSEEN).map(|(_, lasted)| lasted);
        self.last = Some((Instant::now(), since.elapsed().max(before.unwrap_or_default())));
    }

    /// How long nobody could be heard, at most; 0 once the others had `time` to be heard again.
    pub(super) fn excuse(&self, time: Duration) -> Duration {
        let last = self.last.filter(|(end, _)| end.elapsed() < time).map(|(_, lasted)| lasted);
        let now = self.since.map(|since| since.elapsed());
        now.max(last).map_or(Duration::ZERO, |away| away + UNSEEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_is_excused_while_the_store_is_away_and_for_a_while_after() {
        let (second, lease) = (Duration::from_secs(1), Duration::from_secs(10));
        let mut silence = Silence::default();
        silence.ends();
        assert_eq!(silence.excuse(lease), Duration::ZERO);
        silence.begins();
        tokio::time::advance(second * 30).await;
        silence.begins();
        assert_eq!(silence.excuse(lease), second * 30 + UNSEEN);
        silence.ends();
        tokio::time::advance(second * 9).await;
        assert_eq!(silence.excuse(lease), second * 30 + UNSEEN);
        tokio::time::advance(second).await;
        assert_eq!(silence.excuse(lease), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_comes_and_goes_excuses_its_longest_absence_and_no_more() {
        let (second, lease) = (Duration::from_secs(1), Duration::from_secs(10));
        let mut silence = Silence::default();
        silence.begins();
        tokio::time::advance(second * 60).await;
        silence.ends();
        for _ in 0..100 {
            tokio::time::advance(second).await;
            silence.begins();
            tokio::time::advance(second).await;
            assert_eq!(silence.excuse(lease), second * 60 + UNSEEN);
            silence.ends();
        }
        tokio::time::advance(UNSEEN).await;
        silence.begins();
        tokio::time::advance(second).await;
        silence.ends();
        assert_eq!(silence.excuse(lease), second + UNSEEN);
    }

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
