//! One case of the fault matrix: ranks as processes, one of them with a fault, and the reports of the
//! survivors.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use convoke_launcher_tests::fault::{Failed, Orders, Report, Work, noted};
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::path;
use convoke_store::StoreServer;
use convoke_testkit::process::without_job_variables;
use convoke_testkit::programs::{shipped, with_faults};
use convoke_testkit::{PATIENCE, free_port, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The hosts on which the ranks run, and the process that serves their store.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    /// On this host; the test process serves the store, as a torchrun agent does.
    Here,
    /// On this host; rank 0 serves the store.
    Alone,
    /// On this host under `convoke`, which also reports how ranks died.
    Launcher,
    /// On simulated hosts, with the given number of ranks on each. A process on the switch h0 serves the
    /// store.
    Hosts(&'a Hosts, usize),
}

/// Returns orders without a fault.
pub fn orders(work: Work) -> Orders {
    Orders {
        folder: std::path::PathBuf::new(),
        work,
        calls: 50,
        pause: Duration::ZERO,
        timeout: PATIENCE,
        init_timeout: PATIENCE,
        peer_timeout: Duration::from_secs(10),
        shared_memory: true,
        early: None,
        faults: Vec::new(),
    }
}

/// The running ranks of one case.
pub struct Job {
    folder: tempfile::TempDir,
    /// One process for each rank, or a single launcher.
    processes: Vec<Child>,
    orders: Orders,
    size: usize,
    /// The store, if the test process serves it.
    _store: Option<StoreServer>,
    store_process: Option<Child>,
}

impl Job {
    pub fn start(place: Place<'_>, size: usize, orders: Orders) -> Self {
        let folder = tempfile::Builder::new().prefix("convoke-faults-").tempdir().unwrap();
        let orders = Orders { folder: folder.path().to_owned(), ..orders };
        let mut job = Self { folder, processes: Vec::new(), orders, size, _store: None, store_process: None };
        job.spawn(place);
        job
    }

    fn spawn(&mut self, place: Place<'_>) {
        let orders = serde_json::to_string(&self.orders).unwrap();
        let shared_memory = if self.orders.shared_memory { "on" } else { "off" };
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let port = match place {
            Place::Here => {
                let store = StoreServer::bind(&[local]).unwrap();
                self._store.insert(store).port()
            }
            Place::Alone => free_port(),
            Place::Hosts(hosts, _) => {
                let mut command = hosts.command(["exec", "0"]);
                command.args(worker()).arg("store").arg(self.folder.path()).stdin(Stdio::piped());
                self.store_process = Some(command.spawn().unwrap());
                wait_until("the store", || noted(self.folder.path(), "port", 0))
            }
            Place::Launcher => {
                let mut command = Command::new(shipped("convoke"));
                command.arg(format!("--nproc-per-node={}", self.size)).arg("--log-dir=/dev/null");
                command.args(worker()).arg(&orders).stdin(Stdio::null());
                command.stdout(Stdio::null()).stderr(Stdio::null());
                without_job_variables(&mut command).env("CONVOKE_SHM", shared_memory);
                self.processes.push(command.spawn().unwrap());
                return;
            }
        };
        let [program, role] = worker();
        for rank in 0..self.size {
            let (mut command, addr) = match place {
                Place::Hosts(hosts, each) => {
                    let host = (rank / each + 1).to_string();
                    (hosts.command(["exec", &host, &program, &role]), "10.77.0.254")
                }
                Place::Here | Place::Alone | Place::Launcher => {
                    let mut command = Command::new(&program);
                    command.arg(&role);
                    (command, "127.0.0.1")
                }
            };
            without_job_variables(&mut command).arg(&orders).stdin(Stdio::piped()).stderr(Stdio::null());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.size.to_string());
            command.env("CONVOKE_SHM", shared_memory);
            command.env("MASTER_ADDR", addr).env("MASTER_PORT", port.to_string());
            let served = if let Place::Alone = place { "False" } else { "True" };
            command.env("TORCHELASTIC_USE_AGENT_STORE", served);
            if let Place::Hosts(hosts, _) = place {
                command.env("TESTBED_DIR", hosts.state());
            }
            self.processes.push(command.spawn().unwrap());
        }
    }

    /// The folder into which the ranks write their reports.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until all ranks are in the middle of their calls.
    pub fn wait_until_up(&self) {
        for rank in 0..self.size {
            wait_until("all ranks to be at work", || noted::<()>(self.folder.path(), "up", rank));
        }
    }

    /// Waits for the final report of rank `rank`.
    pub fn report(&self, rank: usize) -> Report {
        wait_until(&format!("rank {rank} to report, {:?}", self.orders), || {
            noted(self.folder.path(), "report", rank)
        })
    }

    /// Waits for the time at which the fault occurred. The other ranks may notice the fault before the
    /// failing rank records it.
    pub fn fault_at(&self, rank: usize) -> u64 {
        wait_until(&format!("rank {rank} to come to the fault, {:?}", self.orders), || {
            noted(self.folder.path(), "fault", rank)
        })
    }

    /// Waits for the time at which rank `rank` began to leave.
    pub fn leaving_at(&self, rank: usize) -> u64 {
        wait_until(&format!("rank {rank} to leave, {:?}", self.orders), || {
            noted(self.folder.path(), "leaving", rank)
        })
    }

    /// Asserts that all other ranks blame `victim`. Returns the time from the fault to the last survivor's
    /// error.
    pub fn blames(&self, victim: usize, kinds: &[&str]) -> Duration {
        let reports: Vec<_> = self.others(victim).map(|rank| self.report(rank)).collect();
        self.agree(&reports, &[victim], self.fault_at(victim), kinds)
    }

    /// Asserts that all `reports` blame one and the same rank of `victims`. Returns the time from `since` to
    /// the last error.
    pub fn agree(&self, reports: &[Report], victims: &[usize], since: u64, kinds: &[&str]) -> Duration {
        let context = || format!("{victims:?} {kinds:?}: {reports:#?}\n{:?}", self.orders);
        let failed =
            |report: &Report| report.failed.clone().unwrap_or_else(|| panic!("no error: {}", context()));
        let all: Vec<Failed> = reports.iter().map(failed).collect();
        for failed in &all {
            assert!(kinds.contains(&&*failed.kind), "{}", context());
            assert!(failed.blamed.is_some_and(|blamed| victims.contains(&blamed)), "{}", context());
            assert_eq!(failed.named, all[0].named, "{}", context());
            // A rank that could not reach the store in time names the right victim, but perhaps not the rank
            // that detected it.
            if failed.confirmed && all[0].confirmed {
                assert_eq!((&failed.how, failed.by), (&all[0].how, all[0].by), "{}", context());
            }
        }
        assert!(reports.iter().all(|report| report.returned >= since), "too early: {}", context());
        let last = reports.iter().map(|report| report.returned).max().unwrap_or(since);
        Duration::from_nanos(last - since)
    }

    pub fn others(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.size).filter(move |&other| other != rank)
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        for pid in inside(&self.processes[rank]) {
            kill(pid, signal).unwrap();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self.processes.iter_mut().chain(&mut self.store_process) {
            if let Ok(None) = child.try_wait() {
                // A launcher's workers end with it. On a simulated host only this code ends them.
                inside(child).into_iter().for_each(|pid| _ = kill(pid, Signal::SIGKILL));
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
fn inside(child: &Child) -> Vec<Pid> {
    let pid = child.id();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.trim() != "nsenter" {
        return vec![Pid::from_raw(pid.cast_signed())];
    }
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok().map(Pid::from_raw)).collect()
}

/// Program and role of a rank.
fn worker() -> [String; 2] {
    [path(with_faults("test-worker-faults")), "fault".to_owned()]
}

/// Runs `case` for all of `cases`, at most `many` at a time; for cases that mostly wait.
pub fn side_by_side<C: Send, R: Send>(
    many: usize,
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
        let threads: Vec<_> = (0..many).map(|_| scope.spawn(one)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}
