//! Checks NVIDIA's GPUs: memory errors, messages of the driver, processes that were left behind, throttling.

use std::time::{Duration, SystemTime};

use super::super::peer::NodeResult;
use super::super::problem::Problem;
use crate::config::build::{hidden_gpus_message, visible_gpus};
use crate::config::{Config, Machine, Vendor};
use crate::formatting::count;
use crate::gpus::Gpu;
use crate::gpus::evidence::driver_messages;
use crate::gpus::nvml::Nvml;

const CHECK: &str = "GPUs";
/// Age of messages of the driver that are reported.
const RECENT: Duration = Duration::from_secs(24 * 3600);

pub(super) fn check(config: &Config, machine: &Machine, host: &str) -> NodeResult {
    let mut result = NodeResult::default();
    let env = |name: &str| std::env::var_os(name);
    let visible = visible_gpus(&env, machine);
    let nvidia = machine.devices(Vendor::Nvidia, &|_| None);
    let amd = machine.devices(Vendor::Amd, &|_| None);
    if nvidia + amd == 0 {
        result.not_checked.push("GPUs (none)".to_owned());
    }
    result.facts.insert("GPUs".to_owned(), visible.to_string());
    // The driver would give no answer to further questions either.
    if let Some(warning) = machine.gpu_warning() {
        result.problems.push(Problem::fail_of_message(CHECK, host, warning));
        return result;
    }
    if visible == 0 {
        result.problems.extend(none_visible(config, hidden_gpus_message(&env, machine), host));
    }
    let Some(nvml) = Nvml::open() else {
        if nvidia > 0 {
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

/// Returns the problem of a host on which no GPU is visible, although the job was given some or `hidden` tells why.
fn none_visible(config: &Config, hidden: Option<String>, host: &str) -> Option<Problem> {
    let given =
        config.scheduled.as_ref().and_then(|job| Some((&job.label, job.gpus.filter(|gpus| *gpus > 0)?)));
    match (given, hidden) {
        (Some((job, gpus)), hidden) => {
            let why = hidden.map_or_else(String::new, |hidden| format!(": {hidden}"));
            let text = format!("{job} has {} on this node, but none is visible{why}", count(gpus, "GPU"));
            let remedy =
                "is the driver loaded there (nvidia-smi), and do container and variables pass the GPUs on?";
            Some(Problem::fail(CHECK, host, text, remedy))
        }
        (None, Some(hidden)) => {
            let remedy = "unset the variable, unless the job needs no GPU";
            Some(Problem::warning(CHECK, host, hidden, remedy))
        }
        (None, None) => None,
    }
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
