//! Checks before the first worker that the workers' Python has the package convoke-dist.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::settings::Program;
use crate::child::{interrupts, read_to_end};
use crate::cli::CliError;

/// Python code that prints [`ABSENT`] if the package is not installed.
const CODE: &str =
    "import importlib.util; importlib.util.find_spec('convoke_dist') or print('absent', end='')";
const ABSENT: &[u8] = b"absent";
/// Time that the interpreter may take. One that takes longer is left to the workers.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns an error if the Python that runs SCRIPT does not find the package of `--as-gloo`: its workers would
/// use gloo, without a word. A program that is not run by that Python is not checked.
pub(crate) fn check(program: &Program) -> Result<(), CliError> {
    if !program.is_python {
        return Ok(());
    }
    let python = &program.argv[0];
    if says_absent(python) {
        let python = python.display();
        return Err(CliError::value(format!(
            "--as-gloo needs the Python package convoke-dist, which {python} does not find; \
             install it: {python} -m pip install convoke-dist"
        )));
    }
    Ok(())
}

fn says_absent(python: &OsStr) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", CODE]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // If it cannot be started, the start of the workers reports why.
    let Ok(mut child) = command.spawn() else { return false };
    let stdout = child.stdout.take().expect("its stdout is a pipe");
    let answer = read_to_end(&stdout.into(), Instant::now() + TIMEOUT, &interrupts());
    if answer.is_err() {
        let _ = child.kill();
    }
    let _ = child.wait();
    answer.is_ok_and(|text| text.ends_with(ABSENT))
}
