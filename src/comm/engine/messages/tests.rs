//! Tests of messages over links with injected faults; both ranks run in one thread.

use std::collections::HashMap;
use std::time::Duration;

use convoke_env::Generation;

use super::direct::{RecvProgress, SendProgress};
use super::unexpected::CREDIT_BYTES;
use super::*;
use crate::collectives::call::CallKind;
use crate::collectives::dtype::Dtype;
use crate::error::CommError;
use crate::shm::ring;
use crate::transport::links::CELL_BYTES;
use crate::transport::links::fake::{self, FaultScript};
use convoke_testkit::Random;

fn group() -> GroupId {
    (Generation::from_bytes([4; 16]), 0)
}

fn call(len: usize, tag: u32) -> Call {
    Call::new(CallKind::PointToPoint, Dtype::U8, None, tag, len as u64)
}

fn completion() -> Arc<Completion> {
    Arc::new(Completion::new(Duration::from_secs(60)))
}

/// A message in progress: its buffers at sender and receiver, and its completions.
pub(super) struct Message {
    tag: u32,
    pub(super) sent: Vec<u8>,
    pub(super) got: Vec<u8>,
    pub(super) sending: Option<Arc<Completion>>,
    pub(super) receiving: Option<Arc<Completion>>,
}

#[allow(unsafe_code)]
impl Message {
    /// Sends the message without the queues if `directly` is set and that is possible.
    pub(super) fn send(&mut self, from: &mut PeerMessages, directly: bool) {
        // SAFETY: the test keeps all messages, and does not change `sent`, until both queues are gone.
        let buffer = unsafe { BorrowedBuffer::default().with_ref(0, &self.sent[..]).erase_lifetime() };
        let completion = self.sending.insert(completion());
        let (call, completion) = (call(self.sent.len(), self.tag), Arc::clone(completion));
        let sent = if directly { from.send_direct(call, &self.sent).unwrap() } else { SendProgress::Nothing };
        let posted = PostedCall { call, buffer, completion };
        match sent {
            SendProgress::Complete => posted.completion.complete(Ok(None)),
            SendProgress::Partial { seq, frame } => from.post_partial_send(seq, frame, posted),
            SendProgress::Nothing => from.post_send(posted),
        }
    }

    /// Receives the message without the queues if `directly` is set and that is possible.
    pub(super) fn recv(&mut self, at: &mut PeerMessages, directly: bool) {
        // SAFETY: the test keeps all messages until both queues are gone; it reads `got` only when its
        // completion is done.
        let mut buffer = unsafe { BorrowedBuffer::default().with_mut(0, &mut self.got[..]).erase_lifetime() };
        let completion = self.receiving.insert(completion());
        let (call, completion) = (call(self.got.len(), self.tag), Arc::clone(completion));
        let any_source = AnySourceQueue::default();
        let received = if directly {
            let len = buffer.len();
            at.recv_direct(&any_source, call, &mut buffer.bytes_mut(0..len)).unwrap()
        } else {
            RecvProgress::UseQueues
        };
        let posted = PostedCall { call, buffer, completion };
        match received {
            RecvProgress::Complete => posted.completion.complete(Ok(Some(Status { source: 0, call }))),
            RecvProgress::Partial(done) => at.post_partial_recv(0, posted, done),
            RecvProgress::Nothing | RecvProgress::UseQueues => at.post_recv(0, posted).unwrap(),
        }
    }
}

/// Random sends and receives in random order: for each tag, the received messages are the sent ones, in
/// order.
#[test]
fn random_messages_keep_their_order_for_each_tag() {
    let mut random = Random::new("random_messages_keep_their_order_for_each_tag");
    for round in 0..100 {
        let script = match round % 5 {
            0 | 3 | 4 => FaultScript::default(),
            1 => {
                FaultScript { step: 3000, capacity: 5000, refuse: 4, interrupt: 6, ..FaultScript::default() }
            }
            _ => FaultScript { step: 7, capacity: 16, ..FaultScript::default() },
        };
        let small = round % 5 == 2;
        let (mut left, mut right) = (PeerMessages::new(1, group()), PeerMessages::new(0, group()));
        (left.conn, right.conn) = if round % 5 >= 3 {
            let [a, b] = if round % 5 == 3 { ring::tests::pair() } else { ring::tests::exposing_pair() };
            (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))))
        } else {
            let (a, b) = fake::pair(FaultScript { seed: random.next(), ..script });
            (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))))
        };
        let mut messages: Vec<Message> = (0..if small { 12 } else { 80 })
            .map(|index| {
                let len = match random.below(5) {
                    0 => random.below(40),
                    4 if !small => random.below(2 * CELL_BYTES),
                    1 if !small => EAGER_BYTES + random.below(EAGER_BYTES),
                    _ if small => random.below(300),
                    _ => random.below(EAGER_BYTES + 1),
                };
                let sent = vec![index as u8 + 1; len];
                let tag = random.below(4) as u32;
                // Buffers may be longer than their messages, or too short.
                let room = match random.below(4) {
                    0 => len + random.below(5000),
                    1 => random.below(len + 1),
                    _ => len,
                };
                Message { tag, got: vec![0; room], sent, sending: None, receiving: None }
            })
            .collect();
        // Sends are begun in the order of the list; receives are in that order only for each tag.
        let mut sends = 0;
        let mut recvs: HashMap<u32, VecDeque<usize>> = HashMap::new();
        for (index, message) in messages.iter().enumerate() {
            recvs.entry(message.tag).or_default().push_back(index);
        }
        let mut idle = 0;
        while messages
            .iter()
            .any(|message| !message.receiving.as_ref().is_some_and(|completion| completion.is_done()))
        {
            match random.below(12) {
                0 if sends < messages.len() => {
                    messages[sends].send(&mut left, random.below(2) == 0);
                    sends += 1;
                }
                1 => {
                    let tag = random.below(4) as u32;
                    if let Some(index) = recvs.get_mut(&tag).and_then(VecDeque::pop_front) {
                        messages[index].recv(&mut right, random.below(2) == 0);
                    }
                }
                side => {
                    let side = if side % 2 == 0 { &mut left } else { &mut right };
                    let moved = side.progress(&mut AnySourceQueue::default()).unwrap();
                    idle = if moved { 0 } else { idle + 1 };
                    assert!(idle < 200_000, "nothing moves any more");
                }
            }
        }
        // Credit frames may still be on their way.
        while left.progress(&mut AnySourceQueue::default()).unwrap()
            | right.progress(&mut AnySourceQueue::default()).unwrap()
        {}
        assert!(
            messages
                .iter()
                .all(|message| message.sending.as_ref().is_some_and(|completion| completion.is_done()))
        );
        assert!(right.unexpected.is_empty() && right.recvs.is_empty() && left.sends.is_empty());
        assert_eq!(left.credit.left + right.credit.owed, CREDIT_BYTES, "credit is lost or made");
        for message in &messages {
            let both = message.got.len().min(message.sent.len());
            assert!(message.got[..both] == message.sent[..both]);
            match message.receiving.as_ref().and_then(|completion| completion.take()) {
                Some(Ok(Some(status))) => assert_eq!(status.count(), message.sent.len()),
                Some(Err(CommError::Truncated { count, room, .. })) => {
                    assert_eq!((count, room), (message.sent.len() as u64, message.got.len() as u64));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Returns the two ends of messages between two ranks.
pub(super) fn ends() -> (PeerMessages, PeerMessages) {
    let (a, b) = fake::pair(FaultScript { capacity: 1 << 20, ..FaultScript::default() });
    let (mut left, mut right) = (PeerMessages::new(1, group()), PeerMessages::new(0, group()));
    (left.conn, right.conn) = (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))));
    (left, right)
}

/// Returns what [`ends`] returns, inside a host.
fn ends_in_memory() -> (PeerMessages, PeerMessages) {
    let (mut left, mut right) = ends();
    let [a, b] = ring::tests::pair();
    (left.conn, right.conn) = (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))));
    (left, right)
}

pub(super) fn large(tag: u32) -> Message {
    let (sent, got) = (vec![tag as u8; EAGER_BYTES + 1], vec![0; EAGER_BYTES + 1]);
    Message { tag, sent, got, sending: None, receiving: None }
}

pub(super) fn progress(end: &mut PeerMessages) {
    while end.progress(&mut AnySourceQueue::default()).unwrap() {}
}

#[test]
fn large_message_for_a_posted_receive_is_sent_without_a_request() {
    let (mut left, mut right) = ends();
    for tag in 1..4 {
        let mut message = large(tag);
        message.recv(&mut right, false);
        progress(&mut right);
        progress(&mut left);
        message.send(&mut left, false);
        assert_eq!((left.announced, left.sends[0].stage), (0, Stage::Sent));
        while left.progress(&mut AnySourceQueue::default()).unwrap()
            | right.progress(&mut AnySourceQueue::default()).unwrap()
        {
            assert_eq!(left.announced, 0);
        }
        assert!(message.receiving.as_ref().is_some_and(|completion| completion.is_done()));
        assert!(message.got == message.sent);
    }
}

#[test]
fn message_of_256_kib_is_sent_before_its_receive_is_posted() {
    let links: [fn() -> (PeerMessages, PeerMessages); 2] = [ends, ends_in_memory];
    let sizes = [(EAGER_BYTES, true), (EAGER_BYTES + 1, false)];
    for (ends, (bytes, at_once)) in links.into_iter().flat_map(|link| sizes.map(|size| (link, size))) {
        let (mut left, mut right) = ends();
        let (sent, got) = (vec![5; bytes], vec![0; bytes]);
        let mut message = Message { tag: 1, sent, got, sending: None, receiving: None };
        message.send(&mut left, true);
        assert_eq!(message.sending.as_ref().is_some_and(|completion| completion.is_done()), at_once);
        // A message of another tag is delivered past it.
        let mut other = Message { tag: 2, sent: vec![6], got: vec![0], sending: None, receiving: None };
        other.send(&mut left, true);
        other.recv(&mut right, true);
        progress(&mut left);
        progress(&mut right);
        assert_eq!(other.got, [6]);
        message.recv(&mut right, true);
        while left.progress(&mut AnySourceQueue::default()).unwrap()
            | right.progress(&mut AnySourceQueue::default()).unwrap()
        {}
        assert!(message.got == message.sent, "{bytes} bytes");
    }
}

#[test]
fn direct_receive_takes_credit_that_comes_before_its_message() {
    let (mut left, mut right) = ends_in_memory();
    for tag in 1..4 {
        let (sent, got) = (vec![tag as u8; EAGER_BYTES], vec![0; EAGER_BYTES]);
        let mut message = Message { tag, sent, got, sending: None, receiving: None };
        message.send(&mut left, true);
        message.recv(&mut right, true);
        assert!(message.receiving.is_some_and(|completion| completion.is_done()));
    }
    let sent_bytes = 3 * credit_for(EAGER_BYTES);
    assert_eq!(left.credit.left, CREDIT_BYTES - sent_bytes);
    progress(&mut right);
    // The data of this message is in the stream, behind the credit.
    let (sent, got) = (vec![9; 10_000], vec![0; 10_000]);
    let mut answer = Message { tag: 4, sent, got, sending: None, receiving: None };
    answer.send(&mut right, true);
    let (any_source, call) = (AnySourceQueue::default(), call(10_000, 4));
    assert_eq!(left.recv_direct(&any_source, call, &mut answer.got).unwrap(), RecvProgress::Nothing);
    assert_eq!(left.credit.left + right.credit.owed, CREDIT_BYTES);
    assert_eq!(left.recv_direct(&any_source, call, &mut answer.got).unwrap(), RecvProgress::Complete);
    assert_eq!(answer.got, answer.sent);
}

#[test]
fn messages_to_and_fro_need_no_frames_for_credit() {
    let (mut left, mut right) = ends();
    for round in 0..40 {
        for to_right in [true, false] {
            let (from, to) = if to_right { (&mut left, &mut right) } else { (&mut right, &mut left) };
            let (sent, got) = (vec![round; 60_000], vec![0; 60_000]);
            let mut message = Message { tag: 1, sent, got, sending: None, receiving: None };
            message.send(from, true);
            let received = to.recv_direct(&AnySourceQueue::default(), call(60_000, 1), &mut message.got);
            assert_eq!(received.unwrap(), RecvProgress::Complete);
            assert!(message.got == message.sent && to.outgoing.is_empty());
        }
    }
    assert_eq!(left.credit.left + right.credit.owed, CREDIT_BYTES);
    assert_eq!(right.credit.left + left.credit.owed, CREDIT_BYTES);
}

/// No event would tell a probe or a receive from any source that the next message has been read.
#[test]
fn direct_receive_over_a_connection_reads_nothing_of_the_next_message() {
    for bytes in [0, 8, 20_000, EAGER_BYTES] {
        let (mut left, mut right) = ends();
        let message =
            |tag| Message { tag, sent: vec![7; bytes], got: vec![0; bytes], sending: None, receiving: None };
        let (mut first, mut second) = (message(1), message(2));
        first.send(&mut left, true);
        second.send(&mut left, true);
        let received = right.recv_direct(&AnySourceQueue::default(), call(bytes, 1), &mut first.got).unwrap();
        assert_eq!(received, RecvProgress::Complete);
        assert!(first.got == first.sent);
        assert!(right.conn.as_ref().unwrap().unread().is_empty());
        progress(&mut right);
        assert_eq!(right.unexpected(2).unwrap().1.count(), bytes);
    }
}

#[test]
fn shorter_message_leaves_the_rest_of_the_buffer_unchanged() {
    for (sent, room) in [(0, 8), (100, 2_000), (13_000, 20_000), (40_000, 60_000)] {
        let (mut left, mut right) = ends();
        let message = |bytes, room| Message {
            tag: 1,
            sent: vec![7; bytes],
            got: vec![0; room],
            sending: None,
            receiving: None,
        };
        // The first message of a connection is read in another way than the next.
        let mut earlier = message(20_000, 20_000);
        earlier.send(&mut left, true);
        earlier.recv(&mut right, true);
        let (mut first, mut second) = (message(sent, room), message(100_000, 100_000));
        first.send(&mut left, true);
        second.send(&mut left, true);
        first.recv(&mut right, true);
        while !first.receiving.as_ref().unwrap().is_done() {
            progress(&mut right);
        }
        assert!(first.got[..sent] == first.sent);
        assert!(first.got[sent..].iter().all(|&byte| byte == 0), "{sent} bytes into a buffer of {room}");
    }
}

#[test]
fn sender_expects_the_ready_frame_of_a_receiver_that_sent_one_for_the_last_large_message() {
    let (mut left, mut right) = ends();
    let mut messages: Vec<Message> = (1..4).map(large).collect();
    let exchange = |left: &mut PeerMessages, right: &mut PeerMessages| {
        while left.progress(&mut AnySourceQueue::default()).unwrap()
            | right.progress(&mut AnySourceQueue::default()).unwrap()
        {}
    };
    messages[0].send(&mut left, false);
    assert!(!left.expects_ready());
    // The receiver has not read the announcement yet.
    messages[0].recv(&mut right, false);
    exchange(&mut left, &mut right);
    assert!(left.expects_ready());
    messages[1].recv(&mut right, false);
    exchange(&mut left, &mut right);
    assert!(!left.expects_ready(), "the frame has come");
    messages[1].send(&mut left, false);
    exchange(&mut left, &mut right);
    assert!(left.expects_ready());
    // The receiver finds the announcement when it posts its receive.
    messages[2].send(&mut left, false);
    exchange(&mut left, &mut right);
    messages[2].recv(&mut right, false);
    exchange(&mut left, &mut right);
    assert!(!left.expects_ready());
    for message in messages {
        assert!(
            message.receiving.is_some_and(|completion| completion.is_done()) && message.got == message.sent
        );
    }
}

#[test]
fn receive_that_is_posted_has_no_effect_on_large_messages_of_another_tag() {
    let (mut left, mut right) = ends();
    let (mut first, mut second) = (large(1), large(2));
    second.recv(&mut right, false);
    progress(&mut right);
    progress(&mut left);
    first.send(&mut left, false);
    second.send(&mut left, false);
    progress(&mut left);
    progress(&mut right);
    assert_eq!(right.unexpected.announcements, 1);
    first.recv(&mut right, false);
    while left.progress(&mut AnySourceQueue::default()).unwrap()
        | right.progress(&mut AnySourceQueue::default()).unwrap()
    {}
    for message in [first, second] {
        assert!(message.receiving.is_some_and(|completion| completion.is_done()));
        assert!(message.got == message.sent);
    }
}

#[test]
fn large_message_with_another_type_than_the_posted_receive_is_a_mismatch() {
    let (mut left, mut right) = ends();
    let mut message = large(1);
    message.recv(&mut right, false);
    progress(&mut right);
    let ready = Frame { call: call(EAGER_BYTES + 1, 1).encode(), ..Frame::empty(Kind::Ready, group(), 0) };
    assert_eq!(right.ready, Some(0));
    // A peer that ignores the type in the Ready frame.
    let theirs = Call::new(CallKind::PointToPoint, Dtype::F32, None, 1, 30_000);
    let header = Frame { len: theirs.bytes(), call: theirs.encode(), kind: Kind::Message, ..ready };
    let conn = left.conn.as_mut().unwrap();
    conn.send(&[IoSlice::new(&header.encode())]).unwrap();
    let error = right.progress(&mut AnySourceQueue::default()).unwrap_err();
    assert!(matches!(error, MessageError::Mismatch { seq: 0, .. }), "{error:?}");
}

/// A sender has more messages than it may announce. It holds the rest back, and they arrive in order.
#[test]
fn messages_beyond_the_announcement_limit_wait_at_the_sender() {
    for len in [0, 100, EAGER_BYTES + 1] {
        let (a, b) = fake::pair(FaultScript::default());
        let (mut left, mut right) = (PeerMessages::new(1, group()), PeerMessages::new(0, group()));
        (left.conn, right.conn) = (Some(Conn::new(Box::new(a))), Some(Conn::new(Box::new(b))));
        let eager = if len > EAGER_BYTES { 0 } else { CREDIT_BYTES / credit_for(len) };
        let count = eager + 4 * MAX_ANNOUNCEMENTS;
        let mut messages: Vec<Message> = (0..count)
            .map(|index| {
                let sent = vec![index as u8; len];
                Message { tag: 1, got: vec![0; len], sent, sending: None, receiving: None }
            })
            .collect();
        let exchange = |left: &mut PeerMessages, right: &mut PeerMessages| {
            while left.progress(&mut AnySourceQueue::default()).unwrap()
                | right.progress(&mut AnySourceQueue::default()).unwrap()
            {}
        };
        messages.iter_mut().for_each(|message| message.send(&mut left, false));
        exchange(&mut left, &mut right);
        assert_eq!(
            (right.unexpected.len(), right.unexpected.announcements),
            (eager + MAX_ANNOUNCEMENTS, MAX_ANNOUNCEMENTS),
            "{len}"
        );
        for message in &mut messages {
            message.recv(&mut right, false);
            exchange(&mut left, &mut right);
        }
        for message in &messages {
            assert!(message.got == message.sent);
            assert!(message.sending.as_ref().is_some_and(|completion| completion.is_done()));
        }
        assert_eq!(
            (left.held, left.announced, right.unexpected.bytes, right.unexpected.announcements),
            (0, 0, 0, 0),
            "{len}"
        );
        assert_eq!(left.credit.left + right.credit.owed, CREDIT_BYTES, "credit is lost or made");
    }
}

/// Random frames from a peer cause an error or nothing, and never a panic or unbounded memory.
#[test]
fn random_frames_never_cause_a_panic() {
    let mut random = Random::new("random_frames_never_cause_a_panic");
    for _ in 0..3000 {
        let (mut peer, ours) = fake::pair(FaultScript::default());
        let mut receiver = PeerMessages::new(0, group());
        receiver.conn = Some(Conn::new(Box::new(ours)));
        let mut message =
            Message { tag: 1, sent: Vec::new(), got: vec![0; 100], sending: None, receiving: None };
        message.recv(&mut receiver, false);
        let mut bytes = Vec::new();
        for _ in 0..1 + random.below(5) {
            let kinds =
                [Kind::Eager, Kind::Rts, Kind::Cts, Kind::Message, Kind::Credit, Kind::Data, Kind::Ready];
            let (kind, len) = (kinds[random.below(kinds.len())], random.below(3) * 50);
            let about = call(if random.below(2) == 0 { 100 } else { len }, random.below(3) as u32);
            let header = Frame {
                credit: if random.below(3) == 0 { random.below(20) as u16 } else { 0 },
                len: len as u64,
                call: about.encode(),
                ..Frame::empty(kind, group(), random.below(3) as u64)
            };
            let mut frame = header.encode().to_vec();
            frame.extend((0..len).map(|_| random.next() as u8));
            if random.below(3) == 0 {
                let at = random.below(frame.len());
                frame[at] = random.next() as u8;
            }
            bytes.extend(frame);
        }
        crate::transport::links::Link::try_send(&mut peer, &[IoSlice::new(&bytes)]).unwrap();
        for _ in 0..20 {
            if receiver.progress(&mut AnySourceQueue::default()).is_err() {
                break;
            }
        }
    }
}
