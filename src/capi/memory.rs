//! Memory that all ranks of a host can access.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use convoke_comm::SharedBuffer;
use convoke_comm::raw::Adopted;

use crate::group::{Group, borrow_group};
use crate::pointers::{borrow, check_place, free, invalid, put_handle};
use crate::status::{Status, run, run_or};

/// Memory of this rank that the other ranks of its host can access.
#[derive(Debug)]
pub struct Memory {
    origin: Origin,
    address: *mut c_void,
}

#[derive(Debug)]
enum Origin {
    /// 8-byte elements, so that the memory is aligned for every type.
    Allocated(SharedBuffer<u64>),
    Adopted(Adopted),
}

/// Allocates `bytes` zero bytes that all ranks of the host can access. All ranks of the group call it; each
/// gets its own memory, of the size that it passes. An all-reduce of more than 16 KiB copies nothing if all
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
        buffer.limit_use(bytes);
        let address = buffer.as_mut_ptr().cast();
        let made = Memory { origin: Origin::Allocated(buffer), address };
        // SAFETY: the caller promises it.
        unsafe { put_handle(memory, made, "memory") }?;
        Ok(Status::Ok)
    })
}

/// Lets the other ranks of the host access memory that the program has already. The program has mapped `bytes`
/// bytes of the file `descriptor`, from byte `offset` on, at `address`. Then an all-reduce of this memory copies
/// nothing, as with memory of `cvk_alloc`. All ranks of the group call it, each with its own memory.
///
/// `address` and `offset` are multiples of the page size. If a rank cannot share its memory, it stays private
/// on all ranks, as `cvk_memory_is_shared` tells. `cvk_memory_free` ends the sharing; the program removes its
/// mapping after that.
///
/// After a failed operation on the memory, its pages are private and zero: the library replaces the mapping.
///
/// # Safety
/// `group` is valid or `NULL`; `memory` is writable. The following holds until the handle is freed and all
/// operations on the memory are done. The mapping stays: shared, readable and writable, with all of its last
/// page. No process makes the file shorter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_adopt(
    group: *const Group,
    descriptor: c_int,
    offset: u64,
    address: *mut c_void,
    bytes: usize,
    memory: *mut *mut Memory,
) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        check_place(memory, "memory")?;
        let start = NonNull::new(address.cast()).ok_or_else(|| invalid("address is NULL".to_owned()))?;
        if descriptor < 0 {
            return Err(invalid(format!("descriptor {descriptor} is no file descriptor")));
        }
        // SAFETY: the caller promises it.
        let adopted = unsafe { group.group.adopt(BorrowedFd::borrow_raw(descriptor), offset, start, bytes) }?;
        let made = Memory { origin: Origin::Adopted(adopted), address };
        // SAFETY: the caller promises it.
        unsafe { put_handle(memory, made, "memory") }?;
        Ok(Status::Ok)
    })
}

/// Declares that the program uses only the first `bytes` bytes of memory of `cvk_alloc`: an all-reduce of
/// exactly these copies nothing. If it fails, all bytes of their last page are unspecified. No operation may
/// use the memory meanwhile. Other memory is left as it is.
///
/// # Safety
/// `memory` is valid or `NULL`, and no other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_memory_limit_use(memory: *mut Memory, bytes: usize) -> Status {
    run(|| {
        // SAFETY: the caller promises it.
        let memory = unsafe { memory.as_mut() }.ok_or_else(|| invalid("memory is NULL".to_owned()))?;
        if let Origin::Allocated(buffer) = &mut memory.origin {
            buffer.limit_use(bytes);
        }
        Ok(Status::Ok)
    })
}

/// Returns whether an all-reduce of the `bytes` bytes at `address` may copy nothing: they are memory of
/// `cvk_alloc` or `cvk_adopt`, and begin and end with a page of it.
///
/// # Safety
/// `group` is valid or `NULL`. `address` may be any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_is_shared_memory(
    group: *const Group,
    address: *const c_void,
    bytes: usize,
) -> bool {
    // SAFETY: the caller promises it.
    let Ok(group) = (unsafe { borrow(group, "group") }) else { return false };
    run_or(false, || group.group.is_shared_memory(address.cast(), bytes))
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
    let Ok(memory) = (unsafe { borrow(memory, "memory") }) else { return false };
    run_or(false, || match &memory.origin {
        Origin::Allocated(buffer) => buffer.is_shared(),
        Origin::Adopted(adopted) => adopted.is_shared(),
    })
}

/// Frees memory of `cvk_alloc`, and ends the sharing of memory of `cvk_adopt`; `NULL` is allowed. No operation
/// may use it any more.
///
/// # Safety
/// `memory` is `NULL` or valid, and neither it nor its address is used from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_memory_free(memory: *mut Memory) {
    // SAFETY: the caller promises it.
    run_or((), || unsafe { free(memory) });
}
