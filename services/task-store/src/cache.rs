//! Records that this replica saw last. What is in here may be old: whoever writes checks the version, whoever
//! refuses reads again.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use hashbrown::HashMap;
use tokio::time::Instant;

use crate::stored::Held;

/// A bounded map of records in two generations: what is used moves to the young one, and when that is full the
/// old one is forgotten as a whole. So a scan of strangers costs at most half of it, without a list to keep.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    generations: Mutex<Generations<T>>,
    half: usize,
    max_age: Option<Duration>,
}

#[derive(Debug)]
struct Generations<T> {
    young: HashMap<String, (Held<T>, Instant)>,
    old: HashMap<String, (Held<T>, Instant)>,
}

impl<T> Cache<T> {
    /// A cache of `records` at most, which are believed until they reach `max_age`.
    pub(crate) fn new(records: usize, max_age: Option<Duration>) -> Self {
        let generations = Generations { young: HashMap::new(), old: HashMap::new() };
        Self { generations: Mutex::new(generations), half: records.div_ceil(2), max_age }
    }

    pub(crate) fn get(&self, key: &str) -> Option<Held<T>> {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, at) = match generations.young.get(key) {
            Some((held, at)) => (held.clone(), *at),
            None => {
                let (key, (held, at)) = generations.old.remove_entry(key)?;
                self.insert(&mut generations, key, held.clone(), at);
                (held, at)
            }
        };
        self.max_age.is_none_or(|max_age| at.elapsed() < max_age).then_some(held)
    }

    /// Remembers a record, unless a newer one is known: two commits may report in any order.
    pub(crate) fn put(&self, key: &str, held: Held<T>) {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        let known = generations.young.get(key).or_else(|| generations.old.get(key));
        if known.is_none_or(|(known, _)| known.version < held.version) {
            self.insert(&mut generations, key.to_owned(), held, Instant::now());
        }
    }

    pub(crate) fn forget(&self, key: &str) {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.young.remove(key);
        generations.old.remove(key);
    }

    pub(crate) fn clear(&self) {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.young.clear();
        generations.old.clear();
    }

    fn insert(&self, generations: &mut Generations<T>, key: String, held: Held<T>, at: Instant) {
        if generations.young.len() >= self.half {
            generations.old = std::mem::take(&mut generations.young);
        }
        generations.young.insert(key, (held, at));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn held(version: u64) -> Held<u64> {
        Held { version, value: Arc::new(version), run: None }
    }

    #[test]
    fn what_is_used_stays_and_the_rest_goes() {
        let cache = Cache::new(8, None);
        for n in 0..100_u64 {
            cache.put(&n.to_string(), held(1));
            assert!(cache.get("0").is_some(), "used all the time, forgotten at {n}");
        }
        let known = (0..100).filter(|n: &u64| cache.get(&n.to_string()).is_some()).count();
        assert!((4..=8).contains(&known), "{known}");
    }

    #[test]
    fn an_older_version_does_not_replace_a_newer_one() {
        let cache = Cache::new(8, None);
        cache.put("k", held(2));
        cache.put("k", held(1));
        assert_eq!(cache.get("k").map(|held| held.version), Some(2));
        cache.forget("k");
        assert!(cache.get("k").is_none());
        cache.put("k", held(2));
        cache.clear();
        cache.put("k", held(1));
        assert_eq!(cache.get("k").map(|held| held.version), Some(1));
    }
}
