//! A rank that dies while others wait for it in convoke-train: in the guard, in a bucket, in a join. The
//! ranks run `worker/training.rs`.

use convoke_store::StoreServer;
use convoke_testkit::process::{self, Process};
use convoke_testkit::programs::fault_injection_program;

/// Number of ranks in each job.
const WORLD_SIZE: usize = 3;

/// Runs the scenario on all ranks; `victim` dies in it, and the others must report its loss.
fn run_scenario(scenario: &str, victim: usize) {
    let store = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let ranks: Vec<Process> = (0..WORLD_SIZE)
        .map(|rank| {
            let mut command = process::program(fault_injection_program("test-worker-faults"));
            process::set_rank_variables(&mut command, rank, WORLD_SIZE, store.port());
            command.args(["training", scenario, &victim.to_string()]);
            Process::start(&mut command)
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait();
        let text = String::from_utf8_lossy(&output.stderr);
        if rank == victim {
            assert_eq!(output.status.code(), None, "{scenario}: the victim did not die: {text}");
        } else {
            assert!(output.status.success(), "{scenario}, rank {rank}: {text}");
        }
    }
}

#[test]
fn training_reports_a_rank_death_in_the_first_rank_guard() {
    run_scenario("prepares", 0);
    run_scenario("waits for the first", 1);
}

#[test]
fn training_reports_a_rank_death_during_a_bucket() {
    for scenario in ["computes", "sends", "receives"] {
        run_scenario(scenario, 1);
    }
}

#[test]
fn training_reports_a_rank_death_during_a_join() {
    // The victim dies before the others join it, and while it takes part without a batch of its own.
    for scenario in ["joins", "helps"] {
        run_scenario(scenario, 2);
    }
}
