//! How the system shares out its CPUs; both sides act on it.

use std::fs;
use std::path::Path;

/// Whether CPUs are shared out among sessions before they are among threads (autogroups), as the machine says whose
/// proc/ lies below `root`; a yield then does not reach another session.
#[must_use]
pub fn schedules_sessions(root: &Path) -> bool {
    let setting = fs::read_to_string(root.join("proc/sys/kernel/sched_autogroup_enabled"));
    setting.is_ok_and(|text| text.trim() == "1")
}
