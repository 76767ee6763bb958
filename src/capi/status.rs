//! The result of a call, and the error of the last failed call of each thread.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use convoke_comm::{CommError, LossReason};
use serde_json::{Map, Value, json};

/// The result of a function. Every value but `CVK_STATUS_OK` and `CVK_STATUS_PENDING` is an error, which
/// `cvk_error_message` and `cvk_error_json` describe.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// The operation is not done yet.
    Pending = 1,
    /// An argument is invalid. Nothing was sent, and the group continues.
    InvalidArgument = 2,
    /// A rank was lost. The group has ended on all ranks.
    PeerLost = 3,
    /// A call did not end within its time limit. The group has ended on all ranks.
    Timeout = 4,
    /// Two ranks made different calls. The group has ended on all ranks.
    Mismatch = 5,
    /// A rank called `cvk_group_abort`. The group has ended on all ranks.
    Aborted = 6,
    /// A rank has no file descriptor or no shared memory left. The group has ended on all ranks.
    Exhausted = 7,
    /// A connected rank sent an invalid frame. The group has ended on all ranks.
    Protocol = 8,
    /// A message was longer than the buffer of its receive. The group continues.
    Truncated = 9,
    /// A connection could not prove that it belongs to this job.
    Unauthorized = 10,
    /// The group did not form.
    Bootstrap = 11,
    /// This process has joined, or is joining, this world already.
    AlreadyJoined = 12,
    /// This rank has destroyed the group.
    Destroyed = 13,
    /// The ranks that survived a failure have continued without this rank.
    Excluded = 14,
    /// This build or platform does not support the operation.
    Unsupported = 15,
    /// The operating system refused an operation.
    System = 16,
    /// The environment variables, URL, token or agent channel of this process cannot be used.
    Environment = 17,
    /// The store failed.
    Store = 18,
    /// A fault of this library, which its authors want to know of.
    Internal = 19,
}

/// An error as C sees it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    message: CString,
    json: CString,
    pub(crate) ends_group: bool,
}

thread_local! {
    static LAST_FAILURE: RefCell<Option<Arc<Failure>>> = const { RefCell::new(None) };
}

impl Failure {
    pub(crate) fn new(error: &CommError) -> Self {
        let (status, code) = classify(error);
        Self::from_parts(status, code, error.to_string(), error.ends_group(), details(error))
    }

    fn from_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref().cloned()).unwrap_or_else(|| "no text".to_owned());
        let message = format!("a fault of libconvoke, please report it: {text}");
        Self::from_parts(Status::Internal, "internal", message, false, Map::new())
    }

    fn from_parts(
        status: Status,
        code: &str,
        message: String,
        ends_group: bool,
        details: Map<String, Value>,
    ) -> Self {
        let mut object = Map::new();
        object.insert("code".to_owned(), code.into());
        object.insert("message".to_owned(), message.as_str().into());
        object.insert("ends_group".to_owned(), ends_group.into());
        object.extend(details);
        let json = Value::Object(object).to_string();
        let text = |text: String| CString::new(text.replace('\0', "?")).expect("it has no byte 0");
        Self { status, message: text(message), json: text(json), ends_group }
    }

    pub(crate) fn message(&self) -> *const c_char {
        self.message.as_ptr()
    }

    pub(crate) fn json(&self) -> *const c_char {
        self.json.as_ptr()
    }

    pub(crate) fn json_text(&self) -> String {
        self.json.to_string_lossy().into_owned()
    }

    /// Makes this the error of the last failed call of this thread.
    pub(crate) fn set(self: Arc<Self>) -> Status {
        let status = self.status;
        LAST_FAILURE.set(Some(self));
        status
    }
}

/// Returns the JSON object of an error, as `cvk_error_json`.
#[must_use]
pub fn error_json(error: &CommError) -> String {
    Failure::new(error).json_text()
}

/// Runs the body of a function of the library. Its error becomes the last one of this thread.
pub(crate) fn run(body: impl FnOnce() -> Result<Status, CommError>) -> Status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => return status,
        Ok(Err(error)) => Failure::new(&error),
        Err(panic) => Failure::from_panic(&*panic),
    };
    Arc::new(failure).set()
}

/// Runs the body of a function that cannot fail but for a panic, which makes it return `otherwise`.
pub(crate) fn run_or<R>(otherwise: R, body: impl FnOnce() -> R) -> R {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(panic) => {
            Arc::new(Failure::from_panic(&*panic)).set();
            otherwise
        }
    }
}

fn last(read: impl FnOnce(&Failure) -> *const c_char) -> *const c_char {
    LAST_FAILURE.with_borrow(|last| last.as_deref().map_or(ptr::null(), read))
}

/// Returns what the last failed call of this thread reports, in one line of text for people. `NULL` if no
/// call of this thread has failed. The text is valid until the next call that fails on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn cvk_error_message() -> *const c_char {
    last(Failure::message)
}

/// Returns the error of the last failed call of this thread as a JSON object. `NULL` if no call of this
/// thread has failed. The text is valid until the next call that fails on this thread.
///
/// `code`, `message` and `ends_group` are always there. `rank` is the rank to inspect first. An error that
/// ended the group has `group`, `call`, `seq`, `received_bytes`, `expected_bytes`, `reported_by` and
/// `confirmed`. docs/reference/c.md lists the fields of each code.
#[unsafe(no_mangle)]
pub extern "C" fn cvk_error_json() -> *const c_char {
    last(Failure::json)
}

/// Returns whether the last failed call of this thread ended its group on all ranks.
#[unsafe(no_mangle)]
pub extern "C" fn cvk_error_ends_group() -> bool {
    LAST_FAILURE.with_borrow(|last| last.as_deref().is_some_and(|failure| failure.ends_group))
}

fn classify(error: &CommError) -> (Status, &'static str) {
    match error {
        CommError::PeerLost { .. } => (Status::PeerLost, "peer_lost"),
        CommError::Timeout { .. } => (Status::Timeout, "timeout"),
        CommError::Mismatch { .. } => (Status::Mismatch, "mismatch"),
        CommError::Aborted { .. } => (Status::Aborted, "aborted"),
        CommError::Exhausted { .. } => (Status::Exhausted, "exhausted"),
        CommError::Protocol { .. } => (Status::Protocol, "protocol"),
        CommError::Truncated { .. } => (Status::Truncated, "truncated"),
        CommError::Unauthorized { .. } => (Status::Unauthorized, "unauthorized"),
        CommError::Bootstrap { .. } => (Status::Bootstrap, "bootstrap"),
        CommError::InvalidArgument(_) => (Status::InvalidArgument, "invalid_argument"),
        CommError::Concurrent { .. } | CommError::AlreadyJoined { .. } => {
            (Status::AlreadyJoined, "already_joined")
        }
        CommError::Destroyed { .. } => (Status::Destroyed, "destroyed"),
        CommError::Excluded { .. } => (Status::Excluded, "excluded"),
        CommError::Unsupported(_) => (Status::Unsupported, "unsupported"),
        CommError::System { .. } => (Status::System, "system"),
        CommError::Url { .. } | CommError::Env(_) | CommError::Channel(_) | CommError::Token(_) => {
            (Status::Environment, "environment")
        }
        CommError::Store(_) => (Status::Store, "store"),
        // Errors that no function of this library returns: of objects, devices, or later versions.
        _ => (Status::Internal, "internal"),
    }
}

/// The facts of an error that programs read.
fn details(error: &CommError) -> Map<String, Value> {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| object.insert(name.to_owned(), value);
    if let Some(rank) = error.suspect_rank() {
        set("rank", rank.into());
    }
    match error {
        CommError::PeerLost { address, how, .. } => {
            set("address", address.as_str().into());
            set("how", how_lost(how));
        }
        CommError::Timeout { missing, after, .. } => {
            set("missing", json!(missing));
            set("after_ms", json!(u64::try_from(after.as_millis()).unwrap_or(u64::MAX)));
        }
        CommError::Mismatch { theirs, theirs_seq, by, ours, ours_seq, .. } => {
            set("theirs", theirs.to_string().into());
            set("theirs_seq", json!(theirs_seq));
            set("by", json!(by));
            set("ours", ours.to_string().into());
            set("ours_seq", json!(ours_seq));
        }
        CommError::Aborted { reason, .. } => {
            set("reason", reason.as_str().into());
        }
        CommError::Truncated { tag, count, room, .. } => {
            set("tag", json!(tag));
            set("count", json!(count));
            set("room", json!(room));
        }
        CommError::Bootstrap { ranks, .. } => {
            set("ranks", json!(ranks));
        }
        CommError::Excluded { survivors, .. } => {
            set("survivors", json!(survivors));
        }
        CommError::System { source, .. } => {
            set("errno", json!(source.raw_os_error()));
        }
        _ => {}
    }
    if let Some(context) = error.context() {
        set("group", context.group.as_str().into());
        set("call", context.call.map(|call| call.to_string()).into());
        set("seq", json!(context.seq));
        set("received_bytes", json!(context.received_bytes));
        set("expected_bytes", json!(context.expected_bytes));
        set("reported_by", json!(context.reported_by));
        set("confirmed", json!(context.confirmed));
    }
    object
}

fn how_lost(how: &LossReason) -> Value {
    let mut value = serde_json::to_value(how).expect("a plain enum has a JSON form");
    value["text"] = how.to_string().into();
    value
}
