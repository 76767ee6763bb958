//! The capability exchange of a group's devices before NCCL is called, and the check that they match. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::DeviceError;
use crate::nccl::Version;

/// The message of a rank about its device, sent before NCCL is called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Capabilities {
    /// The version of NCCL; `None` if the rank is staged through the host.
    pub(super) version: Option<(u32, u32, u32)>,
    /// The device's UUID.
    pub(super) device: String,
    /// The reason why the rank cannot use its device.
    pub(super) error: Option<String>,
}

/// Checks that the messages of all ranks allow a common communicator.
pub(super) fn check_compatible(all: &[Capabilities]) -> Result<(), DeviceError> {
    let ranks = || all.iter().enumerate();
    if let Some((rank, what)) = ranks().find_map(|(rank, one)| Some((rank, one.error.clone()?))) {
        return Err(DeviceError::PeerUnavailable { rank, what });
    }
    if let Some(rank) = all.iter().position(|one| one.version.is_none() != all[0].version.is_none()) {
        let what = "its data are staged through host memory and those of other ranks are not, or the \
                    reverse: set DeviceOptions::staged equally on all ranks";
        return Err(DeviceError::PeerUnavailable { rank, what: what.to_owned() });
    }
    // The first rank with each version.
    let versions: BTreeMap<_, _> = ranks().rev().map(|(rank, one)| (one.version, rank)).collect();
    if versions.len() > 1 {
        let version = |(major, minor, patch)| Version { major, minor, patch };
        let mut ranks: Vec<_> =
            versions.into_iter().filter_map(|(of, rank)| Some((rank, version(of?)))).collect();
        ranks.sort_unstable();
        return Err(DeviceError::VersionMismatch { ranks });
    }
    // Several ranks may share a device if they are staged through the host.
    let mut devices = BTreeMap::new();
    for (rank, Capabilities { device, .. }) in
        ranks().filter(|(_, one)| one.version.is_some() && !one.device.is_empty())
    {
        if let Some(first) = devices.insert(device, rank) {
            return Err(DeviceError::DeviceShared { ranks: (first, rank), device: device.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(version: Option<(u32, u32, u32)>, device: &str) -> Capabilities {
        Capabilities { version, device: device.to_owned(), error: None }
    }

    #[test]
    fn ranks_with_equal_versions_and_separate_devices_are_compatible() {
        let new = Some((2, 30, 7));
        assert_eq!(check_compatible(&[capabilities(new, "a"), capabilities(new, "b")]), Ok(()));
        assert_eq!(
            check_compatible(&[capabilities(None, "a"), capabilities(None, "a")]),
            Ok(()),
            "through the host"
        );
        // Devices whose UUID the driver does not report are not compared.
        assert_eq!(check_compatible(&[capabilities(new, ""), capabilities(new, "")]), Ok(()));
    }

    #[test]
    fn differing_versions_and_shared_devices_are_named() {
        let (old, new) = (Some((2, 18, 3)), Some((2, 30, 7)));
        let text = |all: &[Capabilities]| check_compatible(all).unwrap_err().to_string();
        assert_eq!(
            text(&[capabilities(new, "a"), capabilities(old, "b"), capabilities(new, "c")]),
            "the ranks have different versions of NCCL: rank 0 has 2.30.7, rank 1 has 2.18.3"
        );
        let shared = text(&[capabilities(new, "a"), capabilities(new, "b"), capabilities(new, "a")]);
        assert!(
            shared.starts_with("ranks 0 and 2 are on the same device, a: each needs its own"),
            "{shared}"
        );
        let broken = Capabilities { error: Some("NCCL was not found".to_owned()), ..capabilities(None, "b") };
        assert_eq!(
            text(&[capabilities(new, "a"), broken]),
            "rank 1 has no device for the group: NCCL was not found"
        );
        let mixed = text(&[capabilities(new, "a"), capabilities(None, "b")]);
        assert!(
            mixed.starts_with("rank 1 has no device for the group: its data are staged through host memory"),
            "{mixed}"
        );
    }
}
