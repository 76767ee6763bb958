//! Runs a test again in a process of its own, on simulated GPUs: their libraries must be there when a process begins.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "libraries.rs"]
mod libraries;

/// Set where this is that process.
const MARK: &str = "CONVOKE_TEST_SIMULATED";

/// The folder with the libraries, compiled once for all tests.
fn folder() -> &'static PathBuf {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../launcher-tests/gpu");
        libraries::compile(&sources, PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("simulated-gpu"))
    })
}

/// Whether this is a process with simulated GPUs.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Runs the test of this name in a process with 4 simulated GPUs and these variables, and says that it need not be run
/// here; or says that this is that process.
///
/// # Panics
/// If it fails there.
pub(crate) fn is_simulated(test: &str, variables: &[(&str, &str)]) -> bool {
    if is_inside() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(MARK, "1");
    child.env("LD_LIBRARY_PATH", folder()).env("SIMULATED_GPUS", "4").envs(variables.iter().copied());
    child.env("SIMULATED_NCCL_DIR", env!("CARGO_TARGET_TMPDIR")).env_remove("CUDA_VISIBLE_DEVICES");
    let Output { status, stdout, stderr } = child.output().unwrap();
    let text = String::from_utf8_lossy(&stdout) + String::from_utf8_lossy(&stderr);
    assert!(status.success() && text.contains("1 passed"), "{text}");
    false
}
