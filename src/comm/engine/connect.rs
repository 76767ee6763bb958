//! Connecting to all ranks before the group is complete, or giving up.

use std::sync::PoisonError;
use std::time::Instant;

use super::core::Engine;
use super::door::Door;
use super::failure::Failure;
use super::poller::Source;
use crate::cause::{Cause, Report};
use crate::error::CommError;
use crate::links::hello::Lane;

impl Engine {
    /// Opens control connections to all ranks, and the lanes in `lanes`. Returns whether all are open by
    /// `until`. The bootstrap calls this before any other thread uses the engine.
    pub(crate) fn connect(&mut self, lanes: &[(usize, Lane)], until: Instant) -> Result<bool, CommError> {
        self.connecting = true;
        loop {
            for &(peer, lane) in lanes {
                let address = self.settings.addresses[peer];
                if self.lacks(peer, lane) && self.settings.me > peer {
                    self.door.dial(peer, lane, address, Instant::now());
                } else if self.lacks(peer, lane) && lane == Lane::Control {
                    self.door.expect(peer, lane, address, Instant::now());
                }
            }
            let now = Instant::now();
            self.look_around(now);
            self.look_for_losses(now);
            if let Some(failure) = &self.failure {
                return Err(self.error(failure, None, 0, (0, 0)));
            }
            if self.unconnected(lanes).next().is_none() {
                self.connecting = false;
                return Ok(true);
            }
            if now >= until {
                return Ok(false);
            }
            let wake = self.wake_at(now).min(until);
            self.poller.sleep(&[], wake.saturating_duration_since(now));
        }
    }

    /// Returns the ranks to which not all of `lanes` are open.
    pub(crate) fn unconnected(&self, lanes: &[(usize, Lane)]) -> impl Iterator<Item = usize> {
        lanes.iter().filter(|&&(peer, lane)| self.lacks(peer, lane)).map(|&(peer, _)| peer)
    }

    /// Returns whether `lane` to `peer` is missing. A rank that has said goodbye had all the connections it
    /// needed.
    fn lacks(&self, peer: usize, lane: Lane) -> bool {
        !self.peers[peer].is_open(lane) && !self.peers[peer].left
    }

    /// Returns whether `peer` has authenticated.
    pub(crate) fn is_connected(&self, peer: usize) -> bool {
        self.peers[peer].control.is_some()
    }

    /// Ends the group for the failure report that another rank left in the store.
    pub(crate) fn aborted(&mut self, report: &[u8]) -> CommError {
        match Report::decode(report) {
            Ok(report) => self.give_up(report),
            Err(reason) => self.give_up(Report::new(self.settings.me, Cause::Aborted { reason })),
        }
    }

    /// Ends the group before it is complete, and tells the ranks that are connected.
    pub(crate) fn give_up(&mut self, report: Report) -> CommError {
        self.fail(report.clone());
        let failure = self.failure.clone().unwrap_or(Failure::new(report));
        self.error(&failure, None, 0, (0, 0))
    }

    pub(crate) fn door(&self) -> &Door {
        &self.door
    }

    pub(crate) fn unregister_agent(&mut self) {
        if let Some((agent, _)) = self.settings.agent.as_ref().filter(|_| self.agent_registered) {
            let agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
            self.poller.remove(agent.as_fd());
            self.agent_registered = false;
        }
    }

    /// Watches the agent channel, and reads data that came together with its first message.
    pub(super) fn register_agent(&mut self) {
        if let Some((agent, _)) = &self.settings.agent {
            let agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
            self.agent_registered = self.poller.add(agent.as_fd(), Source::Agent, false).is_ok();
            drop(agent);
            self.look_at_agent();
        }
    }
}
