//! The shell around the machines: the only select loop of the launcher.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use convoke_env::{ExitCause, Token, vars};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::environment::{command_line, variables};
use super::machine::{Action, Agent, End, Event, Rules};
use super::workers::Workers;
use crate::config::{Config, Orphans, Rendezvous as Choice};
use crate::events::Events;
use crate::exit;
use crate::fault;
use crate::guard::{FromGuard, GuardLink, Leftover, SpawnRequest, ToGuard, kill_all, reap};
use crate::logs::{AttemptDir, RunDir, StdioTarget, Tee};
use crate::rendezvous::{self, Assignment, Rendezvous};
use crate::report::{self, Failure};
use crate::supervise::{self, Policy, Supervisor};

/// From SIGTERM to SIGKILL after a worker failed; torchrun's fixed value.
const FAILURE_GRACE: Duration = Duration::from_secs(30);
/// How long a process may outlive a successful worker before anyone is bothered with it: helpers like
/// Python's resource tracker end a moment after their worker.
const LEFTOVER_PATIENCE: Duration = Duration::from_millis(250);
/// How many leftover processes a message names.
const NAMED_LEFTOVERS: usize = 8;
/// How long the guard may take to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long output that is already written may take to reach its file or the console.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the job of this node to its end.
pub(crate) fn run(config: Config, guard: Pid, socket: UnixStream) -> ExitCode {
    fault::point("starting");
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("error: no event loop: {error}"));
            return exit::FAILURE;
        }
    };
    let end = runtime.block_on(async {
        match Shell::new(config, guard, socket) {
            Ok(mut shell) => shell.run().await,
            Err(error) => {
                say(&format!("error: {error}"));
                Exit::Code(exit::FAILURE)
            }
        }
    });
    // A thread that still waits for other nodes must not hold us up.
    runtime.shutdown_background();
    match end {
        Exit::Code(code) => code,
        Exit::Signal(signal) => {
            crate::os::die_by(signal);
            exit::FAILURE
        }
    }
}

/// How the launcher ends.
enum Exit {
    Code(ExitCode),
    Signal(Signal),
}

/// What comes from threads and signal handlers.
#[derive(Debug)]
enum News {
    Joined(Result<Assignment, String>),
    BarrierPassed(Option<String>),
    Signalled(Signal),
    ChildEnded,
}

struct Shell {
    config: Arc<Config>,
    guard: Pid,
    link: GuardLink,
    news: mpsc::UnboundedReceiver<News>,
    tell: mpsc::UnboundedSender<News>,
    agent: Agent,
    rendezvous: Arc<Mutex<Box<dyn Rendezvous>>>,
    token: Option<Token>,
    run_dir: RunDir,
    events: Events,
    restarts: u32,
    round: Option<Round>,
    /// The last round did.
    succeeded: bool,
    next_worker_id: u64,
    /// Set once the guard has been reaped (how it ended) or its socket has closed (not known).
    guard_end: Option<Option<ExitCause>>,
}

/// What exists while there are workers.
struct Round {
    assignment: Assignment,
    supervisor: Supervisor,
    workers: Workers,
    tee: Option<Tee>,
}

impl Shell {
    fn new(config: Config, guard: Pid, socket: UnixStream) -> Result<Self, String> {
        nix::sys::prctl::set_child_subreaper(true)
            .map_err(|error| format!("cannot become a subreaper: {error}"))?;
        let link = GuardLink::new(socket).map_err(|error| format!("guard: {error}"))?;
        let (tell, news) = mpsc::unbounded_channel();
        watch_signals(&config, &tell)?;
        let run_dir = RunDir::create(&config.logs, &config.run_id).map_err(|error| error.to_string())?;
        let events = Events::new(&config);
        let rules = Rules {
            max_restarts: config.max_restarts,
            sweep_patience: LEFTOVER_PATIENCE,
            sweep_grace: FAILURE_GRACE,
            keep_orphans: config.orphans == Orphans::Keep,
        };
        let (agent, _first) = Agent::new(rules);
        Ok(Self {
            token: token(&config)?,
            rendezvous: Arc::new(Mutex::new(rendezvous::choose(&config))),
            config: Arc::new(config),
            guard,
            link,
            news,
            tell,
            agent,
            run_dir,
            events,
            restarts: 0,
            round: None,
            succeeded: false,
            next_worker_id: 0,
            guard_end: None,
        })
    }

    async fn run(&mut self) -> Exit {
        self.join(0);
        loop {
            let wake_at = self.round.as_ref().and_then(|round| round.supervisor.wake_at());
            let sleep = async {
                match wake_at {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let ended = tokio::select! {
                biased;
                message = self.link.receive(), if self.guard_end.is_none() => match message {
                    Ok(Some(message)) => self.guard_says(message),
                    Ok(None) => { self.guard_end = Some(None); None }
                    Err(error) => Some(End::Error(format!("the guard said what it should not: {error}"))),
                },
                Some(news) = self.news.recv() => self.hear(news),
                () = sleep => self.supervise(supervise::Event::Tick),
            };
            if self.guard_end.is_some() {
                return self.guard_lost();
            }
            if let Some(end) = ended {
                return self.end(end).await;
            }
        }
    }

    fn hear(&mut self, news: News) -> Option<End> {
        match news {
            News::Joined(Ok(assignment)) => {
                let round = self.prepare(assignment);
                match round {
                    Ok(round) => {
                        self.round = Some(round);
                        self.decide(Event::Joined)
                    }
                    Err(error) => self.decide(Event::JoinFailed(error)),
                }
            }
            News::Joined(Err(error)) => self.decide(Event::JoinFailed(error)),
            News::BarrierPassed(warning) => {
                if let Some(warning) = warning {
                    say(&format!("warning: {warning}"));
                }
                self.decide(Event::BarrierPassed)
            }
            News::Signalled(signal) => self.decide(Event::Signalled(signal)),
            News::ChildEnded => {
                // The guard, or strangers that we adopted as subreaper or as PID 1 of a container.
                let guard = self.guard.as_raw();
                reap(|pid, cause| {
                    if pid == guard {
                        self.guard_end = Some(Some(cause));
                    }
                });
                None
            }
        }
    }

    fn guard_says(&mut self, message: FromGuard) -> Option<End> {
        let rank_of = |id| self.round.as_ref().and_then(|round| round.workers.local_rank(id));
        match message {
            FromGuard::Spawned { id, pid } => {
                let local_rank = rank_of(id)?;
                let round = self.round.as_mut()?;
                round.workers.started(local_rank, pid);
                self.events.started(&round.assignment, round.workers.rank(local_rank), pid, self.restarts);
                self.supervise(supervise::Event::Started { local_rank })
            }
            FromGuard::SpawnFailed { id, error } => {
                let local_rank = rank_of(id)?;
                let program = self.config.program.argv.first().cloned().unwrap_or_default();
                let error = format!("{}: {error}", program.to_string_lossy());
                self.supervise(supervise::Event::StartFailed { local_rank, error })
            }
            FromGuard::Exited { id, cause } => {
                let local_rank = rank_of(id)?;
                self.round.as_mut()?.workers.ended(local_rank, SystemTime::now(), cause);
                self.supervise(supervise::Event::Exited { local_rank, cause })
            }
            FromGuard::Swept { stopped, stuck } => {
                self.tell_swept(&stopped, &stuck);
                self.decide(Event::Swept)
            }
        }
    }

    /// Feeds the supervisor and carries out what it decides.
    fn supervise(&mut self, event: supervise::Event) -> Option<End> {
        let round = self.round.as_mut()?;
        let mut actions = Vec::new();
        round.supervisor.handle(Instant::now(), event, &mut actions);
        let mut ended = None;
        for action in actions {
            match action {
                supervise::Action::Signal { local_rank, signal } => {
                    fault::point("stopping");
                    let id = self.round.as_ref()?.workers.id(local_rank);
                    self.tell_guard(&ToGuard::Signal { id, signal: signal as i32 });
                }
                supervise::Action::Finish(outcome) => {
                    self.finish_output();
                    self.tell_outcome(&outcome);
                    ended = self.decide(Event::RoundEnded(outcome));
                }
            }
        }
        ended
    }

    /// Feeds the agent's machine and carries out what it decides.
    fn decide(&mut self, event: Event) -> Option<End> {
        match self.agent.handle(event)? {
            Action::Join { restarts } => {
                fault::point("restarting");
                self.restarts = restarts;
                self.join(restarts);
                None
            }
            Action::Start => self.start().err().map(End::Error),
            Action::Stop(signal) => {
                let grace = self.config.shutdown_timeout;
                self.supervise(supervise::Event::Stop { signal, grace })
            }
            Action::Sweep { patience, grace } => {
                let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
                let sweep = ToGuard::Sweep { patience_ms: ms(patience), grace_ms: ms(grace) };
                self.tell_guard(&sweep);
                None
            }
            Action::Barrier => {
                fault::point("waiting");
                self.in_thread(|rendezvous| News::BarrierPassed(rendezvous.barrier()));
                None
            }
            Action::End(end) => Some(end),
        }
    }

    /// Sends what has no descriptors. If the guard is gone, the select loop deals with that next.
    fn tell_guard(&mut self, message: &ToGuard) {
        if self.link.send(message, &[]).is_err() {
            self.guard_end = Some(None);
        }
    }

    fn join(&self, restarts: u32) {
        fault::point("joining");
        self.in_thread(move |rendezvous| {
            News::Joined(rendezvous.join(restarts).map_err(|error| error.to_string()))
        });
    }

    /// Runs something that blocks; its news comes through the select loop.
    fn in_thread(&self, work: impl FnOnce(&mut dyn Rendezvous) -> News + Send + 'static) {
        let rendezvous = Arc::clone(&self.rendezvous);
        let tell = self.tell.clone();
        std::thread::spawn(move || {
            let mut rendezvous = rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
            let news = work(rendezvous.as_mut());
            // Nobody listens any more if the launcher is just ending.
            let _ = tell.send(news);
        });
    }

    /// Everything for a round but its workers.
    fn prepare(&mut self, assignment: Assignment) -> Result<Round, String> {
        self.events.rendezvous(&assignment, self.restarts);
        self.events.assigned(&assignment, self.restarts);
        let policy =
            Policy { settle: self.config.monitor_interval.unwrap_or_default(), failure_grace: FAILURE_GRACE };
        let supervisor = Supervisor::new(self.config.nproc_per_node, policy);
        let workers = Workers::new(self.next_worker_id, assignment.base_rank, assignment.generation);
        Ok(Round { assignment, supervisor, workers, tee: None })
    }

    /// Asks the guard for all workers of the round.
    fn start(&mut self) -> Result<(), String> {
        let Some(round) = self.round.as_mut() else { return Ok(()) };
        let config = &self.config;
        let parent = |name: &str| std::env::var_os(name);
        let mut attempt: AttemptDir =
            self.run_dir.attempt(self.restarts, config.nproc_per_node).map_err(|error| error.to_string())?;
        for local_rank in 0..config.nproc_per_node {
            fault::point("spawning");
            let rank = round.workers.rank(local_rank);
            let stdio = attempt.worker(local_rank, rank).map_err(|error| error.to_string())?;
            let error_file = stdio.error_file.clone();
            let variables = variables(
                config,
                &round.assignment,
                local_rank,
                self.restarts,
                error_file.as_deref(),
                &parent,
            )?;
            let added = round.workers.add(self.token.as_ref(), error_file);
            let (id, channel) = added.map_err(|error| format!("no channel to a worker: {error}"))?;
            let mut descriptors = vec![channel.as_fd()];
            let given = |target: &StdioTarget| target.as_fd().is_some();
            let (stdout, stderr) = (given(&stdio.stdout), given(&stdio.stderr));
            descriptors.extend(stdio.stdout.as_fd());
            descriptors.extend(stdio.stderr.as_fd());
            let request = ToGuard::Spawn(SpawnRequest {
                id,
                argv: command_line(config, local_rank),
                vars: variables.set,
                unset: variables.unset,
                stdout,
                stderr,
            });
            if self.link.send(&request, &descriptors).is_err() {
                self.guard_end = Some(None);
                return Ok(());
            }
        }
        round.tee = attempt.start_tee().map_err(|error| error.to_string())?;
        self.next_worker_id = round.workers.next_id();
        fault::point("running");
        Ok(())
    }

    fn finish_output(&mut self) {
        if let Some(tee) = self.round.as_mut().and_then(|round| round.tee.take()) {
            tee.finish(Instant::now() + DRAIN_TIMEOUT);
        }
    }

    fn tell_outcome(&mut self, outcome: &supervise::Outcome) {
        self.succeeded = *outcome == supervise::Outcome::Succeeded;
        let Some(round) = &self.round else { return };
        for local_rank in 0..self.config.nproc_per_node {
            let worker = round.workers.get(local_rank);
            if let (Some(pid), Some((_, cause))) = (worker.pid, worker.ended) {
                self.events.ended(
                    &round.assignment,
                    round.workers.rank(local_rank),
                    pid,
                    cause,
                    self.restarts,
                );
            }
        }
        let supervise::Outcome::Failed(failures) = outcome else { return };
        let left = self.config.max_restarts.saturating_sub(self.restarts);
        if let Some(first) = failures.first().filter(|_| left > 0) {
            let rank = round.workers.rank(first.local_rank);
            say(&format!(
                "warning: rank {rank} (local_rank {}) {}; restarting all {} workers of this node ({left} of {} restarts left)",
                first.local_rank,
                report::describe(first.cause),
                self.config.nproc_per_node,
                self.config.max_restarts
            ));
        }
    }

    fn tell_swept(&self, stopped: &[Leftover], stuck: &[Leftover]) {
        let names = |processes: &[Leftover]| {
            let shown = processes.iter().take(NAMED_LEFTOVERS);
            let list: Vec<_> = shown.map(|left| format!("{} (pid {})", left.name, left.pid)).collect();
            let more = processes.len() - list.len();
            list.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
        };
        // What failing workers leave behind is part of their failure.
        if self.succeeded && !stopped.is_empty() {
            say(&format!("warning: stopped processes that outlived their workers: {}", names(stopped)));
        }
        if !stuck.is_empty() {
            say(&format!("warning: processes that SIGKILL does not end: {}", names(stuck)));
        }
    }

    async fn end(&mut self, end: End) -> Exit {
        fault::point("ending");
        self.finish_output();
        if let Err(error) = self.dismiss_guard().await {
            say(&format!("warning: guard: {error}"));
            kill_all(|_, _| {});
        }
        match end {
            End::Success => {
                self.events
                    .agent_succeeded(self.round.as_ref().map(|round| &round.assignment), self.restarts);
                Exit::Code(exit::SUCCESS)
            }
            End::Failed(failures) => {
                self.events.agent_failed(self.round.as_ref().map(|round| &round.assignment), self.restarts);
                self.report(&failures);
                Exit::Code(exit::FAILURE)
            }
            End::Error(error) => {
                say(&format!("error: {error}"));
                Exit::Code(exit::FAILURE)
            }
            End::Stopped(signal) => {
                say(&format!("stopped by {signal}"));
                Exit::Code(exit::FAILURE)
            }
            End::Interrupted(signal) => {
                say(&format!("{signal} while waiting for other nodes"));
                Exit::Signal(signal)
            }
        }
    }

    fn report(&self, failures: &[supervise::Failure]) {
        let Some(round) = &self.round else { return };
        let failures: Vec<Failure> = failures
            .iter()
            .map(|failure| {
                let worker = round.workers.get(failure.local_rank);
                Failure {
                    local_rank: failure.local_rank,
                    rank: round.workers.rank(failure.local_rank),
                    pid: worker.pid.unwrap_or_default(),
                    cause: failure.cause,
                    time: worker.ended.map_or_else(SystemTime::now, |(time, _)| time),
                    error_file: worker.error_file.clone(),
                }
            })
            .collect();
        if let Some(target) = std::env::var_os(vars::ERROR_FILE).filter(|path| !path.is_empty()) {
            if let Err(error) = report::hand_on(&failures, target.as_ref()) {
                say(&format!("warning: {error}"));
            }
        }
        match report::render(&self.config.program.title, &failures) {
            Ok(text) => say_raw(&text),
            Err(error) => say(&format!("error: {error}")),
        }
    }

    /// Tells the guard to leave and waits until it has.
    async fn dismiss_guard(&mut self) -> io::Result<()> {
        self.link.send(&ToGuard::Leave, &[])?;
        let deadline = tokio::time::Instant::now() + LEAVE_TIMEOUT;
        while self.guard_end.is_none() {
            tokio::select! {
                message = self.link.receive() => if message?.is_none() { break },
                Some(news) = self.news.recv() => if matches!(news, News::ChildEnded) { self.hear(news); },
                () = tokio::time::sleep_until(deadline) => return Err(io::Error::other("it does not leave")),
            }
        }
        Ok(())
    }

    /// The guard is gone without our asking. The kernel has killed the workers; the rest falls to us.
    fn guard_lost(&mut self) -> Exit {
        let guard = self.guard.as_raw();
        let mut cause = self.guard_end.flatten();
        // Its socket may have closed a moment before it could be reaped.
        kill_all(|pid, end| {
            if pid == guard {
                cause = Some(end);
            }
        });
        self.finish_output();
        let how = cause.map_or_else(|| "went away".to_owned(), report::describe);
        say(&format!("error: the guard process (pid {guard}) {how}; all workers of this node were killed"));
        Exit::Code(exit::FAILURE)
    }
}

/// Passes signals on to the select loop.
fn watch_signals(config: &Config, tell: &mpsc::UnboundedSender<News>) -> Result<(), String> {
    let watch = |kind: SignalKind, news: fn(Signal) -> News, name: Signal| {
        let mut stream = signal(kind).map_err(|error| format!("cannot handle {name}: {error}"))?;
        let tell = tell.clone();
        tokio::spawn(async move { while stream.recv().await.is_some() && tell.send(news(name)).is_ok() {} });
        Ok::<(), String>(())
    };
    for &signal in &config.signals {
        watch(SignalKind::from_raw(signal as i32), News::Signalled, signal)?;
    }
    watch(SignalKind::child(), |_| News::ChildEnded, Signal::SIGCHLD)
}

/// The secret of the job: given by the user, or made here if all workers are ours.
fn token(config: &Config) -> Result<Option<Token>, String> {
    if let Some(token) = Token::from_process().map_err(|error| error.to_string())? {
        return Ok(Some(token));
    }
    let alone = match &config.rendezvous {
        Choice::Standalone => true,
        Choice::Static { .. } | Choice::C10d { .. } | Choice::Etcd { .. } => config.nodes.max == 1,
    };
    alone.then(Token::random).transpose().map_err(|error| format!("no random numbers: {error}"))
}

/// One line of the launcher's own, on stderr.
fn say(line: &str) {
    say_raw(&format!("convoke: {line}\n"));
}

/// Text on stderr in one piece. A closed stderr must not end the job.
fn say_raw(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}
