//! The CPUs, devices and programs of this machine.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use super::topology::numbered_entries;
use crate::cgroup::cpu_quota;
use crate::gpus::Gpu;
use crate::gpus::nvml::Nvml;
use crate::gpus::visible::{self, VisibleError};

const CUDA: &str = "CUDA_VISIBLE_DEVICES";
const HIP: &str = "HIP_VISIBLE_DEVICES";

/// The root below which the machine's files are read; tests use another root.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// `/`: holds dev/, proc/ and sys/.
    pub(crate) root: PathBuf,
    /// CPUs on which this process may run, ascending; empty if the system does not report them.
    pub(crate) cpus: Vec<usize>,
    /// NVIDIA's GPUs, read at the first request.
    pub(crate) gpus: OnceLock<Vec<Gpu>>,
    /// Folders of the launcher: that of its path as called, and that to which the links lead.
    pub(crate) launcher: Vec<PathBuf>,
}

/// The vendor of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vendor {
    /// /dev/nvidia0, ...
    Nvidia,
    /// /dev/kfd, and render nodes of AMD.
    Amd,
    /// Render nodes of Intel.
    Intel,
}

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Machine {
    /// The machine that this process runs on.
    pub(crate) fn detect() -> Self {
        Self {
            root: PathBuf::from("/"),
            cpus: affinity(),
            gpus: OnceLock::new(),
            launcher: launcher_folders(),
        }
    }

    /// Returns the number of CPUs on which this process may run.
    pub(crate) fn cpu_count(&self) -> usize {
        self.cpus.len().max(1)
    }

    /// Returns the number of CPUs whose time this process may use: [`Self::cpu_count`], or less under a
    /// control group's quota.
    pub(crate) fn cpu_share(&self) -> usize {
        cpu_quota(&self.root).map_or(self.cpu_count(), |quota| self.cpu_count().min(quota))
    }

    /// Returns the number of this vendor's devices that exist and may be used.
    pub(crate) fn devices(&self, vendor: Vendor, env: Env<'_>) -> usize {
        match vendor {
            Vendor::Nvidia => {
                let list = env(CUDA).map(|list| list.to_string_lossy().into_owned());
                visible::count(self.gpus(), list.as_deref())
            }
            Vendor::Amd if self.root.join("dev/kfd").exists() => {
                let variables = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"];
                visible_count(self.render_nodes("0x1002").len(), env, &variables)
            }
            Vendor::Amd => 0,
            Vendor::Intel => visible_count(self.render_nodes("0x8086").len(), env, &["ZE_AFFINITY_MASK"]),
        }
    }

    /// Returns NVIDIA's GPUs as the driver's library lists them. Without the library, returns one nameless
    /// GPU for each device node.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        self.gpus.get_or_init(|| {
            let listed =
                if self.root == Path::new("/") { Nvml::open().and_then(|nvml| nvml.gpus()) } else { None };
            listed.unwrap_or_else(|| vec![Gpu::default(); self.nvidia_minors().len()])
        })
    }

    /// The devices of each of `workers`, `each` for one, and the variable that shows them.
    ///
    /// # Errors
    /// There are too few devices, or the variable names a device that does not exist.
    pub(crate) fn gpus_of_workers(
        &self,
        env: Env<'_>,
        workers: usize,
        each: usize,
    ) -> Result<(&'static str, Vec<String>), VisibleError> {
        let list = |name: &str| env(name).map(|list| list.to_string_lossy().into_owned());
        let amd = self.devices(Vendor::Amd, &|_| None);
        let (variable, gpus, list) = match self.gpus() {
            [] if amd > 0 => {
                let hip = list(HIP).filter(|list| !list.is_empty());
                (HIP, &*vec![Gpu::default(); amd], hip.or_else(|| list(CUDA)))
            }
            gpus => (CUDA, gpus, list(CUDA)),
        };
        let devices = visible::devices(gpus, variable, list.as_deref())?;
        Ok((variable, visible::split_devices(&devices, workers, each)?))
    }

    /// N of each /dev/nvidiaN, ascending.
    pub(super) fn nvidia_minors(&self) -> Vec<usize> {
        numbered_entries(&self.root.join("dev"), "nvidia").into_iter().map(|(minor, _)| minor).collect()
    }

    /// N of each /dev/dri/renderDN whose sysfs entry names this PCI vendor, ascending; without sysfs, of all.
    pub(super) fn render_nodes(&self, vendor: &str) -> Vec<usize> {
        let is_ours = |number: &usize| {
            let path = self.root.join(format!("sys/class/drm/renderD{number}/device/vendor"));
            fs::read_to_string(path).map_or(true, |text| text.trim() == vendor)
        };
        let numbers =
            numbered_entries(&self.root.join("dev/dri"), "renderD").into_iter().map(|(number, _)| number);
        numbers.filter(is_ours).collect()
    }
}

/// The folders of this program: from the word that called it, then from the kernel.
fn launcher_folders() -> Vec<PathBuf> {
    let word = std::env::args_os().next().unwrap_or_default();
    let called = if word.as_bytes().contains(&b'/') {
        Some(PathBuf::from(word))
    } else {
        in_path(&word, &|name| std::env::var_os(name))
    };
    let files = called.into_iter().chain(std::env::current_exe().ok());
    files.filter_map(|file| file.parent().map(Path::to_owned)).collect()
}

/// CPUs that this process may run on.
fn affinity() -> Vec<usize> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
}

/// Returns the number of `count` devices that the variables leave visible. Like the drivers, it counts up to
/// the first entry that is no device.
fn visible_count(count: usize, env: Env<'_>, variables: &[&str]) -> usize {
    variables.iter().fold(count, |left, variable| match env(variable) {
        Some(list) => {
            let list = list.to_string_lossy();
            let is_index = |text: &str| text.parse().is_ok_and(|index: usize| index < count);
            // Only the driver knows names, and parts of a device such as 0.1.
            let is_part = |entry: &str| entry.split_once('.').is_some_and(|(device, _)| is_index(device));
            let is_device = |entry: &&str| is_index(entry) || is_part(entry) || visible::has_uuid_form(entry);
            left.min(list.split(',').map(str::trim).take_while(is_device).count())
        }
        None => left,
    })
}

/// Returns whether the path is a file with an execute permission.
pub(crate) fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// The first program of this name in PATH. A name with a slash is none.
pub(crate) fn in_path(name: &OsStr, env: Env<'_>) -> Option<PathBuf> {
    if name.is_empty() || name.as_bytes().contains(&b'/') {
        return None;
    }
    let path = env("PATH").unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| is_executable(path))
}
