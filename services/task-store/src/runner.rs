//! What a runner is told when it begins a turn.

use std::collections::BTreeMap;

use futures::future::try_join3;
use prost::Message as _;
use rialto_a2a::{Error, v1::Message};
use rialto_rpc::tasks::{BeginRequest, Granted, JournalEntry, Turn};
use rialto_store::{IndexQuery, Order, ReadLimit, Shard};

use crate::{
    keys::{ScopeKey, TaskId},
    read::bare_task,
    store::{Store, corrupt, failed},
    stored::{Artifact, Head, Phase, Place, tag},
};

/// Earlier tasks of a context that are looked at for its conversation.
const MAX_TASKS: usize = 64;

/// How much of a conversation is wanted.
#[derive(Clone, Copy, Debug)]
struct Window {
    messages: usize,
    bytes: usize,
}

impl Window {
    /// Takes the newest of these that fit, and says so with what is left of the window.
    fn take(&mut self, messages: Vec<Message>) -> Vec<Message> {
        let mut taken = Vec::new();
        for message in messages.into_iter().rev() {
            let size = message.encoded_len();
            if self.messages == 0 || size > self.bytes {
                *self = Self { messages: 0, bytes: 0 };
                break;
            }
            self.messages -= 1;
            self.bytes -= size;
            taken.push(message);
        }
        taken.reverse();
        taken
    }
}

/// Everything that an attempt needs.
pub(crate) async fn briefing(store: &Store, task: TaskId, head: &Head, request: &BeginRequest) -> Result<Turn, Error> {
    let place = Place::new(task, &head.context_id);
    let turn = head.turn.clone().unwrap_or_default();
    let window = Window {
        messages: usize::try_from(request.window_messages).unwrap_or(usize::MAX),
        bytes: usize::try_from(request.window_bytes).unwrap_or(usize::MAX),
    };
    let (mut message, journal, (earlier, own)) = try_join3(
        store.messages(task, head, &place, turn.message - 1, turn.message),
        journal(store, task, turn.journal),
        conversation(store, task, head, &place, window),
    )
    .await?;
    let ids = |which: &dyn Fn(&Artifact) -> bool| {
        head.artifacts.iter().filter(|artifact| which(artifact)).map(|artifact| artifact.id.clone()).collect()
    };
    let mut bare = bare_task(task, head, &place);
    bare.history.clone_from(&own);
    Ok(Turn {
        fence: turn.fence,
        attempt: turn.attempts,
        next_event: head.last_event + 1,
        task: Some(bare),
        message: Some(message.pop().ok_or_else(|| {
            tracing::error!(%task, "the message of a turn is gone");
            Error::internal()
        })?),
        conversation: earlier.into_iter().chain(own).collect(),
        journal,
        stale_artifacts: ids(&|it| it.discarded),
        kept_artifacts: ids(&|it| it.turn == turn.number && !it.discarded),
        granted: (turn.grants > 0).then(|| Granted { times: turn.grants, metadata: turn.grant.clone() }),
        tenant: head.scope().tenant,
        owner: head.scope().owner,
        number: turn.number,
    })
}

/// Steps that earlier attempts completed.
async fn journal(store: &Store, task: TaskId, steps: u32) -> Result<Vec<JournalEntry>, Error> {
    let mut journal = Vec::new();
    while journal.len() < steps as usize {
        let limit = ReadLimit { entries: 512, bytes: 4 << 20 };
        let read = store.read(task.shard(), &task.journal(), journal.len() as u64, limit).await?;
        if read.is_empty() {
            break;
        }
        for entry in read {
            let step = u32::try_from(entry.id.0).unwrap_or(u32::MAX);
            journal.push(match entry.tag {
                tag::JOURNAL => JournalEntry { step, ..JournalEntry::decode(entry.payload).map_err(corrupt)? },
                _ => JournalEntry { step, payload: entry.payload, ..JournalEntry::default() },
            });
        }
    }
    Ok(journal)
}

/// The newest messages of the context before this turn: those of other tasks, and those of this one. Messages
/// that nobody has begun to answer are not part of it.
async fn conversation(
    store: &Store,
    task: TaskId,
    head: &Head,
    place: &Place,
    mut window: Window,
) -> Result<(Vec<Message>, Vec<Message>), Error> {
    if window.messages == 0 {
        return Ok(Default::default());
    }
    let before = head.turn.as_ref().map_or(0, |turn| turn.message - 1);
    let from = before.saturating_sub(window.messages as u64);
    let own = window.take(store.messages(task, head, place, from, before).await?);
    let mut earlier: Vec<Vec<Message>> = Vec::new();
    if window.messages > 0 {
        let scope = head.scope_key();
        let since = store.context(task.shard(), &scope.context(&head.context_id)).await?;
        if since.as_ref().is_some_and(|held| held.value.tasks <= 1) {
            return Ok((Vec::new(), own));
        }
        let since = since.map_or(0, |held| held.value.since_ms);
        let others = others(store, task, &scope, &head.context_id).await?;
        let heads = store.heads(task.shard(), &others).await?;
        for (other, held) in others.into_iter().zip(heads) {
            if window.messages == 0 {
                break;
            }
            let Some(held) = held.filter(|held| held.value.created_ms >= since) else { continue };
            let begun = match held.value.phase() {
                Phase::Waiting => held.value.history_len - 1,
                Phase::Queued if held.value.turn.as_ref().is_some_and(|turn| turn.attempts == 0) => {
                    held.value.history_len - 1
                }
                _ => held.value.history_len,
            };
            let from = begun.saturating_sub(window.messages as u64);
            let place = Place::new(other, &head.context_id);
            earlier.push(window.take(store.messages(other, &held.value, &place, from, begun).await?));
        }
    }
    earlier.reverse();
    Ok((earlier.into_iter().flatten().collect(), own))
}

/// The other tasks of the context, newest status first, hidden ones included.
async fn others(store: &Store, task: TaskId, scope: &ScopeKey, context: &str) -> Result<Vec<TaskId>, Error> {
    let mut found = BTreeMap::new();
    for index in [scope.list(Some(context), None), scope.hidden(context)] {
        let query = IndexQuery { index, order: Order::Descending, after: None, min: None, max: None, limit: MAX_TASKS };
        for (score, id) in store.engine.index(task.shard(), &query).await.map_err(|error| failed(&error))? {
            if let Some(other) = TaskId::parse(&id, Shard::MAX).filter(|other| *other != task) {
                found.insert((score, other), ());
            }
        }
    }
    Ok(found.into_keys().rev().map(|(_, task)| task).take(MAX_TASKS).collect())
}
