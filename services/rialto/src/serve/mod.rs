//! `rialto serve`: any of the services in this process, as part of a cluster.

mod admin;
mod gate;
mod health;
mod metrics;
mod process;
mod store;

use std::process::ExitCode;

use clap::ValueEnum;
use rialto_runtime::config::{Flag, StoreKind};

pub(crate) use self::process::{Services, run, url};
use crate::{
    cli::{ServeArgs, fail},
    config::load_or_complain,
};

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// The doors: every A2A binding, and the agent cards
    Gateway,
    /// The tasks: the one place that knows what became of a message
    TaskStore,
    /// The agents: takes turns and runs them
    AgentRunner,
    /// Not in this version
    CardSigner,
    /// Not in this version
    PushDispatcher,
    /// Not in this version
    HubScoring,
    /// All services in this process
    All,
}

pub(crate) async fn serve(args: ServeArgs) -> ExitCode {
    let services = match services(&args.services) {
        Ok(services) => services,
        Err(problem) => return fail(2, &problem),
    };
    let flags = flags(&args);
    let config = match load_or_complain(args.config, flags) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if config.store == StoreKind::Sqlite && services != Services::ALL {
        let problem = "store: sqlite is for one process, which is `rialto serve all`; \
                       services in processes of their own need store: redis";
        return fail(2, problem);
    }
    run(config, services, |_, _| {}).await
}

/// The services of these roles, or why there are none.
fn services(roles: &[Role]) -> Result<Services, String> {
    let mut services = Services::default();
    for role in roles {
        match role {
            Role::Gateway => services.gateway = true,
            Role::TaskStore => services.task_store = true,
            Role::AgentRunner => services.agent_runner = true,
            Role::All => services = Services::ALL,
            Role::CardSigner | Role::PushDispatcher | Role::HubScoring => {
                let name = role.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
                return Err(format!(
                    "{name} is not in this version; there are gateway, task-store, agent-runner, and all of them: all"
                ));
            }
        }
    }
    Ok(services)
}

fn flags(args: &ServeArgs) -> Vec<Flag> {
    [
        ("--listen", "listen", &args.listen),
        ("--admin-listen", "admin-listen", &args.admin_listen),
        ("--task-store-listen", "task-store-listen", &args.task_store_listen),
    ]
    .into_iter()
    .filter_map(|(name, key, value)| Some(Flag { name, key, value: value.clone()? }))
    .collect()
}
