//! Rules of the source tree that no compiler checks: allowed dependencies, allowed places for the clock and
//! `unsafe`, and working links in documents. `docs/internals/architecture.md` gives the reason for each
//! rule.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // a broken expectation ends the test

mod circles;
mod extending;
mod layers;
mod names;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use source::is_word_part;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Files that may contain `unsafe` code, tests excluded. They make system calls without a safe wrapper, or
/// share memory. A new entry needs a reason that a reviewer accepts. An entry whose file has no `unsafe`
/// must go.
const UNSAFE_FILES: &[&str] = &[
    // The agent channel takes its descriptor from a number in the environment.
    "src/env/channel.rs",
    // The progress thread accesses buffers that the caller lends to it.
    "src/comm/buffer/borrowed.rs",
    "src/comm/buffer/send_recv.rs",
    "src/comm/buffer/slice.rs",
    "src/comm/engine/exclusive.rs",
    "src/comm/engine/shared.rs",
    // Pending operations borrow buffers; their handles, or the scope that waits, keep the buffers alive.
    "src/comm/api/op/start.rs",
    "src/comm/api/group/work.rs",
    // The program describes its memory by address and length.
    "src/comm/api/raw.rs",
    "src/comm/api/group/adopt.rs",
    // C programs pass addresses and handles, and call functions by name.
    "src/capi/call.rs",
    "src/capi/collectives.rs",
    "src/capi/group.rs",
    "src/capi/init.rs",
    "src/capi/memory.rs",
    "src/capi/pointers.rs",
    "src/capi/probe.rs",
    "src/capi/status.rs",
    "src/capi/store.rs",
    "src/capi/table.rs",
    "src/capi/work.rs",
    // Python code passes addresses of arrays.
    "src/python/group.rs",
    // The file asks the interpreter whether a signal came.
    "src/python/interrupt.rs",
    // The file makes an ioctl.
    "src/comm/transport/links/tcp.rs",
    // The file registers a handler of `exit`, which stops threads that use CUDA.
    "src/comm/api/device/process_exit.rs",
    // The file registers a fork handler, which closes descriptors.
    "src/comm/transport/links/fork.rs",
    // Ranks share this memory, and vectorized loops read it.
    "src/comm/collectives/kernels/non_temporal.rs",
    "src/comm/collectives/kernels/simd.rs",
    "src/comm/shm/region.rs",
    "src/comm/shm/write.rs",
    "src/comm/fence.rs",
    "src/comm/shm/segment.rs",
    // The files call functions of libraries that are opened at run time.
    "src/comm/nccl/library.rs",
    "src/comm/nccl/functions.rs",
    "src/comm/nccl/communicator.rs",
    "src/comm/nccl/free.rs",
    "src/comm/api/device/driver.rs",
    // Devices access their memory after the call has returned. The host memory is pinned.
    "src/comm/api/device/batch/mod.rs",
    "src/comm/api/device/raw.rs",
    "src/comm/api/device/registered.rs",
    "src/comm/api/device/enqueue.rs",
    "src/comm/api/device/join.rs",
    "src/comm/api/device/events.rs",
    "src/comm/api/device/staged.rs",
    // The compiler does not check the arguments of kernels.
    "src/train/device/add.rs",
    "src/examples/digits/device/kernels.rs",
    "src/examples/digits/device/mod.rs",
    "src/tools/gpu_check/kernels.rs",
    "src/tools/gpu_check/order.rs",
    // The file accesses a mapped file as atomics.
    "src/comm/flight/map.rs",
    // The file reads the processor's time stamp counter.
    "src/comm/flight/clock.rs",
    // The file calls functions of NVML.
    "src/launcher/gpus/nvml.rs",
    // The file forks a child that calls NVML.
    "src/launcher/child.rs",
    // The launcher calls fork and exec, and a few system calls between the two.
    "src/launcher/os.rs",
];

/// Reasons for which production code calls `unwrap_or_default`, with the number of calls in each file. A
/// state that cannot be is no reason: make it unrepresentable, or write `expect("why it cannot be")`. A state
/// that input, a peer or the system can cause is a typed error.
const DEFAULTS: &[(&str, &[(&str, usize)])] = &[
    (
        "a file of /proc, /sys or /etc that is absent or unreadable has nothing to say",
        &[
            ("src/launcher/config/topology/mod.rs", 3),
            ("src/launcher/gpus/evidence.rs", 1),
            ("src/launcher/host_name.rs", 1),
            ("src/launcher/logs/tail.rs", 1),
            ("src/launcher/rendezvous/port_owner.rs", 1),
            ("src/tools/perf/memory.rs", 1),
        ],
    ),
    (
        "a variable, flag or setting that was not given is empty or zero",
        &[
            ("src/comm/api/group/subgroup.rs", 2),
            ("src/comm/api/session/mod.rs", 3),
            ("src/env/worker_env.rs", 1),
            ("src/launcher/agent/start.rs", 2),
            ("src/launcher/cli/parsed_args.rs", 1),
            ("src/launcher/config/accelerators/mod.rs", 1),
            ("src/launcher/config/file.rs", 1),
            ("src/launcher/config/rendezvous_flags.rs", 1),
            ("src/launcher/fault.rs", 1),
            ("src/launcher/hosts/flags.rs", 1),
            ("src/launcher/logs/mod.rs", 1),
            ("src/launcher/scheduler/slurm.rs", 1),
            ("src/tools/perf/error.rs", 1),
            ("src/tools/perf/plot.rs", 2),
            ("src/tools/perf/run.rs", 1),
        ],
    ),
    (
        "an absent key, entry or list is an empty one",
        &[
            ("src/comm/api/group/objects.rs", 1),
            ("src/comm/api/group/shrink.rs", 1),
            ("src/comm/shm/bootstrap/leader.rs", 1),
            ("src/launcher/agent/reporting.rs", 1),
            ("src/launcher/config/accelerators/mod.rs", 1),
            ("src/launcher/rendezvous/elastic/registry/file.rs", 1),
            ("src/launcher/rendezvous/mod.rs", 1),
            ("src/launcher/report/short.rs", 2),
            ("src/recorder/layout/groups.rs", 1),
            ("src/recorder/names.rs", 1),
            ("src/store/answer.rs", 1),
            ("src/store/file/mod.rs", 2),
            ("src/store/state/waits.rs", 2),
        ],
    ),
    (
        "an empty list or text has no first word and no largest number",
        &[
            ("src/comm/api/group/subgroup.rs", 2),
            ("src/comm/transport/links/tcp.rs", 1),
            ("src/launcher/agent/start_failure.rs", 1),
            ("src/launcher/cli/grammar.rs", 1),
            ("src/launcher/config/endpoint.rs", 1),
            ("src/launcher/config/file.rs", 2),
            ("src/launcher/config/machine.rs", 1),
            ("src/launcher/membership/record.rs", 1),
            ("src/launcher/report/short.rs", 1),
            ("src/tools/perf/pairs.rs", 1),
            ("src/tools/perf/run.rs", 1),
            ("src/tools/perf/stats.rs", 1),
            ("src/train/trace.rs", 1),
        ],
    ),
    (
        "a host without a name, or a name that does not resolve, is told from no other",
        &[
            ("src/comm/flight/mod.rs", 1),
            ("src/comm/api/session/rendezvous.rs", 1),
            ("src/launcher/rendezvous/elastic/endpoint.rs", 1),
        ],
    ),
    (
        "a clock before its beginning counts as at its beginning",
        &[
            ("src/launcher/flight.rs", 1),
            ("src/launcher/gpus/evidence.rs", 1),
            ("src/launcher/rendezvous/elastic/session.rs", 2),
            ("src/tools/flight/main.rs", 1),
            ("src/train/trace.rs", 1),
        ],
    ),
];

/// Crates that a worker links. They must stay small and must not touch the worker's runtime or signals.
const WORKER_CRATES: &[&str] = &[
    "convoke-env",
    "convoke-recorder",
    "convoke-store",
    "convoke-comm",
    "convoke-train",
    "convoke-capi",
    "convoke-examples",
];
/// Crates that no worker may link, directly or indirectly.
const LAUNCHER_ONLY_CRATES: &[&str] = &["clap", "tokio", "etcd-client", "convoke"];

/// Crates that run protoc at build time.
const PROTOC_USERS: &[&str] = &["prost-build", "tonic-prost-build", "protobuf-codegen"];

/// Folders in which every file must be pure, with or without the mark.
const PURE_FOLDERS: &[&str] = &["src/comm/collectives/plan"];
/// Names that a file marked `Pure` must not contain: clocks, the system, other threads.
const IMPURE_PATTERNS: &[&str] = &[
    "Instant::now",
    "SystemTime::now",
    "elapsed()",
    "sleep(",
    "fs::",
    "net::",
    "thread::",
    "env::var",
    "process::Command",
    "File::",
    "TcpStream",
    "UnixStream",
    "OwnedFd",
    "nix::unistd",
    "nix::sys::socket",
    "nix::fcntl",
    "nix::poll",
    "rustix::",
    "libc::",
    "socket2",
    "tokio",
    "getrandom",
    "stdout()",
    "stderr()",
];

/// Maximum lines of one file, tests excluded. The test warns above the first limit and fails above the
/// second.
const LONG_FILE_LINES: usize = 400;
const TOO_LONG_FILE_LINES: usize = 450;

fn root() -> PathBuf {
    convoke_testkit::programs::repository_root()
}

/// Returns the files of the project in order, relative to the root, without files that git ignores.
fn files() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).unwrap();
    // git also lists a file that is deleted in the work tree but still in the index.
    names.split_terminator('\0').map(PathBuf::from).filter(|path| root().join(path).is_file()).collect()
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn with_extension(extension: &str) -> impl Iterator<Item = (PathBuf, String)> {
    files().into_iter().filter(move |path| path.extension().is_some_and(|e| e == extension)).map(|path| {
        let text = read(&path);
        (path, text)
    })
}

/// Returns the lines before the test module at the end of the file.
fn without_tests(text: &str) -> impl Iterator<Item = &str> {
    let lines: Vec<&str> = text.lines().collect();
    let end = (0..lines.len())
        .find(|&i| lines[i] == "#[cfg(test)]" && lines.get(i + 1).is_some_and(|next| next.ends_with('{')))
        .unwrap_or(lines.len());
    lines.into_iter().take(end)
}

/// Returns the code of a line without a trailing comment. A `//` inside a string also ends the code; this is
/// good enough here.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(start, _)| {
        !line[..start].ends_with(is_word_part) && !line[start + word.len()..].starts_with(is_word_part)
    })
}

/// Returns true if `line` contains `text` at the start of a word.
fn has_at_word_start(line: &str, text: &str) -> bool {
    line.match_indices(text).any(|(start, _)| !line[..start].ends_with(is_word_part))
}

fn is_test_file(path: &Path) -> bool {
    path.starts_with("launcher-tests")
        || path.file_name().is_some_and(|name| name == "tests.rs" || name == "build.rs")
        || path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "testing")
}

fn assert_none(found: &[String], rule: &str) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

/// Normal and build dependencies of each package by name, from `cargo metadata`.
struct Dependencies(BTreeMap<String, BTreeSet<String>>);

impl Dependencies {
    fn load() -> Self {
        let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["metadata", "--format-version=1", "--locked", "--all-features", "--filter-platform"])
            .arg(format!("{}-unknown-linux-gnu", env::consts::ARCH))
            .current_dir(root())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let names: BTreeMap<&str, &str> = list(&metadata["packages"])
            .map(|package| (text(&package["id"]), text(&package["name"])))
            .collect();
        let edges = list(&metadata["resolve"]["nodes"]).map(|node| {
            let needed = list(&node["deps"])
                .filter(|dep| list(&dep["dep_kinds"]).any(|kind| kind["kind"] != "dev"))
                .map(|dep| names[text(&dep["pkg"])].to_owned());
            (names[text(&node["id"])].to_owned(), needed.collect())
        });
        Self(edges.collect())
    }

    /// Returns a chain of dependencies from one package to another, if one exists.
    fn path(&self, from: &str, to: &str) -> Option<String> {
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = vec![from];
        while let Some(name) = queue.pop() {
            for next in self.0.get(name).into_iter().flatten() {
                if next != from && !came_from.contains_key(next.as_str()) {
                    came_from.insert(next, name);
                    queue.push(next);
                }
            }
        }
        let mut chain = vec![to];
        while let Some(&before) = came_from.get(chain.last()?) {
            chain.push(before);
        }
        chain.reverse();
        (chain.len() > 1).then(|| chain.join(" -> "))
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().unwrap().iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn worker_libraries_do_not_depend_on_launcher_libraries() {
    let dependencies = Dependencies::load();
    let mut found = Vec::new();
    for worker in WORKER_CRATES {
        assert!(dependencies.0.contains_key(*worker), "no crate {worker}");
        found.extend(LAUNCHER_ONLY_CRATES.iter().filter_map(|other| dependencies.path(worker, other)));
    }
    assert_none(&found, "a worker must not link these");
}

#[test]
fn launcher_and_runtime_do_not_depend_on_each_other() {
    let dependencies = Dependencies::load();
    let pairs = [
        ("convoke", "convoke-comm"),
        ("convoke-comm", "convoke"),
        ("convoke-env", "convoke-store"),
        ("convoke-recorder", "convoke-store"),
    ];
    let found: Vec<String> = pairs.iter().filter_map(|(from, to)| dependencies.path(from, to)).collect();
    assert_none(&found, "dependencies point one way only");
}

#[test]
fn rules_for_slow_tests_name_existing_tests() {
    let rules = fs::read_to_string(root().join(".config/nextest.toml")).unwrap();
    let modules: Vec<&str> =
        rules.split("test(/^").skip(1).map(|rest| rest.split("::").next().unwrap()).collect();
    assert!(!modules.is_empty(), "no rule of .config/nextest.toml begins with test(/^MODULE::");
    for module in modules {
        let has_module = with_extension("rs").any(|(path, _)| path.ends_with(format!("{module}.rs")));
        assert!(has_module, ".config/nextest.toml has a rule for {module}::, and no file is {module}.rs");
    }
}

#[test]
fn launcher_without_etcd_builds_without_protoc() {
    let builders = |features: &[&str]| {
        let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["tree", "--locked", "--package=convoke", "--edges=normal,build", "--prefix=none"])
            .args(features)
            .current_dir(root())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8(output.stdout).unwrap();
        let uses_protoc = |line: &&str| PROTOC_USERS.contains(&line.split(' ').next().unwrap());
        tree.lines().filter(uses_protoc).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_none(&builders(&["--no-default-features"]), "these need protoc; they belong to the feature etcd");
    assert!(!builders(&[]).is_empty(), "no crate of PROTOC_USERS builds etcd's client: is the list right?");
}

#[test]
fn pure_files_use_no_clock_and_no_system_calls() {
    let mut found = Vec::new();
    let mut pure_count = 0;
    for (path, text) in with_extension("rs") {
        let marked = text
            .lines()
            .take_while(|line| line.starts_with("//!"))
            .any(|l| l.contains("Pure:") || l.contains("Pure."));
        if !marked && (!PURE_FOLDERS.iter().any(|folder| path.starts_with(folder)) || is_test_file(&path)) {
            continue;
        }
        pure_count += 1;
        for (number, line) in without_tests(&text).enumerate() {
            for name in IMPURE_PATTERNS.iter().filter(|name| has_at_word_start(code(line), name)) {
                found.push(format!("{}:{}: {name}", path.display(), number + 1));
            }
        }
    }
    assert_none(&found, "a file that is marked `Pure` decides only; time and I/O are given to it");
    assert!(pure_count > 10, "only {pure_count} files are marked: does the mark still read so?");
}

#[test]
fn unsafe_code_appears_only_in_allowed_files() {
    let with_unsafe: BTreeSet<String> = with_extension("rs")
        .filter(|(path, _)| !is_test_file(path))
        .filter(|(_, text)| text.lines().any(|line| has_word(code(line), "unsafe")))
        .map(|(path, _)| path.display().to_string())
        .collect();
    let fence: BTreeSet<String> = UNSAFE_FILES.iter().map(|path| (*path).to_owned()).collect();
    let outside: Vec<String> = with_unsafe.difference(&fence).cloned().collect();
    assert_none(&outside, "`unsafe` outside the fence (UNSAFE_FILES in tidy/main.rs)");
    let needless: Vec<String> = fence.difference(&with_unsafe).cloned().collect();
    assert_none(&needless, "entries of UNSAFE_FILES without `unsafe`");
}

/// Returns true for code that users run: neither tests nor examples.
fn is_production(path: &Path) -> bool {
    let folders = ["src/examples", "src/frameworks", "src/comm/programs"];
    path.starts_with("src") && !is_test_file(path) && !folders.iter().any(|folder| path.starts_with(folder))
}

#[test]
fn each_silent_default_has_a_reason() {
    let mut allowed: BTreeMap<&str, usize> = BTreeMap::new();
    for (path, count) in DEFAULTS.iter().flat_map(|(_, files)| *files) {
        *allowed.entry(path).or_default() += count;
    }
    let mut found = Vec::new();
    for (path, text) in with_extension("rs").filter(|(path, _)| is_production(path)) {
        let count = without_tests(&text).filter(|line| code(line).contains(".unwrap_or_default()")).count();
        let path = path.display().to_string();
        let expected = allowed.remove(path.as_str()).unwrap_or(0);
        if count != expected {
            found.push(format!("{path}: {count} calls, DEFAULTS in tidy.rs lists {expected}"));
        }
    }
    found.extend(allowed.keys().map(|path| format!("{path}: in DEFAULTS, but there is no such file")));
    assert_none(&found, "`unwrap_or_default` without a reason (DEFAULTS in tidy.rs)");
}

#[test]
fn compiled_kernels_match_their_sources() {
    let mut stale = Vec::new();
    for (path, text) in with_extension("cu") {
        let compiled = fs::read_to_string(root().join(path.with_extension("ptx"))).unwrap_or_default();
        let hash: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        let first = format!("// Made by scripts/kernels of a source with SHA-256 {hash}.");
        if compiled.lines().next() != Some(&first) {
            stale.push(path.display().to_string());
        }
    }
    assert_none(&stale, "kernels that changed since they were compiled: run scripts/kernels");
}

#[test]
fn every_crate_inherits_version_and_lints_from_the_workspace() {
    let mut found = Vec::new();
    for (path, text) in with_extension("toml").filter(|(path, _)| path.ends_with("Cargo.toml")) {
        // A Cargo.toml with its own workspace has its own lints and versions.
        if text.lines().any(|line| line.starts_with("[workspace")) {
            continue;
        }
        for key in ["version", "edition", "rust-version", "license", "publish"] {
            if !text.lines().any(|line| line == format!("{key}.workspace = true")) {
                found.push(format!("{}: {key}.workspace = true", path.display()));
            }
        }
        if !text.contains("[lints]\nworkspace = true\n") {
            found.push(format!("{}: [lints] workspace = true", path.display()));
        }
        let own_version = |line: &&str| line.contains("version = \"") && !line.starts_with("rust-version");
        found.extend(text.lines().filter(own_version).map(|line| format!("{}: {line}", path.display())));
    }
    assert_none(&found, "versions and lints stand in the workspace's Cargo.toml, once");
}

#[test]
fn files_stay_within_the_line_limit() {
    let mut found = Vec::new();
    for (path, text) in with_extension("rs").filter(|(path, _)| !is_test_file(path)) {
        let lines = without_tests(&text).count();
        if lines > TOO_LONG_FILE_LINES {
            found.push(format!("{}: {lines} lines", path.display()));
        } else if lines > LONG_FILE_LINES {
            eprintln!("warning: {}: {lines} lines", path.display());
        }
    }
    assert_none(&found, "split these files");
}

#[test]
fn scripts_are_executable_and_document_their_usage() {
    let mut found = Vec::new();
    for path in files().into_iter().filter(|path| path.starts_with("scripts") || path.starts_with(".ci")) {
        let text = read(&path);
        let head: Vec<&str> = text.lines().skip(1).take_while(|line| line.starts_with('#')).collect();
        let mode = fs::metadata(root().join(&path)).unwrap().permissions().mode();
        let shown = path.display();
        if mode & 0o111 != 0o111 {
            found.push(format!("{shown}: not executable"));
        }
        if !text.starts_with("#!/usr/bin/env ") {
            found.push(format!("{shown}: no #!/usr/bin/env line"));
        }
        if text.starts_with("#!/usr/bin/env bash") && !text.contains("\nset -euo pipefail\n") {
            found.push(format!("{shown}: no set -euo pipefail"));
        }
        let usage = path.starts_with(".ci") || head.iter().any(|line| line.contains(&format!("{shown}")));
        if head.is_empty() || !usage {
            found.push(format!("{shown}: no comment at its head that shows how it is called"));
        }
    }
    assert_none(&found, "scripts");
}

#[test]
fn documents_are_linked_and_links_are_valid() {
    let mut found = Vec::new();
    let mut linked = BTreeSet::new();
    for (path, text) in with_extension("md") {
        let folder = root().join(&path).parent().unwrap().to_owned();
        for target in links(&text) {
            let file = folder.join(target.split('#').next().unwrap_or(""));
            if !file.exists() {
                found.push(format!("{}: link to {target}", path.display()));
            }
            if path == Path::new("docs/SUMMARY.md") {
                linked.insert(file.canonicalize().unwrap_or(file));
            }
        }
    }
    for (path, _) in
        with_extension("md").filter(|(path, _)| path.starts_with("docs") && !path.ends_with("SUMMARY.md"))
    {
        if !linked.contains(&root().join(&path).canonicalize().unwrap()) {
            found.push(format!("{}: not in docs/SUMMARY.md", path.display()));
        }
    }
    assert_none(&found, "documents");
}

#[test]
fn documented_call_paths_name_existing_functions() {
    let page = read(Path::new("docs/internals/call-paths.md"));
    let mut found = Vec::new();
    let mut steps = 0;
    // A step has the form "1. `function` (`file`) ...".
    for line in page.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())) {
        let mut quoted = line.split('`').skip(1).step_by(2);
        let (Some(function), Some(file)) = (quoted.next(), quoted.next()) else {
            found.push(format!("{line}: no function and file"));
            continue;
        };
        steps += 1;
        let source = fs::read_to_string(root().join(file)).unwrap_or_default();
        if !source.lines().any(|line| line.contains("fn ") && has_word(line, function)) {
            found.push(format!("{file} has no function {function}"));
        }
    }
    assert!(steps > 0, "no steps");
    assert_none(&found, "docs/internals/call-paths.md");
}

/// Returns the targets of the Markdown links to files.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("](").filter_map(|(start, _)| {
        let target = text[start + 2..].split(')').next()?;
        (!target.contains("://") && !target.starts_with('#')).then_some(target)
    })
}

#[test]
fn comments_contain_no_todo() {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("to", "do!")];
    let mut found = Vec::new();
    for path in files() {
        // Files that are not UTF-8 are data.
        let Ok(text) = fs::read_to_string(root().join(&path)) else { continue };
        for (number, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| has_word(line, mark)) {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert_none(&found, "do it, or write an issue");
}

/// Clones with a common target folder share binaries, so no binary may contain the path of one clone.
#[test]
fn only_testkit_compiles_in_the_repository_path() {
    let compiled = concat!("env!(\"CARGO_MANIFEST", "_DIR\")");
    let mut found = files();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    found.retain(|path| fs::read_to_string(root().join(path)).unwrap().contains(compiled));
    assert_eq!(
        found,
        [Path::new("launcher-tests/testkit/programs.rs")],
        "use convoke_testkit::programs::repository_root()"
    );
}

#[test]
fn rules_detect_planted_violations() {
    assert!(has_word("unsafe { x }", "unsafe") && !has_word("allow(unsafe_code)", "unsafe"));
    assert_eq!(code("let x = 1; // unsafe"), "let x = 1; ");
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod tests {\nb\n}").count(), 1);
    assert_eq!(without_tests("#[cfg(test)]\nmod tests;\na").count(), 3);
    let targets: Vec<_> = links("[a](x.md) [b](https://x) [c](y.md#z) [d](#here)").collect();
    assert_eq!(targets, ["x.md", "y.md#z"]);
    let edges = [("a", vec!["b", "c"]), ("b", vec!["a"]), ("c", vec!["d"]), ("d", vec![])];
    let graph = edges.map(|(from, to)| (from.to_owned(), to.into_iter().map(str::to_owned).collect()));
    let graph = Dependencies(BTreeMap::from(graph));
    assert_eq!(graph.path("a", "d").as_deref(), Some("a -> c -> d"));
    assert_eq!(graph.path("d", "a"), None);
}
