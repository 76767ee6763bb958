//! Polls the descriptors of a process for all of its groups.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use convoke_env::{ChannelError, ExitCause, ToWorker};

use super::inbox::copy;
use super::state::{Event, State};
use crate::engine::handshake::HandshakeEvent;
use crate::engine::poller::{Poller, Source};
use crate::error::LossReason;
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;

/// Most messages of the launcher that are read at a time, so that the launcher cannot keep a thread busy.
const AGENT_MESSAGES: usize = 64;

impl State {
    /// Handles the descriptors that are ready, except handshakes.
    pub(super) fn poll_ready(&mut self, poller: &Poller) {
        for source in poller.ready() {
            match source {
                Source::Doorbell => self.sleepers.on_doorbell(),
                Source::Listener | Source::Handshake => {}
                Source::Agent => self.poll_agent(poller),
                Source::Control(process) => {
                    self.flush_link(poller, process);
                    self.read_link(poller, process);
                }
                Source::Process(process) => self.process_ended(poller, process),
                Source::Message(_) => unreachable!("message connections are in the epoll set of their group"),
            }
        }
    }

    pub(super) fn poll_handshakes(&mut self, poller: &Poller, now: Instant) {
        let mut events = Vec::new();
        self.handshakes.progress(poller, now, &mut events);
        for event in events {
            match event {
                HandshakeEvent::Opened { group, peer, conn_kind: ConnectionKind::Control, conn } => {
                    self.control_opened(poller, group, peer, conn);
                }
                HandshakeEvent::Opened { group, peer, conn_kind, conn } => {
                    if let Some(fd) = conn.pollable() {
                        poller.remove(fd);
                    }
                    self.push(group, Event::Opened { peer, conn_kind, conn });
                }
                HandshakeEvent::Unauthorized { group, from, error } => {
                    self.push(group, Event::Unauthorized { from, error });
                }
                HandshakeEvent::Exhausted { group: Some(group), source } => {
                    self.push(group, Event::Exhausted { outgoing: true, source });
                }
                HandshakeEvent::Exhausted { group: None, source } => {
                    for group in self.groups.values_mut() {
                        group.push(Event::Exhausted { outgoing: false, source: copy(&source) });
                    }
                }
            }
        }
    }

    /// Keeps the control connection to a process, which its first group has opened.
    fn control_opened(&mut self, poller: &Poller, group: u64, process: usize, conn: Conn) {
        let link = &mut self.links[process];
        if group != self.first || link.conn.is_some() || link.ended.is_some() {
            return;
        }
        if let Some(fd) = conn.pollable() {
            let _ = poller.change(fd, Source::Control(process), false);
        }
        let _ = conn.enable_keepalive(self.peer_timeout);
        link.conn = Some(conn);
        self.push(group, Event::Connected(process));
        // Frames that the peer sent right after its proof may have been read already. No event announces
        // them.
        self.read_link(poller, process);
    }

    pub(super) fn register_agent(&mut self, poller: &Poller) {
        if let Some((agent, _)) = &self.agent {
            let agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = poller.add(agent.as_fd(), Source::Agent, false);
            drop(agent);
            // Data may have been received together with the agent's first message.
            self.poll_agent(poller);
        }
    }

    pub(super) fn unregister_agent(&mut self, poller: &Poller) {
        if let Some((agent, _)) = self.agent.take() {
            poller.remove(agent.lock().unwrap_or_else(PoisonError::into_inner).as_fd());
        }
    }

    /// Reads the launcher's reports of processes that ended, and hands them to the groups of these processes.
    pub(super) fn poll_agent(&mut self, poller: &Poller) {
        let Some((agent, generation)) = self.agent.clone() else { return };
        for _ in 0..AGENT_MESSAGES {
            let received = agent.lock().unwrap_or_else(PoisonError::into_inner).receive(Duration::ZERO);
            match received {
                Ok(ToWorker::PeerExit { generation: g, rank, cause }) if g == generation => {
                    if cause != ExitCause::Code(0) {
                        let how = LossReason::from(cause);
                        for group in self.groups.values_mut() {
                            if let Some((group, rank)) = group.of(rank) {
                                group.push(Event::Exited(rank, how.clone()));
                            }
                        }
                        self.exits.push((rank, how));
                    }
                }
                Ok(_) => {}
                Err(ChannelError::Timeout { .. }) => return,
                Err(_) => return self.unregister_agent(poller),
            }
        }
    }
}
