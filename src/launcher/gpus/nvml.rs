//! Calls NVML, the driver's library for managing GPUs, which is loaded if it exists.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::libc::RTLD_NODELETE;

use super::Gpu;

/// Environment variable that names another library, for tests.
const LIBRARY_VARIABLE: &str = "CONVOKE_NVML_SO";
const LIBRARY_NAME: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
/// Sizes of the buffers for a UUID and for an address on the PCI bus.
const UUID_BYTES: usize = 96;
const BUS_ID_BYTES: usize = 32;
/// Size of the buffer for the driver's version, and most processes that are listed for a GPU.
const VERSION_BYTES: usize = 80;
const MAX_PROCESSES: usize = 64;
/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED` and `NVML_VOLATILE_ECC`, which counts since the driver was loaded.
const UNCORRECTED: c_int = 1;
const VOLATILE: c_int = 0;
/// Limit on the number of MIG instances, more than any GPU has.
const MAX_INSTANCES: c_uint = 64;
/// Limit on the number of GPUs, more than any node has.
const MAX_GPUS: c_uint = 1024;

/// NVML's `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_sub_system_id: c_uint,
    bus_id: [c_char; BUS_ID_BYTES],
}

/// NVML's `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Bits of `nvmlClocksThrottleReasons` that tell of a problem, worst first.
const THROTTLE_REASONS: [(c_ulonglong, &str); 4] = [
    (0x40, "it is too hot (HW thermal slowdown)"),
    (0x80, "its power supply is insufficient (HW power brake)"),
    (0x8, "the hardware halves its clock or worse (HW slowdown)"),
    (0x20, "it is hot (SW thermal slowdown)"),
];

type Device = *mut c_void;

/// The library NVML, initialized until this value is dropped.
pub(crate) struct Nvml {
    library: Library,
}

#[allow(unsafe_code)]
impl Nvml {
    /// Loads and initializes NVML; `None` if there is no such library, or it cannot reach the driver.
    pub(crate) fn open() -> Option<Self> {
        let name = std::env::var_os(LIBRARY_VARIABLE).unwrap_or_else(|| LIBRARY_NAME.into());
        // SAFETY: opening a library runs its initializers. The name says that it is NVML, whose initializers
        // are sound. NVML starts a thread that outlives `nvmlShutdown`; RTLD_NODELETE keeps its code loaded.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) }.ok()?;
        let nvml = Self { library };
        // SAFETY: the function type is that of `nvml.h`.
        let init: unsafe extern "C" fn() -> c_int = unsafe { nvml.function(c"nvmlInit_v2") }?;
        // SAFETY: any thread may call `nvmlInit_v2` at any time; each call that succeeds is paired with
        // `nvmlShutdown` in `drop`.
        (unsafe { init() } == SUCCESS).then_some(nvml)
    }

    /// Returns the GPUs of this node that this process may use; `None` if NVML fails.
    pub(crate) fn gpus(&self) -> Option<Vec<Gpu>> {
        type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let count: Count = unsafe { self.function(c"nvmlDeviceGetCount_v2") }?;
        let mut gpus = 0;
        // SAFETY: the function writes one number.
        if unsafe { count(&raw mut gpus) } != SUCCESS {
            return None;
        }
        (0..gpus.min(MAX_GPUS)).map(|index| self.gpu(self.device(index)?)).collect()
    }

    /// Returns the number of uncorrected memory errors of a GPU since the driver was loaded. `None` means
    /// that the GPU does not count them.
    pub(crate) fn uncorrected_errors(&self, uuid: &str) -> Option<u64> {
        type Total = unsafe extern "C" fn(Device, c_int, c_int, *mut c_ulonglong) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let total: Total = unsafe { self.function(c"nvmlDeviceGetTotalEccErrors") }?;
        let (device, mut errors) = (self.device_by_uuid(uuid)?, 0);
        // SAFETY: the function writes one number.
        let result = unsafe { total(device, UNCORRECTED, VOLATILE, &raw mut errors) };
        (result == SUCCESS).then_some(errors)
    }

    /// Returns the version of the driver; `None` if NVML does not tell.
    pub(crate) fn driver_version(&self) -> Option<String> {
        type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let version: Version = unsafe { self.function(c"nvmlSystemGetDriverVersion") }?;
        let mut bytes = [0; VERSION_BYTES];
        // SAFETY: the function writes at most `VERSION_BYTES` bytes.
        let result = unsafe { version(bytes.as_mut_ptr(), VERSION_BYTES as c_uint) };
        if result == SUCCESS { text(&bytes) } else { None }
    }

    /// Returns the processes that compute on a GPU, at most [`MAX_PROCESSES`]. Empty if NVML does not tell.
    pub(crate) fn processes(&self, uuid: &str) -> Vec<u32> {
        type Processes = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let processes: Option<Processes> =
            unsafe { self.function(c"nvmlDeviceGetComputeRunningProcesses_v3") };
        let (Some(processes), Some(device)) = (processes, self.device_by_uuid(uuid)) else {
            return Vec::new();
        };
        let mut infos = [ProcessInfo::default(); MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: the function writes at most `count` entries of this layout, and their number.
        let result = unsafe { processes(device, &raw mut count, infos.as_mut_ptr()) };
        if result != SUCCESS {
            return Vec::new();
        }
        infos.iter().take(count as usize).map(|info| info.pid).collect()
    }

    /// Returns why the hardware slows a GPU down; `None` if it does not, or NVML does not tell.
    pub(crate) fn throttle_reason(&self, uuid: &str) -> Option<&'static str> {
        type Reasons = unsafe extern "C" fn(Device, *mut c_ulonglong) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let reasons: Reasons = unsafe { self.function(c"nvmlDeviceGetCurrentClocksThrottleReasons") }?;
        let (device, mut bits) = (self.device_by_uuid(uuid)?, 0);
        // SAFETY: the function writes one number.
        if unsafe { reasons(device, &raw mut bits) } != SUCCESS {
            return None;
        }
        THROTTLE_REASONS.iter().find(|(bit, _)| bits & bit != 0).map(|(_, reason)| *reason)
    }

    fn device_by_uuid(&self, uuid: &str) -> Option<Device> {
        type ByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let by_uuid: ByUuid = unsafe { self.function(c"nvmlDeviceGetHandleByUUID") }?;
        let uuid = std::ffi::CString::new(uuid).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the function reads a NUL-terminated text and writes one pointer.
        let result = unsafe { by_uuid(uuid.as_ptr(), &raw mut device) };
        (result == SUCCESS).then_some(device)
    }

    fn device(&self, index: c_uint) -> Option<Device> {
        type ByIndex = unsafe extern "C" fn(c_uint, *mut Device) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let by_index: ByIndex = unsafe { self.function(c"nvmlDeviceGetHandleByIndex_v2") }?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the function writes one pointer.
        (unsafe { by_index(index, &raw mut device) } == SUCCESS).then_some(device)
    }

    fn gpu(&self, device: Device) -> Option<Gpu> {
        type Pci = unsafe extern "C" fn(Device, *mut PciInfo) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let pci: Pci = unsafe { self.function(c"nvmlDeviceGetPciInfo_v3") }?;
        // SAFETY: the struct holds only integers, for which zero bytes are valid.
        let mut info: PciInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the function writes one `nvmlPciInfo_t`, which has this layout.
        if unsafe { pci(device, &raw mut info) } != SUCCESS {
            return None;
        }
        Some(Gpu {
            uuid: self.uuid(device)?,
            pci: to_sysfs_address(&text(&info.bus_id)?),
            instances: self.instances(device),
        })
    }

    /// Returns the names of a GPU's MIG instances; `None` if the GPU is not partitioned.
    fn instances(&self, device: Device) -> Option<Vec<String>> {
        type Mode = unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> c_int;
        type Most = unsafe extern "C" fn(Device, *mut c_uint) -> c_int;
        type Instance = unsafe extern "C" fn(Device, c_uint, *mut Device) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let mode: Mode = unsafe { self.function(c"nvmlDeviceGetMigMode") }?;
        // SAFETY: the function type is that of `nvml.h`.
        let most: Most = unsafe { self.function(c"nvmlDeviceGetMaxMigDeviceCount") }?;
        // SAFETY: the function type is that of `nvml.h`.
        let instance: Instance = unsafe { self.function(c"nvmlDeviceGetMigDeviceHandleByIndex") }?;
        let (mut now, mut pending, mut count) = (0, 0, 0);
        // SAFETY: the function writes two numbers.
        if unsafe { mode(device, &raw mut now, &raw mut pending) } != SUCCESS || now != 1 {
            return None;
        }
        // SAFETY: the function writes one number.
        if unsafe { most(device, &raw mut count) } != SUCCESS {
            return None;
        }
        let each = (0..count.min(MAX_INSTANCES)).filter_map(|index| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the function writes one pointer.
            let found = unsafe { instance(device, index, &raw mut handle) } == SUCCESS;
            found.then(|| self.uuid(handle)).flatten()
        });
        Some(each.collect())
    }

    fn uuid(&self, device: Device) -> Option<String> {
        type Uuid = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
        // SAFETY: the function type is that of `nvml.h`.
        let uuid: Uuid = unsafe { self.function(c"nvmlDeviceGetUUID") }?;
        let mut bytes = [0; UUID_BYTES];
        // SAFETY: the function writes at most `UUID_BYTES` bytes.
        let result = unsafe { uuid(device, bytes.as_mut_ptr(), UUID_BYTES as c_uint) };
        if result == SUCCESS { text(&bytes) } else { None }
    }

    /// Returns a function of the library by its name; `None` if the library lacks it.
    ///
    /// # Safety
    /// `F` is the type of the pointer to that function, as `nvml.h` declares it.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: the caller guarantees the type. The library is open while a method uses the pointer, and no
        // pointer outlives the call of a method.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }
}

impl Drop for Nvml {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the function type is that of `nvml.h`.
        let shutdown = unsafe { self.function::<unsafe extern "C" fn() -> c_int>(c"nvmlShutdown") };
        if let Some(shutdown) = shutdown {
            // SAFETY: this undoes `nvmlInit_v2` of `open`; nothing of NVML is used after it.
            let _ = unsafe { shutdown() };
        }
    }
}

/// Returns the text before the first NUL; `None` if there is no NUL.
fn text(bytes: &[c_char]) -> Option<String> {
    let bytes: Vec<u8> = bytes.iter().map(|&byte| byte.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).ok().map(|text| text.to_string_lossy().into_owned())
}

/// Converts a PCI bus address from NVML's form, in which the domain has 8 digits, to that of sysfs with 4.
fn to_sysfs_address(bus_id: &str) -> String {
    let lower = bus_id.to_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 => format!("{}:{rest}", &domain[domain.len() - 4..]),
        _ => lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_match_sysfs() {
        assert_eq!(to_sysfs_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(to_sysfs_address("0001:3b:00.0"), "0001:3b:00.0");
        assert_eq!((size_of::<PciInfo>(), size_of::<ProcessInfo>()), (68, 24));
    }
}
