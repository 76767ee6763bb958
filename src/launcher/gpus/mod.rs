//! NVIDIA's GPUs: the list of them, the share of each worker, and the evidence when one fails.
//!
//! `nvml` calls the driver's library and loads it if it exists. `visible` and `xid` (pure) read device lists
//! and the driver's messages. `evidence` gathers the facts about a failed worker's GPUs.

pub(crate) mod evidence;
pub(crate) mod nvml;
pub(crate) mod visible;
mod xid;

/// A GPU as NVML reports it. Lists are in PCI bus order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Gpu {
    /// `GPU-...`.
    pub(crate) uuid: String,
    /// Address on the PCI bus, as sysfs writes it: `0000:3b:00.0`.
    pub(crate) pci: String,
    /// `MIG-...` of each of its instances; `None` if it is not cut into any.
    pub(crate) instances: Option<Vec<String>>,
}
