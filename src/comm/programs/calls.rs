//! Each collective in its blocking and its nonblocking form.

use std::sync::Arc;

use crate::{
    Buffer, BufferMut, CommError, Group, List, Nonblocking, OperationBuffers, ReduceOp, Reduction, Work,
};

use super::random_program::{Collective, CollectiveKind};
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
        CollectiveKind::Barrier => group.barrier(),
        CollectiveKind::AllReduce => group.all_reduce(recv, op),
        CollectiveKind::AllReduceInto => group.all_reduce_into(send, recv, op),
        CollectiveKind::AllReduceList => group.all_reduce_coalesced::<T, _>(&mut recv.split_by(lens, 1), op),
        CollectiveKind::Broadcast => group.broadcast(recv, root),
        CollectiveKind::BroadcastList => group.broadcast_coalesced::<T, _>(&mut recv.split_by(lens, 1), root),
        CollectiveKind::Reduce => group.reduce(recv, op, root),
        CollectiveKind::ReduceInto => group.reduce_into(send, recv, op, root),
        CollectiveKind::ReduceList => group.reduce_coalesced::<T, _>(&mut recv.split_by(lens, 1), op, root),
        CollectiveKind::Scan => group.scan(recv, op),
        CollectiveKind::ExclusiveScan => group.exclusive_scan(recv, op),
        CollectiveKind::AllGather => group.all_gather(send, recv),
        CollectiveKind::AllGatherInPlace => group.all_gather_in_place(recv),
        CollectiveKind::AllGatherV => group.all_gather_v(send, recv, lens),
        CollectiveKind::AllGatherList => {
            group.all_gather_coalesced::<T, _, _>(&send.split_by(lens, 1), &mut recv.split_by(lens, size))
        }
        CollectiveKind::ReduceScatter => group.reduce_scatter(send, recv, op),
        CollectiveKind::ReduceScatterInPlace => group.reduce_scatter_in_place(recv, op),
        CollectiveKind::ReduceScatterV => group.reduce_scatter_v(send, recv, lens, op),
        CollectiveKind::ReduceScatterList => group.reduce_scatter_coalesced::<T, _, _>(
            &send.split_by(lens, size),
            &mut recv.split_by(lens, 1),
            op,
        ),
        CollectiveKind::Gather => group.gather(send, recv, root),
        CollectiveKind::GatherV => group.gather_v(send, recv, lens, root),
        CollectiveKind::Scatter => group.scatter(send, recv, root),
        CollectiveKind::ScatterV => group.scatter_v(send, recv, lens, root),
        CollectiveKind::AllToAll => group.all_to_all(send, recv),
        CollectiveKind::AllToAllInPlace => group.all_to_all_in_place(recv),
        CollectiveKind::AllToAllV => {
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
pub(crate) type OutputCheck<'s, M> =
    Box<dyn FnOnce(<M as OperationBuffers>::Output) -> Result<(), String> + Send + 's>;

/// A receiver of handles.
pub(crate) trait HandleSink<'s> {
    fn add_handle<M: OperationBuffers + Send + 's>(&mut self, work: Work<M>, check: OutputCheck<'s, M>);
}

/// Begins `call`, and passes its handle to `sink`.
pub(crate) fn begin<'s, T, S, R>(
    from: &Nonblocking<'s, '_>,
    (call, me, size): (&Collective, usize, usize),
    (send, recv): (S, R),
    sink: &mut impl HandleSink<'s>,
    check: Check<'s, T>,
) -> Result<(), CommError>
where
    T: Value,
    S: Buffer<Element = T> + SplitBuffer + Send + 's,
    R: BufferMut<Element = T> + SplitBuffer + Send + 's,
{
    let Collective { root, lens, .. } = call;
    let (root, op) = (*root, reduction::<T>(call, me));
    let of_one =
        |check: Check<'s, T>| -> OutputCheck<'s, R> { Box::new(move |recv: R| check(&[], recv.elements())) };
    let of_two = |check: Check<'s, T>| -> OutputCheck<'s, (S, R)> {
        Box::new(move |(send, recv): (S, R)| check(send.elements(), recv.elements()))
    };
    let of_list = |check: Check<'s, T>| -> OutputCheck<'s, List<R>> {
        Box::new(move |List(recvs): List<R>| check(&[], &joined(&recvs)))
    };
    let of_lists = |check: Check<'s, T>| -> OutputCheck<'s, (List<S>, List<R>)> {
        Box::new(move |(List(sends), List(recvs)): (List<S>, List<R>)| {
            check(&joined(&sends), &joined(&recvs))
        })
    };
    match call.kind {
        CollectiveKind::Barrier => sink.add_handle(from.barrier()?, Box::new(move |()| check(&[], &[]))),
        CollectiveKind::AllReduce => sink.add_handle(from.all_reduce(recv, op)?, of_one(check)),
        CollectiveKind::AllReduceInto => {
            sink.add_handle(from.all_reduce_into(send, recv, op)?, of_two(check))
        }
        CollectiveKind::AllReduceList => {
            sink.add_handle(from.all_reduce_coalesced(recv.split_by(lens, 1), op)?, of_list(check));
        }
        CollectiveKind::Broadcast => sink.add_handle(from.broadcast(recv, root)?, of_one(check)),
        CollectiveKind::BroadcastList => {
            sink.add_handle(from.broadcast_coalesced(recv.split_by(lens, 1), root)?, of_list(check));
        }
        CollectiveKind::Reduce => sink.add_handle(from.reduce(recv, op, root)?, of_one(check)),
        CollectiveKind::ReduceInto => sink.add_handle(from.reduce_into(send, recv, op, root)?, of_two(check)),
        CollectiveKind::ReduceList => {
            sink.add_handle(from.reduce_coalesced(recv.split_by(lens, 1), op, root)?, of_list(check));
        }
        CollectiveKind::Scan => sink.add_handle(from.scan(recv, op)?, of_one(check)),
        CollectiveKind::ExclusiveScan => sink.add_handle(from.exclusive_scan(recv, op)?, of_one(check)),
        CollectiveKind::AllGather => sink.add_handle(from.all_gather(send, recv)?, of_two(check)),
        CollectiveKind::AllGatherInPlace => sink.add_handle(from.all_gather_in_place(recv)?, of_one(check)),
        CollectiveKind::AllGatherV => sink.add_handle(from.all_gather_v(send, recv, lens)?, of_two(check)),
        CollectiveKind::AllGatherList => {
            let work = from.all_gather_coalesced(send.split_by(lens, 1), recv.split_by(lens, size))?;
            sink.add_handle(work, of_lists(check));
        }
        CollectiveKind::ReduceScatter => sink.add_handle(from.reduce_scatter(send, recv, op)?, of_two(check)),
        CollectiveKind::ReduceScatterInPlace => {
            sink.add_handle(from.reduce_scatter_in_place(recv, op)?, of_one(check))
        }
        CollectiveKind::ReduceScatterV => {
            sink.add_handle(from.reduce_scatter_v(send, recv, lens, op)?, of_two(check))
        }
        CollectiveKind::ReduceScatterList => {
            let work =
                from.reduce_scatter_coalesced(send.split_by(lens, size), recv.split_by(lens, 1), op)?;
            sink.add_handle(work, of_lists(check));
        }
        CollectiveKind::Gather => sink.add_handle(from.gather(send, recv, root)?, of_two(check)),
        CollectiveKind::GatherV => sink.add_handle(from.gather_v(send, recv, lens, root)?, of_two(check)),
        CollectiveKind::Scatter => sink.add_handle(from.scatter(send, recv, root)?, of_two(check)),
        CollectiveKind::ScatterV => sink.add_handle(from.scatter_v(send, recv, lens, root)?, of_two(check)),
        CollectiveKind::AllToAll => sink.add_handle(from.all_to_all(send, recv)?, of_two(check)),
        CollectiveKind::AllToAllInPlace => sink.add_handle(from.all_to_all_in_place(recv)?, of_one(check)),
        CollectiveKind::AllToAllV => {
            let (sent, filled) = lens_of_pairs(lens, me, size);
            sink.add_handle(from.all_to_all_v((send, &sent), (recv, &filled))?, of_two(check));
        }
    }
    Ok(())
}

fn joined<B: Buffer>(buffers: &[B]) -> Vec<B::Element> {
    buffers.iter().flat_map(|buffer| buffer.elements()).copied().collect()
}

/// A buffer that can be split into the buffers of a list.
pub(crate) trait SplitBuffer: Sized {
    /// Splits off pieces of `times` each of `lens`.
    fn split_by(self, lens: &[usize], times: usize) -> Vec<Self>;
}

impl<T: Value> SplitBuffer for Vec<T> {
    fn split_by(self, lens: &[usize], times: usize) -> Vec<Self> {
        self.as_slice().split_by(lens, times).into_iter().map(<[T]>::to_vec).collect()
    }
}

impl<T: Value> SplitBuffer for Box<[T]> {
    fn split_by(self, lens: &[usize], times: usize) -> Vec<Self> {
        (&*self).split_by(lens, times).into_iter().map(Box::from).collect()
    }
}

impl<T: Value> SplitBuffer for Arc<[T]> {
    fn split_by(self, lens: &[usize], times: usize) -> Vec<Self> {
        (&*self).split_by(lens, times).into_iter().map(Arc::from).collect()
    }
}

impl<T: Value> SplitBuffer for &[T] {
    fn split_by(mut self, lens: &[usize], times: usize) -> Vec<Self> {
        lens.iter().map(|len| self.split_off(..len * times).expect("long enough")).collect()
    }
}

impl<T: Value> SplitBuffer for &mut [T] {
    fn split_by(mut self, lens: &[usize], times: usize) -> Vec<Self> {
        lens.iter().map(|len| self.split_off_mut(..len * times).expect("long enough")).collect()
    }
}
