//! Implements `--bind` and `--numa-binding`: computes the CPUs of each worker on this machine.

mod cpu_sets;
#[cfg(test)]
mod tests;

use std::ffi::OsString;

use super::accelerators;
use super::machine::Machine;
use super::topology::Topology;
use crate::cli::{CliError, ParsedArgs, Value};

/// The kind of hardware part over which `--bind` spreads the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bind {
    Node,
    Socket,
    CoreComplex,
    /// Physical cores, of which each worker gets its own.
    Core,
}

/// Which CPUs near its device `--numa-binding` gives to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NumaBinding {
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
    fn without_device(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Socket => "socket",
            Self::Exclusive => "core",
            Self::CoreComplex => "core-complex",
        }
    }
}

/// Returns the CPUs of each worker by local rank. Empty if workers are not bound to CPUs.
///
/// # Errors
/// The machine lacks the hardware parts that the flag asks for, or does not report them.
pub(super) fn worker_cpus(
    args: &ParsedArgs,
    env: &dyn Fn(&str) -> Option<OsString>,
    machine: &Machine,
    workers: usize,
) -> Result<Vec<Vec<usize>>, CliError> {
    match (args.get("bind"), args.get("numa-binding")) {
        (None, None) => Ok(Vec::new()),
        (Some(_), Some(_)) => {
            Err(CliError::value("--bind and --numa-binding exclude each other; remove one of them"))
        }
        (Some(value), None) => {
            let kind = match value.text.to_str() {
                Some("node") => Bind::Node,
                Some("socket") => Bind::Socket,
                Some("core-complex") => Bind::CoreComplex,
                Some("core") => Bind::Core,
                _ => return Ok(Vec::new()),
            };
            let topology = topology(value, machine)?;
            cpu_sets::spread(&topology, kind, workers).map_err(|error| wrong(value, error))
        }
        (None, Some(value)) => {
            let kind = match value.text.to_str() {
                Some("node") => NumaBinding::Node,
                Some("socket") => NumaBinding::Socket,
                Some("exclusive") => NumaBinding::Exclusive,
                _ => NumaBinding::CoreComplex,
            };
            let instead = kind.without_device();
            let devices = accelerators::numa_nodes(machine, env)
                .map_err(|error| wrong(value, format!("{error}, or --bind={instead}")))?;
            if devices.is_empty() {
                let what = "there is no accelerator to bind to";
                return Err(wrong(value, format!("{what}; leave it out, or write --bind={instead}")));
            }
            let topology = topology(value, machine)?;
            cpu_sets::cpus_of_devices(&topology, kind, &devices, workers).map_err(|error| wrong(value, error))
        }
    }
}

fn topology(value: &Value, machine: &Machine) -> Result<Topology, CliError> {
    Topology::read(&machine.root, &machine.cpus)
        .map_err(|error| wrong(value, format!("{error}; leave {} out", value.name)))
}

fn wrong(value: &Value, what: impl std::fmt::Display) -> CliError {
    CliError::value(format!("{value}: {what}"))
}
