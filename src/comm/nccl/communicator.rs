//! A communicator of NCCL: this rank's part of a GPU group.
//!
//! All calls return at once, also those that set up connections. A call is [`Progress::InProgress`]
//! until [`Communicator::progress`] reports otherwise. The caller makes the device the current one of its
//! thread.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use super::error::NcclError;
use super::free::{FreeCall, SetDevice};
use super::functions::Functions;
use super::library::Library;
use super::types::{
    Address, Comm, Config, DataType, HOST_IMMEDIATE, IN_PROGRESS, NO_COLOR, NcclCall, NcclFunction, RedOp,
    SUCCESS, UniqueId,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    InProgress,
}

/// A communicator. It is aborted when dropped, unless it was [destroyed](Self::destroy). Both wait for NCCL
/// for at most a second.
pub(crate) struct Communicator {
    functions: &'static Functions,
    /// The handle; `None` once it is freed.
    handle: Option<NonNull<Comm>>,
    set_device: SetDevice,
}

// SAFETY: NCCL's communicators are not bound to a thread. It is not `Sync`: users that share one serialise
// its calls by a lock.
unsafe impl Send for Communicator {}

/// The handle of memory registered with one communicator.
#[derive(Debug)]
pub(crate) struct RegistrationHandle(NonNull<c_void>);

// SAFETY: a handle that only NCCL reads.
unsafe impl Send for RegistrationHandle {}

/// A split in progress: NCCL writes the new communicator to `into` when the split is done.
pub(crate) struct PendingSplit {
    functions: &'static Functions,
    set_device: SetDevice,
    /// The destination of NCCL's write, whose address stays fixed. If the split is abandoned, NCCL may still
    /// write there: 8 bytes are leaked, once for each group that fails so.
    into: ManuallyDrop<Box<*mut Comm>>,
}

// SAFETY: as for a communicator. NCCL writes `into` before the parent reports that it is done, and it is read
// only then.
unsafe impl Send for PendingSplit {}

impl Library {
    /// Creates a unique id for a group. One rank creates it and sends it to the other ranks.
    pub(crate) fn unique_id(&'static self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        let functions = &self.functions;
        // SAFETY: writes 128 bytes.
        let result = unsafe { (functions.get_unique_id)(&raw mut id) };
        check(functions, "ncclGetUniqueId", result, ptr::null_mut()).map(|_| id)
    }

    /// Begins to create the communicator of rank `rank` of `size` ranks that share `id`, on the thread's
    /// current device. `set_device` makes that device current on other threads.
    pub(crate) fn begin(
        &'static self,
        size: usize,
        id: UniqueId,
        rank: usize,
        set_device: SetDevice,
    ) -> Result<(Communicator, Progress), NcclError> {
        let functions = &self.functions;
        let (mut handle, mut config) = (ptr::null_mut(), Config::nonblocking());
        let (begin, size, rank) = (functions.comm_init_rank_config, size as c_int, rank as c_int);
        // SAFETY: NCCL copies `config` and writes the handle before it returns.
        let result = unsafe { begin(&raw mut handle, size, id, rank, &raw mut config) };
        const NAME: &str = "ncclCommInitRankConfig";
        let progress = check(functions, NAME, result, ptr::null_mut())?;
        let handle = NonNull::new(handle).ok_or_else(|| NcclError::empty_result(NAME))?;
        Ok((Communicator { functions, handle: Some(handle), set_device }, progress))
    }
}

impl Communicator {
    /// Returns whether the last call on this communicator is done.
    pub(crate) fn progress(&self) -> Result<Progress, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: writes one number; the handle is valid while `self` is.
        let result = unsafe { (self.functions.comm_get_async_error)(self.raw(), &raw mut state) };
        self.check("ncclCommGetAsyncError", result)?;
        self.check("NCCL", state)
    }

    /// Enqueues calls on a stream; several calls become one NCCL group call.
    ///
    /// # Safety
    /// `stream` is a stream of this communicator's device. The memory at the addresses is on that device,
    /// long enough, and stays so until the stream has executed the calls.
    pub(crate) unsafe fn enqueue(
        &self,
        steps: &[NcclCall],
        stream: *mut c_void,
    ) -> Result<Progress, NcclError> {
        if let [step] = steps {
            // SAFETY: the caller promises it.
            let called = unsafe { self.call(step, stream) }?;
            // Up to 2.23 NCCL reports a single message as done while its thread still connects, and enqueues
            // it later.
            let is_message = matches!(step.function, NcclFunction::Send { .. } | NcclFunction::Recv { .. });
            return if is_message { self.progress() } else { Ok(called) };
        }
        // SAFETY: has no arguments.
        let begun = unsafe { (self.functions.group_start)() };
        self.check("ncclGroupStart", begun)?;
        // SAFETY: the caller promises it.
        let called = steps.iter().try_for_each(|step| unsafe { self.call(step, stream) }.map(drop));
        // SAFETY: ends the group call begun above, even after an error: later calls of this thread must not
        // join it.
        let ended = unsafe { (self.functions.group_end)() };
        called?;
        self.check("ncclGroupEnd", ended)
    }

    /// # Safety
    /// As of [`Self::enqueue`].
    unsafe fn call(&self, step: &NcclCall, stream: *mut c_void) -> Result<Progress, NcclError> {
        let (functions, comm, NcclCall { function, count, .. }) = (self.functions, self.raw(), *step);
        let (send, recv) = (step.send as *const c_void, step.recv as *mut c_void);
        let datatype = step.datatype as c_int;
        let made = function.reduction().map(|op| self.create_reduction(op, step.datatype)).transpose()?;
        let op = made.as_ref().map_or(0, |made| made.number);
        // SAFETY: the caller promises it.
        let (name, result) = unsafe {
            match function {
                NcclFunction::AllReduce(_) => {
                    ("ncclAllReduce", (functions.all_reduce)(send, recv, count, datatype, op, comm, stream))
                }
                NcclFunction::Broadcast { root } => {
                    let root = root as c_int;
                    ("ncclBroadcast", (functions.broadcast)(send, recv, count, datatype, root, comm, stream))
                }
                NcclFunction::Reduce { root, .. } => {
                    let root = root as c_int;
                    ("ncclReduce", (functions.reduce)(send, recv, count, datatype, op, root, comm, stream))
                }
                NcclFunction::AllGather => {
                    ("ncclAllGather", (functions.all_gather)(send, recv, count, datatype, comm, stream))
                }
                NcclFunction::ReduceScatter(_) => {
                    let call = functions.reduce_scatter;
                    ("ncclReduceScatter", call(send, recv, count, datatype, op, comm, stream))
                }
                NcclFunction::Send { to } => {
                    ("ncclSend", (functions.send)(send, count, datatype, to as c_int, comm, stream))
                }
                NcclFunction::Recv { from } => {
                    ("ncclRecv", (functions.recv)(recv, count, datatype, from as c_int, comm, stream))
                }
            }
        };
        self.check(name, result)
    }

    /// Returns NCCL's number of a reduction. A reduction with a factor is created for this one call.
    fn create_reduction(&self, op: RedOp, datatype: DataType) -> Result<CreatedReduction<'_>, NcclError> {
        let mut made = CreatedReduction { number: 0, owner: None };
        if let RedOp::PremulSum(mut factor) = op {
            let create = self.functions.red_op_create_pre_mul_sum;
            let factor = factor.as_mut_ptr().cast();
            // SAFETY: reads one element, of at most 8 bytes, before it returns, and writes one number.
            let result = unsafe {
                create(&raw mut made.number, factor, datatype as c_int, HOST_IMMEDIATE, self.raw())
            };
            self.check("ncclRedOpCreatePreMulSum", result)?;
            made.owner = Some(self);
        } else {
            made.number = op.number();
        }
        Ok(made)
    }

    /// Registers memory that will be used often with NCCL, for direct access; `None` if this NCCL version has
    /// no registration.
    ///
    /// # Safety
    /// The memory is on the communicator's device, and stays until it is [deregistered](Self::deregister).
    pub(crate) unsafe fn register(
        &self,
        at: Address,
        bytes: usize,
    ) -> Result<Option<RegistrationHandle>, NcclError> {
        let Some(register) = self.functions.comm_register else { return Ok(None) };
        let mut handle = ptr::null_mut();
        // SAFETY: the caller promises it; writes one pointer.
        let result = unsafe { register(self.raw(), at as *mut c_void, bytes, &raw mut handle) };
        self.check("ncclCommRegister", result)?;
        Ok(NonNull::new(handle).map(RegistrationHandle))
    }

    pub(crate) fn deregister(&self, registered: RegistrationHandle) {
        if let Some(deregister) = self.functions.comm_deregister {
            // SAFETY: from `register` of this communicator, and used once.
            let _ = unsafe { deregister(self.raw(), registered.0.as_ptr()) };
        }
    }

    /// Begins to split this communicator: ranks with the same color get one new communicator, in the order of
    /// their keys. All ranks call it; those that want no communicator pass `None`. When [`Self::progress`] of
    /// this communicator reports that the split is done, [`PendingSplit::into_communicator`] returns the new
    /// one.
    ///
    /// The result of this call does not tell whether the split is done: only `progress` does.
    pub(crate) fn begin_split(
        &self,
        color_and_key: Option<(usize, usize)>,
    ) -> Result<PendingSplit, NcclError> {
        let mut into = Box::new(ptr::null_mut());
        let mut config = Config::nonblocking();
        let (color, key) = color_and_key.map_or((NO_COLOR, 0), |(color, key)| (color as c_int, key as c_int));
        // SAFETY: NCCL copies `config`, and writes to `into` until it reports that it is done. `PendingSplit`
        // keeps `into` until then.
        let result =
            unsafe { (self.functions.comm_split)(self.raw(), color, key, &raw mut *into, &raw mut config) };
        self.check("ncclCommSplit", result)?;
        let (set_device, into) = (self.set_device.clone(), ManuallyDrop::new(into));
        Ok(PendingSplit { functions: self.functions, set_device, into })
    }

    /// Begins an orderly shutdown, in which enqueued operations are carried out. Call [`Self::progress`]
    /// until the shutdown is done, then [`Self::destroy`].
    pub(crate) fn finalize(&self) -> Result<Progress, NcclError> {
        // SAFETY: the handle is valid.
        let result = unsafe { (self.functions.comm_finalize)(self.raw()) };
        self.check("ncclCommFinalize", result)
    }

    /// Frees the communicator after [`Self::finalize`].
    pub(crate) fn destroy(mut self) {
        self.free_with(self.functions.comm_destroy, FreeCall::run_on_thread);
    }

    /// Aborts the communicator on this thread, however long that takes.
    pub(crate) fn abort_blocking(mut self) {
        self.free_with(self.functions.comm_abort, FreeCall::run_here);
    }

    fn free_with(&mut self, call: unsafe extern "C" fn(*mut Comm) -> c_int, how: fn(FreeCall)) {
        if let Some(handle) = self.handle.take() {
            how(FreeCall { call, handle, set_device: self.set_device.clone() });
        }
    }

    /// Returns the handle for a call of NCCL. It is valid: only `free_with` takes it, and that is called by
    /// functions that consume the communicator, and by `drop`.
    fn raw(&self) -> *mut Comm {
        self.handle.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    fn check(&self, function: &'static str, result: c_int) -> Result<Progress, NcclError> {
        check(self.functions, function, result, self.raw())
    }
}

impl PendingSplit {
    /// Returns the new communicator; `None` for a rank without a color. Call it only when the parent
    /// communicator reports that the split is done.
    pub(crate) fn into_communicator(self) -> Option<Communicator> {
        let Self { functions, set_device, into } = self;
        let handle = Some(NonNull::new(*ManuallyDrop::into_inner(into))?);
        Some(Communicator { functions, handle, set_device })
    }
}

/// A reduction operation of NCCL. If it was created for one call, dropping this value destroys it; NCCL keeps
/// it until calls in progress are done.
struct CreatedReduction<'a> {
    number: c_int,
    owner: Option<&'a Communicator>,
}

impl Drop for CreatedReduction<'_> {
    fn drop(&mut self) {
        if let Some(communicator) = self.owner {
            // SAFETY: made by this communicator, and used for the last time.
            let _ = unsafe { (communicator.functions.red_op_destroy)(self.number, communicator.raw()) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.free_with(self.functions.comm_abort, FreeCall::run_on_thread);
    }
}

fn check(
    functions: &Functions,
    function: &'static str,
    result: c_int,
    comm: *mut Comm,
) -> Result<Progress, NcclError> {
    match result {
        SUCCESS => Ok(Progress::Done),
        IN_PROGRESS => Ok(Progress::InProgress),
        _ => {
            // SAFETY: both return texts that stay valid, or null; the communicator is valid or null.
            let (what, detail) = unsafe {
                (text((functions.get_error_string)(result)), text((functions.get_last_error)(comm)))
            };
            Err(NcclError::Call { function, what: what.unwrap_or_else(|| format!("error {result}")), detail })
        }
    }
}

/// # Safety
/// `at` is null or points to a text that ends with a zero byte.
unsafe fn text(at: *const std::ffi::c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: the caller promises it.
    let text = unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}
