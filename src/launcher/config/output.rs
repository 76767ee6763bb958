//! Reads the flags for output: log files, tee, filters, events.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use convoke_env::vars;

use super::numeric_flags::choice;
use super::settings::{EventHandler, ExitCodes, FlightDir, LogConfig, LogDir, StreamChoice, Streams};
use crate::cli::{CliError, Env, ParsedArgs, integer};
use crate::formatting::count;

const PREFIX_TEMPLATE: &str = "[${role_name}${local_rank}]:";

/// The file in which Kubernetes looks for the reason why a container ended.
const KUBERNETES_TERMINATION_LOG: &str = "/dev/termination-log";

/// Reads `--termination-log`. In a pod the default is the file that Kubernetes reads.
pub(super) fn termination_log(args: &ParsedArgs, env: Env<'_>) -> Option<PathBuf> {
    match args.get("termination-log") {
        Some(value) => Some(PathBuf::from(&value.text)).filter(|path| !path.as_os_str().is_empty()),
        None => {
            let in_pod = env("KUBERNETES_SERVICE_HOST").is_some();
            Some(PathBuf::from(KUBERNETES_TERMINATION_LOG)).filter(|path| in_pod && path.exists())
        }
    }
}

/// Reads `--exit-codes`.
pub(super) fn exit_codes(args: &ParsedArgs) -> Result<ExitCodes, CliError> {
    Ok(match choice(args, "exit-codes", &["torchrun", "scheduler"])? {
        Some("scheduler") => ExitCodes::Scheduler,
        Some(_) | None => ExitCodes::Torchrun,
    })
}

/// Reads all flags about the workers' output.
pub(super) fn logs(
    args: &ParsedArgs,
    env: Env<'_>,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<LogConfig, CliError> {
    let (redirects, tee) = (stream_choice(args, "redirects")?, stream_choice(args, "tee")?);
    let dir = match args.get_nonempty("log-dir") {
        None => LogDir::Temporary,
        Some(value) if value.text == "/dev/null" => LogDir::Disabled,
        // A path that is no directory is probably mistyped. Other problems of the path (no permission, a full
        // disk) must not stop a job.
        Some(value) if fs::metadata(&value.text).is_ok_and(|found| !found.is_dir()) => {
            return Err(value.error("not a directory", "DIRECTORY"));
        }
        Some(value) => LogDir::Path(PathBuf::from(&value.text)),
    };
    let from_flag = args.get_nonempty("log-line-prefix-template").map(|value| value.text.clone());
    let from_variable = || env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").filter(|text| !text.is_empty());
    let prefix_template = from_flag.or_else(from_variable).map(|text| text.to_string_lossy().into_owned());
    let (role, local_ranks_filter) = (role(args)?, local_ranks_filter(args)?);
    let named = |choice: &StreamChoice| match choice {
        StreamChoice::All(_) => BTreeSet::new(),
        StreamChoice::Some(of_rank) => of_rank.keys().copied().collect(),
    };
    let filtered = local_ranks_filter.clone().into_iter().flatten().collect();
    let ranks_of_flags =
        [("redirects", named(&redirects)), ("tee", named(&tee)), ("local-ranks-filter", filtered)];
    for (flag, ranks) in ranks_of_flags {
        if let (Some(value), Some(rank)) = (args.get(flag), ranks.range(nproc_per_node..).next()) {
            let workers = count(nproc_per_node, "worker");
            warnings.push(format!("{value} names local rank {rank}, but this node has {workers}"));
        }
    }
    Ok(LogConfig {
        role,
        dir,
        redirects,
        tee,
        prefix_template: prefix_template.unwrap_or_else(|| PREFIX_TEMPLATE.to_owned()),
        local_ranks_filter,
        keep_stderr_tail: true,
        duplicate_stdout: substrings(args.text("duplicate-stdout-filters")?),
        duplicate_stderr: substrings(args.text("duplicate-stderr-filters")?),
    })
}

fn stream_choice(args: &ParsedArgs, name: &str) -> Result<StreamChoice, CliError> {
    let Some(value) = args.get(name) else { return Ok(StreamChoice::All(Streams::default())) };
    streams(value.as_str()?).ok_or_else(|| {
        value.error(
            "neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9",
            "3, or 0:3,1:2",
        )
    })
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
    let bits = ["0", "1", "2", "3"].iter().position(|digit| *digit == text)?;
    Some(Streams { stdout: bits & 1 != 0, stderr: bits & 2 != 0 })
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

fn local_ranks_filter(args: &ParsedArgs) -> Result<Option<BTreeSet<usize>>, CliError> {
    let Some(value) = args.get_nonempty("local-ranks-filter") else { return Ok(None) };
    let rank = |text: &str| integer(text).and_then(|number| usize::try_from(number).ok());
    let ranks: Option<BTreeSet<usize>> = value.as_str()?.split(',').map(rank).collect();
    ranks.map(Some).ok_or_else(|| value.error("not a list of local ranks", "0,2"))
}

pub(super) fn flight(env: Env<'_>) -> FlightDir {
    match env(vars::FLIGHT_DIR) {
        None => FlightDir::LogFolder,
        Some(folder) if folder.is_empty() => FlightDir::Disabled,
        Some(folder) => FlightDir::Path(PathBuf::from(folder)),
    }
}

/// Reads `--event-log-handler` and the environment variable LOGLEVEL.
pub(super) fn events(args: &ParsedArgs, env: Env<'_>) -> Result<EventHandler, CliError> {
    const INFO: i128 = 20;
    let Some(value) = args.get("event-log-handler") else { return Ok(EventHandler::Null) };
    match value.text.to_str() {
        Some("null") => Ok(EventHandler::Null),
        // Unlike other messages of level INFO, events are printed unless LOGLEVEL is set to a higher level.
        Some("console") if env("LOGLEVEL").is_some() && log_level(env) > INFO => Ok(EventHandler::Null),
        Some("console") => Ok(EventHandler::Console),
        _ => Err(value.error("no such handler", "console")),
    }
}

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

pub(super) fn role(args: &ParsedArgs) -> Result<String, CliError> {
    args.text_or("role", "default").map(str::to_owned)
}
