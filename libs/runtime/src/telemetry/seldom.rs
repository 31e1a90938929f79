//! Lines that would come too often.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Lets a line of one kind through at most once per time. In an outage each call, and each stream, has the same to
/// say; a flood of lines would be a fault of its own.
#[derive(Debug)]
pub struct Seldom {
    every: Duration,
    /// When it was said last, and how often it was not said since.
    said: Mutex<(Option<Instant>, u64)>,
}

impl Seldom {
    /// A line that nobody said yet.
    #[must_use]
    pub const fn new(every: Duration) -> Self {
        Self { every, said: Mutex::new((None, 0)) }
    }

    /// Whether it may be said now; then how often it was not said since the last time.
    pub fn may_say(&self) -> Option<u64> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, unsaid) = &mut *said;
        if last.is_some_and(|last| last.elapsed() < self.every) {
            *unsaid += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_that_everybody_has_to_say_is_said_once_and_counted() {
        let second = Duration::from_secs(1);
        let seldom = Seldom::new(second * 10);
        assert_eq!(seldom.may_say(), Some(0));
        for _ in 0..300 {
            assert_eq!(seldom.may_say(), None);
        }
        tokio::time::advance(second * 9).await;
        assert_eq!(seldom.may_say(), None);
        tokio::time::advance(second).await;
        assert_eq!((seldom.may_say(), seldom.may_say()), (Some(301), None));
    }
}
