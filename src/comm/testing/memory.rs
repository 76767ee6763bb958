//! How much memory a thread uses, counted by the allocator of this crate's tests.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes in use that this thread has allocated, and the most that it ever were. Threads that free what others
    /// have allocated go below zero.
    static USED: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: isize) {
    // A thread that is ending may free after its counter is gone.
    let _ = USED.try_with(|used| {
        let (now, most) = used.get();
        used.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: as the system's allocator, to which everything goes; counting touches no memory of others and does not
// allocate (the counter is const-initialised and has no destructor).
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as isize - layout.size() as isize);
        // SAFETY: promised by the caller.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// What `work` returns, and the most bytes that it had in use at a time.
pub(crate) fn most_of<R>(work: impl FnOnce() -> R) -> (R, usize) {
    USED.set((0, 0));
    let result = work();
    (result, USED.get().1.unsigned_abs())
}

#[test]
fn what_is_freed_no_longer_counts() {
    let ((), most) = most_of(|| {
        for _ in 0..10 {
            drop(vec![0_u8; 1 << 20]);
        }
    });
    assert!((1 << 20..2 << 20).contains(&most), "{most}");
}
