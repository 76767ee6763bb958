//! Receives of messages that the peer exposes: this rank reads the elements in the memory of the peer, and then tells the peer.

use super::{Match, PeerMessages};
use crate::fault::fault_point;
use crate::transport::frame::Kind;
use crate::transport::links::conn::Conn;

/// Most bytes that are read before other messages are looked at.
const MOST_BYTES: usize = 1 << 20;

impl PeerMessages {
    /// Reads a part of the next exposed message that a receive has matched. Returns whether there was one.
    pub(super) fn read_exposed(&mut self, conn: &Conn) -> bool {
        if self.exposed == 0 {
            return false;
        }
        let mut recvs = self.recvs.iter_mut().enumerate();
        let Some((index, recv, seq, address)) = recvs.find_map(|(index, recv)| match recv.matched {
            Some(Match::Exposed { seq, address }) => Some((index, recv, seq, address)),
            _ => None,
        }) else {
            unreachable!("a matched receive stays until its message is read")
        };
        // The receive may have no room for the rest.
        let end = recv.posted.buffer.len().min(recv.message_bytes());
        let mut into = recv.posted.buffer.bytes_mut(recv.done..end.min(recv.done + MOST_BYTES));
        let (bytes, read) =
            (into.len(), conn.read_exposed(address.wrapping_add(recv.done as u64), &mut into));
        drop(into);
        match read {
            Ok(true) => {}
            // The peer has ended or the group has failed, which is reported soon.
            Ok(false) => return false,
            Err(error) => {
                log::debug!(
                    "the kernel does not let this rank read in the memory of rank {}: {error}",
                    self.peer
                );
                (recv.matched, recv.done) = (Some(Match::Large(seq)), 0);
                self.exposed -= 1;
                self.push(self.frame(Kind::Cts, seq), None);
                return true;
            }
        }
        recv.done += bytes;
        fault_point("message received", recv.id, recv.done);
        if recv.done == end {
            let recv = self.recvs.remove(index).expect("it was found there");
            self.exposed -= 1;
            self.push(self.frame(Kind::ReadDone, seq), None);
            recv.complete(self.peer);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, IoSlice};

    use super::super::tests::{Message, ends, large, progress};
    use super::*;
    use crate::engine::messages::AnySourceQueue;
    use crate::shm::ring;
    use crate::transport::links::Link;

    /// Returns the ends of messages between two ranks that expose them.
    fn exposing_ends() -> (PeerMessages, PeerMessages) {
        let (mut left, mut right) = ends();
        let [a, b] = ring::tests::exposing_pair();
        (left.conn, right.conn) = (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))));
        (left, right)
    }

    fn is_done(message: &Message) -> [bool; 2] {
        [&message.sending, &message.receiving].map(|side| side.as_ref().is_some_and(|side| side.is_done()))
    }

    #[test]
    fn exposed_message_is_sent_when_the_receiver_has_read_it() {
        // The receive is posted before the announcement comes, or later.
        for early in [true, false] {
            let (mut left, mut right) = exposing_ends();
            let mut message = large(3);
            if early {
                message.recv(&mut right, false);
                progress(&mut right);
            }
            message.send(&mut left, false);
            progress(&mut left);
            if !early {
                progress(&mut right);
                message.recv(&mut right, false);
            }
            assert_eq!(is_done(&message), [false, false]);
            progress(&mut right);
            assert_eq!(is_done(&message), [false, true]);
            assert!(message.got == message.sent);
            progress(&mut left);
            assert_eq!(is_done(&message), [true, true]);
        }
    }

    #[test]
    fn long_exposed_message_is_read_in_parts_between_other_messages() {
        let (mut left, mut right) = exposing_ends();
        let mut long = large(1);
        (long.sent, long.got) = (vec![8; 3 * MOST_BYTES + 5], vec![0; 3 * MOST_BYTES + 5]);
        let mut other = large(2);
        (other.sent, other.got) = (vec![9], vec![0]);
        long.send(&mut left, false);
        other.send(&mut left, false);
        progress(&mut left);
        long.recv(&mut right, false);
        other.recv(&mut right, false);
        assert!(right.progress(&mut AnySourceQueue::default()).unwrap());
        assert_eq!((is_done(&other)[1], is_done(&long)[1]), (true, false));
        progress(&mut right);
        assert!(long.got == long.sent);
    }

    #[test]
    fn exposed_message_that_the_kernel_does_not_let_the_receiver_read_is_requested() {
        /// A ring whose reader may not read the memory of the peer.
        #[derive(Debug)]
        struct Refused<L>(L);

        impl<L: Link> Link for Refused<L> {
            fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
                self.0.try_send(parts)
            }

            fn try_recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0.try_recv(into)
            }

            fn close_write(&mut self) {
                self.0.close_write();
            }

            fn is_flushed(&self) -> bool {
                true
            }

            fn read_exposed(&self, _address: u64, _into: &mut [u8]) -> io::Result<bool> {
                Err(io::ErrorKind::PermissionDenied.into())
            }
        }

        let (mut left, mut right) = ends();
        let [a, b] = ring::tests::exposing_pair();
        (left.conn, right.conn) = (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(Refused(b)))));
        let mut message = large(4);
        message.recv(&mut right, false);
        message.send(&mut left, false);
        while left.progress(&mut AnySourceQueue::default()).unwrap()
            | right.progress(&mut AnySourceQueue::default()).unwrap()
        {}
        assert_eq!(is_done(&message), [true, true]);
        assert!(message.got == message.sent);
    }
}
