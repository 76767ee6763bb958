//! Small collectives in shared memory, run inline.

use super::budget::RetryBudget;
use super::conditions::{first_attempts, runs_function};
use crate::collectives::call::Call;
use crate::collectives::kernels::Kernel;
use crate::engine::recording::small_entry;
use crate::engine::state::Engine;
use crate::engine::wait_policy::WaitMedium;
use crate::error::ExecutionError;
use crate::fault::fault_point;
use crate::flight::{self, now_ns};
use crate::shm::copy_reduce::Buffers;
use crate::shm::small_call::SmallCall;

/// The result of an attempt to run a small call inline.
#[derive(Debug)]
pub(super) enum SmallCallResult {
    Done,
    /// The call is not small; nothing was started.
    NotSmall,
    Pending(Box<PendingSmall>),
}

/// The remaining work of a small call, its flight recorder entry, and the error that stopped it, if any.
#[derive(Debug)]
pub(super) struct PendingSmall {
    pub(super) small: SmallCall,
    pub(super) step: flight::CallRecord,
    pub(super) error: Option<ExecutionError>,
}

impl Engine {
    /// Runs a small collective as far as possible with short waits only.
    #[inline(always)]
    pub(super) fn try_small_inline<B: Buffers>(
        &mut self,
        call: Call,
        buffers: &mut B,
        kernel: Option<&Kernel>,
    ) -> SmallCallResult {
        match self.try_small_in::<B, false>(call, buffers, kernel) {
            SmallCallResult::NotSmall => self.try_small_in::<B, true>(call, buffers, kernel),
            tried => tried,
        }
    }

    /// Runs a collective whose data is in slots, or in one round if `IN_ROUND` is true. These are two functions, since
    /// one for both delays the shortest calls by 3 percent.
    #[inline(never)]
    fn try_small_in<B: Buffers, const IN_ROUND: bool>(
        &mut self,
        call: Call,
        buffers: &mut B,
        kernel: Option<&Kernel>,
    ) -> SmallCallResult {
        let Self { host, settings, collectives, .. } = self;
        let Some(node) = &mut host.memory else { return SmallCallResult::NotSmall };
        // A scaling kernel may need a copy of this rank's elements, which a small call does not make.
        let scaled = kernel.is_some_and(|kernel| kernel.scale().is_some());
        let Some(schedule) = node.small_schedule::<IN_ROUND>(&call).filter(|_| !scaled) else {
            return SmallCallResult::NotSmall;
        };
        let seq = collectives.number(call);
        let mut small = node.start_small::<IN_ROUND>(&call, schedule, seq, buffers);
        // The data is on its way now, so reading the time costs less than when it has come.
        let at_ns = now_ns();
        for _ in 0..if runs_function(call) { 0 } else { first_attempts(settings) } {
            match node.progress_small::<IN_ROUND>(&mut small, buffers, kernel) {
                Ok(true) => {
                    fault_point("moved", seq, 0);
                    let recorded = settings.flight.done(&small_entry(call, &small, at_ns));
                    node.doorbells.wake_all_after(recorded);
                    return SmallCallResult::Done;
                }
                Ok(false) => {}
                Err(error) => return self.small_failed(call, small.clone(), error),
            }
        }
        // A copy, so that the compiler can keep `small` in registers until here.
        self.wait_small(call, small.clone(), buffers, kernel)
    }

    /// Continues a small call whose data has not arrived at once. This rank uses the time to wake sleeping ranks and
    /// to make its flight recorder entry.
    #[inline(never)]
    fn wait_small<B: Buffers>(
        &mut self,
        call: Call,
        mut small: SmallCall,
        buffers: &mut B,
        kernel: Option<&Kernel>,
    ) -> SmallCallResult {
        let Self { host, settings, driver, .. } = self;
        let Some(node) = &mut host.memory else { return SmallCallResult::NotSmall };
        node.doorbells.wake_all();
        let step = settings.flight.begin(&small_entry(call, &small, now_ns()));
        let mut budget = RetryBudget::new(settings, driver, WaitMedium::SharedMemory, small.round_bytes());
        let error = loop {
            let before = small.fetched();
            match node.progress_small::<true>(&mut small, buffers, kernel) {
                Ok(true) => {
                    fault_point("moved", small.seq, 0);
                    budget.end(&step);
                    if small.has_round() {
                        node.doorbells.wake_all();
                    }
                    return SmallCallResult::Done;
                }
                Ok(false) if budget.may_retry(small.fetched() > before, || node.should_yield(&small)) => {}
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        SmallCallResult::Pending(Box::new(PendingSmall { small, step, error }))
    }

    /// Records a small call that failed at once.
    #[cold]
    fn small_failed(&mut self, call: Call, small: SmallCall, error: ExecutionError) -> SmallCallResult {
        if let Some(node) = &self.host.memory {
            node.doorbells.wake_all();
        }
        let step = self.settings.flight.begin(&small_entry(call, &small, now_ns()));
        SmallCallResult::Pending(Box::new(PendingSmall { small, step, error: Some(error) }))
    }
}
