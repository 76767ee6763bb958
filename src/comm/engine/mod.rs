//! Runs operations: one engine for each group, driven by whichever thread waits ([`seat`]).
//!
//! Without a call in progress nothing happens, except for nonblocking operations. A background thread runs
//! them if no thread waits for them.

mod affinity;
mod at_once;
pub(crate) mod buffer;
pub(crate) mod chores;
mod connect;
mod control;
mod core;
mod door;
mod failure;
mod leave;
mod look;
mod losses;
mod mailbox;
mod messages;
mod missing;
#[cfg(all(test, loom))]
mod models;
mod patience;
mod poller;
mod probe;
mod recording;
mod roll_call;
pub(crate) mod row;
mod run;
mod seat;
mod share;
mod state;
pub(crate) mod streams;
mod sync;
#[cfg(test)]
mod tests;
mod ticket;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::call::Call;
use crate::dtype::Dtype;
use crate::error::CommError;
use crate::kernels::Kernel;
use crate::plan::Plan;
pub(crate) use affinity::{Sharing, allowed_cores};
use at_once::AtOnce;
use buffer::Lent;
pub(crate) use core::Engine;
pub(crate) use mailbox::Mailbox;
pub(crate) use patience::Crowd;
use row::Row;
pub(crate) use state::Settings;
pub(crate) use ticket::{Limit, Outcome, Ticket};

/// The transport of a collective.
#[derive(Debug)]
pub(crate) enum Way {
    /// Streams over connections.
    Streams(Arc<Plan>),
    /// The memory that all ranks share.
    Memory,
}

/// An operation with its memory.
#[derive(Debug)]
pub(crate) enum Operation<'a> {
    Collective {
        call: Call,
        way: Way,
        lent: Lent<'a>,
        kernel: Option<Kernel>,
    },
    Send {
        to: usize,
        call: Call,
        lent: Lent<'a>,
    },
    /// A receive from rank `from`, or from any rank if `from` is `None`.
    Recv {
        from: Option<usize>,
        call: Call,
        lent: Lent<'a>,
    },
    /// A probe for a message that could be received; only the tag of its `call` counts.
    Probe {
        from: Option<usize>,
        call: Call,
        wait: bool,
    },
    /// A question that the engine answers at once, also after the group has ended.
    Ask(Question),
    /// Says goodbye to the others when all earlier operations are done.
    Leave,
}

/// A function that the next driver calls with the engine.
pub(crate) struct Question(Box<dyn FnOnce(&mut Engine) -> Outcome + Send>);

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Question").finish()
    }
}

/// The ranks that will still make calls of a group, as far as this rank knows.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    /// Ranks whose processes still have the group.
    pub(crate) here: Vec<usize>,
    /// The lost rank for which the group ended, if there is one.
    pub(crate) lost: Option<usize>,
}

/// An operation and its ticket, which knows the waiters and the deadline.
#[derive(Debug)]
pub(crate) struct Task {
    operation: Operation<'static>,
    ticket: Arc<Ticket>,
}

/// Runs the collective of a group of one without an engine: only the rank's own share is changed.
pub(crate) fn alone(lent: Lent<'_>, kernel: Option<Kernel>, dtype: Dtype, plan: &Plan) {
    let mut row = Row::new(lent, kernel, dtype.size_bytes(), plan);
    row.begin();
    row.finish();
}

/// An engine that several threads use.
pub(crate) type Shared = seat::Shared<Engine>;

impl Shared {
    pub(crate) fn new(engine: Engine) -> Self {
        let mailbox = Arc::clone(engine.mailbox());
        Self::of(engine, mailbox)
    }

    /// Takes an operation, runs it and waits for it.
    pub(crate) fn call(&self, operation: &mut Option<Operation<'_>>, limit: Limit) -> Outcome {
        // SAFETY: the borrows last until this function returns, and it returns only with the outcome. It does
        // not unwind before. Callbacks and reductions of the user may panic. They are caught, or they run
        // with the lock held, whose poison makes the next driver forget all tasks.
        #[allow(unsafe_code)]
        let operation = unsafe { Operation::outliving(operation) };
        match self.if_free(|engine| engine.at_once(operation, limit)).flatten() {
            Some(AtOnce::Done(outcome)) => return outcome,
            Some(AtOnce::Begun(ticket)) => return self.outcome(&ticket),
            None => {}
        }
        let ticket = Arc::new(Ticket::new(limit));
        match operation.take() {
            Some(operation) => self.post(Task { operation, ticket: Arc::clone(&ticket) }),
            None => return Ok(None),
        }
        self.outcome(&ticket)
    }

    /// Runs operations concurrently, and waits for all of them.
    pub(crate) fn call_all(&self, operations: Vec<Operation<'_>>, limit: Limit) -> Result<(), CommError> {
        let limit = limit.begun();
        let begin = |operation| {
            let ticket = Arc::new(Ticket::new(limit));
            // SAFETY: `call_all` returns only when all tickets are done, so the borrows outlast the
            // operations, as in `call`.
            #[allow(unsafe_code)]
            unsafe {
                self.begin(operation, &ticket);
            }
            ticket
        };
        let tickets: Vec<_> = operations.into_iter().map(begin).collect();
        let outcomes: Vec<_> = tickets.iter().map(|ticket| self.outcome(ticket)).collect();
        outcomes.into_iter().try_for_each(|outcome| outcome.map(drop))
    }

    /// Finishes pending operations that no caller waits for, each within its timeout, and leaves. It runs
    /// before the last handle is dropped.
    pub(crate) fn finish(&self) {
        if self.chores().pending() == 0 {
            return;
        }
        let _ = self.ask(|engine| {
            engine.finish();
            Ok(None)
        });
        let _ = self.call(&mut Some(Operation::Leave), Limit::from(Duration::MAX));
    }

    /// Returns which ranks still have the group.
    pub(crate) fn look(&self) -> Presence {
        let presence = Arc::new(Mutex::default());
        let into = Arc::clone(&presence);
        let _ = self.ask(move |engine| {
            *into.lock().unwrap_or_else(PoisonError::into_inner) = engine.presence();
            Ok(None)
        });
        std::mem::take(&mut *presence.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns `Ok` if the group still works, else the error for `call`.
    #[cfg(feature = "nccl")]
    pub(crate) fn check(&self, call: Option<Call>) -> Result<(), CommError> {
        self.ask(move |engine| engine.check(call).map(|()| None)).map(drop)
    }

    /// Ends the group, unless it has ended.
    #[cfg(feature = "nccl")]
    pub(crate) fn end(&self, cause: crate::cause::Cause) {
        let _ = self.ask(move |engine| {
            engine.end(cause);
            Ok(None)
        });
    }

    fn ask(&self, question: impl FnOnce(&mut Engine) -> Outcome + Send + 'static) -> Outcome {
        self.call(&mut Some(Operation::Ask(Question(Box::new(question)))), Limit::from(Duration::MAX))
    }

    /// Waits until a ticket that only this thread has is done.
    fn outcome(&self, ticket: &Arc<Ticket>) -> Outcome {
        loop {
            self.wait(std::slice::from_ref(ticket), None);
            if let Some(outcome) = ticket.take() {
                return outcome;
            }
        }
    }

    /// Begins an operation that ends when `ticket` is done.
    ///
    /// A ticket is done only when the engine has let go of the memory of its operation: the thread that took
    /// the task out of the engine completes it. If a thread panics while it drives, it poisons the lock. The
    /// next thread that takes the lock first forgets all tasks.
    ///
    /// # Safety
    /// The borrows of `operation` last until `ticket` is done.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn begin(&self, operation: Operation<'_>, ticket: &Arc<Ticket>) {
        let mut operation = Some(operation);
        // SAFETY: the caller guarantees that the borrows last until `ticket` is done.
        if let Some(operation) = unsafe { Operation::outliving(&mut operation) }.take() {
            self.post(Task { operation, ticket: Arc::clone(ticket) });
        }
    }
}

impl Operation<'_> {
    /// Returns the operation with its lifetime removed.
    ///
    /// # Safety
    /// Until every value that is taken from the result is dropped, the memory stays valid as it was borrowed.
    /// Memory that was lent to be filled is not accessed, memory that was lent to be read is not written. The
    /// caller puts no other operation into the place.
    #[allow(unsafe_code)]
    unsafe fn outliving(operation: &mut Option<Self>) -> &mut Option<Operation<'static>> {
        // SAFETY: types that differ only in a lifetime have one layout. The caller guarantees the rest.
        unsafe { &mut *std::ptr::from_mut(operation).cast() }
    }
}
