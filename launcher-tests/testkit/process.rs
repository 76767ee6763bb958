//! Ranks as processes, started with torchrun's variables but without a launcher.

use std::ffi::OsStr;
use std::process::{Child, Command, Output, Stdio};

/// Prefixes of the variables that describe a job to a program, or a test run to a test.
const JOB_VARIABLE_PREFIXES: [&str; 7] =
    ["PET_", "TORCHELASTIC_", "CONVOKE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"];
/// The variable by which `scripts/check` finds its processes.
const CHECK_RUN_VARIABLE: &str = "CONVOKE_CHECK_RUN";

/// A process that is killed when this value is dropped, so that no process outlives a failing test.
pub struct Process(Option<Child>);

impl Process {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    /// Returns the process while it runs.
    pub fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    /// Waits until the process ends; returns its exit status and output.
    #[must_use]
    pub fn wait(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Builds a command for `program` without job variables that this test may have inherited; its output goes
/// to pipes.
pub fn program(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    remove_job_variables(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Removes job variables from `command`, except the mark by which `scripts/check` finds its processes.
pub fn remove_job_variables(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text != CHECK_RUN_VARIABLE && JOB_VARIABLE_PREFIXES.iter().any(|begin| text.starts_with(begin)) {
            command.env_remove(&name);
        }
    }
    command
}

/// Makes `command` a rank of a job whose store outlives every rank, like the store of a launcher.
pub fn set_rank_variables(command: &mut Command, rank: usize, world: usize, port: u16) {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("TORCHELASTIC_USE_AGENT_STORE", "True");
}
