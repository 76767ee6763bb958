//! Runs the operations of groups. Each group has one engine, driven by a thread that waits for an operation
//! of the group ([`progress_lock`]).
//!
//! Between blocking calls no data moves, except that of nonblocking operations: a background thread drives
//! the engine if no thread waits for them.

mod affinity;
mod broken;
pub(crate) mod callbacks;
mod completion;
mod connect;
mod control;
mod events;
mod execution;
mod failure;
mod fast_path;
pub(crate) mod handshake;
mod lost_peers;
mod messages;
mod missing;
#[cfg(all(test, loom))]
mod models;
mod monitored_barrier;
pub(crate) mod mux;
mod poller;
mod probe;
mod progress;
mod progress_lock;
mod recording;
mod shared_memory;
mod state;
mod streams;
mod submission;
mod sync;
mod teardown;
#[cfg(test)]
mod tests;
mod wait_policy;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::buffer::{BorrowedBuffer, PlanBuffer};
use crate::collectives::call::{Call, Status};
use crate::collectives::dtype::Dtype;
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::Plan;
use crate::error::CommError;
pub(crate) use affinity::CoreSharing;
pub(crate) use completion::{Completion, Outcome, TimeLimit};
use fast_path::FastPath;
pub(crate) use progress::Engine;
pub(crate) use shared_memory::ParentLinks;
pub(crate) use state::Settings;
pub(crate) use submission::SubmissionQueue;
pub(crate) use wait_policy::Oversubscription;

/// The transport of a collective.
#[derive(Debug)]
pub(crate) enum Transport {
    /// The streams of the plan, sent over connections between ranks.
    Connections(Arc<Plan>),
    /// Memory that all ranks of the group share.
    SharedMemory,
}

/// An operation with the buffers that it reads and writes.
#[derive(Debug)]
pub(crate) enum Operation<'a> {
    Collective {
        call: Call,
        transport: Transport,
        buffer: BorrowedBuffer<'a>,
        kernel: Option<Kernel>,
    },
    Send {
        to: usize,
        call: Call,
        buffer: BorrowedBuffer<'a>,
    },
    /// A receive from rank `from`, or from any rank if `from` is `None`.
    Recv {
        from: Option<usize>,
        call: Call,
        buffer: BorrowedBuffer<'a>,
    },
    /// A probe for a message from rank `from` (`None`: any rank) that no receive has matched. If `wait` is
    /// set, it waits for one. Of `call` only the tag counts.
    Probe {
        from: Option<usize>,
        call: Call,
        wait: bool,
    },
    /// A function that the driving thread calls with the engine, also after the group has ended.
    OnEngine(EngineFn),
    /// Leaves the group when all earlier operations are done: sends a Goodbye frame to every other rank.
    Leave,
}

/// A function that the next thread that drives the engine calls with it.
pub(crate) struct EngineFn(Box<dyn FnOnce(&mut Engine) -> Outcome + Send>);

impl fmt::Debug for EngineFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EngineFn").finish()
    }
}

/// The ranks of a group that have neither left it nor died, as far as this rank knows.
#[derive(Debug, Default)]
pub(crate) struct LiveRanks {
    /// Ranks that have not left the group and whose control connection has not ended; this rank is one of
    /// them.
    pub(crate) live: Vec<usize>,
    /// The rank whose loss ended the group; `None` if the group works or ended for another cause.
    pub(crate) lost: Option<usize>,
}

/// An operation and its [`Completion`]. The completion holds the operation's deadline and the threads that
/// wait for the operation.
#[derive(Debug)]
pub(crate) struct Task {
    operation: Operation<'static>,
    completion: Arc<Completion>,
}

/// Runs a collective of a group of one rank, without an engine: scales this rank's elements if `kernel`
/// scales, and makes the copies that the call needs.
pub(crate) fn run_single_rank(buffer: BorrowedBuffer<'_>, kernel: Option<Kernel>, dtype: Dtype, plan: &Plan) {
    let mut buffer = PlanBuffer::new(buffer, kernel, dtype.size_bytes(), plan);
    buffer.begin();
    buffer.finish();
}

/// The engine of a group, shared by the threads that make calls of the group.
pub(crate) type Shared = progress_lock::Shared<Engine>;

impl Shared {
    pub(crate) fn new(engine: Engine) -> Self {
        let submissions = Arc::clone(engine.submissions());
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
        match self.try_with_engine(|engine| engine.try_inline(operation, limit)).flatten() {
            Some(FastPath::Done(outcome)) => return outcome,
            Some(FastPath::Pending(completion)) => return self.outcome(&completion),
            None => {}
        }
        let completion = Arc::new(Completion::new(limit));
        match operation.take() {
            Some(operation) => self.post(Task { operation, completion: Arc::clone(&completion) }),
            None => return Ok(None),
        }
        self.outcome(&completion)
    }

    /// Runs operations concurrently, and waits for all of them. Returns the status of each message that was
    /// received.
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
        let _ = self.on_engine(|engine| {
            engine.finish();
            Ok(None)
        });
        let _ = self.call(&mut Some(Operation::Leave), TimeLimit::from(Duration::MAX));
    }

    /// Returns what groups that are made from this group share with it.
    pub(crate) fn parent_links(&self) -> Option<ParentLinks> {
        self.ask(|engine| Some(engine.parent_links()))
    }

    /// Returns the ranks that have neither left the group nor died, and the rank whose loss ended the group.
    pub(crate) fn live_ranks(&self) -> LiveRanks {
        self.ask(Engine::live_ranks)
    }

    /// Returns what `question` returns for the engine.
    fn ask<R: Default + Send + 'static>(
        &self,
        question: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> R {
        let answer = Arc::new(Mutex::default());
        let into = Arc::clone(&answer);
        let _ = self.on_engine(move |engine| {
            *into.lock().unwrap_or_else(PoisonError::into_inner) = question(engine);
            Ok(None)
        });
        std::mem::take(&mut *answer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns `Ok` if the group still works, else the error that `call` returns in the failed group.
    #[cfg(feature = "nccl")]
    pub(crate) fn check(&self, call: Option<Call>) -> Result<(), CommError> {
        self.on_engine(move |engine| engine.check(call).map(|()| None)).map(drop)
    }

    /// Ends the group with `cause`, unless it has ended already.
    #[cfg(feature = "nccl")]
    pub(crate) fn end(&self, cause: crate::error::cause::Cause) {
        let _ = self.on_engine(move |engine| {
            engine.end(cause);
            Ok(None)
        });
    }

    fn on_engine(&self, function: impl FnOnce(&mut Engine) -> Outcome + Send + 'static) -> Outcome {
        self.call(
            &mut Some(Operation::OnEngine(EngineFn(Box::new(function)))),
            TimeLimit::from(Duration::MAX),
        )
    }

    /// Waits until `completion` is done, and takes its outcome, which no other thread may take.
    fn outcome(&self, completion: &Arc<Completion>) -> Outcome {
        loop {
            self.wait(std::slice::from_ref(completion), None);
            if let Some(outcome) = completion.take() {
                return outcome;
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
