//! Ranks as threads around a store in memory.
#![allow(dead_code, unused_imports, unused_macros, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) use convoke_comm::{CommError, Group, GroupOptions, ReduceOp};
use convoke_comm::{Complex, Element, bf16, f16};
use convoke_store::{MemoryStore, Store};

/// Bound for anything that should succeed.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn options() -> GroupOptions {
    GroupOptions::default().timeout(LONG).init_timeout(LONG)
}

/// Runs `body` on `world` ranks and returns what each returned, in order.
pub(crate) fn ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    with_options(world, GroupOptions::default(), body)
}

pub(crate) fn with_options<R: Send>(
    world: usize,
    options: GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let name = format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let options = options.timeout(LONG).init_timeout(LONG).name(name);
    on(&store, world, &options, body)
}

/// As [`with_options`], on a given store with exactly these options.
pub(crate) fn on<R: Send>(
    store: &Arc<dyn Store>,
    world: usize,
    options: &GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, body) = (Arc::clone(store), &body);
                scope.spawn(move || {
                    let group = Group::new(store, rank, world, options.clone());
                    body(group.unwrap_or_else(|error| panic!("rank {rank}: {error}")))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A port that nobody uses now, below those that the system picks for connections.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let number = std::process::id() as usize * 61 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (number % 10_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Whether tests run in their whole form.
pub(crate) fn is_full() -> bool {
    std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1")
}

/// Elements that stand for small whole numbers.
pub(crate) trait Sample: Element + PartialEq + std::fmt::Debug {
    fn of(number: i64) -> Self;

    /// A number that such an element can stand for.
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
