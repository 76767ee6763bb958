//! Probes for messages that have arrived and that no receive has matched yet.

use std::sync::Arc;

use super::completion::Completion;
use super::messages::Probe;
use super::state::Engine;
use crate::collectives::call::{Call, Status};
use crate::transport::links::hello::ConnectionKind;

impl Engine {
    pub(super) fn probe(&mut self, from: Option<usize>, call: Call, wait: bool, completion: Arc<Completion>) {
        match from {
            Some(from) => self.ensure_connected(from, ConnectionKind::Message),
            None => self.ensure_message_connections(),
        }
        self.poll_ready();
        match self.first_unexpected(from, call.root) {
            None if wait => self.any_source.probes.push(Probe { from, call, completion }),
            found => completion.complete(Ok(found)),
        }
    }

    /// Completes the waiting probes for which a message has arrived. Returns whether there were any.
    pub(super) fn complete_probes(&mut self) -> bool {
        let waiting = self.any_source.probes.len();
        let mut probes = std::mem::take(&mut self.any_source.probes);
        probes.retain(|probe| {
            let found = self.first_unexpected(probe.from, probe.call.root);
            found.map(|found| probe.completion.complete(Ok(Some(found)))).is_none()
        });
        self.any_source.probes = probes;
        self.any_source.probes.len() < waiting
    }

    /// Returns the first unexpected message with this tag, from rank `from` or from any rank.
    pub(super) fn first_unexpected(&self, from: Option<usize>, tag: u32) -> Option<Status> {
        let peers = self.peers.iter().enumerate().filter(|(rank, _)| from.is_none_or(|from| from == *rank));
        let first = peers
            .filter_map(|(_, peer)| peer.messages.unexpected(tag))
            .min_by_key(|(arrival_index, _)| *arrival_index);
        first.map(|(_, status)| status)
    }

    pub(super) fn ensure_message_connections(&mut self) {
        (0..self.settings.size).for_each(|peer| self.ensure_connected(peer, ConnectionKind::Message));
    }
}
