//! A Slurm cluster on simulated hosts of this machine; `slurm.sh` sets it up.

use std::path::{Path, PathBuf};
use std::process::Command;

use convoke_testkit::skip;

use crate::harness::{Job, Launcher, ProcessOutput};
use crate::hosts::missing_requirement;

/// Nodes h1 to hN, and h0, from which users submit jobs. Dropping this value stops them.
#[derive(Debug)]
pub struct Slurm {
    state: tempfile::TempDir,
}

impl Slurm {
    /// Brings up `nodes` nodes. Reports `test` as skipped and returns `None` if that is impossible here.
    ///
    /// # Panics
    /// If this machine has no folder for temporary files.
    #[must_use]
    pub fn up_or_skip(nodes: usize, test: &str) -> Option<Self> {
        Self::up(nodes, test, false)
    }

    /// Brings up `nodes` nodes whose processes are tracked by cgroups, as most clusters do. Reports `test` as skipped
    /// and returns `None` if that is impossible here.
    ///
    /// # Panics
    /// If this machine has no folder for temporary files.
    #[must_use]
    pub fn up_with_cgroups_or_skip(nodes: usize, test: &str) -> Option<Self> {
        if !Path::new("/sys/fs/cgroup/freezer/tasks").exists() {
            skip(format!("{test}: no hierarchy of cgroups version 1 with the controller freezer"));
            return None;
        }
        Self::up(nodes, test, true)
    }

    fn up(nodes: usize, test: &str, with_cgroups: bool) -> Option<Self> {
        let tools = ["ip", "nsenter", "unshare", "pgrep", "srun", "slurmctld", "slurmd", "munged"];
        let why = if let Some(why) = missing_requirement(&tools) {
            why
        } else {
            let state = tempfile::Builder::new().prefix("convoke-slurm-").tempdir();
            let slurm = Self { state: state.expect("a temporary folder") };
            let mut up = slurm.script(&["up", &nodes.to_string()]);
            if with_cgroups {
                up.env("TB_SLURM_PROCTRACK", "cgroup");
            }
            let up = up.output().expect("slurm.sh can be started");
            if up.status.success() {
                return Some(slurm);
            }
            String::from_utf8_lossy(&up.stderr).trim().to_owned()
        };
        skip(format!("{test}: {why}"));
        None
    }

    fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(testbed("slurm.sh"));
        command.args(arguments).env("TESTBED_DIR", self.state.path());
        command
    }

    /// Starts a command on h0, with Slurm's tools.
    pub fn start(&self, job: &Job, arguments: &[&str], variables: &[(&str, &str)]) -> Launcher {
        let mut command = job.command_for_program(testbed("slurm.sh"), [&["exec"], arguments].concat());
        command.env("TESTBED_DIR", self.state.path()).envs(variables.iter().copied());
        job.start(command)
    }

    /// Runs a command on h0, and waits for its end.
    #[must_use]
    pub fn run(&self, job: &Job, arguments: &[&str], variables: &[(&str, &str)]) -> ProcessOutput {
        self.start(job, arguments, variables).wait()
    }

    /// Runs a shell command on a node as root, and returns its output.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn on_node(&self, node: usize, shell: &str) -> String {
        self.hosts_script(&["exec", &node.to_string(), "sh", "-c", shell])
    }

    /// Powers a node off: the others see silence.
    ///
    /// # Panics
    /// If that fails.
    pub fn power_off(&self, node: usize) {
        let _ = self.hosts_script(&["kill-host", &node.to_string()]);
    }

    /// Runs `hosts.sh` for the hosts of this cluster, and returns its output.
    fn hosts_script(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(testbed("hosts.sh"));
        let output = command.args(arguments).env("TESTBED_DIR", self.state.path()).output();
        let output = output.expect("hosts.sh can be started");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Changes one node's view of host names by a `sed` script over its /etc/hosts.
    pub fn edit_hosts(&self, node: usize, sed: &str) {
        let file = self.state.path().join(format!("etc-hosts-{node}"));
        let file = file.display();
        let edited = format!(
            "sed '{sed}' /etc/hosts > {file}.new && cat {file}.new > {file} && mount --bind {file} /etc/hosts"
        );
        let _ = self.on_node(node, &edited);
    }

    /// A folder that all nodes share.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.state.path()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = self.script(&["down"]).output();
    }
}

fn testbed(script: &str) -> PathBuf {
    convoke_testkit::programs::repository_root().join("launcher-tests/testbed").join(script)
}
