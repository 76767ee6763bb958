//! Copies the output of workers from pipes to their files and, line by line, to the console.
//!
//! One thread reads all pipes of an attempt (one start of the workers). The file gets the bytes unchanged;
//! the console gets whole lines with a prefix. If a line stays unfinished for a while, its beginning is
//! written to the console anyway.
//!
//! A stderr that is neither redirected nor teed also goes through this thread, so that its last lines are
//! known when its worker fails. Its bytes stay unchanged and without prefix, and whole lines are written at
//! once.

mod copier;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use nix::sys::eventfd::{EfdFlags, EventFd};
use rustix::termios::Winsize;

use super::console::{Console, ConsoleDeadline};
use super::lines::Lines;
use super::tail::Tail;
use super::{ReportedProblems, block_file_size_signal};
use crate::config::Streams;
use copier::{Copier, Outputs};

/// Time after which an unfinished line (without newline) of a teed stream is written to the console.
const PARTIAL_AFTER: Duration = Duration::from_secs(2);
/// Time after which an unfinished line of a stderr that passes unchanged is written to the console. It is
/// counted from the last output to the console. It suffices for a worker that loses its CPU in the middle of
/// a line, and is too short for a user to notice.
const RAW_PARTIAL_AFTER: Duration = Duration::from_millis(200);
/// Longest time before an unfinished line of a stderr that passes unchanged is written to the console, while
/// other workers keep writing.
const RAW_PARTIAL_MAX: Duration = Duration::from_secs(1);

/// A worker's standard output or standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    pub(super) fn of(self, streams: Streams) -> bool {
        match self {
            Self::Stdout => streams.stdout,
            Self::Stderr => streams.stderr,
        }
    }

    pub(super) fn file_name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout.log",
            Self::Stderr => "stderr.log",
        }
    }
}

/// The stdout or stderr of one worker, read from a pipe.
#[derive(Debug)]
pub(super) struct Source {
    stream: Stream,
    pipe: File,
    /// The log file and its path; `None` if there is none.
    file: Option<(File, PathBuf)>,
    prefix: Vec<u8>,
    /// True if the output goes to the console and to the duplicate filters.
    on_console: bool,
    mode: ConsoleMode,
    /// Buffer that keeps the last bytes, if the report needs them.
    pub(super) tail: Option<Tail>,
    /// Set if the pipe is a pseudo-terminal; the inner value is the size last set.
    terminal: Option<Option<Winsize>>,
    /// Time at which the last bytes arrived.
    read_at: Instant,
}

/// How the output of a worker is written to the console.
#[derive(Debug)]
enum ConsoleMode {
    /// Line by line, each with a prefix.
    Lines(Lines),
    /// Unchanged. `held` is the unfinished line, which is written when it has been held too long, since
    /// `since`.
    Raw { held: Vec<u8>, since: Instant },
}

impl Source {
    pub(super) fn new(
        stream: Stream,
        pipe: OwnedFd,
        file: Option<(File, PathBuf)>,
        prefix: Vec<u8>,
        on_console: bool,
    ) -> Self {
        let (pipe, mode) = (File::from(pipe), ConsoleMode::Lines(Lines::default()));
        let read_at = Instant::now();
        Self { stream, pipe, file, prefix, on_console, mode, tail: None, terminal: None, read_at }
    }

    /// Creates a source for a stderr that passes to the console unchanged.
    pub(super) fn raw(pipe: OwnedFd, on_console: bool) -> Self {
        let mode = ConsoleMode::Raw { held: Vec::new(), since: Instant::now() };
        Self { mode, ..Self::new(Stream::Stderr, pipe, None, Vec::new(), on_console) }
    }

    /// Creates a source for a stderr that passes to the console unchanged, read from a pseudo-terminal.
    pub(super) fn terminal(pty: OwnedFd) -> Self {
        Self { terminal: Some(None), ..Self::raw(pty, true) }
    }

    /// Returns the time at which the unfinished line must be written to the console; `None` if there is no
    /// unfinished line. `shown_at` is the time of the last output that passed to the console unchanged.
    fn partial_at(&self, shown_at: Instant) -> Option<Instant> {
        match &self.mode {
            ConsoleMode::Lines(lines) => lines.has_partial().then(|| self.read_at + PARTIAL_AFTER),
            ConsoleMode::Raw { held, since } => {
                let quiet = shown_at.max(*since) + RAW_PARTIAL_AFTER;
                (!held.is_empty()).then(|| quiet.min(*since + RAW_PARTIAL_MAX))
            }
        }
    }

    #[cfg(test)]
    pub(super) fn set_file(&mut self, file: File, path: &str) {
        self.file = Some((file, path.into()));
    }
}

/// Longest time to wait until the copying thread has resized the workers' terminals.
const RESIZE_TIMEOUT: Duration = Duration::from_millis(100);

/// Controls the thread that copies the workers' output. If this is dropped, the thread continues until all
/// pipes are closed.
#[derive(Debug)]
pub(crate) struct Tee {
    /// Wakes the thread; the launcher writes to it after each request.
    wake: EventFd,
    requests: mpsc::Sender<Request>,
    /// Numbers of the requests that the thread has completed: [`Request::ReadPending`] and
    /// [`Request::Drain`]. Closed when the thread ends.
    answers: mpsc::Receiver<u64>,
    asked: Cell<u64>,
    /// Numbers of completed writes to the consoles.
    writes: [Arc<AtomicU64>; 2],
}

/// A request of the launcher to the copying thread.
#[derive(Debug, Clone, Copy)]
enum Request {
    /// Read all bytes that a pipe can hold now, resize the workers' terminals to the console's size, answer
    /// with this number, and continue.
    ReadPending(u64),
    /// Copy the available bytes and wait for the consoles until the deadline. Then answer with this number,
    /// and continue.
    Drain(u64, Instant),
    /// Copy the available bytes, wait for the consoles until the deadline, and end the thread.
    Finish(Instant),
}

impl Tee {
    pub(super) fn start(
        sources: Vec<Source>,
        filtered: [Option<File>; 2],
        filters: [Vec<Finder<'static>>; 2],
        consoles: [Console; 2],
        reported: Arc<ReportedProblems>,
    ) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let theirs = File::from(wake.as_fd().try_clone_to_owned()?);
        let (answer, answers) = mpsc::channel();
        let (requests, asked) = mpsc::channel();
        let writes = [consoles[0].writes(), consoles[1].writes()];
        let outputs = Outputs { filtered, filters, consoles };
        let copier = Copier::new(sources, outputs, reported);
        // When the thread ends, `answer` is dropped, which closes `answers`.
        thread::Builder::new().name("tee".to_owned()).spawn(move || {
            block_file_size_signal();
            copier.run(theirs, &asked, &answer);
        })?;
        Ok(Self { wake, requests, answers, asked: Cell::new(0), writes })
    }

    /// Copies the workers' output and waits until it is written. To be called when all workers have ended.
    /// Waits beyond the deadline only for a slow console that still accepts data. The thread also copies
    /// later output of the workers' descendants.
    pub(crate) fn drain(&self, deadline: Instant) {
        let number = self.ask(|number| Request::Drain(number, deadline));
        self.wait_for_consoles(Some(number), deadline);
    }

    /// Reads the output that is already in the pipes, at most for `limit`, so that the last lines of an ended
    /// worker are known. To be called while other workers continue. Waits for no console.
    pub(crate) fn read_pending(&self, limit: Duration) {
        let number = self.ask(Request::ReadPending);
        let deadline = Instant::now() + limit;
        while let Ok(answered) = self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if answered == number {
                return;
            }
        }
    }

    /// Resizes the workers' terminals. To be called when the console was resized.
    pub(crate) fn resize(&self) {
        self.read_pending(RESIZE_TIMEOUT);
    }

    /// Copies the remaining output like [`Tee::drain`], then ends the thread. Processes that still hold such
    /// a pipe then cannot write to it.
    pub(crate) fn finish(self, deadline: Instant) {
        self.ask(|_| Request::Finish(deadline));
        self.wait_for_consoles(None, deadline);
    }

    /// Makes a request with the next number, and returns this number.
    fn ask(&self, request: impl FnOnce(u64) -> Request) -> u64 {
        let number = self.asked.get() + 1;
        self.asked.set(number);
        // If the thread has already ended, `answers` is closed, which the caller notices.
        let _ = self.requests.send(request(number));
        let _ = self.wake.write(1);
        number
    }

    /// Waits for the answer with this number, or with `None` for the end of the thread.
    fn wait_for_consoles(&self, number: Option<u64>, deadline: Instant) {
        let mut deadline = ConsoleDeadline::new(deadline);
        let writes = || self.writes.iter().map(|writes| writes.load(Ordering::Relaxed)).sum::<u64>();
        while let Some(left) = deadline.left(writes()) {
            match self.answers.recv_timeout(left) {
                Ok(answered) if Some(answered) == number => return,
                // An answer to a `drain` that timed out may still be queued.
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Returns consoles for the launcher's own stdout and stderr. Stderr is locked during each write, so that the
/// launcher's own messages do not come in the middle of a chunk.
pub(super) fn consoles() -> io::Result<[Console; 2]> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    Ok([Console::new("stdout", Box::new(stdout)), Console::new("stderr", Box::new(io::stderr()))])
}
