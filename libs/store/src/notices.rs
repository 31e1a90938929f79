//! The hub of an engine: who listens to which topic in this process.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use tokio::sync::broadcast;

use crate::{Notice, Notices, Shard};

/// Notices kept for a listener that does not keep up. They are hints: a few are enough.
const DEPTH: usize = 16;

/// Topics looked after before the first sweep.
const SWEEP: usize = 256;

/// Hands notices to the listeners of a topic. A topic exists while somebody listens.
#[derive(Debug)]
pub(crate) struct Hub {
    topics: Mutex<Topics>,
}

#[derive(Debug)]
struct Topics {
    senders: HashMap<(Shard, String), broadcast::Sender<Notice>>,
    /// Listeners leave without a word, so silent topics are swept when the map has grown to this.
    sweep_at: usize,
}

impl Hub {
    pub(crate) fn new() -> Self {
        Self { topics: Mutex::new(Topics { senders: HashMap::new(), sweep_at: SWEEP }) }
    }

    /// Listens from now on.
    pub(crate) fn listen(&self, shard: Shard, topic: &str) -> Notices {
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        if topics.senders.len() >= topics.sweep_at {
            topics.senders.retain(|_, sender| sender.receiver_count() > 0);
            topics.sweep_at = SWEEP.max(topics.senders.len() * 2);
        }
        let sender = topics.senders.entry((shard, topic.to_owned()));
        Notices::new(sender.or_insert_with(|| broadcast::Sender::new(DEPTH)).subscribe())
    }

    /// Tells the listeners, if any.
    pub(crate) fn send(&self, shard: Shard, topic: String, notice: Notice) {
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (shard, topic);
        if topics.senders.get(&key).is_some_and(|sender| sender.send(notice).is_err()) {
            topics.senders.remove(&key);
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).senders.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn topics_nobody_listens_to_are_forgotten() {
        let hub = Hub::new();
        let mut kept = hub.listen(0, "kept");
        for n in 0..100_000 {
            drop(hub.listen(0, &n.to_string()));
        }
        assert!(hub.len() <= SWEEP + 1, "{} topics", hub.len());
        hub.send(0, "kept".to_owned(), Notice { payload: "still".to_owned() });
        assert_eq!(kept.recv().await.map(|notice| notice.payload), Some("still".to_owned()));
        drop(kept);
        hub.send(0, "kept".to_owned(), Notice { payload: String::new() });
        assert!(!hub.topics.lock().unwrap().senders.contains_key(&(0, "kept".to_owned())));
    }
}
