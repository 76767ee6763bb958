//! Checks resource limits and shared memory.

use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;

use super::super::problem::{Level, Problem};
use crate::config::{Config, Machine, Vendor};
use crate::limits::Limits;

const SHM: &str = "/dev/shm";
const MIB: u64 = 1 << 20;
/// Shared memory below which workers fail, and below which they probably do, without and with GPUs.
const SHM_LEAST: u64 = 32 * MIB;
const SHM_WANTED: u64 = 1024 * MIB;
const SHM_WANTED_WITH_GPUS: u64 = 8192 * MIB;
/// Open files that data loaders need, and those that NCCL with many GPUs needs.
const FILES_WANTED: u64 = 8192;
const FILES_WANTED_WITH_GPUS: u64 = 65_536;

pub(super) fn check(config: &Config, machine: &Machine, limits: &Limits, host: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    match limits.check(config) {
        Ok(warnings) => problems.extend(warnings.iter().map(|warning| Problem {
            level: Level::Warning,
            ..Problem::fail_of_message("limits", host, warning)
        })),
        Err(error) => problems.push(Problem::fail_of_message("limits", host, &error)),
    }
    let has_gpus = machine.devices(Vendor::Nvidia, &|_| None) + machine.devices(Vendor::Amd, &|_| None) > 0;
    let files = if has_gpus { FILES_WANTED_WITH_GPUS } else { FILES_WANTED };
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && hard < files
        && !problems.iter().any(|problem| problem.text.contains("open files"))
    {
        let text = format!("a process may open {hard} files; data loaders and NCCL may need {files}");
        let remedy = "raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE= of systemd, docker run --ulimit nofile=N:N";
        problems.push(Problem::warning("limits", host, text, remedy));
    }
    problems.extend(shared_memory(Path::new(SHM), has_gpus, host));
    problems
}

fn shared_memory(folder: &Path, has_gpus: bool, host: &str) -> Option<Problem> {
    const REMEDY: &str = "docker run --shm-size=16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm; on a host mount -o \
                          remount,size=16g /dev/shm; remove files of dead jobs from it";
    let shown = folder.display();
    let Ok(state) = statvfs(folder) else {
        let text = format!("there is no {shown}, where workers share memory");
        return Some(Problem::fail("shared memory", host, text, "mount -t tmpfs tmpfs /dev/shm"));
    };
    let free = state.blocks_available() * state.fragment_size() / MIB;
    let size = state.blocks() * state.fragment_size() / MIB;
    let wanted = if has_gpus { SHM_WANTED_WITH_GPUS } else { SHM_WANTED } / MIB;
    let text =
        format!("{shown} has {free} MiB free of {size} MiB; data loaders, NCCL and gloo share memory there");
    if free < SHM_LEAST / MIB {
        Some(Problem::fail("shared memory", host, text, REMEDY))
    } else if free < wanted {
        Some(Problem::warning("shared memory", host, text, REMEDY))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_shared_memory_is_a_failure() {
        let problem = shared_memory(Path::new("/no/such/folder"), false, "h1").unwrap();
        assert_eq!(
            problem.lines().lines().next().unwrap(),
            "FAIL h1: there is no /no/such/folder, where workers share memory"
        );
    }
}
