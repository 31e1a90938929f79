//! Many who watch one task: events per second that reach them.

use std::{
    io::{self, BufRead as _, Write as _},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{Call, Open, ask, first_task, load::as_f64, rpc, servers::Servers, subscribe};

/// Events that the agent sends each subscriber.
const EVENTS: usize = 100;
/// Tasks, one after the other; the middle one counts.
const ROUNDS: usize = 5;
/// A round may take so long before something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// What subscribers of one task receive, in one line.
pub(super) async fn measure(servers: &Servers, subscribers: usize) -> anyhow::Result<String> {
    let mut rates = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        rates.push(timeout(PATIENCE, round(servers, subscribers)).await.context("the events do not come")??);
    }
    rates.sort_by(f64::total_cmp);
    Ok(format!("{subscribers} subscribers × {EVENTS} events of one task: {:.0} events/s", rates[ROUNDS / 2]))
}

/// Events per second, from the message that sets the agent going to the last event of the last subscriber.
async fn round(servers: &Servers, subscribers: usize) -> anyhow::Result<f64> {
    let task = first_task(servers, "/many", "wait").await?;
    let open = subscribe(servers, "/many", &task, subscribers).await?;
    let message = json!({ "message": {
        "messageId": "go", "taskId": task, "role": "ROLE_USER", "parts": [{ "text": "go" }],
    } });
    let call = Call { path: "/many".to_owned(), ..rpc("SendMessage", [message]) };
    let started = Instant::now();
    let (answer, seen) = tokio::join!(ask(servers, &call), try_join_all(open.into_iter().map(count)));
    let seen: usize = seen?.into_iter().sum();
    ensure!(answer?.get("result").is_some(), "the agent refused");
    ensure!(seen >= subscribers * EVENTS, "{seen} of {} events came", subscribers * EVENTS);
    Ok(as_f64(seen as u64) / started.elapsed().as_secs_f64())
}

/// Artifact events until the end of a stream.
async fn count((_connection, mut body): Open) -> anyhow::Result<usize> {
    let mut seen = 0;
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            text.extend_from_slice(&data);
        }
        // What is behind the last line end may be half an event.
        let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else { continue };
        let lines = text.drain(..=end).collect::<Vec<_>>();
        seen += lines.split(|byte| *byte == b'\n').filter(|line| is_artifact(line)).count();
    }
    Ok(seen)
}

fn is_artifact(line: &[u8]) -> bool {
    const WORD: &[u8] = b"\"artifactUpdate\"";
    line.starts_with(b"data:") && line.windows(WORD.len()).any(|window| window == WORD)
}

/// The agent: asks for a second message, answers that with [`EVENTS`] events.
pub(super) fn agent() -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let order: Value = serde_json::from_str(&line?)?;
        if order["type"] != "turn" {
            continue;
        }
        if order["turn"] == 1 {
            writeln!(out, "{}", json!({ "type": "input-required", "text": "Say when." }))?;
        } else {
            for n in 0..EVENTS {
                let parts = json!([{ "text": format!("event {n} of a stream that many watch") }]);
                let event = json!({ "type": "artifact", "artifactId": "events", "parts": parts, "append": n > 0 });
                writeln!(out, "{event}")?;
            }
            writeln!(out, "{}", json!({ "type": "completed" }))?;
        }
        out.flush()?;
    }
    Ok(())
}
