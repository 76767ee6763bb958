//! Ctrl-C while a call waits without the interpreter's lock.

#![allow(unsafe_code)]

use nix::unistd::{getpid, gettid};
use pyo3::prelude::*;

/// Returns whether the calling thread is Python's main thread and a SIGINT came. Then Python raises its
/// `KeyboardInterrupt` after the call, which returns with an error that says for which rank it waited.
pub(crate) fn is_interrupted() -> bool {
    // Only the main thread handles signals. In a process that Python started, it is the first thread.
    if gettid() != getpid() {
        return false;
    }
    Python::attach(|_| {
        // SAFETY: this thread has the interpreter's lock.
        let is_interrupted = unsafe { pyo3::ffi::PyOS_InterruptOccurred() } != 0;
        if is_interrupted {
            // SAFETY: as above. The question has taken the signal away.
            unsafe { pyo3::ffi::PyErr_SetInterrupt() };
        }
        is_interrupted
    })
}
