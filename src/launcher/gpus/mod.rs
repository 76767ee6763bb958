//! NVIDIA's GPUs: the list of them, the GPUs of each worker, and the evidence when a worker fails.
//!
//! `nvml` loads the driver's library if it exists, and calls it. `list` lists the GPUs in a child process.
//! `visible` and `xid` (pure) parse device lists and the driver's messages. `evidence` collects the facts
//! about a failed worker's GPUs.

pub(crate) mod evidence;
pub(crate) mod list;
pub(crate) mod nvml;
pub(crate) mod visible;
mod xid;

use serde::{Deserialize, Serialize};

/// A GPU as NVML reports it. Lists are in PCI bus order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Gpu {
    /// Name of the GPU, `GPU-...`.
    pub(crate) uuid: String,
    /// Address on the PCI bus, as sysfs writes it: `0000:3b:00.0`.
    pub(crate) pci: String,
    /// Names of the MIG instances, `MIG-...`; `None` if the GPU is not partitioned.
    pub(crate) instances: Option<Vec<String>>,
}

impl Gpu {
    /// Returns the names of the GPU and of its MIG instances, as far as they are known.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        [&self.uuid].into_iter().chain(self.instances.iter().flatten()).filter(|name| !name.is_empty())
    }
}
