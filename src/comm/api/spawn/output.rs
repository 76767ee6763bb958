//! Standard output and standard error of a rank, which its spawner reads from pipes and prints in whole
//! lines.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// A rank writes this text to both outputs when it reaches its call of spawn. Output before it is dropped.
pub(super) const REACHED: &[u8] = b"\x1Econvoke: the call of spawn is reached\x1E";
/// A rank writes this text to standard error at its end if its failure is most likely the consequence of
/// another rank's failure.
pub(super) const CONSEQUENCE: &[u8] = b"\x1Econvoke: another rank failed first\x1E";
/// Longest line that is printed whole, in bytes.
const LINE_BYTES: usize = 64 << 10;
/// The numbers of last bytes of an output that are kept, and that an error shows.
const KEPT_BYTES: usize = 64 << 10;
const SHOWN_BYTES: usize = 4 << 10;
/// Limit on reads of one pipe before other events are handled; these reads together exceed its capacity.
const MAX_READS: usize = 64;

/// The destination of the output of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Stdout,
    Stderr,
}

/// An output of a rank.
pub(super) struct Output {
    /// `None` before [`Self::open`] and after the end of file.
    pipe: Option<File>,
    target: Target,
    /// The spawner is in a test, so output goes through the macros that the harness captures.
    captured: bool,
    /// [`REACHED`] has come.
    pub(super) started: bool,
    /// [`CONSEQUENCE`] is the end of the output.
    pub(super) consequence: bool,
    /// An incomplete line.
    line: Vec<u8>,
    /// The last bytes.
    tail: Vec<u8>,
}

impl Output {
    pub(super) fn without_pipe(target: Target, captured: bool) -> Self {
        let (line, tail) = (Vec::new(), Vec::new());
        Self { pipe: None, target, captured, started: false, consequence: false, line, tail }
    }

    /// Sets the pipe from which to read.
    pub(super) fn open(&mut self, pipe: OwnedFd) -> io::Result<()> {
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        self.pipe = Some(File::from(pipe));
        Ok(())
    }

    /// Returns the pipe to poll; `None` after its end.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Reads what has arrived, and prints its complete lines.
    pub(super) fn forward(&mut self) {
        let mut buffer = [0; 16 << 10];
        // The bound keeps a rank that writes without end from delaying the others.
        for _ in 0..MAX_READS {
            let Some(pipe) = &mut self.pipe else { return };
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    let lines = self.push(&buffer[..count]);
                    self.print(&lines);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    /// Prints the rest of the output of a dead rank. Later output of processes that the rank left running is
    /// dropped.
    pub(super) fn finish(&mut self) {
        self.forward();
        self.pipe = None;
        let rest = self.end();
        self.print(&rest);
    }

    /// Returns the incomplete last line, which gets a line end.
    fn end(&mut self) -> Vec<u8> {
        self.consequence = self.line.ends_with(CONSEQUENCE);
        if self.consequence {
            self.line.truncate(self.line.len() - CONSEQUENCE.len());
            self.tail.truncate(self.tail.len() - CONSEQUENCE.len());
        }
        if !self.line.is_empty() {
            self.line.push(b'\n');
        }
        std::mem::take(&mut self.line)
    }

    /// Adds bytes of the output; returns the complete lines to print now. A line that is too long is cut.
    fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.tail.extend_from_slice(bytes);
        if self.started {
            self.line.extend_from_slice(bytes);
        } else if let Some(at) = self.tail.windows(REACHED.len()).position(|part| part == REACHED) {
            self.started = true;
            self.tail.drain(..at + REACHED.len());
            self.line.clone_from(&self.tail);
        }
        keep_last(KEPT_BYTES, &mut self.tail);
        let end = self.line.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let mut lines: Vec<u8> = self.line.drain(..end).collect();
        if self.line.len() > LINE_BYTES {
            lines.append(&mut self.line);
            lines.push(b'\n');
        }
        lines
    }

    #[allow(clippy::print_stdout, clippy::print_stderr)] // these two are what a test harness captures
    fn print(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let text = || String::from_utf8_lossy(bytes);
        // Write errors are ignored: the ranks continue if nobody reads the output.
        let _ = match (self.captured, self.target) {
            (true, Target::Stderr) => return eprint!("{}", text()),
            (true, Target::Stdout) => return print!("{}", text()),
            (false, Target::Stderr) => io::stderr().write_all(bytes),
            (false, Target::Stdout) => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
        };
    }

    /// Returns the last bytes of the output, without Rust's backtraces, which would displace the panic
    /// messages before them.
    pub(super) fn tail(&self) -> String {
        let text = String::from_utf8_lossy(&self.tail);
        let mut inside = false;
        let kept = text.split_inclusive('\n').filter(|line| {
            inside = line.trim_end() == "stack backtrace:" || inside && line.starts_with(' ');
            !inside
        });
        let mut kept: Vec<u8> = kept.collect::<String>().into_bytes();
        keep_last(SHOWN_BYTES, &mut kept);
        String::from_utf8_lossy(&kept).into_owned()
    }
}

/// Keeps the last `limit` bytes, and drops their first line, which is incomplete, if other lines follow.
fn keep_last(limit: usize, bytes: &mut Vec<u8>) {
    if bytes.len() > limit {
        let cut = bytes.len() - limit;
        let line = bytes[cut..].iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        bytes.drain(..if cut + line < bytes.len() { cut + line } else { cut });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an output of a rank that has reached its call.
    fn output() -> Output {
        Output { started: true, ..Output::without_pipe(Target::Stderr, true) }
    }

    #[test]
    fn marks_are_found_across_chunks_and_earlier_output_is_dropped() {
        let all = [b"running 1 test\ntest x ... ", REACHED, b"one\ntwo\x1E\nthree", CONSEQUENCE].concat();
        for step in 1..=all.len() {
            let mut output = Output::without_pipe(Target::Stderr, true);
            let mut seen = Vec::new();
            for piece in all.chunks(step) {
                let lines = output.push(piece);
                assert!(lines.is_empty() || lines.ends_with(b"\n"));
                seen.extend(lines);
            }
            seen.extend(output.end());
            assert_eq!(seen, b"one\ntwo\x1E\nthree\n", "pieces of {step}");
            assert!(output.started && output.consequence);
            assert_eq!(output.tail(), "one\ntwo\x1E\nthree");
        }
    }

    #[test]
    fn output_before_the_call_is_kept_for_the_error_and_not_printed() {
        let mut output = Output::without_pipe(Target::Stderr, true);
        assert_eq!(output.push(b"no such option\n"), b"");
        assert_eq!((output.started, output.tail().as_str()), (false, "no such option\n"));
    }

    #[test]
    fn a_backtrace_does_not_hide_the_panic() {
        let mut output = output();
        output.push(b"thread 'x' panicked at x.rs:1:2:\nwhat it was\nstack backtrace:\n");
        for frame in 0..1000 {
            output.push(format!("  {frame}: a_function\n             at ./x.rs:1:2\n").as_bytes());
        }
        output.push(b"note: Some details are omitted\n");
        assert_eq!(
            output.tail(),
            "thread 'x' panicked at x.rs:1:2:\nwhat it was\nnote: Some details are omitted\n"
        );
    }

    #[test]
    fn line_over_the_limit_is_cut_into_whole_lines_and_memory_is_bounded() {
        let mut output = output();
        let mut shown = Vec::new();
        for _ in 0..100 {
            let lines = output.push(&[b'x'; 8 << 10]);
            assert!(lines.is_empty() || lines.ends_with(b"x\n"), "an unfinished line is printed");
            shown.extend(lines);
            assert!(output.line.len() <= LINE_BYTES && output.tail.len() <= KEPT_BYTES);
        }
        let printed = shown.iter().filter(|&&byte| byte == b'x').count();
        assert_eq!(printed + output.line.len(), 100 * (8 << 10));
        output.push(b"\nthe last line\n");
        assert_eq!(output.tail(), "the last line\n");
    }
}
