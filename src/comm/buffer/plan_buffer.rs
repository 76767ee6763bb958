//! The buffer of elements that a plan works on: the caller's memory, or a copy of it with wider elements. It
//! also copies or reduces arriving elements into that buffer.

use std::ops::Range;

use super::{BorrowedBuffer, BytesMut};
use crate::collectives::kernels::{ACCUMULATOR_BYTES, F32Conversion, Kernel, SourceBytes};
use crate::collectives::plan::{Apply, Plan};
use crate::transport::links::read_ahead::MAX_READ_AHEAD_BYTES;

#[derive(Debug)]
pub(crate) struct PlanBuffer<'m> {
    buffer: BorrowedBuffer<'m>,
    kernel: Option<Kernel>,
    /// The conversion between the half-precision elements of the caller's memory and the f32 elements of the
    /// plan, if the plan uses these.
    wide: Option<&'static F32Conversion>,
    /// The copy on which the plan works instead of the caller's memory, if the plan's elements are wider or
    /// read-only memory must be changed.
    copy: Option<Vec<u8>>,
    /// Partial sums of a reduction in rank order, for `window` elements of a stream. Further elements use the
    /// array again from its start.
    sums: Vec<u8>,
    window: usize,
    started: bool,
    /// Size of the plan's elements in bytes.
    pub(crate) element_bytes: usize,
}

/// Elements that have arrived from a peer, and where and how to apply them.
#[derive(Debug)]
pub(crate) struct Fragment<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) apply: Apply,
    /// The offset of the elements in the buffer, in bytes.
    pub(crate) at: usize,
    /// Number of elements that came before these on the same stream.
    pub(crate) before: usize,
    /// The elements come from a lower rank and are the first operand. So both ranks of an exchange reduce
    /// their operands in the same order.
    pub(crate) is_first: bool,
}

impl<'m> PlanBuffer<'m> {
    /// Makes a buffer of the elements in `buffer` for `plan`; `kernel` is `Some` if the plan reduces.
    #[inline(always)]
    pub(crate) fn new(
        buffer: BorrowedBuffer<'m>,
        kernel: Option<Kernel>,
        element_bytes: usize,
        plan: &Plan,
    ) -> Self {
        let wide = kernel.as_ref().and_then(Kernel::f32_conversion).filter(|_| plan.wide);
        let element_bytes = if wide.is_some() { ACCUMULATOR_BYTES } else { element_bytes };
        let (window, sums, copy) = (plan.window, Vec::new(), None);
        Self { buffer, kernel, wide, copy, sums, window, started: false, element_bytes }
    }

    /// Converts this rank's elements to wider ones and scales them, if plan and kernel require it. This
    /// happens when the collective starts, so that queued collectives need no memory for copies.
    pub(crate) fn begin(&mut self) {
        let Some(kernel) = self.kernel.as_ref().filter(|_| !self.started) else { return };
        self.started = true;
        self.sums = vec![0; self.window * self.sum_bytes()];
        let scale = |shares: &mut [u8]| kernel.scale().map_or((), |scale| scale(shares));
        let is_written = self.buffer.ranges().all(|(_, writable)| writable);
        if self.wide.is_none() && (is_written || kernel.scale().is_none()) {
            self.buffer.ranges().for_each(|(part, _)| scale(&mut self.buffer.bytes_mut(part)));
            return;
        }
        let end = self.buffer.ranges().map(|(part, _)| part.end).max().unwrap_or(0);
        let mut copy = vec![0; end * self.widening_factor()];
        let widen = self.wide.unwrap_or(&F32Conversion::IDENTITY).widen;
        for (part, _) in self.buffer.ranges() {
            let shares = &mut copy[self.range_in_copy(&part)];
            widen(self.buffer.bytes(part), shares);
            scale(shares);
        }
        self.copy = Some(copy);
    }

    /// Returns address and length of the caller's memory, if it is one writable part and the plan works
    /// directly on it.
    pub(crate) fn single_range(&self) -> Option<(usize, usize)> {
        self.buffer.single_range().filter(|_| self.copy.is_none())
    }

    /// Returns what [`BorrowedBuffer::address`] returns, if the plan works directly on the caller's memory.
    pub(crate) fn address(&self, range: &Range<usize>) -> Option<usize> {
        self.buffer.address(range).filter(|_| self.copy.is_none())
    }

    /// Makes a bounded part of the copies that [`BorrowedBuffer::add_copy`] requested. Returns whether it
    /// copied. It is called when no data moves.
    pub(crate) fn copy_some(&mut self) -> bool {
        self.copy_bytes(MAX_READ_AHEAD_BYTES) > 0
    }

    /// Makes at most `most` bytes of these copies, from the end of a block on. Returns the number of bytes.
    pub(crate) fn copy_bytes(&mut self, most: usize) -> usize {
        self.buffer.copy_some(most)
    }

    /// Finishes the operation: writes the results from the copy to the caller's memory, if there is a copy.
    pub(crate) fn finish(&mut self) {
        self.buffer.copy_some(usize::MAX);
        let Some(copy) = self.copy.take() else { return };
        let narrow = self.wide.unwrap_or(&F32Conversion::IDENTITY).narrow;
        for (part, _) in self.buffer.ranges().filter(|(_, writable)| *writable) {
            narrow(&copy[self.range_in_copy(&part)], &mut self.buffer.bytes_mut(part));
        }
    }

    /// Copies or reduces as many of the arrived elements as possible into the buffer. Returns the number of
    /// bytes used.
    ///
    /// The error is the text with which a reduction function of the program failed.
    pub(crate) fn apply(&mut self, fragment: &Fragment<'_>) -> Result<usize, String> {
        let Fragment { bytes, apply, at, before, is_first } = *fragment;
        let sum_bytes = self.sum_bytes();
        // This uses the free function, because the method would also borrow the sums and the kernel.
        let mut into = bytes_mut(&mut self.buffer, self.copy.as_mut(), at..at + bytes.len());
        // The slice `into` ends with the part of the buffer in which the range begins.
        let mut used = into.len();
        if apply != Apply::Copy {
            used -= used % self.element_bytes;
        }
        let (into, from) = (&mut into[..used], &bytes[..used]);
        match (apply, &self.kernel) {
            (Apply::Reduce | Apply::ReduceLast, Some(kernel)) => {
                kernel.reduce(into, from, is_first, apply == Apply::ReduceLast)?;
            }
            (Apply::ReduceOrdered(step), Some(kernel)) => {
                let wide = kernel.f32_conversion().filter(|_| self.wide.is_none());
                let sums = before % self.window.max(1) * sum_bytes;
                let sums = &mut self.sums[sums..sums + used / self.element_bytes * sum_bytes];
                kernel.reduce_ordered(step, wide, sums, from, into)?;
            }
            (Apply::Copy | Apply::Reduce | Apply::ReduceLast | Apply::ReduceOrdered(_), _) => {
                SourceBytes::from(from).copy_to(into);
            }
        }
        Ok(used)
    }

    /// Returns the bytes in `range`, up to the end of the part in which it begins (none if they may not be
    /// changed), and the kernel.
    pub(crate) fn operands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (bytes_mut(&mut self.buffer, self.copy.as_mut(), range), self.kernel.as_ref())
    }

    /// Returns how many bytes [`Self::apply`] can use at once after `before` elements of a stream. A
    /// reduction in rank order stops at the end of the array of sums.
    pub(crate) fn max_bytes(&self, apply: Apply, before: usize) -> usize {
        match apply {
            Apply::Copy | Apply::Reduce | Apply::ReduceLast => usize::MAX,
            Apply::ReduceOrdered(_) => (self.window - before % self.window.max(1)) * self.element_bytes,
        }
    }

    /// Returns the bytes in `range`, up to the end of the part in which it begins.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match &self.copy {
            None => self.buffer.bytes(range),
            Some(copy) => &copy[range],
        }
    }

    /// Returns the bytes in `range`, up to the end of the part in which it begins; none if they may not be
    /// changed.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        bytes_mut(&mut self.buffer, self.copy.as_mut(), range)
    }

    /// Returns the size in bytes of a partial sum of a reduction in rank order.
    fn sum_bytes(&self) -> usize {
        let conversion = self.kernel.as_ref().and_then(Kernel::f32_conversion);
        if conversion.is_some() { ACCUMULATOR_BYTES } else { self.element_bytes }
    }

    /// Returns the number of bytes of the copy for each byte of the caller's memory.
    fn widening_factor(&self) -> usize {
        self.wide.map_or(1, |_| ACCUMULATOR_BYTES / F32Conversion::HALF_BYTES)
    }

    fn range_in_copy(&self, part: &Range<usize>) -> Range<usize> {
        part.start * self.widening_factor()..part.end * self.widening_factor()
    }
}

/// Returns what [`PlanBuffer::bytes_mut`] returns.
fn bytes_mut<'a>(
    buffer: &'a mut BorrowedBuffer<'_>,
    copy: Option<&'a mut Vec<u8>>,
    range: Range<usize>,
) -> BytesMut<'a> {
    match copy {
        None => buffer.bytes_mut(range),
        Some(copy) => copy[range].as_mut().into(),
    }
}
