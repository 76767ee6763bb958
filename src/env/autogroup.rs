//! The autogroup setting of the kernel's scheduler. Launcher and runtime both act on it.

use std::fs;
use std::path::Path;

/// Returns true if the scheduler divides CPU time among sessions first (autogroups).
///
/// `sched_yield` then does not let threads of another session run. Reads
/// `proc/sys/kernel/sched_autogroup_enabled` below `root`; returns false if that file cannot be read.
#[must_use]
pub fn autogroup_enabled(root: &Path) -> bool {
    let setting = fs::read_to_string(root.join("proc/sys/kernel/sched_autogroup_enabled"));
    setting.is_ok_and(|text| text.trim() == "1")
}
