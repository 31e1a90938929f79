//! A model check of the real service, the real worker and the real engine in memory.
//!
//! A schedule is one short life: some clients, replicas and runners, of which each runs on its own until it needs
//! something from outside. There it waits until the scheduler chooses it, and may find its call refused, its answer
//! lost, or the call made twice; meanwhile runners are killed, paused past their lease and stopped, replicas are
//! killed, and the work stream is deleted. Then nothing goes wrong any more, and everything must come to rest. A
//! ledger beside the store checks each commit, and everybody checks what they are told.
//!
//! Time is tokio's and stands still unless the scheduler lets it pass, so a seed always tells the same story. One
//! that ends badly is cut down to the shortest list of choices that still does, and printed.
//!
//! `MODEL_SCHEDULES` and `MODEL_SEED` make it longer, or another one; `MODEL_SEED` with one schedule repeats it.

mod client;
mod dice;
mod door;
mod ledger;
mod runner;
mod schedule;
mod sim;
mod world;

/// A quarter of the time goes by in the one of the system.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[expect(clippy::all, unreachable_pub, reason = "generated")]
mod stored {
    include!(concat!(env!("OUT_DIR"), "/rialto.tasks.v1.stored.rs"));
}

use crate::{
    schedule::{Weather, check, run, shrink},
    sim::Mutant,
};

/// Schedules of each kind of weather.
const SCHEDULES: u64 = 25_500;

/// Schedules within which the lack of a guard is noticed.
const ENOUGH: u64 = 20_000;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

fn holds(weather: Weather) {
    let first = setting("MODEL_SEED").unwrap_or(1);
    let count = setting("MODEL_SCHEDULES").unwrap_or(SCHEDULES);
    if let Some(failure) = check(weather, None, first..first + count) {
        panic!("{}", shrink(weather, None, failure));
    }
}

#[test]
fn lost_answers_and_repeated_calls() {
    holds(Weather::Lossy);
}

#[test]
fn runners_and_replicas_that_die_or_sleep() {
    holds(Weather::Deadly);
}

#[test]
fn any_order_of_calls() {
    holds(Weather::Calm);
}

#[test]
fn everything_at_once() {
    holds(Weather::Storm);
}

/// Without this guard the check fails, and with these words.
#[expect(clippy::print_stdout, reason = "the shortest story, for those who ask for it")]
fn is_missed(mutant: Mutant, words: &[&str]) {
    let Some(failure) = check(Weather::Storm, Some(mutant), 1..ENOUGH) else {
        panic!("nobody misses the guard {mutant:?}");
    };
    let seed = failure.seed;
    let told = shrink(Weather::Storm, Some(mutant), failure);
    println!("{told}");
    assert!(words.iter().any(|words| told.contains(words)), "seed {seed} fails for another reason");
}

#[test]
fn without_the_fence_late_writes_count() {
    is_missed(Mutant::Fence, &["a write counted after the next attempt had begun"]);
}

#[test]
fn without_the_pending_check_turns_are_taken_from_their_owners() {
    is_missed(Mutant::Pending, &["began although nothing had happened"]);
}

#[test]
fn without_commit_ids_repeats_are_not_recognised() {
    is_missed(Mutant::CommitId, &["a repeated commit had another result"]);
    is_missed(Mutant::CallId, &["a cancel was refused after it was done", "began although nothing had happened"]);
}

#[test]
fn without_the_context_queue_turns_overlap() {
    is_missed(Mutant::ContextQueue, &["has more than one turn"]);
}

#[test]
fn without_the_terminal_guard_ended_tasks_change() {
    is_missed(Mutant::TerminalGuard, &["the terminal state of"]);
}

#[test]
fn a_seed_tells_one_story() {
    for seed in 1..40 {
        let [one, other] = [(), ()].map(|()| run(Weather::Storm, None, seed.into(), true));
        assert_eq!(one, other, "seed {seed}");
    }
}
