//! Routes the output of the workers to the console, to files, or to both.
//!
//! [`RunDir`] is the directory of one launcher. [`AttemptDir`] is the directory of one attempt (one start of
//! the workers) and provides the descriptors of each worker. Without tee, the worker itself writes to its
//! file. A teed stream is a pipe that [`Tee`] reads. A stderr that goes to the console is also such a pipe,
//! since the report needs its last lines if the worker fails. If the console is a terminal, the worker gets a
//! pseudo-terminal instead of the pipe.
//!
//! A problem with log files must not end the job. The launcher reports it once, and the job continues without
//! files.

mod console;
mod lines;
mod pty;
mod tail;
mod tee;
#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memchr::memmem::Finder;
use nix::sys::signal::{SigSet, Signal};

use crate::config::{LogConfig, LogDir, StreamChoice, Streams, expand};
use crate::host_name::host_name;
use crate::messages::print_message;
use console::Console;
pub(crate) use tail::StderrTail;
use tail::Tail;
pub(crate) use tee::Tee;
use tee::{Source, Stream};

const RANDOM_CHARS: usize = 8;
const PIPE_BYTES: i32 = 256 << 10;

/// The workers' output cannot be routed: the operating system refuses a pipe, a thread or /dev/null.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub(crate) struct LogError {
    /// The operation that failed.
    what: &'static str,
    source: io::Error,
}

/// Returns a function that adds the failed operation to an error.
fn system(what: &'static str) -> impl FnOnce(io::Error) -> LogError {
    move |source| LogError { what, source }
}

/// The log directory of one launcher, `<base>/<run id>_<8 random>`.
#[derive(Debug)]
pub(crate) struct RunDir {
    settings: Arc<Settings>,
    /// `None` with `--log-dir=/dev/null`, or if the directory could not be made.
    path: Option<PathBuf>,
}

/// Settings that all attempts of a launcher share.
#[derive(Debug)]
struct Settings {
    config: LogConfig,
    host: String,
    /// True if the launcher's own stderr is a terminal. A worker's stderr is then a terminal too, so that
    /// colours and progress bars work.
    terminal: bool,
    reported: Arc<ReportedProblems>,
}

/// Problems that were already reported. Each kind is reported once in the life of a launcher.
#[derive(Debug, Default)]
struct ReportedProblems {
    /// True if a problem with log files was reported.
    files: AtomicBool,
    /// True if a problem with the launcher's stdout was reported. A failing stderr cannot be reported
    /// anywhere.
    stdout: AtomicBool,
}

/// The log directory of one attempt, `attempt_<restarts>`, and the output streams of its workers.
#[derive(Debug)]
pub(crate) struct AttemptDir {
    settings: Arc<Settings>,
    path: Option<PathBuf>,
    sources: Vec<Source>,
    filtered: [Option<File>; 2],
}

/// Descriptors and paths for one worker's output.
#[derive(Debug)]
pub(crate) struct WorkerStdio {
    pub(crate) stdout: StdioTarget,
    pub(crate) stderr: StdioTarget,
    /// Path for TORCHELASTIC_ERROR_FILE; `None` if there are no log files.
    pub(crate) error_file: Option<PathBuf>,
    /// Source of the last lines of the worker's standard error.
    pub(crate) stderr_tail: StderrTail,
}

/// Destination of a worker's stdout or stderr.
#[derive(Debug)]
pub(crate) enum StdioTarget {
    /// The stdout or stderr that the worker inherits from the launcher.
    Inherit,
    /// /dev/null: the output is discarded.
    Null(OwnedFd),
    /// A log file.
    File(OwnedFd),
    /// The worker's end of a pipe or pseudo-terminal that [`Tee`] reads. The launcher closes this end once
    /// the worker has it.
    Pipe(OwnedFd),
}

impl StdioTarget {
    /// Returns the descriptor to give to the worker; `None` if it inherits the launcher's.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Inherit => None,
            Self::Null(fd) | Self::File(fd) | Self::Pipe(fd) => Some(fd.as_fd()),
        }
    }
}

impl RunDir {
    /// Creates the directory. If that fails, the launcher warns, and there will be no log files.
    pub(crate) fn create(config: &LogConfig, run_id: &str) -> Self {
        Self::create_on(config, run_id, io::stderr().is_terminal())
    }

    fn create_on(config: &LogConfig, run_id: &str, terminal: bool) -> Self {
        let (host, reported) = (host_name(), Arc::default());
        let settings = Arc::new(Settings { config: config.clone(), host, terminal, reported });
        let (base, made) = match &config.dir {
            LogDir::Disabled => return Self { settings, path: None },
            LogDir::Temporary => {
                let base = std::env::temp_dir();
                let made = make_random(&base, &format!("torchelastic_{run_id}"));
                (base, made)
            }
            LogDir::Path(base) => {
                let made = fs::create_dir_all(base).and_then(|()| make_random(base, run_id));
                (base.clone(), made.map_err(|error| clarify_error(error, base)))
            }
        };
        let path = made.inspect_err(|error| settings.warn_no_files(&base, error)).ok();
        Self { settings, path }
    }

    /// Returns the directory; `None` if the launcher writes no log files.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the directory if it is in TMPDIR and disappears when it stays empty.
    fn temporary(&self) -> Option<&Path> {
        self.path().filter(|_| matches!(self.settings.config.dir, LogDir::Temporary))
    }

    /// Removes the directory of a worker if it is empty and in TMPDIR. To be called when the worker has
    /// succeeded: a file system may take 0.1 ms, in which the other workers end.
    pub(crate) fn worker_succeeded(&self, restarts: u32, local_rank: usize) {
        if let Some(path) = self.temporary() {
            let _ = fs::remove_dir(path.join(attempt_name(restarts)).join(local_rank.to_string()));
        }
    }

    /// Removes empty directories in TMPDIR. To be called when the job has ended.
    pub(crate) fn remove_empty(&self) {
        let Some(path) = self.temporary() else { return };
        // This suffices if all workers of the first attempt succeeded and wrote no files.
        let removed = fs::remove_dir(path.join(attempt_name(0))).and_then(|()| fs::remove_dir(path));
        if removed.is_err() {
            remove_empty(path);
        }
    }

    /// Warns if the disk may have been too full for the log files. To be called when the workers of an
    /// attempt have ended. If a worker writes its file itself, only it sees the error, and it may be unable
    /// to report it.
    pub(crate) fn check_space(&self) {
        let Some(path) = &self.path else { return };
        if self.settings.config.redirects == StreamChoice::All(Streams::default()) {
            return;
        }
        let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        if let Some(error) = probe_disk_space(path).err().filter(|error| full.contains(&error.kind())) {
            self.settings.warn_once(&format!(
                "the log files in {} are cut short: {error}; free some space, or give another --log-dir",
                path.display()
            ));
        }
    }

    /// Creates the directory of an attempt, with one directory for each of `nproc` local ranks. An existing
    /// one is removed before. A problem is reported, and there will be no log files.
    pub(crate) fn attempt(&self, restarts: u32, nproc: usize) -> AttemptDir {
        let settings = Arc::clone(&self.settings);
        let mut attempt = AttemptDir { settings, path: None, sources: Vec::new(), filtered: [None, None] };
        let Some(run) = &self.path else { return attempt };
        let path = run.join(attempt_name(restarts));
        match create_attempt_dir(&path, nproc, &self.settings.config) {
            Ok(filtered) => {
                attempt.path = Some(path);
                attempt.filtered = filtered;
            }
            Err(error) => self.settings.warn_no_files(&path, &error),
        }
        attempt
    }
}

/// Blocks SIGXFSZ in a thread that writes files. A write beyond `ulimit -f` then fails, and the signal does
/// not end the launcher.
fn block_file_size_signal() {
    // If blocking fails, the signal ends the launcher, as it does other programs.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Replaces the error "File exists" by "Not a directory" if `base` exists and is no directory.
fn clarify_error(error: io::Error, base: &Path) -> io::Error {
    if error.kind() == io::ErrorKind::AlreadyExists && fs::metadata(base).is_ok_and(|found| !found.is_dir()) {
        return io::Error::from_raw_os_error(nix::libc::ENOTDIR);
    }
    error
}

fn attempt_name(restarts: u32) -> String {
    format!("attempt_{restarts}")
}

/// Removes `directory` if it contains only empty directories. Entries that cannot be removed stay.
fn remove_empty(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(directory);
}

/// Checks for free space: writes a block to an unnamed file, which the system removes at once.
fn probe_disk_space(directory: &Path) -> io::Result<()> {
    const BLOCK: [u8; 4096] = [0; 4096];
    OpenOptions::new().write(true).custom_flags(nix::libc::O_TMPFILE).open(directory)?.write_all(&BLOCK)
}

/// Makes the directory `<base>/<prefix>_<8 random>`. Returns its absolute path, since workers may change
/// their working directory.
fn make_random(base: &Path, prefix: &str) -> io::Result<PathBuf> {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let prefix = prefix.replace('/', "_");
    for _ in 0..100 {
        let mut random = [0; RANDOM_CHARS];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let random: String = random.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect();
        let path = std::path::absolute(base)?.join(format!("{prefix}_{random}"));
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| path),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Makes the directory of an attempt. Returns the files for lines that match the duplicate filters of stdout
/// and stderr.
fn create_attempt_dir(path: &Path, nproc: usize, config: &LogConfig) -> io::Result<[Option<File>; 2]> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir(path)?;
    for local_rank in 0..nproc {
        fs::create_dir(path.join(local_rank.to_string()))?;
    }
    let open =
        |filters: &[String], name: &str| (!filters.is_empty()).then(|| append(&path.join(name))).transpose();
    Ok([
        open(&config.duplicate_stdout, "filtered_stdout.log")?,
        open(&config.duplicate_stderr, "filtered_stderr.log")?,
    ])
}

/// Opens a log file for appending, so that `truncate` frees its space while the job is running.
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

impl AttemptDir {
    /// Returns the descriptors and paths for the output of the worker with this local and global rank. To be
    /// called once for each worker.
    pub(crate) fn worker(&mut self, local_rank: usize, rank: usize) -> Result<WorkerStdio, LogError> {
        let (stdout, _) = self.target(Stream::Stdout, local_rank, rank)?;
        let (stderr, stderr_tail) = self.target(Stream::Stderr, local_rank, rank)?;
        let error_file = self.dir(local_rank).map(|dir| dir.join("error.json"));
        Ok(WorkerStdio { stdout, stderr, error_file, stderr_tail })
    }

    /// Starts the thread that copies the output of teed streams; `None` if there are none.
    pub(crate) fn start_tee(self) -> Result<Option<Tee>, LogError> {
        if self.sources.is_empty() {
            return Ok(None);
        }
        let start = || self.start_tee_on(tee::consoles()?).map(Some);
        start().map_err(system("cannot start copying output"))
    }

    fn start_tee_on(self, consoles: [Console; 2]) -> io::Result<Tee> {
        let config = &self.settings.config;
        let filters = [&config.duplicate_stdout, &config.duplicate_stderr]
            .map(|texts| texts.iter().map(|text| Finder::new(text.as_bytes()).into_owned()).collect());
        Tee::start(self.sources, self.filtered, filters, consoles, Arc::clone(&self.settings.reported))
    }

    fn dir(&self, local_rank: usize) -> Option<PathBuf> {
        self.path.as_ref().map(|path| path.join(local_rank.to_string()))
    }

    fn target(
        &mut self,
        stream: Stream,
        local_rank: usize,
        rank: usize,
    ) -> Result<(StdioTarget, StderrTail), LogError> {
        let settings = Arc::clone(&self.settings);
        let config = &settings.config;
        let chosen = |choice: &StreamChoice| stream.of(streams_of(choice, local_rank));
        let on_console = config.local_ranks_filter.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        let (teed, redirected) = (chosen(&config.tee), chosen(&config.redirects));
        let path = self.dir(local_rank).map(|dir| dir.join(stream.file_name()));
        let file = path.as_ref().filter(|_| teed || redirected).and_then(|path| self.open(path));
        let tail_wanted = stream == Stream::Stderr && config.keep_stderr_tail;
        if teed {
            let (ours, theirs) = pipe()?;
            let prefix = prefix(config, &settings.host, local_rank, rank);
            let source = Source::new(stream, ours, file.zip(path), prefix, on_console);
            return Ok(self.add_source(source, theirs, tail_wanted));
        }
        if let (Some(file), Some(path)) = (file, path) {
            return Ok((StdioTarget::File(file.into()), StderrTail::File(path)));
        }
        // If no log file could be made, redirected output goes to the console rather than being lost.
        let inherit = on_console && !(redirected && config.dir == LogDir::Disabled);
        let nowhere = redirected && !inherit;
        if tail_wanted && !nowhere {
            let terminal = if inherit && settings.terminal { pty::open().ok() } else { None };
            let (source, theirs) = match terminal {
                Some((ours, theirs)) => (Source::terminal(ours), theirs),
                None => {
                    let (ours, theirs) = pipe()?;
                    (Source::raw(ours, on_console), theirs)
                }
            };
            return Ok(self.add_source(source, theirs, true));
        }
        if inherit {
            return Ok((StdioTarget::Inherit, StderrTail::Unknown));
        }
        let null = OpenOptions::new().read(true).write(true).open("/dev/null");
        let null = null.map(|file| StdioTarget::Null(file.into())).map_err(system("/dev/null"))?;
        Ok((null, StderrTail::Unknown))
    }

    /// Adds a source that keeps its last bytes if `tail_wanted`. `theirs` is the worker's end of its pipe.
    fn add_source(
        &mut self,
        mut source: Source,
        theirs: OwnedFd,
        tail_wanted: bool,
    ) -> (StdioTarget, StderrTail) {
        source.tail = tail_wanted.then(Tail::default);
        let tail = source.tail.clone().map_or(StderrTail::Unknown, StderrTail::Stream);
        self.sources.push(source);
        (StdioTarget::Pipe(theirs), tail)
    }

    fn open(&self, path: &Path) -> Option<File> {
        let warning = |error| format!("cannot write {}: {error}; the job continues", path.display());
        append(path).map_err(|error| self.settings.warn_once(&warning(error))).ok()
    }
}

impl Settings {
    /// Prints a warning on stderr about log files, if it is the first one.
    fn warn_once(&self, what: &str) {
        if !self.reported.files.swap(true, Ordering::Relaxed) {
            print_message(&format!("warning: {what}"));
        }
    }

    /// Warns that there will be no log files. Says where the output goes instead, and the remedy.
    fn warn_no_files(&self, directory: &Path, error: &io::Error) {
        let redirected = self.config.redirects != StreamChoice::All(Streams::default());
        let instead = if redirected { "with its output on the console" } else { "without them" };
        self.warn_once(&format!(
            "no log files: cannot make a directory in {}: {error}; the job continues {instead}; give a --log-dir that can be written to, or /dev/null for none",
            directory.display()
        ));
    }
}

fn streams_of(choice: &StreamChoice, local_rank: usize) -> Streams {
    match choice {
        StreamChoice::All(streams) => *streams,
        StreamChoice::Some(of_rank) => of_rank.get(&local_rank).copied().unwrap_or_default(),
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd), LogError> {
    let (ours, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
        .map_err(|error| system("cannot create a pipe for a worker's output")(error.into()))?;
    // A larger pipe means fewer switches between worker and launcher. If the system refuses the size
    // (pipe-user-pages-soft), the pipe still works.
    let _ = nix::fcntl::fcntl(&ours, nix::fcntl::FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    Ok((ours, theirs))
}

/// Returns the prefix of each teed line of a worker.
fn prefix(config: &LogConfig, host: &str, local_rank: usize, rank: usize) -> Vec<u8> {
    let (local_rank, rank) = (local_rank.to_string(), rank.to_string());
    expand(config.prefix_template.as_bytes(), |name| match name {
        "role_name" => Some(config.role.as_str()),
        "local_rank" => Some(local_rank.as_str()),
        "rank" => Some(rank.as_str()),
        "hostname" => Some(host),
        _ => None,
    })
}
