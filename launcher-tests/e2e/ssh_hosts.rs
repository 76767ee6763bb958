//! Simulated hosts with a real sshd each, on which `--hosts` starts jobs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::harness::{Job, Launcher};
use convoke_launcher_tests::hosts::{Hosts, missing_requirement};
use convoke_launcher_tests::path_argument;
use convoke_testkit::programs::user_program;
use convoke_testkit::{skip, wait_until};

/// Time after the end of the head or of a connection until no process of a job is left on any host. The documentation
/// promises 5 s.
pub const ENDED: Duration = Duration::from_secs(5);

/// Simulated hosts h1 to hN, each with sshd; commands run on h0.
pub struct SshHosts {
    pub hosts: Hosts,
    count: usize,
    pub job: Job,
}

impl SshHosts {
    pub fn up_or_skip(count: usize, test: &str) -> Option<Self> {
        let sshd = Path::new("/usr/sbin/sshd").exists();
        let why =
            missing_requirement(&["ssh", "ssh-keygen"]).or((!sshd).then(|| "no program sshd".to_owned()));
        let hosts = why.map_or_else(|| Hosts::up(count), Err);
        let hosts = hosts.inspect_err(|why| skip(format!("{test}: {why}"))).ok()?;
        let ssh = Self { hosts, count, job: Job::new() };
        for key in ["host_key", "user_key"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(ssh.path(key))
                .status();
            assert!(made.unwrap().success());
        }
        fs::copy(ssh.path("user_key.pub"), ssh.path("authorized_keys")).unwrap();
        fs::write(ssh.path("noise"), "").unwrap();
        let public = fs::read_to_string(ssh.path("host_key.pub")).unwrap();
        let known: String = (1..=count).map(|host| format!("h{host} {public}")).collect();
        fs::write(ssh.path("known_hosts"), known).unwrap();
        let folder = ssh.job.dir.path().display();
        fs::write(
            ssh.path("ssh_config"),
            format!(
                "IdentityFile {folder}/user_key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n\
                 GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\nUser root\nLogLevel ERROR\n"
            ),
        )
        .unwrap();
        fs::write(
            ssh.path("sshd_config"),
            format!(
                "HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n\
                 PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nSetEnv BASH_ENV={folder}/noise XDG_CACHE_HOME={folder}/cache\n"
            ),
        )
        .unwrap();
        (1..=count).for_each(|host| ssh.start_sshd(host, ""));
        Some(ssh)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.job.path(name)
    }

    pub fn start_sshd(&self, host: usize, more: &str) {
        let config = self.path("sshd_config");
        let start = format!("mkdir -p /run/sshd && /usr/sbin/sshd -f {} {more}", config.display());
        self.on(host, &start);
    }

    pub fn on(&self, host: usize, shell: &str) -> String {
        self.hosts
            .run_script(["exec", &host.to_string(), "sh", "-c", shell])
            .unwrap_or_else(|error| panic!("{shell}: {error}"))
    }

    /// Stops sshd on a host, and waits for its end. Sessions that are open go on.
    pub fn stop_sshd(&self, host: usize) {
        self.on(host, "pkill -x sshd; while pgrep -x sshd > /dev/null; do sleep 0.01; done");
    }

    /// Starts `convoke --hosts=LIST FLAGS... PROGRAM...` on h0.
    pub fn start(&self, list: &str, words: &[&str]) -> Launcher {
        self.start_program(&path_argument(user_program("convoke")), list, words)
    }

    pub fn start_program(&self, program: &str, list: &str, words: &[&str]) -> Launcher {
        let list = format!("--hosts={list}");
        let shell = format!("--rsh=ssh -F {}", self.path("ssh_config").display());
        self.job.start(self.command_on_h0(&[&[program, &list, &shell], words].concat()))
    }

    /// Returns a command that runs these words on h0.
    pub fn command_on_h0(&self, words: &[&str]) -> Command {
        let mut command = self.job.command_for_program(Hosts::script(), [&["exec", "0"][..], words].concat());
        command.env("TESTBED_DIR", self.hosts.state_dir()).env("OMP_NUM_THREADS", "1");
        command
    }

    /// Makes a folder for PATH, with `convoke` and an `ssh` that knows these hosts. Returns the value of PATH.
    pub fn path_with_programs(&self) -> String {
        let bin = self.path("bin");
        fs::create_dir(&bin).unwrap();
        symlink(user_program("convoke"), bin.join("convoke")).unwrap();
        let config = self.path("ssh_config");
        self.program("bin/ssh", &format!("exec /usr/bin/ssh -F {} \"$@\"", config.display()));
        format!("{}:{}", bin.display(), std::env::var("PATH").unwrap())
    }

    /// Writes a shell script that can be executed.
    pub fn program(&self, name: &str, text: &str) {
        fs::write(self.path(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Starts a job of sleeping workers, one on each host, and waits until all run.
    pub fn start_sleepers(&self) -> Launcher {
        let list = format!("h[1-{}]", self.count);
        let worker = self.job.script("echo > \"$JOB/up.$RANK\"\nexec sleep 1000\n");
        let job_folder = format!("--env=JOB={}", self.job.dir.path().display());
        let launcher = self.start(&list, &[&job_folder, worker.to_str().unwrap()]);
        (0..self.count).for_each(|rank| drop(self.job.wait_for_file(&format!("up.{rank}"))));
        launcher
    }

    /// Sends a signal to the head, which runs on h0.
    pub fn signal_head(&self, signal: Signal) {
        self.on(0, &format!("kill -{} $(pgrep -of -- '[-]-hosts=')", signal as i32));
    }

    /// Checks that no process of a job is left on these hosts `within` this time since `since`.
    pub fn assert_nothing_left(&self, since: Instant, within: Duration, hosts: impl Iterator<Item = usize>) {
        for host in hosts {
            let left = || self.on(host, "pgrep -f '[s]leep 1000|[c]onvoke --agent|[w]orker.sh' || true");
            wait_until(&format!("the end of all processes on h{host}"), || left().is_empty().then_some(()));
        }
        assert!(since.elapsed() < within, "{:?}", since.elapsed());
    }
}

/// Writes a copy of convoke with another version to `path`. Returns the versions of convoke and of the copy.
pub fn convoke_of_another_version(path: &Path) -> [String; 2] {
    let version = |program: &Path| {
        let said = Command::new(program).arg("--version").output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        said.trim().strip_prefix("convoke ").unwrap().to_owned()
    };
    let own = user_program("convoke");
    let here = version(&own);
    let other = here.replacen(|digit: char| digit.is_ascii_digit(), "9", 1);
    let mut program = fs::read(&own).unwrap();
    for at in 0..program.len() - here.len() {
        if program[at..].starts_with(here.as_bytes()) {
            program[at..at + here.len()].copy_from_slice(other.as_bytes());
        }
    }
    fs::write(path, program).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let there = version(path);
    assert_eq!(there, other);
    [here, there]
}
