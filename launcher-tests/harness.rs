//! A job: one launcher with its own folder, and a tag that identifies all its processes.

// This module is test code.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::new_without_default,
    missing_docs,
    missing_debug_implementations
)]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use convoke_testkit::process::remove_job_variables;
use convoke_testkit::programs::user_program;
use convoke_testkit::{TEST_TIMEOUT, try_wait_until_within, wait_until};

/// Environment variable that every process of a job inherits.
const TAG: &str = "CONVOKE_TEST_TAG";

/// A job's folder and tag.
pub struct Job {
    pub dir: tempfile::TempDir,
    tag: String,
}

/// A running launcher.
pub struct Launcher {
    pub child: Child,
    out: PathBuf,
    err: PathBuf,
}

/// Exit status and output of a launcher.
pub struct ProcessOutput {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Job {
    pub fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let tag = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::Builder::new().prefix("convoke-e2e-").tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        Self { dir, tag }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a shell script and returns its path.
    pub fn script(&self, text: &str) -> PathBuf {
        let path = self.path("worker.sh");
        fs::write(&path, format!("#!/bin/sh\n{text}")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&path, mode).unwrap();
        path
    }

    /// Builds a launcher command with these arguments. Its output goes to files, and TMPDIR is in the job's
    /// folder.
    pub fn command<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Command {
        self.prepare_command(Command::new(user_program("convoke")), arguments)
    }

    /// Builds a launcher command that another program, such as `unshare`, executes as its last arguments.
    pub fn wrapped_command<I: AsRef<OsStr>>(
        &self,
        wrapper: &[&str],
        arguments: impl IntoIterator<Item = I>,
    ) -> Command {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(user_program("convoke"));
        self.prepare_command(command, arguments)
    }

    /// Builds a command for another program, in the environment that launchers get.
    pub fn command_for_program<I: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: impl IntoIterator<Item = I>,
    ) -> Command {
        self.prepare_command(Command::new(program), arguments)
    }

    fn prepare_command<I: AsRef<OsStr>>(
        &self,
        mut command: Command,
        arguments: impl IntoIterator<Item = I>,
    ) -> Command {
        command.args(arguments);
        remove_job_variables(&mut command);
        command.env(TAG, &self.tag).env("TMPDIR", self.path("tmp")).env("JOB", self.dir.path());
        // A developer may have set RUST_BACKTRACE for the tests; the expected output has no backtraces.
        command.env("RUST_BACKTRACE", "0");
        // With it, Python writes a line and its end separately, and the lines of workers mix.
        command.env_remove("PYTHONUNBUFFERED");
        command.stdin(Stdio::null()).current_dir(self.dir.path());
        command
    }

    pub fn start(&self, command: Command) -> Launcher {
        self.start_with_stdout(command, None)
    }

    /// Starts a launcher; `stdout` replaces the job's output file.
    pub fn start_with_stdout(&self, mut command: Command, stdout: Option<Stdio>) -> Launcher {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let (out, err) = (self.path(&format!("{number}.out")), self.path(&format!("{number}.err")));
        let file = fs::File::create(&out).unwrap();
        command.stdout(stdout.unwrap_or(file.into())).stderr(fs::File::create(&err).unwrap());
        Launcher { child: command.spawn().unwrap(), out, err }
    }

    pub fn run<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> ProcessOutput {
        self.start(self.command(arguments)).wait()
    }

    /// Returns the pids of all living processes of this job.
    pub fn processes(&self) -> Vec<i32> {
        let needle = format!("{TAG}={}", self.tag);
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                // A zombie no longer has an environment.
                let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environ.split(|&byte| byte == 0).any(|variable| variable == needle.as_bytes())
            })
            .collect()
    }

    pub fn wait_for_file(&self, name: &str) -> String {
        let path = self.path(name);
        wait_until(&format!("{name} to appear"), || {
            fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n'))
        })
    }

    pub fn wait_until_no_processes(&self, within: Duration) {
        let end = Instant::now() + within;
        while !self.processes().is_empty() {
            let left: Vec<_> = self.processes().into_iter().map(describe_process).collect();
            assert!(Instant::now() < end, "still there after {within:?}: {left:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

impl Launcher {
    pub fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(self.pid(), signal).unwrap();
    }

    /// Returns the pid of the launcher's guard, the only process that the launcher starts itself.
    pub fn guard(&self) -> nix::unistd::Pid {
        let children = children(self.pid());
        assert_eq!(children.len(), 1, "{:?}", children.iter().map(|pid| describe_process(pid.as_raw())));
        children[0]
    }

    /// Returns what the launcher and its workers have written to stdout so far.
    pub fn stdout(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Returns the stderr output of the launcher so far.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.err).unwrap()).into_owned()
    }

    pub fn wait(self) -> ProcessOutput {
        self.wait_within(TEST_TIMEOUT)
    }

    /// Waits for a program that runs for longer than a test usually does.
    pub fn wait_within(mut self, limit: Duration) -> ProcessOutput {
        let status = try_wait_until_within(limit, || self.child.try_wait().unwrap());
        let read = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
        let Some(status) = status else {
            let all = Command::new("ps").args(["-eo", "pid,ppid,psr,stat,etime,args"]).output();
            let all = all.map(|ps| String::from_utf8_lossy(&ps.stdout).into_owned()).unwrap_or_default();
            panic!("launcher {} does not end:\n{}\n{}\n{all}", self.pid(), read(&self.out), read(&self.err));
        };
        ProcessOutput { status, stdout: read(&self.out), stderr: read(&self.err) }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl ProcessOutput {
    pub fn expect_exit_code(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{}\n{}\n{}", self.status, self.stdout, self.stderr);
        self
    }
}

/// Returns the child processes of process `of`.
pub fn children(of: nix::unistd::Pid) -> Vec<nix::unistd::Pid> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| parent(pid) == of.to_string()).map(nix::unistd::Pid::from_raw).collect()
}

fn parent(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap_or_default().trim().to_owned()
}

/// Formats pid, parent and command line for messages.
pub fn describe_process(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    format!("{pid} (child of {}) {line}", parent(pid))
}
