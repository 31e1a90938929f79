use std::time::Duration;

use rialto_a2a::v1::{Message, Part, Role, TaskState, part};
use rialto_agent_runner::backend::text_part;
use rialto_runtime::{
    config::{self, Answer, Reply, TurnEnd},
    units::Span,
};
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    fake::{Fault, Kept, message, text_of},
    lab::{Lab, agent},
    scripted::{backend, shell},
};

fn scripted(persistent: bool) -> config::Agent {
    agent(backend(persistent, &[("SCRIPTED_TICK_MS", "30")]))
}

/// A scripted agent with counters.
fn counting(persistent: bool) -> (config::Agent, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let env = [("SCRIPTED_TICK_MS", "30"), ("SCRIPTED_COUNTERS", folder.path().to_str().unwrap())];
    (agent(backend(persistent, &env)), folder)
}

fn counts(folder: &tempfile::TempDir, key: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.path().join(key)).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until the file of counts has this many lines.
async fn counted(folder: &tempfile::TempDir, key: &str, lines: usize) {
    let wait = async {
        while counts(folder, key).len() < lines {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it counts");
}

fn state(task: &Kept) -> (TaskState, String) {
    (task.state, task.status_text())
}

#[tokio::test]
async fn the_script_in_both_modes() {
    for persistent in [false, true] {
        let lab = Lab::with([scripted(persistent)]);
        let task = lab.ask("echo hello").await;
        assert_eq!(
            (state(&task), task.artifact_text("answer")),
            ((TaskState::Completed, String::new()), "hello".into())
        );
        assert_eq!(task.agent_texts(), ["hello"]);

        let task = lab.ask("chunks:3x0").await;
        assert_eq!(task.artifact_text("chunks"), "1\n2\n3\n");
        assert_eq!(task.agent_texts(), [""; 0]);

        let task = lab.ask("status:2x30").await;
        assert_eq!(task.progress(), ["status 1", "status 2"]);
        assert_eq!(task.agent_texts(), [""; 0]);

        let task = lab.ask("text:3x30").await;
        assert_eq!(task.artifact_text("answer"), "1\n2\n3\n");
        assert_eq!(task.agent_texts(), ["1\n2\n3\n"]);

        let task = lab.ask("sleep:0.01").await;
        assert_eq!(task.artifact_text("answer"), "sleep:0.01");

        let task = lab.ask("silent:0.01").await;
        assert_eq!((state(&task), task.events.len()), ((TaskState::Completed, String::new()), 1));

        assert_eq!(state(&lab.ask("fail").await), (TaskState::Failed, "failed on request".to_owned()));
        let task = lab.ask("reject").await;
        assert_eq!(state(&task), (TaskState::Rejected, "rejected on request".to_owned()));
        assert_eq!(task.agent_texts(), ["rejected on request"]);

        let task = lab.ask("message plain words").await;
        assert_eq!(state(&task), (TaskState::Completed, "plain words".to_owned()));
        assert_eq!(task.agent_texts(), ["plain words"]);

        let task = lab.ask("bytes:2500000").await;
        assert_eq!(task.artifact_text("bytes").len(), 2_500_000);

        let task = lab.ask("usage").await;
        let metadata = rialto_a2a::json::to_value(&task.metadata).unwrap();
        assert_eq!(metadata, serde_json::json!({"usage": {"inputTokens": 3, "outputTokens": 5}, "model": "scripted"}));
        lab.settled().await;
    }
}

#[tokio::test]
async fn appended_chunks_are_one_artifact_and_a_replaced_one_starts_anew() {
    let lab = Lab::with([scripted(false)]);
    let task = lab.ask("artifact3").await;
    assert_eq!(task.artifacts.len(), 1);
    assert_eq!(task.artifact_text("a1"), "new");
    assert_eq!(task.artifacts[0].metadata, None);
}

#[tokio::test]
async fn data_parts_go_through_unchanged() {
    let lab = Lab::with([scripted(false)]);
    let text = r#"{"a":[1,2.5,null,{"b":9007199254740991}]}"#;
    let data =
        Part { content: Some(part::Content::Data(rialto_a2a::json::from_str(text).unwrap())), ..Part::default() };
    let parts = vec![text_part("data"), data.clone()];
    let task_id = lab.send_message(Message { parts, ..message(Role::User, "") }).await;
    let task = lab.over(&task_id).await;
    assert_eq!(task.artifacts[0].parts, [data]);
}

#[tokio::test]
async fn a_question_waits_for_its_answer() {
    let lab = Lab::with([scripted(true)]);
    let task_id = lab.send("ask").await;
    let task = lab.over(&task_id).await;
    assert_eq!(state(&task), (TaskState::InputRequired, "what do you want?".to_owned()));
    assert_eq!(task.agent_texts(), ["what do you want?"]);
    lab.turn(&task_id, message(Role::User, "peace")).await;
    let task = lab.until(&task_id, |kept| kept.state == TaskState::Completed).await;
    assert_eq!(task.artifact_text("answer-2"), "peace");
    assert_eq!(task.agent_texts(), ["what do you want?", "peace"]);
}

#[tokio::test]
async fn authorization_frees_the_slot_and_the_same_turn_goes_on() {
    let mut agent = scripted(false);
    agent.max_concurrent = 1;
    let lab = Lab::with([agent]);
    let task_id = lab.send("auth").await;
    let task = lab.over(&task_id).await;
    assert_eq!(state(&task), (TaskState::AuthRequired, "authorization needed".to_owned()));
    assert_eq!(lab.ask("echo free").await.artifact_text("answer"), "free");
    lab.turn(&task_id, message(Role::User, "auth")).await;
    let task = lab.until(&task_id, |kept| kept.state == TaskState::Completed).await;
    assert_eq!(task.agent_texts().last().unwrap(), "auth");
}

#[tokio::test]
async fn contexts_do_not_know_of_each_other() {
    let mut agent = scripted(true);
    agent.turn_end = TurnEnd::InputRequired;
    agent.max_concurrent = 2;
    let lab = Lab::with([agent]);
    let (one, two) = (lab.send("remember: blue-17").await, lab.send("echo x").await);
    lab.over(&one).await;
    lab.over(&two).await;
    for task_id in [&one, &two] {
        lab.turn(task_id, message(Role::User, "what did I say?")).await;
    }
    assert_eq!(lab.over(&one).await.artifact_text("answer-2"), "blue-17");
    assert_eq!(lab.over(&two).await.artifact_text("answer-2"), "nothing");
}

#[tokio::test]
async fn the_answer_may_be_statuses_and_the_turn_may_stay_open() {
    let mut agent = scripted(false);
    (agent.answer, agent.turn_end) = (Answer::Status, TurnEnd::InputRequired);
    let lab = Lab::with([agent]);
    let task = lab.ask("text:3x40").await;
    assert_eq!(state(&task), (TaskState::InputRequired, String::new()));
    assert_eq!(task.progress().concat(), "1\n2\n3\n");
    assert_eq!(task.agent_texts(), ["1\n2\n3\n"]);
}

#[tokio::test]
async fn a_plain_reply_carries_results_too() {
    let mut agent = scripted(false);
    agent.reply = Reply::Message;
    let lab = Lab::with([agent]);
    let task = lab.ask("artifact3").await;
    assert_eq!(task.reply.unwrap().parts.iter().map(text_of).collect::<Vec<_>>(), ["new"]);
    let task = lab.ask("message hi").await;
    assert_eq!(task.reply.unwrap().parts.iter().map(text_of).collect::<Vec<_>>(), ["hi"]);
    assert_eq!(state(&lab.ask("fail").await), (TaskState::Failed, "failed on request".to_owned()));
}

#[tokio::test]
async fn an_append_to_nothing_is_an_invalid_response() {
    let lab = Lab::with([scripted(true)]);
    let task = lab.ask("unknownappend").await;
    assert_eq!(task.state, TaskState::Failed);
    assert!(task.status_text().starts_with("invalid agent response: append"), "{}", task.status_text());
    assert_eq!(lab.ask("echo still here").await.artifact_text("answer"), "still here");
}

#[tokio::test]
async fn an_append_to_nothing_in_a_later_turn_is_refused_by_task_store() {
    let mut agent = scripted(true);
    agent.turn_end = TurnEnd::InputRequired;
    let lab = Lab::with([agent]);
    let task_id = lab.send("echo one").await;
    lab.over(&task_id).await;
    lab.turn(&task_id, message(Role::User, "unknownappend")).await;
    let task = lab.over(&task_id).await;
    assert_eq!(task.state, TaskState::Failed);
    assert!(task.status_text().starts_with("invalid agent response"), "{}", task.status_text());
    assert_eq!(task.artifacts.len(), 1);
}

#[tokio::test]
async fn ending_without_a_result_fails_once() {
    for persistent in [false, true] {
        let lab = Lab::with([scripted(persistent)]);
        let task = lab.ask("noend").await;
        assert_eq!(state(&task), (TaskState::Failed, "the agent ended without a result".to_owned()));
        assert_eq!(task.attempts, 1);
    }
}

#[tokio::test]
async fn crashes_are_counted_and_then_failed() {
    for command in ["exit", "panic"] {
        let mut agent = scripted(true);
        agent.max_attempts = 3;
        let lab = Lab::with([agent]);
        let task_id = lab.send(command).await;
        assert_eq!(lab.ask("echo unharmed").await.artifact_text("answer"), "unharmed");
        let task = lab.over(&task_id).await;
        assert_eq!((task.state, task.attempts), (TaskState::Failed, 3));
        lab.settled().await;
    }
}

#[tokio::test]
async fn a_program_that_is_not_there_fails_at_once_and_is_no_crash() {
    let mut agent = agent(config::Backend::Command {
        command: vec!["/no/such/program".to_owned()],
        cwd: None,
        env: Default::default(),
        persistent: false,
    });
    agent.max_attempts = 2;
    let lab = Lab::with([agent]);
    let task = lab.ask("x").await;
    assert_eq!((task.state, task.attempts), (TaskState::Failed, 1));
}

#[tokio::test]
async fn the_next_attempt_goes_on_after_the_journal() {
    // Dies after the second step of the first attempt.
    let script = r#"
        IFS= read -r turn
        case $turn in
        *'"attempt":1,'*)
            echo '{"type":"artifact","artifactId":"out","text":"first"}'
            echo '{"type":"journal","data":{"step":1}}'
            echo '{"type":"journal","data":{"step":2}}'
            echo '{"type":"artifact","artifactId":"half","text":"lost"}'
            echo '{"type":"status","text":"dying"}'
            sleep 0.3
            kill -9 $$;;
        *)
            echo '{"type":"artifact","artifactId":"out","text":" second","append":true}'
            echo '{"type":"artifact","artifactId":"half","text":"whole","append":true}'
            echo '{"type":"journal","data":{"step":3}}'
            printf '%s' "$turn" | sed 's/.*"journal":\(\[[^]]*\]\).*"idempotencyKey.*/\1/; s/.*"journal":\(\[[^]]*\]\).*/\1/; s/"/\\"/g; s/^/{"type":"completed","text":"/; s/$/"}/'
            echo;;
        esac"#;
    let lab = Lab::with([agent(shell(script, false))]);
    let task = lab.ask("go").await;
    assert_eq!(state(&task), (TaskState::Completed, r#"[{"step":1},{"step":2}]"#.to_owned()));
    assert_eq!(task.attempts, 2);
    // What it wrote before its last step is extended, what came after it is replaced.
    assert_eq!(task.artifact_text("out"), "first second");
    assert_eq!(task.artifact_text("half"), "whole");
}

#[tokio::test]
async fn journaled_steps_count_once_over_a_killed_runner() {
    let (agent, folder) = counting(false);
    let mut lab = Lab::new();
    let task_id = lab.send("journal:6").await;
    lab.start([config::Agent { lease: Span::secs(1), ..agent.clone() }], Duration::from_secs(1));
    lab.until(&task_id, |kept| kept.journal.len() == 3).await;
    lab.kill().await;
    lab.start([config::Agent { lease: Span::secs(1), ..agent }], Duration::from_secs(1));
    let task = lab.over(&task_id).await;
    assert_eq!(task.attempts, 2);
    let steps: Vec<_> = counts(&folder, "journal").iter().map(|count| count["n"].as_u64().unwrap()).collect();
    assert!(steps.len() <= 7, "a journaled step ran again: {steps:?}");
    assert_eq!(steps.iter().collect::<std::collections::BTreeSet<_>>().len(), 6);
    let keys: std::collections::BTreeSet<_> =
        counts(&folder, "journal").iter().map(|count| count["key"].as_str().unwrap().to_owned()).collect();
    assert_eq!(keys.len(), 1, "all attempts have the same idempotency key");
}

#[tokio::test]
async fn cancel_stops_the_work() {
    for silently in [false, true] {
        let (agent, folder) = counting(false);
        let lab = Lab::with([config::Agent { lease: Span(Duration::from_millis(600)), ..agent }]);
        let task_id = lab.send("count:k:1000").await;
        counted(&folder, "k", 3).await;
        lab.cancel(&task_id, silently);
        let task = lab.over(&task_id).await;
        assert_eq!(task.state, TaskState::Canceled);
        lab.settled().await;
        let before = counts(&folder, "k").len();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(counts(&folder, "k").len(), before, "it goes on counting");
    }
}

#[tokio::test]
async fn one_that_ignores_cancel_is_cut_off_and_its_slot_freed() {
    for persistent in [false, true] {
        let mut agent = scripted(persistent);
        agent.max_concurrent = 1;
        let lab = Lab::with([agent]);
        let task_id = lab.send("hang").await;
        lab.until(&task_id, |kept| kept.attempts == 1).await;
        lab.cancel(&task_id, false);
        lab.over(&task_id).await;
        assert_eq!(lab.ask("echo free").await.artifact_text("answer"), "free");
    }
}

#[tokio::test]
async fn an_agent_that_reads_no_cancel_gets_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("told");
    let script = format!("trap 'echo term > {}; exit' TERM; read turn; while :; do sleep 0.05; done", told.display());
    let mut agent = agent(shell(&script, false));
    agent.kill_grace = Span::secs(10);
    let lab = Lab::with([agent]);
    let task_id = lab.send("x").await;
    lab.until(&task_id, |kept| kept.attempts == 1).await;
    lab.cancel(&task_id, false);
    lab.over(&task_id).await;
    assert_eq!(std::fs::read_to_string(told).unwrap(), "term\n");
}

#[tokio::test]
async fn a_turn_that_takes_too_long_fails() {
    let mut agent = scripted(false);
    agent.turn_timeout = Span(Duration::from_millis(200));
    let lab = Lab::with([agent]);
    let task = lab.ask("hang").await;
    assert_eq!(state(&task), (TaskState::Failed, "turn timed out".to_owned()));
    assert_eq!(task.attempts, 1);
}

#[tokio::test]
async fn a_fenced_turn_stops_and_writes_nothing() {
    let (agent, folder) = counting(false);
    let lab = Lab::with([config::Agent { lease: Span(Duration::from_millis(600)), ..agent }]);
    let task_id = lab.send("count:k:1000").await;
    counted(&folder, "k", 2).await;
    lab.fence(&task_id);
    let calls = lab.calls();
    tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            let before = counts(&folder, "k").len();
            tokio::time::sleep(Duration::from_millis(100)).await;
            if counts(&folder, "k").len() == before {
                break;
            }
        }
    })
    .await
    .expect("it stops counting");
    assert_eq!(lab.calls(), calls);
    assert!(lab.task(&task_id).open);
}

#[tokio::test]
async fn a_planned_stop_waits_for_what_ends_in_time() {
    let (agent, _folder) = counting(false);
    let mut lab = Lab::with([agent]);
    let task_id = lab.send("sleep:0.3").await;
    lab.until(&task_id, |kept| kept.attempts == 1).await;
    lab.stop().await;
    assert_eq!(lab.task(&task_id).artifact_text("answer"), "sleep:0.3");
}

#[tokio::test]
async fn a_planned_stop_hands_back_the_rest_and_costs_no_attempt() {
    let (mut agent, folder) = counting(false);
    agent.max_attempts = 1;
    let mut lab = Lab::new();
    lab.start([agent.clone()], Duration::from_millis(100));
    let task_id = lab.send("count:k:12").await;
    counted(&folder, "k", 1).await;
    let before = Instant::now();
    lab.stop().await;
    assert!(before.elapsed() < Duration::from_secs(3));
    let task = lab.task(&task_id);
    assert_eq!((task.open, task.handed_back, task.attempts), (true, 1, 0));
    lab.start([agent], Duration::from_secs(5));
    let task = lab.over(&task_id).await;
    assert_eq!((task.state, task.attempts), (TaskState::Completed, 1));
}

#[tokio::test]
async fn a_backend_that_is_told_may_end_its_turn_early() {
    let script = r#"
        IFS= read -r turn
        echo '{"type":"status","text":"at work"}'
        IFS= read -r word
        echo '{"type":"text","text":"told to stop"}'
        echo '{"type":"input-required","text":"go on?"}'"#;
    let mut lab = Lab::with([agent(shell(script, false))]);
    let task_id = lab.send("x").await;
    lab.until(&task_id, |kept| !kept.progress().is_empty()).await;
    lab.stop().await;
    let task = lab.task(&task_id);
    assert_eq!(state(&task), (TaskState::InputRequired, "go on?".to_owned()));
    assert_eq!(task.agent_texts(), ["told to stop|go on?"]);
}

#[tokio::test]
async fn never_more_turns_than_slots() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let script =
        format!(r#"read turn; echo in >> {0}; sleep 0.05; echo out >> {0}; echo '{{"type":"end"}}'"#, log.display());
    let mut agent = agent(shell(&script, false));
    agent.max_concurrent = 2;
    let lab = Lab::with([agent]);
    let mut tasks = Vec::new();
    for _ in 0..8 {
        tasks.push(lab.send("x").await);
    }
    for task in &tasks {
        assert_eq!(lab.over(task).await.state, TaskState::Completed);
    }
    let mut running = 0;
    for line in std::fs::read_to_string(log).unwrap().lines() {
        running += if line == "in" { 1 } else { -1 };
        assert!((0..=2).contains(&running));
    }
}

#[tokio::test]
async fn a_line_that_is_no_event_ends_the_turn() {
    for line in ["hello", "{\"type\":\"tekst\"}", "{}", "{\"type\":\"text\"}", "{\"type\":\"status\",\"parts\":[{}]}"] {
        let script = format!("read turn; echo '{{\"type\":\"text\",\"text\":\"a\"}}'; echo '{line}'; sleep 30");
        let lab = Lab::with([agent(shell(&script, true))]);
        let task = lab.ask("x").await;
        assert_eq!(task.state, TaskState::Failed, "{line}");
        assert!(task.status_text().starts_with("invalid agent response: "), "{}", task.status_text());
        assert_eq!(task.artifact_text("answer"), "a");
    }
}

#[tokio::test]
async fn a_line_without_end_is_not_read_without_end() {
    let script = "read turn; printf '{\"type\":\"text\",\"text\":\"'; yes x | tr -d '\\n'";
    let lab = Lab::with([agent(shell(script, false))]);
    let task = lab.ask("x").await;
    assert_eq!(task.state, TaskState::Failed);
    assert_eq!(task.status_text(), "invalid agent response: line 1 is not an event");
}

#[tokio::test]
async fn the_environment_and_the_open_files_are_clean() {
    let script = r#"
        read turn
        say() { printf '{"type":"text","text":"%s\\n"}\n' "$*"; }
        say "$(env | cut -d= -f1 | sort | tr '\n' ' ')"
        say "$(ls -l /proc/$$/fd | tr -d '\n')"
        echo '{"type":"end"}'"#;
    let mut agent = agent(shell(script, false));
    let folder = tempfile::tempdir().unwrap();
    let _secret = std::fs::File::create(folder.path().join("secret-file")).unwrap();
    let _socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config::Backend::Command { env, .. } = &mut agent.backend else { unreachable!() };
    env.insert("MODEL".to_owned(), "x".to_owned());
    let lab = Lab::with([agent]);
    let answer = lab.ask("x").await.artifact_text("answer");
    let (names, files) = answer.split_once('\n').unwrap();
    let allowed = ["PATH", "HOME", "LANG", "TZ", "MODEL", "PWD", "OLDPWD", "SHLVL", "_"];
    let names: Vec<_> = names.split_whitespace().collect();
    assert!(names.contains(&"MODEL") && names.iter().all(|name| allowed.contains(name)), "{names:?}");
    assert!(files.contains("pipe:"), "{files}");
    assert!(!files.contains("secret-file") && !files.contains("socket:"), "{files}");
}

#[tokio::test]
async fn the_whole_group_goes_with_a_turn_that_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!("read turn; sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", pid.display());
    let lab = Lab::with([agent(shell(&script, false))]);
    let task_id = lab.send("x").await;
    let grandchild = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            if let Ok(text) = std::fs::read_to_string(&pid) {
                break text.trim().to_owned();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let grandchild = grandchild.await.unwrap();
    let alive = || {
        let stat = std::fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
        // A zombie that nobody reaps is dead enough.
        !stat.is_empty() && !stat.contains(") Z ")
    };
    assert!(alive());
    lab.cancel(&task_id, false);
    lab.over(&task_id).await;
    tokio::time::timeout(Duration::from_secs(5), async {
        while alive() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the grandchild dies");
}

#[tokio::test]
async fn a_persistent_process_takes_turn_after_turn_and_is_replaced_when_it_dies() {
    let script = r#"
        n=0
        while IFS= read -r line; do
            case $line in *'"type":"turn"'*) ;; *) continue;; esac
            n=$((n + 1))
            case $line in *die*) kill -9 $$;; esac
            echo "{\"type\":\"text\",\"text\":\"$$ $n\"}"
            printf '{"type":"end"}\n{"type":"text","text":"too late"}\n'
        done"#;
    let mut agent = agent(shell(script, true));
    (agent.max_concurrent, agent.max_attempts) = (1, 1);
    let lab = Lab::with([agent]);
    let say = async |text: &str| lab.ask(text).await;
    let first = say("x").await.artifact_text("answer");
    let second = say("x").await.artifact_text("answer");
    let pid = first.strip_suffix(" 1").unwrap();
    assert_eq!(second, format!("{pid} 2"));
    assert_eq!(say("die").await.state, TaskState::Failed);
    let third = say("x").await.artifact_text("answer");
    assert!(third.ends_with(" 1") && !third.starts_with(&format!("{pid} ")), "{third}");
}

#[tokio::test]
async fn a_persistent_process_that_left_between_turns_costs_nothing() {
    // Leaves as soon as it has answered.
    let script = r#"IFS= read -r line; echo '{"type":"end"}'"#;
    let mut agent = agent(shell(script, true));
    agent.max_attempts = 1;
    let lab = Lab::with([agent]);
    for _ in 0..5 {
        assert_eq!(lab.ask("x").await.state, TaskState::Completed);
    }
}

#[tokio::test]
async fn a_long_reason_is_shortened() {
    let script = r#"read turn; printf '{"type":"failed","reason":"'; head -c 100000 /dev/zero | tr '\0' x; echo '"}'"#;
    let lab = Lab::with([agent(shell(script, false))]);
    let task = lab.ask("x").await;
    let reason = task.status_text();
    assert!(reason.len() <= 4096 && reason.ends_with('…'), "{}", reason.len());
}

#[tokio::test]
async fn a_flood_of_words_is_few_records() {
    let script = r#"read turn; i=0; while [ $i -lt 3000 ]; do echo '{"type":"text","text":"word "}'; i=$((i + 1)); done; echo '{"type":"end"}'"#;
    let lab = Lab::with([agent(shell(script, false))]);
    let task = lab.ask("x").await;
    assert_eq!(task.artifact_text("answer"), "word ".repeat(3000));
    assert_eq!(task.agent_texts(), ["word ".repeat(3000)]);
    let records = lab.calls().iter().filter(|call| **call == "record").count();
    assert!(records < 200, "{records} records");
}

#[tokio::test]
async fn noise_on_stderr_harms_nobody() {
    let script = r#"read turn; yes "noise" | head -c 3000000 >&2; echo '{"type":"end"}'"#;
    let lab = Lab::with([agent(shell(script, false))]);
    assert_eq!(lab.ask("x").await.state, TaskState::Completed);
}

#[tokio::test]
async fn replies_get_lost_and_calls_fail_and_nothing_is_said_twice() {
    let lab = Lab::with([scripted(true)]);
    for fault in [Fault::Unavailable, Fault::ReplyLost] {
        for call in ["begin", "record", "finish"] {
            lab.fault(call, fault, 2);
            let task = lab.ask("text:3x40").await;
            assert_eq!(task.artifact_text("answer"), "1\n2\n3\n", "{call} {fault:?}");
            assert_eq!((task.state, task.attempts), (TaskState::Completed, 1));
            assert_eq!(task.agent_texts().len(), 1);
        }
    }
    lab.settled().await;
}
