//! Buffers of nonblocking operations.

use std::sync::Arc;

use crate::api::group::alloc::SharedBuffer;
use crate::collectives::call::Envelope;
use crate::collectives::dtype::Element;

mod sealed {
    pub trait Sealed {}
}

/// Elements that an operation reads: `Vec<T>`, `Box<[T]>`, `Arc<[T]>`, `Arc<Vec<T>>`, [`SharedBuffer<T>`];
/// in a scope also `&[T]`.
///
/// The trait is sealed: moving the owner must not move the elements, which holds for these types.
pub trait Buffer: sealed::Sealed + Sized + Send {
    /// Type of the elements.
    type Element: Element;

    /// The elements.
    fn elements(&self) -> &[Self::Element];
}

/// Elements that an operation fills or changes: `Vec<T>`, `Box<[T]>`, [`SharedBuffer<T>`]; in a scope also
/// `&mut [T]`.
pub trait BufferMut: Buffer {
    /// The elements.
    fn elements_mut(&mut self) -> &mut [Self::Element];
}

macro_rules! buffers {
    ($($buffer:ty),*) => {$(
        impl<T: Element> sealed::Sealed for $buffer {}

        impl<T: Element> Buffer for $buffer {
            type Element = T;

            fn elements(&self) -> &[T] {
                self
            }
        }
    )*};
}

macro_rules! mutable {
    ($($buffer:ty),*) => {$(
        impl<T: Element> BufferMut for $buffer {
            fn elements_mut(&mut self) -> &mut [T] {
                self
            }
        }
    )*};
}

buffers!(Vec<T>, Box<[T]>, Arc<[T]>, Arc<Vec<T>>, SharedBuffer<T>, &[T], &mut [T]);
mutable!(Vec<T>, Box<[T]>, SharedBuffer<T>, &mut [T]);

/// All buffers of one operation, and the value that their owner gets back.
///
/// The trait is sealed: it is implemented for one buffer, a pair of send and receive buffers, a list of
/// buffers, [`AnySource`], and nothing. Dropping one of these types accesses no borrowed elements, and moving
/// it moves no elements.
pub trait OperationBuffers: sealed::Sealed + Sized + Send {
    /// The value that is returned when the operation is done.
    type Output;

    #[doc(hidden)]
    fn into_output(self, envelope: Option<Envelope>) -> Self::Output;
}

impl<B: Buffer> OperationBuffers for B {
    type Output = B;

    fn into_output(self, _: Option<Envelope>) -> B {
        self
    }
}

macro_rules! compound {
    ($([$($parameter:ident),*] $memory:ty;)*) => {$(
        impl<$($parameter: Buffer),*> sealed::Sealed for $memory {}

        impl<$($parameter: Buffer),*> OperationBuffers for $memory {
            type Output = Self;

            fn into_output(self, _: Option<Envelope>) -> Self {
                self
            }
        }
    )*};
}

compound! {
    [] ();
    [S, R] (S, R);
    [B] List<B>;
    [S, R] (List<S>, List<R>);
}

/// Buffers of one coalesced operation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct List<B>(pub Vec<B>);

/// The buffers that a coalesced operation sends, and those that it fills.
pub type Lists<S, R> = (List<S>, List<R>);

/// A buffer for a message from any rank; it is returned with the rank of the sender.
#[derive(Debug)]
pub struct AnySource<B>(pub(super) B);

impl<B: Buffer> sealed::Sealed for AnySource<B> {}

impl<B: Buffer> OperationBuffers for AnySource<B> {
    type Output = (B, usize);

    fn into_output(self, envelope: Option<Envelope>) -> (B, usize) {
        (self.0, envelope.expect("a successful receive has an envelope").source)
    }
}
