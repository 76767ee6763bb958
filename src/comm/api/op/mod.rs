//! Operations as values: buffers and arguments of a call that has not begun.
//!
//! Each function makes the operation of the method of [`Group`] of that name, with its arguments, meaning,
//! errors and cost. A group carries an operation out in one of four ways:
//!
//! - [`Group::start`] begins it. It owns its buffers, and [`Work`](crate::Work) returns them.
//! - [`Group::scope`] begins operations that borrow their buffers, and waits for them.
//! - [`Group::run`] carries out several operations at once, and waits for them.
//! - `Group::on` (with the feature `nccl`) enqueues operations on device buffers, on a CUDA stream.
//!
//! ```
//! use convoke_comm::{ReduceOp, op};
//!
//! # fn main() -> Result<(), convoke_comm::CommError> {
//! let world = convoke_comm::init()?;
//! let work = world.start(op::all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum))?;
//! // ... compute something else ...
//! let sums = work.wait()?;
//! assert_eq!(sums[0], world.size() as f32);
//! # Ok(())
//! # }
//! ```

// The methods of sealed traits name types of the engine.
#![allow(private_interfaces)]

pub(crate) mod buffers;
mod lists;
mod messages;
pub(crate) mod start;

use crate::api::group::{Group, IntoPrepared, Prepared};
use crate::api::reduction::{Reduction, UntypedReduction};
use crate::buffer::{Slice, SliceMut};
use crate::collectives::dtype::Element;
use crate::engine;
use crate::error::CommError;
pub use buffers::{Buffer, BufferMut, Elements, OperationOutput};
pub use lists::Operations;
pub use messages::{Recv, Send, recv, recv_any, send};
pub use start::{Scope, ScopedWork};

/// An operation on buffers in host memory: those that the functions of [this module](self) return.
///
/// The trait is sealed.
pub trait Operation: sealed::HostOperation {}

impl<O: sealed::HostOperation> Operation for O {}

pub(crate) mod sealed {
    use super::{CommError, Group, OperationOutput, Prepared, engine};

    /// An operation, in two parts: the buffers, which [`Work`](crate::Work) returns, and the arguments.
    pub trait HostOperation: Sized {
        type Output: OperationOutput;
        type Arguments;

        fn into_parts(self) -> Parts<Self>;

        /// Checks the arguments and borrows the buffers.
        fn prepare<'a>(
            group: &Group,
            buffers: &'a mut Self::Output,
            arguments: &Self::Arguments,
        ) -> Prepared<'a>;

        /// Prepares the operations of a list: one for each, or one for all if their buffers can be sent as
        /// if they were one buffer.
        fn prepare_list<'a>(
            list: &'a mut [Parts<Self>],
            into: &mut PreparedList<'_, 'a>,
        ) -> Result<(), CommError> {
            into.add_each::<Self>(list)
        }
    }

    /// The buffers and arguments of an operation.
    pub(crate) type Parts<O> = (<O as HostOperation>::Output, <O as HostOperation>::Arguments);

    /// The prepared operations of a list; `None` for an operation with nothing left to do.
    #[derive(Debug)]
    pub struct PreparedList<'g, 'a> {
        pub(super) group: &'g Group,
        pub(super) operations: Vec<Option<engine::Operation<'a>>>,
    }

    impl<'a> PreparedList<'_, 'a> {
        /// Prepares one operation for each entry of a list.
        pub(super) fn add_each<O: HostOperation>(
            &mut self,
            list: &'a mut [Parts<O>],
        ) -> Result<(), CommError> {
            for (buffers, arguments) in list {
                self.operations.push(O::prepare(self.group, buffers, arguments)?);
            }
            Ok(())
        }
    }
}

/// Ignores the name, so that a type occurs once for each optional argument.
macro_rules! arguments {
    ($name:ident $Argument:ty) => {
        $Argument
    };
}

/// Keeps the code only for an operation that can run on a list of buffers at the cost of one call.
macro_rules! if_listed {
    ([] $code:tt) => {};
    ([$prepare_list:ident] $code:tt) => {
        $code
    };
}

macro_rules! elements {
    (Buffer $buf:ident) => {
        Slice::from($buf.elements())
    };
    (BufferMut $buf:ident) => {
        SliceMut::from($buf.elements_mut())
    };
}

/// Defines an operation: its type, the function that makes it, and its host form, which calls the `prepare_*`
/// method of [`Group`] with the buffers and then the arguments.
macro_rules! operations {
    ($($name:ident => $Type:ident $([$life:lifetime])? (
        $buf:ident: $B:ident: $Access:ident $(, $buf2:ident: $B2:ident: $Access2:ident)?
        $(; lens $lens:ident)? $(; by $op:ident: $Number:ident)? $(; root $root:ident)?
    ) $prepare:ident $(or $prepare_list:ident)?;)*) => {$(
        #[doc = concat!("The operation of [`", stringify!($name), "`].")]
        #[derive(Debug)]
        #[must_use = "an operation does nothing until a group carries it out"]
        #[allow(unused_parens)] // around one buffer
        pub struct $Type<$($life,)? $B: Elements $(, $B2: Elements<Element = $B::Element>)?> {
            pub(crate) buffers: ($B $(, $B2)?),
            $(pub(crate) $lens: &$life [usize],)?
            $(pub(crate) $op: Reduction<$B::Element>,)?
            $(pub(crate) $root: usize,)?
        }

        #[doc = concat!("The operation [`Group::", stringify!($name), "`].")]
        pub fn $name<$($life,)? $B: Elements $(, $B2: Elements<Element = $B::Element>)?>(
            $buf: $B
            $(, $buf2: $B2)?
            $(, $lens: &$life [usize])?
            $(, $op: impl Into<Reduction<$B::Element>>)?
            $(, $root: usize)?
        ) -> $Type<$($life,)? $B $(, $B2)?> {
            $Type { buffers: ($buf $(, $buf2)?), $($lens,)? $($op: $op.into(),)? $($root,)? }
        }

        #[allow(unused_parens)]
        impl<$($life,)? $B: $Access $(, $B2: $Access2<Element = $B::Element>)?> sealed::HostOperation
            for $Type<$($life,)? $B $(, $B2)?>
        $(where $B::Element: $Number)?
        {
            type Output = ($B $(, $B2)?);
            type Arguments = ($(&$life [usize],)? $(arguments!($op UntypedReduction),)? $(arguments!($root usize),)?);

            fn into_parts(self) -> sealed::Parts<Self> {
                (self.buffers, ($(self.$lens,)? $(self.$op.untyped,)? $(self.$root,)?))
            }

            fn prepare<'b>(
                group: &Group,
                ($buf $(, $buf2)?): &'b mut Self::Output,
                ($($lens,)? $($op,)? $($root,)?): &Self::Arguments,
            ) -> Prepared<'b> {
                let prepared = group.$prepare(
                    (elements!($Access $buf) $(, elements!($Access2 $buf2))?)
                    $(, $lens)? $(, $op)? $(, *$root)?
                );
                prepared.into_prepared(group)
            }

            fn prepare_list<'b>(
                list: &'b mut [sealed::Parts<Self>],
                into: &mut sealed::PreparedList<'_, 'b>,
            ) -> Result<(), CommError> {
                if_listed!([$($prepare_list)?] {
                    if let [(_, first), _, ..] = &*list
                        && list.iter().all(|(_, other)| other == first)
                    {
                        let ($($op,)? $($root,)?) = &first.clone();
                        let buffers = list.iter_mut().map(|(($buf $(, $buf2)?), _)| {
                            (elements!($Access $buf) $(, elements!($Access2 $buf2))?)
                        });
                        let prepared = $(into.group.$prepare_list)?(buffers.collect() $(, $op)? $(, *$root)?)?;
                        into.operations.push(prepared);
                        return Ok(());
                    }
                });
                into.add_each::<Self>(list)
            }
        }
    )*};
}

operations! {
    all_reduce => AllReduce(buf: B: BufferMut; by op: Element) prepare_all_reduce or prepare_all_reduce_list;
    all_reduce_into => AllReduceInto(send: S: Buffer, recv: R: BufferMut; by op: Element) prepare_all_reduce_into;
    broadcast => Broadcast(buf: B: BufferMut; root root) prepare_broadcast or prepare_broadcast_list;
    reduce => Reduce(buf: B: BufferMut; by op: Element; root root) prepare_reduce or prepare_reduce_list;
    reduce_into => ReduceInto(send: S: Buffer, recv: R: BufferMut; by op: Element; root root) prepare_reduce_into;
    scan => Scan(buf: B: BufferMut; by op: Element) prepare_scan;
    exclusive_scan => ExclusiveScan(buf: B: BufferMut; by op: Element) prepare_exclusive_scan;
    all_gather => AllGather(send: S: Buffer, recv: R: BufferMut) prepare_all_gather or prepare_all_gather_list;
    all_gather_in_place => AllGatherInPlace(buf: B: BufferMut) prepare_all_gather_in_place;
    reduce_scatter => ReduceScatter(send: S: Buffer, recv: R: BufferMut; by op: Element) prepare_reduce_scatter or prepare_reduce_scatter_list;
    reduce_scatter_in_place => ReduceScatterInPlace(buf: B: BufferMut; by op: Element) prepare_reduce_scatter_in_place;
    gather => Gather(send: S: Buffer, recv: R: BufferMut; root root) prepare_gather;
    scatter => Scatter(send: S: Buffer, recv: R: BufferMut; root root) prepare_scatter;
    all_to_all => AllToAll(send: S: Buffer, recv: R: BufferMut) prepare_all_to_all;
    all_to_all_in_place => AllToAllInPlace(buf: B: BufferMut) prepare_all_to_all_in_place;
    all_gather_v => AllGatherV['l](send: S: Buffer, recv: R: BufferMut; lens lens) prepare_all_gather_v;
    reduce_scatter_v => ReduceScatterV['l](send: S: Buffer, recv: R: BufferMut; lens lens; by op: Element) prepare_reduce_scatter_v;
    gather_v => GatherV['l](send: S: Buffer, recv: R: BufferMut; lens lens; root root) prepare_gather_v;
    scatter_v => ScatterV['l](send: S: Buffer, recv: R: BufferMut; lens lens; root root) prepare_scatter_v;
}

/// The operation [`Group::barrier`].
pub fn barrier() -> Barrier {
    Barrier
}

/// The operation of [`barrier`].
#[derive(Debug)]
#[must_use = "an operation does nothing until a group carries it out"]
pub struct Barrier;

impl sealed::HostOperation for Barrier {
    type Output = ();
    type Arguments = ();

    fn into_parts(self) -> ((), ()) {
        ((), ())
    }

    fn prepare<'a>(group: &Group, (): &'a mut (), (): &()) -> Prepared<'a> {
        group.prepare_barrier().into_prepared(group)
    }
}

/// The operation of [`all_to_all_v`].
#[derive(Debug)]
#[must_use = "an operation does nothing until a group carries it out"]
pub struct AllToAllV<'l, S: Elements, R: Elements<Element = S::Element>> {
    pub(crate) buffers: (S, R),
    pub(crate) lens: (&'l [usize], &'l [usize]),
}

/// The operation [`Group::all_to_all_v`].
pub fn all_to_all_v<'l, S: Elements, R: Elements<Element = S::Element>>(
    (send, send_lens): (S, &'l [usize]),
    (recv, recv_lens): (R, &'l [usize]),
) -> AllToAllV<'l, S, R> {
    AllToAllV { buffers: (send, recv), lens: (send_lens, recv_lens) }
}

impl<'l, S: Buffer, R: BufferMut<Element = S::Element>> sealed::HostOperation for AllToAllV<'l, S, R> {
    type Output = (S, R);
    type Arguments = (&'l [usize], &'l [usize]);

    fn into_parts(self) -> (Self::Output, Self::Arguments) {
        (self.buffers, self.lens)
    }

    fn prepare<'a>(
        group: &Group,
        (send, recv): &'a mut Self::Output,
        (send_lens, recv_lens): &Self::Arguments,
    ) -> Prepared<'a> {
        let buffers = (send.elements().into(), recv.elements_mut().into());
        group.prepare_all_to_all_v(buffers, send_lens, recv_lens)
    }
}
