//! Nodes of a Slurm job that lose power while the job runs under `--no-kill`.

use std::fs;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::Job;
use convoke_launcher_tests::slurm::Slurm;
use convoke_testkit::programs::user_program;
use convoke_testkit::wait_until;

/// Time from the loss of a node to new workers. A silent node is lost after 3 s (docs/reference/rendezvous.md); the rest
/// is a margin for a busy machine.
const REPLACED_LIMIT: Duration = Duration::from_secs(15);

/// Waits until all ranks of a round run, and takes away what they wrote. Returns their hosts, by rank.
fn hosts_of_round(job: &Job, size: usize) -> Vec<usize> {
    let host = |rank| {
        let file = format!("up.{size}.{rank}");
        let host = job.wait_for_file(&file).trim().trim_start_matches('h').parse().unwrap();
        fs::remove_file(job.path(&file)).unwrap();
        host
    };
    (0..size).map(host).collect()
}

#[test]
fn spare_node_replaces_a_lost_one_and_without_spares_the_job_goes_on_with_fewer() {
    let Some(slurm) = Slurm::up_or_skip(4, "lost nodes of a Slurm job") else { return };
    let job = Job::new();
    let worker = job.script("hostname > up.$WORLD_SIZE.$RANK\nuntil [ -e done ]; do sleep 0.02; done\n");
    let script = job.path("job.sh");
    let lines = format!(
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --no-kill\n\
         srun --no-kill {} --nnodes=2:3 --max-restarts=3 {}\n",
        user_program("convoke").display(),
        worker.display()
    );
    fs::write(&script, lines).unwrap();
    let output = job.path("out");
    let words = ["sbatch", "-o", output.to_str().unwrap(), script.to_str().unwrap()];
    let _ = slurm.run(&job, &words, &[]).expect_exit_code(0);

    // Node 0, which serves the rendezvous, is on h1.
    let first = hosts_of_round(&job, 3);
    let spare = (1..=4).find(|host| !first.contains(host)).unwrap();
    let lost = *first.iter().find(|host| **host != 1).unwrap();
    slurm.power_off(lost);
    let since = Instant::now();
    let second = hosts_of_round(&job, 3);
    assert!(since.elapsed() < REPLACED_LIMIT, "{:?}", since.elapsed());
    assert!(second.contains(&spare) && !second.contains(&lost), "{first:?}, then {second:?}");

    let lost = *second.iter().find(|host| **host != 1).unwrap();
    slurm.power_off(lost);
    let since = Instant::now();
    let third = hosts_of_round(&job, 2);
    assert!(since.elapsed() < REPLACED_LIMIT, "{:?}", since.elapsed());
    assert!(!third.contains(&lost), "{second:?}, then {third:?}");

    // The step ends when Slurm, which is slower to notice, has given up the tasks of the lost nodes.
    let said = || fs::read_to_string(&output).unwrap();
    wait_until("Slurm to notice both losses", || {
        (said().matches("srun: error: Node failure on").count() == 2).then_some(())
    });
    fs::write(job.path("done"), "").unwrap();
    wait_until("the job to end well", || {
        let records = fs::read_to_string(slurm.folder().join("slurm/log/jobs.txt")).unwrap_or_default();
        assert!(!records.contains("JobState=FAILED"), "{records}{}", said());
        records.contains("JobState=COMPLETED").then_some(())
    });
    // Both other nodes of each round name the lost one, in one line.
    assert_eq!(said().matches("is lost: its launcher was killed, or its host").count(), 4, "{}", said());
}
