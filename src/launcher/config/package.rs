//! Checks before the first worker that the workers' Python has the package convoke-dist.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::settings::Program;
use crate::cli::CliError;

/// Python code that ends with [`ABSENT`] if the package is not installed.
const CODE: &str =
    "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('convoke_dist') else 77)";
const ABSENT: i32 = 77;
/// Time that the interpreter may take. One that takes longer is left to the workers.
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns an error if the Python that runs SCRIPT does not find the package of `--as-gloo`: its workers would
/// use gloo, without a word. A program that is not run by that Python is not checked.
pub(crate) fn check(program: &Program) -> Result<(), CliError> {
    if !program.is_python {
        return Ok(());
    }
    let python = &program.argv[0];
    if ends_with_absent(python) {
        let python = python.display();
        return Err(CliError::value(format!(
            "--as-gloo needs the Python package convoke-dist, which {python} does not find; \
             install it: {python} -m pip install convoke-dist"
        )));
    }
    Ok(())
}

fn ends_with_absent(python: &OsStr) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", CODE]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // If it cannot be started, the start of the workers reports why.
    let Ok(mut child) = command.spawn() else { return false };
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.code() == Some(ABSENT),
            Ok(None) if Instant::now() < deadline => sleep(POLL_INTERVAL),
            Ok(None) | Err(_) => {
                let _ = child.kill().and_then(|()| child.wait());
                return false;
            }
        }
    }
}
