//! Compiles what stands in for CUDA's driver, kernels, NCCL and NVML; used by tests of several packages.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Library, compiler, source, what it is linked with.
const LIBRARIES: [(&str, &str, &str, &[&str]); 4] = [
    ("libcuda.so.1", "cc", "driver.c", &["-ldl"]),
    ("libsimulated-kernels.so", "c++", "kernels.cpp", &["-std=c++17"]),
    ("libnccl.so.2", "cc", "nccl.c", &["-ldl"]),
    ("libnvidia-ml.so.1", "cc", "nvml.c", &[]),
];

/// Compiles them into `folder`, for LD_LIBRARY_PATH.
///
/// # Panics
/// If the compiler does not.
pub(crate) fn compile(sources: &Path, folder: PathBuf) -> PathBuf {
    std::fs::create_dir_all(&folder).unwrap();
    for (library, compiler, source, linked) in LIBRARIES {
        // Others may be loading the one that is there.
        let made = folder.join(format!("{library}.{}", std::process::id()));
        let mut compiler = Command::new(compiler);
        compiler
            .args(["-O1", "-shared", "-fPIC", "-pthread", "-o"])
            .arg(&made)
            .arg(sources.join(source))
            .args(linked);
        assert!(compiler.status().unwrap().success(), "{source} was not compiled");
        std::fs::rename(made, folder.join(library)).unwrap();
    }
    folder
}
