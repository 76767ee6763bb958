//! Runs collectives and messages in shared memory on the calling thread, as long as they need not wait.
//!
//! If no operation is queued, the calling thread runs the call inline, without a task for the progress
//! thread. A collective needs no ticket either. If the other ranks do not arrive soon, the call becomes a
//! queued operation.

use std::sync::Arc;
use std::time::Instant;

use convoke_env::flight::layout;

use super::core::Engine;
use super::messages::direct::{Received, Sent};
use super::patience::{Crowd, Patience, Step};
use super::recording::{told_of_message, told_of_small};
use super::run::{Run, RunError};
use super::state::Collective;
use super::ticket::{Limit, Outcome, Ticket};
use super::{Operation, Way};
use crate::call::{Call, Envelope};
use crate::dtype::ReduceOp;
use crate::fault::moment;
use crate::flight::{self, now_ns};
use crate::shm::small::Small;
use crate::shm::{self, Node};

/// Attempts between two pauses. One pause takes about as long as the awaited data.
const SPINS_PER_PAUSE: u32 = 8;
/// Calls between two polls for aborts, farewells and unexpected messages.
const CALLS_BETWEEN_LOOKS: u32 = 256;
/// Collectives between two checks of the core assignment, if there are more ranks than cores. Messages are
/// checked less often: long ones gain nothing from it.
const CALLS_BETWEEN_PLACES: u32 = 16;
/// Most turns of one inline call. An operation that moves much data must poll other events too.
const TURNS: u32 = 32;

/// The result of an attempt to run an operation inline.
#[derive(Debug)]
pub(super) enum AtOnce {
    Done(Outcome),
    /// The operation is queued in the engine.
    Begun(Arc<Ticket>),
}

/// The result of an attempt to run a small call inline.
#[derive(Debug)]
enum Tried {
    Done,
    /// The call is not small.
    Not,
    Begun(Box<Rest>),
}

/// The remaining work of a small call, its flight recorder entry, and the error that stopped it, if any.
#[derive(Debug)]
struct Rest {
    small: Small,
    step: flight::Step,
    error: Option<RunError>,
}

impl Engine {
    /// Runs `operation` inline if it goes through memory and no operation is queued.
    pub(super) fn at_once(
        &mut self,
        operation: &mut Option<Operation<'static>>,
        limit: Limit,
    ) -> Option<AtOnce> {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(CALLS_BETWEEN_LOOKS) {
            self.look_around(Instant::now());
        }
        let is_collective = matches!(operation, Some(Operation::Collective { .. }));
        let between = if is_collective { CALLS_BETWEEN_PLACES } else { CALLS_BETWEEN_LOOKS };
        if self.turns.is_multiple_of(between) {
            // The system would not move a rank that yields and never sleeps.
            self.take_place();
        }
        let idle = self.failure.is_none()
            && !self.left
            && self.collectives.is_empty()
            && self.node.as_ref().is_some_and(|node| !node.has_failed())
            && !self.mailbox.has_letters();
        if !idle {
            return None;
        }
        match operation {
            Some(Operation::Collective { way: Way::Memory, .. }) => self.collective_at_once(operation, limit),
            Some(Operation::Send { to: peer, .. }) if self.beside.contains(peer) => {
                self.send_at_once(operation, limit)
            }
            Some(Operation::Recv { from: Some(peer), .. }) if self.beside.contains(peer) => {
                self.recv_at_once(operation, limit)
            }
            _ => None,
        }
    }

    fn send_at_once(&mut self, operation: &mut Option<Operation<'static>>, limit: Limit) -> Option<AtOnce> {
        let Some(Operation::Send { to, call, lent }) = operation else { return None };
        let (to, call) = (*to, *call);
        let told = || told_of_message(layout::Operation::Send, Some(to), call, now_ns());
        let sent = self.peers[to].messages.send_direct(&self.settings.credentials, call, lent);
        if let Ok(Sent::Whole) = sent {
            self.settings.flight.done(&told());
            return Some(AtOnce::Done(Ok(None)));
        }
        let step = self.settings.flight.begin(&told());
        let ticket = Arc::new(Ticket::new(limit));
        let _ = ticket.step.set(step);
        let Some(Operation::Send { lent, .. }) = operation.take() else { return None };
        let mailbox = &mut self.peers[to].messages;
        let failed = match sent {
            Ok(Sent::Part(begun)) => {
                mailbox.post_rest(begun, call, lent, Arc::clone(&ticket));
                None
            }
            other => {
                mailbox.post_send(&self.settings.credentials, call, lent, Arc::clone(&ticket));
                other.err()
            }
        };
        if let Some(error) = failed {
            self.message_failed(to, error);
        }
        Some(self.attend(to, ticket))
    }

    fn recv_at_once(&mut self, operation: &mut Option<Operation<'static>>, limit: Limit) -> Option<AtOnce> {
        let Some(Operation::Recv { from: Some(from), call, lent }) = operation else { return None };
        let (from, call) = (*from, *call);
        let told = || told_of_message(layout::Operation::Recv, Some(from), call, now_ns());
        let (mut step, mut done) = (None, 0);
        let mut attempts = Attempts::new(self);
        let ours = &self.settings.credentials;
        let mut received = self.peers[from].messages.recv_direct(ours, &self.open, call, lent);
        while let Ok(state @ (Received::Nothing | Received::Part(_))) = received {
            step.get_or_insert_with(|| self.settings.flight.begin(&told()));
            let come = if let Received::Part(come) = state { come } else { 0 };
            let node = &mut self.node;
            if !attempts.go_on(come > std::mem::replace(&mut done, come), || is_near(node, [from])) {
                break;
            }
            let mailbox = &mut self.peers[from].messages;
            received = match state {
                Received::Part(done) => mailbox.recv_rest(ours, done, lent),
                _ => mailbox.recv_direct(ours, &self.open, call, lent),
            };
        }
        if let Ok(Received::Whole) = received {
            step.map_or_else(|| self.settings.flight.done(&told()), |step| attempts.end(&step));
            if self.peers[from].messages.is_busy() {
                // The peer may be owed credit.
                self.turn_messages(from);
            }
            return Some(AtOnce::Done(Ok(Some(Envelope { from, call }))));
        }
        let step = step.unwrap_or_else(|| self.settings.flight.begin(&told()));
        let ticket = Arc::new(Ticket::new(limit));
        let _ = ticket.step.set(step);
        let Some(Operation::Recv { lent, .. }) = operation.take() else { return None };
        let order = self.open.order();
        if let Ok(Received::Part(done)) = received {
            self.peers[from].messages.post_begun(order, call, lent, Arc::clone(&ticket), done);
        } else {
            self.receive(from, order, call, lent, Arc::clone(&ticket));
        }
        if let Err(error) = received {
            self.message_failed(from, error);
        }
        Some(self.attend(from, ticket))
    }

    /// Moves messages with a peer until an operation is done or would have to wait.
    fn attend(&mut self, peer: usize, ticket: Arc<Ticket>) -> AtOnce {
        let mut attempts = Attempts::new(self);
        loop {
            if let Some(outcome) = ticket.take() {
                return AtOnce::Done(outcome);
            }
            let moved = self.turn_messages(peer);
            let node = &mut self.node;
            if self.failure.is_some() || !attempts.go_on(moved, || is_near(node, [peer])) {
                return AtOnce::Begun(ticket);
            }
        }
    }

    fn collective_at_once(
        &mut self,
        operation: &mut Option<Operation<'static>>,
        limit: Limit,
    ) -> Option<AtOnce> {
        let rest = match self.small_at_once(operation.as_mut()?) {
            Tried::Done => return Some(AtOnce::Done(Ok(None))),
            Tried::Not => None,
            Tried::Begun(rest) => Some(*rest),
        };
        let Some(Operation::Collective { call, way, lent, kernel }) = operation.take() else { return None };
        let Some(Rest { small, step, error }) = rest else {
            let run = self.run(call, way, lent, kernel);
            return Some(self.large_at_once(run, limit));
        };
        let run = shm::run::Run::of(self.node.as_mut()?, call, &small, lent, kernel, error.is_some());
        Some(self.keep(Run::Memory(run), limit, step, error))
    }

    /// Runs a small call as far as it can without waiting.
    #[inline]
    fn small_at_once(&mut self, operation: &mut Operation<'_>) -> Tried {
        let Operation::Collective { call, lent, kernel, .. } = operation else { return Tried::Not };
        // Scaled shares may need a buffer of their own.
        let scaled = kernel.as_ref().is_some_and(|kernel| kernel.scale().is_some());
        let program = |node: &mut Node| node.small_program(call).filter(|_| !scaled);
        let Some(program) = self.node.as_mut().and_then(program) else { return Tried::Not };
        let seq = self.number(*call);
        let Some(node) = &mut self.node else { return Tried::Not };
        let mut small = node.small(call, program, seq);
        node.give_small(&mut small, lent);
        let mut patience = Attempts::new(self);
        let flight = &self.settings.flight;
        let told = |small: &Small| told_of_small(*call, small, now_ns());
        let Some(node) = &mut self.node else { return Tried::Not };
        let begin = |node: &Node, small: &Small| {
            node.ring();
            flight.begin(&told(small))
        };
        // While this rank waits, it wakes sleeping ranks and records the call. A call that need not wait does
        // both at the end.
        let mut step = runs_function(*call).then(|| begin(node, &small));
        let error = loop {
            match node.meet_small(&mut small) {
                Ok(true) => break node.end_small(&small, lent, kernel.as_ref()).err(),
                Ok(false) => {}
                Err(error) => break Some(error),
            }
            let step = step.get_or_insert_with(|| begin(node, &small));
            if !patience.go_on(false, || node.yields_to_neighbour(&small)) {
                return Tried::Begun(Box::new(Rest { small, step: *step, error: None }));
            }
        };
        if step.is_none() {
            node.ring();
        }
        if error.is_some() {
            let step = step.unwrap_or_else(|| flight.begin(&told(&small)));
            return Tried::Begun(Box::new(Rest { small, step, error }));
        }
        moment("moved", seq, 0);
        step.map_or_else(|| flight.done(&told(&small)), |step| patience.end(&step));
        Tried::Done
    }

    fn large_at_once(&mut self, mut run: Run, limit: Limit) -> AtOnce {
        let made_ns = now_ns();
        let begun = runs_function(run.call()).then(|| self.record_collective(&run, made_ns));
        let mut turned = run.turn(&mut self.peers, self.node.as_mut());
        let step = begun.unwrap_or_else(|| self.record_collective(&run, made_ns));
        let mut patience = Attempts::new(self);
        let error = loop {
            match turned {
                Ok(_) if run.is_finished() => {
                    moment("moved", run.seq(), 0);
                    step.end(true);
                    return AtOnce::Done(Ok(None));
                }
                Ok(moved) if patience.go_on(moved, || is_near(&mut self.node, run.awaited())) => {}
                Ok(_) => break None,
                Err(error) => break Some(error),
            }
            turned = run.turn(&mut self.peers, self.node.as_mut());
        };
        self.keep(run, limit, step, error)
    }

    /// Turns a call that was begun inline into a queued operation.
    #[cold]
    fn keep(&mut self, run: Run, limit: Limit, step: flight::Step, error: Option<RunError>) -> AtOnce {
        let ticket = Arc::new(Ticket::new(limit));
        let _ = ticket.step.set(step);
        self.collectives.push_back(Collective { run, ticket: Arc::clone(&ticket), signed: false });
        self.compare_with_states();
        if let Some(error) = error {
            self.run_failed(error);
        }
        AtOnce::Begun(ticket)
    }
}

/// Returns whether a call runs a function of the program. Such a function may take any time, so the call is
/// begun and recorded before.
fn runs_function(call: Call) -> bool {
    call.op == Some(ReduceOp::Custom)
}

/// Returns whether one of `ranks` shares this rank's core.
fn is_near(node: &mut Option<Node>, ranks: impl IntoIterator<Item = usize>) -> bool {
    node.as_mut().is_some_and(|node| node.is_near(ranks))
}

/// Limits for how long an operation is tried inline.
struct Attempts {
    patience: Patience,
    turns: u32,
    vain: u32,
    /// There are more ranks than cores. `unknown` says that it must be found out (again, after each yield)
    /// whether an awaited rank shares this core.
    crowded: bool,
    unknown: bool,
    /// The attempt has only spun so far.
    brief: bool,
}

impl Attempts {
    fn new(engine: &Engine) -> Self {
        let crowd = engine.settings.sharing.crowd;
        let crowded = crowd == Crowd::Cores;
        Self { patience: Patience::brief(crowd), turns: 0, vain: 0, crowded, unknown: crowded, brief: true }
    }

    /// Pauses if nothing `moved`. Returns whether to try again. `near` says whether an awaited rank shares
    /// this rank's core.
    #[inline]
    fn go_on(&mut self, moved: bool, near: impl FnOnce() -> bool) -> bool {
        if moved {
            self.turns += 1;
            self.brief = false;
            self.patience.moved();
            return self.turns < TURNS;
        }
        if std::mem::take(&mut self.unknown) {
            self.patience.is_near(near());
        }
        match self.patience.step(false) {
            Step::Spin => {
                self.vain += 1;
                if self.vain.is_multiple_of(SPINS_PER_PAUSE) {
                    std::hint::spin_loop();
                }
            }
            Step::Yield => {
                self.brief = false;
                let begin = Instant::now();
                std::thread::yield_now();
                self.patience.yielded(begin.elapsed());
                self.unknown = self.crowded;
            }
            Step::Sleep => return false,
        }
        true
    }

    /// Records that the operation is done.
    #[inline]
    fn end(&self, step: &flight::Step) {
        if self.brief { step.end_soon() } else { step.end(true) }
    }
}
