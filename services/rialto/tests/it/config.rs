use std::fs;

use crate::process::{rialto, run, shown};

#[test]
fn every_fault_of_a_file_is_printed_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.yaml");
    fs::write(&file, "lisen: x\nstop-grace: soon\nagents: [{id: A, backend: echo}, {id: b, backend: {type: command}}]")
        .unwrap();
    let file = file.to_str().unwrap();
    let place = [(folder.path().to_str().unwrap(), "DIR")];
    insta::assert_snapshot!(shown(&run(&["config", "check", file]), &place), @r#"
        exit 2
        ---
        error: lisen: unknown key; did you mean listen? (DIR/r.yaml)
        error: agents[1].backend.command: is required (DIR/r.yaml)
        error: stop-grace: "soon" is not a time such as "30s" or "10m" (DIR/r.yaml)
        error: agents[0].id: "A" must be 1 to 32 of a-z, 0-9 and "-" (DIR/r.yaml)
        error: agents[1].mount: "/" belongs to agent "A" already; give one of the two another mount, or different hosts (DIR/r.yaml)
    "#);
    // The same from every command that reads it.
    assert_eq!(run(&["config", "print", file]).stderr, run(&["config", "check", file]).stderr);
    assert_eq!(run(&["dev", "--ephemeral", "--config", file]).stderr, run(&["config", "check", file]).stderr);
}

#[test]
fn a_good_file_is_said_to_be_good_and_printed_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("r.yaml");
    fs::write(&file, "listen: 127.0.0.1:9").unwrap();
    let file = file.to_str().unwrap();
    let place = [(folder.path().to_str().unwrap(), "DIR")];
    insta::assert_snapshot!(shown(&run(&["config", "check", file]), &place), @r"
        exit 0
        DIR/r.yaml: no faults
        ---
    ");
    let printed = rialto(&["config", "print", file]).env("RIALTO__STOP_GRACE", "3s").output().unwrap();
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("listen: \"127.0.0.1:9\"\n") && text.contains("stop-grace: \"3s\"\n"), "{text}");
}

#[test]
fn variables_that_mean_nothing_are_mentioned() {
    let mut command = rialto(&["config", "print"]);
    let output = command.env("RIALTO_LISTEN", "x").env("RIALTO__LIMITS__PART", "3").output().unwrap();
    insta::assert_snapshot!(shown(&output, &[]), @r"
        exit 2
        ---
        error: limits.part: unknown key; did you mean parts? (RIALTO__LIMITS__PART in the environment)
    ");
}

#[test]
fn help_and_version_say_what_there_is() {
    insta::assert_snapshot!(shown(&run(&["--help"]), &[]));
    insta::assert_snapshot!(shown(&run(&["dev", "--help"]), &[]));
    insta::assert_snapshot!(shown(&run(&["call", "--help"]), &[]));
    insta::assert_snapshot!(shown(&run(&["task", "--help"]), &[]));
    let version = concat!("exit 0\nrialto ", env!("CARGO_PKG_VERSION"), "\n---\n");
    assert_eq!(shown(&run(&["--version"]), &[]), version);
}
