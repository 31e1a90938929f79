use rialto_a2a::v1::{Message, Part, Role, StreamResponse, TaskState, part, stream_response::Payload};
use rialto_agent_runner::backend::text_part;
use rialto_runtime::config::{Answer, Reply, TurnEnd};

use crate::{
    fake::{message, text_of},
    lab::{Lab, echo},
};

fn artifact(event: &StreamResponse) -> (&str, String, bool, bool) {
    let Some(Payload::ArtifactUpdate(update)) = &event.payload else { panic!("{event:?}") };
    let artifact = update.artifact.as_ref().unwrap();
    (&artifact.artifact_id, artifact.parts.iter().map(text_of).collect(), update.append, update.last_chunk)
}

#[tokio::test]
async fn an_echo_costs_begin_and_finish() {
    let lab = Lab::with([echo()]);
    let task = lab.ask("hello").await;
    assert_eq!(lab.calls(), ["begin", "finish"]);
    assert_eq!(task.events.len(), 2);
    assert_eq!(artifact(&task.events[0]), ("answer", "hello".to_owned(), false, true));
    assert_eq!((task.state, task.status_message.clone()), (TaskState::Completed, None));
    assert_eq!(task.agent_texts(), ["hello"]);
    lab.settled().await;
}

#[tokio::test]
async fn parts_other_than_text_come_back_as_an_artifact() {
    let lab = Lab::with([echo()]);
    let data = Part { content: Some(part::Content::Data(7.into())), ..Part::default() };
    let url = Part { content: Some(part::Content::Url("https://example.test/x".to_owned())), ..Part::default() };
    let parts = vec![text_part("one"), data.clone(), text_part("two"), url.clone()];
    let task_id = lab.send_message(Message { parts, ..message(Role::User, "") }).await;
    let task = lab.over(&task_id).await;
    assert_eq!(task.artifact_text("answer"), "one\ntwo");
    assert_eq!(task.artifacts.iter().find(|a| a.artifact_id == "parts").unwrap().parts, [data, url]);
}

#[tokio::test]
async fn a_later_turn_has_artifacts_of_its_own() {
    let mut agent = echo();
    agent.turn_end = TurnEnd::InputRequired;
    let lab = Lab::with([agent]);
    let task_id = lab.send("one").await;
    assert_eq!(lab.over(&task_id).await.state, TaskState::InputRequired);
    lab.turn(&task_id, message(Role::User, "two")).await;
    let task = lab.until(&task_id, |kept| !kept.open && kept.history.len() == 4).await;
    assert_eq!(task.artifact_text("answer"), "one");
    assert_eq!(task.artifact_text("answer-2"), "two");
    assert_eq!(task.agent_texts(), ["one", "two"]);
}

/// The history is a window; turns were once counted in it.
#[tokio::test]
async fn a_turn_without_history_does_not_overwrite_the_first_answer() {
    let mut agent = echo();
    agent.turn_end = TurnEnd::InputRequired;
    agent.context_window.messages = 0;
    let lab = Lab::with([agent]);
    let task_id = lab.send("one").await;
    lab.over(&task_id).await;
    lab.turn(&task_id, message(Role::User, "two")).await;
    let task = lab.until(&task_id, |kept| !kept.open && kept.history.len() == 4).await;
    assert_eq!((task.artifact_text("answer"), task.artifact_text("answer-2")), ("one".into(), "two".into()));
}

#[tokio::test]
async fn an_answer_by_status_is_one_message_of_the_history() {
    let mut agent = echo();
    agent.answer = Answer::Status;
    let lab = Lab::with([agent]);
    let task = lab.ask("hello").await;
    assert_eq!(task.progress(), ["hello"]);
    assert_eq!((task.state, task.artifacts.len()), (TaskState::Completed, 0));
    assert_eq!(task.agent_texts(), ["hello"]);
}

#[tokio::test]
async fn a_reply_by_message_is_all_there_is() {
    let mut agent = echo();
    agent.reply = Reply::Message;
    let lab = Lab::with([agent]);
    let task = lab.ask("hello").await;
    assert_eq!(task.events.len(), 1);
    let reply = task.reply.unwrap();
    assert_eq!(text_of(&reply.parts[0]), "hello");
    assert_eq!((reply.role(), reply.task_id.as_str()), (Role::Agent, ""));
    assert!(!reply.context_id.is_empty() && !reply.message_id.is_empty());
    assert_eq!(task.history.last(), Some(&reply));
}
