//! Parses the output of spawned ranks, and the marks that the runtime writes into it. Pure.

/// Starts and ends a mark: a control character that text output does not use.
const MARK_DELIMITER: u8 = 0x1E;
/// Longest incomplete line that is buffered, in bytes.
const LINE_BYTES: usize = 64 << 10;
/// How many last bytes of standard error are kept, and how many of them an error shows.
const KEPT_BYTES: usize = 64 << 10;
const SHOWN_BYTES: usize = 4 << 10;

/// A message from the runtime of a rank to the spawner, written into the rank's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// The rank has reached its call of spawn; output from here on is that of `worker`.
    Begin,
    /// The failure of this rank is most likely the consequence of another rank's failure.
    Consequence,
}

/// Returns the bytes of mark `what`; the random `token` keeps the program from writing one by chance.
pub(super) fn mark(token: &str, what: Mark) -> Vec<u8> {
    let what = match what {
        Mark::Begin => b'b',
        Mark::Consequence => b'c',
    };
    [&[MARK_DELIMITER], token.as_bytes(), &[what, MARK_DELIMITER]].concat()
}

/// Parser of standard output or standard error of a rank.
#[derive(Debug)]
pub(super) struct Output {
    marks: [(Mark, Vec<u8>); 2],
    /// The start of a possible mark, kept until more bytes arrive.
    pending: Vec<u8>,
    /// An incomplete line.
    line: Vec<u8>,
    /// Last bytes of the output before and after [`Mark::Begin`].
    before: Tail,
    after: Tail,
    started: bool,
    consequence: bool,
}

impl Output {
    pub(super) fn new(token: &str) -> Self {
        let marks = [Mark::Begin, Mark::Consequence].map(|what| (what, mark(token, what)));
        let (before, after) = (Tail::default(), Tail::default());
        Self {
            marks,
            pending: Vec::new(),
            line: Vec::new(),
            before,
            after,
            started: false,
            consequence: false,
        }
    }

    /// Parses bytes that were read from the pipe; returns the complete lines to print now.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        let pending = std::mem::take(&mut self.pending);
        let mut rest = pending.as_slice();
        while let Some(at) = rest.iter().position(|&byte| byte == MARK_DELIMITER) {
            self.push_text(&rest[..at]);
            rest = &rest[at..];
            let found = self.marks.iter().find(|(_, mark)| rest.starts_with(mark));
            if let Some((what, mark)) = found {
                rest = &rest[mark.len()..];
                match what {
                    Mark::Begin => self.started = true,
                    Mark::Consequence => self.consequence = true,
                }
            } else if self.marks.iter().any(|(_, mark)| mark.starts_with(rest)) {
                self.pending = rest.to_vec();
                return self.complete_lines();
            } else {
                self.push_text(&rest[..1]);
                rest = &rest[1..];
            }
        }
        self.push_text(rest);
        self.complete_lines()
    }

    /// Returns the incomplete last line once the output has ended.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        let pending = std::mem::take(&mut self.pending);
        self.push_text(&pending);
        std::mem::take(&mut self.line)
    }

    fn push_text(&mut self, bytes: &[u8]) {
        if self.started {
            self.after.push(bytes);
            self.line.extend_from_slice(bytes);
        } else {
            self.before.push(bytes);
        }
    }

    fn complete_lines(&mut self) -> Vec<u8> {
        let end = self.line.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let end = if end == 0 && self.line.len() > LINE_BYTES { self.line.len() } else { end };
        self.line.drain(..end).collect()
    }

    pub(super) fn has_started(&self) -> bool {
        self.started
    }

    pub(super) fn is_consequence(&self) -> bool {
        self.consequence
    }

    /// Returns the last bytes of the output since [`Mark::Begin`], or of all output if the mark did not come.
    pub(super) fn tail(&self) -> String {
        let tail = if self.started { &self.after } else { &self.before };
        without_backtraces(&String::from_utf8_lossy(&tail.bytes))
    }
}

/// Returns the last bytes of `text` without Rust's backtraces, which would displace the panic messages before
/// them.
fn without_backtraces(text: &str) -> String {
    let mut inside = false;
    let kept = text.split_inclusive('\n').filter(|line| {
        inside = line.trim_end() == "stack backtrace:" || inside && line.starts_with(' ');
        !inside
    });
    let mut kept: Vec<u8> = kept.collect::<String>().into_bytes();
    keep_last(SHOWN_BYTES, &mut kept);
    String::from_utf8_lossy(&kept).into_owned()
}

/// Keeps the last `limit` bytes, and drops their first line, which is incomplete, if other lines follow.
fn keep_last(limit: usize, bytes: &mut Vec<u8>) {
    if bytes.len() > limit {
        let cut = bytes.len() - limit;
        let line = bytes[cut..].iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        bytes.drain(..if cut + line < bytes.len() { cut + line } else { cut });
    }
}

/// The last bytes of an output, at most [`KEPT_BYTES`].
#[derive(Debug, Default)]
struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        keep_last(KEPT_BYTES, &mut self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found_across_chunks_and_earlier_output_is_dropped() {
        let foreign = mark("other", Mark::Consequence);
        let parts: [&[u8]; 6] = [
            b"running 1 test\ntest x ... ",
            &mark("token", Mark::Begin),
            b"one\ntwo\x1E",
            &foreign,
            b"\nthree",
            &mark("token", Mark::Consequence),
        ];
        let all = parts.concat();
        let shown = [b"one\ntwo\x1E", foreign.as_slice(), b"\nthree"].concat();
        for step in 1..=all.len() {
            let mut output = Output::new("token");
            let mut seen = Vec::new();
            for piece in all.chunks(step) {
                let lines = output.push(piece);
                assert!(lines.is_empty() || lines.ends_with(b"\n"));
                seen.extend(lines);
            }
            seen.extend(output.finish());
            assert_eq!(seen, shown, "pieces of {step}");
            assert!(output.has_started() && output.is_consequence());
            assert_eq!(output.tail().as_bytes(), shown);
        }
    }

    #[test]
    fn tail_of_output_before_the_marker_is_kept() {
        let mut output = Output::new("token");
        assert_eq!(output.push(b"no such option\n"), b"");
        assert!(!output.has_started());
        assert_eq!(output.tail(), "no such option\n");
    }

    #[test]
    fn a_backtrace_does_not_hide_the_panic() {
        let mut output = Output::new("token");
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
    fn long_line_is_split_and_memory_is_bounded() {
        let mut output = Output::new("token");
        output.push(&mark("token", Mark::Begin));
        let mut shown = 0;
        for _ in 0..100 {
            shown += output.push(&[b'x'; 8 << 10]).len();
            assert!(output.line.len() <= LINE_BYTES && output.after.bytes.len() <= KEPT_BYTES);
        }
        assert_eq!(shown + output.finish().len(), 100 * (8 << 10));
        output.push(b"\nthe last line\n");
        assert_eq!(output.tail(), "the last line\n");
    }
}
