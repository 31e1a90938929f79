//! The store and its replicas, and how everybody else reaches them.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use rialto_a2a::{Error, Kind as Fault};
use rialto_rpc::tasks::{GetRequest, Scope, task_store_server::TaskStore as _};
use rialto_store::{Batch, Engine, Op, sqlite::SqliteEngine};
use rialto_task_store::{Options, TaskStore};
use tokio::time::sleep;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status};

use crate::{
    dice::Dice,
    door::Door,
    ledger::RUNS,
    runner::Hands,
    sim::{Actor, Fate, Kind, Mutant, Sim},
};

/// After this long without a sign of life, an entry is somebody else's.
pub(crate) const LEASE: Duration = Duration::from_secs(3);

/// Pause of a caller before it calls again.
const PAUSE: Duration = Duration::from_millis(20);

/// One process of the service.
#[derive(Clone, Debug)]
pub(crate) struct Replica {
    pub(crate) service: TaskStore,
    /// Whatever it was doing is over when it dies.
    life: CancellationToken,
}

/// One process that runs turns.
#[derive(Debug)]
struct Runner {
    stop: CancellationToken,
    process: tokio::task::AbortHandle,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) sim: Arc<Sim>,
    engine: Arc<dyn Engine>,
    options: Options,
    replicas: Mutex<Vec<Replica>>,
    runners: Mutex<Vec<Runner>>,
    tracker: TaskTracker,
    /// Clients that are not done.
    pub(crate) busy: AtomicUsize,
    ids: AtomicUsize,
    pub(crate) max_attempts: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn scope() -> Scope {
    Scope { agent: "echo".into(), ..Scope::default() }
}

impl World {
    pub(crate) fn new(dice: Dice, mutant: Option<Mutant>, traced: bool) -> Arc<Self> {
        let sim = Arc::new(Sim::new(dice, mutant, traced));
        let options = Options {
            fold_after: if sim.chance(4) { Duration::from_secs(1) } else { Duration::from_secs(600) },
            cancel_grace: Duration::from_secs(2),
            due_period: Duration::from_millis(700),
            sweep_period: Duration::from_secs(1),
            ..Options::default()
        };
        let world = Arc::new(Self {
            engine: SqliteEngine::simulated(1).expect("opens"),
            options,
            replicas: Mutex::default(),
            runners: Mutex::default(),
            tracker: TaskTracker::new(),
            busy: AtomicUsize::new(0),
            ids: AtomicUsize::new(1),
            max_attempts: if sim.chance(4) { 2 } else { 1000 },
            sim,
        });
        for n in 0..1 + world.sim.pick(3) {
            let replica = world.replica(n);
            lock(&world.replicas).push(replica);
        }
        for n in 0..1 + world.sim.pick(2) {
            let runner = world.runner(n);
            lock(&world.runners).push(runner);
        }
        world
    }

    fn door(&self, who: Actor) -> Arc<dyn Engine> {
        Arc::new(Door { who, sim: Arc::clone(&self.sim), engine: Arc::clone(&self.engine) })
    }

    fn replica(&self, n: usize) -> Replica {
        let life = CancellationToken::new();
        let service = TaskStore::new(self.door(Actor::Replica(n)), &self.options);
        service.run_background(&life, &self.tracker);
        Replica { service, life }
    }

    fn runner(self: &Arc<Self>, n: usize) -> Runner {
        let stop = CancellationToken::new();
        let name = format!("r{n}-{}", self.ids.fetch_add(1, Ordering::Relaxed));
        let hands = Hands::new(Arc::clone(self), n);
        let work = hands.work_as(name, self.door(Actor::Runner(n)), stop.clone());
        Runner { stop, process: self.tracker.spawn(work).abort_handle() }
    }

    pub(crate) fn start(self: &Arc<Self>, client: impl Future<Output = ()> + Send + 'static) {
        self.busy.fetch_add(1, Ordering::Relaxed);
        let world = Arc::clone(self);
        self.tracker.spawn(async move {
            client.await;
            world.busy.fetch_sub(1, Ordering::Relaxed);
        });
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.load(Ordering::Relaxed) == 0 && self.sim.ledger().is_idle()
    }

    /// An id that nobody else has.
    pub(crate) fn id(&self) -> Bytes {
        let number = self.ids.fetch_add(1, Ordering::Relaxed) as u64;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.reverse_bits().to_be_bytes());
        Bytes::copy_from_slice(&id)
    }

    /// The id with which a call is made, once more.
    pub(crate) fn call_id(&self, id: &Bytes) -> Bytes {
        if self.sim.mutant == Some(Mutant::CallId) { self.id() } else { id.clone() }
    }

    /// Calls some replica, once; the answer may get lost, and the call made again. `again` says whether a second
    /// answer may follow the first.
    pub(crate) async fn call<T, F: Future<Output = Result<Response<T>, Status>>>(
        &self,
        who: Actor,
        what: &str,
        call: impl Fn(TaskStore) -> F,
        again: impl Fn(&T, &Result<T, Error>) -> bool,
    ) -> Result<T, Error> {
        let once = async || {
            let replica = {
                let replicas = lock(&self.replicas);
                replicas[self.sim.pick(replicas.len())].clone()
            };
            let answer = replica.life.run_until_cancelled(call(replica.service.clone())).await;
            let answer = answer.unwrap_or_else(|| Err(Error::unavailable().to_status()));
            answer.map(Response::into_inner).map_err(|status| Error::from_status(&status))
        };
        if matches!(who, Actor::Runner(_)) {
            self.sim.gate(who, Kind::Call, || what.to_owned()).await;
        }
        let answer = once().await;
        let told = || match &answer {
            Ok(_) => format!("hears that {what} is done"),
            Err(error) => format!("hears of {what}: {:?}", error.kind),
        };
        match self.sim.gate(who, Kind::Answer, told).await {
            Fate::Pass | Fate::Refuse => answer,
            Fate::Forget => Err(Error::unavailable()),
            Fate::Twice => {
                let second = once().await;
                let lost = matches!(&second, Err(error) if error.kind == Fault::Unavailable);
                if let Ok(first) = &answer
                    && !lost
                    && !again(first, &second)
                {
                    self.sim.violated(format!("{what} was answered otherwise the second time"));
                }
                second
            }
        }
    }

    /// The same, until there is an answer.
    pub(crate) async fn insist<T, F: Future<Output = Result<Response<T>, Status>>>(
        &self,
        who: Actor,
        what: &str,
        call: impl Fn(TaskStore) -> F,
        again: impl Fn(&T, &Result<T, Error>) -> bool,
    ) -> Result<T, Error> {
        loop {
            match self.call(who, what, &call, &again).await {
                Err(error) if error.kind == Fault::Unavailable => sleep(PAUSE).await,
                answer => return answer,
            }
        }
    }

    /// Something happens that nobody called for.
    pub(crate) async fn event(self: &Arc<Self>) {
        let (runners, replicas) = (lock(&self.runners).len(), lock(&self.replicas).len());
        match self.sim.roll(12) {
            0..5 => self.time_passes().await,
            5 => {
                let n = self.sim.pick(runners);
                self.sim.note(|| format!("runner {n} is killed"));
                lock(&self.runners)[n].process.abort();
                self.replace(n);
            }
            6 | 7 => {
                let n = self.sim.pick(runners);
                let paused = self.sim.pause(Actor::Runner(n));
                self.sim.note(|| format!("runner {n} {}", if paused { "is paused" } else { "goes on" }));
            }
            8 => {
                let n = self.sim.pick(replicas);
                self.sim.note(|| format!("replica {n} is killed"));
                let fresh = self.replica(n);
                let old = std::mem::replace(&mut lock(&self.replicas)[n], fresh);
                old.life.cancel();
            }
            9 => {
                let n = self.sim.pick(runners);
                self.sim.note(|| format!("runner {n} is told to stop"));
                lock(&self.runners)[n].stop.cancel();
                self.replace(n);
            }
            10 => {
                self.sim.note(|| "the work stream is deleted".to_owned());
                let ops = vec![Op::Drop { stream: RUNS.to_owned() }];
                let batch = Batch { ops, ..Batch::default() };
                let committed = self.engine.commit(batch.clone()).await.expect("drops");
                self.sim.ledger().committed(&batch, &committed).expect("a delete breaks no promise");
            }
            _ => self.time_passes().await,
        }
    }

    /// Another process takes the place of a runner.
    fn replace(self: &Arc<Self>, n: usize) {
        self.sim.resume(Actor::Runner(n));
        let runner = self.runner(n);
        lock(&self.runners)[n] = runner;
    }

    async fn time_passes(&self) {
        let ms = [50, 300, 1100, 3300][self.sim.pick(4)];
        self.sim.note(|| format!("{ms} ms pass"));
        sleep(Duration::from_millis(ms)).await;
    }

    /// Nothing goes wrong any more, and there is one runner more: what is lost for the others is not lost.
    pub(crate) fn calm(self: &Arc<Self>) {
        self.sim.calm();
        let runner = self.runner(9);
        lock(&self.runners).push(runner);
    }

    /// Members of the index of turns that somebody should be working at.
    pub(crate) async fn active(&self) -> u64 {
        self.engine.index_count(0, "active", None).await.expect("counts")
    }

    /// Whether each task is, for whoever reads it, what its events say.
    pub(crate) async fn reads_are_true(&self) -> Result<(), String> {
        if self.sim.mutant == Some(Mutant::TerminalGuard) {
            // Readers are shown what decisions are shown.
            return Ok(());
        }
        let service = lock(&self.replicas)[0].service.clone();
        let tasks = self.sim.ledger().folded();
        for (id, folded) in tasks {
            let request = GetRequest { scope: Some(scope()), id: id.clone(), history_length: Some(0) };
            let read = service.get(Request::new(request)).await.map_err(|status| format!("{id}: {status}"))?;
            let mut read = read.into_inner();
            // The events are as they are stored: without what the key says already.
            if let Some(message) = read.status.as_mut().and_then(|status| status.message.as_mut()) {
                message.task_id.clear();
                message.context_id.clear();
            }
            let (read, folded) = ((read.status, read.artifacts), (folded.status, folded.artifacts));
            if read != folded {
                return Err(format!("{id} is not what its events say: {read:?}, not {folded:?}"));
            }
        }
        Ok(())
    }
}
