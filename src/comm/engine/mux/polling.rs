//! Polls the descriptors of a process for all of its groups.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use convoke_env::{ChannelError, ExitCause, ToWorker};

use super::state::{Event, State};
use crate::engine::handshake::HandshakeEvent;
use crate::engine::poller::Source;
use crate::error::LossReason;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

/// Most messages of the launcher that are read at a time, so that the launcher cannot keep a thread busy.
const AGENT_MESSAGES: usize = 64;

impl State {
    /// Handles the descriptors that are ready, except handshakes.
    pub(super) fn poll_ready(&mut self) {
        for source in self.poller.ready() {
            match source {
                Source::Doorbell => self.sleepers.on_doorbell(),
                Source::Handshake => self.handshakes.note_ready(),
                Source::Agent => self.poll_agent(),
                Source::Peer(process) => {
                    self.flush_link(process);
                    self.read_link(process);
                }
                Source::Process(process) => self.process_ended(process),
            }
        }
    }

    pub(super) fn poll_handshakes(&mut self, now: Instant) {
        for (group, event) in self.handshakes.progress(&self.poller, now) {
            match event {
                HandshakeEvent::Opened { peer, conn_kind: ConnectionKind::Control, conn } => {
                    self.control_opened(group, peer, conn);
                }
                event => {
                    if let HandshakeEvent::Opened { conn, .. } = &event
                        && let Some(fd) = conn.pollable()
                    {
                        self.poller.remove(fd);
                    }
                    self.push(group, Event::Handshake(event));
                }
            }
        }
    }

    /// Keeps the control connection to a process, which its first group has opened.
    fn control_opened(&mut self, group: u64, process: usize, conn: Conn) {
        let link = &mut self.links[process];
        if group != self.first || link.conn.is_some() || link.ended.is_some() {
            return;
        }
        if let Some(fd) = conn.pollable() {
            let _ = self.poller.change(fd, Source::Peer(process), false);
        }
        let _ = conn.enable_keepalive(self.peer_timeout);
        link.conn = Some(conn);
        self.push(group, Event::Connected(process));
        // Frames that followed the peer's proof may have been read already. No event announces them.
        self.read_link(process);
    }

    pub(super) fn register_agent(&mut self) {
        if let Some((agent, _)) = &self.agent {
            let agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = self.poller.add(agent.as_fd(), Source::Agent, false);
            drop(agent);
            // Data may have been received together with the agent's first message.
            self.poll_agent();
        }
    }

    pub(super) fn unregister_agent(&mut self) {
        if let Some((agent, _)) = self.agent.take() {
            self.poller.remove(agent.lock().unwrap_or_else(PoisonError::into_inner).as_fd());
        }
    }

    /// Reads the launcher's reports of processes that ended, and hands them to the groups of these processes.
    pub(super) fn poll_agent(&mut self) {
        let Some((agent, generation)) = self.agent.clone() else { return };
        for _ in 0..AGENT_MESSAGES {
            let received = agent.lock().unwrap_or_else(PoisonError::into_inner).receive(Duration::ZERO);
            match received {
                Ok(ToWorker::PeerExit { generation: of, rank: process, cause })
                    if of == generation && cause != ExitCause::Code(0) =>
                {
                    let how = LossReason::from(cause);
                    for (group, rank) in self.ranks_of(process) {
                        group.push(Event::Exited(rank, how.clone()));
                    }
                    self.exits.push((process, how));
                }
                Ok(_) => {}
                Err(ChannelError::Timeout { .. }) => return,
                Err(_) => return self.unregister_agent(),
            }
        }
    }
}
