//! The shell around the state machines: the only select loop of the launcher.

use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use convoke_env::{ExitCause, Token};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::sync::mpsc;

use super::backoff::Backoff;
use super::environment::command_line;
use super::machine::{Action, Agent, End, Event, Rules};
use super::pause::{Pause, Same};
use super::refused::surroundings;
use super::setup::token;
use super::signalled::Signalled;
use super::signals::{Meaning, watch};
use super::trial::start_thread;
use super::workers::Workers;
use crate::cause::{Evidence, not_started};
use crate::config::{Config, Orphans};
use crate::events::Events;
use crate::flight::Flight;
use crate::guard::{FromGuard, GuardLink, ToGuard, reap};
use crate::logs::{RunDir, Tee};
use crate::rendezvous::{
    self, Assignment, Barrier, Court, FromOthers, Guests, Rendezvous, RendezvousError, Verdict, What,
};
use crate::say::say;
use crate::supervise::{self, Supervisor};
use crate::{exit, fault};

/// Time for which the failure of workers that only lost a peer stops no workers, here or on other nodes. The
/// peer's own failure may still be reported.
/// This exceeds the time in which the loss of a launcher or its host is detected.
pub(super) const CULPRIT_PATIENCE: Duration = Duration::from_secs(5);
/// From SIGTERM to SIGKILL after a worker failed; torchrun's fixed value.
pub(super) const FAILURE_GRACE: Duration = Duration::from_secs(30);
/// Time from SIGTERM to SIGKILL when the other nodes are about to start a round without this node.
const ALONE_GRACE: Duration = Duration::from_millis(500);
/// Time after which the launcher explains why the nodes may not have met. On one host they take less.
const DOUBT_AFTER: Duration = Duration::from_secs(1);
/// Time for which a process may outlive a successful worker before the launcher stops and reports it.
/// Helpers such as Python's resource tracker end shortly after their worker.
const LEFTOVER_PATIENCE: Duration = Duration::from_millis(250);
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
    // A thread that still waits for other nodes must not delay the exit.
    runtime.shutdown_background();
    match end {
        Exit::Code(code) => code,
        Exit::Signal(signal) => crate::os::die_by(signal),
    }
}

/// Result of the launcher: an exit code or a signal.
pub(super) enum Exit {
    Code(ExitCode),
    Signal(i32),
}

/// Input from threads and signal handlers.
#[derive(Debug)]
pub(super) enum News {
    Joined(Result<(Assignment, Option<Arc<dyn Court>>), RendezvousError>),
    Others(FromOthers),
    Barrier(Barrier),
    Signal(i32, Meaning),
}

pub(super) struct Shell {
    pub(super) config: Arc<Config>,
    pub(super) guard: Pid,
    pub(super) link: GuardLink,
    pub(super) news: mpsc::UnboundedReceiver<News>,
    pub(super) tell: mpsc::UnboundedSender<News>,
    pub(super) agent: Agent,
    pub(super) rendezvous: Arc<Mutex<Box<dyn Rendezvous>>>,
    pub(super) guests: Guests,
    /// Set once this node has joined other nodes with which it can exchange failures.
    pub(super) court: Option<Arc<dyn Court>>,
    /// The failure that this node has declared or is about to declare.
    pub(super) declared: Option<Declared>,
    /// Outcome of the job, as far as it is known.
    pub(super) verdict: Option<Verdict>,
    pub(super) token: Option<Token>,
    pub(super) run_dir: RunDir,
    pub(super) flight: Flight,
    pub(super) events: Events,
    pub(super) restarts: u32,
    pub(super) round: Option<Round>,
    /// Number of the latest round that other nodes have ended.
    pub(super) ended_round: Option<u64>,
    /// Number of the latest round that this node ended because it was cut off from the others.
    pub(super) alone_in: Option<u64>,
    /// True if the last round succeeded.
    pub(super) succeeded: bool,
    pub(super) next_worker_id: u64,
    pub(super) signals: Signalled,
    pub(super) backoff: Backoff,
    /// Delay before the next restart.
    pub(super) restart_wait: Duration,
    pub(super) pause: Option<Pause>,
    pub(super) same: Same,
    /// Set once the guard has been reaped (how it ended) or its socket has closed (not known).
    pub(super) guard_end: Option<Option<ExitCause>>,
}

/// The failure that this node declares to the other nodes.
#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) what: What,
    /// Time until which other nodes may name the root cause: the workers that failed here only lost a peer.
    pub(super) others_first: Option<Instant>,
}

/// State that exists while there are workers.
pub(super) struct Round {
    pub(super) assignment: Assignment,
    pub(super) supervisor: Supervisor,
    pub(super) workers: Workers,
    pub(super) tee: Option<Tee>,
    pub(super) began: Instant,
    /// Time at which the first worker failed.
    pub(super) first_failed: Option<Instant>,
    /// True if the worker that ended last left no process behind.
    pub(super) nothing_left: bool,
}

/// Completes at that time, or never if `at` is `None`.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

impl Shell {
    fn new(config: Config, guard: Pid, socket: UnixStream) -> Result<Self, String> {
        let link = GuardLink::new(socket).map_err(|error| format!("guard: {error}"))?;
        let (tell, news) = mpsc::unbounded_channel();
        watch(&config, &tell)?;
        let run_dir = RunDir::create(&config.logs, &config.run_id);
        let flight = Flight::new(&config.flight, run_dir.path());
        let events = Events::new(&config);
        let rules = Rules {
            // If restarts are counted for all nodes together, each node asks for every one.
            max_restarts: if config.has_job_budget() { 0 } else { config.max_restarts },
            sweep_patience: LEFTOVER_PATIENCE,
            sweep_grace: FAILURE_GRACE,
            keep_orphans: config.orphans == Orphans::Keep,
        };
        let (agent, _first) = Agent::new(rules);
        let backoff = Backoff::new(config.restart_delay);
        let rendezvous = rendezvous::choose(&config);
        Ok(Self {
            token: token(&config)?,
            guests: rendezvous.guests(),
            rendezvous: Arc::new(Mutex::new(rendezvous)),
            court: None,
            declared: None,
            verdict: None,
            config: Arc::new(config),
            guard,
            link,
            news,
            tell,
            agent,
            run_dir,
            flight,
            events,
            restarts: 0,
            round: None,
            ended_round: None,
            alone_in: None,
            succeeded: false,
            next_worker_id: 0,
            signals: Signalled::default(),
            backoff,
            restart_wait: Duration::ZERO,
            pause: None,
            same: Same::default(),
            guard_end: None,
        })
    }

    async fn run(&mut self) -> Exit {
        self.join(0);
        let mut doubt = self.config.doubt.clone();
        let doubt_at = tokio::time::Instant::now() + DOUBT_AFTER;
        loop {
            let sleep = until(self.round.as_ref().and_then(|round| round.supervisor.wake_at()));
            let pause = until(self.pause.as_ref().map(Pause::wake_at));
            let ended = tokio::select! {
                biased;
                message = self.link.receive(), if self.guard_end.is_none() => match message {
                    Ok(Some(message)) => self.guard_says(message),
                    Ok(None) => { self.guard_end = Some(None); None }
                    Err(error) => Some(End::Error(format!("the guard said what it should not: {error}"))),
                },
                Some(news) = self.news.recv() => self.hear(news),
                () = sleep => self.supervise(supervise::Event::Tick),
                () = pause => { self.go_on_pausing(); None }
                () = tokio::time::sleep_until(doubt_at), if doubt.is_some() => {
                    if let (Some(doubt), None) = (doubt.take(), &self.round) {
                        say(&format!("warning: {doubt}"));
                    }
                    None
                }
            };
            if self.guard_end.is_some() {
                return self.guard_lost().await;
            }
            if let Some(end) = ended {
                return self.end(end).await;
            }
        }
    }

    pub(super) fn hear(&mut self, news: News) -> Option<End> {
        match news {
            News::Joined(Ok((assignment, court))) => {
                self.enter_court(court);
                if self.ended_round >= Some(assignment.round) {
                    // The end of the round was reported before its start.
                    self.join(self.restarts);
                    return None;
                }
                if let Some(restarts) = assignment.restarts {
                    self.restarts = restarts;
                }
                let last_word = self.court.as_ref().is_some_and(|court| court.has_last_word());
                let round = self.prepare(assignment);
                match round {
                    Ok(round) => {
                        self.round = Some(round);
                        self.decide(Event::Joined { last_word })
                    }
                    Err(error) => self.decide(Event::JoinFailed(error)),
                }
            }
            News::Joined(Err(RendezvousError::NotNeeded)) => {
                say("the job has ended well; this node waited as a spare and is not needed any more");
                self.decide(Event::NotNeeded)
            }
            News::Joined(Err(error)) => {
                let likely = self.config.doubt.as_ref().filter(|_| error.is_absence());
                let likely = likely.map_or_else(String::new, |doubt| format!("\n  likely: {doubt}"));
                self.decide(Event::JoinFailed(format!("{error}{likely}")))
            }
            News::Barrier(Barrier::Interrupted) => None,
            News::Barrier(barrier) => {
                if let Barrier::Unknown(warning) = barrier {
                    say(&format!("warning: {warning}"));
                }
                self.decide(Event::BarrierPassed)
            }
            News::Others(FromOthers::Verdict(verdict)) => {
                // This node is already acting on its own declaration.
                let mine = self.court.as_ref().is_some_and(|court| court.is_mine(&verdict));
                self.verdict.get_or_insert(verdict);
                self.decide(if mine { Event::Final } else { Event::Verdict })
            }
            News::Others(FromOthers::NewRound { round, cause, alone }) => {
                self.ended_round = self.ended_round.max(Some(round));
                if self.round.as_ref().is_some_and(|current| current.assignment.round == round) {
                    self.alone_in = alone.then_some(round).or(self.alone_in);
                    let then = if alone { "this node stops its workers" } else { "all nodes begin anew" };
                    say(&format!("{cause}; {then}"));
                    self.decide(Event::NewRound { alone })
                } else {
                    None
                }
            }
            News::Signal(number, meaning) => self.signalled(number, meaning),
        }
    }

    /// Reaps the guard, workers that became our children when it died, and processes that we adopted as
    /// subreaper or as PID 1.
    pub(super) fn reap_children(&mut self) {
        let mut reaped = Vec::new();
        reap(|pid, cause| reaped.push((pid, cause)));
        self.note_reaped(&reaped);
    }

    /// Records how the guard, or workers without a guard, ended.
    pub(super) fn note_reaped(&mut self, reaped: &[(i32, ExitCause)]) {
        for &(pid, cause) in reaped {
            if pid == self.guard.as_raw() {
                self.guard_end = Some(Some(cause));
            } else if let Some(round) = &mut self.round
                && let Some(local_rank) = round.workers.running_as(pid)
            {
                round.workers.ended(local_rank, SystemTime::now(), cause, Evidence::default());
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
                let argv = command_line(&self.config, local_rank);
                let error = not_started(error, &surroundings(&argv));
                self.supervise(supervise::Event::StartFailed { local_rank, error })
            }
            FromGuard::Exited { id, cause, evidence, last } => {
                let local_rank = rank_of(id)?;
                let round = self.round.as_mut()?;
                round.nothing_left = last;
                round.workers.ended(local_rank, SystemTime::now(), cause, evidence);
                let blame = self.blame(local_rank, cause);
                self.supervise(supervise::Event::Exited { local_rank, cause, blame })
            }
            FromGuard::Forwarded { id, caught } => {
                self.forwarded(id, caught);
                None
            }
            FromGuard::Swept { stopped, stuck } => {
                self.tell_swept(&stopped, &stuck);
                self.decide(Event::Swept)
            }
        }
    }

    /// Passes an event to the supervisor and carries out its decisions.
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
                supervise::Action::Failing { local_rank, cause } => self.declare_failure(local_rank, cause),
                supervise::Action::Finish(outcome) => {
                    self.finish_output();
                    self.tell_outcome(&outcome);
                    ended = self.decide(Event::RoundEnded(outcome));
                }
            }
        }
        ended
    }

    /// Passes an event to the agent's state machine and carries out its decision.
    pub(super) fn decide(&mut self, event: Event) -> Option<End> {
        match self.agent.handle(event)? {
            Action::Join { restarts } => {
                fault::point("restarting");
                self.restarts = restarts;
                self.restart(restarts);
                None
            }
            Action::Start => self.start().err().map(End::Error),
            Action::Stop { signal, at_once } => {
                let grace = if self.is_alone() { ALONE_GRACE } else { self.config.shutdown_timeout };
                self.supervise(supervise::Event::Stop { signal, grace, at_once })
            }
            Action::Abort => {
                let (signal, grace) = match self.verdict.as_ref().map(|verdict| &verdict.what) {
                    _ if self.is_alone() => (Signal::SIGTERM, ALONE_GRACE),
                    // The signal is handled as if this node had received it.
                    Some(What::Stopped { signal }) => {
                        (Signal::try_from(*signal).unwrap_or(Signal::SIGTERM), self.config.shutdown_timeout)
                    }
                    Some(_) | None => (Signal::SIGTERM, FAILURE_GRACE),
                };
                self.supervise(supervise::Event::Abort { signal, grace })
            }
            Action::Sweep { .. } if self.round.as_ref().is_some_and(|round| round.nothing_left) => {
                self.decide(Event::Swept)
            }
            Action::Sweep { patience, grace } => {
                let grace = if self.is_alone() { Duration::ZERO } else { grace };
                let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
                let sweep = ToGuard::Sweep { patience_ms: ms(patience), grace_ms: ms(grace) };
                self.tell_guard(&sweep);
                None
            }
            Action::Barrier => {
                fault::point("waiting");
                self.meet(|rendezvous| News::Barrier(rendezvous.barrier()));
                None
            }
            Action::End(end) => Some(end),
        }
    }

    /// Returns true if this node is cut off and the other nodes are about to continue without it.
    fn is_alone(&self) -> bool {
        let round = self.round.as_ref().map(|round| round.assignment.round);
        self.alone_in.is_some() && self.alone_in == round
            || self.verdict.as_ref().is_some_and(|verdict| matches!(verdict.what, What::Alone { .. }))
    }

    /// Sends a message without descriptors. If the guard is gone, the select loop handles that next.
    pub(super) fn tell_guard(&mut self, message: &ToGuard) {
        if self.link.send(message, &[]).is_err() {
            self.guard_end = Some(None);
        }
    }

    pub(super) fn join(&self, restarts: u32) {
        fault::point("joining");
        self.meet(move |rendezvous| {
            let joined = rendezvous.join(restarts);
            News::Joined(joined.map(|assignment| (assignment, rendezvous.court())))
        });
    }

    /// Calls the rendezvous in a thread. The result arrives in the select loop.
    fn meet(&self, work: impl FnOnce(&mut dyn Rendezvous) -> News + Send + 'static) {
        // If the launcher is just ending, nobody receives this message.
        let tell = self.tell.clone();
        let tell = move |news| drop(tell.send(news));
        // A thread that waits for other nodes holds this lock. No other thread uses the rendezvous.
        if let Ok(mut rendezvous) = self.rendezvous.try_lock()
            && !rendezvous.waits()
        {
            tell(work(rendezvous.as_mut()));
            return;
        }
        let rendezvous = Arc::clone(&self.rendezvous);
        start_thread("rendezvous", move || {
            let mut rendezvous = rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
            tell(work(rendezvous.as_mut()));
        });
    }
}
