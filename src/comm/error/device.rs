//! The reasons why a group cannot use devices.

use std::time::Duration;

use crate::nccl::{NcclError, Version};

/// The reason why a group cannot use devices.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// CUDA's driver was not found.
    #[error(
        "CUDA's driver, libcuda.so.1, was not found: is there an NVIDIA GPU with its driver on this host, and was a container \
         given it (docker run --gpus all)?"
    )]
    NoDriver,
    /// CUDA's driver is too old: it lacks a function that convoke needs.
    #[error("CUDA's driver has no {missing}: install a newer one, of CUDA 12 or later")]
    OldDriver {
        /// The first function that the driver lacks.
        missing: &'static str,
    },
    /// The process sees no device of this number.
    #[error("there is no device {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES may hide some)")]
    NoDevice {
        /// The number of the device, from 0.
        ordinal: usize,
        /// The number of devices that this process sees.
        count: usize,
    },
    /// CUDA's driver returned an error.
    #[error("{what}: {message}")]
    Driver {
        /// The operation that failed.
        what: &'static str,
        /// The driver's error message.
        message: String,
    },
    /// NCCL cannot be used, or failed.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Another rank cannot use its device.
    #[error("rank {rank} has no device for the group: {what}")]
    PeerUnavailable {
        /// The rank that cannot use its device.
        rank: usize,
        /// The error message of that rank.
        what: String,
    },
    /// The ranks have different versions of NCCL.
    #[error("the ranks have different versions of NCCL: {}", versions(ranks))]
    VersionMismatch {
        /// For each version, the lowest rank that has it, and the version.
        ranks: Vec<(usize, Version)>,
    },
    /// Two ranks use one device.
    #[error(
        "ranks {} and {} are on the same device, {device}: each needs its own (convoke --gpu-bind, or \
         CudaContext::new(LOCAL_RANK))", ranks.0, ranks.1
    )]
    DeviceShared {
        /// The two ranks that use the device.
        ranks: (usize, usize),
        /// The device's UUID.
        device: String,
    },
    /// NCCL did not connect the devices of the group in time.
    #[error("NCCL did not connect the group's devices within {} ms", after.as_millis())]
    InitTimeout {
        /// How long the ranks waited.
        after: Duration,
    },
    /// The call needs a device, and the group has none.
    #[error("group {group} has no device: Group::with_device gives it one")]
    GroupWithoutDevice {
        /// Name of the group.
        group: String,
    },
}

convoke_env::debug_as_display!(DeviceError);

impl DeviceError {
    /// Returns the rank to inspect first, if the error points to one.
    #[must_use]
    pub fn suspect_rank(&self) -> Option<usize> {
        match self {
            Self::PeerUnavailable { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// Returns a function that converts an error of CUDA's driver in the operation `what`.
    pub fn driver(what: &'static str) -> impl FnOnce(cudarc::driver::DriverError) -> Self {
        move |error| {
            // Both functions look up the error code in the driver.
            let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
            let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
            let name = name.unwrap_or_else(|_| format!("CUDA error {}", error.0 as u32));
            Self::Driver { what, message: text.map_or(name.clone(), |text| format!("{name}, {text}")) }
        }
    }
}

/// Lists the versions, with a rank of each.
fn versions(ranks: &[(usize, Version)]) -> String {
    let one = |(rank, version): &(usize, Version)| format!("rank {rank} has {version}");
    ranks.iter().map(one).collect::<Vec<_>>().join(", ")
}
