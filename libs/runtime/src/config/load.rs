//! From files, variables and flags to a [`Config`], or to everything that is wrong with them.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::Read as _,
    path::{Path as FilePath, PathBuf},
};

use config::{FileFormat, Source as _};
use serde::de::DeserializeOwned;

use super::{
    Backend, Config, check,
    de::{De, closest},
    tree::{self, Node, Origin, Path},
};
use crate::Secret;

/// Larger than any configuration that a person wrote.
const MAX_FILE: u64 = 4 << 20;

/// Variables of ours that are no configuration keys, after `RIALTO_`.
const OTHER_VARIABLES: [&str; 5] = ["LOG", "LOG_FORMAT", "URL", "ADMIN_URL", "ADMIN_TOKEN_FILE"];

/// What a configuration is read from; later ones win: files in their order, variables, flags.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Files in YAML (`.yaml`, `.yml`) or TOML (`.toml`).
    pub files: Vec<PathBuf>,
    /// The environment. Only `RIALTO__SECTION__KEY` is read; other names with `RIALTO_` give warnings.
    pub variables: BTreeMap<String, String>,
    /// Flags of the command line.
    pub flags: Vec<Flag>,
}

/// A key that a flag of the command line sets.
#[derive(Clone, Debug)]
pub struct Flag {
    /// As the user typed it: `--listen`.
    pub name: &'static str,
    /// What it sets: `limits.request-size`.
    pub key: &'static str,
    /// In the form that a variable of the environment would have.
    pub value: String,
}

/// A configuration without faults.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The merged configuration.
    pub config: Config,
    /// Lines that the operator should see.
    pub warnings: Vec<String>,
}

/// Something wrong in a configuration; displayed as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The full key, such as `agents[0].mount`; empty when no key is at fault.
    pub key: String,
    /// What is wrong, and what would be right.
    pub problem: String,
    /// Where it was written; `None` for a built-in value.
    pub origin: Option<String>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.problem)?;
        self.origin.as_ref().map_or(Ok(()), |origin| write!(f, " ({origin})"))
    }
}

/// Everything that is wrong with a configuration, one line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Faults(pub Vec<Fault>);

impl Sources {
    /// The environment of this process. Names and values that are not UTF-8 are left out.
    #[must_use]
    pub fn environment() -> BTreeMap<String, String> {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect()
    }
}

/// Reads, merges, types and checks a configuration.
///
/// # Errors
/// All faults at once: files that cannot be read, unknown keys, values of the wrong type, broken rules.
pub fn load(sources: &Sources) -> Result<Loaded, Faults> {
    load_with(sources, |_| Vec::new())
}

/// As [`load`], with rules of those who know more: what a text means to a store, or to TLS. Each that is broken is the
/// full key, such as `services.tls.cert`, and what is wrong with it.
///
/// # Errors
/// All faults at once.
pub fn load_with(sources: &Sources, rules: impl FnOnce(&Config) -> Vec<Broken>) -> Result<Loaded, Faults> {
    let mut reading = Reading::new();
    for file in &sources.files {
        reading.file(file);
    }
    let warnings = reading.variables(&sources.variables);
    for flag in &sources.flags {
        let path: Vec<_> = flag.key.split('.').collect();
        reading.set(&path, &flag.value, &Origin::Flag(flag.name.into()));
    }
    let config = reading.finish(|config: &mut Config| {
        let filled_in = fill_in(config, &sources.variables);
        let named = |(key, problem): Broken| match filled_in.get(&key) {
            Some(name) => (key, format!("{name} in the environment {problem}")),
            None => (key, problem),
        };
        check::check(config).into_iter().chain(rules(config)).map(named).collect()
    })?;
    Ok(Loaded { config, warnings })
}

/// Reads a configuration from YAML text, as from a file of that name.
///
/// # Errors
/// All faults at once.
pub fn parse_yaml(name: &str, text: &str) -> Result<Config, Faults> {
    let mut reading = Reading::new();
    reading.text(name, text, FileFormat::Yaml);
    reading.finish(|config| check::check(config))
}

/// Takes endpoints and keys of models, and the collector, from the variables that every tool of that kind reads.
/// Returns the keys that were filled in, with the names of their variables.
fn fill_in(config: &mut Config, variables: &BTreeMap<String, String>) -> BTreeMap<String, &'static str> {
    let mut filled_in = BTreeMap::new();
    const COLLECTOR: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
    if let (None, Some(endpoint)) = (&config.telemetry.otlp_endpoint, variables.get(COLLECTOR))
        && !endpoint.is_empty()
    {
        config.telemetry.otlp_endpoint = Some(endpoint.clone());
        filled_in.insert("telemetry.otlp-endpoint".to_owned(), COLLECTOR);
    }
    for (at, agent) in config.agents.iter_mut().enumerate() {
        let Backend::Openai { base_url, api_key, .. } = &mut agent.backend else { continue };
        let mut variable = |key: &str, name: &'static str| {
            let value = variables.get(name).filter(|value| !value.is_empty()).cloned();
            filled_in.extend(value.as_ref().map(|_| (format!("agents[{at}].backend.{key}"), name)));
            value
        };
        if base_url.is_none() {
            *base_url = variable("base-url", "OPENAI_BASE_URL");
        }
        if api_key.is_none() {
            *api_key = variable("api-key", "OPENAI_API_KEY").map(Secret::from);
        }
    }
    filled_in
}

/// A rule that a typed configuration breaks: the key, and what would be right.
pub type Broken = (String, String);

pub(super) struct Reading {
    tree: Node,
    faults: Vec<Fault>,
}

impl Reading {
    pub(super) fn new() -> Self {
        Self { tree: Node::map(Origin::File("".into())), faults: Vec::new() }
    }

    fn fault(&mut self, problem: String, origin: &impl ToString) {
        self.faults.push(Fault { key: String::new(), problem, origin: Some(origin.to_string()) });
    }

    fn file(&mut self, path: &FilePath) {
        let name = path.display().to_string();
        let format = match path.extension().and_then(|extension| extension.to_str()) {
            Some("yaml" | "yml") => FileFormat::Yaml,
            Some("toml") => FileFormat::Toml,
            _ => return self.fault("the file's name must end in .yaml, .yml or .toml".to_owned(), &name),
        };
        let mut text = String::new();
        match File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text)) {
            Err(error) => self.fault(format!("cannot read the file: {error}"), &name),
            Ok(_) if text.len() as u64 > MAX_FILE => self.fault("the file is larger than 4MiB".to_owned(), &name),
            Ok(_) => self.text(&name, &text, format),
        }
    }

    pub(super) fn text(&mut self, name: &str, text: &str, format: FileFormat) {
        let origin = Origin::File(name.into());
        match config::File::from_str(text, format).collect() {
            Ok(map) => {
                let over = tree::from_file(config::ValueKind::Table(map), &origin);
                self.tree.origin = origin;
                self.tree.merge(over);
            }
            Err(error) => {
                let cause = match &error {
                    config::ConfigError::FileParse { cause, .. } => cause.to_string(),
                    other => other.to_string(),
                };
                // One line, and without the parser's own way to show a string.
                let line = cause.split_whitespace().collect::<Vec<_>>().join(" ");
                self.fault(line.replacen("String(\"", "\"", 1).replacen("\"):", "\":", 1), &name);
            }
        }
    }

    pub(super) fn set(&mut self, path: &[&str], value: &str, origin: &Origin) {
        if let Err(problem) = self.tree.set(path, value.to_owned(), origin) {
            self.fault(problem, origin);
        }
    }

    fn variables(&mut self, variables: &BTreeMap<String, String>) -> Vec<String> {
        let mut warnings = Vec::new();
        for (name, value) in variables.iter().filter(|(name, _)| name.starts_with("RIALTO")) {
            let keys = name.strip_prefix("RIALTO__").map(|keys| keys.split("__").collect::<Vec<_>>());
            match keys {
                Some(path) if path.iter().all(|key| !key.is_empty()) => {
                    self.set(&path, value, &Origin::Variable(name.as_str().into()));
                }
                _ => {
                    let Some(rest) = name.strip_prefix("RIALTO_") else { continue };
                    if OTHER_VARIABLES.contains(&rest) {
                        continue;
                    }
                    let hint = match closest(rest, &OTHER_VARIABLES) {
                        Some(close) => format!("did you mean RIALTO_{close}?"),
                        None => "keys are written RIALTO__SECTION__KEY, with two underscores".to_owned(),
                    };
                    warnings.push(format!("the environment variable {name} means nothing; {hint}"));
                }
            }
        }
        warnings
    }

    /// Types the tree. Each fault is mended (the key removed, the value replaced by a hole) until no fault is
    /// left; then the rules are checked (and may fill in what is missing), except at the places that were mended.
    pub(super) fn finish<T: DeserializeOwned>(
        mut self,
        rules: impl FnOnce(&mut T) -> Vec<Broken>,
    ) -> Result<T, Faults> {
        let mut mended: Vec<String> = Vec::new();
        let mut typed = loop {
            let fault = match T::deserialize(De::new(&self.tree)) {
                Ok(typed) => break Some(typed),
                Err(fault) => fault,
            };
            // Text of the environment that is a whole list or map has no nodes to mend until it is expanded.
            if self.tree.expand(&self.place(&fault.path)) {
                continue;
            }
            let key = fault.path.to_string();
            let origin = self.origin(&fault.path);
            self.faults.push(Fault { key: key.clone(), problem: fault.problem, origin });
            mended.push(key);
            let mended = if fault.unknown { self.tree.remove(&fault.path) } else { self.tree.cut(&fault.path) };
            if !mended {
                break None;
            }
        };
        if let Some(typed) = &mut typed {
            for (key, problem) in rules(typed) {
                let doubtful = |mended: &String| {
                    let (short, long) = if mended.len() < key.len() { (mended, &key) } else { (&key, mended) };
                    long.strip_prefix(short.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
                };
                if !mended.iter().any(doubtful) {
                    let origin = self.origin(&Path::parse(&key));
                    self.faults.push(Fault { key, problem, origin });
                }
            }
        }
        match typed {
            Some(typed) if self.faults.is_empty() => Ok(typed),
            _ => Err(Faults(self.faults)),
        }
    }

    /// The part of a path that the tree has.
    fn place(&self, path: &Path) -> Path {
        let (_, depth) = self.tree.nearest(path);
        Path(path.0[..depth].to_vec())
    }

    /// Where the value at `path` was written, or what surrounds it when it was not.
    fn origin(&self, path: &Path) -> Option<String> {
        let origin = self.tree.nearest(path).0.origin.to_string();
        (!origin.is_empty()).then_some(origin)
    }
}
