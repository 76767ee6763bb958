//! Runs collectives and messages in shared memory inline: on the calling thread, while they need not wait.
//!
//! A call is run inline if no operation is queued. It then needs no task in the submission queue; a
//! collective needs no completion either. If the other ranks do not arrive soon, it is queued.

use std::sync::Arc;
use std::time::Instant;

use convoke_recorder::layout;

use super::completion::{Completion, Outcome, TimeLimit};
use super::execution::{Execution, Paths};
use super::messages::PostedCall;
use super::messages::direct::{RecvProgress, SendProgress};
use super::operation::{Operation, Transport};
use super::recording::{call_entry, small_entry};
use super::settings::Settings;
use super::state::{Driver, Engine};
use super::wait_policy::{Oversubscription, WaitAction, WaitPolicy};
use crate::collectives::call::{Call, Status};
use crate::collectives::dtype::ReduceOp;
use crate::error::ExecutionError;
use crate::fault::fault_point;
use crate::flight::{self, now_ns};
use crate::shm::HostMemory;
use crate::shm::collective::ShmCollective;
use crate::shm::small_call::SmallCall;

/// Attempts between two `pause` instructions, each of which takes about as long as the awaited data.
const SPINS_PER_PAUSE: u32 = 8;
/// Inline calls between two polls for goodbyes and unexpected messages. Failures need no poll: shared memory has
/// a flag for them. A poll takes about 2 µs. One in 256 calls determined the 99th percentile of short messages.
const CALLS_BETWEEN_POLLS: u32 = 1024;
/// Inline collectives between two checks whether this thread is on its assigned core, if there are more ranks
/// than cores. Messages are checked less often, because the move does not make long messages faster.
const COLLECTIVES_BETWEEN_CORE_CHECKS: u32 = 16;
const MESSAGES_BETWEEN_CORE_CHECKS: u32 = 256;
/// Most times that one inline call moves data. Then it is queued, so that other events are polled too.
const MAX_ROUNDS: u32 = 32;

/// An operation, which is taken out when it becomes a queued operation.
type OperationSlot = Option<Operation<'static>>;

/// The result of an attempt to run an operation inline.
#[derive(Debug)]
pub(super) enum FastPath {
    Done(Outcome),
    /// The operation was started and is queued in the engine.
    Pending(Arc<Completion>),
}

/// The result of an attempt to run a small call inline.
#[derive(Debug)]
enum SmallCallResult {
    Done,
    /// The call is not small; nothing was started.
    NotSmall,
    Pending(Box<PendingSmall>),
}

/// The remaining work of a small call, its flight recorder entry, and the error that stopped it, if any.
#[derive(Debug)]
struct PendingSmall {
    small: SmallCall,
    step: flight::CallRecord,
    error: Option<ExecutionError>,
}

impl Engine {
    /// Runs `operation` inline if it uses shared memory and nothing is queued; else returns `None`.
    pub(super) fn try_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> Option<FastPath> {
        self.driver.rounds = self.driver.rounds.wrapping_add(1);
        if self.driver.rounds.is_multiple_of(CALLS_BETWEEN_POLLS) {
            self.poll_events(Instant::now());
        }
        let is_collective = matches!(operation, Some(Operation::Collective { .. }));
        let between =
            if is_collective { COLLECTIVES_BETWEEN_CORE_CHECKS } else { MESSAGES_BETWEEN_CORE_CHECKS };
        if self.driver.rounds.is_multiple_of(between) {
            // Linux would not move a thread that yields and never sleeps to another core.
            self.driver.affinity.move_to_assigned_core();
        }
        let idle = self.failure.is_none()
            && !self.lifecycle.left
            && self.collectives.queue.is_empty()
            && self.host.memory.as_ref().is_some_and(|node| !node.has_failed())
            && !self.submissions.has_submissions();
        if !idle {
            return None;
        }
        match operation {
            Some(Operation::Collective { transport: Transport::SharedMemory, .. }) => {
                self.try_collective_inline(operation, limit)
            }
            Some(Operation::Send { to: peer, .. }) if self.host.ranks.contains(peer) => {
                self.try_send_inline(operation, limit)
            }
            Some(Operation::Recv { from: Some(peer), .. }) if self.host.ranks.contains(peer) => {
                self.try_recv_inline(operation, limit)
            }
            _ => None,
        }
    }

    fn try_send_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> Option<FastPath> {
        let Some(Operation::Send { to, call, buffer }) = operation else { return None };
        let (to, call) = (*to, *call);
        let entry = || call_entry(layout::Operation::Send, Some(to), call, now_ns());
        let sent = self.peers[to].messages.send_direct(call, buffer);
        if let Ok(SendProgress::Complete) = sent {
            self.settings.flight.done(&entry());
            return Some(FastPath::Done(Ok(None)));
        }
        let step = self.settings.flight.begin(&entry());
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        let Some(Operation::Send { buffer, .. }) = operation.take() else { return None };
        let posted = PostedCall { call, buffer, completion: Arc::clone(&completion) };
        let messages = &mut self.peers[to].messages;
        match sent {
            Ok(SendProgress::Partial { seq, frame }) => messages.post_partial_send(seq, frame, posted),
            other => {
                messages.post_send(posted);
                if let Err(error) = other {
                    self.message_failed(to, error);
                }
            }
        }
        Some(self.progress_message(to, call, completion))
    }

    fn try_recv_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> Option<FastPath> {
        let Some(Operation::Recv { from: Some(from), call, buffer }) = operation else { return None };
        let (from, call) = (*from, *call);
        let entry = || call_entry(layout::Operation::Recv, Some(from), call, now_ns());
        let (mut step, mut done) = (None, 0);
        let mut budget = RetryBudget::new(&self.settings, &self.driver, call.bytes());
        let mut received = self.peers[from].messages.recv_direct(&self.any_source, call, buffer);
        while let Ok(state @ (RecvProgress::Nothing | RecvProgress::Partial(_))) = received {
            step.get_or_insert_with(|| self.settings.flight.begin(&entry()));
            let received_bytes = if let RecvProgress::Partial(bytes) = state { bytes } else { 0 };
            let node = &mut self.host.memory;
            if !budget.may_retry(received_bytes > std::mem::replace(&mut done, received_bytes), || {
                shares_core(node, [from])
            }) {
                break;
            }
            let messages = &mut self.peers[from].messages;
            received = match state {
                RecvProgress::Partial(done) => messages.recv_rest(done, buffer),
                _ => messages.recv_direct(&self.any_source, call, buffer),
            };
        }
        if let Ok(RecvProgress::Complete) = received {
            step.map_or_else(|| self.settings.flight.done(&entry()), |step| budget.end(&step));
            if self.peers[from].messages.is_busy() {
                // The receive may have queued a frame that returns credit to the peer.
                self.progress_messages(from);
            }
            return Some(FastPath::Done(Ok(Some(Status { source: from, call }))));
        }
        let step = step.unwrap_or_else(|| self.settings.flight.begin(&entry()));
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        let Some(Operation::Recv { buffer, .. }) = operation.take() else { return None };
        let posted = PostedCall { call, buffer, completion: Arc::clone(&completion) };
        if let Ok(RecvProgress::Partial(done)) = received {
            let order = self.any_source.order();
            self.peers[from].messages.post_partial_recv(order, posted, done);
        } else {
            self.receive(from, posted);
        }
        if let Err(error) = received {
            self.message_failed(from, error);
        }
        Some(self.progress_message(from, call, completion))
    }

    /// Moves messages with `peer` until `completion` is done; `Pending` if that requires a longer wait.
    fn progress_message(&mut self, peer: usize, call: Call, completion: Arc<Completion>) -> FastPath {
        self.driver.wait_policy.set_bytes(call.bytes());
        let mut budget = RetryBudget::new(&self.settings, &self.driver, call.bytes());
        loop {
            if let Some(outcome) = completion.take() {
                return FastPath::Done(outcome);
            }
            let moved = self.progress_messages(peer);
            let node = &mut self.host.memory;
            if self.failure.is_some() || !budget.may_retry(moved, || shares_core(node, [peer])) {
                return FastPath::Pending(completion);
            }
        }
    }

    fn try_collective_inline(&mut self, operation: &mut OperationSlot, limit: TimeLimit) -> Option<FastPath> {
        let rest = match self.try_small_inline(operation.as_mut()?) {
            SmallCallResult::Done => return Some(FastPath::Done(Ok(None))),
            SmallCallResult::NotSmall => None,
            SmallCallResult::Pending(rest) => Some(*rest),
        };
        let Some(Operation::Collective { call, buffer, kernel, .. }) = operation.take() else {
            return None;
        };
        let Some(PendingSmall { small, step, error }) = rest else {
            let run = self.start_in_memory(call, buffer, kernel);
            return Some(self.try_large_inline(run, limit));
        };
        let (memory, broken) = (self.host.memory.as_mut()?, error.is_some());
        let run = ShmCollective::from_small(memory, call, &small, buffer, kernel, broken);
        Some(self.enqueue(run, limit, step, error))
    }

    /// Runs a small collective as far as possible with short waits only.
    #[inline]
    fn try_small_inline(&mut self, operation: &mut Operation<'_>) -> SmallCallResult {
        let Operation::Collective { call, buffer, kernel, .. } = operation else {
            return SmallCallResult::NotSmall;
        };
        let Self { host, settings, collectives, driver, .. } = self;
        let Some(node) = &mut host.memory else { return SmallCallResult::NotSmall };
        // A scaling kernel may need a copy of this rank's elements, which a small call does not make.
        let scaled = kernel.as_ref().is_some_and(|kernel| kernel.scale().is_some());
        let Some(schedule) = node.small_schedule(call).filter(|_| !scaled) else {
            return SmallCallResult::NotSmall;
        };
        let seq = collectives.number(*call);
        let mut small = node.start_small(call, schedule, seq);
        node.publish_small(&mut small, buffer);
        let mut budget = RetryBudget::new(settings, driver, 0);
        let flight = &settings.flight;
        let entry = |small: &SmallCall| small_entry(*call, small, now_ns());
        let begin = |node: &HostMemory, small: &SmallCall| {
            node.doorbells.wake_all();
            flight.begin(&entry(small))
        };
        // A call that must wait uses that time to wake sleeping ranks and to make its flight recorder entry.
        // A call that need not wait does both at the end.
        let mut step = runs_function(*call).then(|| begin(node, &small));
        let error = loop {
            match node.match_small(&mut small) {
                Ok(true) => break node.finish_small(&small, buffer, kernel.as_ref()).err(),
                Ok(false) => {}
                Err(error) => break Some(error),
            }
            let step = step.get_or_insert_with(|| begin(node, &small));
            if !budget.may_retry(false, || node.should_yield(&small)) {
                return SmallCallResult::Pending(Box::new(PendingSmall { small, step: *step, error: None }));
            }
        };
        if step.is_none() {
            node.doorbells.wake_all();
        }
        if error.is_some() {
            let step = step.unwrap_or_else(|| flight.begin(&entry(&small)));
            return SmallCallResult::Pending(Box::new(PendingSmall { small, step, error }));
        }
        fault_point("moved", seq, 0);
        step.map_or_else(|| flight.done(&entry(&small)), |step| budget.end(&step));
        SmallCallResult::Done
    }

    fn paths(&mut self) -> Paths<'_> {
        Paths { connections: &mut self.peers, memory: self.host.memory.as_mut() }
    }

    fn try_large_inline(&mut self, mut run: ShmCollective, limit: TimeLimit) -> FastPath {
        let (started_ns, call) = (now_ns(), (run.call, run.seq));
        let recorded = runs_function(run.call).then(|| self.record_collective(call, &run, started_ns));
        let mut result = run.poll(self.paths());
        let step = recorded.unwrap_or_else(|| self.record_collective(call, &run, started_ns));
        let mut budget = RetryBudget::new(&self.settings, &self.driver, run.call.bytes());
        let error = loop {
            match result {
                Ok(_) if run.is_finished() => {
                    fault_point("moved", run.seq, 0);
                    step.end(true);
                    return FastPath::Done(Ok(None));
                }
                Ok(moved)
                    if budget.may_retry(moved, || shares_core(&mut self.host.memory, run.awaited())) => {}
                Ok(_) => break None,
                Err(error) => break Some(error),
            }
            result = run.poll(self.paths());
        };
        self.enqueue(run, limit, step, error)
    }

    /// Queues a collective that was begun inline, and handles the `error` that stopped it, if any.
    #[cold]
    fn enqueue(
        &mut self,
        run: ShmCollective,
        limit: TimeLimit,
        step: flight::CallRecord,
        error: Option<ExecutionError>,
    ) -> FastPath {
        let completion = Arc::new(Completion::new(limit));
        let _ = completion.step.set(step);
        self.driver.wait_policy.set_bytes(run.call.bytes());
        self.collectives.push((run.call, run.seq), Box::new(run), Arc::clone(&completion));
        self.compare_with_reports();
        if let Some(error) = error {
            self.execution_failed(error);
        }
        FastPath::Pending(completion)
    }
}

/// Returns whether a call reduces with a function of the program. The function may take any time, so the
/// call's flight recorder entry is made before it runs.
fn runs_function(call: Call) -> bool {
    call.op == Some(ReduceOp::Custom)
}

/// Returns whether one of `ranks` runs on the core of this rank.
fn shares_core(node: &mut Option<HostMemory>, ranks: impl IntoIterator<Item = usize>) -> bool {
    node.as_mut().is_some_and(|node| node.shares_core_with_any(ranks))
}

/// Limits for how long an operation is tried inline.
struct RetryBudget {
    wait_policy: WaitPolicy,
    rounds: u32,
    failed_spins: u32,
    /// There are more ranks than cores.
    oversubscribed: bool,
    /// Find out before the next pause whether an awaited rank runs on this core; each yield can change that.
    check_core: bool,
    /// So far the operation has only spun: no retry moved data, and it has not yielded.
    only_spun: bool,
}

impl RetryBudget {
    fn new(settings: &Settings, driver: &Driver, bytes: u64) -> Self {
        let oversubscribed = settings.sharing.oversubscription == Oversubscription::Cores;
        Self {
            wait_policy: driver.wait_policy.for_inline(bytes),
            rounds: 0,
            failed_spins: 0,
            oversubscribed,
            check_core: oversubscribed,
            only_spun: true,
        }
    }

    /// Pauses if the last attempt has not `moved` data. Returns whether to try again. `on_this_core` says
    /// whether an awaited rank runs on the core of this rank.
    #[inline]
    fn may_retry(&mut self, moved: bool, on_this_core: impl FnOnce() -> bool) -> bool {
        if moved {
            self.rounds += 1;
            self.only_spun = false;
            self.wait_policy.record_progress();
            return self.rounds < MAX_ROUNDS;
        }
        if std::mem::take(&mut self.check_core) {
            self.wait_policy.set_shares_core(on_this_core());
        }
        match self.wait_policy.next_action(false) {
            WaitAction::Spin => {
                self.failed_spins += 1;
                if self.failed_spins.is_multiple_of(SPINS_PER_PAUSE) {
                    std::hint::spin_loop();
                }
            }
            WaitAction::Yield => {
                self.only_spun = false;
                let begin = Instant::now();
                std::thread::yield_now();
                self.wait_policy.record_yield(begin.elapsed());
                self.check_core = self.oversubscribed;
            }
            WaitAction::Sleep => return false,
        }
        true
    }

    /// Records in the flight recorder that the operation is done, and whether it ended without a real wait.
    #[inline]
    fn end(&self, step: &flight::CallRecord) {
        if self.only_spun { step.end_immediately() } else { step.end(true) }
    }
}
