//! Pods on simulated hosts, as the kubelet starts them: each with its own processes, host name, files in /etc,
//! /dev and termination message. A name server knows what the test tells it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use convoke_launcher_tests::harness::{Job, Launcher, children};
use convoke_launcher_tests::hosts::Hosts;
use convoke_testkit::process::Process;
use convoke_testkit::programs::{repository_root, test_worker_program, user_program};
use convoke_testkit::wait_until;

/// Most bytes of the root cause that a pod shows.
pub const MAX_MESSAGE_BYTES: usize = 3 << 10;

/// A manifest of `src/examples/jobs` and the pods that its controller makes, from `pods.json`.
#[derive(Deserialize)]
pub struct Manifest {
    pub file: String,
    pub sha256: String,
    pub pods: Vec<Pod>,
}

#[derive(Deserialize, Clone)]
pub struct Pod {
    pub name: String,
    /// Name of the pod for other pods, in full.
    pub dns: String,
    /// True if the pod has a subdomain, so that its own full name is `dns`.
    has_domain: bool,
    pub containers: Vec<Container>,
}

#[derive(Deserialize, Clone)]
pub struct Container {
    /// True for a container that must succeed before the next one starts.
    init: bool,
    pub argv: Vec<String>,
    env: BTreeMap<String, String>,
}

/// Returns all manifests with their pods.
pub fn manifests() -> Vec<Manifest> {
    let file = repository_root().join("launcher-tests/e2e/pods.json");
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Returns the pods of one manifest.
pub fn pods_of(file: &str) -> Vec<Pod> {
    manifests().into_iter().find(|manifest| manifest.file == file).unwrap().pods
}

/// Hosts for pods, and a name server on h0.
pub struct Cluster {
    pub hosts: Hosts,
    pub job: Job,
    /// The names that the name server knows, with its answers.
    names: Mutex<BTreeMap<String, String>>,
    _name_server: Process,
}

impl Cluster {
    /// Brings up `count` hosts, on at most 2 CPUs: `--nproc-per-node=auto` starts a worker for each. Each pod runs
    /// `worker`, a shell script, as `digits`.
    ///
    /// # Errors
    /// Returns the reason why this machine cannot have simulated hosts.
    pub fn up(count: usize, worker: &str) -> Result<Self, String> {
        use_two_cpus();
        let hosts = Hosts::up(count)?;
        let job = Job::new();
        fs::create_dir(job.path("bin")).unwrap();
        std::os::unix::fs::symlink(user_program("convoke"), job.path("bin/convoke")).unwrap();
        let script = job.script(&worker.replace("TEST_WORKER", &test_worker_program().display().to_string()));
        std::os::unix::fs::symlink(script, job.path("bin/digits")).unwrap();

        let table = job.path("names");
        fs::write(&table, "").unwrap();
        let server = start_name_server(&hosts, &job, &table);
        Ok(Self { hosts, job, names: Mutex::default(), _name_server: server })
    }

    /// Makes the name server answer `answer` for the name of `pod`, or deny that it exists.
    pub fn set_name(&self, pod: &Pod, answer: Option<String>) {
        let mut names = self.names.lock().unwrap();
        names.remove(&pod.dns);
        names.extend(answer.map(|answer| (pod.dns.clone(), answer)));
        let lines: String = names.iter().map(|(name, answer)| format!("{name} {answer}\n")).collect();
        fs::write(self.job.path("names.new"), lines).unwrap();
        fs::rename(self.job.path("names.new"), self.job.path("names")).unwrap();
    }

    /// Starts the containers of `pod` on host `host`, whose address becomes that of the pod. No name leads to it yet.
    pub fn start(&self, pod: &Pod, host: usize) -> Launcher {
        let folder = self.folder(pod);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("dev")).unwrap();
        let own = if pod.has_domain { format!("{} {}", pod.dns, pod.name) } else { pod.name.clone() };
        let write = |file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
        write("hosts", &format!("127.0.0.1 localhost\n{} {own}\n", address(host)));
        write(
            "resolv.conf",
            "nameserver 10.77.0.254\n\
             search default.svc.cluster.local svc.cluster.local cluster.local\n\
             options ndots:5 timeout:1 attempts:1\n",
        );
        write("message", "");
        write("start", &script(pod));

        let host = host.to_string();
        let [hosts, start] = [Hosts::script(), folder.join("start")].map(|path| path.display().to_string());
        let arguments = ["exec", &host, "unshare", "--uts", "--mount", "sh", &start];
        let mut command = self.job.command_for_program(hosts, arguments);
        command.env("TESTBED_DIR", self.hosts.state_dir()).current_dir(&folder);
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.job.path("bin").display()));
        command.env("KUBERNETES_SERVICE_HOST", "10.96.0.1").env("KUBERNETES_SERVICE_PORT", "443");
        self.job.start(command)
    }

    /// Returns what `kubectl describe` would show of the pod's end.
    pub fn termination_message(&self, pod: &Pod) -> String {
        fs::read_to_string(self.folder(pod).join("message")).unwrap()
    }

    fn folder(&self, pod: &Pod) -> PathBuf {
        self.job.path(&format!("pods/{}", pod.name))
    }
}

/// Starts the name server of the pods on h0. It answers from `table`, and ends when the value is dropped.
pub fn start_name_server(hosts: &Hosts, job: &Job, table: &Path) -> Process {
    let server = repository_root().join("launcher-tests/testbed/dns.py");
    let arguments =
        ["exec", "0", "python3", server.to_str().unwrap(), "10.77.0.254", table.to_str().unwrap()];
    let mut command = hosts.command(arguments);
    let server = Process::start(command.stdout(fs::File::create(job.path("dns")).unwrap()));
    job.wait_for_file("dns");
    server
}

/// Returns the address of a host.
pub fn address(host: usize) -> String {
    format!("10.77.0.{host}")
}

/// Kills all processes of a pod at once.
pub fn kill_pod(pod: &Launcher) {
    // The pod's process 1 is below those that enter its namespaces. With it the kernel ends all others.
    let first = wait_until("process 1 of the pod", || {
        let mut below = children(pod.pid());
        while let Some(pid) = below.pop() {
            if is_first_of_pod(pid) {
                return Some(pid);
            }
            below.extend(children(pid));
        }
        None
    });
    kill(first, Signal::SIGKILL).unwrap();
}

/// Returns true for process 1 of a PID namespace in that of a simulated host.
fn is_first_of_pod(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let pids: Vec<_> = pids.split_whitespace().collect();
    pids.len() >= 3 && pids.last() == Some(&"1")
}

/// Returns the shell script that makes a pod of new UTS and mount namespaces, and runs its containers.
fn script(pod: &Pod) -> String {
    let mut script = format!("set -e\nhostname {}\n", pod.name);
    script += "\
mount --bind hosts /etc/hosts
mount --bind resolv.conf /etc/resolv.conf
mount -t tmpfs tmpfs dev
for node in null zero full random urandom; do touch dev/$node; mount --bind /dev/$node dev/$node; done
mkdir dev/shm
mount --bind /dev/shm dev/shm
ln -s /proc/self/fd dev/fd
touch dev/termination-log
mount --bind message dev/termination-log
mount --rbind dev /dev
";
    for container in &pod.containers {
        let variables = container.env.iter().map(|(name, value)| format!("{name}={value}"));
        let words: Vec<_> =
            variables.chain(container.argv.iter().cloned()).map(|word| quoted(&word)).collect();
        let exec = if container.init { "" } else { "exec " };
        let words = words.join(" ");
        script += &format!("{exec}unshare --pid --fork --kill-child --mount-proc env {words}\n");
    }
    script
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Leaves this thread, and what it starts, at most 2 CPUs.
fn use_two_cpus() {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).unwrap();
    let mut two = CpuSet::new();
    let all = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    all.take(2).for_each(|cpu| two.set(cpu).unwrap());
    sched_setaffinity(this, &two).unwrap();
}
