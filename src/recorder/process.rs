//! The identity of this process, and the status of the process that made a recording.

use std::fs;
use std::os::unix::fs::MetadataExt;

use convoke_env::host::boot_id;

use crate::layout::Process;

/// The status of a process, as seen from this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessStatus {
    /// The process is running.
    Alive,
    /// The process has ended.
    Gone,
    /// The process ran on another host, in another boot, or in another container.
    Unknown,
}

/// Returns the identity of this process.
#[must_use]
pub fn current() -> Process {
    let pid = std::process::id();
    Process {
        pid,
        start_ticks: start_ticks(pid).unwrap_or(0),
        pid_namespace: fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino()),
        boot_id: boot_id().unwrap_or(0),
    }
}

/// Returns the status of `process`. `here` is the identity of this process, see [`current`].
#[must_use]
pub fn status(process: &Process, here: &Process) -> ProcessStatus {
    let is_visible = process.boot_id == here.boot_id && process.pid_namespace == here.pid_namespace;
    if process.boot_id == 0 || process.start_ticks == 0 || !is_visible {
        return ProcessStatus::Unknown;
    }
    // The kernel may have given the pid to another process, which then has another start time.
    if start_ticks(process.pid) == Some(process.start_ticks) {
        ProcessStatus::Alive
    } else {
        ProcessStatus::Gone
    }
}

/// Returns the start time of a process, in clock ticks since the boot; `None` if it is not running.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may contain any characters, so the fields are counted
    // from the end of the name.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
    // A zombie has ended.
    (!matches!(state, "Z" | "X" | "x")).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_is_alive_and_an_exited_one_is_not() {
        let here = current();
        assert!(here.start_ticks > 0 && here.boot_id > 0 && here.pid_namespace > 0, "{here:?}");
        assert_eq!(status(&here, &here), ProcessStatus::Alive);
        let earlier = Process { start_ticks: here.start_ticks - 1, ..here };
        assert_eq!(status(&earlier, &here), ProcessStatus::Gone, "another process with its pid");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let started = start_ticks(pid);
        // The child may already be a zombie here.
        let ended = Process { pid, start_ticks: started.unwrap_or(1), ..here };
        child.wait().unwrap();
        assert_eq!(status(&ended, &here), ProcessStatus::Gone);
        let elsewhere = Process { boot_id: here.boot_id ^ 1, ..here };
        assert_eq!(status(&elsewhere, &here), ProcessStatus::Unknown);
    }
}
