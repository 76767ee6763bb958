//! The caller's buffers while an operation uses them. Only this module makes slices from the borrowed memory.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use smallvec::SmallVec;

use super::slice::{Scratch, Slice, SliceMut, Values};
use crate::collectives::dtype::Dtype;
use crate::collectives::kernels::{copy, copy_non_temporal, is_uncached, store_fence};

/// Memory that a caller lends to an operation, seen as one range of bytes.
///
/// A rank may hold only parts of the byte range: a window of the elements of all ranks, separate send and
/// receive buffers, or a list of buffers. A part holds whole elements.
///
/// While a `BorrowedBuffer` exists, its memory is valid, and only the thread that drives the engine accesses
/// it. (Other threads may read memory that the operation only reads.) The borrows for `'a` guarantee this. A
/// caller that removes the lifetime, as the engine does (`Operation::erase_lifetime`), must guarantee it
/// instead.
#[derive(Debug, Default)]
pub(crate) struct BorrowedBuffer<'a> {
    /// The parts in order; they do not overlap.
    parts: SmallVec<[Part; 2]>,
    /// Copies that are still to be made between slices outside `parts`, and whether each of them bypasses the caches.
    copies: SmallVec<[(PendingCopy, bool); 1]>,
    /// Owned memory to which one or two of the parts point.
    scratch: Option<Box<[u128]>>,
    /// The elements are `bool`, for which not every byte is valid.
    pub(super) bools: bool,
    borrowed: PhantomData<&'a mut [u8]>,
}

/// Mutable bytes of borrowed memory. On drop, bytes that are not valid elements are replaced by valid ones.
/// So a caller never sees an invalid `bool`, whatever a peer sends.
#[derive(Debug)]
pub(crate) struct BytesMut<'a> {
    bytes: &'a mut [u8],
    bools: bool,
}

/// The part of a copy that is still to be done.
#[derive(Debug)]
pub(super) struct PendingCopy {
    pub(super) from: *const u8,
    pub(super) into: *mut u8,
    pub(super) len: usize,
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) start: *mut u8,
    pub(super) len: usize,
    pub(super) writable: bool,
    /// The offset in the whole buffer at which the part begins, in bytes.
    pub(super) at: usize,
}

// SAFETY: only one thread at a time uses the memory, the one that drives the engine (see the type). Plain
// bytes may be read and written from any thread.
#[allow(unsafe_code)]
unsafe impl Send for BorrowedBuffer<'_> {}

impl<'a> BorrowedBuffer<'a> {
    /// Adds memory that is filled or changed, beginning at value `at` of the buffer.
    #[inline(always)]
    pub(crate) fn with_mut(self, at: usize, buf: impl Into<SliceMut<'a>>) -> Self {
        self.part(at, &buf.into(), true)
    }

    /// Adds memory that is only read, beginning at value `at` of the buffer.
    #[inline(always)]
    pub(crate) fn with_ref(self, at: usize, buf: impl Into<Slice<'a>>) -> Self {
        self.part(at, &buf.into(), false)
    }

    /// Adds owned memory, beginning at value `at` of the buffer.
    pub(crate) fn with_scratch(self, at: usize, mut scratch: Scratch) -> Self {
        let mut buffer = self.part(at, &scratch.as_mut(), true);
        buffer.scratch = Some(scratch.into_memory());
        buffer
    }

    /// Adds owned memory for all values except `hole`. The part of `scratch` inside `hole` is not used.
    pub(crate) fn with_scratch_around(self, hole: Range<usize>, mut scratch: Scratch) -> Self {
        let (before, _, behind) = scratch.as_mut().split_around(hole.clone());
        let mut buffer = self.part(0, &before, true).part(hole.end, &behind, true);
        buffer.scratch = Some(scratch.into_memory());
        buffer
    }

    #[inline(always)]
    fn part<Borrow>(mut self, at: usize, values: &Values<Borrow>, writable: bool) -> Self {
        self.bools |= values.value_type().dtype == Dtype::Bool;
        self.add(Part::new(at, values, writable));
        self
    }

    /// Adds `part` without its range `hole`, in bytes of the buffer.
    pub(super) fn add_around(&mut self, part: Part, hole: Range<usize>) {
        if hole.is_empty() {
            return self.add(part);
        }
        let Part { start, len, writable, at } = part;
        let behind = start.wrapping_add(hole.end - at);
        self.add(Part { start, len: hole.start - at, writable, at });
        self.add(Part { start: behind, len: at + len - hole.end, writable, at: hole.end });
    }

    /// Requests that the operation makes the copy.
    pub(super) fn add_copy(&mut self, copy: PendingCopy) {
        if copy.len > 0 {
            let bypasses_caches = is_uncached(copy.len);
            self.copies.push((copy, bypasses_caches));
        }
    }

    #[inline]
    pub(super) fn add(&mut self, part: Part) {
        if part.len == 0 {
            return;
        }
        // As a rule the parts come in order.
        if self.parts.last().is_none_or(|last| last.at <= part.at) {
            return self.parts.push(part);
        }
        let index = self.parts.partition_point(|other| other.at < part.at);
        self.parts.insert(index, part);
    }

    /// Returns the number of bytes in all parts.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// Returns address and length of the buffer, if it is one writable part at offset 0 that may hold any
    /// bytes: not elements of type `bool`.
    pub(crate) fn single_range(&self) -> Option<(usize, usize)> {
        match &self.parts[..] {
            [Part { start, len, writable: true, at: 0 }] if !self.bools => Some((*start as usize, *len)),
            _ => None,
        }
    }

    /// Returns the address of the first byte of `range`, if all parts within the range belong to one contiguous piece of memory.
    /// There may be holes between the parts.
    pub(crate) fn address(&self, range: &Range<usize>) -> Option<usize> {
        let overlaps = |part: &&Part| part.at < range.end && range.start < part.at + part.len;
        // The address that the byte at `range.start` would have in the memory of a part.
        let address = |part: &Part| part.start.addr().wrapping_sub(part.at).wrapping_add(range.start);
        let mut addresses = self.parts.iter().filter(overlaps).map(address);
        let first = addresses.next()?;
        addresses.all(|address| address == first).then_some(first)
    }

    /// Returns the byte range of each part in the buffer, and whether it is writable.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (Range<usize>, bool)> + use<> {
        let ranges = self.parts.iter().map(|part| (part.at..part.at + part.len, part.writable));
        ranges.collect::<SmallVec<[_; 2]>>().into_iter()
    }

    /// Returns the part in which `range` begins (an empty one if there is none), and the offset and length of
    /// `range` within that part.
    fn clip(&self, range: &Range<usize>) -> (&Part, usize, usize) {
        let index = self.parts.partition_point(|part| part.at <= range.start);
        let part = index.checked_sub(1).map_or(&Part::NONE, |index| &self.parts[index]);
        let start = (range.start - part.at).min(part.len);
        let end = (range.end.max(range.start) - part.at).min(part.len);
        (part, start, end - start)
    }
}

#[allow(unsafe_code)]
impl BorrowedBuffer<'_> {
    /// # Safety
    /// The caller guarantees what [`BorrowedBuffer`] requires of a caller that removes the lifetime.
    #[cfg(test)]
    pub(crate) unsafe fn erase_lifetime(self) -> BorrowedBuffer<'static> {
        let Self { parts, copies, scratch, bools, .. } = self;
        BorrowedBuffer { parts, copies, scratch, bools, borrowed: PhantomData }
    }

    /// Makes at most `most` bytes of the copies that [`Self::add_copy`] requested, those of long blocks past the caches.
    /// Returns how many bytes it copied.
    pub(crate) fn copy_some(&mut self, most: usize) -> usize {
        let (mut done, mut is_non_temporal) = (0, false);
        while done < most {
            let Some((last, bypasses_caches)) = self.copies.last_mut() else { break };
            let step = last.len.min(most - done);
            last.len -= step;
            // SAFETY:
            // - in bounds and valid: `from` and `into` are borrowed slices of at least `len` + `step` bytes.
            // - apart: one was borrowed exclusively beside the other; nobody else touches them, see the type.
            // - whole elements in the end: both slices have one type, and nobody reads them before all is
            //   copied.
            unsafe {
                let (from, into) = (last.from.add(last.len), last.into.add(last.len));
                if *bypasses_caches {
                    copy_non_temporal(from, into, step);
                    is_non_temporal = true;
                } else {
                    copy(from, into, step);
                }
            }
            done += step;
            if last.len == 0 {
                self.copies.pop();
            }
        }
        if is_non_temporal {
            store_fence();
        }
        done
    }

    /// Returns the bytes in `range`, up to the end of the part in which it begins.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        let (part, start, len) = self.clip(&range);
        // SAFETY:
        // - in bounds and valid: `clip` stays within the part, which is a slice that is borrowed.
        // - not written meanwhile: only `bytes_mut` writes, and it borrows `self` exclusively.
        // - initialised: they are elements of a slice of numbers.
        unsafe { std::slice::from_raw_parts(part.start.add(start), len) }
    }

    /// Returns the bytes in `range`, up to the end of the part in which it begins; none if that part was
    /// borrowed for reading only.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        let (part, start, len) = self.clip(&range);
        let (start, len) = if part.writable { (start, len) } else { (0, 0) };
        // SAFETY:
        // - in bounds and valid for writes: `clip` stays within the part; not `with_ref`, checked above.
        // - no other reference: `self` is borrowed exclusively, and nobody else touches the memory.
        // - initialised, and `u8` needs no alignment; any bytes are elements, or `BytesMut` makes them some.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.start.add(start), len) };
        BytesMut { bytes, bools: self.bools }
    }
}

impl<'a> From<&'a mut [u8]> for BytesMut<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { bytes, bools: false }
    }
}

impl Deref for BytesMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for BytesMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl Drop for BytesMut<'_> {
    fn drop(&mut self) {
        if self.bools {
            for byte in &mut *self.bytes {
                *byte = u8::from(*byte != 0);
            }
        }
    }
}

impl BytesMut<'_> {
    /// Makes the bytes of elements, which are of type `bool` if `bools` is set.
    #[inline(always)]
    pub(super) fn new(bytes: &mut [u8], bools: bool) -> BytesMut<'_> {
        BytesMut { bytes, bools }
    }
}

impl PendingCopy {
    pub(super) const NONE: Self = Self { from: std::ptr::dangling(), into: std::ptr::dangling_mut(), len: 0 };
}

impl Part {
    /// Returns the part with `values`, which begins at value `at` of the buffer.
    #[inline(always)]
    pub(super) fn new<Borrow>(at: usize, values: &Values<Borrow>, writable: bool) -> Self {
        let at = at.saturating_mul(values.value_type().size_bytes());
        Self { start: values.start(), len: values.size_bytes(), writable, at }
    }

    pub(super) const NONE: Self = Self { start: std::ptr::dangling_mut(), len: 0, writable: false, at: 0 };
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::buffer::ValueType;

    fn scratch(values: &[u8]) -> Scratch {
        Scratch::copy_of(ValueType::of::<u8>(), std::iter::once(Slice::from(values)))
    }

    #[test]
    fn ranges_are_clipped_to_the_borrowed_buffer() {
        let mut memory = [1_u8, 2, 3, 4];
        let mut buffer = BorrowedBuffer::default().with_mut(0, &mut memory[..]);
        buffer.bytes_mut(1..2)[0] = 9;
        assert_eq!(buffer.bytes(1..100), [9, 3, 4]);
        assert_eq!(buffer.bytes(100..200), [0; 0]);
        let mut buffer = BorrowedBuffer::default().with_ref(0, &memory[..]);
        assert_eq!(*buffer.bytes_mut(0..4), [0; 0]);
        assert_eq!((buffer.bytes(0..4), buffer.len()), (&[1, 9, 3, 4][..], 4));
        assert_eq!(BorrowedBuffer::default().bytes(3..5), [0; 0]);
    }

    /// The kinds of memory that one place of a row may have.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum MemoryKind {
        Gap,
        Sent,
        Filled,
        Scratch,
    }

    /// Bytes of each row under test.
    const ROW: usize = 5;

    /// Returns all rows of [`ROW`] places, with one part of scratch memory at most.
    fn rows() -> impl Iterator<Item = [MemoryKind; ROW]> {
        let places = [MemoryKind::Gap, MemoryKind::Sent, MemoryKind::Filled, MemoryKind::Scratch];
        let row = move |number: usize| std::array::from_fn(|at| places[number >> (2 * at) & 3]);
        let has_one = |row: &[MemoryKind; ROW]| {
            parts(row).iter().filter(|part| part.2 == MemoryKind::Scratch).count() < 2
        };
        (0..1 << (2 * ROW)).map(row).filter(has_one)
    }

    /// Returns the parts of a row: runs of equal places.
    fn parts(row: &[MemoryKind; ROW]) -> Vec<(usize, usize, MemoryKind)> {
        let mut parts = Vec::new();
        for part in row.chunk_by(|a, b| a == b) {
            let at = parts.last().map_or(0, |&(at, len, _)| at + len);
            parts.push((at, part.len(), part[0]));
        }
        parts.into_iter().filter(|part| part.2 != MemoryKind::Gap).collect()
    }

    #[test]
    fn buffer_parts_form_one_contiguous_view() {
        for row in rows() {
            // Each place holds its own index in the buffer, whichever part it is in.
            let mut memory: Vec<Vec<u8>> =
                parts(&row).iter().map(|&(at, len, _)| (at..at + len).map(|at| at as u8).collect()).collect();
            let mut buffer = BorrowedBuffer::default();
            // The parts are added in reverse order.
            for ((at, _, place), memory) in parts(&row).into_iter().zip(&mut memory).rev() {
                buffer = match place {
                    MemoryKind::Sent => buffer.with_ref(at, &memory[..]),
                    MemoryKind::Filled => buffer.with_mut(at, &mut memory[..]),
                    _ => buffer.with_scratch(at, scratch(memory)),
                };
            }
            for range in (0..ROW + 2).flat_map(|start| (start..ROW + 3).map(move |end| start..end)) {
                let inside =
                    parts(&row).into_iter().find(|(at, len, _)| (*at..at + len).contains(&range.start));
                let (end, place) = inside.map_or((0, MemoryKind::Gap), |(at, len, place)| (at + len, place));
                let expected: Vec<u8> = (range.start..end.min(range.end)).map(|at| at as u8).collect();
                assert_eq!(buffer.bytes(range.clone()), expected, "{range:?} of {row:?}");
                let writable = matches!(place, MemoryKind::Filled | MemoryKind::Scratch);
                let expected = if writable { expected } else { Vec::new() };
                assert_eq!(*buffer.bytes_mut(range.clone()), expected, "{range:?} of {row:?}");
            }
        }
    }

    #[test]
    fn writes_to_a_view_change_the_borrowed_buffers() {
        let (sent, mut first, mut second) = ([1_u8, 2, 3], [0_u8; 4], [0_u8; 2]);
        let mut buffer = BorrowedBuffer::default()
            .with_mut(12, &mut second[..])
            .with_ref(5, &sent[..])
            .with_mut(8, &mut first[..]);
        buffer.bytes_mut(9..11).copy_from_slice(&[7, 8]);
        buffer.bytes_mut(13..14).copy_from_slice(&[9]);
        assert_eq!(buffer.len(), 9);
        assert_eq!((first, second), ([0, 7, 8, 0], [0, 9]));
    }

    #[test]
    fn view_lists_the_ranges_of_its_parts() {
        let (sent, mut filled) = ([1_u8, 2, 3], [0_u8; 4]);
        let buffer = BorrowedBuffer::default()
            .with_mut(8, &mut filled[..])
            .with_ref(5, &sent[..])
            .with_scratch(20, scratch(&[7; 2]));
        assert!(buffer.ranges().eq([(5..8, false), (8..12, true), (20..22, true)]));
    }

    #[test]
    fn copies_proceed_in_bounded_steps() {
        let (from, mut into, other, mut beside) = ([1_u8, 2, 3, 4, 5, 6], [0_u8; 6], [9_u8; 2], [0_u8; 2]);
        let mut buffer = BorrowedBuffer::default();
        buffer.add_copy(PendingCopy { from: from.as_ptr(), into: into.as_mut_ptr(), len: 6 });
        buffer.add_copy(PendingCopy { from: other.as_ptr(), into: beside.as_mut_ptr(), len: 2 });
        let steps: Vec<usize> =
            std::iter::from_fn(|| Some(buffer.copy_some(3)).filter(|&done| done > 0)).collect();
        assert_eq!(steps, [3, 3, 2]);
        assert_eq!((into, beside), (from, other));
    }

    #[test]
    fn long_block_is_copied_whole() {
        let bytes = (20..).map(|power| 1 << power).find(|&bytes| is_uncached(bytes)).unwrap() + 4097;
        let from: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let mut into = vec![255; bytes + 1];
        let mut buffer = BorrowedBuffer::default();
        buffer.add_copy(PendingCopy { from: from.as_ptr(), into: into[1..].as_mut_ptr(), len: bytes });
        while buffer.copy_some(100_003) > 0 {}
        assert!(into[1..] == from && into[0] == 255);
    }

    #[test]
    fn offsets_count_elements() {
        let mut memory = [1_u32, 2];
        let buffer = BorrowedBuffer::default().with_mut(3, &mut memory[..]);
        assert_eq!(buffer.bytes(16..20), 2_u32.to_ne_bytes());
    }

    #[test]
    fn bool_buffers_contain_only_zero_and_one_bytes() {
        let mut memory = [false; 256];
        let mut buffer = BorrowedBuffer::default().with_mut(0, &mut memory[..]);
        let every_byte: Vec<u8> = (0..=255).collect();
        buffer.bytes_mut(0..256).copy_from_slice(&every_byte);
        assert!(buffer.bytes(0..256).iter().enumerate().all(|(index, &byte)| byte == u8::from(index > 0)));
        buffer.bytes_mut(7..8)[0] = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut bytes = buffer.bytes_mut(0..4);
            bytes.fill(77);
            panic!("in the middle");
        }));
        assert!(panicked.is_err());
        assert_eq!(buffer.bytes(0..9), [1, 1, 1, 1, 1, 1, 1, 0, 1]);
        assert_eq!(memory.iter().filter(|&&truth| truth).count(), 255);
    }
}
