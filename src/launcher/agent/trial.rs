//! The outcome of the job on all nodes: this node receives it, declares it, and leaves.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use convoke_env::ExitCause;
use nix::sys::signal::Signal;
use tokio::sync::oneshot;

use super::machine::End;
use super::run::{CULPRIT_PATIENCE, Declared, News, Shell};
use super::signals::Meaning;
use crate::cause::{Class, Weight};
use crate::os::stop_this_process;
use crate::rendezvous::{Court, FromOthers, What};
use crate::report::{self, Report};
use crate::say::say;
use crate::supervise::Blame;

/// Longest wait for the other nodes at the very end.
const COURT_TIMEOUT: Duration = CULPRIT_PATIENCE.saturating_add(Duration::from_secs(3));
/// Head start of other nodes' declarations if the workers of this node only timed out waiting for another
/// worker.
const TIMEOUT_PATIENCE: Duration = Duration::from_millis(500);

impl Shell {
    /// Starts listening to the other nodes, once.
    pub(super) fn enter_court(&mut self, court: Option<Arc<dyn Court>>) {
        let (None, Some(court)) = (&self.court, court) else { return };
        self.court = Some(Arc::clone(&court));
        let tell = self.tell.clone();
        start_thread("verdict", move || {
            while let Some(news) = court.hear() {
                let last = matches!(news, FromOthers::Verdict(_));
                // If the launcher is just ending, nobody receives this message.
                if tell.send(News::Others(news)).is_err() || last {
                    return;
                }
            }
        });
    }

    /// Determines whether a worker that has just ended blames another one, from its error file and the stderr
    /// read so far.
    pub(super) fn blame(&mut self, local_rank: usize, cause: ExitCause) -> Blame {
        let Some(round) = self.round.as_mut().filter(|_| cause != ExitCause::Code(0)) else {
            return Blame::Itself;
        };
        round.first_failed.get_or_insert_with(Instant::now);
        let is_alone = self.court.is_none() && self.config.nproc_per_node == 1;
        if is_alone || round.supervisor.is_stopping() {
            return Blame::Itself;
        }
        let base = round.workers.rank(0);
        match self.first_report(Some(local_rank)).failures.first() {
            Some(failure) if failure.class == Class::PeerLost => {
                let here =
                    |rank: usize| rank.checked_sub(base).filter(|&local| local < self.config.nproc_per_node);
                Blame::Other(failure.blames.and_then(here).filter(|&blamed| blamed != local_rank))
            }
            Some(_) | None => Blame::Itself,
        }
    }

    /// Declares a failure that ends the round. If no restart is left, the job ends on all nodes at once.
    pub(super) fn declare_failure(&mut self, local_rank: usize, cause: ExitCause) {
        let (Some(court), Some(round)) = (&self.court, &self.round) else { return };
        let restarts = self.agent.restarts_left() > 0;
        if restarts && !court.has_last_word() {
            return;
        }
        let (rank, failed) = (round.workers.rank(local_rank), round.first_failed);
        let first = self.first_report(None);
        let root = first.root();
        let (rank, local_rank, how) = match root {
            Some(root) => (root.rank, root.local_rank, root.describe()),
            None => (rank, local_rank, report::describe(cause)),
        };
        let mut summary = format!("rank {rank} (local_rank {local_rank}) {how}");
        let here =
            |rank: &usize| (0..self.config.nproc_per_node).any(|local| round.workers.rank(local) == *rank);
        if let Some(blamed) = root.and_then(|root| root.blames).filter(|rank| !here(rank)) {
            summary.push_str(&format!(", for want of rank {blamed}, whose node did not say that it failed"));
        }
        // A worker that lost its peer is not the cause if the peer's node declares a failure.
        let patience = match root.map(|root| root.class) {
            Some(Class::PeerLost) => CULPRIT_PATIENCE,
            Some(class) if class.weight() != Weight::Own => TIMEOUT_PATIENCE,
            Some(_) | None => Duration::ZERO,
        };
        let others_first = failed.map(|failed| failed + patience).filter(|&until| until > Instant::now());
        let what = What::Failed { summary, report: first.root_only().to_json() };
        let (court, tell) = (Arc::clone(court), self.tell.clone());
        self.declared = (!restarts).then(|| Declared { what: what.clone(), others_first });
        let Some(verdict) = court.failed(what, restarts, others_first) else { return };
        start_thread("declare", move || {
            if let Some(verdict) = verdict() {
                let _ = tell.send(News::Others(FromOthers::Verdict(verdict)));
            }
        });
    }

    /// Declares that a signal stops this agent without a failed worker.
    pub(super) fn declare_stop(&self, signal: Signal) {
        if let Some(court) = self.court.clone() {
            start_thread("declare", move || court.stops(signal as i32));
        }
    }

    /// Declares how this node ends, if it must, and leaves. Records who ended the job, if it was another
    /// node.
    pub(super) fn leave_court(&mut self, end: &End) {
        let Some(court) = self.court.take() else { return };
        let what = match end {
            End::Success | End::Aborted => None,
            // This was declared when it happened, but that thread may not have run yet.
            End::Failed(_) => {
                self.declared.take().map(|Declared { what, others_first }| (what, others_first))
            }
            End::Error(text) => Some((What::Error { text: text.clone() }, None)),
            End::Stopped(signal) | End::Interrupted(signal) => {
                Some((What::Stopped { signal: *signal as i32 }, None))
            }
        };
        let (done, wait) = std::sync::mpsc::channel();
        start_thread("leave", move || {
            let standing = what.map(|(what, others_first)| court.declare(what, others_first));
            court.leave();
            let _ = done.send((standing, court));
        });
        match wait.recv_timeout(COURT_TIMEOUT) {
            Ok((standing, court)) => {
                self.verdict = self.verdict.take().or(standing).filter(|verdict| !court.is_mine(verdict));
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    /// Stays for other jobs that use the rendezvous server of this launcher, unless a signal stops it.
    pub(super) async fn leave_guests(&mut self, end: &End) {
        if let End::Stopped(signal) | End::Interrupted(signal) = *end {
            return self.desert_guests(signal).await;
        }
        let (count, endpoint) = self.guests.count();
        if count == 0 {
            return;
        }
        let (jobs, they) =
            if count == 1 { ("another job meets", "it has") } else { ("other jobs meet", "they have") };
        say(&format!(
            "this job has ended; {jobs} at {endpoint}, which this launcher serves: it stays until {they} ended (a signal ends \
             that as well)"
        ));
        let (guests, (done, mut all)) = (self.guests.clone(), oneshot::channel());
        start_thread("guests", move || {
            guests.wait();
            let _ = done.send(());
        });
        loop {
            tokio::select! {
                _ = &mut all => return,
                Some(news) = self.news.recv() => match news {
                    News::Signal(number, Meaning::Stop | Meaning::Die) => {
                        let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                        return self.desert_guests(signal).await;
                    }
                    News::Signal(_, Meaning::Suspend) => stop_this_process(),
                    News::Signal(_, Meaning::Forward | Meaning::Resize | Meaning::Child)
                    | News::Joined(_) | News::Others(_) | News::Barrier(_) => {}
                },
            }
        }
    }

    async fn desert_guests(&self, signal: Signal) {
        let (guests, (done, all)) = (self.guests.clone(), oneshot::channel());
        start_thread("guests", move || {
            guests.desert(signal as i32);
            let _ = done.send(());
        });
        let _ = tokio::time::timeout(COURT_TIMEOUT, all).await;
    }
}

/// Returns the report that came with another node's verdict, if it can be parsed.
pub(super) fn told_by(what: &What) -> Option<Report> {
    match what {
        What::Failed { report, .. } => Report::from_json(report).ok(),
        What::Error { .. } | What::Stopped { .. } | What::Lost | What::Succeeded | What::Alone { .. } => None,
    }
}

/// Starts a thread that ends by itself. If it cannot start, its work is not done, and a warning says so.
pub(super) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name(format!("convoke-{name}")).spawn(work) {
        say(&format!("warning: no thread to {name}: {error}"));
    }
}
