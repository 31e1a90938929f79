use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::OwnedSemaphorePermit, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{super::Turn, process::Process};

/// Tenant, owner and context id: only together they name a conversation.
type Context = (String, String, String);

/// Contexts whose last process is remembered.
const MAX_CONTEXTS: usize = 10_000;

/// Processes that wait for their next turn.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Inner>);

/// A process that somebody listens to until it is needed.
#[derive(Debug)]
pub(super) struct Idle {
    /// See [`Process::id`].
    pub id: u64,
    /// Ends the listening.
    pub needed: CancellationToken,
    /// The process, unless it is gone.
    pub process: JoinHandle<Option<(Process, OwnedSemaphorePermit)>>,
}

impl Idle {
    /// Takes it back.
    pub(super) async fn take(self) -> Option<(Process, OwnedSemaphorePermit)> {
        self.needed.cancel();
        self.process.await.ok().flatten()
    }
}

#[derive(Debug, Default)]
struct Inner {
    idle: Vec<Idle>,
    /// Which process served a context last: it may still know the conversation.
    last: HashMap<Context, u64>,
    closed: bool,
}

impl Pool {
    /// A living process, the one that served this context last if it is idle.
    pub(super) async fn take(&self, turn: &Turn) -> Option<(Process, OwnedSemaphorePermit)> {
        loop {
            let idle = self.lock().pick(&context(turn))?;
            if let Some((mut process, permit)) = idle.take().await
                && process.is_fresh()
            {
                return Some((process, permit));
            }
        }
    }

    /// Keeps a process for later turns, unless none are to come.
    pub(super) fn keep(&self, turn: &Turn, idle: impl FnOnce() -> Idle) {
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        if inner.last.len() >= MAX_CONTEXTS {
            inner.last.clear();
        }
        let idle = idle();
        inner.last.insert(context(turn), idle.id);
        inner.idle.push(idle);
    }

    /// All idle processes; none is kept from now on.
    pub(super) fn close(&self) -> Vec<Idle> {
        let mut inner = self.lock();
        inner.closed = true;
        std::mem::take(&mut inner.idle)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn pick(&mut self, context: &Context) -> Option<Idle> {
        self.idle.retain(|idle| !idle.process.is_finished());
        let known = self.last.get(context).and_then(|id| self.idle.iter().position(|idle| idle.id == *id));
        let index = known.or_else(|| self.idle.len().checked_sub(1))?;
        Some(self.idle.swap_remove(index))
    }
}

fn context(turn: &Turn) -> Context {
    (turn.tenant.clone(), turn.owner.clone(), turn.context_id.clone())
}
