//! Handles the outcome of the job on all nodes: this node receives it, or declares it, and then leaves the
//! job.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::Signal;
use tokio::sync::oneshot;

use super::event_loop::{DeclaredFailure, EventLoop, Notification, ROOT_CAUSE_WAIT};
use super::signals::SignalAction;
use super::state_machine::AgentOutcome;
use crate::cause::{CauseKind, Class};
use crate::messages::print_message;
use crate::os::stop_this_process;
use crate::rendezvous::{OutcomeKind, RemoteEvent, TerminationChannel};
use crate::report::{self, Report};
use crate::supervise::FailureOrigin;

/// Longest wait for the other nodes to agree on the job's outcome before this launcher exits.
const TERMINATION_TIMEOUT: Duration = ROOT_CAUSE_WAIT.saturating_add(Duration::from_secs(3));
/// Time by which this node defers its own declaration if its workers only timed out waiting for another
/// worker. Other nodes can declare the real failure first.
const PEER_TIMEOUT_WAIT: Duration = Duration::from_millis(500);

impl EventLoop {
    /// Starts a thread that receives the messages of the other nodes, if none runs yet.
    pub(super) fn open_termination_channel(&mut self, channel: Option<Arc<dyn TerminationChannel>>) {
        let (None, Some(channel)) = (&self.termination_channel, channel) else { return };
        self.termination_channel = Some(Arc::clone(&channel));
        let notifier = self.notifier.clone();
        start_thread("verdict", move || {
            while let Some(notification) = channel.recv() {
                let last = matches!(notification, RemoteEvent::JobEnded(_));
                // If the launcher is just ending, nobody receives the message.
                if notifier.send(Notification::Remote(notification)).is_err() || last {
                    return;
                }
            }
        });
    }

    /// Determines whether a worker that has just failed blames another worker. The evidence is its error file
    /// and the stderr read so far.
    pub(super) fn failure_origin(&mut self, local_rank: usize, cause: ExitCause) -> FailureOrigin {
        let Some(round) = self.round.as_mut().filter(|_| cause != ExitCause::Code(0)) else {
            return FailureOrigin::Own;
        };
        round.first_failed.get_or_insert_with(Instant::now);
        let has_no_peers = self.termination_channel.is_none() && self.config.nproc_per_node == 1;
        if has_no_peers || round.supervisor.is_stopping() {
            return FailureOrigin::Own;
        }
        let base = round.workers.rank(0);
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
        let (Some(channel), Some(round)) = (&self.termination_channel, &self.round) else { return };
        let restarts = self.agent.restarts_left() > 0;
        if restarts && !channel.defers_final_failure() {
            return;
        }
        let (rank, failed) = (round.workers.rank(local_rank), round.first_failed);
        let first = self.preliminary_report(None);
        let root = first.root();
        let (rank, local_rank, how) = match root {
            Some(root) => (root.rank, root.local_rank, root.describe()),
            None => (rank, local_rank, report::describe(cause)),
        };
        let mut summary = format!("rank {rank} (local_rank {local_rank}) {how}");
        let here =
            |rank: &usize| (0..self.config.nproc_per_node).any(|local| round.workers.rank(local) == *rank);
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
        let what = OutcomeKind::Failed { summary, report: first.root_only().to_json() };
        let (channel, notifier) = (Arc::clone(channel), self.notifier.clone());
        self.declared = (!restarts).then(|| DeclaredFailure { what: what.clone(), defer_until });
        let Some(job_outcome) = channel.report_failure(what, restarts, defer_until) else { return };
        start_thread("declare", move || {
            if let Some(job_outcome) = job_outcome() {
                let _ = notifier.send(Notification::Remote(RemoteEvent::JobEnded(job_outcome)));
            }
        });
    }

    /// Declares to the other nodes that a signal stops this agent without a failed worker.
    pub(super) fn declare_stop(&self, signal: Signal) {
        if let Some(channel) = self.termination_channel.clone() {
            start_thread("declare", move || channel.report_signal(signal as i32));
        }
    }

    /// Declares to the other nodes how this node ends, unless it succeeded or was ended by them, and leaves
    /// the job. Records the outcome if another node ended the job.
    pub(super) fn close_termination_channel(&mut self, end: &AgentOutcome) {
        let Some(channel) = self.termination_channel.take() else { return };
        let what = match end {
            AgentOutcome::Success | AgentOutcome::Aborted => None,
            // The failure was declared when it happened, but the thread that declares it may not have run
            // yet. Declares it again.
            AgentOutcome::Failed(_) => {
                self.declared.take().map(|DeclaredFailure { what, defer_until }| (what, defer_until))
            }
            AgentOutcome::Error(text) => Some((OutcomeKind::Error { text: text.clone() }, None)),
            AgentOutcome::Stopped(signal) | AgentOutcome::Interrupted(signal) => {
                Some((OutcomeKind::Stopped { signal: *signal as i32 }, None))
            }
        };
        let (done, wait) = std::sync::mpsc::channel();
        start_thread("leave", move || {
            let agreed = what.map(|(what, defer_until)| channel.propose_outcome(what, defer_until));
            channel.leave();
            let _ = done.send((agreed, channel));
        });
        match wait.recv_timeout(TERMINATION_TIMEOUT) {
            Ok((agreed, channel)) => {
                self.job_outcome =
                    self.job_outcome.take().or(agreed).filter(|job_outcome| !channel.is_own(job_outcome));
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    /// Keeps the launcher running while other jobs use its rendezvous server, unless a signal stops it.
    pub(super) async fn serve_other_jobs(&mut self, end: &AgentOutcome) {
        if let AgentOutcome::Stopped(signal) | AgentOutcome::Interrupted(signal) = *end {
            return self.stop_serving_other_jobs(signal).await;
        }
        let (count, endpoint) = self.other_jobs.count();
        if count == 0 {
            return;
        }
        let (jobs, they) =
            if count == 1 { ("another job uses", "it has") } else { ("other jobs use", "they have") };
        print_message(&format!(
            "this job has ended; {jobs} the rendezvous at {endpoint}, which this launcher serves: it keeps running until {they} \
             ended (a signal stops it sooner)"
        ));
        let (other_jobs, (done, mut all)) = (self.other_jobs.clone(), oneshot::channel());
        start_thread("guests", move || {
            other_jobs.wait();
            let _ = done.send(());
        });
        loop {
            tokio::select! {
                _ = &mut all => return,
                Some(notification) = self.notifications.recv() => match notification {
                    Notification::Signal(number, SignalAction::Stop | SignalAction::Die) => {
                        let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                        return self.stop_serving_other_jobs(signal).await;
                    }
                    Notification::Signal(_, SignalAction::Suspend) => stop_this_process(),
                    Notification::Signal(_, SignalAction::Forward | SignalAction::Resize | SignalAction::Child)
                    | Notification::Joined(_) | Notification::Remote(_) | Notification::Barrier(_) => {}
                },
            }
        }
    }

    async fn stop_serving_other_jobs(&self, signal: Signal) {
        let (other_jobs, (done, all)) = (self.other_jobs.clone(), oneshot::channel());
        start_thread("guests", move || {
            other_jobs.notify_shutdown(signal as i32);
            let _ = done.send(());
        });
        let _ = tokio::time::timeout(TERMINATION_TIMEOUT, all).await;
    }
}

/// Returns the report that came with the job outcome of another node, if it can be parsed.
pub(super) fn report_of(what: &OutcomeKind) -> Option<Report> {
    match what {
        OutcomeKind::Failed { report, .. } => Report::from_json(report).ok(),
        OutcomeKind::Error { .. }
        | OutcomeKind::Stopped { .. }
        | OutcomeKind::Lost
        | OutcomeKind::Succeeded
        | OutcomeKind::Partitioned { .. } => None,
    }
}

/// Starts a detached thread. If the thread cannot be started, `work` is not done, and a warning says so.
pub(super) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name(format!("convoke-{name}")).spawn(work) {
        print_message(&format!("warning: cannot start the thread convoke-{name}: {error}"));
    }
}
