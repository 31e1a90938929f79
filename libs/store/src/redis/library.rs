//! The functions that run inside Redis.

use redis::Cmd;

const SOURCE: &str = include_str!("library.lua");

/// The function library. It is named by its text, so it never needs to be replaced.
#[derive(Debug)]
pub(super) struct Library {
    name: String,
    functions: [String; 6],
}

/// A function of the library.
#[derive(Clone, Copy, Debug)]
pub(super) enum Function {
    Commit,
    /// Commit that passes when the memory is full.
    Release,
    Claim,
    Heartbeat,
    Tick,
    Depth,
}

impl Library {
    pub(super) fn new() -> Self {
        let name = format!("rialto_{:08x}", fnv(SOURCE.as_bytes()));
        let names = ["commit", "release", "claim", "heartbeat", "tick", "depth"];
        let functions = names.map(|function| format!("{name}_{function}"));
        Self { name, functions }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The start of a call: `FCALL <function>`, or `FCALL_RO` when it only reads.
    pub(super) fn call(&self, function: Function) -> Cmd {
        self.call_with(function, 0, 0)
    }

    /// The same, with room for so many more arguments and bytes.
    pub(super) fn call_with(&self, function: Function, arguments: usize, bytes: usize) -> Cmd {
        let (command, name) = match function {
            Function::Depth => ("FCALL_RO", &self.functions[function as usize]),
            _ => ("FCALL", &self.functions[function as usize]),
        };
        let mut call = Cmd::with_capacity(arguments + 2, bytes + command.len() + name.len());
        call.arg(command).arg(name);
        call
    }

    pub(super) fn load(&self) -> Cmd {
        let mut command = redis::cmd("FUNCTION");
        command.arg("LOAD").arg(SOURCE.replace('@', &self.name));
        command
    }
}

/// FNV-1a.
fn fnv(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_names_itself_and_every_function() {
        let library = Library::new();
        // Once in the first line and once where functions are registered.
        assert_eq!(SOURCE.matches('@').count(), 2);
        for function in &library.functions {
            let short = function.strip_prefix(library.name()).unwrap().strip_prefix('_').unwrap();
            assert!(SOURCE.contains(&format!("register('{short}', ")), "{short}");
        }
    }
}
