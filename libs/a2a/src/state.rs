//! The task state machine: what may follow what, and what a task is after a series of events.
//!
//! Pure functions for both ends of a stream. A store decides with [`set_status`] and [`merge_artifact`], whatever
//! records it keeps; a client, or a reader of a log, rebuilds a whole task with [`fold`]. A refused event changes
//! nothing.

use crate::{
    error::{Error, Kind},
    v1::{Artifact, StreamResponse, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus, stream_response::Payload},
    wkt::Struct,
};

/// Why an event cannot happen to a task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The task has ended; nothing happens to it any more.
    #[error("the task has already ended in {}", .0.as_str_name())]
    Ended(TaskState),
    /// No task goes from the first of these states to the second.
    #[error("a task does not go from {} to {}", .0.as_str_name(), .1.as_str_name())]
    Transition(TaskState, TaskState),
    /// An append to an artifact that was never created.
    #[error("append to the unknown artifact {0:?}")]
    UnknownArtifact(String),
    /// The event is about another task.
    #[error("the event is about another task")]
    OtherTask,
    /// The event lacks what makes it one: a status, an artifact, or anything that is about a task.
    #[error("the event says nothing about a task")]
    Empty,
}

/// An agent that makes such events answers something that is not A2A. Where the caller is to blame, callers of this
/// module say so themselves.
impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(Kind::InvalidAgentResponse, format!("The agent gave an invalid response: {refusal}"))
    }
}

impl TaskState {
    /// Whether a task in this state has ended.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled | Self::Rejected)
    }

    /// Whether a task in this state waits for somebody.
    #[must_use]
    pub const fn is_interrupted(self) -> bool {
        matches!(self, Self::InputRequired | Self::AuthRequired)
    }

    /// Fails unless a task may go from this state to `next`.
    ///
    /// A task works, asks and works again as often as it likes, and reports from any of these more than once. It is
    /// submitted at its beginning, and again when somebody has answered its question.
    ///
    /// # Errors
    /// [`Refusal::Ended`] from a terminal state, else [`Refusal::Transition`].
    pub const fn check(self, next: Self) -> Result<(), Refusal> {
        match (self, next) {
            (from, _) if from.is_terminal() => Err(Refusal::Ended(from)),
            (_, Self::Unspecified) | (Self::Submitted | Self::Working, Self::Submitted) => {
                Err(Refusal::Transition(self, next))
            }
            _ => Ok(()),
        }
    }
}

/// Replaces a status. Its time never goes back, whatever clock made it.
///
/// # Errors
/// See [`TaskState::check`].
pub fn set_status(current: &mut TaskStatus, next: TaskStatus) -> Result<(), Refusal> {
    current.state().check(next.state())?;
    let timestamp = current.timestamp.max(next.timestamp);
    *current = TaskStatus { timestamp, ..next };
    Ok(())
}

/// The artifact that an update makes of the current one with that id, if there is one.
///
/// Without `append` the update is the artifact. With it, parts are added as they are, metadata is merged and
/// extensions are united. `lastChunk` is news for readers and changes nothing.
///
/// # Errors
/// [`Refusal::UnknownArtifact`] when there is nothing to append to, [`Refusal::Empty`] without an artifact.
pub fn merge_artifact(
    current: Option<&mut Artifact>,
    update: TaskArtifactUpdateEvent,
) -> Result<Option<Artifact>, Refusal> {
    let artifact = update.artifact.ok_or(Refusal::Empty)?;
    match current {
        None if update.append => Err(Refusal::UnknownArtifact(artifact.artifact_id)),
        None => Ok(Some(artifact)),
        Some(current) => {
            if update.append {
                append(current, artifact);
            } else {
                *current = artifact;
            }
            Ok(None)
        }
    }
}

fn append(current: &mut Artifact, chunk: Artifact) {
    current.parts.extend(chunk.parts);
    merge(&mut current.metadata, chunk.metadata);
    for extension in chunk.extensions {
        if !current.extensions.contains(&extension) {
            current.extensions.push(extension);
        }
    }
    if !chunk.name.is_empty() {
        current.name = chunk.name;
    }
    if !chunk.description.is_empty() {
        current.description = chunk.description;
    }
}

/// Adds members, the newer one of two with the same key.
fn merge(current: &mut Option<Struct>, newer: Option<Struct>) {
    if let Some(newer) = newer {
        current.get_or_insert_default().fields.extend(newer.fields);
    }
}

/// Makes a task what it is after `event`. A default task is one of which nothing is known yet.
///
/// # Errors
/// A [`Refusal`] when this cannot happen to that task; the task is then as before.
pub fn fold(task: &mut Task, event: StreamResponse) -> Result<(), Refusal> {
    match event.payload {
        Some(Payload::Task(snapshot)) => {
            same(task, &snapshot.id)?;
            let (now, then) = (task.state(), snapshot.state());
            if now.is_terminal() && now != then {
                return Err(Refusal::Ended(now));
            }
            *task = snapshot;
        }
        Some(Payload::StatusUpdate(update)) => {
            same(task, &update.task_id)?;
            let next = update.status.ok_or(Refusal::Empty)?;
            let mut status = task.status.clone().unwrap_or_default();
            set_status(&mut status, next)?;
            task.status = Some(status);
            merge(&mut task.metadata, update.metadata);
            introduce(task, update.task_id, update.context_id);
        }
        Some(Payload::ArtifactUpdate(mut update)) => {
            same(task, &update.task_id)?;
            if task.state().is_terminal() {
                return Err(Refusal::Ended(task.state()));
            }
            let (task_id, context_id) = (std::mem::take(&mut update.task_id), std::mem::take(&mut update.context_id));
            let id = update.artifact.as_ref().map(|artifact| artifact.artifact_id.clone());
            let current = task.artifacts.iter_mut().find(|artifact| Some(&artifact.artifact_id) == id.as_ref());
            let created = merge_artifact(current, update)?;
            task.artifacts.extend(created);
            introduce(task, task_id, context_id);
        }
        Some(Payload::Message(_)) | None => return Err(Refusal::Empty),
    }
    Ok(())
}

impl Task {
    /// The state; `Unspecified` without a status.
    #[must_use]
    pub fn state(&self) -> TaskState {
        self.status.as_ref().map_or(TaskState::Unspecified, TaskStatus::state)
    }
}

fn same(task: &Task, id: &str) -> Result<(), Refusal> {
    match task.id.is_empty() || task.id == id {
        true => Ok(()),
        false => Err(Refusal::OtherTask),
    }
}

/// Names a task of which nothing was known.
fn introduce(task: &mut Task, id: String, context_id: String) {
    if task.id.is_empty() {
        task.id = id;
    }
    if task.context_id.is_empty() {
        task.context_id = context_id;
    }
}

#[cfg(test)]
mod tests;
