//! The source of every choice of a schedule, so that one number, or one list, tells the whole story.

/// Choices from a seed, or from a list that was cut down by hand or by [`shrink`](crate::shrink).
#[derive(Debug)]
pub(crate) struct Dice {
    source: Source,
    /// What was thrown so far.
    pub(crate) thrown: Vec<u32>,
}

#[derive(Debug)]
enum Source {
    Seed(u64),
    Tape(Vec<u32>),
}

impl Dice {
    pub(crate) fn of_seed(seed: u64) -> Self {
        // Seeds that follow each other must not throw alike.
        let seed = (seed ^ 0x5bf0_3635).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { source: Source::Seed(seed), thrown: Vec::new() }
    }

    /// Throws what the tape says, and zeros after its end.
    pub(crate) fn of_tape(tape: Vec<u32>) -> Self {
        Self { source: Source::Tape(tape), thrown: Vec::new() }
    }

    /// A number below `sides`. Everywhere 0 is the choice with which the least happens.
    pub(crate) fn roll(&mut self, sides: u32) -> u32 {
        let number = match &mut self.source {
            Source::Seed(state) => {
                *state ^= *state << 13;
                *state ^= *state >> 7;
                *state ^= *state << 17;
                u32::try_from((*state >> 16) & 0x7fff_ffff).expect("31 bits") % sides
            }
            Source::Tape(tape) => tape.get(self.thrown.len()).copied().unwrap_or(0) % sides,
        };
        self.thrown.push(number);
        number
    }
}
