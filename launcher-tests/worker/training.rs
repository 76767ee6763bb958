//! `test-worker-faults training SCENE VICTIM`: a rank that trains with others until rank VICTIM dies. All
//! others must detect the death.

#![allow(clippy::unwrap_used, clippy::panic)] // test code

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, Group, Moment, on_moment};
use convoke_train::{Ddp, DdpOptions, TrainError, first_of_all};
use nix::sys::signal::{Signal, raise};

use super::Outcome;

/// Time within which the survivors must detect the death.
const SOON: Duration = Duration::from_secs(10);
/// Number of elements of the larger parameter; the transfer of its bucket takes a while.
const LARGE: usize = 1 << 20;

pub(super) fn run(arguments: &[&str]) -> Outcome {
    let [scene, victim] = *arguments else {
        return Err("usage: test-worker-faults training SCENE VICTIM".into());
    };
    let victim: usize = victim.parse()?;
    let joined = convoke_comm::init()?;
    // This timeout far exceeds `SOON`, but it bounds a test that hangs.
    let world = joined.with_timeout(Duration::from_secs(60));
    let is_victim = world.rank() == victim;
    world.barrier().unwrap();
    let begin = Instant::now();
    let error = act(scene, &world, is_victim).unwrap_err();
    let lost = matches!(&error, TrainError::Comm(CommError::PeerLost { rank, .. }) if *rank == victim);
    assert!(lost && begin.elapsed() < SOON, "after {:?}: {error}", begin.elapsed());
    Ok(())
}

fn die() {
    // A process may always signal itself.
    let _ = raise(Signal::SIGKILL);
}

/// Kills this process in the middle of a large transfer.
fn die_in(point: &'static str) {
    static POINT: OnceLock<&str> = OnceLock::new();
    POINT.get_or_init(|| point);
    on_moment(|Moment { point, bytes, .. }| {
        if bytes > LARGE / 2 && POINT.get() == Some(&point) {
            die();
        }
    });
}

fn act(scene: &str, world: &Group, is_victim: bool) -> Result<(), TrainError> {
    let die_if = |is_here: bool| {
        if is_victim && is_here {
            die();
        }
    };
    if let "prepares" | "waits for the first" = scene {
        // The victim dies before it enters the guard, or inside.
        die_if(scene == "waits for the first");
        return first_of_all(world, || {
            die_if(true);
            Ok::<_, String>(())
        });
    }
    let options = DdpOptions::default().first_bucket_bytes(64);
    let mut ddp = Ddp::with_options(world, [("first", LARGE), ("last", 64)], options)?;
    match scene {
        "sends" | "receives" if is_victim => die_in(if scene == "sends" { "sent" } else { "received" }),
        _ => {}
    }
    // In the join, ranks have different numbers of batches. The victim has no batch from the second step on.
    let mut batches = 0..if is_victim { 1 } else { 50 };
    while let Some(batch) = ddp.join(batches.next())? {
        let mut pass = ddp.pass();
        if batch.is_some() {
            pass.add(1, &[1.0; 64])?;
            die_if(scene == "computes");
            pass.add(0, &vec![1.0; LARGE])?;
        } else {
            die_if(scene == "helps");
        }
        pass.finish()?;
        die_if(scene == "joins");
    }
    Ok(())
}
