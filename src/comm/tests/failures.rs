//! Every way in which a call can fail ends the same way on all ranks: one cause, named, no hang.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{CommError, Group, GroupOptions, LONG, ReduceOp, ranks, with_options};
use convoke_comm::{CallKind, Dtype, Loss};

fn all_reduce<T: convoke_comm::Element + Default>(
    group: &Group,
    count: usize,
    op: ReduceOp,
) -> Result<(), CommError> {
    group.all_reduce(&mut vec![T::default(); count], op)
}

#[test]
fn calls_that_differ_are_a_mismatch_on_all_ranks() {
    type Odd = fn(&Group) -> Result<(), CommError>;
    let odd: [(&str, Odd); 6] = [
        ("another operation", |group| all_reduce::<f32>(group, 1000, ReduceOp::Max)),
        ("another type", |group| all_reduce::<i32>(group, 1000, ReduceOp::Sum)),
        ("another count", |group| all_reduce::<f32>(group, 1001, ReduceOp::Sum)),
        ("a count of another algorithm", |group| all_reduce::<f32>(group, 1_000_000, ReduceOp::Sum)),
        ("a barrier", Group::barrier),
        ("a broadcast", |group| group.broadcast(&mut [0.0_f32; 1000], 1)),
    ];
    for (name, odd) in odd {
        for world in 2..=5 {
            for who in [0, world - 1] {
                let errors = ranks(world, |group| {
                    // Who is slow may hear of the mismatch in this one already.
                    let warm = all_reduce::<f32>(&group, 10, ReduceOp::Sum);
                    let result = warm.and_then(|()| {
                        if group.rank() == who {
                            odd(&group)
                        } else {
                            all_reduce::<f32>(&group, 1000, ReduceOp::Sum)
                        }
                    });
                    // A root that has returned hears of it with its next call.
                    result.and_then(|()| group.barrier()).unwrap_err()
                });
                for error in &errors {
                    let CommError::Mismatch { rank, by, .. } = error else {
                        panic!("{name}, rank {who} of {world}: {error}");
                    };
                    assert!(*rank == who || *by == who, "{name}, rank {who} of {world}: {error}");
                    assert_eq!(
                        error.to_string().split("; group").next(),
                        errors[0].to_string().split("; group").next()
                    );
                }
            }
        }
    }
}

#[test]
fn a_mismatch_is_found_where_no_data_flows_between_the_ranks_that_differ() {
    let start = Instant::now();
    // Each waits for its root, and nobody sends.
    let errors = ranks(3, |group| group.broadcast(&mut [0_u8], (group.rank() + 1) % 3).unwrap_err());
    for error in errors {
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
    }
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn a_mismatch_names_both_calls() {
    let errors = ranks(2, |group| {
        if group.rank() == 0 { group.barrier() } else { all_reduce::<f64>(&group, 3, ReduceOp::Min) }
            .unwrap_err()
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
fn messages_of_another_length_or_type_are_a_mismatch() {
    for early in [false, true] {
        for large in [false, true] {
            let count = if large { 100_000 } else { 100 };
            let errors = ranks(2, |group| {
                if group.rank() == 0 {
                    let sent = group.send(&vec![1.0_f32; count], 1, 5);
                    sent.and_then(|()| group.barrier()).unwrap_err()
                } else {
                    if early {
                        // Behind the other message on the same connection.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    group.recv(&mut vec![0.0_f32; count + 1], 0, 5).unwrap_err()
                }
            });
            assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { .. })), "{errors:?}");
        }
    }
}

#[test]
fn whoever_does_not_call_is_named_by_all_at_the_deadline() {
    for world in [2, 4] {
        for who in 0..world {
            let gate = Barrier::new(world);
            let timeout = Duration::from_millis(400);
            let errors = ranks(world, |group| {
                group.barrier().unwrap();
                if group.rank() == who {
                    gate.wait();
                    // It hears of it with its next call.
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
                    (missing.as_slice(), *after, error.blame()),
                    (&[who][..], timeout, Some(who)),
                    "{error}"
                );
                assert!(error.place().unwrap().confirmed);
            }
        }
    }
}

#[test]
fn a_receive_without_a_send_times_out_naming_the_sender() {
    let errors = ranks(3, |group| match group.rank() {
        0 => group.with_timeout(Duration::from_millis(200)).recv(&mut [0], 2, 0).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn a_large_send_that_nobody_receives_times_out_naming_the_receiver() {
    let errors = ranks(2, |group| match group.rank() {
        0 => group.with_timeout(Duration::from_millis(200)).send(&[0_u8; 100_000], 1, 0).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    });
    for error in errors {
        assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [1]), "{error}");
    }
}

#[test]
fn an_abort_reaches_everybody_also_in_the_middle_of_a_call() {
    let errors = ranks(3, |group| {
        group.barrier().unwrap();
        let waiting = Arc::new(Barrier::new(2));
        std::thread::scope(|scope| {
            if group.rank() == 2 {
                // Another thread of this rank waits in a call as well.
                let caller = scope.spawn(|| {
                    waiting.wait();
                    group.recv(&mut [0], 0, 1).unwrap_err()
                });
                waiting.wait();
                group.abort("enough");
                caller.join().unwrap()
            } else {
                group.barrier().unwrap_err()
            }
        })
    });
    for error in errors {
        assert!(matches!(&error, CommError::Aborted { by: 2, reason, .. } if reason == "enough"), "{error}");
    }
}

#[test]
fn a_failed_group_stays_failed_with_the_same_cause() {
    ranks(2, |group| {
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
fn who_left_in_good_order_is_missed_only_by_calls_that_need_it() {
    ranks(3, |group| {
        group.barrier().unwrap();
        match group.rank() {
            2 => {
                group.send(&[7_i32], 0, 0).unwrap();
                drop(group);
            }
            rank => {
                // What it sent before it left still arrives; the others go on among themselves.
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
                assert!(matches!(error, CommError::PeerLost { rank: 2, how: Loss::Left, .. }), "{error}");
            }
        }
    });
}

#[test]
fn different_settings_are_refused_by_all_ranks_with_their_names() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let options = common::options().algorithms(if rank == 1 { "all_reduce:ring" } else { "" });
                let error = Group::new(store, rank, 3, options).unwrap_err();
                let text = error.to_string();
                assert!(matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [1]), "{text}");
                assert!(text.contains("CONVOKE_ALGO") && text.contains("all_reduce:ring"), "{text}");
            });
        }
    });
}

#[test]
fn different_tokens_are_an_error_and_not_a_hang() {
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
    with_options(3, GroupOptions::default().token(token), |group| group.barrier().unwrap());
}

#[test]
fn who_does_not_join_is_named_by_all_others() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in [0, 1, 3] {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let options = common::options().init_timeout(Duration::from_millis(300));
                let error = Group::new(store, rank, 4, options).unwrap_err();
                assert!(matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [2]), "{error}");
                assert!(error.to_string().contains("rank(s) 2 of 4 did not come"), "{error}");
            });
        }
    });
    let error = Group::new(store, 1, 2, common::options().name("b").init_timeout(Duration::from_millis(50)));
    assert_eq!(error.unwrap_err().blame(), Some(0));
}

#[test]
fn what_a_crashed_round_left_in_the_store_misleads_nobody() {
    let store: Arc<dyn convoke_store::Store> = Arc::new(convoke_store::MemoryStore::new());
    let soon = Instant::now() + LONG;
    // As rank 0 and a whole table of an earlier round would have left it.
    let stale = "00000000000000000000000000000001";
    let announced = format!("{{\"generation\":\"{stale}\",\"given\":false}}");
    store.set(b"convoke/default/generation", announced.as_bytes(), soon).unwrap();
    let record = |rank: usize| {
        format!(
            "{{\"version\":1,\"rank\":{rank},\"size\":2,\"address\":\"127.0.0.1:1\",\"host\":\"\",\"pid\":1,\
             \"tuning\":\"\",\"token\":false}}"
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
