//! Groups of ranks and what they do together.

pub(crate) mod alloc;
mod blocks;
pub(crate) mod buffers;
mod coalesced;
#[cfg(feature = "nccl")]
mod device;
pub(crate) mod messages;
pub(crate) mod nonblocking;
mod objects;
mod scan;
mod shrink;
mod subgroup;
mod unequal;
mod whole;
pub(crate) mod work;

use std::any::Any;
use std::fmt;
#[cfg(feature = "nccl")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::{PrefixStore, Store};

use crate::bootstrap::{self, Formed, Invitation, Whereabouts};
use crate::call::{Call, CallKind, Envelope};
#[cfg(feature = "nccl")]
use crate::device::side::Side;
use crate::dtype::{Dtype, Element, ReduceOp};
use crate::engine::buffer::Lent;
use crate::engine::{self, Engine, Limit, Operation, Shared, Sharing, Ticket, Way};
use crate::error::CommError;
use crate::kernels::{self, Kernel};
use crate::links::fork::forks;
use crate::options::GroupOptions;
use crate::plan::{self, Algorithm, Blocks, Plan, Rounding, Topology, Tuning};
use crate::reduction::Reduction;
use crate::shm;
use crate::shm::allocations::Allocations;
pub(crate) use subgroup::Agreed;

/// Plans that are kept for the next call of the same kind.
const PLANS: usize = 16;

/// An operation whose arguments make sense, with the memory it works on; `None` if there is nothing to do.
///
/// Each operation has a `prepare_*`; the blocking form carries out what it gives, the nonblocking one begins it.
type Prepared<'a> = Result<Option<Operation<'a>>, CommError>;

/// Ranks that work together.
///
/// Collectives of a group happen in the same order on all ranks: every rank makes the same calls, and
/// calls on one group from several threads must be ordered by the program. What ranks get is the same to
/// the last bit on all of them, and from run to run for the same number of ranks on hosts in the same way
/// (payloads of NaN excepted).
///
/// A call that fails with [`CommError::place`] ends the group on all ranks. Clones are the same group;
/// when the last is dropped, or one is [destroyed](Self::destroy), the group takes leave of its peers and no
/// thread, socket or file stays.
///
/// Operations that were begun, and whose [`Work`](crate::Work) was dropped, complete before the group takes leave, each within
/// its timeout. So a message of [`Self::isend`] arrives though `main` returns. Pending receives are given up. The group leaves
/// at once after a panic, and soon if another rank waits for a call that this one has not begun. `std::process::exit` drops
/// nothing: call [`Work::wait`](crate::Work::wait) before it.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
    timeout: Duration,
    /// Set on a handle for the parts of one call: what is left for them together.
    rest: Option<Limit>,
    /// What subgroups made through this handle are called.
    subgroup_name: Option<Arc<str>>,
    /// How groups made through this handle choose algorithms, if not as this one.
    tuning: Option<Arc<Tuning>>,
    /// Its side on a device, which has a handle of its own.
    #[cfg(feature = "nccl")]
    device: Option<Arc<Side>>,
}

/// What must outlive a group and those that come from it, such as the store that this process serves.
type Keep = Arc<dyn Any + Send + Sync>;

struct Inner {
    name: String,
    rank: usize,
    size: usize,
    generation: Generation,
    tuning: Tuning,
    topology: Topology,
    /// What of it programs have, if all ranks share memory.
    memory: Option<Arc<Allocations>>,
    /// `None` in a group of one, which needs nobody.
    shared: Option<Shared>,
    /// In a group of one: for messages to itself, from the first on.
    itself: OnceLock<Shared>,
    plans: Mutex<Vec<(Call, Arc<Plan>)>>,
    /// The process that made the group: a forked child must not speak for it.
    pid: u32,
    /// How many forks that process was from the first.
    forks: u32,
    keep: Option<Keep>,
    destroyed: AtomicBool,
    /// Its sides on devices: handles without one speak for them as well.
    #[cfg(feature = "nccl")]
    sides: Mutex<Vec<Weak<Side>>>,
    /// What its subgroups are made from.
    store: Arc<dyn Store>,
    store_rank: Option<usize>,
    options: GroupOptions,
    /// Times that subgroups were made so far, the same on all ranks. Locked while the ranks agree on the next.
    subgroups: Mutex<u64>,
    /// Whether the survivors have gone on. Locked while they find together.
    shrunk: Mutex<bool>,
    /// The ranks' ranks in the first of the groups that this one comes from.
    origin: Vec<usize>,
    /// How this rank shares cores with others; `None` in a group of one.
    sharing: Option<Sharing>,
}

impl Group {
    /// Finds the other ranks of a group through `store` and connects to them.
    ///
    /// Needs no environment. All ranks pass the same `size`, and options that are the same but for
    /// where they listen; each passes its own `rank`.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`] names who did not come or differs. [`CommError::Concurrent`] if another
    /// thread is making the same rank's group through this store. [`CommError::InvalidArgument`],
    /// [`CommError::Unauthorized`], [`CommError::PeerLost`], [`CommError::Store`],
    /// [`CommError::System`].
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        size: usize,
        options: GroupOptions,
    ) -> Result<Self, CommError> {
        // Two handles of one store are one place.
        let place = format!("the store {:p}", Arc::as_ptr(&store).cast::<()>());
        let store = Arc::new(PrefixStore::new("convoke", store));
        let tuning = Tuning::parse(&options.algorithms).map_err(CommError::InvalidArgument)?;
        let origin = (0..size).collect();
        let (store_rank, agent, sharing) = (None, None, None);
        let (is_successor, whereabouts, removal) = (false, Whereabouts::default(), None);
        let invitation = Invitation {
            store,
            place,
            store_rank,
            whereabouts,
            removal,
            rank,
            size,
            origin,
            is_successor,
            options,
            tuning,
            agent,
            sharing,
        };
        Self::join(invitation, None)
    }

    pub(crate) fn join(invitation: Invitation, keep: Option<Keep>) -> Result<Self, CommError> {
        let Invitation { rank, size, .. } = invitation;
        if rank >= size || size > 1 << 24 {
            let what = format!("rank {rank} of {size}: ranks are 0 to {}", size.saturating_sub(1));
            return Err(CommError::InvalidArgument(what));
        }
        if size == 1 {
            let generation = match invitation.options.generation {
                Some(generation) => generation,
                None => {
                    Generation::random().map_err(|error| CommError::system("no random numbers", error))?
                }
            };
            return Ok(Self::of(&invitation, generation, (Topology::one_host(1), None), None, keep));
        }
        let formed = bootstrap::connect(&invitation)?;
        Ok(Self::formed(invitation, formed, keep))
    }

    fn formed(invitation: Invitation, formed: Formed, keep: Option<Keep>) -> Self {
        let Formed { engine, generation, topology, in_memory } = formed;
        let memory = engine.allocations().filter(|_| in_memory);
        let invitation = Invitation { sharing: Some(engine.sharing()), ..invitation };
        Self::of(&invitation, generation, (topology, memory), Some(Shared::new(*engine)), keep)
    }

    fn of(
        invitation: &Invitation,
        generation: Generation,
        (topology, memory): (Topology, Option<Arc<Allocations>>),
        shared: Option<Shared>,
        keep: Option<Keep>,
    ) -> Self {
        let inner = Inner {
            name: invitation.options.name.clone(),
            rank: invitation.rank,
            size: invitation.size,
            generation,
            tuning: invitation.tuning.clone(),
            topology,
            memory,
            shared,
            itself: OnceLock::new(),
            plans: Mutex::default(),
            pid: std::process::id(),
            forks: forks(),
            keep,
            store: Arc::clone(&invitation.store),
            store_rank: invitation.store_rank,
            options: invitation.options.clone(),
            destroyed: AtomicBool::new(false),
            #[cfg(feature = "nccl")]
            sides: Mutex::default(),
            subgroups: Mutex::default(),
            shrunk: Mutex::default(),
            origin: invitation.origin.clone(),
            sharing: invitation.sharing,
        };
        let timeout = invitation.options.timeout;
        Self {
            inner: Arc::new(inner),
            timeout,
            rest: None,
            subgroup_name: None,
            tuning: None,
            #[cfg(feature = "nccl")]
            device: None,
        }
    }

    /// This rank, below [`Self::size`].
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Index of this rank among those of the group that share its host (and could share memory), and their
    /// number.
    #[must_use]
    pub fn place_on_host(&self) -> (usize, usize) {
        let Inner { rank, ref topology, .. } = *self.inner;
        (topology.place(rank).1, topology.ranks_beside(rank).len())
    }

    /// The ranks of each host, lowest first; hosts in the order of their lowest ranks. The same on all ranks.
    ///
    /// Ranks share a host if they could share memory, and are in the same
    /// [part](crate::GroupOptions::part_of_host) of it. Known since the group was made: costs nothing.
    #[must_use]
    pub fn hosts(&self) -> &[Vec<usize>] {
        self.inner.topology.hosts()
    }

    /// Whether all ranks share memory.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.inner.memory.is_some()
    }

    /// Name of the group.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Which incarnation of the job this group belongs to; the same on all ranks.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// How long calls on this handle may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The same group with another time for each call. The time covers the whole call; a call that
    /// takes longer ends the group with [`CommError::Timeout`].
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, rest: None, ..self.clone() }
    }

    /// Ends the group on all ranks: every pending or later call returns [`CommError::Aborted`] with
    /// `reason`. From any thread, also while calls are in progress.
    pub fn abort(&self, reason: &str) {
        if let Some(shared) = self.inner.shared().filter(|_| !self.inner.is_forked()) {
            shared.abort(reason.to_owned());
        }
        #[cfg(feature = "nccl")]
        if let Some(side) = self.device.as_ref().filter(|_| !self.inner.is_forked()) {
            side.abort(reason);
        }
    }

    /// Takes leave of the other ranks now, though there are handles left: later calls on any of them, on this rank,
    /// return [`CommError::Destroyed`]. Its subgroups go on.
    ///
    /// First waits until all that is under way here is done, each within its time; [`Self::abort`] ends it at once.
    /// Who needs this rank later gets [`CommError::PeerLost`], left. Ranks need not destroy a group together. In a
    /// forked child and inside a reduction function it does nothing.
    pub fn destroy(&self) {
        let refused = self.inner.check_caller().is_err();
        if refused || self.inner.destroyed.swap(true, Ordering::Relaxed) {
            return;
        }
        #[cfg(feature = "nccl")]
        for side in self.sides() {
            side.destroy();
        }
        let Some(shared) = self.inner.shared() else { return };
        // Of who comes between the two, the engine knows that it has left.
        let _ = shared.call(&mut Some(Operation::Leave), Limit::from(Duration::MAX));
        shared.close(|_| {});
    }

    /// Carries out an operation and waits for it.
    #[inline]
    fn carry_out(&self, mut prepared: Prepared<'_>) -> Result<Option<Envelope>, CommError> {
        // Operations are large: it stays where it is.
        if let (Ok(operation @ Some(_)), Some(shared)) = (&mut prepared, self.inner.shared()) {
            return shared.call(operation, self.limit());
        }
        prepared.map(|_| None)
    }

    /// A handle for the parts of one call, which have its time together.
    pub(crate) fn in_parts(&self) -> Self {
        Self { rest: Some(self.limit().begun()), ..self.clone() }
    }

    /// How long an operation that begins now may take.
    pub(crate) fn limit(&self) -> Limit {
        self.rest.unwrap_or_else(|| Limit::from(self.timeout))
    }

    /// Drives until one of `tickets` is done, at most until `until`.
    fn wait_for(&self, tickets: &[Arc<Ticket>], until: Option<Instant>) {
        if let Some(shared) = self.inner.shared() {
            shared.wait(tickets, until);
        }
    }

    fn nudge(&self) {
        if let Some(shared) = self.inner.shared() {
            shared.nudge();
        }
    }

    /// Whether both are handles of one group.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// A collective over `lent`, the row of `plan`, which is asked for only where there is something to do.
    fn collective<'a>(
        &self,
        call: Call,
        plan: impl FnOnce() -> Arc<Plan>,
        lent: Lent<'a>,
        kernel: Option<Kernel>,
    ) -> Prepared<'a> {
        self.inner.check_caller()?;
        if self.inner.shared.is_none() {
            engine::alone(lent, kernel, call.dtype, &plan());
            return Ok(None);
        }
        Ok(Some(Operation::Collective { call, way: Way::Streams(plan()), lent, kernel }))
    }

    /// As [`Self::collective`], by the plan that the call alone determines.
    #[inline(always)]
    fn planned<'a>(&self, call: Call, lent: Lent<'a>, kernel: Option<Kernel>) -> Prepared<'a> {
        if self.inner.goes_through_memory(&call) {
            self.inner.check_caller()?;
            return Ok(Some(Operation::Collective { call, way: Way::Memory, lent, kernel }));
        }
        self.collective(call, || self.inner.plan(call), lent, kernel)
    }

    pub(crate) fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        Err(CommError::InvalidArgument(format!("{what} {rank}: ranks are 0 to {}", self.size() - 1)))
    }
}

impl Inner {
    fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// The engine, if there is one.
    fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref().or_else(|| self.itself.get())
    }

    /// Sees to it that there is one.
    fn ensure_shared(&self) -> Result<(), CommError> {
        if self.shared().is_some() {
            return Ok(());
        }
        let invitation = Invitation {
            store: Arc::clone(&self.store),
            store_rank: self.store_rank,
            origin: self.origin.clone(),
            ..Invitation::alone(self.options.clone(), self.tuning.clone())
        };
        let shared = Shared::new(bootstrap::alone(&invitation, self.generation)?);
        // Another thread may have been first; nobody has used the second.
        let _ = self.itself.set(shared);
        Ok(())
    }

    /// Whether whoever calls may use the group.
    fn check_caller(&self) -> Result<(), CommError> {
        if self.destroyed.load(Ordering::Relaxed) {
            return Err(CommError::Destroyed { group: self.name.clone() });
        }
        if kernels::is_inside_function() {
            let what = "a reduction function cannot use a group: it is called in the middle of an operation";
            return Err(CommError::InvalidArgument(what.to_owned()));
        }
        if !self.is_forked() {
            return Ok(());
        }
        let what = format!("group {} belongs to process {}; this is a fork of it", self.name, self.pid);
        Err(CommError::InvalidArgument(what))
    }

    /// Whether a call is carried out in the memory that all ranks share. All ranks decide alike.
    fn goes_through_memory(&self, call: &Call) -> bool {
        // Shares that are wider than elements need a copy of the row: streams have that.
        let wide = matches!(call.rounding(), Rounding::Once { wide_shares: true });
        self.memory.is_some() && shm::is_known(call.kind) && !wide && !self.tuning.is_chosen(call.kind)
    }

    /// Whether a reduce-scatter changes what other ranks own, so that it needs a copy: ring and hierarchy do.
    fn works_on_copy(&self, call: &Call) -> bool {
        let (bytes, rounding) = (call.bytes() as usize, call.rounding());
        !self.goes_through_memory(call)
            && self.tuning.reduce_scatter(bytes, &self.topology, rounding) != Algorithm::Direct
    }

    fn plan(&self, call: Call) -> Arc<Plan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.iter().find(|(known, _)| *known == call) {
            return Arc::clone(plan);
        }
        let Self { rank, size: world, ref tuning, ref topology, .. } = *self;
        let (count, root) = (call.count() as usize, call.root as usize);
        let (bytes, element_bytes) = (call.bytes() as usize, call.dtype.size_bytes());
        let rounding = call.rounding();
        let blocks = || Blocks::equal_of(world, count);
        let plan = Arc::new(match call.kind {
            CallKind::AllReduce => {
                let algorithm = tuning.all_reduce(bytes, topology, rounding);
                plan::all_reduce(algorithm, rounding, rank, topology, count, element_bytes)
            }
            CallKind::Broadcast => plan::broadcast(tuning.broadcast(bytes), rank, topology, count, root),
            CallKind::Reduce => {
                let algorithm = tuning.reduce(bytes, topology, rounding);
                plan::reduce(algorithm, rounding, rank, topology, count, root)
            }
            CallKind::AllGather | CallKind::Subgroup => {
                let algorithm = tuning.all_gather(bytes, topology);
                plan::all_gather(algorithm, rank, topology, &blocks(), element_bytes)
            }
            CallKind::ReduceScatter => {
                let algorithm = tuning.reduce_scatter(bytes, topology, rounding);
                plan::reduce_scatter(algorithm, rounding, rank, topology, &blocks(), element_bytes)
            }
            CallKind::Gather => plan::gather(rank, &blocks(), root),
            CallKind::Scatter => plan::scatter(rank, &blocks(), root),
            CallKind::Scan => plan::scan(rounding, rank, world, count),
            CallKind::ExclusiveScan => plan::exclusive_scan(rounding, rank, world, count),
            CallKind::AllToAll => plan::all_to_all(rank, &blocks(), &blocks()),
            // No data: the ranks tell each other that they are there.
            CallKind::MonitoredBarrier => Plan::default(),
            // Unequal blocks are not known by the call, and are planned by who has them.
            CallKind::Barrier
            | CallKind::PointToPoint
            | CallKind::AllGatherV
            | CallKind::ReduceScatterV
            | CallKind::GatherV
            | CallKind::ScatterV
            | CallKind::AllToAllV => plan::barrier(rank, topology),
        });
        if plans.len() == PLANS {
            plans.remove(0);
        }
        plans.push((call, Arc::clone(&plan)));
        plan
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_forked() {
            // A farewell would not be ours to say. The sockets were closed when the process forked
            // (`links::fork`), and must not be closed again; what we keep may wait for threads that a
            // forked child does not have.
            std::mem::forget((self.shared.take(), self.itself.take(), self.keep.take()));
        } else if let Some(shared) = self.shared() {
            if std::thread::panicking() {
                return shared.close(Engine::leave_in_panic);
            }
            shared.finish();
            shared.close(Engine::leave);
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.inner.name)
            .field("rank", &self.inner.rank)
            .field("size", &self.inner.size)
            .field("generation", &self.inner.generation)
            .finish_non_exhaustive()
    }
}

fn call<T: Element>(kind: CallKind, op: Option<ReduceOp>, root: u32, count: usize) -> Call {
    let dtype: Dtype = T::DTYPE;
    Call::new(kind, dtype, op, root, count as u64)
}

fn check_len(what: &str, len: usize, expected: usize) -> Result<(), CommError> {
    if len == expected {
        return Ok(());
    }
    Err(CommError::InvalidArgument(format!("{what} has {len} elements, not {expected}")))
}
