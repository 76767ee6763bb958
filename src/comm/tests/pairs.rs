//! Pairs of ranks of a host pass all kinds of data to each other in memory, in random orders and lengths.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Group, GroupOptions, ReduceOp, op, run_ranks, run_with_options};
use convoke_comm::SingleCopy;
use convoke_testkit::Random;

/// Around the limits of slots, cells, exchange areas and rounds.
const SIZES: [usize; 10] = [1, 3000, 4097, 16_385, 40_000, 65_537, 131_073, 262_144, 600_000, 1_100_000];

/// Lengths of blocks around the limits of slots and exchange areas of more than two ranks.
const BLOCKS: [usize; 9] = [1, 410, 690, 4097, 5462, 52_429, 87_382, 170_000, 300_000];

fn content(rank: usize, call: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (rank * 89 + call * 31 + at * 7 + at / 256) as u8).collect()
}

/// Makes call number `call`, of a kind that `random` chooses alike on both ranks, and checks its result.
fn check(group: &Group, call: usize, random: &mut Random) {
    let (me, root) = (group.rank(), random.below(2));
    let bytes = SIZES[random.below(SIZES.len())] - random.below(2);
    let data = |rank: usize| content(rank, call, bytes);
    let (mine, theirs) = (data(me), data(1 - me));
    let mut got = vec![0; bytes];
    match random.below(8) {
        0 => {
            let mut all = vec![0; 2 * bytes];
            group.all_gather(&mine, &mut all).unwrap();
            assert!(all == [data(0), data(1)].concat());
        }
        1 => {
            let mut sum = mine;
            group.all_reduce(&mut sum, ReduceOp::Max).unwrap();
            assert!(sum.iter().zip(data(0).iter().zip(data(1))).all(|(&sum, (&a, b))| sum == a.max(b)));
        }
        2 => {
            let mut all = vec![0; if me == root { 2 * bytes } else { 0 }];
            group.gather(&mine, &mut all, root).unwrap();
            assert!(me != root || all == [data(0), data(1)].concat());
        }
        3 => {
            let mut data = if me == root { mine } else { got };
            group.broadcast(&mut data, root).unwrap();
            assert!(data == content(root, call, bytes));
        }
        4 => {
            let mut all = vec![0; 2 * bytes];
            group.all_to_all(&[data(2 * me), data(2 * me + 1)].concat(), &mut all).unwrap();
            assert!(all == [data(me), data(2 + me)].concat());
        }
        5 if me == root => group.send(&mine, 1 - me, 7).unwrap(),
        5 => {
            group.recv(&mut got, root, 7).unwrap();
            assert!(got == theirs);
        }
        6 => {
            // Both send at the same time.
            group
                .scope(|scope| {
                    scope.start(op::recv(&mut got[..], 1 - me).tag(7))?;
                    scope.start(op::send(&mine[..], 1 - me).tag(7)).map(drop)
                })
                .unwrap();
            assert!(got == theirs);
        }
        _ => {
            for turn in 0..4 {
                if (turn + root + me) % 2 == 0 {
                    group.send(&mine, 1 - me, 7).unwrap();
                } else {
                    group.recv(&mut got, 1 - me, 7).unwrap();
                    assert!(got == theirs, "turn {turn}");
                }
            }
        }
    }
}

#[test]
fn two_ranks_of_a_host_exchange_data_of_all_lengths_in_any_order() {
    let mut seeds = Random::new("two_ranks_of_a_host_exchange_data_of_all_lengths_in_any_order");
    let (first, second) = (seeds.next(), seeds.next());
    for single_copy in [SingleCopy::Never, SingleCopy::Always] {
        let options = || GroupOptions::default().single_copy(single_copy);
        // The memory of the first group of a host is allocated at once, that of a later group when it is used.
        run_with_options(3, options(), |world| {
            let pair = world.subgroup(&[2, 0]).unwrap();
            if let Some(pair) = &pair {
                let mut random = Random::from_seed(first);
                (0..250).for_each(|call| check(pair, call, &mut random));
            }
        });
        run_with_options(2, options(), |world| {
            let mut random = Random::from_seed(second);
            (0..250).for_each(|call| check(&world, call, &mut random));
        });
    }
}

/// The largest byte of all ranks at each position.
fn largest(all: &[Vec<u8>]) -> Vec<u8> {
    (0..all[0].len()).map(|at| all.iter().map(|data| data[at]).max().unwrap()).collect()
}

/// Makes call number `call` of several ranks, of a kind that `random` chooses alike on all ranks, and checks its result.
fn check_blocks(group: &Group, call: usize, random: &mut Random) {
    let (me, ranks) = (group.rank(), group.size());
    let (kind, root, bytes) =
        (random.below(8), random.below(ranks), BLOCKS[random.below(BLOCKS.len())] - random.below(2));
    let data = |from: usize, to: usize| content(from * ranks + to, call, bytes);
    let mine = (0..ranks).flat_map(|to| data(me, to)).collect::<Vec<_>>();
    match kind {
        0 | 1 => {
            let mut all = vec![0; ranks * bytes];
            group.all_to_all(&mine, &mut all).unwrap();
            assert!(all == (0..ranks).flat_map(|from| data(from, me)).collect::<Vec<_>>(), "call {call}");
        }
        2 | 3 => {
            let mut most = vec![0; bytes];
            group.reduce_scatter(&mine, &mut most, ReduceOp::Max).unwrap();
            let all: Vec<_> = (0..ranks).map(|from| data(from, me)).collect();
            assert!(most == largest(&all), "call {call}");
        }
        4 => {
            let mut data = if me == root { mine } else { vec![0; ranks * bytes] };
            group.broadcast(&mut data, root).unwrap();
            assert!(data[..bytes] == content(root * ranks, call, bytes), "call {call}");
        }
        5 => {
            let mut most = mine;
            group.all_reduce(&mut most, ReduceOp::Max).unwrap();
            let all: Vec<_> =
                (0..ranks).map(|from| (0..ranks).flat_map(|to| data(from, to)).collect::<Vec<_>>()).collect();
            assert!(most == largest(&all), "call {call}");
        }
        6 => {
            let mut block = vec![0; bytes];
            group.scatter(if me == root { &mine } else { &[] }, &mut block, root).unwrap();
            assert!(block == data(root, me), "call {call}");
        }
        _ => {
            let mut all = vec![0; ranks * ranks * bytes];
            group.all_gather(&mine, &mut all).unwrap();
            let expected = (0..ranks).flat_map(|from| (0..ranks).flat_map(move |to| data(from, to)));
            assert!(all.into_iter().eq(expected), "call {call}");
        }
    }
}

#[test]
fn several_ranks_of_a_host_exchange_blocks_of_all_lengths_in_any_order() {
    let mut seeds = Random::new("several_ranks_of_a_host_exchange_blocks_of_all_lengths_in_any_order");
    for (ranks, single_copy) in [3, 4, 5]
        .into_iter()
        .flat_map(|ranks| [SingleCopy::Never, SingleCopy::Always].map(|single_copy| (ranks, single_copy)))
    {
        let (first, second) = (seeds.next(), seeds.next());
        run_with_options(ranks, GroupOptions::default().single_copy(single_copy), |world| {
            let chosen: Vec<_> = (0..ranks).rev().collect();
            let later = world.subgroup(&chosen).unwrap().unwrap();
            let [mut random, mut later_random] = [first, second].map(Random::from_seed);
            for call in 0..30 {
                check_blocks(&world, call, &mut random);
                check_blocks(&later, call, &mut later_random);
            }
        });
    }
}

/// Blocks around the limits from which rounds begin at the end, and from which results bypass the caches.
#[test]
fn blocks_longer_than_the_caches_arrive_whole_and_so_does_the_own_one() {
    const CACHED: usize = 2 << 20;
    const BYPASS: usize = 8 << 20;
    for ranks in [2, 3] {
        run_ranks(ranks, |group| {
            let me = group.rank();
            for (call, bytes) in [CACHED - 3, CACHED, CACHED + 77, BYPASS + 5].into_iter().enumerate() {
                let blocks: Vec<_> = (0..ranks).map(|rank| content(rank, call, bytes)).collect();
                let mut all = vec![0; ranks * bytes];
                group.all_gather(&blocks[me], &mut all).unwrap();
                assert!(all == blocks.concat(), "{bytes} bytes of {ranks} ranks");
                let mut mine = vec![0; bytes];
                group.scatter(if me == 1 { &all } else { &[] }, &mut mine, 1).unwrap();
                assert!(mine == blocks[me], "{bytes} bytes to {ranks} ranks");
                let mut gathered = vec![0; if me == 1 { ranks * bytes } else { 0 }];
                group.gather(&mine, &mut gathered, 1).unwrap();
                assert!(me != 1 || gathered == all, "{bytes} bytes from {ranks} ranks");
            }
        });
    }
}

/// The rank that exposes its data learns that it was read, although the reader has left.
#[test]
fn rank_may_leave_as_soon_as_it_has_read_exposed_data() {
    const BYTES: usize = 300_000;
    let options = GroupOptions::default().single_copy(SingleCopy::Always);
    run_with_options(2, options, |world| {
        let me = world.rank();
        for turn in 0..100 {
            let pair = world.subgroup(&[0, 1]).unwrap().unwrap();
            let (mine, mut got) = (content(me, turn, 2 * BYTES), vec![0; 2 * BYTES]);
            match (turn % 3, me == turn % 2) {
                (0, true) => pair.send(&mine, 1 - me, 0).unwrap(),
                (0, false) => drop(pair.recv(&mut got, 1 - me, 0).unwrap()),
                (1, root) => {
                    pair.scatter(if root { &mine } else { &[] }, &mut got[..BYTES], turn % 2).unwrap();
                    let root = content(turn % 2, turn, 2 * BYTES);
                    assert!(got[..BYTES] == root[me * BYTES..][..BYTES], "turn {turn}");
                }
                _ => pair.all_to_all(&mine, &mut got).unwrap(),
            }
            drop(pair);
            if turn % 3 == 0 && me != turn % 2 {
                assert!(got == content(1 - me, turn, 2 * BYTES), "turn {turn}");
            }
        }
    });
}
