//! Who our children are, by /proc.

use std::fs;

use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::protocol::Leftover;

/// All children of this process, adopted ones and zombies included.
///
/// The kernel promises its list of children only while nothing changes, so an empty one is believed only
/// if there is nobody to wait for either.
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
            // A kernel without CONFIG_PROC_CHILDREN.
            Err(_) => return children_by_scan(),
        }
    }
    found
}

/// The same by reading the parent of every process.
fn children_by_scan() -> Vec<i32> {
    let me = Pid::this().as_raw();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|&pid| parent(pid) == Some(me))
        .collect()
}

/// Parent of `pid`: the second field after the name, which may itself hold spaces and parentheses.
fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// What to call the process in a message.
pub(crate) fn describe(pid: i32) -> Leftover {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Leftover { pid, name: name.trim_end().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_a_child() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(children().contains(&pid));
        assert!(children_by_scan().contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
    }
}
