//! Every failure of a call ends alike on all ranks: they report one cause with a name, and none hangs.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    CommError, Group, GroupOptions, LONG, ReduceOp, SHORT, TimedBarrier, op, run_ranks, run_ranks_together,
    run_with_options,
};
use convoke_comm::LossReason;

fn all_reduce<T: convoke_comm::Element + Default>(
    group: &Group,
    count: usize,
    op: ReduceOp,
) -> Result<(), CommError> {
    group.all_reduce(&mut vec![T::default(); count], op)
}

#[test]
fn all_ranks_name_an_absent_rank_at_the_deadline() {
    for world in [2, 4] {
        for who in 0..world {
            let gate = TimedBarrier::new(world);
            let timeout = SHORT;
            let errors = run_ranks(world, |group| {
                group.barrier().unwrap();
                if group.rank() == who {
                    gate.wait();
                    // The rank hears of the failure with its next call.
                    group.barrier().unwrap_err()
                } else {
                    let start = Instant::now();
                    let error =
                        all_reduce::<f32>(&group.with_timeout(timeout), 100_000, ReduceOp::Sum).unwrap_err();
                    assert!(start.elapsed() >= timeout / 2, "{error}");
                    gate.wait();
                    error
                }
            });
            for error in errors {
                let CommError::Timeout { missing, after, .. } = &error else { panic!("{error}") };
                assert_eq!(
                    (missing.as_slice(), *after, error.suspect_rank()),
                    (&[who][..], timeout, Some(who)),
                    "{error}"
                );
                assert!(error.context().unwrap().confirmed);
            }
        }
    }
}

#[test]
fn receive_without_a_send_times_out_naming_the_sender() {
    let errors = run_ranks(3, |group| match group.rank() {
        0 => group.with_timeout(SHORT).recv(&mut [0], 2, 0).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn last_rank_of_a_wait_chain_is_named() {
    for world in [3, 5] {
        let gate = TimedBarrier::new(world);
        let errors = run_ranks(world, |group| {
            let (rank, last) = (group.rank(), world - 1);
            // Each rank waits for the next; the last one computes.
            let waited = (rank != last).then(|| {
                let timeout = if rank == 0 { SHORT } else { LONG };
                group.with_timeout(timeout).recv(&mut [0_u8], rank + 1, 0).unwrap_err()
            });
            gate.wait();
            waited.unwrap_or_else(|| group.barrier().unwrap_err())
        });
        for error in errors {
            assert!(
                matches!(&error, CommError::Timeout { missing, .. } if *missing == [world - 1]),
                "{error}"
            );
        }
    }
}

#[test]
fn computing_rank_with_pending_messages_is_named() {
    let gate = TimedBarrier::new(3);
    let errors = run_ranks(3, |group| {
        // Rank 2 has asked for a message of rank 1 early; both compute, and only rank 2 is waited for.
        let asked = (group.rank() == 2).then(|| group.start(op::recv(vec![0_u8], 1)).unwrap());
        let waited =
            (group.rank() == 0).then(|| group.with_timeout(SHORT).recv(&mut [0_u8], 2, 0).unwrap_err());
        gate.wait();
        let error = waited.or_else(|| asked.map(|asked| asked.wait().unwrap_err()));
        error.unwrap_or_else(|| group.barrier().unwrap_err())
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn unreceived_large_send_times_out_naming_the_receiver() {
    let errors = run_ranks(2, |group| match group.rank() {
        0 => group.with_timeout(SHORT).send(&vec![0_u8; 300_000], 1, 0).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [1]), "{error}");
    }
}

#[test]
fn failed_group_always_returns_the_same_cause() {
    run_ranks(2, |group| {
        group.barrier().unwrap();
        if group.rank() == 0 {
            group.abort("first");
            group.abort("second");
        }
        for _ in 0..3 {
            let error = group.barrier().unwrap_err();
            assert!(matches!(&error, CommError::Aborted { reason, .. } if reason == "first"), "{error}");
            let error = group.send(&[1], 1 - group.rank(), 0).unwrap_err();
            assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        }
    });
}

#[test]
fn only_calls_that_need_a_departed_rank_fail() {
    run_ranks(3, |group| {
        group.barrier().unwrap();
        match group.rank() {
            2 => {
                group.send(&[7_i32], 0, 0).unwrap();
                drop(group);
            }
            rank => {
                // Messages that it sent before it left still arrive; the others can still communicate.
                if rank == 0 {
                    let mut last = [0_i32];
                    group.recv(&mut last, 2, 0).unwrap();
                    assert_eq!(last, [7]);
                    group.send(&[1_u8], 1, 0).unwrap();
                    group.recv(&mut [0_u8], 1, 0).unwrap();
                } else {
                    group.recv(&mut [0_u8], 0, 0).unwrap();
                    group.send(&[1_u8], 0, 0).unwrap();
                }
                let error = group.barrier().unwrap_err();
                assert!(
                    matches!(error, CommError::PeerLost { rank: 2, how: LossReason::Left, .. }),
                    "{error}"
                );
            }
        }
    });
}

#[test]
fn panicked_rank_is_lost_at_once_to_all_ranks() {
    run_ranks(3, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _last_handle = group;
                panic!("on purpose");
            }));
            assert!(panicked.is_err());
            return;
        }
        let start = Instant::now();
        // Neither call needs rank 1.
        let error = group.recv(&mut [0_u8], 2 - group.rank(), 0).unwrap_err();
        assert!(matches!(error, CommError::PeerLost { rank: 1, how: LossReason::Panicked, .. }), "{error}");
        assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
    });
}

#[test]
fn destroyed_group_says_goodbye_and_all_handles_refuse_calls() {
    run_ranks_together(3, |group| {
        let pair = group.subgroup(&[2, 0]).unwrap();
        group.barrier().unwrap();
        if group.rank() == 2 {
            let other = group.clone();
            group.destroy();
            group.destroy();
            let destroyed = |result: Result<(), CommError>| {
                let error = result.unwrap_err();
                assert!(
                    matches!(&error, CommError::Destroyed { group, .. } if *group == other.name()),
                    "{error}"
                );
            };
            destroyed(other.barrier());
            destroyed(other.send(&[1], 0, 0));
            destroyed(other.try_probe(None, 0).map(drop));
            destroyed(other.all_gather_object(&1).map(drop));
            destroyed(other.start(op::all_reduce(vec![1], ReduceOp::Sum)).map(drop));
            destroyed(other.subgroup(&[0]).map(drop));
            destroyed(other.shrink(LONG).map(drop));
        } else {
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, CommError::PeerLost { rank: 2, how: LossReason::Left, .. }), "{error}");
        }
        // Subgroups stay usable.
        pair.into_iter().for_each(|pair| pair.barrier().unwrap());
    });
    run_ranks(1, |group| {
        group.destroy();
        assert!(matches!(group.barrier(), Err(CommError::Destroyed { .. })));
    });
}

#[test]
fn group_destruction_completes_pending_operations() {
    run_ranks(2, |group| {
        let (mut message, large) = (vec![0_u8; 200_000], vec![1_u8; 200_000]);
        if group.rank() == 0 {
            let sum = group.start(op::all_reduce(vec![1; 100_000], ReduceOp::Sum)).unwrap();
            let sent = group.start(op::send(large, 1)).unwrap();
            // No thread waits for this send.
            drop(group.start(op::send(vec![2_u8; 200_000], 1).tag(1)).unwrap());
            group.destroy();
            assert!(sum.is_completed() && sent.is_completed());
            assert_eq!(sum.wait().unwrap(), [2; 100_000]);
            sent.wait().unwrap();
        } else {
            group.recv(&mut message, 0, 1).unwrap();
            assert_eq!(message, [2; 200_000]);
            group.recv(&mut message, 0, 0).unwrap();
            assert_eq!(message, large);
            let mut sum = vec![1; 100_000];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2; 100_000]);
        }
    });
    // The group may also have failed; other threads that call meanwhile are refused.
    run_ranks_together(2, |group| {
        if group.rank() == 0 {
            let work = group.start(op::recv(vec![0_u8; 1], 1)).unwrap();
            std::thread::scope(|scope| {
                let called = scope.spawn(|| {
                    loop {
                        if let Err(error) = group.try_probe(Some(1), 7) {
                            return error;
                        }
                    }
                });
                group.destroy();
                let error = called.join().unwrap();
                assert!(matches!(error, CommError::Destroyed { .. } | CommError::Aborted { .. }), "{error}");
            });
            assert!(matches!(work.wait(), Err(CommError::Aborted { by: 1, .. })));
        } else {
            group.abort("no message");
        }
    });
}

#[test]
fn different_settings_are_refused_and_named_by_all_ranks() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let algorithms = if rank == 1 { "all_reduce:ring" } else { "" };
                let options = common::options().algorithms(algorithms.parse().unwrap());
                let error = Group::new(store, rank, 3, options).unwrap_err();
                let text = error.to_string();
                assert!(matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [1]), "{text}");
                assert!(text.contains("CONVOKE_ALGO") && text.contains("all_reduce:ring"), "{text}");
            });
        }
    });
}

#[test]
fn different_tokens_are_an_error_instead_of_a_hang() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3_usize {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let token = convoke_env::Token::new(vec![u8::from(rank == 2)]);
                let error = Group::new(store, rank, 3, common::options().token(token)).unwrap_err();
                assert!(matches!(error, CommError::Unauthorized { .. }), "rank {rank}: {error}");
            });
        }
    });
}

#[test]
fn equal_tokens_connect() {
    let token = convoke_env::Token::random().unwrap();
    run_with_options(3, GroupOptions::default().token(token), |group| group.barrier().unwrap());
}

#[test]
fn all_ranks_name_a_rank_that_does_not_join() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in [0, 1, 3] {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let options = common::options().init_timeout(SHORT);
                let error = Group::new(store, rank, 4, options).unwrap_err();
                assert!(matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [2]), "{error}");
                assert!(error.to_string().contains("rank(s) 2 of 4 did not join"), "{error}");
            });
        }
    });
    let error = Group::new(store, 1, 2, common::options().name("b").init_timeout(Duration::from_millis(50)));
    assert_eq!(error.unwrap_err().suspect_rank(), Some(0));
}

#[test]
fn stale_store_keys_of_a_crashed_round_are_ignored() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    let soon = Instant::now() + LONG;
    // The state that rank 0 and the complete table of an earlier round would have left.
    let stale = "00000000000000000000000000000001";
    let announced = format!("{{\"generation\":\"{stale}\",\"given\":false}}");
    store.set(b"convoke/default/generation", announced.as_bytes(), soon).unwrap();
    let record = |rank: usize| {
        format!(
            "{{\"version\":7,\"rank\":{rank},\"size\":2,\"address\":\"127.0.0.1:1\",\"host\":\"\",\"pid\":1,\
             \"tuning\":\"\",\"token\":false,\"memory\":true}}"
        )
    };
    let table = serde_json::to_vec(&[record(0), record(1)]).unwrap();
    store.set(format!("convoke/default/{stale}/table").as_bytes(), &table, soon).unwrap();
    std::thread::scope(|scope| {
        let late = Arc::clone(&store);
        let second = scope.spawn(move || Group::new(late, 1, 2, common::options()).unwrap());
        // Rank 1 is misled first; then rank 0 comes.
        let key = format!("convoke/default/{stale}/rank/1");
        store.wait(&[key.as_bytes()], soon).unwrap();
        let first = Group::new(Arc::clone(&store), 0, 2, common::options()).unwrap();
        let second = second.join().unwrap();
        assert_eq!(first.generation(), second.generation());
        let keys = store.list_keys(soon).unwrap();
        let left: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        assert_eq!(left, [format!("convoke/default/{stale}/table")], "nothing of ours stays");
    });
}
