//! Many groups at once, with ranks as processes: what they cost, and that nothing of them is left.
//!
//! The test binary starts itself as the ranks (`rank` below).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Group, LONG, ReduceOp};
use convoke_comm::Session;
use convoke_store::StoreServer;
use convoke_testkit::{subprocess_test, subprocess_variable};
use nix::sys::resource::{Resource, setrlimit};

const RANKS: usize = 16;
/// Calls that make groups of 4 ranks, four in each call, and calls that make a group of all ranks.
const SPLITS_BY_4: usize = 50;
const GROUPS_OF_16: usize = 20;
/// Most memory of all groups together, in KiB, and most descriptors of each rank.
const MOST_KIB: i64 = 64 << 10;
const MOST_DESCRIPTORS: i64 = 40;
/// Cycles of making, using and dropping groups one after the other.
const CYCLES: usize = 200;

/// What a process uses: open descriptors, and memory in KiB. Memory that processes share is divided among
/// them; page tables count too.
fn usage() -> [i64; 2] {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count() as i64;
    let kib = |file: &str, name: &str| -> i64 {
        let text = std::fs::read_to_string(file).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    [descriptors, kib("/proc/self/smaps_rollup", "Pss:") + kib("/proc/self/status", "VmPTE:")]
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// Adds up ones in `group`.
fn use_once(group: &Group) {
    let mut sum = [1_u64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [group.size() as u64]);
}

/// Returns the sums over all ranks of what they used more than `before`, and the most descriptors of a rank.
fn growth(world: &Group, before: [i64; 2]) -> (i64, i64) {
    world.barrier().unwrap();
    let now = usage();
    let (mut kib, mut descriptors) = ([now[1] - before[1]], [now[0] - before[0]]);
    world.all_reduce(&mut kib, ReduceOp::Sum).unwrap();
    world.all_reduce(&mut descriptors, ReduceOp::Max).unwrap();
    (kib[0], descriptors[0])
}

#[test]
#[ignore = "what the processes run that the test starts"]
fn rank() {
    let memory = subprocess_variable("CONVOKE_TEST_MEMORY") == "on";
    setrlimit(Resource::RLIMIT_NOFILE, 1024, 1024).unwrap();
    let options = move |options: convoke_comm::GroupOptions| {
        options.timeout(LONG).init_timeout(LONG).shared_memory(memory)
    };
    let world = Session::join().unwrap().with_options(options).world().unwrap();
    let me = world.rank();
    use_once(&world);
    let before = usage();
    let (mut times, mut used) = (Vec::new(), Duration::ZERO);
    let mut groups = Vec::new();
    for round in 0..SPLITS_BY_4 + GROUPS_OF_16 {
        let color = if round < SPLITS_BY_4 { (me + round * (me / 4)) % 4 } else { 0 };
        let (start, cpu) = (Instant::now(), cpu_time());
        groups.push(world.split(Some(color as u32), 0).unwrap().unwrap());
        times.push(start.elapsed());
        used += cpu_time() - cpu;
        use_once(&groups[round]);
    }
    assert!(groups[..SPLITS_BY_4].iter().all(|group| group.size() == 4));
    let (kib, descriptors) = growth(&world, before);
    times.sort_unstable();
    if me == 0 {
        let (median, used) = (times[times.len() / 2], used / times.len() as u32);
        println!(
            "@ all {kib} KiB, {descriptors} descriptors, formed in {median:?} (median), {used:?} of CPU time"
        );
    }
    // Groups that are dropped free all that they had.
    groups.iter().rev().for_each(use_once);
    drop(groups);
    for _ in 0..CYCLES / 10 {
        use_once(&world.split(Some(0), 0).unwrap().unwrap());
    }
    world.barrier().unwrap();
    let warm = usage();
    for cycle in 0..CYCLES {
        let group = world.split(Some((me / 4) as u32), 0).unwrap().unwrap();
        use_once(&group);
        if cycle % 10 == 0 {
            // A rank that has passed the barrier may abort before another has.
            let _ = group.barrier();
            group.abort("enough");
        }
    }
    let (kib, descriptors) = growth(&world, warm);
    if me == 0 {
        println!("@ dropped {kib} KiB, {descriptors} descriptors");
    }
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs the ranks. Returns, for the groups that exist together and for those that were dropped, KiB of all
/// ranks and descriptors of a rank.
fn measure(memory: &str) -> [(i64, i64); 2] {
    let store = StoreServer::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap();
    let start = |rank: usize| {
        let mut command = subprocess_test("rank");
        command.env("CONVOKE_TEST_MEMORY", memory);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut ranks = Ranks((0..RANKS).map(start).collect());
    let first = ranks.0.remove(0).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    assert!(first.status.success(), "{text}");
    let deadline = Instant::now() + Duration::from_secs(60);
    for child in &mut ranks.0 {
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "a rank does not end");
            std::thread::yield_now();
        };
        assert!(status.success(), "{text}");
    }
    ["@ all", "@ dropped"].map(|what| {
        let line = text.lines().find_map(|line| Some(line.split_once(what)?.1)).unwrap();
        println!("memory {memory}:{what}{line}");
        let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
        (numbers.next().unwrap(), numbers.next().unwrap())
    })
}

#[test]
fn many_groups_take_little_memory_and_few_descriptors() {
    for memory in ["on", "off"] {
        let [(kib, descriptors), (left_kib, left_descriptors)] = measure(memory);
        assert!(kib <= MOST_KIB, "{kib} KiB");
        assert!(descriptors <= MOST_DESCRIPTORS, "{descriptors} descriptors");
        assert!(left_descriptors <= 0, "{left_descriptors} descriptors are left");
        assert!(left_kib <= 16 << 10, "{left_kib} KiB are left");
    }
}
