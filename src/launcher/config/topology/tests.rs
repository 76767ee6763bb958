//! Tests of the topology read from full and from sparse sysfs trees.

use super::fake_sysfs::FakeSysfs;
use super::*;

fn cpu(id: usize, node: usize, package: usize, cache: usize, core: usize) -> Cpu {
    Cpu { id, node, package, cache, core }
}

#[test]
fn each_cpu_has_its_core_cache_socket_and_numa_node() {
    let topology = FakeSysfs::two_sockets().read([0, 1, 5, 9, 15]).expect("CPUs");
    let wanted =
        [cpu(0, 0, 0, 0, 0), cpu(1, 0, 0, 0, 1), cpu(5, 2, 1, 4, 5), cpu(9, 0, 0, 0, 1), cpu(15, 3, 1, 6, 7)];
    assert_eq!(topology.cpus, wanted, "cores and caches by a CPU that is not allowed itself");
}

#[test]
fn missing_topology_files_have_plain_defaults() {
    let tree = FakeSysfs::new();
    assert_eq!(tree.read([0, 2]).expect("CPUs").cpus, [cpu(0, 0, 0, 0, 0), cpu(2, 0, 0, 0, 2)]);
    tree.node(1, "2-3");
    for (id, package, core) in [(0, "-1", "0"), (1, "-1", "0"), (2, "7", "0"), (3, "7", "1")] {
        tree.file(&format!("sys/devices/system/cpu/cpu{id}/topology/physical_package_id"), package);
        tree.file(&format!("sys/devices/system/cpu/cpu{id}/topology/core_id"), core);
    }
    let wanted = [cpu(0, 0, 0, 0, 0), cpu(1, 0, 0, 0, 0), cpu(2, 1, 7, 2, 2), cpu(3, 1, 7, 2, 3)];
    assert_eq!(tree.read(0..4).expect("CPUs").cpus, wanted, "cores by core_id, no cache: the package");
}

#[test]
fn offline_cpus_do_not_count() {
    let tree = FakeSysfs::two_sockets();
    tree.file("sys/devices/system/cpu/online", "0-2,12");
    let ids: Vec<usize> = tree.read(2..16).expect("CPUs").cpus.iter().map(|cpu| cpu.id).collect();
    assert_eq!(ids, [2, 12]);
    for none in [tree.read(3..12), tree.read([])] {
        assert_eq!(none.expect_err("no CPU").to_string(), "the CPUs that workers may run on are not known");
    }
}

#[test]
fn malformed_topology_file_is_named() {
    let files = [
        ("node/node1/cpulist", "0-x", "list of CPUs"),
        ("cpu/online", "3-1", "list of CPUs"),
        ("cpu/cpu3/topology/thread_siblings_list", "3,11,11", "list of CPUs"),
        ("cpu/cpu3/topology/physical_package_id", "one", "number"),
        ("cpu/cpu3/cache/index1/level", "", "number"),
        ("cpu/cpu3/cache/index1/shared_cpu_list", "0-99999999", "list of CPUs"),
    ];
    for (path, text, wanted) in files {
        let tree = FakeSysfs::two_sockets();
        let path = format!("sys/devices/system/{path}");
        tree.file(&path, text);
        let error = tree.read([3]).expect_err(&path).to_string();
        let path = tree.root().join(path);
        assert_eq!(error, format!("{} holds `{text}`, which is no {wanted}", path.display()));
    }
    let tree = FakeSysfs::new();
    tree.file("sys/devices/system/cpu/online", "\u{1b}[2J".repeat(1000));
    let error = tree.read([0]).expect_err("no list").to_string();
    assert!(error.len() < 400 && !error.contains('\u{1b}'), "{error}");
    fs_dir(&tree, "sys/devices/system/node/node0/cpulist");
    tree.file("sys/devices/system/cpu/online", "0");
    let error = tree.read([0]).expect_err("a folder").to_string();
    assert!(error.contains("node0/cpulist cannot be read: Is a directory"), "{error}");
}

fn fs_dir(tree: &FakeSysfs, path: &str) {
    std::fs::create_dir_all(tree.root().join(path)).expect("a directory");
}

#[test]
fn cpu_lists_follow_kernel_syntax() {
    for (text, cpus) in
        [("", vec![]), ("0", vec![0]), ("0-2,4,6-7", vec![0, 1, 2, 4, 6, 7]), ("65536", vec![65_536])]
    {
        assert_eq!(cpu_list(text), Some(cpus), "{text}");
    }
    assert_eq!(cpu_list("0-65536").map(|cpus| cpus.len()), Some(65_537));
    for text in
        [",", "0,", "-", "1-", "-1", "2-1", "1,1", "3,1-2", "0-65537", "1-2-3", "+1", "0x1", " 1", "0-7:2/4"]
    {
        assert_eq!(cpu_list(text), None, "{text}");
    }
    assert_eq!(cpu_list(&"9".repeat(99)), None);
}
