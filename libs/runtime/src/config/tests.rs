use std::{collections::BTreeMap, fs};

use proptest::prelude::*;
use serde::Deserialize;

use super::{
    Answer, Backend, Config, Flag, Sources, load,
    load::{Faults, Loaded, Reading},
    parse_yaml, to_yaml,
    tree::Origin,
};
use crate::{
    Secret,
    units::{Size, Span},
};

fn faults(yaml: &str) -> String {
    parse_yaml("r.yaml", yaml).expect_err("this configuration is faulty").to_string()
}

fn with_variables(yaml: &str, variables: &[(&str, &str)]) -> Result<Loaded, Faults> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.yaml");
    fs::write(&file, yaml).unwrap();
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    load(&Sources { files: vec![file], variables, flags: Vec::new() }).map_err(|Faults(faults)| {
        let folder = format!("{}/", folder.path().display());
        let short = |origin: String| origin.replace(&folder, "");
        let mend = |fault: super::Fault| super::Fault {
            problem: short(fault.problem),
            origin: fault.origin.map(short),
            ..fault
        };
        Faults(faults.into_iter().map(mend).collect())
    })
}

#[test]
fn nothing_set_is_the_built_in_configuration() {
    let loaded = load(&Sources::default()).unwrap();
    assert_eq!(to_yaml(&loaded.config), to_yaml(&Config::default()));
    assert_eq!(loaded.warnings, Vec::<String>::new());
}

#[test]
fn every_fault_is_reported_at_once_each_on_one_line() {
    insta::assert_snapshot!(faults(
        r"
lissen: 127.0.0.1:1
listen: 8080
admin_listen: 0.0.0.0:8081
store: postgres
public-url: ftp://files.example.test
stop-grace: 25
limits:
  request-sise: 4MiB
  task_size: 1GiB
  parts: 0
  header-timeout: 0s
  connections: -1
agents:
  - id: Bad Id
    mount: /tasks/
    backend: {type: comand, command: []}
  - id: two
    mount: /two
    backend:
      type: command
      comand: [python3]
      persistent: perhaps
  - mount: /three
    backend: {type: echo, command: [x]}
    card:
      skills: [{id: s, tags: []}]
      input-modes: [text]
      output-modes: []
      extensions: [{required: true}]
  - id: two
    mount: /two
    lease: 100ms
    tenants: [acme, tasks, acme]
    backend: echo
"
    ), @r#"
        lissen: unknown key; did you mean listen? (r.yaml)
        agents[0].backend.type: "comand" is not one of echo, command, openai; did you mean command? (r.yaml)
        agents[1].backend.comand: unknown key; did you mean command? (r.yaml)
        agents[1].backend.persistent: expected true or false, found "perhaps" (r.yaml)
        agents[1].backend.command: is required (r.yaml)
        agents[2].backend.command: unknown key; nothing else belongs here (r.yaml)
        agents[2].card.extensions[0].uri: is required (r.yaml)
        agents[2].card.skills[0].name: is required (r.yaml)
        agents[2].card.skills[0].description: is required (r.yaml)
        agents[2].id: is required (r.yaml)
        limits.request-sise: unknown key; did you mean request-size? (r.yaml)
        limits.connections: expected a whole number that is not negative, found the number -1 (r.yaml)
        listen: expected a string, found the number 8080 (put it in quotes) (r.yaml)
        stop-grace: expected a time such as "30s" or "10m", found the number 25 (r.yaml)
        store: "postgres" is not one of sqlite, redis (r.yaml)
        admin-listen: 0.0.0.0:8081 is reachable from other machines, which needs an admin-token-file (r.yaml)
        public-url: must begin with http:// or https:// (r.yaml)
        limits.task-size: must be 16MiB or less (r.yaml)
        limits.parts: must be at least 1 (r.yaml)
        limits.header-timeout: must be longer than 0 (r.yaml)
        agents[0].id: "Bad Id" must be 1 to 32 of a-z, 0-9 and "-" (r.yaml)
        agents[0].mount: "/tasks/" must not end with "/" (r.yaml)
        agents[2].card.input-modes[0]: "text" is not a media type such as "text/plain" (r.yaml)
        agents[2].card.output-modes: at least one media type is needed (r.yaml)
        agents[2].card.skills[0].tags: at least one tag is needed (r.yaml)
        agents[3].tenants[1]: "tasks" is a path of Rialto's own (r.yaml)
        agents[3].tenants[2]: "acme" is there twice (r.yaml)
        agents[3].lease: 100ms is less than 1s (r.yaml)
        agents[3].id: "two" is the id of another agent already (r.yaml)
        agents[3].mount: "/two" belongs to agent "two" already; give one of the two another mount, or different hosts (r.yaml)
    "#);
}

#[test]
fn both_spellings_of_a_key_are_one_key() {
    let config = parse_yaml("r.yaml", "limits: {request_size: 1MiB}\nstop_grace: 3s").unwrap();
    assert_eq!((config.limits.request_size, config.stop_grace), (Size::mib(1), Span::secs(3)));
    insta::assert_snapshot!(faults("limits: {request_size: 1MiB, request-size: 2MiB}"), @"limits.request_size: request-size is set twice (r.yaml)");
}

#[test]
fn broken_files_say_where() {
    insta::assert_snapshot!(faults("listen: [1\nagents: }"), @"illegal placement of ':' indicator at byte 17 line 2 column 7 (r.yaml)");
    insta::assert_snapshot!(faults("listen: a\nlisten: b"), @r#""listen": duplicated key in mapping at byte 18 line 2 column 9 (r.yaml)"#);
    insta::assert_snapshot!(faults("- just\n- a list"), @"invalid type: sequence, expected a map (r.yaml)");
    insta::assert_snapshot!(faults("listen: {a: 1}\nlimits: 3\nagents: {}"), @r"
        agents: expected a list, found a map (r.yaml)
        limits: expected a map, found the number 3 (r.yaml)
        listen: expected a string, found a map (r.yaml)
    ");
}

#[test]
fn files_that_cannot_be_used_are_faults_not_panics() {
    let sources = Sources { files: vec!["/nowhere/r.yaml".into(), "r.json".into(), "/".into()], ..Sources::default() };
    insta::assert_snapshot!(load(&sources).unwrap_err().to_string(), @r"
        cannot read the file: No such file or directory (os error 2) (/nowhere/r.yaml)
        the file's name must end in .yaml, .yml or .toml (r.json)
        the file's name must end in .yaml, .yml or .toml (/)
    ");
}

#[test]
fn toml_says_the_same_as_yaml() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.toml");
    let toml = "listen = \"127.0.0.1:9\"\n[limits]\nrequest-size = \"1MiB\"\n[[agents]]\nid = \"a\"\nbackend = { type = \"echo\" }\n";
    fs::write(&file, toml).unwrap();
    let config = load(&Sources { files: vec![file], ..Sources::default() }).unwrap().config;
    let yaml = "listen: 127.0.0.1:9\nlimits: {request-size: 1MiB}\nagents: [{id: a, backend: echo}]";
    assert_eq!(to_yaml(&config), to_yaml(&parse_yaml("r.yaml", yaml).unwrap()));
}

#[test]
fn later_files_win_key_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("1.yaml"), folder.path().join("2.yml"));
    fs::write(&first, "listen: 127.0.0.1:1\nlimits: {parts: 3, streams: 4}").unwrap();
    fs::write(&second, "limits: {parts: 5}").unwrap();
    let config = load(&Sources { files: vec![first, second], ..Sources::default() }).unwrap().config;
    assert_eq!((config.listen.as_str(), config.limits.parts, config.limits.streams), ("127.0.0.1:1", 5, 4));
}

#[test]
fn variables_take_the_type_of_their_key() {
    let loaded = with_variables(
        "limits: {request_size: 2MiB}\nagents: [{id: a, backend: echo, card: {version: '1'}}]",
        &[
            ("RIALTO__LISTEN", "127.0.0.1:7"),
            ("RIALTO__EPHEMERAL", "true"),
            ("RIALTO__LIMITS__REQUEST_SIZE", "1MiB"),
            ("RIALTO__LIMITS__PARTS", "7"),
            ("RIALTO__TRUSTED_PROXIES", "10.0.0.0/8, fd00::/8"),
            ("RIALTO__AGENTS__0__ANSWER", "status"),
            // Text stays what it is; a number is not parsed and printed again.
            ("RIALTO__AGENTS__0__CARD__VERSION", "00123"),
        ],
    );
    let config = loaded.unwrap().config;
    assert_eq!(config.listen, "127.0.0.1:7");
    assert!(config.ephemeral);
    assert_eq!((config.limits.request_size, config.limits.parts), (Size::mib(1), 7));
    assert_eq!(config.trusted_proxies, ["10.0.0.0/8", "fd00::/8"]);
    assert_eq!((config.agents[0].answer, config.agents[0].card.version.as_str()), (Answer::Status, "00123"));
}

#[test]
fn protocol_0_3_is_switched_on_by_a_key_with_a_dot() {
    let agent = |value: &str| format!("agents: [{{id: a, backend: echo, {value}}}]");
    let is_on = |yaml: &str| parse_yaml("r.yaml", &agent(yaml)).unwrap().agents[0].a2a_v03;
    assert!(!parse_yaml("r.yaml", "agents: [{id: a, backend: echo}]").unwrap().agents[0].a2a_v03);
    for (yaml, expected) in [
        ("a2a-0.3: on", true),
        ("a2a-0.3: true", true),
        ("a2a_0.3: on", true),
        ("a2a-0-3: on", true),
        ("a2a-0.3: off", false),
        ("a2a-0.3: false", false),
        ("a2a-0.3:", false),
    ] {
        assert_eq!(is_on(yaml), expected, "{yaml}");
    }
    let variable = |yaml: &str, value| {
        let loaded = with_variables(&agent(yaml), &[("RIALTO__AGENTS__0__A2A_0_3", value)]);
        loaded.map(|loaded| loaded.config.agents[0].a2a_v03).map_err(|faults| faults.to_string())
    };
    assert_eq!(variable("mount: /", "on"), Ok(true));
    assert_eq!(variable("a2a-0.3: on", "off"), Ok(false), "a variable wins over the file");
    insta::assert_snapshot!(variable("a2a-0.3: off", "maybe").unwrap_err(), @r#"agents[0].a2a-0.3: expected true or false, found "maybe" (RIALTO__AGENTS__0__A2A_0_3 in the environment)"#);
    insta::assert_snapshot!(faults(&agent("a2a-0.3: maybe")), @r#"agents[0].a2a-0.3: expected true or false, found "maybe" (r.yaml)"#);
    insta::assert_snapshot!(faults(&agent("a2a-0.3: on, a2a-0-3: off")), @"agents[0].a2a-0.3: a2a-0.3 is set twice (r.yaml)");

    // In TOML a dot parts keys, so this one needs quotes.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.toml");
    fs::write(&file, "[[agents]]\nid = \"a\"\nbackend = \"echo\"\n\"a2a-0.3\" = true\n").unwrap();
    let config = load(&Sources { files: vec![file], ..Sources::default() }).unwrap().config;
    assert!(config.agents[0].a2a_v03);
    let printed = to_yaml(&config);
    assert!(printed.contains(" a2a-0.3: true\n"), "{printed}");
    assert!(parse_yaml("printed.yaml", &printed).unwrap().agents[0].a2a_v03);
}

#[test]
fn a_variable_may_hold_a_whole_section() {
    let agents = r#"[{"id": "a", "backend": {"type": "command", "command": ["x"], "env": {"MY_VAR": "1"}}}]"#;
    let config = with_variables("{}", &[("RIALTO__AGENTS", agents)]).unwrap().config;
    let env = BTreeMap::from([("MY_VAR".to_owned(), "1".to_owned())]);
    let command = vec!["x".to_owned()];
    assert_eq!(config.agents[0].backend, Backend::Command { command, cwd: None, env, persistent: false });

    let config = with_variables("{}", &[("RIALTO__AGENTS__0__ID", "b"), ("RIALTO__AGENTS__0__BACKEND__TYPE", "echo")]);
    assert_eq!(config.unwrap().config.agents[0].id, "b");
}

#[test]
fn faults_name_the_variable_that_they_come_from() {
    let agents = r#"[{"id": "a", "backend": "ecko", "lease": 5, "mounts": "/"}]"#;
    let faults = with_variables(
        "listen: 127.0.0.1:1",
        &[
            ("RIALTO__LIMITS__PARTS", "many"),
            ("RIALTO__LIMITS__PART", "3"),
            ("RIALTO__LISTEN__PORT", "3"),
            ("RIALTO__EPHEMERAL", "perhaps"),
            ("RIALTO__AGENTS", agents),
        ],
    );
    insta::assert_snapshot!(faults.unwrap_err().to_string(), @r#"
        the key above it holds a single value, set in r.yaml (RIALTO__LISTEN__PORT in the environment)
        agents[0].mounts: unknown key; did you mean mount? (RIALTO__AGENTS in the environment)
        agents[0].backend: "ecko" is not one of echo, command, openai; did you mean echo? (RIALTO__AGENTS in the environment)
        agents[0].lease: expected a time such as "30s" or "10m", found the number 5 (RIALTO__AGENTS in the environment)
        ephemeral: expected true or false, found "perhaps" (RIALTO__EPHEMERAL in the environment)
        limits.part: unknown key; did you mean parts? (RIALTO__LIMITS__PART in the environment)
        limits.parts: expected a whole number that is not negative, found "many" (RIALTO__LIMITS__PARTS in the environment)
    "#);
    let faults = with_variables("agents: [{id: a, backend: echo}]", &[("RIALTO__AGENTS__5__ID", "b")]);
    insta::assert_snapshot!(faults.unwrap_err().to_string(), @"the list has 1 entries; 5 is past them (RIALTO__AGENTS__5__ID in the environment)");
}

#[test]
fn a_model_is_taken_from_the_variables_that_every_tool_reads() {
    let openai = |yaml: &str, variables: &[(&str, &str)]| {
        let yaml = format!("agents: [{{id: a, backend: {{type: openai, model: m{yaml}}}}}]");
        with_variables(&yaml, variables).map(|loaded| match &loaded.config.agents[0].backend {
            Backend::Openai { base_url, api_key, .. } => {
                (base_url.clone(), api_key.as_ref().map(|key| key.expose().to_owned()))
            }
            other => panic!("{other:?}"),
        })
    };
    let some = |text: &str| Some(text.to_owned());
    let both = [("OPENAI_BASE_URL", "http://e.test/v1"), ("OPENAI_API_KEY", "e")];
    assert_eq!(openai("", &both).unwrap(), (some("http://e.test/v1"), some("e")));
    assert_eq!(openai("", &both[1..]).unwrap(), (None, some("e")));
    let own = ", base-url: 'http://c.test', api-key: c";
    assert_eq!(openai(own, &both).unwrap(), (some("http://c.test"), some("c")));
    // A server of one's own may ask for no key; OpenAI does.
    assert_eq!(openai(", base-url: 'http://c.test'", &[]).unwrap(), (some("http://c.test"), None));
    let faults = [
        openai("", &[("OPENAI_API_KEY", "")]),
        openai("", &[("OPENAI_BASE_URL", "http://u:p@e.test"), ("OPENAI_API_KEY", "a b")]),
        openai(", base-url: e.test, temperature: 3, max_output_tokens: 0, stall-timeout: 0", &[]),
        openai(", temperature: hot, api-kee: x", &both),
    ];
    insta::assert_snapshot!(faults.map(|faults| faults.unwrap_err().to_string()).join("\n"), @r#"
        agents[0].backend.api-key: is needed, here or as OPENAI_API_KEY in the environment (r.yaml)
        agents[0].backend.base-url: OPENAI_BASE_URL in the environment must not hold a user name or password; use api-key (r.yaml)
        agents[0].backend.api-key: OPENAI_API_KEY in the environment must be one line of visible characters (r.yaml)
        agents[0].backend.base-url: must be an http or https URL such as "http://127.0.0.1:11434/v1" (r.yaml)
        agents[0].backend.temperature: must be 0 to 2 (r.yaml)
        agents[0].backend.max-output-tokens: must be at least 1 (r.yaml)
        agents[0].backend.stall-timeout: must be longer than 0 (r.yaml)
        agents[0].backend.api-kee: unknown key; did you mean api-key? (r.yaml)
        agents[0].backend.temperature: expected a number, found "hot" (r.yaml)
    "#);
}

#[test]
fn variables_that_look_like_ours_but_are_not_give_warnings() {
    let loaded = with_variables(
        "{}",
        &[
            ("RIALTO_REDIS__URL", "x"),
            ("RIALTO_LOGS", "debug"),
            ("RIALTO_LOG", "debug"),
            ("RIALTOS", "x"),
            ("PATH", "x"),
        ],
    );
    insta::assert_snapshot!(loaded.unwrap().warnings.join("\n"), @r"
        the environment variable RIALTO_LOGS means nothing; did you mean RIALTO_LOG?
        the environment variable RIALTO_REDIS__URL means nothing; keys are written RIALTO__SECTION__KEY, with two underscores
    ");
}

#[test]
fn flags_win_over_everything_and_are_named_in_faults() {
    let flag = |value: &str| Flag { name: "--listen", key: "listen", value: value.to_owned() };
    let variables = BTreeMap::from([("RIALTO__LISTEN".to_owned(), "127.0.0.1:1".to_owned())]);
    let sources = |value| Sources { files: Vec::new(), variables: variables.clone(), flags: vec![flag(value)] };
    assert_eq!(load(&sources("127.0.0.1:2")).unwrap().config.listen, "127.0.0.1:2");
    insta::assert_snapshot!(load(&sources("nonsense")).unwrap_err().to_string(), @r#"listen: "nonsense" is not an address and port such as "127.0.0.1:8080" or "[::]:8080" (--listen)"#);
}

#[test]
fn free_keys_are_left_as_they_are() {
    let yaml = "agents: [{id: a, backend: {type: command, command: [x], env: {MY_VAR: a, my-var: b}}, \
                card: {extensions: [{uri: 'urn:x', params: {a_b: 1.5, type: t, none: null}}]}}]";
    let config = parse_yaml("r.yaml", yaml).unwrap();
    let Backend::Command { env, .. } = &config.agents[0].backend else { panic!("a command") };
    assert_eq!(env.keys().collect::<Vec<_>>(), ["MY_VAR", "my-var"]);
    let params = serde_json::to_value(&config.agents[0].card.extensions[0].params).unwrap();
    assert_eq!(params, serde_json::json!({"a_b": 1.5, "type": "t", "none": null}));
}

#[test]
fn a_key_without_a_value_is_not_set() {
    let config = parse_yaml("r.yaml", "limits:\npublic-url:\nlisten:\nagents:\n").unwrap();
    assert_eq!(to_yaml(&config), to_yaml(&Config::default()));
}

#[test]
fn agents_do_not_take_each_others_paths() {
    insta::assert_snapshot!(faults(
        "agents:
  - {id: a, backend: echo, tenants: [acme]}
  - {id: b, backend: echo, mount: /acme}
  - {id: c, backend: echo, mount: /}
  - {id: d, backend: echo, mount: /, host: d.example.test}
  - {id: e, backend: echo, mount: x, host: 'E.example:80'}
  - {id: f, backend: echo, mount: /team/tasks}
  - {id: g, backend: echo, mount: /../x}
  - {id: h, backend: echo, mount: /team/docs}
  - {id: i, backend: echo, mount: /acme/i, host: i.example.test}"
    ), @r#"
        agents[4].mount: "x" must begin with "/" (r.yaml)
        agents[4].host: "E.example:80" is not a host name in lower case, without scheme and port (r.yaml)
        agents[5].mount: "/team/tasks" holds "tasks", which is a path of Rialto's own (r.yaml)
        agents[6].mount: "/../x" must be segments of letters, digits, ".", "_", "~" and "-" (r.yaml)
        agents[0].tenants[0]: /acme would be this tenant, and leads to agent "b" already (r.yaml)
        agents[0].tenants[0]: /acme would be this tenant, and leads to agent "i" already (r.yaml)
        agents[2].mount: "/" belongs to agent "a" already; give one of the two another mount, or different hosts (r.yaml)
    "#);
}

#[test]
fn the_public_url_is_one_that_cards_can_carry() {
    for good in ["https://agents.example.com", "http://127.0.0.1:8080/", "https://example.com/agents"] {
        parse_yaml("r.yaml", &format!("public-url: {good}")).unwrap();
    }
    let bad = [
        "example.com",
        "ftp://example.com",
        "https://u:p@example.com",
        "https://example.com/?a",
        "https://example.com/a/",
        "https://example.com/a%20b",
    ];
    let all: Vec<_> = bad.iter().map(|url| faults(&format!("public-url: {url}"))).collect();
    insta::assert_snapshot!(all.join("\n"), @r#"
        public-url: must be a URL such as "https://agents.example.com" (r.yaml)
        public-url: must begin with http:// or https:// (r.yaml)
        public-url: must not hold a user name or password: every client sees it (r.yaml)
        public-url: must not have a query or fragment: paths are appended to it (r.yaml)
        public-url: must have a plain path without "/" at its end (r.yaml)
        public-url: must have a plain path without "/" at its end (r.yaml)
    "#);
}

#[test]
fn media_types_are_checked_in_their_form() {
    for good in ["text/plain", "*/*", "application/vnd.x+json; charset=utf-8", "a/b;c=\"d e\""] {
        parse_yaml("r.yaml", &format!("agents: [{{id: a, backend: echo, card: {{input-modes: ['{good}']}}}}]"))
            .unwrap();
    }
    for bad in ["text", "text/", "/plain", "text/pl ain", "a/b/c", "a/b;c", "*/json", ""] {
        let yaml = format!("agents: [{{id: a, backend: echo, card: {{input-modes: ['{bad}']}}}}]");
        assert!(faults(&yaml).contains("agents[0].card.input-modes[0]"), "{bad}");
    }
}

#[test]
fn what_a_cluster_needs_is_checked_and_no_password_is_quoted() {
    insta::assert_snapshot!(faults(
        "store: redis\ntask-store-listen: 127.0.0.1:8080\nadmin-listen: 0.0.0.0:1\nadmin-token: hunter2\n\
         redis: {prefix: \"a b\", shards: 0}\n\
         services: {task-store: [\"http://task-store\", \"https://a:1\", \"http://[::1]:7101/\", \"http://u@a:1\"]}\n"
    ), @r#"
        task-store-listen: 127.0.0.1:8080 is the address of `listen` or `admin-listen` already; task-store needs its own (r.yaml)
        admin-token: must be one line of at least 16 visible characters (r.yaml)
        redis.prefix: "a b" must not have braces, spaces or "@" (r.yaml)
        redis.shards: must be from 1 to 256 (r.yaml)
        services.task-store[0]: "http://task-store" is not a URL such as "http://task-store:7101" (r.yaml)
        services.task-store[1]: "https://a:1" is not a URL such as "http://task-store:7101"; https needs services.tls (r.yaml)
        services.task-store[3]: "http://u@a:1" is not a URL such as "http://task-store:7101" (r.yaml)
    "#);
    insta::assert_snapshot!(faults("services: {task-store: []}"), @"services.task-store: at least one URL is needed (r.yaml)");
    insta::assert_snapshot!(faults("services: {task-store: ['http://a:1', 'https://a:1'], tls: {cert: c, key: k}}"), @r#"
        services.tls.ca: is required (r.yaml)
        services.task-store[0]: "http://a:1" is not a URL such as "https://task-store:7101" (r.yaml)
    "#);
}

#[test]
fn what_is_printed_can_be_read_back_and_shows_no_secret() {
    let yaml = "agents: [{id: a, backend: {type: command, command: ['a b', 'true', '1', \"q\\\"'#\"], \
                env: {TOKEN: s3cr3t}}, card: {skills: [{id: s, name: n, description: d, tags: [t]}], \
                extensions: [{uri: 'urn:x', params: {a: [[1, {}], []]}}]}}]";
    let printed = to_yaml(&parse_yaml("r.yaml", yaml).unwrap());
    assert!(!printed.contains("s3cr3t"), "{printed}");
    insta::assert_snapshot!(printed);
    assert_eq!(to_yaml(&parse_yaml("printed.yaml", &printed).unwrap()), printed);
}

#[test]
fn the_collector_of_the_environment_is_used_where_the_file_names_none() {
    let endpoint = |yaml: &str, value: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("r.yaml");
        fs::write(&file, yaml).unwrap();
        let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(), value.to_owned())].into();
        let loaded = load(&Sources { files: vec![file], variables, ..Sources::default() });
        loaded.map(|loaded| loaded.config.telemetry.otlp_endpoint).map_err(|faults| faults.to_string())
    };
    assert_eq!(endpoint("{}", "http://c:4317"), Ok(Some("http://c:4317".to_owned())));
    assert_eq!(endpoint("{}", ""), Ok(None));
    let own = "telemetry: {otlp-endpoint: 'https://own:4317'}";
    assert_eq!(endpoint(own, "http://c:4317"), Ok(Some("https://own:4317".to_owned())));
    let fault = endpoint("{}", "collector:4317").unwrap_err();
    assert!(
        fault.starts_with("telemetry.otlp-endpoint: OTEL_EXPORTER_OTLP_ENDPOINT in the environment must"),
        "{fault}"
    );
    assert!(endpoint("telemetry: {otlp-endpoint: collector}", "").unwrap_err().contains("must be an http"));
    let secret = endpoint("{}", "http://user:hunter2@c:4317").unwrap_err();
    assert!(secret.contains("OTEL_EXPORTER_OTLP_HEADERS") && !secret.contains("hunter2"), "{secret}");
}

#[test]
fn every_key_is_documented() {
    const DOCS: &str = include_str!("../../../../docs/configuration.md");
    // One of each thing that may be in a list.
    let yaml = "agents: [{id: a, backend: {type: command, command: [x]}, card: {provider: {organization: o}, \
                skills: [{id: s, name: n, description: d, tags: [t]}], extensions: [{uri: 'urn:x'}]}}]";
    let model = "agents: [{id: a, backend: {type: openai, model: m, base-url: 'http://e.test'}}]";
    let tls = "services: {task-store: ['https://a:1'], tls: {cert: c, key: k, ca: a}}";
    let printed = [yaml, model, tls].map(|yaml| to_yaml(&parse_yaml("r.yaml", yaml).unwrap())).concat();
    for line in printed.lines() {
        let Some((key, _)) = line.trim_start_matches([' ', '-']).split_once(':') else { continue };
        if line.trim_start_matches([' ', '-']).starts_with(|c: char| c.is_ascii_lowercase()) && key != "type" {
            let as_key = [format!("`{key}`"), format!(".{key}`")];
            assert!(as_key.iter().any(|key| DOCS.contains(key.as_str())), "{key} is missing in docs/configuration.md");
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct Sealed {
    api_key: Secret,
    other_key: Option<Secret>,
    plain: String,
}

impl Default for Sealed {
    fn default() -> Self {
        Self { api_key: String::new().into(), other_key: None, plain: String::new() }
    }
}

fn sealed(yaml: &str) -> Result<Sealed, Faults> {
    let mut reading = Reading::new();
    reading.text("r.yaml", yaml, config::FileFormat::Yaml);
    reading.finish(|_| Vec::new())
}

#[test]
fn secrets_may_be_in_files_and_never_show() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    fs::write(&file, "00123\r\n").unwrap();
    let config = sealed(&format!("api-key: 's3 cr3t'\nother_key_file: {}", file.display())).unwrap();
    assert_eq!((config.api_key.expose(), config.other_key.as_ref().unwrap().expose()), ("s3 cr3t", "00123"));
    assert!(!format!("{config:?}").contains("123"), "{config:?}");
    assert_eq!(serde_json::to_string(&config.api_key).unwrap(), "\"(secret)\"");

    // A number has lost its zeros already, and the fault must not show it either.
    insta::assert_snapshot!(sealed("api-key: 00123\nother-key-file: /nowhere/key\nplain-file: x").unwrap_err(), @r#"
        api-key: expected a string (put it in quotes) (r.yaml)
        other-key-file: cannot read "/nowhere/key": No such file or directory (os error 2) (r.yaml)
        plain-file: unknown key; only secrets may be read from a file (r.yaml)
    "#);
    insta::assert_snapshot!(sealed("api-key: a\napi-key-file: b").unwrap_err(), @"api-key-file: api-key is set twice (r.yaml)");
}

#[test]
fn a_secret_in_a_variable_is_taken_to_the_letter() {
    let mut reading = Reading::new();
    reading.set(&["API_KEY"], "[00123] ", &Origin::Variable("RIALTO__API_KEY".into()));
    let config: Sealed = reading.finish(|_| Vec::new()).unwrap();
    assert_eq!(config.api_key.expose(), "[00123] ");
}

proptest! {
    /// Whatever is written, reading ends with a configuration or with faults that name something.
    #[test]
    fn no_configuration_makes_the_loader_hang_or_panic(
        lines in prop::collection::vec(
            ("(listen|limits|agents|store|stop-grace|x)", "(1|a|\\[\\]|\\{\\}|\\[1\\]|\\[\\{\\}\\]|\\[\\{id: 1\\}\\]|\\{parts: x, y: 1\\}|\\[\\{id: a, backend: \\{\\}, card: \\[\\]\\}\\]|null|-1s)"),
            0..6,
        ),
    ) {
        let lines: BTreeMap<_, _> = lines.into_iter().collect();
        let yaml: String = lines.iter().map(|(key, value)| format!("{key}: {value}\n")).collect();
        match parse_yaml("r.yaml", &yaml) {
            Ok(config) => prop_assert_eq!(to_yaml(&parse_yaml("p.yaml", &to_yaml(&config)).unwrap()), to_yaml(&config)),
            Err(Faults(faults)) => {
                prop_assert!(!faults.is_empty());
                prop_assert!(faults.iter().all(|fault| !fault.problem.is_empty() && !fault.to_string().contains('\n')));
            }
        }
    }
}
