//! Copies what workers write into pipes to their files and, line by line, to the console.
//!
//! One thread reads all pipes of an attempt. The file gets the bytes as they are; the console gets whole
//! lines with prefix. A line that stays without its newline is shown after a while all the same.
//!
//! A stderr that is neither redirected nor teed passes through here as well, so that its last lines are known when
//! its worker fails: byte for byte, without prefix, whole lines at once.

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

use super::console::{Console, Patience, Writes};
use super::lines::Lines;
use super::tail::Tail;
use super::{Told, hold_file_size_signal};
use crate::config::Streams;
use copier::{Copier, Outputs};

/// How long a line may stay without its newline before it is shown.
const PARTIAL_AFTER: Duration = Duration::from_secs(2);
/// The same for what passes through unchanged, counted from when anything was shown: long enough for the rest of a line
/// from a worker that must wait for a processor in the middle of it, too short to wait for.
const RAW_PARTIAL_AFTER: Duration = Duration::from_millis(200);
/// The same while others write all the time.
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
    form: Form,
    /// Where its last bytes are kept.
    tail: Option<Tail>,
    /// It is a terminal, of this size.
    terminal: Option<Option<Winsize>>,
    /// When its last bytes came.
    read_at: Instant,
}

/// How a stream reaches the console.
#[derive(Debug)]
enum Form {
    /// Line by line, with prefix.
    Lines(Lines),
    /// As it is. Holds the line that is not over, until `since` is too long ago.
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
        let (pipe, form) = (File::from(pipe), Form::Lines(Lines::default()));
        Self {
            stream,
            pipe,
            file,
            prefix,
            on_console,
            form,
            tail: None,
            terminal: None,
            read_at: Instant::now(),
        }
    }

    /// A stderr that passes through unchanged.
    pub(super) fn raw(pipe: OwnedFd, on_console: bool) -> Self {
        let form = Form::Raw { held: Vec::new(), since: Instant::now() };
        Self { form, ..Self::new(Stream::Stderr, pipe, None, Vec::new(), on_console) }
    }

    /// The same with a terminal on its other end.
    pub(super) fn terminal(pty: OwnedFd) -> Self {
        Self { terminal: Some(None), ..Self::raw(pty, true) }
    }

    /// Keeps the last bytes in `tail`.
    pub(super) fn with_tail(self, tail: Tail) -> Self {
        Self { tail: Some(tail), ..self }
    }

    /// When what is there of a line is to be shown; `None` if nothing waits.
    fn partial_at(&self, shown_at: Instant) -> Option<Instant> {
        match &self.form {
            Form::Lines(lines) => lines.has_partial().then(|| self.read_at + PARTIAL_AFTER),
            Form::Raw { held, since } => {
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

/// How long the thread may take to give the workers' terminals another size.
const RESIZE_TIMEOUT: Duration = Duration::from_millis(100);

/// The thread that copies. Dropping it lets the thread go on until all pipes are closed.
#[derive(Debug)]
pub(crate) struct Tee {
    /// Written to after each request.
    wake: EventFd,
    requests: mpsc::Sender<Request>,
    /// One answer to each [`Request::Glance`] and [`Request::Drain`]; closed when all is done.
    answers: mpsc::Receiver<u64>,
    asked: Cell<u64>,
    writes: [Writes; 2],
}

/// What the thread is asked for.
#[derive(Debug, Clone, Copy)]
enum Request {
    /// Read what any pipe can hold by now, give terminals the size of the console, answer with this number, and go on.
    Glance(u64),
    /// Copy what is there, answer with this number, and go on.
    Drain(u64, Instant),
    /// Copy what is there, and end.
    Finish(Instant),
}

impl Tee {
    pub(super) fn start(
        sources: Vec<Source>,
        filtered: [Option<File>; 2],
        filters: [Vec<Finder<'static>>; 2],
        consoles: [Console; 2],
        told: Arc<Told>,
    ) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let theirs = File::from(wake.as_fd().try_clone_to_owned()?);
        let (answer, answers) = mpsc::channel();
        let (requests, asked) = mpsc::channel();
        let writes = [consoles[0].writes(), consoles[1].writes()];
        let outputs = Outputs { filtered, filters, consoles };
        let copier = Copier::new(sources, outputs, told);
        // Its end closes `answer`.
        thread::Builder::new().name("tee".to_owned()).spawn(move || {
            hold_file_size_signal();
            copier.run(theirs, &asked, &answer);
        })?;
        Ok(Self { wake, requests, answers, asked: Cell::new(0), writes })
    }

    /// All workers have ended: copies what they have written, and waits for that, but beyond the deadline only for a
    /// slow console that still takes something. What their descendants write is copied afterwards as well.
    pub(crate) fn drain(&self, deadline: Instant) {
        let number = self.next_number();
        self.ask(Request::Drain(number, deadline));
        let mut patience = Patience::new(deadline);
        while let Some(left) = patience.left(self.writes.iter().map(Writes::count).sum()) {
            match self.answers.recv_timeout(left) {
                Ok(answered) if answered == number => return,
                // An answer may be left of a `drain` that lost its patience.
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// A worker has ended while others go on: its last lines are read if that is possible within `limit`. Waits for no
    /// console.
    pub(crate) fn glance(&self, limit: Duration) {
        let number = self.next_number();
        self.ask(Request::Glance(number));
        let deadline = Instant::now() + limit;
        while let Ok(answered) = self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if answered == number {
                return;
            }
        }
    }

    /// The console has another size: the workers' terminals get it.
    pub(crate) fn resize(&self) {
        self.glance(RESIZE_TIMEOUT);
    }

    fn next_number(&self) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.asked.get()
    }

    /// As [`Tee::drain`], for the last time: from then on, processes that still hold such a pipe cannot write to it
    /// any more.
    pub(crate) fn finish(self, deadline: Instant) {
        self.ask(Request::Finish(deadline));
        let mut patience = Patience::new(deadline);
        while let Some(left) = patience.left(self.writes.iter().map(Writes::count).sum()) {
            match self.answers.recv_timeout(left) {
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn ask(&self, request: Request) {
        // The thread may have broken off: then `answers` is closed.
        let _ = self.requests.send(request);
        let _ = self.wake.write(1);
    }
}

/// The launcher's own stdout and stderr.
pub(super) fn consoles() -> io::Result<[Console; 2]> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    Ok([Console::new("stdout", Box::new(stdout)), Console::new("stderr", Box::new(LockedStderr))])
}

/// Holds the lock while a chunk is written, so that the launcher's own lines do not fall into ours.
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
