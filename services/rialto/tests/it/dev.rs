use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use crate::process::{Dev, lines, rialto, run, scripted, shown};

#[test]
fn ready_is_the_only_line_on_stdout_and_names_the_real_port() {
    let dev = Dev::ephemeral();
    assert!(dev.url.starts_with("http://127.0.0.1:") && !dev.url.ends_with(":0"), "{}", dev.url);
    assert_eq!(dev.client(&["call", "hello"]).status.code(), Some(0));
    dev.signal(Signal::SIGTERM);
    let (code, rest, stderr) = dev.wait();
    assert_eq!((code, rest.as_str()), (0, ""), "{stderr}");
}

#[test]
fn the_commands_that_are_shown_work_as_they_are() {
    let dev = Dev::ephemeral();
    let url = dev.url.clone();
    let run = |command: &str| Command::new("bash").args(["-c", command]).env_remove("RIALTO_URL").output().unwrap();
    dev.signal(Signal::SIGTERM);
    let (_, _, stderr) = dev.wait();
    let hints: Vec<_> = stderr.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    assert_eq!(hints.len(), 3, "{stderr}");

    let dev = Dev::start(&["--ephemeral", "--listen", url.strip_prefix("http://").unwrap()]);
    for hint in hints {
        let output = run(hint);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("hello") && text.contains("TASK_STATE_COMPLETED"), "{hint}\n{text}");
    }
    drop(dev);
}

#[test]
fn a_log_of_json_lines_has_no_other_lines() {
    let dev = |listen: &str| {
        let ports = ["dev", "--ephemeral", "--admin-listen", "127.0.0.1:0", "--listen", listen];
        let mut command = rialto(&ports);
        command.env("RIALTO_LOG_FORMAT", "json").env("RIALTO_LOG", "debug").env("RIALTO_NONSENSE", "1");
        command
    };
    let logged = |stderr: &str| -> Vec<serde_json::Value> {
        stderr.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    };
    let has = |logged: &[serde_json::Value], level: &str, message: &str| {
        let text = |line: &serde_json::Value| line["message"].as_str().unwrap_or_default().contains(message);
        logged.iter().any(|line| line["level"] == level && text(line) && line["timestamp"].is_string())
    };
    let running = Dev::spawn(dev("127.0.0.1:0"));
    let taken = running.url.strip_prefix("http://").unwrap();
    let second = logged(&String::from_utf8(dev(taken).output().unwrap().stderr).unwrap());
    assert!(has(&second, "ERROR", "is used by another process"), "{second:?}");
    running.signal(Signal::SIGTERM);
    let (code, _, stderr) = running.wait();
    assert_eq!(code, 0, "{stderr}");
    assert!(has(&logged(&stderr), "WARN", "RIALTO_NONSENSE"), "{stderr}");
}

#[test]
fn ctrl_c_ends_within_the_grace_with_code_0_even_in_the_middle_of_a_turn() {
    let folder = tempfile::tempdir().unwrap();
    let config = scripted(folder.path(), "stop-grace: 6s");
    let data = folder.path().join("data");
    let dev = Dev::start(&["--config", &config, "--data", data.to_str().unwrap()]);
    let (mut client, mut stdout) = dev.client_started(&["stream", "sleep:60"]);
    wait_for(&mut stdout, "TASK_STATE_WORKING");
    let started = Instant::now();
    dev.signal(Signal::SIGINT);
    let (code, _, stderr) = dev.wait();
    assert_eq!(code, 0, "{stderr}");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}\n{stderr}", started.elapsed());
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn a_second_signal_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = scripted(folder.path(), "stop-grace: 60s");
    for (signal, expected) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let dev = Dev::start(&["--config", &config, "--ephemeral"]);
        let (mut client, mut stdout) = dev.client_started(&["stream", "sleep:60"]);
        wait_for(&mut stdout, "TASK_STATE_WORKING");
        let started = Instant::now();
        dev.signal(signal);
        // The second one counts once the first is handled; until then they may be one to the kernel.
        while dev.client(&["card", "--timeout", "1s"]).status.success() {}
        dev.signal(signal);
        assert_eq!(dev.wait().0, expected);
        assert!(started.elapsed() < Duration::from_secs(30));
        client.kill().unwrap();
        client.wait().unwrap();
    }
}

#[test]
fn a_busy_port_is_one_clear_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let replace = [(address.as_str(), "ADDRESS")];
    let public = run(&["dev", "--ephemeral", "--admin-listen", "127.0.0.1:0", "--listen", &address]);
    insta::assert_snapshot!(shown(&public, &replace), @r"
        exit 2
        ---
        error: ADDRESS is used by another process; stop that one, or choose another address with --listen
    ");
    let admin = run(&["dev", "--ephemeral", "--listen", "127.0.0.1:0", "--admin-listen", &address]);
    insta::assert_snapshot!(shown(&admin, &replace), @r"
        exit 2
        ---
        error: ADDRESS is used by another process; stop that one, or choose another address with --admin-listen
    ");
}

#[test]
fn a_bad_address_is_one_clear_line() {
    insta::assert_snapshot!(shown(&run(&["dev", "--ephemeral", "--listen", "127.0.0.1:99999"]), &[]), @r#"
        exit 2
        ---
        error: listen: "127.0.0.1:99999" is not an address and port such as "127.0.0.1:8080" or "[::]:8080" (--listen)
    "#);
    insta::assert_snapshot!(shown(&run(&["dev", "--ephemeral", "--admin-listen", "0.0.0.0:1"]), &[]), @r"
        exit 2
        ---
        error: admin-listen: 0.0.0.0:1 is reachable from other machines, which needs an admin-token-file (--admin-listen)
    ");
    // An address of documentation, which no machine has.
    let foreign = run(&["dev", "--ephemeral", "--admin-listen", "127.0.0.1:0", "--listen", "192.0.2.1:80"]);
    insta::assert_snapshot!(shown(&foreign, &[]), @r"
        exit 2
        ---
        error: listen: cannot listen on 192.0.2.1:80: Cannot assign requested address (os error 99); choose another address with --listen
    ");
}

#[test]
fn a_folder_that_another_process_uses_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().to_str().unwrap();
    let dev = Dev::start(&["--data", data]);
    let second = run(&["dev", "--data", data, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    insta::assert_snapshot!(shown(&second, &[(data, "DIR")]), @r"
        exit 2
        ---
        error: the data folder DIR is used by another process; stop that one, or give this one a folder of its own
    ");
    assert_eq!(dev.client(&["call", "still here"]).status.code(), Some(0));
}

#[test]
fn a_folder_that_cannot_be_used_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let inside = file.join("data");
    let ports = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let dev = |data: &str| run(&[&["dev", "--data", data], ports.as_slice()].concat());
    insta::assert_snapshot!(shown(&dev(inside.to_str().unwrap()), &[(place, "DIR")]), @r"
        exit 2
        ---
        error: cannot write to the data folder DIR/file/data: Not a directory (os error 20); create it for this user, or choose another one
    ");
    let sealed = folder.path().join("sealed");
    fs::create_dir(&sealed).unwrap();
    fs::set_permissions(&sealed, fs::Permissions::from_mode(0o500)).unwrap();
    // Root may write here all the same.
    if fs::write(sealed.join("probe"), "").is_err() {
        let text = shown(&dev(sealed.to_str().unwrap()), &[(place, "DIR")]);
        assert!(text.starts_with("exit 2\n---\nerror: cannot write to the data folder DIR/sealed: "), "{text}");
    }
    // The same for root, who may write everywhere but to a read-only file system.
    let output = dev("/proc/rialto");
    assert_eq!((output.status.code(), output.stderr.iter().filter(|byte| **byte == b'\n').count()), (Some(2), 1));

    let homeless = rialto(&[["dev"].as_slice(), ports.as_slice()].concat())
        .env_remove("HOME")
        .env_remove("XDG_DATA_HOME")
        .output();
    insta::assert_snapshot!(shown(&homeless.unwrap(), &[]), @r"
        exit 2
        ---
        error: there is no home folder to keep tasks in; use --data DIR or --ephemeral
    ");
}

#[test]
fn tasks_are_there_after_kill_9_and_a_restart_on_the_same_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = scripted(folder.path(), "");
    let data = folder.path().join("data");
    let arguments = ["--config", config.as_str(), "--data", data.to_str().unwrap()];
    let dev = Dev::start(&arguments);
    let done = lines(&dev.client(&["call", "echo one"]))[0]["task"].clone();
    let (mut client, mut stdout) = dev.client_started(&["stream", "sleep:2"]);
    let line = wait_for(&mut stdout, "TASK_STATE_WORKING");
    let running = serde_json::from_str::<serde_json::Value>(&line).unwrap()["statusUpdate"]["taskId"].clone();
    dev.signal(Signal::SIGKILL);
    dev.wait();
    client.kill().unwrap();
    client.wait().unwrap();

    let dev = Dev::start(&arguments);
    assert_eq!(lines(&dev.client(&["task", "get", done["id"].as_str().unwrap()]))[0], done);
    let watched = dev.client(&["task", "watch", running.as_str().unwrap(), "--timeout", "30s"]);
    assert_eq!(watched.status.code(), Some(0), "{}", shown(&watched, &[]));
    let last = lines(&watched).pop().unwrap();
    assert!(last.to_string().contains("TASK_STATE_COMPLETED"), "{last}");
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_raised() {
    let mut command = Command::new("bash");
    let binary = env!("CARGO_BIN_EXE_rialto");
    let dev = format!("ulimit -Sn 64; exec {binary} dev --ephemeral --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0");
    command.args(["-c", &dev]).stdin(Stdio::null());
    let dev = Dev::spawn(command);
    let address = dev.url.strip_prefix("http://").unwrap();
    let connections: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    assert_eq!(dev.client(&["call", "hello"]).status.code(), Some(0));
    drop(connections);
}

/// Reads lines until one holds `text`.
fn wait_for(lines: &mut impl std::io::BufRead, text: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "ended before {text}");
        if line.contains(text) {
            return line;
        }
    }
}
