//! Binding of workers to CPUs.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_testkit::{free_port, wait_until};

/// A worker that writes its allowed CPUs to a file.
const WORKER: &str = "grep Cpus_allowed_list /proc/self/status > \"$JOB/cpus.$RANK\"\n";

/// Parses the CPUs of `Cpus_allowed_list` in a status file.
fn parse_allowed_cpus(status: &str) -> BTreeSet<usize> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let number = |text: &str| text.parse::<usize>().unwrap();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        number(first)..=number(last)
    };
    list.trim().split(',').flat_map(range).collect()
}

fn own_cpus() -> BTreeSet<usize> {
    parse_allowed_cpus(&fs::read_to_string("/proc/self/status").unwrap())
}

/// Returns the physical cores of these CPUs; each core is named by the list of its hyperthreads.
fn cores(cpus: &BTreeSet<usize>) -> BTreeSet<String> {
    let siblings = |cpu: &usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
    };
    cpus.iter().map(siblings).collect()
}

fn run(job: &Job, flags: &[&str]) -> ProcessOutput {
    let mut command = job.command(flags);
    command.arg(job.script(WORKER));
    job.start(command).wait()
}

fn worker_cpus(job: &Job, rank: usize) -> BTreeSet<usize> {
    parse_allowed_cpus(&job.wait_for_file(&format!("cpus.{rank}")))
}

#[test]
fn each_worker_gets_its_own_cores() {
    let (job, ours) = (Job::new(), own_cpus());
    if cores(&ours).len() < 2 {
        convoke_testkit::skip("this test may use one core only");
        let ended = run(&job, &["--bind=core", "--nproc-per-node=2"]).expect_exit_code(1);
        let what = "--bind=core: convoke can use 1 physical core for 2 workers; write --nproc-per-node=1, or --bind=node";
        assert!(ended.stderr.contains(what), "{}", ended.stderr);
        return;
    }
    run(&job, &["--bind=core", "--nproc-per-node=2"]).expect_exit_code(0);
    let [first, second] = [0, 1].map(|rank| worker_cpus(&job, rank));
    assert!(first.is_disjoint(&second) && cores(&first).is_disjoint(&cores(&second)), "{first:?} {second:?}");
    assert_eq!(first.union(&second).copied().collect::<BTreeSet<_>>(), ours);
}

#[test]
fn every_bind_kind_leaves_each_worker_at_least_one_cpu() {
    for kind in ["node", "socket", "core-complex", "none"] {
        let (job, ours) = (Job::new(), own_cpus());
        run(&job, &["--nproc-per-node=3", "--bind", kind]).expect_exit_code(0);
        for rank in 0..3 {
            let cpus = worker_cpus(&job, rank);
            assert!(!cpus.is_empty() && cpus.is_subset(&ours), "--bind={kind}: {cpus:?} of {ours:?}");
            assert!(kind != "none" || cpus == ours, "--bind=none: {cpus:?} of {ours:?}");
        }
    }
}

#[test]
fn workers_get_only_cpus_that_the_launcher_may_use() {
    let (job, ours) = (Job::new(), own_cpus());
    let last = *ours.last().unwrap();
    let launcher = job.command(["--bind=core", "--nproc-per-node=1"]);
    let mut command = Command::new("taskset");
    command.arg("-c").arg(last.to_string()).arg(launcher.get_program()).args(launcher.get_args());
    command.arg(job.script(WORKER)).current_dir(job.dir.path());
    for (name, value) in launcher.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    job.start(command).wait().expect_exit_code(0);
    assert_eq!(worker_cpus(&job, 0), [last].into());
}

/// A cpuset with one CPU; it is removed on drop.
struct CpuSet(PathBuf);

impl CpuSet {
    fn new(cpu: usize) -> std::io::Result<Self> {
        let parent = Path::new("/sys/fs/cgroup/cpuset");
        let dir = parent.join(format!("convoke-bind-{}", std::process::id()));
        fs::create_dir(&dir)?;
        let set = Self(dir);
        fs::write(set.0.join("cpuset.mems"), fs::read(parent.join("cpuset.mems"))?)?;
        fs::write(set.0.join("cpuset.cpus"), cpu.to_string())?;
        Ok(set)
    }
}

impl Drop for CpuSet {
    fn drop(&mut self) {
        // The last process of the cpuset may still be exiting.
        wait_until("the cpuset to be empty", || fs::remove_dir(&self.0).ok());
    }
}

#[test]
fn removed_cpus_are_reported_as_the_cause() {
    let ours = own_cpus();
    let first = *ours.first().unwrap();
    let cpuset = match CpuSet::new(first) {
        Ok(_) if cores(&ours).len() < 2 => {
            convoke_testkit::skip("this test may use one core only");
            return;
        }
        Ok(cpuset) => cpuset,
        Err(error) => {
            convoke_testkit::skip(format_args!("no cpuset of version 1 can be made: {error}"));
            return;
        }
    };
    let job = Job::new();
    let (worker, port) = (job.script("sleep 60\n"), free_port().to_string());
    let node = |rank: &str, flags: &[&str]| {
        let mut command = job.command(["--nnodes=2", "--master-addr=127.0.0.1", "--nproc-per-node=2"]);
        command.args(["--node-rank", rank, "--master-port", &port]).args(flags).arg(&worker);
        job.start(command)
    };
    // The launcher chooses CPUs before it serves the store, and starts workers once the other node joins.
    let bound = node("0", &["--bind=core", "--report-file=report.json"]);
    wait_until("the store", || TcpStream::connect(format!("127.0.0.1:{port}")).ok());
    // The two processes are the launcher and its guard.
    wait_until("two processes in the cpuset", || {
        let all = job.processes();
        all.iter().for_each(|pid| fs::write(cpuset.0.join("cgroup.procs"), pid.to_string()).unwrap());
        (all.len() == 2).then_some(())
    });
    let other = node("1", &[]);
    let ended = bound.wait().expect_exit_code(1);
    let what =
        format!("local rank 1 could not be started: {}: cannot be bound to its CPUs", worker.display());
    assert!(ended.stderr.contains(&what), "{}", ended.stderr);
    assert!(fs::read_to_string(job.path("report.json")).unwrap().contains("\"cpu-binding\""));
    other.wait().expect_exit_code(1);
}
