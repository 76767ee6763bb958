//! Probes for messages that have come and that no receive has matched yet.

use std::sync::Arc;

use super::core::Engine;
use super::ticket::Ticket;
use crate::call::{Call, Envelope};
use crate::links::hello::Lane;

/// A probe that waits for a message.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) from: Option<usize>,
    pub(super) call: Call,
    pub(super) ticket: Arc<Ticket>,
}

impl Engine {
    pub(super) fn probe(&mut self, from: Option<usize>, call: Call, wait: bool, ticket: Arc<Ticket>) {
        match from {
            Some(from) => self.need(from, Lane::Message),
            None => self.need_all_messages(),
        }
        self.look_at_ready();
        match self.first_early(from, call.root) {
            None if wait => self.probes.push(Probe { from, call, ticket }),
            found => ticket.complete(Ok(found)),
        }
    }

    /// Ends the probes that have found a message. Returns whether there were any.
    pub(super) fn answer_probes(&mut self) -> bool {
        let waiting = self.probes.len();
        let mut probes = std::mem::take(&mut self.probes);
        probes.retain(|probe| match self.first_early(probe.from, probe.call.root) {
            Some(found) => {
                probe.ticket.complete(Ok(Some(found)));
                false
            }
            None => true,
        });
        self.probes = probes;
        self.probes.len() < waiting
    }

    /// Returns the first unexpected message with this tag, from rank `from` or from any rank.
    pub(super) fn first_early(&self, from: Option<usize>, tag: u32) -> Option<Envelope> {
        let peers = self.peers.iter().enumerate().filter(|(rank, _)| from.is_none_or(|from| from == *rank));
        let first = peers.filter_map(|(_, peer)| peer.messages.early(tag)).min_by_key(|(came, _)| *came);
        first.map(|(_, arrival)| arrival)
    }

    pub(super) fn need_all_messages(&mut self) {
        for peer in 0..self.settings.size {
            if peer != self.settings.me {
                self.need(peer, Lane::Message);
            }
        }
    }
}
