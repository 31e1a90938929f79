//! Real processes, a real Redis and real faults, under traffic that keeps books.
//!
//! Each test prints its seed and its ledger; `CHAOS_SEED` repeats one, as far as chance goes. They are short;
//! `make chaos` runs the same campaigns for as long as one likes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "seeds and ledgers are for people")]
#![expect(clippy::disallowed_methods, reason = "real processes live by the wall clock")]

mod caller;
mod dice;
mod embedded;
mod kills;
mod ledger;
mod long;
mod network;
mod redis;
mod scale;
mod wire;
