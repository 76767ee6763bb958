//! Every operation over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    Group, HOSTS, ReduceOp, Sample, TimedBarrier, WITH_HIERARCHIES, algorithms_of, for_every_type,
    is_full_test_run, run_on_hosts, run_ranks,
};
use convoke_comm::{CommError, op};
use convoke_testkit::{assert_one_passed, subprocess_test};

/// Numbers whose sums are exact in every order of adding.
fn number<T: Sample>(rank: usize, index: usize) -> i64 {
    T::number(((rank + 1) * (index % 13 + 1)) as i64 % 6 - 2)
}

fn reduced<T: Sample>(op: ReduceOp, world: usize, index: usize) -> T {
    let numbers = (0..world).map(|rank| number::<T>(rank, index));
    let number = match op {
        ReduceOp::Min => numbers.min(),
        ReduceOp::Max => numbers.max(),
        ReduceOp::Product => numbers.reduce(|a, b| a * b),
        ReduceOp::Band => numbers.reduce(|a, b| a & b),
        ReduceOp::Bor => numbers.reduce(|a, b| a | b),
        ReduceOp::Bxor => numbers.reduce(|a, b| a ^ b),
        _ => numbers.reduce(|a, b| a + b),
    };
    T::of(number.unwrap())
}

fn check<T: Sample>(group: &Group, count: usize) {
    let share = |rank: usize| (0..count).map(|i| T::of(number::<T>(rank, i))).collect::<Vec<_>>();
    // The other operations are not exact, or need more than a name.
    let left_out = [ReduceOp::Avg, ReduceOp::PremulSum, ReduceOp::Custom];
    for op in ReduceOp::ALL.into_iter().filter(|op| op.accepts(T::DTYPE) && !left_out.contains(op)) {
        let mut buf = share(group.rank());
        group.all_reduce(&mut buf, op).unwrap();
        let want: Vec<T> = (0..count).map(|i| reduced(op, group.size(), i)).collect();
        assert!(buf == want, "{op} of {count} {} on rank {} of {}", T::DTYPE, group.rank(), group.size());
    }
    for root in [0, group.size() - 1] {
        let mut buf = share(group.rank());
        group.broadcast(&mut buf, root).unwrap();
        assert!(buf == share(root), "broadcast of {count} {} from {root}", T::DTYPE);
    }
}

/// Sizes in elements around every threshold of the tuning table, for 4-byte elements.
const COUNTS: [usize; 14] = [0, 1, 2, 3, 5, 1000, 2047, 2048, 2049, 16_384, 16_385, 32_769, 65_536, 65_537];

/// One size for each algorithm.
fn check_some<T: Sample>(group: &Group) {
    for bytes in [0, 8 << 10, 256 << 10] {
        check::<T>(group, bytes / size_of::<T>() + 5);
    }
}

#[test]
fn every_type_operation_size_and_world_size() {
    for world in 1..=if is_full_test_run() { 8 } else { 5 } {
        run_ranks(world, |group| {
            for count in COUNTS {
                check::<f32>(&group, count);
                if is_full_test_run() {
                    for_every_type!(check, (&group, 2 * count));
                }
            }
            if is_full_test_run() || world <= 3 {
                for_every_type!(check_some, (&group));
            }
            check::<f32>(&group, 3_000_001);
            group.barrier().unwrap();
        });
    }
}

#[test]
fn collectives_work_on_any_distribution_of_ranks_over_hosts() {
    for hosts in HOSTS {
        for algorithms in WITH_HIERARCHIES {
            run_on_hosts(hosts, algorithms, |group| {
                for count in [0, 1, 3, 2049, 16_385, 300_007] {
                    check::<f32>(&group, count);
                }
                for_every_type!(check, (&group, 41));
                if is_full_test_run() {
                    for_every_type!(check_some, (&group));
                    check::<f32>(&group, 3_000_001);
                }
                group.barrier().unwrap();
            });
        }
    }
}

#[test]
fn subgroups_work_across_hosts() {
    for algorithms in WITH_HIERARCHIES {
        run_on_hosts(&[0, 1, 1, 2, 2, 0], algorithms, |group| {
            // The parts are: one host each, unequal parts of hosts, all ranks; each with the ranks reversed.
            let me = group.rank();
            for color in [me.div_ceil(2) % 3, me / 4, 0] {
                let part = group.split(Some(color as u32), -(me as i64)).unwrap().unwrap();
                assert!(part.local_rank_and_size().1 <= 2, "{:?}", part.local_rank_and_size());
                for count in [1, 3, 50_001] {
                    check::<f64>(&part, count);
                }
            }
        });
    }
}

#[test]
fn inexact_sums_are_bitwise_equal_on_all_ranks_and_reruns() {
    let flat = algorithms_of(&["all_reduce"])
        .into_iter()
        .flat_map(|algorithm| [2, 3, 5].map(|world| (algorithm.clone(), vec![0; world])));
    let deep = HOSTS.into_iter().map(|hosts| ("all_reduce:hierarchy".to_owned(), hosts.to_vec()));
    for (algorithm, hosts) in flat.chain(deep) {
        let run = || {
            run_on_hosts(&hosts, &algorithm, |group| {
                let mut all = Vec::new();
                for count in [1, 77, 5000, 100_003] {
                    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product] {
                        let mut buf: Vec<f32> =
                            (0..count).map(|i| ((i * 31 + group.rank() * 17) as f32).sin() * 1.7).collect();
                        group.all_reduce(&mut buf, op).unwrap();
                        all.extend(buf.iter().map(|x| x.to_bits()));
                    }
                }
                all
            })
        };
        let first = run();
        assert!(first.iter().all(|bits| *bits == first[0]), "{algorithm} {hosts:?}: ranks differ");
        assert!(first == run(), "{algorithm} {hosts:?}: runs differ");
    }
}

#[test]
fn averages_divide_the_sum() {
    for algorithm in algorithms_of(&["all_reduce"]) {
        run_on_hosts(&[0, 0, 1], &algorithm, |group| {
            let mut buf = vec![(group.rank() * 3) as f64; 1001];
            group.all_reduce(&mut buf, ReduceOp::Avg).unwrap();
            assert!(buf.iter().all(|&x| x == 3.0));
            let mut nan = [f32::NAN, -0.0, group.rank() as f32];
            if group.rank() > 0 {
                nan[0] = 1.0;
                nan[1] = 0.0;
            }
            let mut least = nan;
            group.all_reduce(&mut least, ReduceOp::Min).unwrap();
            group.all_reduce(&mut nan, ReduceOp::Max).unwrap();
            assert!(least[0].is_nan() && nan[0].is_nan());
            assert_eq!((least[1].to_bits(), nan[1].to_bits()), ((-0.0_f32).to_bits(), 0));
            assert_eq!((least[2], nan[2]), (0.0, 2.0));
        });
    }
}

#[test]
fn messages_of_any_size_keep_their_order_per_tag() {
    run_ranks(3, |group| {
        let (me, world) = (group.rank(), group.size());
        for count in [0_usize, 1, 100, 16_384, 16_385, 1_000_000] {
            // Around the ring; even ranks send first, so that large messages cannot deadlock.
            let (to, from) = ((me + 1) % world, (me + world - 1) % world);
            let sent: Vec<f32> = (0..count).map(|i| (i + me) as f32).collect();
            let mut got = vec![0.0_f32; count];
            if me == 0 {
                group.send(&sent, to, 7).unwrap();
                group.recv(&mut got, from, 7).unwrap();
            } else {
                group.recv(&mut got, from, 7).unwrap();
                group.send(&sent, to, 7).unwrap();
            }
            assert!(got.iter().enumerate().all(|(i, &x)| x == (i + from) as f32));
        }
        // Tags out of order, more than the credit allows, and a wanted tag behind all of them.
        if me == 0 {
            for i in 0..40_u8 {
                group.send(&vec![i; 60_000], 1, u32::from(i % 2)).unwrap_or_else(|error| panic!("{error}"));
                if i == 12 {
                    group.send(&[9_i64], 1, 99).unwrap();
                }
            }
        } else if me == 1 {
            let mut wanted = [0_i64];
            group.recv(&mut wanted, 0, 99).unwrap();
            assert_eq!(wanted, [9]);
            for parity in [1_u8, 0] {
                for i in (0..40).filter(|i| i % 2 == parity) {
                    if parity == 1 {
                        continue;
                    }
                    let mut got = vec![0_u8; 60_000];
                    group.recv(&mut got, 0, u32::from(parity)).unwrap();
                    assert!(got.iter().all(|&x| x == i));
                    if i + 1 < 40 {
                        group.recv(&mut got, 0, 1).unwrap();
                        assert!(got.iter().all(|&x| x == i + 1));
                    }
                }
            }
        }
        group.barrier().unwrap();
    });
}

#[test]
fn late_receiver_gets_the_data_sent_earlier() {
    late_receiver(false);
    // A group that was made from another one allocates its memory when it is first used.
    late_receiver(true);
}

fn late_receiver(in_subgroup: bool) {
    let (made, seen) = std::sync::mpsc::channel();
    let seen = std::sync::Mutex::new(seen);
    // More than there are slots and rounds in memory, so that each is used several times.
    let calls = 1000_usize;
    run_ranks(2, |group| {
        let group = if in_subgroup { group.split(Some(0), 0).unwrap().unwrap() } else { group };
        let me = group.rank();
        if me == 1 {
            (0..10).for_each(|_| seen.lock().unwrap().recv_timeout(common::LONG).unwrap());
            // The root runs ahead as far as it may.
            (0..10_000).for_each(|_| std::thread::yield_now());
        }
        for call in 0..calls {
            let mut buf =
                vec![if me == 0 { call as f32 } else { 0.0 }; [1, 5, 1500, 12_000, 40_000][call % 5]];
            group.broadcast(&mut buf, 0).unwrap();
            assert!(buf.iter().all(|&x| x == call as f32), "call {call}");
            if me == 0 {
                made.send(()).unwrap();
            }
        }
    });
}

#[test]
fn threads_of_one_rank_share_a_group() {
    run_ranks(3, |group| {
        std::thread::scope(|scope| {
            // Each thread has its own tag; one thread makes the collectives.
            for thread in 0..4_u32 {
                let group = &group;
                scope.spawn(move || {
                    let (me, world) = (group.rank(), group.size());
                    for round in 0..50_u32 {
                        group.send(&[round + thread], (me + 1) % world, thread).unwrap();
                        let mut got = [0];
                        group.recv(&mut got, (me + world - 1) % world, thread).unwrap();
                        assert_eq!(got, [round + thread]);
                    }
                });
            }
            for _ in 0..50 {
                let mut one = [1];
                group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
                assert_eq!(one, [3]);
            }
        });
    });
}

#[test]
fn meaningless_arguments_are_refused_and_the_group_continues() {
    run_ranks(2, |group| {
        let refused = |result: Result<(), CommError>| matches!(result, Err(CommError::InvalidArgument(_)));
        assert!(refused(group.all_reduce(&mut [1_i32], ReduceOp::Avg)));
        assert!(refused(group.broadcast(&mut [1_i32], 2)));
        assert!(refused(group.send(&[1], 2, 0)));
        assert!(refused(group.recv(&mut [1], 2, 0).map(drop)));
        group.barrier().unwrap();
    });
}

#[test]
fn group_of_one_needs_no_peers() {
    run_ranks(1, |group| {
        let mut buf = [1.5_f32];
        group.all_reduce(&mut buf, ReduceOp::Avg).unwrap();
        group.broadcast(&mut buf, 0).unwrap();
        group.barrier().unwrap();
        assert_eq!(buf, [1.5]);
    });
}

/// Ranks of a large group.
const MANY: usize = 20;

/// Sockets of this process; each connection between two of its threads has two.
fn sockets() -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn large_groups_connect_lazily() {
    assert_one_passed(&subprocess_test("subprocess_counts_connections").output().unwrap());
}

#[test]
#[ignore = "run by large_groups_connect_lazily, whose sockets it counts"]
fn subprocess_counts_connections() {
    let gate = TimedBarrier::new(MANY);
    let hosts: Vec<usize> = (0..MANY).collect();
    let count = |group: &Group| {
        group.barrier().unwrap();
        gate.wait();
        let count = sockets();
        gate.wait();
        count
    };
    run_on_hosts(&hosts, "", |group| {
        let begun = count(&group);
        // Each pair has a control connection; only neighbours also have a data connection.
        let pairs = MANY * (MANY - 1) / 2;
        assert!((2 * pairs..4 * pairs).contains(&begun), "{begun} sockets of {pairs} pairs");
        let across = (group.rank() + MANY / 2) % MANY;
        group.run((op::send(&[1], across), op::recv(&mut [0], across))).unwrap();
        let opened = count(&group) - begun;
        assert_eq!(opened, 2 * MANY / 2, "a connection for messages of each of {} pairs", MANY / 2);
    });
}

#[test]
fn collectives_of_large_groups_open_all_needed_connections() {
    run_ranks(MANY, |group| {
        let mut sum = vec![1_i32; 100];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert!(sum.iter().all(|&x| x == 20));
        for root in 0..20 {
            let mut buf = [group.rank() as i32];
            group.broadcast(&mut buf, root).unwrap();
            assert_eq!(buf, [root as i32]);
        }
        let across = (group.rank() + 10) % 20;
        group.send(&[group.rank()].map(|rank| rank as u64), across, 1).unwrap();
        let mut got = [0_u64];
        group.recv(&mut got, across, 1).unwrap();
        assert_eq!(got, [across as u64]);
        group.barrier().unwrap();
    });
}

#[test]
fn bitwise_operations_support_integers_and_refuse_floats() {
    run_ranks(3, |group| {
        let mine = 1_u16 << group.rank() | 0x8000;
        for (op, want) in [(ReduceOp::Band, 0x8000), (ReduceOp::Bor, 0x8007), (ReduceOp::Bxor, 0x8007)] {
            let mut buf = vec![mine; 1001];
            group.all_reduce(&mut buf, op).unwrap();
            assert!(buf.iter().all(|&bits| bits == want), "{op}: {:#x}", buf[0]);
        }
        let refused = group.all_reduce(&mut [1.0_f32], ReduceOp::Bor).unwrap_err();
        assert!(refused.to_string().contains("bor of f32 has no meaning"), "{refused}");
    });
}
