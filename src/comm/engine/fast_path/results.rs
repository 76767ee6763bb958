//! The results of attempts to run an operation inline.

use std::sync::Arc;

use crate::collectives::call::Status;
use crate::engine::completion::Completion;
use crate::engine::operation::Operation;
use crate::error::CommError;

/// An operation, which is taken out when it becomes a queued operation.
pub(super) type OperationSlot = Option<Operation<'static>>;

/// The result of an attempt to run an operation inline.
///
/// It is small. A [`CommError`] has 88 bytes, and each move of one that was just made takes several nanoseconds.
#[derive(Debug)]
pub(crate) enum FastPath {
    /// Nothing was started.
    NotInline,
    Done(Option<Status>),
    Failed(Box<CommError>),
    /// The operation was started and is queued in the engine.
    Pending(Arc<Completion>),
}

/// The result of an attempt to send or receive an eager message inline.
///
/// It fits in two registers. With a larger result, a short message takes a tenth longer.
#[derive(Debug)]
pub(crate) enum MessageResult {
    /// Nothing was started.
    NotInline,
    /// The message was sent, or a message of the length of the buffer was received.
    Done,
    /// The call had to be queued.
    Queued(Box<FastPath>),
}

/// The result of an attempt to run a small collective inline.
#[derive(Debug)]
pub(crate) enum SmallResult {
    /// Nothing was started.
    NotInline,
    Done,
    /// The collective was started and is queued in the engine.
    Pending(Arc<Completion>),
}
