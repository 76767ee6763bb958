//! Reads the flags about drains.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::numeric_flags::{choice, seconds, whole_number};
use super::settings::{DrainConfig, OnDrained};
use super::signal_list::signals;
use crate::cli::{CliError, Env, ParsedArgs};
use crate::scheduler::ScheduledJob;

const TIMEOUT: Duration = Duration::from_secs(90);
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
const EXIT_CODE: u8 = 75;

/// Reads all flags about drains. In a step of Slurm, SIGUSR1 drains the job.
pub(super) fn drain(
    args: &ParsedArgs,
    env: Env<'_>,
    scheduled: Option<&ScheduledJob>,
    warnings: &mut Vec<String>,
) -> Result<DrainConfig, CliError> {
    let in_slurm = scheduled.is_some_and(|job| job.is_slurm);
    let signals = match args.get("drain-signal") {
        Some(value) => signals("drain-signal", &with_prefix(value.as_str()?), warnings),
        None => in_slurm.then_some(Signal::SIGUSR1).into_iter().collect(),
    };
    let timeout = seconds(args, "drain-timeout")?.unwrap_or(TIMEOUT);
    if timeout < MIN_TIMEOUT {
        return Err(args.error("drain-timeout", "must be at least 1 s", "90"));
    }
    let exit_code = match whole_number(args, "drain-exit-code", "75")? {
        None => EXIT_CODE,
        Some((value, number)) => {
            u8::try_from(number).map_err(|_| value.error("an exit code is a number from 0 to 255", "75"))?
        }
    };
    let on_drained = match choice(args, "on-drained", &["auto", "exit", "requeue", "hold"])? {
        Some("exit") => OnDrained::Exit,
        Some("requeue") => OnDrained::Requeue,
        Some("hold") => OnDrained::Hold,
        Some(_) | None => OnDrained::Auto,
    };
    let slurm_job = env("SLURM_JOB_ID").filter(|_| in_slurm).map(|id| id.to_string_lossy().into_owned());
    Ok(DrainConfig {
        signals,
        timeout,
        after: seconds(args, "drain-after")?,
        exit_code,
        on_drained,
        slurm_job,
    })
}

/// Adds SIG to the names of signals that lack it, as Slurm's users write them.
fn with_prefix(list: &str) -> String {
    let full = |name: &str| match name.trim() {
        name if name.is_empty() || name.starts_with("SIG") => name.to_owned(),
        name => format!("SIG{name}"),
    };
    list.split(',').map(full).collect::<Vec<_>>().join(",")
}
