//! Prints the output of all hosts, whole lines at a time, with the host before each line.

use std::io::Write;
use std::time::{Duration, Instant};

use super::list::Host;

/// A line that waits longer for its end is printed in part.
const LATE: Duration = Duration::from_secs(2);
/// Longest part of a line that is kept.
const MAX_LINE: usize = 64 << 10;

pub(super) struct Output {
    /// The text before each line, by host; empty for a single host.
    prefixes: Vec<String>,
    /// The begin of a line that is not complete, for stdout and stderr of each host.
    parts: Vec<[Part; 2]>,
}

#[derive(Debug, Default)]
struct Part {
    bytes: Vec<u8>,
    since: Option<Instant>,
}

impl Output {
    pub(super) fn new(hosts: &[Host]) -> Self {
        let prefix = |host: &Host| match hosts.len() {
            1 => String::new(),
            _ => format!("[{}] ", host.address()),
        };
        let parts = hosts.iter().map(|_| [Part::default(), Part::default()]).collect();
        Self { prefixes: hosts.iter().map(prefix).collect(), parts }
    }

    /// Adds output of a host, and prints the lines that it completes.
    pub(super) fn write(&mut self, host: usize, is_stderr: bool, bytes: &[u8]) {
        let part = &mut self.parts[host][usize::from(is_stderr)];
        part.bytes.extend_from_slice(bytes);
        part.since.get_or_insert_with(Instant::now);
        let complete = part.bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let end = if complete == 0 && part.bytes.len() > MAX_LINE { part.bytes.len() } else { complete };
        let lines: Vec<u8> = part.bytes.drain(..end).collect();
        if part.bytes.is_empty() {
            part.since = None;
        }
        print(&self.prefixes[host], is_stderr, &lines);
    }

    /// Prints parts of lines that have waited long, as a prompt or a progress bar does.
    pub(super) fn flush_late_parts(&mut self) {
        self.flush_parts(LATE);
    }

    /// Prints all that is left.
    pub(super) fn flush(&mut self) {
        self.flush_parts(Duration::ZERO);
    }

    fn flush_parts(&mut self, age: Duration) {
        for (host, parts) in self.parts.iter_mut().enumerate() {
            for (stream, part) in parts.iter_mut().enumerate() {
                if part.since.is_some_and(|since| since.elapsed() >= age) {
                    print(&self.prefixes[host], stream == 1, &std::mem::take(&mut part.bytes));
                    part.since = None;
                }
            }
        }
    }
}

/// Prints lines in one piece. A closed stdout or stderr must not end the job.
fn print(prefix: &str, is_stderr: bool, lines: &[u8]) {
    if lines.is_empty() {
        return;
    }
    let text = with_prefix(prefix, lines);
    let _ = if is_stderr { std::io::stderr().write_all(&text) } else { std::io::stdout().write_all(&text) };
    if !is_stderr {
        let _ = std::io::stdout().flush();
    }
}

fn with_prefix(prefix: &str, lines: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(lines.len() + prefix.len());
    for line in lines.split_inclusive(|&byte| byte == b'\n') {
        text.extend_from_slice(prefix.as_bytes());
        text.extend_from_slice(line);
    }
    // Another host's line may follow.
    if !prefix.is_empty() && !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_host() {
        assert_eq!(with_prefix("[h1] ", b"a\nb\n"), b"[h1] a\n[h1] b\n");
        assert_eq!(with_prefix("[h1] ", b"50 %"), b"[h1] 50 %\n");
        assert_eq!(with_prefix("", b"50 %"), b"50 %");
    }
}
