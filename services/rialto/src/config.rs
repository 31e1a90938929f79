//! `rialto config`, and how every command loads its configuration.

use std::{path::PathBuf, process::ExitCode};

use rialto_runtime::config::{Config, Faults, Flag, Loaded, Sources, load, to_yaml};

use crate::{cli::fail, output};

/// Loads a configuration from a file, the environment and flags. Warnings go to stderr, faults too.
pub(crate) fn load_or_complain(file: Option<PathBuf>, flags: Vec<Flag>) -> Result<Config, ExitCode> {
    let sources = Sources { files: file.into_iter().collect(), variables: Sources::environment(), flags };
    match load(&sources) {
        Ok(Loaded { config, warnings }) => {
            for warning in warnings {
                output::complain(&format!("warning: {warning}"));
            }
            Ok(config)
        }
        Err(Faults(faults)) => {
            for fault in &faults {
                output::complain(&format!("error: {fault}"));
            }
            Err(ExitCode::from(2))
        }
    }
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
