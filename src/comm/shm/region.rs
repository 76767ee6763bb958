//! A region of shared memory that the program of one rank uses. Other ranks write to the region only during a
//! collective to which its rank has passed the memory.

#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::segment::map_shared;
use crate::collectives::dtype::Element;

pub(crate) const PAGE_BYTES: usize = 4096;

/// A mapping of the pages of one rank's region.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    /// The total size of the elements; the rest of the last page is unused.
    bytes: usize,
    /// The number of bytes that the program uses, from the start on.
    used: AtomicUsize,
    /// The program made the mapping, and removes it.
    is_adopted: bool,
}

/// The owner of a region's elements; each region has exactly one.
#[derive(Debug)]
pub(crate) struct OwnedRegion<T> {
    pub(crate) region: Arc<Region>,
    len: usize,
    elements: PhantomData<T>,
}

// SAFETY: it is an address and a length; the `OwnedRegion` of the region, or the program, owns the elements.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of `bytes` bytes that the program has mapped at `start`.
    ///
    /// # Safety
    /// `start` is a multiple of the page size. As long as the region exists, the pages are mapped there,
    /// shared, readable and writable, and may be [made private](Self::make_private).
    pub(crate) unsafe fn adopt(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes, used: bytes.into(), is_adopted: true }
    }

    /// Returns the offset in this region of the `bytes` bytes at `address`. `None` if they are not all in the
    /// region, or if one of their pages holds other elements.
    pub(crate) fn offset_of(&self, address: usize, bytes: usize) -> Option<usize> {
        let at = address.checked_sub(self.start.as_ptr() as usize)?;
        let end = at.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        let is_last = end == self.bytes || end == self.used.load(Ordering::Relaxed);
        let is_apart = at.is_multiple_of(PAGE_BYTES) && (end.is_multiple_of(PAGE_BYTES) || is_last);
        is_apart.then_some(at)
    }

    /// Declares that the program uses only the first `bytes` bytes. The rest of their last page then becomes
    /// zero if the page is [made private](Self::make_private).
    pub(crate) fn limit_use(&self, bytes: usize) {
        self.used.store(bytes, Ordering::Relaxed);
    }

    /// Replaces the `bytes` bytes at an [offset](Self::offset_of) by private zero pages, so that later writes
    /// of other ranks do not reach this program.
    ///
    /// A failed collective does so for its elements before it returns, since other ranks may still write to
    /// them.
    pub(crate) fn make_private(&self, at: usize, bytes: usize) {
        assert!(at.is_multiple_of(PAGE_BYTES) && at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let start = self.start.as_ptr().wrapping_add(at);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: pages of this mapping are replaced by memory of the same size and rights. Zeros are valid
        // elements of every type, and a failed collective leaves its elements unspecified.
        let replaced = unsafe { rustix::mm::mmap_anonymous(start.cast(), bytes, protection, flags) };
        if let Err(error) = replaced {
            // Other ranks may write to a slice that the program reads, so the process cannot continue.
            log::error!("cannot replace shared memory by private memory, so this process aborts: {error}");
            std::process::abort();
        }
    }
}

impl<T: Element> OwnedRegion<T> {
    /// Maps `len` elements of `memory` from byte `at` on, a multiple of the page size. Their pages must be
    /// allocated. The elements are zero at first.
    ///
    /// A forked child inherits the mapping, so it sees what the parent's collectives write, as in all shared
    /// memory.
    pub(crate) fn map(memory: impl AsFd, at: usize, len: usize) -> io::Result<Self> {
        let bytes =
            len.checked_mul(size_of::<T>()).filter(|&bytes| bytes > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let start = map_shared(memory, at, bytes)?;
        let region = Region { start, bytes, used: bytes.into(), is_adopted: false };
        let region = Arc::new(region);
        Ok(Self { region, len, elements: PhantomData })
    }
}

impl<T: Element> Deref for OwnedRegion<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is mapped as long as the region exists, is aligned to a page, and has `len`
        // elements. Zeros and all bytes that other ranks write are valid elements. Other ranks write only
        // during a collective, to which the owner has passed the slice.
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for OwnedRegion<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; and this is the only owner of the elements, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.region.start.as_ptr().cast(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.is_adopted {
            return;
        }
        // SAFETY: our mapping, and no slice of it exists: slices borrow its owner.
        let _ = unsafe {
            rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes.next_multiple_of(PAGE_BYTES))
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::segment::{Segment, commit, create};

    #[test]
    fn reclaimed_pages_are_private() {
        let bytes = 4 * PAGE_BYTES;
        let memory = create(bytes).unwrap();
        commit(&memory, 0..bytes).unwrap();
        let others = Segment::map(&memory, bytes).unwrap();
        let mut owned = OwnedRegion::<u8>::map(&memory, PAGE_BYTES, 3 * PAGE_BYTES - 10).unwrap();
        others.view(PAGE_BYTES, 1).write(&[1]);
        others.view(2 * PAGE_BYTES, 1).write(&[2]);
        assert_eq!((owned[0], owned[PAGE_BYTES]), (1, 2));
        owned.region.make_private(PAGE_BYTES, 2 * PAGE_BYTES - 10);
        for page in 1..4 {
            others.view(page * PAGE_BYTES, 1).write(&[9]);
        }
        assert_eq!((owned[0], owned[PAGE_BYTES], owned[2 * PAGE_BYTES]), (9, 0, 0));
        owned[PAGE_BYTES] = 5;
        let mut byte = [0];
        others.view(2 * PAGE_BYTES, 1).read(&mut byte);
        assert_eq!((byte, owned[PAGE_BYTES]), ([9], 5));
    }

    #[test]
    fn only_whole_owned_pages_have_an_offset() {
        let memory = create(4 * PAGE_BYTES).unwrap();
        commit(&memory, 0..4 * PAGE_BYTES).unwrap();
        let owned = OwnedRegion::<u8>::map(&memory, 0, 3 * PAGE_BYTES + 5).unwrap();
        let (region, start) = (&owned.region, owned.as_ptr() as usize);
        assert_eq!(region.offset_of(start, 3 * PAGE_BYTES + 5), Some(0));
        assert_eq!(region.offset_of(start + PAGE_BYTES, PAGE_BYTES), Some(PAGE_BYTES));
        assert_eq!(region.offset_of(start + PAGE_BYTES, 2 * PAGE_BYTES + 5), Some(PAGE_BYTES));
        for (at, bytes) in [(1, PAGE_BYTES), (0, 100), (0, 3 * PAGE_BYTES + 6), (4 * PAGE_BYTES, 1)] {
            assert_eq!(region.offset_of(start + at, bytes), None, "{bytes} at {at}");
        }
        assert_eq!(region.offset_of(start - 1, 10), None);
        region.limit_use(100);
        assert_eq!((region.offset_of(start, 100), region.offset_of(start, 99)), (Some(0), None));
    }
}
