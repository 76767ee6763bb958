//! Collectives of whole buffers.

use std::time::Duration;

use super::{
    CallKind, Checked, Collective, CommError, Element, Group, Reduction, SendRecv, SendRecvBuffers, SliceMut,
    Transfer, UntypedReduction, ValueType, call, check_len, untyped,
};
use crate::collectives::dtype::Dtype;
use crate::collectives::plan;

/// The type in which a barrier describes its call.
const BYTES: ValueType = ValueType::element(Dtype::U8);

impl Group {
    /// Replaces `buf` on every rank by the elementwise `op` over all ranks' `buf`.
    ///
    /// All ranks pass the same length, type and `op`, a [`ReduceOp`](crate::ReduceOp) or a [`Reduction`].
    /// The order of additions is fixed: results are bitwise equal on all ranks and on a rerun. Sums of
    /// `f16` and `bf16` are computed in `f32` and rounded once.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if `op` is not defined for the type
    /// ([`ReduceOp::accepts`](crate::ReduceOp::accepts)). [`CommError::Mismatch`] on all ranks if their calls
    /// differ. Otherwise the error that ended the group; `buf` is then unspecified.
    ///
    /// # Cost
    /// For P ranks and S bytes, small buffers take log2(P) exchanges of S bytes. Large ones take a ring of
    /// 2(P−1) steps in which each rank sends 2·S·(P−1)/P bytes. On H hosts of several ranks, 2·S·(H−1)/H
    /// bytes leave each host.
    ///
    /// Sums of 16-bit floats on up to 16 ranks: small buffers take one round in which each rank sends
    /// S·(P−1) bytes; large ones take two rounds and 2·S·(P−1)/P bytes. With more ranks, sums are sent as
    /// `f32`.
    pub fn all_reduce<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.run_collective(self.prepare_all_reduce(buf.into(), &untyped::<T>(op)))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_reduce<'a>(&self, buf: SliceMut<'a>, op: &UntypedReduction) -> Checked<'a> {
        let kernel = op.kernel(buf.value_type().dtype, self.size())?;
        let call = call(buf.value_type(), CallKind::AllReduce, Some(op.op()), 0, buf.len());
        Ok(Collective { call, buffers: SendRecvBuffers::in_place(buf), kernel: Some(kernel) })
    }

    /// Out-of-place form of [`Self::all_reduce`]: reads `send`, which is not changed, and fills `recv`.
    ///
    /// # Errors
    /// The errors of [`Self::all_reduce`]; [`CommError::InvalidArgument`] also if the lengths differ.
    ///
    /// # Cost
    /// The cost of [`Self::all_reduce`], and a copy.
    pub fn all_reduce_into<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.run_collective(self.prepare_all_reduce_into((send.into(), recv.into()), &untyped::<T>(op)))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_reduce_into<'a>(
        &self,
        (send, mut recv): SendRecv<'a>,
        op: &UntypedReduction,
    ) -> Checked<'a> {
        op.kernel(send.value_type().dtype, self.size())?;
        check_len("recv", recv.len(), send.len())?;
        recv.copy_from(send);
        self.prepare_all_reduce(recv, op)
    }

    /// Replaces `buf` on every rank by the `buf` of rank `root`.
    ///
    /// All ranks pass the same length, type and `root`. The root may return before the other ranks have all
    /// data.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `root`. [`CommError::Mismatch`] if the ranks' calls
    /// differ; a root that has already returned gets this error from its next call. Otherwise the error
    /// that ended the group.
    ///
    /// # Cost
    /// With P ranks and S bytes, small buffers take a tree of log2(P) steps. Large ones take a chain in which
    /// every rank sends S bytes at most. S bytes go to each other host.
    pub fn broadcast<T: Transfer>(&self, buf: &mut [T], root: usize) -> Result<(), CommError> {
        self.run_collective(self.prepare_broadcast(buf.into(), root))
    }

    #[inline(always)]
    pub(crate) fn prepare_broadcast<'a>(&self, buf: SliceMut<'a>, root: usize) -> Checked<'a> {
        self.check_rank(root, "root")?;
        let call = call(buf.value_type(), CallKind::Broadcast, None, root as u32, buf.len());
        Ok(Collective { call, buffers: SendRecvBuffers::in_place(buf), kernel: None })
    }

    /// Replaces `buf` on rank `root` by the elementwise `op` over all ranks' `buf`. On the other ranks `buf`
    /// is unspecified afterwards.
    ///
    /// All ranks pass the same length, type, `op` and `root`. A rank other than the root may return before
    /// the root has all data.
    ///
    /// # Errors
    /// The errors of [`Self::all_reduce`]; [`CommError::InvalidArgument`] also if there is no rank `root`.
    ///
    /// # Cost
    /// With P ranks and S bytes, small buffers take a tree of log2(P) steps. Large ones take a chain in which
    /// every rank sends S bytes at most. S bytes come from each other host.
    ///
    /// Sums of 16-bit floats on up to 16 ranks take one or two rounds of messages, in which every rank sends
    /// S bytes.
    pub fn reduce<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<(), CommError> {
        self.run_collective(self.prepare_reduce(buf.into(), &untyped::<T>(op), root))
    }

    #[inline(always)]
    pub(crate) fn prepare_reduce<'a>(
        &self,
        buf: SliceMut<'a>,
        op: &UntypedReduction,
        root: usize,
    ) -> Checked<'a> {
        self.check_rank(root, "root")?;
        let kernel = op.kernel(buf.value_type().dtype, self.size())?;
        let call = call(buf.value_type(), CallKind::Reduce, Some(op.op()), root as u32, buf.len());
        Ok(Collective { call, buffers: SendRecvBuffers::in_place(buf), kernel: Some(kernel) })
    }

    /// Out-of-place form of [`Self::reduce`]: reads `send`, which is not changed, and fills `recv` of the
    /// root. On other ranks `recv` is ignored and may be empty.
    ///
    /// # Errors
    /// The errors of [`Self::reduce`]; [`CommError::InvalidArgument`] also if the lengths differ on the
    /// root.
    ///
    /// # Cost
    /// The cost of [`Self::reduce`], and a copy.
    pub fn reduce_into<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<(), CommError> {
        let buffers = (send.into(), recv.into());
        self.run_collective(self.prepare_reduce_into(buffers, &untyped::<T>(op), root))
    }

    #[inline(always)]
    pub(crate) fn prepare_reduce_into<'a>(
        &self,
        (send, mut recv): SendRecv<'a>,
        op: &UntypedReduction,
        root: usize,
    ) -> Checked<'a> {
        self.check_rank(root, "root")?;
        let kernel = op.kernel(send.value_type().dtype, self.size())?;
        if self.rank() == root {
            check_len("recv", recv.len(), send.len())?;
            recv.copy_from(send);
            return self.prepare_reduce(recv, op, root);
        }
        let call = call(send.value_type(), CallKind::Reduce, Some(op.op()), root as u32, send.len());
        Ok(Collective { call, buffers: SendRecvBuffers::send_only(0, send), kernel: Some(kernel) })
    }

    /// Returns when all ranks have called `barrier`.
    ///
    /// # Errors
    /// The error that ended the group.
    ///
    /// # Cost
    /// Messages of a few bytes in sequence: log2(L) inside hosts of L ranks, then log2(H) between H hosts.
    pub fn barrier(&self) -> Result<(), CommError> {
        // The bytes that ranks exchange over connections. They are here, so that the call allocates nothing.
        let mut bytes = [0_u8; plan::MOST_BARRIER_ELEMENTS];
        let buffers = SendRecvBuffers::in_place((&mut bytes[..]).into());
        self.run_collective(self.prepare_barrier().map(|barrier| Collective { buffers, ..barrier }))
    }

    /// Returns when all ranks have called it, like [`Self::barrier`]. If ranks do not call it within
    /// `timeout` of this rank's call, the error on every rank names all of these late ranks.
    ///
    /// Use it to find hung ranks; an error of `barrier` names only ranks for which some rank happened to
    /// wait. A late rank ends the group, as with every timeout: it might still send data of an earlier call,
    /// which other ranks could not tell from later data. [`Self::shrink`] makes a group of the ranks that
    /// arrived.
    ///
    /// # Errors
    /// [`CommError::Timeout`], whose `missing` lists the late ranks, up to 64. Otherwise the error that ended
    /// the group.
    ///
    /// # Cost
    /// Each rank sends every other rank a message of 64 bytes.
    ///
    /// Counterpart of `torch.distributed.monitored_barrier` with `wait_all_ranks` always on. That costs no
    /// time, since the ranks report to each other instead of to one rank.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<(), CommError> {
        let call = call(BYTES, CallKind::MonitoredBarrier, None, 0, 0);
        let prepared = self.planned(call, SendRecvBuffers::none(), None);
        self.with_timeout(timeout).carry_out(prepared).map(drop)
    }

    #[inline(always)]
    pub(crate) fn prepare_barrier(&self) -> Checked<'static> {
        let call = call(BYTES, CallKind::Barrier, None, 0, 0);
        Ok(Collective { call, buffers: SendRecvBuffers::none(), kernel: None })
    }
}
