//! CUDA's driver, opened so that nothing panics.
//!
//! cudarc looks up each function at its first call, and panics if the library or the function is missing. So
//! this module checks for the library and all needed functions before it returns a context.

use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::api::group::Group;
use crate::error::{CommError, DeviceError};

/// The driver functions that we call, and that cudarc calls for contexts, streams, events, memory and
/// kernels.
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

/// Opens device `ordinal`, from 0, among those visible to this process. Returns its primary context, which
/// other libraries of the process, such as NCCL, use too.
///
/// # Errors
/// [`DeviceError::NoDevice`] if the process sees no device of this number. Otherwise the errors of [`count`].
pub fn open(ordinal: usize) -> Result<Arc<CudaContext>, DeviceError> {
    let count = count()?;
    if ordinal >= count {
        return Err(DeviceError::NoDevice { ordinal, count });
    }
    CudaContext::new(ordinal).map_err(DeviceError::driver("the device could not be opened"))
}

/// Returns the number of devices visible to this process.
///
/// # Errors
/// [`DeviceError::NoDriver`] if CUDA's driver is not installed. [`DeviceError::OldDriver`] if the driver
/// lacks a function that convoke calls. [`DeviceError::Driver`] if a call of the driver fails.
pub fn count() -> Result<usize, DeviceError> {
    CHECKED.clone()?;
    match CudaContext::device_count() {
        Ok(count) => Ok(usize::try_from(count).expect("CUDA counts devices from 0")),
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        Err(error) => Err(DeviceError::driver("CUDA's devices could not be counted")(error)),
    }
}

/// Opens the device of this rank. If the process sees only one device, as with `convoke --gpu-bind`, it is
/// that device. Otherwise the device number is the rank's [local rank](Group::local_rank_and_size).
///
/// # Errors
/// [`CommError::Device`] with the errors of [`open`].
pub fn open_for_rank(group: &Group) -> Result<Arc<CudaContext>, CommError> {
    let (local_rank, _) = group.local_rank_and_size();
    let ordinal = if count()? == 1 { 0 } else { local_rank };
    Ok(open(ordinal)?)
}

/// Makes a context the current one of this thread. cudarc keeps an error that occurs while it drops a value,
/// and returns it once from a later call. Such an error is no reason to end a group, so this tries twice.
pub(super) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    context.bind_to_thread().or_else(|_| context.bind_to_thread())
}

/// The result of the check that the driver is installed, with all functions that are called.
#[allow(unsafe_code)]
static CHECKED: LazyLock<Result<(), DeviceError>> = LazyLock::new(|| {
    // SAFETY: opens the driver, as every program that uses it does.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoDriver);
    }
    // SAFETY: the library is present.
    let library = unsafe { sys::culib() };
    // SAFETY: only checks whether the symbol exists.
    let has = |name: &&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
    let missing = FUNCTIONS.iter().find(|name| !has(name));
    missing.map_or(Ok(()), |missing| Err(DeviceError::OldDriver { missing }))
});
