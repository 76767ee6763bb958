//! `abort` from another thread ends every kind of call that is blocked, on all ranks.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{CommError, Group, ReduceOp, TimedBarrier, op, run_ranks};
use convoke_testkit::Thread;

/// The longest time that a blocked call may take to end; in practice it takes microseconds.
const PROMPT_LIMIT: Duration = Duration::from_secs(5);

type Call = fn(&Group) -> Result<(), CommError>;

/// Calls in which rank 0 waits for rank 2, which makes no call.
const BLOCKED: &[(&str, Call)] = &[
    ("barrier", Group::barrier),
    ("all_reduce, small", |group| group.all_reduce(&mut [1], ReduceOp::Sum)),
    ("all_reduce, direct", |group| group.all_reduce(&mut vec![1; 40_000], ReduceOp::Sum)),
    ("all_reduce, ring", |group| group.all_reduce(&mut vec![1; 1 << 20], ReduceOp::Sum)),
    ("broadcast, tree", |group| group.broadcast(&mut [0], 2)),
    ("broadcast, chain", |group| group.broadcast(&mut vec![0; 1 << 20], 2)),
    ("reduce", |group| group.reduce(&mut [0], ReduceOp::Sum, 0)),
    ("scan", |group| group.scan(&mut [0], ReduceOp::Sum).and_then(|()| group.barrier())),
    ("all_gather", |group| group.all_gather(&[0], &mut [0; 3])),
    ("reduce_scatter", |group| group.reduce_scatter(&[0; 3], &mut [0], ReduceOp::Sum)),
    ("gather", |group| group.gather(&[0], &mut [0; 3], 0)),
    ("scatter", |group| group.scatter(&[0; 3], &mut [0], 2)),
    ("all_to_all", |group| group.all_to_all(&[0; 3], &mut [0; 3])),
    ("all_gather_v", |group| group.all_gather_v(&vec![0; group.rank()], &mut [0; 3], &[0, 1, 2])),
    ("gather_v", |group| group.gather_v(&vec![0; group.rank()], &mut [0; 3], &[0, 1, 2], 0)),
    ("all_gather_object", |group| group.all_gather_object(&"object".to_owned()).map(drop)),
    ("broadcast_object", |group| group.broadcast_object::<String>(None, 2).map(drop)),
    ("subgroup", |group| group.subgroup(&[0, 1]).map(drop)),
    ("split", |group| group.split(Some(1), 0).map(drop)),
    ("recv", |group| group.recv(&mut [0], 2, 0).map(drop)),
    ("recv_any", |group| group.recv_any(&mut [0], 0).map(drop)),
    ("send of a large message", |group| group.send(&vec![0; 1 << 20], 2, 0)),
    ("send and recv", |group| group.run((op::send(&[0], 1 - group.rank()), op::recv(&mut [0], 2))).map(drop)),
    ("probe", |group| group.probe(Some(2), 0).map(drop)),
    ("a nonblocking call that is waited for", |group| group.start(op::recv(vec![0], 2))?.wait().map(drop)),
    ("a scope", |group| group.scope(|scope| scope.start(op::recv(vec![0], 2))?.wait().map(drop))),
];

#[test]
fn an_abort_from_another_thread_ends_every_kind_of_call() {
    for (name, call) in BLOCKED {
        let gate = TimedBarrier::new(3);
        let errors = run_ranks(3, |group| {
            group.barrier().unwrap();
            gate.wait();
            match group.rank() {
                0 => std::thread::scope(|scope| {
                    let (tell, told) = channel();
                    let group = &group;
                    let blocked = scope.spawn(move || {
                        tell.send(Thread::current()).unwrap();
                        (call(group).unwrap_err(), Instant::now())
                    });
                    told.recv().unwrap().wait_until_asleep();
                    let at = Instant::now();
                    group.abort("enough");
                    let (error, returned) = blocked.join().unwrap();
                    let took = returned.saturating_duration_since(at);
                    assert!(took < PROMPT_LIMIT, "{name}: {took:?}");
                    gate.wait();
                    error
                }),
                1 => {
                    let error = call(&group).and_then(|()| group.barrier()).unwrap_err();
                    gate.wait();
                    error
                }
                _ => {
                    gate.wait();
                    group.barrier().unwrap_err()
                }
            }
        });
        for (rank, error) in errors.iter().enumerate() {
            let aborted = matches!(error, CommError::Aborted { by: 0, reason, .. } if reason == "enough");
            assert!(aborted, "{name}, rank {rank}: {error}");
        }
    }
}

#[test]
fn first_of_many_aborts_is_the_cause_for_all() {
    let errors = run_ranks(4, |group| {
        let warm = group.barrier();
        group.abort(&format!("rank {}", group.rank()));
        warm.and_then(|()| group.barrier()).unwrap_err()
    });
    let cause = |error: &CommError| match error {
        CommError::Aborted { by, reason, .. } => (*by, reason.clone()),
        other => panic!("{other}"),
    };
    let (by, reason) = cause(&errors[0]);
    assert_eq!(reason, format!("rank {by}"));
    assert!(errors.iter().all(|error| cause(error) == (by, reason.clone())), "{errors:?}");
}
