//! Collectives of blocks: a buffer that holds one block of equal length for each rank, in rank order.

use std::ops::Range;

use super::{
    CallKind, Checked, Collective, CommError, Element, Group, Reduction, SendRecv, SendRecvBuffers, SliceMut,
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
        self.run_collective(self.prepare_all_gather((send.into(), recv.into())))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_gather<'a>(&self, (send, recv): SendRecv<'a>) -> Checked<'a> {
        self.check_blocks("recv", recv.len(), send.len())?;
        let (count, own) = (send.len(), self.own_range(send.len()));
        let call = call(send.value_type(), CallKind::AllGather, None, 0, count);
        Ok(Collective {
            call,
            buffers: SendRecvBuffers::new((own.start, send), (0, recv), (0..count, own)),
            kernel: None,
        })
    }

    /// In-place form of [`Self::all_gather`]: this rank's block is already at its position in `buf`.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather`]; [`CommError::InvalidArgument`] also if `buf` is not `size` equal
    /// blocks.
    pub fn all_gather_in_place<T: Transfer>(&self, buf: &mut [T]) -> Result<(), CommError> {
        self.run_collective(self.prepare_all_gather_in_place(buf.into()))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_gather_in_place<'a>(&self, buf: SliceMut<'a>) -> Checked<'a> {
        let count = self.block_len("buf", buf.len())?;
        let call = call(buf.value_type(), CallKind::AllGather, None, 0, count);
        Ok(Collective { call, buffers: SendRecvBuffers::in_place(buf), kernel: None })
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
        self.run_collective(self.prepare_reduce_scatter((send.into(), recv.into()), &untyped::<T>(op)))
    }

    #[inline(always)]
    pub(crate) fn prepare_reduce_scatter<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        op: &UntypedReduction,
    ) -> Checked<'a> {
        self.check_blocks("send", send.len(), recv.len())?;
        let kernel = op.kernel(recv.value_type().dtype, self.size())?;
        let call = call(recv.value_type(), CallKind::ReduceScatter, Some(op.op()), 0, recv.len());
        let (count, own) = (recv.len(), self.own_range(recv.len()));
        let buffers = SendRecvBuffers::new((0, send), (own.start, recv), (own, 0..count));
        Ok(Collective { call, buffers, kernel: Some(kernel) })
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
        self.run_collective(self.prepare_reduce_scatter_in_place(buf.into(), &untyped::<T>(op)))
    }

    #[inline(always)]
    pub(crate) fn prepare_reduce_scatter_in_place<'a>(
        &self,
        buf: SliceMut<'a>,
        op: &UntypedReduction,
    ) -> Checked<'a> {
        let count = self.block_len("buf", buf.len())?;
        let kernel = op.kernel(buf.value_type().dtype, self.size())?;
        let call = call(buf.value_type(), CallKind::ReduceScatter, Some(op.op()), 0, count);
        Ok(Collective { call, buffers: SendRecvBuffers::in_place(buf), kernel: Some(kernel) })
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
        self.run_collective(self.prepare_gather((send.into(), recv.into()), root))
    }

    #[inline(always)]
    pub(crate) fn prepare_gather<'a>(&self, (send, recv): SendRecv<'a>, root: usize) -> Checked<'a> {
        self.check_rank(root, "root")?;
        let (count, own) = (send.len(), self.own_range(send.len()));
        let call = call(send.value_type(), CallKind::Gather, None, root as u32, count);
        if self.rank() == root {
            self.check_blocks("recv", recv.len(), count)?;
            let buffers = SendRecvBuffers::new((own.start, send), (0, recv), (0..count, own));
            return Ok(Collective { call, buffers, kernel: None });
        }
        Ok(Collective { call, buffers: SendRecvBuffers::send_only(own.start, send), kernel: None })
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
        self.run_collective(self.prepare_scatter((send.into(), recv.into()), root))
    }

    #[inline(always)]
    pub(crate) fn prepare_scatter<'a>(&self, (send, recv): SendRecv<'a>, root: usize) -> Checked<'a> {
        self.check_rank(root, "root")?;
        let (count, own) = (recv.len(), self.own_range(recv.len()));
        let call = call(recv.value_type(), CallKind::Scatter, None, root as u32, count);
        if self.rank() == root {
            self.check_blocks("send", send.len(), count)?;
            let buffers = SendRecvBuffers::new((0, send), (own.start, recv), (own, 0..count));
            return Ok(Collective { call, buffers, kernel: None });
        }
        Ok(Collective { call, buffers: SendRecvBuffers::recv_only(own.start, recv), kernel: None })
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
        self.run_collective(self.prepare_all_to_all((send.into(), recv.into())))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_to_all<'a>(&self, (send, recv): SendRecv<'a>) -> Checked<'a> {
        let count = self.block_len("send", send.len())?;
        self.check_blocks("recv", recv.len(), count)?;
        let (len, own) = (send.len(), self.own_range(count));
        let call = call(send.value_type(), CallKind::AllToAll, None, 0, count);
        Ok(Collective {
            call,
            buffers: SendRecvBuffers::new((0, send), (len, recv), (own.clone(), own)),
            kernel: None,
        })
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
        self.run_collective(self.prepare_all_to_all_in_place(buf.into()))
    }

    #[inline(always)]
    pub(crate) fn prepare_all_to_all_in_place<'a>(&self, buf: SliceMut<'a>) -> Checked<'a> {
        let count = self.block_len("buf", buf.len())?;
        let call = call(buf.value_type(), CallKind::AllToAll, None, 0, count);
        Ok(Collective { call, buffers: SendRecvBuffers::exchanged(buf), kernel: None })
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
