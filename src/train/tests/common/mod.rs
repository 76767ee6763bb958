//! Ranks as threads around a store in memory.
#![allow(dead_code, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use convoke_comm::{Group, GroupOptions};
use convoke_store::{MemoryStore, Store};

#[path = "../../../comm/testing/gate.rs"]
mod gate;
pub(crate) use gate::Gate;

/// Bound for anything that should happen.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Runs `body` on `world` ranks and returns what each returned, in order.
pub(crate) fn ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_hosts(&vec![0; world], body)
}

/// As [`ranks`]; `body` begins when the group is there on all of them, so that no failure can overtake that.
pub(crate) fn ranks_together<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let gate = Gate::new(world);
    ranks(world, |group| {
        group.barrier().unwrap();
        gate.wait();
        body(group)
    })
}

/// As [`ranks`], a rank on each of `hosts`.
pub(crate) fn on_hosts<R: Send>(hosts: &[usize], body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..hosts.len())
            .map(|rank| {
                let options = GroupOptions::default().timeout(LONG).init_timeout(LONG).name(name.clone());
                let options = options.part_of_host(hosts[rank].to_string());
                let (store, body) = (Arc::clone(&store), &body);
                scope.spawn(move || body(Group::new(store, rank, hosts.len(), options).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
