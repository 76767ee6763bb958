//! Survivors continue in a new group, ranks as threads. `processes.rs` has ranks that die.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    CommError, Group, LONG, ReduceOp, TimedBarrier, options, run_on_store, run_ranks, run_ranks_together,
};
use convoke_store::{MemoryStore, Store, StoreServer, TcpStore};

/// The timeout for ranks of which some are absent.
const SHORT: Duration = Duration::from_secs(1);

/// Checks that the new group has these ranks of the first one, in this order, and works.
fn check(group: &Group, me: usize, survivors: &[usize]) {
    assert_eq!(group.global_ranks(), survivors);
    assert_eq!((group.size(), group.global_rank(group.rank())), (survivors.len(), Some(me)));
    assert_eq!(group.group_rank(me), Some(group.rank()));
    for count in [1, 100_000] {
        let mut sum = vec![me as u64; count];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert!(sum.iter().all(|&sum| sum == survivors.iter().sum::<usize>() as u64));
    }
}

#[test]
fn shrink_after_an_abort_creates_a_new_generation() {
    run_ranks_together(4, |group| {
        let me = group.rank();
        if me == 3 {
            group.abort("once more");
        }
        assert!(matches!(group.barrier(), Err(CommError::Aborted { by: 3, .. })));
        let again = group.shrink(LONG).unwrap();
        check(&again, me, &[0, 1, 2, 3]);
        assert_ne!((again.generation(), again.name()), (group.generation(), group.name()));
        assert_eq!(again.timeout(), group.timeout());
        // The old group stays failed, and can be shrunk only once.
        assert!(matches!(group.barrier(), Err(CommError::Aborted { by: 3, .. })));
        assert!(matches!(group.shrink(LONG), Err(CommError::InvalidArgument(_))));
        drop(group);
        check(&again, me, &[0, 1, 2, 3]);
    });
}

#[test]
fn shrink_aborts_a_working_group_first() {
    run_ranks_together(3, |group| {
        let me = group.rank();
        if me > 0 {
            let error =
                if me == 1 { group.barrier() } else { group.recv(&mut [0], 0, 0).map(drop) }.unwrap_err();
            assert!(matches!(error, CommError::Aborted { by: 0, .. }), "{error}");
        }
        check(&group.shrink(LONG).unwrap(), me, &[0, 1, 2]);
    });
}

#[test]
fn group_can_shrink_repeatedly_down_to_one() {
    let checked: Vec<TimedBarrier> = (0..5).map(|first| TimedBarrier::new(5 - first)).collect();
    run_ranks(5, |world| {
        let me = world.rank();
        let mut group = world;
        // The first rank leaves each time, so that rank 0 is another one each time.
        for (first, checked) in checked.iter().enumerate() {
            check(&group, me, &(first..5).collect::<Vec<_>>());
            checked.wait();
            if me == first {
                return;
            }
            // The rank that left is not waited for, but the group ended because of it.
            assert!(matches!(group.barrier(), Err(CommError::PeerLost { rank: 0, .. })));
            group = group.shrink(LONG).unwrap();
        }
    });
}

#[test]
fn late_rank_is_excluded_by_shrink_and_learns_it() {
    let gone_on = TimedBarrier::new(4);
    run_ranks_together(4, |group| {
        let me = group.rank();
        if me == 1 {
            gone_on.wait();
        } else {
            let error = group.with_timeout(SHORT).barrier().unwrap_err();
            assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [1]), "{error}");
        }
        let start = Instant::now();
        let result = group.shrink(if me == 1 { LONG } else { SHORT });
        if me == 1 {
            // A second request gets the error as well.
            for error in [result.unwrap_err(), group.shrink(LONG).unwrap_err()] {
                assert!(
                    matches!(&error, CommError::Excluded { survivors, .. } if *survivors == [0, 2, 3]),
                    "{error}"
                );
            }
            assert!(start.elapsed() < LONG / 2);
        } else {
            check(&result.unwrap(), me, &[0, 2, 3]);
            gone_on.wait();
        }
    });
}

#[test]
fn subgroup_can_shrink_separately() {
    let formed = TimedBarrier::new(4);
    run_ranks(5, |world| {
        let me = world.rank();
        let Some(part) = world.subgroup(&[4, 2, 0, 1]).unwrap() else { return world.barrier().unwrap() };
        formed.wait();
        if me == 2 {
            drop(part);
        } else {
            assert!(matches!(part.barrier(), Err(CommError::PeerLost { rank: 1, .. })));
            let left = part.shrink(LONG).unwrap();
            check(&left, me, &[4, 0, 1]);
            let pair = left.subgroup(&[2, 0]).unwrap();
            assert_eq!(pair.is_some(), me != 0);
            pair.into_iter().for_each(|pair| check(&pair, me, &[1, 4]));
        }
        world.barrier().unwrap();
    });
}

#[test]
fn group_of_one_can_shrink() {
    run_ranks(1, |group| {
        let again = group.shrink(LONG).unwrap();
        assert_ne!(again.generation(), group.generation());
        again.barrier().unwrap();
    });
}

/// The key under which a shrink of the group stores data.
fn key(group: &Group, what: &str) -> String {
    format!("convoke/{}/{}/shrink/{what}", group.name(), group.generation())
}

/// Three ranks shrink, while rank 1 only pretends to: it stays until the survivors are decided.
fn shrink_with_faulty_rank(name: &str, misbehave: impl Fn(&Arc<dyn Store>, Group) + Sync) {
    let (store, formed): (Arc<dyn Store>, _) = (Arc::new(MemoryStore::new()), TimedBarrier::new(4));
    run_on_store(&store, 4, &options().name(name), |group| {
        let me = group.rank();
        group.barrier().unwrap();
        formed.wait();
        if me == 2 {
            group.abort("go on");
        }
        assert!(group.barrier().is_err());
        if me == 1 {
            let soon = Instant::now() + LONG;
            store.append(key(&group, "came").as_bytes(), b"1 ", soon).unwrap();
            store.wait(&[key(&group, "decided").as_bytes()], soon).unwrap();
            misbehave(&store, group);
        } else {
            let left = group.shrink(Duration::from_secs(2)).unwrap();
            check(&left, me, &[0, 2, 3]);
        }
    });
}

#[test]
fn shrink_agrees_again_if_a_rank_dies_after_the_decision() {
    shrink_with_faulty_rank("lost early", |_, group| drop(group));
}

#[test]
fn shrink_agrees_again_if_a_rank_dies_after_formation() {
    shrink_with_faulty_rank("lost late", |store, group| {
        let soon = Instant::now() + LONG;
        let decision = store.get(key(&group, "decided").as_bytes(), soon).unwrap();
        let decision: serde_json::Value = serde_json::from_slice(&decision).unwrap();
        let generation = decision["generation"].as_str().unwrap().parse().unwrap();
        let options = options().name(format!("{}/shrunk", group.name())).generation(generation);
        let formed = Group::new(Arc::clone(store), 1, 4, options).unwrap();
        drop((formed, group));
    });
}

#[test]
fn shrink_without_the_store_is_an_error() {
    let server = StoreServer::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap();
    let address = format!("127.0.0.1:{}", server.port());
    let (formed, lost) = (TimedBarrier::new(3), TimedBarrier::new(3));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (address, formed, lost) = (&address, &formed, &lost);
            scope.spawn(move || {
                let store: Arc<dyn Store> =
                    Arc::new(TcpStore::connect(address, Instant::now() + LONG).unwrap());
                let group = Group::new(store, rank, 2, options()).unwrap();
                group.barrier().unwrap();
                formed.wait();
                lost.wait();
                let start = Instant::now();
                let error = group.shrink(LONG).unwrap_err();
                assert!(matches!(error, CommError::Store(_)), "{error}");
                assert!(start.elapsed() < LONG / 2);
            });
        }
        formed.wait();
        drop(server);
        lost.wait();
    });
}
