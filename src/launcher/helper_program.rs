//! Runs a short program of the system, such as `scontrol`, and returns its output.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Most bytes of output that are read.
const MAX_OUTPUT: u64 = 1 << 20;

/// Runs `program` with `input` as its stdin, and returns its stdout. The exit code is not known: the
/// launcher's event loop may reap the process first.
///
/// # Errors
/// The program cannot be started, or has not ended after `timeout` and was killed. The error is a line that
/// names the program.
pub(crate) fn output(
    program: &str,
    arguments: &[&str],
    input: &[u8],
    timeout: Duration,
) -> Result<String, String> {
    let failed = |error: std::io::Error| format!("cannot run {program}: {error}");
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input closes the pipe.
        let _ = stdin.write_all(input);
    }
    let stdout = child.stdout.take();
    let (sender, receiver) = mpsc::channel();
    let read = move || {
        let mut text = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MAX_OUTPUT).read_to_end(&mut text));
        let _ = sender.send(read.transpose().map(|_| text));
    };
    thread::Builder::new().name("convoke-helper".into()).spawn(read).map_err(failed)?;
    let text = receiver.recv_timeout(timeout);
    if text.is_err() {
        let _ = child.kill();
    }
    // Fails if the event loop has reaped the process.
    let _ = child.wait();
    match text {
        Ok(text) => Ok(String::from_utf8_lossy(&text.map_err(failed)?).into_owned()),
        Err(_) => Err(format!("{program} did not answer within {} s", timeout.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_returned_and_a_hung_program_is_killed() {
        let long = Duration::from_secs(60);
        assert_eq!(output("cat", &[], b"words", long).unwrap(), "words");
        let hung = output("sleep", &["1000"], b"", Duration::from_millis(50)).unwrap_err();
        assert_eq!(hung, "sleep did not answer within 0 s");
        let missing = output("convoke-no-such-program", &[], b"", long).unwrap_err();
        assert!(missing.starts_with("cannot run convoke-no-such-program: "), "{missing}");
    }
}
