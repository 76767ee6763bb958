//! What is known of a program, and of limits, when a worker could not be started.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::{FsFlags, statvfs};

use crate::cause::{NotStarted, Program, StartFailure, Step, Surroundings, not_started};
use crate::cgroup::task_limit;
use crate::config::{FileKind, is_executable};

/// A process of the launcher's own that could not be made.
pub(crate) fn no_process(what: &str, errno: i32) -> NotStarted {
    not_started(StartFailure { step: Step::Fork, errno }, &surroundings(&[what.into()]))
}

/// For the program `argv[0]`. Of the variables those of the launcher count; what a worker gets besides is small.
pub(super) fn surroundings(argv: &[OsString]) -> Surroundings {
    let program = argv.first().cloned().unwrap_or_default();
    let size = |(name, value): (OsString, OsString)| {
        let bytes = name.len() + value.len() + 2;
        (name, bytes)
    };
    let sizes: Vec<(OsString, usize)> = std::env::vars_os().map(size).collect();
    let largest = sizes.iter().max_by_key(|(_, bytes)| *bytes);
    let limit = |resource| getrlimit(resource).ok().map(|(soft, _)| soft).filter(|soft| *soft < 1 << 60);
    let path = find(&program);
    Surroundings {
        is_here: path.is_none() && Path::new(&program).is_file(),
        program: program.to_string_lossy().into_owned(),
        file: path.map(|path| look_at(&path)),
        argument_bytes: argv.iter().map(|word| word.len() + 1).sum(),
        variable_bytes: sizes.iter().map(|(_, bytes)| bytes).sum(),
        largest: largest.map(|(name, bytes)| (name.to_string_lossy().into_owned(), *bytes)),
        tasks: task_limit(Path::new("/")),
        process_limit: limit(Resource::RLIMIT_NPROC),
        descriptor_limit: limit(Resource::RLIMIT_NOFILE),
    }
}

/// The first file of this name in PATH, also one that may not be executed; of a name with a slash, that file.
fn find(program: &OsStr) -> Option<PathBuf> {
    let exists = |path: &PathBuf| path.symlink_metadata().is_ok();
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program)).filter(exists);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(exists)
}

fn look_at(path: &Path) -> Program {
    Program {
        path: path.display().to_string(),
        kind: FileKind::of(path),
        is_executable: is_executable(path),
        is_noexec: statvfs(path).is_ok_and(|system| system.flags().contains(FsFlags::ST_NOEXEC)),
    }
}
