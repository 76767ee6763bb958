//! Facts about this host that launcher and runtime both read: its name and boot, CPUs, network interfaces
//! and cgroups.

pub mod cgroup;
mod interfaces;
pub mod kernel_file;

use std::fs;
use std::path::Path;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, gethostname};

pub use interfaces::{Interface, Reach, interfaces, most_reachable_address};

/// Returns the host name; `None` if the system does not tell.
#[must_use]
pub fn name() -> Option<String> {
    gethostname().ok().map(|name| name.to_string_lossy().into_owned())
}

/// Returns the random number that the kernel drew at its start; `None` if the system does not tell. It tells
/// hosts and their boots apart; containers of one host have one boot id.
#[must_use]
pub fn boot_id() -> Option<u128> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()
}

/// Returns the CPUs on which this thread may run, ascending; empty if the system does not tell.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu) == Ok(true)).collect()
}

/// Returns true if the scheduler divides CPU time among sessions first (autogroups).
///
/// `sched_yield` then does not let threads of another session run. Reads
/// `proc/sys/kernel/sched_autogroup_enabled` below `root`; returns false if that file cannot be read.
#[must_use]
pub fn autogroup_enabled(root: &Path) -> bool {
    let setting = fs::read_to_string(root.join("proc/sys/kernel/sched_autogroup_enabled"));
    setting.is_ok_and(|text| text.trim() == "1")
}
