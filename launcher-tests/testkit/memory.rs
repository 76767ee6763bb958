//! Memory use of a thread, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes in use that this thread has allocated, and their maximum. The count falls below zero on a
    /// thread that frees memory of other threads.
    static BYTES_IN_USE: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system allocator with counting. A test binary installs it with `#[global_allocator]`.
pub struct CountingAllocator;

fn count(bytes: isize) {
    // A thread that is ending may free memory after its counter is gone.
    let _ = BYTES_IN_USE.try_with(|used| {
        let (now, most) = used.get();
        used.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: the system allocator keeps the contract, and every call goes to it. Counting touches no other
// memory and does not allocate, because the counter is const-initialised and has no destructor.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as isize - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// Returns the result of `work`, and the maximum number of bytes that it had in use.
pub fn peak_bytes<R>(work: impl FnOnce() -> R) -> (R, usize) {
    BYTES_IN_USE.set((0, 0));
    let result = work();
    (result, BYTES_IN_USE.get().1.unsigned_abs())
}

/// Returns true if [`CountingAllocator`] is the allocator of this program.
#[must_use]
pub fn counts_memory() -> bool {
    peak_bytes(|| drop(std::hint::black_box(vec![0_u8; 64]))).1 >= 64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn freed_memory_no_longer_counts() {
        let ((), most) = peak_bytes(|| {
            for _ in 0..10 {
                drop(vec![0_u8; 1 << 20]);
            }
        });
        assert!((1 << 20..2 << 20).contains(&most), "{most}");
    }
}
