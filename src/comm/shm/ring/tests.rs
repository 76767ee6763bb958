//! Tests of rings, and the ends of rings for other tests.

use std::io::IoSlice;

use nix::sys::eventfd::EventFd;

use super::*;
use crate::collectives::kernels::uncached_message_bytes;
use crate::shm::doorbells::HostProcesses;
use crate::shm::layout::{Layout, RingChannel};
use crate::shm::peer_memory::{PeerMemory, publish_identity};
use crate::shm::segment::create;
use crate::shm::single_copy::{SingleCopy, SingleCopyPolicy};
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::conn::{Conn, ConnError};
use crate::transport::links::{CELL_BYTES, CellMessage, EAGER_BYTES};

/// Returns both ends of the rings and cells for messages between two ranks.
pub(crate) fn pair() -> [Ring; 2] {
    pair_with(usize::MAX, SingleCopy::Never)
}

/// Returns what [`pair`] returns, but each rank exposes its long messages.
pub(crate) fn exposing_pair() -> [Ring; 2] {
    pair_with(usize::MAX, SingleCopy::Always)
}

/// Returns what [`pair`] returns. Of the data of each ring, at most `allocated` bytes are allocated.
fn pair_with(allocated: usize, setting: SingleCopy) -> [Ring; 2] {
    let layout = Layout::dense(2);
    let segment = Arc::new(Segment::map(create(layout.bytes).unwrap(), layout.bytes).unwrap());
    let doorbells = (0..2).map(|_| EventFd::new().unwrap().into()).collect();
    for rank in 0..2 {
        publish_identity(&segment, layout, rank).unwrap();
    }
    let policy = SingleCopyPolicy { setting, is_oversubscribed: false };
    let memories = [0, 1].map(|me| PeerMemory::new(Arc::clone(&segment), layout, me, policy.reads()));
    let [memory, _] = memories.map(Arc::new);
    let host = HostProcesses { doorbells, memory, of_rank: Arc::new([0, 1]) };
    [(0, 1), (1, 0)].map(|(me, peer)| {
        let (segment, host) = (Arc::clone(&segment), host.clone());
        let peer_reader = Arc::new(PeerReader::new(host.clone(), Arc::clone(&segment), policy));
        let doorbells = Arc::new(Doorbells { segment: Arc::clone(&segment), layout, me, host });
        let rings = |from, to| layout.ring(RingChannel::Messages, from, to);
        let cells = Cells::new(layout.cells(me, peer), layout.cells(peer, me), true);
        let out = rings(me, peer);
        let areas = [layout.message_area(0, 1), layout.message_area(1, 0)];
        let messages = Some((cells, MessageAreas::new(areas, me, allocated > 0)));
        Ring::new(
            segment,
            (doorbells, peer_reader),
            (peer, 2),
            (out, allocated.min(out.bytes)),
            rings(peer, me),
            messages,
        )
    })
}

/// Returns what [`pair`] returns, but the first end owns no exchange area, so that its messages go into the ring.
fn pair_without_area() -> [Ring; 2] {
    let [mut a, b] = pair();
    send_area(&mut a);
    [a, b]
}

fn send_area(ring: &mut Ring) {
    let Some((_, areas)) = &mut ring.messages else { unreachable!("these rings carry messages") };
    areas.sent(0, 0);
}

pub(super) const HEADER: CellHeader = *b"sixteen bytes ok";
/// The bytes of a header in the stream.
const FRAME: [u8; HEADER_BYTES] = [7; HEADER_BYTES];

pub(super) fn data(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + 1) as u8).collect()
}

/// Reads `bytes` bytes of the stream.
pub(super) fn read(conn: &mut Conn, bytes: usize) -> Vec<u8> {
    let (mut into, mut done) = (vec![0; bytes], 0);
    while done < bytes {
        let got = conn.read(&mut into[done..]).unwrap();
        assert!(got > 0, "{done} of {bytes} bytes");
        done += got;
    }
    into
}

#[test]
fn data_of_an_announced_message_is_read_after_the_bytes_before_it() {
    let [mut a, b] = pair_without_area();
    let (mut b, mut at) = (Conn::new(Box::new(b)), 0);
    // The ring wraps around several times, at other places each time.
    for (seq, bytes) in (0..).zip([CELL_BYTES + 1, 8 << 10, 20_001, 64 << 10, EAGER_BYTES].repeat(20)) {
        assert_eq!(a.try_send(&[IoSlice::new(&FRAME)]).unwrap(), HEADER_BYTES);
        let sent = data(bytes);
        assert!(a.try_send_cell(seq + 1, HEADER, &sent).unwrap());
        assert_eq!(b.cell(seq, Some(bytes)), None, "the frame comes first");
        assert_eq!(read(&mut b, HEADER_BYTES), FRAME);
        at += HEADER_BYTES as u64;
        assert_eq!(b.cell(seq, Some(bytes)), Some(CellMessage { header: HEADER, data_at: Some(at) }));
        b.take_header(at).unwrap();
        assert!(read(&mut b, bytes) == sent, "{bytes} bytes of message {seq}");
        at += bytes as u64;
    }
}

#[test]
fn pages_of_an_announced_message_are_allocated_before_its_first_byte_is_written() {
    let [mut a, mut b] = pair_with(0, SingleCopy::Never);
    send_area(&mut a);
    let (bytes, mut into) = (64 << 10, vec![0; 64 << 10]);
    a.allocate_for(bytes).unwrap();
    assert_eq!((a.allocated, a.written), (bytes, 0));
    for stamp in 1..=40 {
        let sent = data(bytes - 1);
        assert!(a.try_send_cell(stamp, HEADER, &sent).unwrap());
        assert!(a.allocated as u64 >= a.written.min(a.outgoing.bytes as u64), "{}", a.allocated);
        b.take_cell(&mut []).unwrap();
        let mut read = 0;
        while read < sent.len() {
            read += b.try_recv(&mut into[read..sent.len()]).unwrap();
        }
        assert!(into[..sent.len()] == sent, "message {stamp}");
    }
    assert_eq!(a.allocated, a.outgoing.bytes);
}

#[test]
fn reader_that_sees_the_first_bytes_of_a_message_finds_its_cell() {
    let [mut a, b] = pair_without_area();
    let (mut b, sent) = (Conn::new(Box::new(b)), data(10_000));
    assert_eq!(b.cell(0, None), None);
    assert!(a.try_send_cell(1, HEADER, &sent).unwrap());
    // The bytes are read ahead before this end looks at the cell again.
    assert_eq!(b.fill(HEADER_BYTES).unwrap(), HEADER_BYTES);
    assert_eq!(b.cell(0, None), Some(CellMessage { header: HEADER, data_at: Some(0) }));
    b.take_header(0).unwrap();
    assert!(read(&mut b, sent.len()) == sent);
}

#[test]
fn message_is_announced_only_if_the_ring_has_space_for_all_of_it() {
    let [mut a, mut b] = pair_without_area();
    let (bytes, longest) = (a.most_unread_bytes(), 64 << 10);
    let mut into = vec![0; bytes];
    for stamp in 1..=4 {
        assert_eq!(a.try_send(&[IoSlice::new(&vec![1; bytes - longest + 1])]).unwrap(), bytes - longest + 1);
        assert!(!a.try_send_cell(stamp, HEADER, &data(longest)).unwrap());
        assert!(a.try_send_cell(stamp, HEADER, &data(longest - 1)).unwrap());
        let mut read = 0;
        while read < bytes {
            read += b.try_recv(&mut into).unwrap();
        }
        b.take_cell(&mut []).unwrap();
    }
}

#[test]
fn ring_has_space_for_several_messages_that_cells_announce() {
    for (ranks, longest) in [(2, 256), (4, 256), (8, 256), (32, 64), (125, 16)] {
        let longest = longest << 10;
        let [mut a, _b] = pair_without_area();
        a.outgoing.bytes = Layout::dense(ranks).ring(RingChannel::Messages, 0, 1).bytes;
        assert_eq!(a.most_announced_bytes(), longest, "{ranks} ranks");
        for stamp in 1..=4 {
            assert!(!a.try_send_cell(stamp, HEADER, &data(longest.max(CELL_BYTES) + 1)).unwrap());
            assert!(a.try_send_cell(stamp, HEADER, &data(longest)).unwrap());
        }
    }
}

#[test]
fn only_a_message_beyond_the_caches_fills_the_whole_ring() {
    let [mut a, mut b] = pair();
    let (most, ring) = (MOST_CACHED_BYTES, a.outgoing.bytes);
    assert!(most < ring);
    // The reader publishes its count after each of these.
    let unreported = most / READ_REPORTS;
    let long = uncached_message_bytes(2);
    for (bytes, expected) in [(ring, most), (long - 1, most), (long, ring), (3 * most, most)] {
        let (sent, mut into, mut done) = (data(bytes), vec![0; bytes], 0);
        while done < bytes {
            let rest = bytes - done;
            let part = a.try_send(&[IoSlice::new(&sent[done..])]).unwrap();
            let allowed = rest.min(expected - unreported)..=rest.min(expected);
            assert!(allowed.contains(&part), "{part} bytes of {bytes} after {done}");
            while done < bytes - rest + part {
                done += b.try_recv(&mut into[done..]).unwrap();
            }
        }
        assert!(into == sent, "{bytes} bytes");
    }
}

#[test]
fn impossible_places_of_data_are_errors() {
    let invalid = |error: ConnError| matches!(error, ConnError::Failed(error) if error.kind() == io::ErrorKind::InvalidData);
    let [mut a, b] = pair_without_area();
    let mut conn = Conn::new(Box::new(b));
    assert!(a.try_send_cell(1, HEADER, &data(10_000)).unwrap());
    assert!(invalid(conn.take_header(1).unwrap_err()), "the data is elsewhere");

    let [mut a, mut b] = pair_without_area();
    let Some((cells, _)) = &mut a.messages else { unreachable!("these rings have cells") };
    assert!(cells.has_room(&a.segment).unwrap());
    let first_bytes = a.outgoing.bytes as u64 + 1;
    cells.announce(&a.segment, 1, HEADER, Announced { at: 0, first_bytes, place: Place::Ring });
    assert_eq!(b.take_cell(&mut []).unwrap_err().kind(), io::ErrorKind::InvalidData);
}
