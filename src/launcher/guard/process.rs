//! The guard: the process between launcher and workers.
//!
//! The guard starts, signals and reaps workers for the launcher. When the launcher's socket closes, the guard
//! kills all its own descendants and then exits. It has one thread and no timers except its poll timeout.
//! [`super::sweep`] decides which processes to signal when.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use convoke_env::{ExitCause, vars};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;

use super::memory::OomCounter;
use super::procfs::pids_catching;
use super::protocol::{Decoder, FromGuard, SpawnRequest, ToGuard, WorkerId, encode};
use super::sweep::{Sweep, kill_all, reap_with_core};
use crate::cause::Evidence;
use crate::fault;
use crate::limits::Limits;
use crate::os::{FAILURE_BYTES, PreparedProgram, StartingProcess, decode_failure, start_worker};

/// Environment variable that makes the guard work without pidfds, as on kernels before 5.3.
const NO_PIDFD: &str = "CONVOKE_NO_PIDFD";

/// Runs the guard until the launcher tells it to exit or dies.
pub(crate) fn run(socket: UnixStream, limits: Limits) -> ExitCode {
    fault::init("guard");
    match Guard::new(socket, limits).and_then(|mut guard| guard.serve()) {
        Ok(GuardExit::Requested) => ExitCode::SUCCESS,
        // No process can receive an error any more. After every error the guard kills its descendants.
        Ok(GuardExit::LauncherDied) | Err(_) => {
            kill_all(|_, _| {});
            ExitCode::FAILURE
        }
    }
}

enum GuardExit {
    /// The launcher told the guard to exit.
    Requested,
    /// The launcher's end of the socket is closed.
    LauncherDied,
}

struct Guard {
    socket: UnixStream,
    /// Resource limits of the workers.
    limits: Limits,
    signals: SignalFd,
    decoder: Decoder,
    /// File descriptors that have arrived with messages not handled yet.
    descriptors: VecDeque<OwnedFd>,
    workers: BTreeMap<i32, WorkerId>,
    pids: HashMap<WorkerId, i32>,
    /// Forked workers that have not executed their program yet. The descriptor shows when they have, or why
    /// they failed.
    starting: HashMap<i32, OwnedFd>,
    /// A pidfd for each running worker, if the kernel has them. The worker's exit makes it readable.
    pidfds: HashMap<i32, OwnedFd>,
    use_pidfds: bool,
    sweep: Option<Sweep>,
    memory: OomCounter,
    /// Workers whose start has not been passed to [`OomCounter`] yet.
    just_started: Vec<u64>,
    send_buffer: VecDeque<u8>,
}

impl Guard {
    fn new(socket: UnixStream, limits: Limits) -> io::Result<Self> {
        // Schedulers signal every process of a job (Slurm even after setsid). The launcher stops the workers
        // itself, so the guard ignores such signals. The guard itself exits only on the launcher's request or
        // death.
        let mut blocked = SigSet::all();
        for synchronous in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGABRT]
        {
            blocked.remove(synchronous);
        }
        blocked.thread_block()?;
        let mut child = SigSet::empty();
        child.add(Signal::SIGCHLD);
        let signals = SignalFd::with_flags(&child, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        nix::sys::prctl::set_child_subreaper(true)?;
        nix::unistd::setsid()?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            limits,
            signals,
            decoder: Decoder::default(),
            descriptors: VecDeque::new(),
            workers: BTreeMap::new(),
            pids: HashMap::new(),
            starting: HashMap::new(),
            pidfds: HashMap::new(),
            use_pidfds: std::env::var_os(NO_PIDFD).is_none(),
            sweep: None,
            memory: OomCounter::default(),
            just_started: Vec::new(),
            send_buffer: VecDeque::new(),
        })
    }

    fn serve(&mut self) -> io::Result<GuardExit> {
        loop {
            self.wait()?;
            while let Ok(Some(_)) = self.signals.read_signal() {}
            self.report_started()?;
            self.reap();
            self.continue_sweep();
            if !self.receive()? {
                return Ok(GuardExit::LauncherDied);
            }
            while let Some(message) = self.decoder.next::<ToGuard>().map_err(io::Error::other)? {
                match message {
                    ToGuard::Spawn(request) => self.spawn(request)?,
                    ToGuard::Signal { id, signal } => self.signal(id, signal),
                    ToGuard::Forward { id, signal } => self.forward(id, signal)?,
                    ToGuard::Sweep { delay_ms, grace_ms } => {
                        fault::point("sweeping");
                        let (delay, grace) =
                            (Duration::from_millis(delay_ms), Duration::from_millis(grace_ms));
                        self.sweep = Some(Sweep::new(Instant::now(), delay, grace));
                        self.continue_sweep();
                    }
                    ToGuard::Exit => {
                        fault::point("leaving");
                        return Ok(GuardExit::Requested);
                    }
                }
            }
            self.memory.started(&std::mem::take(&mut self.just_started));
            if !self.flush()? {
                return Ok(GuardExit::LauncherDied);
            }
        }
    }

    /// Sleeps until the launcher sends a message, a child changes its state, or the next step of the sweep is
    /// due.
    fn wait(&self) -> io::Result<()> {
        let mut wanted = PollFlags::POLLIN;
        wanted.set(PollFlags::POLLOUT, !self.send_buffer.is_empty());
        let mut fds = vec![
            PollFd::new(self.socket.as_fd(), wanted),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        let watched = self.pidfds.values().chain(self.starting.values());
        fds.extend(watched.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        let now = Instant::now();
        let timeout = match &self.sweep {
            None => PollTimeout::NONE,
            Some(sweep) => {
                let left = sweep.wake_at(now).saturating_duration_since(now) + Duration::from_millis(1);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the bytes and descriptors that have arrived from the launcher. Returns false if the launcher is
    /// gone.
    fn receive(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; 3]);
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let (count, received) =
                match recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                    Ok(message) => {
                        let mut received = Vec::new();
                        for part in message.cmsgs()? {
                            if let ControlMessageOwned::ScmRights(fds) = part {
                                received.extend(fds);
                            }
                        }
                        (message.bytes, received)
                    }
                    Err(Errno::EAGAIN) => return Ok(true),
                    Err(Errno::EINTR) => continue,
                    Err(Errno::ECONNRESET) => return Ok(false),
                    Err(error) => return Err(error.into()),
                };
            self.descriptors.extend(received.into_iter().map(crate::os::adopt_received_fd));
            if count == 0 {
                return Ok(false);
            }
            self.decoder.push(&bytes[..count]);
        }
    }

    fn spawn(&mut self, request: SpawnRequest) -> io::Result<()> {
        fault::point("spawning");
        let id = request.id;
        let mut next = || {
            self.descriptors
                .pop_front()
                .ok_or_else(|| io::Error::other("a descriptor of a spawn request is missing"))
        };
        let channel = next()?;
        let stdout = request.stdout.then(&mut next).transpose()?;
        let stderr = request.stderr.then(&mut next).transpose()?;
        let environment = environment(&request, &channel);
        let started = PreparedProgram::new(request.argv, environment, &request.cpus, request.own_session)
            .and_then(|program| {
                start_worker(&program, &self.limits, &channel, stdout.as_ref(), stderr.as_ref())
            });
        match started {
            Ok(StartingProcess { pid, status }) => {
                self.workers.insert(pid, id);
                self.pids.insert(id, pid);
                self.starting.insert(pid, status);
                self.just_started.push(id.0);
                if self.use_pidfds {
                    self.watch(pid);
                }
                Ok(())
            }
            Err(error) => self.send(&FromGuard::SpawnFailed { id, error }),
        }
    }

    /// Reports to the launcher that a worker has executed its program, or failed to. The process `pid` may
    /// have been reaped already.
    fn started(&mut self, pid: i32) -> io::Result<()> {
        let (Some(status), Some(&id)) = (self.starting.remove(&pid), self.workers.get(&pid)) else {
            return Ok(());
        };
        let mut failure = [0; FAILURE_BYTES];
        match nix::unistd::read(&status, &mut failure) {
            Ok(FAILURE_BYTES) => {
                // The failed process is reaped later as an unknown child.
                self.workers.remove(&pid);
                self.pids.remove(&id);
                self.send(&FromGuard::SpawnFailed { id, error: decode_failure(failure) })
            }
            Ok(_) | Err(_) => self.send(&FromGuard::Spawned { id, pid }),
        }
    }

    /// Reports to the launcher all workers whose start has succeeded or failed since the last call.
    fn report_started(&mut self) -> io::Result<()> {
        let pids: Vec<i32> = self.starting.keys().copied().collect();
        for pid in pids {
            let Some(status) = self.starting.get(&pid) else { continue };
            let mut fds = [PollFd::new(status.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
                self.started(pid)?;
            }
        }
        Ok(())
    }

    /// Opens a pidfd for a worker. Without one (old kernel, sandbox), SIGCHLD reports its exit.
    fn watch(&mut self, pid: i32) {
        let opened = rustix::process::Pid::from_raw(pid)
            .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
        match opened {
            Some(fd) => drop(self.pidfds.insert(pid, fd)),
            None => self.use_pidfds = false,
        }
    }

    fn signal(&mut self, id: WorkerId, signal: i32) {
        let (Some(&pid), Ok(signal)) = (self.pids.get(&id), Signal::try_from(signal)) else { return };
        fault::point("signalling");
        // The worker has not been reaped, so its pid still denotes its own process group.
        let _ = killpg(Pid::from_raw(pid), signal);
        // A stopped process must continue before it can end.
        if !matches!(signal, Signal::SIGKILL | Signal::SIGSTOP | Signal::SIGWINCH) {
            let _ = killpg(Pid::from_raw(pid), Signal::SIGCONT);
        }
    }

    /// Sends a signal only to those processes of a worker that have a handler for it. The default action
    /// would kill the others.
    fn forward(&mut self, id: WorkerId, signal: i32) -> io::Result<()> {
        let group = self.pids.get(&id).copied();
        let mut caught = false;
        if let (Some(group), Ok(signal)) = (group, Signal::try_from(signal)) {
            for pid in pids_catching(group, signal as i32) {
                caught |= kill(Pid::from_raw(pid), signal).is_ok();
            }
        }
        self.send(&FromGuard::Forwarded { id, caught })
    }

    fn reap(&mut self) {
        let mut exits = Vec::new();
        let last = reap_with_core(|pid, cause, core_dumped| exits.push((pid, cause, core_dumped)));
        for (pid, cause, core_dumped) in exits {
            self.exited(pid, cause, core_dumped, last);
        }
    }

    fn exited(&mut self, pid: i32, cause: ExitCause, core_dumped: bool, last: bool) {
        self.pidfds.remove(&pid);
        // The launcher must get the report of the start first, even if start and exit are seen at once. If it
        // fails, the next flush reports the error.
        let _ = self.started(pid);
        if let Some(id) = self.workers.remove(&pid) {
            self.pids.remove(&id);
            let oom = if cause == ExitCause::Code(0) { None } else { self.memory.oom_kills(id.0, cause) };
            self.memory.forget(id.0);
            let evidence = Evidence { core_dumped, oom };
            let _ = self.send(&FromGuard::Exited { id, cause, evidence, last });
        }
    }

    fn continue_sweep(&mut self) {
        let swept = self.sweep.as_mut().and_then(|sweep| sweep.step(Instant::now()));
        if let Some(swept) = swept {
            self.sweep = None;
            let _ = self.send(&FromGuard::Swept { stopped: swept.stopped, stuck: swept.stuck });
        }
    }

    fn send(&mut self, message: &FromGuard) -> io::Result<()> {
        self.send_buffer.extend(encode(message)?);
        Ok(())
    }

    /// Writes as many bytes of `send_buffer` as the socket accepts. Returns false if the launcher is gone.
    fn flush(&mut self) -> io::Result<bool> {
        while !self.send_buffer.is_empty() {
            match (&self.socket).write(self.send_buffer.as_slices().0) {
                Ok(written) => drop(self.send_buffer.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Returns the environment of a worker: the guard's own variables, which are the launcher's, overridden by
/// those of the request.
fn environment(request: &SpawnRequest, channel: &OwnedFd) -> Vec<(OsString, OsString)> {
    let mut all: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    for name in &request.unset {
        all.remove(name);
    }
    all.extend(request.vars.iter().cloned());
    all.insert(vars::AGENT_FD.into(), channel.as_raw_fd().to_string().into());
    all.into_iter().collect()
}
