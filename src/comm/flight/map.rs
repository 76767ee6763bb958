//! Maps a file as memory that is shared with its readers.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicU64;

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

/// Maps the first `words` words of `file` for the rest of the life of this process.
///
/// The caller has allocated this many bytes in the file. If another process truncates it nevertheless, the
/// next store raises SIGBUS. Only processes of this user can do that.
///
/// # Errors
/// The system's.
#[allow(unsafe_code)]
pub(super) fn map(file: &File, words: usize) -> io::Result<&'static [AtomicU64]> {
    let bytes = NonZeroUsize::new(words * size_of::<u64>()).ok_or(io::ErrorKind::InvalidInput)?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses: it takes no memory away from anybody.
    let start = unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, file, 0) }?;
    // SAFETY:
    // - valid for so many bytes, for ever: mapped above for reading and writing, and never unmapped.
    // - aligned: to a page.
    // - initialised: any bits are a value of `AtomicU64`.
    // - other processes may read and write there: all access here is atomic, and the code relies on no value.
    Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), words) })
}
