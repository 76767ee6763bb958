//! Each collective in its blocking and its nonblocking form.

use std::sync::Arc;

use crate::op::{self, Buffer, BufferMut, Operation, OperationOutput, Scope};
use crate::{CommError, Group, ReduceOp, Reduction, Work};

use super::handles::TestError;
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
        CollectiveKind::Broadcast => group.broadcast(recv, root),
        CollectiveKind::Reduce => group.reduce(recv, op, root),
        CollectiveKind::ReduceInto => group.reduce_into(send, recv, op, root),
        CollectiveKind::Scan => group.scan(recv, op),
        CollectiveKind::ExclusiveScan => group.exclusive_scan(recv, op),
        CollectiveKind::AllGather => group.all_gather(send, recv),
        CollectiveKind::AllGatherInPlace => group.all_gather_in_place(recv),
        CollectiveKind::AllGatherV => group.all_gather_v(send, recv, lens),
        CollectiveKind::ReduceScatter => group.reduce_scatter(send, recv, op),
        CollectiveKind::ReduceScatterInPlace => group.reduce_scatter_in_place(recv, op),
        CollectiveKind::ReduceScatterV => group.reduce_scatter_v(send, recv, lens, op),
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
        CollectiveKind::AllReduceList
        | CollectiveKind::BroadcastList
        | CollectiveKind::ReduceList
        | CollectiveKind::AllGatherList
        | CollectiveKind::ReduceScatterList => run_list(group, call, send, recv).map(drop),
    }
}

/// Carries out a collective on a list of buffers: pieces of `send` and `recv`, which it returns.
fn run_list<T, S, R>(
    group: &Group,
    call: &Collective,
    send: S,
    recv: R,
) -> Result<(Vec<S>, Vec<R>), CommError>
where
    T: Value,
    S: Buffer<Element = T> + SplitBuffer,
    R: BufferMut<Element = T> + SplitBuffer,
{
    let Collective { root, lens, .. } = call;
    let (root, size, op) = (*root, group.size(), reduction::<T>(call, group.rank()));
    let recvs = |recv: R| recv.split_by(lens, 1).into_iter();
    let filled = match call.kind {
        CollectiveKind::AllReduceList => {
            group.run(recvs(recv).map(|recv| op::all_reduce(recv, op.clone())).collect::<Vec<_>>())?
        }
        CollectiveKind::BroadcastList => {
            group.run(recvs(recv).map(|recv| op::broadcast(recv, root)).collect::<Vec<_>>())?
        }
        CollectiveKind::ReduceList => {
            group.run(recvs(recv).map(|recv| op::reduce(recv, op.clone(), root)).collect::<Vec<_>>())?
        }
        CollectiveKind::AllGatherList => {
            let pairs = send.split_by(lens, 1).into_iter().zip(recv.split_by(lens, size));
            let done = group.run(pairs.map(|(send, recv)| op::all_gather(send, recv)).collect::<Vec<_>>())?;
            return Ok(done.into_iter().unzip());
        }
        _ => {
            let pairs = send.split_by(lens, size).into_iter().zip(recvs(recv));
            let one = |(send, recv)| op::reduce_scatter(send, recv, op.clone());
            return Ok(group.run(pairs.map(one).collect::<Vec<_>>())?.into_iter().unzip());
        }
    };
    Ok((Vec::new(), filled))
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
pub(crate) type OutputCheck<'s, M> = Box<dyn FnOnce(M) -> Result<(), String> + Send + 's>;

/// A group, or a scope of one, in which operations begin.
pub(crate) trait Start<'s> {
    fn group(&self) -> &Group;

    fn start<O: Operation>(&self, operation: O) -> Result<Work<O::Output>, CommError>
    where
        O::Output: 's;
}

impl Start<'static> for Group {
    fn group(&self) -> &Group {
        self
    }

    fn start<O: Operation>(&self, operation: O) -> Result<Work<O::Output>, CommError>
    where
        O::Output: 'static,
    {
        Group::start(self, operation)
    }
}

impl<'s> Start<'s> for (&Group, &Scope<'s, '_>) {
    fn group(&self) -> &Group {
        self.0
    }

    fn start<O: Operation>(&self, operation: O) -> Result<Work<O::Output>, CommError>
    where
        O::Output: 's,
    {
        self.1.start(operation).map(Work::from)
    }
}

/// A receiver of handles.
pub(crate) trait HandleSink<'s> {
    fn add_handle<M: OperationOutput + 's>(&mut self, work: Work<M>, check: OutputCheck<'s, M>);
}

/// Begins `call`, and passes its handle to `sink`.
pub(crate) fn begin<'s, T, S, R>(
    from: &impl Start<'s>,
    call: &Collective,
    (send, recv): (S, R),
    sink: &mut impl HandleSink<'s>,
    check: Check<'s, T>,
) -> Result<(), TestError>
where
    T: Value,
    S: Buffer<Element = T> + SplitBuffer + 's,
    R: BufferMut<Element = T> + SplitBuffer + 's,
{
    let Collective { root, lens, .. } = call;
    let (me, size) = (from.group().rank(), from.group().size());
    let (root, op) = (*root, reduction::<T>(call, me));
    let of_one =
        |check: Check<'s, T>| -> OutputCheck<'s, R> { Box::new(move |recv: R| check(&[], recv.elements())) };
    let of_two = |check: Check<'s, T>| -> OutputCheck<'s, (S, R)> {
        Box::new(move |(send, recv): (S, R)| check(send.elements(), recv.elements()))
    };
    match call.kind {
        CollectiveKind::Barrier => {
            sink.add_handle(from.start(op::barrier())?, Box::new(move |()| check(&[], &[])))
        }
        CollectiveKind::AllReduce => sink.add_handle(from.start(op::all_reduce(recv, op))?, of_one(check)),
        CollectiveKind::AllReduceInto => {
            sink.add_handle(from.start(op::all_reduce_into(send, recv, op))?, of_two(check))
        }
        CollectiveKind::Broadcast => sink.add_handle(from.start(op::broadcast(recv, root))?, of_one(check)),
        CollectiveKind::Reduce => sink.add_handle(from.start(op::reduce(recv, op, root))?, of_one(check)),
        CollectiveKind::ReduceInto => {
            sink.add_handle(from.start(op::reduce_into(send, recv, op, root))?, of_two(check))
        }
        CollectiveKind::Scan => sink.add_handle(from.start(op::scan(recv, op))?, of_one(check)),
        CollectiveKind::ExclusiveScan => {
            sink.add_handle(from.start(op::exclusive_scan(recv, op))?, of_one(check))
        }
        CollectiveKind::AllGather => sink.add_handle(from.start(op::all_gather(send, recv))?, of_two(check)),
        CollectiveKind::AllGatherInPlace => {
            sink.add_handle(from.start(op::all_gather_in_place(recv))?, of_one(check))
        }
        CollectiveKind::AllGatherV => {
            sink.add_handle(from.start(op::all_gather_v(send, recv, lens))?, of_two(check))
        }
        CollectiveKind::ReduceScatter => {
            sink.add_handle(from.start(op::reduce_scatter(send, recv, op))?, of_two(check))
        }
        CollectiveKind::ReduceScatterInPlace => {
            sink.add_handle(from.start(op::reduce_scatter_in_place(recv, op))?, of_one(check))
        }
        CollectiveKind::ReduceScatterV => {
            sink.add_handle(from.start(op::reduce_scatter_v(send, recv, lens, op))?, of_two(check))
        }
        CollectiveKind::Gather => sink.add_handle(from.start(op::gather(send, recv, root))?, of_two(check)),
        CollectiveKind::GatherV => {
            sink.add_handle(from.start(op::gather_v(send, recv, lens, root))?, of_two(check))
        }
        CollectiveKind::Scatter => sink.add_handle(from.start(op::scatter(send, recv, root))?, of_two(check)),
        CollectiveKind::ScatterV => {
            sink.add_handle(from.start(op::scatter_v(send, recv, lens, root))?, of_two(check))
        }
        CollectiveKind::AllToAll => sink.add_handle(from.start(op::all_to_all(send, recv))?, of_two(check)),
        CollectiveKind::AllToAllInPlace => {
            sink.add_handle(from.start(op::all_to_all_in_place(recv))?, of_one(check))
        }
        CollectiveKind::AllToAllV => {
            let (sent, filled) = lens_of_pairs(lens, me, size);
            sink.add_handle(from.start(op::all_to_all_v((send, &sent), (recv, &filled)))?, of_two(check));
        }
        CollectiveKind::AllReduceList
        | CollectiveKind::BroadcastList
        | CollectiveKind::ReduceList
        | CollectiveKind::AllGatherList
        | CollectiveKind::ReduceScatterList => {
            let (sends, recvs) = run_list(from.group(), call, send, recv)?;
            check(&joined(&sends), &joined(&recvs))?;
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
