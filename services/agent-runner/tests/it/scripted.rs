//! Where the scripted agent is. Built when it is missing or older than its source.

use std::{collections::BTreeMap, path::PathBuf, process::Command};

use rialto_runtime::config;

/// The program.
pub(crate) fn program() -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../libs/testkit/src/bin/scripted_agent.rs");
    let deps = std::env::current_exe().unwrap();
    let folder = deps.ancestors().nth(2).unwrap();
    let program = folder.join("scripted_agent");
    let changed = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    if changed(&program) < changed(&source) {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "-p", "rialto-testkit", "--bin", "scripted_agent"]);
        if let Some(profile) = folder.file_name().and_then(|name| name.to_str()).filter(|name| *name != "debug") {
            build.args(["--profile", profile]);
        }
        assert!(build.status().unwrap().success(), "the scripted agent cannot be built");
    }
    program
}

/// The backend, with its counters in a folder.
pub(crate) fn backend(persistent: bool, env: &[(&str, &str)]) -> config::Backend {
    let env: BTreeMap<_, _> = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let command = vec![program().to_str().unwrap().to_owned()];
    config::Backend::Command { command, cwd: None, env, persistent }
}

/// An agent that is a shell script.
pub(crate) fn shell(script: &str, persistent: bool) -> config::Backend {
    let command = vec!["sh".to_owned(), "-c".to_owned(), script.to_owned()];
    config::Backend::Command { command, cwd: None, env: BTreeMap::new(), persistent }
}
