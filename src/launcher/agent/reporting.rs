//! Messages of the launcher, all on stderr.

use std::time::{Duration, SystemTime};

use convoke_env::{ExitCause, vars};
use convoke_recorder::layout::Exit;

use super::event_loop::EventLoop;
use super::state_machine::AgentOutcome;
use crate::cause::{Class, Evidence};
use crate::flight;
use crate::gpus::evidence::{self, FailedWorker};
use crate::guard::Orphan;
use crate::messages::{print_message, print_report};
use crate::rendezvous::FailureProtocol;
use crate::report::{self, EndedWorker, Outcome, Report, WorkerEnd};
use crate::supervise::{self, FailureOrigin};

/// Maximum number of leftover processes that a message names.
const MAX_NAMED_ORPHANS: usize = 8;
/// Longest time for reading a worker's last lines of stderr before its failure is declared to other nodes.
const TAIL_READ_TIMEOUT: Duration = Duration::from_millis(100);

impl EventLoop {
    pub(super) fn report_round(&mut self, outcome: &supervise::Outcome) {
        self.rounds.succeeded = *outcome == supervise::Outcome::Succeeded;
        let Some(round) = &mut self.rounds.current else { return };
        for (local_rank, worker) in round.workers.iter().enumerate() {
            if let (Some(pid), Some((_, cause))) = (worker.pid, worker.ended) {
                let rank = round.rank(local_rank);
                self.events.ended(&round.assignment, rank, pid, cause, self.rounds.restarts);
            }
        }
        if let supervise::Outcome::NotStarted { local_rank, error } = outcome {
            round.not_started = Some((*local_rank, error.clone()));
            return;
        }
        let supervise::Outcome::Failed(failures) = outcome else { return };
        let lasted = round.began.elapsed();
        let left = self.config.max_restarts.saturating_sub(self.rounds.restarts);
        if left == 0 {
            return;
        }
        let (report, ..) = self.report(failures, None);
        if !self.restart_delay.record_failure(lasted, report.root()) {
            self.agent.disable_restarts();
            // This node has not declared the failure to the other nodes yet, since a restart was left.
            if let (Some(root), Some(failure)) = (report.root(), failures.first())
                && self.cluster.protocol == FailureProtocol::FirstIsFinal
            {
                self.declare_failure(root.local_rank, failure.cause);
            }
            return;
        }
        if let Some(root) = report.root() {
            // An exit code alone has no class to add.
            let why = if root.class == Class::Exit { String::new() } else { format!(" ({})", root.class) };
            print_message(&format!(
                "warning: rank {} (local_rank {}) {}{why}; restarting {} of this node ({left} of {} restarts left)",
                root.rank,
                root.local_rank,
                root.describe(),
                match self.config.nproc_per_node {
                    1 => "the worker".to_owned(),
                    workers => format!("all {workers} workers"),
                },
                self.config.max_restarts
            ));
            for line in self.flight(Some(failures)).map(|flight| flight.groups).unwrap_or_default() {
                print_message(&format!("warning: {line}"));
            }
        }
    }

    /// Returns what the flight recordings of this round's workers, which have all ended, show about their
    /// operations. Without `failures`, all workers count as stopped by the launcher.
    pub(super) fn flight(&self, failures: Option<&[supervise::Failure]>) -> Option<report::FlightSummary> {
        let round = self.rounds.current.as_ref()?;
        let stopped = |local_rank: usize| {
            failures.is_none_or(|failures| {
                failures.iter().any(|failure| failure.local_rank == local_rank && failure.stopped)
            })
        };
        let exit = |&local_rank: &usize| {
            let (time, cause) = round.workers[local_rank].ended?;
            let exit = Exit { unix_ns: flight::unix_ns(time), cause, stopped: stopped(local_rank) };
            Some((round.rank(local_rank), exit))
        };
        self.flight.analyze(&flight::Round {
            generation: round.assignment.generation,
            began: round.began_at,
            exits: round.exit_order.iter().filter_map(exit).collect(),
        })
    }

    pub(super) fn report_orphans(&self, stopped: &[Orphan], stuck: &[Orphan]) {
        let names = |processes: &[Orphan]| {
            let shown = processes.iter().take(MAX_NAMED_ORPHANS);
            let list: Vec<_> = shown.map(|left| format!("{} (pid {})", left.name, left.pid)).collect();
            let more = processes.len() - list.len();
            list.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
        };
        // Orphan processes of failed workers need no warning: they belong to the failure.
        if self.rounds.succeeded && !stopped.is_empty() {
            print_message(&format!(
                "warning: stopped processes that outlived their workers: {}",
                names(stopped)
            ));
        }
        if !stuck.is_empty() {
            print_message(&format!("warning: processes that SIGKILL does not end: {}", names(stuck)));
        }
    }

    /// Reports which workers failed and why: on stderr and in the requested files.
    pub(super) fn report_failures(&self, failures: &[supervise::Failure]) -> Report {
        let (mut report, ended, wrong) = self.report(failures, None);
        self.add_gpu_evidence(&mut report);
        report.flight = self.flight(Some(failures));
        let target = std::env::var_os(vars::ERROR_FILE).filter(|path| !path.is_empty());
        if let Some(Err(error)) =
            target.map(|target| report::copy_error_file(&report, &ended, target.as_ref()))
        {
            print_message(&format!("warning: {error}"));
        }
        if let Some(wrong) = wrong {
            print_message(&format!("error: {wrong}; the report follows without it:"));
        }
        self.print(&report);
        report
    }

    /// Adds evidence about the GPUs of those workers that failed by themselves.
    fn add_gpu_evidence(&self, report: &mut Report) {
        let Some(began) = self.rounds.current.as_ref().map(|round| round.began_at) else { return };
        let own = |failure: &&mut report::Failure| !failure.stopped_by_us && failure.pid > 0;
        let failed = report.failures.iter_mut().filter(own).map(|failure| {
            let devices = self.config.gpus.1.get(failure.local_rank).cloned();
            // Without a device list of its own, a worker usually uses the device with its local rank.
            let devices = devices.unwrap_or_else(|| failure.local_rank.to_string());
            FailedWorker { devices: devices.split(',').map(str::to_owned).collect(), pid: Some(failure.pid) }
        });
        let lines = evidence::gather(failed.collect(), began);
        for (failure, lines) in report.failures.iter_mut().filter(own).zip(lines) {
            failure.gpu = lines;
        }
    }

    /// Returns a preliminary report, for use while the first failure of a round is being handled. The other
    /// workers still run, and the failed worker's stderr may not have been read to its end. The final report
    /// can only add to this one. `only` is that of [`EventLoop::report`].
    pub(super) fn preliminary_report(&self, only: Option<usize>) -> Report {
        if let Some(tee) = self.rounds.tee() {
            tee.read_pending(TAIL_READ_TIMEOUT);
        }
        self.report(&[], only).0
    }

    /// Returns the report of the current round, the ended workers from which it was built, and a problem with
    /// an error file, if any. `only` selects one worker by local rank; `None` selects all. The report is
    /// complete once all output of the workers has been read ([`EventLoop::finish_output`]).
    pub(super) fn report(
        &self,
        failures: &[supervise::Failure],
        only: Option<usize>,
    ) -> (Report, Vec<EndedWorker>, Option<String>) {
        let job = self.job();
        let Some(round) = &self.rounds.current else {
            return (report::without_failures(&job, Outcome::Failed, None), Vec::new(), None);
        };
        let ended = |&local_rank: &usize| {
            let worker = &round.workers[local_rank];
            let (time, cause) = worker.ended?;
            Some(EndedWorker {
                local_rank,
                rank: round.rank(local_rank),
                pid: worker.pid,
                end: WorkerEnd::Exited(cause),
                time,
                stopped: failures.iter().any(|failure| failure.local_rank == local_rank && failure.stopped),
                error_file: worker.error_file.clone(),
                stderr: worker.stderr.read(),
                evidence: worker.evidence.clone(),
                gpu: Vec::new(),
            })
        };
        let wanted = |local_rank: &&usize| only.is_none_or(|only| **local_rank == only);
        let mut all: Vec<EndedWorker> = round.exit_order.iter().filter(wanted).filter_map(ended).collect();
        if let Some((local_rank, why)) = round.not_started.clone() {
            let first = EndedWorker {
                local_rank,
                rank: round.rank(local_rank),
                pid: None,
                end: WorkerEnd::NotStarted(why),
                time: SystemTime::now(),
                stopped: false,
                error_file: None,
                stderr: (Vec::new(), false),
                evidence: Evidence::default(),
                gpu: Vec::new(),
            };
            all.iter_mut().for_each(|worker| worker.stopped = true);
            all.insert(0, first);
        }
        let (report, wrong) = report::build(&job, &all);
        (report, all, wrong)
    }

    /// Prints what the flight recordings show, for cases in which no report contains it.
    pub(super) fn report_flight(&self) {
        if let Some(flight) = self.flight(None) {
            print_flight(&flight);
        }
    }

    /// Reports the loss of the guard. The report names workers that failed before the guard ended, and
    /// workers that ended with it, as far as that is known.
    pub(super) fn report_guard_loss(&self) {
        let (mut failures, mut fallen) = (Vec::new(), Vec::new());
        let mut killed = false;
        if let Some(round) = &self.rounds.current {
            failures.extend_from_slice(&round.supervisor.failures);
            for &local_rank in &round.exit_order {
                let is_reported = failures.iter().any(|failure| failure.local_rank == local_rank);
                if let Some((_, cause)) = round.workers[local_rank].ended
                    && !is_reported
                    && cause != ExitCause::Code(0)
                {
                    fallen.push(local_rank);
                    let origin = FailureOrigin::Own;
                    failures.push(supervise::Failure { local_rank, cause, stopped: true, origin });
                }
            }
            killed = !fallen.is_empty() || round.workers.iter().any(|worker| worker.ended.is_none());
        }
        let how = self.guard.exit_cause();
        let how = how.map_or_else(|| "ended with an unknown exit status".to_owned(), report::describe);
        let workers = if killed { "; all workers of this node were killed" } else { "" };
        let message = format!("the guard process (pid {}) {how}{workers}", self.guard.pid);
        print_message(&format!("error: {message}"));

        let mut report = self.report(&failures, None).0;
        report.outcome = Outcome::Error;
        report.flight = self.flight(Some(&failures));
        for worker in &mut report.failures {
            if worker.class == Class::Stopped && fallen.contains(&worker.local_rank) {
                worker.explanation = format!(
                    "it ended with the guard process, without which no worker may run: {}",
                    worker.describe()
                );
            }
        }
        report.root_cause = report.root_cause.filter(|&at| !report.failures[at].stopped_by_us);
        if report.root_cause.is_some() {
            self.print(&report);
        } else if let Some(flight) = &report.flight {
            print_flight(flight);
        }
        report.message = Some(message.clone());
        let _ = self.write_outcome(&AgentOutcome::Error(message), Some(report));
    }

    pub(super) fn print(&self, report: &Report) {
        print_report(&report::render(report, self.config.report));
    }

    pub(super) fn job(&self) -> report::Job {
        let assignment = self.rounds.assignment();
        report::Job {
            title: self.config.program.title.clone(),
            run_id: self.config.run_id.clone(),
            node: assignment.map(|assignment| assignment.group_rank),
            nodes: assignment.map(|assignment| assignment.group_world_size),
            restarts: self.rounds.restarts,
            max_restarts: self.config.max_restarts,
            assumed_python: self.config.program.assumed_python,
            began: self.rounds.current.as_ref().map_or_else(SystemTime::now, |round| round.began_at),
            stderr_lines: self.config.stderr_lines,
            notes: self.config.notes.clone(),
        }
    }
}

fn print_flight(report::FlightSummary { folder, groups }: &report::FlightSummary) {
    for line in groups {
        print_message(line);
    }
    print_message(&format!("recorded calls: convoke-flight {folder}"));
}
