//! Implements `--bind` and `--numa-binding`: computes the CPUs of each worker on this machine.

mod cpu_sets;
#[cfg(test)]
mod tests;

use super::accelerators;
use super::machine::Machine;
use super::topology::Topology;
use crate::cli::{CliError, Env, ParsedArgs, Value};
use cpu_sets::{Bind, NumaBinding};

/// Returns the CPUs of each worker by local rank. Empty if workers are not bound to CPUs.
pub(super) fn worker_cpus(
    args: &ParsedArgs,
    env: Env<'_>,
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
