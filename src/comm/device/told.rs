//! The capability exchange of a group's devices before NCCL is called, and the check that they match. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::error::DeviceError;
use crate::nccl::Version;

/// The message of a rank about its device, sent before NCCL is called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    /// The version of NCCL; `None` if the rank is staged through the host.
    pub(super) version: Option<(u32, u32, u32)>,
    /// The device's UUID.
    pub(super) device: String,
    /// The reason why the rank cannot use its device.
    pub(super) error: Option<String>,
}

/// Checks that the messages of all ranks allow a common communicator.
pub(super) fn judge(all: &[Told]) -> Result<(), DeviceError> {
    if let Some((rank, what)) =
        all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.error.clone()?)))
    {
        return Err(DeviceError::Elsewhere { rank, what });
    }
    if all.iter().any(|told| told.version.is_none() != all[0].version.is_none()) {
        let other = all.iter().position(|told| told.version.is_none() != all[0].version.is_none());
        let what =
            "it goes through the host and others do not, or the other way round (DeviceOptions::staged)"
                .to_owned();
        return Err(DeviceError::Elsewhere { rank: other.unwrap_or_default(), what });
    }
    let mut versions = BTreeMap::new();
    for (rank, told) in all.iter().enumerate() {
        if let Some(version) = told.version {
            versions.entry(version).or_insert(rank);
        }
    }
    if versions.len() > 1 {
        let version = |(major, minor, patch)| Version { major, minor, patch };
        let mut ranks: Vec<_> = versions.into_iter().map(|(of, rank)| (rank, version(of))).collect();
        ranks.sort_unstable();
        return Err(DeviceError::Versions { ranks });
    }
    // Several ranks may share a device if they are staged through the host.
    let mut devices = BTreeMap::new();
    for (rank, told) in
        all.iter().enumerate().filter(|(_, told)| told.version.is_some() && !told.device.is_empty())
    {
        if let Some(first) = devices.insert(told.device.as_str(), rank) {
            return Err(DeviceError::Shared { ranks: (first, rank), device: told.device.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(version: Option<(u32, u32, u32)>, device: &str) -> Told {
        Told { version, device: device.to_owned(), error: None }
    }

    #[test]
    fn ranks_with_equal_versions_and_separate_devices_are_compatible() {
        let new = Some((2, 30, 7));
        assert_eq!(judge(&[told(new, "a"), told(new, "b")]), Ok(()));
        assert_eq!(judge(&[told(None, "a"), told(None, "a")]), Ok(()), "through the host");
        // Devices whose UUID the driver does not report are not compared.
        assert_eq!(judge(&[told(new, ""), told(new, "")]), Ok(()));
    }

    #[test]
    fn differing_versions_and_shared_devices_are_named() {
        let (old, new) = (Some((2, 18, 3)), Some((2, 30, 7)));
        let text = |all: &[Told]| judge(all).unwrap_err().to_string();
        assert_eq!(
            text(&[told(new, "a"), told(old, "b"), told(new, "c")]),
            "the ranks have different versions of NCCL: rank 0 has 2.30.7, rank 1 has 2.18.3"
        );
        let shared = text(&[told(new, "a"), told(new, "b"), told(new, "a")]);
        assert!(
            shared.starts_with("ranks 0 and 2 are on the same device, a: each needs its own"),
            "{shared}"
        );
        let broken = Told { error: Some("NCCL was not found".to_owned()), ..told(None, "b") };
        assert_eq!(text(&[told(new, "a"), broken]), "rank 1 has no device for the group: NCCL was not found");
        let mixed = text(&[told(new, "a"), told(None, "b")]);
        assert!(mixed.starts_with("rank 1 has no device for the group: it goes through the host"), "{mixed}");
    }
}
