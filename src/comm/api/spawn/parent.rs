//! The part of spawn that runs in the spawner: it starts ranks and waits for them.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use convoke_env::{ExitCause, LocalWorld};
use convoke_store::StoreServer;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpid, gettid};
use rustix::process::{PidfdFlags, pidfd_open};

use super::calls::{self, SpawnCall};
use super::output::{Output, Target};
use super::{Spawn, SpawnError};

/// Time to wait, after a rank failed because it lost a peer, for the rank that failed first to end.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Poll interval for ranks without a pidfd (an old kernel, a sandbox).
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Starts the ranks and waits until all have ended.
pub(super) fn run(spec: &Spawn, mut call: SpawnCall) -> Result<(), SpawnError> {
    if spec.size == 0 {
        return Err(SpawnError::Unusable("0 ranks were requested, and at least one is needed".to_owned()));
    }
    let program = Program::find()?;
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let store = StoreServer::bind(&[local])
        .map_err(|error| SpawnError::system("serve a store", io::Error::other(error)))?;
    let world = LocalWorld::new(spec.size, store.port());
    let world = world.map_err(|error| SpawnError::system("get random numbers", error))?;
    let encoded_call = call.encode();
    let deadline = spec.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut ranks = Ranks { all: Vec::new(), stage: Stage::Running, failure: None, deadline };
    for rank in 0..spec.size {
        let mut command = program.command();
        for (name, value) in world.variables(rank) {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(spec.env.iter().map(|(name, value)| (name, value)));
        command.env(calls::VARIABLE, &encoded_call);
        let child = command.spawn().map_err(|error| SpawnError::system("start this program again", error))?;
        ranks.add(child, !program.is_main).map_err(|error| SpawnError::system("watch a rank", error))?;
    }
    ranks.wait(spec, &call.place)
}

/// The program to start, and the arguments with which it reaches this call of spawn.
struct Program {
    path: PathBuf,
    arguments: Vec<OsString>,
    /// The caller is on the main thread, not in a test.
    is_main: bool,
}

impl Program {
    fn find() -> Result<Self, SpawnError> {
        let path = std::env::current_exe().ok().filter(|path| path.exists());
        // The file may be gone, as after another build; `/proc/self/exe` still names the running program.
        let path = path.unwrap_or_else(|| Path::new("/proc/self/exe").to_owned());
        if gettid() == getpid() {
            let arguments = std::env::args_os().skip(1).collect();
            return Ok(Self { path, arguments, is_main: true });
        }
        // Rust's test harness names the thread of each test after the test.
        let Some(test) = std::thread::current().name().map(OsString::from) else {
            let what = "this thread is neither the main thread nor that of a test, so a rank would not \
                        reach this call";
            return Err(SpawnError::Unusable(what.to_owned()));
        };
        let rest = ["--exact", "--nocapture", "--include-ignored", "--test-threads=1"].map(OsString::from);
        Ok(Self { path, arguments: [test].into_iter().chain(rest).collect(), is_main: false })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        command.args(&self.arguments);
        // A process group of its own lets a signal reach all processes that the rank starts.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// The ranks of one call of spawn. Dropping this value kills and reaps all ranks that are left.
struct Ranks {
    all: Vec<Rank>,
    stage: Stage,
    /// The failure to return, once a rank has failed or the time limit has expired.
    failure: Option<SpawnError>,
    /// When the stage ends at the latest; `None` without a limit.
    deadline: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No rank has failed.
    Running,
    /// A rank failed because it lost a peer, and the peer that failed first still seems to run.
    AwaitingCause,
    /// The remaining ranks have got SIGTERM, and SIGKILL after the deadline.
    Terminating,
}

struct Rank {
    child: Child,
    pidfd: Option<OwnedFd>,
    out: Output,
    err: Output,
    has_ended: bool,
}

impl Ranks {
    /// Adds a rank that has just been started.
    fn add(&mut self, mut child: Child, captured: bool) -> io::Result<()> {
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let [out, err] = [Target::Stdout, Target::Stderr].map(|to| Output::without_pipe(to, captured));
        let pid = rustix::process::Pid::from_raw(child.id().cast_signed());
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // From here on, dropping `Ranks` kills and reaps this rank.
        self.all.push(Rank { child, pidfd, out, err, has_ended: false });
        let rank = self.all.last_mut().expect("a rank was just added");
        let mut outputs = rank.outputs().into_iter().zip(pipes);
        outputs.try_for_each(|(output, pipe)| pipe.map_or(Ok(()), |pipe| output.open(pipe)))
    }

    /// Prints the output of the ranks, and ends all when one fails. Returns when all have ended.
    fn wait(mut self, spec: &Spawn, place: &str) -> Result<(), SpawnError> {
        while self.running().next().is_some() {
            self.sleep().map_err(|error| SpawnError::system("wait for ranks", error))?;
            for rank in 0..self.all.len() {
                if self.all[rank].has_ended {
                    continue;
                }
                self.all[rank].outputs().into_iter().for_each(Output::forward);
                if self.all[rank].is_dead() {
                    let (failure, is_consequence) = self.reap(rank, place);
                    if let Some(failure) = failure {
                        self.rank_failed(failure, is_consequence, spec.grace);
                    }
                }
            }
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.time_out(spec);
            }
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn running(&self) -> impl Iterator<Item = &Rank> {
        self.all.iter().filter(|rank| !rank.has_ended)
    }

    /// Sleeps until a rank writes or ends, or the stage ends.
    fn sleep(&self) -> io::Result<()> {
        let is_polled = self.running().any(|rank| rank.pidfd.is_none());
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = left.into_iter().chain(is_polled.then_some(POLL_INTERVAL)).min();
        // Rounded up; otherwise the last millisecond would be spent spinning.
        let timeout = limit.map_or(PollTimeout::NONE, |limit| {
            PollTimeout::try_from(limit.as_millis() + 1).unwrap_or(PollTimeout::MAX)
        });
        let descriptors = self.running().flat_map(|rank| {
            let outputs = [&rank.out, &rank.err].into_iter().filter_map(Output::as_fd);
            outputs.chain(rank.pidfd.as_ref().map(AsFd::as_fd))
        });
        let mut polled: Vec<_> = descriptors.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut polled, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Prints the rest of a dead rank's output, kills its process group, and reaps it. Returns its failure,
    /// if it failed, and whether that is most likely the consequence of another rank's failure.
    fn reap(&mut self, rank: usize, place: &str) -> (Option<SpawnError>, bool) {
        let size = self.all.len();
        let dead = &mut self.all[rank];
        dead.outputs().into_iter().for_each(Output::finish);
        let (status, stderr) = (dead.kill_and_reap(), dead.err.tail());
        let failure = match status.map(exit_cause) {
            Err(source) => Some(SpawnError::system(&format!("learn how rank {rank} ended"), source)),
            Ok(how) if !dead.err.started => {
                Some(SpawnError::Unreached { rank, size, place: place.to_owned(), how, stderr })
            }
            Ok(ExitCause::Code(0)) => None,
            Ok(how) => Some(SpawnError::Failed { rank, size, how, stderr }),
        };
        (failure, dead.err.consequence)
    }

    /// Ends the other ranks. If the failure is a consequence, first waits for the rank that failed first.
    fn rank_failed(&mut self, failure: SpawnError, is_consequence: bool, grace: Duration) {
        match (self.stage, is_consequence) {
            (Stage::Running, true) => {
                self.failure = Some(failure);
                (self.stage, self.deadline) = (Stage::AwaitingCause, Some(Instant::now() + CAUSE_TIMEOUT));
            }
            (Stage::Running | Stage::AwaitingCause, false) => {
                self.failure = Some(failure);
                self.terminate(grace);
            }
            // Another rank's failure is known already, or this rank was ended by a signal of the spawner.
            (Stage::AwaitingCause, true) | (Stage::Terminating, _) => {}
        }
    }

    /// Acts at the end of the time for the stage.
    fn time_out(&mut self, spec: &Spawn) {
        match self.stage {
            Stage::Running => {
                let ranks = (0..self.all.len()).filter(|&rank| !self.all[rank].has_ended).collect();
                let after = spec.timeout.expect("this stage ends only by the time limit");
                self.failure = Some(SpawnError::Timeout { ranks, after });
                self.terminate(spec.grace);
            }
            Stage::AwaitingCause => self.terminate(spec.grace),
            Stage::Terminating => {
                self.deadline = None;
                self.running().for_each(|rank| rank.signal(Signal::SIGKILL));
            }
        }
    }

    fn terminate(&mut self, grace: Duration) {
        (self.stage, self.deadline) = (Stage::Terminating, Instant::now().checked_add(grace));
        self.running().for_each(|rank| rank.signal(Signal::SIGTERM));
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.all.iter_mut().filter(|rank| !rank.has_ended) {
            rank.signal(Signal::SIGKILL);
            let _ = rank.kill_and_reap();
        }
    }
}

impl Rank {
    fn outputs(&mut self) -> [&mut Output; 2] {
        [&mut self.out, &mut self.err]
    }

    /// Signals the rank and its process group. Call it only before the rank is reaped: later its pid may be
    /// reused.
    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let _ = killpg(pid, signal);
        // The rank may have moved into another process group, so it gets the signal itself too.
        let _ = kill(pid, signal);
    }

    fn is_dead(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let pid = Pid::from_raw(self.child.id().cast_signed());
        !matches!(waitid(Id::Pid(pid), flags), Ok(WaitStatus::StillAlive))
    }

    /// Kills the rest of the rank's process group, and reaps the rank.
    fn kill_and_reap(&mut self) -> io::Result<ExitStatus> {
        self.has_ended = true;
        self.signal(Signal::SIGKILL);
        self.child.wait()
    }
}

fn exit_cause(status: ExitStatus) -> ExitCause {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitCause::Code(code),
        (None, Some(signal)) => ExitCause::Signal(signal),
        (None, None) => unreachable!("a process that was reaped has exited or was killed by a signal"),
    }
}
