//! One schedule from beginning to end, many of them, and the shortest one that fails.

use std::{ops::Range, time::Duration};

use tokio::time::sleep;

use crate::{
    client::Client,
    dice::Dice,
    sim::{Actor, Climate, Mutant},
    world::World,
};

/// Steps after which nothing goes wrong any more.
const STEPS: u32 = 160;

/// Within this time everything must come to rest.
const REST: Duration = Duration::from_secs(90);

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Only the order of things.
    Calm,
    /// Answers get lost and calls are repeated.
    Lossy,
    /// Processes die, sleep and stop, and streams are deleted.
    Deadly,
    /// All of it.
    Storm,
}

/// Where the choices of a schedule come from.
#[derive(Clone, Debug)]
pub(crate) enum Choices {
    Seed(u64),
    Tape(Vec<u32>),
}

impl From<u64> for Choices {
    fn from(seed: u64) -> Self {
        Self::Seed(seed)
    }
}

/// A schedule as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Story {
    pub(crate) violation: Option<String>,
    pub(crate) thrown: Vec<u32>,
    pub(crate) lines: Vec<String>,
}

/// A schedule that broke a promise.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) seed: u64,
    violation: String,
    thrown: Vec<u32>,
}

/// Runs one schedule.
pub(crate) fn run(weather: Weather, mutant: Option<Mutant>, choices: Choices, traced: bool) -> Story {
    let dice = match choices {
        Choices::Seed(seed) => Dice::of_seed(seed),
        Choices::Tape(tape) => Dice::of_tape(tape),
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let world = World::new(dice, mutant, traced);
        live(weather, &world).await;
        let violation = world.sim.violation();
        let (thrown, lines) = world.sim.story();
        Story { violation, thrown, lines }
    })
}

/// Until everybody waits at a gate or for a time: the paused clock only moves when nobody has anything to do.
async fn everybody_waits() {
    sleep(Duration::from_millis(1)).await;
}

async fn live(weather: Weather, world: &std::sync::Arc<World>) {
    let sim = &world.sim;
    let rate = |wanted: bool, rates: [u32; 4]| if wanted { rates[sim.pick(4)] } else { 0 };
    let climate = Climate {
        faults: rate(matches!(weather, Weather::Lossy | Weather::Storm), [0, 24, 12, 6]),
        events: rate(matches!(weather, Weather::Deadly | Weather::Storm), [0, 16, 10, 6]),
    };
    for n in 0..[1, 1, 1, 2, 2, 3][sim.pick(6)] {
        let client = Client { world: std::sync::Arc::clone(world), who: Actor::Client(n) };
        world.start(client.live());
    }
    let steps = STEPS / (1 + sim.roll(4));
    for _ in 0..steps {
        everybody_waits().await;
        if sim.violation().is_some() || world.is_idle() {
            break;
        }
        if sim.chance(climate.events) {
            world.event().await;
        } else if !sim.step(climate) {
            sleep(Duration::from_millis(100)).await;
        }
    }
    world.calm();
    let mut waited = Duration::ZERO;
    while sim.violation().is_none() && !world.is_idle() {
        if waited > REST {
            let left = sim.ledger().left();
            sim.violated(format!("not everything comes to rest: {left}"));
        }
        let pause = Duration::from_millis(200);
        sleep(pause).await;
        waited += pause;
    }
    if sim.violation().is_some() {
        return;
    }
    let settled = sim.ledger().settled();
    if let Err(broken) = settled {
        sim.violated(broken);
    }
    if let Err(broken) = world.reads_are_true().await {
        sim.violated(broken);
    }
    let active = world.active().await;
    if active > 0 {
        sim.violated(format!("{active} turns are taken for active, and nothing is left to do"));
    }
}

/// Runs a schedule for each seed, until one fails.
pub(crate) fn check(weather: Weather, mutant: Option<Mutant>, seeds: Range<u64>) -> Option<Failure> {
    seeds.into_iter().find_map(|seed| {
        let story = run(weather, mutant, Choices::Seed(seed), false);
        story.violation.map(|violation| Failure { seed, violation, thrown: story.thrown })
    })
}

/// Cuts a failure down, and tells its story.
pub(crate) fn shrink(weather: Weather, mutant: Option<Mutant>, failure: Failure) -> String {
    let Failure { seed, violation, mut thrown } = failure;
    // The names in it may differ.
    let kind = |violation: &str| violation.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
    let mut tries = 600;
    let mut fails = |tape: &[u32]| {
        if tries == 0 {
            return None;
        }
        tries -= 1;
        let story = run(weather, mutant, Choices::Tape(tape.to_vec()), false);
        story.violation.filter(|other| kind(other) == kind(&violation)).map(|_| ())
    };
    let mut size = thrown.len();
    while size > 0 {
        let mut start = 0;
        while start < thrown.len() {
            let end = (start + size).min(thrown.len());
            let mut zeroed = thrown.clone();
            zeroed[start..end].fill(0);
            let mut cut = thrown.clone();
            cut.drain(start..end);
            if fails(&cut).is_some() {
                thrown = cut;
                continue;
            }
            if zeroed != thrown && fails(&zeroed).is_some() {
                thrown = zeroed;
            }
            start = end;
        }
        size /= 2;
    }
    while thrown.last() == Some(&0) {
        thrown.pop();
    }
    let story = run(weather, mutant, Choices::Tape(thrown.clone()), true);
    format!(
        "{weather:?}, seed {seed} (MODEL_SEED={seed} MODEL_SCHEDULES=1 repeats it): {violation}\nshortest: {thrown:?}\n{}",
        story.lines.join("\n")
    )
}
