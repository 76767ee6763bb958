//! Checks NVIDIA's GPUs: memory errors, messages of the driver, processes that were left behind, throttling.

use std::time::{Duration, SystemTime};

use super::super::peer::NodeResult;
use super::super::problem::Problem;
use crate::config::{Machine, Vendor};
use crate::gpus::Gpu;
use crate::gpus::evidence::driver_messages;
use crate::gpus::nvml::Nvml;

const CHECK: &str = "GPUs";
/// Age of messages of the driver that are reported.
const RECENT: Duration = Duration::from_secs(24 * 3600);

pub(super) fn check(machine: &Machine, host: &str) -> NodeResult {
    let mut result = NodeResult::default();
    let count = machine.devices(Vendor::Nvidia, &|_| None);
    let amd = machine.devices(Vendor::Amd, &|_| None);
    if count + amd == 0 {
        result.not_checked.push("GPUs (none)".to_owned());
    }
    result.facts.insert("GPUs".to_owned(), (count + amd).to_string());
    let Some(nvml) = Nvml::open() else {
        if count > 0 {
            result.not_checked.push("GPU health (no NVML)".to_owned());
        }
        return result;
    };
    if let Some(version) = nvml.driver_version() {
        result.facts.insert("GPU driver".to_owned(), version);
    }
    for (index, gpu) in machine.gpus().iter().enumerate() {
        result.problems.extend(check_gpu(&nvml, index, gpu, host));
    }
    for xid in driver_messages(SystemTime::now() - RECENT).iter().filter(|xid| xid.is_hardware()) {
        let text = format!("the driver reported Xid {} on {} within the last day", xid.number, xid.pci);
        result.problems.push(Problem::fail(CHECK, host, text, xid.meaning()));
    }
    result
}

fn check_gpu(nvml: &Nvml, index: usize, gpu: &Gpu, host: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let name = format!("GPU {index} ({})", gpu.pci);
    if let Some(errors) = nvml.uncorrected_errors(&gpu.uuid).filter(|errors| *errors > 0) {
        let text = format!("{name} has had {errors} uncorrected memory errors since its driver was loaded");
        problems.push(Problem::fail(
            CHECK,
            host,
            text,
            "reset the GPU: nvidia-smi -r; replace it if they come again",
        ));
    }
    let processes = nvml.processes(&gpu.uuid);
    if !processes.is_empty() {
        let list: Vec<_> = processes.iter().map(|pid| described(*pid)).collect();
        let text = format!("{name} is in use by {}", list.join(", "));
        problems.push(Problem::fail(
            CHECK,
            host,
            text,
            "end these processes, if no other job of yours or of others needs them",
        ));
    }
    if let Some(why) = nvml.throttle_reason(&gpu.uuid) {
        let text = format!("{name} is slowed down: {why}");
        problems.push(Problem::warning(
            CHECK,
            host,
            text,
            "look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        ));
    }
    problems
}

/// Formats a process as `pid 123 (python3)`.
fn described(pid: u32) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("pid {pid} ({})", name.trim()),
        Err(_) => format!("pid {pid}"),
    }
}
