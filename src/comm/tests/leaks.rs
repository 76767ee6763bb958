//! A dropped group leaves nothing behind, and a waiting one uses no CPU. One test: it looks at what the
//! whole process holds and uses.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{Group, ReduceOp};
use convoke_store::{MemoryStore, Store};
use nix::sys::time::TimeValLike;

/// Cycles of making, using and dropping a group of three; CONVOKE_CYCLES sets another number.
const CYCLES: usize = 200;

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

/// Waits until the process holds no more than before: closing is asynchronous in the kernel.
fn settles(what: &str, before: usize) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while count(what) > before {
        assert!(Instant::now() < deadline, "{what}: {} instead of {before}", count(what));
        std::thread::yield_now();
    }
}

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let sum = usage.user_time() + usage.system_time();
    Duration::from_micros(u64::try_from(sum.num_microseconds()).unwrap())
}

/// Two ranks that wait for a third which computes, here: sleeps.
fn a_long_wait_uses_no_cpu() {
    common::ranks(3, |group| {
        group.barrier().unwrap();
        let before = cpu_time();
        if group.rank() == 0 {
            std::thread::sleep(Duration::from_millis(500));
        }
        group.barrier().unwrap();
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(50), "{used:?}");
    });
}

#[test]
fn a_dropped_group_leaves_no_descriptor_no_thread_and_no_key_and_a_waiting_one_uses_no_cpu() {
    let cycles = std::env::var("CONVOKE_CYCLES").map_or(CYCLES, |text| text.parse().unwrap());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    a_long_wait_uses_no_cpu();
    let (fds, threads) = (count("fd"), count("task"));
    for cycle in 0..cycles {
        let (made, used) = (Barrier::new(4), Barrier::new(4));
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (store, made, used) = (Arc::clone(&store), &made, &used);
                scope.spawn(move || {
                    let group = Group::new(store, rank, 3, common::options()).unwrap();
                    made.wait();
                    used.wait();
                    let mut sum = vec![1_i64; 20_000];
                    match group.all_reduce(&mut sum, ReduceOp::Sum) {
                        Ok(()) => assert!(sum.iter().all(|&x| x == 3)),
                        // Rank 0 may be done, and abort, while others are not.
                        Err(error) => assert!(cycle % 4 >= 2, "{error}"),
                    }
                    match cycle % 4 {
                        // A message that nobody takes, or to somebody who has left.
                        1 => drop(group.send(&[7_u8; 10_000], (rank + 1) % 3, 0)),
                        2 if rank == 0 => group.abort("enough"),
                        2 => drop(group.barrier()),
                        3 => drop(group.with_timeout(Duration::from_millis(2)).recv(
                            &mut [0],
                            (rank + 1) % 3,
                            9,
                        )),
                        _ => {}
                    }
                });
            }
            made.wait();
            // The three ranks, and no thread of the groups.
            assert_eq!(count("task"), threads + 3);
            used.wait();
        });
        settles("fd", fds);
        settles("task", threads);
        let keys = store.list_keys(Instant::now() + Duration::from_secs(1)).unwrap();
        let left: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        // What ended a group stays: whoever is late must learn of it.
        assert!(left.iter().all(|key| key.ends_with("/abort")), "{left:?}");
    }
}
