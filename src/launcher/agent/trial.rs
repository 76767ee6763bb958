//! The job's end on all nodes: hearing the verdict, declaring one, leaving when it is read.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use convoke_env::ExitCause;
use nix::sys::signal::Signal;

use super::machine::End;
use super::run::{News, Shell};
use crate::cause::Weight;
use crate::rendezvous::{Court, FromOthers, What};
use crate::report::{self, Report};
use crate::say::say;

/// Longest wait for the court at the very end.
const COURT_TIMEOUT: Duration = Duration::from_secs(3);

impl Shell {
    /// Takes this node's seat, once.
    pub(super) fn enter_court(&mut self, court: Option<Arc<dyn Court>>) {
        let (None, Some(court)) = (&self.court, court) else { return };
        self.court = Some(Arc::clone(&court));
        let tell = self.tell.clone();
        start_thread("verdict", move || {
            while let Some(news) = court.hear() {
                let last = matches!(news, FromOthers::Verdict(_));
                // Nobody listens any more if the launcher is just ending.
                if tell.send(News::Others(news)).is_err() || last {
                    return;
                }
            }
        });
    }

    /// The first failure of a round: if no restart is left it is the end of the job, on all nodes at once.
    pub(super) fn declare_failure(&mut self, local_rank: usize, cause: ExitCause) {
        let (Some(court), Some(round)) = (&self.court, &self.round) else { return };
        let restarts = self.agent.restarts_left() > 0;
        if restarts && !court.has_last_word() {
            return;
        }
        let rank = round.workers.rank(local_rank);
        let summary = format!("rank {rank} (local_rank {local_rank}) {}", report::describe(cause));
        let first = self.first_report();
        // A worker that lost its peer is not to blame if the peer's node has something to say.
        let consequence = first.root().is_some_and(|root| root.class.weight() != Weight::Own);
        let what = What::Failed { summary, report: first.root_only().to_json() };
        let (court, tell) = (Arc::clone(court), self.tell.clone());
        self.declared = Some(what.clone()).filter(|_| !restarts);
        let Some(verdict) = court.failed(what, restarts, consequence) else { return };
        start_thread("declare", move || {
            if let Some(verdict) = verdict() {
                let _ = tell.send(News::Others(FromOthers::Verdict(verdict)));
            }
        });
    }

    /// The same for what ends this agent without a failed worker.
    pub(super) fn declare_stop(&self, signal: Signal) {
        if let Some(court) = self.court.clone() {
            start_thread("declare", move || drop(court.declare(What::Stopped { signal: signal as i32 })));
        }
    }

    /// The last word with the other nodes; who ended the job, if it was another node.
    pub(super) fn leave_court(&mut self, end: &End) {
        let Some(court) = self.court.take() else { return };
        let what = match end {
            End::Success | End::Aborted => None,
            // Declared when it happened; but that thread may not have come to it yet.
            End::Failed(_) => self.declared.take(),
            End::Error(text) => Some(What::Error { text: text.clone() }),
            End::Stopped(signal) | End::Interrupted(signal) => Some(What::Stopped { signal: *signal as i32 }),
        };
        let (done, wait) = std::sync::mpsc::channel();
        start_thread("leave", move || {
            let standing = what.map(|what| court.declare(what));
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
}

/// The report that came with another node's verdict, if it can be read.
pub(super) fn told_by(what: &What) -> Option<Report> {
    match what {
        What::Failed { report, .. } => Report::from_json(report).ok(),
        What::Error { .. } | What::Stopped { .. } | What::Lost | What::Alone { .. } => None,
    }
}

/// A thread that ends by itself; without one its work is not done, and that is said.
pub(super) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name(format!("convoke-{name}")).spawn(work) {
        say(&format!("warning: no thread to {name}: {error}"));
    }
}
