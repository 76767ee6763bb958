//! Kernels that keep a stream busy (`kernels.cu`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;

const ONE_BLOCK: LaunchConfig =
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
const ONE_THREAD: LaunchConfig =
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };

/// The CUDA version that the driver supports: 12080 is 12.8.
#[allow(unsafe_code)]
pub(crate) fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the call writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map(|()| version)
}

fn kernel(stream: &Arc<CudaStream>, name: &str) -> Result<CudaFunction, DriverError> {
    stream.context().load_module(Ptx::from_src(include_str!("kernels.ptx")))?.load_function(name)
}

/// A GPU kernel that adds 1 to each element of a buffer after a delay.
pub(crate) struct AddOne(CudaFunction);

#[allow(unsafe_code)]
impl AddOne {
    pub(crate) fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        Ok(Self(kernel(stream, "add_one")?))
    }

    /// Enqueues the kernel for `count` elements, with a delay of `ticks` of the GPU clock.
    ///
    /// # Safety
    /// `at` is the address of `count` numbers of type `f32`, which stay allocated until the kernel has ended.
    /// Other streams do not wait for the kernel.
    pub(crate) unsafe fn run(
        &self,
        stream: &Arc<CudaStream>,
        at: sys::CUdeviceptr,
        count: u64,
        ticks: i64,
    ) -> Result<(), DriverError> {
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(&at).arg(&count).arg(&ticks);
        // SAFETY: these are the kernel's arguments; the caller guarantees the rest.
        unsafe { launch.launch(ONE_BLOCK) }.map(drop)
    }
}

/// A running kernel, which ends when this value is dropped.
pub(crate) struct SpinKernel {
    flag: *mut i32,
    /// Keeps the kernel's module loaded. Unloading it would wait for the kernel.
    _function: CudaFunction,
    stream: Arc<CudaStream>,
}

// SAFETY: the pointer is an address in pinned memory, which is only written atomically.
#[allow(unsafe_code)]
unsafe impl Send for SpinKernel {}

#[allow(unsafe_code)]
impl SpinKernel {
    pub(crate) fn start(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        let function = kernel(stream, "spin")?;
        // SAFETY: `drop` frees the memory after the kernel has ended.
        let flag = unsafe { result::malloc_host(4, 0) }?.cast::<i32>();
        // SAFETY: the 4 bytes were allocated above.
        unsafe { flag.write(0) };
        let at = flag as u64;
        let mut launch = stream.launch_builder(&function);
        launch.arg(&at);
        // SAFETY: this is the kernel's argument. An address of pinned memory is also valid on the device.
        unsafe { launch.launch(ONE_THREAD) }?;
        Ok(Self { flag, _function: function, stream: Arc::clone(stream) })
    }
}

#[allow(unsafe_code)]
impl Drop for SpinKernel {
    fn drop(&mut self) {
        // SAFETY: the memory stays allocated until the code below frees it.
        unsafe { AtomicI32::from_ptr(self.flag) }.store(1, Ordering::SeqCst);
        if self.stream.synchronize().is_ok() {
            // SAFETY: the memory is from `malloc_host`, and the kernel, its only other user, has ended.
            let _ = unsafe { result::free_host(self.flag.cast()) };
        }
    }
}
