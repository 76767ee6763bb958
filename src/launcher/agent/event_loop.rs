//! The event loop of the agent: the only select loop of the launcher.

use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use convoke_env::{ExitCause, Token};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::drain::Drain;
use super::environment::command_line;
use super::restart_delay::RestartDelay;
use super::rounds::Rounds;
use super::signals::Signals;
use super::start_failure::start_context;
use super::state_machine::{Action, Agent, AgentOutcome, Event};
use crate::cause::explain_start_failure;
use crate::config::{Config, Orphans, Rendezvous};
use crate::events::Events;
use crate::flight::FlightFolder;
use crate::guard::{FromGuard, GuardProcess, ToGuard, reap};
use crate::logs::RunDir;
use crate::messages::print_message;
use crate::rendezvous::{
    Cluster, ClusterCommand, ClusterEvent, FailureProtocol, JobOutcome, OutcomeKind, ProposedOutcome,
    RendezvousError, until,
};
use crate::{fault, supervise};

/// Time from SIGTERM to SIGKILL when the other nodes are about to start a round without this node.
const PARTITIONED_GRACE: Duration = Duration::from_millis(500);
/// Time after which the launcher prints why the nodes may not have met in the rendezvous. Nodes on one host
/// meet sooner.
const RENDEZVOUS_HINT_DELAY: Duration = Duration::from_secs(1);

/// Runs this node's part of the job to its end.
pub(crate) fn run(config: Config, guard: Pid, socket: UnixStream) -> ExitCode {
    fault::point("starting");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the event loop: {error}"));
    let end = runtime.and_then(|runtime| {
        let end = runtime.block_on(async { Ok(EventLoop::new(config, guard, socket)?.run().await) });
        // Does not wait for threads: one that still waits for other nodes must not delay the exit.
        runtime.shutdown_background();
        end
    });
    match end {
        Ok(LauncherExit::Code(code)) => code,
        Ok(LauncherExit::Signal(signal)) => crate::os::exit_by_signal(signal),
        Err(error) => {
            print_message(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// How the launcher ends: with an exit code, or killed by a signal.
pub(super) enum LauncherExit {
    Code(ExitCode),
    Signal(i32),
}

/// The agent of one node. Its parts hold the state; the state machine decides.
pub(super) struct EventLoop {
    pub(super) config: Config,
    pub(super) token: Option<Token>,
    pub(super) guard: GuardProcess,
    pub(super) cluster: Cluster,
    pub(super) signals: Signals,
    pub(super) agent: Agent,
    pub(super) rounds: Rounds,
    pub(super) restart_delay: RestartDelay,
    pub(super) drain: Drain,
    /// The failure that this node has declared to the other nodes or is about to declare.
    pub(super) declared: Option<ProposedOutcome>,
    /// Outcome of the job on all nodes; `None` until this node learns it.
    pub(super) job_outcome: Option<JobOutcome>,
    /// Outcome of the job that the nodes agreed on when this node left it, also if it is about this node.
    pub(super) agreed_outcome: Option<JobOutcome>,
    pub(super) run_dir: RunDir,
    pub(super) flight: FlightFolder,
    pub(super) events: Events,
}

/// Returns the token of the job. The user may provide it. Otherwise the launcher creates one if the job has
/// only this node, and returns `None` for several nodes.
fn token(config: &Config) -> Result<Option<Token>, String> {
    if let Some(token) = Token::from_process().map_err(|error| error.to_string())? {
        return Ok(Some(token));
    }
    let alone = matches!(config.rendezvous, Rendezvous::Standalone) || config.nodes.max == 1;
    alone.then(Token::random).transpose().map_err(|error| format!("cannot get random numbers: {error}"))
}

impl EventLoop {
    fn new(config: Config, guard: Pid, socket: UnixStream) -> Result<Self, String> {
        let guard = GuardProcess::new(guard, socket)
            .map_err(|error| format!("cannot connect to the guard process: {error}"))?;
        // Threads that start later inherit the mask of signals.
        let signals = Signals::watch(&config)?;
        let run_dir = RunDir::create(&config.logs, &config.run_id);
        // If all nodes count restarts together (a budget of the job), this agent has no restarts of its own:
        // the nodes decide together after each failure.
        let max_restarts = if config.has_job_budget() { 0 } else { config.max_restarts };
        let agent = Agent::new(max_restarts, config.orphans == Orphans::Keep);
        Ok(Self {
            token: token(&config)?,
            cluster: Cluster::new(&config),
            flight: FlightFolder::new(&config.flight, run_dir.path()),
            events: Events::new(&config),
            drain: Drain::new(&config.drain, run_dir.path())?,
            restart_delay: RestartDelay::new(config.restart_delay, config.restart_stop_after_same),
            config,
            guard,
            signals,
            agent,
            rounds: Rounds::default(),
            declared: None,
            job_outcome: None,
            agreed_outcome: None,
            run_dir,
        })
    }

    async fn run(&mut self) -> LauncherExit {
        self.join(0);
        let mut hint = self.config.rendezvous_hint.clone();
        let hint_at = tokio::time::Instant::now() + RENDEZVOUS_HINT_DELAY;
        loop {
            let sleep = self.rounds.current.as_ref().and_then(|round| round.supervisor.wake_at());
            let sleep = until(sleep.map(Into::into));
            let pause = until(self.restart_delay.wake_at().map(Into::into));
            let ended = tokio::select! {
                biased;
                message = self.guard.receive() => match message {
                    Ok(Some(message)) => self.handle_guard_message(message),
                    Ok(None) => None,
                    Err(error) => Some(AgentOutcome::Error(format!("the guard process sent an invalid message: {error}"))),
                },
                signal = self.signals.next() => self.handle_signal(signal),
                event = self.cluster.receive() => self.handle_cluster_event(event),
                event = self.drain.next() => self.handle_drain_event(event),
                () = sleep => self.supervise(supervise::Event::Tick),
                () = pause => {
                    if let Some(restarts) = self.restart_delay.advance() {
                        self.join(restarts);
                    }
                    None
                }
                () = tokio::time::sleep_until(hint_at), if hint.is_some() => {
                    if let (Some(hint), None) = (hint.take(), &self.rounds.current) {
                        print_message(&format!("warning: {hint}"));
                    }
                    None
                }
            };
            if self.guard.has_ended() {
                return self.handle_guard_loss().await;
            }
            if let Some(end) = ended {
                return self.end(end).await;
            }
        }
    }

    fn handle_cluster_event(&mut self, event: ClusterEvent) -> Option<AgentOutcome> {
        match event {
            ClusterEvent::Joined(Ok(assignment)) => {
                self.cluster.note_joined(&assignment);
                if let Some(token) = &assignment.token {
                    self.token = Some(token.clone());
                }
                if self.rounds.ended >= Some(assignment.round) {
                    // The message that other nodes have ended this round arrived before the message that it
                    // starts.
                    self.join(self.rounds.restarts);
                    return None;
                }
                if let Some(restarts) = assignment.restarts {
                    self.rounds.restarts = restarts;
                }
                self.prepare(assignment);
                let awaits_decision = self.cluster.protocol == FailureProtocol::Confirmed;
                self.decide(Event::Joined { awaits_decision })
            }
            ClusterEvent::Joined(Err(RendezvousError::AlreadySucceeded)) => {
                print_message("the job has succeeded; this standby node is no longer needed");
                self.decide(Event::NotNeeded)
            }
            ClusterEvent::Joined(Err(error)) => {
                let likely = self.config.rendezvous_hint.as_ref().filter(|_| error.is_join_timeout());
                let likely = likely.map_or_else(String::new, |hint| format!("\n  likely: {hint}"));
                self.decide(Event::JoinFailed(format!("{error}{likely}")))
            }
            ClusterEvent::Barrier { warning } => {
                if let Some(warning) = warning {
                    print_message(&format!("warning: {warning}"));
                }
                self.decide(Event::BarrierPassed)
            }
            ClusterEvent::JobEnded(outcome) => {
                // The outcome may be the one that this node declared. This node is then already acting on it.
                let mine = self.cluster.is_own(&outcome);
                self.job_outcome.get_or_insert(outcome);
                self.decide(if mine { Event::JobFailedHere } else { Event::JobEnded })
            }
            ClusterEvent::NewRound { round, cause, partitioned } => {
                if !self.rounds.note_end(round, partitioned) {
                    return None;
                }
                let then =
                    if partitioned { "this node stops its workers" } else { "all nodes start a new round" };
                if self.drain.state.is_some() {
                    print_message(&format!("error: {cause}, during the drain; this node stops its workers"));
                    return self.decide(Event::Signalled { signal: Signal::SIGTERM, at_once: false });
                }
                print_message(&format!("{cause}; {then}"));
                self.decide(Event::NewRound { partitioned })
            }
            ClusterEvent::Left { .. } => unreachable!("this node has not asked to leave"),
        }
    }

    /// Reaps the guard, workers that became our children when the guard died, and processes that we adopted
    /// as subreaper or as PID 1.
    pub(super) fn reap_children(&mut self) {
        let mut reaped = Vec::new();
        reap(|pid, cause, _| reaped.push((pid, cause)));
        self.record_reaped(&reaped);
    }

    /// Records how the guard ended, or how workers ended that this process reaped after the loss of the
    /// guard.
    pub(super) fn record_reaped(&mut self, reaped: &[(i32, ExitCause)]) {
        for &(pid, cause) in reaped {
            if !self.guard.record_end(pid, cause) {
                self.rounds.record_reaped(pid, cause);
            }
        }
    }

    fn handle_guard_message(&mut self, message: FromGuard) -> Option<AgentOutcome> {
        match message {
            FromGuard::Spawned { id, pid } => {
                let restarts = self.rounds.restarts;
                let (round, local_rank) = self.rounds.of_worker(id)?;
                round.workers[local_rank].pid = Some(pid);
                self.events.started(&round.assignment, round.rank(local_rank), pid, restarts);
                self.supervise(supervise::Event::Started { local_rank })
            }
            FromGuard::SpawnFailed { id, error } => {
                let (_, local_rank) = self.rounds.of_worker(id)?;
                let argv = command_line(&self.config, local_rank);
                let error = explain_start_failure(error, &start_context(&argv));
                self.supervise(supervise::Event::StartFailed { local_rank, error })
            }
            FromGuard::Exited { id, cause, evidence, last } => {
                let cause = self.count_drained(cause);
                let (round, local_rank) = self.rounds.of_worker(id)?;
                round.no_process_left = last;
                round.record_exit(local_rank, cause, evidence);
                if cause == ExitCause::Code(0) {
                    self.run_dir.worker_succeeded(self.rounds.restarts, local_rank);
                }
                let origin = self.failure_origin(local_rank, cause);
                self.supervise(supervise::Event::Exited { local_rank, cause, origin })
            }
            FromGuard::Forwarded { id, caught } => {
                self.signals.forwarded.record_answer(id, caught);
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
        let round = self.rounds.current.as_mut()?;
        let mut actions = Vec::new();
        round.supervisor.handle(Instant::now(), event, &mut actions);
        let mut ended = None;
        for action in actions {
            match action {
                supervise::Action::Signal { local_rank, signal } => {
                    fault::point("stopping");
                    let id = self.rounds.current.as_ref()?.id(local_rank);
                    self.guard.send(&ToGuard::Signal { id, signal: signal as i32 }, &[]);
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
                self.rounds.restarts = restarts;
                if !self.restart_delay.begin(restarts) {
                    self.join(restarts);
                }
                None
            }
            Action::Start => self.start().err().map(AgentOutcome::Error),
            Action::Stop { signal, at_once } => {
                let grace = match &self.drain.state {
                    _ if self.is_partitioned() => PARTITIONED_GRACE,
                    Some(state) if state.is_late => state.grace,
                    Some(_) | None => self.config.shutdown_timeout,
                };
                self.supervise(supervise::Event::Stop { signal, grace, at_once })
            }
            Action::Abort => {
                let (signal, grace) = match self.job_outcome.as_ref().map(|outcome| &outcome.kind) {
                    _ if self.is_partitioned() => (Signal::SIGTERM, PARTITIONED_GRACE),
                    // Another node was stopped by this signal. The workers here are stopped as if this node
                    // had received it.
                    Some(OutcomeKind::Stopped { signal }) => {
                        (Signal::try_from(*signal).unwrap_or(Signal::SIGTERM), self.config.shutdown_timeout)
                    }
                    Some(_) | None => (Signal::SIGTERM, supervise::FAILURE_GRACE),
                };
                self.supervise(supervise::Event::Abort { signal, grace })
            }
            Action::Sweep { .. }
                if self.rounds.current.as_ref().is_some_and(|round| round.no_process_left) =>
            {
                self.decide(Event::Swept)
            }
            Action::Sweep { delay, grace } => {
                let grace = if self.is_partitioned() { Duration::ZERO } else { grace };
                let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
                self.guard.send(&ToGuard::Sweep { delay_ms: ms(delay), grace_ms: ms(grace) }, &[]);
                None
            }
            Action::Barrier => {
                fault::point("waiting");
                let drained = self.drain.state.is_some();
                self.cluster.send(ClusterCommand::Barrier { drained });
                None
            }
            Action::End(end) => Some(end),
        }
    }

    /// Returns true if this node is cut off from the other nodes, and they are about to continue without it.
    fn is_partitioned(&self) -> bool {
        let outcome = self.job_outcome.as_ref().map(|outcome| &outcome.kind);
        self.rounds.is_partitioned() || matches!(outcome, Some(OutcomeKind::Partitioned { .. }))
    }

    fn join(&mut self, restarts: u32) {
        fault::point("joining");
        self.cluster.send(ClusterCommand::Join { restarts });
    }
}
