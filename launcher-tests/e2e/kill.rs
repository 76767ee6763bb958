//! A launcher or guard that is killed at a random moment leaves no processes and no files behind.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use convoke_launcher_tests::harness::{Job, describe_process};
use convoke_testkit::programs::fault_injection_program;
use convoke_testkit::{Random, free_port, wait_until};

/// Number of kills for each of the two processes, over all phases.
const KILLS: u64 = 200;
/// A promised deadline with an allowance for a busy machine; the typical time is milliseconds.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The job has two failing attempts, then a successful one. Each worker leaves a process that forked twice
/// and has its own session. Rank 1 ends the attempt while the others would continue.
const WORKER: &str = r#"
setsid --fork sh -c 'sleep 1000 & sleep 1000'
sh -c 'setsid --fork sleep 1000 &'
echo "$MASTER_ADDR $MASTER_PORT" > "$JOB/master.$TORCHELASTIC_RESTART_COUNT.$$" 
if [ "$RANK" = 1 ]; then sleep 0.02; [ "$TORCHELASTIC_RESTART_COUNT" = 2 ]; exit $?; fi
[ "$TORCHELASTIC_RESTART_COUNT" = 2 ] || sleep 1000
"#;

/// Fault points of the launcher in such a job, and the number of times that it passes each.
const LAUNCHER_POINTS: [(&str, u64); 9] = [
    ("starting", 1),
    ("joining", 3),
    ("spawning", 9),
    ("running", 3),
    ("stopping", 4),
    ("restarting", 2),
    ("waiting", 1),
    ("ending", 1),
    ("starting", 1),
];
/// Fault points of the guard in such a job, and the number of times that it passes each.
const GUARD_POINTS: [(&str, u64); 5] =
    [("spawning", 9), ("signalling", 4), ("sweeping", 3), ("leaving", 1), ("spawning", 9)];

fn seed() -> u64 {
    let seed = std::env::var("CONVOKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    println!("CONVOKE_SEED={seed}");
    seed
}

/// Returns the names of the files in /dev/shm.
fn shared_memory() -> BTreeSet<OsString> {
    std::fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name()).collect()
}

/// Runs one job and kills `who` at a moment that `seed` selects. Returns true if the kill came before the
/// job ended.
fn kill_once(who: &str, points: &[(&str, u64)], seed: u64) -> bool {
    let mut random = Random::from_seed(seed);
    let mut random = |bound: u64| random.next() % bound;
    let (point, times) = points[usize::try_from(random(points.len() as u64)).unwrap()];
    let (nth, delay_us) = (1 + random(times), if random(4) == 0 { 0 } else { random(30_000) });
    let plan = format!("{who}:{point}:{nth}:{delay_us}");
    let job = Job::new();
    let worker = job.script(WORKER);
    let before = shared_memory();
    // The port stays reserved, so that no other process serves it after the job.
    let port = format!("--master-port={}", free_port());
    let flags = ["--nproc-per-node=3", "--max-restarts=2", "--shutdown-timeout=1", "--log-dir=logs", &port];
    let mut command = job.command_for_program(fault_injection_program("convoke-faults"), flags);
    command.arg(&worker).env("CONVOKE_FAULT", &plan);
    let ended = job.start(command).wait();
    let context = || format!("plan {plan}: {}\n{}", ended.status, ended.stderr);
    println!("{}", context());
    let hit = match who {
        "launcher" => ended.status.signal() == Some(9),
        _ => ended.stderr.contains("guard process"),
    };
    if hit && who == "launcher" {
        job.wait_until_no_processes(END_LIMIT);
    }
    // If a launcher ends by itself, no process of the job may outlive it.
    let left: Vec<_> = job.processes().into_iter().map(describe_process).collect();
    assert!(left.is_empty(), "left over: {left:?}; {}", context());
    if !hit {
        assert_eq!(ended.status.code(), Some(0), "{}", context());
    } else if who == "guard" {
        assert_eq!(ended.status.code(), Some(1), "{}", context());
    }
    for entry in std::fs::read_dir(job.dir.path()).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("master.") {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            if let Some((host, port)) = text.trim().split_once(' ') {
                let port: u16 = port.parse().unwrap();
                assert!(
                    TcpStream::connect((host, port)).is_err(),
                    "port {port} is still served; {}",
                    context()
                );
            }
        }
    }
    let temporary: Vec<_> = std::fs::read_dir(job.path("tmp")).unwrap().flatten().map(|e| e.path()).collect();
    assert!(temporary.is_empty(), "temporary files {temporary:?}; {}", context());
    // Other tests may have files in /dev/shm for a while.
    wait_until("shared memory to be freed", || (&shared_memory() - &before).is_empty().then_some(()));
    hit
}

fn kill_often(who: &str, points: &[(&str, u64)]) {
    let seed = seed();
    let hits = (0..KILLS).filter(|round| kill_once(who, points, seed ^ (round + 1))).count();
    println!("{who} killed in {hits} of {KILLS} jobs");
    assert!(hits as u64 > KILLS / 2, "the plans hardly ever come true: {hits} of {KILLS}");
}

#[test]
fn killed_launcher_leaves_no_process() {
    kill_often("launcher", &LAUNCHER_POINTS);
}

#[test]
fn killed_guard_leaves_no_process() {
    kill_often("guard", &GUARD_POINTS);
}
