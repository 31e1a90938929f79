//! Clients that send, follow and resume, whatever happens, and write down what they saw.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream};
use reqwest::Client;
use rialto_testkit::cluster::Cluster;
use serde_json::{Value, json};
use tokio::{
    sync::broadcast,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    dice::Dice,
    ledger::{Entry, Ledger, Rules, Stream, is_over},
    wire::{Binding, Events, Trouble, Wire, http},
};

/// How long a message may take, faults and all.
const PATIENCE: Duration = Duration::from_secs(90);

/// What is out of anybody's patience by then hangs.
const SPARE: Duration = Duration::from_secs(30);

/// Pause before the next try.
const PAUSE: Duration = Duration::from_millis(50);

/// What a client has just done or seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// A message goes out: the next commit is its own.
    Sending,
    Answered,
    /// A piece came; another commit is near.
    Event,
    Ended,
}

pub(crate) const MOMENTS: [Moment; 4] = [Moment::Sending, Moment::Answered, Moment::Event, Moment::Ended];

/// How the traffic is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) callers: usize,
    /// Most steps of a turn.
    pub(crate) steps: u64,
    /// Most milliseconds between two steps.
    pub(crate) apart: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self { callers: 16, steps: 8, apart: 60 }
    }
}

/// Many clients at work.
#[derive(Debug)]
pub(crate) struct Traffic {
    callers: JoinSet<Vec<Entry>>,
    stop: CancellationToken,
    moments: broadcast::Sender<Moment>,
    refused: Arc<AtomicBool>,
    http: Client,
    gateways: Arc<[String]>,
    since: Instant,
}

impl Traffic {
    /// Starts clients of these gateways.
    pub(crate) fn start(gateways: impl IntoIterator<Item = String>, load: Load, dice: &Dice) -> Self {
        let (gateways, http): (Arc<[_]>, _) = (gateways.into_iter().collect(), http());
        let (stop, moments, refused) = (CancellationToken::new(), broadcast::Sender::new(64), Arc::default());
        let mut callers = JoinSet::new();
        for name in 0..load.callers {
            let caller = Caller {
                name: format!("{:x}-{name}", dice.next() >> 40),
                http: http.clone(),
                gateways: Arc::clone(&gateways),
                dice: dice.split(),
                load,
                moments: moments.clone(),
                refused: Arc::clone(&refused),
            };
            callers.spawn(caller.work(stop.clone()));
        }
        Self { callers, stop, moments, refused, http, gateways, since: Instant::now() }
    }

    /// Waits until some client does or sees this; not for long.
    pub(crate) async fn moment(&self, moment: Moment) {
        let mut moments = self.moments.subscribe();
        let seen = async {
            loop {
                match moments.recv().await {
                    Ok(now) if now == moment => return,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return,
                }
            }
        };
        drop(timeout(Duration::from_millis(300), seen).await);
    }

    /// Whether any send was refused for now.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Lets everybody finish what they sent, and closes the books.
    pub(crate) async fn end(self, cluster: &Cluster, rules: &Rules) -> Ledger {
        let ledger = self.close(rules, |key| cluster.counted(key)).await;
        if !ledger.is_clean() {
            for process in cluster.processes() {
                let stderr = process.stderr();
                let lines: Vec<_> = stderr.lines().rev().take(50).collect();
                println!("--- {}\n{}", process.name(), lines.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
        }
        ledger
    }

    /// The same, with the counters of another folder.
    pub(crate) async fn close(mut self, rules: &Rules, counted: impl Fn(&str) -> Vec<Value>) -> Ledger {
        self.stop.cancel();
        let mut entries = Vec::new();
        while let Some(done) = self.callers.join_next().await {
            entries.extend(done.unwrap());
        }
        let until = Instant::now() + PATIENCE;
        let lists = loop {
            let mut lists = Vec::new();
            for gateway in &*self.gateways {
                lists.push(self.lists(gateway).await);
            }
            // Not everything has somebody who follows it.
            if lists.iter().flatten().all(is_over) || Instant::now() >= until {
                break lists;
            }
            sleep(PAUSE).await;
        };
        let ids = entries.iter().filter_map(|entry| Some((entry.mount, entry.task.clone()?)));
        let tasks: HashMap<_, _> =
            stream::iter(ids.map(|(mount, id)| self.shown(mount, id))).buffer_unordered(16).collect().await;
        Ledger::close(entries, &lists, &tasks, counted, rules).after(self.since.elapsed())
    }

    async fn lists(&self, gateway: &str) -> Vec<Value> {
        let mut all = Vec::new();
        for mount in MOUNTS {
            let wire = Wire::new(&self.http, gateway, mount, Binding::JsonRpc);
            all.extend(patiently(|| wire.tasks()).await.unwrap_or_else(|refused| panic!("ListTasks: {refused}")));
        }
        all
    }

    /// A task as each gateway shows it; `None` if it is not there.
    async fn shown(&self, mount: &str, id: String) -> (String, Vec<Option<Value>>) {
        let mut shown = Vec::new();
        for gateway in &*self.gateways {
            let wire = Wire::new(&self.http, gateway, mount, Binding::Rest);
            shown.push(patiently(|| wire.task(&id)).await.ok());
        }
        (id, shown)
    }
}

/// Asks until there is an answer or a refusal.
pub(crate) async fn patiently<T>(ask: impl AsyncFn() -> Result<T, Trouble>) -> Result<T, String> {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(Trouble::Refused(why)) => return Err(why),
            Err(Trouble::Cut(why) | Trouble::Busy(why)) if Instant::now() >= until => return Err(why),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Where agents are: one that does steps, one that echoes, and one that does steps and lets messages of a context wait
/// for each other.
const MOUNTS: [&str; 3] = ["", "/echo", "/queue"];

/// Steps of a long turn, and milliseconds between them.
const LONG: (u64, u64) = (40, 150);

/// Contexts that the clients of the last one share.
const CONTEXTS: u64 = 6;

/// The agents that [`Traffic`] talks to. Attempts are many, because kills are.
pub(crate) const AGENTS: &str = "\
stop-grace: 4s
limits: {keep-alive: 500ms}
agents:
  - id: scripted
    lease: 1s
    max-attempts: 100
    backend: {type: command, command: [scripted_agent], persistent: true, env: {SCRIPTED_COUNTERS: $COUNTERS}}
  - {id: echo, mount: /echo, lease: 1s, max-attempts: 100, backend: echo}
  - id: queue
    mount: /queue
    when-busy: queue
    lease: 1s
    max-attempts: 100
    backend: {type: command, command: [scripted_agent], persistent: true, env: {SCRIPTED_COUNTERS: $COUNTERS}}
";

/// One client.
struct Caller {
    name: String,
    http: Client,
    gateways: Arc<[String]>,
    dice: Dice,
    load: Load,
    moments: broadcast::Sender<Moment>,
    refused: Arc<AtomicBool>,
}

impl Caller {
    async fn work(self, stop: CancellationToken) -> Vec<Entry> {
        let mut entries = Vec::new();
        while !stop.is_cancelled() {
            let mut entry = self.write(entries.len());
            if timeout(PATIENCE + SPARE, self.deliver(&mut entry)).await.is_err() {
                entry.faults.push("never came to an end".to_owned());
            }
            if entry.task.is_none() {
                sleep(PAUSE).await;
            }
            entries.push(entry);
        }
        entries
    }

    /// A new message.
    fn write(&self, number: usize) -> Entry {
        let key = format!("m{}-{number}", self.name);
        let mount = MOUNTS[if self.dice.chance(25) { 1 } else { 2 * usize::from(self.dice.chance(20)) }];
        let (steps, text, expected) = if mount == MOUNTS[1] {
            (0, key.clone(), key.clone())
        } else {
            // Some take long enough for their journals to matter.
            let (steps, apart) = match self.dice.chance(8) {
                true => LONG,
                false => (self.dice.of(1..self.load.steps + 1), self.dice.of(0..self.load.apart + 1)),
            };
            let expected = (1..=steps).map(|n| format!("{n}\n")).collect();
            (steps, format!("work:{key}:{steps}x{apart}"), expected)
        };
        let context = (mount == MOUNTS[2]).then(|| format!("shared-{}", self.dice.of(0..CONTEXTS)));
        Entry {
            key,
            mount,
            context,
            text,
            steps,
            expected,
            since: Instant::now(),
            sends: 0,
            refused: 0,
            task: None,
            answered: None,
            ended: None,
            stream: Stream::default(),
            resumed: 0,
            faults: Vec::new(),
        }
    }

    /// The agent through some gateway.
    fn wire(&self, entry: &Entry) -> Wire {
        let binding = *self.dice.pick(&[Binding::JsonRpc, Binding::Rest]);
        Wire::new(&self.http, self.dice.pick::<String>(&self.gateways), entry.mount, binding)
    }

    fn note(&self, moment: Moment) {
        // Nobody may be listening.
        drop(self.moments.send(moment));
    }

    /// Sends it in some way and follows it to its end.
    async fn deliver(&self, entry: &mut Entry) {
        match self.dice.of(0..10) {
            0..4 => self.stream(entry).await,
            4..7 => self.send(entry, false).await,
            _ => self.send(entry, true).await,
        }
        if entry.task.is_some() && !entry.is_ended() {
            if self.dice.chance(80) {
                self.follow(entry, None).await;
            } else {
                self.poll(entry).await;
            }
        }
        if entry.is_ended() {
            self.note(Moment::Ended);
        }
    }

    fn params(entry: &Entry, immediately: bool) -> Value {
        let mut message = json!({"messageId": entry.key, "role": "ROLE_USER", "parts": [{"text": entry.text}]});
        if let Some(context) = &entry.context {
            message["contextId"] = json!(context);
        }
        json!({"message": message, "configuration": {"returnImmediately": immediately}})
    }

    /// Whether another try of an unanswered send is in order.
    async fn again(&self, entry: &mut Entry, trouble: Trouble, since: Instant) -> bool {
        if matches!(trouble, Trouble::Busy(_)) {
            entry.refused += 1;
            self.refused.store(true, Ordering::Relaxed);
        }
        match trouble {
            Trouble::Refused(why) => {
                entry.faults.push(format!("refused: {why}"));
                false
            }
            // The same key: whatever became of the first try, there is one task.
            Trouble::Cut(_) | Trouble::Busy(_) => {
                sleep(PAUSE).await;
                since.elapsed() < PATIENCE
            }
        }
    }

    async fn send(&self, entry: &mut Entry, immediately: bool) {
        let (params, since) = (Self::params(entry, immediately), Instant::now());
        loop {
            entry.sends += 1;
            self.note(Moment::Sending);
            match self.wire(entry).send(&params, &entry.key).await {
                Ok(answer) => {
                    self.note(Moment::Answered);
                    entry.saw(&answer["task"]);
                    return;
                }
                Err(trouble) => {
                    if !self.again(entry, trouble, since).await {
                        return;
                    }
                }
            }
        }
    }

    async fn stream(&self, entry: &mut Entry) {
        let (params, since) = (Self::params(entry, false), Instant::now());
        loop {
            entry.sends += 1;
            self.note(Moment::Sending);
            let trouble = match self.wire(entry).stream(&params, &entry.key).await {
                Ok(events) => {
                    self.follow(entry, Some(events)).await;
                    if entry.task.is_some() {
                        return;
                    }
                    Trouble::Cut("before the first event".to_owned())
                }
                Err(trouble) => trouble,
            };
            if !self.again(entry, trouble, since).await {
                return;
            }
        }
    }

    /// Reads events to the end of the task, on as many streams as it takes. Without a task it ends with the stream.
    async fn follow(&self, entry: &mut Entry, first: Option<Events>) {
        let mut events = first;
        let since = Instant::now();
        loop {
            if let Some(mut open) = events.take() {
                self.read(entry, &mut open).await;
            }
            if entry.is_ended() || since.elapsed() > PATIENCE {
                return;
            }
            let Some(task) = entry.task.clone() else { return };
            match self.wire(entry).subscribe(&task, entry.stream.last).await {
                Ok(opened) => {
                    entry.resumed += u32::from(entry.stream.last.is_some());
                    events = Some(opened);
                }
                // It ended before it was followed at all.
                Err(Trouble::Refused(_)) if entry.stream.last.is_none() => return self.poll(entry).await,
                Err(Trouble::Refused(why)) => return entry.faults.push(format!("no resumption: {why}")),
                Err(Trouble::Cut(_) | Trouble::Busy(_)) => sleep(PAUSE).await,
            }
        }
    }

    async fn read(&self, entry: &mut Entry, events: &mut Events) {
        loop {
            match events.next().await {
                Ok(Some((number, event))) => {
                    let known = entry.task.is_some();
                    entry.heard(number, &event);
                    self.note(if known { Moment::Event } else { Moment::Answered });
                }
                Ok(None) | Err(Trouble::Cut(_) | Trouble::Busy(_)) => return,
                Err(Trouble::Refused(why)) => return entry.faults.push(format!("in a stream: {why}")),
            }
        }
    }

    /// Looks at the task until it has ended.
    async fn poll(&self, entry: &mut Entry) {
        let (task, since) = (entry.task.clone().unwrap_or_default(), Instant::now());
        while !entry.is_ended() && since.elapsed() < PATIENCE {
            match self.wire(entry).task(&task).await {
                Ok(task) => entry.saw(&task),
                Err(Trouble::Refused(why)) => return entry.faults.push(format!("GetTask: {why}")),
                Err(Trouble::Cut(_) | Trouble::Busy(_)) => {}
            }
            sleep(PAUSE).await;
        }
    }
}
