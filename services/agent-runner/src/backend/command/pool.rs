use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::OwnedSemaphorePermit;

use super::process::Process;

/// Contexts whose last process is remembered.
const MAX_CONTEXTS: usize = 10_000;

/// Processes that wait for their next turn.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    idle: Vec<(Process, OwnedSemaphorePermit)>,
    /// Which process served a context last: it may still know the conversation.
    last: HashMap<String, u64>,
    closed: bool,
}

impl Pool {
    /// A living process, the one that served this context last if it is idle.
    pub(super) fn take(&self, context_id: &str) -> Option<(Process, OwnedSemaphorePermit)> {
        loop {
            let (mut process, permit) = self.lock().pick(context_id)?;
            if process.is_fresh() {
                return Some((process, permit));
            }
        }
    }

    /// Keeps a process for later turns.
    pub(super) fn keep(&self, process: Process, permit: OwnedSemaphorePermit, context_id: &str) {
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        if inner.last.len() >= MAX_CONTEXTS {
            inner.last.clear();
        }
        inner.last.insert(context_id.to_owned(), process.id);
        inner.idle.push((process, permit));
    }

    /// All idle processes; none is kept from now on.
    pub(super) fn close(&self) -> Vec<(Process, OwnedSemaphorePermit)> {
        let mut inner = self.lock();
        inner.closed = true;
        std::mem::take(&mut inner.idle)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn pick(&mut self, context_id: &str) -> Option<(Process, OwnedSemaphorePermit)> {
        let known =
            self.last.get(context_id).and_then(|id| self.idle.iter().position(|(process, _)| process.id == *id));
        let index = known.or_else(|| self.idle.len().checked_sub(1))?;
        Some(self.idle.swap_remove(index))
    }
}
