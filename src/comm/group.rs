//! Groups of ranks and what they do together.

mod blocks;
mod objects;
mod scan;
mod subgroup;
mod unequal;

use std::any::Any;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use convoke_env::Generation;
use convoke_store::{PrefixStore, Store};

use crate::bootstrap::{self, Invitation};
use crate::call::{Call, CallKind};
use crate::dtype::{Dtype, Element, ReduceOp};
use crate::engine::{Shared, Work};
use crate::error::CommError;
use crate::kernels::Kernel;
use crate::options::GroupOptions;
use crate::plan::{self, Blocks, Plan, Tuning};

/// Plans that are kept for the next call of the same kind.
const PLANS: usize = 16;
/// Elements of the longest barrier: one for each round, and 64 rounds are 2^64 ranks.
const BARRIER_ELEMENTS: usize = 64;

/// Ranks that work together.
///
/// Collectives of a group happen in the same order on all ranks: every rank makes the same calls, and
/// calls on one group from several threads must be ordered by the program. What ranks get is the same to
/// the last bit on all of them, and from run to run for the same number of ranks (payloads of NaN
/// excepted).
///
/// A call that fails with [`CommError::place`] ends the group on all ranks. Clones are the same group;
/// when the last is dropped, the group takes leave of its peers and no thread, socket or file stays.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
    timeout: Duration,
}

struct Inner {
    name: String,
    rank: usize,
    size: usize,
    generation: Generation,
    tuning: Tuning,
    /// `None` in a group of one, which needs nobody.
    shared: Option<Shared>,
    plans: Mutex<Vec<(Call, Arc<Plan>)>>,
    /// The process that made the group: a forked child must not speak for it.
    pid: u32,
    /// What must outlive the group, such as the store that this process serves.
    keep: Option<Box<dyn Any + Send + Sync>>,
    /// What its subgroups are made from.
    store: Arc<dyn Store>,
    store_rank: Option<usize>,
    options: GroupOptions,
    /// Number of subgroups so far, the same on all ranks.
    subgroups: AtomicU64,
    /// The ranks' ranks in the first of the groups that this one comes from.
    origin: Vec<usize>,
}

impl Group {
    /// Finds the other ranks of a group through `store` and connects to them.
    ///
    /// Needs no environment. All ranks pass the same `size`, and options that are the same but for
    /// where they listen; each passes its own `rank`.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`] names who did not come or differs. [`CommError::InvalidArgument`],
    /// [`CommError::Unauthorized`], [`CommError::PeerLost`], [`CommError::Store`],
    /// [`CommError::System`].
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        size: usize,
        options: GroupOptions,
    ) -> Result<Self, CommError> {
        let store = Arc::new(PrefixStore::new("convoke", store));
        let tuning = Tuning::parse(&options.algorithms).map_err(CommError::InvalidArgument)?;
        let origin = (0..size).collect();
        let invitation =
            Invitation { store, store_rank: None, rank, size, origin, options, tuning, agent: None };
        Self::join(invitation, None)
    }

    pub(crate) fn join(
        invitation: Invitation,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Self, CommError> {
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
            return Ok(Self::of(&invitation, generation, None, keep));
        }
        let (engine, generation) = bootstrap::connect(&invitation)?;
        Ok(Self::of(&invitation, generation, Some(Shared::new(engine)), keep))
    }

    fn of(
        invitation: &Invitation,
        generation: Generation,
        shared: Option<Shared>,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        let inner = Inner {
            name: invitation.options.name.clone(),
            rank: invitation.rank,
            size: invitation.size,
            generation,
            tuning: invitation.tuning.clone(),
            shared,
            plans: Mutex::default(),
            pid: std::process::id(),
            keep,
            store: Arc::clone(&invitation.store),
            store_rank: invitation.store_rank,
            options: invitation.options.clone(),
            subgroups: AtomicU64::new(0),
            origin: invitation.origin.clone(),
        };
        Self { inner: Arc::new(inner), timeout: invitation.options.timeout }
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
        Self { inner: Arc::clone(&self.inner), timeout }
    }

    /// Replaces `buf` on every rank by the elementwise `op` over all ranks' `buf`.
    ///
    /// All ranks pass the same length, type and `op`. Sums are added in one fixed order: bitwise equal on
    /// all ranks and on a rerun.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`], before anything is sent, if `op` has no meaning for the type
    /// ([`ReduceOp::Avg`] of integers). [`CommError::Mismatch`] on all ranks if they disagree. Else
    /// whatever ended the group; `buf` is then unspecified.
    ///
    /// # Cost
    /// With P ranks and S bytes: few bytes, log2(P) exchanges of S; many, a ring of 2(P−1) steps in which
    /// each rank sends 2·S·(P−1)/P bytes.
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        let kernel = kernel::<T>(op)?;
        let call = call::<T>(CallKind::AllReduce, Some(op), 0, buf.len());
        self.collective(call, buf, Some(kernel))
    }

    /// Replaces `buf` on every rank by that of rank `root`.
    ///
    /// All ranks pass the same length, type and `root`. The root may return before the others have
    /// everything.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such rank. [`CommError::Mismatch`] if ranks
    /// disagree (a root that has returned gets it from its next call). Else whatever ended the group.
    ///
    /// # Cost
    /// Few bytes: a tree of log2(P) steps. Many: a chain in which every rank sends S bytes at most.
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: usize) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let call = call::<T>(CallKind::Broadcast, None, root as u32, buf.len());
        self.collective(call, buf, None)
    }

    /// Replaces `buf` on rank `root` by the elementwise `op` over all ranks' `buf`. On the other ranks it is
    /// unspecified afterwards.
    ///
    /// All ranks pass the same length, type, `op` and `root`. A rank other than the root may return before
    /// the root has everything.
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; [`CommError::InvalidArgument`] also if there is no such rank.
    ///
    /// # Cost
    /// Few bytes: a tree of log2(P) steps. Many: a chain in which every rank sends S bytes at most.
    pub fn reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp, root: usize) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let kernel = kernel::<T>(op)?;
        let call = call::<T>(CallKind::Reduce, Some(op), root as u32, buf.len());
        self.collective(call, buf, Some(kernel))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Whatever ended the group.
    ///
    /// # Cost
    /// log2(P) messages of a few bytes, one after the other.
    pub fn barrier(&self) -> Result<(), CommError> {
        let mut memory = [0_u8; BARRIER_ELEMENTS];
        let elements = plan::barrier_elements(self.size()).min(BARRIER_ELEMENTS);
        let call = call::<u8>(CallKind::Barrier, None, 0, 0);
        self.collective(call, &mut memory[..elements], None)
    }

    /// Sends `buf` to rank `to`, which receives it with the same `tag`, type and length.
    ///
    /// Returns when `buf` may be reused. Up to 64 KiB that is as a rule before the receiver has asked
    /// for it, so two ranks may send to each other first; beyond, it is when the receiver takes it.
    /// Messages of one sender with one tag are received in the order in which they were sent.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `to` is no other rank. Else whatever ended the group.
    pub fn send<T: Element>(&self, buf: &[T], to: usize, tag: u32) -> Result<(), CommError> {
        let shared = self.peer(to, "send to")?;
        let call = call::<T>(CallKind::PointToPoint, None, tag, buf.len());
        shared.call_ref(buf, self.timeout, |lent| Work::Send { to, call, lent })
    }

    /// Fills `buf` with the next message with this `tag` from rank `from`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `from` is no other rank. [`CommError::Mismatch`] if the
    /// message has another type or length. Else whatever ended the group.
    pub fn recv<T: Element>(&self, buf: &mut [T], from: usize, tag: u32) -> Result<(), CommError> {
        let shared = self.peer(from, "receive from")?;
        let call = call::<T>(CallKind::PointToPoint, None, tag, buf.len());
        shared.call_mut(buf, self.timeout, |lent| Work::Recv { from, call, lent })
    }

    /// Ends the group on all ranks: every pending or later call returns [`CommError::Aborted`] with
    /// `reason`. From any thread, also while calls are in progress.
    pub fn abort(&self, reason: &str) {
        if let Some(shared) = self.inner.shared.as_ref().filter(|_| !self.inner.is_forked()) {
            shared.abort(reason.to_owned());
        }
    }

    fn collective<T: Element>(
        &self,
        call: Call,
        buf: &mut [T],
        kernel: Option<Kernel>,
    ) -> Result<(), CommError> {
        self.inner.check_process()?;
        let Some(shared) = &self.inner.shared else { return Ok(()) };
        let plan = self.inner.plan(call);
        shared.call_mut(buf, self.timeout, |lent| Work::Collective { call, plan, lent, kernel })
    }

    fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        Err(CommError::InvalidArgument(format!("{what} {rank}: ranks are 0 to {}", self.size() - 1)))
    }

    fn peer(&self, rank: usize, what: &str) -> Result<&Shared, CommError> {
        self.check_rank(rank, what)?;
        self.inner.check_process()?;
        match &self.inner.shared {
            Some(shared) if rank != self.rank() => Ok(shared),
            Some(_) | None => Err(CommError::InvalidArgument(format!("{what} {rank}: that is this rank"))),
        }
    }
}

impl Inner {
    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    fn check_process(&self) -> Result<(), CommError> {
        if !self.is_forked() {
            return Ok(());
        }
        let what = format!("group {} belongs to process {}; this is a fork of it", self.name, self.pid);
        Err(CommError::InvalidArgument(what))
    }

    fn plan(&self, call: Call) -> Arc<Plan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.iter().find(|(known, _)| *known == call) {
            return Arc::clone(plan);
        }
        let (rank, world, count) = (self.rank, self.size, call.count as usize);
        let (bytes, element_bytes) = (call.bytes() as usize, call.dtype.size_bytes());
        let blocks = || Blocks::equal_of(world, count);
        let plan = Arc::new(match call.kind {
            CallKind::AllReduce => {
                plan::all_reduce(self.tuning.all_reduce(bytes, world), rank, world, count, element_bytes)
            }
            CallKind::Broadcast => {
                plan::broadcast(self.tuning.broadcast(bytes), rank, world, count, call.root as usize)
            }
            CallKind::Reduce => {
                plan::reduce(self.tuning.reduce(bytes), rank, world, count, call.root as usize)
            }
            CallKind::AllGather => {
                plan::all_gather(self.tuning.all_gather(bytes, world), rank, &blocks(), element_bytes)
            }
            CallKind::ReduceScatter => {
                let algorithm = self.tuning.reduce_scatter(bytes, world);
                plan::reduce_scatter(algorithm, rank, &blocks(), element_bytes)
            }
            CallKind::Gather => plan::gather(rank, &blocks(), call.root as usize),
            CallKind::Scatter => plan::scatter(rank, &blocks(), call.root as usize),
            CallKind::Scan => plan::scan(rank, world, count),
            CallKind::Shift => plan::shift(rank, world, count),
            CallKind::AllToAll => plan::all_to_all(rank, &blocks(), &blocks()),
            // Unequal blocks are not known by the call, and are planned by who has them.
            CallKind::Barrier
            | CallKind::PointToPoint
            | CallKind::AllGatherV
            | CallKind::ReduceScatterV
            | CallKind::GatherV
            | CallKind::ScatterV
            | CallKind::AllToAllV => plan::barrier(rank, world),
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
            std::mem::forget((self.shared.take(), self.keep.take()));
        } else if let Some(shared) = &self.shared {
            shared.leave();
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

fn kernel<T: Element>(op: ReduceOp) -> Result<Kernel, CommError> {
    Kernel::of(T::DTYPE, op)
        .ok_or_else(|| CommError::InvalidArgument(format!("{op} of {} has no meaning", T::DTYPE)))
}

fn call<T: Element>(kind: CallKind, op: Option<ReduceOp>, root: u32, count: usize) -> Call {
    let dtype: Dtype = T::DTYPE;
    Call { kind, dtype, op, root, count: count as u64 }
}
