//! Flags with a number or fixed choices as value.

use std::time::Duration;

use crate::cli::{CliError, ParsedArgs, suggest_choice};

const MAX_SECONDS: f64 = 86_400.0;

/// Values of the flags that argparse itself converts. As in torchrun, a failed conversion is a usage error,
/// found before all other checks.
pub(super) struct NumericFlags {
    pub(super) max_restarts: Option<i128>,
    pub(super) node_rank: Option<i128>,
    pub(super) master_port: Option<i128>,
    pub(super) shutdown_timeout: Option<i128>,
    pub(super) stderr_tail: Option<i128>,
    pub(super) gpus_per_worker: Option<i128>,
    pub(super) restart_stop_after_same: Option<i128>,
    pub(super) monitor_interval: Option<f64>,
    pub(super) restart_delay: Option<f64>,
}

impl NumericFlags {
    pub(super) fn read(args: &ParsedArgs) -> Result<Self, CliError> {
        let integer =
            |name: &str, example: &str| args.get(name).map(|value| value.integer(example)).transpose();
        let float = |name: &str, example: &str| args.get(name).map(|value| value.float(example)).transpose();
        let numbers = Self {
            max_restarts: integer("max-restarts", "3")?,
            node_rank: integer("node-rank", "0")?,
            master_port: integer("master-port", "29500")?,
            shutdown_timeout: integer("shutdown-timeout", "30")?,
            stderr_tail: integer("stderr-tail", "64")?,
            gpus_per_worker: integer("gpus-per-worker", "1")?,
            restart_stop_after_same: integer("restart-stop-after-same", "3")?,
            monitor_interval: float("monitor-interval", "0.1")?,
            restart_delay: float("restart-delay", "5")?,
        };
        choice(args, "start-method", &["spawn", "fork", "forkserver"])?;
        choice(args, "numa-binding", &["node", "socket", "exclusive", "core-complex"])?;
        choice(args, "bind", &["node", "socket", "core-complex", "core", "none"])?;
        choice(args, "orphans", &["stop", "keep"])?;
        Ok(numbers)
    }
}

/// Returns the value of a flag with fixed choices; `None` if the flag is not set. Another value is a usage
/// error.
pub(super) fn choice<'a>(
    args: &'a ParsedArgs,
    name: &str,
    choices: &[&str],
) -> Result<Option<&'a str>, CliError> {
    let Some(value) = args.get(name) else { return Ok(None) };
    match value.text.to_str() {
        Some(text) if choices.contains(&text) => Ok(Some(text)),
        text => {
            let example = text
                .and_then(|text| suggest_choice(text, choices))
                .map_or_else(|| choices.join("|"), str::to_owned);
            Err(CliError::usage(value.wrong("no such choice", &example)))
        }
    }
}

/// Checks that a number is not negative; `None` if the flag is not set.
pub(super) fn non_negative<T: TryFrom<i128>>(
    args: &ParsedArgs,
    name: &str,
    number: Option<i128>,
    example: &str,
) -> Result<Option<T>, CliError> {
    let (Some(value), Some(number)) = (args.get(name), number) else { return Ok(None) };
    if number < 0 {
        return Err(CliError::value(value.wrong("must not be negative", example)));
    }
    T::try_from(number).map(Some).map_err(|_| CliError::value(value.wrong("too large", example)))
}

/// Checks that a time is at most a day; `None` if the flag is not set.
pub(super) fn seconds(
    args: &ParsedArgs,
    name: &str,
    seconds: Option<f64>,
) -> Result<Option<Duration>, CliError> {
    let (Some(value), Some(seconds)) = (args.get(name), seconds) else { return Ok(None) };
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(CliError::value(value.wrong("must be from 0 to 86400 seconds", "0.1")));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}
