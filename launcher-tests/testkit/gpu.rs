//! Simulated GPUs: libraries that replace CUDA's driver, kernels, NCCL and NVML.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use rustix::fs::{FlockOperation, flock};

use crate::assert_one_passed;
use crate::programs::{repository_root, target_dir};

/// Library, compiler, source, linker arguments.
const LIBRARIES: [(&str, &str, &str, &[&str]); 4] = [
    ("libcuda.so.1", "cc", "driver.c", &["-ldl"]),
    ("libsimulated-kernels.so", "c++", "kernels.cpp", &["-std=c++17"]),
    ("libnccl.so.2", "cc", "nccl.c", &["-ldl"]),
    ("libnvidia-ml.so.1", "cc", "nvml.c", &[]),
];
/// Environment variable that is set in a process with simulated GPUs.
const SIMULATED_GPUS_MARK: &str = "CONVOKE_TEST_SIMULATED";

/// Returns a folder with the libraries, for LD_LIBRARY_PATH. The first test of a test run compiles them.
pub fn libraries() -> &'static PathBuf {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let folder = target_dir().join("tmp/simulated-gpu");
        fs::create_dir_all(&folder).unwrap();
        // One process compiles while the others wait; each process holds this lock during its check.
        let lock = fs::File::create(folder.join("lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        for (library, compiler, source, linker_arguments) in LIBRARIES {
            let source = repository_root().join("launcher-tests/gpu").join(source);
            let library = folder.join(library);
            if is_newer(&library, &source).unwrap_or(false) {
                continue;
            }
            // A process of an earlier test run may have loaded the old library. The rename leaves its copy
            // intact.
            let made = library.with_extension("new");
            let mut command = Command::new(compiler);
            command
                .args(["-O1", "-shared", "-fPIC", "-pthread", "-o"])
                .arg(&made)
                .arg(&source)
                .args(linker_arguments);
            assert!(command.status().unwrap().success(), "{} was not compiled", source.display());
            fs::rename(made, library).unwrap();
        }
        folder
    })
}

fn is_newer(library: &PathBuf, source: &PathBuf) -> io::Result<bool> {
    Ok(fs::metadata(library)?.modified()? > fs::metadata(source)?.modified()?)
}

/// Returns true if this process has simulated GPUs.
#[must_use]
pub fn has_simulated_gpus() -> bool {
    std::env::var_os(SIMULATED_GPUS_MARK).is_some()
}

/// Returns true in a process with simulated GPUs.
///
/// Otherwise runs the test of this name in a new process with 4 GPUs and these variables, and returns false.
/// A new process is needed because the libraries must be present when a process starts. Panics if that test
/// fails.
#[must_use]
pub fn run_with_simulated_gpus(test: &str, variables: &[(&str, &str)]) -> bool {
    match output_with_simulated_gpus(test, variables) {
        None => true,
        Some(output) => {
            assert_one_passed(&output);
            false
        }
    }
}

/// As [`run_with_simulated_gpus`], for a test that ends its process: returns the output of the new process,
/// or `None` in a process with simulated GPUs.
#[must_use]
pub fn output_with_simulated_gpus(test: &str, variables: &[(&str, &str)]) -> Option<Output> {
    if has_simulated_gpus() {
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(SIMULATED_GPUS_MARK, "1");
    child.env("LD_LIBRARY_PATH", libraries()).env("SIMULATED_GPUS", "4").envs(variables.iter().copied());
    child.env("SIMULATED_NCCL_DIR", target_dir().join("tmp")).env_remove("CUDA_VISIBLE_DEVICES");
    Some(child.output().unwrap())
}
