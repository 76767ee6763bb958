//! Which process this is, and whether the one that made a recording lives.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::layout::Process;

/// Whether a process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It does.
    Alive,
    /// It does not.
    Gone,
    /// It was on another host, or is in another container.
    Unknown,
}

/// What the kernel calls this process.
#[must_use]
pub fn this() -> Process {
    let pid = std::process::id();
    Process {
        pid,
        start_ticks: running(pid).unwrap_or(0),
        pid_namespace: fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino()),
        boot_id: boot_id().unwrap_or(0),
    }
}

/// Whether `process` lives, as far as it can be seen from `here`, see [`this`].
#[must_use]
pub fn life(process: &Process, here: &Process) -> Life {
    if process.boot_id == 0 || process.start_ticks == 0 {
        return Life::Unknown;
    }
    if process.boot_id != here.boot_id || process.pid_namespace != here.pid_namespace {
        return Life::Unknown;
    }
    // Another process may have got its pid.
    if running(process.pid) == Some(process.start_ticks) { Life::Alive } else { Life::Gone }
}

fn boot_id() -> Option<u128> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()
}

/// When the process was started, in clock ticks since the boot; `None` if it does not run.
fn running(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
    // A zombie only waits to be reaped.
    (!matches!(state, "Z" | "X" | "x")).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_one_that_has_ended_does_not() {
        let here = this();
        assert!(here.start_ticks > 0 && here.boot_id > 0 && here.pid_namespace > 0, "{here:?}");
        assert_eq!(life(&here, &here), Life::Alive);
        let earlier = Process { start_ticks: here.start_ticks - 1, ..here };
        assert_eq!(life(&earlier, &here), Life::Gone, "another process with its pid");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let started = running(pid);
        // Its state changes to that of a zombie before it is reaped.
        let ended = Process { pid, start_ticks: started.unwrap_or(1), ..here };
        child.wait().unwrap();
        assert_eq!(life(&ended, &here), Life::Gone);
        let elsewhere = Process { boot_id: here.boot_id ^ 1, ..here };
        assert_eq!(life(&elsewhere, &here), Life::Unknown);
    }
}
