//! Copies what workers write into pipes to their files and, line by line, to the console.
//!
//! One thread reads all pipes of an attempt. The file gets the bytes as they are; the console gets whole
//! lines with prefix. A line that stays without its newline is shown after a while all the same.
//!
//! A stderr that is neither redirected nor teed passes through here as well, so that its last lines are known when
//! its worker fails: byte for byte, without prefix, whole lines at once.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use memchr::memrchr2;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::PIPE_BYTES;
use super::console::{Console, Patience, Writes};
use super::lines::{LINE_MAX_BYTES, Lines, Piece};
use super::tail::Tail;
use crate::config::Streams;

const READ_BYTES: usize = 64 << 10;
/// After so many reads, whatever a pipe held before them has been read.
const GLANCE_ROUNDS: usize = PIPE_BYTES as usize / READ_BYTES + 1;
/// How long a line may stay without its newline before it is shown.
const PARTIAL_AFTER: Duration = Duration::from_secs(2);
/// The same for what passes through unchanged, counted from when anything was shown: long enough for the rest of a line
/// that was written in pieces, too short to be seen.
const RAW_PARTIAL_AFTER: Duration = Duration::from_millis(30);
/// The same while others write all the time.
const RAW_PARTIAL_MAX: Duration = Duration::from_secs(1);
/// How long is read on, once all workers are gone, from pipes that their descendants go on writing to.
const DRAIN_MAX: Duration = Duration::from_secs(1);

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
    /// Its log file, if there can be one.
    file: Option<File>,
    prefix: Vec<u8>,
    /// Shown on the console and to the duplicate filters.
    on_console: bool,
    form: Form,
    /// Where its last bytes are kept.
    tail: Option<Tail>,
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
        file: Option<File>,
        prefix: Vec<u8>,
        on_console: bool,
    ) -> Self {
        let (pipe, form) = (File::from(pipe), Form::Lines(Lines::default()));
        Self { stream, pipe, file, prefix, on_console, form, tail: None, read_at: Instant::now() }
    }

    /// A stderr that passes through unchanged.
    pub(super) fn raw(pipe: OwnedFd, on_console: bool) -> Self {
        let form = Form::Raw { held: Vec::new(), since: Instant::now() };
        Self { form, ..Self::new(Stream::Stderr, pipe, None, Vec::new(), on_console) }
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
    pub(super) fn set_file(&mut self, file: File) {
        self.file = Some(file);
    }
}

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
    /// Read what any pipe can hold by now, answer with this number, and go on.
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
    ) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let theirs = File::from(wake.as_fd().try_clone_to_owned()?);
        let (answer, answers) = mpsc::channel();
        let (requests, asked) = mpsc::channel();
        let writes = [consoles[0].writes(), consoles[1].writes()];
        let outputs = Outputs { filtered, filters, consoles };
        let copier = Copier {
            sources: sources.into_iter().enumerate().collect(),
            outputs,
            told: [false; 3],
            shown_at: Instant::now(),
        };
        // Its end closes `answer`.
        thread::Builder::new().name("tee".to_owned()).spawn(move || copier.run(theirs, &asked, &answer))?;
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

/// What the thread works on.
struct Copier {
    /// With a number each, which the console tells them apart by.
    sources: Vec<(usize, Source)>,
    outputs: Outputs,
    /// What was told already: trouble with files, with stdout, with stderr.
    told: [bool; 3],
    /// When something last passed through to the console.
    shown_at: Instant,
}

impl Copier {
    fn run(mut self, mut wake: File, requests: &mpsc::Receiver<Request>, answer: &mpsc::Sender<u64>) {
        let mut buffer = vec![0; READ_BYTES];
        // What is being answered, and how long is read on for it.
        let mut current = None;
        let mut finish = None;
        let mut rounds = 0;
        while !self.sources.is_empty() {
            rounds += 1;
            if current.is_none() {
                current = requests.try_recv().ok().map(|request| (request, Instant::now() + DRAIN_MAX));
                rounds = 0;
            }
            let timeout = if current.is_some() { Some(Duration::ZERO) } else { self.next_partial() };
            let Ok((woken, readable)) = self.wait(&wake, timeout) else { break };
            match current {
                Some((Request::Glance(number), _)) if rounds >= GLANCE_ROUNDS || readable.is_empty() => {
                    let _ = answer.send(number);
                    current = None;
                }
                Some((Request::Glance(_), _)) => {}
                Some((_, until)) if Instant::now() < until && !readable.is_empty() => {}
                Some((Request::Finish(deadline), _)) => {
                    finish = Some(deadline);
                    break;
                }
                Some((Request::Drain(number, deadline), _)) => {
                    self.settle(deadline);
                    let _ = answer.send(number);
                    current = None;
                }
                None if woken => drop(wake.read(&mut [0; 8])),
                None => {}
            }
            // From the back, so that removing one does not move those that follow.
            for at in readable.into_iter().rev() {
                self.read(at, &mut buffer);
            }
            self.show_partials(Instant::now());
            self.hand_over();
        }
        while let Some((number, mut source)) = self.sources.pop() {
            self.finish_source(number, &mut source);
        }
        self.hand_over();
        let mut request = current.map(|(request, _)| request);
        // All pipes may have been closed before the workers ended: then all time is ours.
        let until = finish.unwrap_or_else(|| {
            loop {
                match request.take().map_or_else(|| requests.recv(), Ok) {
                    Ok(Request::Drain(number, deadline)) => {
                        self.settle(deadline);
                        let _ = answer.send(number);
                    }
                    // All has been read.
                    Ok(Request::Glance(number)) => drop(answer.send(number)),
                    Ok(Request::Finish(deadline)) => return deadline,
                    Err(_) => return Instant::now() + DRAIN_MAX,
                }
            }
        });
        for console in self.outputs.consoles {
            console.finish(&mut Patience::new(until));
        }
    }

    /// Shows all that is there, and waits for the consoles.
    fn settle(&mut self, deadline: Instant) {
        self.show_partials(Instant::now() + RAW_PARTIAL_MAX);
        self.hand_over();
        for console in &self.outputs.consoles {
            console.settle(&mut Patience::new(deadline));
        }
    }

    /// Waits for bytes; returns whether the workers have ended, and which sources have some.
    fn wait(&self, wake: &File, timeout: Option<Duration>) -> nix::Result<(bool, Vec<usize>)> {
        let timeout = match timeout {
            None => PollTimeout::NONE,
            // Rounded up, else the last millisecond is spent in a loop.
            Some(Duration::ZERO) => PollTimeout::ZERO,
            Some(time) => PollTimeout::try_from(time.as_millis() + 1).unwrap_or(PollTimeout::MAX),
        };
        let mut polled: Vec<PollFd<'_>> = self
            .sources
            .iter()
            .map(|(_, source)| PollFd::new(source.pipe.as_fd(), PollFlags::POLLIN))
            .collect();
        polled.push(PollFd::new(wake.as_fd(), PollFlags::POLLIN));
        loop {
            match poll(&mut polled, timeout) {
                Err(nix::Error::EINTR) => {}
                Err(error) => return Err(error),
                Ok(_) => break,
            }
        }
        let ready = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
        let finish = polled.last().is_some_and(ready);
        Ok((finish, (0..self.sources.len()).filter(|&at| ready(&polled[at])).collect()))
    }

    fn read(&mut self, at: usize, buffer: &mut [u8]) {
        let (number, source) = &mut self.sources[at];
        let number = *number;
        let count = match source.pipe.read(buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Err(_) => 0,
        };
        if count == 0 {
            let (number, mut source) = self.sources.remove(at);
            self.finish_source(number, &mut source);
            return;
        }
        let bytes = &buffer[..count];
        source.read_at = Instant::now();
        if let Some(Err(error)) = source.file.as_mut().map(|file| file.write_all(bytes)) {
            // Tried again with the next bytes: space may be freed.
            let line = format!(
                "warning: cannot write {} of a worker: {error}; the job goes on",
                source.stream.file_name()
            );
            tell(&mut self.told[0], &mut self.outputs.consoles[1], &line);
        }
        if let Some(tail) = &source.tail {
            tail.push(bytes);
        }
        if !source.on_console {
            return;
        }
        match &mut source.form {
            Form::Lines(lines) => {
                let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
                lines.feed(bytes, |piece| sink.pass(piece));
            }
            Form::Raw { held, since } => {
                let console = &mut self.outputs.consoles[1];
                let rest = match memrchr2(b'\n', b'\r', bytes) {
                    Some(end) => {
                        console.pass_through(number, [held, &bytes[..=end]]);
                        self.shown_at = source.read_at;
                        held.clear();
                        &bytes[end + 1..]
                    }
                    None => bytes,
                };
                if held.is_empty() {
                    *since = source.read_at;
                }
                held.extend_from_slice(rest);
                if held.len() >= LINE_MAX_BYTES {
                    console.pass_through(number, [held, &[]]);
                    held.clear();
                }
            }
        }
    }

    fn finish_source(&mut self, number: usize, source: &mut Source) {
        match &mut source.form {
            Form::Lines(lines) => {
                let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
                lines.finish(|piece| sink.pass(piece));
            }
            Form::Raw { held, .. } => {
                if !held.is_empty() {
                    self.outputs.consoles[1].pass_through(number, [held, &[]]);
                    held.clear();
                }
            }
        }
    }

    /// How long until the next line without newline is to be shown.
    fn next_partial(&self) -> Option<Duration> {
        let first = self.sources.iter().filter_map(|(_, source)| source.partial_at(self.shown_at)).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn show_partials(&mut self, now: Instant) {
        for (number, source) in &mut self.sources {
            if source.partial_at(self.shown_at).is_none_or(|at| now < at) {
                continue;
            }
            match &mut source.form {
                Form::Lines(lines) => {
                    let mut sink = self.outputs.sink(*number, source.stream, &source.prefix);
                    lines.show_partial(|piece| sink.pass(piece));
                    // A character that is not whole is shown with the rest, not waited for in a loop.
                    source.read_at = now;
                }
                Form::Raw { held, .. } => {
                    self.outputs.consoles[1].pass_through(*number, [held, &[]]);
                    held.clear();
                }
            }
        }
    }

    fn hand_over(&mut self) {
        if let Some(error) = self.outputs.consoles[0].hand_over() {
            let line = format!("warning: cannot write to stdout: {error}; the job goes on");
            tell(&mut self.told[1], &mut self.outputs.consoles[1], &line);
        }
        // If stderr itself is broken there is nowhere left to say so.
        let _ = self.outputs.consoles[1].hand_over();
    }
}

fn tell(told: &mut bool, console: &mut Console, line: &str) {
    if !std::mem::replace(told, true) {
        console.note(line);
    }
}

/// Where lines go, for stdout and stderr.
struct Outputs {
    consoles: [Console; 2],
    filters: [Vec<Finder<'static>>; 2],
    filtered: [Option<File>; 2],
}

impl Outputs {
    fn sink<'a>(&'a mut self, number: usize, stream: Stream, prefix: &'a [u8]) -> Sink<'a> {
        let index = stream as usize;
        let (console, filters) = (&mut self.consoles[index], &self.filters[index]);
        Sink { number, prefix, console, filters, filtered: &mut self.filtered[index] }
    }
}

/// Where the lines of one source go.
struct Sink<'a> {
    number: usize,
    prefix: &'a [u8],
    console: &'a mut Console,
    filters: &'a [Finder<'static>],
    filtered: &'a mut Option<File>,
}

impl Sink<'_> {
    fn pass(&mut self, piece: Piece<'_>) {
        let continued = piece.text.len() < piece.line.len();
        self.console.add(self.number, self.prefix, piece.text, piece.newline, continued);
        let Some(file) = self.filtered else { return };
        if piece.complete && self.filters.iter().any(|filter| filter.find(piece.line).is_some()) {
            // One write for one line. A full disk was or will be told for the log itself.
            let _ = file.write_all(&[self.prefix, piece.line, b"\n"].concat());
        }
    }
}
