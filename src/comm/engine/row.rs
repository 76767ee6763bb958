//! The row of elements that a plan works on: the caller's memory, or a copy of it with wider elements. It
//! also applies elements that arrive.

use std::ops::Range;

use crate::engine::buffer::{BytesMut, Lent};
use crate::kernels::{Kernel, Source, WIDE_BYTES, Wide};
use crate::links::conn::QUANTUM_BYTES;
use crate::plan::{Apply, Plan};

#[derive(Debug)]
pub(crate) struct Row<'m> {
    lent: Lent<'m>,
    kernel: Option<Kernel>,
    /// The conversion from elements of the memory to those of the plan, if these are wider.
    wide: Option<&'static Wide>,
    /// The copy that replaces the memory, if the plan's elements are wider or read-only memory must be
    /// changed.
    copy: Option<Vec<u8>>,
    /// Partial sums of an ordered reduction, outside the row. The buffer holds a window of elements and is
    /// used again from its front.
    sums: Vec<u8>,
    window: usize,
    begun: bool,
    /// Size of the plan's elements.
    pub(crate) element_bytes: usize,
}

/// Elements that have arrived, and the place where they belong.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) apply: Apply,
    /// The offset of the elements in the row, in bytes.
    pub(crate) at: usize,
    /// Number of elements of the stream before these.
    pub(crate) before: usize,
    /// The elements come from a lower rank. So both ends of an exchange use the operands in one order.
    pub(crate) is_first: bool,
}

impl<'m> Row<'m> {
    /// Makes a row of the elements in `lent` for `plan`; `kernel` is `Some` if the plan reduces.
    pub(crate) fn new(lent: Lent<'m>, kernel: Option<Kernel>, element_bytes: usize, plan: &Plan) -> Self {
        let wide = kernel.as_ref().and_then(Kernel::wide).filter(|_| plan.wide);
        let element_bytes = if wide.is_some() { WIDE_BYTES } else { element_bytes };
        let (window, sums, copy) = (plan.window, Vec::new(), None);
        Self { lent, kernel, wide, copy, sums, window, begun: false, element_bytes }
    }

    /// Converts and scales this rank's share for the kernel. This happens when the plan starts, so that
    /// queued operations take no memory.
    pub(crate) fn begin(&mut self) {
        let Some(kernel) = self.kernel.as_ref().filter(|_| !self.begun) else { return };
        self.begun = true;
        self.sums = vec![0; self.window * self.sum_bytes()];
        let scale = |shares: &mut [u8]| kernel.scale().map_or((), |scale| scale(shares));
        let is_written = self.lent.ranges().all(|(_, writable)| writable);
        if self.wide.is_none() && (is_written || kernel.scale().is_none()) {
            self.lent.ranges().for_each(|(part, _)| scale(&mut self.lent.bytes_mut(part)));
            return;
        }
        let end = self.lent.ranges().map(|(part, _)| part.end).max().unwrap_or(0);
        let mut copy = vec![0; end * self.wider()];
        for (part, _) in self.lent.ranges() {
            let shares = &mut copy[self.in_copy(&part)];
            match self.wide {
                Some(wide) => (wide.widen)(self.lent.bytes(part), shares),
                None => Source::from(self.lent.bytes(part)).copy_to(shares),
            }
            scale(shares);
        }
        self.copy = Some(copy);
    }

    /// Returns address and length of the row, if it is one piece of memory that may be changed.
    pub(crate) fn whole(&self) -> Option<(usize, usize)> {
        self.lent.whole().filter(|_| self.copy.is_none())
    }

    /// Does some of the copies beside the row, while there is nothing else to do. Returns whether it copied.
    pub(crate) fn copy_some(&mut self) -> bool {
        self.lent.copy_some(QUANTUM_BYTES) > 0
    }

    /// Finishes the operation: writes the results to the caller's memory.
    pub(crate) fn finish(&mut self) {
        self.lent.copy_some(usize::MAX);
        let Some(copy) = self.copy.take() else { return };
        for (part, _) in self.lent.ranges().filter(|(_, writable)| *writable) {
            let results = &copy[self.in_copy(&part)];
            match self.wide {
                Some(wide) => (wide.narrow)(results, &mut self.lent.bytes_mut(part)),
                None => Source::from(results).copy_to(&mut self.lent.bytes_mut(part)),
            }
        }
    }

    /// Applies as much of the arrived elements as possible. Returns the number of bytes used.
    ///
    /// The error says how a function of the program failed.
    pub(crate) fn take(&mut self, arrival: &Arrival<'_>) -> Result<usize, String> {
        let Arrival { bytes, apply, at, before, is_first } = *arrival;
        let sum_bytes = self.sum_bytes();
        // This does not go through `self`, which would also borrow the sums and the kernel.
        let mut into = bytes_mut(&mut self.lent, self.copy.as_mut(), at..at + bytes.len());
        // The range is cut at the end of a part of the row.
        let mut used = into.len();
        if apply != Apply::Copy {
            used -= used % self.element_bytes;
        }
        let (into, from) = (&mut into[..used], &bytes[..used]);
        match (apply, &self.kernel) {
            (Apply::Reduce | Apply::ReduceLast, Some(kernel)) => {
                kernel.reduce(into, from, is_first, apply == Apply::ReduceLast)?;
            }
            (Apply::Fold(step), Some(kernel)) => {
                let wide = kernel.wide().filter(|_| self.wide.is_none());
                let sums = before % self.window.max(1) * sum_bytes;
                let sums = &mut self.sums[sums..sums + used / self.element_bytes * sum_bytes];
                kernel.fold(step, wide, sums, from, into)?;
            }
            (Apply::Copy | Apply::Reduce | Apply::ReduceLast | Apply::Fold(_), _) => {
                Source::from(from).copy_to(into);
            }
        }
        Ok(used)
    }

    /// Returns the operand bytes in `range`, up to the end of their part, if they may be changed; and the
    /// kernel.
    pub(crate) fn summands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (bytes_mut(&mut self.lent, self.copy.as_mut(), range), self.kernel.as_ref())
    }

    /// Returns the most bytes that can be used at once after `before` elements of their stream.
    pub(crate) fn most(&self, apply: Apply, before: usize) -> usize {
        match apply {
            Apply::Copy | Apply::Reduce | Apply::ReduceLast => usize::MAX,
            Apply::Fold(_) => (self.window - before % self.window.max(1)) * self.element_bytes,
        }
    }

    /// Returns the bytes in `range` of the row, up to the end of their part.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match &self.copy {
            None => self.lent.bytes(range),
            Some(copy) => copy.get(range).unwrap_or_default(),
        }
    }

    /// Returns the bytes in `range` of the row, up to the end of their part; none if they may not be changed.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        bytes_mut(&mut self.lent, self.copy.as_mut(), range)
    }

    /// Returns the element size of an ordered reduction's sums.
    fn sum_bytes(&self) -> usize {
        self.kernel.as_ref().and_then(Kernel::wide).map_or(self.element_bytes, |_| WIDE_BYTES)
    }

    /// Returns the bytes of the copy for each byte of the memory.
    fn wider(&self) -> usize {
        self.wide.map_or(1, |_| WIDE_BYTES / Wide::NARROW_BYTES)
    }

    fn in_copy(&self, part: &Range<usize>) -> Range<usize> {
        part.start * self.wider()..part.end * self.wider()
    }
}

/// Returns the bytes in `range` of a row, up to the end of their part; none if they may not be changed.
fn bytes_mut<'a>(lent: &'a mut Lent<'_>, copy: Option<&'a mut Vec<u8>>, range: Range<usize>) -> BytesMut<'a> {
    match copy {
        None => lent.bytes_mut(range),
        Some(copy) => copy.get_mut(range).unwrap_or_default().into(),
    }
}
