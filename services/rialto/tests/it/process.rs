//! Processes of the binary under test.

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{Child, ChildStdout, Command, Output, Stdio},
    thread::JoinHandle,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rialto_testkit::cluster::path_with_agents;

/// The binary, with nothing of the surrounding environment that would change what it does.
pub(crate) fn rialto(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rialto"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RIALTO") || name.starts_with("RUST_")) {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    rialto(arguments).output().unwrap()
}

/// Exit code, stdout and stderr as one text, for snapshots. Texts that differ between runs are replaced.
pub(crate) fn shown(output: &Output, replace: &[(&str, &str)]) -> String {
    let mut text = format!(
        "exit {}\n{}---\n{}",
        output.status.code().map_or_else(|| "by a signal".to_owned(), |code| code.to_string()),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    for (from, to) in replace {
        text = text.replace(from, to);
    }
    text
}

/// JSON lines of stdout.
pub(crate) fn lines(output: &Output) -> Vec<serde_json::Value> {
    let text = std::str::from_utf8(&output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A `rialto dev` that answers. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Dev {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: Option<JoinHandle<String>>,
    pub(crate) url: String,
}

impl Dev {
    pub(crate) fn ephemeral() -> Self {
        Self::start(&["--ephemeral"])
    }

    /// With ports of its own, unless the arguments name some.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut all = vec!["dev", "--admin-listen", "127.0.0.1:0"];
        if !arguments.contains(&"--listen") {
            all.extend(["--listen", "127.0.0.1:0"]);
        }
        all.extend(arguments);
        let mut command = rialto(&all);
        if arguments.contains(&"--config") {
            command.env("PATH", scripted_agent_path());
        }
        Self::spawn(command)
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut pipe = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = Vec::new();
            drop(pipe.read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        });
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let Some(url) = line.trim_end().strip_prefix("ready: ").map(ToOwned::to_owned) else {
            drop(child.kill());
            panic!("not ready: {line:?}\n{}", stderr.join().unwrap());
        };
        Self { child, stdout, stderr: Some(stderr), url }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// Waits for the end: exit code (negative: signal), the rest of stdout, stderr.
    pub(crate) fn wait(mut self) -> (i32, String, String) {
        use std::os::unix::process::ExitStatusExt as _;
        let status = self.child.wait().unwrap();
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        let code = status.code().unwrap_or_else(|| -status.signal().unwrap_or_default());
        (code, rest, self.stderr.take().unwrap().join().unwrap())
    }

    /// Runs a client command against this server.
    pub(crate) fn client(&self, arguments: &[&str]) -> Output {
        rialto(arguments).env("RIALTO_URL", &self.url).output().unwrap()
    }

    /// As [`Dev::client`], not waiting for its end, with stdout to be read.
    pub(crate) fn client_started(&self, arguments: &[&str]) -> (Child, BufReader<ChildStdout>) {
        let mut command = rialto(arguments);
        let mut child =
            command.env("RIALTO_URL", &self.url).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        (child, stdout)
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // Ended already, if the test waited.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A configuration with the scripted agent at `/`.
pub(crate) fn scripted(folder: &Path, more: &str) -> String {
    let file = folder.join("scripted.yaml");
    let yaml = format!(
        "agents:\n  - id: scripted\n    backend: {{type: command, command: [scripted_agent]}}\n    lease: 1s\n{more}"
    );
    std::fs::File::create(&file).unwrap().write_all(yaml.as_bytes()).unwrap();
    file.to_str().unwrap().to_owned()
}

/// PATH with the scripted agent in it, which lies beside the binary.
pub(crate) fn scripted_agent_path() -> OsString {
    path_with_agents(Path::new(env!("CARGO_BIN_EXE_rialto"))).unwrap()
}
