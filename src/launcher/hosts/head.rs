//! The head of a job on hosts: connects to all hosts, then starts a launcher on each, prints their output, and
//! ends with the job's exit code.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use convoke_env::{Token, job_ports, vars};
use nix::sys::signal::Signal;

use super::agent::{ALIVE_INTERVAL, ALIVE_TIMEOUT};
use super::connection::{Connection, Event, RemoteShell};
use super::connection_queue::ConnectionQueue;
use super::frame::{FromAgent, Ready, Start, ToAgent};
use super::job::HostsJob;
use super::output::Output;
use super::signals::watch_signals;
use super::ssh_error::{Class, FailedHost, classify, message};
use crate::cli::VERSION;
use crate::formatting::hex;
use crate::messages::print_message;
use crate::scheduler::{HOSTS_JOB, JOB_PORTS, NodeSearch, ScheduledJob};

const TICK: Duration = Duration::from_millis(200);
/// Time without a sign of life after which a host counts as lost if another launcher has failed. The job is over
/// then, and the likely reason is this host.
const ALIVE_TIMEOUT_AFTER_FAILURE: Duration = Duration::from_secs(4);
/// Time that the other launchers have, after a host was lost, to end by themselves; then SIGTERM, and after the
/// same time the end of the connections.
const LOSS_GRACE: Duration = Duration::from_secs(10);

/// The state of one host.
#[derive(Debug)]
enum State {
    /// The connection is not open yet.
    Waiting,
    /// The agent may have answered, but has not entered the folder of the job.
    Connecting,
    Ready,
    Running,
    /// The launcher has ended.
    Ended,
    /// The connection was lost.
    Lost,
    Failed,
}

struct Head<'a> {
    job: &'a HostsJob,
    shell: RemoteShell,
    states: Vec<State>,
    connections: Vec<Option<Connection>>,
    queue: ConnectionQueue,
    heard: Vec<Instant>,
    /// The hosts that failed, by number.
    failed: BTreeMap<usize, FailedHost>,
    /// The first message of the agent on the first host, which becomes node 0.
    first: Option<Ready>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// Exit code of the first launcher that failed.
    code: u8,
    interrupts: u32,
    /// Standard output of the first host, if it is collected.
    collected: Option<Vec<u8>>,
    /// Names of the hosts on which no launcher could be started.
    unreachable: Vec<String>,
}

/// Runs the job, and returns its exit code.
pub(crate) fn run(job: &HostsJob) -> ExitCode {
    match Head::new(job).and_then(|mut head| head.run()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            print_message(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The end of launchers whose output was collected.
#[derive(Debug)]
pub(crate) struct Collected {
    /// Standard output of the first host.
    pub(crate) output: Vec<u8>,
    /// Hosts on which no launcher could be started.
    pub(crate) unreachable: Vec<String>,
    pub(crate) code: u8,
}

/// Runs the job like [`run`], but collects the standard output of the first host instead of printing it.
pub(crate) fn run_and_collect(job: &HostsJob) -> Collected {
    let mut collected = Collected { output: Vec::new(), unreachable: Vec::new(), code: 1 };
    let ended = Head::new(job).and_then(|mut head| {
        head.collected = Some(Vec::new());
        let ended = head.run();
        collected.output = head.collected.take().unwrap_or_else(|| unreachable!("the head keeps it"));
        collected.unreachable = head.unreachable;
        ended
    });
    match ended {
        Ok(code) => collected.code = code,
        Err(error) => print_message(&format!("error: {error}")),
    }
    collected
}

impl<'a> Head<'a> {
    fn new(job: &'a HostsJob) -> Result<Self, String> {
        let count = job.hosts.len();
        let program = || {
            let program = std::env::current_exe().and_then(std::fs::read);
            program.map_err(|error| format!("cannot read the own program for --copy-binary: {error}"))
        };
        let copies = job.copies_program.then(program).transpose()?.map(std::sync::Arc::new);
        let (sender, events) = channel();
        watch_signals(&sender)?;
        Ok(Self {
            job,
            shell: RemoteShell { words: job.shell.clone(), copies },
            states: (0..count).map(|_| State::Waiting).collect(),
            connections: (0..count).map(|_| None).collect(),
            queue: ConnectionQueue::new(count),
            heard: vec![Instant::now(); count],
            failed: BTreeMap::new(),
            first: None,
            sender,
            events,
            code: 0,
            interrupts: 0,
            collected: None,
            unreachable: Vec::new(),
        })
    }

    fn run(&mut self) -> Result<u8, String> {
        if let Some(code) = self.connect()? {
            return Ok(code);
        }
        self.start()?;
        Ok(self.supervise())
    }

    /// Connects to all hosts before any job starts. Returns an exit code if a signal comes first.
    fn connect(&mut self) -> Result<Option<u8>, String> {
        let deadline = Instant::now() + self.job.start_timeout;
        let folder = std::env::current_dir()
            .map_err(|error| format!("cannot find the current directory: {error}"))?
            .into_os_string()
            .into_vec();
        loop {
            self.open_connections();
            let is_open = |state: &State| matches!(state, State::Waiting | State::Connecting);
            if !self.states.iter().any(is_open) {
                break;
            }
            match self.events.recv_timeout(TICK) {
                Ok(Event::Message { host, message: FromAgent::Ready(ready) }) => {
                    self.heard[host] = Instant::now();
                    if ready.version != VERSION {
                        let detail = format!("{} there, {VERSION} here", ready.version);
                        self.fail(host, Class::OtherVersion, detail);
                    } else if let Some(connection) = &mut self.connections[host] {
                        connection.send(&ToAgent::Enter(folder.clone()));
                        if host == 0 {
                            self.first = Some(ready);
                        }
                    }
                }
                Ok(Event::Message { host, message: FromAgent::Entered(entered) }) => match entered {
                    Ok(()) => self.states[host] = State::Ready,
                    Err(why) => self.fail(host, Class::NoFolder, why),
                },
                Ok(Event::Message { host, .. }) => self.heard[host] = Instant::now(),
                Ok(Event::Closed { host, words }) => self.closed_before_start(host, words),
                Ok(Event::Signal(_)) => return Ok(Some(1)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this value keeps a sender"),
            }
            if Instant::now() >= deadline {
                let late: Vec<usize> =
                    (0..self.states.len()).filter(|&host| is_open(&self.states[host])).collect();
                let seconds = self.job.start_timeout.as_secs();
                for host in late {
                    let (class, detail) = if self.queue.has_dropped(host) {
                        (Class::Dropped, format!("each time within {seconds} s"))
                    } else {
                        (Class::Timeout, format!("no answer within {seconds} s"))
                    };
                    self.fail(host, class, detail);
                }
            }
        }
        if self.failed.is_empty() {
            return Ok(None);
        }
        let failed: Vec<_> = std::mem::take(&mut self.failed).into_values().collect();
        self.unreachable = failed.iter().map(|failed| failed.host.clone()).collect();
        Err(message(&failed, self.job.hosts.len()))
    }

    fn open_connections(&mut self) {
        let mut open = self.states.iter().filter(|state| matches!(state, State::Connecting)).count();
        while let Some(number) = self.queue.next(open, Instant::now()) {
            open += 1;
            self.states[number] = State::Connecting;
            match Connection::start(number, &self.job.hosts[number], &self.shell, &self.sender) {
                Ok(connection) => self.connections[number] = Some(connection),
                Err(error) => {
                    let what = format!("cannot run {}: {error}", self.shell.words[0]);
                    self.fail(number, Class::Other, what);
                }
            }
        }
    }

    fn closed_before_start(&mut self, host: usize, words: String) {
        if matches!(self.states[host], State::Failed) {
            return;
        }
        let code = self.connections[host].take().and_then(|mut connection| connection.exit_code());
        let class = classify(&words, code);
        if class == Class::Dropped && self.queue.dropped(host, Instant::now()) {
            self.states[host] = State::Waiting;
            return;
        }
        self.fail(host, class, words);
    }

    fn fail(&mut self, host: usize, class: Class, detail: String) {
        self.states[host] = State::Failed;
        self.connections[host] = None;
        let failed = FailedHost { host: self.job.hosts[host].name.clone(), class, detail };
        self.failed.insert(host, failed);
    }

    /// Starts the launchers.
    fn start(&mut self) -> Result<(), String> {
        let random = |error| format!("cannot get random numbers: {error}");
        let secret = || Ok::<_, String>(hex(Token::random().map_err(random)?.as_bytes()));
        let id = format!("hosts-{}", &secret()?[..16]);
        let mut variables = self.job.variables.clone();
        if !variables.iter().any(|(name, _)| name == vars::TOKEN || name == vars::TOKEN_FILE) {
            variables.push((vars::TOKEN.into(), secret()?.into()));
        }
        let first = self.first.clone().expect("all hosts are ready, the first among them");
        let count = self.job.hosts.len();
        let label = format!("job on {count} hosts");
        let name = self.job.hosts[0].address().to_owned();
        let search = NodeSearch {
            job: label.clone(),
            // The first host may be called localhost, as which others would find themselves.
            name: if name == "localhost" { first.host.clone() } else { name },
            ports: job_ports(&id, JOB_PORTS),
            addresses: first.addresses.clone(),
            asks_scontrol: false,
        };
        for (node, host) in self.job.hosts.iter().enumerate() {
            let job = ScheduledJob {
                id: id.clone(),
                label: label.clone(),
                nodes: count,
                node,
                node_0: search.clone(),
                hosts: self.job.hosts.iter().map(|host| host.name.clone()).collect(),
                is_slurm: false,
                cpus: None,
                gpus: None,
                sources: vec![format!("host {} of --hosts or --hostfile", host.name)],
                warnings: Vec::new(),
            };
            let mut variables = variables.clone();
            variables
                .push((HOSTS_JOB.into(), serde_json::to_string(&job).expect("a job is plain data").into()));
            let mut arguments = self.job.command.clone();
            if let Some(slots) = host.slots.filter(|_| self.job.slots_count) {
                arguments.push(format!("--nproc-per-node={slots}").into());
            }
            arguments.extend(self.job.arguments.iter().cloned());
            let start = Start {
                arguments: arguments.into_iter().map(OsString::into_vec).collect(),
                variables: variables
                    .into_iter()
                    .map(|(name, value)| (name.into_vec(), value.into_vec()))
                    .collect(),
            };
            self.states[node] = State::Running;
            if let Some(connection) = &mut self.connections[node] {
                connection.send(&ToAgent::Start(start));
            }
        }
        Ok(())
    }

    /// Prints the output of the launchers until all have ended. Returns the exit code of the job.
    fn supervise(&mut self) -> u8 {
        let mut output = Output::new(&self.job.hosts);
        let (mut said, mut lost_at): (_, Option<Instant>) = (Instant::now(), None);
        let mut is_told = false;
        while self.states.iter().any(|state| matches!(state, State::Running)) {
            match self.events.recv_timeout(TICK) {
                Ok(Event::Message { host, message }) => {
                    self.heard[host] = Instant::now();
                    self.handle_message(host, message, &mut output);
                }
                Ok(Event::Closed { host, words }) => {
                    if matches!(self.states[host], State::Running) {
                        self.lose(host, words.lines().last().unwrap_or("the connection was closed"));
                    }
                }
                Ok(Event::Signal(number)) => self.pass_on(number),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this value keeps a sender"),
            }
            output.flush_late_parts();
            if said.elapsed() >= ALIVE_INTERVAL {
                said = Instant::now();
                self.tell_all(&ToAgent::Alive);
                let timeout = if self.code == 0 { ALIVE_TIMEOUT } else { ALIVE_TIMEOUT_AFTER_FAILURE };
                for host in 0..self.states.len() {
                    if matches!(self.states[host], State::Running) && self.heard[host].elapsed() > timeout {
                        self.lose(host, "no sign of life");
                    }
                }
            }
            if lost_at.is_none() && self.states.iter().any(|state| matches!(state, State::Lost)) {
                lost_at = Some(Instant::now());
            }
            // The launchers end by themselves when one of them is lost.
            match lost_at.map(|at| at.elapsed()) {
                Some(since) if since > 2 * LOSS_GRACE => break,
                Some(since) if since > LOSS_GRACE && !is_told => {
                    is_told = true;
                    self.tell_all(&ToAgent::Signal(Signal::SIGTERM as i32));
                }
                Some(_) | None => {}
            }
        }
        output.flush();
        self.code
    }

    fn handle_message(&mut self, host: usize, message: FromAgent, output: &mut Output) {
        match message {
            FromAgent::Output { is_stderr, bytes } => match &mut self.collected {
                Some(collected) if host == 0 && !is_stderr => collected.extend_from_slice(&bytes),
                Some(_) | None => output.write(host, is_stderr, &bytes),
            },
            FromAgent::Ended { code, signal } => {
                let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
                if let Some(signal) = signal {
                    let name = &self.job.hosts[host].name;
                    print_message(&format!(
                        "error: the launcher on {name} was killed by {}",
                        crate::formatting::signal(signal)
                    ));
                }
                self.note_code(code);
                self.states[host] = State::Ended;
            }
            FromAgent::Failed(why) => {
                print_message(&format!("error: {}: {why}", self.job.hosts[host].name));
                self.note_code(1);
                self.states[host] = State::Lost;
            }
            FromAgent::Ready(_) | FromAgent::Entered(_) | FromAgent::Alive => {}
        }
    }

    fn lose(&mut self, host: usize, why: &str) {
        print_message(&format!("error: {} is lost: {why}", self.job.hosts[host].name));
        self.note_code(1);
        self.states[host] = State::Lost;
        self.connections[host] = None;
    }

    fn note_code(&mut self, code: u8) {
        if self.code == 0 {
            self.code = code;
        }
    }

    /// Passes a signal to the launchers. A third Ctrl-C ends the connections, and with them everything.
    fn pass_on(&mut self, number: i32) {
        self.interrupts += u32::from(number == Signal::SIGINT as i32);
        match self.interrupts {
            0 | 1 => self.tell_all(&ToAgent::Signal(number)),
            2 => self.tell_all(&ToAgent::Signal(Signal::SIGKILL as i32)),
            _ => self.connections.iter_mut().for_each(|connection| *connection = None),
        }
    }

    fn tell_all(&mut self, message: &ToAgent) {
        for (state, connection) in self.states.iter().zip(&mut self.connections) {
            if let (State::Running, Some(connection)) = (state, connection) {
                connection.send(message);
            }
        }
    }
}
