//! Scans: reductions over all ranks up to each.

use super::{CallKind, CommError, Element, Group, ReduceOp, call, kernel};

impl Group {
    /// Replaces `buf` on rank r by the elementwise `op` over the `buf` of ranks 0 to r.
    ///
    /// All ranks pass the same length, type and `op`. The order of adding is that of the ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; [`CommError::InvalidArgument`] also for [`ReduceOp::Avg`], which has no meaning here.
    ///
    /// # Cost
    /// A chain through all ranks, in which every rank sends S bytes at most.
    pub fn scan<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        let kernel = kernel::<T>(op)?;
        if op == ReduceOp::Avg {
            return Err(CommError::InvalidArgument(
                "avg of a part of the ranks has no meaning in a scan".to_owned(),
            ));
        }
        self.collective(call::<T>(CallKind::Scan, Some(op), 0, buf.len()), buf, Some(kernel))
    }

    /// Replaces `buf` on rank r by the elementwise `op` over the `buf` of ranks 0 to r − 1. On rank 0 it stays as
    /// it is.
    ///
    /// All ranks pass the same length, type and `op`. The order of adding is that of the ranks.
    ///
    /// # Errors
    /// As [`Self::scan`].
    ///
    /// # Cost
    /// A scan, and another S bytes from each rank to the next; `buf` is copied.
    pub fn exclusive_scan<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        let mut inclusive = buf.to_vec();
        self.scan(&mut inclusive, op)?;
        let count = buf.len();
        let call = call::<T>(CallKind::Shift, Some(op), 0, count);
        self.exchange(call, || self.inner.plan(call), (&inclusive, 0), (buf, count), None)
    }
}
