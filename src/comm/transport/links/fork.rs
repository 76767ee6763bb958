//! Closes the sockets of this process in its forked children.
//!
//! If a forked child kept copies of the sockets, peers would not notice the death of this process: the kernel
//! ends a connection only when all copies are closed. Close-on-exec closes the copies in children that
//! execute another program. This module closes them in children that only fork, such as data-loading workers.
//! A fork handler closes the registered descriptors in the child. The objects that own these descriptors are
//! never dropped in the child (groups check that the process is the same), so no descriptor is closed twice.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};

use nix::libc;

/// Most sockets that can be registered. Further sockets work, but forked children keep copies of them.
const SLOTS: usize = 1 << 14;
/// The registered descriptors, each plus one; 0 marks a free slot. Atomics, since a fork handler may not lock
/// anything.
static OPEN: [AtomicI32; SLOTS] = [const { AtomicI32::new(0) }; SLOTS];
/// The slot at which the search for a free slot begins.
static HINT: AtomicUsize = AtomicUsize::new(0);

/// The number of forks between the first process of this program and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Returns the forks between the first process of this program and this process. It costs one atomic load.
pub(crate) fn fork_count() -> u32 {
    install();
    FORKS.load(Ordering::Relaxed)
}

/// The registration of a descriptor, which forked children then close. Drop it before the descriptor is
/// closed. Otherwise a fork between the two would close, in the child, a newer descriptor that has got the
/// same number.
#[derive(Debug)]
pub(crate) struct CloseOnFork {
    slot: Option<usize>,
}

impl CloseOnFork {
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Self {
        install();
        let fd: RawFd = fd.as_raw_fd();
        let start = HINT.fetch_add(1, Ordering::Relaxed);
        let slot = (0..SLOTS).map(|offset| (start + offset) % SLOTS).find(|&slot| {
            OPEN[slot].compare_exchange(0, fd + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        });
        Self { slot }
    }
}

impl Drop for CloseOnFork {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            OPEN[slot].store(0, Ordering::SeqCst);
        }
    }
}

#[allow(unsafe_code)]
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: `close_all` lives as long as the process and only does what a handler in the child of a
        // multi-threaded process may do: atomics and close(2). If there is no memory for the handler,
        // children keep copies, as without the handler.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(close_all)) };
    });
}

#[allow(unsafe_code)]
unsafe extern "C" fn close_all() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for slot in &OPEN {
        let fd = slot.swap(0, Ordering::Relaxed) - 1;
        if fd >= 0 {
            // SAFETY: `fd` is the child's copy of a descriptor that was registered when the process forked.
            // The object that owns it is never dropped in the child (module docs), so nothing else closes it.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn slots_are_reused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        for _ in 0..3 * SLOTS {
            assert!(CloseOnFork::new(file.as_fd()).slot.is_some());
        }
    }
}
