//! Tests of the NUMA nodes of devices, and of the devices that variables select.

use std::ffi::OsString;
use std::os::unix::fs::symlink;

use super::super::topology::fake_sysfs::FakeSysfs;
use super::*;

fn nodes(tree: &FakeSysfs, variables: &[(&str, &str)]) -> Result<Vec<usize>, String> {
    let env = |name: &str| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
    };
    numa_nodes(&tree.machine([0]), &env).map_err(|error| error.to_string())
}

/// GPUs with minor numbers 0 up at these places on the bus, the n-th on node n.
fn nvidia(places: &[&str]) -> FakeSysfs {
    let tree = FakeSysfs::new();
    for (minor, pci) in places.iter().enumerate() {
        tree.file(&format!("dev/nvidia{minor}"), "");
        let information = format!(
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 120\nGPU UUID: \t GPU-{minor}a{minor}-77\nBus Location: \t {pci}\nDevice Minor: \t {minor}"
        );
        tree.file(&format!("proc/driver/nvidia/gpus/{pci}/information"), information);
        tree.file(&format!("sys/bus/pci/devices/{pci}/numa_node"), minor);
    }
    tree
}

/// Render nodes 128 up of these vendors, the n-th on node n.
fn rendering(vendors: &[&str]) -> FakeSysfs {
    let tree = FakeSysfs::new();
    tree.file("dev/kfd", "");
    for (node, vendor) in vendors.iter().enumerate() {
        let (name, pci) = (format!("renderD{}", 128 + node), format!("0000:{node}3:00.0"));
        tree.file(&format!("dev/dri/{name}"), "");
        tree.file(&format!("sys/devices/pci0000:00/{pci}/vendor"), vendor);
        tree.file(&format!("sys/bus/pci/devices/{pci}/numa_node"), node);
        let class = tree.root().join("sys/class/drm").join(name);
        fs::create_dir_all(&class).expect("a directory");
        symlink(format!("../../../devices/pci0000:00/{pci}"), class.join("device")).expect("a link");
    }
    tree
}

#[test]
fn nvidia_gpus_are_numbered_in_pci_order() {
    let tree = nvidia(&["0000:c1:00.0", "0000:07:00.0", "10000:01:00.0", "0000:0f:00.0"]);
    assert_eq!(nodes(&tree, &[]), Ok(vec![1, 3, 0, 2]));
    assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", "2, 0")]), Ok(vec![0, 1]));
    assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", "3,-1,0")]), Ok(vec![2]));
    assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", "")]), Ok(vec![]));
    assert_eq!(nodes(&tree, &[("HIP_VISIBLE_DEVICES", "3")]), Ok(vec![1, 3, 0, 2]), "not its own");
    // A container may have some of the device nodes only.
    fs::remove_file(tree.root().join("dev/nvidia1")).expect("a file");
    assert_eq!(nodes(&tree, &[]), Ok(vec![3, 0, 2]));
}

#[test]
fn nvidia_gpus_are_found_by_driver_uuid() {
    let tree = nvidia(&["0000:01:00.0", "0000:02:00.0"]);
    assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", "GPU-1a1-77,GPU-0")]), Ok(vec![1, 0]));
    for unknown in ["MIG-1a1-77", "GPU-9", "GPU-", "one"] {
        let what = format!(
            "CUDA_VISIBLE_DEVICES: only the driver's library (such as NVML) knows which device `{unknown}` is; \
             write indices, such as CUDA_VISIBLE_DEVICES=0,1"
        );
        assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", unknown)]), Err(what));
    }
}

#[test]
fn missing_numa_node_defaults_to_0_and_missing_address_fails() {
    let tree = nvidia(&["0000:01:00.0"]);
    fs::remove_dir_all(tree.root().join("sys/bus")).expect("a directory");
    assert_eq!(nodes(&tree, &[]), Ok(vec![0]));
    tree.file("dev/nvidia7", "");
    let path = tree.root().join("proc/driver/nvidia/gpus");
    let what = format!("{} does not tell where /dev/nvidia7 is; leave --numa-binding out", path.display());
    assert_eq!(nodes(&tree, &[]), Err(what));
    tree.file("sys/bus/pci/devices/0000:01:00.0/numa_node", "north");
    fs::remove_file(tree.root().join("dev/nvidia7")).expect("a file");
    let error = nodes(&tree, &[]).expect_err("no number");
    assert!(error.contains("numa_node holds `north`, which is no number; leave"), "{error}");
}

#[test]
fn amd_and_intel_gpus_are_found_by_render_nodes() {
    let tree = rendering(&["0x8086", "0x1002", "0x1002", "0x1002"]);
    assert_eq!(nodes(&tree, &[]), Ok(vec![1, 2, 3]), "AMD before Intel");
    let both = [("ROCR_VISIBLE_DEVICES", "2,1"), ("HIP_VISIBLE_DEVICES", "1"), ("CUDA_VISIBLE_DEVICES", "0")];
    assert_eq!(nodes(&tree, &both), Ok(vec![2]), "the second counts in the first, and the third is not read");
    assert_eq!(nodes(&tree, &[("CUDA_VISIBLE_DEVICES", "2")]), Ok(vec![3]));
    assert_eq!(nodes(&tree, &[("HIP_VISIBLE_DEVICES", "")]), Ok(vec![]), "hidden, and Intel is not asked");
    assert_eq!(nodes(&rendering(&["0x8086", "0x8086"]), &[("ZE_AFFINITY_MASK", "1")]), Ok(vec![1]));
    assert_eq!(nodes(&FakeSysfs::new(), &[]), Ok(vec![]));
}
