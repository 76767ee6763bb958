//! Kernels that keep a stream busy (`kernels.cu`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;

const ONE_BLOCK: LaunchConfig =
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
const ONE_THREAD: LaunchConfig =
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };

/// Of CUDA that the driver is for: 12080 is 12.8.
#[allow(unsafe_code)]
pub(crate) fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map(|()| version)
}

fn kernel(stream: &Arc<CudaStream>, name: &str) -> Result<CudaFunction, DriverError> {
    stream.context().load_module(Ptx::from_src(include_str!("kernels.ptx")))?.load_function(name)
}

/// Adds 1 to numbers, and takes its time.
pub(crate) struct AddOne(CudaFunction);

#[allow(unsafe_code)]
impl AddOne {
    pub(crate) fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        Ok(Self(kernel(stream, "add_one")?))
    }

    /// To `count` numbers, after so many ticks.
    ///
    /// # Safety
    /// At that address there are so many `f32`, and stay until the stream has come past this. No other stream is ordered
    /// behind it.
    pub(crate) unsafe fn run(
        &self,
        stream: &Arc<CudaStream>,
        at: sys::CUdeviceptr,
        count: u64,
        ticks: i64,
    ) -> Result<(), DriverError> {
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(&at).arg(&count).arg(&ticks);
        // SAFETY: the kernel's arguments; the rest is the caller's.
        unsafe { launch.launch(ONE_BLOCK) }.map(drop)
    }
}

/// A kernel that does not end until this is dropped.
pub(crate) struct Spin {
    flag: *mut i32,
    /// Without it its module would be unloaded, which waits for the kernel.
    _function: CudaFunction,
    stream: Arc<CudaStream>,
}

// SAFETY: an address in pinned memory, which is only written atomically.
#[allow(unsafe_code)]
unsafe impl Send for Spin {}

#[allow(unsafe_code)]
impl Spin {
    pub(crate) fn on(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        let function = kernel(stream, "spin")?;
        // SAFETY: freed when the kernel has ended.
        let flag = unsafe { result::malloc_host(4, 0) }?.cast::<i32>();
        // SAFETY: 4 bytes that are ours.
        unsafe { flag.write(0) };
        let at = flag as u64;
        let mut launch = stream.launch_builder(&function);
        launch.arg(&at);
        // SAFETY: the kernel's argument: an address of pinned memory is that on the device as well.
        unsafe { launch.launch(ONE_THREAD) }?;
        Ok(Self { flag, _function: function, stream: Arc::clone(stream) })
    }
}

#[allow(unsafe_code)]
impl Drop for Spin {
    fn drop(&mut self) {
        // SAFETY: it is there until below.
        unsafe { AtomicI32::from_ptr(self.flag) }.store(1, Ordering::SeqCst);
        if self.stream.synchronize().is_ok() {
            // SAFETY: from `malloc_host`, and the kernel, which was the only one to know it, has ended.
            let _ = unsafe { result::free_host(self.flag.cast()) };
        }
    }
}
