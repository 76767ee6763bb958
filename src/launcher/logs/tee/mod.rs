//! Copies the output of workers from pipes to their files and, line by line, to the console.
//!
//! One thread reads all pipes of an attempt. The file gets the bytes unchanged; the console gets whole lines
//! with a prefix. A line that lacks its newline for a while is shown anyway.
//!
//! A stderr that is neither redirected nor teed also passes through here, so that its last lines are known
//! when its worker fails. Its bytes stay unchanged and without prefix, and whole lines are written at once.

mod copier;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use nix::sys::eventfd::{EfdFlags, EventFd};
use rustix::termios::Winsize;

use super::console::{Console, ConsoleDeadline, Writes};
use super::lines::Lines;
use super::tail::Tail;
use super::{ReportedProblems, block_file_size_signal};
use crate::config::Streams;
use copier::{Copier, Outputs};

/// The time after which a line without a newline is shown.
const PARTIAL_AFTER: Duration = Duration::from_secs(2);
/// The time after which an unfinished line of an unchanged stderr is shown, counted from the last output to
/// the console. It suffices for a worker that loses its CPU in the middle of a line. It is too short for a
/// user to notice.
const RAW_PARTIAL_AFTER: Duration = Duration::from_millis(200);
/// The maximum time before an unfinished line of an unchanged stderr is shown while other sources keep
/// writing.
const RAW_PARTIAL_MAX: Duration = Duration::from_secs(1);

/// Standard output or standard error.
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

/// One stream of one worker.
#[derive(Debug)]
pub(super) struct Source {
    stream: Stream,
    pipe: File,
    /// Its log file, if there can be one, and the path of it.
    file: Option<(File, PathBuf)>,
    prefix: Vec<u8>,
    /// Shown on the console and to the duplicate filters.
    on_console: bool,
    mode: ConsoleMode,
    /// The buffer that keeps the last bytes of the stream.
    tail: Option<Tail>,
    /// It is a terminal, of this size.
    terminal: Option<Option<Winsize>>,
    /// The time at which its last bytes arrived.
    read_at: Instant,
}

/// The mode in which a stream reaches the console.
#[derive(Debug)]
enum ConsoleMode {
    /// Line by line, with prefix.
    Lines(Lines),
    /// Unchanged. Holds the unfinished line until `since` is too long ago.
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
        Self {
            stream,
            pipe,
            file,
            prefix,
            on_console,
            mode,
            tail: None,
            terminal: None,
            read_at: Instant::now(),
        }
    }

    /// A stderr that passes through unchanged.
    pub(super) fn raw(pipe: OwnedFd, on_console: bool) -> Self {
        let mode = ConsoleMode::Raw { held: Vec::new(), since: Instant::now() };
        Self { mode, ..Self::new(Stream::Stderr, pipe, None, Vec::new(), on_console) }
    }

    /// A stderr that passes through unchanged from a pseudo-terminal.
    pub(super) fn terminal(pty: OwnedFd) -> Self {
        Self { terminal: Some(None), ..Self::raw(pty, true) }
    }

    /// Keeps the last bytes in `tail`.
    pub(super) fn with_tail(self, tail: Tail) -> Self {
        Self { tail: Some(tail), ..self }
    }

    /// Returns the time at which an unfinished line is to be shown; `None` if there is none.
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

/// The time limit for the thread to resize the workers' terminals.
const RESIZE_TIMEOUT: Duration = Duration::from_millis(100);

/// The thread that copies. Dropping it lets the thread go on until all pipes are closed.
#[derive(Debug)]
pub(crate) struct Tee {
    /// The launcher writes to it after each request.
    wake: EventFd,
    requests: mpsc::Sender<Request>,
    /// One answer to each [`Request::ReadPending`] and [`Request::Drain`]; closed when the thread ends.
    answers: mpsc::Receiver<u64>,
    asked: Cell<u64>,
    writes: [Writes; 2],
}

/// A request to the thread.
#[derive(Debug, Clone, Copy)]
enum Request {
    /// Read all that a pipe can hold now, resize terminals to the console's size, answer with this number,
    /// and continue.
    ReadPending(u64),
    /// Copy the available bytes, answer with this number, and continue.
    Drain(u64, Instant),
    /// Copy the available bytes, and end.
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
        // The thread's end closes `answer`.
        thread::Builder::new().name("tee".to_owned()).spawn(move || {
            block_file_size_signal();
            copier.run(theirs, &asked, &answer);
        })?;
        Ok(Self { wake, requests, answers, asked: Cell::new(0), writes })
    }

    /// Called when all workers have ended. Copies their output and waits for the copy. Beyond the deadline
    /// it waits only for a slow console that still accepts data. The thread also copies later output of
    /// their descendants.
    pub(crate) fn drain(&self, deadline: Instant) {
        let number = self.next_number();
        self.ask(Request::Drain(number, deadline));
        let mut deadline = ConsoleDeadline::new(deadline);
        while let Some(left) = deadline.left(self.writes.iter().map(Writes::count).sum()) {
            match self.answers.recv_timeout(left) {
                Ok(answered) if answered == number => return,
                // An answer to a `drain` that timed out may still be queued.
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Called when one worker has ended while others continue. Reads its last lines if that is possible
    /// within `limit`. Waits for no console.
    pub(crate) fn read_pending(&self, limit: Duration) {
        let number = self.next_number();
        self.ask(Request::ReadPending(number));
        let deadline = Instant::now() + limit;
        while let Ok(answered) = self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if answered == number {
                return;
            }
        }
    }

    /// Called when the console was resized: resizes the workers' terminals.
    pub(crate) fn resize(&self) {
        self.read_pending(RESIZE_TIMEOUT);
    }

    fn next_number(&self) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.asked.get()
    }

    /// Drains like [`Tee::drain`], then ends the thread. Afterwards, processes that still hold such a pipe
    /// cannot write to it.
    pub(crate) fn finish(self, deadline: Instant) {
        self.ask(Request::Finish(deadline));
        let mut deadline = ConsoleDeadline::new(deadline);
        while let Some(left) = deadline.left(self.writes.iter().map(Writes::count).sum()) {
            match self.answers.recv_timeout(left) {
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn ask(&self, request: Request) {
        // If the thread has ended early, `answers` is closed.
        let _ = self.requests.send(request);
        let _ = self.wake.write(1);
    }
}

/// The launcher's own stdout and stderr.
pub(super) fn consoles() -> io::Result<[Console; 2]> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    Ok([Console::new("stdout", Box::new(stdout)), Console::new("stderr", Box::new(LockedStderr))])
}

/// Holds the lock during each write, so that the launcher's own lines do not interrupt a chunk.
struct LockedStderr;

impl Write for LockedStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stderr().lock().write(bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::stderr().lock().write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
