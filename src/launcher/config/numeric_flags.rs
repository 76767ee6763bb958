//! Flags with a number or fixed choices as value.

use std::time::Duration;

use crate::cli::{CliError, ParsedArgs, Value, suggest_choice};

/// Values of `--scheduler`.
pub(super) const SCHEDULERS: &[&str] = &["auto", "none", "slurm", "k8s"];
const MAX_SECONDS: f64 = 86_400.0;

/// Checks the flags that argparse itself converts. As in torchrun, a failed conversion is a usage error that
/// is found before all other checks.
pub(super) fn check(args: &ParsedArgs) -> Result<(), CliError> {
    for (name, example) in [
        ("max-restarts", "3"),
        ("node-rank", "0"),
        ("master-port", "29500"),
        ("shutdown-timeout", "30"),
        ("stderr-tail", "64"),
        ("gpus-per-worker", "1"),
        ("restart-stop-after-same", "3"),
        ("drain-exit-code", "75"),
    ] {
        whole_number(args, name, example)?;
    }
    for (name, example) in [
        ("monitor-interval", "0.1"),
        ("restart-delay", "5"),
        ("drain-timeout", "90"),
        ("drain-after", "3600"),
        ("start-timeout", "60"),
    ] {
        args.get(name).map(|value| value.float(example)).transpose()?;
    }
    choice(args, "start-method", &["spawn", "fork", "forkserver"])?;
    choice(args, "numa-binding", &["node", "socket", "exclusive", "core-complex"])?;
    choice(args, "bind", &["node", "socket", "core-complex", "core", "none"])?;
    choice(args, "orphans", &["stop", "keep"])?;
    choice(args, "scheduler", SCHEDULERS)?;
    choice(args, "on-drained", &["auto", "exit", "requeue", "hold"])?;
    choice(args, "exit-codes", &["torchrun", "scheduler"])?;
    Ok(())
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
        text => Err(value.usage_error("no such choice", &suggestion(text.unwrap_or(""), choices))),
    }
}

/// Returns the choice that `text` probably meant, else all choices.
pub(super) fn suggestion(text: &str, choices: &[&str]) -> String {
    suggest_choice(text, choices).map_or_else(|| choices.join("|"), str::to_owned)
}

/// Returns a flag with a whole number as value, and the number; `None` if the flag is not set.
pub(super) fn whole_number<'a>(
    args: &'a ParsedArgs,
    name: &str,
    example: &str,
) -> Result<Option<(&'a Value, i128)>, CliError> {
    args.get(name).map(|value| Ok((value, value.integer(example)?))).transpose()
}

/// Returns a number that must not be negative; `None` if the flag is not set.
pub(super) fn non_negative<T: TryFrom<i128>>(
    args: &ParsedArgs,
    name: &str,
    example: &str,
) -> Result<Option<T>, CliError> {
    let Some((value, number)) = whole_number(args, name, example)? else { return Ok(None) };
    if number < 0 {
        return Err(value.error("must not be negative", example));
    }
    T::try_from(number).map(Some).map_err(|_| value.error("too large", example))
}

/// Returns a time, which is at most a day; `None` if the flag is not set.
pub(super) fn seconds(args: &ParsedArgs, name: &str) -> Result<Option<Duration>, CliError> {
    let Some(value) = args.get(name) else { return Ok(None) };
    let seconds = value.float("0.1")?;
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(value.error("must be from 0 to 86400 seconds", "0.1"));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}
