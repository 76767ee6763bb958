//! Values behind the pointers that a C program passes.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use convoke_comm::CommError;

/// Borrows the value behind a handle named `what`.
///
/// # Safety
/// The handle is `NULL`, or a function of this library made it, and it is not freed while the call runs.
pub(crate) unsafe fn borrow<'a, T>(handle: *const T, what: &str) -> Result<&'a T, CommError> {
    // SAFETY: the caller promises it.
    unsafe { handle.as_ref() }.ok_or_else(|| missing(what))
}

/// Writes a result to where the program wants it.
///
/// # Safety
/// `to` is `NULL`, or points to memory for a `T`, which nothing else uses.
pub(crate) unsafe fn put<T>(to: *mut T, value: T, what: &str) -> Result<(), CommError> {
    if to.is_null() {
        return Err(missing(what));
    }
    // SAFETY: the caller promises it.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a handle to `value`, which [`free`] frees.
///
/// # Safety
/// As of [`put`].
pub(crate) unsafe fn put_handle<T>(to: *mut *mut T, value: T, what: &str) -> Result<(), CommError> {
    check_place(to, what)?;
    // SAFETY: the caller promises it.
    unsafe { put(to, Box::into_raw(Box::new(value)), what) }
}

/// Returns an error if the program gave no place for a result. Call it before an operation that makes one.
pub(crate) fn check_place<T>(to: *mut T, what: &str) -> Result<(), CommError> {
    if to.is_null() { Err(missing(what)) } else { Ok(()) }
}

/// Borrows a text; `None` if it is `NULL`.
///
/// # Safety
/// `text` is `NULL` or ends with a byte 0, and is not changed or freed while the call runs.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, CommError> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller promises it.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|error| invalid(format!("{what} is not UTF-8: {error}")))
}

/// Borrows a list of numbers.
///
/// # Safety
/// `at` is `NULL`, or points to `len` numbers that are not changed or freed while the call runs.
pub(crate) unsafe fn list<'a>(at: *const usize, len: usize, what: &str) -> Result<&'a [usize], CommError> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(missing(what));
    }
    // SAFETY: the caller promises it.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// Frees a handle, if it is not `NULL`.
///
/// # Safety
/// The handle is `NULL`, or a function of this library made it with `Box`, and nothing uses it from now on.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller promises it.
        drop(unsafe { Box::from_raw(handle) });
    }
}

fn missing(what: &str) -> CommError {
    invalid(format!("{what} is NULL"))
}

pub(crate) fn invalid(what: String) -> CommError {
    CommError::InvalidArgument(what)
}
