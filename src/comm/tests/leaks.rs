//! A dropped group leaves nothing behind, and a waiting one uses no CPU. It is one test, since it measures
//! the resources of the whole process.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Group, ReduceOp, TimedBarrier, op};
use convoke_comm::Work;
use convoke_store::{MemoryStore, Store};
use convoke_testkit::skip;
use nix::sched::{CloneFlags, unshare};
use nix::sys::time::TimeValLike;

/// Cycles of making, using, aborting and dropping a group of three; CONVOKE_CYCLES sets another number.
const CYCLES: usize = 1000;
/// Cycles after which the process has reached its stable size.
const WARM_UP: usize = 100;

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

/// Waits until the count is no higher than before: the kernel closes asynchronously.
fn wait_until_at_most(what: &str, before: usize) {
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

/// Two ranks wait for a third, which sleeps. `with_pending_operation` adds an operation that nobody waits
/// for.
fn a_long_wait_uses_no_cpu(with_pending_operation: bool) {
    common::run_ranks(3, |group| {
        let peer = (group.rank() + 1) % 3;
        let message = with_pending_operation
            .then(|| group.start(op::recv(vec![0_u8], (group.rank() + 2) % 3)).unwrap());
        group.barrier().unwrap();
        let before = cpu_time();
        if group.rank() == 0 {
            std::thread::sleep(Duration::from_millis(500));
        }
        group.barrier().unwrap();
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(50), "{used:?}");
        if let Some(message) = message {
            group.send(&[1_u8], peer, 0).unwrap();
            message.wait().unwrap();
        }
    });
}

fn sockets() -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

/// A destroyed group frees its resources while its handles still exist.
fn a_destroyed_group_has_no_socket_and_no_thread() {
    let (before, threads, destroyed) = (sockets(), count("task"), TimedBarrier::new(3));
    common::run_ranks(3, |group| {
        group.start(op::barrier()).unwrap().wait().unwrap();
        group.destroy();
        destroyed.wait();
        let deadline = Instant::now() + Duration::from_secs(10);
        while sockets() > before || count("task") > threads + 3 {
            assert!(Instant::now() < deadline, "{} sockets instead of {before}", sockets());
            std::thread::yield_now();
        }
        destroyed.wait();
    });
}

/// Memory mappings, and resident memory in KiB.
fn memory() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = resident.trim().trim_end_matches(" kB").parse().unwrap();
    (std::fs::read_to_string("/proc/self/maps").unwrap().lines().count(), resident)
}

/// Gives this thread and its children a network without connections of others. Needs root.
fn has_own_network() -> bool {
    if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
        skip(format!("connections that keep their ports are not counted: no network of its own: {error}"));
        return false;
    }
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(up.success());
    true
}

/// Connections of this thread's network that have ended and keep their port for a minute.
fn waiting_ports() -> usize {
    let text = std::fs::read_to_string("/proc/thread-self/net/sockstat").unwrap();
    let waiting = text.split_whitespace().skip_while(|&word| word != "tw").nth(1).unwrap();
    waiting.parse().unwrap()
}

#[test]
fn dropped_group_leaks_nothing_and_waiting_group_uses_no_cpu() {
    let cycles = std::env::var("CONVOKE_CYCLES").map_or(CYCLES, |text| text.parse().unwrap());
    let counts_ports = has_own_network();
    // Counted before any group exists: a thread that was joined may still be visible for a moment.
    let (fds, threads) = (count("fd"), count("task"));
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    [false, true].into_iter().for_each(a_long_wait_uses_no_cpu);
    a_destroyed_group_has_no_socket_and_no_thread();
    let (mut warm, waiting) = (None, waiting_ports());
    for cycle in 0..cycles {
        if cycle == WARM_UP {
            warm = Some(memory());
        }
        let (made, used) = (TimedBarrier::new(4), TimedBarrier::new(4));
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
                        Err(error) => assert!(cycle % 6 >= 2, "{error}"),
                    }
                    match cycle % 6 {
                        // A message that is never received, or that goes to a rank that has left.
                        1 => drop(group.send(&[7_u8; 10_000], (rank + 1) % 3, 0)),
                        2 if rank == 0 => group.abort("enough"),
                        2 => drop(group.barrier()),
                        3 => drop(group.with_timeout(Duration::from_millis(2)).recv(
                            &mut [0],
                            (rank + 1) % 3,
                            9,
                        )),
                        // No thread waits for these operations; some never end.
                        4 => {
                            drop(group.start(op::all_reduce(vec![1_i64; 20_000], ReduceOp::Sum)));
                            drop(group.start(op::recv(vec![0_u8; 1000], (rank + 1) % 3).tag(9)));
                            drop(group.start(op::barrier()).map(Work::wait));
                            group.abort("enough");
                        }
                        5 => {
                            let mut sum = vec![1_i64; 20_000];
                            let subgroup = group.split(Some(0), 0).unwrap().unwrap();
                            let of_scope = subgroup.scope(|scope| {
                                drop(scope.start(op::all_reduce(&mut sum[..], ReduceOp::Sum))?);
                                scope.start(op::barrier()).map(drop)
                            });
                            of_scope.unwrap();
                            assert_eq!(sum[19_999], 3);
                        }
                        _ => {}
                    }
                });
            }
            made.wait();
            // The three ranks, and no thread of the groups.
            assert_eq!(count("task"), threads + 3);
            used.wait();
        });
        wait_until_at_most("fd", fds);
        wait_until_at_most("task", threads);
        let keys = store.list_keys(Instant::now() + Duration::from_secs(1)).unwrap();
        let left: Vec<_> = keys.iter().map(|key| String::from_utf8_lossy(key)).collect();
        // The reason of a group's end stays in the store, since a late rank must learn of it.
        assert!(left.iter().all(|key| key.ends_with("/abort")), "{left:?}");
    }
    // Of the ten connections of a cycle, those that both sides closed at once.
    let more = waiting_ports().saturating_sub(waiting);
    assert!(!counts_ports || more <= 6 * cycles, "{more} ports wait after {cycles} cycles");
    if let Some((mappings, resident)) = warm {
        let now = memory();
        assert!(now.0 <= mappings + 16, "{} mappings, {mappings} when warm", now.0);
        assert!(now.1 <= resident + 4096, "{} KiB, {resident} when warm", now.1);
    }
}
