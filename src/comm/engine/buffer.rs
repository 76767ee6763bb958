//! The caller's buffer while an operation works on it: the one place where lent memory becomes a slice.

use std::ops::Range;

/// Memory that a blocked caller lends to the engine, as bytes.
///
/// A value exists only inside a task, and a task leaves the engine before the call that lent the
/// memory returns ([`super::Shared::call`]). So while one exists, its memory is there, and nobody
/// but the thread that drives the engine touches it (writes it, if it was lent to be read only).
#[derive(Debug)]
pub(crate) struct Lent {
    start: *mut u8,
    len: usize,
    writable: bool,
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
        Self { start, len, writable: true }
    }

    /// Lends memory that is only sent.
    ///
    /// # Safety
    /// `start` is valid for reads of `len` initialised bytes, and until this is dropped nothing
    /// writes there.
    pub(crate) unsafe fn read_only(start: *const u8, len: usize) -> Self {
        Self { start: start.cast_mut(), len, writable: false }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes in `range`, cut to what was lent.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        let (start, len) = self.clip(range);
        // SAFETY:
        // - in bounds and valid: `clip` stays within `len`, the rest is promised to `new`.
        // - not written meanwhile: only `bytes_mut` writes, and it borrows `self` exclusively.
        // - initialised: they are elements of a slice of numbers.
        unsafe { std::slice::from_raw_parts(self.start.add(start), len) }
    }

    /// The bytes in `range`, cut to what was lent; none if it was lent to be read only.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let (start, len) = if self.writable { self.clip(range) } else { (0, 0) };
        // SAFETY:
        // - in bounds and valid for writes: `clip` stays within `len`; not `read_only`, checked above.
        // - no other reference: `self` is borrowed exclusively and the caller is blocked.
        // - any bytes are numbers, and `u8` needs no alignment.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    fn clip(&self, range: Range<usize>) -> (usize, usize) {
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        (start, end - start)
    }
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
}
