//! Ranks as threads around a store in memory.
#![allow(dead_code, unused_imports, unused_macros, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use convoke_comm::algorithms::Algorithms;
pub(crate) use convoke_comm::{CommError, Group, GroupOptions, ReduceOp, op};
use convoke_comm::{Complex, Element, bf16, f16};
use convoke_store::{MemoryStore, Store};

pub(crate) use convoke_testkit::{TimedBarrier, free_port, is_full_test_run};

/// The timeout of operations that should succeed.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// The timeout of calls that should time out. A quarter of it remains for ranks to report whom they wait for,
/// also on a busy machine.
pub(crate) const SHORT: Duration = Duration::from_secs(1);

pub(crate) fn options() -> GroupOptions {
    GroupOptions::default().timeout(LONG).init_timeout(LONG)
}

/// Runs `body` on `world` ranks and returns what each returned, in order.
pub(crate) fn run_ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    run_with_options(world, GroupOptions::default(), body)
}

/// As [`run_ranks`], but `body` begins only when the group works on all ranks, so that no failure comes
/// earlier.
pub(crate) fn run_ranks_together<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let gate = TimedBarrier::new(world);
    run_ranks(world, |group| {
        group.barrier().unwrap();
        gate.wait();
        body(group)
    })
}

pub(crate) fn run_with_options<R: Send>(
    world: usize,
    options: GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let (store, options) = unique_group(options);
    run_on_store(&store, world, &options, body)
}

/// A new store, and options with a unique group name.
fn unique_group(options: GroupOptions) -> (Arc<dyn Store>, GroupOptions) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    (Arc::new(MemoryStore::new()), options.timeout(LONG).init_timeout(LONG).name(name))
}

/// The host of each rank in several layouts: equal and unequal numbers, consecutive ranks and others, one
/// rank on each.
pub(crate) const HOSTS: [&[usize]; 6] =
    [&[0, 0, 1, 1], &[0, 1, 0, 1, 0], &[0, 0, 0, 1], &[0, 1, 2], &[0, 1, 1, 2, 2, 0], &[0, 0, 0, 1, 1, 2]];

/// The tuning table, and hierarchies for all collectives that have one.
pub(crate) const WITH_HIERARCHIES: [&str; 2] =
    ["", "all_reduce:hierarchy,all_gather:hierarchy,reduce_scatter:hierarchy"];

/// The tuning table, and each algorithm that can be chosen for one of `collectives`.
pub(crate) fn algorithms_of(collectives: &[&str]) -> Vec<String> {
    let choices = Algorithms::choices().filter(|(collective, _)| collectives.contains(collective));
    [String::new()].into_iter().chain(choices.map(|(of, name)| format!("{of}:{name}"))).collect()
}

/// As [`run_with_options`], with one rank on each of `hosts` and these algorithms.
pub(crate) fn run_on_hosts<R: Send>(
    hosts: &[usize],
    algorithms: &str,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let (store, options) = unique_group(GroupOptions::default().algorithms(algorithms.parse().unwrap()));
    spawn_ranks(&store, hosts.len(), |rank| options.clone().locality_domain(hosts[rank].to_string()), body)
}

/// As [`run_with_options`], on a given store with exactly these options.
pub(crate) fn run_on_store<R: Send>(
    store: &Arc<dyn Store>,
    world: usize,
    options: &GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    spawn_ranks(store, world, |_| options.clone(), body)
}

fn spawn_ranks<R: Send>(
    store: &Arc<dyn Store>,
    world: usize,
    options: impl Fn(usize) -> GroupOptions + Sync,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, options, body) = (Arc::clone(store), options(rank), &body);
                scope.spawn(move || {
                    let group = Group::new(store, rank, world, options);
                    body(group.unwrap_or_else(|error| panic!("rank {rank}: {error}")))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Element types that can represent small whole numbers.
pub(crate) trait Sample: Element + PartialEq + std::fmt::Debug {
    fn of(number: i64) -> Self;

    /// A number that this element type can represent.
    fn number(any: i64) -> i64 {
        any
    }
}

macro_rules! samples {
    ($($t:ty, |$number:ident| $make:expr, |$any:ident| $fit:expr;)*) => {$(
        impl Sample for $t {
            fn of($number: i64) -> Self {
                $make
            }
            fn number($any: i64) -> i64 {
                $fit
            }
        }
    )*};
}

samples! {
    i8, |n| n as Self, |n| n;
    i16, |n| n as Self, |n| n;
    i32, |n| n as Self, |n| n;
    i64, |n| n, |n| n;
    u8, |n| n as Self, |n| n.abs();
    u16, |n| n as Self, |n| n.abs();
    u32, |n| n as Self, |n| n.abs();
    u64, |n| n as Self, |n| n.abs();
    f32, |n| n as Self, |n| n;
    f64, |n| n as Self, |n| n;
    f16, |n| Self::from_f32(n as f32), |n| n;
    bf16, |n| Self::from_f32(n as f32), |n| n;
    bool, |n| n != 0, |n| n.rem_euclid(2);
    Complex<f32>, |n| Self::from(n as f32), |n| n;
    Complex<f64>, |n| Self::from(n as f64), |n| n;
}

/// Calls `$check::<T>` with the arguments for every type of elements.
macro_rules! for_every_type {
    ($check:ident, $arguments:tt) => {{
        use convoke_comm::{Complex, bf16, f16};
        common::for_every_type!($check, $arguments, i8, i16, i32, i64, u8, u16, u32, u64, bool);
        common::for_every_type!($check, $arguments, f32, f64, f16, bf16, Complex<f32>, Complex<f64>);
    }};
    ($check:ident, $arguments:tt, $($t:ty),*) => {
        $($check::<$t> $arguments;)*
    };
}
pub(crate) use for_every_type;
