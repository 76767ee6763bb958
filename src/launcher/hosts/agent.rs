//! The launcher agent of a host (`convoke --agent`): starts the launcher that the head asks for, and passes its
//! output and its end back. The connection is its lifeline: without it, the launcher and all its processes end.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use super::frame::{Decoder, FromAgent, MAGIC, Ready, Start, ToAgent, encode};
use crate::cli::VERSION;
use crate::host_name::host_name;
use crate::rendezvous::own_addresses;

/// Interval of signs of life in both directions.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a sign of life after which the other side counts as lost.
pub(super) const ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time from SIGTERM to SIGKILL for the launcher of a head that is lost.
const LOST_GRACE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(500);
/// Variable with the pid of the agent that started a launcher.
pub(crate) const AGENT_PID: &str = "CONVOKE_HOSTS_AGENT";

enum Event {
    FromHead(ToAgent),
    /// The connection to the head is lost, or the head sent nonsense.
    HeadLost,
    /// The launcher has ended, and its output is complete.
    Ended,
}

/// The way of messages to the head. Several threads use it.
#[derive(Clone)]
struct Head(Arc<Mutex<std::io::Stdout>>);

impl Head {
    fn send(&self, message: &FromAgent) {
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A head that is gone is noticed at its end of the connection.
        let _ = out.write_all(&encode(message)).and_then(|()| out.flush());
    }
}

/// Runs the agent. It ends with the launcher, or without the connection to the head.
pub(crate) fn run() -> ExitCode {
    let head = Head(Arc::new(Mutex::new(std::io::stdout())));
    let _ = std::io::stdout().write_all(MAGIC);
    let addresses =
        own_addresses().into_iter().filter(|ip| !ip.is_loopback()).map(|ip| ip.to_string()).collect();
    head.send(&FromAgent::Ready(Ready { version: VERSION.to_owned(), host: host_name(), addresses }));
    let (sender, events) = channel();
    let from_head = sender.clone();
    thread::spawn(move || read_head(&from_head));
    let start = loop {
        match events.recv() {
            Ok(Event::FromHead(ToAgent::Start(start))) => break start,
            Ok(Event::FromHead(ToAgent::Enter(folder))) => {
                let folder = OsString::from_vec(folder);
                let entered = std::env::set_current_dir(&folder);
                head.send(&FromAgent::Entered(
                    entered.map_err(|error| format!("{}: {error}", folder.display())),
                ));
            }
            Ok(Event::FromHead(ToAgent::Alive)) => {}
            // The head has given up before the job began.
            Ok(Event::FromHead(ToAgent::Signal(_)) | Event::HeadLost | Event::Ended) | Err(_) => {
                return ExitCode::FAILURE;
            }
        }
    };
    match start_launcher(start) {
        Ok(child) => supervise(child, &head, sender, &events),
        Err(error) => {
            head.send(&FromAgent::Failed(error));
            ExitCode::FAILURE
        }
    }
}

fn start_launcher(start: Start) -> Result<Child, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find its own program: {error}"))?;
    let variables = start
        .variables
        .into_iter()
        .map(|(name, value)| (OsString::from_vec(name), OsString::from_vec(value)));
    // The file may have been replaced since: a copy of equal content by another host that shares the cache.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(program)
        .args(start.arguments.into_iter().map(OsString::from_vec))
        .envs(variables)
        .env(AGENT_PID, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command.spawn().map_err(|error| format!("cannot start the launcher: {error}"))
}

fn supervise(mut child: Child, head: &Head, sender: Sender<Event>, events: &Receiver<Event>) -> ExitCode {
    let pid = Pid::from_raw(child.id().cast_signed());
    let copiers = [
        child.stdout.take().map(|stream| copy(stream, false, head.clone())),
        child.stderr.take().map(|stream| copy(stream, true, head.clone())),
    ];
    thread::spawn(move || {
        // The process is reaped later: until then its pid can belong to no other process that gets its signals.
        let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        // Processes that outlive the launcher on purpose (--orphans=keep) may hold its output open.
        for copier in copiers.into_iter().flatten() {
            let deadline = Instant::now() + LOST_GRACE;
            while !copier.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(2));
            }
        }
        let _ = sender.send(Event::Ended);
    });
    let (mut heard, mut said) = (Instant::now(), Instant::now());
    let mut kill_at: Option<Instant> = None;
    let stop = |kill_at: &mut Option<Instant>| {
        if kill_at.is_none() {
            *kill_at = Some(Instant::now() + LOST_GRACE);
            let _ = kill(pid, Signal::SIGTERM);
        }
    };
    loop {
        match events.recv_timeout(POLL) {
            Ok(Event::FromHead(message)) => {
                heard = Instant::now();
                if let ToAgent::Signal(number) = message
                    && let Ok(signal) = Signal::try_from(number)
                {
                    // Fails if the launcher is just ending.
                    let _ = kill(pid, signal);
                }
            }
            Ok(Event::HeadLost) => stop(&mut kill_at),
            Ok(Event::Ended) => {
                let (code, signal) =
                    child.wait().map_or((None, None), |status| (status.code(), status.signal()));
                head.send(&FromAgent::Ended { code, signal });
                return ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("the waiting thread sends before it ends"),
        }
        if heard.elapsed() > ALIVE_TIMEOUT {
            stop(&mut kill_at);
        }
        if said.elapsed() >= ALIVE_INTERVAL {
            said = Instant::now();
            head.send(&FromAgent::Alive);
        }
        if kill_at.is_some_and(|at| Instant::now() >= at) {
            // The launcher's guard then kills all processes of the job on this host.
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

/// Reads the head's messages until the connection ends or makes no sense.
fn read_head(events: &Sender<Event>) {
    let mut decoder = Decoder::without_magic();
    let mut stdin = std::io::stdin().lock();
    let mut bytes = [0; 4096];
    while let Ok(count) = stdin.read(&mut bytes)
        && count > 0
    {
        decoder.push(&bytes[..count]);
        loop {
            match decoder.next() {
                // The receiver lives as long as this process.
                Ok(Some(message)) => drop(events.send(Event::FromHead(message))),
                Ok(None) => break,
                Err(_) => return drop(events.send(Event::HeadLost)),
            }
        }
    }
    let _ = events.send(Event::HeadLost);
}

/// Starts a thread that sends a stream of the launcher to the head.
fn copy(mut stream: impl Read + Send + 'static, is_stderr: bool, head: Head) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count) = stream.read(&mut bytes)
            && count > 0
        {
            head.send(&FromAgent::Output { is_stderr, bytes: bytes[..count].to_vec() });
        }
    })
}

/// Makes this launcher end with the agent that started it, if one did. The guard then kills its processes.
/// Returns false if the agent has ended already.
pub(crate) fn end_with_agent() -> bool {
    // Workers do not get the variable, so an agent is the parent.
    let Some(agent) = std::env::var(AGENT_PID).ok().and_then(|pid| pid.parse::<i32>().ok()) else {
        return true;
    };
    // If the kernel refuses this, the agent still ends the launcher, unless it is killed itself.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    nix::unistd::getppid() == Pid::from_raw(agent)
}
