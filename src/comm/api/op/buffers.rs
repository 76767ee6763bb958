//! Buffers of operations.

use std::sync::Arc;

use crate::api::group::alloc::SharedBuffer;
use crate::collectives::call::Status;
use crate::collectives::dtype::{Element, Transfer};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// A buffer of elements in host or device memory.
///
/// The trait is sealed: [`Buffer`] lists the types in host memory, and with the feature `nccl` the trait
/// `DeviceSource` those in device memory.
pub trait Elements: sealed::Sealed {
    /// Type of the elements.
    type Element;
}

/// Elements in host memory that an operation reads: `Vec<T>`, `Box<[T]>`, `Arc<[T]>`, `Arc<Vec<T>>`,
/// [`SharedBuffer<T>`], and references to slices, arrays and vectors.
///
/// The trait is sealed: moving the owner must not move the elements, and dropping it must not access borrowed
/// elements. Both hold for these types.
pub trait Buffer: Elements<Element: Transfer> + Send {
    /// The elements.
    fn elements(&self) -> &[Self::Element];
}

/// Elements in host memory that an operation fills or changes: `Vec<T>`, `Box<[T]>`, [`SharedBuffer<T>`], and
/// mutable references to slices, arrays and vectors.
pub trait BufferMut: Buffer {
    /// The elements.
    fn elements_mut(&mut self) -> &mut [Self::Element];
}

macro_rules! buffers {
    ($(<$Bound:ident $(, const $N:ident)?> $buffer:ty;)*) => {$(
        impl<T: $Bound, $(const $N: usize)?> sealed::Sealed for $buffer {}

        impl<T: $Bound, $(const $N: usize)?> Elements for $buffer {
            type Element = T;
        }

        impl<T: $Bound, $(const $N: usize)?> Buffer for $buffer {
            fn elements(&self) -> &[T] {
                &self[..]
            }
        }
    )*};
}

macro_rules! mutable {
    ($(<$Bound:ident $(, const $N:ident)?> $buffer:ty;)*) => {$(
        impl<T: $Bound, $(const $N: usize)?> BufferMut for $buffer {
            fn elements_mut(&mut self) -> &mut [T] {
                &mut self[..]
            }
        }
    )*};
}

buffers! {
    <Transfer> Vec<T>; <Transfer> Box<[T]>; <Transfer> Arc<[T]>; <Transfer> Arc<Vec<T>>; <Element> SharedBuffer<T>;
    <Transfer> &[T]; <Transfer> &Vec<T>; <Transfer, const N> &[T; N];
    <Transfer> &mut [T]; <Transfer> &mut Vec<T>; <Transfer, const N> &mut [T; N];
}
mutable! {
    <Transfer> Vec<T>; <Transfer> Box<[T]>; <Element> SharedBuffer<T>;
    <Transfer> &mut [T]; <Transfer> &mut Vec<T>; <Transfer, const N> &mut [T; N];
}

/// The value that an operation returns when it is done: its buffers, and the [`Status`] of a received
/// message.
///
/// The trait is sealed: it is implemented for one buffer, a pair of send and receive buffers, a buffer with a
/// [`Status`], and nothing. Dropping one of these types accesses no borrowed elements, and moving it moves no
/// elements.
pub trait OperationOutput: sealed::Sealed + Send {
    #[doc(hidden)]
    fn set_status(&mut self, _: Status) {}
}

impl<B: Buffer> OperationOutput for B {}

impl sealed::Sealed for () {}

impl OperationOutput for () {}

impl<S: Buffer, R: Buffer> sealed::Sealed for (S, R) {}

impl<S: Buffer, R: Buffer> OperationOutput for (S, R) {}

impl<B: Buffer> sealed::Sealed for (B, Status) {}

impl<B: Buffer> OperationOutput for (B, Status) {
    fn set_status(&mut self, status: Status) {
        self.1 = status.of::<B::Element>();
    }
}
