//! 16-bit floats, factors and reduction functions of the program, over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::{
    CommError, Group, GroupOptions, HOSTS, ReduceOp, WITH_HIERARCHIES, algorithms_of, run_on_hosts,
    run_ranks, run_with_options,
};
use convoke_comm::{Complex, Element, Reduction, bf16, f16, op};

/// The operations of 16-bit floats that the tests need.
trait Half: Element<Factor = f32> + PartialEq + std::fmt::Debug {
    fn of(value: f32) -> Self;
    fn as_f32(self) -> f32;
}

macro_rules! half {
    ($($half:ty),*) => {$(
        impl Half for $half {
            fn of(value: f32) -> Self {
                Self::from_f32(value)
            }
            fn as_f32(self) -> f32 {
                self.to_f32()
            }
        }
    )*};
}

half!(f16, bf16);

/// The value of `rank` at `index`. It has all digits, so that every rounding shows. Every third element has
/// large shares that cancel each other, so that the order of adding shows.
fn share<T: Half>(rank: usize, index: usize) -> T {
    let mixed = ((index * 17 + rank + 1) as u32).wrapping_mul(0x9E37_79B9) >> 12;
    T::of(match (index % 3, rank) {
        (0, 0) => 32_768.0,
        (0, 2) => -32_768.0,
        (0, _) => (mixed % 1000) as f32 / 100_000.0,
        _ => mixed as f32 / 137.0 - 3000.0,
    })
}

fn shares<T: Half>(rank: usize, range: std::ops::Range<usize>) -> Vec<T> {
    range.map(|index| share(rank, index)).collect()
}

/// The sum of the shares of `ranks` ranks, each changed by `change`, as `f32` in rank order.
fn sum<T: Half>(ranks: usize, index: usize, change: impl Fn(usize, f32) -> f32) -> f32 {
    (0..ranks).map(|rank| change(rank, share::<T>(rank, index).as_f32())).reduce(|a, b| a + b).unwrap()
}

fn rounded<T: Half>(range: std::ops::Range<usize>, value: impl Fn(usize) -> f32) -> Vec<T> {
    range.map(|index| T::of(value(index))).collect()
}

/// Every operation that adds gives the sum in rank order, rounded once.
fn halves<T: Half>(group: &Group, count: usize) {
    let (me, world) = (group.rank(), group.size());
    let name = format!("{count} {} on rank {me} of {world}", T::DTYPE);
    let plain = |_: usize, x: f32| x;
    let factor = |rank: usize| 1.0 / (rank as f32 + 3.0);
    let scaled = |rank: usize, x: f32| x * factor(rank);
    type Want<'a> = &'a dyn Fn(usize) -> f32;
    let cases: [(Reduction<T>, Want<'_>); 3] = [
        (ReduceOp::Sum.into(), &|i| sum::<T>(world, i, plain)),
        (ReduceOp::Avg.into(), &|i| sum::<T>(world, i, plain) / world as f32),
        (Reduction::premul_sum(factor(me)), &|i| sum::<T>(world, i, scaled)),
    ];
    for (reduction, want) in cases {
        let op = reduction.op();
        let mut buf = shares::<T>(me, 0..count);
        group.all_reduce(&mut buf, reduction.clone()).unwrap();
        assert!(buf == rounded(0..count, want), "all_reduce {op} of {name}");

        let mut buf = shares::<T>(me, 0..count);
        group.reduce(&mut buf, reduction.clone(), world - 1).unwrap();
        assert!(me + 1 < world || buf == rounded(0..count, want), "reduce {op} of {name}");

        let own = me * count..(me + 1) * count;
        let send = shares::<T>(me, 0..count * world);
        let mut recv = vec![T::of(9.0); count];
        group.reduce_scatter(&send, &mut recv, reduction).unwrap();
        assert!(recv == rounded(own, want), "reduce_scatter {op} of {name}");
    }
}

#[test]
fn half_sums_follow_rank_order_and_round_once() {
    for world in 1..=8 {
        run_ranks(world, |group| {
            for count in [1, 5, 2049, 5000] {
                halves::<bf16>(&group, count);
            }
            halves::<f16>(&group, 5000);
            if [2, 3].contains(&world) {
                // More for each rank than is in progress at once.
                halves::<bf16>(&group, 200_001);
            }
        });
    }
}

#[test]
fn half_sums_follow_rank_order_on_any_hosts() {
    for hosts in HOSTS {
        run_on_hosts(hosts, "", |group| {
            halves::<bf16>(&group, 5);
            halves::<bf16>(&group, 50_001);
        });
    }
}

#[test]
fn half_scans_round_once() {
    for world in 1..=5 {
        run_ranks(world, |group| {
            let me = group.rank();
            for count in [0, 1, 3000] {
                let mut buf = shares::<bf16>(me, 0..count);
                group.scan(&mut buf, ReduceOp::Sum).unwrap();
                let upto = |ranks| rounded::<bf16>(0..count, |i| sum::<bf16>(ranks, i, |_, x| x));
                assert!(buf == upto(me + 1), "scan of {count} on {me} of {world}");

                let mut buf = shares::<bf16>(me, 0..count);
                group.exclusive_scan(&mut buf, ReduceOp::Sum).unwrap();
                let want = if me == 0 { shares(0, 0..count) } else { upto(me) };
                assert!(buf == want, "exclusive_scan of {count} on {me} of {world}");

                let mut buf = shares::<bf16>(me, 0..count);
                group.exclusive_scan(&mut buf, Reduction::premul_sum(0.3)).unwrap();
                let halved = rounded::<bf16>(0..count, |i| sum::<bf16>(me.max(1), i, |_, x| x * 0.3));
                assert!(buf == if me == 0 { shares(0, 0..count) } else { halved }, "premul on {me}");
            }
        });
    }
}

/// The sums are exact in `f32` but not in 16 bits, so a rounded partial sum shows with any algorithm and
/// number of ranks.
#[test]
fn half_partial_sums_are_not_rounded() {
    let check = |group: Group| {
        let (me, world) = (group.rank(), group.size());
        let value = |rank: usize, i: usize| ((i * 7 + rank * 5) % 255 + 1) as f32;
        let sum = |i: usize| bf16::from_f32((0..world).map(|rank| value(rank, i)).sum());
        for count in [1, 700, 30_000] {
            let mine = |len: usize| (0..len).map(|i| bf16::from_f32(value(me, i))).collect::<Vec<_>>();
            let mut buf = mine(count);
            group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            assert!(buf.iter().enumerate().all(|(i, &x)| x == sum(i)), "all_reduce of {count}");
            let mut buf = mine(count);
            group.reduce(&mut buf, ReduceOp::Sum, 1).unwrap();
            assert!(me != 1 || buf.iter().enumerate().all(|(i, &x)| x == sum(i)), "reduce of {count}");
            let mut recv = vec![bf16::ZERO; count];
            group.reduce_scatter(&mine(count * world), &mut recv, ReduceOp::Sum).unwrap();
            assert!(recv.iter().enumerate().all(|(i, &x)| x == sum(me * count + i)), "scatter of {count}");
        }
    };
    for algorithms in algorithms_of(&["all_reduce", "reduce", "reduce_scatter"]) {
        run_with_options(3, GroupOptions::default().algorithms(algorithms.parse().unwrap()), check);
    }
    run_ranks(17, check);
    for hosts in HOSTS {
        run_on_hosts(hosts, WITH_HIERARCHIES[1], check);
    }
    run_on_hosts(&[0, 1, 2].repeat(6), "", check);
}

#[test]
fn half_lists_and_unequal_blocks_round_once() {
    run_ranks(3, |group| {
        let me = group.rank();
        let sums = |range| rounded::<f16>(range, |i| sum::<f16>(3, i, |_, x| x));
        let lens = [5, 0, 4000];
        let mut own = vec![f16::ZERO; lens[me]];
        group.reduce_scatter_v(&shares(me, 0..4005), &mut own, &lens, ReduceOp::Sum).unwrap();
        let at: usize = lens[..me].iter().sum();
        assert_eq!(own, sums(at..at + lens[me]));

        let list = [shares::<f16>(me, 0..3), shares(me, 3..3000), Vec::new(), shares(me, 3000..3001)];
        let list = group.run(list.map(|buf| op::all_reduce(buf, ReduceOp::Sum))).unwrap();
        assert_eq!(list, [sums(0..3), sums(3..3000), Vec::new(), sums(3000..3001)]);
        let list = group.run(list.map(|buf| op::all_reduce(buf, Reduction::premul_sum(0.0)))).unwrap();
        assert!(list.iter().flatten().all(|&x| x == f16::ZERO));
    });
}

/// Shares times factors that differ between ranks; whole numbers, so that every order gives one result.
fn factors<T: Element + PartialEq + std::fmt::Debug>(
    group: &Group,
    make: impl Fn(i64) -> T,
    factor: impl Fn(i64) -> T::Factor,
) {
    let (me, world) = (group.rank(), group.size());
    let value = |rank: usize, i: usize| ((rank * 3 + i) % 7) as i64 - 3;
    let mine = |len: usize| (0..len).map(|i| make(value(me, i))).collect::<Vec<_>>();
    let sum = |i: usize| make((0..world).map(|rank| value(rank, i) * (rank as i64 + 2)).sum());
    let premul = || Reduction::premul_sum(factor(me as i64 + 2));
    for count in [0, 1, 1000, 20_000] {
        let name = format!("{count} {} of {world}", T::DTYPE);
        let mut buf = mine(count);
        group.all_reduce(&mut buf, premul()).unwrap();
        assert!(buf.iter().enumerate().all(|(i, x)| *x == sum(i)), "all_reduce of {name}");
        let send = mine(count * world);
        let mut recv = vec![make(99); count];
        group.reduce_scatter(&send, &mut recv, premul()).unwrap();
        assert!(recv.iter().enumerate().all(|(i, x)| *x == sum(me * count + i)), "reduce_scatter of {name}");
        assert!(send == mine(count * world), "what is only sent stays as it is");
        let mut recv = vec![make(99); if me == 0 { count } else { 0 }];
        group.reduce_into(&mine(count), &mut recv, premul(), 0).unwrap();
        assert!(recv.iter().enumerate().all(|(i, x)| *x == sum(i)), "reduce_into of {name}");
    }
}

#[test]
fn each_rank_multiplies_its_data_by_its_own_factor() {
    for world in [1, 2, 3, 5] {
        run_ranks(world, |group| {
            factors::<f32>(&group, |v| v as f32, |f| f as f32);
            factors::<i64>(&group, |v| v, |f| f);
            factors::<u8>(&group, |v| v as u8, |f| f as u8);
            factors::<f16>(&group, |v| f16::from_f32(v as f32), |f| f as f32);
            factors::<Complex<f64>>(
                &group,
                |v| Complex::new(v as f64, -v as f64),
                |f| Complex::new(f as f64, 0.0),
            );
        });
    }
}

/// Greatest common divisor.
fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[test]
fn user_functions_combine_elements() {
    let gcds = || {
        Reduction::new(|into: &mut [u32], from: &[u32]| {
            for (a, b) in into.iter_mut().zip(from) {
                *a = gcd(*a, *b);
            }
        })
    };
    for world in [1, 2, 3, 5] {
        run_ranks(world, |group| {
            let me = group.rank();
            for count in [0, 1, 1000, 100_000] {
                let value = |rank: usize, i: usize| ((i % 50 + 1) * 6 * (rank + 1)) as u32;
                let want = |i: usize| (0..world).map(|rank| value(rank, i)).reduce(gcd).unwrap();
                let mine = |len: usize| (0..len).map(|i| value(me, i)).collect::<Vec<_>>();
                let mut buf = mine(count);
                group.all_reduce(&mut buf, gcds()).unwrap();
                assert!(buf.iter().enumerate().all(|(i, &x)| x == want(i)), "all_reduce of {count}");
                let mut recv = vec![0; count];
                group.reduce_scatter(&mine(count * world), &mut recv, gcds()).unwrap();
                assert!(recv.iter().enumerate().all(|(i, &x)| x == want(me * count + i)), "of {count}");
                let work = group.start(op::reduce(mine(count), gcds(), 0)).unwrap();
                let buf = work.wait().unwrap();
                assert!(me > 0 || buf.iter().enumerate().all(|(i, &x)| x == want(i)), "reduce of {count}");
            }
        });
    }
}

/// The larger of two by absolute value. For -1 and 1 it depends on the order, but all ranks get equal
/// results.
#[test]
fn non_commutative_functions_produce_equal_bits_on_all_ranks() {
    for algorithm in algorithms_of(&["all_reduce"]) {
        let results = run_on_hosts(&[0, 1, 1, 0, 1], &algorithm, |group| {
            let farther = Reduction::new(|into: &mut [f32], from: &[f32]| {
                for (a, b) in into.iter_mut().zip(from) {
                    *a = if b.abs() > a.abs() { *b } else { *a };
                }
            });
            let mut buf: Vec<f32> =
                (0..1000).map(|i| if (i >> group.rank()) % 2 == 0 { 1.0 } else { -1.0 }).collect();
            group.all_reduce(&mut buf, farther).unwrap();
            buf
        });
        assert!(results.iter().all(|buf| *buf == results[0]), "{algorithm}");
    }
}

#[test]
fn user_function_panic_ends_the_group_with_one_cause() {
    for world in [2, 3, 5] {
        let errors = run_ranks(world, |group| {
            // Without this the call could fail before it begins.
            group.barrier().unwrap();
            let (fails, calls) = (group.rank() == 1, AtomicUsize::new(0));
            let reduction = Reduction::new(move |_: &mut [i32], _: &[i32]| {
                // It fails once, in the middle: nobody must retry with half of the data added.
                assert!(!fails || calls.fetch_add(1, Ordering::Relaxed) != 1, "rank 1 cannot add");
            });
            let result = group.all_reduce(&mut vec![1; 10_000], reduction);
            assert!(!fails || result.is_err());
            // Other ranks may have their result before rank 1 adds.
            let first = result.and_then(|()| group.barrier()).unwrap_err();
            assert!(matches!(group.barrier(), Err(CommError::Aborted { by: 1, .. })), "it stays so");
            first
        });
        for error in errors {
            assert_eq!(error.suspect_rank(), Some(1));
            assert!(error.to_string().contains("panicked: rank 1 cannot add"), "{error}");
        }
    }
}

#[test]
fn user_function_cannot_wait_for_its_own_group() {
    run_ranks(2, |group| {
        let inner = group.clone();
        let reduction = Reduction::new(move |into: &mut [i32], _: &[i32]| {
            let refused = inner.barrier().unwrap_err().to_string();
            into.fill(i32::from(refused.contains("a reduction function cannot use a group")));
        });
        let mut buf = [7; 3];
        group.all_reduce(&mut buf, reduction).unwrap();
        assert_eq!(buf, [1; 3]);
        group.barrier().unwrap();
    });
}

#[test]
fn undefined_reductions_are_refused_before_anything_is_sent() {
    fn refused<T: Element>(group: &Group, value: T, op: ReduceOp) {
        // Only one rank calls it: if it sent anything, the barrier below would not match the others'.
        if group.rank() == 0 {
            let error = group.all_reduce(&mut [value], op).unwrap_err();
            assert!(matches!(error, CommError::InvalidArgument(_)), "{op} of {}: {error}", T::DTYPE);
            assert!(error.to_string().contains(op.to_string().as_str()), "{error}");
        }
        group.barrier().unwrap();
    }
    for world in [1, 2] {
        run_ranks(world, |group| {
            for op in [ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor] {
                refused(&group, 1.0_f32, op);
                refused(&group, bf16::ONE, op);
                refused(&group, Complex::new(1.0_f64, 0.0), op);
            }
            for op in [ReduceOp::Min, ReduceOp::Max] {
                refused(&group, Complex::new(1.0_f32, 0.0), op);
            }
            refused(&group, true, ReduceOp::Avg);
            refused(&group, 1_u64, ReduceOp::Avg);
            // The operation without its factor, and without its function.
            refused(&group, 1_i32, ReduceOp::PremulSum);
            refused(&group, 1_i32, ReduceOp::Custom);
        });
    }
}

#[test]
fn ranks_with_differing_reduction_operations_learn_it() {
    let errors = run_ranks(2, |group| {
        let reduction =
            if group.rank() == 0 { ReduceOp::Sum.into() } else { Reduction::<f32>::premul_sum(2.0) };
        group.all_reduce(&mut [1.0], reduction).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("(f32, 1, sum)") && error.contains("(f32, 1, premul_sum)"), "{error}");
    }
}

#[test]
fn unsupported_operation_error_states_an_alternative() {
    run_ranks(2, |group| {
        let told = [
            (group.all_reduce(&mut [1_i32], ReduceOp::Avg), "ReduceOp::Sum and divide by Group::size"),
            (group.all_reduce(&mut [1_u8], ReduceOp::Avg), "ReduceOp::Sum and divide by Group::size"),
            (group.reduce(&mut [true], ReduceOp::Avg, 0), "ReduceOp::Sum and divide by Group::size"),
            (group.all_reduce(&mut [Complex::new(1.0_f32, 0.0)], ReduceOp::Max), "absolute values"),
            (group.all_reduce(&mut [1.0_f64], ReduceOp::Bxor), "to_bits"),
        ];
        for (result, advice) in told {
            let error = result.unwrap_err();
            assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(advice), "{error}");
        }
        // Nothing was sent, so the group stays usable.
        group.barrier().unwrap();
    });
}
