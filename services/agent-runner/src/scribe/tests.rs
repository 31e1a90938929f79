use proptest::{collection::vec, prelude::*};
use rialto_a2a::v1::part;

use super::*;

fn scribe(style: Style, turn: u32, stale: &[&str]) -> Scribe {
    let place = Place {
        task_id: "t".to_owned(),
        context_id: "c".to_owned(),
        turn,
        next_event: 1,
        stale: stale.iter().map(|id| (*id).to_owned()).collect(),
        ..Place::default()
    };
    Scribe::new(style, place)
}

#[test]
fn agents_in_the_style_of_iac_code_say_their_usage_where_its_clients_look() {
    let object = |members: &[(&str, u32)]| -> Struct { members.iter().copied().collect() };
    let nested = |name: &str, object: Struct| -> Struct {
        Struct { fields: [(name.to_owned(), value::Kind::StructValue(object).into())].into() }
    };
    let style = Style { answer: Answer::Status, reply: Reply::Task, turn_end: TurnEnd::InputRequired };
    for (style, under_iac_code) in [
        (style, true),
        (Style { answer: Answer::Artifact, ..style }, false),
        (Style { turn_end: TurnEnd::Completed, ..style }, false),
    ] {
        let iac_code = nested("cwd", object(&[("n", 1)]));
        let mut scribe = Scribe::new(style, Place { next_event: 1, iac_code: iac_code.clone(), ..Place::default() });
        scribe.push(AgentEvent::Usage(object(&[("inputTokens", 1)]))).unwrap();
        scribe.push(AgentEvent::Usage(object(&[("inputTokens", 2)]))).unwrap();
        let usage = nested("usage", object(&[("inputTokens", 2)]));
        let expected = match under_iac_code {
            true => nested("iac_code", Struct { fields: iac_code.fields.into_iter().chain(usage.fields).collect() }),
            false => usage,
        };
        assert_eq!(scribe.close(End::Done(Vec::new())).page.metadata, Some(expected));
    }
}

fn chunk(id: &str, text: &str, append: bool) -> AgentEvent {
    let artifact = Artifact { artifact_id: id.to_owned(), parts: vec![text_part(text)], ..Artifact::default() };
    AgentEvent::Artifact(Box::new(Chunk { artifact, append, last: false }))
}

fn text(part: &Part) -> &str {
    match &part.content {
        Some(part::Content::Text(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn texts(message: &Message) -> Vec<&str> {
    message.parts.iter().map(text).collect()
}

/// Artifact id, text, append, last chunk.
fn artifacts(events: &[StreamResponse]) -> Vec<(&str, String, bool, bool)> {
    let updates = events.iter().filter_map(|event| match &event.payload {
        Some(Payload::ArtifactUpdate(update)) => Some(update),
        _ => None,
    });
    updates
        .map(|update| {
            let artifact = update.artifact.as_ref().unwrap();
            let text = artifact.parts.iter().map(text).collect();
            (artifact.artifact_id.as_str(), text, update.append, update.last_chunk)
        })
        .collect()
}

fn state(closing: &Closing) -> (TaskState, Option<&Message>) {
    match &closing.page.events.last().unwrap().payload {
        Some(Payload::StatusUpdate(update)) => {
            let status = update.status.as_ref().unwrap();
            (status.state(), status.message.as_ref())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn text_that_waits_together_is_one_event() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    for word in ["a", "b", "c"] {
        scribe.push(AgentEvent::Text(word.to_owned())).unwrap();
    }
    assert_eq!(artifacts(&scribe.send().events), [("answer", "abc".to_owned(), false, false)]);
    scribe.stored();
    scribe.push(AgentEvent::Text("d".to_owned())).unwrap();
    let closing = scribe.close(End::Done(Vec::new()));
    assert_eq!(closing.page.first_event, 2);
    assert_eq!(artifacts(&closing.page.events), [("answer", "d".to_owned(), true, true)]);
    assert_eq!(texts(closing.history.as_ref().unwrap()), ["abcd"]);
    assert_eq!(state(&closing), (TaskState::Completed, None));
}

#[test]
fn an_artifact_named_like_the_answer_replaces_text_before_it_instead_of_failing() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    scribe.push(AgentEvent::Text("draft".to_owned())).unwrap();
    scribe.push(chunk("answer", "final", false)).unwrap();
    let page = scribe.send();
    let written: Vec<_> = artifacts(&page.events).into_iter().map(|(id, text, append, _)| (id, text, append)).collect();
    assert_eq!(written, [("answer", "draft".to_owned(), false), ("answer", "final".to_owned(), false)]);
}

#[test]
fn an_answer_that_was_stored_whole_ends_with_an_empty_piece() {
    let mut scribe = scribe(Style::default(), 2, &[]);
    scribe.push(AgentEvent::Text("a".to_owned())).unwrap();
    scribe.send();
    scribe.stored();
    let closing = scribe.close(End::Done(Vec::new()));
    assert_eq!(artifacts(&closing.page.events), [("answer-2", String::new(), true, true)]);
}

#[test]
fn the_last_waiting_piece_carries_the_mark() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    scribe.push(AgentEvent::Text("a".to_owned())).unwrap();
    scribe.push(chunk("x", "1", false)).unwrap();
    let closing = scribe.close(End::Done(Vec::new()));
    let expected = [("answer", "a".to_owned(), false, true), ("x", "1".to_owned(), false, false)];
    assert_eq!(artifacts(&closing.page.events), expected);
}

#[test]
fn a_failed_answer_is_not_marked_as_whole() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    scribe.push(AgentEvent::Text("half".to_owned())).unwrap();
    let closing = scribe.close(End::Failed("why".to_owned()));
    assert_eq!(artifacts(&closing.page.events), [("answer", "half".to_owned(), false, false)]);
    assert_eq!(texts(closing.history.as_ref().unwrap()), ["half", "why"]);
    let (state, message) = state(&closing);
    assert_eq!((state, texts(message.unwrap())), (TaskState::Failed, vec!["why"]));
}

#[test]
fn the_question_is_the_message_of_the_turn() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    let closing = scribe.close(End::InputRequired(vec![text_part("what?")]));
    let (state, message) = state(&closing);
    assert_eq!(state, TaskState::InputRequired);
    assert_eq!(message, closing.history.as_ref());
    assert_eq!(texts(message.unwrap()), ["what?"]);
}

#[test]
fn what_a_lost_attempt_wrote_is_replaced_at_first_touch() {
    let mut scribe = scribe(Style::default(), 1, &["x", "answer"]);
    scribe.push(chunk("x", "1", true)).unwrap();
    scribe.push(chunk("x", "2", true)).unwrap();
    scribe.push(AgentEvent::Text("new".to_owned())).unwrap();
    let closing = scribe.close(End::Done(Vec::new()));
    let appends: Vec<_> = artifacts(&closing.page.events).into_iter().map(|(id, _, append, _)| (id, append)).collect();
    assert_eq!(appends, [("x", false), ("x", true), ("answer", false)]);
}

#[test]
fn an_attempt_that_goes_on_after_a_step_goes_on_in_the_middle_of_its_answer() {
    let mut first = scribe(Style::default(), 1, &[]);
    first.push(AgentEvent::Text("one ".to_owned())).unwrap();
    first.push(AgentEvent::Journal("1".into())).unwrap();
    first.push(AgentEvent::Text("two ".to_owned())).unwrap();
    first.push(chunk("x", "1", false)).unwrap();
    first.push(AgentEvent::Journal("2".into())).unwrap();
    first.push(AgentEvent::Text("half".to_owned())).unwrap();
    let page = first.send();
    let steps: Vec<_> = page.journal.iter().map(|entry| (entry.step, entry.after_event, &entry.text[..])).collect();
    assert_eq!(steps, [(1, 1, "one "), (2, 3, "two ")], "each step names what was said before it");

    let kept = ["answer".to_owned(), "x".to_owned()].into_iter().collect();
    let place = Place { turn: 1, next_event: 9, journal: page.journal.clone(), kept, ..Place::default() };
    let mut second = Scribe::new(Style::default(), place);
    second.push(AgentEvent::Text("three".to_owned())).unwrap();
    second.push(chunk("x", "2", true)).unwrap();
    second.push(AgentEvent::Journal("3".into())).unwrap();
    let closing = second.close(End::Done(Vec::new()));
    let expected = [("answer", "three".to_owned(), true, true), ("x", "2".to_owned(), true, false)];
    assert_eq!(artifacts(&closing.page.events), expected);
    assert_eq!(texts(closing.history.as_ref().unwrap()), ["one two three"], "the history has the whole answer");
    assert_eq!((closing.page.journal[0].step, closing.page.journal[0].after_event), (3, 10));
}

#[test]
fn a_message_that_goes_on_after_a_step_has_the_results_before_it() {
    let style = Style { reply: Reply::Message, ..Style::default() };
    let mut first = scribe(style, 1, &[]);
    first.push(AgentEvent::Text("one ".to_owned())).unwrap();
    first.push(chunk("x", "1", false)).unwrap();
    first.push(AgentEvent::Journal("1".into())).unwrap();
    first.push(AgentEvent::Journal("2".into())).unwrap();
    first.push(chunk("x", "lost", true)).unwrap();
    let page = first.send();
    assert!(page.journal[1].results.is_empty(), "nothing new since the step before");
    let place = Place { turn: 1, next_event: 3, journal: page.journal.clone(), ..Place::default() };
    let mut second = Scribe::new(style, place);
    second.push(chunk("x", "2", true)).unwrap();
    second.push(AgentEvent::Text("two".to_owned())).unwrap();
    let closing = second.close(End::Done(Vec::new()));
    assert_eq!(texts(closing.history.as_ref().unwrap()), ["one two", "1", "2"]);
}

#[test]
fn what_is_not_valid_is_refused() {
    let mut first = scribe(Style::default(), 1, &[]);
    for (event, reason) in [
        (chunk("x", "1", true), "append to the artifact"),
        (chunk("", "1", false), "an artifact: Invalid parameters: artifactId"),
        (AgentEvent::Status(Vec::new()), "a status: Invalid parameters: parts"),
        (AgentEvent::Status(vec![Part::default()]), "a status: Invalid parameters: parts[0]"),
    ] {
        let Invalid(found) = first.push(event).unwrap_err();
        assert!(found.starts_with(reason), "{found}");
    }
    // Only task-store knows the artifacts of earlier turns.
    scribe(Style::default(), 2, &[]).push(chunk("x", "1", true)).unwrap();
}

#[test]
fn what_was_refused_takes_no_number() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    scribe.push(AgentEvent::Text("a".to_owned())).unwrap();
    scribe.send();
    scribe.push(AgentEvent::Text("b".to_owned())).unwrap();
    scribe.discard();
    let closing = scribe.close(End::Failed("no".to_owned()));
    assert_eq!((closing.page.first_event, closing.page.events.len()), (1, 1));
}

#[test]
fn usage_and_metadata_become_metadata_of_the_task() {
    let mut scribe = scribe(Style::default(), 1, &[]);
    scribe.push(AgentEvent::Usage([("tokens", 1)].into_iter().collect())).unwrap();
    assert!(scribe.is_waiting());
    scribe.send();
    scribe.push(AgentEvent::Usage([("tokens", 2)].into_iter().collect())).unwrap();
    scribe.push(AgentEvent::Metadata([("k", "v")].into_iter().collect())).unwrap();
    let metadata = rialto_a2a::json::to_value(&scribe.close(End::Done(Vec::new())).page.metadata.unwrap()).unwrap();
    assert_eq!(metadata, serde_json::json!({"usage": {"tokens": 2}, "k": "v"}));
}

/// What happens while an agent speaks.
#[derive(Clone, Debug)]
enum Step {
    Say(AgentEvent),
    /// A page is sent, and whether its reply arrives.
    Send,
    Stored,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let event = prop_oneof![
        4 => "[a-z]{0,4}".prop_map(AgentEvent::Text),
        1 => "[a-z]{1,4}".prop_map(|word| AgentEvent::Status(vec![text_part(word)])),
        2 => ("[xy]", "[a-z]{1,3}", any::<bool>()).prop_map(|(id, word, append)| chunk(&id, &word, append)),
        1 => "[0-9]{1,3}".prop_map(|step| AgentEvent::Journal(step.into())),
    ];
    vec(prop_oneof![4 => event.prop_map(Step::Say), 2 => Just(Step::Send), 2 => Just(Step::Stored)], 0..40)
}

fn styles() -> impl Strategy<Value = Style> {
    let answer = prop_oneof![Just(Answer::Artifact), Just(Answer::Status)];
    let turn_end = prop_oneof![Just(TurnEnd::Completed), Just(TurnEnd::InputRequired)];
    (answer, turn_end).prop_map(|(answer, turn_end)| Style { answer, reply: Reply::Task, turn_end })
}

/// A log that skips what it has, as task-store does.
fn store(log: &mut Vec<StreamResponse>, journal: &mut Vec<JournalEntry>, page: &Page) {
    let known = log.len() as u64 + 1;
    assert!(page.first_event <= known, "a gap");
    let skip = usize::try_from(known - page.first_event).unwrap();
    for (n, event) in page.events.iter().enumerate() {
        if n < skip {
            assert_eq!(event, &log[log.len() - skip + n], "a repeat that differs");
        }
    }
    log.extend(page.events.iter().skip(skip).cloned());
    let steps = u32::try_from(journal.len()).unwrap();
    journal.extend(page.journal.iter().filter(|entry| entry.step > steps).cloned());
}

proptest! {
    /// However pages are cut, and whichever replies are lost: the log tells the same story, once.
    #[test]
    fn the_log_tells_what_was_said(style in styles(), steps in steps(), arrives in vec(any::<bool>(), 40)) {
        let mut scribe = scribe(style, 1, &["x", "y"]);
        let (mut log, mut journal) = (Vec::new(), Vec::new());
        let (mut said, mut progress, mut journaled) = (String::new(), Vec::new(), Vec::new());
        let mut on_the_way = false;
        let mut arrives = arrives.into_iter();
        for step in steps {
            match step {
                Step::Say(event) => {
                    match &event {
                        AgentEvent::Text(text) => said.push_str(text),
                        AgentEvent::Status(parts) => progress.push(text(&parts[0]).to_owned()),
                        AgentEvent::Journal(step) => journaled.push(step.clone()),
                        _ => {}
                    }
                    scribe.push(event).unwrap();
                }
                Step::Send if !on_the_way => {
                    let page = scribe.send();
                    on_the_way = true;
                    if arrives.next() == Some(true) {
                        store(&mut log, &mut journal, &page);
                    }
                }
                // Nothing counts as stored before it is.
                Step::Stored if on_the_way => {
                    let sent = scribe.sent.clone().unwrap();
                    store(&mut log, &mut journal, &sent);
                    scribe.stored();
                    on_the_way = false;
                }
                _ => {}
            }
        }
        let closing = scribe.close(End::Done(Vec::new()));
        store(&mut log, &mut journal, &closing.page);

        let answers: Vec<_> = artifacts(&log).into_iter().filter(|(id, ..)| *id == "answer").collect();
        let statuses: Vec<String> = log.iter().filter_map(|event| match &event.payload {
            Some(Payload::StatusUpdate(update)) => update.status.as_ref()?.message.as_ref(),
            _ => None,
        }).map(|message| texts(message).concat()).collect();
        match style.answer {
            Answer::Artifact => {
                prop_assert_eq!(answers.iter().map(|(_, text, ..)| text.as_str()).collect::<String>(), said.clone());
                for (n, (_, _, append, last)) in answers.iter().enumerate() {
                    prop_assert_eq!((*append, *last), (n > 0, n + 1 == answers.len()));
                }
                prop_assert_eq!(statuses, progress);
            }
            Answer::Status => {
                prop_assert!(answers.is_empty());
                prop_assert_eq!(statuses.concat().len(), said.len() + progress.concat().len());
            }
        }
        for id in ["x", "y"] {
            let first = artifacts(&log).into_iter().find(|(found, ..)| *found == id);
            prop_assert!(first.is_none_or(|(_, _, append, _)| !append), "the lost attempt is extended");
        }
        prop_assert_eq!(journal.iter().map(|entry| entry.payload.clone()).collect::<Vec<_>>(), journaled);
        prop_assert!(journal.iter().enumerate().all(|(n, entry)| entry.step as usize == n + 1));
        let spoken = closing.history.as_ref().map(|message| texts(message).concat());
        prop_assert_eq!(spoken.unwrap_or_default(), said);
    }

    #[test]
    fn a_reason_is_short_and_still_text(reason in "\\PC{0,3000}") {
        let short = shorten(reason.clone());
        prop_assert!(short.len() <= MAX_REASON);
        prop_assert!(short == reason || short.ends_with('…'));
    }
}
