//! The caller's buffer while an operation works on it: the one place where lent memory becomes a slice.

use std::ops::Range;

/// Memory that a blocked caller lends to the engine, as bytes.
///
/// A value exists only inside a task, and a task leaves the engine before the call that lent the
/// memory returns ([`super::Shared::call`]). So while one exists, its memory is there, and nobody
/// but the thread that drives the engine touches it (writes it, if it was lent to be read only).
///
/// It is seen as one row of bytes, of which it may hold one or two parts: a window of what all ranks
/// have together, or what is only read and what is written.
#[derive(Debug)]
pub(crate) struct Lent {
    parts: [Part; 2],
}

#[derive(Debug)]
struct Part {
    start: *mut u8,
    len: usize,
    writable: bool,
    /// Where in the row it begins.
    at: usize,
}

// SAFETY: the memory belongs to a caller that is blocked; whichever thread drives the engine is the
// only one to use it (see the type), and bytes may be read and written from any thread.
#[allow(unsafe_code)]
unsafe impl Send for Lent {}

#[allow(unsafe_code)]
impl Lent {
    /// Lends memory that is filled or changed.
    ///
    /// # Safety
    /// `start` is valid for reads and writes of `len` bytes, any bytes are a value of what is stored
    /// there, and until this is dropped nothing else touches the memory.
    pub(crate) unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { parts: [Part { start, len, writable: true, at: 0 }, Part::NONE] }
    }

    /// Lends memory that is only sent.
    ///
    /// # Safety
    /// `start` is valid for reads of `len` initialised bytes, and until this is dropped nothing
    /// writes there.
    pub(crate) unsafe fn read_only(start: *const u8, len: usize) -> Self {
        Self { parts: [Part { start: start.cast_mut(), len, writable: false, at: 0 }, Part::NONE] }
    }

    /// The same, beginning at byte `at` of the row.
    pub(crate) fn at(mut self, at: usize) -> Self {
        self.parts[0].at = at;
        self
    }

    /// Both: `self` and one part of `other`, which do not overlap in the row.
    pub(crate) fn with(self, other: Self) -> Self {
        let [mine, _] = self.parts;
        let [theirs, _] = other.parts;
        Self { parts: [mine, theirs] }
    }

    /// Bytes in all.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// The bytes in `range`, cut to the part in which it begins.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        let (part, start, len) = self.clip(range);
        // SAFETY:
        // - in bounds and valid: `clip` stays within the part, the rest is promised to `new`.
        // - not written meanwhile: only `bytes_mut` writes, and it borrows `self` exclusively.
        // - initialised: they are elements of a slice of numbers.
        unsafe { std::slice::from_raw_parts(part.start.add(start), len) }
    }

    /// The bytes in `range`, cut to the part in which it begins; none if that was lent to be read only.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let (part, start, len) = self.clip(range);
        let (start, len) = if part.writable { (start, len) } else { (0, 0) };
        // SAFETY:
        // - in bounds and valid for writes: `clip` stays within the part; not `read_only`, checked above.
        // - no other reference: `self` is borrowed exclusively and the caller is blocked.
        // - any bytes are numbers, and `u8` needs no alignment.
        unsafe { std::slice::from_raw_parts_mut(part.start.add(start), len) }
    }

    /// The part in which `range` begins, else an empty one; and where in it, and how long.
    fn clip(&self, range: Range<usize>) -> (&Part, usize, usize) {
        let holds = |part: &&Part| range.start >= part.at && range.start - part.at < part.len;
        let Some(part) = self.parts.iter().find(holds) else { return (&Part::NONE, 0, 0) };
        let (start, end) = (range.start - part.at, (range.end.max(range.start) - part.at).min(part.len));
        (part, start, end - start)
    }
}

impl Part {
    const NONE: Self = Self { start: std::ptr::dangling_mut(), len: 0, writable: false, at: 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn ranges_are_cut_to_what_was_lent() {
        let mut memory = [1_u8, 2, 3, 4];
        // SAFETY: `memory` outlives `lent` and is not used otherwise meanwhile.
        let mut lent = unsafe { Lent::new(memory.as_mut_ptr(), memory.len()) };
        lent.bytes_mut(1..2)[0] = 9;
        assert_eq!(lent.bytes(1..100), [9, 3, 4]);
        assert_eq!(lent.bytes(100..200), [0; 0]);
        // SAFETY: as above; nothing writes.
        let mut lent = unsafe { Lent::read_only(memory.as_ptr(), memory.len()) };
        assert_eq!(lent.bytes_mut(0..4), [0; 0]);
        assert_eq!((lent.bytes(0..4), lent.len()), (&[1, 9, 3, 4][..], 4));
    }

    #[test]
    #[allow(unsafe_code)]
    fn two_parts_are_one_row() {
        let (sent, mut filled) = ([1_u8, 2, 3], [0_u8; 4]);
        // SAFETY: both outlive `lent` and are not used otherwise meanwhile.
        let mut lent =
            unsafe { Lent::read_only(sent.as_ptr(), 3).at(5).with(Lent::new(filled.as_mut_ptr(), 4).at(8)) };
        assert_eq!(lent.bytes(6..8), [2, 3]);
        assert_eq!(lent.bytes(6..12), [2, 3], "cut where the part ends");
        assert_eq!((lent.bytes(0..5), lent.bytes(12..13)), (&[][..], &[][..]), "not lent");
        lent.bytes_mut(9..11).copy_from_slice(&[7, 8]);
        assert_eq!(lent.bytes_mut(5..8), [0; 0], "read only");
        assert_eq!(lent.len(), 7);
        assert_eq!(filled, [0, 7, 8, 0]);
    }
}
