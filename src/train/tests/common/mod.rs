//! Ranks as threads around a store in memory.

use std::sync::Arc;
use std::time::Duration;

use convoke_comm::{Group, GroupOptions};
use convoke_store::{MemoryStore, Store};
pub(crate) use convoke_testkit::Gate;

/// Bound for anything that should succeed.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Runs `body` on `world` ranks and returns what each returned, in order.
pub(crate) fn ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    each(world, |_, options| options, body)
}

/// As [`ranks`]; `body` begins when the group has worked on all of them, so that no failure can overtake that.
pub(crate) fn ranks_together<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let gate = Gate::new(world);
    ranks(world, |group| {
        group.barrier().unwrap();
        gate.wait();
        body(group)
    })
}

/// As [`ranks`], a rank on each of `hosts`, with these choices of algorithms.
pub(crate) fn on_hosts<R: Send>(
    hosts: &[usize],
    algorithms: &str,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let on_host = |rank: usize, options: GroupOptions| {
        options.algorithms(algorithms).part_of_host(hosts[rank].to_string())
    };
    each(hosts.len(), on_host, body)
}

fn each<R: Send>(
    world: usize,
    options: impl Fn(usize, GroupOptions) -> GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let options = options(rank, GroupOptions::default().timeout(LONG).init_timeout(LONG));
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let group = Group::new(store, rank, world, options);
                body(group.unwrap_or_else(|error| panic!("rank {rank}: {error}")))
            })
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
