//! Prints the launcher's messages to stderr, never to stdout.

use std::io::{self, IsTerminal, StderrLock, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Escape sequence that moves to the start of the terminal's line and clears it.
const CLEAR: &str = "\r\x1b[2K";
const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[1;31m";
const YELLOW: &str = "\x1b[1;33m";
const RESET: &str = "\x1b[0m";
/// True if the terminal's last line was written by [`Progress`]. It must be cleared before other output.
static PROGRESS_SHOWN: Mutex<bool> = Mutex::new(false);

/// Prints one line of the launcher's own on stderr.
pub(crate) fn print_message(line: &str) {
    let colour = match line.split_once(':').map(|(kind, _)| kind) {
        Some("error") if is_coloured() => RED,
        Some("warning") if is_coloured() => YELLOW,
        _ => return print_raw(&format!("convoke: {line}\n")),
    };
    print_raw(&format!("{colour}convoke:{RESET} {line}\n"));
}

/// Prints text on stderr in one piece. A closed stderr must not end the job.
pub(crate) fn print_raw(text: &str) {
    write(text, false);
}

/// Prints a report on stderr, with its headings in colour on a terminal.
pub(crate) fn print_report(text: &str) {
    if is_coloured() { print_raw(&coloured(text)) } else { print_raw(text) }
}

/// Returns whether the terminal shows colours and the user wants them: <https://no-color.org>.
fn is_coloured() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !unwanted && !is_dumb() && io::stderr().is_terminal()
}

/// Returns whether the terminal cannot interpret escape sequences.
fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb")
}

/// Colours the title of a report, its headings and the names of its most important lines.
fn coloured(report: &str) -> String {
    let line = |line: &str| {
        let (name, rest) = line.split_once(':').unwrap_or((line, ""));
        match name.trim_end() {
            _ if line.ends_with(" FAILED") => format!("{RED}{line}{RESET}\n"),
            "Root Cause (first observed failure)" | "Failures" => format!("{BOLD}{line}{RESET}\n"),
            "  cause" => format!("{RED}{name}{RESET}:{rest}\n"),
            "  rank" | "  advice" => format!("{BOLD}{name}{RESET}:{rest}\n"),
            _ => format!("{line}\n"),
        }
    };
    report.lines().map(line).collect()
}

fn write(text: &str, is_progress: bool) {
    let mut progress_shown = PROGRESS_SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut stderr: StderrLock<'_> = io::stderr().lock();
    let clear = if *progress_shown { CLEAR } else { "" };
    let _ = stderr.write_all(format!("{clear}{text}").as_bytes());
    *progress_shown = is_progress;
}

/// Shows the progress of a wait on stderr. A terminal shows one line that is updated. Other outputs get a
/// line whenever the text changes, and every 10 s. Dropping the value clears the terminal's line.
#[derive(Debug)]
pub(crate) struct Progress {
    terminal: bool,
    until: Instant,
    shown: String,
    shown_at: Instant,
}

impl Progress {
    /// Interval at which callers update the progress.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(1);
    /// The interval at which an unchanged line is repeated on outputs other than terminals.
    const REPEAT: Duration = Duration::from_secs(10);

    /// Creates the progress of a wait that ends at `until`.
    pub(crate) fn new(until: Instant) -> Self {
        Self {
            terminal: !is_dumb() && io::stderr().is_terminal(),
            until,
            shown: String::new(),
            shown_at: Instant::now(),
        }
    }

    /// Shows what the launcher waits for and how much time is left. To be called every [`Self::INTERVAL`] or
    /// so.
    pub(crate) fn show(&mut self, what: &str) {
        // Rounds up, so that a wait of one second does not begin with 0 s left.
        let left = self.until.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000);
        let again = self.shown_at.elapsed() >= Self::REPEAT;
        self.update(what, &format!("convoke: {what} ({left} s left)"), again);
    }

    /// Shows a wait without a time limit. Does not repeat an unchanged line, since nobody needs to read it
    /// again.
    pub(crate) fn show_endless(&mut self, what: &str) {
        self.update(what, &format!("convoke: {what}"), false);
    }

    fn update(&mut self, what: &str, line: &str, again: bool) {
        if self.terminal {
            write(&cut(line, columns()), true);
        } else if again || what != self.shown {
            print_raw(&format!("{line}\n"));
            self.shown_at = Instant::now();
        }
        what.clone_into(&mut self.shown);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            print_raw("");
        }
    }
}

/// Returns the width of the terminal. A longer line would wrap onto a second one, which is not cleared later.
fn columns() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| match size.ws_col {
        0 => 80,
        columns => usize::from(columns),
    })
}

fn cut(line: &str, columns: usize) -> String {
    if line.chars().count() < columns {
        return line.to_owned();
    }
    let mut out: String = line.chars().take(columns.saturating_sub(2)).collect();
    out.push('…');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_change_no_text() {
        let report =
            "\n===\nx FAILED\n---\nRoot Cause (first observed failure):\n  cause     : exit: 3\n===\n";
        let shown = coloured(report);
        assert!(shown.contains("\x1b[1;31mx FAILED\x1b[0m\n"), "{shown:?}");
        let mut plain = shown;
        for code in ["\x1b[1m", "\x1b[1;31m", "\x1b[0m"] {
            plain = plain.replace(code, "");
        }
        assert_eq!(plain, report);
    }

    #[test]
    fn long_line_is_cut_before_the_last_column() {
        assert_eq!(cut("waiting", 8), "waiting");
        assert_eq!(cut("waiting", 7), "waiti…");
        assert_eq!(cut("wärme", 5), "wär…");
    }
}
