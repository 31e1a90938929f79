//! What a person sees of an answer.

use std::fmt::Write as _;

use rialto_a2a::json;
use rialto_rpc::tasks::{DeadEntry, ListStuckReply, Queue, Runner, TaskFacts};

use crate::output;

/// Columns under their names, each as wide as its widest cell; the last one may be long.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    /// Columns of numbers.
    right: &'static [usize],
}

impl Table {
    pub(super) fn new(head: &[&str], right: &'static [usize]) -> Self {
        Self { rows: vec![head.iter().map(|name| (*name).to_owned()).collect()], right }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| one_line(&cell)).collect());
    }

    pub(super) fn text(&self) -> String {
        let columns = self.rows[0].len();
        let wide = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(wide).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let room = " ".repeat(widths[column] - cell.chars().count());
                match self.right.contains(&column) {
                    true => line.extend([room.as_str(), cell]),
                    false => line.extend([cell, room.as_str()]),
                }
                line.push_str("  ");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Text of strangers, on the line that it belongs to.
fn one_line(text: &str) -> String {
    let text = output::harmless(text).replace(['\n', '\t'], " ");
    if text.is_empty() { "-".to_owned() } else { text }
}

/// A length of time: its two largest units.
pub(super) fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d{:02}h", s / 86_400, s / 3600 % 24),
    }
}

/// A moment, as RFC 3339 has it.
fn moment(at_ms: u64) -> String {
    let at = rialto_a2a::wkt::Timestamp::from_millis(i64::try_from(at_ms).unwrap_or(i64::MAX));
    serde_json::to_value(at).ok().and_then(|at| at.as_str().map(ToOwned::to_owned)).unwrap_or_default()
}

/// A state as people say it.
fn state(name: &str) -> String {
    name.strip_prefix("TASK_STATE_").unwrap_or(name).to_lowercase().replace('_', "-")
}

pub(super) fn queues(queues: &[Queue]) -> String {
    let names = ["AGENT", "LENGTH", "LAG", "PENDING", "DELAYED", "OLDEST", "DEAD", "RUNNERS"];
    let mut table = Table::new(&names, &[1, 2, 3, 4, 5, 6, 7]);
    for queue in queues {
        let counts = [queue.length, queue.lag, queue.pending, queue.delayed].map(|count| count.to_string());
        let rest = [queue.oldest_ms.map(span).unwrap_or_default(), queue.dead.to_string(), queue.runners.to_string()];
        let agent = if queue.agent.is_empty() { "(unknown)".to_owned() } else { queue.agent.clone() };
        table.row([agent].into_iter().chain(counts).chain(rest));
    }
    table.text()
}

pub(super) fn runners(runners: &[Runner]) -> String {
    let mut table = Table::new(&["RUNNER", "HOST", "PID", "AGENTS", "TURNS", "IDLE", "STATE"], &[2, 4, 5]);
    for runner in runners {
        let state = match (runner.alive, runner.turns) {
            (true, _) => "alive",
            (false, 0) => "gone",
            (false, _) => "dead",
        };
        let pid = if runner.pid == 0 { String::new() } else { runner.pid.to_string() };
        table.row([
            runner.consumer.clone(),
            runner.host.clone(),
            pid,
            runner.agents.join(","),
            runner.turns.to_string(),
            span(runner.idle_ms),
            state.to_owned(),
        ]);
    }
    table.text()
}

pub(super) fn dead_list(entries: &[DeadEntry]) -> String {
    let mut table = Table::new(&["ID", "AGE", "AGENT", "ATTEMPTS", "TASK", "REASON"], &[1, 3]);
    for entry in entries {
        let run = entry.run.as_ref();
        table.row([
            entry.id.clone(),
            span(entry.age_ms),
            entry.agent.clone(),
            entry.attempts.max(entry.deliveries).to_string(),
            run.map_or_else(|| "(no run entry)".to_owned(), |run| run.task_id.clone()),
            entry.reason.clone(),
        ]);
    }
    table.text()
}

pub(super) fn stuck(reply: &ListStuckReply) -> String {
    let mut table = Table::new(&["TASK", "AGENT", "STATE", "AGE", "WAITS FOR", "DETAIL"], &[3]);
    for task in &reply.tasks {
        table.row([
            task.task_id.clone(),
            task.agent.clone(),
            state(&task.state),
            span(task.age_ms),
            task.waits_for.clone(),
            task.detail.clone(),
        ]);
    }
    table.text()
}

/// Names and values, one per line; values that say nothing are left out.
struct Sheet(Vec<(&'static str, String)>);

impl Sheet {
    fn line(&mut self, name: &'static str, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            self.0.push((name, one_line(&value)));
        }
    }

    fn text(&self) -> String {
        let width = self.0.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        self.0.iter().fold(String::new(), |mut text, (name, value)| {
            writeln!(text, "{name:width$}  {value}").expect("writing to a string");
            text
        })
    }
}

pub(super) fn dead(entry: &DeadEntry) -> String {
    let mut sheet = Sheet(Vec::new());
    sheet.line("dead entry", &entry.id);
    sheet.line("agent", &entry.agent);
    sheet.line("reason", &entry.reason);
    sheet.line("given up", format!("{} ({} ago)", moment(entry.at_ms), span(entry.age_ms)));
    sheet.line("deliveries", entry.deliveries.to_string());
    sheet.line("was", format!("entry {} of {}", one_line(&entry.entry), one_line(&entry.stream)));
    sheet.line("bytes", entry.bytes.to_string());
    match &entry.run {
        Some(run) => {
            sheet.line("attempts", entry.attempts.to_string());
            sheet.line("task", &run.task_id);
            sheet.line(
                "task state",
                if entry.task_state.is_empty() { "gone".to_owned() } else { state(&entry.task_state) },
            );
            sheet.line("turn", &run.turn_id);
            sheet.line("message", &run.message_id);
            sheet.line("queued", moment(run.queued_at_ms));
            sheet.line("trace", &run.traceparent);
        }
        None => sheet.line("payload", &entry.payload_hex),
    }
    sheet.line(
        "replay",
        match entry.replay.as_str() {
            "new-task" => "sends the message again, as a new task of the same context".to_owned(),
            "same-turn" => "queues the turn of the task again".to_owned(),
            _ => format!("not possible: {}", entry.hindrance),
        },
    );
    sheet.text()
}

pub(super) fn facts(facts: &TaskFacts) -> String {
    let mut sheet = Sheet(Vec::new());
    sheet.line("task", &facts.task_id);
    sheet.line("state", format!("{}, since {}", state(&facts.state), moment(facts.state_at_ms)));
    sheet.line("reason", &facts.reason);
    sheet.line(
        "waits for",
        match facts.detail.as_str() {
            "" => facts.waits_for.clone(),
            detail => format!("{}: {detail}", facts.waits_for),
        },
    );
    sheet.line("agent", &facts.agent);
    sheet.line("tenant", &facts.tenant);
    sheet.line("owner", &facts.owner);
    sheet.line("context", &facts.context_id);
    sheet.line("created", moment(facts.created_at_ms));
    if facts.hidden {
        sheet.line("hidden", "its answer is a message; clients see no task");
    }
    if let Some(turn) = &facts.turn {
        sheet.line("turn", format!("number {}, {}, id {}", turn.number, turn.phase, turn.id));
        sheet.line("attempts", format!("{} (fence {})", turn.attempts, turn.fence));
        sheet.line("queued", moment(turn.queued_at_ms));
        if turn.deadline_at_ms > 0 {
            sheet.line("begin before", moment(turn.deadline_at_ms));
        }
        sheet.line(
            "run entry",
            match (turn.entry.as_str(), turn.entry_exists) {
                ("", _) => String::new(),
                (entry, true) => entry.to_owned(),
                (entry, false) => format!("{entry} (not on the stream any more)"),
            },
        );
        sheet.line(
            "runner",
            match (turn.consumer.as_str(), turn.consumer_alive) {
                ("", _) => String::new(),
                (runner, true) => format!("{runner} (alive)"),
                (runner, false) => format!("{runner} (gone)"),
            },
        );
        if turn.journal_steps > 0 {
            sheet.line("journal", format!("{} steps, {} bytes", turn.journal_steps, turn.journal_bytes));
        }
        if turn.grants > 0 {
            sheet.line("grants", turn.grants.to_string());
        }
        sheet.line("trace", &turn.traceparent);
    }
    sheet.line(
        "events",
        match facts.first_event > facts.last_event {
            true => format!("{} (folded away)", facts.last_event),
            false => format!("{} to {}", facts.first_event, facts.last_event),
        },
    );
    sheet.line("messages", format!("{} ({} bytes)", facts.messages, facts.messages_bytes));
    for artifact in &facts.artifacts {
        sheet
            .line("artifact", format!("{} ({} bytes, turn {})", one_line(&artifact.id), artifact.bytes, artifact.turn));
    }
    sheet.line("size", format!("{} of {} bytes", facts.bytes, facts.max_bytes));
    sheet.line(
        "context held by",
        match facts.context_holder.as_str() {
            holder if holder == facts.task_id => "this task",
            holder => holder,
        },
    );
    for waiting in &facts.waiting {
        sheet.line("waits behind it", format!("{}, since {}", waiting.task_id, moment(waiting.queued_at_ms)));
    }
    if facts.due_at_ms > 0 {
        sheet.line("next clean-up", moment(facts.due_at_ms));
    }
    let mut text = sheet.text();
    if let Some(content) = facts.content.as_ref().and_then(|content| json::to_value(content).ok()) {
        writeln!(text, "\n{}", output::harmless(&format!("{content:#}"))).expect("writing to a string");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_two_units() {
        let spans = [0, 999, 59_999, 60_000, 3_599_000, 3_600_000, 90_061_000].map(span);
        assert_eq!(spans, ["0ms", "999ms", "59s", "1m00s", "59m59s", "1h00m", "1d01h"]);
    }

    #[test]
    fn columns_are_aligned_and_a_strangers_text_stays_in_its_cell() {
        let mut table = Table::new(&["NAME", "N", "REASON"], &[1]);
        table.row(["a".to_owned(), "7".to_owned(), "it\nfell\u{1b}[2J".to_owned()]);
        table.row(["größer".to_owned(), "1234".to_owned(), String::new()]);
        insta::assert_snapshot!(table.text(), @r"
        NAME       N  REASON
        a          7  it fell␛[2J
        größer  1234  -
        ");
    }
}
