//! Tests of the CPUs that workers get, from a command line and a machine.

use std::ffi::OsString;

use super::super::testing::config_of;
use super::super::topology::fake_sysfs::FakeSysfs;
use crate::formatting::ranges;

/// The CPUs of each worker as `taskset -c` writes them, or what is said instead.
fn cpus(
    tree: &FakeSysfs,
    allowed: impl IntoIterator<Item = usize>,
    flag: &str,
    workers: usize,
) -> Result<Vec<String>, String> {
    let words = ["convoke", flag, &format!("--nproc-per-node={workers}"), "--no-python", "x"];
    match config_of(words.map(OsString::from).into_iter(), &|_| None, &tree.machine(allowed)) {
        Ok(config) => Ok(config.cpus.iter().map(|cpus| ranges(cpus)).collect()),
        Err(error) => Err(error.text),
    }
}

fn gets(tree: &FakeSysfs, allowed: impl IntoIterator<Item = usize>, flag: &str, wanted: &[&str]) {
    let got = cpus(tree, allowed, flag, wanted.len());
    assert_eq!(got, Ok(wanted.iter().copied().map(String::from).collect()), "{flag}");
}

fn refuses(
    tree: &FakeSysfs,
    allowed: impl IntoIterator<Item = usize>,
    flag: &str,
    workers: usize,
    what: &str,
) {
    assert_eq!(cpus(tree, allowed, flag, workers), Err(format!("convoke: error: {flag}: {what}\n")));
}

/// Two sockets with four GPUs on node 0 and two on node 3, and minor numbers against the order of the bus.
fn with_gpus() -> FakeSysfs {
    let tree = FakeSysfs::two_sockets();
    for (minor, pci, node) in
        [(5, "01", 0), (4, "02", 0), (3, "0a", 0), (2, "41", 0), (1, "c1", 3), (0, "e1", 3)]
    {
        tree.file(&format!("dev/nvidia{minor}"), "");
        tree.file(
            &format!("proc/driver/nvidia/gpus/0000:{pci}:00.0/information"),
            format!("Device Minor: \t {minor}"),
        );
        tree.file(&format!("sys/bus/pci/devices/0000:{pci}:00.0/numa_node"), node);
    }
    tree
}

#[test]
fn workers_are_distributed_in_contiguous_blocks() {
    let tree = FakeSysfs::two_sockets();
    let nodes = ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"];
    let sockets = ["0-3,8-11", "4-7,12-15"];
    gets(&tree, 0..16, "--bind=node", &nodes);
    gets(&tree, 0..16, "--bind=node", &[nodes[0], nodes[2]]);
    gets(&tree, 0..16, "--bind=node", &[nodes[0], nodes[0], nodes[1], nodes[2], nodes[2], nodes[3]]);
    gets(&tree, 0..16, "--bind=socket", &[sockets[0]]);
    gets(&tree, 0..16, "--bind=socket", &[sockets[0], sockets[0], sockets[1]]);
    gets(&tree, 0..16, "--bind=core-complex", &nodes);
    let complexes = FakeSysfs::core_complexes();
    gets(&complexes, 0..8, "--bind=core-complex", &["0-1", "2-5", "6-7"]);
    gets(&complexes, 0..8, "--bind=node", &["0-7", "0-7"]);
}

#[test]
fn core_binding_never_splits_a_physical_core() {
    let tree = FakeSysfs::two_sockets();
    gets(&tree, 0..16, "--bind=core", &["0-15"]);
    gets(&tree, 0..16, "--bind=core", &["0-3,8-11", "4-7,12-15"]);
    gets(&tree, 0..16, "--bind=core", &["0-2,8-10", "3-5,11-13", "6-7,14-15"]);
    refuses(
        &tree,
        0..16,
        "--bind=core",
        9,
        "convoke can use 8 physical cores for 9 workers; write --nproc-per-node=8, or --bind=node",
    );
    gets(&FakeSysfs::new(), 0..3, "--bind=core", &["0-1", "2"]);
}

#[test]
fn cpu_sets_are_contiguous_in_topology_instead_of_cpu_numbers() {
    let tree = FakeSysfs::new();
    tree.node(0, "0,2,4,6");
    tree.node(1, "1,3,5,7");
    for cpu in 0..8 {
        tree.core(&[cpu], cpu % 2, if cpu % 2 == 0 { "0,2,4,6" } else { "1,3,5,7" });
    }
    gets(&tree, 0..8, "--bind=core", &["0,2", "4,6", "1,3", "5,7"]);
    gets(&tree, 0..8, "--bind=socket", &["0,2,4,6", "1,3,5,7"]);
}

#[test]
fn only_allowed_cpus_are_assigned() {
    let tree = FakeSysfs::two_sockets();
    // Of node 0 nothing, of node 1 one hyperthread of a core, of node 2 all, of node 3 one core.
    let allowed = [10, 4, 5, 12, 13, 7, 15];
    let mut ascending = allowed;
    ascending.sort_unstable();
    gets(&tree, ascending, "--bind=node", &["10", "4-5,12-13", "7,15"]);
    gets(&tree, ascending, "--bind=socket", &["10", "4-5,7,12-13,15"]);
    gets(&tree, ascending, "--bind=core", &["10", "4,12", "5,13", "7,15"]);
    refuses(
        &tree,
        [3, 11],
        "--bind=core",
        2,
        "convoke can use 1 physical core for 2 workers; write --nproc-per-node=1, or --bind=node",
    );
}

#[test]
fn workers_are_unbound_by_default() {
    let tree = with_gpus();
    assert_eq!(cpus(&tree, 0..16, "--bind=none", 2), Ok(Vec::new()));
    tree.file("sys/devices/system/cpu/online", "nonsense");
    assert_eq!(cpus(&tree, 0..16, "--standalone", 2), Ok(Vec::new()), "nor read");
}

#[test]
fn unreadable_topology_is_reported_with_advice() {
    let tree = FakeSysfs::two_sockets();
    tree.node(2, "4-");
    let path = tree.root().join("sys/devices/system/node/node2/cpulist");
    let what = format!("{} holds `4-`, which is no list of CPUs; leave --bind out", path.display());
    refuses(&tree, 0..16, "--bind=core", 2, &what);
    let what = "the CPUs that workers may run on are not known; leave --bind out";
    refuses(&FakeSysfs::new(), [], "--bind=node", 1, what);
}

#[test]
fn workers_are_bound_to_the_numa_node_of_their_device() {
    let tree = with_gpus();
    let [near, far] = ["0-1,8-9", "6-7,14-15"];
    gets(&tree, 0..16, "--numa-binding=node", &[near, near, near, near, far, far]);
    gets(&tree, 0..16, "--numa-binding=node", &[near]);
    let [near, far] = ["0-3,8-11", "4-7,12-15"];
    gets(&tree, 0..16, "--numa-binding=socket", &[near, near, near, near, far, far]);
    let what = "convoke can use 6 devices for 7 workers; write --nproc-per-node=6, or --bind=core-complex";
    refuses(&tree, 0..16, "--numa-binding=core-complex", 7, what);
    let what = "device 4 is on NUMA node 3, but convoke may not use any CPU there; \
                widen its affinity mask, or write --bind=node";
    refuses(&tree, 0..4, "--numa-binding=node", 5, what);
    gets(&tree, 0..4, "--numa-binding=node", &["0-1", "0-1"]);
}

#[test]
fn devices_of_a_numa_node_divide_its_cores_and_caches() {
    let tree = with_gpus();
    let what = "NUMA node 0 has 2 physical cores for 4 devices; write --numa-binding=node";
    refuses(&tree, 0..16, "--numa-binding=exclusive", 1, what);
    let tree = FakeSysfs::core_complexes();
    for card in 0..5 {
        tree.file(&format!("dev/nvidia{card}"), "");
        tree.file(
            &format!("proc/driver/nvidia/gpus/0000:0{card}:00.0/information"),
            format!("Device Minor: {card}"),
        );
    }
    gets(&tree, 0..8, "--numa-binding=exclusive", &["0-1", "2-3", "4-5", "6", "7"]);
    gets(&tree, 0..8, "--numa-binding=core-complex", &["2-5", "0-1", "6-7", "2-5", "0-1"]);
    gets(&tree, [1, 2, 6, 7], "--numa-binding=core-complex", &["6-7", "1", "2", "6-7"]);
}

#[test]
fn numa_node_spanning_sockets_belongs_to_the_first_socket() {
    let tree = FakeSysfs::new();
    tree.node(0, "0-3");
    for cpu in 0..4 {
        tree.core(&[cpu], cpu / 2, if cpu < 2 { "0-1" } else { "2-3" });
    }
    tree.file("dev/nvidia0", "");
    tree.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: 0");
    tree.file("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1");
    gets(&tree, 0..4, "--numa-binding=socket", &["0-3"]);
    gets(&tree, 0..4, "--bind=socket", &["0-1", "2-3"]);
}
