//! Adds vectors on a device, with the kernel in `add.cu`.

use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DriverError,
    LaunchConfig, PushKernelArg,
};
use convoke_comm::device::cudarc::nvrtc::Ptx;

use super::Gradient;

/// Threads per block, and the maximum number of blocks. In a vector with more elements than threads, each
/// thread adds several.
const THREADS: usize = 256;
const BLOCKS: usize = 4096;

/// The kernel for one element type.
#[derive(Debug)]
pub(super) struct Adder(CudaFunction);

impl Adder {
    pub(super) fn new<T: Gradient>(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let module = context.load_module(Ptx::from_src(include_str!("add.ptx")))?;
        Ok(Self(module.load_function(&format!("add_{}", T::DTYPE))?))
    }

    /// Enqueues on `stream` the addition of `from` to `into`. Both have the same length.
    #[allow(unsafe_code)]
    pub(super) fn add<T: Gradient + DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        into: &mut CudaViewMut<'_, T>,
        from: &impl DevicePtr<T>,
    ) -> Result<(), DriverError> {
        let count = into.len().min(from.len());
        if count == 0 {
            return Ok(());
        }
        let blocks = count.div_ceil(THREADS).min(BLOCKS) as u32;
        let shape =
            LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 };
        let elements = count as u64;
        let ((into, _written), (from, _read)) = (into.device_ptr_mut(stream), from.device_ptr(stream));
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(&into).arg(&from).arg(&elements);
        // SAFETY: these are the kernel's arguments. Both buffers have `elements` elements of the kernel's
        // type. The guards of both buffers make other CUDA streams wait for the kernel.
        unsafe { launch.launch(shape) }.map(drop)
    }
}
