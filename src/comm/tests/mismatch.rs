//! If ranks make different calls, all of them report that alike, with the rank that differs.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Instant;

use common::{CommError, Group, LONG, ReduceOp, SHORT, TimedBarrier, op, run_ranks};
use convoke_comm::{CallKind, Dtype, Element, LossReason};
use convoke_testkit::Thread;

type Call = fn(&Group) -> Result<(), CommError>;
/// A call with a root, or with another distinguished rank.
type Rooted = fn(&Group, usize) -> Result<(), CommError>;

fn sum<T: Element + Default>(group: &Group, count: usize, op: ReduceOp) -> Result<(), CommError> {
    group.all_reduce(&mut vec![T::default(); count], op)
}

fn sum_1000(group: &Group) -> Result<(), CommError> {
    sum::<f32>(group, 1000, ReduceOp::Sum)
}

fn broadcast_from(group: &Group, root: usize) -> Result<(), CommError> {
    group.broadcast(&mut [0.0_f32; 1000], root)
}

fn reduce_to(group: &Group, root: usize) -> Result<(), CommError> {
    group.reduce(&mut [0.0_f32; 1000], ReduceOp::Sum, root)
}

fn gather_to(group: &Group, root: usize) -> Result<(), CommError> {
    group.gather(&[0.0_f32; 10], &mut vec![0.0; 10 * group.size()], root)
}

fn scatter_from(group: &Group, root: usize) -> Result<(), CommError> {
    group.scatter(&vec![0.0_f32; 10 * group.size()], &mut [0.0; 10], root)
}

/// Lengths of blocks: the first two ranks share `three` elements, the others have one each.
fn blocks(group: &Group, three: [usize; 2]) -> Vec<usize> {
    (0..group.size()).map(|rank| three.get(rank).copied().unwrap_or(1)).collect()
}

fn gather_blocks(group: &Group, three: [usize; 2]) -> Result<(), CommError> {
    let lens = blocks(group, three);
    group.all_gather_v(&vec![0_i32; lens[group.rank()]], &mut vec![0; lens.iter().sum()], &lens)
}

fn sum_blocks(group: &Group, three: [usize; 2]) -> Result<(), CommError> {
    let lens = blocks(group, three);
    let mut own = vec![0_i32; lens[group.rank()]];
    group.reduce_scatter_v(&vec![0; lens.iter().sum()], &mut own, &lens, ReduceOp::Sum)
}

/// The difference, the calls of one rank, and the calls of the others.
const MISMATCHES: &[(&str, &[Call], &[Call])] = &[
    ("the operation", &[|group| sum::<f32>(group, 1000, ReduceOp::Max)], &[sum_1000]),
    ("the type", &[|group| sum::<i32>(group, 1000, ReduceOp::Sum)], &[sum_1000]),
    ("the count", &[|group| sum::<f32>(group, 1001, ReduceOp::Sum)], &[sum_1000]),
    ("the algorithm", &[|group| sum::<f32>(group, 1_000_000, ReduceOp::Sum)], &[sum_1000]),
    ("nothing to add", &[|group| sum::<f32>(group, 0, ReduceOp::Sum)], &[sum_1000]),
    ("a barrier", &[Group::barrier], &[sum_1000]),
    ("a broadcast", &[|group| broadcast_from(group, 1)], &[sum_1000]),
    ("a reduction to one", &[|group| reduce_to(group, 0)], &[sum_1000]),
    ("a scan", &[|group| group.scan(&mut [0.0_f32; 1000], ReduceOp::Sum)], &[sum_1000]),
    ("the root of a broadcast", &[|group| broadcast_from(group, 1)], &[|group| broadcast_from(group, 0)]),
    ("the root of a reduction", &[|group| reduce_to(group, 1)], &[|group| reduce_to(group, 0)]),
    ("the root of a gather", &[|group| gather_to(group, 1)], &[|group| gather_to(group, 0)]),
    ("the root of a scatter", &[|group| scatter_from(group, 1)], &[|group| scatter_from(group, 0)]),
    ("lengths to gather", &[|group| gather_blocks(group, [1, 2])], &[|group| gather_blocks(group, [2, 1])]),
    ("lengths to sum up", &[|group| sum_blocks(group, [1, 2])], &[|group| sum_blocks(group, [2, 1])]),
    ("the order", &[Group::barrier, sum_1000], &[sum_1000, Group::barrier]),
    ("a missing call", &[Group::barrier], &[sum_1000, Group::barrier]),
    ("one call more", &[sum_1000, sum_1000, Group::barrier], &[sum_1000, Group::barrier]),
];

/// The errors of all ranks after these calls. A call that all make alike comes first, since a slow rank could
/// otherwise hear of the mismatch while the group forms.
fn errors(world: usize, calls: impl Fn(&Group) -> Result<(), CommError> + Sync) -> Vec<CommError> {
    run_ranks(world, |group| {
        let result = sum::<f32>(&group, 10, ReduceOp::Sum).and_then(|()| calls(&group));
        // A rank that has returned already, such as a root, hears of it with its next call.
        result.and_then(|()| group.barrier()).and_then(|()| group.barrier()).unwrap_err()
    })
}

#[test]
fn differing_calls_are_a_mismatch_on_all_ranks() {
    for &(name, odd, even) in MISMATCHES {
        for world in if common::is_full_test_run() { vec![2, 3, 4, 5] } else { vec![2, 5] } {
            for who in 0..world {
                let errors = errors(world, |group| {
                    let calls = if group.rank() == who { odd } else { even };
                    calls.iter().try_for_each(|call| call(group))
                });
                let cause = |error: &CommError| error.to_string().split("; group").next().unwrap().to_owned();
                for error in &errors {
                    let CommError::Mismatch { rank, by, .. } = error else {
                        panic!("{name}, rank {who} of {world}: {error}");
                    };
                    assert!(*rank == who || *by == who, "{name}, rank {who} of {world}: {error}");
                    assert_eq!(cause(error), cause(&errors[0]), "{name}, rank {who} of {world}");
                }
            }
        }
    }
}

#[test]
fn mismatch_is_detected_without_data_flow_between_differing_ranks() {
    let start = Instant::now();
    // Each rank waits for its own root and none sends; or all send, and none waits.
    let all: [Rooted; 4] = [broadcast_from, scatter_from, reduce_to, gather_to];
    for call in all {
        for world in [3, 5] {
            for error in errors(world, |group| call(group, (group.rank() + 1) % world)) {
                assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
            }
        }
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_mismatch_names_both_calls() {
    let errors = run_ranks(2, |group| {
        if group.rank() == 0 { group.barrier() } else { sum::<f64>(&group, 3, ReduceOp::Min) }.unwrap_err()
    });
    for error in errors {
        let CommError::Mismatch { rank, theirs, by, ours, .. } = &error else { panic!("{error}") };
        let calls = if (*rank, *by) == (0, 1) { [theirs, ours] } else { [ours, theirs] };
        assert_eq!(calls.map(convoke_comm::Call::kind), [CallKind::Barrier, CallKind::AllReduce]);
        assert_eq!((calls[1].dtype(), calls[1].op(), calls[1].count()), (Dtype::F64, Some(ReduceOp::Min), 3));
        assert!(error.to_string().contains("all_reduce(f64, 3, min)"), "{error}");
    }
}

#[test]
fn rank_that_omits_a_call_is_named() {
    for leaves in [false, true] {
        for who in 0..3 {
            let gate = TimedBarrier::new(3);
            let errors = run_ranks(3, |group| {
                group.barrier().unwrap();
                if group.rank() == who {
                    let kept = (!leaves).then_some(group);
                    gate.wait();
                    return kept.map(|group| group.barrier().unwrap_err());
                }
                let timeout = if leaves { LONG } else { SHORT };
                let error = group.with_timeout(timeout).barrier().unwrap_err();
                gate.wait();
                Some(error)
            });
            for error in errors.into_iter().flatten() {
                let named = match &error {
                    CommError::Timeout { missing, .. } => !leaves && *missing == [who],
                    CommError::PeerLost { rank, how: LossReason::Left, .. } => leaves && *rank == who,
                    _ => false,
                };
                assert!(named, "rank {who}, leaves: {leaves}: {error}");
            }
        }
    }
}

#[test]
fn rank_with_an_extra_call_learns_the_absent_ranks() {
    for who in 0..3 {
        let gate = TimedBarrier::new(3);
        let errors = run_ranks(3, |group| {
            let group = group.with_timeout(SHORT);
            group.barrier().unwrap();
            let more = (group.rank() == who).then(|| group.barrier().unwrap_err());
            gate.wait();
            // The data that it had sent may be all that the others need.
            more.unwrap_or_else(|| group.barrier().and_then(|()| group.barrier()).unwrap_err())
        });
        let others: Vec<usize> = (0..3).filter(|&rank| rank != who).collect();
        for error in errors {
            // It waits for one of them, not necessarily the first.
            let CommError::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert!(!missing.is_empty() && missing.iter().all(|rank| others.contains(rank)), "{error}");
        }
    }
}

#[test]
fn root_names_senders_of_blocks_with_wrong_length() {
    // Rank `odd` sends one element more than it should.
    let cases: [(&str, Rooted); 3] = [
        ("gather_v", |group, odd| {
            let len = 2 + usize::from(group.rank() == odd);
            let mut recv = vec![0_i32; 2 * group.size()];
            group.gather_v(&vec![0; len], &mut recv, &vec![2; group.size()], 0)
        }),
        ("scatter_v", |group, odd| {
            let lens: Vec<usize> = (0..group.size()).map(|rank| 2 + usize::from(rank == 1)).collect();
            let mine = if group.rank() == odd { lens[odd] } else { 2 };
            group.scatter_v(&vec![0_i32; lens.iter().sum()], &mut vec![0; mine], &lens, odd)
        }),
        ("all_to_all_v", |group, odd| {
            let more = |to: usize| usize::from(group.rank() == odd && to == (odd + 1) % group.size());
            let sent: Vec<usize> = (0..group.size()).map(|to| 2 + more(to)).collect();
            let filled = vec![2; group.size()];
            let send = vec![0_i32; sent.iter().sum()];
            group.all_to_all_v((&send, &sent), (&mut vec![0; 2 * group.size()], &filled))
        }),
    ];
    for (name, call) in cases {
        // The root of a gather knows its own length; in a scatter it sends to another rank.
        for odd in if name == "scatter_v" { [0, 2] } else { [1, 2] } {
            for error in errors(3, |group| call(group, odd)) {
                assert!(
                    matches!(error, CommError::Protocol { peer, .. } if peer == odd),
                    "{name}, {odd}: {error}"
                );
                assert!(error.to_string().contains("12 bytes for"), "{name}, {odd}: {error}");
            }
        }
    }
}

/// The state of a message when its receiver asks for it.
#[derive(Clone, Copy)]
enum MessageState {
    /// The message may or may not be sent.
    No,
    /// The sender waits, because it has used its credit.
    SenderBlocked,
    /// The receiver has read the announcement.
    Known,
}

fn warm_up(group: &Group) {
    match group.rank() {
        0 => group.send(&[1], 1, 4).unwrap(),
        _ => drop(group.recv(&mut [0], 0, 4).unwrap()),
    }
}

#[test]
fn messages_of_differing_type_are_a_mismatch() {
    for when in [MessageState::No, MessageState::SenderBlocked, MessageState::Known] {
        for large in [false, true] {
            let count = if large { 100_000 } else { 100 };
            let (tell, told) = channel();
            let told = Mutex::new(told);
            let errors = run_ranks(2, |group| {
                // The connection for messages exists and was used.
                warm_up(&group);
                if group.rank() == 0 {
                    tell.send(Thread::current()).unwrap();
                    let sent = group.send(&vec![1.0_f32; count], 1, 5);
                    sent.and_then(|()| group.barrier()).unwrap_err()
                } else {
                    match when {
                        MessageState::No => {}
                        MessageState::SenderBlocked => {
                            told.lock().unwrap().recv().unwrap().wait_until_asleep()
                        }
                        MessageState::Known => drop(group.probe(Some(0), 5).unwrap()),
                    }
                    group.recv(&mut vec![0.0_f64; count], 0, 5).unwrap_err()
                }
            });
            assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { .. })), "{errors:?}");
        }
    }
}

#[test]
fn threads_that_begin_collectives_in_different_orders_learn_of_both_calls() {
    let errors = run_ranks(2, |group| {
        let reduce = || group.start(op::all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum)).unwrap();
        let broadcast = || group.start(op::broadcast(vec![1_u8; 1000], 0)).unwrap();
        std::thread::scope(|scope| {
            let (reduced, sent);
            if group.rank() == 0 {
                reduced = scope.spawn(reduce).join().unwrap();
                sent = scope.spawn(broadcast).join().unwrap();
            } else {
                sent = scope.spawn(broadcast).join().unwrap();
                reduced = scope.spawn(reduce).join().unwrap();
            }
            [reduced.wait().unwrap_err(), sent.wait().unwrap_err()]
        })
    });
    for error in errors.iter().flatten() {
        assert!(matches!(error, CommError::Mismatch { .. }) && error.ends_group(), "{error}");
        let text = error.to_string();
        assert!(text.contains("all_reduce(f32") && text.contains("broadcast(u8"), "{text}");
    }
}

#[test]
fn threads_may_use_a_group_each_in_any_order() {
    run_ranks(2, |group| {
        let own = [(); 3].map(|()| group.subgroup(&[0, 1]).unwrap().unwrap());
        std::thread::scope(|scope| {
            for (number, group) in own.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..50 {
                        let mut buf = [number as u64 * 100 + round];
                        group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                        assert_eq!(buf[0], 2 * (number as u64 * 100 + round));
                    }
                });
            }
        });
        // Operations that were begun on two groups in opposite orders do not wait for each other.
        let mut works = [0, 1].map(|index: usize| {
            own[index ^ group.rank()].start(op::all_reduce(vec![1_u32; 50_000], ReduceOp::Sum)).unwrap()
        });
        for work in &mut works {
            assert_eq!(work.wait_for(LONG).unwrap().unwrap()[49_999], 2);
        }
    });
}

#[test]
fn message_with_another_tag_times_out_naming_its_sender() {
    let errors = run_ranks(2, |group| match group.rank() {
        0 => group.send(&[1], 1, 5).and_then(|()| group.barrier()).unwrap_err(),
        _ => group.with_timeout(SHORT).recv(&mut [0], 0, 6).unwrap_err(),
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [0]), "{error}");
    }
}
