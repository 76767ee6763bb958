//! The preparation of operations: checked arguments, the transport, and the plan of a collective.

use std::sync::{Arc, PoisonError};

use super::{Call, CallKind, CommError, Group, Inner, Operation, ReduceOp, Slice, SliceMut, ValueType};
use crate::bootstrap::BootstrapConfig;
use crate::buffer::{BorrowedBuffer, CollectiveBuffers, Scratch, SendRecvBuffers};
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::{self, Algorithm, Blocks, Input, Plan, Rounding};
use crate::engine::{self, Shape, Transport};
use crate::error::require;
use crate::shm;

/// Number of cached plans (schedules of transfers). Later calls with an equal descriptor use the cached plan.
const PLANS: usize = 16;

/// A checked operation with its buffers, ready to start; `None` if nothing is left to do. Each operation has
/// a `prepare_*` function. The blocking form runs the prepared operation; the nonblocking form starts it.
pub(crate) type Prepared<'a> = Result<Option<Operation<'a>>, CommError>;

/// A checked collective with its buffers.
#[derive(Debug)]
pub(crate) struct Collective<'a> {
    pub(super) call: Call,
    pub(super) buffers: SendRecvBuffers<'a>,
    pub(super) kernel: Option<Kernel>,
}

/// A collective, or the error of its arguments.
pub(crate) type Checked<'a> = Result<Collective<'a>, CommError>;

/// A checked call that becomes an operation.
pub(crate) trait IntoPrepared<'a> {
    fn into_prepared(self, group: &Group) -> Prepared<'a>;
}

impl<'a> IntoPrepared<'a> for Checked<'a> {
    fn into_prepared(self, group: &Group) -> Prepared<'a> {
        group.prepare(self?)
    }
}

impl<'a> IntoPrepared<'a> for Prepared<'a> {
    fn into_prepared(self, _: &Group) -> Prepared<'a> {
        self
    }
}

/// The send and the receive buffer of a call.
pub(crate) type SendRecv<'a> = (Slice<'a>, SliceMut<'a>);

impl Group {
    /// Runs a collective and waits for it.
    #[inline(always)]
    pub(super) fn run_collective(&self, collective: Checked<'_>) -> Result<(), CommError> {
        let mut collective = collective?;
        let Collective { call, ref mut buffers, ref kernel } = collective;
        let Some(shared) = &self.inner.shared else {
            return self.carry_out(self.prepare(collective)).map(drop);
        };
        self.inner.check_caller()?;
        let limit = || self.limit();
        if self.inner.runs_in_shared_memory(&call) {
            if let Some(result) = shared.call_small(call, buffers, kernel.as_ref(), &limit) {
                return result;
            }
            return self.carry_out(self.prepare(collective)).map(drop);
        }
        let plan = self.inner.plan(call);
        if let Some(shape) = Shape::of(&plan, call, buffers, kernel.as_ref())
            && let Some(result) = shared.call_short(call, shape, buffers, kernel.as_ref(), &limit)
        {
            return result;
        }
        let Collective { buffers, kernel, .. } = collective;
        let prepared = self.collective(call, || plan, self.with_scratch(call, buffers), kernel);
        self.carry_out(prepared).map(drop)
    }

    /// Prepares a collective whose plan (schedule of transfers) depends only on its descriptor.
    pub(super) fn prepare<'a>(&self, Collective { call, buffers, kernel }: Collective<'a>) -> Prepared<'a> {
        self.planned(call, self.with_scratch(call, buffers), kernel)
    }

    /// Returns the buffers of a call with the memory of its own that its plan needs.
    fn with_scratch<'a>(&self, call: Call, buffers: SendRecvBuffers<'a>) -> CollectiveBuffers<'a> {
        match call.kind {
            CallKind::ReduceScatter if self.inner.needs_scratch_copy(&call) => {
                buffers.with_scratch_blocks().into()
            }
            // A blocking barrier has memory of its caller.
            CallKind::Barrier if buffers.is_empty() && !self.inner.runs_in_shared_memory(&call) => {
                let elements = plan::barrier_elements(&self.inner.topology);
                let scratch = Scratch::zeros(elements, ValueType::element(call.dtype));
                BorrowedBuffer::default().with_scratch(0, scratch).into()
            }
            _ => CollectiveBuffers::from(buffers),
        }
    }

    /// Prepares a collective over `buffers`; `plan` returns its schedule of transfers.
    pub(super) fn collective<'a>(
        &self,
        call: Call,
        plan: impl FnOnce() -> Arc<Plan>,
        buffers: impl Into<CollectiveBuffers<'a>>,
        kernel: Option<Kernel>,
    ) -> Prepared<'a> {
        self.inner.check_caller()?;
        let buffers = buffers.into();
        if self.inner.shared.is_none() {
            engine::run_single_rank(buffers.into_borrowed(call.kind), kernel, call.dtype, &plan());
            return Ok(None);
        }
        Ok(Some(Operation::Collective { call, transport: Transport::Connections(plan()), buffers, kernel }))
    }

    /// Prepares a collective whose plan (schedule of transfers) depends only on the descriptor `call`.
    #[inline(always)]
    pub(super) fn planned<'a>(
        &self,
        call: Call,
        buffers: impl Into<CollectiveBuffers<'a>>,
        kernel: Option<Kernel>,
    ) -> Prepared<'a> {
        if self.inner.runs_in_shared_memory(&call) {
            self.inner.check_caller()?;
            let (transport, buffers) = (Transport::SharedMemory, buffers.into());
            return Ok(Some(Operation::Collective { call, transport, buffers, kernel }));
        }
        self.collective(call, || self.inner.plan(call), buffers, kernel)
    }

    pub(crate) fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        require(rank < self.size(), || format!("{what} {rank}: ranks are 0 to {}", self.size() - 1))
    }
}

impl Inner {
    /// Returns true if a collective runs in the memory that all ranks share; the answer is equal on all
    /// ranks.
    pub(super) fn runs_in_shared_memory(&self, call: &Call) -> bool {
        // Wide inputs (`f32` for 16-bit elements) need a copy of the buffer, which only plans over
        // connections make.
        let wide = matches!(Rounding::of(call), Rounding::Once { wide_inputs: true });
        self.memory.is_some()
            && shm::is_supported(call.kind)
            && !wide
            && !self.config.tuning.has_override(call.kind)
    }

    /// Returns true if a reduce-scatter overwrites the blocks of other ranks, so that it needs a copy of the
    /// input. The ring and hierarchy algorithms overwrite these blocks.
    pub(super) fn needs_scratch_copy(&self, call: &Call) -> bool {
        let (bytes, rounding) = (call.bytes() as usize, Rounding::of(call));
        !self.runs_in_shared_memory(call)
            && self.config.tuning.for_reduce_scatter(bytes, &self.topology, rounding) != Algorithm::Direct
    }

    fn plan(&self, call: Call) -> Arc<Plan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.iter().find(|(known, _)| *known == call) {
            return Arc::clone(plan);
        }
        let Self { ref config, ref topology, .. } = *self;
        let BootstrapConfig { rank, size: world, ref tuning, .. } = *config;
        let (count, root) = (call.count() as usize, call.root as usize);
        let (bytes, rounding) = (call.bytes() as usize, Rounding::of(&call));
        let input = Input { rank, topology, rounding, element_bytes: call.dtype.size_bytes() };
        let blocks = || Blocks::uniform(world, count);
        let plan = Arc::new(match call.kind {
            CallKind::AllReduce => {
                plan::all_reduce(tuning.for_all_reduce(bytes, topology, rounding), &input, count)
            }
            CallKind::Broadcast => plan::broadcast(tuning.for_broadcast(bytes), &input, count, root),
            CallKind::Reduce => {
                plan::reduce(tuning.for_reduce(bytes, topology, rounding), &input, count, root)
            }
            CallKind::AllGather | CallKind::Subgroup => {
                plan::all_gather(tuning.for_all_gather(bytes, topology), &input, &blocks())
            }
            CallKind::ReduceScatter => {
                plan::reduce_scatter(tuning.for_reduce_scatter(bytes, topology, rounding), &input, &blocks())
            }
            CallKind::Gather => plan::gather(rank, &blocks(), root),
            CallKind::Scatter => plan::scatter(rank, &blocks(), root),
            CallKind::Scan => plan::scan(rounding, rank, world, count),
            CallKind::ExclusiveScan => plan::exclusive_scan(rounding, rank, world, count),
            CallKind::AllToAll => plan::all_to_all(rank, &blocks(), &blocks()),
            // The ranks exchange no data, only notices that they have arrived.
            CallKind::MonitoredBarrier => Plan::default(),
            CallKind::Barrier => plan::barrier(rank, topology),
            CallKind::AllGatherV
            | CallKind::ReduceScatterV
            | CallKind::GatherV
            | CallKind::ScatterV
            | CallKind::AllToAllV => {
                unreachable!("a descriptor has no unequal lengths, so callers make the plan of {}", call.kind)
            }
            CallKind::PointToPoint => unreachable!("messages have no plan"),
        });
        if plans.len() == PLANS {
            plans.remove(0);
        }
        plans.push((call, Arc::clone(&plan)));
        plan
    }
}

/// Returns the descriptor of a call on `count` values. Plain data are described as bytes.
#[inline]
pub(super) fn call(value: ValueType, kind: CallKind, op: Option<ReduceOp>, root: u32, count: usize) -> Call {
    Call::new(kind, value.dtype, op, root, (count * value.units()) as u64)
}

pub(crate) fn check_len(what: &str, len: usize, expected: usize) -> Result<(), CommError> {
    require(len == expected, || format!("{what} has {len} elements, not {expected}"))
}
