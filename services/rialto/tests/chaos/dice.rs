//! Chance that can be repeated.

use std::{
    hash::{BuildHasher as _, RandomState},
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The seed of a run: `CHAOS_SEED`, or another one each time. Printed, so that the run can be repeated.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("CHAOS_SEED").ok();
    let seed = given.map_or_else(|| RandomState::new().hash_one(0) >> 32, |seed| seed.parse().unwrap());
    println!("CHAOS_SEED={seed}");
    seed
}

/// A generator of numbers (SplitMix64): the same seed, the same throws.
#[derive(Debug)]
pub(crate) struct Dice {
    state: AtomicU64,
}

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { state: AtomicU64::new(seed) }
    }

    /// Dice of its own for somebody else.
    pub(crate) fn split(&self) -> Self {
        Self::new(self.next())
    }

    pub(crate) fn next(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = self.state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of a range.
    pub(crate) fn of(&self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// Whether something happens that happens in `percent` of all cases.
    pub(crate) fn chance(&self, percent: u64) -> bool {
        self.of(0..100) < percent
    }

    /// One of these.
    pub(crate) fn pick<'a, T>(&self, from: &'a [T]) -> &'a T {
        let index = self.next() % from.len() as u64;
        &from[usize::try_from(index).expect("shorter than that")]
    }

    /// Up to so many milliseconds, to the microsecond.
    pub(crate) fn millis(&self, most: u64) -> Duration {
        Duration::from_micros(self.of(0..most * 1000 + 1))
    }
}
