//! The contract suite: what every engine must do, as cases that take an empty engine.
//!
//! `contract_tests!(factory)` in a test makes one test per case. The factory is an `async fn` without arguments
//! that gives an empty engine of its own, and something that is dropped when the case is over.

#![expect(clippy::unwrap_used, reason = "these are tests; a panic is how they fail")]
#![expect(clippy::disallowed_methods, reason = "cases wait for the tasks that they spawn")]

pub mod delayed;
pub mod draft;
pub mod indexes;
pub mod model;
pub mod notices;
pub mod records;
pub mod streams;
pub mod together;
pub mod work;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};

use crate::{Conflict, Engine, Error, Result, Shard};

/// A case: its name, and what it does with an empty engine.
pub type Case = (&'static str, fn(Arc<dyn Engine>) -> BoxFuture<'static, ()>);

/// Names all cases to a macro: `[macro] argument` gives `macro! { argument; module::case, … }`.
#[macro_export]
macro_rules! contract_cases {
    ([$($run:tt)+] $argument:path) => {
        $($run)+! { $argument;
            records::puts_count_versions_from_one,
            records::a_deleted_record_starts_again,
            records::get_answers_in_the_order_asked,
            records::values_are_bytes_of_any_size,
            records::refs_are_written_by_append_and_kept_by_put,
            records::a_ref_into_no_record_is_malformed_and_nothing_is_written,
            records::operations_apply_in_order,
            records::the_first_failed_check_is_named,
            records::a_conflict_writes_nothing_at_all,
            records::shards_are_worlds_apart,
            records::a_repeated_commit_returns_its_first_result,
            records::only_the_last_commit_is_recognised,
            records::a_commit_id_needs_its_lead_record,
            indexes::pages_go_both_ways,
            indexes::equal_scores_are_ordered_by_member,
            indexes::bounds_are_inclusive_and_after_is_not,
            indexes::members_move_and_leave,
            indexes::counts_equal_scans,
            indexes::pages_neither_skip_nor_repeat_while_others_move,
            streams::next_ids_rise,
            streams::reads_go_on_after_an_id_within_limits,
            streams::the_newest_are_read_oldest_first,
            streams::numbers_must_rise,
            streams::the_tail_is_checked_before_the_number,
            streams::numbers_are_not_used_again_after_removal,
            streams::a_dropped_stream_is_as_new,
            streams::length_counts_claimed_entries_too,
            work::entries_are_claimed_in_order_and_only_once,
            work::a_claim_waits_and_is_woken,
            work::a_claim_gives_up_after_its_wait,
            work::streams_are_preferred_in_order,
            work::two_waiting_claims_share_two_entries,
            work::a_claim_leaves_the_rest_to_others,
            work::acknowledged_entries_are_gone,
            work::only_the_owner_passes_a_pending_check,
            work::handed_back_entries_come_first_and_at_once,
            work::handing_back_wakes_a_waiting_claim,
            work::abandoned_entries_are_taken_over,
            work::what_is_abandoned_during_a_wait_is_taken_over,
            work::a_heartbeat_keeps_an_entry,
            work::own_entries_are_not_taken_over,
            work::buried_entries_tell_their_story,
            work::settling_twice_is_harmless,
            work::a_dropped_claim_loses_nothing,
            work::depth_tells_the_state,
            work::consumers_are_known_with_what_they_own,
            work::every_entry_is_handled_whatever_happens,
            work::one_consumer_sees_the_order_of_the_stream,
            delayed::entries_join_when_due,
            delayed::the_same_id_replaces,
            delayed::undelay_takes_back,
            delayed::many_join_in_bounded_steps,
            delayed::ticks_at_the_same_time_move_each_entry_once,
            notices::listeners_hear_commits_in_order,
            notices::topics_are_separate,
            notices::a_failed_commit_is_not_heard,
            notices::a_slow_listener_is_told_so,
            notices::a_limit_has_a_burst_and_an_interval,
            notices::a_refused_batch_takes_nothing_from_a_limit,
            notices::one_batch_can_take_twice,
            together::commits_are_seen_whole_or_not_at_all,
            together::of_two_commits_on_a_version_one_wins,
            together::increments_are_not_lost,
            together::repeats_and_lost_replies_change_nothing,
            together::a_stale_owner_never_writes,
        }
    };
}

/// Makes a test of each case; see [`contract_cases`](crate::contract_cases).
#[macro_export]
macro_rules! contract_test {
    ($factory:path; $($module:ident::$case:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let (engine, guard) = $factory().await;
                $crate::suite::soon($crate::suite::$module::$case(engine)).await;
                drop(guard);
            }
        )*
    };
}

/// Makes one test per case of the suite, each with an engine of `$factory`.
#[macro_export]
macro_rules! contract_tests {
    ($factory:path) => {
        $crate::contract_cases!([$crate::contract_test] $factory);
    };
}

macro_rules! list {
    ($ignored:path; $($module:ident::$case:ident,)*) => {
        vec![$((stringify!($case), |engine| $module::$case(engine).boxed())),*]
    };
}

/// All cases.
#[must_use]
pub fn all() -> Vec<Case> {
    contract_cases!([list] self)
}

/// Waits for something that happens soon.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("this should have happened long ago")
}

/// The shard that a case works in: the last one, so that all but the first are tried somewhere.
fn home(engine: &Arc<dyn Engine>) -> Shard {
    engine.shards() - 1
}

/// The conflict that a commit ended with.
fn conflict<T: std::fmt::Debug>(result: Result<T>) -> (usize, Conflict) {
    match result {
        Err(Error::Conflict { check, reason }) => (check, reason),
        other => panic!("expected a conflict, got {other:?}"),
    }
}

fn is_malformed<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::Malformed(_)))
}

/// Numbers that look random and are the same for the same seed.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}
