//! A rank that waits for an absent rank gets a timeout in time, which names the absent rank.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{CommError, Group, LONG, ReduceOp, TimedBarrier, op, run_ranks, run_ranks_together};
use convoke_comm::{GroupOptions, LossReason, Mesh};

const TIMEOUT: Duration = Duration::from_millis(800);
/// The margin for a busy machine.
const MARGIN: Duration = Duration::from_secs(10);
/// The rank that makes no call; it is the root in operations whose root sends.
const ABSENT: usize = 2;

type Op = fn(&Group) -> Result<(), CommError>;

/// Operations in which ranks below [`ABSENT`] wait for it, or send data that it does not receive.
const OPERATIONS: [(&str, Op); 38] = [
    ("barrier", Group::barrier),
    ("monitored_barrier", |group| group.monitored_barrier(group.timeout())),
    ("all_reduce", |group| group.all_reduce(&mut [1], ReduceOp::Sum)),
    ("all_reduce, long", |group| group.all_reduce(&mut vec![1.0_f32; 300_000], ReduceOp::Sum)),
    ("all_reduce_into", |group| group.all_reduce_into(&[1], &mut [0], ReduceOp::Sum)),
    ("all_reduce of a list", |group| {
        group.run([[1], [2]].map(|x| op::all_reduce(x.to_vec(), ReduceOp::Sum))).map(drop)
    }),
    ("broadcast", |group| group.broadcast(&mut [1], ABSENT)),
    ("broadcast, long", |group| group.broadcast(&mut vec![1_u8; 300_000], ABSENT)),
    ("broadcast of a list", |group| {
        group.run([[1], [2]].map(|x| op::broadcast(x.to_vec(), ABSENT))).map(drop)
    }),
    ("reduce", |group| group.reduce(&mut [1], ReduceOp::Sum, 0)),
    ("reduce_into", |group| group.reduce_into(&[1], &mut [0], ReduceOp::Sum, 0)),
    ("reduce of a list", |group| {
        group.run([[1], [2]].map(|x| op::reduce(x.to_vec(), ReduceOp::Sum, 0))).map(drop)
    }),
    ("scan", |group| group.scan(&mut [1], ReduceOp::Sum)),
    ("exclusive_scan", |group| group.exclusive_scan(&mut [1], ReduceOp::Sum)),
    ("all_gather", |group| group.all_gather(&[1], &mut [0; 3])),
    ("all_gather_in_place", |group| group.all_gather_in_place(&mut [0; 3])),
    ("all_gather of a list", |group| {
        group.run([[1], [2]].map(|x| op::all_gather(x.to_vec(), vec![0; 3]))).map(drop)
    }),
    ("all_gather_v", |group| group.all_gather_v(&[1], &mut [0; 3], &[1, 1, 1])),
    ("reduce_scatter", |group| group.reduce_scatter(&[1; 3], &mut [0], ReduceOp::Sum)),
    ("reduce_scatter_in_place", |group| group.reduce_scatter_in_place(&mut [0; 3], ReduceOp::Sum)),
    ("reduce_scatter of a list", |group| {
        group.run([[1; 3], [2; 3]].map(|x| op::reduce_scatter(x.to_vec(), vec![0], ReduceOp::Sum))).map(drop)
    }),
    ("reduce_scatter_v", |group| group.reduce_scatter_v(&[1; 3], &mut [0], &[1, 1, 1], ReduceOp::Sum)),
    ("gather", |group| group.gather(&[1], &mut [0; 3], 0)),
    ("gather_v", |group| group.gather_v(&[1], &mut [0; 3], &[1, 1, 1], 0)),
    ("scatter", |group| group.scatter(&[], &mut [0], ABSENT)),
    ("scatter_v", |group| group.scatter_v(&[], &mut [0], &[], ABSENT)),
    ("all_to_all", |group| group.all_to_all(&[1; 3], &mut [0; 3])),
    ("all_to_all_v", |group| group.all_to_all_v((&[1; 3], &[1, 1, 1]), (&mut [0; 3], &[1, 1, 1]))),
    ("broadcast_object", |group| group.broadcast_object::<String>(None, ABSENT).map(drop)),
    ("all_gather_object", |group| group.all_gather_object(&"x".to_owned()).map(drop)),
    ("gather_object", |group| group.gather_object(&"x".to_owned(), 0).map(drop)),
    ("scatter_object", |group| group.scatter_object::<String>(None, ABSENT).map(drop)),
    ("recv", |group| group.recv(&mut [0], ABSENT, 0).map(drop)),
    ("send, long", |group| group.send(&[0_u8; 100_000], ABSENT, 0)),
    ("probe", |group| group.probe(Some(ABSENT), 0).map(drop)),
    ("send and recv", |group| group.run((op::send(&[1], ABSENT), op::recv(&mut [0], ABSENT))).map(drop)),
    ("subgroup", |group| group.subgroup(&[0, 1]).map(drop)),
    ("split", |group| group.split(Some(0), 0).map(drop)),
];

/// Checks that an operation, begun at `start`, timed out in time and named only the absent rank.
fn check(name: &str, start: Instant, result: Result<(), CommError>) {
    let error = result.unwrap_err();
    let CommError::Timeout { missing, after, .. } = &error else { panic!("{name}: {error}") };
    assert_eq!((missing.as_slice(), *after), (&[ABSENT][..], TIMEOUT), "{name}: {error}");
    let took = start.elapsed();
    assert!(took < TIMEOUT + MARGIN, "{name}: {took:?}");
}

/// Runs `body` on ranks 0 and 1 of a group of three; rank 2 is alive and makes no call.
fn run_without_rank_2(body: impl Fn(&Group) + Sync) {
    let done = TimedBarrier::new(3);
    run_ranks_together(3, |group| {
        if group.rank() != ABSENT {
            body(&group);
        }
        done.wait();
    });
}

#[test]
fn every_operation_times_out_and_names_missing_ranks() {
    std::thread::scope(|scope| {
        for (name, operation) in OPERATIONS {
            scope.spawn(move || {
                run_without_rank_2(|group| {
                    let (limited, start) = (group.with_timeout(TIMEOUT), Instant::now());
                    // A rank that need not wait in the operation hears of the timeout with its next call.
                    check(name, start, operation(&limited).and_then(|()| limited.barrier()));
                    assert!(start.elapsed() >= TIMEOUT / 2, "{name}");
                });
            });
        }
        scope.spawn(|| {
            run_without_rank_2(|group| {
                let (limited, start) = (group.with_timeout(TIMEOUT), Instant::now());
                let error = limited.recv_any(&mut [0], 0).unwrap_err();
                // Any rank could have sent.
                let CommError::Timeout { missing, .. } = &error else { panic!("{error}") };
                assert!(missing.contains(&ABSENT) && start.elapsed() < TIMEOUT + MARGIN, "{error}");
            });
        });
        scope.spawn(|| {
            run_without_rank_2(|group| {
                let (limited, start) = (group.with_timeout(TIMEOUT), Instant::now());
                check("mesh", start, Mesh::new(&limited, &[("x", 3)]).map(drop));
            });
        });
    });
}

#[test]
fn timeout_of_a_nonblocking_operation_starts_at_submission() {
    run_without_rank_2(|group| {
        let (limited, start) = (group.with_timeout(TIMEOUT), Instant::now());
        let work = limited.start(op::all_reduce(vec![1; 1000], ReduceOp::Sum)).unwrap();
        let (done, is_done) = channel();
        work.on_complete(move || done.send(()).unwrap());
        // No thread waits for the operation.
        is_done.recv_timeout(LONG).unwrap();
        check("all_reduce", start, work.wait().map(drop));
    });
}

#[test]
fn parts_of_one_call_share_its_timeout() {
    // Two thirds of this exceed the margin for a busy machine.
    let timeout = Duration::from_secs(6);
    run_ranks_together(2, |group| {
        if group.rank() == 0 {
            let start = Instant::now();
            let error = group.with_timeout(timeout).all_gather_object(&7_u8).unwrap_err();
            assert!(matches!(&error, CommError::Timeout { missing, after, .. }
                if *missing == [1] && *after == timeout));
            assert!(start.elapsed() < timeout * 3 / 2, "6 s in all, but {:?}", start.elapsed());
        } else {
            // The first part, the sizes, comes late; the second never. If each part had the whole timeout, it
            // would take 10 s.
            std::thread::sleep(timeout * 2 / 3);
            group.all_gather(&[1_u64], &mut [0; 2]).unwrap();
            let error = group.recv(&mut [0], 0, 0).unwrap_err();
            assert!(matches!(error, CommError::Timeout { .. }), "{error}");
        }
    });
}

#[test]
fn default_timeout_is_half_an_hour() {
    let store = std::sync::Arc::new(convoke_store::MemoryStore::new());
    let group = Group::new(store, 0, 1, GroupOptions::default()).unwrap();
    assert_eq!(group.timeout(), Duration::from_secs(30 * 60));
    assert_eq!(group.with_timeout(TIMEOUT).timeout(), TIMEOUT);
    group.with_timeout(Duration::MAX).barrier().unwrap();
}

#[test]
fn monitored_barrier_names_all_missing_ranks_on_every_rank() {
    let timeout = 2 * TIMEOUT;
    let names = |absent: &[usize]| {
        let gate = TimedBarrier::new(4);
        run_ranks_together(4, |group| {
            let is_absent = absent.contains(&group.rank());
            if is_absent {
                gate.wait();
            } else if group.rank() != absent[0] ^ 1 {
                // One rank is early, and waits longer than the others.
                std::thread::sleep(timeout / 4);
            }
            let start = Instant::now();
            let error = group.monitored_barrier(timeout).unwrap_err();
            if !is_absent {
                assert!(start.elapsed() >= timeout / 2 && start.elapsed() < timeout + MARGIN);
                gate.wait();
            }
            let CommError::Timeout { missing, after, context, .. } = &error else { panic!("{error}") };
            assert_eq!((missing.as_slice(), *after), (absent, timeout), "{error}");
            assert!(context.confirmed, "{error}");
            // The group has ended.
            assert!(matches!(group.barrier(), Err(CommError::Timeout { .. })));
        });
    };
    std::thread::scope(|scope| {
        for absent in [&[2][..], &[1, 3], &[0], &[0, 3], &[0, 1, 2]] {
            scope.spawn(move || names(absent));
        }
    });
}

#[test]
fn monitored_barrier_waits_for_late_ranks_in_collective_order() {
    for world in 1..=4 {
        run_ranks(world, |group| {
            if group.rank() == world / 2 {
                std::thread::sleep(Duration::from_millis(200));
            }
            group.monitored_barrier(LONG).unwrap();
            for round in 0..100 {
                let mut sum = [round];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [round * world as i64]);
                group.monitored_barrier(LONG).unwrap();
                if round % 10 == 0 {
                    group.barrier().unwrap();
                }
            }
            // A rank that has passed the barrier may leave at once.
            group.monitored_barrier(LONG).unwrap();
        });
    }
}

#[test]
fn monitored_barrier_completes_only_after_all_ranks_enter() {
    // In large groups not all pairs have a data connection.
    for (world, rounds) in [(4, 200), (20, 5)] {
        let come = AtomicUsize::new(0);
        run_ranks(world, |group| {
            for round in 1..=rounds {
                come.fetch_add(1, Ordering::SeqCst);
                group.monitored_barrier(LONG).unwrap();
                assert!(come.load(Ordering::SeqCst) >= world * round);
            }
        });
    }
}

#[test]
fn monitored_barrier_fails_like_other_calls() {
    // Another call is a mismatch, on all ranks.
    run_ranks_together(3, |group| {
        let result = if group.rank() == 1 {
            group.all_reduce(&mut [1], ReduceOp::Sum)
        } else {
            group.monitored_barrier(LONG)
        };
        let error = result.unwrap_err();
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("monitored_barrier()"), "{error}");
    });
    // A rank that has left will not come.
    run_ranks_together(3, |group| {
        if group.rank() != 1 {
            let error = group.monitored_barrier(LONG).unwrap_err();
            assert!(matches!(error, CommError::PeerLost { rank: 1, how: LossReason::Left, .. }), "{error}");
        }
    });
}
