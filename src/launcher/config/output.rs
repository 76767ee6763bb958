//! Reads the flags for output: log files, tee, filters, events.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use convoke_env::vars;

use super::settings::{EventHandler, FlightDir, LogConfig, LogDir, StreamChoice, Streams};
use crate::cli::{CliError, ParsedArgs, Value, integer};
use crate::formatting::count;

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

const PREFIX_TEMPLATE: &str = "[${role_name}${local_rank}]:";

/// Reads all flags about the workers' output.
///
/// # Errors
/// A value that makes no sense: exit code 1.
pub(super) fn logs(
    args: &ParsedArgs,
    env: Env<'_>,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<LogConfig, CliError> {
    let redirects = stream_choice(args, "redirects", nproc_per_node, warnings)?;
    let tee = stream_choice(args, "tee", nproc_per_node, warnings)?;
    let dir = match args.get("log-dir") {
        None => LogDir::Temporary,
        Some(value) if value.text.is_empty() => LogDir::Temporary,
        Some(value) if value.text == "/dev/null" => LogDir::Disabled,
        // A path that is no directory is probably mistyped. Other problems of the path (no permission, a full
        // disk) must not stop a job.
        Some(value) if fs::metadata(&value.text).is_ok_and(|found| !found.is_dir()) => {
            return Err(CliError::value(value.wrong("not a directory", "DIRECTORY")));
        }
        Some(value) => LogDir::Path(PathBuf::from(&value.text)),
    };
    let template = |text: OsString| text.to_string_lossy().into_owned();
    let from_flag = args.get("log-line-prefix-template").map(|value| template(value.text.clone()));
    let from_variable = || env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").map(template);
    let prefix_template =
        from_flag.filter(|text| !text.is_empty()).or_else(from_variable).filter(|text| !text.is_empty());
    Ok(LogConfig {
        role: role(args)?,
        dir,
        redirects,
        tee,
        prefix_template: prefix_template.unwrap_or_else(|| PREFIX_TEMPLATE.to_owned()),
        local_ranks_filter: local_ranks_filter(args, nproc_per_node, warnings)?,
        keep_stderr_tail: true,
        duplicate_stdout: substrings(args.text("duplicate-stdout-filters")?),
        duplicate_stderr: substrings(args.text("duplicate-stderr-filters")?),
    })
}

fn stream_choice(
    args: &ParsedArgs,
    name: &str,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<StreamChoice, CliError> {
    let Some(value) = args.get(name) else { return Ok(StreamChoice::All(Streams::default())) };
    let choice = streams(value.as_str()?).ok_or_else(|| {
        CliError::value(value.wrong(
            "neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9",
            "3, or 0:3,1:2",
        ))
    })?;
    if let StreamChoice::Some(of_rank) = &choice {
        warn_of_absent_ranks(value, of_rank.keys().copied(), nproc_per_node, warnings);
    }
    Ok(choice)
}

/// Parses the value of `-r` and `-t`: one digit, or `rank:digit,rank:digit` with one-digit local ranks.
pub(super) fn streams(text: &str) -> Option<StreamChoice> {
    if let Some(streams) = one_streams(text) {
        return Some(StreamChoice::All(streams));
    }
    let mut of_rank = BTreeMap::new();
    for item in text.split(',') {
        let (rank, streams) = item.split_once(':')?;
        let [rank @ b'0'..=b'9'] = rank.as_bytes() else { return None };
        of_rank.insert(usize::from(rank - b'0'), one_streams(streams)?);
    }
    Some(StreamChoice::Some(of_rank))
}

fn one_streams(text: &str) -> Option<Streams> {
    match text {
        "0" => Some(Streams { stdout: false, stderr: false }),
        "1" => Some(Streams { stdout: true, stderr: false }),
        "2" => Some(Streams { stdout: false, stderr: true }),
        "3" => Some(Streams { stdout: true, stderr: true }),
        _ => None,
    }
}

/// Parses the value of the duplicate filters. A comma separates texts, `,,` is a comma itself. Empty texts
/// are dropped, since every line would contain them.
pub(super) fn substrings(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            out.push(String::new());
        } else if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out.retain(|text| !text.is_empty());
    out
}

fn local_ranks_filter(
    args: &ParsedArgs,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<Option<BTreeSet<usize>>, CliError> {
    let Some(value) = args.get("local-ranks-filter").filter(|value| !value.text.is_empty()) else {
        return Ok(None);
    };
    let rank = |text: &str| integer(text).and_then(|number| usize::try_from(number).ok());
    let ranks: Option<BTreeSet<usize>> = value.as_str()?.split(',').map(rank).collect();
    let ranks = ranks.ok_or_else(|| CliError::value(value.wrong("not a list of local ranks", "0,2")))?;
    warn_of_absent_ranks(value, ranks.iter().copied(), nproc_per_node, warnings);
    Ok(Some(ranks))
}

fn warn_of_absent_ranks(
    value: &Value,
    ranks: impl Iterator<Item = usize>,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) {
    if let Some(rank) = ranks.into_iter().find(|&rank| rank >= nproc_per_node) {
        let workers = count(nproc_per_node, "worker");
        warnings.push(format!("{value} names local rank {rank}, but this node has {workers}"));
    }
}

/// Reads CONVOKE_FLIGHT_DIR.
pub(super) fn flight(env: Env<'_>) -> FlightDir {
    match env(vars::FLIGHT_DIR) {
        None => FlightDir::LogFolder,
        Some(folder) if folder.is_empty() => FlightDir::Disabled,
        Some(folder) => FlightDir::Path(PathBuf::from(folder)),
    }
}

/// Reads `--event-log-handler` and the environment variable LOGLEVEL.
///
/// # Errors
/// There is no such handler: exit code 1.
pub(super) fn events(args: &ParsedArgs, env: Env<'_>) -> Result<EventHandler, CliError> {
    const INFO: i128 = 20;
    let Some(value) = args.get("event-log-handler") else { return Ok(EventHandler::Null) };
    match value.text.to_str() {
        Some("null") => Ok(EventHandler::Null),
        // Unlike other messages of level INFO, events are printed unless LOGLEVEL is set to a higher level.
        Some("console") if env("LOGLEVEL").is_some() && log_level(env) > INFO => Ok(EventHandler::Null),
        Some("console") => Ok(EventHandler::Console),
        _ => Err(CliError::value(value.wrong("no such handler", "console"))),
    }
}

/// The level if LOGLEVEL is not set.
const WARNING: i128 = 30;

/// Returns whether the environment variable LOGLEVEL suppresses warnings.
pub(crate) fn is_quiet(env: Env<'_>) -> bool {
    log_level(env) > WARNING
}

/// Returns LOGLEVEL as a number of Python's logging; WARNING by default.
fn log_level(env: Env<'_>) -> i128 {
    let Some(text) = env("LOGLEVEL") else { return WARNING };
    let text = text.to_string_lossy().to_uppercase();
    match text.trim() {
        "CRITICAL" | "FATAL" => 50,
        "ERROR" => 40,
        "WARNING" | "WARN" => WARNING,
        "INFO" => 20,
        "DEBUG" => 10,
        "NOTSET" => 0,
        other => integer(other).unwrap_or(WARNING),
    }
}

/// Returns the value of `--role`, or its default.
pub(super) fn role(args: &ParsedArgs) -> Result<String, CliError> {
    Ok(if args.is_on("role") { args.text("role")?.to_owned() } else { "default".to_owned() })
}
