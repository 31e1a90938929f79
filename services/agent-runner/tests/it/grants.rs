//! Agents that stop for authorization, and agents that report that it is there.

use rialto_a2a::{
    v1::TaskState,
    wkt::{Struct, value::Kind},
};

use crate::{
    fake::Fault,
    lab::{Lab, agent, echo},
    scripted::shell,
};

fn code(grant: &Struct) -> &str {
    match grant.fields["code"].kind.as_ref() {
        Some(Kind::StringValue(code)) => code,
        other => panic!("{other:?}"),
    }
}

/// A task of the agent, which nobody works at.
async fn another_task(lab: &mut Lab) -> String {
    let task_id = lab.send("x").await;
    lab.start([echo()], std::time::Duration::from_secs(1));
    lab.over(&task_id).await;
    lab.stop().await;
    task_id
}

#[tokio::test]
async fn a_grant_of_a_turn_is_stored_before_the_turn_ends() {
    for fault in [None, Some(Fault::Unavailable), Some(Fault::ReplyLost)] {
        let mut lab = Lab::new();
        let waiting = another_task(&mut lab).await;
        if let Some(fault) = fault {
            lab.fault("grant", fault, 3);
        }
        let script = format!(
            r#"read turn; echo '{{"type":"grant","taskId":"{waiting}","data":{{"code":"c1"}}}}'; echo '{{"type":"end"}}'"#
        );
        lab.start([agent(shell(&script, false))], std::time::Duration::from_secs(1));
        assert_eq!(lab.ask("callback").await.state, TaskState::Completed);
        let grants = lab.task(&waiting).grants;
        assert!(!grants.is_empty() && grants.iter().all(|grant| code(grant) == "c1"), "{grants:?}");
        let calls = lab.calls();
        let last = |name: &str| calls.iter().rposition(|call| *call == name);
        assert!(last("grant") < last("finish"), "{calls:?}");
    }
}

#[tokio::test]
async fn a_process_between_turns_reports_a_grant() {
    let mut lab = Lab::new();
    let waiting = another_task(&mut lab).await;
    // Listens for a callback, which comes when no turn runs; and says nonsense, which harms nobody.
    let script = format!(
        r#"while read turn; do
             case $turn in *'"type":"turn"'*) ;; *) continue;; esac
             echo '{{"type":"end"}}'
             (sleep 0.1; echo nonsense; echo '{{"type":"grant","taskId":"{waiting}","data":{{"code":"late"}}}}') &
           done; wait"#
    );
    lab.start([agent(shell(&script, true))], std::time::Duration::from_secs(1));
    assert_eq!(lab.ask("x").await.state, TaskState::Completed);
    let kept = lab.until(&waiting, |kept| !kept.grants.is_empty()).await;
    assert_eq!(code(&kept.grants[0]), "late");
    // The process is still good for turns.
    assert_eq!(lab.ask("y").await.state, TaskState::Completed);
}

#[tokio::test]
async fn a_grant_that_is_refused_harms_nobody() {
    let script = r#"read turn; echo '{"type":"grant","taskId":"of somebody else"}'; echo '{"type":"end"}'"#;
    let lab = Lab::with([agent(shell(script, false))]);
    assert_eq!(lab.ask("x").await.state, TaskState::Completed);
    assert!(lab.calls().contains(&"grant"));
}

#[tokio::test]
async fn a_granted_turn_is_told_so_and_what_came_with_it() {
    let script = r#"read turn
        case $turn in *'"granted":{"code":"c2"}'*) echo '{"type":"text","text":"paid"}';
                      ;; *) echo '{"type":"journal","data":1}'; echo '{"type":"auth-required","text":"log in"}'; exit;;
        esac
        echo '{"type":"end"}'"#;
    let lab = Lab::with([agent(shell(script, false))]);
    let task_id = lab.send("x").await;
    let stopped = lab.over(&task_id).await;
    assert_eq!((stopped.state, stopped.status_text()), (TaskState::AuthRequired, "log in".to_owned()));
    assert_eq!(stopped.finished_journal.len(), 1, "a step right before the stop is kept");
    lab.grant(&task_id, [("code", "c2")].into_iter().collect()).await;
    let over = lab.until(&task_id, |kept| kept.state == TaskState::Completed).await;
    assert_eq!(over.artifact_text("answer"), "paid");
    assert_eq!(over.attempts, 1);
}
