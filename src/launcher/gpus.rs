//! NVIDIA's GPUs: which there are, what each worker sees of them, and what is known of them when one fails.
//!
//! `nvml` asks the driver's library, which is loaded when it is there; `visible` and `xid` (pure) read lists and the
//! driver's messages; `evidence` gathers what is known of a failed worker's GPUs.

pub(crate) mod evidence;
pub(crate) mod nvml;
pub(crate) mod visible;
mod xid;

/// A GPU, as NVML tells of it; in the order of the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Gpu {
    /// `GPU-...`.
    pub(crate) uuid: String,
    /// Address on the PCI bus, as sysfs writes it: `0000:3b:00.0`.
    pub(crate) pci: String,
    /// `MIG-...` of each of its instances; `None` if it is not cut into any.
    pub(crate) instances: Option<Vec<String>>,
}
