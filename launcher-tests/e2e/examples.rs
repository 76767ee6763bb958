//! Every example does what its header comment says, and the documentation repeats it.
//!
//! The header of an example contains a command and its output. The test runs this command unchanged, with a
//! PATH that begins with the example and the launcher.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use convoke_testkit::programs::{repository_root, user_program};

/// Maximum number of lines of an example.
const LINES: usize = 99;

/// The examples that consist of one file.
const EXAMPLES: [&str; 8] = ["ddp", "elastic", "first", "groups", "p2p", "pipeline", "ring", "sgd"];

fn source(name: &str) -> String {
    fs::read_to_string(repository_root().join(format!("src/examples/{name}.rs"))).unwrap()
}

/// Returns the command in the header of an example, and the lines that it prints.
fn transcript(name: &str) -> (String, Vec<String>) {
    let text = source(name);
    let head = text
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line));
    let mut block = head.skip_while(|line| *line != "```text").skip(1).take_while(|line| *line != "```");
    let command = block.next().and_then(|line| line.strip_prefix("$ "));
    let command = command.unwrap_or_else(|| panic!("{name}: no command in its head"));
    (command.to_owned(), block.map(str::to_owned).collect())
}

#[test]
fn every_example_prints_its_documented_output() {
    for name in EXAMPLES {
        let folder = tempfile::Builder::new().prefix("convoke-examples-").tempdir().unwrap();
        let (bin, work) = (folder.path().join("bin"), folder.path().join("work"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&work).unwrap();
        symlink(user_program("convoke"), bin.join("convoke")).unwrap();
        for name in EXAMPLES {
            symlink(user_program(name), bin.join(name)).unwrap();
        }
        let mut path = OsString::from(&bin);
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());

        let (command, expected) = transcript(name);
        let output = Command::new("timeout")
            .args(["60", "sh", "-c", &command])
            .env("PATH", path)
            .env("TMPDIR", folder.path())
            .current_dir(&work)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{command}: {}\n{out}{err}", output.status);
        assert_eq!(out.lines().collect::<Vec<_>>(), expected, "{command}\n{err}");
    }
}

#[test]
fn examples_are_short() {
    for name in EXAMPLES {
        let lines = source(name).lines().count();
        assert!(lines <= LINES, "{name} has {lines} lines");
    }
}

#[test]
fn docs_contain_every_example_with_its_command() {
    let book = fs::read_to_string(repository_root().join("docs/guides/examples.md")).unwrap();
    for name in EXAMPLES {
        let (command, expected) = transcript(name);
        let transcript = format!("$ {command}\n{}\n", expected.join("\n"));
        assert!(book.contains(&transcript), "docs/guides/examples.md does not have:\n{transcript}");
    }
    let is_example = |name: &String| name != "lib";
    let files =
        fs::read_dir(repository_root().join("src/examples")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let files: BTreeSet<String> = files
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .filter(is_example)
        .collect();
    let known: BTreeSet<String> = EXAMPLES.iter().map(|name| (*name).to_owned()).collect();
    // `scripts/check` runs the examples that use another framework, so no test here builds them.
    let frameworks = BTreeSet::from(["burn".to_owned(), "candle".to_owned()]);
    assert_eq!(files.difference(&frameworks).cloned().collect::<BTreeSet<_>>(), known);
}
