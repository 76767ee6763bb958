//! Jobs on simulated hosts: what a node does when another host loses its power or its network.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::harness::{Ended, Job, describe, lacks, skip, wait_until};

/// From the loss of a host to the end of the other node; documented are 4 s.
const LIMIT: Duration = Duration::from_secs(15);
const PORT: &str = "29500";

/// Two hosts that exist as long as this does.
struct Hosts {
    state: tempfile::TempDir,
}

impl Hosts {
    /// None if there can be no such hosts here, which it says.
    fn up() -> Option<Self> {
        let why = if let Some(why) = lacks(&["ip", "nsenter", "unshare", "pgrep"]) {
            why
        } else {
            let hosts =
                Self { state: tempfile::Builder::new().prefix("convoke-e2e-hosts-").tempdir().unwrap() };
            let up = hosts.command(["up", "2"]).output().unwrap();
            if up.status.success() {
                return Some(hosts);
            }
            String::from_utf8_lossy(&up.stderr).trim().to_owned()
        };
        skip("the loss of a host", &why);
        None
    }

    fn command<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(Self::script());
        command.args(arguments).env("TESTBED_DIR", self.state.path());
        command
    }

    fn script() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("testbed/hosts.sh")
    }

    fn tell(&self, what: &str, host: &str) {
        let output = self.command([what, host]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.command(["down"]).output();
    }
}

/// Node 0 on h1, node 1 on h2, two workers each that wait for ever; then `what` happens to the host of node `lost`, and
/// the other node ends.
fn survivor(what: &str, lost: usize) -> Option<(Ended, Duration)> {
    let hosts = Hosts::up()?;
    let job = Job::new();
    let worker = job.script("echo $$ > \"$JOB/up.$RANK\"\nexec sleep 1000\n");
    let [first, second] = [0, 1].map(|node| {
        let through = [Hosts::script().display().to_string(), "exec".to_owned(), (node + 1).to_string()];
        let through: Vec<_> = through.iter().map(String::as_str).collect();
        let mut command =
            job.command_through(&through, ["--nnodes=2", "--master-addr=h1", "--master-port", PORT]);
        command.arg(format!("--node-rank={node}")).arg("--nproc-per-node=2").arg(&worker);
        command.env("TESTBED_DIR", hosts.state.path()).env("OMP_NUM_THREADS", "1");
        job.start(command)
    });
    for rank in 0..4 {
        job.wait_for_file(&format!("up.{rank}"));
    }
    let (survivor, other) = if lost == 0 { (second, first) } else { (first, second) };
    hosts.tell(what, &(lost + 1).to_string());
    let start = Instant::now();
    let ended = survivor.wait().expect(1);
    let took = start.elapsed();
    let pid_namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let here = hosts.command(["pid", &(2 - lost).to_string()]).output().unwrap();
    let here = pid_namespace(String::from_utf8_lossy(&here.stdout).trim().parse().unwrap());
    let left: Vec<_> = job.processes().into_iter().filter(|&pid| pid_namespace(pid) == here).collect();
    assert!(left.is_empty(), "{:?}", left.into_iter().map(describe).collect::<Vec<_>>());
    if what == "partition" {
        // It lives, and for it the survivor is lost.
        let stderr = other.wait().expect(1).stderr;
        assert!(stderr.contains(&format!("node {} (", 1 - lost)) && stderr.contains("is lost"), "{stderr}");
    }
    drop(hosts);
    wait_until("the other host's processes to be gone", || job.processes().is_empty().then_some(()));
    Some((ended, took))
}

fn expect_named(what: &str) {
    for lost in [0, 1] {
        let Some((ended, took)) = survivor(what, lost) else { return };
        eprintln!("{what}, node {lost}: the other ended after {took:.1?}:\n{}", ended.stderr);
        let named = format!("node {lost} (");
        assert!(ended.stderr.contains(&named) && ended.stderr.contains("is lost"), "{}", ended.stderr);
        assert!(took < LIMIT, "took {took:?}");
    }
}

#[test]
fn a_host_without_power_is_lost_and_named() {
    expect_named("kill-host");
}

#[test]
fn a_host_without_network_is_lost_and_named() {
    expect_named("partition");
}
