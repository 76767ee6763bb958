//! The rank that fails first is the root cause, with its own error message. This holds for every kind of
//! end, every kind of work and every number of nodes.

use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::worker_command;
use convoke_testkit::{Random, free_port, is_full_test_run};

/// Argument HOW of the worker, class in the report, and text of the report for each kind of end.
const EXITS: [(&str, &str, &str); 8] = [
    ("error", "exit", "the data set is empty"),
    ("panic", "panic", "the loader is gone"),
    ("exit", "exit", "exitcode  : 3 (pid: "),
    ("abort", "abort", "(SIGABRT)"),
    ("segv", "segfault", "(SIGSEGV)"),
    ("kill", "killed", "(SIGKILL)"),
    ("return", "early-exit", "exited with code 0 while the others continued"),
    ("exit0", "early-exit", "exited with code 0 while the others continued"),
];

/// Time limit from the start of the launchers to the end of the last one, with an allowance for a busy
/// machine.
const END_LIMIT: Duration = Duration::from_secs(20);

/// One job: `nodes` with `each` workers; rank `who` ends early.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    how: (&'static str, &'static str, &'static str),
    who: usize,
    work: &'static str,
    nodes: usize,
    each: usize,
    /// The rendezvous backend for several nodes.
    backend: &'static str,
}

impl Scenario {
    fn random(random: &mut Random) -> Self {
        let nodes = 1 + random.below(2);
        let each = if nodes == 1 { 3 } else { 2 };
        loop {
            let how = EXITS[random.below(EXITS.len())];
            let work = ["reduce", "ring", "apart"][random.below(3)];
            // A rank that no other rank needs may leave.
            let misses_nobody = work == "apart" && how.0 == "return";
            // With several nodes, no node can know that the other nodes still need a rank that exited with
            // code 0.
            let is_elsewhere = nodes > 1 && how.1 == "early-exit";
            if !misses_nobody && !is_elsewhere {
                let (who, backend) = (random.below(nodes * each), ["static", "c10d"][random.below(2)]);
                return Self { how, who, work, nodes, each, backend };
            }
        }
    }

    fn start(self, job: &Job) -> Vec<Launcher> {
        let port = free_port().to_string();
        let start = |node: usize| {
            let mut command = job.command([format!("--nproc-per-node={}", self.each)]);
            if self.nodes > 1 {
                command.arg(format!("--nnodes={}", self.nodes));
                if self.backend == "static" {
                    command.args(["--master-addr=127.0.0.1", "--master-port", &port]);
                    command.arg(format!("--node-rank={node}"));
                } else {
                    command.arg("--rdzv-backend=c10d").arg(format!("--rdzv-endpoint=127.0.0.1:{port}"));
                }
            }
            command.args(worker_command("exit")).args([self.how.0, &self.who.to_string(), self.work]);
            job.start(command)
        };
        (0..self.nodes).map(start).collect()
    }

    /// Returns a description of the errors in a node's report, or `None`.
    fn mismatch(self, ended: &ProcessOutput) -> Option<String> {
        let (how, class, words) = self.how;
        let root = ended.stderr.split("Root Cause").nth(1).unwrap_or_default();
        let rank = format!("rank      : {} (local_rank: {})", self.who, self.who % self.each);
        let cause = format!("cause     : {class}");
        // A plain exit code has no line for the cause.
        let is_right =
            root.contains(&rank) && root.contains(words) && (how == "exit" || root.contains(&cause));
        (!is_right || ended.status.code() != Some(1)).then(|| format!("{self:?}:\n{}", ended.stderr))
    }
}

#[test]
fn first_failed_worker_is_root_cause_with_its_own_message() {
    let mut random = Random::new("first_failed_worker_is_root_cause_with_its_own_message");
    for _ in 0..if is_full_test_run() { 500 } else { 40 } {
        let run = Scenario::random(&mut random);
        let job = Job::new();
        let nodes = run.start(&job);
        let start = Instant::now();
        let mismatches: Vec<_> = nodes.into_iter().filter_map(|node| run.mismatch(&node.wait())).collect();
        assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
        assert!(start.elapsed() < END_LIMIT, "{run:?} took {:?}", start.elapsed());
    }
}
