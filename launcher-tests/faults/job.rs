//! One case of the fault matrix: ranks as processes, one of them with a fault, and the reports of the
//! survivors.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use convoke_launcher_tests::fault_spec::{FaultTestConfig, Operation, Report, ReportedError, read_json};
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::path_argument;
use convoke_store::StoreServer;
use convoke_testkit::process::remove_job_variables;
use convoke_testkit::programs::{fault_injection_program, user_program};
use convoke_testkit::{TEST_TIMEOUT, free_port, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The hosts on which the ranks run, and the process that serves their store.
#[derive(Clone, Copy)]
pub enum Placement<'a> {
    /// On this host; the test process serves the store, as a torchrun agent does.
    Local,
    /// On this host; rank 0 serves the store.
    LocalStoreOnRank0,
    /// On this host under `convoke`, which also reports how ranks died.
    Launcher,
    /// On simulated hosts, with the given number of ranks on each. A process on the switch h0 serves the
    /// store.
    SimulatedHosts(&'a Hosts, usize),
}

/// Returns the configuration without a fault.
pub fn config(operation: Operation) -> FaultTestConfig {
    FaultTestConfig {
        folder: std::path::PathBuf::new(),
        operation,
        calls: 50,
        pause: Duration::ZERO,
        timeout: TEST_TIMEOUT,
        init_timeout: TEST_TIMEOUT,
        peer_timeout: Duration::from_secs(10),
        shared_memory: true,
        single_copy: false,
        early_leave: None,
        faults: Vec::new(),
    }
}

/// The running ranks of one case.
pub struct Job {
    folder: tempfile::TempDir,
    /// One process for each rank, or a single launcher.
    processes: Vec<Child>,
    config: FaultTestConfig,
    size: usize,
    /// The store, if the test process serves it.
    _store: Option<StoreServer>,
    store_process: Option<Child>,
}

impl Job {
    pub fn start(placement: Placement<'_>, size: usize, config: FaultTestConfig) -> Self {
        let folder = tempfile::Builder::new().prefix("convoke-faults-").tempdir().unwrap();
        let config = FaultTestConfig { folder: folder.path().to_owned(), ..config };
        let mut job = Self { folder, processes: Vec::new(), config, size, _store: None, store_process: None };
        job.spawn(placement);
        job
    }

    fn spawn(&mut self, placement: Placement<'_>) {
        let config = serde_json::to_string(&self.config).unwrap();
        let shared_memory = if self.config.shared_memory { "on" } else { "off" };
        let single_copy = if self.config.single_copy { "always" } else { "never" };
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let port = match placement {
            Placement::Local => {
                let store = StoreServer::bind(&[local]).unwrap();
                self._store.insert(store).port()
            }
            Placement::LocalStoreOnRank0 => free_port(),
            Placement::SimulatedHosts(hosts, _) => {
                let mut command = hosts.command(["exec", "0"]);
                command.args(worker_arguments()).arg("store").arg(self.folder.path()).stdin(Stdio::piped());
                self.store_process = Some(command.spawn().unwrap());
                wait_until("the store", || read_json(self.folder.path(), "port", 0))
            }
            Placement::Launcher => {
                let mut command = Command::new(user_program("convoke"));
                command.arg(format!("--nproc-per-node={}", self.size)).arg("--log-dir=/dev/null");
                command.args(worker_arguments()).arg(&config).stdin(Stdio::null());
                command.stdout(Stdio::null()).stderr(Stdio::null());
                remove_job_variables(&mut command).env("CONVOKE_SHM", shared_memory);
                command.env("CONVOKE_SINGLE_COPY", single_copy);
                self.processes.push(command.spawn().unwrap());
                return;
            }
        };
        let [program, role] = worker_arguments();
        for rank in 0..self.size {
            let (mut command, addr) = match placement {
                Placement::SimulatedHosts(hosts, each) => {
                    let host = (rank / each + 1).to_string();
                    (hosts.command(["exec", &host, &program, &role]), "10.77.0.254")
                }
                Placement::Local | Placement::LocalStoreOnRank0 | Placement::Launcher => {
                    let mut command = Command::new(&program);
                    command.arg(&role);
                    (command, "127.0.0.1")
                }
            };
            remove_job_variables(&mut command).arg(&config).stdin(Stdio::piped()).stderr(Stdio::null());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.size.to_string());
            command.env("CONVOKE_SHM", shared_memory).env("CONVOKE_SINGLE_COPY", single_copy);
            command.env("MASTER_ADDR", addr).env("MASTER_PORT", port.to_string());
            let served = if let Placement::LocalStoreOnRank0 = placement { "False" } else { "True" };
            command.env("TORCHELASTIC_USE_AGENT_STORE", served);
            if let Placement::SimulatedHosts(hosts, _) = placement {
                command.env("TESTBED_DIR", hosts.state_dir());
            }
            self.processes.push(command.spawn().unwrap());
        }
    }

    /// The folder into which the ranks write their reports.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until all ranks are in the middle of their calls.
    pub fn wait_until_running(&self) {
        for rank in 0..self.size {
            wait_until("all ranks to be at work", || read_json::<()>(self.folder.path(), "up", rank));
        }
    }

    /// Waits for the final report of rank `rank`.
    pub fn report(&self, rank: usize) -> Report {
        wait_until(&format!("rank {rank} to report, {:?}", self.config), || {
            read_json(self.folder.path(), "report", rank)
        })
    }

    /// Waits for the time at which the fault occurred. The other ranks may notice the fault before the
    /// failing rank records it.
    pub fn fault_time(&self, rank: usize) -> u64 {
        wait_until(&format!("rank {rank} to come to the fault, {:?}", self.config), || {
            read_json(self.folder.path(), "fault", rank)
        })
    }

    /// Waits for the time at which rank `rank` began to leave.
    pub fn leave_time(&self, rank: usize) -> u64 {
        wait_until(&format!("rank {rank} to leave, {:?}", self.config), || {
            read_json(self.folder.path(), "leaving", rank)
        })
    }

    /// Asserts that all other ranks blame `victim`. Returns the time from the fault to the last survivor's
    /// error.
    pub fn expect_suspect(&self, victim: usize, kinds: &[&str]) -> Duration {
        let reports: Vec<_> = self.other_ranks(victim).map(|rank| self.report(rank)).collect();
        self.expect_agreement(&reports, &[victim], self.fault_time(victim), kinds)
    }

    /// Asserts that all `reports` blame one and the same rank of `victims`. Returns the time from `since` to
    /// the last error.
    pub fn expect_agreement(
        &self,
        reports: &[Report],
        victims: &[usize],
        since: u64,
        kinds: &[&str],
    ) -> Duration {
        let context = || format!("{victims:?} {kinds:?}: {reports:#?}\n{:?}", self.config);
        let error =
            |report: &Report| report.error.clone().unwrap_or_else(|| panic!("no error: {}", context()));
        let all: Vec<ReportedError> = reports.iter().map(error).collect();
        for error in &all {
            assert!(kinds.contains(&&*error.kind), "{}", context());
            assert!(error.suspect.is_some_and(|suspect| victims.contains(&suspect)), "{}", context());
            assert_eq!(error.named_ranks, all[0].named_ranks, "{}", context());
            // A rank that could not reach the store in time names the right victim, but perhaps not the rank
            // that detected it.
            if error.confirmed && all[0].confirmed {
                assert_eq!(
                    (&error.loss_reason, error.detected_by),
                    (&all[0].loss_reason, all[0].detected_by),
                    "{}",
                    context()
                );
            }
        }
        assert!(reports.iter().all(|report| report.returned_at >= since), "too early: {}", context());
        let last = reports.iter().map(|report| report.returned_at).max().unwrap_or(since);
        Duration::from_nanos(last - since)
    }

    pub fn other_ranks(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.size).filter(move |&other| other != rank)
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        for pid in worker_pids(&self.processes[rank]) {
            kill(pid, signal).unwrap();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self.processes.iter_mut().chain(&mut self.store_process) {
            if let Ok(None) = child.try_wait() {
                // A launcher's workers end with it. On a simulated host only this code ends them.
                worker_pids(child).into_iter().for_each(|pid| _ = kill(pid, Signal::SIGKILL));
                let _ = child.kill();
            }
            let status = child.wait();
            if std::thread::panicking() {
                eprintln!("{status:?}, signal {:?}", status.as_ref().ok().and_then(ExitStatusExt::signal));
            }
        }
    }
}

/// Returns the process that does the work: `child` itself, or the process that `nsenter` runs on a simulated
/// host.
fn worker_pids(child: &Child) -> Vec<Pid> {
    let pid = child.id();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.trim() != "nsenter" {
        return vec![Pid::from_raw(pid.cast_signed())];
    }
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok().map(Pid::from_raw)).collect()
}

/// Program and role of a rank.
fn worker_arguments() -> [String; 2] {
    [path_argument(fault_injection_program("test-worker-faults")), "fault".to_owned()]
}

/// Runs `case` for all of `cases`, at most `limit` at a time; for cases that mostly wait.
pub fn run_concurrently<C: Send, R: Send>(
    limit: usize,
    cases: impl IntoIterator<Item = C>,
    case: impl Fn(C) -> R + Sync,
) -> Vec<R> {
    let cases = Mutex::new(cases.into_iter().collect::<Vec<_>>().into_iter());
    let next = || cases.lock().unwrap().next();
    std::thread::scope(|scope| {
        let one = || {
            let mut results = Vec::new();
            while let Some(next) = next() {
                results.push(case(next));
            }
            results
        };
        let threads: Vec<_> = (0..limit).map(|_| scope.spawn(one)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}
