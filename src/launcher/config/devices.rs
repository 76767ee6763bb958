//! Implements `--virtual-local-rank`: computes which device each worker sees. Pure.

/// The device list in the launcher's environment has fewer entries than there are workers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value} has no device for local rank {local_rank} (entries: {count})")]
pub(crate) struct TooFewDevices {
    variable: &'static str,
    value: String,
    count: usize,
    local_rank: usize,
}

/// Returns the environment variables that make one device visible to the worker with `local_rank`.
///
/// The device is the entry with this index in the launcher's CUDA_VISIBLE_DEVICES, or the local rank if that
/// is not set. If HIP_VISIBLE_DEVICES is set and not empty, it is the source instead, and both variables are
/// set. An empty CUDA_VISIBLE_DEVICES hides all devices and is left empty.
pub(crate) fn visible_devices(
    parent: &dyn Fn(&str) -> Option<String>,
    local_rank: usize,
) -> Result<Vec<(String, String)>, TooFewDevices> {
    const CUDA: &str = "CUDA_VISIBLE_DEVICES";
    const HIP: &str = "HIP_VISIBLE_DEVICES";
    let hip = parent(HIP).filter(|value| !value.is_empty());
    let (variable, value) = if hip.is_some() { (HIP, hip) } else { (CUDA, parent(CUDA)) };
    let device = match value {
        None => local_rank.to_string(),
        Some(value) if value.trim().is_empty() => String::new(),
        Some(value) => {
            let devices: Vec<&str> = value.split(',').map(str::trim).collect();
            match devices.get(local_rank) {
                Some(device) => (*device).to_owned(),
                None => return Err(TooFewDevices { variable, count: devices.len(), local_rank, value }),
            }
        }
    };
    let names: &[&str] = if variable == HIP { &[CUDA, HIP] } else { &[CUDA] };
    Ok(names.iter().map(|&name| (name.to_owned(), device.clone())).collect())
}

/// Returns the value of OMP_NUM_THREADS to set for the workers. `None` if the launcher's environment sets it,
/// or if there is one worker and no scheduler that counts its CPUs.
///
/// `scheduled` is the number of CPUs that the scheduler gives to all workers of this node. `allowed` is the
/// number of those that this process may use.
pub(crate) fn omp_num_threads(
    parent_has_it: bool,
    workers: usize,
    scheduled: Option<usize>,
    allowed: usize,
) -> Option<usize> {
    match scheduled {
        _ if parent_has_it => None,
        Some(cpus) => Some((cpus.min(allowed) / workers).max(1)),
        None => (workers > 1).then_some(1),
    }
}
