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
    insta::assert_snapshot!(shown(&run(&["config", "check", file]), &place), @"");
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
    insta::assert_snapshot!(shown(&run(&["config", "check", file]), &place), @"");
    let printed = rialto(&["config", "print", file]).env("RIALTO__STOP_GRACE", "3s").output().unwrap();
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("listen: \"127.0.0.1:9\"\n") && text.contains("stop-grace: \"3s\"\n"), "{text}");
}

#[test]
fn variables_that_mean_nothing_are_mentioned() {
    let mut command = rialto(&["config", "print"]);
    let output = command.env("RIALTO_LISTEN", "x").env("RIALTO__LIMITS__PART", "3").output().unwrap();
    insta::assert_snapshot!(shown(&output, &[]), @"");
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
