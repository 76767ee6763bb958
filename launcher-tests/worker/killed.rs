//! `test-worker-faults killed VICTIM [FAULT_POINT]`: one of three ranks that share memory. The ranks make
//! calls of all kinds and check each result.
//!
//! With FAULT_POINT this rank kills itself at the fault point of that number, and the others must report
//! the loss of VICTIM. Prints "lost", or the number of fault points that it passed.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // test code

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use convoke_comm::{Backend, CommError, ReduceOp, Session, on_fault_point, op};
use nix::sys::signal::{Signal, raise};

use super::Outcome;
use crate::kills::WORLD_SIZE;

/// Time within which the survivors must detect the death. They wait [`INIT_TIMEOUT`] for a rank that died
/// before it met them.
const DETECTION_LIMIT: Duration = Duration::from_secs(10);
const INIT_TIMEOUT: Duration = Duration::from_secs(2);
const ROUNDS: usize = 4;

/// Number of fault points passed so far, and the number at which this process dies.
static FAULT_POINTS_PASSED: AtomicU64 = AtomicU64::new(0);
static KILL_AT: AtomicU64 = AtomicU64::new(u64::MAX);

pub(super) fn run(arguments: &[&str]) -> Outcome {
    let (victim, last) = match *arguments {
        [victim] => (victim.parse::<u64>()?, u64::MAX),
        [victim, fault_point] => (victim.parse()?, fault_point.parse()?),
        _ => return Err("usage: test-worker-faults killed VICTIM [FAULT_POINT]".into()),
    };
    KILL_AT.store(last, Ordering::Relaxed);
    on_fault_point(|_| {
        if FAULT_POINTS_PASSED.fetch_add(1, Ordering::Relaxed) == KILL_AT.load(Ordering::Relaxed) {
            // A process may always signal itself.
            let _ = raise(Signal::SIGKILL);
        }
    });
    let (before, begin) = (descriptors(), Instant::now());
    let mut formed = false;
    let outcome = job(&mut formed);
    let lost =
        |error: &CommError| matches!(error, CommError::PeerLost { rank, .. } if *rank as u64 == victim);
    match outcome {
        Ok(()) => println!("through after {} fault points", FAULT_POINTS_PASSED.load(Ordering::Relaxed)),
        Err(error) if !formed || lost(&error) => println!("lost"),
        Err(error) => panic!("{error}"),
    }
    assert!(begin.elapsed() < DETECTION_LIMIT, "{:?}", begin.elapsed());
    // Leaked descriptors of shared memory, doorbells and connections would show up here.
    assert_eq!(descriptors(), before);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:convoke"), "{maps}");
    Ok(())
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Makes small and large calls of all kinds, in memory from `alloc` too, and messages; checks each result.
fn job(formed: &mut bool) -> Result<(), CommError> {
    let mut session =
        Session::join()?.with_options(|options| options.timeout(DETECTION_LIMIT).init_timeout(INIT_TIMEOUT));
    let world = session.world()?;
    *formed = true;
    assert_eq!(world.backend(), Backend::SharedMemory);
    let (rank, next, previous) =
        (world.rank(), (world.rank() + 1) % WORLD_SIZE, (world.rank() + WORLD_SIZE - 1) % WORLD_SIZE);
    let mut direct = world.alloc::<f32>(200_000)?;
    let (mut large, mut all) = (vec![0_u32; 100_000], vec![0_u16; WORLD_SIZE * 30_000]);
    let (mut message, mut answer) = (vec![0_u64; 20_000], vec![0_u64; 20_000]);
    for round in 1..=ROUNDS {
        let mut small = [rank + round; 3].map(|x| x as i64);
        world.all_reduce(&mut small, ReduceOp::Sum)?;
        assert_eq!(small, [(WORLD_SIZE * round + 3) as i64; 3]);
        large.fill((rank * round) as u32);
        world.all_reduce(&mut large, ReduceOp::Max)?;
        assert!(large.iter().all(|&x| x == (2 * round) as u32), "all_reduce");
        direct.fill((rank + round) as f32);
        world.all_reduce(&mut direct[..], ReduceOp::Sum)?;
        assert!(
            direct.iter().all(|&x| x == (WORLD_SIZE * round + 3) as f32),
            "all_reduce in memory of alloc"
        );
        let root = round % WORLD_SIZE;
        large.fill(rank as u32);
        world.broadcast(&mut large, root)?;
        assert!(large.iter().all(|&x| x == root as u32), "broadcast");
        world.all_gather(&[(rank + round) as u16; 30_000], &mut all)?;
        let right = |(from, block): (usize, &[u16])| block.iter().all(|&x| x == (from + round) as u16);
        assert!(all.chunks(30_000).enumerate().all(right), "all_gather");
        for len in [1, 2_000, 20_000] {
            message[..len].fill((rank * round) as u64);
            let tag = round as u32;
            let send = op::send(&message[..len], next).tag(tag);
            world.run((send, op::recv(&mut answer[..len], previous).tag(tag)))?;
            assert!(answer[..len].iter().all(|&x| x == (previous * round) as u64), "send and recv");
        }
        world.barrier()?;
    }
    Ok(())
}
