//! Collectives of one block for each rank, and reduce, over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    Group, GroupOptions, HOSTS, ReduceOp, Sample, WITH_HIERARCHIES, algorithms_of, for_every_type,
    is_full_test_run, run_on_hosts, run_ranks, run_with_options,
};
use convoke_comm::{CommError, bf16};

/// The value of rank `from` at `index` of its block for rank `to`. Sums are exact in every order.
fn value(from: usize, to: usize, index: usize) -> i64 {
    ((from * 7 + to * 3 + index) % 23) as i64 - 11
}

fn check<T: Sample>(group: &Group, count: usize) {
    let (value, make) = (|from, to, index| T::number(value(from, to, index)), T::of);
    let (me, world) = (group.rank(), group.size());
    let name = format!("{count} {} on rank {me} of {world}", T::DTYPE);
    let block = |from: usize, to: usize| (0..count).map(move |i| value(from, to, i));
    let blocks = |pairs: Vec<(usize, usize)>| -> Vec<T> {
        pairs.into_iter().flat_map(|(from, to)| block(from, to)).map(make).collect()
    };
    let filler = || vec![make(99); count];
    let from_all = blocks((0..world).map(|from| (from, 0)).collect());
    let to_all = blocks((0..world).map(|to| (me, to)).collect());

    let mine = blocks(vec![(me, 0)]);
    let mut recv = vec![make(99); world * count];
    group.all_gather(&mine, &mut recv).unwrap();
    assert!(recv == from_all, "all_gather of {name}");
    recv.fill(make(99));
    recv[me * count..(me + 1) * count].copy_from_slice(&mine);
    group.all_gather_in_place(&mut recv).unwrap();
    assert!(recv == from_all, "all_gather_in_place of {name}");

    recv.fill(make(99));
    group.all_to_all(&to_all, &mut recv).unwrap();
    assert!(recv == blocks((0..world).map(|from| (from, me)).collect()), "all_to_all of {name}");

    let ops = [(ReduceOp::Sum, i64::wrapping_add as fn(i64, i64) -> i64), (ReduceOp::Max, i64::max)];
    for (op, fold) in ops.into_iter().filter(|(op, _)| op.accepts(T::DTYPE)) {
        let all = |to: usize| {
            let column = move |i: usize| (0..world).map(move |from| value(from, to, i)).reduce(fold).unwrap();
            (0..count).map(column).map(make).collect::<Vec<T>>()
        };
        let mut own = filler();
        group.reduce_scatter(&to_all, &mut own, op).unwrap();
        assert!(own == all(me), "reduce_scatter {op} of {name}");
        for root in [0, world - 1] {
            let mut buf = mine.clone();
            group.reduce(&mut buf, op, root).unwrap();
            assert!(me != root || buf == all(0), "reduce {op} of {name} to {root}");
        }
    }
    for root in [0, world / 2] {
        let mut recv = if me == root { vec![make(99); world * count] } else { Vec::new() };
        group.gather(&mine, &mut recv, root).unwrap();
        assert!(me != root || recv == from_all, "gather of {name} to {root}");
        let mut own = filler();
        group.scatter(if me == root { &to_all[..] } else { &[] }, &mut own, root).unwrap();
        assert!(own == blocks(vec![(root, me)]), "scatter of {name} from {root}");
    }
}

/// Lengths of a block around the thresholds of the tuning table.
const COUNTS: [usize; 9] = [0, 1, 3, 1000, 13_107, 13_108, 21_846, 65_537, 200_003];

#[test]
fn every_collective_size_type_and_world_size() {
    for world in 1..=if is_full_test_run() { 8 } else { 5 } {
        run_ranks(world, |group| {
            for count in COUNTS {
                check::<f32>(&group, count);
                if is_full_test_run() {
                    for_every_type!(check, (&group, count));
                }
            }
            if is_full_test_run() || world <= 3 {
                for_every_type!(check, (&group, 1001));
                check::<bf16>(&group, 40_001);
            }
            check::<f32>(&group, 1_000_001);
        });
    }
}

#[test]
fn collectives_work_on_any_distribution_of_ranks_over_hosts() {
    for hosts in HOSTS {
        for algorithms in WITH_HIERARCHIES {
            run_on_hosts(hosts, algorithms, |group| {
                for count in [0, 1, 2731, 65_537] {
                    check::<f32>(&group, count);
                }
                for_every_type!(check, (&group, 3));
            });
        }
    }
}

#[test]
fn every_algorithm_is_correct_for_few_and_many_bytes() {
    for algorithms in algorithms_of(&["reduce", "all_gather", "reduce_scatter"]) {
        run_with_options(4, GroupOptions::default().algorithms(algorithms.parse().unwrap()), |group| {
            for count in [0, 1, 2, 4097, 300_001] {
                check::<f32>(&group, count);
            }
        });
    }
}

#[test]
fn averages_divide_once_and_inexact_sums_repeat_exactly() {
    for algorithms in algorithms_of(&["reduce", "reduce_scatter"]) {
        let run = || {
            run_with_options(3, GroupOptions::default().algorithms(algorithms.parse().unwrap()), |group| {
                let me = group.rank();
                let send: Vec<f32> = (0..3 * 5001).map(|i| ((i * 31 + me * 17) as f32).sin()).collect();
                let mut own = vec![0.0_f32; 5001];
                group.reduce_scatter(&send, &mut own, ReduceOp::Avg).unwrap();
                let mut all = send.clone();
                group.all_reduce(&mut all, ReduceOp::Avg).unwrap();
                let same = &all[me * 5001..(me + 1) * 5001];
                assert!(own.iter().zip(same).all(|(a, b)| (a - b).abs() < 1e-6), "an average of three");
                let mut to_root = send.clone();
                group.reduce(&mut to_root, ReduceOp::Avg, 1).unwrap();
                assert!(me != 1 || to_root.iter().zip(&all).all(|(a, b)| (a - b).abs() < 1e-6));
                let rooted = if me == 1 { &to_root[..] } else { &[] };
                own.iter().chain(rooted).map(|x| x.to_bits()).collect::<Vec<_>>()
            })
        };
        assert!(run() == run(), "{algorithms}: runs differ");
    }
}

#[test]
fn scans_combine_the_ranks_up_to_each() {
    for world in 1..=5 {
        run_ranks(world, |group| {
            let me = group.rank();
            for count in [0, 1, 1000, 100_001] {
                let mine: Vec<i64> = (0..count).map(|i| value(me, 0, i)).collect();
                let sum = |ranks: usize, i: usize| (0..ranks).map(|rank| value(rank, 0, i)).sum::<i64>();
                let mut buf = mine.clone();
                group.scan(&mut buf, ReduceOp::Sum).unwrap();
                assert!(buf.iter().enumerate().all(|(i, &x)| x == sum(me + 1, i)), "{count} on {me}");
                buf.clone_from(&mine);
                group.exclusive_scan(&mut buf, ReduceOp::Sum).unwrap();
                let want = |i: usize| if me == 0 { mine[i] } else { sum(me, i) };
                assert!(buf.iter().enumerate().all(|(i, &x)| x == want(i)), "exclusive {count} on {me}");
            }
            let refused = group.scan(&mut [1.0_f32], ReduceOp::Avg).unwrap_err();
            assert!(refused.to_string().contains("no meaning in a scan"), "{refused}");
        });
    }
}

#[test]
fn invalid_lengths_are_refused_before_anything_is_sent() {
    run_ranks(2, |group| {
        let invalid = |result: Result<(), CommError>, what: &str| {
            let Err(CommError::InvalidArgument(text)) = &result else { panic!("{result:?}") };
            assert!(text.contains(what), "{text}");
        };
        let (mut three, mut four) = ([0_i32; 3], [0_i32; 4]);
        invalid(group.all_gather(&[1, 2], &mut three), "recv has 3 elements, not 2 blocks of 2");
        invalid(group.all_gather_in_place(&mut three), "buf has 3 elements, which are not 2 equal blocks");
        invalid(group.reduce_scatter(&[1, 2, 3], &mut three, ReduceOp::Sum), "send has 3 elements");
        invalid(group.all_to_all(&[1, 2], &mut four), "recv has 4 elements, not 2 blocks of 1");
        invalid(group.reduce(&mut four, ReduceOp::Sum, 2), "root 2: ranks are 0 to 1");
        invalid(group.reduce(&mut four, ReduceOp::Avg, 0), "avg of i32 has no meaning");
        invalid(group.gather(&[1], &mut [], 7), "root 7");
        if group.rank() == 0 {
            invalid(group.gather(&[1, 2], &mut three, 0), "recv has 3 elements");
            invalid(group.scatter(&three, &mut four, 0), "send has 3 elements");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn ranks_with_differing_calls_learn_both_calls() {
    run_ranks(2, |group| {
        let mut recv = [0_i32; 4];
        let result = if group.rank() == 0 {
            group.all_gather(&[1, 2], &mut recv)
        } else {
            group.all_to_all(&[1, 2, 3, 4], &mut recv)
        };
        let text = result.unwrap_err().to_string();
        assert!(text.contains("all_gather(i32, 2)") && text.contains("all_to_all(i32, 2)"), "{text}");
    });
}
