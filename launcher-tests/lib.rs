//! Tests of convoke with real processes; see `e2e/`, `elastic/`, `faults/`, `conformance/` and `tidy/`.

pub mod fault_spec;
pub mod harness;
#[path = "testbed/hosts.rs"]
pub mod hosts;
pub mod kills;
#[path = "testbed/slurm.rs"]
pub mod slurm;
pub mod worker;

use std::path::PathBuf;

use convoke_testkit::programs::test_worker_program;

/// Program and role of a worker in `worker/`, as arguments of a launcher.
#[must_use]
pub fn worker_command(role: &str) -> [String; 2] {
    [path_argument(test_worker_program()), role.to_owned()]
}

/// The line that `test-worker group` writes: where the rank is, and the sum of `rank + 1` over all ranks.
#[must_use]
pub fn group_line(rank: usize, size: usize, local_rank: usize, local_size: usize) -> String {
    format!("rank {rank} of {size}, {local_rank} of {local_size} here, sum {}", size * (size + 1) / 2)
}

/// Converts a path to an argument.
#[must_use]
pub fn path_argument(path: PathBuf) -> String {
    path.into_os_string().into_string().unwrap_or_else(|path| unreachable!("not Unicode: {}", path.display()))
}

/// A line that `test-worker plain lines` writes: rank, number, and a filler whose length varies from line to
/// line.
#[must_use]
pub fn numbered_line(rank: usize, number: usize) -> String {
    format!("{rank} {number} {}", "x".repeat(number % 97))
}
