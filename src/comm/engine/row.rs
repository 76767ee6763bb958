//! The row of elements that a plan works on: the caller's memory, or a copy of it with other elements; and
//! what is done to elements that arrive.

use std::ops::Range;

use crate::engine::buffer::{BytesMut, Lent};
use crate::kernels::{Kernel, Source, WIDE_BYTES, Wide};
use crate::links::conn::QUANTUM_BYTES;
use crate::plan::{Apply, Plan};

#[derive(Debug)]
pub(crate) struct Row<'m> {
    lent: Lent<'m>,
    kernel: Option<Kernel>,
    /// How elements of the memory become those of the plan, if these are wider.
    wide: Option<&'static Wide>,
    /// Instead of the memory, if the plan's elements are wider, or what is only read must be changed.
    copy: Option<Vec<u8>>,
    /// Sums in progress beside the row: those of the elements of a fold one after the other, and from the
    /// front again.
    sums: Vec<u8>,
    window: usize,
    begun: bool,
    /// Size of the plan's elements.
    pub(crate) element_bytes: usize,
}

/// Elements that have arrived, and where they belong.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) apply: Apply,
    /// Where they begin, in bytes of the row.
    pub(crate) at: usize,
    /// Elements of their stream before them.
    pub(crate) before: usize,
    /// They come from a rank before this one: both ends of an exchange have the operands in one order.
    pub(crate) is_first: bool,
}

impl<'m> Row<'m> {
    /// A row for `plan` of the elements in `lent`; `kernel` is there if the plan reduces.
    pub(crate) fn new(lent: Lent<'m>, kernel: Option<Kernel>, element_bytes: usize, plan: &Plan) -> Self {
        let wide = kernel.as_ref().and_then(Kernel::wide).filter(|_| plan.wide);
        let element_bytes = if wide.is_some() { WIDE_BYTES } else { element_bytes };
        let (window, sums, copy) = (plan.window, Vec::new(), None);
        Self { lent, kernel, wide, copy, sums, window, begun: false, element_bytes }
    }

    /// Makes this rank's shares what the kernel adds. Not before the plan is carried out: what waits for
    /// others takes no memory.
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

    /// Where the row lies, and its bytes, if it is all in one piece of memory that may be changed.
    pub(crate) fn whole(&self) -> Option<(usize, usize)> {
        self.lent.whole().filter(|_| self.copy.is_none())
    }

    /// Copies some of what the operation copies beside its row, while there is nothing else to do; whether it
    /// did.
    pub(crate) fn copy_some(&mut self) -> bool {
        self.lent.copy_some(QUANTUM_BYTES) > 0
    }

    /// Leaves the results where the caller has its memory, after everything else.
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

    /// Uses as much of what has arrived as can be; how many bytes.
    ///
    /// The error says how a function of the program failed.
    pub(crate) fn take(&mut self, arrival: &Arrival<'_>) -> Result<usize, String> {
        let Arrival { bytes, apply, at, before, is_first } = *arrival;
        let sum_bytes = self.sum_bytes();
        // Not through `self`, which would lend the sums and the kernel as well.
        let mut into = bytes_mut(&mut self.lent, self.copy.as_mut(), at..at + bytes.len());
        // Cut where a part of the row ends.
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

    /// What is added up of `range`, as far as it lies together and may be changed, and by what.
    pub(crate) fn summands(&mut self, range: Range<usize>) -> (BytesMut<'_>, Option<&Kernel>) {
        (bytes_mut(&mut self.lent, self.copy.as_mut(), range), self.kernel.as_ref())
    }

    /// Most bytes that can be used at once, `before` elements of their stream being done.
    pub(crate) fn most(&self, apply: Apply, before: usize) -> usize {
        match apply {
            Apply::Copy | Apply::Reduce | Apply::ReduceLast => usize::MAX,
            Apply::Fold(_) => (self.window - before % self.window.max(1)) * self.element_bytes,
        }
    }

    /// The bytes in `range` of the row, as far as they lie together.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match &self.copy {
            None => self.lent.bytes(range),
            Some(copy) => copy.get(range).unwrap_or_default(),
        }
    }

    /// The bytes in `range` of the row, as far as they lie together and may be changed.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        bytes_mut(&mut self.lent, self.copy.as_mut(), range)
    }

    /// Size of the elements in which shares are folded.
    fn sum_bytes(&self) -> usize {
        self.kernel.as_ref().and_then(Kernel::wide).map_or(self.element_bytes, |_| WIDE_BYTES)
    }

    /// Bytes of the copy for one of the memory.
    fn wider(&self) -> usize {
        self.wide.map_or(1, |_| WIDE_BYTES / Wide::NARROW_BYTES)
    }

    fn in_copy(&self, part: &Range<usize>) -> Range<usize> {
        part.start * self.wider()..part.end * self.wider()
    }
}

/// The bytes in `range` of a row, as far as they lie together and may be changed.
fn bytes_mut<'a>(lent: &'a mut Lent<'_>, copy: Option<&'a mut Vec<u8>>, range: Range<usize>) -> BytesMut<'a> {
    match copy {
        None => lent.bytes_mut(range),
        Some(copy) => copy.get_mut(range).unwrap_or_default().into(),
    }
}
