//! Process groups and their operations.

pub(crate) mod adopt;
pub(crate) mod alloc;
mod blocks;
mod coalesced;
mod collectives;
#[cfg(feature = "nccl")]
pub(crate) mod device;
mod formation;
pub(crate) mod messages;
mod objects;
mod prepare;
mod scan;
mod shrink;
mod subgroup;
mod unequal;
pub(crate) mod work;

use std::any::Any;
use std::fmt;
#[cfg(feature = "nccl")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use convoke_env::Generation;

use crate::api::backend::Backend;
use crate::api::reduction::{Reduction, UntypedReduction, untyped};
use crate::bootstrap::BootstrapConfig;
use crate::bootstrap::options::GroupOptions;
use crate::buffer::{BorrowedBuffer, Scratch, SendRecvBuffers, Slice, SliceMut, ValueType};
use crate::collectives::call::{Call, CallKind, Status};
use crate::collectives::dtype::{Element, ReduceOp, Transfer};
use crate::collectives::kernels;
use crate::collectives::plan::{Algorithms, Plan, Topology};
use crate::engine::{Completion, Engine, Operation, Shared, TimeLimit};
use crate::error::{CommError, require};
use crate::shm::allocations::Allocations;
use crate::transport::links::fork::fork_count;
#[cfg(feature = "nccl")]
use device::GroupDevice;
use prepare::call;
use prepare::{Checked, Collective};
pub(crate) use prepare::{IntoPrepared, Prepared, SendRecv, check_len};
pub(crate) use subgroup::SubgroupAgreement;

/// A process group: ranks that communicate, like an MPI communicator.
///
/// All ranks call the same collectives in the same order.
///
/// Results are equal to the last bit on all ranks. They are also equal between runs with an equal number of
/// ranks and an equal distribution over hosts. Payloads of NaN are excepted.
///
/// A call that fails with [`CommError::context`] ends the group on all ranks. Clones are handles of one
/// group. When the last handle is dropped, or one is [destroyed](Self::destroy), this rank tells its peers
/// that it leaves, and frees all threads, sockets and files of the group.
///
/// An operation that was started, and whose [`Work`](crate::Work) was dropped, completes before this rank
/// leaves, within the operation's timeout. So a message that was started arrives although `main` returns.
/// Pending receives are cancelled. This rank leaves at once after a panic, and soon if another rank waits for
/// a call that this rank has not started. `std::process::exit` drops nothing: call
/// [`Work::wait`](crate::Work::wait) before it.
///
/// # Several threads and groups
///
/// - **Handles** may be used by any number of threads. A group carries out one collective at a time, in the
///   order in which the threads of this rank began them. Messages progress beside collectives.
/// - **One group:** all ranks must begin its collectives in one order, whichever threads do. If the order of
///   two ranks differs, all ranks get [`CommError::Mismatch`], which names both calls. Only calls of equal
///   kind, type, length, reduction and root cannot be told apart: then each gets the data of the other. Give
///   each thread its own group ([`Self::subgroup`] of all ranks).
/// - **Several groups** are independent: no order is needed between them. But two ranks whose blocking calls
///   on two groups have opposite orders wait for each other, until [`CommError::Timeout`] names the other
///   rank. [`Self::start`] does not block.
/// - **Messages** are matched by source and tag, in the order in which they were sent. Threads that receive
///   from one rank use different tags.
/// - **Refused** with [`CommError::InvalidArgument`]: calls in a reduction function, and in a forked child. A
///   callback ([`Work::on_complete`](crate::Work::on_complete)) may start operations, but must not wait.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
    timeout: Duration,
    /// Time limit that all parts of one call share; set only on the handle that runs these parts.
    fixed_limit: Option<TimeLimit>,
    /// Text that this handle adds to the names of subgroups made through it.
    subgroup_name: Option<Arc<str>>,
    /// Choice of algorithms for groups made through this handle, if it differs from this group's choice.
    tuning: Option<Algorithms>,
    /// The device backend of this handle; other handles of the group have their own.
    #[cfg(feature = "nccl")]
    device: Option<Arc<dyn GroupDevice>>,
}

/// Object that must outlive a group and its descendants, such as the store server of this process.
type KeepAlive = Arc<dyn Any + Send + Sync>;

struct Inner {
    generation: Generation,
    topology: Topology,
    /// The shared-memory allocations of [`Group::alloc`]; `None` unless all ranks share memory.
    memory: Option<Arc<Allocations>>,
    /// The engine; `None` in a group of one, which has no peers.
    shared: Option<Shared>,
    /// The engine of a group of one, made for its first message to itself.
    self_engine: OnceLock<Shared>,
    plans: Mutex<Vec<(Call, Arc<Plan>)>>,
    /// Id of the process that made the group: a forked child must not use the group's connections.
    pid: u32,
    /// Number of forks between the first process of the program and the process that made the group.
    forks: u32,
    keep: Option<KeepAlive>,
    destroyed: AtomicBool,
    /// The device backends of all handles, so that a handle that ends the group ends all of them.
    #[cfg(feature = "nccl")]
    device_backends: Mutex<Vec<Weak<dyn GroupDevice>>>,
    /// The configuration of the group; subgroups use the store in it too. It is dropped after the engine and
    /// `keep`.
    config: BootstrapConfig,
    /// Number of subgroups made so far, equal on all ranks. Locked while the ranks agree on the next
    /// subgroup.
    subgroups: Mutex<u64>,
    /// True once [`Group::shrink`] has decided on a new group. Locked during that call.
    shrunk: Mutex<bool>,
}

impl Group {
    /// Returns this rank, below [`Self::size`].
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.config.rank
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.config.size
    }

    /// Returns the index of this rank among the ranks of the group on its host, and their number. Ranks of
    /// one host are those that could share memory.
    #[must_use]
    pub fn local_rank_and_size(&self) -> (usize, usize) {
        let (rank, topology) = (self.rank(), &self.inner.topology);
        (topology.host_and_index(rank).1, topology.local_ranks(rank).len())
    }

    /// Returns the ranks of each host in ascending order, with hosts ordered by their lowest rank. Equal on
    /// all ranks.
    ///
    /// Ranks share a host if they could share memory, and are in one
    /// [locality domain](crate::GroupOptions::locality_domain) of it. The answer is known since the group
    /// formed, so the call costs nothing.
    #[must_use]
    pub fn hosts(&self) -> &[Vec<usize>] {
        self.inner.topology.hosts()
    }

    /// Returns the transport of this group.
    #[must_use]
    pub fn backend(&self) -> Backend {
        if self.inner.memory.is_some() { Backend::SharedMemory } else { Backend::Tcp }
    }

    /// Returns the name of the group.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.config.options.name
    }

    /// Returns the incarnation of the job to which this group belongs; equal on all ranks.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// Returns the time limit of calls on this handle.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns a handle of this group with another time limit. The limit covers the whole call; a call that
    /// exceeds it ends the group with [`CommError::Timeout`].
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, fixed_limit: None, ..self.clone() }
    }

    /// Ends the group on all ranks: every pending or later call returns [`CommError::Aborted`] with
    /// `reason`. Any thread may call it, also while calls are in progress.
    pub fn abort(&self, reason: &str) {
        if let Some(shared) = self.inner.shared().filter(|_| !self.inner.is_forked()) {
            shared.abort(reason.to_owned());
        }
        #[cfg(feature = "nccl")]
        if let Some(backend) = self.device.as_ref().filter(|_| !self.inner.is_forked()) {
            backend.abort(reason);
        }
    }

    /// Leaves the group now, although handles exist. Later calls on any handle of this rank return
    /// [`CommError::Destroyed`]. Subgroups are not affected.
    ///
    /// First waits until all operations in progress on this rank complete, each within its time limit;
    /// [`Self::abort`] ends operations at once. A peer that needs this rank later gets
    /// [`CommError::PeerLost`] with [`LossReason::Left`](crate::LossReason::Left). Ranks may destroy a group
    /// at different times. In a forked child and inside a reduction function, the call does nothing.
    pub fn destroy(&self) {
        let refused = self.inner.check_caller().is_err();
        if refused || self.inner.destroyed.swap(true, Ordering::Relaxed) {
            return;
        }
        #[cfg(feature = "nccl")]
        for backend in self.device_backends() {
            backend.destroy();
        }
        let Some(shared) = self.inner.shared() else { return };
        // The engine refuses calls that other threads make between these two lines.
        let _ = shared.call(&mut Some(Operation::Leave), TimeLimit::from(Duration::MAX));
        shared.close(|_| {});
    }

    /// Runs an operation and waits for it.
    #[inline]
    fn carry_out(&self, mut prepared: Prepared<'_>) -> Result<Option<Status>, CommError> {
        // Operations are large, so the engine takes this one by reference instead of moving it.
        if let (Ok(operation @ Some(_)), Some(shared)) = (&mut prepared, self.inner.shared()) {
            return shared.call(operation, self.limit());
        }
        prepared.map(|_| None)
    }

    /// Returns a handle whose calls are parts of one call: they share one time limit, which starts now.
    pub(crate) fn with_fixed_deadline(&self) -> Self {
        Self { fixed_limit: Some(self.limit().started()), ..self.clone() }
    }

    /// Returns the time limit of an operation that starts now.
    pub(crate) fn limit(&self) -> TimeLimit {
        self.fixed_limit.unwrap_or_else(|| TimeLimit::from(self.timeout))
    }

    /// Drives the engine until one of `completions` is done, at most until `until`.
    pub(crate) fn wait_for(&self, completions: &[Arc<Completion>], until: Option<Instant>) {
        if let Some(shared) = self.inner.shared() {
            shared.wait(completions, until);
        }
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        self.inner.shared()
    }
}

impl Inner {
    fn is_forked(&self) -> bool {
        fork_count() != self.forks
    }

    /// Returns the engine; `None` in a group of one that has not needed an engine yet.
    fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref().or_else(|| self.self_engine.get())
    }

    /// Returns an error if the group was destroyed, this thread runs a reduction function, or this process is
    /// a fork.
    fn check_caller(&self) -> Result<(), CommError> {
        if self.destroyed.load(Ordering::Relaxed) {
            return Err(CommError::Destroyed { group: self.config.options.name.clone() });
        }
        require(!kernels::is_in_reduction_function(), || {
            "a reduction function cannot use a group: it is called in the middle of an operation".to_owned()
        })?;
        let (name, pid) = (&self.config.options.name, self.pid);
        require(!self.is_forked(), || format!("group {name} belongs to process {pid}; this is a fork of it"))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_forked() {
            // A forked child must not tell peers that its parent leaves. The child's sockets were closed at
            // the fork (`links::fork`) and must not be closed again. Dropping the engine may wait for threads
            // that a forked child does not have.
            std::mem::forget((self.shared.take(), self.self_engine.take(), self.keep.take()));
        } else if let Some(shared) = self.shared() {
            if std::thread::panicking() {
                return shared.close(Engine::leave_on_panic);
            }
            shared.finish();
            shared.close(Engine::leave);
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}
