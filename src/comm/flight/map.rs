//! Maps a file as memory that other processes can read through the file.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicU64;

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

/// Maps the first `words` words of `file` for the rest of the life of this process.
///
/// The caller has allocated this many bytes in the file. If another process truncates the file nevertheless,
/// the next memory write raises SIGBUS. Only processes of this user can truncate it.
///
/// # Errors
/// The system's.
#[allow(unsafe_code)]
pub(super) fn map(file: &File, words: usize) -> io::Result<&'static [AtomicU64]> {
    let bytes = NonZeroUsize::new(words * size_of::<u64>()).ok_or(io::ErrorKind::InvalidInput)?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the kernel chooses the address of the new mapping, so the mapping replaces no other memory.
    let start = unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, file, 0) }?;
    // Otherwise one in 32 of the first calls takes 2 µs more, for a page that was not written before. A kernel that does
    // not know the advice (before Linux 5.14) fills the page table at these calls.
    // SAFETY: the range is the mapping that was just made; the advice does not change its contents.
    let _ =
        unsafe { rustix::mm::madvise(start.as_ptr(), bytes.get(), rustix::mm::Advice::LinuxPopulateWrite) };
    // SAFETY:
    // - valid for so many bytes, for ever: mapped above for reading and writing, and never unmapped.
    // - aligned: to a page.
    // - initialised: any bits are a value of `AtomicU64`.
    // - other processes may read and write this memory: all access in this process is atomic, and the code
    //   relies on no value.
    Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), words) })
}
