//! One call of a collective, in its blocking and nonblocking form.

use convoke_comm::op::{self, Scope};
use convoke_comm::{CommError, Group, ReduceOp, Reduction};

use super::buffers::PageBuffer;
use super::collective::{Collective, Shape};
use super::values::{TestPattern, Value};

/// The two buffers of one operation: `a` is sent, `b` or `a` gets the result.
pub(crate) struct BufferPair<T: Value> {
    pub(crate) a: PageBuffer<T>,
    pub(crate) b: PageBuffer<T>,
}

/// A prepared collective call, which can be made any number of times.
pub(crate) struct Call<T: Value> {
    pub(crate) shape: Shape,
    pub(crate) reduction: Reduction<T>,
    pub(crate) lens: Vec<usize>,
    /// The rank that this rank exchanges messages with, in `send_recv`.
    pub(crate) peer: Option<usize>,
}

impl<T: Value> Call<T> {
    pub(crate) fn new(shape: Shape, op: Option<ReduceOp>) -> Self {
        let reduction = match op {
            Some(ReduceOp::PremulSum) => T::premul_sum(TestPattern::factor(shape.rank)),
            _ => None,
        };
        let reduction = reduction.unwrap_or_else(|| op.unwrap_or(ReduceOp::Sum).into());
        let peer = (shape.rank < shape.collective.participants(shape.ranks)).then_some(shape.rank ^ 1);
        let lens = shape.block_lens(shape.rank);
        Self { shape, reduction, lens, peer }
    }

    fn parts<'a>(&self, buffers: &'a mut BufferPair<T>) -> (&'a mut [T], &'a mut [T]) {
        let (a, b) = self.shape.buffer_lens();
        (&mut buffers.a[..a], &mut buffers.b[..b])
    }

    /// Returns for each element of `buffers` the parts that the call uses.
    pub(crate) fn buffer_parts<'a>(
        &self,
        buffers: &'a mut [BufferPair<T>],
    ) -> impl Iterator<Item = (&'a mut [T], &'a mut [T])> {
        buffers.iter_mut().map(|buffers| self.parts(buffers))
    }

    /// Runs one operation with each element of `buffers`. Nonblocking operations run concurrently.
    pub(crate) fn run(
        &self,
        group: &Group,
        buffers: &mut [BufferPair<T>],
        root: usize,
        nonblocking: bool,
    ) -> Result<(), CommError> {
        if nonblocking {
            return group.scope(move |scope| {
                buffers.iter_mut().try_for_each(|buffers| self.begin(scope, buffers, root))
            });
        }
        buffers.iter_mut().try_for_each(|buffers| self.wait(group, buffers, root))
    }

    fn wait(&self, group: &Group, buffers: &mut BufferPair<T>, root: usize) -> Result<(), CommError> {
        let (a, b) = self.parts(buffers);
        let op = || self.reduction.clone();
        let lens = &self.lens[..];
        match self.shape.collective {
            Collective::AllReduce => group.all_reduce(a, op()),
            Collective::Broadcast => group.broadcast(a, root),
            Collective::Reduce => group.reduce(a, op(), root),
            Collective::AllGather => group.all_gather(a, b),
            Collective::ReduceScatter => group.reduce_scatter(a, b, op()),
            Collective::AllToAll => group.all_to_all(a, b),
            Collective::Gather => group.gather(a, b, root),
            Collective::Scatter => group.scatter(a, b, root),
            Collective::Scan => group.scan(a, op()),
            Collective::ExclusiveScan => group.exclusive_scan(a, op()),
            Collective::Barrier => group.barrier(),
            Collective::AllGatherV => group.all_gather_v(a, b, lens),
            Collective::ReduceScatterV => group.reduce_scatter_v(a, b, lens, op()),
            Collective::AllToAllV => group.all_to_all_v((a, lens), (b, lens)),
            Collective::GatherV => group.gather_v(a, b, lens, root),
            Collective::ScatterV => group.scatter_v(a, b, lens, root),
            Collective::SendRecv => match self.peer {
                Some(peer) if self.is_first() => {
                    group.send(a, peer, 0)?;
                    group.recv(b, peer, 0).map(drop)
                }
                Some(peer) => {
                    group.recv(b, peer, 0)?;
                    group.send(a, peer, 0)
                }
                None => Ok(()),
            },
        }
    }

    fn begin<'scope, 'env: 'scope>(
        &self,
        scope: &'scope Scope<'scope, 'env>,
        buffers: &'env mut BufferPair<T>,
        root: usize,
    ) -> Result<(), CommError> {
        let (a, b) = self.parts(buffers);
        let op = || self.reduction.clone();
        let lens = &self.lens[..];
        // The scope waits for operations whose handles were dropped.
        match self.shape.collective {
            Collective::AllReduce => scope.start(op::all_reduce(a, op())).map(drop),
            Collective::Broadcast => scope.start(op::broadcast(a, root)).map(drop),
            Collective::Reduce => scope.start(op::reduce(a, op(), root)).map(drop),
            Collective::AllGather => scope.start(op::all_gather(&*a, b)).map(drop),
            Collective::ReduceScatter => scope.start(op::reduce_scatter(&*a, b, op())).map(drop),
            Collective::AllToAll => scope.start(op::all_to_all(&*a, b)).map(drop),
            Collective::Gather => scope.start(op::gather(&*a, b, root)).map(drop),
            Collective::Scatter => scope.start(op::scatter(&*a, b, root)).map(drop),
            Collective::Scan => scope.start(op::scan(a, op())).map(drop),
            Collective::ExclusiveScan => scope.start(op::exclusive_scan(a, op())).map(drop),
            Collective::Barrier => scope.start(op::barrier()).map(drop),
            Collective::AllGatherV => scope.start(op::all_gather_v(&*a, b, lens)).map(drop),
            Collective::ReduceScatterV => scope.start(op::reduce_scatter_v(&*a, b, lens, op())).map(drop),
            Collective::AllToAllV => scope.start(op::all_to_all_v((&*a, lens), (b, lens))).map(drop),
            Collective::GatherV => scope.start(op::gather_v(&*a, b, lens, root)).map(drop),
            Collective::ScatterV => scope.start(op::scatter_v(&*a, b, lens, root)).map(drop),
            Collective::SendRecv => match self.peer {
                Some(peer) if self.is_first() => {
                    scope.start(op::send(&*a, peer))?;
                    scope.start(op::recv(b, peer)).map(drop)
                }
                // This rank sends back data only after it has received the peer's message.
                Some(peer) => {
                    scope.start(op::recv(b, peer))?.wait()?;
                    scope.start(op::send(&*a, peer)).map(drop)
                }
                None => Ok(()),
            },
        }
    }

    /// Returns whether this rank sends first and its peer receives first.
    pub(crate) fn is_first(&self) -> bool {
        self.shape.rank.is_multiple_of(2)
    }
}
