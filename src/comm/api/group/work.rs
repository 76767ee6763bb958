//! Handles of operations in progress.

use std::fmt;
use std::future::Future;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

#[cfg(feature = "nccl")]
use super::device::DeviceWork;
use super::{CommError, Group};
use crate::api::op::OperationOutput;
use crate::engine::Completion;

/// An operation in progress, and the value `T` that it returns: its buffers, with the
/// [`Status`](crate::Status) of a received message. A request in the terms of MPI.
///
/// [`wait`](Self::wait), or `.await` under any async runtime, returns the buffers with the result. The
/// operation progresses whether or not a thread waits; a waiting thread carries out transfers itself. A
/// dropped handle does not stop its operation: the buffers are freed when the operation is done. Dropping the
/// last handle of the group waits for the operation; in a scope, the end of the scope waits for it.
///
/// After an error the buffers are not returned, since their contents are unspecified; no rank accesses them
/// any more.
#[must_use = "the result is known only to who waits for it"]
pub struct Work<T: OperationOutput> {
    state: Option<State<T>>,
}

struct State<T> {
    operation: Operation,
    group: Group,
    /// The buffers, always initialised. They are not a plain `T`: the engine writes through pointers into
    /// them, and moving a `Box` or `&mut` would assert exclusive access.
    memory: MaybeUninit<T>,
}

/// The operation that a handle waits for.
enum Operation {
    /// There was nothing to do.
    Nothing,
    OnHost(Arc<Completion>),
    #[cfg(feature = "nccl")]
    OnDevice(Arc<dyn DeviceWork>),
}

impl Operation {
    fn completion(&self) -> Option<&Completion> {
        match self {
            Self::Nothing => None,
            Self::OnHost(completion) => Some(completion),
            #[cfg(feature = "nccl")]
            Self::OnDevice(operation) => Some(operation.completion()),
        }
    }
}

impl<T: OperationOutput> Work<T> {
    pub(crate) fn new(group: Group, completion: Option<Arc<Completion>>, memory: MaybeUninit<T>) -> Self {
        let operation = completion.map_or(Operation::Nothing, Operation::OnHost);
        Self { state: Some(State { operation, group, memory }) }
    }

    /// Waits until the operation is done.
    ///
    /// # Errors
    /// The errors of the blocking call. [`CommError::InvalidArgument`] if [`Self::try_wait`] or
    /// [`Self::wait_for`] has returned the result before.
    pub fn wait(mut self) -> Result<T, CommError> {
        loop {
            self.drive(None);
            if let Some(output) = self.result()? {
                return Ok(output);
            }
        }
    }

    /// Waits at most `time`. Returns `None` if the operation is not done by then. `time` does not change the
    /// time limit of the operation, whose expiry ends the group.
    ///
    /// # Errors
    /// The errors of [`Self::wait`].
    pub fn wait_for(&mut self, time: Duration) -> Result<Option<T>, CommError> {
        self.drive(Instant::now().checked_add(time));
        self.result()
    }

    /// Returns the result if the operation is done now, else `None`, like `MPI_Test`.
    ///
    /// # Errors
    /// The errors of [`Self::wait`].
    pub fn try_wait(&mut self) -> Result<Option<T>, CommError> {
        if let Some(State { operation: Operation::OnHost(completion), group, .. }) = &self.state
            && !completion.is_done()
            && let Some(shared) = group.shared()
        {
            shared.poll_once();
        }
        self.wait_for(Duration::ZERO)
    }

    /// Returns true if the operation is done, successfully or not.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        #[cfg(feature = "nccl")]
        if let Some(device_operation) = self.device_operation() {
            return device_operation.poll();
        }
        self.completion().is_none_or(|completion| completion.is_done())
    }

    /// Registers a `callback` that is called once when the operation is done, successfully or not; at once if
    /// it is done already. The thread that detects completion calls it, without holding locks. `callback` may
    /// start operations, but should not wait for them.
    pub fn on_complete(&self, callback: impl FnOnce() + Send + 'static) {
        self.request_fast_poll();
        let Some(completion) = self.completion() else { return callback() };
        if let Err(callback) = completion.on_complete(Box::new(callback)) {
            callback();
        }
    }

    /// Returns a file descriptor that polls as readable once the operation is done, for event loops. Returns
    /// `None` if the operation was done from the start. Callers must not read from the descriptor. It is
    /// valid as long as the handle exists.
    ///
    /// # Errors
    /// [`CommError::System`] if the process has no descriptor left.
    pub fn descriptor(&self) -> Result<Option<BorrowedFd<'_>>, CommError> {
        self.request_fast_poll();
        self.completion().map(|completion| completion.descriptor()).transpose()
    }

    fn completion(&self) -> Option<&Completion> {
        self.state.as_ref()?.operation.completion()
    }

    #[cfg(feature = "nccl")]
    fn device_operation(&self) -> Option<&dyn DeviceWork> {
        match &self.state.as_ref()?.operation {
            Operation::OnDevice(operation) => Some(&**operation),
            Operation::Nothing | Operation::OnHost(_) => None,
        }
    }

    /// Makes the watchdog poll a device operation often, for a caller that waits without polling: no other
    /// thread notices that the operation is done.
    fn request_fast_poll(&self) {
        #[cfg(feature = "nccl")]
        if let Some(device_operation) = self.device_operation() {
            device_operation.request_fast_poll();
        }
    }

    /// Drives the engine until the operation is done or `until` has passed.
    fn drive(&self, until: Option<Instant>) {
        #[cfg(feature = "nccl")]
        if let Some(device_operation) = self.device_operation() {
            return device_operation.wait(until);
        }
        if let Some(State { operation: Operation::OnHost(completion), group, .. }) = &self.state {
            group.wait_for(std::slice::from_ref(completion), until);
        }
    }

    /// Takes the result if the operation is done.
    fn result(&mut self) -> Result<Option<T>, CommError> {
        if !self.is_completed() {
            return Ok(None);
        }
        let taken =
            || CommError::InvalidArgument("the result of this operation was returned before".to_owned());
        let State { operation, memory, .. } = self.state.take().ok_or_else(taken)?;
        // SAFETY: initialised from the start, and read once: `state` has been taken. The operation is done,
        // so the engine writes no more through pointers into it.
        #[allow(unsafe_code)]
        let mut output = unsafe { memory.assume_init() };
        if let Some(completion) = operation.completion()
            && let Some(status) =
                completion.take().expect("while the handle exists, only it takes the outcome")?
        {
            output.set_status(status);
        }
        Ok(Some(output))
    }
}

#[cfg(feature = "nccl")]
impl Work<()> {
    /// Makes the handle of a device operation; `device_operation` is `None` if there is nothing to wait for.
    pub(crate) fn on_device(group: Group, device_operation: Option<Arc<dyn DeviceWork>>) -> Self {
        let operation = device_operation.map_or(Operation::Nothing, Operation::OnDevice);
        Self { state: Some(State { operation, group, memory: MaybeUninit::new(()) }) }
    }

    /// Makes `stream` wait until the operation is done, without blocking the host. Work enqueued on `stream`
    /// later sees the result.
    ///
    /// # Errors
    /// [`CommError::Device`] if the device failed.
    pub fn wait_on(&self, stream: &cudarc::driver::CudaStream) -> Result<(), CommError> {
        let operation = self.device_operation();
        Ok(operation.map_or(Ok(()), |operation| operation.block_stream(stream))?)
    }
}

impl<T: OperationOutput> Future for Work<T> {
    type Output = Result<T, CommError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let work = self.get_mut();
        work.request_fast_poll();
        if let Some(completion) = work.completion()
            && completion.register_waker(context.waker())
        {
            return Poll::Pending;
        }
        work.result().transpose().map_or(Poll::Pending, Poll::Ready)
    }
}

/// No field is pinned: the handle does not store the elements themselves.
impl<T: OperationOutput> Unpin for Work<T> {}

impl<T: OperationOutput> Drop for Work<T> {
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        let buffers = KeptBuffers(state.memory);
        let completion = match state.operation {
            Operation::Nothing => return,
            Operation::OnHost(completion) => completion,
            // The handle has no buffers. Its group is kept, since the device backend must not end while the
            // operation is in progress.
            #[cfg(feature = "nccl")]
            Operation::OnDevice(operation) => return operation.detach(state.group),
        };
        completion.detach();
        // The group is not kept: dropping its last handle waits for this operation.
        let kept: Box<dyn Send + '_> = Box::new(buffers);
        // SAFETY: types that differ only in a lifetime have one layout. `kept` may outlive what `T` borrows,
        // but until then nothing except its drop uses it, and that touches no borrowed elements: see
        // `OperationOutput`.
        #[allow(unsafe_code)]
        let kept = unsafe { std::mem::transmute::<Box<dyn Send + '_>, Box<dyn Send>>(kept) };
        // If the operation is done already, the buffers come back and are dropped here.
        drop(completion.on_complete(Box::new(move || drop(kept))));
    }
}

/// The buffers of an operation whose handle was dropped. This value and its buffers are dropped when the
/// operation is done. Until then they are only moved as bytes, never as a `T`.
struct KeptBuffers<T: OperationOutput>(MaybeUninit<T>);

impl<T: OperationOutput> Drop for KeptBuffers<T> {
    fn drop(&mut self) {
        // SAFETY: initialised from the start, and `State` handed it over only to this value. The engine uses
        // the elements no more: the operation is done, or there was none.
        #[allow(unsafe_code)]
        unsafe {
            self.0.assume_init_drop();
        }
    }
}

impl<T: OperationOutput> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("is_completed", &self.is_completed()).finish_non_exhaustive()
    }
}

/// Waits until all operations are done; returns their results in the order of `works`.
///
/// # Errors
/// The first error in that order, after all are done.
pub fn wait_all<T: OperationOutput>(works: impl IntoIterator<Item = Work<T>>) -> Result<Vec<T>, CommError> {
    let results: Vec<_> = works.into_iter().map(Work::wait).collect();
    results.into_iter().collect()
}

/// Waits until one operation is done and removes it from the list. Returns its former index and its result;
/// `None` if the list is empty. The index of each later entry decreases by one.
///
/// # Errors
/// The error of the operation that is done.
pub fn wait_any<T: OperationOutput>(works: &mut Vec<Work<T>>) -> Result<Option<(usize, T)>, CommError> {
    let Some(first) = works.first().and_then(|work| work.state.as_ref()).map(|state| state.group.clone())
    else {
        return Ok(None);
    };
    loop {
        if let Some(index) = works.iter().position(Work::is_completed) {
            return works.remove(index).wait().map(|output| Some((index, output)));
        }
        let of_first = |work: &Work<T>| match work.state.as_ref()? {
            State { operation: Operation::OnHost(completion), group, .. }
                if Arc::ptr_eq(&group.inner, &first.inner) =>
            {
                Some(Arc::clone(completion))
            }
            _ => None,
        };
        let completions: Vec<_> = works.iter().filter_map(of_first).collect();
        if completions.len() == works.len() {
            first.wait_for(&completions, None);
        } else {
            // A thread cannot drive several groups at once; the background threads of the groups drive
            // them.
            let me = Waker::from(Arc::new(Unpark(std::thread::current())));
            works.iter().for_each(Work::request_fast_poll);
            if works.iter().filter_map(Work::completion).all(|completion| completion.register_waker(&me)) {
                std::thread::park();
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
