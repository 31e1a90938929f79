//! What was sent, what came of it, and whether that is what was promised.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    ops::AddAssign,
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

/// States that nothing leaves.
const TERMINAL: [&str; 4] = ["COMPLETED", "FAILED", "CANCELED", "REJECTED"];

/// One message and what its sender saw.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Its id, and the name of its counter.
    pub(crate) key: String,
    /// Path of the agent.
    pub(crate) mount: &'static str,
    /// The context, if others use it too.
    pub(crate) context: Option<String>,
    pub(crate) text: String,
    /// Steps that the agent does, each counted once; none by an agent that only echoes.
    pub(crate) steps: u64,
    /// What the task's artifact must hold at the end.
    pub(crate) expected: String,
    /// When it was sent for the first time.
    pub(crate) since: Instant,
    pub(crate) sends: u32,
    /// How many of them were refused for now.
    pub(crate) refused: u32,
    /// The task, when the message was answered.
    pub(crate) task: Option<String>,
    pub(crate) answered: Option<Instant>,
    /// The end that was seen.
    pub(crate) ended: Option<End>,
    pub(crate) stream: Stream,
    /// Streams that were opened after the first.
    pub(crate) resumed: u32,
    /// What must never happen.
    pub(crate) faults: Vec<String>,
}

impl Entry {
    pub(crate) const fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Takes a task as an answer shows it.
    pub(crate) fn saw(&mut self, task: &Value) {
        let id = task["id"].as_str().unwrap_or_default();
        match &self.task {
            Some(known) if known != id => self.faults.push(format!("answered as {known}, then as {id}")),
            Some(_) => {}
            None => (self.task, self.answered) = (Some(id.to_owned()), Some(Instant::now())),
        }
        match &self.ended {
            Some(end) if end.state != state(task) => {
                self.faults.push(format!("was {}, is {}", end.told, told(task)));
            }
            None if is_over(task) => self.ended = Some(End::of(task)),
            _ => {}
        }
    }

    /// Takes an event of a stream: numbered without gaps, and nothing after the last.
    pub(crate) fn heard(&mut self, number: u64, event: &Value) {
        let last = self.stream.last.replace(number);
        if self.is_ended() {
            self.faults.push(format!("event {number} after the end: {event}"));
        }
        if let Some(task) = event.get("task") {
            if let Some(last) = last {
                self.faults.push(format!("a snapshot at {number} instead of event {}", last + 1));
            }
            self.stream.work = artifact(task);
            return self.saw(task);
        }
        match last {
            Some(last) if number != last + 1 => self.faults.push(format!("event {number} came after {last}")),
            None => self.faults.push(format!("the first event is no snapshot: {event}")),
            Some(_) => {}
        }
        if let Some(update) = event.get("artifactUpdate") {
            if update["append"] != true {
                self.stream.work.clear();
            }
            self.stream.work += &text(&update["artifact"]);
        }
        if let Some(update) = event.get("statusUpdate")
            && is_over(update)
        {
            if state(update) == "COMPLETED" && self.stream.work != self.expected {
                self.faults.push(format!("the stream made {:?}", self.stream.work));
            }
            self.ended = Some(End::of(update));
        }
    }
}

/// The end of a task, as somebody saw it.
#[derive(Debug)]
pub(crate) struct End {
    state: String,
    /// With its reason.
    told: String,
    at: Instant,
}

impl End {
    fn of(holder: &Value) -> Self {
        Self { state: state(holder).to_owned(), told: told(holder), at: Instant::now() }
    }
}

/// What a client knows that follows a task.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Number of the last event.
    pub(crate) last: Option<u64>,
    /// The artifact as its pieces make it.
    work: String,
}

/// Whether a task, or an update of its status, says that it has ended.
pub(crate) fn is_over(holder: &Value) -> bool {
    TERMINAL.contains(&state(holder))
}

/// The state with what is said about it: `FAILED crashed "The agent…"`.
fn told(holder: &Value) -> String {
    let (state, message) = (state(holder), &holder["status"]["message"]);
    match (message["metadata"]["reason"].as_str(), text(message)) {
        (None, text) if text.is_empty() => state.to_owned(),
        (reason, text) => format!("{state} {} {text:?}", reason.unwrap_or("for no reason")),
    }
}

/// `COMPLETED`.
fn state(holder: &Value) -> &str {
    let state = holder["status"]["state"].as_str().unwrap_or_default();
    state.strip_prefix("TASK_STATE_").unwrap_or(state)
}

/// The texts of the artifact that an agent of these tests makes.
fn artifact(task: &Value) -> String {
    task["artifacts"].as_array().into_iter().flatten().map(text).collect()
}

fn text(holder: &Value) -> String {
    let parts = holder["parts"].as_array().into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect()
}

/// What may be asked of a run.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// Steps that an attempt did so shortly before its last one may be done again: their journal entries may have
    /// been under way.
    pub(crate) blind: Duration,
    /// Attempts that a turn may take.
    pub(crate) most_attempts: u64,
    /// Longest time between two steps of a turn.
    pub(crate) longest_gap: Duration,
    /// Times from which the store itself may have lost what it was told, each until it served again. What was
    /// answered then may be gone, what ran then may be seen to run again.
    pub(crate) lossy: Vec<(Instant, Instant)>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { blind: Duration::from_secs(3), most_attempts: u64::MAX, longest_gap: Duration::MAX, lossy: Vec::new() }
    }
}

/// The sum of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) sent: usize,
    pub(crate) answered: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
    /// Sent, again and again, and never answered.
    unanswered: usize,
    /// Of these, how many were accepted all the same.
    accepted: usize,
    /// Answered, and gone or without an end.
    pub(crate) lost: usize,
    /// The same within the bound of a store that may lose.
    pub(crate) lost_by_store: usize,
    /// Two tasks of one message, two ends, or a step done again that the journal knew.
    pub(crate) duplicated: usize,
    steps: usize,
    pub(crate) repeated_steps: usize,
    resumed: usize,
    /// Sends that were refused for now.
    pub(crate) refused: usize,
    /// Messages whose clients saw more than one course of events, because the store lost the first.
    disturbed: usize,
    took: Duration,
    /// Ends other than completed, which these agents give no cause for, and how often each was seen.
    ends: BTreeMap<String, usize>,
    faults: Vec<String>,
    /// Faults of those.
    forgiven: Vec<String>,
}

impl AddAssign for Ledger {
    fn add_assign(&mut self, other: Self) {
        let Self { sent, answered, completed, failed, unanswered, accepted, lost, lost_by_store, .. } = other;
        for (sum, one) in [
            (&mut self.sent, sent),
            (&mut self.answered, answered),
            (&mut self.completed, completed),
            (&mut self.failed, failed),
            (&mut self.unanswered, unanswered),
            (&mut self.accepted, accepted),
            (&mut self.lost, lost),
            (&mut self.lost_by_store, lost_by_store),
            (&mut self.duplicated, other.duplicated),
            (&mut self.steps, other.steps),
            (&mut self.repeated_steps, other.repeated_steps),
            (&mut self.resumed, other.resumed),
            (&mut self.refused, other.refused),
            (&mut self.disturbed, other.disturbed),
        ] {
            *sum += one;
        }
        self.took += other.took;
        for (end, times) in other.ends {
            *self.ends.entry(end).or_default() += times;
        }
        self.faults.extend(other.faults);
        self.forgiven.extend(other.forgiven);
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, answered, completed, failed, unanswered, accepted, lost, lost_by_store, .. } = self;
        write!(f, "sent {sent}, answered {answered}, completed {completed}, failed {failed}")?;
        write!(f, ", unanswered {unanswered} (accepted {accepted}), lost {lost}, lost by the store {lost_by_store}")?;
        let Self { duplicated, steps, repeated_steps, resumed, refused, disturbed, .. } = self;
        write!(f, ", duplicated {duplicated}, steps {steps} (repeated {repeated_steps}), resumed streams {resumed}")?;
        write!(f, ", sends refused for now {refused}, disturbed by the store {disturbed}; {} s", self.took.as_secs())?;
        self.ends.iter().take(20).try_for_each(|(end, times)| write!(f, "\n  {times}x seen: {end}"))?;
        self.forgiven.iter().take(20).try_for_each(|fault| write!(f, "\n  forgiven: {fault}"))?;
        self.faults.iter().take(40).try_for_each(|fault| write!(f, "\n  fault: {fault}"))
    }
}

impl Ledger {
    /// Whether every promise was kept.
    pub(crate) fn is_clean(&self) -> bool {
        self.faults.is_empty()
            && self.lost == 0
            && self.duplicated == 0
            && self.completed + self.lost_by_store == self.answered + self.accepted
    }

    pub(crate) fn after(self, took: Duration) -> Self {
        Self { took, ..self }
    }

    /// Prints it.
    ///
    /// # Panics
    /// When a promise was not kept.
    pub(crate) fn check(&self, title: &str) {
        println!("{title}: {self}");
        assert!(self.is_clean(), "{title}: {self}");
    }

    /// Closes the books: `lists` is what each gateway lists at the end, `tasks` what each shows of each task by
    /// its id, `counted` what agents counted under a key.
    pub(crate) fn close(
        entries: Vec<Entry>,
        lists: &[Vec<Value>],
        tasks: &HashMap<String, Vec<Option<Value>>>,
        counted: impl Fn(&str) -> Vec<Value>,
        rules: &Rules,
    ) -> Self {
        let mut ledger = Self { sent: entries.len(), ..Self::default() };
        let lists: Vec<_> = lists.iter().map(|list| by_message(list)).collect();
        for entry in entries {
            ledger.enter(entry, &lists, tasks, &counted, rules);
        }
        ledger
    }

    fn enter(
        &mut self,
        mut entry: Entry,
        lists: &[HashMap<&str, Vec<&Value>>],
        tasks: &HashMap<String, Vec<Option<Value>>>,
        counted: &impl Fn(&str) -> Vec<Value>,
        rules: &Rules,
    ) {
        self.resumed += entry.resumed as usize;
        self.refused += entry.refused as usize;
        let mut faults = std::mem::take(&mut entry.faults);
        let listed: Vec<&Vec<&Value>> = lists.iter().filter_map(|list| list.get(entry.key.as_str())).collect();
        let ids: BTreeSet<_> = listed.iter().flat_map(|list| list.iter()).filter_map(|it| it["id"].as_str()).collect();
        if ids.len() > 1 {
            faults.push(format!("{} tasks of one message: {ids:?}", ids.len()));
            self.duplicated += 1;
        }
        let lossy = |at: Instant| rules.lossy.iter().any(|(from, to)| (*from..*to).contains(&at));
        let may_be_gone = entry.answered.is_some_and(lossy);
        let disturbed = rules
            .lossy
            .iter()
            .any(|(from, to)| entry.since < *to && entry.ended.as_ref().is_none_or(|end| end.at >= *from));
        if disturbed && !faults.is_empty() {
            self.disturbed += 1;
            let forgiven = std::mem::take(&mut faults).into_iter();
            self.forgiven.extend(forgiven.map(|fault| format!("{} ({}): {fault}", entry.key, entry.text)));
        }
        match &entry.task {
            Some(task) => {
                self.answered += 1;
                let shown = tasks.get(task).map_or(&[] as &[_], Vec::as_slice);
                let states: BTreeSet<_> = shown.iter().map(|task| task.as_ref().map_or("gone", state)).collect();
                let ends = shown.iter().flatten().filter(|task| is_over(task)).map(told);
                let ends: BTreeSet<_> = ends.chain(entry.ended.iter().map(|end| end.told.clone())).collect();
                for end in ends.iter().filter(|end| *end != "COMPLETED") {
                    *self.ends.entry(end.clone()).or_default() += 1;
                }
                let seen = entry.ended.as_ref().map(|end| end.state.as_str());
                match states.iter().copied().collect::<Vec<_>>()[..] {
                    [now] if TERMINAL.contains(&now) && seen.is_none_or(|seen| seen == now) => {
                        if now == "COMPLETED" {
                            self.completed += 1;
                        } else {
                            self.failed += 1;
                            faults.push(format!("ended {ends:?}"));
                        }
                        if let Some(wrong) = shown.iter().flatten().find(|it| artifact(it) != entry.expected) {
                            faults.push(format!("made {:?}", artifact(wrong)));
                        }
                        if listed.len() < lists.len() || !ids.contains(task.as_str()) {
                            faults.push(format!("not in every list, only in {}: {ids:?}", listed.len()));
                        }
                    }
                    ["gone"] if may_be_gone => self.lost_by_store += 1,
                    _ => {
                        self.lost += 1;
                        faults.push(format!("seen as {seen:?}, now {states:?}, ends {ends:?}"));
                    }
                }
            }
            None => {
                self.unanswered += 1;
                if let Some(task) = listed.iter().flat_map(|list| list.iter()).next() {
                    self.accepted += 1;
                    if state(task) == "COMPLETED" && artifact(task) == entry.expected {
                        self.completed += 1;
                    } else {
                        faults.push(format!("accepted, and now {}: {:?}", state(task), artifact(task)));
                    }
                }
            }
        }
        if entry.steps > 0 {
            let steps = Steps::of(&counted(&entry.key));
            self.steps += steps.done;
            self.repeated_steps += steps.repeated;
            if !disturbed {
                self.duplicated += steps.faults(rules, &mut faults);
            }
            if !disturbed && entry.is_ended() && steps.distinct != entry.steps {
                faults.push(format!("{} of {} steps were done", steps.distinct, entry.steps));
            }
        }
        let (key, text, sends) = (&entry.key, &entry.text, entry.sends);
        self.faults.extend(faults.into_iter().map(|fault| format!("{key} ({text}, sent {sends}x): {fault}")));
    }
}

/// Tasks by the id of their first message.
fn by_message(tasks: &[Value]) -> HashMap<&str, Vec<&Value>> {
    let mut found: HashMap<&str, Vec<&Value>> = HashMap::new();
    for task in tasks {
        let message = task["history"][0]["messageId"].as_str().unwrap_or_default();
        found.entry(message).or_default().push(task);
    }
    found
}

/// What a turn did, over all of its attempts.
#[derive(Debug, Default)]
struct Steps {
    done: usize,
    distinct: u64,
    repeated: usize,
    attempts: u64,
    longest_gap: Duration,
    /// How long before the last step of an earlier run a repeated one was done.
    ages: Vec<Duration>,
    gaps: Vec<String>,
}

impl Steps {
    fn of(lines: &[Value]) -> Self {
        let number = |line: &Value, name: &str| line[name].as_u64().unwrap_or_default();
        let mut steps = Self { done: lines.len(), ..Self::default() };
        // Runs: attempts, and those that were handed back and go on under the same number.
        let mut runs: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
        let mut current: HashMap<u64, u64> = HashMap::new();
        for line in lines {
            let (attempt, n, at) = (number(line, "attempt"), number(line, "n"), number(line, "at"));
            let run = current.entry(attempt).or_default();
            if runs.get(&(attempt, *run)).and_then(|run| run.last()).is_some_and(|(last, _)| n <= *last) {
                *run += 1;
            }
            runs.entry((attempt, *run)).or_default().push((n, at));
        }
        let mut known: BTreeMap<u64, u64> = BTreeMap::new();
        let mut last_at = 0;
        for (run, ns) in &runs {
            for (place, (n, _)) in ns.iter().enumerate() {
                let next = if place > 0 { ns[place - 1].0 + 1 } else { known.len() as u64 + 1 };
                if *n > next {
                    steps.gaps.push(format!("step {n} of run {run:?} where {next} was next"));
                }
                if let Some(before) = known.get(n) {
                    steps.repeated += 1;
                    steps.ages.push(Duration::from_millis(last_at - before.min(&last_at)));
                }
            }
            for (n, at) in ns {
                known.insert(*n, *at);
                last_at = last_at.max(*at);
            }
        }
        steps.distinct = known.len() as u64;
        steps.attempts = current.keys().copied().max().unwrap_or_default();
        let mut times: Vec<_> = lines.iter().map(|line| number(line, "at")).collect();
        times.sort_unstable();
        let longest = times.windows(2).map(|two| two[1] - two[0]).max();
        steps.longest_gap = Duration::from_millis(longest.unwrap_or_default());
        steps
    }

    /// How many steps were done again although the journal had time to know them.
    fn faults(&self, rules: &Rules, faults: &mut Vec<String>) -> usize {
        faults.extend(self.gaps.iter().cloned());
        if self.attempts > rules.most_attempts {
            faults.push(format!("{} attempts", self.attempts));
        }
        if self.longest_gap > rules.longest_gap {
            faults.push(format!("nothing happened for {:?}", self.longest_gap));
        }
        let known: Vec<_> = self.ages.iter().filter(|age| **age > rules.blind).collect();
        faults.extend(known.iter().map(|age| format!("a step was done again that was done {age:?} before the cut")));
        known.len()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn steps_may_be_repeated_only_where_the_journal_cannot_know() {
        let line = |attempt: u64, n: u64, at: u64| json!({"attempt": attempt, "n": n, "at": at});
        let rules = Rules { blind: Duration::from_millis(500), ..Rules::default() };
        let judged = |lines: &[Value]| {
            let (steps, mut faults) = (Steps::of(lines), Vec::new());
            (steps.distinct, steps.repeated, steps.faults(&rules, &mut faults), faults.len())
        };
        let once = [line(1, 1, 0), line(1, 2, 100), line(2, 3, 2000)];
        assert_eq!(judged(&once), (3, 0, 0, 0));
        let last_again = [line(1, 1, 0), line(1, 2, 900), line(2, 2, 2000), line(2, 3, 2100)];
        assert_eq!(judged(&last_again), (3, 1, 0, 0));
        let all_again = [line(1, 1, 0), line(1, 2, 900), line(2, 1, 2000), line(2, 2, 2100)];
        assert_eq!(judged(&all_again), (2, 2, 1, 1));
        let handed_back = [line(1, 1, 0), line(1, 2, 100), line(1, 2, 200), line(1, 3, 300)];
        assert_eq!(judged(&handed_back), (3, 1, 0, 0));
        let skipped = [line(1, 1, 0), line(2, 3, 900)];
        assert_eq!(judged(&skipped).3, 1);
        // Two attempts at the same time: the first one does not know yet that it has lost.
        let zombie = [line(1, 1, 0), line(1, 2, 100), line(2, 2, 150), line(1, 3, 200), line(2, 3, 250)];
        assert_eq!(judged(&zombie), (3, 2, 0, 0));
    }

    fn entry() -> Entry {
        Entry {
            key: "m".to_owned(),
            mount: "",
            context: None,
            text: "work:m:2x0".to_owned(),
            steps: 2,
            expected: "1\n2\n".to_owned(),
            since: Instant::now(),
            sends: 1,
            refused: 0,
            task: None,
            answered: None,
            ended: None,
            stream: Stream::default(),
            resumed: 0,
            faults: Vec::new(),
        }
    }

    fn task(id: &str, state: &str, text: &str) -> Value {
        json!({"id": id, "status": {"state": format!("TASK_STATE_{state}")}, "history": [{"messageId": "m"}],
               "artifacts": [{"parts": [{"text": text}]}]})
    }

    fn piece(text: &str, append: bool) -> Value {
        json!({"artifactUpdate": {"append": append, "artifact": {"parts": [{"text": text}]}}})
    }

    fn completed() -> Value {
        json!({"statusUpdate": {"status": {"state": "TASK_STATE_COMPLETED"}}})
    }

    /// Faults of a stream of these events.
    fn heard(events: &[(u64, Value)]) -> Vec<String> {
        let mut entry = entry();
        entry.heard(1, &json!({"task": task("t", "SUBMITTED", "")}));
        events.iter().for_each(|(number, event)| entry.heard(*number, event));
        entry.faults
    }

    #[test]
    fn a_stream_that_skips_repeats_or_goes_on_is_noticed() {
        let [one, two, end] = [piece("1\n", false), piece("2\n", true), completed()];
        assert_eq!(heard(&[(2, one.clone()), (3, two.clone()), (4, end.clone())]), [""; 0]);
        // A later attempt begins anew.
        assert_eq!(heard(&[(2, one.clone()), (3, one.clone()), (4, two.clone()), (5, end.clone())]), [""; 0]);
        assert_eq!(heard(&[(2, one.clone()), (4, two.clone()), (5, end.clone())]).len(), 1, "skipped");
        assert_eq!(
            heard(&[(2, one.clone()), (2, one.clone()), (3, two.clone()), (4, end.clone())]).len(),
            1,
            "repeated"
        );
        assert_eq!(heard(&[(2, one.clone()), (3, end.clone())]).len(), 1, "incomplete");
        assert_eq!(heard(&[(2, one), (3, two), (4, end.clone()), (5, end)]).len(), 1, "two ends");
    }

    /// The books of one message that was seen to be completed, when two gateways list and show this.
    fn closed(lists: &[Vec<Value>; 2], shown: &[Option<Value>; 2]) -> Ledger {
        let mut entry = entry();
        entry.saw(&task("t", "COMPLETED", "1\n2\n"));
        let counted = |_: &str| vec![json!({"attempt": 1, "n": 1, "at": 5}), json!({"attempt": 1, "n": 2, "at": 6})];
        let tasks = HashMap::from([("t".to_owned(), shown.to_vec())]);
        Ledger::close(vec![entry], lists, &tasks, counted, &Rules::default())
    }

    #[test]
    fn what_is_lost_doubled_or_different_is_noticed() {
        let good = || task("t", "COMPLETED", "1\n2\n");
        assert!(closed(&[vec![good()], vec![good()]], &[Some(good()), Some(good())]).is_clean());
        let gone = closed(&[vec![], vec![]], &[None, None]);
        assert!(gone.lost == 1 && !gone.is_clean(), "{gone}");
        let disputed = closed(&[vec![good()], vec![]], &[Some(good()), None]);
        assert!(disputed.lost == 1, "{disputed}");
        let working = || task("t", "WORKING", "1\n");
        let hangs = closed(&[vec![working()], vec![working()]], &[Some(working()), Some(working())]);
        assert!(hangs.lost == 1, "{hangs}");
        let twice = || vec![good(), task("u", "COMPLETED", "1\n2\n")];
        let twice = closed(&[twice(), twice()], &[Some(good()), Some(good())]);
        assert!(twice.duplicated == 1 && !twice.is_clean(), "{twice}");
        let other = || task("t", "COMPLETED", "1\n1\n2\n");
        let other = closed(&[vec![other()], vec![other()]], &[Some(other()), Some(other())]);
        assert!(!other.is_clean(), "{other}");
    }
    #[test]
    fn two_ends_of_a_task_are_a_fault_even_in_a_fail_over_and_both_are_told() {
        let mut entry = entry();
        let mut failed = task("t", "FAILED", "");
        failed["status"]["message"] = json!({"metadata": {"reason": "crashed"}, "parts": [{"text": "lost"}]});
        entry.saw(&failed);
        let lossy = vec![(entry.since, Instant::now() + Duration::from_secs(60))];
        let now = task("t", "COMPLETED", "1\n2\n");
        let tasks = HashMap::from([("t".to_owned(), vec![Some(now.clone())])]);
        let rules = Rules { lossy, ..Rules::default() };
        let ledger = Ledger::close(vec![entry], &[vec![now]], &tasks, |_| Vec::new(), &rules);
        assert!(!ledger.is_clean(), "{ledger}");
        assert!(ledger.to_string().contains(r#"1x seen: FAILED crashed "lost""#), "{ledger}");
    }
}
