//! Copies what workers write into pipes to their files and, line by line, to the console.
//!
//! One thread reads all pipes of an attempt. The file gets the bytes as they are; the console gets whole
//! lines with prefix. A line that stays without its newline is shown after a while all the same.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::console::{Console, Patience, Writes};
use super::lines::{Lines, Piece};
use crate::config::Streams;

const READ_BYTES: usize = 64 << 10;
/// How long a line may stay without its newline before it is shown.
const PARTIAL_AFTER: Duration = Duration::from_secs(2);
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

/// One teed stream of one worker.
#[derive(Debug)]
pub(super) struct Source {
    stream: Stream,
    pipe: File,
    /// Its log file, if there can be one.
    file: Option<File>,
    prefix: Vec<u8>,
    /// Shown on the console and to the duplicate filters.
    on_console: bool,
    lines: Lines,
    /// When its last bytes came.
    read_at: Instant,
}

impl Source {
    pub(super) fn new(
        stream: Stream,
        pipe: OwnedFd,
        file: Option<File>,
        prefix: Vec<u8>,
        on_console: bool,
    ) -> Self {
        let pipe = File::from(pipe);
        Self { stream, pipe, file, prefix, on_console, lines: Lines::default(), read_at: Instant::now() }
    }

    #[cfg(test)]
    pub(super) fn set_file(&mut self, file: File) {
        self.file = Some(file);
    }
}

/// The thread that copies. Dropping it lets the thread go on until all pipes are closed.
#[derive(Debug)]
pub(crate) struct Tee {
    /// Written to when all workers have ended.
    finish: EventFd,
    done: mpsc::Receiver<()>,
    until: mpsc::Sender<Instant>,
    writes: [Writes; 2],
}

impl Tee {
    pub(super) fn start(
        sources: Vec<Source>,
        filtered: [Option<File>; 2],
        filters: [Vec<Finder<'static>>; 2],
        consoles: [Console; 2],
    ) -> io::Result<Self> {
        let finish = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let wake = finish.as_fd().try_clone_to_owned()?;
        let (tell_done, done) = mpsc::channel();
        let (until, deadline) = mpsc::channel();
        let writes = [consoles[0].writes(), consoles[1].writes()];
        let outputs = Outputs { filtered, filters, consoles };
        let copier = Copier { sources: sources.into_iter().enumerate().collect(), outputs, told: [false; 3] };
        thread::Builder::new().name("tee".to_owned()).spawn(move || {
            copier.run(&wake, &deadline);
            // Nobody may wait any more.
            let _ = tell_done.send(());
        })?;
        Ok(Self { finish, done, until, writes })
    }

    /// All workers have ended: copies what they left, and waits for that, but beyond the deadline only for a slow
    /// console that still takes something.
    ///
    /// From then on, processes that still hold such a pipe cannot write to it any more.
    pub(crate) fn finish(self, deadline: Instant) {
        // The thread may have ended by itself, when the last pipe was closed.
        let _ = self.until.send(deadline);
        let _ = self.finish.write(1);
        let mut patience = Patience::new(deadline);
        while let Some(left) = patience.left(self.writes.iter().map(Writes::count).sum()) {
            match self.done.recv_timeout(left) {
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// The launcher's own stdout and stderr.
pub(super) fn consoles() -> io::Result<[Console; 2]> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    Ok([Console::start("stdout", Box::new(stdout))?, Console::start("stderr", Box::new(LockedStderr))?])
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
}

impl Copier {
    fn run(mut self, wake: &OwnedFd, deadline: &mpsc::Receiver<Instant>) {
        let mut buffer = vec![0; READ_BYTES];
        let mut drain_until = None;
        while !self.sources.is_empty() {
            let timeout = if drain_until.is_some() { Some(Duration::ZERO) } else { self.next_partial() };
            let Ok((finish, readable)) = self.wait(wake, timeout) else { break };
            if drain_until.is_some_and(|until| Instant::now() >= until || readable.is_empty()) {
                break;
            }
            if finish && drain_until.is_none() {
                drain_until = Some(Instant::now() + DRAIN_MAX);
            }
            // From the back, so that removing one does not move those that follow.
            for at in readable.into_iter().rev() {
                self.read(at, &mut buffer);
            }
            self.show_partials();
            self.hand_over();
        }
        while let Some((number, mut source)) = self.sources.pop() {
            self.finish_source(number, &mut source);
        }
        self.hand_over();
        // Nobody finishes us if the pipes were closed before the workers ended: then all time is ours.
        let until = deadline.recv().unwrap_or_else(|_| Instant::now() + DRAIN_MAX);
        for console in self.outputs.consoles {
            console.finish(&mut Patience::new(until));
        }
    }

    /// Waits for bytes; returns whether the workers have ended, and which sources have some.
    fn wait(&self, wake: &OwnedFd, timeout: Option<Duration>) -> nix::Result<(bool, Vec<usize>)> {
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
        if source.on_console {
            let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
            source.lines.feed(bytes, |piece| sink.pass(piece));
        }
    }

    fn finish_source(&mut self, number: usize, source: &mut Source) {
        let mut sink = self.outputs.sink(number, source.stream, &source.prefix);
        source.lines.finish(|piece| sink.pass(piece));
    }

    /// How long until the next line without newline is to be shown.
    fn next_partial(&self) -> Option<Duration> {
        let partial = self.sources.iter().filter(|(_, source)| source.lines.has_partial());
        partial.map(|(_, source)| PARTIAL_AFTER.saturating_sub(source.read_at.elapsed())).min()
    }

    fn show_partials(&mut self) {
        for (number, source) in &mut self.sources {
            if source.lines.has_partial() && source.read_at.elapsed() >= PARTIAL_AFTER {
                let mut sink = self.outputs.sink(*number, source.stream, &source.prefix);
                source.lines.show_partial(|piece| sink.pass(piece));
                // A character that is not whole is shown with the rest, not waited for in a loop.
                source.read_at = Instant::now();
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
