//! Finds the CPUs, devices and programs of this machine.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use convoke_env::host;
use convoke_env::host::cgroup::cpu_quota;

use super::topology::numbered_entries;
use crate::cli::Env;
use crate::gpus::Gpu;
use crate::gpus::list::{self, GpuList};
use crate::gpus::visible::{self, VisibleError};

const CUDA: &str = "CUDA_VISIBLE_DEVICES";
const HIP: &str = "HIP_VISIBLE_DEVICES";

/// What the launcher knows about this machine. Tests read its files below another root than `/`.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// Folder with dev/, proc/ and sys/: `/`, except in tests.
    pub(crate) root: PathBuf,
    /// CPUs on which this process may run, ascending; empty if the system does not report them.
    pub(crate) cpus: Vec<usize>,
    /// Longest wait for NVIDIA's driver.
    pub(crate) driver_timeout: Duration,
    /// Result of [`Machine::gpus`], which lists the GPUs at its first call.
    pub(crate) gpus: OnceLock<GpuList>,
    /// Folders that contain the launcher's program: by the path as called, and by the path without symbolic
    /// links.
    pub(crate) launcher: Vec<PathBuf>,
}

/// The vendor of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vendor {
    /// NVIDIA: /dev/nvidia0, ...
    Nvidia,
    /// AMD: /dev/kfd, and render nodes of AMD.
    Amd,
    /// Intel: render nodes of Intel.
    Intel,
}

impl Machine {
    /// Detects the CPUs and folders of the machine on which this process runs.
    pub(crate) fn detect() -> Self {
        Self {
            root: PathBuf::from("/"),
            cpus: host::allowed_cpus(),
            driver_timeout: list::DRIVER_TIMEOUT,
            gpus: OnceLock::new(),
            launcher: launcher_folders(),
        }
    }

    /// Returns the number of CPUs on which this process may run.
    pub(crate) fn cpu_count(&self) -> usize {
        self.cpus.len().max(1)
    }

    /// Returns how many CPUs' worth of time this process may use: [`Self::cpu_count`], or less if a cgroup
    /// has a CPU quota.
    pub(crate) fn cpu_share(&self) -> usize {
        cpu_quota(&self.root).map_or(self.cpu_count(), |quota| self.cpu_count().min(quota))
    }

    /// Returns the number of this vendor's devices that exist and that the environment variables leave
    /// visible.
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
        let nameless = || vec![Gpu::default(); self.nvidia_minors().len()];
        let list = || match self.root == Path::new("/") {
            true => list::list(self.driver_timeout, nameless),
            false => GpuList { gpus: nameless(), warning: None },
        };
        &self.gpus.get_or_init(list).gpus
    }

    /// Returns a warning if NVIDIA's driver was asked for its GPUs and did not list them.
    pub(crate) fn gpu_warning(&self) -> Option<&str> {
        self.gpus.get()?.warning.as_deref()
    }

    /// Returns the environment variable that makes devices visible, and its value for each of `workers`,
    /// which get `each` devices.
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

    /// Returns the number N of each device node /dev/nvidiaN, ascending.
    pub(super) fn nvidia_minors(&self) -> Vec<usize> {
        numbered_entries(&self.root.join("dev"), "nvidia").into_iter().map(|(minor, _)| minor).collect()
    }

    /// Returns the number N of each /dev/dri/renderDN whose sysfs entry names this PCI vendor, ascending.
    /// Nodes without a sysfs entry are included.
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

/// Returns the folders that contain this program: by the word that called it, then by the path that the
/// kernel reports.
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

/// Returns how many of `count` devices the environment variables leave visible. Like the drivers, it counts
/// the list's entries up to the first that is no device.
fn visible_count(count: usize, env: Env<'_>, variables: &[&str]) -> usize {
    let is_index = |text: &str| text.parse().is_ok_and(|index: usize| index < count);
    // A name, or a part of a device such as 0.1, counts as a device: only the driver knows whether it exists.
    let is_part = |entry: &str| entry.split_once('.').is_some_and(|(device, _)| is_index(device));
    let is_device = |entry: &&str| is_index(entry) || is_part(entry) || visible::has_uuid_form(entry);
    let visible =
        |list: OsString| list.to_string_lossy().split(',').map(str::trim).take_while(is_device).count();
    variables.iter().filter_map(|variable| env(variable)).map(visible).fold(count, usize::min)
}

/// Returns whether the path is a file with an execute permission.
pub(crate) fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Returns the first program of this name in PATH; `None` if there is none or the name has a slash.
pub(crate) fn in_path(name: &OsStr, env: Env<'_>) -> Option<PathBuf> {
    if name.is_empty() || name.as_bytes().contains(&b'/') {
        return None;
    }
    let path = env("PATH").unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| is_executable(path))
}
