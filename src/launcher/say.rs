//! What the launcher says goes to stderr, never to stdout.

use std::io::{self, Write};

/// One line of the launcher's own, on stderr.
pub(crate) fn say(line: &str) {
    say_raw(&format!("convoke: {line}\n"));
}

/// Text on stderr in one piece. A closed stderr must not end the job.
pub(crate) fn say_raw(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}
