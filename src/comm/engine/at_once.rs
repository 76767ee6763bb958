//! Collectives and messages through memory that are done before anybody would have had to wait for them.
//!
//! A call that nothing is before is carried out where it is made, without a task for whoever drives; a collective also
//! without a ticket. If the others do not come soon it becomes an operation like every other.

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

/// Attempts between two pauses. A pause takes as long as what is waited for.
const SPINS_PER_PAUSE: u32 = 8;
/// Calls between two looks at what is not data: aborts, farewells, messages that nobody has asked for.
const CALLS_BETWEEN_LOOKS: u32 = 256;
/// Collectives until it is looked again whether ranks, where there are more than cores, share these evenly. Seldomer between
/// messages: long ones gain nothing by it.
const CALLS_BETWEEN_PLACES: u32 = 16;
/// Most turns: who moves much must look around.
const TURNS: u32 = 32;

/// What has become of a call.
#[derive(Debug)]
pub(super) enum AtOnce {
    Done(Outcome),
    /// It is in the engine.
    Begun(Arc<Ticket>),
}

/// What has become of a small call.
#[derive(Debug)]
enum Tried {
    Done,
    /// It is no small one.
    Not,
    Begun(Box<Rest>),
}

/// What is left of a small call, what the recorder knows it by, and why it stopped if it did.
#[derive(Debug)]
struct Rest {
    small: Small,
    step: flight::Step,
    error: Option<RunError>,
}

impl Engine {
    /// Takes `operation` if it goes through memory and nothing is before it.
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
                // It is owed credit.
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

    /// Moves messages with a peer until an operation is done, or it would have to wait.
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

    /// Carries out a small call as far as it can.
    #[inline]
    fn small_at_once(&mut self, operation: &mut Operation<'_>) -> Tried {
        let Operation::Collective { call, lent, kernel, .. } = operation else { return Tried::Not };
        // Shares that are changed first may need a row of their own.
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
        // Who sleeps is woken, and the call recorded, while the others are waited for; at the end if that need not be.
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

    /// Makes a call that was begun an operation.
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

/// Whether a call runs a function of the program, which may take any time: it is begun and recorded before.
fn runs_function(call: Call) -> bool {
    call.op == Some(ReduceOp::Custom)
}

/// Whether one of `ranks` shares this one's core.
fn is_near(node: &mut Option<Node>, ranks: impl IntoIterator<Item = usize>) -> bool {
    node.as_mut().is_some_and(|node| node.is_near(ranks))
}

/// How long an operation is tried at once.
struct Attempts {
    patience: Patience,
    turns: u32,
    vain: u32,
    /// With more ranks than cores it matters who shares one: to be found out, at first and after each yield.
    crowded: bool,
    unknown: bool,
    /// It has done nothing but spin.
    brief: bool,
}

impl Attempts {
    fn new(engine: &Engine) -> Self {
        let crowd = engine.settings.sharing.crowd;
        let crowded = crowd == Crowd::Cores;
        Self { patience: Patience::brief(crowd), turns: 0, vain: 0, crowded, unknown: crowded, brief: true }
    }

    /// Waits for a moment if nothing `moved`; whether to try again. `near` tells whether one that is waited for shares
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

    /// Records that what was tried is done.
    #[inline]
    fn end(&self, step: &flight::Step) {
        if self.brief { step.end_soon() } else { step.end(true) }
    }
}
