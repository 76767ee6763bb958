//! Lists of operations that a group carries out at once.

use super::buffers::OperationOutput;
use super::sealed::{HostOperation, Parts, PreparedList};
use crate::collectives::call::Status;
use crate::error::CommError;

/// Operations that [`Group::run`](crate::Group::run) carries out at once: one
/// [`Operation`](super::Operation), or a tuple, array or vector of operations or lists of them.
///
/// Messages progress concurrently. Collectives run in the order of the list. Several of one kind in an array
/// or vector, with an equal reduction and root, are sent as one transfer at the cost of one call:
/// `all_reduce`, `broadcast`, `reduce`, `all_gather` and `reduce_scatter`.
///
/// The trait is sealed.
pub trait Operations: sealed::List {}

impl<L: sealed::List> Operations for L {}

/// One entry for each prepared operation of a list: the status of a receive, or `None`.
type Statuses = std::vec::IntoIter<Option<Status>>;

pub(super) mod sealed {
    use super::{CommError, PreparedList, Statuses};

    pub trait List {
        /// The results of the operations, in the order and form of the list.
        type Output;
        /// The buffers and arguments of the operations.
        type Parts;

        fn into_parts(self) -> Self::Parts;

        fn prepare<'a>(parts: &'a mut Self::Parts, into: &mut PreparedList<'_, 'a>) -> Result<(), CommError>;

        fn finish(parts: Self::Parts, statuses: &mut Statuses) -> Self::Output;
    }
}

impl<O: HostOperation> sealed::List for O {
    type Output = O::Output;
    type Parts = Parts<O>;

    fn into_parts(self) -> Parts<O> {
        HostOperation::into_parts(self)
    }

    fn prepare<'a>(parts: &'a mut Parts<O>, into: &mut PreparedList<'_, 'a>) -> Result<(), CommError> {
        into.add_each::<O>(std::slice::from_mut(parts))
    }

    fn finish((mut buffers, _): Parts<O>, statuses: &mut Statuses) -> O::Output {
        if let Some(status) = statuses.next().flatten() {
            buffers.set_status(status);
        }
        buffers
    }
}

impl<O: HostOperation> sealed::List for Vec<O> {
    type Output = Vec<O::Output>;
    type Parts = Vec<Parts<O>>;

    fn into_parts(self) -> Self::Parts {
        self.into_iter().map(O::into_parts).collect()
    }

    fn prepare<'a>(parts: &'a mut Self::Parts, into: &mut PreparedList<'_, 'a>) -> Result<(), CommError> {
        O::prepare_list(parts, into)
    }

    fn finish(parts: Self::Parts, statuses: &mut Statuses) -> Self::Output {
        parts.into_iter().map(|part| <O as sealed::List>::finish(part, statuses)).collect()
    }
}

impl<O: HostOperation, const N: usize> sealed::List for [O; N] {
    type Output = [O::Output; N];
    type Parts = [Parts<O>; N];

    fn into_parts(self) -> Self::Parts {
        self.map(O::into_parts)
    }

    fn prepare<'a>(parts: &'a mut Self::Parts, into: &mut PreparedList<'_, 'a>) -> Result<(), CommError> {
        O::prepare_list(parts, into)
    }

    fn finish(parts: Self::Parts, statuses: &mut Statuses) -> Self::Output {
        parts.map(|part| <O as sealed::List>::finish(part, statuses))
    }
}

macro_rules! tuples {
    ($(($($List:ident $part:ident),*);)*) => {$(
        impl<$($List: sealed::List),*> sealed::List for ($($List,)*) {
            type Output = ($($List::Output,)*);
            type Parts = ($($List::Parts,)*);

            fn into_parts(self) -> Self::Parts {
                let ($($part,)*) = self;
                ($($part.into_parts(),)*)
            }

            fn prepare<'a>(
                ($($part,)*): &'a mut Self::Parts,
                into: &mut PreparedList<'_, 'a>,
            ) -> Result<(), CommError> {
                $($List::prepare($part, into)?;)*
                Ok(())
            }

            fn finish(($($part,)*): Self::Parts, statuses: &mut Statuses) -> Self::Output {
                ($($List::finish($part, statuses),)*)
            }
        }
    )*};
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
    (A a, B b, C c, D d, E e);
    (A a, B b, C c, D d, E e, F f);
}
