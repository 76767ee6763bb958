//! Lists the children of this process, from /proc.

use std::fs;
use std::path::Path;

use convoke_env::host::kernel_file;
use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

/// Returns all children of this process, adopted ones and zombies included.
///
/// The kernel's list of children is reliable only while no child is forked or ends. An empty list is
/// therefore believed only if waitid(2) also reports that there is no child.
pub(crate) fn children() -> Vec<i32> {
    let listed = children_by_list();
    let nobody = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if listed.is_empty() && !matches!(waitid(WaitId::All, nobody), Err(Errno::CHILD)) {
        return children_by_scan();
    }
    listed
}

fn children_by_list() -> Vec<i32> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let mut found = Vec::new();
    for task in tasks.flatten() {
        match fs::read_to_string(task.path().join("children")) {
            Ok(text) => found.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok())),
            // The kernel lacks CONFIG_PROC_CHILDREN.
            Err(_) => return children_by_scan(),
        }
    }
    found
}

/// Returns all children of this process by reading the parent of every process on the machine.
fn children_by_scan() -> Vec<i32> {
    let me = Pid::this().as_raw();
    all_processes().filter(|&pid| stat(pid, 1) == Some(me)).collect()
}

/// Returns the pids of all processes of the machine; none if /proc cannot be read.
fn all_processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns field number `field` of `/proc/PID/stat`, counted after the name: 1 is the parent, 2 the process
/// group. The name may contain spaces and parentheses.
fn stat(pid: i32, field: usize) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(field)?.parse().ok()
}

/// Returns the processes of a process group that have a handler for a signal.
pub(crate) fn pids_catching(group: i32, signal: i32) -> Vec<i32> {
    let catches = |pid: &i32| {
        let status = kernel_file::read(Path::new(&format!("/proc/{pid}/status")));
        signal_set(&status, "SigCgt:") >> (signal - 1) & 1 == 1
    };
    all_processes().filter(|&pid| stat(pid, 2) == Some(group)).filter(catches).collect()
}

/// Parses the set of signals in line `field` of `/proc/PID/status`, as a bit set: bit 0 is signal 1. Returns
/// 0 if the line is missing.
fn signal_set(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_sets_are_read_from_proc_status() {
        let status = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180004a02\n";
        assert_eq!(signal_set(status, "SigIgn:"), 1 << 12 | 1);
        assert_eq!(signal_set(status, "SigCgt:"), 0x1_8000_4a02);
        assert_eq!(signal_set("", "SigCgt:"), 0);
        assert_eq!(signal_set("SigCgt:\tmany\n", "SigCgt:"), 0);
    }

    #[test]
    fn both_child_listing_methods_find_a_child() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(children().contains(&pid));
        assert!(children_by_scan().contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
    }
}
