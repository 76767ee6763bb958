//! The event loop of the agent: the only select loop of the launcher.

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
use super::job_outcome::start_thread;
use super::restart_delay::{FailureStreak, PendingRestart};
use super::setup::token;
use super::signal_handling::SignalState;
use super::signals::{SignalAction, watch};
use super::start_failure::start_context;
use super::state_machine::{Action, Agent, AgentOutcome, AgentPolicy, Event};
use super::workers::Workers;
use crate::cause::{Evidence, explain_start_failure};
use crate::config::{Config, Orphans};
use crate::events::Events;
use crate::flight::FlightFolder;
use crate::guard::{FromGuard, GuardLink, ToGuard, reap};
use crate::logs::{RunDir, Tee};
use crate::messages::print_message;
use crate::rendezvous::{
    self, Assignment, BarrierResult, JobOutcome, OtherJobs, OutcomeKind, RemoteEvent, Rendezvous,
    RendezvousError, TerminationChannel,
};
use crate::supervise::{self, Supervisor};
use crate::{exit, fault};

/// If workers failed only because they lost a peer, the launcher waits this long before it stops workers,
/// here or on other nodes. The peer's own failure may still be reported in this time. This exceeds the time
/// in which the loss of a launcher or its host is detected.
pub(super) const ROOT_CAUSE_WAIT: Duration = Duration::from_secs(5);
/// Time from SIGTERM to SIGKILL for the remaining workers after a worker failed; torchrun's fixed value.
pub(super) const FAILURE_GRACE: Duration = Duration::from_secs(30);
/// Time from SIGTERM to SIGKILL when the other nodes are about to start a round without this node.
const PARTITIONED_GRACE: Duration = Duration::from_millis(500);
/// Time after which the launcher prints why the nodes may not have met in the rendezvous. Nodes on one host
/// meet sooner.
const RENDEZVOUS_HINT_DELAY: Duration = Duration::from_secs(1);
/// After a worker succeeds, processes that it started may run this long before the launcher stops and reports
/// them. Helpers such as Python's resource tracker end shortly after their worker.
const ORPHAN_EXIT_WAIT: Duration = Duration::from_millis(250);
/// Runs this node's part of the job to its end.
pub(crate) fn run(config: Config, guard: Pid, socket: UnixStream) -> ExitCode {
    fault::point("starting");
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_message(&format!("error: cannot start the event loop: {error}"));
            return exit::FAILURE;
        }
    };
    let end = runtime.block_on(async {
        match EventLoop::new(config, guard, socket) {
            Ok(mut event_loop) => event_loop.run().await,
            Err(error) => {
                print_message(&format!("error: {error}"));
                LauncherExit::Code(exit::FAILURE)
            }
        }
    });
    // Does not wait for threads: one that still waits for other nodes must not delay the exit.
    runtime.shutdown_background();
    match end {
        LauncherExit::Code(code) => code,
        LauncherExit::Signal(signal) => crate::os::exit_by_signal(signal),
    }
}

/// How the launcher ends: with an exit code, or killed by a signal.
pub(super) enum LauncherExit {
    Code(ExitCode),
    Signal(i32),
}

/// Input of the event loop from threads and signal handlers.
#[derive(Debug)]
pub(super) enum Notification {
    Joined(Result<(Assignment, Option<Arc<dyn TerminationChannel>>), RendezvousError>),
    Remote(RemoteEvent),
    Barrier(BarrierResult),
    Signal(i32, SignalAction),
}

pub(super) struct EventLoop {
    pub(super) config: Arc<Config>,
    pub(super) guard: Pid,
    pub(super) link: GuardLink,
    pub(super) notifications: mpsc::UnboundedReceiver<Notification>,
    pub(super) notifier: mpsc::UnboundedSender<Notification>,
    pub(super) agent: Agent,
    pub(super) rendezvous: Arc<Mutex<Box<dyn Rendezvous>>>,
    pub(super) other_jobs: OtherJobs,
    /// Channel on which nodes report failures to each other. Set once this node has joined other nodes.
    pub(super) termination_channel: Option<Arc<dyn TerminationChannel>>,
    /// The failure that this node has declared to the other nodes or is about to declare.
    pub(super) declared: Option<DeclaredFailure>,
    /// Outcome of the job on all nodes; `None` until this node learns it.
    pub(super) job_outcome: Option<JobOutcome>,
    pub(super) token: Option<Token>,
    pub(super) run_dir: RunDir,
    pub(super) flight: FlightFolder,
    pub(super) events: Events,
    pub(super) restarts: u32,
    pub(super) round: Option<Round>,
    /// Number of the latest round that other nodes have ended.
    pub(super) ended_round: Option<u64>,
    /// Number of the latest round that this node ended because it was cut off from the other nodes.
    pub(super) partitioned_round: Option<u64>,
    /// True if this node's workers succeeded in the last round.
    pub(super) succeeded: bool,
    pub(super) next_worker_id: u64,
    pub(super) signals: SignalState,
    pub(super) backoff: Backoff,
    /// Delay before the next restart, computed when the last round failed.
    pub(super) next_restart_delay: Duration,
    pub(super) pending_restart: Option<PendingRestart>,
    pub(super) failure_streak: FailureStreak,
    /// Set once the guard has ended. The inner value is how it ended, or `None` if only its socket has
    /// closed.
    pub(super) guard_end: Option<Option<ExitCause>>,
}

/// The failure that this node declares to the other nodes.
#[derive(Debug, Clone)]
pub(super) struct DeclaredFailure {
    pub(super) what: OutcomeKind,
    /// The declaration takes effect at this time, unless another node names the root cause before. Set if the
    /// workers that failed here only lost a peer or timed out waiting for one.
    pub(super) defer_until: Option<Instant>,
}

/// State of the current round: its workers and their output.
pub(super) struct Round {
    pub(super) assignment: Assignment,
    pub(super) supervisor: Supervisor,
    pub(super) workers: Workers,
    pub(super) tee: Option<Tee>,
    pub(super) began: Instant,
    /// Time at which the first worker failed.
    pub(super) first_failed: Option<Instant>,
    /// True if no process of any worker was left when the latest worker exited.
    pub(super) no_process_left: bool,
}

/// Completes at the time `at`, or never if `at` is `None`.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

impl EventLoop {
    fn new(config: Config, guard: Pid, socket: UnixStream) -> Result<Self, String> {
        let link = GuardLink::new(socket)
            .map_err(|error| format!("cannot connect to the guard process: {error}"))?;
        let (notifier, notifications) = mpsc::unbounded_channel();
        watch(&config, &notifier)?;
        let run_dir = RunDir::create(&config.logs, &config.run_id);
        let flight = FlightFolder::new(&config.flight, run_dir.path());
        let events = Events::new(&config);
        let policy = AgentPolicy {
            // If all nodes count restarts together (a budget of the job), this agent has no restarts of its
            // own: the nodes decide together after each failure.
            max_restarts: if config.has_job_budget() { 0 } else { config.max_restarts },
            sweep_delay: ORPHAN_EXIT_WAIT,
            sweep_grace: FAILURE_GRACE,
            keep_orphans: config.orphans == Orphans::Keep,
        };
        let (agent, _first) = Agent::new(policy);
        let backoff = Backoff::new(config.restart_delay);
        let rendezvous = rendezvous::choose(&config);
        Ok(Self {
            token: token(&config)?,
            other_jobs: rendezvous.other_jobs(),
            rendezvous: Arc::new(Mutex::new(rendezvous)),
            termination_channel: None,
            declared: None,
            job_outcome: None,
            config: Arc::new(config),
            guard,
            link,
            notifications,
            notifier,
            agent,
            run_dir,
            flight,
            events,
            restarts: 0,
            round: None,
            ended_round: None,
            partitioned_round: None,
            succeeded: false,
            next_worker_id: 0,
            signals: SignalState::default(),
            backoff,
            next_restart_delay: Duration::ZERO,
            pending_restart: None,
            failure_streak: FailureStreak::default(),
            guard_end: None,
        })
    }

    async fn run(&mut self) -> LauncherExit {
        self.join(0);
        let mut hint = self.config.rendezvous_hint.clone();
        let hint_at = tokio::time::Instant::now() + RENDEZVOUS_HINT_DELAY;
        loop {
            let sleep = until(self.round.as_ref().and_then(|round| round.supervisor.wake_at()));
            let pause = until(self.pending_restart.as_ref().map(PendingRestart::wake_at));
            let ended = tokio::select! {
                biased;
                message = self.link.receive(), if self.guard_end.is_none() => match message {
                    Ok(Some(message)) => self.handle_guard_message(message),
                    Ok(None) => { self.guard_end = Some(None); None }
                    Err(error) => Some(AgentOutcome::Error(format!("the guard process sent an invalid message: {error}"))),
                },
                Some(notification) = self.notifications.recv() => self.handle_notification(notification),
                () = sleep => self.supervise(supervise::Event::Tick),
                () = pause => { self.continue_restart_delay(); None }
                () = tokio::time::sleep_until(hint_at), if hint.is_some() => {
                    if let (Some(hint), None) = (hint.take(), &self.round) {
                        print_message(&format!("warning: {hint}"));
                    }
                    None
                }
            };
            if self.guard_end.is_some() {
                return self.handle_guard_loss().await;
            }
            if let Some(end) = ended {
                return self.end(end).await;
            }
        }
    }

    pub(super) fn handle_notification(&mut self, notification: Notification) -> Option<AgentOutcome> {
        match notification {
            Notification::Joined(Ok((assignment, channel))) => {
                self.open_termination_channel(channel);
                if self.ended_round >= Some(assignment.round) {
                    // The message that other nodes have ended this round arrived before the message that it
                    // starts.
                    self.join(self.restarts);
                    return None;
                }
                if let Some(restarts) = assignment.restarts {
                    self.restarts = restarts;
                }
                let awaits_decision =
                    self.termination_channel.as_ref().is_some_and(|channel| channel.defers_final_failure());
                let round = self.prepare(assignment);
                match round {
                    Ok(round) => {
                        self.round = Some(round);
                        self.decide(Event::Joined { awaits_decision })
                    }
                    Err(error) => self.decide(Event::JoinFailed(error)),
                }
            }
            Notification::Joined(Err(RendezvousError::AlreadySucceeded)) => {
                print_message("the job has succeeded; this standby node is no longer needed");
                self.decide(Event::NotNeeded)
            }
            Notification::Joined(Err(error)) => {
                let likely = self.config.rendezvous_hint.as_ref().filter(|_| error.is_join_timeout());
                let likely = likely.map_or_else(String::new, |hint| format!("\n  likely: {hint}"));
                self.decide(Event::JoinFailed(format!("{error}{likely}")))
            }
            Notification::Barrier(BarrierResult::Interrupted) => None,
            Notification::Barrier(barrier) => {
                if let BarrierResult::Unknown(warning) = barrier {
                    print_message(&format!("warning: {warning}"));
                }
                self.decide(Event::BarrierPassed)
            }
            Notification::Remote(RemoteEvent::JobEnded(job_outcome)) => {
                // The outcome may be the one that this node declared. This node is then already acting on it.
                let mine =
                    self.termination_channel.as_ref().is_some_and(|channel| channel.is_own(&job_outcome));
                self.job_outcome.get_or_insert(job_outcome);
                self.decide(if mine { Event::JobFailedHere } else { Event::JobEnded })
            }
            Notification::Remote(RemoteEvent::NewRound { round, cause, partitioned: alone }) => {
                self.ended_round = self.ended_round.max(Some(round));
                if self.round.as_ref().is_some_and(|current| current.assignment.round == round) {
                    self.partitioned_round = alone.then_some(round).or(self.partitioned_round);
                    let then =
                        if alone { "this node stops its workers" } else { "all nodes start a new round" };
                    print_message(&format!("{cause}; {then}"));
                    self.decide(Event::NewRound { partitioned: alone })
                } else {
                    None
                }
            }
            Notification::Signal(number, meaning) => self.handle_signal(number, meaning),
        }
    }

    /// Reaps the guard, workers that became our children when the guard died, and processes that we adopted
    /// as subreaper or as PID 1.
    pub(super) fn reap_children(&mut self) {
        let mut reaped = Vec::new();
        reap(|pid, cause| reaped.push((pid, cause)));
        self.record_reaped(&reaped);
    }

    /// Records how the guard ended, or how workers ended that this process reaped after the loss of the
    /// guard.
    pub(super) fn record_reaped(&mut self, reaped: &[(i32, ExitCause)]) {
        for &(pid, cause) in reaped {
            if pid == self.guard.as_raw() {
                self.guard_end = Some(Some(cause));
            } else if let Some(round) = &mut self.round
                && let Some(local_rank) = round.workers.running_with_pid(pid)
            {
                round.workers.record_exit(local_rank, SystemTime::now(), cause, Evidence::default());
            }
        }
    }

    fn handle_guard_message(&mut self, message: FromGuard) -> Option<AgentOutcome> {
        let rank_of = |id| self.round.as_ref().and_then(|round| round.workers.local_rank(id));
        match message {
            FromGuard::Spawned { id, pid } => {
                let local_rank = rank_of(id)?;
                let round = self.round.as_mut()?;
                round.workers.record_start(local_rank, pid);
                self.events.started(&round.assignment, round.workers.rank(local_rank), pid, self.restarts);
                self.supervise(supervise::Event::Started { local_rank })
            }
            FromGuard::SpawnFailed { id, error } => {
                let local_rank = rank_of(id)?;
                let argv = command_line(&self.config, local_rank);
                let error = explain_start_failure(error, &start_context(&argv));
                self.supervise(supervise::Event::StartFailed { local_rank, error })
            }
            FromGuard::Exited { id, cause, evidence, last } => {
                let local_rank = rank_of(id)?;
                let round = self.round.as_mut()?;
                round.no_process_left = last;
                round.workers.record_exit(local_rank, SystemTime::now(), cause, evidence);
                if cause == ExitCause::Code(0) {
                    self.run_dir.worker_succeeded(self.restarts, local_rank);
                }
                let origin = self.failure_origin(local_rank, cause);
                self.supervise(supervise::Event::Exited { local_rank, cause, origin })
            }
            FromGuard::Forwarded { id, caught } => {
                self.handle_forwarded(id, caught);
                None
            }
            FromGuard::Swept { stopped, stuck } => {
                self.report_orphans(&stopped, &stuck);
                self.decide(Event::Swept)
            }
        }
    }

    /// Passes an event to the supervisor and carries out its decisions.
    fn supervise(&mut self, event: supervise::Event) -> Option<AgentOutcome> {
        let round = self.round.as_mut()?;
        let mut actions = Vec::new();
        round.supervisor.handle(Instant::now(), event, &mut actions);
        let mut ended = None;
        for action in actions {
            match action {
                supervise::Action::Signal { local_rank, signal } => {
                    fault::point("stopping");
                    let id = self.round.as_ref()?.workers.id(local_rank);
                    self.send_to_guard(&ToGuard::Signal { id, signal: signal as i32 });
                }
                supervise::Action::RoundFailed { local_rank, cause } => {
                    self.declare_failure(local_rank, cause)
                }
                supervise::Action::Finish(outcome) => {
                    self.finish_output();
                    self.report_round(&outcome);
                    ended = self.decide(Event::RoundEnded(outcome));
                }
            }
        }
        ended
    }

    /// Passes an event to the agent's state machine and carries out its decision.
    pub(super) fn decide(&mut self, event: Event) -> Option<AgentOutcome> {
        match self.agent.handle(event)? {
            Action::Join { restarts } => {
                fault::point("restarting");
                self.restarts = restarts;
                self.restart(restarts);
                None
            }
            Action::Start => self.start().err().map(AgentOutcome::Error),
            Action::Stop { signal, at_once } => {
                let grace =
                    if self.is_partitioned() { PARTITIONED_GRACE } else { self.config.shutdown_timeout };
                self.supervise(supervise::Event::Stop { signal, grace, at_once })
            }
            Action::Abort => {
                let (signal, grace) = match self.job_outcome.as_ref().map(|job_outcome| &job_outcome.kind) {
                    _ if self.is_partitioned() => (Signal::SIGTERM, PARTITIONED_GRACE),
                    // Another node was stopped by this signal. The workers here are stopped as if this node
                    // had received it.
                    Some(OutcomeKind::Stopped { signal }) => {
                        (Signal::try_from(*signal).unwrap_or(Signal::SIGTERM), self.config.shutdown_timeout)
                    }
                    Some(_) | None => (Signal::SIGTERM, FAILURE_GRACE),
                };
                self.supervise(supervise::Event::Abort { signal, grace })
            }
            Action::Sweep { .. } if self.round.as_ref().is_some_and(|round| round.no_process_left) => {
                self.decide(Event::Swept)
            }
            Action::Sweep { delay, grace } => {
                let grace = if self.is_partitioned() { Duration::ZERO } else { grace };
                let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
                let sweep = ToGuard::Sweep { delay_ms: ms(delay), grace_ms: ms(grace) };
                self.send_to_guard(&sweep);
                None
            }
            Action::Barrier => {
                fault::point("waiting");
                self.call_rendezvous(|rendezvous| Notification::Barrier(rendezvous.barrier()));
                None
            }
            Action::End(end) => Some(end),
        }
    }

    /// Returns true if this node is cut off from the other nodes, and they are about to continue without it.
    fn is_partitioned(&self) -> bool {
        let round = self.round.as_ref().map(|round| round.assignment.round);
        self.partitioned_round.is_some() && self.partitioned_round == round
            || self
                .job_outcome
                .as_ref()
                .is_some_and(|job_outcome| matches!(job_outcome.kind, OutcomeKind::Partitioned { .. }))
    }

    /// Sends a message without descriptors to the guard. If the guard is gone, the event loop handles that
    /// next.
    pub(super) fn send_to_guard(&mut self, message: &ToGuard) {
        if self.link.send(message, &[]).is_err() {
            self.guard_end = Some(None);
        }
    }

    pub(super) fn join(&self, restarts: u32) {
        fault::point("joining");
        self.call_rendezvous(move |rendezvous| {
            let joined = rendezvous.join(restarts);
            Notification::Joined(joined.map(|assignment| (assignment, rendezvous.termination_channel())))
        });
    }

    /// Calls the rendezvous in a thread if the call may block. The result arrives in the event loop.
    fn call_rendezvous(&self, work: impl FnOnce(&mut dyn Rendezvous) -> Notification + Send + 'static) {
        // If the launcher is just ending, nobody receives the notification.
        let notifier = self.notifier.clone();
        let notifier = move |notification| drop(notifier.send(notification));
        // A thread that waits for other nodes holds this lock. At most one thread at a time calls the
        // rendezvous.
        if let Ok(mut rendezvous) = self.rendezvous.try_lock()
            && !rendezvous.may_block()
        {
            notifier(work(rendezvous.as_mut()));
            return;
        }
        let rendezvous = Arc::clone(&self.rendezvous);
        start_thread("rendezvous", move || {
            let mut rendezvous = rendezvous.lock().unwrap_or_else(PoisonError::into_inner);
            notifier(work(rendezvous.as_mut()));
        });
    }
}
