//! Collectives of blocks: a buffer that holds one block of equal length for each rank, in rank order.

use std::ops::Range;

use super::{
    BorrowedBuffer, CallKind, CommError, Element, Group, Prepared, Reduction, Scratch, SendRecv, SliceMut,
    Transfer, UntypedReduction, call, untyped,
};
use crate::error::require;

impl Group {
    /// Fills `recv` with the `send` of all ranks, in rank order, on every rank.
    ///
    /// All ranks pass the same length and type; `recv` is `size` times as long as `send`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if `recv` is not `size` times as long as
    /// `send`. [`CommError::Mismatch`] if ranks pass different lengths or types. Otherwise the error that
    /// ended the group; `recv` is then unspecified.
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes: small blocks in one round of
    /// messages, large blocks around a ring. If every host has L ranks, S·(P−L) bytes leave each host.
    pub fn all_gather<T: Transfer>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_gather((send.into(), recv.into()))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_all_gather<'a>(&self, (send, recv): SendRecv<'a>) -> Prepared<'a> {
        self.check_blocks("recv", recv.len(), send.len())?;
        let own = self.own_range(send.len());
        let call = call(send.value_type(), CallKind::AllGather, None, 0, send.len());
        self.planned(call, recv_around_own((send, recv), own.clone()).with_ref(own.start, send), None)
    }

    /// In-place form of [`Self::all_gather`]: this rank's block is already at its position in `buf`.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`]; [`CommError::InvalidArgument`] also if `buf` is not `size` equal
    /// blocks.
    pub fn all_gather_in_place<T: Transfer>(&self, buf: &mut [T]) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_gather_in_place(buf.into())).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_all_gather_in_place<'a>(&self, buf: SliceMut<'a>) -> Prepared<'a> {
        let count = self.block_len("buf", buf.len())?;
        let call = call(buf.value_type(), CallKind::AllGather, None, 0, count);
        self.planned(call, BorrowedBuffer::default().with_mut(0, buf), None)
    }

    /// Reduces block r of every rank's `send` elementwise by `op` into `recv` of rank r.
    ///
    /// All ranks pass the same length, type and `op`; `send` is `size` times as long as `recv`. Operands are
    /// combined in the same order in every run.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`]; [`CommError::InvalidArgument`] also if `op` is not defined for
    /// the type.
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes: small blocks in one round of
    /// messages, large blocks around a ring, for which `send` is copied. If every host has L ranks, S·(P−L)
    /// bytes leave each host.
    pub fn reduce_scatter<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_reduce_scatter((send.into(), recv.into()), &untyped::<T>(op))).map(drop)
    }

    #[inline(always)]
    pub(crate) fn prepare_reduce_scatter<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        self.check_blocks("send", send.len(), recv.len())?;
        let kernel = op.kernel(recv.value_type().dtype, self.size())?;
        let call = call(recv.value_type(), CallKind::ReduceScatter, Some(op.op()), 0, recv.len());
        let in_memory = self.inner.runs_in_shared_memory(&call);
        let needs_copy = !in_memory && self.inner.needs_scratch_copy(&call);
        let own = self.own_range(recv.len());
        self.planned(call, reduce_scatter_buffers(needs_copy, (send, recv), own), Some(kernel))
    }

    /// In-place form of [`Self::reduce_scatter`]: the result replaces this rank's block of `buf`; the other
    /// blocks are unspecified afterwards.
    ///
    /// # Errors
    /// The errors of [`Self::reduce_scatter`]; [`CommError::InvalidArgument`] also if `buf` is not `size`
    /// equal blocks.
    pub fn reduce_scatter_in_place<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_reduce_scatter_in_place(buf.into(), &untyped::<T>(op))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_reduce_scatter_in_place<'a>(
        &self,
        buf: SliceMut<'a>,
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        let count = self.block_len("buf", buf.len())?;
        let kernel = op.kernel(buf.value_type().dtype, self.size())?;
        let call = call(buf.value_type(), CallKind::ReduceScatter, Some(op.op()), 0, count);
        self.planned(call, BorrowedBuffer::default().with_mut(0, buf), Some(kernel))
    }

    /// Fills `recv` of rank `root` with the `send` of all ranks, in rank order.
    ///
    /// All ranks pass the same length, type and `root`. On the root, `recv` is `size` times as long as
    /// `send`; on other ranks it is ignored and may be empty. A rank other than the root may return before
    /// the root has all blocks.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`]; [`CommError::InvalidArgument`] also if there is no rank `root`.
    ///
    /// # Cost
    /// Each rank sends its block to the root, which receives all blocks concurrently.
    pub fn gather<T: Transfer>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<(), CommError> {
        self.carry_out(self.prepare_gather((send.into(), recv.into()), root)).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_gather<'a>(&self, (send, recv): SendRecv<'a>, root: usize) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let call = call(send.value_type(), CallKind::Gather, None, root as u32, send.len());
        if self.rank() == root {
            self.check_blocks("recv", recv.len(), send.len())?;
            return self.planned(call, recv_around_own((send, recv), self.own_range(send.len())), None);
        }
        self.planned(call, BorrowedBuffer::default().with_ref(self.own_range(send.len()).start, send), None)
    }

    /// Fills `recv` of every rank with the block for that rank in the `send` of rank `root`.
    ///
    /// All ranks pass the same length, type and `root`. On the root, `send` is `size` times as long as
    /// `recv`; on other ranks it is ignored and may be empty. The root may return before the other ranks have
    /// their blocks.
    ///
    /// # Errors
    /// The errors of [`Self::gather`].
    ///
    /// # Cost
    /// The root sends each rank its block, concurrently.
    pub fn scatter<T: Transfer>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<(), CommError> {
        self.carry_out(self.prepare_scatter((send.into(), recv.into()), root)).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_scatter<'a>(&self, (send, recv): SendRecv<'a>, root: usize) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let call = call(recv.value_type(), CallKind::Scatter, None, root as u32, recv.len());
        if self.rank() == root {
            self.check_blocks("send", send.len(), recv.len())?;
            let own = send.part(self.own_range(recv.len()));
            let buffer = BorrowedBuffer::default().with_ref(0, send).with_copy(own, recv);
            return self.planned(call, buffer, None);
        }
        self.planned(call, BorrowedBuffer::default().with_mut(self.own_range(recv.len()).start, recv), None)
    }

    /// Sends block i of `send` to rank i, and fills block i of `recv` with the block that rank i sends to
    /// this rank.
    ///
    /// All ranks pass the same length and type; both buffers have one block for each rank.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`].
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes, to all others concurrently.
    pub fn all_to_all<T: Transfer>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_to_all((send.into(), recv.into()))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_all_to_all<'a>(&self, (send, recv): SendRecv<'a>) -> Prepared<'a> {
        let count = self.block_len("send", send.len())?;
        self.check_blocks("recv", recv.len(), count)?;
        let own = self.own_range(count);
        let (len, from) = (send.len(), send.part(own.clone()));
        let buffer = BorrowedBuffer::default().with_ref(0, send).with_mut_around(len, recv, own, from);
        self.planned(call(send.value_type(), CallKind::AllToAll, None, 0, count), buffer, None)
    }

    /// In-place form of [`Self::all_to_all`]: sends the blocks of `buf`, and replaces them by the received
    /// blocks.
    ///
    /// # Errors
    /// The errors of [`Self::all_to_all`].
    ///
    /// # Cost
    /// The cost of [`Self::all_to_all`], and a copy of `buf`.
    pub fn all_to_all_in_place<T: Transfer>(&self, buf: &mut [T]) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_to_all_in_place(buf.into())).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_all_to_all_in_place<'a>(&self, buf: SliceMut<'a>) -> Prepared<'a> {
        let count = self.block_len("buf", buf.len())?;
        let call = call(buf.value_type(), CallKind::AllToAll, None, 0, count);
        let buffer = BorrowedBuffer::default().with_scratch(0, Scratch::of(buf.as_slice()));
        self.planned(call, buffer.with_mut(buf.len(), buf), None)
    }

    /// Returns the length of one block if a buffer of `len` elements is `size` equal blocks, else an error
    /// with `name`.
    #[inline]
    fn block_len(&self, name: &str, len: usize) -> Result<usize, CommError> {
        let size = self.size();
        let unequal = || format!("{name} has {len} elements, which are not {size} equal blocks");
        require(len.is_multiple_of(size), unequal)?;
        Ok(len / size)
    }

    #[inline]
    pub(super) fn check_blocks(&self, name: &str, len: usize, block: usize) -> Result<(), CommError> {
        let size = self.size();
        let wrong = || format!("{name} has {len} elements, not {size} blocks of {block}");
        require(Some(len) == block.checked_mul(size), wrong)
    }

    /// Returns the range of this rank's block in a buffer whose blocks have `len` elements.
    #[inline]
    pub(super) fn own_range(&self, len: usize) -> Range<usize> {
        self.rank() * len..(self.rank() + 1) * len
    }
}

/// Describes the buffers of a gathering collective: `send` is copied to the range `own` of `recv`, and data
/// of other ranks fill the rest.
#[inline]
pub(super) fn recv_around_own<'a>((send, recv): SendRecv<'a>, own: Range<usize>) -> BorrowedBuffer<'a> {
    BorrowedBuffer::default().with_mut_around(0, recv, own, send)
}

/// Describes the buffers of a reduce-scatter. `recv` starts as this rank's input to its own block. The blocks
/// of other ranks are a copy of `send` if `copied`; otherwise they are `send` itself, which is only read.
#[inline]
pub(super) fn reduce_scatter_buffers<'a>(
    copied: bool,
    (send, mut recv): SendRecv<'a>,
    own: Range<usize>,
) -> BorrowedBuffer<'a> {
    recv.copy_from(send.part(own.clone()));
    let buffer = BorrowedBuffer::default();
    if copied {
        return buffer.with_mut(own.start, recv).with_scratch_around(own, Scratch::of(send));
    }
    let (before, behind) = (send.part(0..own.start), send.part(own.end..send.len()));
    buffer.with_ref(0, before).with_mut(own.start, recv).with_ref(own.end, behind)
}
