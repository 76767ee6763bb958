//! Full memory fences.

#![allow(unsafe_code)]

/// `fence(SeqCst)`; on x86-64 a locked instruction, which costs a quarter of the `mfence` that compilers
/// emit.
#[inline(always)]
pub(crate) fn full_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
    // SAFETY: the instruction changes nothing: it is an `or` with 0 on this thread's stack. The compiler
    // assumes that it may access any memory, so it moves no access across it.
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(any(target_arch = "x86_64", loom)))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Shows that this thread has just made an atomic read-modify-write operation (`SeqCst`), or a fence. On x86-64 each
/// such operation is a full fence, so the thread needs no other.
#[derive(Debug)]
#[must_use]
pub(crate) struct AtomicUpdate(());

impl AtomicUpdate {
    /// The caller has just made such an operation.
    #[inline(always)]
    pub(crate) fn made() -> Self {
        Self(())
    }

    /// Makes the update a full fence between earlier writes of this thread and its later reads.
    #[inline(always)]
    pub(crate) fn complete(self) {
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        full_fence();
        // The compiler moves no access across it either.
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }
}
