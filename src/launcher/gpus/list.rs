//! Lists the GPUs in a child process.
//!
//! NVML starts a thread, and the launcher must have only one thread when it forks its guard. A driver that
//! has lost a GPU may never answer; then the launcher abandons the child process.

use std::io;
use std::time::Duration;

use super::Gpu;
use super::nvml::Nvml;
use crate::child::{interrupts, run_in_child};

/// Environment variable that changes the longest wait for the driver, in milliseconds, for tests.
const TIMEOUT_VARIABLE: &str = "CONVOKE_NVML_TIMEOUT_MS";
/// Longest wait of a job for NVIDIA's driver. Without its persistence mode it first initializes all GPUs of the node.
pub(crate) const DRIVER_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(crate) struct GpuList {
    pub(crate) gpus: Vec<Gpu>,
    /// Warning for the user, if the driver should have listed the GPUs and did not.
    pub(crate) warning: Option<String>,
}

/// Lists the GPUs of this node that this process may use. Without NVML, or if it fails or gives no answer within
/// `timeout`, the list is the result of `count_nodes`.
pub(crate) fn list(timeout: Duration, count_nodes: impl FnOnce() -> Vec<Gpu>) -> GpuList {
    let of_test = std::env::var(TIMEOUT_VARIABLE).ok().and_then(|millis| millis.parse().ok());
    let timeout = of_test.map_or(timeout, Duration::from_millis);
    let query = || {
        let gpus = Nvml::open().and_then(|nvml| nvml.gpus());
        serde_json::to_vec(&gpus).expect("lists of texts have a JSON form")
    };
    let answer: io::Result<Option<Vec<Gpu>>> =
        run_in_child(timeout, &interrupts(), query).and_then(|json| Ok(serde_json::from_slice(&json)?));
    let warning = answer.as_ref().err().and_then(|error| warning(error, timeout));
    GpuList { gpus: answer.ok().flatten().unwrap_or_else(count_nodes), warning }
}

fn warning(error: &io::Error, timeout: Duration) -> Option<String> {
    let what = match error.kind() {
        // The pending signal stops the launcher.
        io::ErrorKind::Interrupted => return None,
        io::ErrorKind::TimedOut => format!("did not list the GPUs within {timeout:?}"),
        _ => format!("could not be asked for the GPUs ({error})"),
    };
    Some(format!(
        "NVIDIA's driver {what}; the GPUs are counted by /dev/nvidia* instead; nvidia-smi shows whether a GPU is lost"
    ))
}
