//! Messages from any source, probes, and concurrent messages.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use common::*;
use convoke_comm::{Dtype, LossReason, Transfer, TransferType, bytemuck, wait_all};

#[test]
fn ring_of_large_messages_does_not_deadlock() {
    run_ranks(3, |group| {
        let (rank, size) = (group.rank(), group.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let (mine, mut got) = (vec![rank as u64; 500_000], vec![0_u64; 500_000]);
        group.run((op::send(&mine, next), op::recv(&mut got, before))).unwrap();
        assert_eq!(got, vec![before as u64; 500_000]);
        let (mut left, mut right) = (vec![0_u64; 500_000], vec![0_u64; 500_000]);
        let sends = [op::send(&mine, next).tag(1), op::send(&mine, before).tag(2)];
        let recvs = [op::recv(&mut left, before).tag(1), op::recv(&mut right, next).tag(2)];
        group.run((sends, recvs)).unwrap();
        assert_eq!((left[0], right[499_999]), (before as u64, next as u64));
    });
}

#[test]
fn messages_are_received_in_arrival_order() {
    run_ranks(4, |group| {
        let rank = group.rank();
        if rank > 0 {
            // Senders send one after the other, each when the previous message has arrived.
            if rank > 1 {
                group.recv(&mut [0_u8], 0, 5).unwrap();
            }
            let len = if rank == 2 { 50_000 } else { 1 };
            return group.send(&vec![rank as u64; len], 0, 3).unwrap();
        }
        for from in 1..4 {
            let status = group.probe(Some(from), 3).unwrap();
            let len = if from == 2 { 50_000 } else { 1 };
            assert_eq!((status.source(), status.count(), status.dtype()), (from, len, Dtype::U64));
            if from < 3 {
                group.send(&[0_u8], from + 1, 5).unwrap();
            }
        }
        assert_eq!(group.try_probe(None, 4).unwrap(), None);
        for from in 1..4 {
            let status = group.try_probe(None, 3).unwrap().unwrap();
            let mut got = vec![0_u64; status.count()];
            assert_eq!(group.recv_any(&mut got, 3).unwrap().source(), from);
            assert_eq!(got, vec![from as u64; got.len()]);
        }
        assert_eq!(group.try_probe(None, 3).unwrap(), None);
    });
}

#[test]
fn many_messages_that_wait_in_a_subgroup_are_received_from_any_rank() {
    let sent = TimedBarrier::new(2);
    let options = GroupOptions::default().shared_memory(false);
    run_with_options(2, options, |world| {
        let group = world.subgroup(&[0, 1]).unwrap().unwrap();
        for round in 0..20_u64 {
            if group.rank() == 1 {
                (0..30).for_each(|number| group.send(&[round, number, 0, 0, 0], 0, 1).unwrap());
                sent.wait();
                group.recv(&mut [0_u8], 0, 2).unwrap();
                continue;
            }
            sent.wait();
            for number in 0..30 {
                let mut got = [0; 5];
                group.recv_any(&mut got, 1).unwrap();
                assert_eq!(got, [round, number, 0, 0, 0]);
            }
            group.send(&[0_u8], 1, 2).unwrap();
        }
    });
}

/// Rank 0 receives so many messages from each other rank by itself that it waits for no events of their connections. All
/// messages have been sent when it begins.
fn receive_many_from_each(group: &Group, sent: &TimedBarrier) {
    let messages = 100;
    for batch in 0..messages / 20 {
        let numbers = batch * 20..(batch + 1) * 20;
        if group.rank() > 0 {
            numbers.for_each(|number: u64| group.send(&[number], 0, 1).unwrap());
            sent.wait();
            group.recv(&mut [0_u8], 0, 2).unwrap();
            continue;
        }
        sent.wait();
        for from in 1..group.size() {
            for number in numbers.clone() {
                let mut got = [0];
                group.recv(&mut got, from, 1).unwrap();
                assert_eq!(got, [number]);
            }
            group.send(&[0_u8], from, 2).unwrap();
        }
    }
}

#[test]
fn late_message_over_a_busy_connection_wakes_the_receiver() {
    let ranks = 6;
    let sent = TimedBarrier::new(ranks);
    run_with_options(ranks, GroupOptions::default().shared_memory(false), |group| {
        for late in 1..ranks {
            receive_many_from_each(&group, &sent);
            if group.rank() == late {
                // Rank 0 has told whom it waits for by then, and would sleep for 30 seconds if nothing woke it.
                std::thread::sleep(Duration::from_millis(300));
                group.send(&[late as u64], 0, 3).unwrap();
            }
            if group.rank() == 0 {
                let (begin, mut got) = (Instant::now(), [0]);
                group.recv(&mut got, late, 3).unwrap();
                assert_eq!(got, [late as u64]);
                assert!(begin.elapsed() < Duration::from_secs(10), "rank {late}: {:?}", begin.elapsed());
            }
        }
    });
}

#[test]
fn probe_finds_a_message_over_a_busy_connection() {
    let sent = TimedBarrier::new(3);
    run_with_options(3, GroupOptions::default().shared_memory(false), |group| {
        for from in 1..3 {
            receive_many_from_each(&group, &sent);
            if group.rank() == from {
                group.send(&[0_u8], 0, 4).unwrap();
            }
            if group.rank() == 0 {
                let (begin, mut found) = (Instant::now(), None);
                while found.is_none() {
                    assert!(begin.elapsed() < Duration::from_secs(10), "rank {from}");
                    found = group.try_probe(None, 4).unwrap();
                }
                assert_eq!(found.unwrap().source(), from);
                group.recv(&mut [0_u8], from, 4).unwrap();
            }
        }
    });
}

#[test]
fn receives_match_in_call_order() {
    // No rank leaves earlier: a receive is left that names one of them.
    let done = TimedBarrier::new(3);
    run_ranks(3, |group| {
        if group.rank() > 0 {
            group.barrier().unwrap();
            for round in 0..2 {
                group.send(&[group.rank() as u64 * 10 + round], 0, 0).unwrap();
            }
            return done.wait();
        }
        let any = group.start(op::recv_any(vec![0_u64])).unwrap();
        let named: Vec<_> = [1, 2, 1, 2].map(|from| group.start(op::recv(vec![0_u64], from)).unwrap()).into();
        let mut named = named.into_iter();
        let mut next = || named.next().unwrap();
        let (one, two, one_more, two_more) = (next(), next(), next(), next());
        group.barrier().unwrap();
        let (first, status) = any.wait().unwrap();
        let from = status.source() as u64;
        assert_eq!(first, [from * 10]);
        // The sender that was matched has one message left for two receives.
        let (mine, other) =
            if from == 1 { ((one, one_more), (two, two_more)) } else { ((two, two_more), (one, one_more)) };
        assert_eq!(mine.0.wait().unwrap().0, [from * 10 + 1]);
        assert_eq!(
            (other.0.wait().unwrap().0, other.1.wait().unwrap().0),
            (vec![(3 - from) * 10], vec![(3 - from) * 10 + 1])
        );
        assert!(!mine.1.is_completed());
        done.wait();
        group.abort("enough");
        mine.1.wait().unwrap_err();
    });
}

#[test]
fn recv_any_receives_many_messages_from_all_ranks() {
    const EACH: u64 = 300;
    let is_large = |round: &u64| round.is_multiple_of(10);
    let len = |round: u64| if is_large(&round) { 20_000 } else { 1 + round as usize % 7 };
    run_ranks(4, |group| {
        if group.rank() > 0 {
            for round in 0..EACH {
                group.send(&vec![round; len(round)], 0, is_large(&round).into()).unwrap();
            }
            return;
        }
        // The next message of each rank, for either tag.
        let mut small: Vec<_> = (0..4).map(|_| (0..EACH).filter(|round| !is_large(round))).collect();
        let mut large: Vec<_> = (0..4).map(|_| (0..EACH).filter(is_large)).collect();
        for count in 0..3 * EACH {
            if is_large(&count) {
                let mut got = vec![0_u64; 20_000];
                let from = group.recv_any(&mut got, 1).unwrap().source();
                assert_eq!(got, vec![large[from].next().unwrap(); 20_000]);
            } else {
                let status = group.probe(None, 0).unwrap();
                let mut got = vec![0_u64; status.count()];
                group.recv(&mut got, status.source(), 0).unwrap();
                let round = small[status.source()].next().unwrap();
                assert_eq!(got, vec![round; len(round)]);
            }
        }
    });
}

#[test]
fn recv_any_timeout_names_all_possible_senders() {
    let options = GroupOptions::default();
    let errors = run_with_options(3, options, |group| {
        if group.rank() != 1 {
            return group.recv(&mut [0_u8], 1, 0).unwrap_err();
        }
        group.with_timeout(SHORT).recv_any(&mut [0_u8], 0).unwrap_err()
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if missing == &[0, 2]), "{error}");
    }
}

#[test]
fn receiving_fails_when_all_senders_have_departed() {
    run_ranks_together(3, |group| {
        if group.rank() != 1 {
            return;
        }
        let probe = group.with_timeout(LONG).probe(Some(2), 0).unwrap_err();
        assert!(matches!(probe, CommError::PeerLost { rank: 2, how: LossReason::Left, .. }), "{probe}");
    });
    run_ranks_together(3, |group| {
        if group.rank() != 1 {
            return;
        }
        let error = group.recv_any(&mut [0_u8], 0).unwrap_err();
        assert!(matches!(error, CommError::PeerLost { rank: 0, how: LossReason::Left, .. }), "{error}");
    });
}

/// Elements of messages and buffers: empty, small, small in parts, and large enough to be announced first.
const COUNTS: [usize; 6] = [0, 1, 100, 15_000, 17_000, 300_000];

/// The order in which a receive and its message come.
#[derive(Debug, Clone, Copy)]
enum Meeting {
    /// The receive is posted first.
    ReceiveFirst,
    /// The message, or its announcement, arrives first.
    MessageFirst,
    /// The receive is a blocking call.
    Blocking,
}

/// Sends a message of `count` elements from rank 0 to the last rank, which has a buffer of `room` elements.
/// Then sends another with the same tag.
fn send_into(group: &Group, meeting: Meeting, count: usize, room: usize) {
    let (me, last) = (group.rank(), group.size() - 1);
    let case = format!("{count} elements into {room}, {meeting:?}, {last}");
    let content = |index: usize| index as u32 + 1;
    let begin = || {
        let long: Vec<u32> = (0..count).map(content).collect();
        [op::send(long, last).tag(1), op::send(vec![7], last).tag(1)].map(|send| group.start(send).unwrap())
    };
    let check = |result: Result<(Option<Vec<u32>>, convoke_comm::Status), CommError>| match result {
        Ok((buf, status)) => {
            assert_eq!((status.source(), status.tag(), status.count()), (0, 1, count), "{case}");
            let right = |(index, &x): (usize, &u32)| x == if index < count { content(index) } else { 9 };
            assert!(count <= room && buf.unwrap().iter().enumerate().all(right), "{case}");
        }
        Err(error) => {
            let told = matches!(&error, CommError::Truncated { from: 0, tag: 1, count: c, room: r, .. }
                if (*c, *r) == (count as u64, room as u64));
            assert!(told && count > room && !error.ends_group(), "{case}: {error}");
            assert_eq!(error.suspect_rank(), Some(0));
        }
    };
    let mut sends = (me == 0 && !matches!(meeting, Meeting::ReceiveFirst)).then(begin);
    if me == last {
        let mut buf = vec![9; room];
        match meeting {
            Meeting::Blocking => {
                let result = group.recv(&mut buf, 0, 1);
                let start = count.min(room);
                assert!(buf[..start].iter().enumerate().all(|(index, &x)| x == content(index)), "{case}");
                check(result.map(|status| (Some(buf), status)));
            }
            Meeting::MessageFirst => {
                assert_eq!(group.probe(Some(0), 1).unwrap().count(), count);
                check(group.run(op::recv(buf, 0).tag(1)).map(|(buf, status)| (Some(buf), status)));
            }
            Meeting::ReceiveFirst => {
                let work = group.start(op::recv(buf, 0).tag(1)).unwrap();
                group.barrier().unwrap();
                sends = (me == 0).then(begin);
                check(work.wait().map(|(buf, status)| (Some(buf), status)));
            }
        }
        let mut next = [0_u32];
        group.recv(&mut next, 0, 1).unwrap();
        assert_eq!(next, [7], "{case}");
    } else if matches!(meeting, Meeting::ReceiveFirst) {
        group.barrier().unwrap();
        sends = (me == 0).then(begin);
    }
    for send in sends.into_iter().flatten() {
        send.wait().unwrap();
    }
}

#[test]
fn message_may_be_shorter_than_its_buffer_and_a_longer_one_fails_only_its_receive() {
    let body = |group: Group| {
        for meeting in [Meeting::ReceiveFirst, Meeting::MessageFirst, Meeting::Blocking] {
            for (count, room) in COUNTS.iter().flat_map(|&count| COUNTS.map(|room| (count, room))) {
                send_into(&group, meeting, count, room);
            }
        }
        group.barrier().unwrap();
    };
    // A rank with itself, two ranks in shared memory, and two ranks over TCP.
    run_ranks(1, body);
    run_ranks(2, body);
    run_on_hosts(&[0, 1], "", body);
}

#[test]
fn receive_from_any_rank_returns_the_length_and_may_be_truncated() {
    run_ranks(3, |group| {
        if group.rank() > 0 {
            return group.send(&vec![group.rank() as u16; 10 * group.rank()], 0, 2).unwrap();
        }
        let results = [(); 2].map(|()| group.recv_any(&mut [0_u16; 15], 2));
        for result in results {
            match result {
                Ok(status) => assert_eq!((status.source(), status.count()), (1, 10)),
                Err(error) => {
                    let told =
                        matches!(error, CommError::Truncated { from: 2, tag: 2, count: 20, room: 15, .. });
                    assert!(told, "{error}");
                }
            }
        }
    });
}

/// Plain data of a program.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
struct Particle {
    position: [f32; 3],
    charge: i16,
    id: u16,
}

// SAFETY: numbers without padding.
#[allow(unsafe_code)]
unsafe impl bytemuck::Zeroable for Particle {}
// SAFETY: numbers without padding.
#[allow(unsafe_code)]
unsafe impl bytemuck::Pod for Particle {}

impl Transfer for Particle {
    const TYPE: TransferType<Self> = TransferType::plain();
}

#[test]
fn plain_data_is_moved_by_all_operations_that_do_not_reduce() {
    let body = |group: Group| {
        let (me, size) = (group.rank(), group.size());
        let particle = |rank: usize, id: usize| Particle {
            position: [rank as f32, 0.5, -1.0],
            charge: -(rank as i16),
            id: id as u16,
        };
        for len in [3, 9_000] {
            let own = |rank: usize| (0..len).map(|id| particle(rank, id)).collect::<Vec<_>>();
            let all: Vec<Particle> = (0..size).flat_map(own).collect();
            let none = |len: usize| vec![Particle::default(); len];

            let mut buf = own(me);
            group.broadcast(&mut buf, size - 1).unwrap();
            assert_eq!(buf, own(size - 1));
            let mut buf = none(len * size);
            group.all_gather(&own(me), &mut buf).unwrap();
            assert_eq!(buf, all);
            let mut buf = none(len * size);
            group.gather(&own(me), &mut buf, 0).unwrap();
            assert!(me > 0 || buf == all);
            let mut buf = none(len);
            group.scatter(&all, &mut buf, 0).unwrap();
            assert_eq!(buf, own(me));
            let mut buf = none(len * size);
            group.all_to_all(&vec![particle(me, 1); len * size], &mut buf).unwrap();
            assert!(buf.chunks(len).enumerate().all(|(rank, block)| block == vec![particle(rank, 1); len]));

            // Rank r has r more.
            let lens: Vec<usize> = (0..size).map(|rank| len + rank).collect();
            let own = |rank: usize| vec![particle(rank, 5); lens[rank]];
            let all: Vec<Particle> = (0..size).flat_map(own).collect();
            let mut buf = none(all.len());
            group.all_gather_v(&own(me), &mut buf, &lens).unwrap();
            assert_eq!(buf, all);
            let mut buf = none(all.len());
            group.gather_v(&own(me), &mut buf, &lens, 0).unwrap();
            assert!(me > 0 || buf == all);
            let mut buf = none(lens[me]);
            group.scatter_v(&all, &mut buf, &lens, size - 1).unwrap();
            assert_eq!(buf, own(me));
            let mut buf = none(lens[me] * size);
            let (to, from) = (lens.clone(), vec![lens[me]; size]);
            group.all_to_all_v((&vec![particle(me, 6); all.len()], &to), (&mut buf, &from)).unwrap();
            assert!(buf.chunks(lens[me]).enumerate().all(|(rank, block)| block[0] == particle(rank, 6)));

            let (next, before) = ((me + 1) % size, (me + size - 1) % size);
            let (send, mut buf) = (own(me), none(lens[before] + 4));
            let (_, (buf, status)) =
                group.run((op::send(&send, next), op::recv(&mut buf[..], before))).unwrap();
            assert_eq!((status.count(), &buf[..lens[before]]), (lens[before], &own(before)[..]));
            let list = [2, 3].map(|id| op::broadcast(vec![particle(me, id); id], 0));
            assert_eq!(group.run(list).unwrap()[1], vec![particle(0, 3); 3]);
        }
    };
    run_ranks(1, body);
    run_ranks(3, body);
    run_on_hosts(&[0, 1, 2], "", body);
}

#[test]
fn differing_type_is_a_mismatch() {
    let errors = run_ranks(2, |group| {
        if group.rank() == 0 {
            group.recv_any(&mut [0_u8; 4], 0).unwrap_err()
        } else {
            group.send(&[0_u32], 0, 0).unwrap();
            group.recv(&mut [0_u8], 0, 0).unwrap_err()
        }
    });
    assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { rank: 1, .. })), "{errors:?}");
}

#[test]
fn receive_in_a_group_of_one_times_out() {
    run_ranks(1, |group| {
        group.run(Vec::<op::Send<Vec<u8>>>::new()).unwrap();
        assert_eq!(group.try_probe(None, 0).unwrap(), None);
        let error = group.with_timeout(SHORT).recv_any(&mut [0_u8], 0).unwrap_err();
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [0]), "{error}");
    });
}

/// More than is sent before it is asked for, and more than is buffered of another rank.
const LARGE: usize = 400_000;

#[test]
fn rank_sends_any_length_to_itself_before_receiving() {
    for world in [1, 3] {
        run_ranks(world, |group| {
            let me = group.rank();
            for len in [0, 1, 1000, LARGE] {
                let sent: Vec<u64> = (0..len as u64).collect();
                // Messages of one tag in order, tags in any order.
                group.send(&sent, me, 1).unwrap();
                group.send(&[9.5_f64], me, 2).unwrap();
                group.send(&[true, false], me, 1).unwrap();
                let status = group.probe(Some(me), 1).unwrap();
                assert_eq!((status.source(), status.count(), status.dtype()), (me, len, Dtype::U64));
                assert_eq!(group.try_probe(None, 2).unwrap().map(|status| status.count()), Some(1));
                let (mut a, mut b, mut c) = (vec![0_u64; len], [0.0_f64], [false; 2]);
                assert_eq!(group.recv_any(&mut b, 2).unwrap().source(), me);
                group.recv(&mut a, me, 1).unwrap();
                group.recv(&mut c, me, 1).unwrap();
                assert!(a == sent && b == [9.5] && c == [true, false]);
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn rank_receives_from_itself_before_sending() {
    for world in [1, 2] {
        run_ranks(world, |group| {
            let me = group.rank();
            let named = group.start(op::recv(vec![0_i32; LARGE], me).tag(5)).unwrap();
            let any = group.start(op::recv_any(vec![0_i32; 2]).tag(6)).unwrap();
            assert!(!named.is_completed());
            group.start(op::send(vec![7_i32; LARGE], me).tag(5)).unwrap().wait().unwrap();
            group.send(&[1_i32, 2], me, 6).unwrap();
            assert!(named.wait().unwrap().0 == vec![7; LARGE]);
            let (got, status) = any.wait().unwrap();
            assert_eq!((got, status.source(), status.tag()), (vec![1, 2], me, 6));
            let (mine, mut got) = ([me as u64; 3], [0_u64; 3]);
            group.run((op::send(&mine, me), op::recv(&mut got, me))).unwrap();
            assert_eq!(got, mine);
            let (mut first, mut second) = ([0_u64; 3], vec![0_u64; LARGE]);
            let large = vec![3_u64; LARGE];
            let sends = (op::send(&mine, me).tag(1), op::send(&large, me).tag(1));
            group.run((sends, op::recv(&mut first, me).tag(1), op::recv(&mut second, me).tag(1))).unwrap();
            assert!(first == mine && second == large);
        });
    }
}

#[test]
fn rank_receives_from_itself_after_the_others_have_left() {
    let (tell, told) = mpsc::channel::<()>();
    let (tell, told) = (Mutex::new(Some(tell)), Mutex::new(told));
    run_ranks(2, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            drop(group);
            drop(tell.lock().unwrap().take());
            return;
        }
        let any = group.start(op::recv_any(vec![0_i32; 2])).unwrap();
        assert!(told.lock().unwrap().recv().is_err());
        (0..1000).for_each(|_| assert!(!any.is_completed()));
        group.send(&[1_i32, 2], 0, 0).unwrap();
        assert_eq!(any.wait().unwrap().0, [1, 2]);
        // Nobody can send what this waits for.
        let error = group.recv_any(&mut [0_i32], 1).unwrap_err();
        assert!(matches!(&error, CommError::PeerLost { rank: 1, .. }), "{error}");
    });
}

#[test]
fn thread_receives_a_message_from_a_thread_of_its_rank() {
    run_ranks(1, |group| {
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let status = group.probe(None, 3).unwrap();
                let mut got = vec![0_u8; status.count()];
                group.recv(&mut got, 0, 3).unwrap();
                got
            });
            group.send(b"from the other thread", 0, 3).unwrap();
            assert_eq!(receiver.join().unwrap(), b"from the other thread");
        });
    });
}

#[test]
fn message_to_self_must_match_in_type() {
    for (world, before) in [(1, true), (1, false), (2, true), (2, false)] {
        let errors = run_ranks_together(world, |group| {
            let me = group.rank();
            if me > 0 {
                return group.barrier().unwrap_err();
            }
            if before {
                let recv = group.start(op::recv(vec![0_i32; 2], me)).unwrap();
                group.send(&[0_u32], me, 0).unwrap_err();
                return recv.wait().unwrap_err();
            }
            group.send(&[0_u32], me, 0).unwrap();
            group.recv(&mut [0_u64], me, 0).unwrap_err()
        });
        let mismatch = |error: &CommError| matches!(error, CommError::Mismatch { rank: 0, by: 0, .. });
        assert!(errors.iter().all(mismatch), "{errors:?}");
    }
}

/// More than a receiver used to hear of before it took the first.
const MANY: usize = 80_000;

#[test]
fn any_number_of_messages_is_delivered_before_the_first_receive() {
    // Shared memory, then connections.
    for hosts in [[0, 0], [0, 1]] {
        let sent = TimedBarrier::new(2);
        run_on_hosts(&hosts, "", |group| {
            // The timeout covers all messages together, also on a busy machine.
            let group = group.with_timeout(10 * LONG);
            if group.rank() == 0 {
                let send = |number| {
                    group.start(op::send(vec![number as u64; 2], 1).tag((number % 2) as u32)).unwrap()
                };
                let works: Vec<_> = (0..MANY).map(send).collect();
                sent.wait();
                assert_eq!(wait_all(works).unwrap().len(), MANY);
                return;
            }
            // The messages arrive while this rank waits for another.
            group.probe(Some(0), 1).unwrap();
            sent.wait();
            for tag in [1, 0] {
                for number in (tag..MANY).step_by(2) {
                    let mut got = [0_u64; 2];
                    group.recv(&mut got, 0, tag as u32).unwrap();
                    assert_eq!(got, [number as u64; 2]);
                }
            }
        });
    }
}
