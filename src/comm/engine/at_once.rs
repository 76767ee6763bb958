//! Collectives and messages through memory that are done before anybody would have had to wait for them.
//!
//! A call that nothing is before is carried out where it is made, without a task for whoever drives; a collective also
//! without a ticket. If the others do not come soon it becomes an operation like every other.

use std::sync::Arc;
use std::time::Instant;

use super::buffer::Lent;
use super::core::Engine;
use super::patience::Crowd;
use super::state::Collective;
use super::ticket::{Limit, Outcome, Ticket};
use super::{Operation, Task, Way};
use crate::call::Call;
use crate::fault::moment;
use crate::kernels::Kernel;

/// Attempts in vain after which a call becomes an operation; with more ranks than cores each of them yields.
const SPINS: u32 = 1000;
const SPINS_PER_PAUSE: u32 = 8;
const YIELDS: u32 = 20;
/// The same where a yield may not reach the other ranks.
const YIELDS_APART: u32 = 3;
/// Calls between two looks at what is not data: aborts, farewells, messages that nobody has asked for.
const CALLS_BETWEEN_LOOKS: u32 = 256;
/// Most turns: who moves much must look around.
const TURNS: u32 = 32;

/// What has become of a call.
#[derive(Debug)]
pub(super) enum AtOnce {
    Done(Outcome),
    /// It is in the engine.
    Begun(Arc<Ticket>),
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
        let idle = self.failure.is_none()
            && !self.left
            && self.collectives.is_empty()
            && self.node.as_ref().is_some_and(|node| !node.has_failed())
            && !self.mailbox.has_letters();
        if !idle {
            return None;
        }
        let beside = |peer: &usize| self.beside.contains(peer);
        match operation.take()? {
            Operation::Collective { call, way: Way::Memory, lent, kernel } => {
                Some(self.collective_at_once(call, lent, kernel, limit))
            }
            Operation::Send { to, call, lent } if beside(&to) => {
                Some(self.message_at_once(to, Operation::Send { to, call, lent }, limit))
            }
            Operation::Recv { from: Some(from), call, lent } if beside(&from) => {
                Some(self.message_at_once(from, Operation::Recv { from: Some(from), call, lent }, limit))
            }
            other => {
                *operation = Some(other);
                None
            }
        }
    }

    fn message_at_once(&mut self, peer: usize, operation: Operation<'static>, limit: Limit) -> AtOnce {
        let ticket = Arc::new(Ticket::new(limit));
        self.start(Task { operation, ticket: Arc::clone(&ticket) });
        let mut patience = Spins::new(self.settings.crowd);
        loop {
            if let Some(outcome) = ticket.take() {
                return AtOnce::Done(outcome);
            }
            let moved = self.turn_messages(peer);
            if self.failure.is_some() || !patience.go_on(moved) {
                return AtOnce::Begun(ticket);
            }
        }
    }

    fn collective_at_once(
        &mut self,
        call: Call,
        lent: Lent<'static>,
        kernel: Option<Kernel>,
        limit: Limit,
    ) -> AtOnce {
        let mut run = self.run(call, Way::Memory, lent, kernel);
        // The others first: they wait while this is recorded.
        let mut turned = run.turn(&mut self.peers, self.node.as_mut());
        let step = self.record_collective(&run, limit.made());
        let mut patience = Spins::new(self.settings.crowd);
        let error = loop {
            match turned {
                Ok(_) if run.is_finished() => {
                    moment("moved", run.seq(), 0);
                    step.end(true);
                    return AtOnce::Done(Ok(None));
                }
                Ok(moved) if patience.go_on(moved) => {}
                Ok(_) => break None,
                Err(error) => break Some(error),
            }
            turned = run.turn(&mut self.peers, self.node.as_mut());
        };
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

/// How long an operation is tried at once.
struct Spins {
    crowd: Crowd,
    turns: u32,
    vain: u32,
}

impl Spins {
    fn new(crowd: Crowd) -> Self {
        Self { crowd, turns: 0, vain: 0 }
    }

    /// Waits for a moment if nothing `moved`; whether to try again.
    fn go_on(&mut self, moved: bool) -> bool {
        if moved {
            (self.turns, self.vain) = (self.turns + 1, 0);
            return self.turns < TURNS;
        }
        self.vain += 1;
        match self.crowd {
            Crowd::No => {
                // A pause takes as long as what is waited for.
                if self.vain.is_multiple_of(SPINS_PER_PAUSE) {
                    std::hint::spin_loop();
                }
                return self.vain < SPINS;
            }
            Crowd::Cores | Crowd::Apart => std::thread::yield_now(),
        }
        self.vain < if self.crowd == Crowd::Cores { YIELDS } else { YIELDS_APART }
    }
}
