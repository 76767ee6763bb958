//! A channel: the control link between two ranks of a group, over the connection between their processes.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use super::state::Mux;
use crate::transport::links::Link;

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) mux: Arc<Mux>,
    pub(super) group: u64,
    pub(super) rank: usize,
}

impl Link for Channel {
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.mux.lock().send(self.group, self.rank, parts)
    }

    fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut state = self.mux.lock();
        let Some((_, inbox)) = state.channel(self.group, self.rank) else { return Ok(0) };
        if let Some(taken) = inbox.take(into) {
            return taken;
        }
        state.read_channel(self.group, self.rank);
        let inbox = state.channel(self.group, self.rank).map(|(_, inbox)| inbox);
        inbox.and_then(|inbox| inbox.take(into)).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Closes the channel; the connection stays open for other groups.
    fn close_write(&mut self) {
        self.mux.lock().close_channel(self.group, self.rank);
    }

    fn is_flushed(&self) -> bool {
        let mut state = self.mux.lock();
        let Some((link, _)) = state.channel(self.group, self.rank) else { return true };
        link.is_flushed()
    }

    fn has_unsent(&self) -> bool {
        let mut state = self.mux.lock();
        let Some((link, inbox)) = state.channel(self.group, self.rank) else { return false };
        link.flush();
        inbox.awaits_room |= link.has_unsent();
        link.has_unsent()
    }

    fn time_since_ack(&self) -> Option<Duration> {
        let mut state = self.mux.lock();
        let (link, _) = state.channel(self.group, self.rank)?;
        link.conn.as_ref()?.time_since_ack()
    }

    fn sender_cpu(&self) -> Option<usize> {
        let mut state = self.mux.lock();
        let (link, _) = state.channel(self.group, self.rank)?;
        link.conn.as_ref()?.sender_cpu()
    }
}
