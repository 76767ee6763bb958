//! A rank that dies while others wait for it: in the guard, in a bucket, in a join.
//!
//! The test binary starts itself as the ranks (`worker` below).

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, Group, Moment, on_moment};
use convoke_store::StoreServer;
use convoke_train::{Ddp, DdpOptions, TrainError, first_of_all};
use nix::sys::signal::{Signal, raise};

#[path = "../../comm/testing/process.rs"]
mod process;
use process::Process;

/// Ranks of each job.
const WORLD: usize = 3;
/// Within this the survivors must know.
const SOON: Duration = Duration::from_secs(10);
/// Elements of the larger parameter: its bucket is on its way for a while.
const LARGE: usize = 1 << 20;

// ---------------------------------------------------------------- the rank's side

/// Not a test: what the processes run that the tests start.
#[test]
fn worker() {
    let Ok(scene) = std::env::var("CONVOKE_TEST_SCENE") else { return };
    let victim: usize = std::env::var("CONVOKE_TEST_VICTIM").unwrap().parse().unwrap();
    let joined = convoke_comm::init().unwrap();
    // Far beyond what is asked for, but not for ever.
    let world = joined.with_timeout(Duration::from_secs(60));
    let is_victim = world.rank() == victim;
    world.barrier().unwrap();
    let begin = Instant::now();
    let error = act(&scene, &world, is_victim).unwrap_err();
    let lost = matches!(&error, TrainError::Comm(CommError::PeerLost { rank, .. }) if *rank == victim);
    // The test harness of the process captures what is printed, unless it fails.
    assert!(lost && begin.elapsed() < SOON, "after {:?}: {error}", begin.elapsed());
}

fn die() {
    // It cannot fail for oneself.
    let _ = raise(Signal::SIGKILL);
}

/// Dies when a large transfer is on its way.
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
        // Before it comes to the guard, or inside.
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
    // In the join ranks have different numbers of batches, and the victim has none from the second step on.
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

// ---------------------------------------------------------------- the launcher's side

/// Runs the scene on all ranks, in which `victim` dies; the others must say that it did.
fn play(scene: &str, victim: usize) {
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let ranks: Vec<Process> = (0..WORLD)
        .map(|rank| {
            let mut command = process::program(std::env::current_exe().unwrap());
            process::as_rank(&mut command, rank, WORLD, store.port());
            command.args(["--exact", "worker", "--nocapture"]);
            command.env("CONVOKE_TEST_SCENE", scene).env("CONVOKE_TEST_VICTIM", victim.to_string());
            Process::start(&mut command)
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait();
        let text = String::from_utf8_lossy(&output.stderr);
        if rank == victim {
            assert_eq!(output.status.code(), None, "{scene}: the victim did not die: {text}");
        } else {
            assert!(output.status.success(), "{scene}, rank {rank}: {text}");
        }
    }
}

#[test]
fn a_rank_dies_in_the_guard() {
    play("prepares", 0);
    play("waits for the first", 1);
}

#[test]
fn a_rank_dies_in_a_bucket() {
    for scene in ["computes", "sends", "receives"] {
        play(scene, 1);
    }
}

#[test]
fn a_rank_dies_in_a_join() {
    // Before others come to it, and while it helps them without a batch of its own.
    for scene in ["joins", "helps"] {
        play(scene, 2);
    }
}
