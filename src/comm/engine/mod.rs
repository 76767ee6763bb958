//! Carries out operations: one engine for each group, driven by whichever thread waits ([`seat`]).
//!
//! Nothing happens while no call is in progress, but for nonblocking operations, which a background thread
//! carries out if nobody waits for them.

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

/// How a collective is carried out.
#[derive(Debug)]
pub(crate) enum Way {
    /// By streams over connections.
    Streams(Arc<Plan>),
    /// Through the memory that all ranks share.
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
    /// From any rank if `from` is `None`.
    Recv {
        from: Option<usize>,
        call: Call,
        lent: Lent<'a>,
    },
    /// Tells of a message that could be received; of its `call` only the tag counts.
    Probe {
        from: Option<usize>,
        call: Call,
        wait: bool,
    },
    /// Something that the engine answers at once, also after the group has ended.
    Ask(Question),
    /// Takes leave of the others when all that was begun before is done.
    Leave,
}

/// What is asked of the engine, by whoever drives next.
pub(crate) struct Question(Box<dyn FnOnce(&mut Engine) -> Outcome + Send>);

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Question").finish()
    }
}

/// Which ranks will still make calls of a group, as far as this one knows.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    /// Those whose processes have it.
    pub(crate) here: Vec<usize>,
    /// The one that it ended for, if one is lost.
    pub(crate) lost: Option<usize>,
}

/// An operation, who waits for it and how long.
#[derive(Debug)]
pub(crate) struct Task {
    operation: Operation<'static>,
    ticket: Arc<Ticket>,
}

/// Carries out the collective of a group of one, without an engine: what a rank does to its own share.
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

    /// Carries out an operation, which it takes, and waits for it.
    pub(crate) fn call(&self, operation: &mut Option<Operation<'_>>, limit: Limit) -> Outcome {
        // SAFETY: the borrows last until this function returns, and it returns only with the outcome. It does
        // not unwind before: what is not ours and may panic, callbacks and user's reductions, is caught or
        // runs with the seat, whose poison makes the next driver forget all tasks.
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

    /// Carries out operations side by side, and waits for all of them.
    pub(crate) fn call_all(&self, operations: Vec<Operation<'_>>, limit: Limit) -> Result<(), CommError> {
        let limit = limit.begun();
        let begin = |operation| {
            let ticket = Arc::new(Ticket::new(limit));
            // SAFETY: as in `call`.
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

    /// Before the last handle goes: has done what was begun and nobody waits for, each within its time, and
    /// leaves.
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

    /// Which ranks still have the group.
    pub(crate) fn look(&self) -> Presence {
        let presence = Arc::new(Mutex::default());
        let into = Arc::clone(&presence);
        let _ = self.ask(move |engine| {
            *into.lock().unwrap_or_else(PoisonError::into_inner) = engine.presence();
            Ok(None)
        });
        std::mem::take(&mut *presence.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the group goes on; if not, the error that `call` gets.
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

    /// Waits until a ticket, which only this thread has, is done.
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
    /// A ticket is done only when the engine has let go of the memory of its operation: it is completed by
    /// whoever took the task out of the engine. If a thread panics while it drives, the seat is poisoned, and
    /// whoever takes it next first forgets all tasks.
    ///
    /// # Safety
    /// What `operation` borrows stays borrowed until `ticket` is done.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn begin(&self, operation: Operation<'_>, ticket: &Arc<Ticket>) {
        let mut operation = Some(operation);
        // SAFETY: passed on to the caller.
        if let Some(operation) = unsafe { Operation::outliving(&mut operation) }.take() {
            self.post(Task { operation, ticket: Arc::clone(ticket) });
        }
    }
}

impl Operation<'_> {
    /// The same, though nothing says any more that its memory is there.
    ///
    /// # Safety
    /// Until what is taken from it is dropped its memory stays valid, as it was borrowed for: nothing else
    /// touches what was lent to be filled, nothing writes what was lent to be read. Nothing else is put
    /// there.
    #[allow(unsafe_code)]
    unsafe fn outliving(operation: &mut Option<Self>) -> &mut Option<Operation<'static>> {
        // SAFETY: types that differ in a lifetime alone are laid out alike. The rest is passed on to the
        // caller.
        unsafe { &mut *std::ptr::from_mut(operation).cast() }
    }
}
