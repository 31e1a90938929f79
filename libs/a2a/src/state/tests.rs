//! Case C33, and random histories.

use proptest::prelude::*;

use super::*;
use crate::{
    v1::{Part, TaskStatusUpdateEvent, part::Content},
    wkt::Timestamp,
};

const ALL: [TaskState; 9] = [
    TaskState::Unspecified,
    TaskState::Submitted,
    TaskState::Working,
    TaskState::Completed,
    TaskState::Failed,
    TaskState::Canceled,
    TaskState::InputRequired,
    TaskState::Rejected,
    TaskState::AuthRequired,
];

fn text(text: &str) -> Part {
    Part { content: Some(Content::Text(text.into())), ..Default::default() }
}

fn status(state: TaskState, millis: i64) -> StreamResponse {
    let status = TaskStatus { state: state.into(), timestamp: Some(Timestamp::from_millis(millis)), message: None };
    let update = TaskStatusUpdateEvent {
        task_id: "t".into(),
        context_id: "c".into(),
        status: Some(status),
        metadata: Some([("at", millis.to_string())].into_iter().collect()),
    };
    StreamResponse { payload: Some(Payload::StatusUpdate(update)) }
}

fn chunk(id: &str, texts: &[&str], append: bool) -> StreamResponse {
    let artifact = Artifact {
        artifact_id: id.into(),
        parts: texts.iter().map(|t| text(t)).collect(),
        metadata: Some([("last", texts.join("")), (id, "x".into())].into_iter().collect()),
        extensions: vec!["urn:x".into()],
        ..Default::default()
    };
    let update = TaskArtifactUpdateEvent {
        task_id: "t".into(),
        context_id: "c".into(),
        artifact: Some(artifact),
        append,
        ..Default::default()
    };
    StreamResponse { payload: Some(Payload::ArtifactUpdate(update)) }
}

fn folded(events: impl IntoIterator<Item = StreamResponse>) -> Task {
    let mut task = Task::default();
    for event in events {
        // Refused events are part of the histories; they change nothing.
        fold(&mut task, event).ok();
    }
    task
}

#[test]
fn the_transition_table() {
    let mut table = String::new();
    for from in ALL {
        let next: String = ALL.iter().map(|&to| if from.check(to).is_ok() { 'x' } else { '.' }).collect();
        table += &format!("{next} {}\n", from.as_str_name());
    }
    insta::assert_snapshot!(table, @r"
    .xxxxxxxx TASK_STATE_UNSPECIFIED
    ..xxxxxxx TASK_STATE_SUBMITTED
    ..xxxxxxx TASK_STATE_WORKING
    ......... TASK_STATE_COMPLETED
    ......... TASK_STATE_FAILED
    ......... TASK_STATE_CANCELED
    .xxxxxxxx TASK_STATE_INPUT_REQUIRED
    ......... TASK_STATE_REJECTED
    .xxxxxxxx TASK_STATE_AUTH_REQUIRED
    ");
}

#[test]
fn appended_chunks_stay_one_artifact_and_keep_their_metadata() {
    let mut task =
        folded([status(TaskState::Working, 1), chunk("a1", &["Hello"], false), chunk("a1", &[" world"], true)]);
    assert_eq!(task.artifacts.len(), 1);
    assert_eq!(task.artifacts[0].parts, [text("Hello"), text(" world")]);
    assert_eq!(task.artifacts[0].extensions, ["urn:x"]);
    let metadata = task.artifacts[0].metadata.clone().unwrap();
    assert_eq!(metadata, [("last", " world"), ("a1", "x")].into_iter().collect());
    fold(&mut task, chunk("a1", &["new"], false)).unwrap();
    assert_eq!(task.artifacts[0].parts, [text("new")]);
    assert_eq!((&task.id[..], &task.context_id[..]), ("t", "c"));
}

#[test]
fn what_cannot_happen_is_refused_and_changes_nothing() {
    let before = folded([status(TaskState::Working, 1), chunk("a1", &["a"], false)]);
    let refused = |mut task: Task, event| {
        let before = task.clone();
        let refusal = fold(&mut task, event).unwrap_err();
        assert_eq!(task, before);
        refusal
    };
    assert_eq!(refused(before.clone(), chunk("a2", &["b"], true)), Refusal::UnknownArtifact("a2".into()));
    assert_eq!(refused(before.clone(), StreamResponse::default()), Refusal::Empty);
    assert_eq!(
        refused(before.clone(), status(TaskState::Submitted, 2)),
        Refusal::Transition(TaskState::Working, TaskState::Submitted)
    );
    let other = Task { id: "other".into(), ..Default::default() };
    assert_eq!(refused(before.clone(), StreamResponse { payload: Some(Payload::Task(other)) }), Refusal::OtherTask);
    let mut ended = before.clone();
    fold(&mut ended, status(TaskState::Completed, 2)).unwrap();
    let refusal = Refusal::Ended(TaskState::Completed);
    assert_eq!(refused(ended.clone(), status(TaskState::Working, 3)), refusal);
    assert_eq!(refused(ended.clone(), chunk("a1", &["b"], true)), refusal);
    assert_eq!(refused(ended, StreamResponse { payload: Some(Payload::Task(before)) }), refusal);
    insta::assert_snapshot!(Error::from(refusal), @"The agent gave an invalid response: the task has already ended in TASK_STATE_COMPLETED");
}

fn event() -> impl Strategy<Value = StreamResponse> {
    prop_oneof![
        (prop::sample::select(&ALL[..]), 0..50_i64).prop_map(|(state, millis)| status(state, millis)),
        (prop::sample::select(&["a", "b", "c"][..]), "[a-z ]{0,4}", any::<bool>())
            .prop_map(|(id, text, append)| chunk(id, &[&text], append)),
    ]
}

proptest! {
    #[test]
    fn no_history_leaves_a_terminal_state_or_goes_back_in_time(events in prop::collection::vec(event(), 0..40)) {
        let mut task = Task::default();
        for event in events {
            let before = task.clone();
            let result = fold(&mut task, event);
            prop_assert!(result.is_ok() || task == before);
            prop_assert!(!before.state().is_terminal() || task == before);
            let time = |task: &Task| task.status.as_ref().and_then(|status| status.timestamp);
            prop_assert!(time(&task) >= time(&before));
            prop_assert!(task.status.as_ref().is_none_or(|status| status.state() != TaskState::Unspecified));
        }
    }

    #[test]
    fn chunks_concatenate(texts in prop::collection::vec("[a-z ]{0,5}", 1..20)) {
        let task = folded(texts.iter().enumerate().map(|(n, text)| chunk("a", &[text], n > 0)));
        let read: Vec<_> = task.artifacts[0].parts.iter().map(|part| match &part.content {
            Some(Content::Text(text)) => text.as_str(),
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(read.concat(), texts.concat());
        prop_assert_eq!(task.artifacts.len(), 1);
    }

    #[test]
    fn a_snapshot_and_the_rest_make_the_whole(events in prop::collection::vec(event(), 0..40), at in 0..40_usize) {
        let (past, rest) = events.split_at(at.min(events.len()));
        let snapshot = StreamResponse { payload: Some(Payload::Task(folded(past.to_vec()))) };
        prop_assert_eq!(folded([snapshot].into_iter().chain(rest.to_vec())), folded(events));
    }
}
