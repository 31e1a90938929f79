//! The agents of `examples/` and `docs/agents.md`, for real.

use std::path::{Path, PathBuf};

use rialto_a2a::v1::TaskState;
use rialto_runtime::config::{self, Backend};

use crate::lab::Lab;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The agent of an example's configuration, which is meant to be started from the root of the repository.
fn example(name: &str) -> config::Agent {
    let file = root().join("examples/agents").join(name);
    let text = std::fs::read_to_string(file).unwrap();
    let mut agent = config::parse_yaml(name, &text).unwrap().agents.remove(0);
    let Backend::Command { cwd, .. } = &mut agent.backend else { panic!("{name} is a command") };
    *cwd = Some(root());
    "a".clone_into(&mut agent.id);
    agent
}

#[tokio::test]
async fn every_example_configuration_is_valid() {
    let mut seen = 0;
    for file in std::fs::read_dir(root().join("examples/agents")).unwrap() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "yaml") {
            let text = std::fs::read_to_string(&file).unwrap();
            let name = file.display().to_string();
            config::parse_yaml(&name, &text).unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
            seen += 1;
        }
    }
    assert!(seen >= 3);
}

#[tokio::test]
async fn upper_stays_and_answers() {
    let lab = Lab::with([example("upper.yaml")]);
    for _ in 0..2 {
        let task = lab.ask("hello world").await;
        assert_eq!((task.state, task.artifact_text("answer")), (TaskState::Completed, "HELLO WORLD ".to_owned()));
    }
    let empty = lab.ask("").await;
    assert_eq!(
        (empty.state, empty.status_text().as_str()),
        (TaskState::InputRequired, "What shall I write in capitals?")
    );
}

#[tokio::test]
async fn count_counts_or_rejects() {
    let lab = Lab::with([example("count.yaml")]);
    let task = lab.ask("one \"two\" three\nfour").await;
    assert_eq!((task.state, task.artifact_text("answer")), (TaskState::Completed, "4 words".to_owned()));
    assert_eq!(lab.ask("").await.state, TaskState::Rejected);
}

#[tokio::test]
async fn pipeline_reports_and_stops() {
    let mut agent = example("pipeline.yaml");
    let Backend::Command { command, .. } = &mut agent.backend else { unreachable!() };
    command.push("0.01".to_owned());
    let lab = Lab::with([agent.clone()]);
    let task = lab.ask("go").await;
    assert_eq!((task.state, task.status_text()), (TaskState::Completed, "done".to_owned()));
    assert_eq!(task.progress(), ["fetch", "think", "write"]);
    assert_eq!(task.artifacts[0].name, "report.json");

    let Backend::Command { command, .. } = &mut agent.backend else { unreachable!() };
    *command.last_mut().unwrap() = "1000".to_owned();
    agent.kill_grace = rialto_runtime::units::Span::secs(10);
    let lab = Lab::with([agent]);
    let task_id = lab.send("go").await;
    lab.until(&task_id, |kept| kept.progress() == ["fetch"]).await;
    let before = tokio::time::Instant::now();
    lab.cancel(&task_id, false);
    assert_eq!(lab.over(&task_id).await.state, TaskState::Canceled);
    assert!(before.elapsed().as_secs() < 5, "it reads the cancel line");
}

/// The listings of the documentation are the files.
#[tokio::test]
async fn the_documentation_shows_the_examples_as_they_are() {
    let page = std::fs::read_to_string(root().join("docs/agents.md")).unwrap();
    for name in ["upper.py", "count.sh"] {
        let code = std::fs::read_to_string(root().join("examples/agents").join(name)).unwrap();
        assert!(page.contains(code.trim_end()), "{name} differs from its listing");
    }
}
