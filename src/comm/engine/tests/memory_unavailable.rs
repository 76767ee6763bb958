//! Ranks of a host that cannot share memory: one of them has none, cannot map it, or has no permission.

use std::sync::Arc;

use convoke_store::{MemoryStore, Store};

use super::LONG;
use crate::api::backend::Backend;
use crate::api::group::Group;
use crate::api::op;
use crate::bootstrap::options::GroupOptions;
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::shm::segment::{INJECTED_FAULT, InjectedFault};

/// Runs three ranks, of which rank `who` cannot do what `failing` names. Returns the backend and the sum of
/// each rank.
fn with_failing_rank(who: usize, failing: InjectedFault) -> Vec<(Backend, i32)> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    INJECTED_FAULT.set((rank == who).then_some(failing));
                    let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                    let group = Group::new(store, rank, 3, options).unwrap();
                    let mut sum = [rank as i32];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    group.run((op::send(&sum, (rank + 1) % 3), op::recv(&mut [0], (rank + 2) % 3))).unwrap();
                    (group.backend(), sum[0])
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_ranks_use_tcp_if_one_cannot_share_memory() {
    for failing in [InjectedFault::Create, InjectedFault::Commit, InjectedFault::Map] {
        for who in 0..3 {
            // Only the first rank creates the shared memory.
            let all = if failing == InjectedFault::Create && who > 0 {
                Backend::SharedMemory
            } else {
                Backend::Tcp
            };
            assert_eq!(with_failing_rank(who, failing), [(all, 3); 3], "{failing:?} at rank {who}");
        }
    }
}

#[test]
fn alloc_uses_private_memory_if_one_rank_cannot_share() {
    for failing in [InjectedFault::Create, InjectedFault::Commit, InjectedFault::Map] {
        for who in 0..3 {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
            let rank = &|rank: usize| {
                let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                let group = Group::new(Arc::clone(&store), rank, 3, options).unwrap();
                INJECTED_FAULT.set((rank == who).then_some(failing));
                let mut buffer = group.alloc::<u32>(10_000).unwrap();
                INJECTED_FAULT.set(None);
                buffer.fill(1);
                group.all_reduce(&mut buffer[..], ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|&sum| sum == 3));
                // The next allocation works.
                (buffer.is_shared(), group.alloc::<u32>(10_000).unwrap().is_shared())
            };
            let all = std::thread::scope(|scope| {
                let ranks = [0, 1, 2].map(|number| scope.spawn(move || rank(number)));
                ranks.map(|rank| rank.join().unwrap())
            });
            let can = failing == InjectedFault::Create && who > 0;
            assert_eq!(all, [(can, true); 3], "{failing:?} at rank {who}");
        }
    }
}

#[test]
fn shared_memory_is_default_and_differing_settings_are_an_error() {
    for wanted in [[true, true], [false, false], [true, false]] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                    match Group::new(store, rank, 2, options.shared_memory(wanted[rank])) {
                        Ok(group) => {
                            let backend = if wanted[0] { Backend::SharedMemory } else { Backend::Tcp };
                            assert_eq!((group.backend(), wanted[0]), (backend, wanted[1]));
                        }
                        Err(error) => {
                            let named = matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [1]);
                            assert!(named && error.to_string().contains("CONVOKE_SHM"), "{error}");
                            assert_ne!(wanted[0], wanted[1]);
                        }
                    }
                });
            }
        });
    }
}

/// Runs `body` on three ranks that share memory.
fn with_shared_memory(body: impl Fn(Group) + Sync) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                let group = Group::new(store, rank, 3, options).unwrap();
                assert_eq!(group.backend(), Backend::SharedMemory);
                body(group);
            });
        }
    });
}

#[test]
fn subgroup_uses_connections_if_one_rank_cannot_map_its_memory() {
    for who in 0..3 {
        with_shared_memory(|world| {
            INJECTED_FAULT.set((world.rank() == who).then_some(InjectedFault::Commit));
            let group = world.split(Some(0), 0).unwrap().unwrap();
            INJECTED_FAULT.set(None);
            let mut sum = [1; 1000];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!((group.backend(), sum), (Backend::Tcp, [3; 1000]));
        });
    }
}

#[test]
fn lack_of_memory_for_a_call_ends_its_group_on_all_ranks_and_no_other_group() {
    for count in [1, 100_000] {
        with_shared_memory(|world| {
            let (group, other) = (world.split(Some(0), 0).unwrap(), world.split(Some(0), 0).unwrap());
            let (group, other) = (group.unwrap(), other.unwrap());
            INJECTED_FAULT.set((world.rank() == 1).then_some(InjectedFault::Commit));
            let error = group.all_reduce(&mut vec![1_u64; count], ReduceOp::Sum).unwrap_err();
            INJECTED_FAULT.set(None);
            assert!(matches!(error, CommError::Exhausted { rank: 1, .. }), "{error}");
            assert!(error.to_string().contains("rank 1 has run out of memory"), "{error}");
            // As for collectives, but the sender of a message writes the memory.
            INJECTED_FAULT.set((world.rank() == 1).then_some(InjectedFault::Commit));
            let error = match world.rank() {
                1 => other.send(&[7_u8; 100], 0, 0).unwrap_err(),
                0 => other.recv(&mut [0_u8; 100], 1, 0).unwrap_err(),
                _ => other.barrier().unwrap_err(),
            };
            INJECTED_FAULT.set(None);
            assert!(matches!(error, CommError::Exhausted { rank: 1, .. }), "{error}");
            world.barrier().unwrap();
            world.split(Some(0), 0).unwrap().unwrap().barrier().unwrap();
        });
    }
}
