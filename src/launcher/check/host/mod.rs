//! Checks of this host alone.

mod disk;
mod facts;
mod gpu;
mod infiniband;
mod limits;
mod names;
mod python;

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::peer::NodeResult;
use super::problem::Problem;
use crate::config::{Config, Machine};
use crate::limits::Limits;

/// Longest time for the checks of a host. What takes longer is reported as a problem.
const HOST_TIMEOUT: Duration = Duration::from_millis(2500);

/// The checks of this host, which run in threads of their own.
pub(super) struct HostChecks {
    host: String,
    result: NodeResult,
    running: Vec<(&'static str, std::sync::mpsc::Receiver<NodeResult>)>,
    deadline: Instant,
}

impl HostChecks {
    /// Starts the checks. `limits` are those with which this process was started.
    pub(super) fn start(config: &Config, machine: &Machine, limits: &Limits, host: &str) -> Self {
        let mut checks = Self {
            host: host.to_owned(),
            result: NodeResult::default(),
            running: Vec::new(),
            deadline: Instant::now() + HOST_TIMEOUT,
        };
        checks.add(limits::check(config, machine, limits, host));
        let (config, machine, host) = (config.clone(), machine.clone(), host.to_owned());
        let own = || (config.clone(), machine.clone(), host.clone());
        checks.run("disk", own(), |(config, _, host)| disk::check(&config, &host));
        checks.run("names", own(), |(config, _, host)| names::check(&config, &host));
        checks.run("GPUs", own(), |(config, machine, host)| gpu::check(&config, &machine, &host));
        checks.run("InfiniBand", own(), |(_, machine, host)| infiniband::check(&machine.root, &host));
        checks.run("versions", own(), |(config, machine, host)| facts::check(&config, &machine, &host));
        checks
    }

    /// Adds problems that are known already.
    pub(super) fn add(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.result.problems.extend(problems);
    }

    fn run<T: Send + 'static>(
        &mut self,
        name: &'static str,
        with: T,
        check: impl FnOnce(T) -> NodeResult + Send + 'static,
    ) {
        let (sender, receiver) = channel();
        let work = move || drop(sender.send(check(with)));
        match thread::Builder::new().name(format!("convoke-{name}")).spawn(work) {
            Ok(_) => self.running.push((name, receiver)),
            Err(error) => self.result.not_checked.push(format!("{name} (cannot start a thread: {error})")),
        }
    }

    /// Waits for the checks, and returns their results.
    pub(super) fn finish(mut self) -> NodeResult {
        for (name, receiver) in std::mem::take(&mut self.running) {
            match receiver.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
                Ok(result) => {
                    self.result.problems.extend(result.problems);
                    self.result.facts.extend(result.facts);
                    self.result.not_checked.extend(result.not_checked);
                }
                Err(RecvTimeoutError::Timeout) => self.result.problems.push(late(name, &self.host)),
                Err(RecvTimeoutError::Disconnected) => {
                    self.result.not_checked.push(format!("{name} (the check ended early)"));
                }
            }
        }
        self.result
    }
}

/// Returns the problem about a check that gave no result in time.
fn late(name: &str, host: &str) -> Problem {
    let after = HOST_TIMEOUT.as_secs_f64();
    let (text, remedy) = match name {
        "disk" => (
            format!("a file system did not take 4 KiB in {after} s"),
            "is a network file system down? look at mount, dmesg, and df on each of the folders",
        ),
        "names" => (
            format!("the name server gave no answer in {after} s"),
            "correct /etc/resolv.conf, or add the names of the hosts to /etc/hosts; each look-up costs the job that long",
        ),
        "GPUs" => (
            format!("NVIDIA's driver gave no answer in {after} s"),
            "a GPU may be lost: nvidia-smi, dmesg; nvidia-smi -pm 1 keeps the driver loaded",
        ),
        _ => (
            format!("the check of {name} took longer than {after} s"),
            "is the file system of the programs slow, or the host overloaded?",
        ),
    };
    Problem::fail(name, host, text, remedy)
}
