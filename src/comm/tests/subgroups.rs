//! Groups of some of a group's ranks, over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Group, ReduceOp, TimedBarrier, op, run_on_hosts, run_ranks, run_with_options};
use convoke_comm::algorithms::{Algorithms, AllReduce};
use convoke_comm::{CommError, GroupOptions};

/// The ranks of `group` in the first group, gathered from its members.
fn members(group: &Group, origin: usize) -> Vec<usize> {
    let mut all = vec![usize::MAX as u64; group.size()];
    group.all_gather(&[origin as u64], &mut all).unwrap();
    all.into_iter().map(|rank| rank as usize).collect()
}

#[test]
fn subgroups_keep_the_given_rank_order_and_run_concurrently() {
    run_ranks(5, |world| {
        let me = world.rank();
        let odd = world.subgroup(&[3, 1]).unwrap();
        let even = world.subgroup(&[0, 2, 4]).unwrap();
        assert_eq!((odd.is_some(), even.is_some()), (me % 2 == 1, me % 2 == 0));
        let mine = odd.or(even).unwrap();
        assert_eq!(mine.global_ranks(), if me % 2 == 1 { &[3, 1][..] } else { &[0, 2, 4] });
        assert_eq!((mine.global_rank(mine.rank()), mine.group_rank(me)), (Some(me), Some(mine.rank())));
        assert_eq!((mine.global_rank(3), mine.group_rank(if me % 2 == 1 { 0 } else { 1 })), (None, None));
        for round in 0..20 {
            let mut sum = [me as i64 + round];
            mine.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            let want: i64 = mine.global_ranks().iter().map(|&rank| rank as i64 + round).sum();
            assert_eq!(sum[0], want);
            assert_eq!(members(&mine, me), mine.global_ranks());
            world.all_reduce(&mut sum, ReduceOp::Max).unwrap();
        }
        // A subgroup of a subgroup still knows where it comes from, and outlives its parents' handles.
        let last = mine.size() - 1;
        let inner = mine.subgroup(&[last]).unwrap();
        assert_eq!(inner.is_some(), mine.rank() == last);
        let pair = mine.subgroup(&[last, 0]).unwrap();
        let origin = [mine.global_ranks()[last], mine.global_ranks()[0]];
        drop((mine, world));
        if let Some(pair) = pair {
            assert_eq!(pair.global_ranks(), origin);
            assert_eq!(members(&pair, me), origin);
        }
    });
}

#[test]
fn split_groups_by_color_and_orders_by_key() {
    run_ranks(6, |world| {
        let me = world.rank();
        // Ranks 0, 2, 4 backwards; 1 and 3; 5 nowhere.
        let color = [Some(0), Some(9), Some(0), Some(9), Some(0), None][me];
        let key = if me % 2 == 0 { -(me as i64) } else { 7 };
        let part = world.split(color, key).unwrap();
        match part {
            None => assert_eq!(me, 5),
            Some(part) => {
                let want: &[usize] = if me % 2 == 0 { &[4, 2, 0] } else { &[1, 3] };
                assert_eq!(part.global_ranks(), want);
                assert_eq!(members(&part, me), want);
                let name = part.name().to_owned();
                let again = part.split(Some(1), 0).unwrap().unwrap();
                assert_eq!(again.global_ranks(), want);
                assert_ne!(again.name(), name);
            }
        }
        world.barrier().unwrap();
    });
}

#[test]
fn invalid_or_differing_rank_lists_are_refused_without_group_failure() {
    run_ranks(3, |world| {
        let invalid = |result: Result<Option<Group>, CommError>, what: &str| {
            let Err(CommError::InvalidArgument(text)) = &result else { panic!("{:?}", result.is_ok()) };
            assert!(text.contains(what), "{text}");
        };
        invalid(world.subgroup(&[]), "name at least one rank, and each once");
        invalid(world.subgroup(&[1, 1]), "name at least one rank, and each once");
        invalid(world.subgroup(&[0, 3]), "rank 3: ranks are 0 to 2");
        let mine: &[usize] = if world.rank() == 2 { &[0, 2] } else { &[0, 1] };
        let other = if world.rank() == 2 {
            "rank 0 creates another subgroup"
        } else {
            "rank 2 creates another subgroup"
        };
        invalid(world.subgroup(mine), other);
        assert!(world.subgroup(&[2, 1, 0]).unwrap().is_some());
    });
}

#[test]
fn subgroups_with_differing_names_or_kinds_are_not_mixed() {
    run_ranks(3, |world| {
        let odd = world.rank() == 1;
        let refused = |result: Result<Option<Group>, CommError>| {
            let Err(CommError::InvalidArgument(text)) = &result else { panic!("{:?}", result.is_ok()) };
            assert!(text.contains(if odd { "rank 0 creates" } else { "rank 1 creates" }), "{text}");
        };
        refused(world.with_subgroup_name(if odd { "tp" } else { "dp" }).subgroup(&[0, 1, 2]));
        refused(world.with_subgroup_name(if odd { "tp" } else { "dp" }).split(Some(0), 0));
        refused(if odd { world.subgroup(&[0, 1, 2]) } else { world.split(Some(0), 0) });
        let named = world.with_subgroup_name("dp").subgroup(&[0, 1, 2]).unwrap().unwrap();
        assert!(named.name().contains("dp"), "{}", named.name());
    });
    // Other collectives do not match a split either.
    run_ranks(2, |world| {
        let error = if world.rank() == 0 {
            world.split(Some(0), 0).map(drop).unwrap_err()
        } else {
            world.all_gather(&[0_i64; 3], &mut [0; 6]).unwrap_err()
        };
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
    });
}

/// The results on ranks 0 to 3 of a sum that depends on the order of adding.
fn sums(group: &Group) -> Vec<u32> {
    let mut buf: Vec<f32> = (0..64).map(|index| 1.0 / (1 + index + 64 * group.rank()) as f32).collect();
    group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
    buf.into_iter().map(f32::to_bits).collect()
}

fn ring() -> Algorithms {
    Algorithms::new().all_reduce(AllReduce::Ring)
}

#[test]
fn subgroups_inherit_the_algorithms_of_their_handle() {
    let rings = run_with_options(4, GroupOptions::default().algorithms(ring()), |world| sums(&world));
    run_ranks(4, |world| {
        let all = [0, 1, 2, 3];
        let ring = world.with_algorithms(ring()).subgroup(&all).unwrap().unwrap();
        assert_eq!(sums(&ring), rings[0]);
        // Subgroups inherit the algorithms; without a choice, the table chooses, as in the world.
        let inner = ring.subgroup(&all).unwrap().unwrap();
        let plain = ring.with_algorithms(Algorithms::new()).subgroup(&all).unwrap().unwrap();
        assert_eq!((sums(&inner), sums(&plain)), (rings[0].clone(), sums(&world)));
        assert_ne!(sums(&plain), rings[0], "else this test sees nothing");
    });
}

#[test]
fn ranks_with_different_algorithms_form_no_subgroup() {
    run_ranks(2, |world| {
        let mine = if world.rank() == 1 { ring() } else { Algorithms::new() };
        let error = world.with_algorithms(mine).subgroup(&[0, 1]).map(drop).unwrap_err();
        assert!(matches!(error, CommError::Bootstrap { .. }), "{error}");
        assert!(error.to_string().contains("the choice of algorithms"), "{error}");
        world.barrier().unwrap();
    });
}

#[test]
fn group_lists_the_ranks_on_the_same_host() {
    run_on_hosts(&[1, 0, 1, 2], "", |world| {
        assert_eq!(world.hosts(), [vec![0, 2], vec![1], vec![3]]);
        let part = world.subgroup(&[3, 2, 0]).unwrap();
        assert_eq!(
            part.map(|part| part.hosts().to_vec()),
            (world.rank() != 1).then(|| vec![vec![0], vec![1, 2]])
        );
    });
    run_ranks(1, |world| assert_eq!(world.hosts(), [[0]]));
}

#[test]
fn concurrent_named_subgroups_are_correct_or_an_error() {
    const ROUNDS: usize = 40;
    let made = run_ranks(2, |world| {
        let round = TimedBarrier::new(2);
        std::thread::scope(|scope| {
            let threads = [0, 1].map(|thread| {
                let (mine, round) = (world.with_subgroup_name(["a", "b"][thread]), &round);
                scope.spawn(move || {
                    let try_once = |_| {
                        round.wait();
                        let made = match mine.subgroup(&[0, 1]) {
                            Ok(group) => {
                                // The group's other member is the other rank's thread of this number.
                                assert_eq!(members(&group.unwrap(), thread), [thread, thread]);
                                true
                            }
                            Err(CommError::InvalidArgument(_)) => false,
                            Err(error) => panic!("{error}"),
                        };
                        // The next round begins when both are done, also with errors.
                        round.wait();
                        made
                    };
                    (0..ROUNDS).map(try_once).collect::<Vec<_>>()
                })
            });
            threads.map(|thread| thread.join().unwrap())
        })
    });
    assert_eq!(made[0], made[1], "both ranks agree on what was made");
}

#[test]
fn subgroup_failure_does_not_affect_other_groups() {
    run_ranks(4, |world| {
        let half = world.split(Some(world.rank() as u32 / 2), 0).unwrap().unwrap();
        if world.rank() < 2 {
            // When one rank returns from the barrier, the other has its group too.
            let _ = half.barrier();
            half.abort("enough");
            assert!(matches!(half.barrier(), Err(CommError::Aborted { .. })));
        } else {
            half.barrier().unwrap();
        }
        world.barrier().unwrap();
    });
}

/// Runs `body` on ranks that share memory, and on ranks that use connections.
fn run_both_ways(world: usize, body: impl Fn(Group) + Sync) {
    run_ranks(world, &body);
    run_with_options(world, GroupOptions::default().shared_memory(false), &body);
}

#[test]
fn each_failure_of_a_subgroup_leaves_the_others_working() {
    run_both_ways(4, |world| {
        let me = world.rank();
        let pairs = || world.split(Some(me as u32 / 2), 0).unwrap().unwrap();
        let (aborted, late, differing, working) = (pairs(), pairs(), pairs(), pairs());
        let all = world.split(Some(0), 0).unwrap().unwrap();
        std::thread::scope(|scope| {
            // Another thread works in two of the groups while this one fails in the others.
            let worker = scope.spawn(|| {
                for round in 0..200 {
                    let mut sum = [round];
                    working.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    all.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [8 * round]);
                }
            });
            if me % 2 == 0 {
                aborted.abort("enough");
            }
            let error = aborted.barrier().unwrap_err();
            assert!(
                matches!(&error, CommError::Aborted { by: 0, reason, .. } if reason == "enough"),
                "{error}"
            );
            if me % 2 == 0 {
                let error = late.with_timeout(common::SHORT).barrier().unwrap_err();
                assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [1]), "{error}");
            }
            let error = match me % 2 {
                0 => differing.all_reduce(&mut [1], ReduceOp::Sum),
                _ => differing.all_reduce(&mut [1, 2], ReduceOp::Sum),
            };
            let error = error.unwrap_err();
            assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
            // Rank 1 of the pair learns of the timeout with a later call: the data of this one has arrived.
            world.barrier().unwrap();
            let error = late.barrier().and_then(|()| late.barrier()).unwrap_err();
            assert!(matches!(error, CommError::Timeout { .. }), "{error}");
            worker.join().unwrap();
        });
        world.barrier().unwrap();
    });
}

#[test]
fn rank_that_leaves_a_subgroup_still_works_in_the_others() {
    run_both_ways(3, |world| {
        let me = world.rank();
        for round in 0..5 {
            let (left, kept) = (world.split(Some(0), 0).unwrap(), world.split(Some(0), 0).unwrap());
            let (left, kept) = (left.unwrap(), kept.unwrap());
            left.barrier().unwrap();
            if me == round % 3 {
                left.destroy();
            } else {
                let error = left.all_reduce(&mut [1], ReduceOp::Sum).unwrap_err();
                let named = matches!(
                    error,
                    CommError::PeerLost { rank, how: convoke_comm::LossReason::Left, .. } if rank == round % 3
                );
                assert!(named, "{error}");
            }
            kept.barrier().unwrap();
            // A group of the same ranks works although the other one has ended.
            assert_eq!(members(&world.split(Some(0), 0).unwrap().unwrap(), me), [0, 1, 2]);
        }
    });
}

#[test]
fn threads_that_wait_in_several_groups_make_progress_independently() {
    const THREADS: usize = 4;
    run_both_ways(2, |world| {
        let groups: Vec<_> = (0..THREADS).map(|_| world.split(Some(0), 0).unwrap().unwrap()).collect();
        if world.rank() == 1 {
            // The threads of rank 0 sleep, and are woken one at a time, in an order of their own.
            for round in 0..20_u64 {
                for index in [2, 0, 3, 1] {
                    let (group, mut got) = (&groups[index], [0]);
                    group.send(&[round], 0, 0).unwrap();
                    group.recv(&mut got, 0, 0).unwrap();
                    assert_eq!(got, [round + index as u64]);
                }
            }
            return world.barrier().unwrap();
        }
        std::thread::scope(|scope| {
            for (index, group) in groups.iter().enumerate() {
                scope.spawn(move || {
                    for _ in 0..20 {
                        let mut got = [0_u64];
                        group.recv(&mut got, 1, 0).unwrap();
                        group.send(&[got[0] + index as u64], 1, 0).unwrap();
                    }
                });
            }
        });
        world.barrier().unwrap();
    });
}

#[test]
fn subgroups_work_when_their_parent_is_gone() {
    run_both_ways(3, |world| {
        let me = world.rank();
        let group = world.split(Some(0), 0).unwrap().unwrap();
        if me == 0 {
            world.destroy();
        }
        drop(world);
        for _ in 0..3 {
            let inner = group.split(Some(0), 0).unwrap().unwrap();
            assert_eq!(members(&inner, me), [0, 1, 2]);
            // More than fits in any buffer, so that connections for data are made.
            let mut sum = vec![1_u32; 300_000];
            inner.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|&sum| sum == 3));
            let peer = (me + 1) % 3;
            let sent = inner.start(op::send(vec![me as u8; 200_000], peer).tag(7)).unwrap();
            let mut got = vec![0_u8; 200_000];
            inner.recv(&mut got, (me + 2) % 3, 7).unwrap();
            assert!(got.iter().all(|&byte| usize::from(byte) == (me + 2) % 3));
            sent.wait().unwrap();
        }
    });
}

#[test]
fn ranks_departing_at_once_do_not_prevent_group_formation() {
    for _ in 0..40 {
        run_ranks(5, drop);
    }
}
