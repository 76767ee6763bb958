//! Requeues a Slurm job after its drain, or waits until Slurm does.

use super::event_loop::EventLoop;
use super::signals::SignalAction;
use super::slurm_job::{AfterDrain, SCONTROL_TIMEOUT, ask_after_drain};
use crate::config::OnDrained;
use crate::messages::print_message;
use crate::scheduler::scontrol;

impl EventLoop {
    /// Requeues a drained Slurm job, or keeps it until Slurm requeues it, as `--on-drained` says. Only node 0
    /// does so.
    pub(super) async fn after_drain(&mut self) {
        let Some(job) = self.config.drain.slurm_job.clone() else { return };
        if self.rounds.assignment().is_none_or(|assignment| assignment.group_rank != 0) {
            return;
        }
        let next = match self.config.drain.on_drained {
            OnDrained::Exit => AfterDrain::Exit,
            OnDrained::Requeue => AfterDrain::Requeue,
            OnDrained::Hold => AfterDrain::Hold,
            OnDrained::Auto => ask_after_drain(&job).unwrap_or_else(|error| {
                let code = self.config.drain.exit_code;
                print_message(&format!(
                    "warning: {error}, so the job is not requeued here; a batch script can: [ $? = {code} ] && scontrol requeue {job}"
                ));
                AfterDrain::Exit
            }),
        };
        match next {
            AfterDrain::Exit => {}
            AfterDrain::Requeue => {
                print_message(&format!("scontrol requeue {job}"));
                if let Err(error) = scontrol(&["requeue", &job], SCONTROL_TIMEOUT) {
                    print_message(&format!("warning: the job is not requeued: {error}"));
                }
            }
            AfterDrain::Hold => {
                print_message("Slurm requeues a preempted job only when it ends it: waiting for that");
                loop {
                    if let (_, SignalAction::Stop | SignalAction::Die | SignalAction::Drain) =
                        self.signals.next().await
                    {
                        return;
                    }
                }
            }
        }
    }
}
