//! Writes the launcher's stdout or stderr from a separate thread, so that a slow terminal does not delay log
//! files and the other stream.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes waiting to be written to a console. Beyond it the launcher stops reading the workers' output,
/// so that they slow down to the console's pace.
const PENDING_MAX_BYTES: usize = 8 << 20;
/// Output for a console that accepts nothing for this long is dropped: a stopped terminal must not stop the
/// job.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A console counts as making progress if it has accepted data within this time.
const PROGRESS_WINDOW: Duration = Duration::from_secs(2);
/// Longest time by which the wait for a slow console at the end exceeds the requested time, while the console
/// accepts data.
const MAX_EXTENSION: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes per write to a console: few enough that a slow console still shows progress.
const WRITE_BYTES: usize = 16 << 10;

/// The sending side of a console: collects lines for the thread that writes them. Used by one thread.
pub(super) struct Console {
    shared: Arc<Shared>,
    /// Name and stream of the writing thread. The thread starts with the first bytes; then this is `None`.
    unstarted: Option<(String, Box<dyn Write + Send>)>,
    /// Number of the source whose unfinished line is the last on the console.
    open: Option<usize>,
    /// True if that unfinished line was passed through unchanged, without prefix.
    open_raw: bool,
    /// Collected lines, not yet passed to the writing thread.
    batch: Vec<u8>,
    /// Number of bytes that were dropped since the console stalled; `None` if it has not.
    dropped: Option<u64>,
    stall: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of completed writes, which shows whether the console makes progress.
    writes: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct State {
    pending: Vec<u8>,
    /// True if the thread has taken bytes and not finished writing them.
    writing: bool,
    /// True if the sender is gone, so that no more bytes will come.
    closed: bool,
    /// The error with which a write to the console failed. All later bytes are dropped.
    broken: Option<io::ErrorKind>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Console {
    /// Creates a console for `stream`. A thread of this name writes to it, started with the first bytes.
    pub(super) fn new(name: &str, stream: Box<dyn Write + Send>) -> Self {
        Self::with_stall(name, stream, STALL_TIMEOUT)
    }

    pub(super) fn with_stall(name: &str, stream: Box<dyn Write + Send>, stall: Duration) -> Self {
        Self {
            shared: Arc::new(Shared::default()),
            unstarted: Some((name.to_owned(), stream)),
            open: None,
            open_raw: false,
            batch: Vec::new(),
            dropped: None,
            stall,
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let Some((name, stream)) = self.unstarted.take() else { return Ok(()) };
        let theirs = Arc::clone(&self.shared);
        let started = thread::Builder::new().name(name).spawn(move || {
            super::block_file_size_signal();
            write(&theirs, stream);
        });
        started.map(drop)
    }

    /// Adds `text`, a piece of a line of `source`. `newline` says that the line ends here, and `continued`
    /// that earlier pieces of it were added.
    ///
    /// A line that other sources have interrupted gets its prefix again.
    pub(super) fn add(&mut self, source: usize, prefix: &[u8], text: &[u8], newline: bool, continued: bool) {
        if self.open != Some(source) {
            if continued && text.is_empty() {
                return; // the source that interrupted the line has already added its newline
            }
            self.close_line();
            self.batch.extend_from_slice(prefix);
        }
        self.batch.extend_from_slice(String::from_utf8_lossy(text).as_bytes());
        self.open = (!newline).then_some(source);
        self.open_raw = false;
        if newline {
            self.batch.push(b'\n');
        }
    }

    /// Adds bytes of `source` unchanged. Unfinished lines of other sources do not get a newline, as if each
    /// source wrote directly.
    pub(super) fn pass_through(&mut self, source: usize, parts: [&[u8]; 2]) {
        if self.open.is_some() && !self.open_raw {
            self.close_line();
        }
        for bytes in parts {
            self.batch.extend_from_slice(bytes);
        }
        self.open = (self.batch.last() != Some(&b'\n')).then_some(source);
        self.open_raw = true;
    }

    /// Adds a line of the launcher itself, with `convoke:` before it.
    pub(super) fn add_launcher_line(&mut self, line: &str) {
        self.close_line();
        self.batch.extend_from_slice(format!("convoke: {line}\n").as_bytes());
    }

    /// Passes the collected lines to the writing thread. Waits while too many bytes are waiting for the
    /// console.
    ///
    /// Returns the error that a write to the console had, if any.
    pub(super) fn submit(&mut self) -> Option<io::ErrorKind> {
        if self.batch.is_empty() {
            return None;
        }
        if let Err(error) = self.start() {
            self.shared.lock().broken = Some(error.kind());
        }
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let mut writes = shared.writes.load(Ordering::Relaxed);
        let mut since = Instant::now();
        while state.broken.is_none() && state.pending.len() >= PENDING_MAX_BYTES {
            let now = shared.writes.load(Ordering::Relaxed);
            if now != writes {
                (writes, since) = (now, Instant::now());
            }
            let left = self.stall.saturating_sub(since.elapsed());
            if left.is_zero() || self.dropped.is_some() {
                *self.dropped.get_or_insert(0) += self.batch.len() as u64;
                self.batch.clear();
                return None;
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(broken) = state.broken {
            self.batch.clear();
            return Some(broken);
        }
        if let Some(bytes) = self.dropped.take() {
            let note = format!(
                "\nconvoke: warning: {bytes} bytes of output are missing here: the console accepted nothing\n"
            );
            state.pending.extend_from_slice(note.as_bytes());
        }
        if state.pending.is_empty() {
            std::mem::swap(&mut state.pending, &mut self.batch);
        } else {
            state.pending.extend_from_slice(&self.batch);
        }
        self.batch.clear();
        drop(state);
        shared.changed.notify_all();
        None
    }

    /// Waits until all bytes are written or a write has failed, at most until `deadline`.
    ///
    /// Returns the error that a write to the console had, if any.
    pub(super) fn flush_console(&self, deadline: &mut ConsoleDeadline) -> Option<io::ErrorKind> {
        let mut state = self.shared.lock();
        while state.broken.is_none() && (state.writing || !state.pending.is_empty()) {
            // After the deadline the thread may still be writing. It ends with the launcher's process.
            let Some(left) = deadline.left(self.shared.writes.load(Ordering::Relaxed)) else { break };
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.broken
    }

    /// Returns the counter of completed writes, which shows whether the console makes progress.
    pub(super) fn writes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shared.writes)
    }

    fn close_line(&mut self) {
        if self.open.take().is_some() {
            self.batch.push(b'\n');
        }
    }
}

/// Time to wait for consoles: until a deadline, and beyond it while they accept data.
#[derive(Debug)]
pub(super) struct ConsoleDeadline {
    until: Instant,
    latest: Instant,
    seen: u64,
}

impl ConsoleDeadline {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { until: deadline, latest: deadline + MAX_EXTENSION, seen: 0 }
    }

    /// Returns the time to wait before the next check, given the number of completed writes; `None` when the
    /// wait is over.
    pub(super) fn left(&mut self, writes: u64) -> Option<Duration> {
        let now = Instant::now();
        if writes != self.seen {
            self.seen = writes;
            self.until = self.until.max(now + PROGRESS_WINDOW).min(self.latest);
        }
        let left = self.until.saturating_duration_since(now);
        (!left.is_zero()).then(|| left.min(POLL_INTERVAL))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

fn write(shared: &Shared, mut stream: Box<dyn Write + Send>) {
    let mut taken = Vec::new();
    loop {
        let mut state = shared.lock();
        state.writing = false;
        shared.changed.notify_all();
        while state.pending.is_empty() && !state.closed {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.pending.is_empty() {
            return;
        }
        taken.clear();
        std::mem::swap(&mut taken, &mut state.pending);
        state.writing = true;
        drop(state);
        shared.changed.notify_all();
        for slice in taken.chunks(WRITE_BYTES) {
            if let Err(error) = stream.write_all(slice) {
                let mut state = shared.lock();
                state.broken = Some(error.kind());
                state.pending = Vec::new();
                shared.changed.notify_all();
                return;
            }
            shared.writes.fetch_add(1, Ordering::Relaxed);
        }
    }
}
