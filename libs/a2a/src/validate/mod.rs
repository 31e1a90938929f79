//! Which fields must be set, and to what (spec §5.7), for every binding alike.
//!
//! JSON's own mistakes are [`crate::json`]'s; this is about messages that exist, whichever wire they came from.
//! Everything that can be wrong is found at once and named by its JSON path.

mod checks;
mod rules;
#[cfg(test)]
mod tests;

use self::checks::{Check, Faults};
use crate::{
    error::{Error, Result, Violation},
    json, v1,
};

/// More faults than a person reads are not collected.
const MAX_VIOLATIONS: usize = 32;

/// A message that may lack what the protocol requires.
pub trait Validate {
    /// Refuses a message that is not complete, naming every fault.
    ///
    /// # Errors
    /// [`Kind::InvalidParams`](crate::Kind::InvalidParams) with one violation per fault.
    fn validate(&self) -> Result<()>;
}

impl<T: Check> Validate for T {
    fn validate(&self) -> Result<()> {
        let mut faults = Faults::default();
        self.check(&mut faults);
        match faults.violations {
            none if none.is_empty() => Ok(()),
            violations => Err(Error::from_violations(violations)),
        }
    }
}

/// The JSON of a card that signatures are about (spec §8.4.1): REQUIRED fields are there even when empty, others
/// only when set.
///
/// # Errors
/// As [`json::to_vec`].
pub fn card_json_with_required(card: &v1::AgentCard) -> Result<serde_json::Value> {
    let mut value = json::to_value(card)?;
    card.fill(&mut value);
    Ok(value)
}
