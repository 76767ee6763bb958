//! Blocking collectives and messages, one function for each.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::time::Duration;

use crate::call::{Call, Kind};
use crate::group::{Group, borrow_group};
use crate::pointers::borrow;
use crate::status::{Status, run};
use crate::work::{Message, cvk_run};

impl Call {
    /// A call without buffers and arguments.
    fn new(kind: Kind) -> Self {
        Self::of_kind_number(kind as u32)
    }

    /// A call without buffers and arguments, of the kind with this number.
    #[must_use]
    pub fn of_kind_number(kind: u32) -> Self {
        Self {
            size: size_of::<Self>(),
            kind,
            dtype: 0,
            reduce_op: 0,
            tag: 0,
            peer: 0,
            send: ptr::null(),
            recv: ptr::null_mut(),
            send_count: 0,
            recv_count: 0,
            send_counts: ptr::null(),
            recv_counts: ptr::null(),
            factor: ptr::null(),
            reduce: None,
            reduce_context: ptr::null_mut(),
            timeout_ms: 0,
            on_complete: None,
            on_complete_context: ptr::null_mut(),
        }
    }

    fn send(self, send: *const c_void, send_count: usize) -> Self {
        Self { send, send_count, ..self }
    }

    fn recv(self, recv: *mut c_void, recv_count: usize) -> Self {
        Self { recv, recv_count, ..self }
    }

    /// # Safety
    /// As [`cvk_run`].
    unsafe fn run(&self, group: *const Group) -> Status {
        // SAFETY: the caller promises it.
        unsafe { cvk_run(group, self, 1, ptr::null_mut()) }
    }
}

/// Returns a call whose root, destination or source is rank `rank`.
fn rooted(kind: Kind, rank: usize) -> Call {
    // A number that is no rank of any group stays one.
    Call { peer: i64::try_from(rank).unwrap_or(i64::MAX), ..Call::new(kind) }
}

/// Returns the number of elements of all ranks together; too large a number stays too large for any memory.
fn times(count: usize, group: *const Group) -> usize {
    // SAFETY: each function of this module requires a valid handle or `NULL`.
    let size = unsafe { crate::group::cvk_group_size(group) };
    count.saturating_mul(size)
}

/// Waits until all ranks have called it.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_barrier(group: *const Group) -> Status {
    let call = Call::new(Kind::Barrier);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Copies `count` elements of rank `root` to all ranks.
///
/// # Safety
/// `group` is valid or `NULL`. `buffer` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_broadcast(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
) -> Status {
    let call = Call { dtype, ..rooted(Kind::Broadcast, root) }.recv(buffer, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Reduces `count` elements of each rank; all ranks get the result in `recv`. `send` may be `NULL`: then it
/// reduces `recv` in place.
///
/// # Safety
/// `group` is valid or `NULL`. `recv`, and `send` unless it is `NULL`, have `count` elements and do not
/// overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_all_reduce(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
    reduce_op: u32,
) -> Status {
    let call = Call { dtype, reduce_op, ..Call::new(Kind::AllReduce) }.send(send, count).recv(recv, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Reduces `count` elements of each rank; rank `root` gets the result in `recv`. Other ranks may pass `NULL`
/// as `recv`. If `send` is `NULL`, it reduces `recv` in place, which is scratch memory on the other ranks.
///
/// # Safety
/// `group` is valid or `NULL`. `send` and `recv`, unless they are `NULL`, have `count` elements and do not
/// overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_reduce(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
    reduce_op: u32,
    root: usize,
) -> Status {
    let call = Call { dtype, reduce_op, ..rooted(Kind::Reduce, root) }.send(send, count).recv(recv, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Concatenates `count` elements of each rank, in the order of ranks, in `recv` of all ranks. If `send` is
/// `NULL`, this rank's elements are in their place of `recv` already.
///
/// # Safety
/// `group` is valid or `NULL`. `send`, unless it is `NULL`, has `count` elements, `recv` as many times that
/// as there are ranks. They do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_all_gather(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
) -> Status {
    let call = Call { dtype, ..Call::new(Kind::AllGather) }.send(send, count).recv(recv, times(count, group));
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Reduces blocks of `count` elements, one for each rank; each rank gets its block in `recv`. If `send` is
/// `NULL`, all blocks are in `recv`, and the result replaces this rank's block.
///
/// # Safety
/// `group` is valid or `NULL`. `send` has as many times `count` elements as there are ranks, `recv` has
/// `count`, or that many if `send` is `NULL`. They do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_reduce_scatter(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
    reduce_op: u32,
) -> Status {
    let call = Call { dtype, reduce_op, ..Call::new(Kind::ReduceScatter) }
        .send(send, times(count, group))
        .recv(recv, if send.is_null() { times(count, group) } else { count });
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Concatenates `count` elements of each rank in `recv` of rank `root`. Other ranks may pass `NULL` as
/// `recv`.
///
/// # Safety
/// `group` is valid or `NULL`. `send` has `count` elements, `recv` of the root as many times that as there
/// are ranks. They do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_gather(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
) -> Status {
    let call = Call { dtype, ..rooted(Kind::Gather, root) }
        .send(send, count)
        .recv(recv, if recv.is_null() { 0 } else { times(count, group) });
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Gives each rank its block of `count` elements of `send` of rank `root`. Other ranks may pass `NULL` as
/// `send`.
///
/// # Safety
/// `group` is valid or `NULL`. `send` of the root has as many times `count` elements as there are ranks,
/// `recv` has `count`. They do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_scatter(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
) -> Status {
    let call = Call { dtype, ..rooted(Kind::Scatter, root) }
        .send(send, if send.is_null() { 0 } else { times(count, group) })
        .recv(recv, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Gives each rank its block of `count` elements of `send` of each rank. If `send` is `NULL`, the blocks in
/// `recv` are exchanged in place.
///
/// # Safety
/// `group` is valid or `NULL`. `recv`, and `send` unless it is `NULL`, have as many times `count` elements as
/// there are ranks. They do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_all_to_all(
    group: *const Group,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: u32,
) -> Status {
    let call = Call { dtype, ..Call::new(Kind::AllToAll) }
        .send(send, times(count, group))
        .recv(recv, times(count, group));
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Replaces the elements by the reduction of the elements of ranks 0 to this one.
///
/// # Safety
/// `group` is valid or `NULL`. `buffer` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_scan(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u32,
    reduce_op: u32,
) -> Status {
    let call = Call { dtype, reduce_op, ..Call::new(Kind::Scan) }.recv(buffer, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Replaces the elements by the reduction of the elements of the ranks before this one. Those of rank 0 are
/// not changed.
///
/// # Safety
/// `group` is valid or `NULL`. `buffer` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_exclusive_scan(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u32,
    reduce_op: u32,
) -> Status {
    let call = Call { dtype, reduce_op, ..Call::new(Kind::ExclusiveScan) }.recv(buffer, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Sends `count` elements to rank `to`. It returns when the program may change them.
///
/// # Safety
/// `group` is valid or `NULL`. `buffer` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_send(
    group: *const Group,
    buffer: *const c_void,
    count: usize,
    dtype: u32,
    to: usize,
    tag: u32,
) -> Status {
    let call = Call { dtype, tag, ..rooted(Kind::Send, to) }.send(buffer, count);
    // SAFETY: the caller promises it.
    unsafe { call.run(group) }
}

/// Receives a message of rank `from`, or of any rank if it is `CVK_ANY_RANK`, with `tag`. `count` is the room
/// in `buffer`; a shorter message is no error. `message` is `NULL`, or gets the source and length of the
/// message.
///
/// # Safety
/// `group` is valid or `NULL`. `buffer` has `count` elements; `message` is `NULL` or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_recv(
    group: *const Group,
    buffer: *mut c_void,
    count: usize,
    dtype: u32,
    from: i64,
    tag: u32,
    message: *mut Message,
) -> Status {
    let call = Call { dtype, tag, peer: from, ..Call::new(Kind::Recv) }.recv(buffer, count);
    // SAFETY: the caller promises it.
    unsafe { cvk_run(group, &call, 1, message) }
}

/// As `cvk_barrier`, but names the ranks that do not come: after `timeout_ms` milliseconds every rank gets
/// `CVK_STATUS_TIMEOUT` with the missing ranks.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_monitored_barrier(group: *const Group, timeout_ms: u64) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        group.group.monitored_barrier(Duration::from_millis(timeout_ms))?;
        Ok(Status::Ok)
    })
}
