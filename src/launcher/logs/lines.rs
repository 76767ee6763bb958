//! Splits the bytes of a worker's output into lines as they arrive. Pure.

use memchr::memchr2;

/// A line longer than this is passed on in several pieces.
pub(super) const LINE_MAX_BYTES: usize = 64 << 10;

/// A line of a worker's output, or a piece of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The part of the line that earlier pieces did not contain.
    pub(super) text: &'a [u8],
    /// The line from its start, without its newline. If the line is longer than [`LINE_MAX_BYTES`], the part
    /// after the last cut.
    pub(super) line: &'a [u8],
    /// True if a newline or a cut ended `line`, so that nothing more will be added to it.
    pub(super) complete: bool,
    /// True if the line ended with a newline here.
    pub(super) newline: bool,
}

/// Cuts output into lines like Python's text files. A line ends with `\n`, `\r\n` or `\r`; progress bars
/// write `\r`.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Bytes of the unfinished line.
    partial: Vec<u8>,
    /// Number of bytes of `partial` that were passed on.
    shown: usize,
    /// True if the last byte was `\r`. A `\n` after it belongs to the same line end.
    after_return: bool,
}

impl Lines {
    /// Adds `bytes` and passes all lines that they complete to `pass`.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut pass: impl FnMut(Piece<'_>)) {
        if self.after_return && !bytes.is_empty() {
            self.after_return = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        while let Some(end) = memchr2(b'\n', b'\r', bytes) {
            let mut next = end + 1;
            if bytes[end] == b'\r' {
                match bytes.get(next) {
                    Some(b'\n') => next += 1,
                    Some(_) => {}
                    None => self.after_return = true,
                }
            }
            if self.partial.is_empty() {
                let line = &bytes[..end];
                pass(Piece { text: line, line, complete: true, newline: true });
            } else {
                self.partial.extend_from_slice(&bytes[..end]);
                self.pass_partial(true, &mut pass);
            }
            bytes = &bytes[next..];
        }
        while self.partial.len() + bytes.len() >= LINE_MAX_BYTES {
            let (now, later) = bytes.split_at(LINE_MAX_BYTES - self.partial.len());
            self.partial.extend_from_slice(now);
            let whole = self.partial.len() - incomplete_utf8_len(&self.partial);
            let rest = self.partial.split_off(whole.max(self.shown));
            self.pass_partial(false, &mut pass);
            self.partial = rest;
            bytes = later;
        }
        self.partial.extend_from_slice(bytes);
    }

    /// Passes the unfinished line to `pass`, up to its last whole character.
    pub(super) fn show_partial(&mut self, mut pass: impl FnMut(Piece<'_>)) {
        let text = &self.partial[self.shown..];
        let whole = text.len() - incomplete_utf8_len(text);
        if whole > 0 {
            let end = self.shown + whole;
            pass(Piece { text: &text[..whole], line: &self.partial[..end], complete: false, newline: false });
            self.shown = end;
        }
    }

    /// Passes the unfinished line to `pass` at the end of the output.
    pub(super) fn finish(&mut self, mut pass: impl FnMut(Piece<'_>)) {
        if !self.partial.is_empty() {
            self.pass_partial(false, &mut pass);
        }
    }

    /// Returns whether an unfinished line has bytes that [`Lines::show_partial`] can pass on.
    pub(super) fn has_partial(&self) -> bool {
        self.shown < self.partial.len()
    }

    fn pass_partial(&mut self, newline: bool, pass: &mut impl FnMut(Piece<'_>)) {
        pass(Piece { text: &self.partial[self.shown..], line: &self.partial, complete: true, newline });
        self.partial.clear();
        self.shown = 0;
    }
}

/// Returns the number of bytes at the end that begin a UTF-8 character whose rest may still come.
pub(super) fn incomplete_utf8_len(bytes: &[u8]) -> usize {
    let longest = bytes.len().min(3);
    (1..=longest)
        .find(|count| {
            let end = &bytes[bytes.len() - count..];
            std::str::from_utf8(end)
                .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}
