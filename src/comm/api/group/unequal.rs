//! Collectives with one block for each rank, where block lengths may differ.

use std::sync::Arc;

use super::{
    CallKind, CommError, Element, Group, Prepared, Reduction, SendRecv, SendRecvBuffers, Transfer,
    UntypedReduction, ValueType, call, check_len, untyped,
};
use crate::collectives::plan::{self, Algorithm, Blocks, Input, Rounding};

impl Group {
    /// Fills `recv` with the `send` of all ranks, in rank order, on every rank; rank i has `lens[i]`
    /// elements.
    ///
    /// All ranks pass the same type and `lens`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if the buffers do not fit `lens`.
    /// [`CommError::Mismatch`] if ranks pass different types or `lens`. Otherwise the error that ended the
    /// group; `recv` is then unspecified.
    ///
    /// # Cost
    /// Each rank sends fewer bytes than `recv` holds: small blocks in one round of messages, large ones
    /// around a ring.
    pub fn all_gather_v<T: Transfer>(
        &self,
        send: &[T],
        recv: &mut [T],
        lens: &[usize],
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_gather_v((send.into(), recv.into()), lens)).map(drop)
    }

    pub(crate) fn prepare_all_gather_v<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        lens: &[usize],
    ) -> Prepared<'a> {
        let blocks = self.blocks(lens)?;
        let own = blocks.range(self.rank());
        check_len("send", send.len(), own.len())?;
        check_len("recv", recv.len(), blocks.end())?;
        let value = send.value_type();
        let call = call(value, CallKind::AllGatherV, None, blocks.fingerprint(), blocks.end());
        let topology = &self.inner.topology;
        let algorithm = self.inner.config.tuning.for_all_gather(recv.size_bytes() / self.size(), topology);
        let (rank, rounding) = (self.rank(), Rounding::Stepwise);
        let input = Input { rank, topology, rounding, element_bytes: value.dtype.size_bytes() };
        let plan = || Arc::new(plan::all_gather(algorithm, &input, &units(value, blocks)));
        let buffers = SendRecvBuffers::new((own.start, send), (0, recv), (0..own.len(), own));
        self.collective(call, plan, buffers, None)
    }

    /// Reduces block r of every rank's `send` elementwise by `op` into `recv` of rank r; block i has
    /// `lens[i]` elements.
    ///
    /// All ranks pass the same type, `op` and `lens`.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather_v`]; [`CommError::InvalidArgument`] also if `op` is not defined for
    /// the type.
    ///
    /// # Cost
    /// Each rank sends fewer bytes than `send` holds: small blocks in one round of messages, large ones
    /// around a ring, for which `send` is copied.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        lens: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_reduce_scatter_v((send.into(), recv.into()), lens, &untyped::<T>(op)))
            .map(drop)
    }

    pub(crate) fn prepare_reduce_scatter_v<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        lens: &[usize],
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        let blocks = self.blocks(lens)?;
        let own = blocks.range(self.rank());
        check_len("send", send.len(), blocks.end())?;
        check_len("recv", recv.len(), own.len())?;
        let value = send.value_type();
        let kernel = op.kernel(value.dtype, self.size())?;
        let call = call(value, CallKind::ReduceScatterV, Some(op.op()), blocks.fingerprint(), blocks.end());
        let (rank, rounding, topology) = (self.rank(), Rounding::of(&call), &self.inner.topology);
        let algorithm =
            self.inner.config.tuning.for_reduce_scatter(send.size_bytes() / self.size(), topology, rounding);
        let input = Input { rank, topology, rounding, element_bytes: value.size_bytes() };
        let plan = || Arc::new(plan::reduce_scatter(algorithm, &input, &blocks));
        let into = 0..own.len();
        let buffers = SendRecvBuffers::new((0, send), (own.start, recv), (own, into));
        if algorithm != Algorithm::Direct {
            return self.collective(call, plan, buffers.with_scratch_blocks(), Some(kernel));
        }
        self.collective(call, plan, buffers, Some(kernel))
    }

    /// Fills `recv` of rank `root` with the `send` of all ranks, in rank order. On the root, `lens[i]` is the
    /// number of elements of rank i.
    ///
    /// All ranks pass the same type and `root`. On ranks other than the root, `recv` and `lens` are ignored
    /// and may be empty.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather_v`]; [`CommError::InvalidArgument`] also if there is no rank `root`.
    /// [`CommError::Protocol`] names a rank that sends another length than the root expects.
    ///
    /// # Cost
    /// Each rank sends its block to the root, which receives all blocks concurrently.
    pub fn gather_v<T: Transfer>(
        &self,
        send: &[T],
        recv: &mut [T],
        lens: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_gather_v((send.into(), recv.into()), lens, root)).map(drop)
    }

    pub(crate) fn prepare_gather_v<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        lens: &[usize],
        root: usize,
    ) -> Prepared<'a> {
        let value = send.value_type();
        self.check_rank(root, "root")?;
        let (blocks, buffers) = if self.rank() == root {
            let blocks = self.blocks(lens)?;
            let own = blocks.range(root);
            check_len("send", send.len(), own.len())?;
            check_len("recv", recv.len(), blocks.end())?;
            (blocks, SendRecvBuffers::new((own.start, send), (0, recv), (0..own.len(), own)))
        } else {
            (self.own_block_only(send.len()), SendRecvBuffers::send_only(0, send))
        };
        let plan = || Arc::new(plan::gather(self.rank(), &units(value, blocks), root));
        self.collective(call(value, CallKind::GatherV, None, root as u32, 0), plan, buffers, None)
    }

    /// Fills `recv` of every rank with the block for that rank in the `send` of rank `root`. On the root,
    /// `lens[i]` is the number of elements for rank i.
    ///
    /// All ranks pass the same type and `root`. On ranks other than the root, `send` and `lens` are ignored
    /// and may be empty.
    ///
    /// # Errors
    /// The errors of [`Self::gather_v`].
    ///
    /// # Cost
    /// The root sends each rank its block, concurrently.
    pub fn scatter_v<T: Transfer>(
        &self,
        send: &[T],
        recv: &mut [T],
        lens: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_scatter_v((send.into(), recv.into()), lens, root)).map(drop)
    }

    pub(crate) fn prepare_scatter_v<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        lens: &[usize],
        root: usize,
    ) -> Prepared<'a> {
        let value = recv.value_type();
        self.check_rank(root, "root")?;
        let (blocks, buffers) = if self.rank() == root {
            let blocks = self.blocks(lens)?;
            let (own, into) = (blocks.range(root), 0..recv.len());
            check_len("send", send.len(), blocks.end())?;
            check_len("recv", recv.len(), own.len())?;
            (blocks, SendRecvBuffers::new((0, send), (own.start, recv), (own, into)))
        } else {
            (self.own_block_only(recv.len()), SendRecvBuffers::recv_only(0, recv))
        };
        let plan = || Arc::new(plan::scatter(self.rank(), &units(value, blocks), root));
        self.collective(call(value, CallKind::ScatterV, None, root as u32, 0), plan, buffers, None)
    }

    /// Sends block i of `send`, with `send_lens[i]` elements, to rank i. Fills block i of `recv`, with
    /// `recv_lens[i]` elements, with the block that rank i sends to this rank.
    ///
    /// All ranks pass the same type. Each block must have the length that its receiver expects.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather_v`]. [`CommError::Protocol`] names a rank that sends another length
    /// than this rank expects.
    ///
    /// # Cost
    /// Each rank sends to all others concurrently.
    pub fn all_to_all_v<T: Transfer>(
        &self,
        send: (&[T], &[usize]),
        recv: (&mut [T], &[usize]),
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_all_to_all_v((send.0.into(), recv.0.into()), send.1, recv.1)).map(drop)
    }

    pub(crate) fn prepare_all_to_all_v<'a>(
        &self,
        (send, recv): SendRecv<'a>,
        send_lens: &[usize],
        recv_lens: &[usize],
    ) -> Prepared<'a> {
        let (sent, filled) = (self.blocks(send_lens)?, self.blocks(recv_lens)?);
        let rank = self.rank();
        check_len("send", send.len(), sent.end())?;
        check_len("recv", recv.len(), filled.end())?;
        check_len("this rank's own block of recv", filled.range(rank).len(), sent.range(rank).len())?;
        let (value, own) = (send.value_type(), (sent.range(rank), filled.range(rank)));
        let buffers = SendRecvBuffers::new((0, send), (sent.end(), recv), own);
        let plan = || Arc::new(plan::all_to_all(rank, &units(value, sent), &units(value, filled)));
        self.collective(call(value, CallKind::AllToAllV, None, 0, 0), plan, buffers, None)
    }

    pub(crate) fn blocks(&self, lens: &[usize]) -> Result<Blocks, CommError> {
        check_len("the list of lengths", lens.len(), self.size())?;
        Blocks::new(lens)
            .ok_or_else(|| CommError::InvalidArgument("the sum of the lengths is too large".to_owned()))
    }

    /// Returns blocks that are empty, except that of this rank, which has `len` elements.
    fn own_block_only(&self, len: usize) -> Blocks {
        let mut lens = vec![0; self.size()];
        lens[self.rank()] = len;
        Blocks::new(&lens).expect("the sum of one length is that length")
    }
}

/// Returns the blocks of values as blocks of the elements that are sent; plain data are sent as bytes.
fn units(value: ValueType, blocks: Blocks) -> Blocks {
    if value.units() == 1 { blocks } else { blocks.scaled(value.units()) }
}
