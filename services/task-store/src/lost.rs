//! What becomes of the output of a lost attempt: it is taken back as far as nobody vouches for it.
//!
//! A step in the journal vouches for what was said before it, for the next attempt goes on after that step. What
//! came later is taken back before the next attempt begins, by events: a status that says so, and for each artifact
//! that was touched, one that makes it again what it was. So whoever follows the events, and whoever reads the
//! task, never sees the words of two attempts in one artifact.

use std::collections::BTreeMap;

use rialto_a2a::{
    Error,
    v1::{Artifact, Part, TaskArtifactUpdateEvent, TaskState, part::Content},
    wkt::Value,
};
use tracing::warn;

use crate::{
    artifacts::Artifacts,
    change::{Draft, Need, State},
    keys::TaskId,
    store::{Gap, Store, corrupt},
    stored::{Head, Turn},
};

impl Turn {
    /// Number of the newest event when it began, or last rested.
    fn base(&self) -> u64 {
        self.base_event.max(self.first_event)
    }
}

impl Head {
    /// Whether artifacts may be folded in the middle of a turn. Not while those are written to that were there
    /// before: their records are what they would be taken back to.
    pub(crate) fn may_fold_early(&self) -> bool {
        self.artifacts.iter().all(|artifact| artifact.base_event == 0 || artifact.last_event <= artifact.base_event)
    }
}

impl Draft {
    /// A turn ends or rests: the artifacts are what they are.
    pub(crate) fn settle_artifacts(&mut self) {
        for artifact in &mut self.head.artifacts {
            artifact.base_event = artifact.last_event.max(1);
        }
    }
}

/// The store has lost a part of what the attempts said, so nobody knows what there is to take back.
#[derive(Debug)]
pub(crate) struct Unknown;

/// Takes back what nobody vouches for; another attempt at the turn of this draft begins.
pub(crate) fn take_back(draft: &mut Draft, state: &State) -> Result<Result<(), Unknown>, Need> {
    let Some(turn) = &draft.head.turn else { return Ok(Ok(())) };
    let (kept, number, steps) = (turn.kept_event, turn.number, turn.journal);
    if kept == 0 || kept >= draft.head.last_event {
        return Ok(Ok(()));
    }
    let touched = draft.head.artifacts.iter().enumerate().filter(|(_, artifact)| artifact.last_event > kept);
    let touched: Vec<(usize, String)> = touched.map(|(place, artifact)| (place, artifact.id.clone())).collect();
    let none = BTreeMap::new();
    let before = match &state.kept {
        _ if touched.is_empty() => &none,
        Some((at, Some(artifacts))) if *at == kept => artifacts,
        Some((at, None)) if *at == kept => return Ok(Err(Unknown)),
        _ => return Err(Need::Kept(kept)),
    };
    let text = match steps {
        0 => "The work was interrupted and begins again.",
        _ => "The work was interrupted and goes on after its last finished step.",
    };
    let metadata = [("reason", Value::from("restarted")), ("keptEvent", Value::from(kept as f64))];
    draft.status_with(TaskState::Working, metadata.into_iter().collect(), text);
    for (place, id) in touched {
        let nothing = empty(id);
        let artifact = before.get(&place).unwrap_or(&nothing);
        // It may have been nothing before, too: left by an attempt that was lost earlier.
        let discarded = *artifact == nothing;
        let update = TaskArtifactUpdateEvent { artifact: Some(artifact.clone()), ..Default::default() };
        draft.artifact(update, number).expect("it is in the list");
        draft.head.artifacts[place].discarded = discarded;
    }
    Ok(Ok(()))
}

/// An artifact that was never to be seen. A2A has no way to delete one, and each must have a part.
fn empty(id: String) -> Artifact {
    let part = Part { content: Some(Content::Text(String::new())), ..Part::default() };
    let metadata = Some([("discarded", true)].into_iter().collect());
    Artifact { artifact_id: id, parts: vec![part], metadata, ..Artifact::default() }
}

impl Store {
    /// The artifacts that the running turn wrote to, as they were at this event.
    pub(crate) async fn artifacts_at(
        &self,
        task: TaskId,
        head: &Head,
        at: u64,
    ) -> Result<Result<BTreeMap<usize, Artifact>, Gap>, Error> {
        let Some(turn) = &head.turn else { return Ok(Ok(BTreeMap::new())) };
        let written = |place: &usize| head.artifacts[*place].last_event > at;
        let earlier = |place: &usize| head.artifacts[*place].base_event > 0;
        let stored = (0..head.artifacts.len()).filter(|place| written(place) && head.artifacts[*place].stored);
        let mut records = head.inlined().map_err(corrupt)?;
        let stored = self.folded(task, stored.filter(earlier)).await?;
        records.extend(stored.into_iter().filter_map(|(place, record)| Some((place, record.artifact?))));
        records.retain(|place, _| earlier(place) && written(place));
        let mut artifacts = Artifacts::new(&head.artifacts, records);
        let apply = |_, update| {
            if let Err(refusal) = artifacts.apply(update) {
                warn!(%task, %refusal, "the log does not fit the artifacts");
            }
        };
        if let Err(gap) = self.each_update(task, head, turn.base(), at, apply).await? {
            return Ok(Err(gap));
        }
        let mut artifacts = artifacts.by_place;
        artifacts.retain(|place, _| written(place));
        Ok(Ok(artifacts))
    }
}
