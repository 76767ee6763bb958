//! Checks the folders that a job writes to: 4 KiB in each, free space and free inodes.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use super::super::peer::NodeResult;
use super::super::problem::Problem;
use crate::config::{Config, FlightDir, LogDir};
use crate::formatting::hex;

const MIB: u64 = 1 << 20;
/// Free space and free inodes that a job should find.
const SPACE_WANTED: u64 = 256 * MIB;
const INODES_WANTED: u64 = 1000;

pub(super) fn check(config: &Config, host: &str) -> NodeResult {
    // Programs create the other folders, and expect the first.
    let mut folders = vec![("temporary files (TMPDIR)", std::env::temp_dir(), true)];
    match &config.logs.dir {
        LogDir::Path(path) => folders.push(("log files (--log-dir)", path.clone(), false)),
        LogDir::Temporary | LogDir::Disabled => {}
    }
    if let FlightDir::Path(path) = &config.flight {
        folders.push(("recordings (CONVOKE_FLIGHT_DIR)", path.clone(), false));
    }
    let models = std::env::var_os("HF_HOME").filter(|folder| !folder.is_empty());
    folders.extend(models.map(|folder| ("Hugging Face's cache (HF_HOME)", PathBuf::from(folder), false)));
    let problems = folders
        .iter()
        .flat_map(|(what, folder, must_exist)| check_folder(what, folder, *must_exist, host))
        .collect();
    NodeResult { problems, ..NodeResult::default() }
}

/// Checks a folder, or the nearest folder above it that exists unless `must_exist`.
fn check_folder(what: &str, folder: &Path, must_exist: bool, host: &str) -> Vec<Problem> {
    let above = || folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    let existing = if must_exist { folder } else { above() };
    let shown = folder.display();
    if let Err(error) = write(existing) {
        let text = format!("cannot write {what} to {shown}: {}", describe(&error));
        let remedy = "free space there, correct its permissions, or name another folder";
        return vec![Problem::fail("disk", host, text, remedy)];
    }
    let Ok(state) = statvfs(existing) else { return Vec::new() };
    let mut problems = Vec::new();
    let free = state.blocks_available() * state.fragment_size();
    if free < SPACE_WANTED {
        let text = format!("{shown} for {what} has {} MiB left", free / MIB);
        problems.push(Problem::warning("disk", host, text, "free space there, or name another folder"));
    }
    // File systems without a fixed number of inodes report 0 of 0.
    if state.files() > 0 && state.files_available() < INODES_WANTED {
        let text = format!("{shown} for {what} has {} inodes left", state.files_available());
        problems.push(Problem::warning(
            "disk",
            host,
            text,
            "remove small files there: df -i shows the inodes",
        ));
    }
    problems
}

/// Writes 4 KiB through to the disk, and removes them. Hosts that share the file system use different names.
fn write(folder: &Path) -> std::io::Result<()> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(std::io::Error::other)?;
    let path = folder.join(format!(".convoke-check-{}", hex(&random)));
    let written = fs::File::create(&path).and_then(|mut file| {
        file.write_all(&[b'x'; 4096])?;
        file.sync_all()
    });
    let removed = fs::remove_file(&path);
    written.and(removed)
}

fn describe(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::StorageFull => "no space is left".to_owned(),
        std::io::ErrorKind::QuotaExceeded => "the quota is used up".to_owned(),
        std::io::ErrorKind::ReadOnlyFilesystem => "the file system is read-only".to_owned(),
        std::io::ErrorKind::PermissionDenied => "no permission".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_that_takes_no_file_is_named() {
        let found = check_folder("log files", Path::new("/proc/self/logs"), false, "h1");
        let line = found[0].lines();
        assert!(line.starts_with("FAIL h1: cannot write log files to /proc/self/logs: "), "{line}");
    }

    #[test]
    fn folder_that_does_not_exist_yet_is_no_problem() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("a/b");
        assert_eq!(check_folder("log files", &missing, false, "h1"), []);
        let expected = check_folder("temporary files", &missing, true, "h1");
        assert!(expected[0].text.starts_with("cannot write temporary files to "), "{expected:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
