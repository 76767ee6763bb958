//! Computes on which CPUs each worker runs. Pure.

use std::ops::Range;

use super::super::topology::{Cpu, Topology, groups};
use crate::formatting::count;

/// The kind of hardware part over which `--bind` spreads the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bind {
    Node,
    Socket,
    CoreComplex,
    /// Physical cores, of which each worker gets its own.
    Core,
}

/// Which CPUs near its device `--numa-binding` gives to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumaBinding {
    /// The CPUs of the device's NUMA node.
    Node,
    /// The CPUs of all NUMA nodes on the device's socket.
    Socket,
    /// The worker's own share of the physical cores on the device's NUMA node.
    Exclusive,
    /// CPUs on the device's NUMA node that share a last-level cache.
    CoreComplex,
}

impl NumaBinding {
    /// Returns the value of `--bind` that is most similar, for machines without devices.
    pub(super) fn without_device(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Socket => "socket",
            Self::Exclusive => "core",
            Self::CoreComplex => "core-complex",
        }
    }
}

/// Reasons why a worker would get no CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BindingError {
    #[error(
        "convoke can use {} for {}; write --nproc-per-node={cores}, or --bind=node",
        count(*cores, "physical core"), count(*workers, "worker")
    )]
    TooFewCores { cores: usize, workers: usize },
    #[error(
        "convoke can use {} for {}; write --nproc-per-node={devices}, or --bind={instead}",
        count(*devices, "device"), count(*workers, "worker")
    )]
    TooFewDevices { devices: usize, workers: usize, instead: &'static str },
    #[error(
        "NUMA node {node} has {} for {}; write --numa-binding=node",
        count(*cores, "physical core"), count(*devices, "device")
    )]
    TooFewCoresOnNode { node: usize, cores: usize, devices: usize },
    #[error(
        "device {device} is on NUMA node {node}, but convoke may not use any CPU there; \
         widen its affinity mask, or write --bind={instead}"
    )]
    NoCpuOnNode { device: usize, node: usize, instead: &'static str },
}

/// Implements `--bind`: spreads the workers over all parts of this kind (NUMA nodes, sockets, caches or
/// cores). Consecutive workers get the same part or neighbouring parts.
pub(super) fn spread(
    topology: &Topology,
    kind: Bind,
    workers: usize,
) -> Result<Vec<Vec<usize>>, BindingError> {
    // Sorting puts neighbouring parts next to each other, however the machine numbers its CPUs. A cache that
    // spans several NUMA nodes counts once in each node.
    let parts = match kind {
        Bind::Node => groups(&topology.cpus, |cpu| cpu.node),
        Bind::Socket => groups(&topology.cpus, |cpu| cpu.package),
        Bind::CoreComplex => groups(&topology.cpus, |cpu| (cpu.package, cpu.node, cpu.cache)),
        Bind::Core => {
            let cores = groups(&topology.cpus, |cpu| (cpu.package, cpu.node, cpu.cache, cpu.core));
            if cores.len() < workers {
                return Err(BindingError::TooFewCores { cores: cores.len(), workers });
            }
            return Ok((0..workers)
                .map(|i| merge_sorted(&cores[block_range(cores.len(), workers, i)]))
                .collect());
        }
    };
    Ok((0..workers).map(|i| parts[i * parts.len() / workers].clone()).collect())
}

/// Implements `--numa-binding`: chooses CPUs near each worker's device, as torchrun does. `devices` has the
/// NUMA node of every device.
pub(super) fn cpus_of_devices(
    topology: &Topology,
    kind: NumaBinding,
    devices: &[usize],
    workers: usize,
) -> Result<Vec<Vec<usize>>, BindingError> {
    if devices.len() < workers {
        let instead = kind.without_device();
        return Err(BindingError::TooFewDevices { devices: devices.len(), workers, instead });
    }
    (0..workers).map(|device| cpus_of_device(topology, kind, devices, device)).collect()
}

fn cpus_of_device(
    topology: &Topology,
    kind: NumaBinding,
    devices: &[usize],
    device: usize,
) -> Result<Vec<usize>, BindingError> {
    let node = devices[device];
    let on_node = |node: usize| topology.cpus.iter().filter(move |cpu| cpu.node == node);
    let Some(first) = on_node(node).next() else {
        return Err(BindingError::NoCpuOnNode { device, node, instead: kind.without_device() });
    };
    // Devices of the same NUMA node share its CPUs, in order of the devices.
    let sharers = devices.iter().filter(|other| **other == node).count();
    let position = devices[..device].iter().filter(|other| **other == node).count();
    Ok(match kind {
        NumaBinding::Node => ids(on_node(node)),
        NumaBinding::Socket => {
            // A NUMA node belongs to the socket of its first CPU, even if it spans several sockets.
            let of_socket =
                |cpu: &&Cpu| on_node(cpu.node).next().is_some_and(|other| other.package == first.package);
            ids(topology.cpus.iter().filter(of_socket))
        }
        NumaBinding::Exclusive => {
            let cores = groups(on_node(node), |cpu| cpu.core);
            if cores.len() < sharers {
                return Err(BindingError::TooFewCoresOnNode { node, cores: cores.len(), devices: sharers });
            }
            merge_sorted(&cores[block_range(cores.len(), sharers, position)])
        }
        NumaBinding::CoreComplex => {
            let mut caches = groups(on_node(node), |cpu| cpu.cache);
            caches.sort_by_key(|cpus| std::cmp::Reverse(cpus.len())); // stable: then by lowest CPU
            caches.swap_remove(position % caches.len())
        }
    })
}

/// Divides `count` things into `parts` blocks, of which the first ones may have one more. Returns the range
/// of block number `part`.
fn block_range(count: usize, parts: usize, part: usize) -> Range<usize> {
    let start = |part: usize| part * (count / parts) + part.min(count % parts);
    start(part)..start(part + 1)
}

fn ids<'a>(cpus: impl Iterator<Item = &'a Cpu>) -> Vec<usize> {
    cpus.map(|cpu| cpu.id).collect()
}

fn merge_sorted(parts: &[Vec<usize>]) -> Vec<usize> {
    let mut cpus = parts.concat();
    cpus.sort_unstable();
    cpus
}
