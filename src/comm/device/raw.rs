//! Memory on a device that somebody else has allocated.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

/// Elements on a device that belong to somebody else, such as a tensor of another library, by their address.
///
/// It frees nothing and waits for nothing: what happens to the elements on other streams is the program's to order.
#[derive(Debug)]
pub struct RawBuffer<T> {
    at: sys::CUdeviceptr,
    len: usize,
    stream: Arc<CudaStream>,
    of: PhantomData<*const T>,
}

// SAFETY: an address, used with streams; that the elements are used rightly is what `new` asks for.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for RawBuffer<T> {}

#[allow(unsafe_code)]
impl<T> RawBuffer<T> {
    /// `len` elements at an address of the device that `stream` is on.
    ///
    /// # Safety
    /// The elements are there, aligned for their type, for as long as operations on this buffer are under way on any
    /// stream; nobody writes them meanwhile, nor reads what an operation writes. An operation that ended with an error may be under
    /// way until its stream has been synchronized: NCCL lets go at once, but not of what stands behind a kernel that does not end.
    #[must_use]
    pub unsafe fn new(at: sys::CUdeviceptr, len: usize, stream: Arc<CudaStream>) -> Self {
        Self { at, len, stream, of: PhantomData }
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
