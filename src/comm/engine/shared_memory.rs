//! Shared memory between the ranks of a host: how the engine sets it up and uses it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_store::interrupt;
use nix::poll::PollFlags;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::execution::{Execution, Paths};
use super::progress_lock::Goal;
use super::settings::ParentLinks;
use super::state::Engine;
use crate::collectives::plan::{Algorithm, Direction};
use crate::error::cause::{Cause, Report};
use crate::error::{CommError, ExecutionError};
use crate::shm::allocations::Allocations;
use crate::shm::bootstrap::{self, Follower, HostBootstrap, Leader, LocalGroup};
use crate::shm::collective::ShmCollective;
use crate::shm::unavailable::Unavailable;
use crate::shm::{HostMemory, Layout, RingChannel};
use crate::transport::frame::Kind;
use crate::transport::links;

/// Longest wait for a failure report after another rank of this host has marked the memory as failed.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_millis(100);

impl Execution for ShmCollective {
    fn poll(&mut self, paths: Paths<'_>) -> Result<bool, ExecutionError> {
        let Some(memory) = paths.memory else { unreachable!("the memory stays as long as the engine") };
        self.progress(memory)
    }

    fn is_finished(&self) -> bool {
        self.finished
    }

    fn bytes(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::Send => self.sent(),
            Direction::Recv => self.received(),
        }
    }

    fn algorithm(&self) -> Option<Algorithm> {
        Some(Algorithm::Memory)
    }

    fn awaited(&self) -> Vec<usize> {
        self.waits.to_vec()
    }
}

impl Engine {
    /// Sets up shared memory between `ranks`, the ranks of this host (this rank is one of them). It then
    /// carries their data. If one of them cannot share memory, all of them use connections, and the result
    /// says why. The set-up may take until `until`.
    pub(crate) fn share_memory(
        &mut self,
        ranks: &[usize],
        until: Instant,
    ) -> Result<Result<(), Unavailable>, CommError> {
        let Some(me) = ranks.iter().position(|&rank| rank == self.settings.me) else { return Ok(Ok(())) };
        let layout = Layout::dense(ranks.len());
        let mut bootstrap = match self.start_memory_bootstrap(ranks, me, layout) {
            Ok(bootstrap) => bootstrap,
            Err(reason) => return Ok(Err(reason)),
        };
        let began = Instant::now();
        let mut check_at = interrupt::next_check(until);
        loop {
            let now = Instant::now();
            ranks.iter().for_each(|&rank| self.flush_control(rank));
            self.poll_events(now);
            self.check_lost_peers(now);
            if let Some(failure) = &self.failure {
                return Err(failure.error(&self.settings, None, 0, (0, 0)));
            }
            if let HostBootstrap::Follower(follower) = &mut bootstrap
                && let Some(offer) = self.peers[ranks[0]].offer.take()
                && let Err(reason) = follower.connect(&offer)
            {
                return Ok(Err(reason));
            }
            match bootstrap.progress() {
                Ok(Some(resources)) => {
                    let (node, processes) =
                        HostMemory::new(resources, layout, ranks.to_vec(), me, self.settings.single_copy);
                    let others = ranks.iter().zip(processes).filter(|&(&rank, _)| rank != ranks[me]);
                    others.for_each(|(&rank, process)| self.links.watch_process(rank, process));
                    self.install_shared_memory(node);
                    return Ok(Ok(()));
                }
                Err(reason) => return Ok(Err(reason)),
                Ok(None) if now >= until => {
                    let after_ms = began.elapsed().as_millis() as u64;
                    let cause = Cause::Timeout { missing: bootstrap.missing(), after_ms };
                    return Err(self.abort_bootstrap(Report::new(self.settings.me, cause)));
                }
                Ok(None) if now >= check_at => {
                    if interrupt::is_interrupted() {
                        return Err(self.interrupt_bootstrap(bootstrap.missing().first().copied()));
                    }
                    check_at = interrupt::next_check(until);
                }
                Ok(None) => {}
            }
            let wake = self.wake_at(now).min(check_at);
            let others = bootstrap.descriptors().into_iter().map(|fd| (fd, PollFlags::POLLIN));
            self.nap(&others.collect::<Vec<_>>(), wake.saturating_duration_since(now));
        }
    }

    /// Returns the registry of buffers that users allocate in memory shared with the other ranks of this
    /// host; `None` if these ranks share no memory.
    pub(crate) fn allocations(&self) -> Option<Arc<Allocations>> {
        self.host.memory.as_ref().map(|node| Arc::clone(&node.allocations))
    }

    fn start_memory_bootstrap(
        &mut self,
        ranks: &[usize],
        me: usize,
        layout: Layout,
    ) -> Result<HostBootstrap, Unavailable> {
        let process = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let group = |doorbell| LocalGroup { ranks: ranks.to_vec(), me, layout, doorbell, process };
        let group = self.links.doorbell().map(group).map_err(|source| Unavailable::Descriptors { source });
        if me > 0 {
            return Ok(HostBootstrap::Follower(Follower::new(group?)));
        }
        let (offer, bootstrap) = match group.and_then(Leader::open) {
            Ok((leader, offer)) => (offer, Ok(HostBootstrap::Leader(leader))),
            Err(reason) => (bootstrap::refusal(&reason.to_string()), Err(reason)),
        };
        let frame = self.frame(Kind::Share, 0);
        ranks[1..].iter().for_each(|&rank| self.send_control(rank, &frame, &offer));
        bootstrap
    }

    pub(crate) fn install_shared_memory(&mut self, node: HostMemory) {
        for (local_rank, rank) in node.others() {
            let conn = |channel: RingChannel| links::connection(node.ring_to(channel, local_rank));
            self.peers[rank].messages.conn = Some(conn(RingChannel::Messages));
            self.peers[rank].collective = Some(conn(RingChannel::Collectives));
        }
        self.links.set_memory(Arc::clone(&node.doorbells));
        self.host.ranks = node.others().map(|(_, rank)| rank).collect();
        self.host.memory = Some(node);
    }

    /// Returns what groups that are made from this group share with it.
    pub(crate) fn parent_links(&self) -> ParentLinks {
        let share = |node: &HostMemory| Some((node.ranks.clone(), node.share.clone()?));
        ParentLinks {
            mux: Arc::clone(&self.links.mux),
            processes: self.links.processes.clone(),
            addresses: self.settings.addresses.clone(),
            host: self.host.memory.as_ref().and_then(share),
        }
    }

    /// Asks the other ranks of the host to ring this rank's doorbell when they write to shared memory.
    /// Returns whether this rank may sleep: what they wrote before leaves nothing to do.
    pub(super) fn may_sleep_on_memory(&mut self, goal: &Goal<'_>) -> bool {
        let Some(node) = &self.host.memory else { return true };
        node.doorbells.mark_sleeping();
        self.driver.control_activity = false;
        let moved = self.progress_local_messages() | self.progress();
        // An awaited control frame may have arrived just now, and no descriptor will report it again.
        let still = !moved && !self.driver.control_activity && self.failure.is_none() && !goal.is_reached();
        still && self.host.memory.as_ref().is_some_and(|node| node.doorbells.is_marked_sleeping())
    }

    /// If another rank of the host has ended the group, waits for the report that says why. Without the
    /// report, a later collective in shared memory could succeed: the stamps that it needs may have been
    /// written before the failure.
    pub(super) fn wait_for_failure_report(&mut self) {
        let until = Instant::now() + FAILURE_REPORT_TIMEOUT;
        while self.failure.is_none() && self.host.memory.as_ref().is_some_and(HostMemory::has_failed) {
            self.read_all_controls();
            if Instant::now() >= until {
                return;
            }
            self.nap(&[], Duration::from_millis(1));
        }
    }

    /// Moves messages between this rank and the other ranks of its host. They are in shared memory, so no
    /// descriptor becomes readable when one arrives.
    pub(super) fn progress_local_messages(&mut self) -> bool {
        let mut moved = false;
        for index in 0..self.host.ranks.len() {
            moved |= self.progress_messages(self.host.ranks[index]);
        }
        moved
    }
}
