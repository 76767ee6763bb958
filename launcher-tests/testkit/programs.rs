//! The programs under test: built once, shared by all tests.
//!
//! `scripts/check` builds them first. CONVOKE_BIN_DIR names the folder of the programs that users get,
//! CONVOKE_TEST_BIN_DIR the folder of the programs that only tests use.
//! If a variable is unset, a test builds the programs that it needs: `cargo test` works alone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

/// Returns the path of a program that users get: `convoke`, a tool, an example.
#[must_use]
pub fn user_program(name: &str) -> PathBuf {
    let (package, kind) = match name {
        "convoke" => ("convoke", "--bin"),
        "convoke-store" | "convoke-perf" | "convoke-flight" | "convoke-gpu-check" => {
            ("convoke-tools", "--bin")
        }
        "digits" => ("convoke-examples", "--bin"),
        "ddp" | "elastic" | "first" | "groups" | "p2p" | "pipeline" | "ring" | "sgd" => {
            ("convoke-examples", "--example")
        }
        other => panic!("no program {other}"),
    };
    let folder = if kind == "--example" { "examples" } else { "" };
    find_or_build("CONVOKE_BIN_DIR", &Path::new(folder).join(name), &["-p", package, kind, name])
}

/// Returns the path of `test-worker`: the workers of all tests, linked with the runtime that users get.
#[must_use]
pub fn test_worker_program() -> PathBuf {
    let name = "test-worker";
    find_or_build("CONVOKE_TEST_BIN_DIR", Path::new(name), &["-p", "convoke-launcher-tests", "--bin", name])
}

/// Returns the path of a program with fault injection: `convoke-faults` or `test-worker-faults`.
#[must_use]
pub fn fault_injection_program(name: &str) -> PathBuf {
    let arguments = ["-p", "convoke-launcher-tests", "--features", "faults", "--bin", name];
    find_or_build("CONVOKE_TEST_BIN_DIR", Path::new(name), &arguments)
}

/// Returns the path of `file` below the folder that `variable` names.
///
/// If the variable is unset, Cargo builds the program with `arguments` below `target/debug`, once for each
/// test process.
fn find_or_build(variable: &str, file: &Path, arguments: &[&str]) -> PathBuf {
    if let Some(folder) = std::env::var_os(variable) {
        let path = Path::new(&folder).join(file);
        assert!(path.exists(), "{variable} has no {}", path.display());
        return path;
    }
    static BUILT: Mutex<Option<HashMap<PathBuf, Arc<OnceLock<()>>>>> = Mutex::new(None);
    let path = target_dir().join("debug").join(file);
    let once = Arc::clone(BUILT.lock().unwrap().get_or_insert_default().entry(path.clone()).or_default());
    once.get_or_init(|| {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--locked"]).args(arguments).current_dir(repository_root());
        cargo.env("CARGO_TARGET_DIR", target_dir());
        assert!(cargo.status().unwrap().success(), "{cargo:?}");
    });
    path
}

/// Returns the root of the repository.
///
/// Cargo and nextest set CARGO_MANIFEST_DIR where they run tests. Its value at compile time may name another
/// clone: clones with a common target folder share binaries, and Cargo does not rebuild for another path.
#[must_use]
pub fn repository_root() -> PathBuf {
    let is_root = |folder: &&Path| folder.join("launcher-tests/testkit").is_dir();
    let now = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let compiled = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = now.as_deref().and_then(|folder| folder.ancestors().find(is_root));
    root.or_else(|| compiled.ancestors().find(is_root))
        .expect("run by Cargo, or in the clone it was built in")
        .to_owned()
}

/// Returns Cargo's target folder, which contains this test binary.
#[must_use]
pub fn target_dir() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let own = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    own.map_or_else(|| repository_root().join("target"), Path::to_owned)
}
