//! Collectives of blocks: a buffer that holds one block of equal length for each rank, in rank order.

use std::ops::Range;
use std::sync::Arc;

use super::{Call, CallKind, CommError, Element, Group, Kernel, ReduceOp, call, kernel};
use crate::engine::Work;
use crate::plan::{Algorithm, Plan};

impl Group {
    /// Fills `recv` with the `send` of all ranks, in rank order, on every rank.
    ///
    /// All ranks pass the same length and type; `recv` is `size` times as long as `send`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if the lengths do not fit.
    /// [`CommError::Mismatch`] if ranks disagree. Else whatever ended the group; `recv` is then
    /// unspecified.
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes: few in one round, many around a
    /// ring.
    pub fn all_gather<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        self.check_blocks("recv", recv.len(), send.len())?;
        self.own(recv, send.len()).copy_from_slice(send);
        self.all_gather_in_place(recv)
    }

    /// As [`Self::all_gather`], with this rank's block already in its place in `buf`.
    ///
    /// # Errors
    /// As [`Self::all_gather`]; also if `buf` cannot be cut in `size` blocks.
    pub fn all_gather_in_place<T: Element>(&self, buf: &mut [T]) -> Result<(), CommError> {
        let count = self.block_len("buf", buf.len())?;
        self.collective(call::<T>(CallKind::AllGather, None, 0, count), buf, None)
    }

    /// Fills `recv` with the elementwise `op` over this rank's block of all ranks' `send`.
    ///
    /// All ranks pass the same length, type and `op`; `send` is `size` times as long as `recv`. The order of
    /// adding is fixed, from run to run.
    ///
    /// # Errors
    /// As [`Self::all_gather`]; [`CommError::InvalidArgument`] also if `op` has no meaning for the type.
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes: few in one round, many around a
    /// ring, for which `send` is copied.
    pub fn reduce_scatter<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        self.check_blocks("send", send.len(), recv.len())?;
        let kernel = kernel::<T>(op)?;
        let call = call::<T>(CallKind::ReduceScatter, Some(op), 0, recv.len());
        let algorithm = self.inner.tuning.reduce_scatter(size_of_val(recv), self.size());
        let own = self.rank() * recv.len()..(self.rank() + 1) * recv.len();
        self.reduce_scatter_by(algorithm, call, || self.inner.plan(call), send, (recv, own), kernel)
    }

    /// Fills `recv` of rank `root` with the `send` of all ranks, in rank order.
    ///
    /// All ranks pass the same length, type and `root`. On the root `recv` is `size` times as long as `send`,
    /// on the others it is not looked at and may be empty. A rank other than the root may return before the
    /// root has everything.
    ///
    /// # Errors
    /// As [`Self::all_gather`]; [`CommError::InvalidArgument`] also if there is no such rank.
    ///
    /// # Cost
    /// Each rank sends its block to the root, which receives them side by side.
    pub fn gather<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let call = call::<T>(CallKind::Gather, None, root as u32, send.len());
        if self.rank() == root {
            self.check_blocks("recv", recv.len(), send.len())?;
            self.own(recv, send.len()).copy_from_slice(send);
            return self.collective(call, recv, None);
        }
        self.exchange(call, || self.inner.plan(call), (send, self.rank() * send.len()), (&mut [], 0), None)
    }

    /// Fills `recv` with this rank's block of the `send` of rank `root`.
    ///
    /// All ranks pass the same length, type and `root`. On the root `send` is `size` times as long as `recv`,
    /// on the others it is not looked at and may be empty. The root may return before the others have
    /// everything.
    ///
    /// # Errors
    /// As [`Self::gather`].
    ///
    /// # Cost
    /// The root sends each rank its block, side by side.
    pub fn scatter<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let call = call::<T>(CallKind::Scatter, None, root as u32, recv.len());
        if self.rank() == root {
            self.check_blocks("send", send.len(), recv.len())?;
            recv.copy_from_slice(self.own_of(send, recv.len()));
            return self.exchange(call, || self.inner.plan(call), (send, 0), (&mut [], 0), None);
        }
        let at = self.rank() * recv.len();
        self.exchange(call, || self.inner.plan(call), (&[], 0), (recv, at), None)
    }

    /// Sends block i of `send` to rank i, and fills block i of `recv` with what rank i sends here.
    ///
    /// All ranks pass the same length and type; both buffers have one block for each rank.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    ///
    /// # Cost
    /// With P ranks and blocks of S bytes each rank sends S·(P−1) bytes, to all others side by side.
    pub fn all_to_all<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        let count = self.block_len("send", send.len())?;
        self.check_blocks("recv", recv.len(), count)?;
        self.own(recv, count).copy_from_slice(self.own_of(send, count));
        let behind = send.len();
        let call = call::<T>(CallKind::AllToAll, None, 0, count);
        self.exchange(call, || self.inner.plan(call), (send, 0), (recv, behind), None)
    }

    /// A reduce-scatter by a plan that `algorithm` made; `own` is where `recv`'s share lies in `send`.
    pub(super) fn reduce_scatter_by<T: Element>(
        &self,
        algorithm: Algorithm,
        call: Call,
        plan: impl FnOnce() -> Arc<Plan>,
        send: &[T],
        (recv, own): (&mut [T], Range<usize>),
        kernel: Kernel,
    ) -> Result<(), CommError> {
        if algorithm == Algorithm::Ring {
            let mut sums = send.to_vec();
            self.exchange(call, plan, (&[], 0), (&mut sums, 0), Some(kernel))?;
            recv.copy_from_slice(&sums[own]);
            return Ok(());
        }
        recv.copy_from_slice(&send[own]);
        self.exchange(call, plan, (send, 0), (recv, send.len()), Some(kernel))
    }

    /// A collective that reads one buffer and fills another, each at its place in the row of `plan`, which is
    /// asked for only where there is something to do.
    pub(super) fn exchange<T: Element>(
        &self,
        call: Call,
        plan: impl FnOnce() -> Arc<Plan>,
        send: (&[T], usize),
        recv: (&mut [T], usize),
        kernel: Option<Kernel>,
    ) -> Result<(), CommError> {
        self.inner.check_process()?;
        let Some(shared) = &self.inner.shared else { return Ok(()) };
        let plan = plan();
        shared.call_both(send, recv, self.timeout, |lent| Work::Collective { call, plan, lent, kernel })
    }

    /// Length of each of the `size` blocks of a buffer.
    fn block_len(&self, name: &str, len: usize) -> Result<usize, CommError> {
        if len.is_multiple_of(self.size()) {
            return Ok(len / self.size());
        }
        let size = self.size();
        Err(CommError::InvalidArgument(format!(
            "{name} has {len} elements, which are not {size} equal blocks"
        )))
    }

    fn check_blocks(&self, name: &str, len: usize, block: usize) -> Result<(), CommError> {
        if Some(len) == block.checked_mul(self.size()) {
            return Ok(());
        }
        let size = self.size();
        Err(CommError::InvalidArgument(format!("{name} has {len} elements, not {size} blocks of {block}")))
    }

    /// This rank's block of a buffer that has been checked.
    fn own<'a, T>(&self, buf: &'a mut [T], len: usize) -> &'a mut [T] {
        &mut buf[self.rank() * len..(self.rank() + 1) * len]
    }

    fn own_of<'a, T>(&self, buf: &'a [T], len: usize) -> &'a [T] {
        &buf[self.rank() * len..(self.rank() + 1) * len]
    }
}
