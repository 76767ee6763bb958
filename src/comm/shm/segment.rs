//! Memory that processes of one host share: anonymous, sealed, gone with the last process that has it.
//!
//! It is never a Rust reference: others write to it. Words are atomics; bytes are copied in and out, or worked on
//! through pointers by kernels. When which bytes may be touched by whom is what the programs of [`super`] keep.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::kernels::Source;

/// Nobody can make it shorter: touching it never is a SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of shared memory.
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is an address and a length; all access is by atomics, or by copies whose order its users agree on.
#[allow(unsafe_code)]
unsafe impl Send for Segment {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Segment {}

/// Some of the bytes of a segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
    segment: PhantomData<&'a Segment>,
}

/// What tests have fail.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    Create,
    Commit,
    Map,
}

#[cfg(test)]
thread_local! {
    /// What fails on this thread.
    pub(crate) static FAILING: std::cell::Cell<Option<Failing>> = const { std::cell::Cell::new(None) };
}

/// Fails where a test wants it to.
macro_rules! may_fail {
    ($what:ident) => {
        #[cfg(test)]
        if FAILING.get() == Some(Failing::$what) {
            return Err(io::ErrorKind::StorageFull.into());
        }
    };
}

/// Makes memory of `bytes` bytes without a name, to be handed to others as a descriptor. It takes no pages yet.
pub(crate) fn create(bytes: usize) -> io::Result<OwnedFd> {
    may_fail!(Create);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Not executable, where the system knows that wish.
    let memory = rustix::fs::memfd_create(c"convoke", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(c"convoke", flags))?;
    rustix::fs::ftruncate(&memory, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SEALS)?;
    Ok(memory)
}

/// Takes the pages of `range`, so that touching them cannot fail: in the memory of whoever calls it, where a machine
/// has several.
///
/// # Errors
/// There is no such memory: the machine's, or what the control group may have.
pub(crate) fn commit(memory: impl AsFd, range: Range<usize>) -> io::Result<()> {
    may_fail!(Commit);
    let (start, len) = (range.start as u64, range.len() as u64);
    Ok(rustix::fs::fallocate(memory, FallocateFlags::empty(), start, len)?)
}

impl Segment {
    /// Maps the `bytes` bytes of `memory`.
    ///
    /// # Errors
    /// The system's; and if it is not sealed or has another size.
    #[allow(unsafe_code)]
    pub(crate) fn map(memory: impl AsFd, bytes: usize) -> io::Result<Self> {
        may_fail!(Map);
        let sealed = rustix::fs::fcntl_get_seals(&memory)?.contains(SealFlags::SHRINK);
        let size = rustix::fs::fstat(&memory)?.st_size;
        if !sealed || usize::try_from(size) != Ok(bytes) {
            return Err(io::Error::other(format!("not sealed memory of {bytes} bytes")));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses: it takes no memory away from anybody.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, memory, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::Other)?;
        let segment = Self { start, bytes };
        // SAFETY: all of it is the mapping just made. A forked child gets none of it: it could only do harm there.
        unsafe { rustix::mm::madvise(segment.start.as_ptr().cast(), bytes, Advice::LinuxDontFork) }?;
        Ok(segment)
    }

    /// Has the processor know all pages, so that touching them is not slow either. They must be committed.
    #[allow(unsafe_code)]
    pub(crate) fn populate(&self) {
        // SAFETY: all of it is our mapping. If the system does not know this, the first touch is slower.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite)
        };
    }

    /// The word at `at`, a multiple of 8 that the layout knows to be there.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(size_of::<u64>()) && at < self.bytes);
        // SAFETY: in bounds and aligned, as the start is to a page; mapped as long as `self` lives; any bits are a
        // value, and all access to words is atomic, also that of other processes.
        unsafe { &*self.start.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// The `bytes` bytes at `at`, which the layout knows to be there.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) fn view(&self, at: usize, bytes: usize) -> View<'_> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: in bounds, checked above.
        let start = unsafe { self.start.as_ptr().add(at) };
        View { start, bytes, segment: PhantomData }
    }
}

impl Drop for Segment {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: our mapping, and nobody has a view of it: they borrow it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl<'a> View<'a> {
    /// To be worked on by a kernel.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) fn source(self) -> Source<'a> {
        // SAFETY: mapped for `'a`. That nobody writes there until the kernel has read it is what the order of a
        // program's steps keeps; should a rank break it, the bytes read are any, which elements may be.
        unsafe { Source::new(self.start, self.bytes) }
    }

    /// Copies it into `into`, which has as many bytes.
    #[inline(always)]
    pub(crate) fn take(self, into: &mut [u8]) {
        self.source().copy_to(into);
    }
}

/// `fence(SeqCst)`; on x86-64 by a locked instruction, which costs a quarter of the `mfence` that compilers take.
#[inline(always)]
pub(super) fn full_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
    // SAFETY: it changes nothing, an `or` with 0 on this thread's stack. What it does is not told to the compiler, which
    // so moves no access to memory across it.
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    #[allow(unsafe_code)]
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(any(target_arch = "x86_64", loom)))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_mappings_are_one_memory() {
        let memory = create(8192).unwrap();
        commit(&memory, 0..8192).unwrap();
        let (a, b) = (Segment::map(&memory, 8192).unwrap(), Segment::map(&memory, 8192).unwrap());
        a.populate();
        a.view(100, 3).put(&[1, 2, 3]);
        a.word(4096).store(7, Ordering::Release);
        let mut bytes = [0; 4];
        b.view(99, 4).take(&mut bytes);
        assert_eq!((bytes, b.word(4096).load(Ordering::Acquire)), ([0, 1, 2, 3], 7));
    }

    #[test]
    fn it_cannot_be_made_shorter() {
        let memory = create(8192).unwrap();
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
        assert!(rustix::fs::ftruncate(&memory, 1 << 20).is_err());
    }

    #[test]
    fn what_is_not_sealed_or_of_another_size_is_refused() {
        assert!(Segment::map(create(4096).unwrap(), 8192).is_err());
        let loose = rustix::fs::memfd_create(c"loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        assert!(Segment::map(&loose, 4096).is_err());
    }
}
