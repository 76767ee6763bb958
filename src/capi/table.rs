//! All functions in one table, for programs and bindings that do not link the library.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::call::{Call, Callback};
use crate::collectives::{
    cvk_all_gather, cvk_all_reduce, cvk_all_to_all, cvk_barrier, cvk_broadcast, cvk_exclusive_scan,
    cvk_gather, cvk_monitored_barrier, cvk_recv, cvk_reduce, cvk_reduce_scatter, cvk_scan, cvk_scatter,
    cvk_send,
};
use crate::group::{
    Group, cvk_group_abort, cvk_group_clone, cvk_group_destroy, cvk_group_failure_json, cvk_group_free,
    cvk_group_global_rank, cvk_group_local_rank, cvk_group_local_size, cvk_group_name, cvk_group_rank,
    cvk_group_restart_count, cvk_group_shrink, cvk_group_size, cvk_group_split, cvk_group_subgroup,
    cvk_group_timeout_ms,
};
use crate::init::{InitOptions, cvk_init};
use crate::memory::{
    Memory, cvk_adopt, cvk_alloc, cvk_is_shared_memory, cvk_memory_address, cvk_memory_free,
    cvk_memory_is_shared, cvk_memory_limit_use,
};
use crate::probe::{cvk_probe, cvk_try_probe};
use crate::status::{Status, cvk_error_ends_group, cvk_error_json, cvk_error_message};
use crate::store::{Store, cvk_store_free, cvk_store_port, cvk_store_serve};
use crate::work::{
    InterruptCheck, Message, Work, cvk_run, cvk_set_interrupt_check, cvk_start, cvk_work_descriptor,
    cvk_work_free, cvk_work_is_done, cvk_work_on_complete, cvk_work_wait,
};

/// The version of the table. It changes only if a field changes; new fields are added at the end.
pub const API_VERSION: u32 = 1;

/// All functions of this header.
///
/// Later libraries add fields at the end. A program that was compiled with a newer header checks `size`
/// before it uses a field that an older library may lack.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)] // each field is the function of that name
pub struct Api {
    /// Number of bytes of the table in this library.
    pub size: usize,
    /// The version of the table.
    pub version: u32,
    pub error_message: extern "C" fn() -> *const c_char,
    pub error_json: extern "C" fn() -> *const c_char,
    pub error_ends_group: extern "C" fn() -> bool,
    pub init: unsafe extern "C" fn(options: *const InitOptions, world: *mut *mut Group) -> Status,
    pub group_rank: unsafe extern "C" fn(group: *const Group) -> usize,
    pub group_size: unsafe extern "C" fn(group: *const Group) -> usize,
    pub group_local_rank: unsafe extern "C" fn(group: *const Group) -> usize,
    pub group_local_size: unsafe extern "C" fn(group: *const Group) -> usize,
    pub group_restart_count: unsafe extern "C" fn(group: *const Group) -> u32,
    pub group_name: unsafe extern "C" fn(group: *const Group) -> *const c_char,
    pub group_timeout_ms: unsafe extern "C" fn(group: *const Group) -> u64,
    pub group_global_rank: unsafe extern "C" fn(group: *const Group, rank: usize) -> usize,
    pub group_failure_json: unsafe extern "C" fn(group: *const Group) -> *const c_char,
    pub group_clone:
        unsafe extern "C" fn(group: *const Group, timeout_ms: u64, new_group: *mut *mut Group) -> Status,
    pub group_subgroup: unsafe extern "C" fn(
        group: *const Group,
        ranks: *const usize,
        count: usize,
        name: *const c_char,
        new_group: *mut *mut Group,
    ) -> Status,
    pub group_split:
        unsafe extern "C" fn(group: *const Group, color: i64, key: i64, new_group: *mut *mut Group) -> Status,
    pub group_shrink:
        unsafe extern "C" fn(group: *const Group, within_ms: u64, new_group: *mut *mut Group) -> Status,
    pub group_abort: unsafe extern "C" fn(group: *const Group, reason: *const c_char) -> Status,
    pub group_destroy: unsafe extern "C" fn(group: *const Group) -> Status,
    pub group_free: unsafe extern "C" fn(group: *mut Group),
    pub barrier: unsafe extern "C" fn(group: *const Group) -> Status,
    pub broadcast: unsafe extern "C" fn(
        group: *const Group,
        buffer: *mut c_void,
        count: usize,
        dtype: u32,
        root: usize,
    ) -> Status,
    pub all_reduce: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
        reduce_op: u32,
    ) -> Status,
    pub reduce: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
        reduce_op: u32,
        root: usize,
    ) -> Status,
    pub all_gather: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
    ) -> Status,
    pub reduce_scatter: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
        reduce_op: u32,
    ) -> Status,
    pub gather: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
        root: usize,
    ) -> Status,
    pub scatter: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
        root: usize,
    ) -> Status,
    pub all_to_all: unsafe extern "C" fn(
        group: *const Group,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: u32,
    ) -> Status,
    pub scan: unsafe extern "C" fn(
        group: *const Group,
        buffer: *mut c_void,
        count: usize,
        dtype: u32,
        reduce_op: u32,
    ) -> Status,
    pub exclusive_scan: unsafe extern "C" fn(
        group: *const Group,
        buffer: *mut c_void,
        count: usize,
        dtype: u32,
        reduce_op: u32,
    ) -> Status,
    pub send: unsafe extern "C" fn(
        group: *const Group,
        buffer: *const c_void,
        count: usize,
        dtype: u32,
        to: usize,
        tag: u32,
    ) -> Status,
    pub recv: unsafe extern "C" fn(
        group: *const Group,
        buffer: *mut c_void,
        count: usize,
        dtype: u32,
        from: i64,
        tag: u32,
        message: *mut Message,
    ) -> Status,
    pub monitored_barrier: unsafe extern "C" fn(group: *const Group, timeout_ms: u64) -> Status,
    pub run: unsafe extern "C" fn(
        group: *const Group,
        calls: *const Call,
        count: usize,
        messages: *mut Message,
    ) -> Status,
    pub start: unsafe extern "C" fn(group: *const Group, call: *const Call, work: *mut *mut Work) -> Status,
    pub work_wait: unsafe extern "C" fn(work: *const Work, timeout_ms: u64, message: *mut Message) -> Status,
    pub work_is_done: unsafe extern "C" fn(work: *const Work) -> bool,
    pub work_descriptor: unsafe extern "C" fn(work: *const Work, descriptor: *mut c_int) -> Status,
    pub work_on_complete:
        unsafe extern "C" fn(work: *const Work, function: Callback, context: *mut c_void) -> Status,
    pub work_free: unsafe extern "C" fn(work: *mut Work),
    pub probe:
        unsafe extern "C" fn(group: *const Group, source: i64, tag: u32, message: *mut Message) -> Status,
    pub try_probe:
        unsafe extern "C" fn(group: *const Group, source: i64, tag: u32, message: *mut Message) -> Status,
    pub alloc: unsafe extern "C" fn(group: *const Group, bytes: usize, memory: *mut *mut Memory) -> Status,
    pub memory_address: unsafe extern "C" fn(memory: *const Memory) -> *mut c_void,
    pub memory_is_shared: unsafe extern "C" fn(memory: *const Memory) -> bool,
    pub memory_free: unsafe extern "C" fn(memory: *mut Memory),
    pub store_serve: unsafe extern "C" fn(host: *const c_char, port: u16, store: *mut *mut Store) -> Status,
    pub store_port: unsafe extern "C" fn(store: *const Store) -> u16,
    pub store_free: unsafe extern "C" fn(store: *mut Store),
    pub adopt: unsafe extern "C" fn(
        group: *const Group,
        descriptor: c_int,
        offset: u64,
        address: *mut c_void,
        bytes: usize,
        memory: *mut *mut Memory,
    ) -> Status,
    pub is_shared_memory:
        unsafe extern "C" fn(group: *const Group, address: *const c_void, bytes: usize) -> bool,
    pub memory_limit_use: unsafe extern "C" fn(memory: *mut Memory, bytes: usize) -> Status,
    pub set_interrupt_check: unsafe extern "C" fn(check: InterruptCheck),
}

static API: Api = Api {
    size: size_of::<Api>(),
    version: API_VERSION,
    error_message: cvk_error_message,
    error_json: cvk_error_json,
    error_ends_group: cvk_error_ends_group,
    init: cvk_init,
    group_rank: cvk_group_rank,
    group_size: cvk_group_size,
    group_local_rank: cvk_group_local_rank,
    group_local_size: cvk_group_local_size,
    group_restart_count: cvk_group_restart_count,
    group_name: cvk_group_name,
    group_timeout_ms: cvk_group_timeout_ms,
    group_global_rank: cvk_group_global_rank,
    group_failure_json: cvk_group_failure_json,
    group_clone: cvk_group_clone,
    group_subgroup: cvk_group_subgroup,
    group_split: cvk_group_split,
    group_shrink: cvk_group_shrink,
    group_abort: cvk_group_abort,
    group_destroy: cvk_group_destroy,
    group_free: cvk_group_free,
    barrier: cvk_barrier,
    broadcast: cvk_broadcast,
    all_reduce: cvk_all_reduce,
    reduce: cvk_reduce,
    all_gather: cvk_all_gather,
    reduce_scatter: cvk_reduce_scatter,
    gather: cvk_gather,
    scatter: cvk_scatter,
    all_to_all: cvk_all_to_all,
    scan: cvk_scan,
    exclusive_scan: cvk_exclusive_scan,
    send: cvk_send,
    recv: cvk_recv,
    monitored_barrier: cvk_monitored_barrier,
    run: cvk_run,
    start: cvk_start,
    work_wait: cvk_work_wait,
    work_is_done: cvk_work_is_done,
    work_descriptor: cvk_work_descriptor,
    work_on_complete: cvk_work_on_complete,
    work_free: cvk_work_free,
    probe: cvk_probe,
    try_probe: cvk_try_probe,
    alloc: cvk_alloc,
    memory_address: cvk_memory_address,
    memory_is_shared: cvk_memory_is_shared,
    memory_free: cvk_memory_free,
    store_serve: cvk_store_serve,
    store_port: cvk_store_port,
    store_free: cvk_store_free,
    adopt: cvk_adopt,
    is_shared_memory: cvk_is_shared_memory,
    memory_limit_use: cvk_memory_limit_use,
    set_interrupt_check: cvk_set_interrupt_check,
};

/// Returns the table of functions.
#[must_use]
pub fn api() -> &'static Api {
    &API
}

/// Returns the table of functions, which is valid for ever; `NULL` if this library does not have that
/// version. Pass `CVK_API_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn cvk_api(version: u32) -> *const Api {
    if version == API_VERSION { &raw const API } else { ptr::null() }
}
