//! Collects evidence about the program and about system limits when a worker could not be started.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use convoke_env::host::cgroup::task_limit;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::{FsFlags, statvfs};

use crate::cause::{NotStarted, ProgramFile, StartContext, StartFailure, StartStep, explain_start_failure};
use crate::config::{FileKind, is_executable};
use crate::os::candidate_paths;

/// Returns the error for a process of the launcher itself, such as the guard, that could not be created.
pub(crate) fn process_creation_error(what: &str, errno: i32) -> NotStarted {
    explain_start_failure(StartFailure { step: StartStep::Fork, errno }, &start_context(&[what.into()]))
}

/// Inspects the program `argv[0]` and the limits that apply to its start. Only the launcher's own environment
/// variables are counted: those added for a worker are small.
pub(super) fn start_context(argv: &[OsString]) -> StartContext {
    let program = argv.first().cloned().unwrap_or_default();
    let size = |(name, value): (OsString, OsString)| {
        let bytes = name.len() + value.len() + 2;
        (name, bytes)
    };
    let sizes: Vec<(OsString, usize)> = std::env::vars_os().map(size).collect();
    let largest = sizes.iter().max_by_key(|(_, bytes)| *bytes);
    let limit = |resource| getrlimit(resource).ok().map(|(soft, _)| soft).filter(|soft| *soft < 1 << 60);
    let path = find(&program);
    StartContext {
        in_current_folder: path.is_none() && Path::new(&program).is_file(),
        program: program.to_string_lossy().into_owned(),
        file: path.map(|path| inspect(&path)),
        argument_bytes: argv.iter().map(|word| word.len() + 1).sum(),
        variable_bytes: sizes.iter().map(|(_, bytes)| bytes).sum(),
        largest: largest.map(|(name, bytes)| (name.to_string_lossy().into_owned(), *bytes)),
        tasks: task_limit(Path::new("/")),
        process_limit: limit(Resource::RLIMIT_NPROC),
        descriptor_limit: limit(Resource::RLIMIT_NOFILE),
    }
}

/// Returns the first existing path in the search for the program, even if that file is not executable.
fn find(program: &OsStr) -> Option<PathBuf> {
    candidate_paths(program).into_iter().map(PathBuf::from).find(|path| path.symlink_metadata().is_ok())
}

fn inspect(path: &Path) -> ProgramFile {
    ProgramFile {
        path: path.display().to_string(),
        kind: FileKind::of(path),
        is_executable: is_executable(path),
        is_noexec: statvfs(path).is_ok_and(|system| system.flags().contains(FsFlags::ST_NOEXEC)),
    }
}
