//! Memory that all ranks of a host can access.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use convoke_comm::SharedBuffer;

use crate::group::{Group, borrow_group};
use crate::pointers::{borrow, check_place, free, put};
use crate::status::{Status, run, run_or};

/// Memory of this rank that the other ranks of its host can access.
#[derive(Debug)]
pub struct Memory {
    /// 8-byte elements, so that the memory is aligned for every type.
    buffer: SharedBuffer<u64>,
    address: *mut c_void,
}

/// Allocates `bytes` zero bytes that all ranks of the host can access. All ranks of the group call it; each
/// gets its own memory, of the size that it passes. An all-reduce of more than 8 KiB copies nothing if all
/// ranks pass the whole memory of one call, or equal pages of it.
///
/// If not all ranks share memory, all get private memory, as `cvk_memory_is_shared` tells. Free the handle
/// with `cvk_memory_free`.
///
/// # Safety
/// `group` is valid or `NULL`; `memory` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_alloc(group: *const Group, bytes: usize, memory: *mut *mut Memory) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        check_place(memory, "memory")?;
        let mut buffer = group.group.alloc::<u64>(bytes.div_ceil(size_of::<u64>()))?;
        let address = buffer.as_mut_ptr().cast();
        // SAFETY: the caller promises it.
        unsafe { put(memory, Box::into_raw(Box::new(Memory { buffer, address })), "memory") }?;
        Ok(Status::Ok)
    })
}

/// Returns the address of the memory; `NULL` for a handle that is `NULL`. It is aligned for every type.
///
/// # Safety
/// `memory` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_memory_address(memory: *const Memory) -> *mut c_void {
    // SAFETY: the caller promises it.
    unsafe { memory.as_ref() }.map_or(ptr::null_mut(), |memory| memory.address)
}

/// Returns whether the other ranks of the host can access the memory.
///
/// # Safety
/// `memory` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_memory_is_shared(memory: *const Memory) -> bool {
    // SAFETY: the caller promises it.
    run_or(false, || unsafe { borrow(memory, "memory") }.is_ok_and(|memory| memory.buffer.is_shared()))
}

/// Frees the memory; `NULL` is allowed. No operation may use it any more.
///
/// # Safety
/// `memory` is `NULL` or valid, and neither it nor its address is used from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_memory_free(memory: *mut Memory) {
    // SAFETY: the caller promises it.
    run_or((), || unsafe { free(memory) });
}
