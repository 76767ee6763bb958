//! Collects evidence about a failed worker's GPUs: the driver's messages in the kernel's log, and memory
//! errors.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, SystemTime};

use nix::libc::O_NONBLOCK;
use nix::time::{ClockId, clock_gettime};

use super::Gpu;
use super::nvml::Nvml;
use super::xid::Xid;

/// Environment variable that names another kernel log, for tests.
const KERNEL_LOG_VARIABLE: &str = "CONVOKE_KMSG";
const KERNEL_LOG: &str = "/dev/kmsg";
/// Longest wait for NVIDIA's driver. It may never answer if a GPU is lost.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Tolerance for differences between the system's clock and the kernel log's.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);
/// Bytes of the longest record of the kernel's log, and most records that are read.
const RECORD_BYTES: usize = 8 << 10;
const MAX_RECORDS: usize = 20_000;
/// Most lines of evidence about one worker.
const MAX_LINES: usize = 8;

/// A worker that failed, for which to collect evidence.
#[derive(Debug, Clone)]
pub(crate) struct FailedWorker {
    /// GPUs of the worker, as CUDA_VISIBLE_DEVICES names them.
    pub(crate) devices: Vec<String>,
    pub(crate) pid: Option<i32>,
}

/// Returns lines of evidence about the GPUs of each worker since the time `began`. There are none if neither
/// driver nor log can be read.
pub(crate) fn gather(failed: Vec<FailedWorker>, began: SystemTime) -> Vec<Vec<String>> {
    let (count, (sender, receiver)) = (failed.len(), channel());
    let gatherer = move || {
        let nvml = Nvml::open();
        if nvml.is_none() && std::env::var_os(KERNEL_LOG_VARIABLE).is_none() {
            // Without NVIDIA's driver the kernel's log has no messages about GPUs.
            return;
        }
        let gpus = nvml.as_ref().and_then(Nvml::gpus).unwrap_or_default();
        let xids = driver_messages(began);
        let errors =
            |gpu: &Gpu| nvml.as_ref().and_then(|nvml| nvml.uncorrected_errors(&gpu.uuid)).unwrap_or(0);
        let lines: Vec<_> = failed.iter().map(|worker| lines(worker, &gpus, &xids, errors)).collect();
        let _ = sender.send(lines);
    };
    // Collects in a thread, which is abandoned if the driver does not answer.
    let started = thread::Builder::new().name("gpus".to_owned()).spawn(gatherer);
    let lines = started.ok().and_then(|_| receiver.recv_timeout(DRIVER_TIMEOUT).ok());
    lines.unwrap_or_else(|| vec![Vec::new(); count])
}

/// Returns the lines of evidence that concern one worker.
fn lines(worker: &FailedWorker, gpus: &[Gpu], xids: &[Xid], errors: impl Fn(&Gpu) -> u64) -> Vec<String> {
    let own: Vec<&Gpu> = worker.devices.iter().filter_map(|device| find_gpu(gpus, device)).collect();
    let is_own = |xid: &&Xid| {
        let by_pid = xid.pid.is_some() && xid.pid == worker.pid.and_then(|pid| u32::try_from(pid).ok());
        by_pid || own.iter().any(|gpu| gpu.pci == xid.pci)
    };
    let reported = xids.iter().filter(is_own).map(|xid| {
        let said = if xid.text.is_empty() { String::new() } else { format!(" ({})", xid.text) };
        format!("Xid {} on {}: {}{said}", xid.number, xid.pci, xid.meaning())
    });
    let counted = own.iter().filter_map(|gpu| match errors(gpu) {
        0 => None,
        count => Some(format!(
            "{count} uncorrected errors of the memory of {} since its driver was loaded",
            gpu.uuid
        )),
    });
    reported.chain(counted).take(MAX_LINES).collect()
}

/// Returns the GPU that an entry of CUDA_VISIBLE_DEVICES means.
fn find_gpu<'a>(gpus: &'a [Gpu], device: &str) -> Option<&'a Gpu> {
    if let Ok(index) = device.parse::<usize>() {
        return gpus.get(index);
    }
    gpus.iter().find(|gpu| gpu.names().any(|name| name.starts_with(device)))
}

/// Returns the driver's messages in the kernel's log since `began`, as far as this user may read them.
pub(crate) fn driver_messages(began: SystemTime) -> Vec<Xid> {
    let path = std::env::var_os(KERNEL_LOG_VARIABLE).unwrap_or_else(|| KERNEL_LOG.into());
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path);
    let Ok(mut log) = opened else { return Vec::new() };
    let age = SystemTime::now().duration_since(began).unwrap_or_default() + CLOCK_TOLERANCE;
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).expect("Linux has this clock");
    let since = now.saturating_sub(age).as_micros();
    let (mut found, mut record) = (Vec::new(), vec![0; RECORD_BYTES]);
    for _ in 0..MAX_RECORDS {
        // Each read returns one record of the kernel's log, or a part of a file in tests.
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(bytes) => found.extend(parse_xids_since(&String::from_utf8_lossy(&record[..bytes]), since)),
            // The kernel has overwritten the record before it was read.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            Err(_) => break,
        }
    }
    found
}

/// Returns the driver's messages in records that are not older than `since`, in microseconds since boot.
fn parse_xids_since(records: &str, since: u128) -> Vec<Xid> {
    let is_new = |line: &&str| {
        let micros = line.split(',').nth(2).and_then(|micros| micros.parse::<u128>().ok());
        micros.is_some_and(|micros| micros >= since)
    };
    records.lines().filter(is_new).filter_map(Xid::parse_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: usize) -> Gpu {
        Gpu { uuid: format!("GPU-{number}a"), pci: format!("0000:0{number}:00.0"), instances: None }
    }

    #[test]
    fn driver_messages_belong_to_the_gpus_of_the_worker() {
        let log = "3,1,900,-;NVRM: Xid (PCI:0000:01:00): 48, too old\n3,2,1000,-;NVRM: Xid (PCI:0000:01:00): 79, off the bus\n\
                   6,3,1001,-;NVRM: loading\n3,4,1002,-;NVRM: Xid (PCI:0000:00:00): 31, pid=77, name=x, MMU Fault\n";
        let xids = parse_xids_since(log, 1000);
        let gpus = [gpu(0), gpu(1)];
        let of = |device: &str, pid| FailedWorker { devices: vec![device.to_owned()], pid };
        let second = lines(&of("1", Some(5)), &gpus, &xids, |_| 0);
        let expected = "Xid 79 on 0000:01:00.0: the GPU fell off the bus: power, heat or the slot; the node needs a restart (off the bus)";
        assert_eq!(second, [expected]);
        // By its process, though no list says which GPU it had.
        let by_pid = lines(&FailedWorker { devices: Vec::new(), pid: Some(77) }, &gpus, &xids, |_| 0);
        assert!(by_pid.len() == 1 && by_pid[0].starts_with("Xid 31 on 0000:00:00.0"), "{by_pid:?}");
        let by_name = lines(&of("GPU-1", None), &gpus, &[], |_| 3);
        assert_eq!(by_name, ["3 uncorrected errors of the memory of GPU-1a since its driver was loaded"]);
        assert_eq!(lines(&of("9", None), &gpus, &xids, |_| 3), Vec::<String>::new());
    }
}
