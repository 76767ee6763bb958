//! Messages that wait to be received.

#![allow(unsafe_code)]

use convoke_comm::CommError;

use crate::call::ANY_RANK;
use crate::group::{Group, borrow_group};
use crate::pointers::{borrow, check_place, invalid, put};
use crate::status::{Status, run};
use crate::work::Message;

/// Waits until a message of rank `source`, or of any rank if it is `CVK_ANY_RANK`, with `tag` is there. It
/// stays until it is received.
///
/// # Safety
/// `group` is valid or `NULL`; `message` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_probe(
    group: *const Group,
    source: i64,
    tag: u32,
    message: *mut Message,
) -> Status {
    let group = borrow_group!(group);
    // SAFETY: the caller promises it.
    unsafe { probe(group, message, || group.group.probe(rank(source)?, tag).map(Some)) }
}

/// As `cvk_probe`, but returns `CVK_STATUS_PENDING` at once if there is no such message.
///
/// # Safety
/// `group` is valid or `NULL`; `message` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_try_probe(
    group: *const Group,
    source: i64,
    tag: u32,
    message: *mut Message,
) -> Status {
    let group = borrow_group!(group);
    // SAFETY: the caller promises it.
    unsafe { probe(group, message, || group.group.try_probe(rank(source)?, tag)) }
}

/// # Safety
/// `message` is writable.
unsafe fn probe(
    group: &Group,
    message: *mut Message,
    ask: impl FnOnce() -> Result<Option<convoke_comm::Status>, CommError>,
) -> Status {
    group.run(|| {
        check_place(message, "message")?;
        let Some(status) = ask()? else { return Ok(Status::Pending) };
        // SAFETY: the caller promises it.
        unsafe { put(message, status.into(), "message") }?;
        Ok(Status::Ok)
    })
}

/// Returns the rank that a message must come from; `None` if any may.
fn rank(source: i64) -> Result<Option<usize>, CommError> {
    match source {
        ANY_RANK => Ok(None),
        _ => usize::try_from(source).map(Some).map_err(|_| invalid(format!("source {source} is no rank"))),
    }
}
