//! Simulated hosts with one node of a job on each, a rendezvous, and workers. The workers log when they
//! start and when they receive SIGTERM.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::hosts::{Hosts, missing_requirement};
use convoke_testkit::wait_until;

/// The rendezvous backend. With `File` and `Etcd` the job survives the loss of any node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    C10d,
    File,
    /// An etcd cluster with the given number of members.
    Etcd(usize),
}

impl Backend {
    pub fn name(self) -> String {
        match self {
            Self::C10d => "c10d".to_owned(),
            Self::File => "file".to_owned(),
            Self::Etcd(members) => format!("etcd, {members}"),
        }
    }

    /// Returns true if the coordinator cannot move away from h1.
    pub fn has_fixed_coordinator(self) -> bool {
        self == Self::C10d
    }
}

/// A running worker; the pids are those of its host's pid namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningWorker {
    at: u128,
    pub generation: String,
    pub rank: usize,
    pub size: usize,
    pub worker: i32,
    pub guard: i32,
    pub launcher: i32,
    pub restarts: u32,
}

/// The workers of a round, by host.
pub type Round = BTreeMap<usize, RunningWorker>;

/// The observed times of a fault.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultTimes {
    /// Time from the fault to the first SIGTERM of a worker, or to the end of the last launcher.
    pub detected: Option<Duration>,
    /// Time from the fault to the start of the last worker of the next round.
    pub restarted: Option<Duration>,
}

const WORKER: &str = r#"
now() { date +%s%N; }
guard=$PPID
launcher=$(awk '/^PPid/ { print $2 }' /proc/$guard/status)
host=$(hostname)
trap 'echo "stop $(now) $CONVOKE_GENERATION ${host#h}" >> "$JOB/log"; [ -e "$JOB/stubborn.$host" ] || exit 143' TERM
echo "up $(now) $CONVOKE_GENERATION ${host#h} $RANK $WORLD_SIZE $$ $guard $launcher $TORCHELASTIC_RESTART_COUNT" >> "$JOB/log"
while [ ! -e "$JOB/go" ]; do sleep 0.02; done
"#;

pub struct Cluster {
    pub hosts: Hosts,
    pub job: Job,
    pub backend: Backend,
    /// The rendezvous endpoint of nodes with `C10d`.
    pub endpoint: String,
    worker: PathBuf,
    /// Arguments that all nodes get.
    arguments: Vec<String>,
    conf: String,
    /// The launchers, by host.
    pub nodes: BTreeMap<usize, Launcher>,
    generations: Vec<String>,
}

impl Cluster {
    /// Brings up hosts h1 to hN, and etcd on h0.
    ///
    /// # Errors
    /// Returns the reason why this machine cannot have simulated hosts or etcd.
    pub fn new(backend: Backend, hosts: usize, nnodes: &str) -> Result<Self, String> {
        if let (Backend::Etcd(_), Some(why)) = (backend, missing_requirement(&["etcd", "etcdctl"])) {
            return Err(why);
        }
        let hosts = Hosts::up(hosts)?;
        let job = Job::new();
        let cluster = Self {
            worker: job.script(WORKER),
            job,
            backend,
            endpoint: "h1:29400".to_owned(),
            arguments: vec![format!("--nnodes={nnodes}")],
            conf: "last_call_timeout=60,join_timeout=100,close_timeout=5".to_owned(),
            nodes: BTreeMap::new(),
            generations: Vec::new(),
            hosts,
        };
        if let Backend::Etcd(members) = backend {
            cluster.etcd(&["up", &members.to_string()]);
        }
        Ok(cluster)
    }

    pub fn with_argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    pub fn with_conf(mut self, conf: &str) -> Self {
        self.conf = conf.to_owned();
        self
    }

    /// Runs `etcd.sh` with these arguments on h0 and returns its output.
    pub fn etcd(&self, arguments: &[&str]) -> String {
        let mut all = vec!["exec", "0"];
        let script = Hosts::script().with_file_name("etcd.sh").display().to_string();
        all.push(&script);
        all.extend(arguments);
        let mut command = self.hosts.command(all);
        command.env("TB_ETCD_IP", "10.77.0.254");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Runs a command on a host and returns its output.
    pub fn output_of(&self, host: usize, command: &str) -> String {
        let output = self.run(host, command);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn exec(&self, host: usize, command: &str) {
        self.output_of(host, command);
    }

    /// Returns true if the command succeeds on the host.
    pub fn succeeds(&self, host: usize, command: &str) -> bool {
        self.run(host, command).status.success()
    }

    fn run(&self, host: usize, command: &str) -> Output {
        let host = host.to_string();
        self.hosts.command(["exec", &host, "sh", "-c", command]).output().unwrap()
    }

    /// Signals the launcher on a host. That launcher must not have started workers.
    pub fn signal(&self, host: usize, signal: &str) {
        let script = format!("kill -{signal} $(pgrep -o -x convoke)");
        self.exec(host, &script);
    }

    pub fn run_testbed(&self, arguments: &[&str]) {
        self.hosts.run_script(arguments.iter().copied()).unwrap();
    }

    /// Builds the launcher command of the node on this host.
    pub fn command(&self, host: usize) -> Command {
        let script = Hosts::script().display().to_string();
        let through = [script.as_str(), "exec", &host.to_string()];
        let etcd = |members: &usize| {
            let all: Vec<String> = (1..=*members).map(|i| format!("10.77.0.254:{}", 23790 + i)).collect();
            all.join(",")
        };
        let (backend, endpoint, conf) = match &self.backend {
            Backend::C10d => ("c10d", self.endpoint.clone(), String::new()),
            Backend::File => {
                ("c10d", self.job.path("rendezvous").display().to_string(), ",store_type=file".to_owned())
            }
            Backend::Etcd(members) => ("etcd", etcd(members), String::new()),
        };
        let mut command = self.job.wrapped_command(
            &through,
            [format!("--rdzv-backend={backend}"), format!("--rdzv-endpoint={endpoint}")],
        );
        command.arg("--rdzv-id=job").arg(format!("--rdzv-conf={}{conf}", self.conf));
        command.args(&self.arguments).arg(&self.worker);
        command.env("TESTBED_DIR", self.hosts.state_dir()).env("OMP_NUM_THREADS", "1");
        command.env("PET_SHUTDOWN_TIMEOUT", "5");
        command
    }

    pub fn start(&mut self, host: usize) {
        let command = self.command(host);
        self.start_as(host, command);
    }

    pub fn start_as(&mut self, host: usize, command: Command) {
        let node = self.job.start(command);
        self.nodes.insert(host, node);
    }

    /// Starts nodes on hosts h1 to hN. Node h1 starts first, so that it becomes the coordinator.
    pub fn start_all(&mut self, hosts: usize) {
        self.start(1);
        if hosts > 1 {
            self.wait_for_output(1, "nodes have joined");
        }
        (2..=hosts).for_each(|host| self.start(host));
    }

    pub fn wait_for_output(&self, host: usize, what: &str) {
        wait_until(&format!("h{host} to say \"{what}\""), || {
            self.nodes[&host].stderr().contains(what).then_some(())
        });
    }

    /// Waits until all workers of the next round of `size` nodes are up, one on each node, and returns them.
    pub fn wait_for_round(&mut self, size: usize) -> Round {
        let round = wait_until(&format!("a round of {size}; so far {}", self.log()), || {
            let mut rounds: BTreeMap<String, Round> = BTreeMap::new();
            for line in self.log().lines() {
                if let Some((host, up)) = parse_running_worker(line)
                    && up.size == size
                    && !self.generations.contains(&up.generation)
                {
                    rounds.entry(up.generation.clone()).or_default().insert(host, up);
                }
            }
            rounds.into_values().find(|round| round.len() == size)
        });
        self.generations.push(round.values().next().unwrap().generation.clone());
        let mut ranks: Vec<usize> = round.values().map(|up| up.rank).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, Vec::from_iter(0..size), "{round:?}");
        round
    }

    /// Returns the number of rounds that have begun, including rounds in which some workers never started.
    pub fn round_count(&self) -> usize {
        let log = self.log();
        let mut all: Vec<_> =
            log.lines().filter_map(parse_running_worker).map(|(_, up)| up.generation).collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.job.path("log")).unwrap_or_default()
    }

    /// Returns the time at which the worker on this host received SIGTERM in that round.
    fn sigterm_time(&self, host: usize, generation: &str) -> Option<u128> {
        self.log().lines().find_map(|line| {
            let mut words = line.split(' ');
            let (what, at, of, on) = (words.next()?, words.next()?, words.next()?, words.next()?);
            (what == "stop" && of == generation && on == host.to_string()).then(|| at.parse().ok())?
        })
    }

    /// Injects `fault` into a round. The survivors are the nodes of the hosts `survivors`; they must begin a
    /// round with `size` nodes.
    pub fn expect_new_round(
        &mut self,
        before: &Round,
        fault: impl FnOnce(&mut Self),
        survivors: &[usize],
        size: usize,
    ) -> (FaultTimes, Round) {
        let start = now();
        fault(self);
        let round = self.wait_for_round(size);
        let generation = &before.values().next().unwrap().generation;
        let first = survivors.iter().filter_map(|&host| self.sigterm_time(host, generation)).min();
        let last = round.values().map(|up| up.at).max().unwrap();
        let since = |at: u128| Duration::from_nanos(at.saturating_sub(start).try_into().unwrap());
        (FaultTimes { detected: first.map(since), restarted: Some(since(last)) }, round)
    }

    /// Injects `fault` and asserts that the nodes of `hosts` end with exit code 1. Returns their output.
    pub fn expect_failure(
        &mut self,
        fault: impl FnOnce(&mut Self),
        hosts: &[usize],
    ) -> (FaultTimes, Vec<ProcessOutput>) {
        let start = now();
        fault(self);
        let ended: Vec<_> =
            hosts.iter().map(|host| self.nodes.remove(host).unwrap().wait().expect_exit_code(1)).collect();
        let took = Duration::from_nanos((now() - start).try_into().unwrap());
        (FaultTimes { detected: Some(took), restarted: None }, ended)
    }

    /// Asserts that for this time the workers of the round run undisturbed.
    pub fn expect_undisturbed(&self, round: &Round, for_: Duration) {
        let rounds = self.round_count();
        std::thread::sleep(for_);
        let generation = &round.values().next().unwrap().generation;
        for host in round.keys() {
            assert_eq!(self.sigterm_time(*host, generation), None, "{}", self.log());
        }
        assert_eq!(self.round_count(), rounds, "{}", self.log());
    }

    /// Lets the workers finish, and asserts that all nodes succeed.
    pub fn finish(&mut self) {
        fs::write(self.job.path("go"), "").unwrap();
        for (_, node) in std::mem::take(&mut self.nodes) {
            node.wait().expect_exit_code(0);
        }
    }

    /// Continues a launcher that was stopped.
    pub fn resume(&self, host: usize, launcher: i32) {
        self.exec(host, &format!("kill -CONT {launcher}"));
        // `nsenter`, which started the launcher, stops together with it but needs its own SIGCONT.
        self.nodes[&host].signal(nix::sys::signal::Signal::SIGCONT);
    }

    /// Drops the launcher of a host that is gone, and returns its output.
    pub fn remove_node(&mut self, host: usize) -> String {
        let node = self.nodes.remove(&host).unwrap();
        let message = node.stderr();
        drop(node);
        message
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (host, node) in &self.nodes {
                eprintln!("--- h{host} has said\n{}", node.stderr());
            }
        }
    }
}

fn parse_running_worker(line: &str) -> Option<(usize, RunningWorker)> {
    let words: Vec<&str> = line.split(' ').collect();
    let ["up", at, generation, host, rank, size, worker, guard, launcher, restarts] = words[..] else {
        return None;
    };
    let up = RunningWorker {
        at: at.parse().ok()?,
        generation: generation.to_owned(),
        rank: rank.parse().ok()?,
        size: size.parse().ok()?,
        worker: worker.parse().ok()?,
        guard: guard.parse().ok()?,
        launcher: launcher.parse().ok()?,
        restarts: restarts.parse().ok()?,
    };
    Some((host.parse().ok()?, up))
}

/// Returns the time in the unit of the workers' `date +%s%N`.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()
}
