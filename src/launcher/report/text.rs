//! The layout of the report. Pure.

use std::time::SystemTime;

use convoke_env::ExitCause;
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::error_file::Account;
use super::{Failure, exit_code, first, signal_name};

/// Borders are as long as the longest line, but not longer than this.
const WIDTH_MAX_CHARS: usize = 60;
const NO_TRACEBACK: &str = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html";

/// The whole report, with an empty line around it and a newline at its end.
pub(super) fn report(
    title: &str,
    failures: &[Failure],
    accounts: &[Option<Account>],
    host: &str,
    zone: &TimeZone,
) -> String {
    let root = first(failures, accounts);
    let blocks: Vec<String> = failures
        .iter()
        .zip(accounts)
        .enumerate()
        .map(|(index, (failure, account))| block(index, failure, account.as_ref(), host, zone))
        .collect();
    let title = format!("{title} FAILED");
    let longest = blocks
        .iter()
        .flat_map(|block| block.lines())
        .chain([title.as_str()])
        .map(|line| line.chars().count());
    let width = longest.max().unwrap_or(0).min(WIDTH_MAX_CHARS);
    let (border, section) = ("=".repeat(width), "-".repeat(width));
    let (mut others, mut root_cause) = (String::new(), String::new());
    for (index, block) in blocks.iter().enumerate() {
        let part = if Some(index) == root { &mut root_cause } else { &mut others };
        part.push_str(block);
        part.push('\n');
    }
    if others.is_empty() {
        others.push_str("  <NO_OTHER_FAILURES>\n");
    }
    format!(
        "\n{border}\n{title}\n{section}\nFailures:\n{others}{section}\nRoot Cause (first observed failure):\n\
         {root_cause}{border}\n"
    )
}

fn block(index: usize, failure: &Failure, account: Option<&Account>, host: &str, zone: &TimeZone) -> String {
    let Failure { local_rank, rank, pid, cause, error_file, .. } = failure;
    let time = local_time(seconds(failure, account), zone);
    let code = exit_code(*cause);
    let signal = match cause {
        ExitCause::Code(_) => String::new(),
        ExitCause::Signal(signal) => format!(" ({})", signal_name(*signal).unwrap_or("<N/A>")),
    };
    let file = match (account, error_file) {
        (Some(_), Some(path)) => path.display().to_string(),
        _ => "<N/A>".to_owned(),
    };
    let told = account.map(|account| account.traceback.as_str()).filter(|text| !text.is_empty());
    let traceback = match (told, cause) {
        (Some(text), _) => text.replace('\n', "\n  "),
        (None, ExitCause::Code(_)) => NO_TRACEBACK.to_owned(),
        (None, ExitCause::Signal(number)) => {
            format!("Signal {number} ({}) received by PID {pid}", signal_name(*number).unwrap_or("<N/A>"))
        }
    };
    format!(
        "[{index}]:\n  time      : {time}\n  host      : {host}\n  rank      : {rank} (local_rank: {local_rank})\n  \
         exitcode  : {code} (pid: {pid}) {signal}\n  error_file: {file}\n  traceback : {traceback}"
    )
}

/// When a worker failed, in seconds since 1970: by its own account, else when its end was noticed.
pub(super) fn seconds(failure: &Failure, account: Option<&Account>) -> i64 {
    let noticed = || match failure.time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        Err(_) => 0,
    };
    account.and_then(|account| account.seconds).unwrap_or_else(noticed)
}

/// `2026-11-21_08:13:05`, local time.
fn local_time(seconds: i64, zone: &TimeZone) -> String {
    match Timestamp::from_second(seconds) {
        Ok(time) => time.to_zoned(zone.clone()).strftime("%Y-%m-%d_%H:%M:%S").to_string(),
        Err(_) => format!("{seconds} s"), // a worker's account may hold any number
    }
}
