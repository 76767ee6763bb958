//! A rank that authenticates and then sends invalid data, too much data or too little.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use convoke_env::Generation;

use super::{Engine, FAKE, LONG, frame, with, with_scripted_peer};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::{Dtype, ReduceOp};
use crate::error::CommError;
use crate::transport::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::ConnectionKind;
use convoke_testkit::Random;
use convoke_testkit::memory;

/// Most memory that a rank may use at a time while it is attacked. It covers the read-ahead buffers of its
/// connections, messages for which it gives credit, and the memory that it needs otherwise.
const MEMORY_BYTES: usize = 4 << 20;

/// Returns cases in which a third rank violates the protocol: a name, the connection, the bytes that it
/// sends, and the text that the error must contain.
fn violations() -> Vec<(&'static str, ConnectionKind, Vec<u8>, &'static str)> {
    use ConnectionKind::{Collective, Control, Message};
    let p2p = |count: u64, tag: u32| Call::new(CallKind::PointToPoint, Dtype::U8, None, tag, count).encode();
    let eager = |count: u64, len: usize| {
        with(Frame { call: p2p(count, 0), ..frame(Kind::Eager, len) }, &[0; 64][..len.min(64)])
    };
    let noise: Vec<u8> = (0..200).map(|i: u32| (i * 37 + 11) as u8).collect();
    let other = Generation::from_bytes([4; 16]);
    vec![
        ("noise as data", Collective, noise.clone(), "not a convoke frame"),
        (
            "a message among data",
            Collective,
            with(frame(Kind::Eager, 0), &[]),
            "on the connection for collectives",
        ),
        (
            "an unknown call",
            Collective,
            with(Frame { call: [0xEE; 16], ..frame(Kind::Data, 4) }, &[]),
            "unknown",
        ),
        (
            "data of another round",
            Collective,
            with(Frame { generation: other, ..frame(Kind::Data, 4) }, &[]),
            "generation",
        ),
        ("noise as control", Control, noise.clone(), "not a convoke frame"),
        ("data as control", Control, with(frame(Kind::Data, 0), &[]), "on the control connection"),
        (
            "control of another group",
            Control,
            with(Frame { group: 5, ..frame(Kind::Goodbye, 0) }, &[]),
            "another generation or group",
        ),
        ("a report that is none", Control, with(frame(Kind::Abort, 5), b"{\"by\""), "malformed report"),
        ("a huge report", Control, with(frame(Kind::Abort, 5000), &[]), "claims 5000 bytes"),
        (
            "a state without a call",
            Control,
            with(Frame { call: [99; 16], ..frame(Kind::State, 0) }, &[]),
            "unknown",
        ),
        (
            "an unknown connection kind",
            Control,
            with(Frame { seq: 77, ..frame(Kind::Open, 0) }, &[]),
            "asks for connection kind 77",
        ),
        ("noise as messages", Message, noise, "not a convoke frame"),
        (
            "control among messages",
            Message,
            with(frame(Kind::Goodbye, 0), &[]),
            "on the connection for messages",
        ),
        (
            "a message out of order",
            Message,
            with(Frame { seq: 5, call: p2p(1, 0), ..frame(Kind::Eager, 1) }, &[0]),
            "message 5 where message 0 was due",
        ),
        ("a length that is not that of the call", Message, eager(10, 11), "11 bytes for"),
        ("a small message that is large", Message, eager(1 << 20, 1 << 20), "bytes for"),
        ("a message nobody asked for", Message, with(frame(Kind::Message, 8), &[0; 8]), "was not asked for"),
        ("a request for nothing", Message, with(frame(Kind::Cts, 0), &[]), "is not waiting to be sent"),
        (
            "credit from nowhere",
            Message,
            with(Frame { credit: 1, ..frame(Kind::Credit, 0) }, &[]),
            "credit for 64 bytes",
        ),
        (
            "credit from nowhere with a message",
            Message,
            with(Frame { credit: u16::MAX, call: p2p(1, 0), ..frame(Kind::Eager, 1) }, &[0]),
            "credit for 4194240 bytes",
        ),
        (
            "more than it has credit for",
            Message,
            (0..20)
                .flat_map(|seq| {
                    with(Frame { seq, call: p2p(60_000, 0), ..frame(Kind::Eager, 60_000) }, &[0; 60_000])
                })
                .collect(),
            "more than it has credit for",
        ),
    ]
}

/// Runs `attack` as the third rank, while ranks 0 and 1 wait for the third rank in a call. Returns the errors
/// of ranks 0 and 1.
fn attacked(attack: impl FnOnce(&mut Engine)) -> Vec<CommError> {
    let attacked = with_scripted_peer(
        // The attack may happen while the group forms.
        |group| {
            let call = || group.and_then(|group| group.all_reduce(&mut [1_i32], ReduceOp::Sum)).unwrap_err();
            memory::peak_bytes(call)
        },
        |peer| attack(&mut peer.engine()),
    );
    for (error, most) in &attacked {
        assert!(*most < MEMORY_BYTES, "{most} bytes: {error}");
    }
    attacked.into_iter().map(|(error, _)| error).collect()
}

pub(super) fn connection_to(engine: &mut Engine, peer: usize, conn_kind: ConnectionKind) -> &mut Conn {
    let peer = &mut engine.peers[peer];
    let conn = match conn_kind {
        ConnectionKind::Control => &mut peer.control,
        ConnectionKind::Collective => &mut peer.collective,
        ConnectionKind::Message => &mut peer.messages.conn,
    };
    conn.as_mut().unwrap()
}

/// Waits until ranks 0 and 1 have both ended the group, or until `time` is over. Returns whether both have.
fn wait_until_ended(engine: &mut Engine, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while !(0..2).all(|peer| has_ended(engine, peer)) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[test]
fn protocol_violation_by_a_peer_is_reported_on_all_ranks() {
    for (what, conn_kind, bytes, part) in violations() {
        let errors = attacked(|engine| {
            send_all(connection_to(engine, 0, conn_kind), &bytes);
            assert!(wait_until_ended(engine, LONG), "{what}: nobody noticed");
        });
        for (rank, error) in errors.iter().enumerate() {
            assert!(matches!(error, CommError::Protocol { peer: FAKE, .. }), "{what}, rank {rank}: {error}");
            assert!(error.to_string().contains(part), "{what}, rank {rank}: {error}");
        }
    }
}

/// Returns a frame of this kind that one cannot tell from a valid one without its context, and that is
/// otherwise random.
fn any_frame(random: &mut Random, kind: Kind) -> Vec<u8> {
    let word = |random: &mut Random| random.next() >> random.below(64);
    let mut payload: Vec<u8> = (0..random.below(200)).map(|_| random.next() as u8).collect();
    let mut call = [0; 16];
    if random.below(2) == 0 {
        call.fill_with(|| random.next() as u8);
    } else {
        let kinds = CallKind::ALL;
        let kind = kinds[random.below(kinds.len())];
        let count = word(random);
        let tag = random.below(3) as u32;
        call = Call::new(kind, Dtype::I32, Some(ReduceOp::Sum), tag, count).encode();
    }
    let len = if random.below(2) == 0 { payload.len() as u64 } else { word(random) };
    let mut bytes = Frame { seq: word(random), call, len, ..frame(kind, 0) }.encode().to_vec();
    bytes.append(&mut payload);
    if random.below(8) == 0 {
        let at = random.below(bytes.len());
        bytes[at] = random.next() as u8;
    }
    bytes.truncate(if random.below(4) == 0 { random.below(bytes.len()) } else { bytes.len() });
    bytes
}

#[test]
fn garbage_frame_on_any_connection_ends_group_with_one_cause() {
    let rounds = if std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1") { 30 } else { 2 };
    let mut random = Random::new("garbage_frame_on_any_connection_ends_group_with_one_cause");
    let all = (0..rounds)
        .flat_map(|_| ConnectionKind::ALL)
        .flat_map(|conn_kind| Kind::ALL.map(|kind| (conn_kind, kind)));
    for (conn_kind, kind) in all {
        let garbage: Vec<Vec<u8>> = (0..=random.below(3)).map(|_| any_frame(&mut random, kind)).collect();
        let victim = random.below(2);
        let errors = attacked(|engine| {
            garbage.iter().for_each(|bytes| send_all(connection_to(engine, victim, conn_kind), bytes));
            // If the frame is valid by chance, or incomplete, the group ends only when its sender leaves.
            wait_until_ended(engine, Duration::from_millis(20));
        });
        let named = |error: &CommError| match error {
            CommError::Mismatch { rank, by, .. } => *rank == FAKE || *by == FAKE,
            CommError::Protocol { peer: rank, .. } | CommError::PeerLost { rank, .. } => *rank == FAKE,
            _ => false,
        };
        let context = format!("{kind:?} on {conn_kind:?} to rank {victim}: {errors:?}, {garbage:02x?}");
        assert!(errors.iter().all(named), "{context}");
        assert_eq!(errors[0].suspect_rank(), errors[1].suspect_rank(), "{context}");
    }
}

#[test]
fn oversized_payload_is_refused_before_it_is_read() {
    let sum = |count: u64| {
        let op = Some(ReduceOp::Sum);
        Call::new(CallKind::AllReduce, Dtype::I32, op, 0, count).encode()
    };
    let data = Frame { call: sum(1), ..frame(Kind::Data, 1 << 40) };
    let errors = attacked(|engine| {
        send_all(connection_to(engine, 0, ConnectionKind::Collective), &with(data, &[0; 4096]));
        assert!(wait_until_ended(engine, LONG));
    });
    for error in errors {
        assert!(matches!(error, CommError::Protocol { peer: FAKE, .. }), "{error}");
        assert!(error.to_string().contains("1099511627776 bytes for all_reduce(i32, 1, sum)"), "{error}");
    }
    let data = Frame { call: sum(1 << 38), ..frame(Kind::Data, 1 << 40) };
    let errors = attacked(|engine| {
        send_all(connection_to(engine, 0, ConnectionKind::Collective), &with(data, &[0; 4096]));
        assert!(wait_until_ended(engine, LONG));
    });
    for error in errors {
        assert!(matches!(error, CommError::Mismatch { rank: FAKE, by: 0, .. }), "{error}");
    }
}

#[test]
fn endless_announcements_are_refused() {
    let call = Call::new(CallKind::PointToPoint, Dtype::U8, None, 7, 1 << 20);
    let many: Vec<u8> = (0..70_000)
        .flat_map(|seq| Frame { seq, call: call.encode(), ..frame(Kind::Rts, 0) }.encode())
        .collect();
    let ended = with_scripted_peer(
        |group| {
            memory::peak_bytes(|| {
                group.and_then(|group| group.all_reduce(&mut [1_i32], ReduceOp::Sum)).unwrap_err()
            })
        },
        |peer| {
            let mut engine = peer.engine();
            send_all(connection_to(&mut engine, 0, ConnectionKind::Message), &many);
            assert!(wait_until_ended(&mut engine, LONG));
        },
    );
    for (error, most) in ended {
        assert!(error.to_string().contains("more than it has credit for"), "{error}");
        assert!(most < 4 * MEMORY_BYTES, "{most} bytes");
    }
}

#[test]
fn flood_of_queries_does_not_stop_timeouts() {
    // The timeout is long enough for both ranks to begin their calls, also on a busy machine.
    let timeout = Duration::from_secs(2);
    let over = AtomicBool::new(false);
    let errors = with_scripted_peer(
        |group| {
            let group = group.unwrap();
            let start = Instant::now();
            let call = || group.with_timeout(timeout).all_reduce(&mut [1_i32], ReduceOp::Sum).unwrap_err();
            let (error, most) = memory::peak_bytes(call);
            over.store(true, Ordering::SeqCst);
            (error, most, start.elapsed())
        },
        |peer| {
            let mut engine = peer.engine();
            let flood: Vec<u8> = (0..100).flat_map(|_| with(frame(Kind::StateQuery, 0), &[])).collect();
            while !over.load(Ordering::SeqCst) {
                (0..2).for_each(|peer| {
                    send_some(connection_to(&mut engine, peer, ConnectionKind::Control), &flood)
                });
            }
            assert!(wait_until_ended(&mut engine, LONG));
        },
    );
    for (error, most, took) in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [FAKE]), "{error}");
        assert!(took < 10 * timeout, "{took:?}");
        assert!(most < MEMORY_BYTES, "{most} bytes");
    }
}

/// Sends whole frames as long as the connection has room.
fn send_some(conn: &mut Conn, frames: &[u8]) {
    if let Ok(sent @ 1..) = conn.send(&[std::io::IoSlice::new(frames)]) {
        send_all(conn, &frames[sent..][..(frames.len() - sent) % HEADER_BYTES]);
    }
}

pub(super) fn send_all(conn: &mut Conn, bytes: &[u8]) {
    let (mut sent, deadline) = (0, Instant::now() + LONG);
    while sent < bytes.len() {
        // The receiver may close the connection in the middle of a frame.
        match conn.send(&[std::io::IoSlice::new(&bytes[sent..])]) {
            Ok(some) => sent += some,
            Err(_) => return,
        }
        assert!(Instant::now() < deadline);
    }
    // Nobody drives this engine later, so all bytes must be in the kernel.
    while conn.has_unsent() {
        assert!(Instant::now() < deadline);
    }
}

/// Returns whether a peer has sent an Abort frame or closed its connection. Earlier frames, such as reports
/// of what the peer waits in, are skipped.
fn has_ended(engine: &mut Engine, peer: usize) -> bool {
    let Some(control) = engine.peers[peer].control.as_mut() else { return true };
    let closed = control.fill(HEADER_BYTES + CONTROL_PAYLOAD_BYTES).is_err();
    while let Some(Ok(frame)) = control.unread().first_chunk::<HEADER_BYTES>().map(Frame::decode) {
        let end = HEADER_BYTES + frame.len as usize;
        if frame.kind == Kind::Abort {
            return true;
        }
        if control.unread().len() < end {
            break;
        }
        control.consume(end);
    }
    closed
}

#[test]
fn received_bools_are_valid_whatever_a_peer_sends() {
    // The first number of elements is small enough to be read ahead, the second so large that they are
    // received straight into the buffer.
    const SHARED: [usize; 2] = [300, 60_000];
    const SENT: [usize; 2] = [300, 70_000];
    let hostile = |count: usize| (0..count).map(|i| (i % 256) as u8).collect::<Vec<u8>>();
    let call = |kind, op, root: usize, count: usize| {
        Call::new(kind, Dtype::Bool, op, root as u32, count as u64).encode()
    };
    let bytes_of = |buf: &[bool]| {
        // SAFETY: initialised memory may be read as bytes.
        #[allow(unsafe_code)]
        let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr().cast::<u8>(), buf.len()) };
        bytes.to_vec()
    };
    let outcomes = with_scripted_peer(
        |group| {
            let (group, mut seen) = (group.unwrap(), Vec::new());
            for count in SHARED {
                let mut buf = vec![false; count];
                group.broadcast(&mut buf, FAKE).unwrap();
                seen.push(bytes_of(&buf));
            }
            for count in SENT {
                let mut buf = vec![false; count];
                group.recv(&mut buf, FAKE, 0).unwrap();
                seen.push(bytes_of(&buf));
            }
            let mut buf = vec![false; SHARED[0]];
            group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            seen.push(bytes_of(&buf));
            seen
        },
        |peer| {
            let mut engine = peer.engine();
            for peer in 0..2 {
                let peer = &mut engine.peers[peer];
                let (data, messages) =
                    (peer.collective.as_mut().unwrap(), peer.messages.conn.as_mut().unwrap());
                for (seq, count) in (0..).zip(SHARED) {
                    let call = call(CallKind::Broadcast, None, FAKE, count);
                    send_all(data, &with(Frame { seq, call, ..frame(Kind::Data, count) }, &hostile(count)));
                }
                let message = |kind, seq, count: usize, len: usize| Frame {
                    seq,
                    call: call(CallKind::PointToPoint, None, 0, count),
                    ..frame(kind, len)
                };
                send_all(messages, &with(message(Kind::Eager, 0, SENT[0], SENT[0]), &hostile(SENT[0])));
                send_all(messages, &with(message(Kind::Rts, 1, SENT[1], 0), &[]));
                await_frame(messages, Kind::Cts);
                send_all(messages, &with(message(Kind::Message, 1, SENT[1], SENT[1]), &hostile(SENT[1])));
                // Only one of the two ranks adds the third rank's share.
                let (count, call) = (SHARED[0], call(CallKind::AllReduce, Some(ReduceOp::Sum), 0, SHARED[0]));
                send_all(data, &with(Frame { seq: 2, call, ..frame(Kind::Data, count) }, &hostile(count)));
            }
            assert!(wait_until_ended(&mut engine, LONG), "nobody left");
        },
    );
    for bytes in outcomes.iter().flatten() {
        assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == u8::from(i % 256 != 0)), "{bytes:?}");
    }
}

/// Reads from the connection until a frame of this kind has arrived.
pub(super) fn await_frame(conn: &mut Conn, kind: Kind) {
    let deadline = Instant::now() + LONG;
    loop {
        conn.fill(HEADER_BYTES).unwrap();
        if let Some(header) = conn.unread().first_chunk::<HEADER_BYTES>() {
            let found = Frame::decode(header).unwrap().kind;
            conn.consume(HEADER_BYTES);
            if found == kind {
                return;
            }
        }
        assert!(Instant::now() < deadline, "no {kind:?}");
        std::thread::yield_now();
    }
}
