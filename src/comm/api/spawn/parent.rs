//! The part of spawn that runs in the spawner: it starts ranks and waits for them.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use convoke_env::{ExitCause, Generation, Role, WorkerEnv, vars};
use convoke_store::StoreServer;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpid, gettid};
use rustix::process::{PidfdFlags, pidfd_open};

use super::output::Output;
use super::supervisor::{Action, RankExit, Supervisor};
use super::{Spawn, SpawnCallId, SpawnError, VARIABLE, call_results};

/// Poll interval for ranks without a pidfd (an old kernel, a sandbox).
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Limit on reads of one pipe before other events are handled; these reads together exceed its capacity.
const MAX_READS: usize = 64;
/// Environment variables of this process's launcher that a rank must not inherit.
const REMOVED_VARIABLES: [&str; 5] =
    [vars::RUN_ID, vars::RESTART_COUNT, vars::MAX_RESTARTS, vars::ERROR_FILE, vars::AGENT_FD];

/// Starts the ranks and waits until all have ended.
pub(super) fn run(spec: &Spawn, call_id: &SpawnCallId) -> Result<(), SpawnError> {
    if spec.size == 0 {
        return Err(SpawnError::Unusable("0 ranks were requested, and at least one is needed".to_owned()));
    }
    let program = Program::find()?;
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let store = StoreServer::bind(&[local])
        .map_err(|error| SpawnError::system("serve a store", io::Error::other(error)))?;
    let random = || Generation::random().map_err(|error| SpawnError::system("get random numbers", error));
    let (generation, secret) = (random()?, format!("{}{}", random()?, random()?));
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
        .map_err(|error| SpawnError::system("make an epoll instance", error))?;
    let deadline = spec.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut ranks = Ranks {
        all: Vec::new(),
        epoll,
        captured: !program.is_main,
        supervisor: Supervisor::new(deadline, spec.grace),
    };
    for rank in 0..spec.size {
        let mut command = program.command();
        for name in REMOVED_VARIABLES {
            command.env_remove(name);
        }
        let variables = worker_env(rank, spec.size, store.port(), generation).to_vars();
        command.envs(variables.into_iter().filter(|(name, _)| !REMOVED_VARIABLES.contains(name)));
        if [vars::TOKEN, vars::TOKEN_FILE].iter().all(|name| std::env::var_os(name).is_none()) {
            command.env(vars::TOKEN, &secret);
        }
        command.envs(spec.env.iter().map(|(name, value)| (name, value)));
        command.env(VARIABLE, call_id.to_string()).env(call_results::VARIABLE, call_results::encode_errors());
        ranks.start(command, call_id, spec.use_pidfds)?;
    }
    ranks.wait(spec, call_id)
}

fn worker_env(rank: usize, size: usize, port: u16, generation: Generation) -> WorkerEnv {
    WorkerEnv {
        rank,
        world_size: size,
        local_rank: rank,
        local_world_size: size,
        group_rank: 0,
        group_world_size: 1,
        role: Role { name: "default".to_owned(), rank, world_size: size },
        master_addr: Ipv4Addr::LOCALHOST.to_string(),
        master_port: port,
        restart_count: 0,
        max_restarts: 0,
        run_id: String::new(),
        use_agent_store: true,
        error_file: None,
        generation: Some(generation),
    }
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

/// Kinds of epoll events; the event data is `rank * KINDS + kind`.
const OUT: u64 = 0;
const ERR: u64 = 1;
const PID: u64 = 2;
const KINDS: u64 = 3;

/// The ranks of one call of spawn. Dropping this value kills and reaps all ranks that are left.
struct Ranks {
    all: Vec<Rank>,
    epoll: Epoll,
    /// The call is in a test, so output goes through the macros that the harness captures.
    captured: bool,
    supervisor: Supervisor,
}

struct Rank {
    child: Child,
    pidfd: Option<OwnedFd>,
    out: OutputPipe<ChildStdout>,
    err: OutputPipe<ChildStderr>,
    has_ended: bool,
}

/// Standard output or standard error of a rank. `pipe` is `None` after its end of file.
struct OutputPipe<P> {
    pipe: Option<P>,
    output: Output,
}

impl Ranks {
    fn start(
        &mut self,
        mut command: Command,
        call_id: &SpawnCallId,
        use_pidfds: bool,
    ) -> Result<(), SpawnError> {
        let rank = self.all.len();
        let failed = |what: &'static str| move |error: io::Error| SpawnError::system(what, error);
        let mut child = command.spawn().map_err(failed("start this program again"))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).filter(|_| use_pidfds);
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let output = || Output::new(&call_id.token);
        let (out, err) =
            (OutputPipe { pipe: out, output: output() }, OutputPipe { pipe: err, output: output() });
        // From here on, dropping `Ranks` kills and reaps this rank.
        self.all.push(Rank { child, pidfd, out, err, has_ended: false });
        let Rank { pidfd, out, err, .. } = &self.all[rank];
        let watch = |fd: &dyn AsFd, kind: u64| -> io::Result<()> {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, rank as u64 * KINDS + kind);
            Ok(self.epoll.add(fd.as_fd(), event)?)
        };
        let watch_all = || {
            if let Some(pipe) = &out.pipe {
                fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                watch(pipe, OUT)?;
            }
            if let Some(pipe) = &err.pipe {
                fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                watch(pipe, ERR)?;
            }
            pidfd.iter().try_for_each(|pidfd| watch(pidfd, PID))
        };
        watch_all().map_err(failed("watch a rank"))
    }

    fn wait(mut self, spec: &Spawn, call_id: &SpawnCallId) -> Result<(), SpawnError> {
        while self.all.iter().any(|rank| !rank.has_ended) {
            let mut events = [EpollEvent::empty(); 64];
            let count = match self.epoll.wait(&mut events, self.poll_timeout()) {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(error) => return Err(SpawnError::system("wait for ranks", error)),
            };
            // The kernel returns events in the order in which they happened, so the first failure is
            // handled first.
            for event in &events[..count] {
                let (rank, kind) = ((event.data() / KINDS) as usize, event.data() % KINDS);
                match kind {
                    OUT => self.all[rank].out.forward(self.captured, false),
                    ERR => self.all[rank].err.forward(self.captured, true),
                    _ => self.reap(rank, call_id),
                }
            }
            for rank in 0..self.all.len() {
                if self.all[rank].pidfd.is_none() && !self.all[rank].has_ended && self.all[rank].is_dead() {
                    self.reap(rank, call_id);
                }
            }
            let running = || (0..self.all.len()).filter(|&rank| !self.all[rank].has_ended).collect();
            let late = || SpawnError::Timeout {
                ranks: running(),
                after: spec.timeout.expect("without a time limit there is no deadline"),
            };
            let action = self.supervisor.tick(Instant::now(), late);
            self.signal_running(action);
        }
        let grace = spec.grace;
        std::mem::replace(&mut self.supervisor, Supervisor::new(None, grace)).outcome()
    }

    /// Returns the time until ranks without a pidfd must be polled or a time limit of the supervisor expires.
    fn poll_timeout(&self) -> EpollTimeout {
        let poll =
            self.all.iter().any(|rank| rank.pidfd.is_none() && !rank.has_ended).then_some(POLL_INTERVAL);
        let wake = self.supervisor.wake_at().map(|at| at.saturating_duration_since(Instant::now()));
        let Some(timeout) = poll.into_iter().chain(wake).min() else { return EpollTimeout::NONE };
        // Rounded up; otherwise the last millisecond would be spent spinning.
        let millis = u16::try_from(timeout.as_millis() + 1).unwrap_or(u16::MAX);
        EpollTimeout::from(millis)
    }

    /// Handles a dead rank: reads the rest of its output, kills its process group, and ends the
    /// other ranks if the supervisor decides so. No rank is restarted.
    fn reap(&mut self, rank: usize, call_id: &SpawnCallId) {
        let size = self.all.len();
        let one = &mut self.all[rank];
        if let Some(pidfd) = one.pidfd.take() {
            let _ = self.epoll.delete(&pidfd);
        }
        one.out.finish(self.captured, false);
        one.err.finish(self.captured, true);
        let status = one.kill_and_reap();
        let stderr = one.err.output.tail();
        let has_started = one.out.output.has_started();
        let is_consequence = one.out.output.is_consequence();
        let end = match status.map(exit_cause) {
            Err(source) => {
                RankExit::Failed(SpawnError::System { what: format!("learn how rank {rank} ended"), source })
            }
            Ok(how) if !has_started => {
                let place = call_id.place.clone();
                RankExit::Failed(SpawnError::Unreached { rank, size, place, how, stderr })
            }
            Ok(ExitCause::Code(0)) => RankExit::Success,
            Ok(how) if is_consequence => {
                RankExit::Consequence(SpawnError::Failed { rank, size, how, stderr })
            }
            Ok(how) => RankExit::Failed(SpawnError::Failed { rank, size, how, stderr }),
        };
        let action = self.supervisor.rank_exited(Instant::now(), end);
        self.signal_running(action);
    }

    fn signal_running(&self, action: Option<Action>) {
        let signal = match action {
            None => return,
            Some(Action::Terminate) => Signal::SIGTERM,
            Some(Action::Kill) => Signal::SIGKILL,
        };
        for rank in self.all.iter().filter(|rank| !rank.has_ended) {
            rank.signal(signal);
        }
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

impl<P: Read + AsRawFd> OutputPipe<P> {
    /// Reads the pipe, and prints the complete lines that have arrived.
    fn forward(&mut self, captured: bool, is_stderr: bool) {
        let mut buffer = [0; 16 << 10];
        // The bound keeps a rank that writes without end from delaying the others.
        for _ in 0..MAX_READS {
            let Some(pipe) = &mut self.pipe else { return };
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(count) => print_output(&self.output.push(&buffer[..count]), captured, is_stderr),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    /// Prints the rest of the output of a dead rank. Later output of processes that the rank left running is
    /// dropped.
    fn finish(&mut self, captured: bool, is_stderr: bool) {
        self.forward(captured, is_stderr);
        self.pipe = None;
        print_output(&self.output.finish(), captured, is_stderr);
    }
}

/// Prints the output of a rank to the output of this process.
#[allow(clippy::print_stdout, clippy::print_stderr)] // these two are what a test harness captures
fn print_output(bytes: &[u8], captured: bool, is_stderr: bool) {
    if bytes.is_empty() {
        return;
    }
    let text = || String::from_utf8_lossy(bytes);
    // Write errors are ignored: the ranks continue if nobody reads the output.
    let _ = match (captured, is_stderr) {
        (true, true) => return eprint!("{}", text()),
        (true, false) => return print!("{}", text()),
        (false, true) => io::stderr().write_all(bytes),
        (false, false) => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
    };
}
