//! Writes the outcome of the job to the files that the user or the scheduler wants, and chooses the exit code.

use super::event_loop::EventLoop;
use super::exit_code::for_scheduler;
use super::job_outcome::report_of;
use super::state_machine::AgentOutcome;
use crate::config::ExitCodes;
use crate::messages::print_message;
use crate::rendezvous::OutcomeKind;
use crate::report::{self, Outcome, Report};

impl EventLoop {
    /// Writes `--report-file` and `--termination-log`. `report` is the failure report if one has been made
    /// already. Returns the exit code of `--exit-codes=scheduler`; `None` without that flag.
    pub(super) fn write_outcome(&self, end: &AgentOutcome, report: Option<Report>) -> Option<u8> {
        let wants_code = self.config.exit_codes == ExitCodes::Scheduler;
        if self.config.report_file.is_none() && self.config.termination_log.is_none() && !wants_code {
            return None;
        }
        let report = self.final_report(end, report);
        if let Some(path) = &self.config.report_file
            && let Err(error) = report::write(&report, path)
        {
            print_message(&format!("warning: {error}"));
        }
        let common = self.common_report();
        if let Some(path) = self.config.termination_log.as_ref().filter(|_| *end != AgentOutcome::Success)
            && let Err(error) = report::write_termination_log(common.as_ref().unwrap_or(&report), path)
        {
            print_message(&format!("warning: {error}"));
        }
        let root = common.as_ref().unwrap_or(&report).root().map(|root| root.class);
        let job = self.agreed_outcome.as_ref().map(|outcome| &outcome.kind);
        let draining = self.drain.state.is_some();
        wants_code.then(|| for_scheduler(end, job, root, draining, self.agent.has_no_progress()))
    }

    /// Returns the report of the outcome that the nodes agreed on, which all of them have in equal words.
    fn common_report(&self) -> Option<Report> {
        let outcome = self.agreed_outcome.as_ref()?;
        report_of(&outcome.kind).or_else(|| {
            let is_known = !matches!(outcome.kind, OutcomeKind::Succeeded);
            is_known
                .then(|| report::without_failures(&self.job(), Outcome::Failed, Some(outcome.to_string())))
        })
    }

    fn final_report(&self, end: &AgentOutcome, report: Option<Report>) -> Report {
        let bare = |outcome, message| report::without_failures(&self.job(), outcome, message);
        let job_outcome = self.job_outcome.as_ref().map(ToString::to_string);
        let mut report = report.unwrap_or_else(|| match end {
            AgentOutcome::Success if self.drain.state.is_some() => bare(Outcome::Drained, None),
            AgentOutcome::Success => bare(Outcome::Succeeded, None),
            AgentOutcome::Failed(failures) => self.report(failures, None).0,
            AgentOutcome::Error(_)
                if self.rounds.current.as_ref().is_some_and(|round| round.not_started.is_some()) =>
            {
                self.report(&[], None).0
            }
            AgentOutcome::Error(error) => bare(Outcome::Error, Some(error.clone())),
            AgentOutcome::Stopped(signal) => bare(Outcome::Stopped, Some(format!("stopped by {signal}"))),
            AgentOutcome::Interrupted(signal) => {
                bare(Outcome::Stopped, Some(format!("{signal} while waiting for other nodes")))
            }
            AgentOutcome::Aborted => bare(Outcome::Failed, None),
        });
        report.message = report.message.or(job_outcome);
        if report.flight.is_none() && *end != AgentOutcome::Success {
            report.flight = self.flight(None);
        }
        report
    }
}
