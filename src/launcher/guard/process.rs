//! The guard: the process between launcher and workers.
//!
//! It has one thread and no timers except its poll timeout. [`super::sweep`] decides which descendants to
//! signal when.

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
use rustix::process::{PidfdFlags, pidfd_open};

use super::memory::OomCounter;
use super::procfs::pids_catching;
use super::protocol::{Decoder, FromGuard, SpawnRequest, ToGuard, WorkerId, encode};
use super::sweep::{Sweep, kill_all, reap};
use crate::cause::Evidence;
use crate::fault;
use crate::limits::Limits;
use crate::os::{PreparedProgram, read_start_failure, start_worker};

/// Environment variable that makes the guard work without pidfds, as on kernels before 5.3.
const NO_PIDFD: &str = "CONVOKE_NO_PIDFD";

/// Runs the guard until the launcher tells it to exit or dies.
pub(crate) fn run(socket: UnixStream, limits: Limits) -> ExitCode {
    fault::init("guard");
    match Guard::new(socket, limits).and_then(|mut guard| guard.serve()) {
        Ok(()) => ExitCode::SUCCESS,
        // The launcher has died, or a system call has failed, which no process can receive any more.
        Err(_) => {
            kill_all();
            ExitCode::FAILURE
        }
    }
}

struct Guard {
    socket: UnixStream,
    /// Resource limits of the workers.
    limits: Limits,
    signals: SignalFd,
    decoder: Decoder,
    /// File descriptors that have arrived with messages not handled yet.
    descriptors: VecDeque<OwnedFd>,
    /// The workers that have not been reaped, by pid. A worker that could not execute its program is removed
    /// before it is reaped.
    workers: BTreeMap<i32, Worker>,
    pids: HashMap<WorkerId, i32>,
    use_pidfds: bool,
    sweep: Option<Sweep>,
    memory: OomCounter,
    /// Pids of workers that were started after the OOM kills were last counted.
    just_started: Vec<i32>,
    send_buffer: VecDeque<u8>,
}

struct Worker {
    id: WorkerId,
    /// Shows when the forked process has executed its program, or why it failed. `None` from then on.
    starting: Option<OwnedFd>,
    /// The worker's exit makes it readable. `None` on a kernel without pidfds.
    pidfd: Option<OwnedFd>,
    /// Number of OOM kills when the worker was started.
    oom_kills_before: Option<u64>,
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
            use_pidfds: std::env::var_os(NO_PIDFD).is_none(),
            sweep: None,
            memory: OomCounter::default(),
            just_started: Vec::new(),
            send_buffer: VecDeque::new(),
        })
    }

    /// Serves the launcher until it tells the guard to exit. An error if the launcher's end of the socket
    /// closes before.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            self.wait()?;
            while let Ok(Some(_)) = self.signals.read_signal() {}
            self.report_started()?;
            self.reap();
            self.continue_sweep();
            self.receive()?;
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
                        return Ok(());
                    }
                }
            }
            self.count_oom_kills();
            self.flush()?;
        }
    }

    /// Counts the OOM kills before workers that have just started. One count for all of them delays none of
    /// their starts.
    fn count_oom_kills(&mut self) {
        let started = std::mem::take(&mut self.just_started);
        let count = if started.is_empty() { None } else { self.memory.count() };
        for pid in started {
            if let Some(worker) = self.workers.get_mut(&pid) {
                worker.oom_kills_before = count;
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
        let watched = self.workers.values().flat_map(|worker| [&worker.pidfd, &worker.starting]).flatten();
        fds.extend(watched.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        let now = Instant::now();
        let timeout = self.sweep.as_ref().map_or(PollTimeout::NONE, |sweep| {
            let left = sweep.wake_at(now).saturating_duration_since(now) + Duration::from_millis(1);
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the bytes and descriptors that have arrived from the launcher.
    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; 16 << 10];
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; 3]);
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let count = match recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
                Ok(message) => {
                    for part in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(fds) = part {
                            self.descriptors.extend(fds.into_iter().map(crate::os::adopt_received_fd));
                        }
                    }
                    message.bytes
                }
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
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
            Ok((pid, status)) => {
                let pidfd = rustix::process::Pid::from_raw(pid)
                    .filter(|_| self.use_pidfds)
                    .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
                // Without a pidfd (old kernel, sandbox), SIGCHLD reports the exit.
                self.use_pidfds = pidfd.is_some();
                self.workers
                    .insert(pid, Worker { id, starting: Some(status), pidfd, oom_kills_before: None });
                self.pids.insert(id, pid);
                self.just_started.push(pid);
                Ok(())
            }
            Err(error) => self.send(&FromGuard::SpawnFailed { id, error }),
        }
    }

    /// Reports to the launcher that a worker has executed its program, or failed to. The process `pid` may
    /// have been reaped already.
    fn started(&mut self, pid: i32) -> io::Result<()> {
        let Some(worker) = self.workers.get_mut(&pid) else { return Ok(()) };
        let (id, Some(status)) = (worker.id, worker.starting.take()) else { return Ok(()) };
        match read_start_failure(&status) {
            Some(error) => {
                // The failed process is reaped later as an unknown child.
                self.workers.remove(&pid);
                self.pids.remove(&id);
                self.send(&FromGuard::SpawnFailed { id, error })
            }
            None => self.send(&FromGuard::Spawned { id, pid }),
        }
    }

    /// Reports to the launcher all workers whose start has succeeded or failed since the last call.
    fn report_started(&mut self) -> io::Result<()> {
        let is_readable = |fd: &OwnedFd| {
            let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
        };
        let ready =
            self.workers.iter().filter(|(_, worker)| worker.starting.as_ref().is_some_and(is_readable));
        let ready: Vec<i32> = ready.map(|(pid, _)| *pid).collect();
        ready.into_iter().try_for_each(|pid| self.started(pid))
    }

    fn signal(&self, id: WorkerId, signal: i32) {
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
        let mut caught = false;
        if let (Some(&group), Ok(signal)) = (self.pids.get(&id), Signal::try_from(signal)) {
            for pid in pids_catching(group, signal as i32) {
                caught |= kill(Pid::from_raw(pid), signal).is_ok();
            }
        }
        self.send(&FromGuard::Forwarded { id, caught })
    }

    fn reap(&mut self) {
        let mut exits = Vec::new();
        let last = reap(|pid, cause, core_dumped| exits.push((pid, cause, core_dumped)));
        for (pid, cause, core_dumped) in exits {
            self.exited(pid, cause, core_dumped, last);
        }
    }

    fn exited(&mut self, pid: i32, cause: ExitCause, core_dumped: bool, last: bool) {
        // The launcher must get the report of the start first, even if start and exit are seen at once. If it
        // fails, the next flush reports the error.
        let _ = self.started(pid);
        if let Some(Worker { id, oom_kills_before, .. }) = self.workers.remove(&pid) {
            self.pids.remove(&id);
            let before = oom_kills_before.filter(|_| cause != ExitCause::Code(0));
            let oom = before.and_then(|before| self.memory.kills_since(before, cause));
            let evidence = Evidence { core_dumped, oom };
            let _ = self.send(&FromGuard::Exited { id, cause, evidence, last });
        }
    }

    fn continue_sweep(&mut self) {
        let swept = self.sweep.as_mut().and_then(|sweep| sweep.step(Instant::now()));
        if let Some(swept) = swept {
            self.sweep = None;
            let _ = self.send(&swept);
        }
    }

    fn send(&mut self, message: &FromGuard) -> io::Result<()> {
        self.send_buffer.extend(encode(message)?);
        Ok(())
    }

    /// Writes as many bytes of `send_buffer` as the socket accepts.
    fn flush(&mut self) -> io::Result<()> {
        while !self.send_buffer.is_empty() {
            match (&self.socket).write(self.send_buffer.as_slices().0) {
                Ok(written) => drop(self.send_buffer.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
