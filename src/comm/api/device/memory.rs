//! Device memory that operations use: the buffers of cudarc and of this crate, by reference.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop,
};

use super::buffer::{DeviceBuffer, DevicePrefix};
use super::element::DeviceElement;
use super::raw::RawBuffer;
use super::registered::Registration;
use crate::api::op::Elements;
use crate::api::op::buffers::sealed::Sealed;
use crate::collectives::dtype::Element;
use crate::nccl::Address;

/// Seals [`DeviceSource`]: this module is private.
pub trait Readable {
    fn count(&self) -> usize;

    fn context(&self) -> &Arc<CudaContext>;

    /// Returns the address, and a guard. The guard keeps the memory, and orders other streams behind the work
    /// that is on `stream` when it is dropped.
    fn read<'a>(self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>)
    where
        Self: 'a;
}

/// Seals [`DeviceTarget`].
pub trait Writable: Readable {
    /// As [`Readable::read`], for an operation that writes.
    fn write<'a>(self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>)
    where
        Self: 'a;
}

/// Elements in device memory that an operation reads: references to cudarc's `CudaSlice`, `CudaView` and
/// `CudaViewMut`, and to [`DeviceBuffer`], [`DevicePrefix`], [`RawBuffer`] and [`Registration`].
///
/// The trait is sealed: the memory must live until the stream has executed the operation, which holds for
/// these types.
pub trait DeviceSource: Elements<Element: DeviceElement> + Readable {}

/// Elements in device memory that an operation fills or changes: mutable references to the types of
/// [`DeviceSource`], except `CudaView`.
pub trait DeviceTarget: DeviceSource + Writable {}

impl<B: Elements<Element: DeviceElement> + Readable> DeviceSource for B {}

impl<B: DeviceSource + Writable> DeviceTarget for B {}

macro_rules! sources {
    ($(<$($life:lifetime)?> $Reference:ty, $Buffer:ty, $Bound:ident;)*) => {$(
        impl<'b, $($life,)? T: $Bound> Sealed for $Reference {}

        impl<'b, $($life,)? T: $Bound> Elements for $Reference {
            type Element = T;
        }

        impl<'b, $($life,)? T: $Bound> Readable for $Reference {
            fn count(&self) -> usize {
                <$Buffer as DeviceSlice<T>>::len(self)
            }

            fn context(&self) -> &Arc<CudaContext> {
                <$Buffer as DeviceSlice<T>>::stream(self).context()
            }

            fn read<'a>(self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>)
            where
                Self: 'a,
            {
                <$Buffer as DevicePtr<T>>::device_ptr(self, stream)
            }
        }
    )*};
}

macro_rules! targets {
    ($(<$($life:lifetime)?> $Buffer:ty, $Bound:ident;)*) => {
        sources! {$(
            <$($life)?> &'b $Buffer, $Buffer, $Bound;
            <$($life)?> &'b mut $Buffer, $Buffer, $Bound;
        )*}

        $(impl<'b, $($life,)? T: $Bound> Writable for &'b mut $Buffer {
            fn write<'a>(self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>)
            where
                Self: 'a,
            {
                <$Buffer as DevicePtrMut<T>>::device_ptr_mut(self, stream)
            }
        })*
    };
}

sources! { <'v> &'b CudaView<'v, T>, CudaView<'v, T>, DeviceElement; }
targets! {
    <> CudaSlice<T>, DeviceElement;
    <'v> CudaViewMut<'v, T>, DeviceElement;
    <> DeviceBuffer<T>, Element;
    <'v> DevicePrefix<'v, T>, Element;
    <> RawBuffer<T>, DeviceElement;
    <> Registration<T>, DeviceElement;
}
