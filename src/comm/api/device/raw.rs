//! Device memory that other code has allocated.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

/// Elements on a device that other code owns, such as a tensor of another library, by their address.
///
/// Dropping it frees nothing, and it makes no stream wait: the program orders accesses from other streams.
#[derive(Debug)]
pub struct RawBuffer<T> {
    at: sys::CUdeviceptr,
    len: usize,
    stream: Arc<CudaStream>,
    element: PhantomData<*const T>,
}

// SAFETY: an address, used with streams; `new` requires that the elements are used correctly.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for RawBuffer<T> {}

#[allow(unsafe_code)]
impl<T> RawBuffer<T> {
    /// Returns `len` elements at an address of the device of `stream`.
    ///
    /// # Safety
    /// The elements exist, aligned for their type, as long as operations on this buffer are in progress on
    /// any stream. Until then nobody else writes the elements, nor reads elements that an operation writes.
    /// An operation that ended with an error may be in progress until its stream has been synchronized: NCCL
    /// aborts at once, but not kernels queued behind one that does not end.
    #[must_use]
    pub unsafe fn new(at: sys::CUdeviceptr, len: usize, stream: Arc<CudaStream>) -> Self {
        Self { at, len, stream, element: PhantomData }
    }
}

impl<T> DeviceSlice<T> for RawBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for RawBuffer<T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.at, SyncOnDrop::Record(None))
    }
}

impl<T> DevicePtrMut<T> for RawBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.at, SyncOnDrop::Record(None))
    }
}
