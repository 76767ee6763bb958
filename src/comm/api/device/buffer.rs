//! Buffers on a device, of every element type of groups.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, SyncOnDrop, sys,
};

use crate::collectives::dtype::Element;
use crate::error::DeviceError;

/// Elements on a device, also of types that cudarc's [`CudaSlice`] does not know, such as
/// [`Complex`](crate::Complex).
///
/// Its memory is freed in the order of its stream, after the operations enqueued there.
pub struct DeviceBuffer<T: Element> {
    bytes: CudaSlice<u8>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    /// Returns `len` elements of zero bits, allocated on `stream`.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if the memory cannot be allocated.
    pub fn zeros(stream: &Arc<CudaStream>, len: usize) -> Result<Self, DeviceError> {
        // At least one byte: CUDA has no empty memory.
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        let bytes = bytes.and_then(|bytes| stream.alloc_zeros(bytes.max(1)));
        let bytes = bytes.map_err(DeviceError::driver("cannot allocate memory on the device"))?;
        Ok(Self { bytes, len, element: PhantomData })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if the allocation or a copy fails.
    pub fn from_slice(stream: &Arc<CudaStream>, values: &[T]) -> Result<Self, DeviceError> {
        let mut buffer = Self::zeros(stream, values.len())?;
        buffer.write(stream, values)?;
        Ok(buffer)
    }

    /// Replaces the first elements by `values`, after the earlier work of `stream`. Two copies: one on the
    /// host, one to the device.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if the copy fails.
    ///
    /// # Panics
    /// If `values` is longer than the buffer.
    pub fn write(&mut self, stream: &Arc<CudaStream>, values: &[T]) -> Result<(), DeviceError> {
        let mut bytes = vec![0; size_of_val(values)];
        T::write(values, &mut bytes);
        let mut part = self.bytes.slice_mut(..bytes.len());
        stream.memcpy_htod(&bytes, &mut part).map_err(DeviceError::driver("a copy to the device failed"))
    }

    /// Returns the elements, after `stream` has done all its earlier work. Two copies: one from the device,
    /// one on the host.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] if the copy fails.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Vec<T>, DeviceError> {
        let part = self.bytes.slice(..self.len * size_of::<T>());
        let bytes = stream.clone_dtoh(&part).and_then(|bytes| stream.synchronize().map(|()| bytes));
        let mut values = Vec::with_capacity(self.len);
        T::read(&bytes.map_err(DeviceError::driver("a copy from the device failed"))?, &mut values);
        Ok(values)
    }

    /// Returns the first `len` elements, for use by operations.
    ///
    /// # Panics
    /// If the buffer has fewer elements.
    pub fn first(&mut self, len: usize) -> DevicePrefix<'_, T> {
        assert!(len <= self.len, "{len} of {} elements", self.len);
        DevicePrefix { buffer: self, len }
    }
}

/// The first elements of a [`DeviceBuffer`].
pub struct DevicePrefix<'a, T: Element> {
    buffer: &'a mut DeviceBuffer<T>,
    len: usize,
}

/// Implements cudarc's traits of device memory for a buffer of `len` elements, by those of the memory in it.
macro_rules! device_memory {
    ($([$($generics:tt)*] $Buffer:ty, |$buffer:ident| $len:expr, $($memory:ident).+;)*) => {$(
        impl<$($generics)*> DeviceSlice<T> for $Buffer {
            fn len(&self) -> usize {
                let $buffer = self;
                $len
            }

            fn stream(&self) -> &Arc<CudaStream> {
                self.$($memory).+.stream()
            }
        }

        impl<$($generics)*> DevicePtr<T> for $Buffer {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
                self.$($memory).+.device_ptr(stream)
            }
        }

        impl<$($generics)*> DevicePtrMut<T> for $Buffer {
            fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
                self.$($memory).+.device_ptr_mut(stream)
            }
        }
    )*};
}

pub(super) use device_memory;

device_memory! {
    [T: Element] DeviceBuffer<T>, |buffer| buffer.len, bytes;
    [T: Element] DevicePrefix<'_, T>, |prefix| prefix.len, buffer.bytes;
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, device) = (self.len, self.bytes.ordinal());
        f.debug_struct("DeviceBuffer").field("len", &len).field("device", &device).finish_non_exhaustive()
    }
}

impl<T: Element> fmt::Debug for DevicePrefix<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePrefix").field("len", &self.len).finish_non_exhaustive()
    }
}
