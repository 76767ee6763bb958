//! Opens the connections of a group: those that it needs before it is complete, and later ones on demand.

use std::time::Instant;

use super::handshake::Handshakes;
use super::state::Engine;
use super::waits::interruption_while_waiting;
use crate::error::CommError;
use crate::error::cause::{Cause, Report};
use crate::transport::frame::Kind;
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    /// Opens `connections`, given as rank and kind. Returns whether all of them are open by `until`. The
    /// bootstrap calls this before any other thread uses the engine.
    pub(crate) fn connect(
        &mut self,
        connections: &[(usize, ConnectionKind)],
        until: Instant,
    ) -> Result<bool, CommError> {
        self.lifecycle.connecting = true;
        loop {
            for &(peer, conn_kind) in connections {
                let opens = self.settings.me > peer;
                if self.is_missing(peer, conn_kind) && (opens || conn_kind == ConnectionKind::Control) {
                    self.links.connect(peer, conn_kind, self.settings.addresses[peer], !opens);
                }
            }
            let now = Instant::now();
            self.poll_events(now);
            self.check_lost_peers(now);
            if let Some(failure) = &self.failure {
                return Err(failure.error(&self.settings, None, 0, (0, 0)));
            }
            if self.unconnected(connections).next().is_none() {
                self.lifecycle.connecting = false;
                return Ok(true);
            }
            if now >= until {
                return Ok(false);
            }
            let wake = self.wake_at(now).min(until);
            self.nap(&[], wake.saturating_duration_since(now));
        }
    }

    /// Returns the rank of each of `connections` that is not open.
    pub(crate) fn unconnected(&self, connections: &[(usize, ConnectionKind)]) -> impl Iterator<Item = usize> {
        let missing = connections.iter().filter(|&&(peer, conn_kind)| self.is_missing(peer, conn_kind));
        missing.map(|&(peer, _)| peer)
    }

    /// Returns whether the connection of `conn_kind` to `peer` is needed and not open. A peer that has said
    /// goodbye needs no more connections.
    fn is_missing(&self, peer: usize, conn_kind: ConnectionKind) -> bool {
        !self.peers[peer].is_open(conn_kind) && !self.liveness.has_left(peer)
    }

    /// Returns whether the control connection to `peer` is open, which means that `peer` has authenticated.
    pub(crate) fn is_connected(&self, peer: usize) -> bool {
        self.peers[peer].control.is_some()
    }

    /// Ends the group before it is complete, for the reason in `report`, which a rank wrote to the store.
    pub(crate) fn abort_with_report(&mut self, report: &[u8]) -> CommError {
        let report = Report::decode(report).unwrap_or_else(|error| {
            Report::new(self.settings.me, Cause::Aborted { reason: error.to_string() })
        });
        self.abort_bootstrap(report)
    }

    /// Ends the group before it is complete: sends `report` to the connected ranks, and returns the error.
    pub(crate) fn abort_bootstrap(&mut self, report: Report) -> CommError {
        self.fail(report);
        let failure = self.failure.as_ref().expect("`fail` has set it");
        failure.error(&self.settings, None, 0, (0, 0))
    }

    /// Ends the group before it is complete, because the program of this rank was interrupted while it waited for
    /// the rank `awaited`.
    pub(crate) fn interrupt_bootstrap(&mut self, awaited: Option<usize>) -> CommError {
        let cause = Cause::Aborted { reason: interruption_while_waiting(awaited) };
        self.abort_bootstrap(Report::new(self.settings.me, cause))
    }

    /// Calls `function` with the handshakes of this process.
    pub(crate) fn with_handshakes<R>(&self, function: impl FnOnce(&Handshakes) -> R) -> R {
        self.links.with_handshakes(function)
    }

    /// Opens a connection to `peer` unless there is a link of this kind.
    pub(super) fn ensure_connected(&mut self, peer: usize, conn_kind: ConnectionKind) {
        if self.peers[peer].link(conn_kind).is_none() {
            self.open_connection(peer, conn_kind);
        }
    }

    /// Opens a connection to `peer` if it is not open. The higher rank of a pair connects, so a lower rank
    /// asks the peer to connect.
    pub(super) fn open_connection(&mut self, peer: usize, conn_kind: ConnectionKind) {
        if self.peers[peer].is_open(conn_kind) || peer == self.settings.me {
            return;
        }
        let open = self.frame(Kind::Open, conn_kind.to_wire().into());
        if self.settings.me > peer {
            if self.peers[peer].link(conn_kind).is_some() {
                // The peer learns that a connection is needed even if it cannot accept it.
                self.send_control(peer, &open, &[]);
            }
            self.links.connect(peer, conn_kind, self.settings.addresses[peer], false);
            self.poll_handshakes(Instant::now());
        } else if conn_kind != ConnectionKind::Control
            && !std::mem::replace(&mut self.peers[peer].requested[conn_kind as usize], true)
        {
            self.send_control(peer, &open, &[]);
        }
    }
}
