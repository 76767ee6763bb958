//! Handles the outcome of the job on all nodes: this node receives it, or declares it, and then leaves the
//! job.

use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::Signal;
use tokio::time::timeout;

use super::event_loop::EventLoop;
use super::signals::SignalAction;
use super::state_machine::AgentOutcome;
use crate::cause::{CauseKind, Class};
use crate::config::Rendezvous as Choice;
use crate::messages::print_message;
use crate::os::stop_this_process;
use crate::rendezvous::{ClusterCommand, FailureProtocol, OutcomeKind, ProposedOutcome};
use crate::report::{self, Report};
use crate::supervise::{FailureOrigin, ROOT_CAUSE_WAIT};

/// Longest wait for the other nodes to agree on the job's outcome before this launcher exits.
const TERMINATION_TIMEOUT: Duration = ROOT_CAUSE_WAIT.saturating_add(Duration::from_secs(3));
/// Time by which this node defers its own declaration if its workers only timed out waiting for another
/// worker. Other nodes can declare the real failure first.
const PEER_TIMEOUT_WAIT: Duration = Duration::from_millis(500);

impl EventLoop {
    /// Determines whether a worker that has just failed blames another worker. The evidence is its error file
    /// and the stderr read so far.
    pub(super) fn failure_origin(&mut self, local_rank: usize, cause: ExitCause) -> FailureOrigin {
        let Some(round) = self.rounds.current.as_mut().filter(|_| cause != ExitCause::Code(0)) else {
            return FailureOrigin::Own;
        };
        round.first_failed.get_or_insert_with(Instant::now);
        let has_no_peers = self.cluster.protocol == FailureProtocol::None && self.config.nproc_per_node == 1;
        if has_no_peers || round.supervisor.is_stopping() {
            return FailureOrigin::Own;
        }
        let base = round.rank(0);
        match self.preliminary_report(Some(local_rank)).failures.first() {
            Some(failure) if failure.class == Class::PeerLost => {
                let here =
                    |rank: usize| rank.checked_sub(base).filter(|&local| local < self.config.nproc_per_node);
                FailureOrigin::Peer(
                    failure.suspect_rank.and_then(here).filter(|&blamed| blamed != local_rank),
                )
            }
            Some(_) | None => FailureOrigin::Own,
        }
    }

    /// Declares to the other nodes a failure that ends the round. If no restart is left, the job ends on all
    /// nodes at once.
    pub(super) fn declare_failure(&mut self, local_rank: usize, cause: ExitCause) {
        let Some(round) = &self.rounds.current else { return };
        let restarts = self.agent.restarts_left() > 0;
        match self.cluster.protocol {
            FailureProtocol::None => return,
            FailureProtocol::FirstIsFinal if restarts => return,
            FailureProtocol::FirstIsFinal | FailureProtocol::Confirmed => {}
        }
        let (rank, failed) = (round.rank(local_rank), round.first_failed);
        let first = self.preliminary_report(None);
        let root = first.root();
        let (rank, local_rank, how) = match root {
            Some(root) => (root.rank, root.local_rank, root.describe()),
            None => (rank, local_rank, report::describe(cause)),
        };
        let mut summary = format!("rank {rank} (local_rank {local_rank}) {how}");
        let here = |rank: &usize| (0..self.config.nproc_per_node).any(|local| round.rank(local) == *rank);
        if let Some(blamed) = root.and_then(|root| root.suspect_rank).filter(|rank| !here(rank)) {
            summary
                .push_str(&format!("; suspected root cause: rank {blamed}, whose node reported no failure"));
        }
        // A worker that lost its peer is not the root cause if the peer's node declares a failure. That node
        // gets time to declare first.
        let head_start = match root.map(|root| root.class) {
            Some(Class::PeerLost) => ROOT_CAUSE_WAIT,
            Some(class) if class.cause_kind() != CauseKind::Primary => PEER_TIMEOUT_WAIT,
            Some(_) | None => Duration::ZERO,
        };
        let defer_until = failed.map(|failed| failed + head_start).filter(|&until| until > Instant::now());
        let report = first.root_only().to_json();
        let kind = OutcomeKind::Failed { summary: summary.clone(), report: report.clone() };
        self.declared = (!restarts).then_some(ProposedOutcome { kind, defer_until });
        self.cluster.send(ClusterCommand::ReportFailure { summary, report, restarts, defer_until });
    }

    /// Declares to the other nodes that a signal stops this agent without a failed worker.
    pub(super) fn declare_stop(&mut self, signal: Signal) {
        self.cluster.send(ClusterCommand::ReportSignal(signal as i32));
    }

    /// Declares to the other nodes how this node ends, unless it succeeded or was ended by them, and leaves
    /// the job. Records the outcome if another node ended the job. Returns the number of other jobs that
    /// still use the rendezvous server of this launcher.
    pub(super) async fn leave(&mut self, end: &AgentOutcome) -> usize {
        if self.cluster.protocol == FailureProtocol::None {
            return 0;
        }
        let proposed = match end {
            AgentOutcome::Success | AgentOutcome::Aborted => None,
            // The failure was declared when it happened, but that may have been deferred. Declares it again.
            AgentOutcome::Failed(_) => self.declared.take(),
            AgentOutcome::Error(text) => Some(OutcomeKind::Error { text: text.clone() }.into()),
            AgentOutcome::Stopped(signal) | AgentOutcome::Interrupted(signal) => {
                Some(OutcomeKind::Stopped { signal: *signal as i32 }.into())
            }
        };
        self.cluster.send(ClusterCommand::Leave { proposed });
        let Ok((agreed, other_jobs)) = timeout(TERMINATION_TIMEOUT, self.cluster.left()).await else {
            return 0;
        };
        let outcome = self.job_outcome.take().or(agreed);
        self.agreed_outcome.clone_from(&outcome);
        self.job_outcome = outcome.filter(|outcome| !self.cluster.is_own(outcome));
        other_jobs
    }

    /// Keeps the launcher running while other jobs use its rendezvous server, unless a signal stops it. If a
    /// signal has stopped it already, their members know that.
    pub(super) async fn serve_other_jobs(&mut self, count: usize) {
        let Choice::Elastic { endpoint, .. } = &self.config.rendezvous else { return };
        if count == 0 {
            return;
        }
        let (jobs, they) =
            if count == 1 { ("another job uses", "it has") } else { ("other jobs use", "they have") };
        print_message(&format!(
            "this job has ended; {jobs} the rendezvous at {endpoint}, which this launcher serves: it keeps running until {they} \
             ended (a signal stops it sooner)"
        ));
        loop {
            tokio::select! {
                _ = self.cluster.left() => return,
                (number, action) = self.signals.next() => match action {
                    SignalAction::Stop | SignalAction::Die => {
                        let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM) as i32;
                        let proposed = Some(OutcomeKind::Stopped { signal }.into());
                        self.cluster.send(ClusterCommand::Leave { proposed });
                        let _ = timeout(TERMINATION_TIMEOUT, self.cluster.left()).await;
                        return;
                    }
                    SignalAction::Suspend => stop_this_process(),
                    SignalAction::Drain | SignalAction::Forward | SignalAction::Resize | SignalAction::Child => {}
                },
            }
        }
    }
}

/// Returns the report that came with the job outcome of another node, if it can be parsed.
pub(super) fn report_of(what: &OutcomeKind) -> Option<Report> {
    let OutcomeKind::Failed { report, .. } = what else { return None };
    Report::from_json(report).ok()
}
