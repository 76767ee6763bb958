//! Simulated hosts on which `convoke check` runs, with a mistake on one of them.

use std::fs;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::path_argument;
use convoke_testkit::programs::{repository_root, user_program};
use convoke_testkit::skip;

/// Times that the documentation promises, 5 s and 20 s with pairs, and a margin for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(5 + 2);
pub const LIMIT_WITH_PAIRS: Duration = Duration::from_secs(20 + 2);

/// Hosts h1 to hN, on which checks run.
pub struct Checked {
    pub hosts: Hosts,
    count: usize,
    pub job: Job,
}

/// The outputs of all nodes of a check.
pub struct CheckResult {
    pub nodes: Vec<ProcessOutput>,
    pub took: Duration,
}

/// The mistake of one node.
#[derive(Default, Clone)]
pub struct Mistake<'a> {
    pub host: usize,
    /// Shell commands before the check, in a mount namespace of its own.
    pub before: &'a str,
    /// Further flags of the check.
    pub flags: &'a str,
}

impl Checked {
    pub fn up_or_skip(count: usize, test: &str) -> Option<Self> {
        let hosts = Hosts::up(count).inspect_err(|why| skip(format!("{test}: {why}"))).ok()?;
        let checked = Self { hosts, count, job: Job::new() };
        checked.job.script("exit 0\n");
        fs::write(checked.job.path("train.py"), "print('training')\n").unwrap();
        Some(checked)
    }

    /// Runs a shell command as root on a host.
    pub fn on(&self, host: usize, shell: &str) {
        let job = self.job.dir.path().display().to_string();
        let result = self.hosts.run_script([
            "exec",
            &host.to_string(),
            "env",
            &format!("JOB={job}"),
            "sh",
            "-c",
            shell,
        ]);
        result.unwrap_or_else(|error| panic!("{shell}: {error}"));
    }

    pub fn start_node(&self, host: usize, flags: &str, mistake: Option<&Mistake<'_>>) -> Launcher {
        let (before, own) = mistake.map_or(("", ""), |mistake| (mistake.before, mistake.flags));
        let convoke = path_argument(user_program("convoke"));
        let nodes = if own.contains("--nnodes") { String::new() } else { format!("--nnodes={}", self.count) };
        let node =
            if own.contains("--node-rank") { String::new() } else { format!("--node-rank={}", host - 1) };
        let program = if flags.contains("--hosts") { "" } else { "./worker.sh" };
        let program = if own.contains(".py") { "" } else { program };
        let shell = format!(
            "set -e; {before}\nexec {convoke} check {nodes} {node} --master-addr=h1 --master-port=29500 --wait=3 {flags} {own} {program}"
        );
        let number = host.to_string();
        let words = ["exec", &number, "unshare", "-m", "sh", "-c", &shell];
        let mut command = self.job.command_for_program(Hosts::script(), words);
        command.env("TESTBED_DIR", self.hosts.state_dir()).env("SIMULATED_GPUS", "0");
        self.job.start(command)
    }

    /// Checks all hosts; one of them has a mistake.
    pub fn check(&self, flags: &str, mistake: Option<&Mistake<'_>>) -> CheckResult {
        let start = Instant::now();
        let of_host = |host| mistake.filter(|mistake| mistake.host == host);
        let nodes: Vec<_> =
            (1..=self.count).map(|host| self.start_node(host, flags, of_host(host))).collect();
        let nodes: Vec<_> = nodes.into_iter().map(Launcher::wait).collect();
        CheckResult { nodes, took: start.elapsed() }
    }

    /// Checks all hosts. Each begins with the commands and flags that `setup` returns for it.
    pub fn check_each(&self, setup: impl Fn(usize) -> (String, String)) -> CheckResult {
        let start = Instant::now();
        let node = |host: usize| {
            let (before, flags) = setup(host);
            self.start_node(host, "", Some(&Mistake { host, before: &before, flags: &flags }))
        };
        let nodes: Vec<_> = (1..=self.count).map(node).collect();
        let nodes: Vec<_> = nodes.into_iter().map(Launcher::wait).collect();
        let result = CheckResult { nodes, took: start.elapsed() };
        assert!(result.took < LIMIT, "{:?}: {}", result.took, result.text());
        result
    }

    /// Starts a name server on h1 that answers from the file `table` of the job's folder. Returns the commands that
    /// make a host ask it for the name of h3, which /etc/hosts then lacks.
    pub fn start_name_server(&self) -> &'static str {
        let testbed = path_argument(repository_root().join("launcher-tests/testbed"));
        self.on(
            1,
            &format!(
                "(exec python3 {testbed}/dns.py 10.77.0.1 $JOB/table > $JOB/dns.out 2>&1 < /dev/null &); \
                 until grep -q ready $JOB/dns.out; do sleep 0.01; done"
            ),
        );
        "grep -v 'h3$' /etc/hosts > $JOB/hosts; mount --bind $JOB/hosts /etc/hosts; \
         echo nameserver 10.77.0.1 > $JOB/resolv; mount --bind $JOB/resolv /etc/resolv.conf"
    }

    /// Makes a mistake on a host, and checks that node 0 names it with a remedy, in time.
    pub fn assert_named(
        &self,
        mistake: &Mistake<'_>,
        level: &str,
        host: &str,
        parts: &[&str],
    ) -> CheckResult {
        let result = self.check("", Some(mistake));
        result.assert_names(level, host, parts);
        assert!(result.took < LIMIT, "{:?}: {}", result.took, result.text());
        result
    }

    pub fn assert_healthy(&self) {
        let result = self.check("", None);
        let text = &result.nodes[0].stdout;
        assert!(!text.contains("FAIL") && !text.contains("WARN"), "{}", result.text());
        assert!(
            text.contains(&format!("convoke check: {} nodes checked in ", self.count)),
            "{}",
            result.text()
        );
        assert!(result.nodes.iter().all(|node| node.status.success()), "{}", result.text());
        assert!(result.took < LIMIT, "{:?}", result.took);
    }
}

impl CheckResult {
    pub fn text(&self) -> String {
        let each = self.nodes.iter().enumerate();
        each.map(|(node, output)| format!("--- node {node}\n{}{}", output.stdout, output.stderr)).collect()
    }

    /// Checks that node 0 prints a problem about `host` with all `parts`, and a remedy. All nodes print the same.
    pub fn assert_names(&self, level: &str, host: &str, parts: &[&str]) {
        let begin = format!("{level} {host}: ");
        let text = &self.nodes[0].stdout;
        let mut lines = text
            .lines()
            .skip_while(|line| !(line.starts_with(&begin) && parts.iter().all(|part| line.contains(part))));
        assert!(lines.next().is_some(), "no {begin}{parts:?} in\n{}", self.text());
        assert!(lines.next().is_some_and(|line| line.starts_with("     try: ")), "no remedy in {text}");
        let code = i32::from(text.contains("FAIL "));
        assert_eq!(self.nodes[0].status.code(), Some(code), "{}", self.text());
    }
}

pub fn mistake(host: usize, before: &str) -> Mistake<'_> {
    Mistake { host, before, ..Mistake::default() }
}

pub fn flag(host: usize, flags: &str) -> Mistake<'_> {
    Mistake { host, flags, ..Mistake::default() }
}
