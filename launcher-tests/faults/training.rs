//! A rank that dies while others wait for it in convoke-train: in the guard, in a bucket, in a join. The
//! ranks run `worker/training.rs`.

use convoke_store::StoreServer;
use convoke_testkit::process::{self, Process};
use convoke_testkit::programs::with_faults;

/// Number of ranks in each job.
const WORLD: usize = 3;

/// Runs the scene on all ranks; `victim` dies in it, and the others must report its loss.
fn play(scene: &str, victim: usize) {
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let ranks: Vec<Process> = (0..WORLD)
        .map(|rank| {
            let mut command = process::program(with_faults("test-worker-faults"));
            process::as_rank(&mut command, rank, WORLD, store.port());
            command.args(["training", scene, &victim.to_string()]);
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
fn training_reports_a_rank_death_in_the_first_rank_guard() {
    play("prepares", 0);
    play("waits for the first", 1);
}

#[test]
fn training_reports_a_rank_death_during_a_bucket() {
    for scene in ["computes", "sends", "receives"] {
        play(scene, 1);
    }
}

#[test]
fn training_reports_a_rank_death_during_a_join() {
    // The victim dies before the others join it, and while it takes part without a batch of its own.
    for scene in ["joins", "helps"] {
        play(scene, 2);
    }
}
