//! The frames on the control connections: each is handed to its group.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use super::inbox::{Inbox, copy_end};
use super::link::ProcessLink;
use super::state::{Event, State};
use crate::engine::poller::Source;
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::conn::ConnError;

/// Most reads of one connection before other connections are read.
const FILLS: u32 = 16;

impl State {
    /// Reads the frames of a process and hands them to their groups. Returns whether more may have come.
    pub(super) fn read_link(&mut self, process: usize) -> bool {
        self.deliver_unread(process);
        for _ in 0..FILLS {
            match self.links[process].fill() {
                Ok(true) => self.deliver_unread(process),
                Ok(false) => return false,
                Err(how) => {
                    self.end_link(process, how);
                    return false;
                }
            }
        }
        // If the kernel has more bytes, the connection stays readable, so the next poll reads them.
        true
    }

    /// Hands the frames that were read from a process to their groups.
    fn deliver_unread(&mut self, process: usize) {
        while let Some((frame, bytes)) = self.links[process].next_input(self.generation) {
            match frame {
                Some(frame) => self.deliver(process, &frame, &bytes),
                None => self.deliver_invalid(process, &bytes),
            }
        }
    }

    fn deliver(&mut self, process: usize, frame: &Frame, bytes: &[u8]) {
        let closes = frame.kind == Kind::Close;
        if let Some((group, rank)) = self.groups.get_mut(&frame.group).and_then(|group| group.of(process)) {
            let inbox = &mut group.inboxes[rank];
            if closes {
                inbox.ended.get_or_insert(ConnError::Closed);
            } else {
                inbox.push(frame, bytes);
            }
            let is_data = frame.kind == Kind::Stream && inbox.ended.is_none();
            return if is_data { group.announce_data(rank) } else { group.announce(rank) };
        }
        let link = &mut self.links[process];
        if closes {
            // A process may close a group that this process did not join, because an agreement failed.
            link.half_closed.remove(&frame.group);
        } else if !link.half_closed.contains(&frame.group) {
            link.invalid = true;
            self.deliver_invalid(process, bytes);
        }
    }

    /// Hands bytes that belong to no common group to all common groups, each of which then reports them.
    fn deliver_invalid(&mut self, process: usize, bytes: &[u8]) {
        for (group, rank) in self.ranks_of(process) {
            group.inboxes[rank].push_invalid(bytes);
            group.announce(rank);
        }
    }

    /// Ends the connection to a process, and with it the channels to it in all groups.
    fn end_link(&mut self, process: usize, how: ConnError) {
        let link = &mut self.links[process];
        if let Some(fd) = link.pollable() {
            self.poller.remove(fd);
        }
        link.half_closed.clear();
        let how = copy_end(link.ended.get_or_insert(how));
        for (group, rank) in self.ranks_of(process) {
            group.inboxes[rank].ended.get_or_insert_with(|| copy_end(&how));
            group.announce(rank);
        }
    }

    /// Handles the end of a process: its connection counts as closed, even if another one holds the socket.
    pub(super) fn process_ended(&mut self, process: usize) {
        if let Some(descriptor) = self.processes[process].take() {
            self.poller.remove(descriptor.as_fd());
        }
        while self.read_link(process) {}
        self.end_link(process, ConnError::Closed);
    }

    /// Sends what a connection takes now, and tells the groups that wait for it.
    pub(super) fn flush_link(&mut self, process: usize) {
        let link = &mut self.links[process];
        link.flush();
        if link.has_unsent() || !link.watches_room {
            return;
        }
        link.watches_room = false;
        if let Some(fd) = link.pollable() {
            let _ = self.poller.change(fd, Source::Peer(process), false);
        }
        for (group, rank) in self.ranks_of(process) {
            if std::mem::take(&mut group.inboxes[rank].awaits_room) {
                group.push(Event::Room);
            }
        }
    }

    /// Returns the connection and the receiving end of the channel to `rank`.
    pub(super) fn channel(&mut self, group: u64, rank: usize) -> Option<(&mut ProcessLink, &mut Inbox)> {
        let group = self.groups.get_mut(&group)?;
        Some((&mut self.links[group.processes[rank]], &mut group.inboxes[rank]))
    }

    /// Sends whole frames of a channel: all of them, or none if the connection takes no more now.
    pub(super) fn send(&mut self, group: u64, rank: usize, frames: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some((link, inbox)) = self.channel(group, rank).filter(|(_, inbox)| !inbox.closed) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let sent = link.send(frames);
        inbox.awaits_room |= link.has_unsent();
        self.watch_room(group, rank);
        sent
    }

    /// Sends a frame of a channel, however many frames wait.
    pub(super) fn push_frame(&mut self, group: u64, rank: usize, frame: &Frame) {
        if let Some((link, _)) = self.channel(group, rank).filter(|(_, inbox)| !inbox.closed) {
            link.push(frame);
            self.watch_room(group, rank);
        }
    }

    pub(super) fn read_channel(&mut self, group: u64, rank: usize) {
        if let Some(process) = self.groups.get(&group).map(|group| group.processes[rank]) {
            self.read_link(process);
        }
    }

    /// Watches the connection of a channel for room to write while bytes wait to be sent.
    fn watch_room(&mut self, group: u64, rank: usize) {
        let Some(process) = self.groups.get(&group).map(|group| group.processes[rank]) else { return };
        let link = &mut self.links[process];
        if link.has_unsent()
            && !std::mem::replace(&mut link.watches_room, true)
            && let Some(fd) = link.pollable()
        {
            let _ = self.poller.change(fd, Source::Peer(process), true);
        }
    }

    pub(super) fn close_channel(&mut self, group: u64, rank: usize) {
        self.push_frame(group, rank, &Frame::empty(Kind::Close, (self.generation, group), 0));
        if let Some((_, inbox)) = self.channel(group, rank) {
            inbox.closed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use convoke_env::Generation;

    use super::super::state::Mux;
    use super::*;
    use crate::transport::frame::HEADER_BYTES;
    use crate::transport::links::Link;
    use crate::transport::links::conn::Conn;
    use crate::transport::links::fake::{self, FaultScript};
    use crate::transport::links::hello::Credentials;

    #[test]
    fn frame_is_delivered_with_its_last_byte() {
        let generation = Generation::from_bytes([7; 16]);
        let credentials = Credentials::new(None, generation, 0);
        let mux = Mux::new(&credentials, 2, None, Duration::from_secs(10), None).unwrap();
        let _membership = mux.join(0, 0, vec![0, 1]);
        // Each read returns one byte, so the last byte of the header is the last that one poll reads.
        assert!(HEADER_BYTES.is_multiple_of(FILLS as usize));
        let (mut peer, link) = fake::pair(FaultScript { step: 1, ..FaultScript::default() });
        let frame = Frame::empty(Kind::Goodbye, (generation, 0), 0).encode();
        for byte in frame {
            peer.try_send(&[IoSlice::new(&[byte])]).unwrap();
        }
        let mut state = mux.lock();
        state.links[1].conn = Some(Conn::new(Box::new(link)));
        while !peer.is_flushed() {
            state.read_link(1);
        }
        // No descriptor would report the frame any more.
        assert!(state.groups[&0].inboxes[1].announced, "the frame was read but not delivered");
    }
}
