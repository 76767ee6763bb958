//! The thread that reads all pipes of an attempt (one start of the workers) and copies their output.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use memchr::memrchr2;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{ConsoleMode, RAW_PARTIAL_MAX, Request, Source, Stream};
use crate::logs::console::{Console, ConsoleDeadline};
use crate::logs::lines::{LINE_MAX_BYTES, Piece, incomplete_utf8_len};
use crate::logs::{PIPE_BYTES, ReportedProblems, pty};

const READ_BYTES: usize = 64 << 10;
/// Number of reads of a pipe that suffice for all bytes that the pipe held before them.
const READ_PENDING_ROUNDS: usize = PIPE_BYTES as usize / READ_BYTES + 1;
/// Longest time to continue reading, after all workers have ended, while their descendants keep writing.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// The pipes that the thread reads and the consoles to which it writes.
pub(super) struct Copier {
    /// The pipes to read, each with the number by which the console identifies it.
    sources: Vec<(usize, Source)>,
    outputs: Outputs,
    reported: Arc<ReportedProblems>,
    /// Time at which output last passed unchanged to the console.
    shown_at: Instant,
}

impl Copier {
    pub(super) fn new(sources: Vec<Source>, outputs: Outputs, reported: Arc<ReportedProblems>) -> Self {
        let sources = sources.into_iter().enumerate().collect();
        Self { sources, outputs, reported, shown_at: Instant::now() }
    }

    pub(super) fn run(
        mut self,
        mut wake: File,
        requests: &mpsc::Receiver<Request>,
        answer: &mpsc::Sender<u64>,
    ) {
        let mut buffer = vec![0; READ_BYTES];
        // The request being handled, with the time limit for its reads.
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
                Some((Request::ReadPending(number), _))
                    if rounds >= READ_PENDING_ROUNDS || readable.is_empty() =>
                {
                    self.sync_terminal_sizes();
                    let _ = answer.send(number);
                    current = None;
                }
                Some((Request::ReadPending(_), _)) => {}
                Some((_, until)) if Instant::now() < until && !readable.is_empty() => {}
                Some((Request::Finish(deadline), _)) => {
                    finish = Some(deadline);
                    break;
                }
                Some((Request::Drain(number, deadline), _)) => {
                    self.flush_console(deadline);
                    let _ = answer.send(number);
                    current = None;
                }
                None if woken => drop(wake.read(&mut [0; 8])),
                None => {}
            }
            // Iterates in reverse, because `read` may remove a source, which moves those after it.
            for at in readable.into_iter().rev() {
                self.read(at, &mut buffer);
            }
            self.show_partials(Instant::now());
            self.submit();
        }
        while let Some((number, mut source)) = self.sources.pop() {
            self.finish_source(number, &mut source);
        }
        self.submit();
        let mut request = current.map(|(request, _)| request);
        // All pipes may be closed before the workers have ended. The thread then only waits for requests.
        let until = finish.unwrap_or_else(|| {
            loop {
                match request.take().map_or_else(|| requests.recv(), Ok) {
                    Ok(Request::Drain(number, deadline)) => {
                        self.flush_console(deadline);
                        let _ = answer.send(number);
                    }
                    // The pipes are closed, so all output has been read.
                    Ok(Request::ReadPending(number)) => drop(answer.send(number)),
                    Ok(Request::Finish(deadline)) => return deadline,
                    Err(_) => return Instant::now() + DRAIN_MAX,
                }
            }
        });
        self.flush_console(until);
    }

    fn sync_terminal_sizes(&mut self) {
        for (_, source) in &mut self.sources {
            if let Some(size) = &mut source.terminal {
                pty::sync_size(&source.pipe, size);
            }
        }
    }

    /// Writes all available output to the consoles, unfinished lines included, and waits for the consoles.
    fn flush_console(&mut self, deadline: Instant) {
        self.show_partials(Instant::now() + RAW_PARTIAL_MAX);
        self.submit();
        // Stdout comes first, because a warning on stderr reports that writing to stdout failed.
        let broken = self.outputs.consoles[0].flush_console(&mut ConsoleDeadline::new(deadline));
        self.warn_stdout_broken(broken);
        let _ = self.outputs.consoles[1].submit();
        let _ = self.outputs.consoles[1].flush_console(&mut ConsoleDeadline::new(deadline));
    }

    /// Waits for bytes from the workers or a request. Returns whether a request has come, and which sources
    /// have bytes.
    fn wait(&self, wake: &File, timeout: Option<Duration>) -> nix::Result<(bool, Vec<usize>)> {
        let timeout = match timeout {
            None => PollTimeout::NONE,
            // Rounds up: with a timeout of 0 the last millisecond would be a busy loop.
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
            // Reads from a closed pseudo-terminal fail with EIO.
            Err(_) => 0,
        };
        if let Some(size) = &mut source.terminal {
            pty::sync_size(&source.pipe, size);
        }
        if count == 0 {
            let (number, mut source) = self.sources.remove(at);
            self.finish_source(number, &mut source);
            return;
        }
        let bytes = &buffer[..count];
        source.read_at = Instant::now();
        if let Some((file, path)) = &mut source.file
            && let Err(error) = file.write_all(bytes)
        {
            // The next bytes are written to the file again, since disk space may become free.
            let line = format!("warning: cannot write {}: {error}; the job continues", path.display());
            warn_once(&self.reported.files, &mut self.outputs.consoles[1], &line);
        }
        if let Some(tail) = &source.tail {
            tail.push(bytes);
        }
        if !source.on_console {
            return;
        }
        match &mut source.mode {
            ConsoleMode::Lines(lines) => {
                let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
                lines.feed(bytes, |piece| sink.pass(piece));
            }
            ConsoleMode::Raw { held, since } => {
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
                    let whole = held.len() - incomplete_utf8_len(held);
                    console.pass_through(number, [&held[..whole], &[]]);
                    held.drain(..whole);
                }
            }
        }
    }

    fn finish_source(&mut self, number: usize, source: &mut Source) {
        match &mut source.mode {
            ConsoleMode::Lines(lines) => {
                let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
                lines.finish(|piece| sink.pass(piece));
            }
            ConsoleMode::Raw { held, .. } => {
                if !held.is_empty() {
                    self.outputs.consoles[1].pass_through(number, [held, &[]]);
                    held.clear();
                }
            }
        }
    }

    /// Returns the time until the next unfinished line must be written to the console.
    fn next_partial(&self) -> Option<Duration> {
        let first = self.sources.iter().filter_map(|(_, source)| source.partial_at(self.shown_at)).min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    fn show_partials(&mut self, now: Instant) {
        for (number, source) in &mut self.sources {
            if source.partial_at(self.shown_at).is_none_or(|at| now < at) {
                continue;
            }
            match &mut source.mode {
                ConsoleMode::Lines(lines) => {
                    let mut sink = self.outputs.sink(*number, source.stream, &source.prefix);
                    lines.show_partial(|piece| sink.pass(piece));
                    // An incomplete UTF-8 character is written together with its rest later. The new time
                    // avoids a busy loop until the rest arrives.
                    source.read_at = now;
                }
                ConsoleMode::Raw { held, .. } => {
                    self.outputs.consoles[1].pass_through(*number, [held, &[]]);
                    held.clear();
                }
            }
        }
    }

    fn submit(&mut self) {
        let broken = self.outputs.consoles[0].submit();
        self.warn_stdout_broken(broken);
        // A failing stderr cannot be reported anywhere.
        let _ = self.outputs.consoles[1].submit();
    }

    fn warn_stdout_broken(&mut self, broken: Option<io::ErrorKind>) {
        if let Some(error) = broken {
            let line = format!("warning: cannot write to stdout: {error}; the job continues");
            warn_once(&self.reported.stdout, &mut self.outputs.consoles[1], &line);
        }
    }
}

fn warn_once(reported: &AtomicBool, console: &mut Console, line: &str) {
    if !reported.swap(true, Ordering::Relaxed) {
        console.add_launcher_line(line);
    }
}

/// Destinations of output lines, one each for stdout and stderr.
pub(super) struct Outputs {
    pub(super) consoles: [Console; 2],
    pub(super) filters: [Vec<Finder<'static>>; 2],
    pub(super) filtered: [Option<File>; 2],
}

impl Outputs {
    fn sink<'a>(&'a mut self, number: usize, stream: Stream, prefix: &'a [u8]) -> Sink<'a> {
        let index = stream as usize;
        let (console, filters) = (&mut self.consoles[index], &self.filters[index]);
        Sink { number, prefix, console, filters, filtered: &mut self.filtered[index] }
    }
}

/// Destinations of the output lines of one source.
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
            // Each line is one write. If the disk is full, the write to the log file itself reports it.
            let _ = file.write_all(&[self.prefix, piece.line, b"\n"].concat());
        }
    }
}
