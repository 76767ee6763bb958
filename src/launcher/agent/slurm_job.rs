//! Asks Slurm about a job: how long it may still run, and what follows its drain.

use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::scheduler::{scontrol, scontrol_field};

pub(super) const SCONTROL_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time before Slurm ends the job at which the workers must have stopped. It is a fifth of what is left
/// if that is shorter, as with a short grace time.
const BEFORE_END: Duration = Duration::from_secs(10);
/// The first version that requeues a preempted job which ends within its grace time.
const REQUEUES_ENDED_JOBS: (u32, u32) = (24, 5);

/// The step that follows the drain of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDrain {
    Exit,
    Requeue,
    Hold,
}

/// Returns how long the workers of Slurm's job may still run; `None` if Slurm does not say so.
pub(super) fn time_left(job: &str) -> Option<Duration> {
    let shown = scontrol(&["show", "job", job], SCONTROL_TIMEOUT).ok();
    // The variable has the end that was planned when the job started. Preemption ends it earlier.
    let end = shown
        .and_then(|text| end_time(&text, &TimeZone::system()))
        .or_else(|| std::env::var("SLURM_JOB_END_TIME").ok()?.parse().ok())?;
    let left = u64::try_from(end - Timestamp::now().as_second()).unwrap_or(0);
    let left = Duration::from_secs(left);
    Some(left - BEFORE_END.min(left / 5))
}

/// Returns EndTime in the output of `scontrol show job`, in seconds since 1970.
fn end_time(text: &str, zone: &TimeZone) -> Option<i64> {
    let time: DateTime = scontrol_field(text, "EndTime")?.parse().ok()?;
    Some(time.to_zoned(zone.clone()).ok()?.timestamp().as_second())
}

/// Decides what follows the drain of a job, from the outputs of `scontrol show job` and `scontrol --version`.
fn after_drain(job: &str, version: &str) -> AfterDrain {
    let is_preempted = scontrol_field(job, "PreemptTime").is_some_and(|time| time != "None");
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok());
    let is_old =
        (numbers.next(), numbers.next()) < (Some(REQUEUES_ENDED_JOBS.0), Some(REQUEUES_ENDED_JOBS.1));
    match scontrol_field(job, "Requeue") {
        Some("1") if is_preempted && is_old => AfterDrain::Hold,
        Some("1") => AfterDrain::Requeue,
        _ => AfterDrain::Exit,
    }
}

/// Asks Slurm what follows the drain of a job.
///
/// # Errors
/// `scontrol` does not answer. The error is a line.
pub(super) fn ask_after_drain(job: &str) -> Result<AfterDrain, String> {
    Ok(after_drain(
        &scontrol(&["show", "job", job], SCONTROL_TIMEOUT)?,
        &scontrol(&["--version"], SCONTROL_TIMEOUT)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preempted_job_waits_for_old_versions_of_slurm() {
        let job = |requeue: &str, preempted: &str| {
            format!("JobId=4 Requeue={requeue} Restarts=0\n PreemptTime={preempted} X=1")
        };
        let none = "None";
        assert_eq!(after_drain(&job("1", none), "slurm-wlm 22.05.8"), AfterDrain::Requeue);
        assert_eq!(after_drain(&job("1", "2026-11-27T10:00:00"), "slurm-wlm 22.05.8"), AfterDrain::Hold);
        assert_eq!(after_drain(&job("1", "2026-11-27T10:00:00"), "slurm 24.05.1"), AfterDrain::Requeue);
        assert_eq!(after_drain(&job("1", "2026-11-27T10:00:00"), "slurm 25.11.0"), AfterDrain::Requeue);
        assert_eq!(after_drain(&job("0", none), "slurm 25.11.0"), AfterDrain::Exit);
        assert_eq!(after_drain("", ""), AfterDrain::Exit);
    }

    #[test]
    fn end_of_a_job_is_read_from_scontrol() {
        let text = "   StartTime=2026-11-27T10:00:00 EndTime=2026-11-27T11:00:00 Deadline=N/A\n";
        assert_eq!(end_time(text, &TimeZone::UTC), Some(1_795_777_200));
        assert_eq!(end_time("EndTime=Unknown", &TimeZone::UTC), None);
    }
}
