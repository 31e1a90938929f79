//! Reading whole tasks: a head, and what belongs to exactly that head.

use std::sync::Arc;

use futures::future::try_join;
use rialto_a2a::{
    Error, Kind,
    v1::{
        Artifact, Message, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState, part::Content,
        stream_response::Payload,
    },
};
use rialto_rpc::tasks::Update;
use rialto_store::ReadLimit;
use tracing::error;

use crate::{
    artifacts::Artifacts,
    keys::TaskId,
    store::{Store, corrupt},
    stored::{Head, Held, Place},
};

/// Reads of a task that is written to at the same time, before giving up.
const TRIES: usize = 8;

/// What one read of messages returns.
const MESSAGES: ReadLimit = ReadLimit { entries: 512, bytes: 4 << 20 };

/// How much of a task is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// The newest messages of the history; `None` = all.
    pub(crate) history: Option<u64>,
    pub(crate) artifacts: bool,
}

impl Shape {
    /// Reads a `historyLength` as clients send it (spec §3.2.4).
    ///
    /// # Errors
    /// When it is negative.
    pub(crate) fn history(field: &str, length: Option<i32>) -> Result<Self, Error> {
        let history =
            length.map(u64::try_from).transpose().map_err(|_| Error::invalid(field, "must not be negative"))?;
        Ok(Self { history, artifacts: true })
    }
}

/// The parts of a task that were read do not belong together: it changed meanwhile.
#[derive(Debug)]
struct Moved;

impl Store {
    /// Reads a task as it is now. `None` when there is no such task.
    pub(crate) async fn task(&self, task: TaskId, shape: Shape) -> Result<Option<(Arc<Head>, Task)>, Error> {
        // What has ended does not change any more, so it may come from the cache.
        let head = match self.ended(task) {
            Some(held) => Some(held),
            None => self.head(task).await?,
        };
        self.task_from(task, head, shape).await
    }

    /// The same, beginning with a head that was read already.
    pub(crate) async fn task_from(
        &self,
        task: TaskId,
        mut head: Option<Held<Head>>,
        shape: Shape,
    ) -> Result<Option<(Arc<Head>, Task)>, Error> {
        for _ in 0..TRIES {
            let Some(held) = head else { return Ok(None) };
            if let Ok(whole) = self.assemble(task, &held.value, shape).await? {
                return Ok(Some((held.value, whole)));
            }
            head = self.head(task).await?;
            if head.as_ref().is_some_and(|again| again.version == held.version) {
                error!(%task, version = held.version, "parts of the task are gone");
                return Err(Error::internal());
            }
        }
        Err(Error::unavailable())
    }

    /// Reads what belongs to a head.
    async fn assemble(&self, task: TaskId, head: &Head, shape: Shape) -> Result<Result<Task, Moved>, Error> {
        let place = Place::new(task, &head.context_id);
        let wanted = shape.history.unwrap_or(u64::MAX).min(head.history_len);
        let parts = try_join(
            self.messages(task, head, &place, head.history_len - wanted, head.history_len),
            self.artifacts(task, head, shape.artifacts),
        );
        let (history, artifacts) = parts.await?;
        if history.len() as u64 != wanted {
            return Ok(Err(Moved));
        }
        Ok(artifacts.map(|artifacts| Task { artifacts, history, ..bare_task(task, head, &place) }))
    }

    /// Reads messages `from + 1` to `to` of a history: those that the head does not have, from their stream.
    pub(crate) async fn messages(
        &self,
        task: TaskId,
        head: &Head,
        place: &Place,
        from: u64,
        to: u64,
    ) -> Result<Vec<Message>, Error> {
        let mut messages = Vec::new();
        let mut after = from;
        let filed = head.filed();
        while after < to.min(filed) {
            let entries = usize::try_from(to.min(filed) - after).unwrap_or(usize::MAX).min(MESSAGES.entries);
            let limit = ReadLimit { entries, ..MESSAGES };
            let read = self.read(task.shard(), &task.history(), after, limit).await?;
            let Some(last) = read.last() else { break };
            after = last.id.0;
            for entry in read {
                messages.push(place.message(entry.payload).map_err(corrupt)?);
            }
        }
        for (number, message) in (filed + 1..).zip(&head.messages) {
            if (from + 1..=to).contains(&number) {
                messages.push(place.message(message.clone()).map_err(corrupt)?);
            }
        }
        Ok(messages)
    }

    async fn artifacts(&self, task: TaskId, head: &Head, wanted: bool) -> Result<Result<Vec<Artifact>, Moved>, Error> {
        if !wanted || head.artifacts.is_empty() {
            return Ok(Ok(Vec::new()));
        }
        let places = head.artifacts.iter().enumerate().filter(|(_, artifact)| artifact.stored).map(|(place, _)| place);
        let stored = places.clone().count();
        let mut records = self.folded(task, places).await?;
        if records.len() != stored || records.values().any(|record| record.to > head.last_event) {
            return Ok(Err(Moved));
        }
        let mut known = head.inlined().map_err(corrupt)?;
        known.extend(records.iter_mut().filter_map(|(place, record)| Some((*place, record.artifact.take()?))));
        let mut artifacts = Artifacts::new(&head.artifacts, known);
        let mut fits = true;
        let apply = |number, update: TaskArtifactUpdateEvent| {
            let place = update.artifact.as_ref().and_then(|artifact| artifacts.place(&artifact.artifact_id));
            // A fold may have got ahead of the head that was read.
            if place.and_then(|place| records.get(&place)).is_some_and(|record| record.to >= number) {
                return;
            }
            if let Err(refusal) = artifacts.apply(update) {
                error!(%task, %refusal, "the log does not fit the artifacts");
                fits = false;
            }
        };
        let (after, to) = head.unfolded_range();
        let whole = self.each_update(task, head, after, to, apply).await?.is_ok();
        if !(whole && fits) {
            return Ok(Err(Moved));
        }
        let found = artifacts.by_place.len();
        Ok(if found == head.artifacts.len() { Ok(artifacts.by_place.into_values().collect()) } else { Err(Moved) })
    }
}

/// A task without history and artifacts.
pub(crate) fn bare_task(task: TaskId, head: &Head, place: &Place) -> Task {
    let mut status = head.status.clone();
    if let Some(message) = status.as_mut().and_then(|status| status.message.as_mut()) {
        place.name(message);
    }
    Task {
        id: task.text(),
        context_id: head.context_id.clone(),
        status,
        metadata: head.metadata.clone(),
        ..Task::default()
    }
}

/// What a caller is shown of a task: itself, or the answer of a hidden one.
///
/// # Errors
/// A hidden task that has no answer to show.
pub(crate) async fn snapshot_event(store: &Store, id: TaskId, head: &Head, task: Task) -> Result<Update, Error> {
    let payload = if head.hidden { Payload::Message(answer(store, id, head).await?) } else { Payload::Task(task) };
    let event = Some(StreamResponse { payload: Some(payload) });
    Ok(Update { number: head.last_event, event, ..Update::default() })
}

/// The answer of a hidden task: its last event, or once that is folded away, its last message; or the question
/// that it ended with. A failure is no answer, and a client that gets messages only must not take it for one.
async fn answer(store: &Store, task: TaskId, head: &Head) -> Result<Message, Error> {
    let place = Place::new(task, &head.context_id);
    let said = head.status.as_ref().and_then(|status| status.message.clone());
    let found = match head.state() {
        TaskState::Completed => {
            let last = store.log(task, head, head.last_event - 1).await?.into_iter().next();
            match last
                .map(|entry| place.event(entry.payload).map_err(corrupt))
                .transpose()?
                .and_then(|event| event.payload)
            {
                Some(Payload::Message(message)) => Some(message),
                _ => {
                    let from = head.history_len.saturating_sub(1);
                    store.messages(task, head, &place, from, head.history_len).await?.pop()
                }
            }
        }
        TaskState::InputRequired | TaskState::AuthRequired => said,
        _ => {
            let reason = said.iter().flat_map(|message| &message.parts).find_map(|part| match &part.content {
                Some(Content::Text(text)) => Some(text.as_str()),
                _ => None,
            });
            let text = format!("The agent gave no answer: {}", reason.unwrap_or("the work was ended"));
            return Err(Error::new(Kind::InvalidAgentResponse, text));
        }
    };
    let mut message = found.ok_or(Error::from(Kind::InvalidAgentResponse))?;
    message.task_id.clear();
    message.context_id.clone_from(&head.context_id);
    Ok(message)
}
