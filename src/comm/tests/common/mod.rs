//! Ranks as threads around a store in memory.
#![allow(dead_code, unused_imports, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) use convoke_comm::{CommError, Group, GroupOptions, ReduceOp};
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
