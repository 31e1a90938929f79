use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::OwnedSemaphorePermit;

use super::{super::Turn, process::Process};

/// Tenant, owner and context id: only together they name a conversation.
type Context = (String, String, String);

/// Contexts whose last process is remembered.
const MAX_CONTEXTS: usize = 10_000;

/// Processes that wait for their next turn.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    idle: Vec<(Process, OwnedSemaphorePermit)>,
    /// Which process served a context last: it may still know the conversation.
    last: HashMap<Context, u64>,
    closed: bool,
}

impl Pool {
    /// A living process, the one that served this context last if it is idle.
    pub(super) fn take(&self, turn: &Turn) -> Option<(Process, OwnedSemaphorePermit)> {
        loop {
            let (mut process, permit) = self.lock().pick(&context(turn))?;
            if process.is_fresh() {
                return Some((process, permit));
            }
        }
    }

    /// Keeps a process for later turns.
    pub(super) fn keep(&self, process: Process, permit: OwnedSemaphorePermit, turn: &Turn) {
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        if inner.last.len() >= MAX_CONTEXTS {
            inner.last.clear();
        }
        inner.last.insert(context(turn), process.id);
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
    fn pick(&mut self, context: &Context) -> Option<(Process, OwnedSemaphorePermit)> {
        let known = self.last.get(context).and_then(|id| self.idle.iter().position(|(process, _)| process.id == *id));
        let index = known.or_else(|| self.idle.len().checked_sub(1))?;
        Some(self.idle.swap_remove(index))
    }
}

fn context(turn: &Turn) -> Context {
    (turn.tenant.clone(), turn.owner.clone(), turn.context_id.clone())
}
