//! Jobs of ranks that share memory on one host. The test kills one rank at a random fault point: in a call,
//! between calls, while the group forms or while it leaves.
//! The other ranks must report the loss of that rank or get right results, and no resource may leak.
//!
//! CONVOKE_FULL=1 kills a thousand times, CONVOKE_KILLS=N kills N times. The ranks run `worker/killed.rs`.

use std::collections::{BTreeMap, BTreeSet};

use convoke_launcher_tests::kills::WORLD_SIZE;
use convoke_store::StoreServer;
use convoke_testkit::process::{self, Process};
use convoke_testkit::programs::fault_injection_program;
use convoke_testkit::{Random, is_full_test_run, wait_until};

/// Number of kills in the short form.
const KILLS: u64 = 60;

/// Runs one job and returns each rank's output, or `None` for the rank that was killed.
fn run(victim: usize, fault_point: Option<u64>) -> Vec<Option<String>> {
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let ranks: Vec<Process> = (0..WORLD_SIZE)
        .map(|rank| {
            let mut command = process::program(fault_injection_program("test-worker-faults"));
            process::set_rank_variables(&mut command, rank, WORLD_SIZE, store.port());
            command.args(["killed", &victim.to_string()]);
            command.args(fault_point.filter(|_| rank == victim).map(|fault_point| fault_point.to_string()));
            Process::start(&mut command)
        })
        .collect();
    let ended = ranks.into_iter().enumerate().map(|(rank, process)| {
        let output = process.wait();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let was_killed = rank == victim && output.status.code().is_none();
        let (said, error) = (text(&output.stdout), text(&output.stderr));
        let context = format!("rank {rank}, victim {victim} at {fault_point:?}");
        assert!(was_killed || output.status.success(), "{context}: {said} {error}");
        (!was_killed).then_some(said)
    });
    ended.collect()
}

/// Returns the abstract names of the Unix sockets that local ranks use for bootstrap: "convoke-" and
/// hexadecimal digits.
fn sockets() -> BTreeSet<String> {
    let text = std::fs::read_to_string("/proc/net/unix").unwrap();
    let names = text.lines().filter_map(|line| line.split("@convoke-").nth(1));
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit())).map(str::to_owned).collect()
}

#[test]
fn survivors_name_a_rank_killed_at_any_time() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let kills = number("CONVOKE_KILLS").unwrap_or(if is_full_test_run() { 1000 } else { KILLS });
    let mut random = Random::new("kills::survivors_name_a_rank_killed_at_any_time");
    let mut below = |bound: u64| random.next() % bound;
    let before = sockets();
    let whole = run(0, None);
    let fault_points =
        whole[0].as_deref().and_then(|said| said.split("after ").nth(1)?.split(' ').next()?.parse().ok());
    let fault_points: u64 = fault_points.unwrap_or_else(|| panic!("{whole:?}"));
    let (mut ends, mut killed, mut runs) = (BTreeMap::new(), 0, 0);
    while killed < kills {
        // One run in eight kills within the first 40 fault points, in which the group forms. An equal share
        // for formation would test calls too rarely.
        let fault_point = if runs % 8 == 0 { below(40) } else { below(fault_points) };
        let victim = below(WORLD_SIZE as u64) as usize;
        let ended = run(victim, Some(fault_point));
        let through = ended.iter().flatten().filter(|said| said.contains("through")).count();
        // The victim may finish before the chosen point, because ranks pass different numbers of fault
        // points.
        let was_killed = ended[victim].is_none();
        killed += u64::from(was_killed);
        runs += 1;
        *ends.entry((was_killed, through)).or_insert(0) += 1;
        assert!(runs < 3 * kills, "{ends:?} of {fault_points} fault points");
    }
    for ((was_killed, through), times) in &ends {
        let what = if *was_killed { "killed" } else { "not reached" };
        println!("{what}: {times} times, {through} ranks through");
    }
    // Other tests hold sockets with such names for a short time.
    wait_until("the names of all sockets to be gone", || (&sockets() - &before).is_empty().then_some(()));
}
