//! Ranks of one host that share memory, one of which is killed at a random moment: in a call, between two, while the group
//! forms or while it leaves. The others get that rank's loss or right results, and nothing is left anywhere.
//!
//! CONVOKE_FULL=1 kills a thousand times, CONVOKE_KILLS so many times. The test binary starts itself as the ranks.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use convoke_comm::{Backend, CommError, ReduceOp, Session, on_moment};
use convoke_store::StoreServer;
use nix::sys::signal::{Signal, raise};

#[path = "../src/comm/testing/process.rs"]
mod process;
use process::Process;

/// Ranks of each job.
const WORLD: usize = 3;
/// Within this the survivors must know. Who dies before the others have met it is noticed when they have waited for it.
const SOON: Duration = Duration::from_secs(10);
const FORMING: Duration = Duration::from_secs(2);
/// Kills in the short form.
const KILLS: u64 = 60;
const ROUNDS: usize = 4;

// ---------------------------------------------------------------- the rank's side

/// Moments so far, and at which this process dies.
static MOMENTS: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(u64::MAX);

/// Not a test: what the processes run that the test starts.
#[test]
fn worker() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let Some(victim) = number("CONVOKE_TEST_VICTIM") else { return };
    LAST.store(number("CONVOKE_TEST_MOMENT").unwrap_or(u64::MAX), Ordering::Relaxed);
    on_moment(|_| {
        if MOMENTS.fetch_add(1, Ordering::Relaxed) == LAST.load(Ordering::Relaxed) {
            // It cannot fail for oneself.
            let _ = raise(Signal::SIGKILL);
        }
    });
    let (before, begin) = (descriptors(), Instant::now());
    let mut formed = false;
    let outcome = job(&mut formed);
    let lost =
        |error: &CommError| matches!(error, CommError::PeerLost { rank, .. } if *rank as u64 == victim);
    match outcome {
        Ok(()) => println!("through after {} moments", MOMENTS.load(Ordering::Relaxed)),
        Err(error) if !formed || lost(&error) => println!("lost"),
        Err(error) => panic!("{error}"),
    }
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    // What of the memory, the doorbells and the connections is still open would be found here.
    assert_eq!(descriptors(), before);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:convoke"), "{maps}");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Calls of all kinds, small, large, in memory of `alloc` and messages, each with a result that is looked at.
fn job(formed: &mut bool) -> Result<(), CommError> {
    let mut session = Session::join()?.with_options(|options| options.timeout(SOON).init_timeout(FORMING));
    let world = session.world()?;
    *formed = true;
    assert_eq!(world.backend(), Backend::SharedMemory);
    let (rank, next, previous) =
        (world.rank(), (world.rank() + 1) % WORLD, (world.rank() + WORLD - 1) % WORLD);
    let mut direct = world.alloc::<f32>(200_000)?;
    let (mut large, mut all) = (vec![0_u32; 100_000], vec![0_u16; WORLD * 30_000]);
    let (mut message, mut answer) = (vec![0_u64; 20_000], vec![0_u64; 20_000]);
    for round in 1..=ROUNDS {
        let mut small = [rank + round; 3].map(|x| x as i64);
        world.all_reduce(&mut small, ReduceOp::Sum)?;
        assert_eq!(small, [(WORLD * round + 3) as i64; 3]);
        large.fill((rank * round) as u32);
        world.all_reduce(&mut large, ReduceOp::Max)?;
        assert!(large.iter().all(|&x| x == (2 * round) as u32), "all_reduce");
        direct.fill((rank + round) as f32);
        world.all_reduce(&mut direct[..], ReduceOp::Sum)?;
        assert!(direct.iter().all(|&x| x == (WORLD * round + 3) as f32), "all_reduce in memory of alloc");
        let root = round % WORLD;
        large.fill(rank as u32);
        world.broadcast(&mut large, root)?;
        assert!(large.iter().all(|&x| x == root as u32), "broadcast");
        world.all_gather(&[(rank + round) as u16; 30_000], &mut all)?;
        let right = |(from, block): (usize, &[u16])| block.iter().all(|&x| x == (from + round) as u16);
        assert!(all.chunks(30_000).enumerate().all(right), "all_gather");
        for len in [1, 2_000, 20_000] {
            message[..len].fill((rank * round) as u64);
            let send = (&message[..len], next, round as u32);
            world.send_recv(send, (&mut answer[..len], previous, round as u32))?;
            assert!(answer[..len].iter().all(|&x| x == (previous * round) as u64), "send_recv");
        }
        world.barrier()?;
    }
    Ok(())
}

// ---------------------------------------------------------------- the launcher's side

/// How a rank has ended: what it said if it was not killed.
fn run(victim: usize, moment: Option<u64>) -> Vec<Option<String>> {
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let ranks: Vec<Process> = (0..WORLD)
        .map(|rank| {
            let mut command = process::program(std::env::current_exe().unwrap());
            process::as_rank(&mut command, rank, WORLD, store.port());
            command.args(["--exact", "worker", "--nocapture"]).env("CONVOKE_TEST_VICTIM", victim.to_string());
            if let Some(moment) = moment.filter(|_| rank == victim) {
                command.env("CONVOKE_TEST_MOMENT", moment.to_string());
            }
            Process::start(&mut command)
        })
        .collect();
    let ended = ranks.into_iter().enumerate().map(|(rank, process)| {
        let output = process.wait();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let was_killed = rank == victim && output.status.code().is_none();
        let (said, error) = (text(&output.stdout), text(&output.stderr));
        let where_ = format!("rank {rank}, victim {victim} at {moment:?}");
        assert!(was_killed || output.status.success(), "{where_}: {said} {error}");
        (!was_killed).then_some(said)
    });
    ended.collect()
}

/// Names of unix sockets that ranks use to meet.
fn sockets() -> usize {
    std::fs::read_to_string("/proc/net/unix").unwrap().matches("@convoke-").count()
}

#[test]
fn a_rank_may_be_killed_at_any_moment() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let mut seed = number("CONVOKE_SEED").unwrap_or_else(|| std::process::id().into());
    println!("CONVOKE_SEED={seed}");
    let full = std::env::var("CONVOKE_FULL").is_ok_and(|value| value == "1");
    let kills = number("CONVOKE_KILLS").unwrap_or(if full { 1000 } else { KILLS });
    let mut below = |bound: u64| {
        // SplitMix64.
        seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    };
    let before = sockets();
    let whole = run(0, None);
    let moments =
        whole[0].as_deref().and_then(|said| said.split("after ").nth(1)?.split(' ').next()?.parse().ok());
    let moments: u64 = moments.unwrap_or_else(|| panic!("{whole:?}"));
    let (mut ends, mut killed, mut runs) = (BTreeMap::new(), 0, 0);
    while killed < kills {
        // As often in the moments in which a group forms as in all others together would be too often.
        let moment = if runs % 8 == 0 { below(40) } else { below(moments) };
        let victim = below(WORLD as u64) as usize;
        let ended = run(victim, Some(moment));
        let through = ended.iter().flatten().filter(|said| said.contains("through")).count();
        // It may come through with fewer moments than others.
        let was_killed = ended[victim].is_none();
        killed += u64::from(was_killed);
        runs += 1;
        *ends.entry((was_killed, through)).or_insert(0) += 1;
        assert!(runs < 3 * kills, "{ends:?} of {moments} moments");
    }
    for ((was_killed, through), times) in &ends {
        let what = if *was_killed { "killed" } else { "not reached" };
        println!("{what}: {times} times, {through} ranks through");
    }
    assert_eq!(sockets(), before);
}
