//! Groups: their ranks, their life, and the groups made from them.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use convoke_comm::{CommError, World};

use crate::pointers::{borrow, check_place, free, invalid, list, put, put_handle, text};
use crate::status::{Failure, Status, run, run_or};

/// A handle of a process group. Any number of threads may use it at a time.
#[derive(Debug)]
pub struct Group {
    pub(crate) group: convoke_comm::Group,
    name: CString,
    local: (usize, usize),
    restart_count: u32,
    pub(crate) end: GroupEnd,
}

/// The error that ended a group, once a call has returned it. All handles of the group share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupEnd(Arc<Mutex<Option<Arc<Failure>>>>);

impl GroupEnd {
    fn get(&self) -> MutexGuard<'_, Option<Arc<Failure>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an error the last one of this thread, and keeps it if it ended the group and is the first to.
    pub(crate) fn fail(&self, failure: &Arc<Failure>) -> Status {
        if failure.ends_group {
            self.get().get_or_insert_with(|| Arc::clone(failure));
        }
        Arc::clone(failure).set()
    }
}

impl Group {
    /// Makes a handle of a group, for bindings that make groups by the Rust interface.
    #[must_use]
    pub fn new(group: convoke_comm::Group) -> Self {
        let local = group.local_rank_and_size();
        Self::with_local(group, local, 0)
    }

    pub(crate) fn of_world(world: &World) -> Self {
        Self::with_local(world.group(), (world.local_rank(), world.local_world_size()), world.restart_count())
    }

    fn with_local(group: convoke_comm::Group, local: (usize, usize), restart_count: u32) -> Self {
        let name = CString::new(group.name().replace('\0', "?")).expect("it has no byte 0");
        Self { group, name, local, restart_count, end: GroupEnd::default() }
    }

    /// Runs the body of a function on a group. An error that ends the group is kept.
    pub(crate) fn run(&self, body: impl FnOnce() -> Result<Status, CommError>) -> Status {
        run(|| body().or_else(|error| Ok(self.end.fail(&Arc::new(Failure::new(&error))))))
    }

    /// Makes another handle of this group, as `handle`.
    fn another(&self, handle: convoke_comm::Group) -> Self {
        Self {
            group: handle,
            name: self.name.clone(),
            end: self.end.clone(),
            local: self.local,
            restart_count: self.restart_count,
        }
    }
}

/// Returns the handle of a group with a time limit; the group's own if `timeout_ms` is 0.
pub(crate) fn limited(group: &convoke_comm::Group, timeout_ms: u64) -> convoke_comm::Group {
    match timeout_ms {
        0 => group.clone(),
        ms => group.with_timeout(Duration::from_millis(ms)),
    }
}

/// Borrows a group, or returns with an error.
macro_rules! borrow_group {
    ($group:ident) => {
        // SAFETY: the caller promises that the handle is `NULL` or valid.
        match unsafe { borrow($group, "group") } {
            Ok(group) => group,
            Err(error) => return run(|| Err(error)),
        }
    };
}

pub(crate) use borrow_group;

/// Reads a group; returns `otherwise` if the handle is `NULL`.
///
/// # Safety
/// As [`borrow`].
unsafe fn read<R>(group: *const Group, otherwise: R, read: impl FnOnce(&Group) -> R) -> R
where
    R: Copy,
{
    // SAFETY: the caller promises it.
    match unsafe { group.as_ref() } {
        Some(group) => run_or(otherwise, || read(group)),
        None => otherwise,
    }
}

/// Writes a new group, or `NULL` if this rank is not a member, to `to`.
///
/// # Safety
/// `to` is writable.
unsafe fn put_group(to: *mut *mut Group, group: Option<convoke_comm::Group>) -> Result<Status, CommError> {
    let handle = group.map_or(ptr::null_mut(), |group| Box::into_raw(Box::new(Group::new(group))));
    // SAFETY: the caller promises it.
    unsafe { put(to, handle, "new_group") }?;
    Ok(Status::Ok)
}

/// Returns this rank in the group.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_rank(group: *const Group) -> usize {
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, |group| group.group.rank()) }
}

/// Returns the number of ranks of the group.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_size(group: *const Group) -> usize {
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, |group| group.group.size()) }
}

/// Returns the index of this rank among the ranks of the group on this host; for the world, as the launcher
/// counts them.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_local_rank(group: *const Group) -> usize {
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, |group| group.local.0) }
}

/// Returns the number of ranks of the group on this host.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_local_size(group: *const Group) -> usize {
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, |group| group.local.1) }
}

/// Returns the number of times that the launcher of this node has restarted its workers; 0 for groups other
/// than the world.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_restart_count(group: *const Group) -> u32 {
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, |group| group.restart_count) }
}

/// Returns the name of the group. The text is valid as long as the handle.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_name(group: *const Group) -> *const c_char {
    // SAFETY: the caller promises it.
    unsafe { read(group, ptr::null(), |group| group.name.as_ptr()) }
}

/// Returns the time limit of calls on this handle, in milliseconds.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_timeout_ms(group: *const Group) -> u64 {
    let of = |group: &Group| u64::try_from(group.group.timeout().as_millis()).unwrap_or(u64::MAX);
    // SAFETY: the caller promises it.
    unsafe { read(group, 0, of) }
}

/// Returns the rank in the world of rank `rank` of the group; `SIZE_MAX` if there is no such rank.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_global_rank(group: *const Group, rank: usize) -> usize {
    // SAFETY: the caller promises it.
    unsafe { read(group, usize::MAX, |group| group.group.global_rank(rank).unwrap_or(usize::MAX)) }
}

/// Returns the error that ended the group as a JSON object, as `cvk_error_json`; `NULL` if no call of this
/// rank has returned it. The text is valid as long as a handle of the group exists.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_failure_json(group: *const Group) -> *const c_char {
    let of = |group: &Group| group.end.get().as_ref().map_or(ptr::null(), |failure| failure.json());
    // SAFETY: the caller promises it.
    unsafe { read(group, ptr::null(), of) }
}

/// Makes another handle of the group, with a time limit of calls in milliseconds; 0 keeps the time limit.
///
/// # Safety
/// `group` is valid or `NULL`; `new_group` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_clone(
    group: *const Group,
    timeout_ms: u64,
    new_group: *mut *mut Group,
) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        let clone = group.another(limited(&group.group, timeout_ms));
        check_place(new_group, "new_group")?;
        // SAFETY: the caller promises it.
        unsafe { put_handle(new_group, clone, "new_group") }?;
        Ok(Status::Ok)
    })
}

/// Makes a group of these ranks of `group`, in this order. All ranks of `group` call it with the same list.
/// `new_group` becomes `NULL` on ranks that are not in the list. `name` is added to the name of the group,
/// for errors; it may be `NULL`.
///
/// # Safety
/// `group` is valid or `NULL`; `ranks` points to `count` ranks; `name` is `NULL` or ends with a byte 0;
/// `new_group` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_subgroup(
    group: *const Group,
    ranks: *const usize,
    count: usize,
    name: *const c_char,
    new_group: *mut *mut Group,
) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        check_place(new_group, "new_group")?;
        // SAFETY: the caller promises it.
        let (ranks, name) = unsafe { (list(ranks, count, "ranks")?, text(name, "name")?) };
        let parent = name.map(|name| group.group.with_subgroup_name(name));
        let made = parent.as_ref().unwrap_or(&group.group).subgroup(ranks)?;
        // SAFETY: the caller promises it.
        unsafe { put_group(new_group, made) }
    })
}

/// Partitions the group, like `MPI_Comm_split`: ranks with equal `color` form a group, ordered by `key`, then
/// by rank. All ranks call it. A negative color makes no group: `new_group` becomes `NULL`.
///
/// # Safety
/// `group` is valid or `NULL`; `new_group` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_split(
    group: *const Group,
    color: i64,
    key: i64,
    new_group: *mut *mut Group,
) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        check_place(new_group, "new_group")?;
        let color =
            match color {
                ..0 => None,
                _ => Some(u32::try_from(color).map_err(|_| {
                    invalid(format!("color {color} is too large: colors are 0 to {}", u32::MAX))
                })?),
            };
        let made = group.group.split(color, key)?;
        // SAFETY: the caller promises it.
        unsafe { put_group(new_group, made) }
    })
}

/// Makes a group of the ranks that survived the failure of `group`. All survivors call it; it excludes ranks
/// that do not call it within `within_ms` milliseconds of the first call. Like `MPI_Comm_shrink` of ULFM.
///
/// # Safety
/// `group` is valid or `NULL`; `new_group` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_shrink(
    group: *const Group,
    within_ms: u64,
    new_group: *mut *mut Group,
) -> Status {
    let group = borrow_group!(group);
    run(|| {
        check_place(new_group, "new_group")?;
        let made = group.group.shrink(Duration::from_millis(within_ms))?;
        // SAFETY: the caller promises it.
        unsafe { put_group(new_group, Some(made)) }
    })
}

/// Ends the group on all ranks: every pending or later call fails with `CVK_STATUS_ABORTED` and `reason`,
/// which may be `NULL`. Any thread may call it, also while calls are in progress.
///
/// # Safety
/// `group` is valid or `NULL`; `reason` is `NULL` or ends with a byte 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_abort(group: *const Group, reason: *const c_char) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        // SAFETY: the caller promises it.
        let reason = unsafe { text(reason, "reason") }?;
        group.group.abort(reason.unwrap_or("cvk_group_abort"));
        Ok(Status::Ok)
    })
}

/// Leaves the group now, after all operations of this rank are done, although handles exist. Later calls of
/// this rank on the group fail with `CVK_STATUS_DESTROYED`.
///
/// # Safety
/// `group` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_destroy(group: *const Group) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        group.group.destroy();
        Ok(Status::Ok)
    })
}

/// Frees a handle; `NULL` is allowed. With the last handle this rank leaves the group, after the operations
/// that it began are done.
///
/// # Safety
/// `group` is `NULL` or valid, and not used from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_group_free(group: *mut Group) {
    // SAFETY: the caller promises it.
    run_or((), || unsafe { free(group) });
}
