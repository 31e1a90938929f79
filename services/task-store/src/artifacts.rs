//! Artifacts grow by events in the log. A record of an artifact is the fold of these events up to the head's
//! `folded_to`; what came after is folded by every reader, until there is so much of it that a writer does it once
//! for all. Each byte is rewritten a bounded number of times, so a long stream costs its length, not its square.
//! Artifacts that stay small have no record: the head carries them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use prost::Message as _;
use rialto_a2a::{
    state::{self, Refusal},
    v1::{Artifact, TaskArtifactUpdateEvent},
};
use rialto_store::Op;

use crate::{
    change::{Draft, Need, State},
    stored::{self, Folded, Head},
};

/// Unfolded bytes that are not worth a rewrite.
const WORTH_FOLDING: u64 = 256 << 10;

/// Artifact events that no record holds, with the records that they build on.
#[derive(Debug, Default)]
pub(crate) struct Unfolded {
    /// From the log, in order.
    pub(crate) log: Vec<TaskArtifactUpdateEvent>,
    /// By place in the head's list.
    pub(crate) records: BTreeMap<usize, Artifact>,
    /// Records that were looked for.
    pub(crate) asked: BTreeSet<usize>,
}

/// Artifacts by their place in a head's list, while events are applied to them.
#[derive(Debug)]
pub(crate) struct Artifacts<'a> {
    places: HashMap<&'a str, usize>,
    /// The artifacts; those that no event touched and no record was given for are missing.
    pub(crate) by_place: BTreeMap<usize, Artifact>,
}

impl<'a> Artifacts<'a> {
    pub(crate) fn new(list: &'a [stored::Artifact], records: BTreeMap<usize, Artifact>) -> Self {
        let places = list.iter().enumerate().map(|(place, artifact)| (artifact.id.as_str(), place)).collect();
        Self { places, by_place: records }
    }

    /// Where an artifact stands in the list.
    pub(crate) fn place(&self, id: &str) -> Option<usize> {
        self.places.get(id).copied()
    }

    /// Applies one event, and says which artifact it was about.
    pub(crate) fn apply(&mut self, update: TaskArtifactUpdateEvent) -> Result<usize, Refusal> {
        let id = update.artifact.as_ref().ok_or(Refusal::Empty)?.artifact_id.as_str();
        let place = *self.places.get(id).ok_or_else(|| Refusal::UnknownArtifact(id.to_owned()))?;
        if let Some(created) = state::merge_artifact(self.by_place.get_mut(&place), update)? {
            self.by_place.insert(place, created);
        }
        Ok(place)
    }
}

/// The places of stored artifacts that these events are about.
pub(crate) fn touched(head: &Head, updates: &[TaskArtifactUpdateEvent]) -> BTreeSet<usize> {
    let ids: BTreeSet<&str> =
        updates.iter().filter_map(|update| Some(update.artifact.as_ref()?.artifact_id.as_str())).collect();
    let stored = head.artifacts.iter().enumerate().filter(|(_, known)| known.stored && ids.contains(known.id.as_str()));
    stored.map(|(place, _)| place).collect()
}

/// Whether the unfolded events should be folded before the turn ends.
pub(crate) fn is_worth_folding(head: &Head) -> bool {
    let total: u64 = head.artifacts.iter().map(|artifact| artifact.bytes).sum();
    head.unfolded_bytes > WORTH_FOLDING.max(total.saturating_sub(head.unfolded_bytes))
}

/// Folds all events of the draft's task into records. Reads nothing when all of them are in the draft itself and
/// each of their artifacts starts in there.
///
/// # Errors
/// What must be read first.
pub(crate) fn fold(draft: &mut Draft, state: &State) -> Result<Result<(), Refusal>, Need> {
    if draft.head.unfolded_bytes == 0 {
        // The log may be dropped after this: whoever folds what comes next must not look for what came before.
        draft.head.folded_to = draft.head.last_event;
        return Ok(Ok(()));
    }
    let mut needed = touched(&draft.head, &draft.updates);
    // A replacement does not need what it replaces.
    let mut seen = BTreeSet::new();
    for update in &draft.updates {
        let Some(artifact) = &update.artifact else { continue };
        if seen.insert(artifact.artifact_id.as_str()) && !update.append {
            needed.retain(|place| draft.head.artifacts[*place].id != artifact.artifact_id);
        }
    }
    let (log, records) = match &state.unfolded {
        Some(unfolded) if needed.is_subset(&unfolded.asked) => (unfolded.log.clone(), unfolded.records.clone()),
        Some(_) => return Err(Need::Unfolded(needed)),
        None => {
            let log = draft.was.as_ref().map_or(Ok(Some(Vec::new())), |held| held.value.unfolded());
            match (log, draft.head.inlined()) {
                (Ok(Some(log)), Ok(inlined)) if needed.is_empty() && touched(&draft.head, &log).is_empty() => {
                    (log, inlined)
                }
                // Also what does not decode: the reader reports it.
                _ => return Err(Need::Unfolded(needed)),
            }
        }
    };
    Ok(fold_all(draft, log, records))
}

fn fold_all(
    draft: &mut Draft,
    log: Vec<TaskArtifactUpdateEvent>,
    records: BTreeMap<usize, Artifact>,
) -> Result<(), Refusal> {
    let list = std::mem::take(&mut draft.head.artifacts);
    let mut artifacts = Artifacts::new(&list, records);
    let mut changed = BTreeSet::new();
    for update in log.into_iter().chain(std::mem::take(&mut draft.updates)) {
        match artifacts.apply(update) {
            Ok(place) => changed.insert(place),
            Err(refusal) => return Err(refusal),
        };
    }
    let mut by_place = artifacts.by_place;
    draft.head.artifacts = list;
    let to = draft.head.last_event;
    let mut inlined: usize = draft.head.artifacts.iter().map(|artifact| artifact.inlined.len()).sum();
    for place in changed {
        let known = &mut draft.head.artifacts[place];
        inlined -= std::mem::take(&mut known.inlined).len();
        let Some(artifact) = by_place.remove(&place) else { continue };
        let size = artifact.encoded_len();
        // One that has a record may be as old as the task, and its readers look there.
        if !known.stored && inlined + size <= stored::INLINED {
            inlined += size;
            known.inlined = artifact.encode_to_vec().into();
            continue;
        }
        known.stored = true;
        let record = Folded { to, artifact: Some(artifact) };
        draft.ops.push(Op::Put { key: draft.task.artifact(place), bytes: record.encode_to_vec().into() });
    }
    draft.head.folded_to = to;
    draft.head.unfolded_bytes = 0;
    Ok(())
}
