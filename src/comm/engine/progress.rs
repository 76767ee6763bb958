//! The progress loop, which moves data, polls for other events now and then, and sleeps if nothing moves.

use std::sync::Arc;
use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};

use super::affinity::Placement;
use super::collectives::Collective;
use super::execution::Paths;
use super::mux;
use super::operation::Task;
use super::progress_lock::{Drive, Goal};
use super::state::Engine;
use super::submission::AbortReason;
use super::wait_policy::{WaitAction, WaitMedium};
use crate::collectives::call::Call;
use crate::error::cause::Cause;
use crate::fault::fault_point;

/// Passes of the progress loop between two polls of control connections and clock while data keeps moving.
const ROUNDS_BETWEEN_POLLS: u32 = 64;

impl Engine {
    /// Moves data of the first collective and all messages without waiting. Returns whether anything moved.
    pub(super) fn progress(&mut self) -> bool {
        let mut moved = false;
        if let Some(first) = self.collectives.queue.front_mut() {
            let paths = Paths { connections: &mut self.peers, memory: self.host.memory.as_mut() };
            match first.execution.poll(paths) {
                Ok(some) => moved = some,
                Err(error) => self.execution_failed(error),
            }
            self.announce_arrival();
            let (me, peers, liveness) = (self.settings.me, &self.peers, &self.liveness);
            let failed = self.failure.is_some();
            let is_done = |first: &mut Collective| {
                first.execution.is_finished() && first.is_barrier_complete(me, peers, liveness, failed)
            };
            let done = self.collectives.queue.pop_front_if(is_done);
            if let Some(Collective { seq, execution, completion, .. }) = done {
                fault_point("moved", seq, 0);
                drop(execution);
                completion.complete(Ok(None));
                self.record_start();
                moved = true;
            }
        }
        if !self.any_source.recvs.is_empty() || !self.any_source.probes.is_empty() {
            // The awaited message may come from any peer, so all connections that have data are read.
            self.poll_ready();
            moved |= self.complete_probes();
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].messages.is_busy() {
                moved |= self.progress_messages(peer);
            }
        }
        if !self.lifecycle.leaving.is_empty()
            && (self.completions().next().is_none() || self.abandons_pending())
        {
            self.leave();
            self.lifecycle.leaving.drain(..).for_each(|completion| completion.complete(Ok(None)));
        }
        moved
    }

    /// Moves this thread off a core from which awaited data was last sent. Returns whether it moved.
    fn leave_shared_core(&mut self) -> bool {
        let (collectives, peers) = (&self.collectives, &self.peers);
        self.driver.affinity.leave_shared_core(|core| {
            let first = collectives.queue.front().into_iter();
            let blocked = first.flat_map(|first| first.execution.blocked());
            let collective = blocked.filter_map(|(peer, _)| peers[peer].collective.as_ref());
            let messages = peers.iter().filter(|peer| peer.messages.is_busy());
            let messages = messages.filter_map(|peer| peer.messages.conn.as_ref());
            collective.chain(messages).filter_map(|conn| conn.sender_cpu()).any(|sender| sender == core)
        })
    }

    /// Notes the call that this rank waits for. It is a message to or from `peer`, if there is one, else a collective or a message
    /// from any rank.
    pub(super) fn set_awaited(&mut self, call: Call, peer: Option<usize>) {
        let medium = peer.map_or(WaitMedium::Connection, |peer| self.medium(peer));
        self.driver.wait_policy.set_bytes(call.bytes());
        self.driver.affinity.set_placement(Placement::of(call, medium));
    }

    /// Returns how this rank waits for messages of `peer`.
    pub(super) fn medium(&self, peer: usize) -> WaitMedium {
        if self.host.ranks.contains(&peer) { WaitMedium::SharedMemory } else { WaitMedium::Connection }
    }

    pub(super) fn progress_messages(&mut self, peer: usize) -> bool {
        self.peers[peer].messages.progress(&mut self.any_source).unwrap_or_else(|error| {
            self.message_failed(peer, error);
            false
        })
    }

    fn drive_to(&mut self, goal: &Goal<'_>) {
        loop {
            self.collect();
            let moved = self.progress();
            if goal.is_reached() {
                self.driver.wait_policy.record_end();
                return;
            }
            if let Some(failure) = self.failure.as_ref().filter(|_| !goal.is_background()) {
                // After a failure the engine has no tasks, so no other code would complete these.
                for completion in goal.completions {
                    completion.complete(Err(failure.error(&self.settings, None, 0, (0, 0))));
                }
                return;
            }
            self.driver.rounds = self.driver.rounds.wrapping_add(1);
            if moved {
                self.driver.wait_policy.record_progress();
                self.waits.stalled_since = None;
                if self.driver.rounds.is_multiple_of(ROUNDS_BETWEEN_POLLS) {
                    let now = Instant::now();
                    self.poll_events(now);
                    if goal.until.is_some_and(|until| now >= until) {
                        return;
                    }
                }
                continue;
            }
            match self.driver.wait_policy.next_action(goal.is_background()) {
                WaitAction::Spin => std::hint::spin_loop(),
                WaitAction::Yield => {
                    if self.driver.rounds.is_multiple_of(ROUNDS_BETWEEN_POLLS) {
                        self.driver.affinity.move_to_assigned_core();
                    }
                    let switches = self.driver.wait_policy.is_first_yield().then(context_switches);
                    let begin = Instant::now();
                    std::thread::yield_now();
                    self.driver.wait_policy.record_yield(begin.elapsed());
                    if let Some(before) = switches {
                        self.driver.wait_policy.record_first_yield(context_switches() != before);
                    }
                }
                WaitAction::Sleep
                    if !goal.is_background()
                        && self.driver.wait_policy.may_migrate()
                        && self.leave_shared_core() =>
                {
                    self.driver.wait_policy.record_migration();
                }
                WaitAction::Sleep => {
                    self.driver.wait_policy.record_sleep();
                    self.sleep(goal);
                    if goal.until.is_some_and(|until| Instant::now() >= until) {
                        return;
                    }
                }
            }
        }
    }
}

/// Returns how often the kernel has switched from this thread to another.
fn context_switches() -> Option<i64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).ok()?;
    Some(usage.voluntary_context_switches() + usage.involuntary_context_switches())
}

impl Drive for Engine {
    type Task = Task;
    type Doorbell = Arc<mux::Slot>;

    fn drive(&mut self, goal: &Goal<'_>) {
        self.driver.has_waiter = !goal.is_background();
        self.drive_to(goal);
        self.driver.has_waiter = false;
    }

    fn collect(&mut self) {
        let Some((tasks, abort)) = self.submissions.collect() else { return };
        for task in tasks {
            self.start(task);
        }
        let reason = abort.map(|abort| match abort {
            AbortReason::Given(reason) => reason,
            AbortReason::Interrupted => self.interruption(),
        });
        if let Some(reason) = reason {
            self.fail_for(Cause::Aborted { reason });
        }
        // Starting a task may fail the group before the task is queued. Then the failure has not ended it.
        self.fail_pending();
    }

    fn poll_once(&mut self) {
        self.collect();
        self.progress();
    }

    fn on_panic(&mut self) {
        self.fail_after_panic();
    }
}
