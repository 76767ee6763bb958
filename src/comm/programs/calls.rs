//! Each collective in its blocking and its nonblocking form.

use std::sync::Arc;

use crate::{Buffer, BufferMut, CommError, Group, List, Memory, Nonblocking, ReduceOp, Reduction, Work};

use super::program::{Collective, Kind};
use super::values::Value;

/// Carries out `call` and waits.
pub(crate) fn blocking<T: Value>(
    group: &Group,
    call: &Collective,
    send: &[T],
    recv: &mut [T],
) -> Result<(), CommError> {
    let Collective { root, lens, .. } = call;
    let (root, me, size) = (*root, group.rank(), group.size());
    let op = reduction::<T>(call, me);
    match call.kind {
        Kind::Barrier => group.barrier(),
        Kind::AllReduce => group.all_reduce(recv, op),
        Kind::AllReduceInto => group.all_reduce_into(send, recv, op),
        Kind::AllReduceList => group.all_reduce_coalesced::<T, _>(&mut recv.cut(lens, 1), op),
        Kind::Broadcast => group.broadcast(recv, root),
        Kind::BroadcastList => group.broadcast_coalesced::<T, _>(&mut recv.cut(lens, 1), root),
        Kind::Reduce => group.reduce(recv, op, root),
        Kind::ReduceInto => group.reduce_into(send, recv, op, root),
        Kind::ReduceList => group.reduce_coalesced::<T, _>(&mut recv.cut(lens, 1), op, root),
        Kind::Scan => group.scan(recv, op),
        Kind::ExclusiveScan => group.exclusive_scan(recv, op),
        Kind::AllGather => group.all_gather(send, recv),
        Kind::AllGatherInPlace => group.all_gather_in_place(recv),
        Kind::AllGatherV => group.all_gather_v(send, recv, lens),
        Kind::AllGatherList => {
            group.all_gather_coalesced::<T, _, _>(&send.cut(lens, 1), &mut recv.cut(lens, size))
        }
        Kind::ReduceScatter => group.reduce_scatter(send, recv, op),
        Kind::ReduceScatterInPlace => group.reduce_scatter_in_place(recv, op),
        Kind::ReduceScatterV => group.reduce_scatter_v(send, recv, lens, op),
        Kind::ReduceScatterList => {
            group.reduce_scatter_coalesced::<T, _, _>(&send.cut(lens, size), &mut recv.cut(lens, 1), op)
        }
        Kind::Gather => group.gather(send, recv, root),
        Kind::GatherV => group.gather_v(send, recv, lens, root),
        Kind::Scatter => group.scatter(send, recv, root),
        Kind::ScatterV => group.scatter_v(send, recv, lens, root),
        Kind::AllToAll => group.all_to_all(send, recv),
        Kind::AllToAllInPlace => group.all_to_all_in_place(recv),
        Kind::AllToAllV => {
            let (sent, filled) = lens_of_pairs(lens, me, size);
            group.all_to_all_v((send, &sent), (recv, &filled))
        }
    }
}

/// The reduction, with this rank's factor if it has one.
fn reduction<T: Value>(call: &Collective, me: usize) -> Reduction<T> {
    match call.op {
        ReduceOp::PremulSum => Reduction::premul_sum(T::factor(call.factor(me))),
        ReduceOp::Custom => Reduction::new(|into: &mut [T], from: &[T]| {
            for (a, b) in into.iter_mut().zip(from) {
                *a = T::reduce(ReduceOp::Custom, *a, *b);
            }
        }),
        op => op.into(),
    }
}

/// The lengths that `me` sends to each rank, and those that it gets from each.
fn lens_of_pairs(lens: &[usize], me: usize, size: usize) -> (Vec<usize>, Vec<usize>) {
    let filled = (0..size).map(|rank| lens[rank * size + me]).collect();
    (lens[me * size..(me + 1) * size].to_vec(), filled)
}

/// Checks the buffers that an operation has sent and filled.
pub(crate) type Check<'s, T> = Box<dyn FnOnce(&[T], &[T]) -> Result<(), String> + Send + 's>;
/// Checks the memory that a handle returns.
pub(crate) type Look<'s, M> = Box<dyn FnOnce(<M as Memory>::Output) -> Result<(), String> + Send + 's>;

/// A receiver of handles.
pub(crate) trait Keeper<'s> {
    fn keep<M: Memory + Send + 's>(&mut self, work: Work<M>, look: Look<'s, M>);
}

/// Begins `call`, and passes its handle to `keeper`.
pub(crate) fn begin<'s, T, S, R>(
    from: &Nonblocking<'s, '_>,
    (call, me, size): (&Collective, usize, usize),
    (send, recv): (S, R),
    keeper: &mut impl Keeper<'s>,
    check: Check<'s, T>,
) -> Result<(), CommError>
where
    T: Value,
    S: Buffer<Element = T> + Cut + Send + 's,
    R: BufferMut<Element = T> + Cut + Send + 's,
{
    let Collective { root, lens, .. } = call;
    let (root, op) = (*root, reduction::<T>(call, me));
    let of_one =
        |check: Check<'s, T>| -> Look<'s, R> { Box::new(move |recv: R| check(&[], recv.elements())) };
    let of_two = |check: Check<'s, T>| -> Look<'s, (S, R)> {
        Box::new(move |(send, recv): (S, R)| check(send.elements(), recv.elements()))
    };
    let of_list = |check: Check<'s, T>| -> Look<'s, List<R>> {
        Box::new(move |List(recvs): List<R>| check(&[], &joined(&recvs)))
    };
    let of_lists = |check: Check<'s, T>| -> Look<'s, (List<S>, List<R>)> {
        Box::new(move |(List(sends), List(recvs)): (List<S>, List<R>)| {
            check(&joined(&sends), &joined(&recvs))
        })
    };
    match call.kind {
        Kind::Barrier => keeper.keep(from.barrier()?, Box::new(move |()| check(&[], &[]))),
        Kind::AllReduce => keeper.keep(from.all_reduce(recv, op)?, of_one(check)),
        Kind::AllReduceInto => keeper.keep(from.all_reduce_into(send, recv, op)?, of_two(check)),
        Kind::AllReduceList => {
            keeper.keep(from.all_reduce_coalesced(recv.cut(lens, 1), op)?, of_list(check));
        }
        Kind::Broadcast => keeper.keep(from.broadcast(recv, root)?, of_one(check)),
        Kind::BroadcastList => {
            keeper.keep(from.broadcast_coalesced(recv.cut(lens, 1), root)?, of_list(check));
        }
        Kind::Reduce => keeper.keep(from.reduce(recv, op, root)?, of_one(check)),
        Kind::ReduceInto => keeper.keep(from.reduce_into(send, recv, op, root)?, of_two(check)),
        Kind::ReduceList => {
            keeper.keep(from.reduce_coalesced(recv.cut(lens, 1), op, root)?, of_list(check));
        }
        Kind::Scan => keeper.keep(from.scan(recv, op)?, of_one(check)),
        Kind::ExclusiveScan => keeper.keep(from.exclusive_scan(recv, op)?, of_one(check)),
        Kind::AllGather => keeper.keep(from.all_gather(send, recv)?, of_two(check)),
        Kind::AllGatherInPlace => keeper.keep(from.all_gather_in_place(recv)?, of_one(check)),
        Kind::AllGatherV => keeper.keep(from.all_gather_v(send, recv, lens)?, of_two(check)),
        Kind::AllGatherList => {
            let work = from.all_gather_coalesced(send.cut(lens, 1), recv.cut(lens, size))?;
            keeper.keep(work, of_lists(check));
        }
        Kind::ReduceScatter => keeper.keep(from.reduce_scatter(send, recv, op)?, of_two(check)),
        Kind::ReduceScatterInPlace => keeper.keep(from.reduce_scatter_in_place(recv, op)?, of_one(check)),
        Kind::ReduceScatterV => keeper.keep(from.reduce_scatter_v(send, recv, lens, op)?, of_two(check)),
        Kind::ReduceScatterList => {
            let work = from.reduce_scatter_coalesced(send.cut(lens, size), recv.cut(lens, 1), op)?;
            keeper.keep(work, of_lists(check));
        }
        Kind::Gather => keeper.keep(from.gather(send, recv, root)?, of_two(check)),
        Kind::GatherV => keeper.keep(from.gather_v(send, recv, lens, root)?, of_two(check)),
        Kind::Scatter => keeper.keep(from.scatter(send, recv, root)?, of_two(check)),
        Kind::ScatterV => keeper.keep(from.scatter_v(send, recv, lens, root)?, of_two(check)),
        Kind::AllToAll => keeper.keep(from.all_to_all(send, recv)?, of_two(check)),
        Kind::AllToAllInPlace => keeper.keep(from.all_to_all_in_place(recv)?, of_one(check)),
        Kind::AllToAllV => {
            let (sent, filled) = lens_of_pairs(lens, me, size);
            keeper.keep(from.all_to_all_v((send, &sent), (recv, &filled))?, of_two(check));
        }
    }
    Ok(())
}

fn joined<B: Buffer>(buffers: &[B]) -> Vec<B::Element> {
    buffers.iter().flat_map(|buffer| buffer.elements()).copied().collect()
}

/// A buffer that can be cut into the buffers of a list.
pub(crate) trait Cut: Sized {
    /// Cuts off pieces of `times` each of `lens`.
    fn cut(self, lens: &[usize], times: usize) -> Vec<Self>;
}

impl<T: Value> Cut for Vec<T> {
    fn cut(self, lens: &[usize], times: usize) -> Vec<Self> {
        self.as_slice().cut(lens, times).into_iter().map(<[T]>::to_vec).collect()
    }
}

impl<T: Value> Cut for Box<[T]> {
    fn cut(self, lens: &[usize], times: usize) -> Vec<Self> {
        (&*self).cut(lens, times).into_iter().map(Box::from).collect()
    }
}

impl<T: Value> Cut for Arc<[T]> {
    fn cut(self, lens: &[usize], times: usize) -> Vec<Self> {
        (&*self).cut(lens, times).into_iter().map(Arc::from).collect()
    }
}

impl<T: Value> Cut for &[T] {
    fn cut(mut self, lens: &[usize], times: usize) -> Vec<Self> {
        lens.iter().map(|len| self.split_off(..len * times).expect("long enough")).collect()
    }
}

impl<T: Value> Cut for &mut [T] {
    fn cut(mut self, lens: &[usize], times: usize) -> Vec<Self> {
        lens.iter().map(|len| self.split_off_mut(..len * times).expect("long enough")).collect()
    }
}
