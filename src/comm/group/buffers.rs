//! Buffers of nonblocking operations.

use std::any::Any;
use std::sync::Arc;

use crate::call::Envelope;
use crate::dtype::Element;
use crate::group::alloc::SharedBuffer;

mod sealed {
    pub trait Sealed {}
}

/// Elements that an operation reads: `Vec<T>`, `Box<[T]>`, `Arc<[T]>`, `Arc<Vec<T>>`, [`SharedBuffer<T>`];
/// in a scope also `&[T]`.
///
/// The trait is sealed: moving the owner must not move the elements, which holds for these types.
pub trait Buffer: sealed::Sealed + Sized {
    /// Type of the elements.
    type Element: Element;

    /// The elements.
    fn elements(&self) -> &[Self::Element];

    /// Returns the owner, which must live while an operation without a handle uses the elements. Returns
    /// `None` for a borrow, whose owner is elsewhere.
    #[doc(hidden)]
    fn owned(self) -> Option<Box<dyn Any + Send>>;
}

/// Elements that an operation fills or changes: `Vec<T>`, `Box<[T]>`, [`SharedBuffer<T>`]; in a scope also
/// `&mut [T]`.
pub trait BufferMut: Buffer {
    /// The elements.
    fn elements_mut(&mut self) -> &mut [Self::Element];
}

macro_rules! owned {
    ($($buffer:ty),*) => {$(
        impl<T: Element> sealed::Sealed for $buffer {}

        impl<T: Element> Buffer for $buffer {
            type Element = T;

            fn elements(&self) -> &[T] {
                self
            }

            fn owned(self) -> Option<Box<dyn Any + Send>> {
                Some(Box::new(self))
            }
        }
    )*};
}

macro_rules! borrowed {
    ($($buffer:ty),*) => {$(
        impl<T: Element> sealed::Sealed for $buffer {}

        impl<T: Element> Buffer for $buffer {
            type Element = T;

            fn elements(&self) -> &[T] {
                self
            }

            fn owned(self) -> Option<Box<dyn Any + Send>> {
                None
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

owned!(Vec<T>, Box<[T]>, Arc<[T]>, Arc<Vec<T>>, SharedBuffer<T>);
borrowed!(&[T], &mut [T]);
mutable!(Vec<T>, Box<[T]>, SharedBuffer<T>, &mut [T]);

/// All buffers of one operation, and the value that their owner gets back.
///
/// Sealed: one buffer, a pair of send and receive buffers, a list of buffers, [`AnySource`], or nothing.
pub trait OperationBuffers: sealed::Sealed + Sized {
    /// The value that is returned when the operation is done.
    type Output;

    #[doc(hidden)]
    fn into_output(self, envelope: Option<Envelope>) -> Self::Output;

    #[doc(hidden)]
    fn into_owned(self) -> Option<Box<dyn Any + Send>>;
}

impl<B: Buffer> OperationBuffers for B {
    type Output = B;

    fn into_output(self, _: Option<Envelope>) -> B {
        self
    }

    fn into_owned(self) -> Option<Box<dyn Any + Send>> {
        self.owned()
    }
}

macro_rules! compound {
    ($([$($parameter:ident),*] $memory:ty, |$value:ident| $owned:expr;)*) => {$(
        impl<$($parameter: Buffer),*> sealed::Sealed for $memory {}

        impl<$($parameter: Buffer),*> OperationBuffers for $memory {
            type Output = Self;

            fn into_output(self, _: Option<Envelope>) -> Self {
                self
            }

            fn into_owned(self) -> Option<Box<dyn Any + Send>> {
                let $value = self;
                $owned
            }
        }
    )*};
}

compound! {
    [] (), |nothing| Some(Box::new(nothing));
    [S, R] (S, R), |both| Some(Box::new((both.0.owned(), both.1.owned())));
    [B] List<B>, |list| Some(all_owned(list.0));
    [S, R] (List<S>, List<R>), |both| Some(Box::new((all_owned(both.0.0), all_owned(both.1.0))));
}

fn all_owned<B: Buffer>(buffers: Vec<B>) -> Box<dyn Any + Send> {
    Box::new(buffers.into_iter().map(Buffer::owned).collect::<Vec<_>>())
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
        // A successful receive always has an envelope.
        (self.0, envelope.map_or(usize::MAX, |envelope| envelope.source))
    }

    fn into_owned(self) -> Option<Box<dyn Any + Send>> {
        self.0.owned()
    }
}
