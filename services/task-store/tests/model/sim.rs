//! The scheduler's half of every call: whoever wants something from outside waits at a gate until it is let
//! through, and is told there what becomes of the call.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::{sync::oneshot, time::Instant};

use crate::{dice::Dice, ledger::Ledger};

/// Who makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Client(usize),
    Runner(usize),
    Replica(usize),
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(n) => write!(f, "client {n}"),
            Self::Runner(n) => write!(f, "runner {n}"),
            Self::Replica(n) => write!(f, "replica {n}"),
        }
    }
}

/// A guard of the real code that is taken away, to see whether anybody would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Late writes of an attempt count as those of the newest one.
    Fence,
    /// Nobody checks whether an entry is still its claimer's.
    Pending,
    /// Repeats of a batch are not recognised by the store.
    CommitId,
    /// Repeats of a call are not recognised by the service.
    CallId,
    /// No replica sees that a context has a turn already.
    ContextQueue,
    /// No decision sees that a task has ended.
    TerminalGuard,
}

/// What waits at a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    /// A batch; one with an id may be sent again by the engine itself.
    Commit {
        id: bool,
    },
    Claim,
    Heartbeat,
    /// A call to a replica, before it is made.
    Call,
    /// Its answer.
    Answer,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Pass,
    /// It is not made.
    Refuse,
    /// It is made, and its answer lost.
    Forget,
    /// It is made, its answer lost, and made again.
    Twice,
}

/// How hard life is in one schedule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Climate {
    /// Of so many calls one goes wrong; 0 = none.
    pub(crate) faults: u32,
    /// Of so many steps one is something other than a call; 0 = none.
    pub(crate) events: u32,
}

#[derive(Debug)]
struct Gate {
    who: Actor,
    /// Which gate of all; calls of one actor are listed in their order.
    number: u64,
    kind: Kind,
    what: String,
    open: oneshot::Sender<Fate>,
}

#[derive(Debug)]
struct State {
    dice: Dice,
    waiting: Vec<Gate>,
    gates: u64,
    paused: BTreeSet<Actor>,
    trace: Option<Vec<String>>,
    violation: Option<String>,
}

/// What all actors of one schedule share.
#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) mutant: Option<Mutant>,
    state: Mutex<State>,
    ledger: Mutex<Ledger>,
    calm: AtomicBool,
    traced: bool,
    began: Instant,
}

impl Sim {
    pub(crate) fn new(dice: Dice, mutant: Option<Mutant>, traced: bool) -> Self {
        let state = State {
            dice,
            waiting: Vec::new(),
            gates: 0,
            paused: BTreeSet::new(),
            trace: traced.then(Vec::new),
            violation: None,
        };
        Self {
            mutant,
            state: Mutex::new(state),
            ledger: Mutex::default(),
            calm: AtomicBool::new(false),
            traced,
            began: Instant::now(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn roll(&self, sides: u32) -> u32 {
        self.state().dice.roll(sides)
    }

    pub(crate) fn pick(&self, len: usize) -> usize {
        let sides = u32::try_from(len).expect("few");
        usize::try_from(self.roll(sides)).expect("few")
    }

    /// Whether something happens that happens once in so many times.
    pub(crate) fn chance(&self, one_in: u32) -> bool {
        one_in > 0 && self.roll(one_in) == one_in - 1
    }

    /// Waits until the scheduler lets a call through, and says what becomes of it.
    pub(crate) async fn gate(&self, who: Actor, kind: Kind, what: impl FnOnce() -> String) -> Fate {
        if self.calm.load(Ordering::Relaxed) {
            if self.traced {
                self.note(|| format!("{who}: {}", what()));
            }
            return Fate::Pass;
        }
        let (open, opened) = oneshot::channel();
        {
            let what = if self.traced { what() } else { String::new() };
            let mut state = self.state();
            state.gates += 1;
            let number = state.gates;
            state.waiting.push(Gate { who, number, kind, what, open });
        }
        opened.await.unwrap_or(Fate::Pass)
    }

    /// Lets one call through; says whether there was one.
    pub(crate) fn step(&self, climate: Climate) -> bool {
        let mut state = self.state();
        let State { dice, waiting, paused, .. } = &mut *state;
        waiting.retain(|gate| !gate.open.is_closed());
        waiting.sort_by_key(|gate| (gate.who, gate.number));
        let ready: Vec<usize> =
            waiting.iter().enumerate().filter(|(_, gate)| !paused.contains(&gate.who)).map(|(n, _)| n).collect();
        if ready.is_empty() {
            return false;
        }
        let chosen = dice.roll(u32::try_from(ready.len()).expect("few"));
        let gate = waiting.remove(ready[usize::try_from(chosen).expect("few")]);
        let goes_wrong = climate.faults > 0 && dice.roll(climate.faults) == climate.faults - 1;
        let fates: &[Fate] = match (goes_wrong, gate.kind) {
            (false, _) | (true, Kind::Call) => &[Fate::Pass],
            (true, Kind::Read | Kind::Heartbeat) => &[Fate::Refuse],
            (true, Kind::Commit { id: true }) => &[Fate::Twice, Fate::Forget, Fate::Refuse],
            (true, Kind::Commit { id: false }) => &[Fate::Forget, Fate::Refuse],
            (true, Kind::Claim) => &[Fate::Forget, Fate::Refuse],
            (true, Kind::Answer) => &[Fate::Twice, Fate::Forget],
        };
        let fate = match fates {
            [only] => *only,
            more => more[usize::try_from(dice.roll(u32::try_from(more.len()).expect("few"))).expect("few")],
        };
        drop(state);
        self.note(|| match fate {
            Fate::Pass => format!("{}: {}", gate.who, gate.what),
            fate => format!("{}: {} -> {fate:?}", gate.who, gate.what),
        });
        // Whoever made the call may be gone by now.
        gate.open.send(fate).unwrap_or_default();
        true
    }

    /// From now on every call is let through and nothing goes wrong.
    pub(crate) fn calm(&self) {
        self.note(|| "from here on nothing goes wrong".to_owned());
        self.calm.store(true, Ordering::Relaxed);
        let mut state = self.state();
        state.paused.clear();
        let mut waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.sort_by_key(|gate| (gate.who, gate.number));
        for gate in waiting {
            gate.open.send(Fate::Pass).unwrap_or_default();
        }
    }

    /// Stops an actor where it is, or lets it go on; says whether it is stopped now.
    pub(crate) fn pause(&self, who: Actor) -> bool {
        let mut state = self.state();
        state.paused.insert(who) || !state.paused.remove(&who)
    }

    pub(crate) fn resume(&self, who: Actor) {
        self.state().paused.remove(&who);
    }

    /// Adds a line to the story, if somebody wants to read it.
    pub(crate) fn note(&self, what: impl FnOnce() -> String) {
        if self.traced {
            let line = format!("{:>6} ms  {}", self.began.elapsed().as_millis(), what());
            self.state().trace.get_or_insert_default().push(line);
        }
    }

    /// A promise was broken. The first one counts.
    pub(crate) fn violated(&self, what: String) {
        self.note(|| format!("VIOLATED: {what}"));
        self.state().violation.get_or_insert(what);
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.state().violation.clone()
    }

    /// The choices and the story.
    pub(crate) fn story(&self) -> (Vec<u32>, Vec<String>) {
        let mut state = self.state();
        (std::mem::take(&mut state.dice.thrown), state.trace.take().unwrap_or_default())
    }
}
