//! Collectives of whole buffers, one on each rank.

use std::time::Duration;

use super::{CallKind, CommError, Element, Group, Lent, Prepared, Reduction, call};
use crate::plan;

impl Group {
    /// Replaces `buf` on every rank by the elementwise `op` over all ranks' `buf`.
    ///
    /// All ranks pass the same length, type and `op`, a [`ReduceOp`](crate::ReduceOp) or a [`Reduction`]. Sums are
    /// added in one fixed order: bitwise equal on all ranks and on a rerun. Those of `f16` and `bf16` are added as
    /// `f32` and rounded once.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if `op` has no meaning for the type
    /// ([`ReduceOp::accepts`](crate::ReduceOp::accepts)). [`CommError::Mismatch`] on all ranks if they disagree.
    /// Else whatever ended the group; `buf` is then unspecified.
    ///
    /// # Cost
    /// With P ranks and S bytes: few bytes, log2(P) exchanges of S; many, a ring of 2(P−1) steps in which
    /// each rank sends 2·S·(P−1)/P bytes. On H hosts of several ranks 2·S·(H−1)/H bytes leave each host.
    ///
    /// Sums of halves, up to 16 ranks: few bytes, one round in which each rank sends S·(P−1) bytes; many, two rounds
    /// and 2·S·(P−1)/P bytes. With more ranks sums travel as `f32`, as those of other types.
    pub fn all_reduce<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_reduce(buf, &op.into())).map(drop)
    }

    pub(super) fn prepare_all_reduce<'a, T: Element>(
        &self,
        buf: &'a mut [T],
        op: &Reduction<T>,
    ) -> Prepared<'a> {
        let kernel = op.kernel(self.size())?;
        let call = call::<T>(CallKind::AllReduce, Some(op.op()), 0, buf.len());
        self.planned(call, Lent::default().filled(0, buf), Some(kernel))
    }

    /// As [`Self::all_reduce`], from `send`, which stays as it is, into `recv`.
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; [`CommError::InvalidArgument`] also if the two are not equally long.
    ///
    /// # Cost
    /// As [`Self::all_reduce`], and a copy.
    pub fn all_reduce_into<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_reduce_into(send, recv, &op.into())).map(drop)
    }

    pub(super) fn prepare_all_reduce_into<'a, T: Element>(
        &self,
        send: &[T],
        recv: &'a mut [T],
        op: &Reduction<T>,
    ) -> Prepared<'a> {
        op.kernel(self.size())?;
        check_same(send, recv)?;
        recv.copy_from_slice(send);
        self.prepare_all_reduce(recv, op)
    }

    /// Replaces `buf` on every rank by that of rank `root`.
    ///
    /// All ranks pass the same length, type and `root`. The root may return before the others have
    /// everything.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such rank. [`CommError::Mismatch`] if ranks
    /// disagree (a root that has returned gets it from its next call). Else whatever ended the group.
    ///
    /// # Cost
    /// Few bytes: a tree of log2(P) steps. Many: a chain in which every rank sends S bytes at most. S bytes go to
    /// each other host.
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: usize) -> Result<(), CommError> {
        self.carry_out(self.prepare_broadcast(buf, root)).map(drop)
    }

    pub(super) fn prepare_broadcast<'a, T: Element>(&self, buf: &'a mut [T], root: usize) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let call = call::<T>(CallKind::Broadcast, None, root as u32, buf.len());
        self.planned(call, Lent::default().filled(0, buf), None)
    }

    /// Replaces `buf` on rank `root` by the elementwise `op` over all ranks' `buf`. On the other ranks it is
    /// unspecified afterwards.
    ///
    /// All ranks pass the same length, type, `op` and `root`. A rank other than the root may return before
    /// the root has everything.
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; [`CommError::InvalidArgument`] also if there is no such rank.
    ///
    /// # Cost
    /// Few bytes: a tree of log2(P) steps. Many: a chain in which every rank sends S bytes at most. S bytes come
    /// from each other host.
    ///
    /// Sums of halves, up to 16 ranks: one round, or two, in which every rank sends S bytes.
    pub fn reduce<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_reduce(buf, &op.into(), root)).map(drop)
    }

    pub(super) fn prepare_reduce<'a, T: Element>(
        &self,
        buf: &'a mut [T],
        op: &Reduction<T>,
        root: usize,
    ) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let kernel = op.kernel(self.size())?;
        let call = call::<T>(CallKind::Reduce, Some(op.op()), root as u32, buf.len());
        self.planned(call, Lent::default().filled(0, buf), Some(kernel))
    }

    /// As [`Self::reduce`], from `send`, which stays as it is, into `recv` of the root; that of the other ranks is
    /// not looked at and may be empty.
    ///
    /// # Errors
    /// As [`Self::reduce`]; [`CommError::InvalidArgument`] also if on the root the two are not equally long.
    ///
    /// # Cost
    /// As [`Self::reduce`], and a copy.
    pub fn reduce_into<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_reduce_into(send, recv, &op.into(), root)).map(drop)
    }

    pub(super) fn prepare_reduce_into<'a, T: Element>(
        &self,
        send: &[T],
        recv: &'a mut [T],
        op: &Reduction<T>,
        root: usize,
    ) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let kernel = op.kernel(self.size())?;
        if self.rank() == root {
            check_same(send, recv)?;
            recv.copy_from_slice(send);
            return self.prepare_reduce(recv, op, root);
        }
        let call = call::<T>(CallKind::Reduce, Some(op.op()), root as u32, send.len());
        self.planned(call, Lent::default().scratch(0, send.to_vec()), Some(kernel))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Whatever ended the group.
    ///
    /// # Cost
    /// Messages of a few bytes, one after the other: log2(L) inside hosts of L ranks, then log2(H) between H hosts.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.carry_out(self.prepare_barrier()).map(drop)
    }

    /// Returns when all ranks have called it, as [`Self::barrier`]; if they do not within `timeout` from this rank's
    /// call, the error names all that did not come, on every rank.
    ///
    /// For finding out who hangs, where a barrier would name only ranks that somebody happened to wait for. A rank
    /// that does not come in time ends the group as every deadline does: it may still send for an earlier call, and
    /// the others could not tell. [`Self::shrink`] goes on with those that came.
    ///
    /// # Errors
    /// [`CommError::Timeout`], whose `missing` are all ranks that did not come, up to 64. Else whatever ended the
    /// group.
    ///
    /// # Cost
    /// Each rank sends every other a message of 80 bytes.
    ///
    /// Mirrors `torch.distributed.monitored_barrier`, with `wait_all_ranks` always on: it costs no time, as the
    /// ranks do not tell one of them but each other.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<(), CommError> {
        self.with_timeout(timeout).carry_out(self.prepare_monitored_barrier()).map(drop)
    }

    fn prepare_monitored_barrier(&self) -> Prepared<'static> {
        self.planned(call::<u8>(CallKind::MonitoredBarrier, None, 0, 0), Lent::default(), None)
    }

    pub(super) fn prepare_barrier(&self) -> Prepared<'static> {
        let call = call::<u8>(CallKind::Barrier, None, 0, 0);
        let elements = |_| vec![0_u8; plan::barrier_elements(&self.inner.topology)];
        let memory = Some(call).filter(|call| !self.inner.goes_through_memory(call)).map(elements);
        self.planned(
            call,
            memory.map_or_else(Lent::default, |memory| Lent::default().scratch(0, memory)),
            None,
        )
    }
}

fn check_same<T>(send: &[T], recv: &[T]) -> Result<(), CommError> {
    super::check_len("recv", recv.len(), send.len())
}
