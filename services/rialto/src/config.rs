//! `rialto config`, and how every command loads its configuration.

use std::{path::PathBuf, process::ExitCode};

use rialto_rpc::{Identity, Unfit};
use rialto_runtime::config::{Broken, Config, Faults, Flag, Loaded, Sources, load_with, to_yaml};
use rialto_store::redis::RedisConfig;

use crate::{cli::fail, output};

/// Loads a configuration from a file, the environment and flags. Warnings go to stderr, faults too.
pub(crate) fn load_or_complain(file: Option<PathBuf>, flags: Vec<Flag>) -> Result<Config, ExitCode> {
    let sources = Sources { files: file.into_iter().collect(), variables: Sources::environment(), flags };
    match load_with(&sources, rules) {
        Ok(Loaded { config, warnings }) => {
            for warning in warnings {
                output::warning(&warning.to_string());
            }
            Ok(config)
        }
        Err(Faults(faults)) => {
            for fault in &faults {
                output::error(&fault.to_string());
            }
            Err(ExitCode::from(2))
        }
    }
}

/// What the store says of its URL, and TLS of its certificates.
fn rules(config: &Config) -> Vec<Broken> {
    let url = RedisConfig::new(config.redis.url()).check_url();
    let url = url.err().map(|problem| ("redis.url".to_owned(), problem));
    let identity = config.services.tls.as_ref().and_then(|tls| {
        let Unfit { part, problem } = Identity::new(tls.cert.expose(), tls.key.expose(), tls.ca.expose()).err()?;
        Some((format!("services.tls.{part}"), problem))
    });
    url.into_iter().chain(identity).collect()
}

pub(crate) fn check(file: PathBuf) -> ExitCode {
    let name = file.display().to_string();
    match load_or_complain(Some(file), Vec::new()) {
        Ok(_) => written(&output::line(&format!("{name}: no faults"))),
        Err(code) => code,
    }
}

pub(crate) fn print(file: Option<PathBuf>) -> ExitCode {
    match load_or_complain(file, Vec::new()) {
        Ok(config) => written(&output::text(&to_yaml(&config))),
        Err(code) => code,
    }
}

fn written(result: &std::io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(2, &format!("cannot write to stdout: {error}")),
    }
}
