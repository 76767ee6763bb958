//! Memory that processes of one host share: anonymous and sealed. The kernel frees it when the last process
//! has closed and unmapped it.
//!
//! No plain Rust reference to its bytes exists, since other processes write to them. Counters are atomic
//! words. Data is copied in and out, or reduced through raw pointers. The schedules of [`super`] define when
//! a rank may access which bytes.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::libc;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::arena::Part;
use super::layout::HUGE_PAGE_BYTES;
use super::region::PAGE_BYTES;
use crate::collectives::kernels::SourceBytes;
use crate::limits;

/// The seals of the memory file: no process can resize the memory, so access to it never raises SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of shared memory.
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    /// The size of the mapping, a multiple of 8.
    bytes: usize,
    /// The part of an arena that is mapped; `None` if the mapping is a whole memory file, whose pages are all
    /// allocated.
    part: Option<Part>,
}

// SAFETY: a segment is an address and a length. All access is by atomics, or by copies through a `View`. The
// module `shm` ensures that this is sound. The order of the steps in its schedules keeps two ranks from
// writing the same bytes at once, and from reading bytes that are being written. No safe function outside of
// `shm` makes a view.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`.
unsafe impl Sync for Segment {}

/// A byte range of a segment. The methods of a view are safe to call only within the module `shm`, which
/// orders all accesses (see [`Segment`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
    segment: PhantomData<&'a Segment>,
}

/// The operations that tests can make fail.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    Create,
    Commit,
    Map,
}

#[cfg(test)]
thread_local! {
    /// The operation that a test makes fail on this thread.
    pub(crate) static INJECTED_FAULT: std::cell::Cell<Option<InjectedFault>> = const { std::cell::Cell::new(None) };
}

/// Returns an error from the surrounding function if a test has set `INJECTED_FAULT` to this operation.
macro_rules! inject_fault {
    ($what:ident) => {
        #[cfg(test)]
        if INJECTED_FAULT.get() == Some(InjectedFault::$what) {
            return Err(io::ErrorKind::StorageFull.into());
        }
    };
}

/// Creates anonymous memory of `bytes` bytes, whose file descriptor can be passed to other processes. No
/// pages are allocated yet, but the control group must have that much memory free.
pub(crate) fn create(bytes: usize) -> io::Result<OwnedFd> {
    inject_fault!(Create);
    limits::check_memory(bytes)?;
    create_sparse(bytes)
}

/// Creates memory as [`create`], of which only a small part is to be allocated at a time.
pub(super) fn create_sparse(bytes: usize) -> io::Result<OwnedFd> {
    limits::check_file_size(bytes)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // `NOEXEC_SEAL` makes the memory not executable. Older kernels refuse the flag.
    let memory = rustix::fs::memfd_create(c"convoke", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(c"convoke", flags))?;
    rustix::fs::ftruncate(&memory, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SEALS)?;
    Ok(memory)
}

/// Allocates the pages of `range`, so that later access to them cannot fail for lack of memory. On NUMA
/// machines the pages come from the node on which the caller runs. Fails if the machine or the control group
/// does not have enough memory.
pub(crate) fn commit(memory: impl AsFd, range: Range<usize>) -> io::Result<()> {
    inject_fault!(Commit);
    // The cgroup limit is not checked for small ranges: the check takes as long as allocating some pages.
    if range.len() > HUGE_PAGE_BYTES / 2 {
        limits::check_memory(range.len())?;
    }
    allocate(memory, range)
}

/// Allocates the pages of `range` that are not allocated yet.
fn allocate(memory: impl AsFd, range: Range<usize>) -> io::Result<()> {
    let (start, len) = (range.start as u64, range.len() as u64);
    Ok(rustix::fs::fallocate(memory, FallocateFlags::empty(), start, len)?)
}

/// Maps `bytes` bytes of `memory` from offset `at` on, a multiple of the page size. The address has the same
/// offset in a huge page as `at`, so that the kernel can map huge pages.
pub(super) fn map_shared(memory: impl AsFd, at: usize, bytes: usize) -> io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let hint = if bytes < HUGE_PAGE_BYTES { std::ptr::null_mut() } else { aligned_hint(at, bytes) };
    // SAFETY: a new mapping where nothing is mapped: it takes no memory away from anybody.
    let start = unsafe { rustix::mm::mmap(hint, bytes, protection, MapFlags::SHARED, memory, at as u64) }?;
    NonNull::new(start.cast()).ok_or(io::ErrorKind::Other.into())
}

/// Returns an address at which `bytes` bytes are unmapped now, with the offset of `at` within a huge page. It
/// is only a hint for `mmap`, since another thread may map memory there. It is null if no address is found.
fn aligned_hint(at: usize, bytes: usize) -> *mut c_void {
    let (null, more) = (std::ptr::null_mut(), bytes.saturating_add(HUGE_PAGE_BYTES));
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping without access rights where nothing is mapped, removed at once.
    unsafe {
        let Ok(free) = rustix::mm::mmap_anonymous(null, more, ProtFlags::empty(), flags) else { return null };
        let _ = rustix::mm::munmap(free, more);
        free.wrapping_byte_add(at.wrapping_sub(free.addr()) % HUGE_PAGE_BYTES)
    }
}

/// Returns an error unless `memory` is sealed and has `bytes` bytes.
pub(super) fn check_sealed(memory: impl AsFd, bytes: usize) -> io::Result<()> {
    let sealed = rustix::fs::fcntl_get_seals(&memory)?.contains(SealFlags::SHRINK);
    let size = rustix::fs::fstat(&memory)?.st_size;
    if !sealed || usize::try_from(size) != Ok(bytes) {
        return Err(io::Error::other(format!("not sealed memory of {bytes} bytes")));
    }
    Ok(())
}

impl Segment {
    /// Maps the `bytes` bytes of `memory`. Fails if a system call fails, or the memory is not sealed, has
    /// another size, or has no whole number of words.
    pub(crate) fn map(memory: impl AsFd, bytes: usize) -> io::Result<Self> {
        inject_fault!(Map);
        check_sealed(&memory, bytes)?;
        Self::map_range(memory, 0, bytes, None)
    }

    /// Allocates and maps the pages of `bytes` bytes from `at` on of memory that a program has made. It fails
    /// if `memory` is shorter. The program promises not to shorten it.
    pub(crate) fn adopt(memory: impl AsFd, at: usize, bytes: usize) -> io::Result<Self> {
        let size = usize::try_from(rustix::fs::fstat(&memory)?.st_size).unwrap_or(0);
        let Some(end) = at.checked_add(bytes).filter(|&end| end <= size) else {
            return Err(io::Error::other(format!("the file of {size} bytes has no {bytes} bytes at {at}")));
        };
        allocate(&memory, at..end)?;
        Self::map_range(memory, at, bytes.next_multiple_of(PAGE_BYTES), None)
    }

    /// Maps the `bytes` bytes of `memory` from `at` on, a multiple of the page size; they are `part`
    /// of an arena. No process shortens the memory.
    pub(super) fn map_range(
        memory: impl AsFd,
        at: usize,
        bytes: usize,
        part: Option<Part>,
    ) -> io::Result<Self> {
        if !bytes.is_multiple_of(size_of::<u64>()) {
            return Err(io::Error::other(format!("memory of {bytes} bytes, which are no whole words")));
        }
        let start = map_shared(memory, at, bytes)?;
        let segment = Self { start, bytes, part };
        // SAFETY: the range is the mapping just made. A forked child does not inherit the mapping, since
        // writes of the child would corrupt data of the ranks.
        unsafe { rustix::mm::madvise(segment.start.as_ptr().cast(), bytes, Advice::LinuxDontFork) }?;
        Ok(segment)
    }

    /// Allocates the pages of `range` if they may not be allocated yet. Access to pages that are not
    /// allocated would raise SIGBUS when memory is lacking.
    pub(super) fn commit(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.bytes);
        self.part.as_ref().map_or(Ok(()), |part| part.commit(range))
    }

    /// Asks the kernel to turn the pages of `own` into huge pages, and fills the page tables of the whole
    /// mapping, so that first accesses are fast. The pages of all ranks must be allocated; other ranks may
    /// already use them.
    ///
    /// Huge pages need fewer TLB entries: four ranks on two cores of an EPYC (Zen 4) add up 16 MiB in place
    /// 1.18 times as fast (median of 9 pairs).
    pub(crate) fn populate(&self, own: Range<usize>) {
        let align = |at: usize| at.next_multiple_of(HUGE_PAGE_BYTES).min(self.bytes);
        self.collapse(align(own.start)..align(own.end));
        // SAFETY: the range is this whole mapping. If the kernel does not know the advice, first accesses are
        // slower.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite)
        };
    }

    /// Asks the kernel to turn the pages of `range` into huge pages. Its ends are multiples of the size of a
    /// huge page, or the end of the memory.
    pub(super) fn collapse(&self, range: Range<usize>) {
        assert!(range.end <= self.bytes);
        if !range.is_empty() {
            // SAFETY: a range of this mapping; the call does not change its contents. Before Linux 6.1, or if
            // there are no huge pages, the call fails and pages stay small.
            unsafe {
                libc::madvise(self.start.as_ptr().add(range.start).cast(), range.len(), libc::MADV_COLLAPSE);
            }
        }
    }

    /// Returns the atomic word at byte offset `at`, which must be a multiple of 8 inside the segment.
    #[inline(always)]
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(size_of::<u64>()) && at < self.bytes);
        // SAFETY: in bounds to the end of the word, since `at` and `bytes` (see `map`) are multiples of 8.
        // Aligned, as the start is to a page; mapped as long as `self` lives. Any bits are a value, and all
        // access to words is atomic, also that of other processes.
        unsafe { &*self.start.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Returns a view of the `bytes` bytes from offset `at` on, which must be inside the segment.
    #[inline(always)]
    pub(crate) fn view(&self, at: usize, bytes: usize) -> View<'_> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: in bounds, checked above.
        let start = unsafe { self.start.as_ptr().add(at) };
        View { start, bytes, segment: PhantomData }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let is_last = self.part.as_ref().is_some_and(|part| part.close(self));
        // SAFETY: our mapping, and no view of it exists: views borrow it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        if let Some(part) = self.part.as_ref().filter(|_| is_last) {
            part.free();
        }
    }
}

impl<'a> View<'a> {
    /// Returns the bytes as the read-only operand of a reduction kernel.
    #[inline(always)]
    pub(crate) fn source(self) -> SourceBytes<'a> {
        // SAFETY: mapped for `'a`. The order of a schedule's steps keeps other ranks from writing these bytes
        // until the kernel has read them. If a rank violates that order, the bytes are arbitrary, and any
        // bytes are valid elements.
        unsafe { SourceBytes::new(self.start, self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_mappings_show_the_same_memory() {
        let memory = create(8192).unwrap();
        commit(&memory, 0..8192).unwrap();
        let (a, b) = (Segment::map(&memory, 8192).unwrap(), Segment::map(&memory, 8192).unwrap());
        a.populate(0..8192);
        a.view(100, 3).write(&[1, 2, 3]);
        a.word(4096).store(7, Ordering::Release);
        let mut bytes = [0; 4];
        b.view(99, 4).read(&mut bytes);
        assert_eq!((bytes, b.word(4096).load(Ordering::Acquire)), ([0, 1, 2, 3], 7));
    }

    #[test]
    fn writes_during_huge_page_conversion_are_kept() {
        // Not a whole number of huge pages; one huge page spans both ranges.
        let (bytes, middle) = (5 * HUGE_PAGE_BYTES + 4096, 5 * HUGE_PAGE_BYTES / 2);
        let memory = create(bytes).unwrap();
        commit(&memory, 0..bytes).unwrap();
        let (a, b) = (Segment::map(&memory, bytes).unwrap(), Segment::map(&memory, bytes).unwrap());
        let words = || (0..bytes).step_by(4096 + 8);
        let write = |segment: &Segment| {
            for _ in 0..20 {
                for at in words() {
                    segment.word(at).fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| write(&a));
            scope.spawn(|| write(&b));
            scope.spawn(|| a.populate(0..middle));
            b.populate(middle..bytes);
        });
        assert!(words().all(|at| a.word(at).load(Ordering::Relaxed) == 40));
        let mut others = (0..bytes).step_by(8).filter(|at| at % (4096 + 8) != 0);
        assert!(others.all(|at| b.word(at).load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn mappings_start_at_huge_page_boundaries() {
        let memory = create(4 * HUGE_PAGE_BYTES).unwrap();
        for at in [0, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 8192] {
            // Another thread may have mapped something there in between.
            let begins_well = |_| {
                let bytes = 2 * HUGE_PAGE_BYTES;
                let segment = Segment { start: map_shared(&memory, at, bytes).unwrap(), bytes, part: None };
                segment.start.addr().get() % HUGE_PAGE_BYTES == at % HUGE_PAGE_BYTES
            };
            assert!((0..100).any(begins_well), "{at}");
        }
    }

    #[test]
    fn sealed_memory_cannot_be_resized() {
        let memory = create(8192).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
        assert!(rustix::fs::ftruncate(&memory, 1 << 20).is_err());
    }

    #[test]
    fn unsealed_or_wrongly_sized_memory_is_refused() {
        assert!(Segment::map(create(4096).unwrap(), 8192).is_err());
        assert!(Segment::map(create(4100).unwrap(), 4100).is_err(), "a word would end behind the memory");
        let loose = rustix::fs::memfd_create(c"loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        assert!(Segment::map(&loose, 4096).is_err());
    }
}
