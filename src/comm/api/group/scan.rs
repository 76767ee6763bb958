//! Scans: reductions over all ranks up to this one.

use super::{
    BorrowedBuffer, CallKind, CommError, Element, Group, Prepared, ReduceOp, Reduction, Scratch,
    SendRecvBuffers, SliceMut, UntypedReduction, call, untyped,
};
use crate::collectives::dtype::Dtype;
use crate::collectives::kernels::Kernel;
use crate::error::require;

impl Group {
    /// Replaces `buf` on rank r by the elementwise `op` over the `buf` of ranks 0 to r.
    ///
    /// All ranks pass the same length, type and `op`. Operands are combined in rank order.
    ///
    /// # Errors
    /// The errors of [`Self::all_reduce`]; [`CommError::InvalidArgument`] also for [`ReduceOp::Avg`], which
    /// scans do not define.
    ///
    /// # Cost
    /// A chain through all ranks, in which every rank sends at most the bytes of `buf`.
    pub fn scan<T: Element>(&self, buf: &mut [T], op: impl Into<Reduction<T>>) -> Result<(), CommError> {
        self.carry_out(self.prepare_scan(buf.into(), &untyped::<T>(op))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_scan<'a>(&self, buf: SliceMut<'a>, op: &UntypedReduction) -> Prepared<'a> {
        let kernel = scan_kernel(op, buf.value_type().dtype)?;
        let call = call(buf.value_type(), CallKind::Scan, Some(op.op()), 0, buf.len());
        self.planned(call, SendRecvBuffers::in_place(buf), Some(kernel))
    }

    /// Replaces `buf` on rank r by the elementwise `op` over the `buf` of ranks 0 to r − 1. On rank 0,
    /// `buf` is not changed.
    ///
    /// All ranks pass the same length, type and `op`. Operands are combined in rank order.
    ///
    /// # Errors
    /// The errors of [`Self::scan`].
    ///
    /// # Cost
    /// A chain through all ranks, in which every rank sends at most twice the bytes of `buf`; `buf` is
    /// copied.
    pub fn exclusive_scan<T: Element>(
        &self,
        buf: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.carry_out(self.prepare_exclusive_scan(buf.into(), &untyped::<T>(op))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_exclusive_scan<'a>(
        &self,
        buf: SliceMut<'a>,
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        let kernel = scan_kernel(op, buf.value_type().dtype)?;
        let call = call(buf.value_type(), CallKind::ExclusiveScan, Some(op.op()), 0, buf.len());
        let buffer = BorrowedBuffer::default().with_scratch(0, Scratch::of(buf.as_slice()));
        // The buffer of rank 0 is not changed.
        let buffer = if self.rank() > 0 { buffer.with_mut(buf.len(), buf) } else { buffer };
        self.planned(call, buffer, Some(kernel))
    }
}

fn scan_kernel(op: &UntypedReduction, dtype: Dtype) -> Result<Kernel, CommError> {
    require(op.op() != ReduceOp::Avg, || "avg of a part of the ranks has no meaning in a scan".to_owned())?;
    op.kernel(dtype, 1)
}
