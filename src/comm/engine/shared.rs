//! The engine of a group as its handles use it, from any thread.

use std::sync::Arc;
use std::time::Duration;

use convoke_store::interrupt;

use super::completion::{Completion, Outcome, TimeLimit};
use super::fast_path::{FastPath, MessageResult, SmallResult};
use super::messages::is_large;
use super::operation::{Answer, LiveRanks, Operation, Request, Task};
use super::progress_lock;
use super::settings::ParentLinks;
use super::state::Engine;
use super::streams::Shape;
use crate::buffer::SendRecvBuffers;
use crate::collectives::call::{Call, Status};
use crate::collectives::kernels::Kernel;
use crate::error::CommError;
#[cfg(doc)]
use crate::transport::links::EAGER_BYTES;

/// The engine of a group, shared by the threads that make calls of the group.
pub(crate) type Shared = progress_lock::Shared<Engine>;

impl Shared {
    pub(crate) fn new(engine: Engine) -> Self {
        let submissions = Arc::clone(&engine.submissions);
        Self::of(engine, submissions)
    }

    /// Takes `operation`, runs it, and waits until it is done.
    pub(crate) fn call(&self, operation: &mut Option<Operation<'_>>, limit: TimeLimit) -> Outcome {
        // SAFETY: the borrows last until this function returns, and it returns only with the outcome. It does
        // not unwind before, except by a panic with the progress lock held: callbacks and reductions of the
        // user are caught. After such a panic this thread makes the engine forget all tasks before it unwinds
        // further (`DriverGuard::run`). That also takes the pages of `Group::alloc` out of the memory that
        // other ranks can write (`make_private`).
        #[allow(unsafe_code)]
        let operation = unsafe { Operation::erase_lifetime(operation) };
        match self.try_with_engine(|engine| engine.try_inline(operation, limit)) {
            Some(FastPath::Done(status)) => return Ok(status),
            Some(FastPath::Failed(error)) => return Err(*error),
            Some(FastPath::Pending(completion)) => return self.outcome(&completion),
            Some(FastPath::NotInline) | None => {}
        }
        let Some(operation) = operation.take() else { return Ok(None) };
        let completion = Arc::new(Completion::new(limit));
        self.post(Task { operation, completion: Arc::clone(&completion) });
        self.outcome(&completion)
    }

    /// Runs a collective in shared memory, if it is small and no operation is queued, and waits until it is done.
    /// Returns `None` if it cannot; nothing was started then. `limit` is evaluated if the call must wait.
    #[inline(always)]
    pub(crate) fn call_small(
        &self,
        call: Call,
        buffers: &mut SendRecvBuffers<'_>,
        kernel: Option<&Kernel>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> Option<Result<(), CommError>> {
        // SAFETY: as in `call`.
        #[allow(unsafe_code)]
        let buffers = unsafe { buffers.erase_lifetime() };
        self.small_result(self.try_with_engine(|engine| engine.try_small(call, buffers, kernel, limit)))
    }

    /// Runs a short exchange of this `shape`, if no operation is queued, and waits until it is done. Returns `None` if it
    /// cannot; nothing was started then. `limit` is evaluated if the call must wait.
    #[inline(always)]
    pub(crate) fn call_short(
        &self,
        call: Call,
        shape: Shape,
        buffers: &mut SendRecvBuffers<'_>,
        kernel: Option<&Kernel>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> Option<Result<(), CommError>> {
        // SAFETY: as in `call`.
        #[allow(unsafe_code)]
        let buffers = unsafe { buffers.erase_lifetime() };
        let result = self.try_with_engine(|engine| engine.try_short(call, shape, buffers, kernel, limit));
        self.small_result(result)
    }

    /// Waits for a small collective that was begun inline; `None` if it was not.
    #[inline(always)]
    fn small_result(&self, result: Option<SmallResult>) -> Option<Result<(), CommError>> {
        match result {
            Some(SmallResult::Done) => Some(Ok(())),
            Some(SmallResult::Pending(completion)) => Some(self.outcome(&completion).map(drop)),
            Some(SmallResult::NotInline) | None => None,
        }
    }

    /// Sends a message of at most [`EAGER_BYTES`], if no operation is queued, and waits until it is sent. Returns `None` if it
    /// cannot; nothing was started then. `limit` is evaluated if the send must wait.
    #[inline(always)]
    pub(crate) fn send_eager(
        &self,
        to: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'_>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> Option<Result<(), CommError>> {
        if is_large(call) {
            return None;
        }
        // SAFETY: as in `call`.
        #[allow(unsafe_code)]
        let buffers = unsafe { buffers.erase_lifetime() };
        match self.try_with_engine(|engine| engine.try_send_eager(to, call, buffers, limit)) {
            Some(MessageResult::Done) => Some(Ok(())),
            Some(MessageResult::Queued(queued)) => Some(self.queued_message(*queued).map(drop)),
            Some(MessageResult::NotInline) | None => None,
        }
    }

    /// Receives a message of at most [`EAGER_BYTES`], if no operation is queued, and waits until it is done. Returns `None` if
    /// it cannot; nothing was started then. `limit` is evaluated if the receive must wait.
    #[inline(always)]
    pub(crate) fn recv_eager(
        &self,
        from: usize,
        call: Call,
        buffers: &mut SendRecvBuffers<'_>,
        limit: &dyn Fn() -> TimeLimit,
    ) -> Option<Result<Status, CommError>> {
        if is_large(call) {
            return None;
        }
        // SAFETY: as in `call`.
        #[allow(unsafe_code)]
        let buffers = unsafe { buffers.erase_lifetime() };
        match self.try_with_engine(|engine| engine.try_recv_eager(from, call, buffers, limit)) {
            Some(MessageResult::Done) => Some(Ok(Status { source: from, call })),
            Some(MessageResult::Queued(queued)) => {
                let status = self.queued_message(*queued);
                Some(status.map(|status| status.expect("a successful receive has a status")))
            }
            Some(MessageResult::NotInline) | None => None,
        }
    }

    /// Waits for a send or receive that was begun inline and queued.
    #[cold]
    fn queued_message(&self, queued: FastPath) -> Outcome {
        match queued {
            FastPath::Done(status) => Ok(status),
            FastPath::Failed(error) => Err(*error),
            FastPath::Pending(completion) => self.outcome(&completion),
            FastPath::NotInline => unreachable!("the message was queued"),
        }
    }

    /// Runs operations concurrently, and waits for all. Returns the status of each message that was received.
    pub(crate) fn call_all(
        &self,
        mut operations: Vec<Option<Operation<'_>>>,
        limit: TimeLimit,
    ) -> Result<Vec<Option<Status>>, CommError> {
        if let [one] = &mut operations[..] {
            return Ok(vec![self.call(one, limit)?]);
        }
        let limit = limit.started();
        let begin = |operation| {
            let completion = Arc::new(Completion::new(limit));
            // SAFETY: `call_all` returns only when all completions are done, so the borrows outlast the
            // operations, as in `call`.
            #[allow(unsafe_code)]
            unsafe {
                self.begin(operation, &completion);
            }
            completion
        };
        let completions: Vec<_> = operations.into_iter().map(|operation| operation.map(begin)).collect();
        let outcomes: Vec<_> = completions
            .iter()
            .map(|completion| completion.as_ref().map_or(Ok(None), |completion| self.outcome(completion)))
            .collect();
        outcomes.into_iter().collect()
    }

    /// Finishes pending operations that no caller waits for, each within its timeout, and leaves the group.
    /// It runs before the last handle of the group is dropped.
    pub(crate) fn finish(&self) {
        if self.callback_queue().pending_operations() == 0 {
            return;
        }
        let _ = self.request(Request::Finish);
        let _ = self.call(&mut Some(Operation::Leave), TimeLimit::from(Duration::MAX));
    }

    /// Returns what groups that are made from this group share with it; `None` if the engine has panicked.
    pub(crate) fn parent_links(&self) -> Option<ParentLinks> {
        let answer = Answer::default();
        let _ = self.request(Request::ParentLinks(Arc::clone(&answer)));
        answer.get().cloned()
    }

    /// Returns the ranks that have neither left the group nor died, and the rank whose loss ended the group.
    pub(crate) fn live_ranks(&self) -> LiveRanks {
        let answer = Answer::default();
        let _ = self.request(Request::LiveRanks(Arc::clone(&answer)));
        answer.get().cloned().expect("the engine answers every request, also after the group has ended")
    }

    /// Returns `Ok` if the group still works, else the error that `call` returns in the failed group.
    #[cfg(feature = "nccl")]
    pub(crate) fn check(&self, call: Option<Call>) -> Result<(), CommError> {
        self.request(Request::Check(call)).map(drop)
    }

    /// Ends the group with `cause`, unless it has ended already.
    #[cfg(feature = "nccl")]
    pub(crate) fn end(&self, cause: crate::error::cause::Cause) {
        let _ = self.request(Request::End(cause));
    }

    fn request(&self, request: Request) -> Outcome {
        self.call(&mut Some(Operation::Request(request)), TimeLimit::from(Duration::MAX))
    }

    /// Waits until `completion` is done, and takes its outcome, which no other thread may take.
    fn outcome(&self, completion: &Arc<Completion>) -> Outcome {
        loop {
            self.wait(std::slice::from_ref(completion), interrupt::check_at());
            if let Some(outcome) = completion.take() {
                return outcome;
            }
            if interrupt::is_interrupted() {
                self.interrupt();
            }
        }
    }

    /// Queues `operation` without waiting. The operation has ended when `completion` is done.
    ///
    /// A completion is done only when the engine has released the memory of its operation: the thread that
    /// took the task out of the engine completes it. If a thread panics while it drives the engine, the
    /// engine forgets all tasks, and completes them, before the thread unwinds further (`DriverGuard::run`).
    ///
    /// # Safety
    /// The borrows of `operation` last until `completion` is done.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn begin(&self, operation: Operation<'_>, completion: &Arc<Completion>) {
        let mut operation = Some(operation);
        // SAFETY: the caller guarantees that the borrows last until `completion` is done.
        if let Some(operation) = unsafe { Operation::erase_lifetime(&mut operation) }.take() {
            self.post(Task { operation, completion: Arc::clone(completion) });
        }
    }
}

impl SendRecvBuffers<'_> {
    /// Returns these buffers as if their borrows were `'static`.
    ///
    /// # Safety
    /// The conditions of [`Operation::erase_lifetime`].
    #[allow(unsafe_code)]
    unsafe fn erase_lifetime(&mut self) -> &mut SendRecvBuffers<'static> {
        // SAFETY: types that differ only in a lifetime have one layout. The caller guarantees the rest.
        unsafe { &mut *std::ptr::from_mut(self).cast() }
    }
}

impl Operation<'_> {
    /// Returns `operation` as if its borrows were `'static`, so that the engine can keep it in its queues.
    ///
    /// # Safety
    /// Until every value that is taken from the result is dropped, the borrowed memory stays valid. The
    /// caller neither accesses memory that the operation borrows mutably nor writes memory that it borrows
    /// for reading. The caller stores no other operation through the returned reference.
    #[allow(unsafe_code)]
    unsafe fn erase_lifetime(operation: &mut Option<Self>) -> &mut Option<Operation<'static>> {
        // SAFETY: types that differ only in a lifetime have one layout. The caller guarantees the rest.
        unsafe { &mut *std::ptr::from_mut(operation).cast() }
    }
}
