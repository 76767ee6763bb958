//! The operations that an engine takes, and the requests to the engine itself.

use std::sync::{Arc, OnceLock};

use super::completion::Completion;
use super::settings::ParentLinks;
use crate::buffer::{BorrowedBuffer, CollectiveBuffers, PlanBuffer};
use crate::collectives::call::Call;
use crate::collectives::dtype::Dtype;
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::Plan;
#[cfg(feature = "nccl")]
use crate::error::cause::Cause;

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
        buffers: CollectiveBuffers<'a>,
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
    /// A request to the engine itself, which it also answers after the group has ended.
    Request(Request),
    /// Leaves the group when all earlier operations are done: sends a Goodbye frame to every other rank.
    Leave,
}

/// A request to an engine.
#[derive(Debug)]
pub(crate) enum Request {
    /// Prepares to leave: the program has dropped its last handle of the group.
    Finish,
    ParentLinks(Answer<ParentLinks>),
    LiveRanks(Answer<LiveRanks>),
    /// Fails with the error that `call` returns, if the group has ended.
    #[cfg(feature = "nccl")]
    Check(Option<Call>),
    /// Ends the group, unless it has ended already.
    #[cfg(feature = "nccl")]
    End(Cause),
}

/// The answer to a request, which is there when the request is done.
pub(crate) type Answer<T> = Arc<OnceLock<T>>;

/// The ranks of a group that have neither left it nor died, as far as this rank knows.
#[derive(Debug, Clone)]
pub(crate) struct LiveRanks {
    /// This rank, and the ranks that have not left and whose control connection has not ended.
    pub(crate) live: Vec<usize>,
    /// The rank whose loss ended the group; `None` if the group works or ended for another cause.
    pub(crate) lost: Option<usize>,
}

/// An operation and its [`Completion`], with the deadline and the threads that wait.
#[derive(Debug)]
pub(crate) struct Task {
    pub(super) operation: Operation<'static>,
    pub(super) completion: Arc<Completion>,
}

/// Runs a collective of a group of one rank, without an engine: scales this rank's elements if `kernel`
/// scales, and makes the copies that the call needs.
pub(crate) fn run_single_rank(buffer: BorrowedBuffer<'_>, kernel: Option<Kernel>, dtype: Dtype, plan: &Plan) {
    let mut buffer = PlanBuffer::new(buffer, kernel, dtype.size_bytes(), plan);
    buffer.begin();
    buffer.finish();
}
