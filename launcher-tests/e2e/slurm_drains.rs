//! Drains of Slurm jobs on a real Slurm: by signals, by job scripts, by preemption.

use std::fs;
use std::time::Duration;

use convoke_launcher_tests::harness::Job;
use convoke_launcher_tests::slurm::Slurm;
use convoke_testkit::programs::user_program;
use convoke_testkit::{TEST_TIMEOUT, is_full_test_run, try_wait_until_within, wait_until};

use crate::slurm::jobs;

/// A job of `digits` on two nodes that a drain stops, on the whole nodes.
struct DrainedJob<'a> {
    slurm: &'a Slurm,
    job: &'a Job,
    id: String,
    path: String,
}

impl<'a> DrainedJob<'a> {
    /// Submits a batch script, and waits until its workers train.
    fn submit(slurm: &'a Slurm, job: &'a Job, script: &str) -> Self {
        let (file, bin) = (job.path("job.sh"), job.path("bin"));
        fs::write(&file, script).unwrap();
        fs::create_dir_all(&bin).unwrap();
        for (name, path) in [("convoke", user_program("convoke")), ("digits", user_program("digits"))] {
            let _ = std::os::unix::fs::symlink(path, bin.join(name));
        }
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut started = Self { slurm, job, id: String::new(), path };
        let output = job.path("out");
        let words =
            ["sbatch", "--parsable", "--exclusive", "-o", output.to_str().unwrap(), file.to_str().unwrap()];
        started.id = started.slurm(&words).trim().to_owned();
        started.wait_for("training to begin", "2 workers, ");
        started
    }

    /// Runs one of Slurm's commands and returns its output.
    fn slurm(&self, words: &[&str]) -> String {
        self.slurm.run(self.job, words, &[("PATH", &self.path)]).expect_exit_code(0).stdout
    }

    fn output(&self) -> String {
        fs::read_to_string(self.job.path("out")).unwrap_or_default()
    }

    fn wait_for(&self, what: &str, text: &str) {
        wait_until(what, || self.output().contains(text).then_some(()));
    }

    /// Waits until the job is requeued, starts it at once, and waits until it continues where it stopped.
    fn check_resumed(&self) {
        self.wait_for("the drain", "digits: drained after epoch ");
        let stopped_at =
            self.output().split("drained after ").nth(1).unwrap().lines().next().unwrap().to_owned();
        let mut shown = String::new();
        let requeued = try_wait_until_within(TEST_TIMEOUT, || {
            shown = self.slurm(&["scontrol", "show", "job", &self.id]);
            shown.contains("Restarts=1").then_some(())
        });
        assert!(requeued.is_some(), "the job was not requeued: {shown}\n{}", self.output());
        // Slurm starts a requeued job two minutes later, counted anew when the last run has ended completely.
        // Two seconds are enough, but not less: slurmd refuses a job that was killed within the same second.
        wait_until("the nodes to be idle", || {
            let states = self.slurm(&["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]);
            states.lines().all(|state| state == "idle").then_some(())
        });
        let _ = self.slurm(&["scontrol", "update", &format!("JobId={}", self.id), "StartTime=now+2seconds"]);
        let mut shown = String::new();
        let started = try_wait_until_within(TEST_TIMEOUT, || {
            shown = self.slurm(&["scontrol", "show", "job", &self.id]);
            shown.contains("JobState=RUNNING").then_some(())
        });
        assert!(started.is_some(), "the job was not started again: {shown}\n{}", self.output());
        self.wait_for("the job to continue", &format!("going on after {stopped_at}, from"));
        let _ = self.slurm(&["scancel", &self.id]);
    }
}

/// Makes digits survive a signal that Slurm sends to all processes, as it does without cgroups.
fn deaf_digits(signal: &str, flags: &str) -> String {
    format!(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --requeue --open-mode=append\n\
         srun convoke --log-dir=logs {flags} sh -c 'trap \"\" {signal}; exec digits --epochs 9000 --print-every 9000 --checkpoint state'\n"
    )
}

#[test]
fn signalled_slurm_job_is_drained_requeued_and_continues_at_its_step() {
    let Some(slurm) = Slurm::up_or_skip(2, "drains of Slurm jobs by signals") else { return };
    let job = Job::new();
    let drained = DrainedJob::submit(&slurm, &job, &deaf_digits("USR1", ""));
    let _ = drained.slurm(&["scancel", "-s", "USR1", &drained.id]);
    drained.check_resumed();
    assert!(drained.output().contains("drain, asked for by SIGUSR1 on node "), "{}", drained.output());
    let drains = drained.output().matches("drain, asked for by").count();
    assert_eq!(drains, 1, "one node says it: {}", drained.output());
}

#[test]
fn job_script_with_a_warning_signal_drains_as_it_stands_in_the_guide() {
    let Some(slurm) = Slurm::up_or_skip(2, "drains of Slurm jobs by job scripts") else { return };
    let job = Job::new();
    let script = fs::read_to_string(jobs().join("slurm-drain.sh")).unwrap();
    let drained = DrainedJob::submit(&slurm, &job, &script);
    // As Slurm does 120 s before the end with --signal=B:USR1@120.
    let _ = drained.slurm(&["scancel", "-b", "-s", "USR1", &drained.id]);
    drained.check_resumed();
    assert!(drained.output().contains("drain, asked for by convoke drain on node "), "{}", drained.output());
}

#[test]
fn preempted_slurm_job_is_drained_within_its_grace_time() {
    let Some(slurm) = Slurm::up_or_skip(2, "drains of preempted Slurm jobs") else { return };
    let job = Job::new();
    // Newer versions of Slurm set this variable at the start, to the end without a preemption.
    let later = "export SLURM_JOB_END_TIME=$(($(date +%s) + 7200))\nsrun";
    let script = deaf_digits("TERM", "--drain-signal=TERM").replace("srun", later);
    let drained = DrainedJob::submit(&slurm, &job, &script);
    let urgent = drained.slurm(&[
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "-N2",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 2",
    ]);
    drained.check_resumed();
    assert!(drained.output().contains("DUE TO PREEMPTION"), "job {urgent}: {}", drained.output());
    assert!(!drained.output().contains("the workers have 90 s"), "{}", drained.output());
}

/// Without a handler, digits would die of the signal. With cgroups Slurm sends it to the launcher alone.
#[test]
fn signalled_job_is_drained_where_slurm_tracks_processes_by_cgroups() {
    let test = "drains of Slurm jobs with proctrack/cgroup";
    let Some(slurm) = Slurm::up_with_cgroups_or_skip(2, test) else { return };
    let job = Job::new();
    let plain = |flags: &str| {
        format!(
            "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --requeue --open-mode=append\n\
             srun convoke --log-dir=logs {flags} digits --epochs 9000 --print-every 9000 --checkpoint state\n"
        )
    };
    let drained = DrainedJob::submit(&slurm, &job, &plain(""));
    let _ = drained.slurm(&["scancel", "-s", "USR1", &drained.id]);
    drained.check_resumed();
    assert!(drained.output().contains("drain, asked for by SIGUSR1 on node "), "{}", drained.output());
    // A preempted job gets SIGTERM, and SIGKILL after its grace time.
    let job = Job::new();
    let drained = DrainedJob::submit(&slurm, &job, &plain("--drain-signal=TERM"));
    let _ = drained.slurm(&["sbatch", "-p", "urgent", "-N2", "-o", "/dev/null", "--wrap", "sleep 2"]);
    drained.check_resumed();
    assert!(drained.output().contains("DUE TO PREEMPTION"), "{}", drained.output());
}

/// Slurm's clock has minutes, so this takes up to two for each form, and runs in the long form alone.
#[test]
fn signal_before_the_time_limit_drains_with_and_without_the_batch_shell() {
    if !is_full_test_run() {
        return;
    }
    let Some(slurm) = Slurm::up_or_skip(2, "signals of Slurm before the time limit") else { return };
    let limit = "#SBATCH --time=2 --signal=";
    for (script, signal) in [
        (deaf_digits("USR1", ""), "USR1@60"),
        (fs::read_to_string(jobs().join("slurm-drain.sh")).unwrap(), "B:USR1@60"),
    ] {
        let job = Job::new();
        // The training must be longer than Slurm's time limit.
        let script =
            script.replace("--epochs 3000", "--epochs 90000").replace("--epochs 9000 ", "--epochs 90000 ");
        let lines = script.lines().filter(|line| !line.contains("--signal"));
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.insert(1, format!("{limit}{signal}"));
        let drained = DrainedJob::submit(&slurm, &job, &format!("{}\n", lines.join("\n")));
        let asked = try_wait_until_within(Duration::from_secs(150), || {
            drained.output().contains("drain, asked for by ").then_some(())
        });
        assert!(asked.is_some(), "{signal}: {}", drained.output());
        drained.check_resumed();
    }
}
