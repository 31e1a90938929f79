//! Ordered indexes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{Dice, draft::Home};
use crate::{Engine, IndexQuery, Order};

fn query(order: Order) -> IndexQuery {
    IndexQuery { index: "i".to_owned(), order, after: None, min: None, max: None, limit: 100 }
}

async fn fill(home: &Home, members: &[(i64, &str)]) {
    let draft = home.batch();
    let draft = members.iter().fold(draft, |draft, (score, member)| draft.index("i", member, None, Some(*score)));
    draft.commit().await.unwrap();
}

fn owned(members: &[(i64, &str)]) -> Vec<(i64, String)> {
    members.iter().map(|(score, member)| (*score, (*member).to_owned())).collect()
}

/// Every page size gives the whole.
pub async fn pages_go_both_ways(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    assert_eq!(home.members("i", Order::Ascending, 3).await, []);
    let sorted = [(-5, "x"), (0, "b"), (1, "a"), (7, "d"), (7, "e"), (1_700_000_000_000, "c")];
    fill(&home, &[sorted[3], sorted[0], sorted[5], sorted[4], sorted[1], sorted[2]]).await;
    for limit in 1..8 {
        let mut all = home.members("i", Order::Ascending, limit).await;
        assert_eq!(all, owned(&sorted));
        all.reverse();
        assert_eq!(home.members("i", Order::Descending, limit).await, all);
    }
}

/// By bytes, as prefixes come before what they start.
pub async fn equal_scores_are_ordered_by_member(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let sorted = [(1, "A"), (1, "a"), (1, "aa"), (1, "ab"), (1, "b"), (1, "ä"), (1, "語")];
    fill(&home, &[sorted[6], sorted[2], sorted[4], sorted[0], sorted[5], sorted[1], sorted[3]]).await;
    for limit in [1, 2, 7] {
        assert_eq!(home.members("i", Order::Ascending, limit).await, owned(&sorted));
        let down: Vec<_> = sorted.iter().rev().copied().collect();
        assert_eq!(home.members("i", Order::Descending, limit).await, owned(&down));
    }
}

/// Also when `after` is no member, or outside the bounds.
pub async fn bounds_are_inclusive_and_after_is_not(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let all = [(1, "a"), (2, "a"), (2, "b"), (2, "c"), (3, "a"), (4, "a")];
    fill(&home, &all).await;
    let afters = [None, Some((0, "z")), Some((2, "a")), Some((2, "bb")), Some((2, "")), Some((3, "a")), Some((9, "a"))];
    for order in [Order::Ascending, Order::Descending] {
        for after in afters {
            for (min, max) in [(None, None), (Some(2), None), (None, Some(2)), (Some(2), Some(3)), (Some(5), Some(1))] {
                let beyond = |one: (i64, &str)| match (order, after) {
                    (_, None) => true,
                    (Order::Ascending, Some(after)) => one > after,
                    (Order::Descending, Some(after)) => one < after,
                };
                let within = |score| min.is_none_or(|min| score >= min) && max.is_none_or(|max| score <= max);
                let mut expected: Vec<_> = all.into_iter().filter(|one| beyond(*one) && within(one.0)).collect();
                if order == Order::Descending {
                    expected.reverse();
                }
                let after_text = after.map(|(score, member)| (score, member.to_owned()));
                let query = IndexQuery { after: after_text, min, max, ..query(order) };
                let found = home.engine.index(home.shard, &query).await.unwrap();
                assert_eq!(found, owned(&expected), "{query:?}");
            }
        }
    }
    for (min, count) in [(None, 6), (Some(0), 6), (Some(2), 5), (Some(3), 2), (Some(5), 0)] {
        assert_eq!(home.engine.index_count(home.shard, "i", min).await.unwrap(), count);
    }
}

/// Nothing stays behind at the old score.
pub async fn members_move_and_leave(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    fill(&home, &[(1, "a"), (2, "b")]).await;
    home.batch().index("i", "a", Some(1), Some(3)).index("j", "a", None, Some(1)).commit().await.unwrap();
    assert_eq!(home.members("i", Order::Ascending, 9).await, owned(&[(2, "b"), (3, "a")]));
    assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), 2);
    home.batch().index("i", "a", Some(3), Some(3)).index("i", "b", Some(2), None).commit().await.unwrap();
    assert_eq!(home.members("i", Order::Ascending, 9).await, owned(&[(3, "a")]));
    // In and out in one batch, and out of an index that is then empty.
    let draft = home.batch().index("i", "c", None, Some(5)).index("i", "c", Some(5), None);
    draft.index("i", "a", Some(3), None).index("never", "x", None, None).commit().await.unwrap();
    assert_eq!(home.members("i", Order::Ascending, 9).await, []);
    assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), 0);
    fill(&home, &[(9, "a")]).await;
    assert_eq!(home.members("i", Order::Descending, 9).await, owned(&[(9, "a")]));
    assert_eq!(home.members("j", Order::Descending, 9).await, owned(&[(1, "a")]));
}

/// After any moves.
pub async fn counts_equal_scans(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut dice = Dice::new(1);
    let mut model: BTreeMap<String, i64> = BTreeMap::new();
    for round in 0..60 {
        let mut draft = home.batch();
        for _ in 0..dice.roll(4) + 1 {
            let member = format!("m{}", dice.roll(30));
            let was = model.get(&member).copied();
            let now = (dice.roll(3) > 0).then(|| i64::try_from(dice.roll(8)).unwrap() - 4);
            draft = draft.index("i", &member, was, now);
            match now {
                Some(now) => drop(model.insert(member, now)),
                None => drop(model.remove(&member)),
            }
        }
        draft.commit().await.unwrap();
        assert_eq!(home.engine.index_count(home.shard, "i", None).await.unwrap(), model.len() as u64);
        if round % 10 == 9 {
            let scan = home.members("i", Order::Ascending, 7).await;
            let mut expected: Vec<_> = model.iter().map(|(member, score)| (*score, member.clone())).collect();
            expected.sort();
            assert_eq!(scan, expected);
            for min in -5..5 {
                let counted = home.engine.index_count(home.shard, "i", Some(min)).await.unwrap();
                assert_eq!(counted, expected.iter().filter(|(score, _)| *score >= min).count() as u64);
            }
        }
    }
}

/// Members that stay are seen exactly once, whatever moves around them, with few different scores.
pub async fn pages_neither_skip_nor_repeat_while_others_move(engine: Arc<dyn Engine>) {
    let home = Home::new(engine);
    let mut draft = home.batch();
    for n in 0..40 {
        draft = draft.index("i", &format!("stay{n:02}"), None, Some(n / 15));
        draft = draft.index("i", &format!("move{n:02}"), None, Some(n / 15));
    }
    draft.commit().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let mover = tokio::spawn({
        let (home, over) = (home.clone(), Arc::clone(&over));
        async move {
            let (mut dice, mut scores) = (Dice::new(2), (0..40).map(|n| n / 15).collect::<Vec<i64>>());
            while !over.load(Ordering::Relaxed) {
                let n = usize::try_from(dice.roll(40)).unwrap();
                let now = i64::try_from(dice.roll(3)).unwrap();
                let draft = home.batch().index("i", &format!("move{n:02}"), Some(scores[n]), Some(now));
                draft.commit().await.unwrap();
                scores[n] = now;
            }
        }
    });
    for round in 0..30 {
        let order = if round % 2 == 0 { Order::Ascending } else { Order::Descending };
        let seen = home.members("i", order, 3 + round % 5).await;
        let mut stayed: Vec<_> = seen.into_iter().filter(|(_, member)| member.starts_with("stay")).collect();
        if order == Order::Descending {
            stayed.reverse();
        }
        let expected: Vec<_> = (0..40).map(|n| (n / 15, format!("stay{n:02}"))).collect();
        assert_eq!(stayed, expected);
    }
    over.store(true, Ordering::Relaxed);
    mover.await.unwrap();
}
