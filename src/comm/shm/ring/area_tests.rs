//! Tests of messages in exchange areas.

use std::io::{self, IoSlice};

use convoke_testkit::Random;

use super::tests::{HEADER, data, pair, read};
use super::*;
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::conn::{Conn, ConnError};
use crate::transport::links::{CELL_BYTES, CellMessage, EAGER_BYTES};

/// Returns where the data of the next message is.
fn place(ring: &Ring) -> Option<Place> {
    let Some((cells, _)) = &ring.messages else { unreachable!("these rings carry messages") };
    cells.announced(&ring.segment).map(|announced| announced.place)
}

/// Receives the next message, of `bytes` bytes.
fn receive(ring: &mut Ring, stamp: u64, bytes: usize) -> Vec<u8> {
    assert!(ring.cell(stamp, Some(bytes)).is_some());
    let mut into = vec![0; bytes];
    if place(ring).is_none() {
        ring.take_cell(&mut into).unwrap();
        return into;
    }
    ring.take_cell(&mut []).unwrap();
    let mut done = 0;
    while done < bytes {
        done += ring.try_recv(&mut into[done..]).unwrap();
    }
    into
}

#[test]
fn reply_is_written_where_the_message_was_read() {
    let [mut a, mut b] = pair();
    for (stamp, bytes) in
        (1..).zip([2 << 10, (2 << 10) + 1, CELL_BYTES, 9000, 64 << 10, EAGER_BYTES].repeat(3))
    {
        let sent = data(bytes);
        let expected = (bytes > 2 << 10).then_some(Place::Area { area: 0, bytes: bytes as u64 });
        assert!(a.try_send_cell(stamp, HEADER, &sent).unwrap());
        assert_eq!(place(&b), expected);
        assert!(receive(&mut b, stamp, bytes) == sent);
        assert!(b.try_send_cell(stamp, HEADER, &sent).unwrap());
        assert_eq!(place(&a), expected, "of two areas, the one that this rank has read last");
        assert!(receive(&mut a, stamp, bytes) == sent);
    }
}

#[test]
fn sender_without_an_area_uses_the_ring_until_it_receives_one() {
    let [mut a, mut b] = pair();
    let sent = data(50_000);
    for stamp in 1..=3 {
        assert!(a.try_send_cell(stamp, HEADER, &sent).unwrap());
        let expected = if stamp == 1 { Place::Area { area: 0, bytes: 50_000 } } else { Place::Ring };
        assert_eq!(place(&b), Some(expected));
        assert!(receive(&mut b, stamp, sent.len()) == sent);
    }
    // The peer sends two messages in a row, so it owns no area then.
    for (stamp, area) in [(1, 0), (2, 1)] {
        assert!(b.try_send_cell(stamp, HEADER, &sent).unwrap());
        assert_eq!(place(&a), Some(Place::Area { area, bytes: 50_000 }));
        assert!(receive(&mut a, stamp, sent.len()) == sent);
    }
    assert!(a.try_send_cell(4, HEADER, &sent).unwrap());
    assert_eq!(place(&b), Some(Place::Area { area: 1, bytes: 50_000 }));
    assert!(receive(&mut b, 4, sent.len()) == sent);
}

#[test]
fn bytes_behind_a_message_in_an_area_wait_until_it_is_read() {
    let [mut a, b] = pair();
    let (mut b, sent) = (Conn::new(Box::new(b)), data(10_000));
    assert_eq!(a.try_send(&[IoSlice::new(&[1; HEADER_BYTES])]).unwrap(), HEADER_BYTES);
    assert!(a.try_send_cell(1, HEADER, &sent).unwrap());
    assert_eq!(a.try_send(&[IoSlice::new(&[2; HEADER_BYTES])]).unwrap(), HEADER_BYTES);
    // This end reads ahead beyond the message before it looks at the cell.
    assert_eq!(b.fill(3 * HEADER_BYTES).unwrap(), 2 * HEADER_BYTES);
    assert_eq!(b.cell(0, None), None, "the bytes before it come first");
    assert_eq!(read(&mut b, HEADER_BYTES), [1; HEADER_BYTES]);
    let at = HEADER_BYTES as u64;
    assert_eq!(b.cell(0, None), Some(CellMessage { header: HEADER, data_at: Some(at) }));
    b.take_header(at).unwrap();
    assert_eq!(read(&mut b, 100), sent[..100]);
    assert_eq!(b.fill(1000).unwrap(), 1000);
    assert!(read(&mut b, sent.len() - 100) == sent[100..]);
    assert_eq!(read(&mut b, HEADER_BYTES), [2; HEADER_BYTES]);
    assert_eq!(b.fill(1).unwrap(), 0);
}

/// One rank that sends frames and messages to another, and checks what it receives.
struct Peer {
    conn: Conn,
    /// The numbers of messages and of frames.
    sent: [u64; 2],
    received: [u64; 2],
}

/// Most bytes of a frame of the test: its header tells the number of bytes behind it.
const MOST_FRAME_BYTES: usize = 3000;

impl Peer {
    fn content(kind: usize, seq: u64, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 + kind * 31 + seq as usize * 13 + 1) as u8).collect()
    }

    /// Sends a message of `bytes` bytes, or says that there is no space.
    fn send_message(&mut self, bytes: usize) -> bool {
        let seq = self.sent[0];
        let header = u128::from(bytes as u64).to_ne_bytes();
        let is_sent = self.conn.send_cell(seq, header, &Self::content(0, seq, bytes)).unwrap();
        self.sent[0] += u64::from(is_sent);
        is_sent
    }

    fn send_frame(&mut self, bytes: usize) {
        let mut frame = vec![0; HEADER_BYTES];
        frame[..8].copy_from_slice(&(bytes as u64).to_ne_bytes());
        frame.extend(Self::content(1, self.sent[1], bytes));
        let sent = self.conn.send(&[IoSlice::new(&frame)]).unwrap();
        assert_eq!(sent, frame.len(), "the test keeps the ring nearly empty");
        self.sent[1] += 1;
    }

    /// Receives the next message or frame, `most` bytes at a time. Returns whether there was one.
    fn receive(&mut self, most: usize) -> bool {
        if let Some(CellMessage { header, data_at }) = self.conn.cell(self.received[0], None) {
            let (seq, bytes) = (self.received[0], u128::from_ne_bytes(header) as usize);
            self.received[0] += 1;
            let expected = Self::content(0, seq, bytes);
            if let Some(at) = data_at {
                self.conn.take_header(at).unwrap();
                let (mut into, mut done) = (vec![0; bytes], 0);
                while done < bytes {
                    // The message is complete, since its sender has returned.
                    let end = bytes.min(done + most);
                    if most.is_multiple_of(3) {
                        self.conn.fill(most).unwrap();
                    }
                    let got = self.conn.read(&mut into[done..end]).unwrap();
                    assert!(got > 0, "{done} of {bytes} bytes of message {seq}");
                    done += got;
                }
                assert!(into == expected, "message {seq} of {bytes} bytes");
            } else {
                let mut into = vec![0; bytes];
                self.conn.take_cell(&mut into).unwrap();
                assert!(into == expected, "message {seq} of {bytes} bytes");
            }
            return true;
        }
        if self.conn.unread().len() < HEADER_BYTES {
            self.conn.fill(HEADER_BYTES + most).unwrap();
        }
        if self.conn.unread().len() < HEADER_BYTES || self.conn.cell(self.received[0], None).is_some() {
            return false;
        }
        let bytes = u64::from_ne_bytes(*self.conn.unread().first_chunk().unwrap()) as usize;
        assert!(bytes <= MOST_FRAME_BYTES);
        self.conn.consume(HEADER_BYTES);
        assert!(read(&mut self.conn, bytes) == Self::content(1, self.received[1], bytes));
        self.received[1] += 1;
        true
    }
}

#[test]
fn messages_and_frames_keep_their_order_in_any_order_of_events() {
    let mut random = Random::new("messages_and_frames_keep_their_order_in_any_order_of_events");
    for _ in 0..200 {
        let mut peers = pair().map(|ring| {
            let conn = Conn::new(Box::new(ring));
            Peer { conn, sent: [0; 2], received: [0; 2] }
        });
        let mut waiting = [0; 2];
        for _ in 0..300 {
            let me = random.below(2);
            match random.below(4) {
                0 if waiting[me] < 200_000 => {
                    let bytes = [0, 9, 3000, 5000, 70_000, EAGER_BYTES][random.below(6)] + random.below(100);
                    if bytes <= EAGER_BYTES && peers[me].send_message(bytes) {
                        waiting[me] += bytes;
                    }
                }
                1 if waiting[me] < 200_000 => {
                    let bytes = random.below(MOST_FRAME_BYTES);
                    peers[me].send_frame(bytes);
                    waiting[me] += bytes;
                }
                _ => {
                    let most = 1 + random.below(20_000);
                    if !peers[me].receive(most) {
                        waiting[1 - me] = 0;
                    }
                }
            }
        }
        for me in [0, 1] {
            let mut idle = 0;
            while idle < 3 {
                idle = if peers[me].receive(20_000) { 0 } else { idle + 1 };
            }
            assert_eq!(peers[me].received, peers[1 - me].sent);
        }
    }
}

#[test]
fn impossible_areas_are_errors() {
    let kind = |result: io::Result<()>| result.unwrap_err().kind();
    for (place, first_bytes) in [
        (Place::Area { area: 1, bytes: 5000 }, 5000),
        (Place::Area { area: 0, bytes: 0 }, 0),
        (Place::Area { area: 0, bytes: EAGER_BYTES as u64 + 1 }, 10),
        (Place::Area { area: 0, bytes: 5000 }, 5001),
    ] {
        let [mut a, mut b] = pair();
        let Some((cells, _)) = &mut a.messages else { unreachable!("these rings carry messages") };
        assert!(cells.has_room(&a.segment).unwrap());
        cells.announce(&a.segment, 1, HEADER, Announced { at: 0, first_bytes, place });
        assert!(b.cell(1, None).is_some());
        assert_eq!(kind(b.take_cell(&mut [])), io::ErrorKind::InvalidData, "{place:?}");
    }
    // A count of more bytes than the message has.
    let [mut a, b] = pair();
    let mut b = Conn::new(Box::new(b));
    let Some((cells, areas)) = &mut a.messages else { unreachable!("these rings carry messages") };
    assert!(cells.has_room(&a.segment).unwrap());
    let place = Place::Area { area: 0, bytes: 5000 };
    cells.announce(&a.segment, 1, HEADER, Announced { at: 0, first_bytes: 10, place });
    areas.publish(&a.segment, 0, 5001);
    b.take_header(0).unwrap();
    assert_eq!(read(&mut b, 10).len(), 10);
    assert!(matches!(b.read(&mut [0; 100]), Err(ConnError::Failed(_))));
}
