//! Runs ranks as threads that share an in-memory store.

use std::sync::Arc;
use std::time::Duration;

use convoke_comm::{Group, GroupOptions};
use convoke_store::{MemoryStore, Store};
pub(crate) use convoke_testkit::TimedBarrier;

/// Timeout of operations that should succeed.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Runs `body` on `world` ranks and returns their results, ordered by rank.
pub(crate) fn ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    each(world, |_, options| options, body)
}

/// Runs [`ranks`], but starts `body` only after a barrier on all ranks, so that no failure interrupts setup.
pub(crate) fn ranks_together<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let gate = TimedBarrier::new(world);
    ranks(world, |group| {
        group.barrier().unwrap();
        gate.wait();
        body(group)
    })
}

/// Runs [`ranks`] with rank `i` on the host `hosts[i]`, and with the given choice of algorithms.
pub(crate) fn on_hosts<R: Send>(
    hosts: &[usize],
    algorithms: &str,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let on_host = |rank: usize, options: GroupOptions| {
        options.algorithms(algorithms.parse().unwrap()).locality_domain(hosts[rank].to_string())
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
