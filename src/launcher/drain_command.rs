//! `convoke drain DIR`: asks running launchers to drain their jobs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::agent::REQUEST_FILE;
use crate::formatting::count;
use crate::messages::print_message;

/// Longest wait for the launchers, which look for a request every second.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time between two looks of a launcher, with a margin.
const LOOK_INTERVAL: Duration = Duration::from_millis(1200);
const POLL: Duration = Duration::from_millis(20);
const USAGE: &str = "convoke drain DIR: asks the launchers whose log folders are DIR, or lie in DIR (--log-dir), to drain their jobs";

/// Runs `convoke drain` if the command line asks for it. Returns `None` if `drain` is a program to launch.
pub(crate) fn run(mut words: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let name = OsStr::new("drain");
    if words.next().as_deref() != Some(name) || Path::new(name).exists() {
        return None;
    }
    let (Some(folder), None) = (words.next(), words.next()) else {
        print_message(&format!("error: {USAGE}"));
        return Some(ExitCode::from(2));
    };
    Some(match request(Path::new(&folder)) {
        Ok(text) => {
            print_message(&text);
            ExitCode::SUCCESS
        }
        Err(error) => {
            print_message(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    })
}

/// Writes a request into each log folder and waits until a launcher removes one.
fn request(folder: &Path) -> Result<String, String> {
    let folders = log_folders(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if folders.is_empty() {
        return Err(format!("{} is no log folder of convoke and contains none\n  {USAGE}", folder.display()));
    }
    let mut requests = Vec::new();
    for file in folders.iter().map(|folder| folder.join(REQUEST_FILE)) {
        fs::write(&file, b"").map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        requests.push(file);
    }
    let count_begun = || requests.iter().filter(|file| !file.exists()).count();
    let wait = |enough: usize, timeout: Duration| {
        let deadline = Instant::now() + timeout;
        while count_begun() < enough && Instant::now() < deadline {
            sleep(POLL);
        }
    };
    wait(1, TIMEOUT);
    if count_begun() > 0 {
        // Launchers of other jobs look within their interval.
        wait(requests.len(), LOOK_INTERVAL);
    }
    let begun = count_begun();
    requests.iter().for_each(|file| drop(fs::remove_file(file)));
    match begun {
        0 => Err(format!(
            "no launcher has looked into {} within {} s\n  try: is the job running, and is this its --log-dir, on a file system \
             that its nodes share?",
            folder.display(),
            TIMEOUT.as_secs()
        )),
        begun => Ok(format!("{} has begun the drain", count(begun, "launcher"))),
    }
}

/// Returns `folder` if it is a launcher's log folder, else those that lie in it.
fn log_folders(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let is_one = |path: &Path| path.join("attempt_0").is_dir();
    if is_one(folder) {
        return Ok(vec![folder.to_owned()]);
    }
    let entries = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    Ok(entries.filter(|path| is_one(path)).collect())
}
