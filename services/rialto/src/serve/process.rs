//! One process: any of the services, wired together, from start to drain.
//!
//! Services of the same process call each other in memory, others over the network; both are the same gRPC client.

use std::{
    convert::Infallible,
    future::pending,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use rialto_agent_runner::RunnerOptions;
use rialto_gateway::Gateway;
use rialto_net::{BindError, Limits, Listener};
use rialto_rpc::{
    Identity, Target, Transport,
    tasks::{self, AdminClient, TaskStoreClient},
};
use rialto_runtime::{
    config::Config,
    supervise::{Failure, Signals, Supervisor},
    telemetry,
};
use rialto_store::Engine;
use rialto_task_store::TaskStore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::warn;
use url::Url;

use super::{
    admin,
    gate::Gate,
    health::{self, Known, Needs},
    metrics, store,
};
use crate::{
    admin::{Api, agents},
    cli::fail,
    client::{self, fetch_card},
    output,
};

/// After the grace for running work: time to hand back what did not end.
const HAND_BACK: Duration = Duration::from_secs(4);

/// At the end: time to hand the last spans to a collector.
const LAST_EXPORT: Duration = Duration::from_secs(2);

/// Between two looks whether the process is ready.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Calls that one process may have under way at task-store: all that a gateway has, and some.
const INTERNAL_STREAMS: u32 = 32_768;

/// The services of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Services {
    pub(crate) gateway: bool,
    pub(crate) task_store: bool,
    pub(crate) agent_runner: bool,
}

impl Services {
    pub(crate) const ALL: Self = Self { gateway: true, task_store: true, agent_runner: true };

    /// What the process is called in traces and metrics: `rialto`, or `rialto-` and its services.
    fn identity(self) -> telemetry::Identity {
        let mut service = "rialto".to_owned();
        if self != Self::ALL {
            let all =
                [(self.gateway, "-gateway"), (self.task_store, "-task-store"), (self.agent_runner, "-agent-runner")];
            service.extend(all.into_iter().filter(|(runs, _)| *runs).map(|(_, name)| name));
        }
        telemetry::Identity { service, version: env!("CARGO_PKG_VERSION") }
    }

    /// Runners claim their work from the store.
    const fn use_store(self) -> bool {
        self.task_store || self.agent_runner
    }

    const fn call_task_store(self) -> bool {
        self.gateway || self.agent_runner
    }
}

/// Runs a process to its end. `greet` is told the URL of the process before `ready: <url>` is printed.
pub(crate) async fn run(config: Config, services: Services, greet: impl FnOnce(&Config, &str)) -> ExitCode {
    let telemetry = match telemetry::start(&config.telemetry, services.identity(), telemetry::Format::from_env()) {
        Ok(telemetry) => telemetry,
        Err(problem) => return fail(2, &problem),
    };
    // As set in the shell is often 1024, which is less than the connections that are served.
    if let Err(error) = raise_file_limit() {
        warn!(%error, "cannot raise the limit of open files");
    }
    let signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => return fail(2, &format!("cannot watch for signals: {error}")),
    };
    let supervisor = Supervisor::new();
    let watch = signals.watch(supervisor.stop());
    let served = async {
        let code = match Box::pin(serve(config, services, supervisor, greet)).await {
            Ok(Ok(())) => ExitCode::SUCCESS,
            Ok(Err(failure)) => fail(1, &failure.to_string()),
            Err(problem) => fail(2, &problem),
        };
        telemetry.stop(LAST_EXPORT).await;
        code
    };
    tokio::select! {
        code = served => code,
        code = watch => ExitCode::from(code),
    }
}

/// The outer error is one of starting, the inner one of running.
async fn serve(
    config: Config,
    services: Services,
    supervisor: Supervisor,
    greet: impl FnOnce(&Config, &str),
) -> Result<Result<(), Failure>, String> {
    let process = Process::new(config, services, supervisor)?;
    let ports = Ports::bind(&process).await?;
    let (base, admin) = (ports.url(&process), url(ports.admin.local_addr()));
    let Ports { public, task_store, admin: probes } = ports;
    let started = async {
        let started = process.start(public, task_store).await;
        if started.is_err() {
            process.supervisor.stop().cancel();
        }
        started?;
        process.announce(&base, &admin, greet).await;
        Ok(())
    };
    let run = process.supervisor.clone().run(process.config.stop_grace.0 + HAND_BACK);
    // Routes for the operator alone go into the list.
    let api = Api::new(&process.config, process.admin.clone(), process.tasks.clone());
    let guarded = [metrics::router(), api.router()];
    let router = admin::router(process.needs.clone(), process.config.admin_token.clone(), guarded);
    let probes = probes.serve(router, process.limits(), CancellationToken::new(), HAND_BACK);
    let work = async { tokio::join!(started, run) };
    // The process does not wait for its probes: they live until it ends.
    let probes = async {
        probes.await;
        pending::<Infallible>().await
    };
    tokio::select! {
        (started, result) = work => {
            let started: Result<(), String> = started;
            started.map(|()| result)
        }
        never = probes => match never {},
    }
}

/// The ports of a process, taken before anything else is done.
struct Ports {
    public: Option<Listener>,
    task_store: Option<Listener>,
    admin: Listener,
}

impl Ports {
    async fn bind(process: &Process) -> Result<Self, String> {
        let (config, services) = (&process.config, process.services);
        let public = match services.gateway {
            true => Some(bind(&config.listen, "listen").await?),
            false => None,
        };
        let admin = bind(&config.admin_listen, "admin-listen").await?;
        // With everything in one process there is nobody to call from outside.
        let task_store = match services.task_store && services != Services::ALL {
            true => Some(bind(&config.task_store_listen, "task-store-listen").await?),
            false => None,
        };
        let task_store = match &process.identity {
            Some(identity) => task_store.map(|port| port.with_tls(identity.server())),
            None => task_store,
        };
        if let Some(port) = &task_store
            && process.identity.is_none()
            && !port.local_addr().ip().to_canonical().is_loopback()
        {
            warn!(address = %port.local_addr(), "whoever reaches this port of task-store reads and writes every task");
        }
        Ok(Self { public, task_store, admin })
    }

    /// Where the process is reached: by clients, by other services, or by its operator.
    fn url(&self, process: &Process) -> String {
        match (&self.public, &self.task_store) {
            (Some(public), _) => url(public.local_addr()),
            (None, Some(port)) if process.identity.is_some() => url(port.local_addr()).replacen("http", "https", 1),
            (None, port) => url(port.as_ref().unwrap_or(&self.admin).local_addr()),
        }
    }
}

async fn bind(address: &str, key: &str) -> Result<Listener, String> {
    Listener::bind(address).await.map_err(|error| match error {
        BindError::InUse(address) => {
            format!("{address} is used by another process; stop that one, or choose another address with --{key}")
        }
        other => format!("{key}: {other}; choose another address with --{key}"),
    })
}

struct Process {
    config: Config,
    services: Services,
    supervisor: Supervisor,
    tasks: TaskStoreClient,
    admin: AdminClient,
    gate: Gate,
    needs: Needs,
    /// What it shows to the other processes.
    identity: Option<Identity>,
}

impl Process {
    fn new(config: Config, services: Services, supervisor: Supervisor) -> Result<Self, String> {
        let identity = match &config.services.tls {
            Some(tls) => {
                let identity = Identity::new(tls.cert.expose(), tls.key.expose(), tls.ca.expose());
                Some(identity.map_err(|problem| format!("services.tls.{problem}"))?)
            }
            None => None,
        };
        let gate = Gate::default();
        let transport = match services.task_store {
            true => Transport::in_memory(gate.clone()),
            false => {
                let urls = config.services.task_store.clone();
                Transport::network(Target { service: "task-store".to_owned(), urls, identity: identity.clone() })?
            }
        };
        let admin = tasks::admin_client(transport.clone());
        let tasks = tasks::client(transport);
        let needs = Needs {
            store: services.use_store().then(Known::default),
            tasks: services.call_task_store().then(Known::default),
            stop: supervisor.stop(),
        };
        Ok(Self { config, services, supervisor, tasks, admin, gate, needs, identity })
    }

    /// Serves what needs no store at once, and the rest as soon as the store is open.
    async fn start(&self, public: Option<Listener>, task_store: Option<Listener>) -> Result<(), String> {
        let (config, stop, tracker) = (&self.config, self.supervisor.stop(), self.supervisor.tracker());
        let limits = self.limits();
        if let Some(public) = public {
            let local = public.local_addr();
            let gateway = Gateway::new(config, self.tasks.clone(), local, &tracker, stop.clone())
                .map_err(|error| format!("{error:#}"))?;
            self.listen("gateway", public, gateway.router(), limits, stop.clone());
        }
        let (reporter, health_server) = tonic_health::server::health_reporter();
        for service in ["", tasks::task_store_server::SERVICE_NAME] {
            reporter.set_service_status(service, tonic_health::ServingStatus::NotServing).await;
        }
        if let Some(port) = task_store {
            let router = Routes::new(health_server).into_axum_router().fallback_service(self.gate.clone());
            let limits = Limits { streams_per_connection: INTERNAL_STREAMS, ..limits };
            self.listen("task-store", port, router, limits, self.after_runners());
        }

        let watch_tasks = || {
            if let Some(known) = &self.needs.tasks {
                tracker.spawn(health::watch_tasks(self.tasks.clone(), known.clone(), stop.clone()));
            }
        };
        if !self.services.task_store {
            watch_tasks();
        }
        let Some(known) = &self.needs.store else { return Ok(()) };
        let Some(engine) = stop.run_until_cancelled(store::open(config)).await else { return Ok(()) };
        let engine = engine?;
        tracker.spawn(health::watch_store(Arc::clone(&engine), known.clone(), reporter, stop.clone()));
        if self.services.task_store {
            let service = TaskStore::new(Arc::clone(&engine), &rialto_task_store::Options::default());
            service.run_background(&stop, &tracker);
            service.measure_queues(agents(config), &stop, &tracker);
            self.gate.open(service);
            watch_tasks();
        }
        if self.services.agent_runner {
            self.run_agents(engine);
        }
        Ok(())
    }

    fn limits(&self) -> Limits {
        let limits = &self.config.limits;
        Limits {
            connections: limits.connections,
            streams_per_connection: limits.streams_per_connection,
            header_timeout: limits.header_timeout.0,
            ping_interval: limits.ping_interval.0,
            ping_timeout: limits.ping_timeout.0,
            send_timeout: limits.send_timeout.0,
        }
    }

    /// The stop for task-store's port: what runners end meanwhile must be stored somewhere.
    fn after_runners(&self) -> CancellationToken {
        let closed = CancellationToken::new();
        let (stop, close) = (self.supervisor.stop(), closed.clone());
        let (gate, grace) = (self.gate.clone(), self.config.stop_grace.0);
        self.supervisor.tracker().spawn(async move {
            stop.cancelled().await;
            if timeout(grace, gate.runners_gone()).await.is_err() {
                warn!("a runner did not leave");
            }
            close.cancel();
        });
        closed
    }

    fn listen(&self, name: &'static str, listener: Listener, router: Router, limits: Limits, stop: CancellationToken) {
        let grace = self.config.stop_grace.0;
        self.supervisor.part(name, async move {
            listener.serve(router, limits, stop, grace).await;
            Ok::<_, String>(())
        });
    }

    fn run_agents(&self, engine: Arc<dyn Engine>) {
        let options = RunnerOptions {
            agents: self.config.agents.clone(),
            stop_grace: self.config.stop_grace.0.saturating_sub(HAND_BACK),
        };
        let (tasks, stop) = (self.tasks.clone(), self.supervisor.stop());
        let known = self.needs.tasks.clone().unwrap_or_default();
        self.supervisor.part("agent-runner", async move {
            // Turns that it could not begin are better left to others.
            if !known.tasks_are_served(&stop).await {
                return Ok(());
            }
            rialto_agent_runner::run(options, engine, tasks, stop).await.map_err(|error| format!("{error:#}"))
        });
    }

    /// Says that the process is ready, once it is.
    async fn announce(&self, base: &str, admin: &str, greet: impl FnOnce(&Config, &str)) {
        let stop = self.supervisor.stop();
        if stop.run_until_cancelled(self.ready(base, admin)).await.is_none() {
            return;
        }
        greet(&self.config, base);
        if let Err(error) = output::line(&format!("ready: {base}")) {
            warn!(%error, "cannot write to stdout");
        }
    }

    /// Waits until all ports answer, and the services behind them.
    async fn ready(&self, base: &str, admin: &str) {
        let mut pause = FIRST_PAUSE;
        let mut wait = async || {
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        };
        if self.services.gateway {
            let public = Url::parse(base).expect("an address makes a URL");
            // An agent with a host of its own has no card here; that is an answer too.
            while matches!(fetch_card(&public).await, Err(client::Failure::Unreachable(_))) {
                wait().await;
            }
        }
        while client::probe(admin, "/readyz").await.is_err() {
            wait().await;
        }
    }
}

/// The URL at which this machine reaches a listening address.
pub(crate) fn url(address: SocketAddr) -> String {
    let reachable = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from((Ipv4Addr::LOCALHOST, v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => SocketAddr::from((Ipv6Addr::LOCALHOST, v6.port())),
        address => address,
    };
    format!("http://{reachable}")
}

/// Raises the soft limit of open files to the hard one.
fn raise_file_limit() -> nix::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::url;

    #[test]
    fn wildcards_are_reached_on_loopback() {
        assert_eq!(url("0.0.0.0:80".parse().unwrap()), "http://127.0.0.1:80");
        assert_eq!(url("[::]:80".parse().unwrap()), "http://[::1]:80");
        assert_eq!(url("10.1.2.3:80".parse().unwrap()), "http://10.1.2.3:80");
    }
}
