//! Computes which GPUs each worker sees. Inputs are the driver's list of GPUs and the launcher's own
//! CUDA_VISIBLE_DEVICES. Pure.

use super::Gpu;

/// Reasons why the workers cannot get the GPUs that the flags ask for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VisibleError {
    #[error("{variable} names {entry}, which is no GPU of this node (there are {})", list_names(there))]
    Unknown { variable: &'static str, entry: String, there: Vec<String> },
    #[error("{workers} workers with {each} GPUs each need {}; {there} can be seen", workers * each)]
    TooFew { workers: usize, each: usize, there: usize },
}

fn list_names(there: &[String]) -> String {
    if there.is_empty() { "none".to_owned() } else { there.join(", ") }
}

/// Returns the visible devices as CUDA_VISIBLE_DEVICES names them. Names are indices, except for the MIG
/// instances of partitioned GPUs, which have no indices.
///
/// `list` is the value of the environment variable `variable`, if that is set. As in the driver, the list
/// ends at the first entry that is no device. An unknown UUID is an error. `gpus` are the GPUs of the node,
/// without names if those are unknown.
pub(crate) fn devices(
    gpus: &[Gpu],
    variable: &'static str,
    list: Option<&str>,
) -> Result<Vec<String>, VisibleError> {
    let (devices, end) = enumerate_visible(gpus, list);
    match end {
        Some(name) if has_uuid_form(name) => {
            let there = gpus.iter().flat_map(Gpu::names).cloned().collect();
            Err(VisibleError::Unknown { variable, entry: name.chars().take(60).collect(), there })
        }
        Some(_) | None => Ok(devices),
    }
}

/// Returns the number of devices that the driver makes visible. Unlike [`devices`], accepts any entry that
/// ends the list.
pub(crate) fn count(gpus: &[Gpu], list: Option<&str>) -> usize {
    enumerate_visible(gpus, list).0.len()
}

/// Returns whether a list entry has the form of a GPU's or MIG instance's UUID. `NoDevFiles`, `none` and
/// `void` do not.
pub(crate) fn has_uuid_form(entry: &str) -> bool {
    entry.starts_with("GPU-") || entry.starts_with("MIG-")
}

/// Returns the visible devices, and the entry that ended the list, if an entry did.
fn enumerate_visible<'a>(gpus: &[Gpu], list: Option<&'a str>) -> (Vec<String>, Option<&'a str>) {
    let Some(list) = list else {
        let is_partitioned = gpus.iter().any(|gpu| gpu.instances.is_some());
        let own = |(index, gpu): (usize, &Gpu)| match &gpu.instances {
            Some(instances) => instances.clone(),
            // If another GPU has MIG instances, which have only UUIDs, this GPU is also listed by its UUID.
            None if is_partitioned => vec![gpu.uuid.clone()],
            None => vec![index.to_string()],
        };
        return (gpus.iter().enumerate().flat_map(own).collect(), None);
    };
    let mut devices: Vec<String> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let is_there = match entry.parse::<i64>() {
            Ok(index) => usize::try_from(index).is_ok_and(|index| index < gpus.len()),
            Err(_) => is_named(gpus, entry),
        };
        if !is_there {
            return (devices, Some(entry));
        }
        // As in the driver, the list also ends at a repeated entry.
        if devices.iter().any(|before| before == entry) {
            break;
        }
        devices.push(entry.to_owned());
    }
    (devices, None)
}

/// Returns whether the entry is a prefix of a device's UUID, as in the driver. If no UUIDs are known, any
/// entry in the form of one matches.
fn is_named(gpus: &[Gpu], entry: &str) -> bool {
    let mut names = gpus.iter().flat_map(Gpu::names).peekable();
    has_uuid_form(entry) && (names.peek().is_none() || names.any(|name| name.starts_with(entry)))
}

/// Assigns `each` devices, in order, to each of `workers`. Returns one list for each worker.
pub(crate) fn split_devices(
    devices: &[String],
    workers: usize,
    each: usize,
) -> Result<Vec<String>, VisibleError> {
    if devices.len() < workers * each {
        return Err(VisibleError::TooFew { workers, each, there: devices.len() });
    }
    Ok(devices.chunks(each).take(workers).map(|share| share.join(",")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: usize, instances: Option<usize>) -> Gpu {
        let named = |count| (0..count).map(|index| format!("MIG-{number}-{index}")).collect();
        Gpu {
            uuid: format!("GPU-{number}a"),
            pci: format!("0000:0{number}:00.0"),
            instances: instances.map(named),
        }
    }

    fn enumerate_visible(gpus: &[Gpu], list: Option<&str>) -> Result<Vec<String>, VisibleError> {
        devices(gpus, "CUDA_VISIBLE_DEVICES", list)
    }

    #[test]
    fn all_gpus_are_visible_without_cuda_visible_devices() {
        assert_eq!(enumerate_visible(&[gpu(0, None), gpu(1, None)], None).unwrap(), ["0", "1"]);
        assert_eq!(
            enumerate_visible(&[gpu(0, Some(2)), gpu(1, None)], None).unwrap(),
            ["MIG-0-0", "MIG-0-1", "GPU-1a"]
        );
        assert_eq!(enumerate_visible(&[gpu(0, Some(0))], None).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn cuda_visible_devices_selects_gpus_like_the_driver() {
        let gpus = [gpu(0, None), gpu(1, Some(2)), gpu(2, None)];
        assert_eq!(enumerate_visible(&gpus, Some("2, 0")).unwrap(), ["2", "0"]);
        assert_eq!(enumerate_visible(&gpus, Some("1,-1,0")).unwrap(), ["1"]);
        assert_eq!(enumerate_visible(&gpus, Some("0,7,1")).unwrap(), ["0"]);
        assert_eq!(enumerate_visible(&gpus, Some("0,1,0,2")).unwrap(), ["0", "1"]);
        assert_eq!(enumerate_visible(&gpus, Some("")).unwrap(), Vec::<String>::new());
        assert_eq!(enumerate_visible(&gpus, Some("GPU-2,MIG-1-1")).unwrap(), ["GPU-2", "MIG-1-1"]);
        let error = enumerate_visible(&gpus, Some("0,GPU-9")).unwrap_err().to_string();
        assert_eq!(
            error,
            "CUDA_VISIBLE_DEVICES names GPU-9, which is no GPU of this node (there are GPU-0a, GPU-1a, MIG-1-0, MIG-1-1, GPU-2a)"
        );
        // A word that names no device ends the list. If devices are only counted, so does an unknown name.
        for (list, count) in [
            ("NoDevFiles", 0),
            ("none", 0),
            ("void,0", 0),
            ("0,none,1", 1),
            ("G", 0),
            ("0,GPU-9,1", 1),
            ("GPU-9", 0),
        ] {
            assert_eq!(super::count(&gpus, Some(list)), count, "{list}");
        }
        assert_eq!(enumerate_visible(&gpus, Some("0,none")).unwrap(), ["0"]);
        assert_eq!(enumerate_visible(&[Gpu::default()], Some("NoDevFiles")).unwrap(), Vec::<String>::new());
        // Counted without the driver's library: names cannot be checked.
        assert_eq!(enumerate_visible(&[Gpu::default()], Some("GPU-9,MIG-1")).unwrap(), ["GPU-9", "MIG-1"]);
    }

    #[test]
    fn each_worker_gets_its_own_gpus() {
        let devices: Vec<String> = ["4", "5", "6", "7", "8"].map(str::to_owned).into();
        assert_eq!(split_devices(&devices, 2, 2).unwrap(), ["4,5", "6,7"]);
        assert_eq!(split_devices(&devices, 5, 1).unwrap(), ["4", "5", "6", "7", "8"]);
        let error = split_devices(&devices, 3, 2).unwrap_err().to_string();
        assert_eq!(error, "3 workers with 2 GPUs each need 6; 5 can be seen");
    }
}
