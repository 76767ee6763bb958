//! `test-worker-faults training SCENARIO VICTIM`: a rank that trains with others until rank VICTIM dies. All
//! others must detect the death.

#![allow(clippy::unwrap_used, clippy::panic)] // test code

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, FaultPoint, Group, on_fault_point};
use convoke_train::{Ddp, DdpOptions, Joined, TrainError, first_of_all};
use nix::sys::signal::{Signal, raise};

use super::Outcome;

/// Time within which the survivors must detect the death.
const DETECTION_LIMIT: Duration = Duration::from_secs(10);
/// Number of elements of the larger parameter; the transfer of its bucket takes a while.
const LARGE: usize = 1 << 20;

pub(super) fn run(arguments: &[&str]) -> Outcome {
    let [scenario, victim] = *arguments else {
        return Err("usage: test-worker-faults training SCENARIO VICTIM".into());
    };
    let victim: usize = victim.parse()?;
    let joined = convoke_comm::init()?;
    // This timeout far exceeds `DETECTION_LIMIT`, but it bounds a test that hangs.
    let world = joined.with_timeout(Duration::from_secs(60));
    let is_victim = world.rank() == victim;
    world.barrier().unwrap();
    let begin = Instant::now();
    let error = run_scenario(scenario, &world, is_victim).unwrap_err();
    let lost = matches!(&error, TrainError::Comm(CommError::PeerLost { rank, .. }) if *rank == victim);
    assert!(lost && begin.elapsed() < DETECTION_LIMIT, "after {:?}: {error}", begin.elapsed());
    Ok(())
}

fn die() {
    // A process may always signal itself.
    let _ = raise(Signal::SIGKILL);
}

/// Kills this process in the middle of a large transfer.
fn die_at_point(point: &'static str) {
    static POINT: OnceLock<&str> = OnceLock::new();
    POINT.get_or_init(|| point);
    on_fault_point(|FaultPoint { point, bytes, .. }| {
        if bytes > LARGE / 2 && POINT.get() == Some(&point) {
            die();
        }
    });
}

fn run_scenario(scenario: &str, world: &Group, is_victim: bool) -> Result<(), TrainError> {
    let die_if = |is_here: bool| {
        if is_victim && is_here {
            die();
        }
    };
    if let "prepares" | "waits for the first" = scenario {
        // The victim dies before it enters the guard, or inside.
        die_if(scenario == "waits for the first");
        return first_of_all(world, || {
            die_if(true);
            Ok::<_, String>(())
        });
    }
    let options = DdpOptions::default().first_bucket_bytes(64);
    let (mut ddp, ids) = Ddp::with_options(world, [("first", LARGE), ("last", 64)], options)?;
    match scenario {
        "sends" | "receives" if is_victim => {
            die_at_point(if scenario == "sends" { "sent" } else { "received" })
        }
        _ => {}
    }
    // In the join, ranks have different numbers of batches. The victim has no batch from the second step on.
    let mut batches = 0..if is_victim { 1 } else { 50 };
    loop {
        let joined = ddp.join(batches.next())?;
        if joined == Joined::Done {
            return Ok(());
        }
        let mut pass = ddp.pass();
        if let Joined::Batch(_) = joined {
            pass.add(ids[1], &[1.0; 64])?;
            die_if(scenario == "computes");
            pass.add(ids[0], &vec![1.0; LARGE])?;
        } else {
            die_if(scenario == "helps");
        }
        pass.finish()?;
        die_if(scenario == "joins");
    }
}
