//! Machines for tests: a folder with the files that the kernel would have.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use super::super::machine::Machine;
use super::{Topology, TopologyError};

pub(in super::super) struct FakeSysfs {
    root: tempfile::TempDir,
}

impl FakeSysfs {
    pub(in super::super) fn new() -> Self {
        Self { root: tempfile::tempdir().expect("a directory") }
    }

    pub(in super::super) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(in super::super) fn file(&self, path: &str, text: impl std::fmt::Display) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, format!("{text}\n")).expect("a file");
    }

    pub(in super::super) fn node(&self, node: usize, cpus: &str) {
        self.file(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
    }

    /// Adds the CPUs of one core of this package. The core has an instruction cache, a private cache, and a
    /// cache that `sharers` share.
    pub(in super::super) fn core(&self, cpus: &[usize], package: usize, sharers: &str) {
        let siblings = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        for cpu in cpus {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}");
            self.file(&format!("{dir}/topology/physical_package_id"), package);
            self.file(&format!("{dir}/topology/thread_siblings_list"), &siblings);
            let caches =
                [("1", "Data", &*siblings), ("3", "Unified", sharers), ("4", "Instruction", &*siblings)];
            for (index, (level, kind, list)) in caches.into_iter().enumerate() {
                self.file(&format!("{dir}/cache/index{index}/level"), level);
                self.file(&format!("{dir}/cache/index{index}/type"), kind);
                self.file(&format!("{dir}/cache/index{index}/shared_cpu_list"), list);
            }
        }
    }

    /// Two sockets with two nodes each, two cores in a node, a cache for each node, and two hyperthreads in
    /// a core. CPU c and c + 8 are core c of socket c / 4 and node c / 2.
    pub(in super::super) fn two_sockets() -> Self {
        let tree = Self::new();
        tree.file("sys/devices/system/cpu/online", "0-15");
        for node in 0..4 {
            let first = 2 * node;
            let cpus = format!("{first}-{},{}-{}", first + 1, first + 8, first + 9);
            tree.node(node, &cpus);
            for core in [first, first + 1] {
                tree.core(&[core, core + 8], core / 4, &cpus);
            }
        }
        tree
    }

    /// One node with three caches over 2, 4 and 2 cores without hyperthreads, like a CPU with disabled
    /// cores.
    pub(in super::super) fn core_complexes() -> Self {
        let tree = Self::new();
        tree.node(0, "0-7");
        for cpu in 0..8 {
            let cache = match cpu {
                0..2 => "0-1",
                2..6 => "2-5",
                _ => "6-7",
            };
            tree.core(&[cpu], 0, cache);
        }
        tree
    }

    pub(in super::super) fn read(
        &self,
        allowed: impl IntoIterator<Item = usize>,
    ) -> Result<Topology, TopologyError> {
        Topology::read(self.root(), &allowed.into_iter().collect::<Vec<_>>())
    }

    pub(in super::super) fn machine(&self, allowed: impl IntoIterator<Item = usize>) -> Machine {
        Machine {
            root: self.root().to_owned(),
            cpus: allowed.into_iter().collect(),
            driver_timeout: Duration::ZERO,
            gpus: OnceLock::new(),
            launcher: Vec::new(),
        }
    }
}
