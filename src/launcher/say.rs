//! What the launcher says goes to stderr, never to stdout.

use std::io::{self, IsTerminal, StderrLock, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Moves to the start of a terminal's line and clears it.
const CLEAR: &str = "\r\x1b[2K";
/// The terminal's last line is one of [`Progress`], to be cleared before anything else is written.
static LIVE: Mutex<bool> = Mutex::new(false);

/// One line of the launcher's own, on stderr.
pub(crate) fn say(line: &str) {
    say_raw(&format!("convoke: {line}\n"));
}

/// Text on stderr in one piece. A closed stderr must not end the job.
pub(crate) fn say_raw(text: &str) {
    write(text, false);
}

fn write(text: &str, live: bool) {
    let mut was_live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut stderr: StderrLock<'_> = io::stderr().lock();
    let clear = if *was_live { CLEAR } else { "" };
    let _ = stderr.write_all(format!("{clear}{text}").as_bytes());
    *was_live = live;
}

/// A wait for something that comes in steps: a terminal shows one line that is kept up to date, anything else gets a line for each
/// change, and every 10 s. The terminal's line is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    terminal: bool,
    until: Instant,
    told: String,
    told_at: Instant,
}

impl Progress {
    /// How often to look whether there is something new to show.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(1);
    /// How often the same is said again to what is no terminal.
    const REPEAT: Duration = Duration::from_secs(10);

    /// For a wait that ends at `until`.
    pub(crate) fn new(until: Instant) -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        Self {
            terminal: !dumb && io::stderr().is_terminal(),
            until,
            told: String::new(),
            told_at: Instant::now(),
        }
    }

    /// What is waited for now. To be called every [`Self::INTERVAL`] or so.
    pub(crate) fn show(&mut self, what: &str) {
        // Rounded up: a wait of a second does not begin with none left.
        let left = self.until.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000);
        let again = self.told_at.elapsed() >= Self::REPEAT;
        self.tell(what, &format!("convoke: {what} ({left} s left)"), again);
    }

    /// The same, of a wait that may last for ever; nobody needs to hear of that again and again.
    pub(crate) fn show_endless(&mut self, what: &str) {
        self.tell(what, &format!("convoke: {what}"), false);
    }

    fn tell(&mut self, what: &str, line: &str, again: bool) {
        if self.terminal {
            write(&cut(line, columns()), true);
        } else if again || what != self.told {
            say_raw(&format!("{line}\n"));
            self.told_at = Instant::now();
        }
        what.clone_into(&mut self.told);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            say_raw("");
        }
    }
}

/// Width of the terminal; a longer line would go on in the next, which is not cleared.
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
    fn a_long_line_leaves_the_last_column_free() {
        assert_eq!(cut("waiting", 8), "waiting");
        assert_eq!(cut("waiting", 7), "waiti…");
        assert_eq!(cut("wärme", 5), "wär…");
    }
}
