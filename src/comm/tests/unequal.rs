//! Collectives of blocks that are not equally long, over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    Group, GroupOptions, HOSTS, ReduceOp, WITH_HIERARCHIES, algorithms_of, run_on_hosts, run_ranks,
    run_with_options,
};
use convoke_comm::CommError;

/// The value of rank `from` at `index` of its block for rank `to`.
fn value(from: usize, to: usize, index: usize) -> i64 {
    ((from * 7 + to * 3 + index) % 23) as i64 - 11
}

fn block(from: usize, to: usize, len: usize) -> impl Iterator<Item = i64> {
    (0..len).map(move |index| value(from, to, index))
}

/// Lengths of the ranks' blocks, with zero, one and many elements.
fn lens(world: usize, scale: usize) -> Vec<usize> {
    (0..world).map(|rank| [0, 1, 3 * scale, scale + 1, 2][(rank + scale) % 5]).collect()
}

fn check(group: &Group, scale: usize) {
    let (me, world) = (group.rank(), group.size());
    let lens = lens(world, scale);
    let all: Vec<i64> = (0..world).flat_map(|from| block(from, 0, lens[from])).collect();
    let for_each: Vec<i64> = (0..world).flat_map(|to| block(me, to, lens[to])).collect();
    let mine: Vec<i64> = block(me, 0, lens[me]).collect();
    let name = format!("{lens:?} on rank {me}");

    let mut recv = vec![99; all.len()];
    group.all_gather_v(&mine, &mut recv, &lens).unwrap();
    assert!(recv == all, "all_gather_v of {name}");

    let mut own = vec![99; lens[me]];
    group.reduce_scatter_v(&for_each, &mut own, &lens, ReduceOp::Sum).unwrap();
    let sum = |index: usize| (0..world).map(|from| value(from, me, index)).sum::<i64>();
    assert!(own.iter().enumerate().all(|(index, &x)| x == sum(index)), "reduce_scatter_v of {name}");

    for root in [0, world - 1] {
        let (mut recv, known) =
            if me == root { (vec![99; all.len()], &lens[..]) } else { (Vec::new(), &[][..]) };
        group.gather_v(&mine, &mut recv, known, root).unwrap();
        assert!(me != root || recv == all, "gather_v of {name}");
        own.fill(99);
        let send = if me == root { &for_each[..] } else { &[] };
        group.scatter_v(send, &mut own, known, root).unwrap();
        assert!(own.iter().copied().eq(block(root, me, lens[me])), "scatter_v of {name}");
    }

    // From a to b go as many elements as block (a + 2 b) has.
    let of = |from: usize, to: usize| lens[(from + 2 * to) % world];
    let sent: Vec<usize> = (0..world).map(|to| of(me, to)).collect();
    let filled: Vec<usize> = (0..world).map(|from| of(from, me)).collect();
    let send: Vec<i64> = (0..world).flat_map(|to| block(me, to, sent[to])).collect();
    let want: Vec<i64> = (0..world).flat_map(|from| block(from, me, filled[from])).collect();
    let mut recv = vec![99; want.len()];
    group.all_to_all_v((&send, &sent), (&mut recv, &filled)).unwrap();
    assert!(recv == want, "all_to_all_v of {name}");
}

#[test]
fn unequal_blocks_work_for_every_size_and_world_size() {
    for algorithms in algorithms_of(&["all_gather", "reduce_scatter"]) {
        let worlds = if algorithms.is_empty() { 1..=5 } else { 4..=5 };
        for world in worlds {
            run_with_options(
                world,
                GroupOptions::default().algorithms(algorithms.parse().unwrap()),
                |group| {
                    for scale in [0, 1, 2, 3, 1000, 50_001] {
                        check(&group, scale);
                    }
                },
            );
        }
    }
}

#[test]
fn collectives_work_on_any_distribution_of_ranks_over_hosts() {
    for hosts in HOSTS {
        for algorithms in WITH_HIERARCHIES {
            run_on_hosts(hosts, algorithms, |group| {
                for scale in [0, 1, 2, 3, 1000, 50_001] {
                    check(&group, scale);
                }
            });
        }
    }
}

#[test]
fn invalid_lengths_are_refused_before_anything_is_sent() {
    run_ranks(2, |group| {
        let invalid = |result: Result<(), CommError>, what: &str| {
            let Err(CommError::InvalidArgument(text)) = &result else { panic!("{result:?}") };
            assert!(text.contains(what), "{text}");
        };
        let mut three = [0_i32; 3];
        let mine = &[1, 2][..=group.rank()];
        invalid(
            group.all_gather_v(mine, &mut three, &[1, 2, 3]),
            "the list of lengths has 3 elements, not 2",
        );
        invalid(group.all_gather_v(mine, &mut three[..2], &[1, 2]), "recv has 2 elements, not 3");
        invalid(group.all_gather_v(&[1, 2, 3], &mut three, &[1, 2]), "send has 3 elements, not");
        invalid(
            group.all_gather_v(mine, &mut three, &[usize::MAX, 2]),
            "the sum of the lengths is too large",
        );
        invalid(group.gather_v(mine, &mut three, &[1, 2], 9), "root 9");
        group.all_gather_v(mine, &mut three, &[1, 2]).unwrap();
        assert_eq!(three, [1, 1, 2]);
    });
}

#[test]
fn ranks_with_differing_lengths_learn_it() {
    run_ranks(2, |group| {
        let lens = if group.rank() == 0 { [1, 2] } else { [2, 1] };
        let error = group.all_gather_v(&[7_i32], &mut [0; 3], &lens).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
    });
    run_ranks(2, |group| {
        let error = match group.rank() {
            0 => group.gather_v(&[], &mut [0_i32; 2], &[0, 2], 0).unwrap_err(),
            _ => group.gather_v(&[1_i32, 2, 3], &mut [], &[], 0).and_then(|()| group.barrier()).unwrap_err(),
        };
        assert!(error.to_string().contains("expected 8") || group.rank() == 1, "{error}");
    });
}
