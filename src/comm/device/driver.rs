//! CUDA's driver, opened so that nothing panics.
//!
//! cudarc looks each function up when it is called first, and panics if the library or the function is not there. So both
//! are looked for before: whoever has a context can call all that is needed.

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, DriverError, sys};

use super::error::DeviceError;
use crate::error::CommError;
use crate::group::Group;

/// What is called of the driver, by us and by cudarc for contexts, streams, events, memory and kernels.
const FUNCTIONS: [&str; 39] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// Opens device `ordinal`, from 0, among those that this process may see. Its primary context is that of every other
/// library in the process, such as NCCL.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::OldDriver`], [`DeviceError::NoDevice`], [`DeviceError::Driver`].
pub fn open(ordinal: usize) -> Result<Arc<CudaContext>, DeviceError> {
    let count = count()?;
    if ordinal >= count {
        return Err(DeviceError::NoDevice { ordinal, count });
    }
    CudaContext::new(ordinal).map_err(DeviceError::driver("the device could not be opened"))
}

/// Number of devices that this process may see.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::OldDriver`], [`DeviceError::Driver`].
pub fn count() -> Result<usize, DeviceError> {
    check()?;
    match CudaContext::device_count() {
        Ok(count) => Ok(usize::try_from(count).unwrap_or_default()),
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        Err(error) => Err(DeviceError::driver("CUDA's devices could not be counted")(error)),
    }
}

/// Opens the device of this rank: the only one that the process sees, as with `convoke --gpu-bind`, else the one with
/// the number of the rank's [place on its host](Group::place_on_host).
///
/// # Errors
/// [`CommError::Device`] as [`open`].
pub fn of_rank(group: &Group) -> Result<Arc<CudaContext>, CommError> {
    let (place, _) = group.place_on_host();
    let ordinal = if count()? == 1 { 0 } else { place };
    Ok(open(ordinal)?)
}

/// Makes a context the current one of this thread. cudarc first tells of an error that some value left when it was dropped,
/// once; that is no reason to end a group.
pub(super) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    context.bind_to_thread().or_else(|_| context.bind_to_thread())
}

/// Whether the driver is there, with all that is called.
fn check() -> Result<(), DeviceError> {
    static CHECKED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    CHECKED.get_or_init(look).clone()
}

#[allow(unsafe_code)]
fn look() -> Result<(), DeviceError> {
    // SAFETY: opens the driver, as every program that uses it does.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    // SAFETY: it is there.
    let library = unsafe { sys::culib() };
    // SAFETY: only whether there is such a name.
    let has = |name: &&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
    match FUNCTIONS.iter().find(|name| !has(name)) {
        Some(absent) => Err(DeviceError::OldDriver { absent }),
        None => Ok(()),
    }
}
