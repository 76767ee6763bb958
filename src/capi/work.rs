//! Operations that are carried out at once, and operations in progress.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use convoke_comm::raw::{self, Buffers, Operation};
use convoke_comm::{CommError, Work as CommWork};

use crate::call::{Call, Callback, Context, callback};
use crate::group::{Group, GroupEnd, borrow_group, limited};
use crate::pointers::{borrow, check_place, free, invalid, put, put_handle};
use crate::status::{Failure, Status, run, run_or};

/// Source, tag and length of a received message.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The rank that sent the message.
    pub source: usize,
    /// The tag of the message.
    pub tag: u32,
    /// Number of elements of the message.
    pub count: usize,
}

impl From<convoke_comm::Status> for Message {
    fn from(status: convoke_comm::Status) -> Self {
        Self { source: status.source(), tag: status.tag(), count: status.count() }
    }
}

/// As `timeout_ms` of `cvk_work_wait`: wait until the operation is done. The operation's own time limit
/// holds.
pub const FOREVER: u64 = u64::MAX;

/// An operation in progress. Any number of threads may wait for it.
#[derive(Debug)]
pub struct Work(Arc<Shared>);

/// What the handle of an operation shares with the callback that the runtime calls when it is done.
#[derive(Debug)]
struct Shared {
    end: GroupEnd,
    /// The operation. `None` once its result was taken, or its handle was freed. A thread that waits holds
    /// the lock, and takes the result.
    operation: Mutex<Option<CommWork<Buffers>>>,
    /// Set when the runtime has finished the operation.
    is_finished: AtomicBool,
    result: OnceLock<Result<Option<Message>, Arc<Failure>>>,
    callbacks: Mutex<Callbacks>,
    /// Notified when the result is set, and when a thread stops waiting.
    changed: Condvar,
}

/// The functions to call when an operation is done; `None` once they were called.
struct Callbacks(Option<Vec<Box<dyn FnOnce() + Send>>>);

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("are_called", &self.0.is_none()).finish_non_exhaustive()
    }
}

impl Work {
    /// Carries out one operation, for bindings that make groups by the Rust interface. Returns the status of a
    /// received message.
    ///
    /// # Errors
    /// The errors of [`convoke_comm::Group::run`].
    ///
    /// # Safety
    /// The pointers of the call are valid as [`Call`] says.
    pub unsafe fn run(group: &convoke_comm::Group, call: &Call) -> Result<Option<Message>, CommError> {
        // SAFETY: the caller promises it.
        let operation = unsafe { call.operation(group.size()) }?;
        let done = limited(group, call.timeout_ms).run(operation)?;
        Ok(done.status.map(Message::from))
    }

    /// Begins an operation, for bindings that make groups by the Rust interface.
    ///
    /// # Errors
    /// The errors of [`convoke_comm::Group::start`].
    ///
    /// # Safety
    /// The pointers of the call are valid as [`Call`] says.
    pub unsafe fn begin(group: &convoke_comm::Group, call: &Call) -> Result<Self, CommError> {
        // SAFETY: the caller promises it.
        let operation = unsafe { call.operation(group.size()) }?;
        Self::start(GroupEnd::default(), &limited(group, call.timeout_ms), call, operation)
    }

    /// Waits until the operation is done, at most `time`. Returns `None` if it is not done by then, and otherwise the
    /// status of a received message, or the error as the JSON object of `cvk_error_json`.
    #[must_use]
    pub fn wait(&self, time: Option<Duration>) -> Option<Result<Option<Message>, String>> {
        let until = time.and_then(|time| Instant::now().checked_add(time));
        match self.0.wait(until)? {
            Ok(message) => Some(Ok(*message)),
            Err(failure) => Some(Err(failure.json_text())),
        }
    }

    /// Returns whether the operation is done, successfully or not.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Lets the operation go on without this handle, for a process that ends. The handle no longer keeps the group,
    /// and its result is an error. The memory of the operation must stay.
    pub fn detach(&self) {
        if let Ok(mut operation) = self.0.operation.try_lock() {
            let given_up = || Err(Arc::new(Failure::new(&invalid("the process ends".to_owned()))));
            self.0.result.get_or_init(given_up);
            drop(operation.take());
        }
    }

    /// Returns a descriptor that polls as readable once the operation is done; -1 if it was done from the start.
    ///
    /// # Errors
    /// [`CommError::System`] if the process has no descriptor left. [`CommError::InvalidArgument`] if another thread
    /// waits for the operation.
    pub fn descriptor(&self) -> Result<c_int, CommError> {
        let operation = self.0.operation.try_lock().map_err(|_| {
            invalid("another thread waits for this operation: ask for the descriptor before".to_owned())
        })?;
        let found = operation.as_ref().map(CommWork::descriptor).transpose()?.flatten();
        Ok(found.map_or(-1, |descriptor| descriptor.as_raw_fd()))
    }

    fn start(
        end: GroupEnd,
        group: &convoke_comm::Group,
        call: &Call,
        operation: Operation,
    ) -> Result<Self, CommError> {
        let work = group.start(operation)?;
        let callbacks = call.callback().map(|callback| Box::new(callback) as _).into_iter().collect();
        let shared = Arc::new(Shared {
            end,
            operation: Mutex::new(Some(work)),
            is_finished: AtomicBool::new(false),
            result: OnceLock::new(),
            callbacks: Mutex::new(Callbacks(Some(callbacks))),
            changed: Condvar::new(),
        });
        let at_end = Arc::clone(&shared);
        if let Some(work) = shared.operation().as_ref() {
            work.on_complete(move || {
                at_end.is_finished.store(true, Ordering::SeqCst);
                at_end.take_result();
            });
        }
        // If the operation was finished from the start, the callback found the lock taken.
        shared.take_result();
        Ok(Self(shared))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // The operation may outlive its handle; then nobody asks for its result.
        drop(self.0.operation().take());
    }
}

impl Shared {
    fn operation(&self) -> MutexGuard<'_, Option<CommWork<Buffers>>> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn callbacks(&self) -> MutexGuard<'_, Callbacks> {
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the operation is done. It polls the operation: its descriptor may be readable a moment before
    /// its callback has run.
    fn is_done(&self) -> bool {
        self.is_finished.load(Ordering::SeqCst) || self.wait(Some(Instant::now())).is_some()
    }

    /// Takes the result of a finished operation, and calls the callbacks. Does nothing if a thread waits:
    /// that thread calls this when it stops.
    fn take_result(&self) {
        if !self.is_finished.load(Ordering::SeqCst) {
            return;
        }
        match self.operation.try_lock() {
            Ok(operation) => self.wait_with(operation, Duration::ZERO),
            Err(TryLockError::Poisoned(poisoned)) => self.wait_with(poisoned.into_inner(), Duration::ZERO),
            Err(TryLockError::WouldBlock) => return,
        }
        // The list of callbacks is taken once, so each is called once.
        let Some(callbacks) = self.callbacks().0.take() else { return };
        self.changed.notify_all();
        callbacks.into_iter().for_each(|callback| callback());
    }

    /// Carries out the operation for `time` at most, and keeps its result if it is finished by then.
    fn wait_with(&self, mut operation: MutexGuard<'_, Option<CommWork<Buffers>>>, time: Duration) {
        let Some(work) = operation.as_mut() else { return };
        let result = match work.wait_for(time) {
            Ok(None) => return,
            Ok(Some(buffers)) => Ok(buffers.status.map(Message::from)),
            Err(error) => Err(Arc::new(Failure::new(&error))),
        };
        self.result.get_or_init(|| result);
        *operation = None;
    }

    /// Waits for the result until `until`, or for as long as it takes. `None` if it is not there by then, or if
    /// the program was interrupted.
    fn wait(&self, until: Option<Instant>) -> Option<&Result<Option<Message>, Arc<Failure>>> {
        const LONG: Duration = Duration::from_secs(3600);
        loop {
            if let Some(result) = self.result.get() {
                return Some(result);
            }
            let all = until.map_or(LONG, |until| until.saturating_duration_since(Instant::now()));
            let left = all.min(raw::interrupt_interval());
            match self.operation.try_lock() {
                Ok(operation) => {
                    self.wait_with(operation, left);
                    self.changed.notify_all();
                    self.take_result();
                }
                Err(TryLockError::Poisoned(poisoned)) => self.wait_with(poisoned.into_inner(), left),
                // Another thread waits. It sets the result, or stops and notifies this thread.
                Err(TryLockError::WouldBlock) => self.wait_for_change(left),
            }
            if self.result.get().is_none() && (all.is_zero() || left < all && raw::is_interrupted()) {
                return None;
            }
        }
    }

    fn wait_for_change(&self, time: Duration) {
        // A thread that stops waiting at this moment notifies before this thread waits, so the time is short.
        const MAX_TIME: Duration = Duration::from_millis(10);
        let callbacks = self.callbacks();
        if callbacks.0.is_some() {
            drop(self.changed.wait_timeout(callbacks, time.min(MAX_TIME)));
        }
    }
}

/// Carries out `count` operations at once and waits for all of them. They progress concurrently, so two ranks
/// may exchange messages by one call each. `messages` is `NULL`, or gets an entry for each operation; entries
/// of operations that receive no message are not changed.
///
/// If an argument is invalid, nothing is begun. Otherwise the first error is returned after all are done. The
/// time limit is that of the first operation.
///
/// # Safety
/// `group` is valid or `NULL`; `calls` points to `count` operations, whose pointers are valid as `cvk_call`
/// says; `messages` is `NULL` or has room for `count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_run(
    group: *const Group,
    calls: *const Call,
    count: usize,
    messages: *mut Message,
) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        if count == 0 {
            return Ok(Status::Ok);
        }
        // SAFETY: the caller promises it.
        let first = unsafe { borrow(calls, "calls") }?;
        // SAFETY: the caller promises it.
        let calls = unsafe { std::slice::from_raw_parts(first, count) };
        let limited = limited(&group.group, first.timeout_ms);
        let size = limited.size();
        let put_message = |index: usize, done: Buffers| {
            if let Some(status) = done.status.filter(|_| !messages.is_null()) {
                // SAFETY: the caller promises that there is room.
                unsafe { messages.add(index).write(status.into()) };
            }
        };
        if let [call] = calls {
            // SAFETY: the caller promises it.
            put_message(0, limited.run(unsafe { call.operation(size) }?)?);
            return Ok(Status::Ok);
        }
        // SAFETY: the caller promises it.
        let operations = calls.iter().map(|call| unsafe { call.operation(size) });
        let done = limited.run(operations.collect::<Result<Vec<_>, _>>()?)?;
        done.into_iter().enumerate().for_each(|(index, done)| put_message(index, done));
        Ok(Status::Ok)
    })
}

/// Begins an operation and returns at once. It progresses whether or not a thread waits. Free the handle with
/// `cvk_work_free`.
///
/// # Safety
/// `group` is valid or `NULL`; `call` points to an operation, whose pointers are valid as `cvk_call` says;
/// `work` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_start(group: *const Group, call: *const Call, work: *mut *mut Work) -> Status {
    let group = borrow_group!(group);
    group.run(|| {
        check_place(work, "work")?;
        // SAFETY: the caller promises it.
        let call = unsafe { borrow(call, "call") }?;
        // SAFETY: the caller promises it.
        let operation = unsafe { call.operation(group.group.size()) }?;
        let started =
            Work::start(group.end.clone(), &limited(&group.group, call.timeout_ms), call, operation)?;
        // SAFETY: the caller promises it.
        unsafe { put_handle(work, started, "work") }?;
        Ok(Status::Ok)
    })
}

/// Waits until the operation is done, at most `timeout_ms` milliseconds, or `CVK_FOREVER`. Then returns its
/// result, also if it is asked again. Returns `CVK_STATUS_PENDING` if the operation is not done by then, or if the
/// check of `cvk_set_interrupt_check` says that the program was interrupted.
/// `message` is `NULL`, or gets the status of a received message.
///
/// # Safety
/// `work` is valid or `NULL`; `message` is `NULL` or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_work_wait(work: *const Work, timeout_ms: u64, message: *mut Message) -> Status {
    run(|| {
        // SAFETY: the caller promises it.
        let work = unsafe { borrow(work, "work") }?;
        let until = Instant::now().checked_add(Duration::from_millis(timeout_ms));
        match work.0.wait(until.filter(|_| timeout_ms != FOREVER)) {
            None => return Ok(Status::Pending),
            Some(Err(failure)) => return Ok(work.0.end.fail(failure)),
            Some(Ok(Some(received))) if !message.is_null() => {
                // SAFETY: the caller promises it.
                unsafe { message.write(*received) };
            }
            Some(Ok(_)) => {}
        }
        Ok(Status::Ok)
    })
}

/// Returns whether the operation is done, successfully or not. Then `cvk_work_wait` returns at once.
///
/// # Safety
/// `work` is valid or `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_work_is_done(work: *const Work) -> bool {
    // SAFETY: the caller promises it.
    let work = unsafe { work.as_ref() };
    run_or(true, || work.is_none_or(|work| work.is_done()))
}

/// Writes to `descriptor` a file descriptor that polls as readable once the operation is done, for event
/// loops; -1 if it was done from the start. Do not read from it or close it. It is valid as long as the
/// handle.
///
/// # Safety
/// `work` is valid or `NULL`; `descriptor` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_work_descriptor(work: *const Work, descriptor: *mut c_int) -> Status {
    run(|| {
        check_place(descriptor, "descriptor")?;
        // SAFETY: the caller promises it.
        let work = unsafe { borrow(work, "work") }?;
        let number = work.descriptor()?;
        // SAFETY: the caller promises it.
        unsafe { put(descriptor, number, "descriptor") }?;
        Ok(Status::Ok)
    })
}

/// Registers a function that is called once when the operation is done, successfully or not; at once if it is
/// done already. See `on_complete` of `cvk_call` for what the function may do.
///
/// # Safety
/// `work` is valid or `NULL`; `function` may be called on any thread with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_work_on_complete(
    work: *const Work,
    function: Callback,
    context: *mut c_void,
) -> Status {
    run(|| {
        // SAFETY: the caller promises it.
        let work = unsafe { borrow(work, "work") }?;
        let function = function.ok_or_else(|| invalid("function is NULL".to_owned()))?;
        let callback = callback(function, Context::new(context));
        let mut callbacks = work.0.callbacks();
        match &mut callbacks.0 {
            Some(callbacks) => callbacks.push(Box::new(callback)),
            None => {
                drop(callbacks);
                callback();
            }
        }
        Ok(Status::Ok)
    })
}

/// Frees a handle; `NULL` is allowed. An operation in progress goes on: its memory must stay valid until
/// `on_complete` is called, or until the group is freed.
///
/// # Safety
/// `work` is `NULL` or valid, and not used from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_work_free(work: *mut Work) {
    // SAFETY: the caller promises it.
    run_or((), || unsafe { free(work) });
}

/// A function that returns whether the calling thread must stop waiting.
pub type InterruptCheck = Option<unsafe extern "C" fn() -> bool>;

/// Sets the function that says whether a thread that waits must stop, because the program was interrupted, as by
/// Ctrl-C. The library calls it about ten times a second while a thread waits. It stays for the life of the
/// process; a second call changes nothing.
///
/// If it returns true, the group ends with `CVK_STATUS_ABORTED`. The error says for which rank this rank waited.
/// `cvk_work_wait` ends no group: it returns `CVK_STATUS_PENDING`, and the operation goes on. `cvk_init` fails with
/// `CVK_STATUS_BOOTSTRAP` or `CVK_STATUS_STORE`. A call of a store fails with `CVK_STATUS_STORE`.
///
/// # Safety
/// `check` is valid for ever, from any thread. It may use no function of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_set_interrupt_check(check: InterruptCheck) {
    static CHECK: OnceLock<unsafe extern "C" fn() -> bool> = OnceLock::new();
    // SAFETY: the caller of `cvk_set_interrupt_check` promises it.
    let call = || CHECK.get().is_some_and(|check| unsafe { check() });
    if let Some(check) = check {
        CHECK.get_or_init(|| check);
        raw::set_interrupt_check(call);
    }
}
