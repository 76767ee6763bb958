//! Reads from /proc and sysfs the NUMA node to which each device is attached.

#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use super::machine::{Machine, Vendor};
use super::topology::{TopologyError, number, text};
use crate::cli::Env;
use crate::gpus::Gpu;
use crate::gpus::visible::has_uuid_form;

/// Reasons why the NUMA node of a device cannot be found. Each message ends with a remedy.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceError {
    #[error(
        "{variable}: only the driver's library (such as NVML) knows which device `{entry}` is; write indices, such as {variable}=0,1"
    )]
    Unresolved { variable: &'static str, entry: String },
    #[error("{} does not tell where {device} is; leave --numa-binding out", path.display())]
    NoNumaNode { path: PathBuf, device: String },
    #[error("{0}; leave --numa-binding out")]
    Unreadable(#[from] TopologyError),
}

/// Returns the NUMA node of each device that workers see, in the order of their indices. The devices are
/// those of one vendor: NVIDIA, else AMD, else Intel.
///
/// # Errors
/// The system does not report the NUMA node of a device, or a variable such as CUDA_VISIBLE_DEVICES holds a
/// name that only the driver knows.
pub(super) fn numa_nodes(machine: &Machine, env: Env<'_>) -> Result<Vec<usize>, DeviceError> {
    let vendors = [Vendor::Nvidia, Vendor::Amd, Vendor::Intel];
    let Some(vendor) = vendors.into_iter().find(|vendor| machine.devices(*vendor, &|_| None) > 0) else {
        return Ok(Vec::new());
    };
    let mut devices = match vendor {
        Vendor::Nvidia if machine.gpus().iter().all(|gpu| !gpu.pci.is_empty()) => machine.gpus().to_vec(),
        Vendor::Nvidia => nvidia(machine)?,
        Vendor::Amd => render_nodes(machine, "0x1002")?,
        Vendor::Intel => render_nodes(machine, "0x8086")?,
    };
    for variable in variables(vendor, env) {
        devices = visible(&devices, variable, &env(variable).unwrap_or_default().to_string_lossy())?;
    }
    let bus = machine.root.join("sys/bus/pci/devices");
    devices.iter().map(|device| Ok(number(&bus.join(&device.pci).join("numa_node"))?.unwrap_or(0))).collect()
}

/// Returns those environment variables that are set and select devices. The indices in each refer to the
/// devices that the variable before it leaves visible.
fn variables(vendor: Vendor, env: Env<'_>) -> Vec<&'static str> {
    let is_set = |name: &&str| env(name).is_some();
    // HIP uses CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set.
    let hip = Some("HIP_VISIBLE_DEVICES").filter(is_set).unwrap_or("CUDA_VISIBLE_DEVICES");
    let all = match vendor {
        Vendor::Nvidia => vec!["CUDA_VISIBLE_DEVICES"],
        Vendor::Amd => vec!["ROCR_VISIBLE_DEVICES", hip],
        Vendor::Intel => vec!["ZE_AFFINITY_MASK"],
    };
    all.into_iter().filter(is_set).collect()
}

/// Returns the devices that the list in an environment variable selects. Like the drivers, it stops at the
/// first entry that is no device.
fn visible(devices: &[Gpu], variable: &'static str, list: &str) -> Result<Vec<Gpu>, DeviceError> {
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim).take_while(|entry| !entry.is_empty()) {
        let device = match entry.parse::<i64>() {
            Ok(index) => usize::try_from(index).ok().and_then(|index| devices.get(index)),
            Err(_) => Some(by_uuid(devices, entry).ok_or_else(|| {
                let entry = entry.chars().take(60).collect();
                DeviceError::Unresolved { variable, entry }
            })?),
        };
        let Some(device) = device else { break };
        chosen.push(device.clone());
    }
    Ok(chosen)
}

/// Returns the device with a UUID, of itself or an instance, that starts with `start`; `None` unless exactly
/// one has.
fn by_uuid<'a>(devices: &'a [Gpu], start: &str) -> Option<&'a Gpu> {
    let mut found = devices.iter().filter(|device| device.names().any(|uuid| uuid.starts_with(start)));
    found.next().filter(|_| has_uuid_form(start) && found.next().is_none())
}

/// Returns the GPUs with a device node, in PCI bus order, in which CUDA numbers GPUs of the same model. Minor
/// numbers may be in another order.
fn nvidia(machine: &Machine) -> Result<Vec<Gpu>, DeviceError> {
    let dir = machine.root.join("proc/driver/nvidia/gpus");
    let mut listed: Vec<(usize, Gpu)> = Vec::new();
    for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
        let Some(information) = text(&entry.path().join("information"))? else { continue };
        let field = |name: &str| {
            information.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
        };
        if let Some(minor) = field("Device Minor").and_then(|minor| minor.parse().ok()) {
            let pci = entry.file_name().to_string_lossy().into_owned();
            let uuid = field("GPU UUID").unwrap_or_default().to_owned();
            listed.push((minor, Gpu { pci, uuid, instances: None }));
        }
    }
    let mut devices = Vec::new();
    for minor in machine.nvidia_minors() {
        let found = listed.iter().find(|(other, _)| *other == minor);
        let device = format!("/dev/nvidia{minor}");
        let (_, found) = found.ok_or_else(|| DeviceError::NoNumaNode { path: dir.clone(), device })?;
        devices.push(found.clone());
    }
    devices.sort_by_key(|device| (device.pci.len(), device.pci.clone()));
    Ok(devices)
}

/// Returns the devices that have render nodes, in the order of the nodes' numbers, which is the driver's
/// order.
fn render_nodes(machine: &Machine, vendor: &str) -> Result<Vec<Gpu>, DeviceError> {
    machine
        .render_nodes(vendor)
        .into_iter()
        .map(|number| {
            let device = format!("/dev/dri/renderD{number}");
            let path = machine.root.join(format!("sys/class/drm/renderD{number}/device"));
            let target = fs::canonicalize(&path).ok();
            match target.as_deref().and_then(Path::file_name) {
                Some(pci) => Ok(Gpu { pci: pci.to_string_lossy().into_owned(), ..Gpu::default() }),
                None => Err(DeviceError::NoNumaNode { path, device }),
            }
        })
        .collect()
}
